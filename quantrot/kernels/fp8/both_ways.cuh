// A matrix as codes and, read once, its transpose as codes (after blocks.cuh): in 1 x 128 blocks, which run along the rows of each
// and have scales of their own, or in 128 x 128 blocks, whose codes turn with them.
//
// A thread block has 128 x 128 elements and keeps them in registers: a lane eight neighbouring rows of eight neighbouring
// columns, so that it makes eight neighbouring bytes of every row of both results. Those of the transpose cross shared memory,
// from where whole lines leave. There eight bytes of a column lie where the column's unit, too, decides: the 16 lanes that
// write at once, of 16 units, meet in no bank.

namespace quantrot {

struct BothWaysArgs {
  const void* x;
  void *q, *turned;  // contiguous; [rows, columns] and [columns, padded]
  float *scales, *turned_scales;
  i64 x_stride, scale_row, scale_column, turned_scale_row, turned_scale_column;  // in elements
  u32 rows, columns, padded;  // rows to the next multiple of 128: what is behind them in `turned` are zeros
};

constexpr u32 TILE = 128, TILE_UNITS = TILE / 8, TILE_WARPS = 8;
constexpr u32 TILE_MAXIMA = TILE_WARPS * TILE * 2, TILE_RECIPROCALS = TILE * 8;  // bytes, in this order, then codes

// What a thread has of its thread block's tile.
struct TilePart {
  u32 lane, warp;
  u32 down, right, unit, eight;  // the tile; the unit of eight columns in it, and of eight rows
  u32 row, column;
  int rows, left;  // that there are from `row` on, and of them those that have this column
  u32 maxima, reciprocals, codes;

  __device__ __forceinline__ explicit TilePart(const BothWaysArgs& a) {
    const u32 across = (a.columns + TILE - 1) / TILE;
    lane = lane_number(), warp = warp_number();
    down = blockIdx.x / across, right = blockIdx.x - down * across;
    unit = lane % TILE_UNITS, eight = warp * 2 + lane / TILE_UNITS;
    row = down * TILE + eight * 8, column = right * TILE + unit * 8;
    rows = row < a.rows ? a.rows - row : 0, left = column < a.columns ? rows : 0;
    maxima = shared_memory(), reciprocals = maxima + TILE_MAXIMA, codes = reciprocals + TILE_RECIPROCALS;
  }

  // Eight elements a row, in W vectors; zeros where there are none.
  template <int W>
  __device__ __forceinline__ void load(Vec (&v)[8][W], const BothWaysArgs& a) const {
    const char* from = (const char*)a.x + (row * a.x_stride + column) * (2 * W);
#pragma unroll
    for (int i = 0; i < 8; i++) {
#pragma unroll
      for (int j = 0; j < W; j++) {
        v[i][j] = Vec{{0, 0, 0, 0}};
        if (i < left) v[i][j] = load16(from + i * a.x_stride * (2 * W) + j * 16);
      }
    }
  }

  __device__ __forceinline__ void store(const BothWaysArgs& a, const u32 (&q)[8][2]) const {
    char* to = (char*)a.q + (i64)row * a.columns + column;
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (i < left) store8(to + (i64)i * a.columns, q[i][0], q[i][1]);
  }

  // The codes of eight rows, of this unit's column c.
  __device__ __forceinline__ void turn(u32 c, u32 first, u32 second) const {
    store_shared2(codes + (unit * 8 + c) * TILE + (eight ^ unit) * 8, first, second);
  }

  // All that `turn` left, once all threads have: 16 bytes of a column at a time.
  __device__ __forceinline__ void store_turned(const BothWaysArgs& a) const {
#pragma unroll
    for (u32 i = 0; i < TILE; i += TILE_WARPS * 4) {
      const u32 own = i + threadIdx.x / 8, part = threadIdx.x % 8, key = own / 8;
      const Vec v = load_vector(codes + own * TILE + ((2 * part ^ key) & 14) * 8);
      const bool swapped = key % 2;
      const Vec line = {{v.w[swapped ? 2 : 0], v.w[swapped ? 3 : 1], v.w[swapped ? 0 : 2], v.w[swapped ? 1 : 3]}};
      if (right * TILE + own < a.columns)
        store16((char*)a.turned + (i64)(right * TILE + own) * a.padded + down * TILE + part * 16, line);
    }
  }
};

// --- 1 x 128 ---------------------------------------------------------------------------------------------------------

// Of a column's reciprocal in the tile: the 16 units' columns of one number lie side by side.
__device__ __forceinline__ u32 reciprocal_at(u32 column) { return column % 8 / 2 * 256 + column / 8 * 16 + column % 2 * 8; }

// 16-bit elements.
template <int D>
__device__ __forceinline__ void rows_both_ways(const BothWaysArgs& a) {
  const TilePart tile(a);
  grid_wait();
  Vec x[8][1], v[8];  // as group_codes has them
  tile.load(x, a);
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = x[i][0];
  Vec most;  // of each column
#pragma unroll
  for (int j = 0; j < 4; j++) {
    most.w[j] = v[0].w[j] & 0x7FFF7FFFu;
#pragma unroll
    for (int i = 1; i < 8; i++) most.w[j] = larger_halves(most.w[j], v[i].w[j] & 0x7FFF7FFFu);
    most.w[j] = larger_halves(most.w[j], __shfl_xor_sync(0xFFFFFFFFu, most.w[j], TILE_UNITS));
  }
  if (tile.lane < TILE_UNITS) store_vector(tile.maxima + tile.warp * (TILE * 2) + tile.unit * 16, most);
  block_sync();

  if (threadIdx.x < TILE) {
    const u32 own = threadIdx.x, column = tile.right * TILE + own;
    u32 largest = 0;
#pragma unroll
    for (u32 i = 0; i < TILE_WARPS; i++) largest = max(largest, load_shared_u16(tile.maxima + i * (TILE * 2) + own * 2));
    float amax, none;
    unpack<D>(largest, amax, none);
    const float scale = scale_of(amax);
    const Reciprocal by(scale);
    store_shared2(tile.reciprocals + reciprocal_at(own), __float_as_uint(by.high), __float_as_uint(by.low));
    if (column < a.columns) a.turned_scales[column * a.turned_scale_row + tile.down * a.turned_scale_column] = scale;
  }
  u32 codes[8][2];
  group_codes<D>(codes, v, [&](float scale) {
    const u32 own = group_of<8, 16>();
    if (tile.unit < 8 && (int)own < tile.rows)
      a.scales[(tile.row + own) * a.scale_row + tile.right * a.scale_column] = scale;
  });
  tile.store(a, codes);

  block_sync();
#pragma unroll
  for (u32 j = 0; j < 4; j++) {  // two columns
    const Vec by = load_vector(tile.reciprocals + j * 256 + tile.unit * 16);
    float q[2][8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      unpack<D>(v[i].w[j], q[0][i], q[1][i]);
#pragma unroll
      for (int e = 0; e < 2; e++)
        q[e][i] = Reciprocal(__uint_as_float(by.w[2 * e]), __uint_as_float(by.w[2 * e + 1])).times(q[e][i]);
    }
#pragma unroll
    for (u32 e = 0; e < 2; e++)
      tile.turn(2 * j + e, codes4(q[e][0], q[e][1], q[e][2], q[e][3]), codes4(q[e][4], q[e][5], q[e][6], q[e][7]));
  }
  block_sync();
  tile.store_turned(a);
}

// --- 128 x 128 -------------------------------------------------------------------------------------------------------

// Four rows of four bytes, turned.
__device__ __forceinline__ void turn_bytes(u32 (&w)[4]) {
  const u32 a = bytes_of(w[0], w[1], 0x5140), b = bytes_of(w[0], w[1], 0x7362);
  const u32 c = bytes_of(w[2], w[3], 0x5140), d = bytes_of(w[2], w[3], 0x7362);
  w[0] = bytes_of(a, c, 0x5410), w[1] = bytes_of(a, c, 0x7632);
  w[2] = bytes_of(b, d, 0x5410), w[3] = bytes_of(b, d, 0x7632);
}

// Eight elements over their scale, as codes: of float32 by a division, for there are too many to try each by every scale.
template <int D, int W>
__device__ __forceinline__ void square_codes(u32 (&codes)[2], const Vec (&v)[W], float scale, const Reciprocal& by) {
  if constexpr (D != FP32) {
    quotients<D>(codes, v[0], by);
  } else {
    const float divisor = __float_as_uint(scale) < 0x7F800000u ? scale : __uint_as_float(0x7FC00000u);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      float q[4];
#pragma unroll
      for (int e = 0; e < 4; e++) q[e] = __fdiv_rn(__uint_as_float(v[j].w[e]), divisor);
      codes[j] = codes4(q[0], q[1], q[2], q[3]);
    }
  }
}

template <int D>
__device__ __forceinline__ void squares_both_ways(const BothWaysArgs& a) {
  constexpr int W = D == FP32 ? 2 : 1;
  const TilePart tile(a);
  grid_wait();
  Vec v[8][W];
  tile.load(v, a);
  u32 most = 0;
#pragma unroll
  for (int i = 0; i < 8 * W * 4; i++) {
    const u32 word = v[i / (W * 4)][i / 4 % W].w[i % 4];
    most = D == FP32 ? max(most, word & 0x7FFFFFFFu) : larger_halves(most, word & 0x7FFF7FFFu);
  }
  most = largest_of_warp(D == FP32 ? most : max(most >> 16, most & 0xFFFF));
  if (tile.lane == 0) store_shared(tile.maxima + tile.warp * 4, most);
  block_sync();
  most = 0;
#pragma unroll
  for (u32 i = 0; i < TILE_WARPS; i++) most = max(most, load_shared1(tile.maxima + i * 4));
  float amax = __uint_as_float(most), none;
  if constexpr (D != FP32) unpack<D>(most, amax, none);
  const float scale = scale_of(amax);
  if (threadIdx.x == 0) {
    a.scales[tile.down * a.scale_row + tile.right * a.scale_column] = scale;
    a.turned_scales[tile.right * a.turned_scale_row + tile.down * a.turned_scale_column] = scale;
  }
  const Reciprocal by(scale);
  u32 codes[8][2];
#pragma unroll
  for (int i = 0; i < 8; i++) square_codes<D>(codes[i], v[i], scale, by);
  tile.store(a, codes);
#pragma unroll
  for (u32 half = 0; half < 2; half++) {  // four columns
    u32 first[4], second[4];
#pragma unroll
    for (int i = 0; i < 4; i++) first[i] = codes[i][half], second[i] = codes[4 + i][half];
    turn_bytes(first), turn_bytes(second);
#pragma unroll
    for (u32 c = 0; c < 4; c++) tile.turn(4 * half + c, first[c], second[c]);
  }
  block_sync();
  tile.store_turned(a);
}

}  // namespace quantrot
