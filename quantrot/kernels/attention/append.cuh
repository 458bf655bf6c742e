// RoPE, rotation and e4m3 codes of one new token a sequence, k's and v's into a cache with room. Follows prepare.cuh.
//
// A warp is a thread block, and takes eight heads of q, of k or of v: the rows of prepare.cuh.

namespace quantrot {

struct AppendArgs {
  const void *q, *k, *v, *cos, *sin;  // heads of D elements at multiples of 16 bytes; of cos and sin, D / 2 are read
  const signed char* signs;           // +-1 [D] before the rotation, at a multiple of 8 bytes, or null
  unsigned char *q_out, *q_scale;     // [batch, heads, D], [batch, heads]
  unsigned char *key, *key_scale, *value, *value_scale;
  u64* count;    // tokens in the cache, or null: `at` says it
  int* lengths;  // [batch]: with the new one
  i64 q_batch, q_head, k_batch, k_head, v_batch, v_head, cos_batch;  // elements
  i64 key_batch, key_head, key_scale_batch, key_scale_head;          // bytes, as what follows
  i64 value_batch, value_head, value_column, value_scale_batch, value_scale_head;
  int heads, groups, at, limit, advance;  // limit: tokens that the cache may have
  float factor;                           // of the rotation
};

// The columns of a row by their signs, +-1.
template <class R, int D>
__device__ __forceinline__ void apply_signs(R& row, const signed char* signs) {
#pragma unroll
  for (int i = 0; i < R::PIECES; i++) {
    const u64 eight = *(const u64*)(signs + column_of<D>(i, lane_number() % 4));
#pragma unroll
    for (int n = 0; n < 4; n++) {
      const u32 two = (u32)(eight >> 16 * n);
      row.x[i][n] ^= (two & 0x80) << 8 | (two & 0x8000) << 16;
    }
  }
}

// T: Bf16, Fp16; Angle: that of cos and sin, T or Fp32.
template <class T, class Angle, int D, bool ROPE, bool ROTATE>
__device__ __forceinline__ void append(const AppendArgs& args) {
  const int q_parts = (args.heads + 7) / 8, k_parts = (args.groups + 7) / 8, batch = blockIdx.y;
  const u32 lane = lane_number(), quarter = lane % 4;
  int part = blockIdx.x;
  grid_wait();
  const u32 at = args.count ? load_count(args.count) : (u32)args.at;
  u64 arrivals = 0;
  if (args.advance) arrivals = count_arrival(args.count);
  const bool room = at < (u32)args.limit;
  if (part == 0 && lane == 0) args.lengths[batch] = (int)at + 1;
  using Pieces = u32[D / 32][2];
  Pieces codes;
  float y[D / 32][2][4];
  if (part < q_parts + k_parts) {
    const bool query = part < q_parts;
    if (!query) part -= q_parts;
    const int count = query ? args.heads : args.groups, place = part * 8 + lane / 4, head = min(place, count - 1);
    const auto* from = query ? (const unsigned short*)args.q + batch * args.q_batch + head * args.q_head
                             : (const unsigned short*)args.k + batch * args.k_batch + head * args.k_head;
    using R = Row<T, E4m3, D, ROTATE>;
    R row;
    row.load(from, true);
    if constexpr (ROPE) {
      const i64 angle = batch * args.cos_batch * Angle::BYTES;
      Turn<Angle, D> angles;
      angles.load((const char*)args.cos + angle, (const char*)args.sin + angle);
      row.turn(angles);
    }
    if constexpr (ROTATE) {
      if (args.signs) apply_signs<R, D>(row, args.signs);
      u32 signs[2];
      matrix_of_16<T>(signs);
      row.rotate(y, signs);
    }
    int scale = row.encode(codes, y, args.factor);
    if (place < count && query) {
      const i64 to = (i64)batch * args.heads + head;
      if (!room) scale = 255;  // and what is attended to is no number
      if (quarter == 0) args.q_scale[to] = (unsigned char)scale;
      R::store(args.q_out + to * D, codes);
    } else if (place < count && room) {
      if (quarter == 0)
        args.key_scale[batch * args.key_scale_batch + head * args.key_scale_head + at] = (unsigned char)scale;
      R::store(args.key + batch * args.key_batch + head * args.key_head + (i64)at * D, codes);
    }
  } else {
    part -= q_parts + k_parts;
    const int place = part * 8 + lane / 4, head = min(place, args.groups - 1);
    using R = Row<T, E4m3, D, false>;
    R row;
    row.load((const unsigned short*)args.v + batch * args.v_batch + head * args.v_head, true);
    const int scale = row.encode(codes, y, 1.f);
    if (place < args.groups && room) {
      if (quarter == 0)
        args.value_scale[batch * args.value_scale_batch + head * args.value_scale_head + at] = (unsigned char)scale;
      unsigned char* to = args.value + batch * args.value_batch + head * args.value_head + at;
#pragma unroll
      for (int i = 0; i < D / 4; i++)
        to[(column_of<D>(i / 8, quarter) + i % 8) * args.value_column] = (unsigned char)(codes[i / 8][i / 4 % 2] >> i % 4 * 8);
    }
  }
  // Every block has read the count: the last to say so sets it.
  if (args.advance && arrivals >> 32 == gridDim.x * gridDim.y - 1) *args.count = at + 1ull;
}

}  // namespace quantrot
