// What attention reads, from q, k and v as the projections leave them: RoPE, a Hadamard rotation and e4m3 or int8 of q and
// k, e4m3 of v transposed, in one pass over memory.
//
// A thread block takes some heads of q or k, one after another, of 64 tokens, or of 128 where k has a scale a tile; or a head
// of v, of 128. Four lanes have a row, of which each has the columns that column_of says: 16 bytes a load, and both columns
// that RoPE mixes. Of the index of a column, the bits of the lane, the lowest and the third are one product with the Hadamard
// matrix of order 16 (exact operands, float32 sums), whose result lies as its operand did; the others are butterflies in
// registers.

namespace quantrot {

struct PrepareArgs {
  const void *q, *k, *v, *cos, *sin;  // rows of D elements at multiples of 16 bytes; of cos and sin, D / 2 are read
  unsigned char* q_out;
  void* q_scale;  // of their codes
  unsigned char* k_out;
  void* k_scale;
  unsigned char *v_out, *v_scale;
  i64 q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, cos_batch, cos_token;  // elements
  int tokens, k_rows, padded;  // of K's storage a head, of V's
  int heads, groups, q_parts, k_parts;
  float factor;  // of the rotation
};

constexpr int TOKENS = 128, PREPARE_THREADS = 256;

// The larger magnitude of two 16-bit numbers, as the bits of one.
__device__ __forceinline__ u32 larger(u32 most, u32 pair) {
  return max(most, max(pair & 0x7FFF, pair >> 16 & 0x7FFF));
}

// Of all 256 threads; buffers take turns, so that one barrier is enough.
__device__ __forceinline__ u32 largest_of_block(u32 x, u32 base, int turn) {
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) x = max(x, __shfl_xor_sync(0xFFFFFFFFu, x, lanes));
  const u32 at = base + turn % 2 * 32, own = at + warp_number() * 4;  // by all lanes: it asks lane 0
  if (lane_number() == 0) store_shared(own, x);
  block_sync();
  x = load_shared1(at + lane_number() % 8 * 4);
#pragma unroll
  for (int lanes = 1; lanes < 8; lanes *= 2) x = max(x, __shfl_xor_sync(0xFFFFFFFFu, x, lanes));
  return x;
}

// Cosines or sines of eight neighbouring columns, as they lie in memory.
template <class Angle>
struct Angles {
  u32 w[Angle::BYTES * 2];

  __device__ __forceinline__ void load(const void* row, u32 column) {
#pragma unroll
    for (int i = 0; i < Angle::BYTES / 2; i++) {
      const Quad x = *(const Quad*)((const char*)row + column * Angle::BYTES + 16 * i);
#pragma unroll
      for (int n = 0; n < 4; n++) w[4 * i + n] = x.w[n];
    }
  }
  __device__ __forceinline__ float at(int i) const {
    if constexpr (Angle::BYTES == 4) {
      return __uint_as_float(w[i]);
    } else {
      return Angle::value((unsigned short)(w[i / 2] >> i % 2 * 16));
    }
  }
};

struct Fp32 {
  static constexpr int BYTES = 4;
};

// RoPE of two neighbouring columns (i and the next of eight) and of those that go with them: products are rounded to
// float32, and their sum. Of numbers of 16 bits they are exact, so one of them and the sum are one operation.
template <class T, class Angle>
__device__ __forceinline__ void turn_pair(u32& low, u32& high, const Angles<Angle>& cos, const Angles<Angle>& sin, int i) {
  float a[2], b[2];
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const float one = T::value((unsigned short)(low >> 16 * e)), two = T::value((unsigned short)(high >> 16 * e));
    const float cosine = cos.at(i + e), sine = sin.at(i + e);
    const float p = __fmul_rn(two, sine), r = __fmul_rn(one, sine);
    if constexpr (Angle::BYTES == 2) {
      a[e] = __fmaf_rn(one, cosine, -p), b[e] = __fmaf_rn(two, cosine, r);
    } else {
      a[e] = __fsub_rn(__fmul_rn(one, cosine), p), b[e] = __fadd_rn(__fmul_rn(two, cosine), r);
    }
  }
  low = T::pack(a[0], a[1]), high = T::pack(b[0], b[1]);
}

// The first of the eight columns of lane q's i-th load of a row. At head_dim 128 a lane has sixteen neighbouring ones, so
// that two loads are of one line and a store is of 16 bytes: 170 us instead of 177 at 32768 tokens.
template <int D>
__device__ __forceinline__ u32 column_of(int i, u32 q) {
  return D == 128 ? i / 2 * 64 + 16 * q + i % 2 * 8 : 32 * i + 8 * q;
}

// The angles of a lane's columns of a token, a quarter of them.
template <class Angle, int D>
struct Turn {
  Angles<Angle> cos[D / 64], sin[D / 64];

  __device__ __forceinline__ void load(const void* cosines, const void* sines) {
#pragma unroll
    for (int i = 0; i < D / 64; i++) {
      cos[i].load(cosines, column_of<D>(i, lane_number() % 4));
      sin[i].load(sines, column_of<D>(i, lane_number() % 4));
    }
  }
  // Rows behind the last have its angles: without a branch all are loaded at once.
  __device__ __forceinline__ void load(const PrepareArgs& args, const void* cosines, const void* sines, int token) {
    const i64 row = min(token, args.tokens - 1) * args.cos_token * Angle::BYTES;
    load((const char*)cosines + row, (const char*)sines + row);
  }
};

// A row of q or k, of which each of four lanes has a quarter. Where it is not rotated, y stays unused.
template <class T, class Code, int D, bool ROTATE>
struct Row {
  static constexpr int PIECES = D / 32;
  u32 x[PIECES][4];  // as loaded, then turned

  __device__ __forceinline__ void load(const unsigned short* row, bool there) {
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      Quad y = {{0, 0, 0, 0}};
      if (there) y = *(const Quad*)(row + column_of<D>(i, lane_number() % 4));
#pragma unroll
      for (int n = 0; n < 4; n++) x[i][n] = y.w[n];
    }
  }
  template <class Angle>
  __device__ __forceinline__ void turn(const Turn<Angle, D>& by) {
#pragma unroll
    for (int i = 0; i < PIECES / 2; i++)
#pragma unroll
      for (int n = 0; n < 4; n++) turn_pair<T, Angle>(x[i][n], x[i + PIECES / 2][n], by.cos[i], by.sin[i], 2 * n);
  }
  // y: [piece][columns + 4][+ 2, + 1].
  __device__ __forceinline__ void rotate(float (&y)[PIECES][2][4], const u32 (&signs)[2]) const {
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
#pragma unroll
      for (int t = 0; t < 2; t++) {
#pragma unroll
        for (int n = 0; n < 4; n++) y[i][t][n] = 0.f;
        product_warp<T>(y[i][t], x[i], signs[0], signs[t]);
      }
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {  // column + 4, column + 1
      float z[2 * PIECES];
#pragma unroll
      for (int i = 0; i < 2 * PIECES; i++) z[i] = y[i / 2][n / 2][i % 2 * 2 + n % 2];
#pragma unroll
      for (int bit = 1; bit < 2 * PIECES; bit *= 2) {
#pragma unroll
        for (int i = 0; i < 2 * PIECES; i++) {
          if (i & bit) continue;
          const float sum = z[i] + z[i | bit], difference = z[i] - z[i | bit];
          z[i] = sum, z[i | bit] = difference;
        }
      }
#pragma unroll
      for (int i = 0; i < 2 * PIECES; i++) y[i / 2][n / 2][i % 2 * 2 + n % 2] = z[i];
    }
  }
  // The largest magnitude, as float32 bits, of this lane's columns. One that is no number makes all of a rotated row so, and
  // an infinity all of it infinite or no number.
  __device__ __forceinline__ u32 largest(const float (&y)[PIECES][2][4], float factor) const {
    if constexpr (ROTATE) {
      float most = fabsf(y[0][0][0]);
#pragma unroll
      for (int i = 1; i < 8 * PIECES; i++) most = fmaxf(most, fabsf(y[i / 8][i / 4 % 2][i % 4]));
      return __float_as_uint(most * factor);
    } else {
      u32 most = 0;
#pragma unroll
      for (int i = 0; i < PIECES * 4; i++) most = larger(most, x[i / 4][i % 4]);
      return __float_as_uint(T::value((unsigned short)most));
    }
  }
  template <class Scale>
  __device__ __forceinline__ void encode(u32 (&codes)[PIECES][2], const float (&y)[PIECES][2][4], Scale scale,
                                         float factor) const {
    const float inverse = Code::inverse(scale), by = ROTATE ? factor * inverse : inverse;
    const u32 kept = Code::known(scale) ? 0xFFFFFFFFu : 0u;
#pragma unroll
    for (int i = 0; i < 2 * PIECES; i++) {
      float z[4];
#pragma unroll
      for (int n = 0; n < 4; n++) {
        if constexpr (ROTATE) {
          z[n] = y[i / 2][i % 2][n] * by;
        } else {
          z[n] = __fmul_rn(T::value((unsigned short)(x[i / 2][i % 2 * 2 + n / 2] >> n % 2 * 16)), by);
        }
      }
      codes[i / 2][i % 2] = Code::pack(z[0], z[1], z[2], z[3]) & kept;
    }
  }
  // With a scale of its own, which it gives.
  __device__ __forceinline__ auto encode(u32 (&codes)[PIECES][2], const float (&y)[PIECES][2][4], float factor) const {
    u32 most = largest(y, factor);
    most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
    most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2));
    const auto scale = Code::scale_of(most);
    encode(codes, y, scale, factor);
    return scale;
  }
  // y waits in shared memory, eight bytes at a time.
  __device__ __forceinline__ static void put(u32 at, const float (&y)[PIECES][2][4]) {
#pragma unroll
    for (int i = 0; i < 4 * PIECES; i++) {
      const float* two = &y[i / 4][i / 2 % 2][i % 2 * 2];
      store_shared2(at + i * (PREPARE_THREADS * 8), __float_as_uint(two[0]), __float_as_uint(two[1]));
    }
  }
  __device__ __forceinline__ static void get(float (&y)[PIECES][2][4], u32 at) {
#pragma unroll
    for (int i = 0; i < 4 * PIECES; i++) {
      const float2 two = load_shared2(at + i * (PREPARE_THREADS * 8));
      y[i / 4][i / 2 % 2][i % 2 * 2] = two.x, y[i / 4][i / 2 % 2][i % 2 * 2 + 1] = two.y;
    }
  }
  __device__ __forceinline__ static void store(unsigned char* row, const u32 (&codes)[PIECES][2]) {
    const u32 q = lane_number() % 4;
    if constexpr (D == 128) {
#pragma unroll
      for (int i = 0; i < PIECES; i += 2)
        *(Quad*)(row + column_of<D>(i, q)) = {{codes[i][0], codes[i][1], codes[i + 1][0], codes[i + 1][1]}};
    } else {
#pragma unroll
      for (int i = 0; i < PIECES; i++) *(u64*)(row + column_of<D>(i, q)) = codes[i][0] | (u64)codes[i][1] << 32;
    }
  }
};

// The matrix of order 16 at rows 2 q and 2 q + 1, column g, and eight further in both, negated.
template <class T>
__device__ __forceinline__ void matrix_of_16(u32 (&signs)[2]) {
  const u32 q = lane_number() % 4, g = lane_number() / 4;
  const u32 one = T::BRAIN ? 0x3F80 : 0x3C00, both = q & g >> 1, odd = (both ^ both >> 1) & 1;
  signs[0] = (one | odd << 15) | (one | ((odd ^ g) & 1) << 15) << 16;
  signs[1] = signs[0] ^ 0x80008000u;
}

// Heads first ... last - 1 of q or k, each row with its own scale: 64 tokens from `begin` on, eight a warp, whose angles stay
// in registers. The pointers are at the sequence's; rows: of the output from a head to the next.
template <class T, class Angle, class Code, int D, bool ROPE, bool ROTATE>
__device__ __forceinline__ void turn(const PrepareArgs& args, const unsigned short* from, const void* cos,
                                     const void* sin, unsigned char* out, typename Code::Scale* scales, i64 x_token,
                                     i64 x_head, int first, int last, int begin, int rows) {
  constexpr int AHEAD = 128 / D;  // heads on their way
  const int token = begin + warp_number() * 8 + lane_number() / 4;
  const bool there = token < args.tokens;
  using R = Row<T, Code, D, ROTATE>;
  R row[AHEAD];
  Turn<Angle, D> angles;
  u32 signs[2];
  matrix_of_16<T>(signs);
  from += token * x_token;
#pragma unroll
  for (int a = 0; a < AHEAD; a++) row[a].load(from + (first + a) * x_head, there && first + a < last);
  if constexpr (ROPE) angles.load(args, cos, sin, token);
#pragma unroll 1
  for (int start = first; start < last; start += AHEAD) {
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
      const int head = start + a;
      if (a && head >= last) break;
      float y[R::PIECES][2][4];
      auto next = [&] {
        if (head + AHEAD < last) row[a].load(from + (head + AHEAD) * x_head, there);
      };
      if constexpr (ROPE) row[a].turn(angles);
      if constexpr (ROTATE) {
        row[a].rotate(y, signs);
        next();
      }
      u32 codes[R::PIECES][2];
      const auto scale = row[a].encode(codes, y, args.factor);
      if constexpr (!ROTATE) next();
      if (there) {
        if (lane_number() % 4 == 0) scales[head * args.tokens + token] = scale;
        R::store(out + ((i64)head * rows + token) * D, codes);
      }
    }
  }
}

// Heads of k with a scale for all of a tile's tokens: two rows a lane, of which one waits in shared memory, rotated, for it.
template <class T, class Angle, class Code, int D, bool ROPE, bool ROTATE>
__device__ __forceinline__ void turn_tile(const PrepareArgs& args, const unsigned short* from, const void* cos,
                                          const void* sin, unsigned char* out, typename Code::Scale* scales, i64 x_token,
                                          i64 x_head, int first, int last, int tile, int rows, u32 base) {
  using R = Row<T, Code, D, ROTATE>;
  const int token = tile * TOKENS + warp_number() * 16 + lane_number() / 4;
  const u32 waiting = base + 64 + threadIdx.x * 8;
  R row[2];
  u32 signs[2];
  matrix_of_16<T>(signs);
  auto load = [&](int head) {
#pragma unroll
    for (int r = 0; r < 2; r++)
      row[r].load(from + (token + 8 * r) * x_token + head * x_head, token + 8 * r < args.tokens);
  };
  load(first);
#pragma unroll 1
  for (int head = first; head < last; head++) {
    if constexpr (ROPE) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        Turn<Angle, D> angles;
        angles.load(args, cos, sin, token + 8 * r);
        row[r].turn(angles);
      }
    }
    float y[R::PIECES][2][4];
    if constexpr (ROTATE) row[0].rotate(y, signs);
    u32 most = row[0].largest(y, args.factor);
    if constexpr (ROTATE) {
      R::put(waiting, y);
      row[1].rotate(y, signs);
    }
    most = max(most, row[1].largest(y, args.factor));
    if (ROTATE && head + 1 < last) load(head + 1);
    const auto scale = Code::scale_of(largest_of_block(most, base, head));
    if (threadIdx.x == 0) scales[head * (args.padded / TOKENS) + tile] = scale;
#pragma unroll
    for (int r = 1; r >= 0; r--) {
      if (ROTATE && r == 0) R::get(y, waiting);
      u32 codes[R::PIECES][2];
      row[r].encode(codes, y, scale, args.factor);
      if (token + 8 * r < args.tokens) R::store(out + ((i64)head * rows + token + 8 * r) * D, codes);
    }
    if (!ROTATE && head + 1 < last) load(head + 1);
  }
}

// A tile of a head of v, [tokens, D] -> [D, tokens]; zeros behind the last token. A thread takes eight columns of four
// neighbouring tokens, whose codes are a word of each of the columns' rows.
template <class T, int D, bool BY_BLOCK>
__device__ __forceinline__ void values(const PrepareArgs& args, const unsigned short* from, unsigned char* out,
                                       unsigned char* scale, int tile, u32 base) {
  constexpr int ACROSS = D / 8, QUADS = 32 / ACROSS, STEPS = TOKENS / 4 / (8 * QUADS);  // quads of tokens: of a warp
  const u32 lane = lane_number(), piece = lane % ACROSS;
  u32 x[STEPS][4][4], largest[STEPS][4];
#pragma unroll
  for (int n = 0; n < STEPS; n++) {
    const int quad = (n * 8 + warp_number()) * QUADS + lane / ACROSS;
#pragma unroll
    for (int m = 0; m < 4; m++) {
      const int token = tile * TOKENS + quad * 4 + m;
      Quad y = {{0, 0, 0, 0}};
      if (token < args.tokens) y = *(const Quad*)(from + token * args.v_token + piece * 8);
      largest[n][m] = 0;
#pragma unroll
      for (int i = 0; i < 4; i++) x[n][m][i] = y.w[i], largest[n][m] = larger(largest[n][m], y.w[i]);
    }
  }
  int bytes[STEPS][4];
  if constexpr (BY_BLOCK) {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < STEPS * 4; i++) most = max(most, largest[i / 4][i % 4]);
    const int byte = scale_byte(__float_as_uint(T::value((unsigned short)largest_of_block(most, base, 0))));
#pragma unroll
    for (int i = 0; i < STEPS * 4; i++) bytes[i / 4][i % 4] = byte;
    if (threadIdx.x == 0) scale[tile] = (unsigned char)byte;
  } else {
#pragma unroll
    for (int i = 0; i < STEPS * 4; i++) {
      u32 most = largest[i / 4][i % 4];
#pragma unroll
      for (int lanes = 1; lanes < ACROSS; lanes *= 2) most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, lanes));
      const int byte = bytes[i / 4][i % 4] = scale_byte(__float_as_uint(T::value((unsigned short)most)));
      const int token = tile * TOKENS + ((i / 4 * 8 + warp_number()) * QUADS + lane / ACROSS) * 4 + i % 4;
      if (piece == 0 && token < args.tokens) scale[token] = (unsigned char)byte;
    }
  }
  const u32 words = base + 64;  // [D][32], the number of a word turned so that a warp's words are in different banks
#pragma unroll
  for (int n = 0; n < STEPS; n++) {
    const u32 quad = (n * 8 + warp_number()) * QUADS + lane / ACROSS;
    float inverse[4];
    u32 kept = 0;
#pragma unroll
    for (int m = 0; m < 4; m++) {
      inverse[m] = inverse_of(bytes[n][m]);
      if (bytes[n][m] != 255) kept |= 0xFFu << 8 * m;
    }
#pragma unroll
    for (int c = 0; c < 8; c++) {
      float z[4];
#pragma unroll
      for (int m = 0; m < 4; m++) z[m] = T::value((unsigned short)(x[n][m][c / 2] >> c % 2 * 16)) * inverse[m];
      store_shared(words + (piece * 8 + c) * 128 + (quad ^ piece * QUADS) * 4, to_e4m3(z[0], z[1], z[2], z[3]) & kept);
    }
  }
  block_sync();
#pragma unroll
  for (int n = 0; n < D / 32; n++) {
    const u32 at = n * PREPARE_THREADS + threadIdx.x, column = at / 8, part = at % 8, turned = column / 8 * QUADS;
    const u32 line = words + column * 128 + (part ^ turned / 4) * 16;
    Quad y;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float2 two = load_shared2(line + (h ^ turned / 2 % 2) * 8);
      y.w[2 * h] = __float_as_uint(two.x), y.w[2 * h + 1] = __float_as_uint(two.y);
    }
    *(Quad*)(out + (i64)column * args.padded + tile * TOKENS + part * 16) = y;
  }
}

// T: Bf16, Fp16; Angle: that of cos and sin, T or Fp32; Code: what q and k become.
template <class T, class Angle, class Code, int D, int SHARE, bool ROPE, bool ROTATE, bool BY_BLOCK>
__device__ __forceinline__ void prepare(const PrepareArgs& args) {
  const u32 base = shared_memory();
  const int tile = blockIdx.x, batch = blockIdx.z, scales = BY_BLOCK ? args.padded / TOKENS : args.tokens;
  int part = blockIdx.y;
  const void* cos = (const char*)args.cos + batch * args.cos_batch * Angle::BYTES;
  const void* sin = (const char*)args.sin + batch * args.cos_batch * Angle::BYTES;
  grid_wait();
  if (part < args.q_parts) {
    const i64 sequence = (i64)batch * args.heads;
    const auto* from = (const unsigned short*)args.q + batch * args.q_batch;
    const int first = part / 2 * SHARE, last = min(first + SHARE, args.heads);
    turn<T, Angle, Code, D, ROPE, ROTATE>(
        args, from, cos, sin, args.q_out + sequence * args.tokens * D,
        (typename Code::Scale*)args.q_scale + sequence * args.tokens, args.q_token, args.q_head, first, last,
        tile * TOKENS + part % 2 * (TOKENS / 2), args.tokens);
    return;
  }
  part -= args.q_parts;
  const i64 sequence = (i64)batch * args.groups;
  if (part < args.k_parts) {
    const auto* from = (const unsigned short*)args.k + batch * args.k_batch;
    unsigned char* out = args.k_out + sequence * args.k_rows * D;
    auto* scale = (typename Code::Scale*)args.k_scale + sequence * scales;
    if constexpr (BY_BLOCK) {
      const int first = part * (SHARE / 2), last = min(first + SHARE / 2, args.groups);
      turn_tile<T, Angle, Code, D, ROPE, ROTATE>(args, from, cos, sin, out, scale, args.k_token, args.k_head, first,
                                                 last, tile, args.k_rows, base);
    } else {
      const int first = part / 2 * SHARE, last = min(first + SHARE, args.groups);
      turn<T, Angle, Code, D, ROPE, ROTATE>(args, from, cos, sin, out, scale, args.k_token, args.k_head, first, last,
                                            tile * TOKENS + part % 2 * (TOKENS / 2), args.k_rows);
    }
    return;
  }
  part -= args.k_parts;
  const auto* from = (const unsigned short*)args.v + batch * args.v_batch + part * args.v_head;
  values<T, D, BY_BLOCK>(args, from, args.v_out + (sequence + part) * args.padded * D,
                         args.v_scale + (sequence + part) * scales, tile, base);
}

}  // namespace quantrot
