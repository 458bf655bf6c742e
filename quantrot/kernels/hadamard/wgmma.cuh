// Long rows of 16-bit elements as one asynchronous tensor core product: see common.cuh.

namespace quantrot {

// --- Rows of K * C elements, H = H_K (x) S_C, C at most 256, by one warpgroup ----------------------------------------
//
// A row is K x C in memory and lies in shared memory as it is. H_K multiplies it from the left: 64 rows of H_K^T at a
// time are the register operand of wgmma, made from sign bits, never stored; the data is the shared memory operand, read
// across its rows (the hardware transposes), so nothing is ever moved. The product is exact, and it leaves each lane
// with two neighbouring columns of every eight: log2(C) - 2 bits of the column number are register bits, two are lane
// bits. No thread block holds more than a few rows and none lives longer than them, so the hardware's own scheduling
// keeps every multiprocessor loading.
//
// ROWS rows of x lie side by side where C is small, so that a product has 128 or 256 columns.

template <int D>
struct Number : Fp16 {};
template <>
struct Number<BF16> : Bf16 {};

// Row m of H_K^T is -1 where bit k of word k / 32 is set; defined by the program, rows past K are zeros.
template <int K>
struct Signs {
  __device__ __forceinline__ static u32 word(u32 m, u32 w);
};

template <int K, int C, int ROWS>
struct WgmmaLayout {
  static constexpr int WIDTH = C * ROWS;              // columns of a product
  static constexpr int DEPTH = (K + 15) / 16 * 16;    // rows of it, with rows of zeros past K
  static constexpr int CHUNK = DEPTH * 128;           // bytes of 64 columns, 128 bytes a row, swizzled
  static constexpr int INPUT = WIDTH / 64 * CHUNK;
  static constexpr int STAGE = 16 * 128;              // a warp's 16 rows of 64 columns on their way out
};

template <int D, int K, int C, int ROWS, bool SIGNS>
__device__ __forceinline__ void load_rows(const Args& a, u32 input, i64 first) {
  using L = WgmmaLayout<K, C, ROWS>;
  constexpr int VECTORS = K * C / 8;                  // of 16 bytes, a row
  for (u32 i = threadIdx.x; i < ROWS * VECTORS; i += 128) {
    const u32 r = i / VECTORS, at = i % VECTORS, k = at / (C / 8), unit = r * (C / 8) + at % (C / 8);
    const u32 to = input + unit / 8 * L::CHUNK + swizzled(k, unit % 8 * 16);
    const bool inside = first + r < a.rows;
    const i64 row = inside ? first + r : 0;
    copy16(to, (const char*)a.x + (row * a.x_stride + at * 8) * 2, inside);
  }
  for (u32 k = K; k < L::DEPTH; k++)
    for (u32 unit = threadIdx.x; unit < L::WIDTH / 8; unit += 128)
      store_vector(input + unit / 8 * L::CHUNK + k * 128 + (unit % 8) * 16, Vec{{0, 0, 0, 0}});
  copies_wait();
  if constexpr (SIGNS) {                              // a thread turns the vectors that it has brought
    for (u32 i = threadIdx.x; i < ROWS * VECTORS; i += 128) {
      const u32 r = i / VECTORS, at = i % VECTORS, k = at / (C / 8), unit = r * (C / 8) + at % (C / 8);
      const u32 to = input + unit / 8 * L::CHUNK + swizzled(k, unit % 8 * 16);
      Vec v = load_vector(to);
      apply_signs16(v, a.signs + (first + r) % a.sign_rows * (K * C) + at * 8);
      store_vector(to, v);
    }
  }
  fence_async();
}

// Rows 64 * tile ... of H_K^T times the input: d[4 t + j] is row 16 * warp + lane / 4 + 8 * (j / 2), column
// 8 t + 2 * (lane % 4) + j % 2.
template <int D, int K, int WIDTH, int CHUNK>
__device__ __forceinline__ void multiply(float (&d)[WIDTH / 2], u32 input, u32 tile) {
  constexpr int STEPS = (K + 15) / 16, BATCH = WIDTH == 256 ? 2 : 4;  // products in flight: 128 sums leave few registers
  constexpr u32 one = D == BF16 ? 0x3F803F80u : 0x3C003C00u;
  const u32 lane = threadIdx.x & 31, q = lane & 3;
  const u32 m = 64 * tile + 16 * (threadIdx.x >> 5) + (lane >> 2);
#pragma unroll
  for (int first = 0; first < STEPS; first += BATCH) {
    u32 h[BATCH][4];
#pragma unroll
    for (int pair = 0; pair < BATCH; pair += 2) {     // 32 columns of H_K^T are one word
#pragma unroll
      for (int half = 0; half < 2; half++) {
        if (first + pair >= STEPS) continue;
        const u32 word = Signs<K>::word(m + 8 * half, (first + pair) / 2) >> (2 * q);
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const u32 bits = word >> (8 * j);
          h[pair + j / 2][half + 2 * (j % 2)] = one ^ ((bits & 1) << 15) ^ ((bits & 2) << 30);
        }
      }
    }
    product_fence();
#pragma unroll
    for (int s = 0; s < BATCH; s++)
      if (first + s < STEPS)
        product_across<Number<D>>(d, h[s], operand_across(input + (first + s) * 2048, CHUNK), first + s > 0);
    product_commit();
    product_wait<0>();
    product_done(d);
  }
}

template <int C, int WIDTH>
__device__ __forceinline__ void butterflies_across(float (&d)[WIDTH / 2]) {
#pragma unroll
  for (int stage = 1; stage < C / 4; stage *= 2) {    // column bit 0, then bits 3 and up
    const int step = stage == 1 ? 1 : 2 * stage;
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++)
      if (!(i & step)) {
        const float x = d[i], y = d[i + step];
        d[i] = x + y;
        d[i + step] = x - y;
      }
  }
#pragma unroll
  for (int s = 1; s <= 2; s *= 2) {                   // column bits 1 and 2
    const float sign = threadIdx.x & s ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) d[i] = fmaf(d[i], sign, __shfl_xor_sync(0xFFFFFFFFu, d[i], s));
  }
}

// A warp's 16 rows of one product, 64 columns at a time through its own piece of shared memory, as 16-byte vectors.
template <int D, int K, int C, int ROWS>
__device__ __forceinline__ void store_rows(
    const Args& a, const float (&d)[C * ROWS / 2], u32 stage, u32 tile, i64 first) {
  const u32 lane = threadIdx.x & 31, top = 64 * tile + 16 * (threadIdx.x >> 5);
#pragma unroll
  for (int chunk = 0; chunk < C * ROWS / 64; chunk++) {
#pragma unroll
    for (int t = 0; t < 8; t += 2) {
      const float* e = d + 4 * (8 * chunk + t);
      const u32 r = lane & 15, unit = t + (lane >> 4);
      store_matrices(
          stage + swizzled(r, unit * 16), pack<D>(e[0] * a.scale, e[1] * a.scale),
          pack<D>(e[2] * a.scale, e[3] * a.scale), pack<D>(e[4] * a.scale, e[5] * a.scale),
          pack<D>(e[6] * a.scale, e[7] * a.scale));
    }
    warp_sync();
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 r = 4 * i + (lane >> 3), unit = lane & 7, m = top + r, column = 64 * chunk + 8 * unit;
      const i64 row = first + column / C;
      if (m < K && row < a.rows)
        store16((char*)a.y + (row * a.y_stride + m * C + column % C) * 2,
                load_vector(stage + swizzled(r, unit * 16)));
    }
    warp_sync();
  }
}

template <int D, int K, int C, int ROWS, bool SIGNS>
__device__ __forceinline__ void wgmma_kernel(const Args& a) {
  using L = WgmmaLayout<K, C, ROWS>;
  static_assert(L::WIDTH == 64 || L::WIDTH == 128 || L::WIDTH == 256, "columns of a product");
  const u32 input = shared_memory();                  // aligned to 1024: the swizzle is a function of the address
  const u32 stage = input + L::INPUT + (threadIdx.x >> 5) * L::STAGE;
  const i64 first = (i64)blockIdx.x * ROWS;
  load_rows<D, K, C, ROWS, SIGNS>(a, input, first);
  block_sync();
  for (u32 tile = 0; tile < (K + 63) / 64; tile++) {
    float d[L::WIDTH / 2];
    multiply<D, K, L::WIDTH, L::CHUNK>(d, input, tile);
    butterflies_across<C, L::WIDTH>(d);
    store_rows<D, K, C, ROWS>(a, d, stage, tile, first);
  }
}

}  // namespace quantrot
