// What attention reads, from q, k and v as the projections leave them: RoPE, a Hadamard rotation and e4m3 or int8 of q and
// k, e4m3 of v transposed, in one pass over memory.
//
// A thread block takes 128 tokens of SHARE heads of q or k, one after another, or of one head of v. A warp has 16 tokens,
// a thread two of them (g and g + 8, g = lane / 4) and of each the columns that column_of says (q = lane % 4): 16 bytes a
// load, and both columns that RoPE mixes. Of the index of a column, the bits of q and two of the lowest are one product
// with the Hadamard matrix of order 16 (exact operands, float32 sums), whose result lies as its operand did; the others
// are butterflies in registers.

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

constexpr int TOKENS = 128, PREPARE_THREADS = 256, EARLY = 512;

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

// Cosines or sines of columns `column` ... + 7.
struct Angles {
  float w[8];

  template <class Angle>
  __device__ __forceinline__ static Angles at(const void* row, int column) {
    Angles a;
    if constexpr (Angle::BYTES == 4) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const Quad x = *(const Quad*)((const float*)row + column + 4 * h);
#pragma unroll
        for (int i = 0; i < 4; i++) a.w[4 * h + i] = __uint_as_float(x.w[i]);
      }
    } else {
      const Quad x = *(const Quad*)((const unsigned short*)row + column);
#pragma unroll
      for (int i = 0; i < 8; i++) a.w[i] = Angle::value((unsigned short)(x.w[i / 2] >> i % 2 * 16));
    }
    return a;
  }
};

struct Fp32 {
  static constexpr int BYTES = 4;
};

// RoPE of two neighbouring columns and of those that go with them: products are rounded to float32, and their sum. Of
// numbers of 16 bits they are exact, so one of them and the sum are one operation.
template <class T, class Angle>
__device__ __forceinline__ void turn_pair(u32& low, u32& high, const float* cosines, const float* sines) {
  float a[2], b[2];
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const float one = T::value((unsigned short)(low >> 16 * e)), two = T::value((unsigned short)(high >> 16 * e));
    const float p = __fmul_rn(two, sines[e]), r = __fmul_rn(one, sines[e]);
    if constexpr (Angle::BYTES == 2) {
      a[e] = __fmaf_rn(one, cosines[e], -p), b[e] = __fmaf_rn(two, cosines[e], r);
    } else {
      a[e] = __fsub_rn(__fmul_rn(one, cosines[e]), p), b[e] = __fadd_rn(__fmul_rn(two, cosines[e]), r);
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

// Heads first ... last - 1 of q or k. The pointers are at the sequence's; rows: of the output from a head to the next.
template <class T, class Angle, class Code, int D, bool ROPE, bool ROTATE, bool BY_BLOCK>
__device__ __forceinline__ void turn(const PrepareArgs& args, const unsigned short* from, const void* cos,
                                     const void* sin, unsigned char* out, typename Code::Scale* scale, i64 x_token, i64 x_head,
                                     int first, int last, int tile, int rows, u32 base) {
  constexpr int PIECES = D / 32;
  const u32 lane = lane_number(), g = lane / 4, q = lane % 4;
  const int token = tile * TOKENS + warp_number() * 16 + g;
  u32 x[2][PIECES][4];
  auto load = [&](int head) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
      for (int i = 0; i < PIECES; i++) {
        Quad y = {{0, 0, 0, 0}};
        if (token + 8 * r < args.tokens)
          y = *(const Quad*)(from + (i64)(token + 8 * r) * x_token + head * x_head + column_of<D>(i, q));
#pragma unroll
        for (int n = 0; n < 4; n++) x[r][i][n] = y.w[n];
      }
    }
  };
  u32 signs[2];  // the matrix of order 16 at rows 2 q and 2 q + 1, column g, and eight further in both, negated
  {
    const u32 one = T::BRAIN ? 0x3F80 : 0x3C00, both = q & g >> 1, odd = (both ^ both >> 1) & 1;
    signs[0] = (one | odd << 15) | (one | ((odd ^ g) & 1) << 15) << 16;
    signs[1] = signs[0] ^ 0x80008000u;
  }
  load(first);
#pragma unroll 1
  for (int head = first; head < last; head++) {
    if constexpr (ROPE) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        // Rows behind the last are turned too (by its angles): without a branch all angles are loaded at once.
        const i64 at = min(token + 8 * r, args.tokens - 1) * args.cos_token;
#pragma unroll
        for (int i = 0; i < PIECES / 2; i++) {
          const Angles c = Angles::at<Angle>((const char*)cos + at * Angle::BYTES, column_of<D>(i, q));
          const Angles s = Angles::at<Angle>((const char*)sin + at * Angle::BYTES, column_of<D>(i, q));
#pragma unroll
          for (int n = 0; n < 4; n++)
            turn_pair<T, Angle>(x[r][i][n], x[r][i + PIECES / 2][n], c.w + 2 * n, s.w + 2 * n);
        }
      }
    }
    float y[PIECES][2][2][4];  // [piece][columns + 4][+ 2][row g: two, row g + 8: two]
    u32 largest[2] = {0, 0};
    if constexpr (ROTATE) {
#pragma unroll
      for (int i = 0; i < PIECES; i++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const u32 a[4] = {x[0][i][2 * h], x[1][i][2 * h], x[0][i][2 * h + 1], x[1][i][2 * h + 1]};
#pragma unroll
          for (int t = 0; t < 2; t++) {
#pragma unroll
            for (int n = 0; n < 4; n++) y[i][h][t][n] = 0.f;
            product_warp<T>(y[i][h][t], a, signs[0], signs[t]);
          }
        }
      }
      if (head + 1 < last) load(head + 1);
#pragma unroll
      for (int n = 0; n < 8; n++) {  // t and the product's four numbers
        float z[2 * PIECES];
#pragma unroll
        for (int i = 0; i < 2 * PIECES; i++) z[i] = y[i / 2][i % 2][n / 4][n % 4];
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
        for (int i = 0; i < 2 * PIECES; i++) y[i / 2][i % 2][n / 4][n % 4] = z[i];
      }
      // A column that is no number makes all of its row so, and an infinity all of it infinite or no number.
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float most = fabsf(y[0][0][0][2 * r]);
#pragma unroll
        for (int i = 1; i < 8 * PIECES; i++) most = fmaxf(most, fabsf(y[i / 8][i / 4 % 2][i / 2 % 2][2 * r + i % 2]));
        largest[r] = __float_as_uint(most * args.factor);
      }
    } else {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        u32 most = 0;
#pragma unroll
        for (int i = 0; i < PIECES * 4; i++) most = larger(most, x[r][i / 4][i % 4]);
        largest[r] = __float_as_uint(T::value((unsigned short)most));
      }
    }
    decltype(Code::scale_of(0)) scales[2];
    if constexpr (BY_BLOCK) {
      scales[0] = scales[1] = Code::scale_of(largest_of_block(max(largest[0], largest[1]), base, head));
      if (threadIdx.x == 0) scale[head * (args.padded / TOKENS) + tile] = scales[0];
    } else {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        u32 most = largest[r];
        most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
        most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2));
        scales[r] = Code::scale_of(most);
        if (q == 0 && token + 8 * r < args.tokens) scale[head * args.tokens + token + 8 * r] = scales[r];
      }
    }
    u32 codes[2][PIECES][2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float inverse = Code::inverse(scales[r]), by = ROTATE ? args.factor * inverse : inverse;
      const u32 kept = Code::known(scales[r]) ? 0xFFFFFFFFu : 0u;
#pragma unroll
      for (int i = 0; i < 2 * PIECES; i++) {
        float z[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
          if constexpr (ROTATE) {
            z[n] = y[i / 2][i % 2][n / 2][2 * r + n % 2] * by;
          } else {
            z[n] = __fmul_rn(T::value((unsigned short)(x[r][i / 2][i % 2 * 2 + n / 2] >> n % 2 * 16)), by);
          }
        }
        codes[r][i / 2][i % 2] = Code::pack(z[0], z[1], z[2], z[3]) & kept;
      }
    }
    if (!ROTATE && head + 1 < last) load(head + 1);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      if (token + 8 * r >= args.tokens) continue;
      unsigned char* to = out + ((i64)head * rows + token + 8 * r) * D;
      if constexpr (D == 128) {
#pragma unroll
        for (int i = 0; i < PIECES; i += 2)
          *(Quad*)(to + column_of<D>(i, q)) = {{codes[r][i][0], codes[r][i][1], codes[r][i + 1][0], codes[r][i + 1][1]}};
      } else {
#pragma unroll
        for (int i = 0; i < PIECES; i++) *(u64*)(to + column_of<D>(i, q)) = codes[r][i][0] | (u64)codes[r][i][1] << 32;
      }
    }
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

// What a thread block will read of q, k or v comes to L2 while the kernel before it ends: for those that start by then. (For
// all of them it was 70 instructions a thread, and every line asked for twice.)
template <int D>
__device__ __forceinline__ void warm(const PrepareArgs& args, const unsigned short* from, i64 x_token, i64 x_head,
                                     int first, int last, int tile) {
  if (blockIdx.z + (blockIdx.y * gridDim.x + blockIdx.x) / EARLY > 0) return;
  constexpr int LINES = D * 2 / 128;  // of a row
  for (int i = threadIdx.x; i < (last - first) * TOKENS * LINES; i += PREPARE_THREADS) {
    const int token = tile * TOKENS + i / LINES % TOKENS;
    if (token < args.tokens)
      warm_line(from + token * x_token + (first + i / LINES / TOKENS) * x_head + i % LINES * 64);
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
  if (part < args.q_parts) {
    const i64 sequence = (i64)batch * args.heads;
    const auto* from = (const unsigned short*)args.q + batch * args.q_batch;
    const int first = part * SHARE, last = min(first + SHARE, args.heads);
    warm<D>(args, from, args.q_token, args.q_head, first, last, tile);
    grid_wait();
    turn<T, Angle, Code, D, ROPE, ROTATE, false>(
        args, from, cos, sin, args.q_out + sequence * args.tokens * D,
        (typename Code::Scale*)args.q_scale + sequence * args.tokens, args.q_token, args.q_head, first, last, tile,
        args.tokens, base);
    return;
  }
  part -= args.q_parts;
  const i64 sequence = (i64)batch * args.groups;
  if (part < args.k_parts) {
    const auto* from = (const unsigned short*)args.k + batch * args.k_batch;
    const int first = part * SHARE, last = min(first + SHARE, args.groups);
    warm<D>(args, from, args.k_token, args.k_head, first, last, tile);
    grid_wait();
    turn<T, Angle, Code, D, ROPE, ROTATE, BY_BLOCK>(
        args, from, cos, sin, args.k_out + sequence * args.k_rows * D,
        (typename Code::Scale*)args.k_scale + sequence * scales, args.k_token, args.k_head, first, last, tile,
        args.k_rows, base);
    return;
  }
  part -= args.k_parts;
  const auto* from = (const unsigned short*)args.v + batch * args.v_batch;
  warm<D>(args, from, args.v_token, args.v_head, part, part + 1, tile);
  grid_wait();
  values<T, D, BY_BLOCK>(args, from + part * args.v_head, args.v_out + (sequence + part) * args.padded * D,
                         args.v_scale + (sequence + part) * scales, tile, base);
}

}  // namespace quantrot
