// The Hadamard transform for sm_90a as device functions, compiled at first use by NVRTC and callable from fused kernels.
//
// A row index is split into bits, and each bit is transformed where it already is:
//   - a bit held in registers: one butterfly addition an element, in float32;
//   - four bits spread over the lanes of a warp: one tensor core product with a 16 x 16 Hadamard matrix whose operand is
//     built from the lane number, never loaded. With the data as the B operand the product also exchanges lane/4 with
//     lane%4, so two products transform the eight bits of 256 contiguous elements and leave each lane with the eight
//     neighbours it loaded: no shuffle, no shared memory;
//   - bits spread over warps, and a dense base of K rows: a product that reads the 16-bit input from shared memory
//     (brought there by bulk copies), then one exchange through shared memory in float32.
// The first product takes the 16-bit input as it is, so it is exact; later ones take float32 sums split into two tf32
// parts, which keeps 22 bits. The only rounding to 16 bits is the last.

namespace quantrot {

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

enum Dtype { BF16 = 0, FP16 = 1, FP32 = 2 };

struct Args {
  const void* x;
  void* y;
  const signed char* signs;  // [sign_rows][n], row r of x takes row r % sign_rows
  i64 rows, x_stride, y_stride;  // strides in elements
  int sign_rows;
  float scale;
};

// --- Words ---------------------------------------------------------------------------------------------------------

struct alignas(16) Vec {
  u32 w[4];
};

// Read once, so keep it out of L1; not .nc, because the in-place operator reads what it writes.
__device__ __forceinline__ Vec load16(const void* p) {
  Vec v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "l"(p));
  return v;
}

__device__ __forceinline__ void store16(void* p, const Vec& v) {
#if defined(STORE_CS)
  asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3])
               : "memory");
#else
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3])
               : "memory");
#endif
}

template <int D>
__device__ __forceinline__ u32 pack(float lo, float hi) {
  u32 r;
  if constexpr (D == BF16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  }
  return r;
}

template <int D>
__device__ __forceinline__ void unpack(u32 w, float& lo, float& hi) {
  if constexpr (D == BF16) {
    lo = __uint_as_float(w << 16);
    hi = __uint_as_float(w & 0xFFFF0000u);
  } else {
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(lo), "=f"(hi) : "r"(w));
  }
}

// Two int8 signs (bytes 2 * i and 2 * i + 1 of s) as the sign bits of two 16-bit lanes.
__device__ __forceinline__ u32 sign_mask(u32 s, int i) {
  return __byte_perm(s, 0, i ? 0x3424 : 0x1404) & 0x80008000u;
}

__device__ __forceinline__ void apply_signs16(Vec& v, const signed char* signs) {
  const uint2 s = *reinterpret_cast<const uint2*>(signs);
  v.w[0] ^= sign_mask(s.x, 0);
  v.w[1] ^= sign_mask(s.x, 1);
  v.w[2] ^= sign_mask(s.y, 0);
  v.w[3] ^= sign_mask(s.y, 1);
}

// --- Tensor core products with constant Hadamard operands --------------------------------------------------------------

template <int D>
__device__ __forceinline__ void mma16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if constexpr (D == BF16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

__device__ __forceinline__ void mma_tf32(float (&d)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)), "r"(__float_as_uint(a3)),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// f as the tf32 number below it in magnitude, and the rest. An infinity's rest would be inf - inf; the minimum replaces
// that NaN by a number too small to matter (a true rest is at most 2^117), while a NaN stays one in `hi`.
__device__ __forceinline__ void split_tf32(float f, float& hi, float& lo) {
  hi = __uint_as_float(__float_as_uint(f) & 0xFFFFE000u);
  lo = fminf(f - hi, 0x1p118f);
}

// Sylvester's 16 x 16 matrix as an m16n8k16 operand: every register is +-w.
template <int D>
__device__ __forceinline__ u32 sylvester16() {
  const u32 lane = threadIdx.x & 31, g = lane >> 2, k = (lane & 3) * 2;
  const u32 one = D == BF16 ? 0x3F80u : 0x3C00u;
  const u32 lo = one | ((__popc(g & k) & 1) << 15), hi = one | ((__popc(g & (k + 1)) & 1) << 15);
  return lo | (hi << 16);
}

// The same matrix, its index bits permuted (rows 0123 against columns 1203... see `eight_bits`), as an m16n8k8 operand.
struct Sylvester8 {
  float f0, f2;
};

__device__ __forceinline__ Sylvester8 sylvester8() {
  const u32 lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const u32 p = ((g >> 1) & q & 1) ^ ((g >> 2) & (q >> 1) & 1);
  return {p ? -1.f : 1.f, (p ^ (g & 1)) ? -1.f : 1.f};
}

// One 16 x 16 step on float32 data: d = H [b of step 0; b of step 1], four values a lane.
__device__ __forceinline__ void step_tf32(float (&d)[4], const Sylvester8& h, float p0, float p1, float r0, float r1) {
  float hi[4], lo[4];
  split_tf32(p0, hi[0], lo[0]);
  split_tf32(p1, hi[1], lo[1]);
  split_tf32(r0, hi[2], lo[2]);
  split_tf32(r1, hi[3], lo[3]);
  d[0] = d[1] = d[2] = d[3] = 0.f;
  mma_tf32(d, h.f0, h.f0, h.f2, h.f2, lo[0], lo[1]);
  mma_tf32(d, h.f0, -h.f0, h.f2, -h.f2, lo[2], lo[3]);
  mma_tf32(d, h.f0, h.f0, h.f2, h.f2, hi[0], hi[1]);
  mma_tf32(d, h.f0, -h.f0, h.f2, -h.f2, hi[2], hi[3]);
}

// --- 256 contiguous elements in a warp ---------------------------------------------------------------------------------
//
// Lane l holds elements 8 l ... 8 l + 7. Element bits e0 e1 e2, lane bits l0 ... l4. The first product transforms
// e0 l0 l1 e2 and leaves them in l2 l3 l4 and a register; the second transforms l3 l4 l2 e1 and puts everything back.

template <int D>
__device__ __forceinline__ void first_product(float (&d)[2][4], u32 h, const Vec& v) {
#pragma unroll
  for (int e1 = 0; e1 < 2; e1++) {
    d[e1][0] = d[e1][1] = d[e1][2] = d[e1][3] = 0.f;
    mma16<D>(d[e1], h, h, h, h ^ 0x80008000u, v.w[e1], v.w[e1 + 2]);
  }
}

// The same on float32 data: p[h][j] holds element 8 (l%4) + 4 h + j of the 32 that start at 32 (l/4).
__device__ __forceinline__ void first_product(float (&d)[2][4], const Sylvester8& h, const float4 (&p)[2]) {
  step_tf32(d[0], h, p[0].x, p[0].y, p[1].x, p[1].y);
  step_tf32(d[1], h, p[0].z, p[0].w, p[1].z, p[1].w);
}

__device__ __forceinline__ void second_product(float (&y)[8], const Sylvester8& h, const float (&d)[2][4]) {
#pragma unroll
  for (int e2 = 0; e2 < 2; e2++) {
    float o[4];
    step_tf32(o, h, d[0][2 * e2], d[0][2 * e2 + 1], d[1][2 * e2], d[1][2 * e2 + 1]);
#pragma unroll
    for (int j = 0; j < 4; j++) y[4 * e2 + j] = o[j];
  }
}

template <int D>
__device__ __forceinline__ Vec pack8(const float* y, float scale) {
  Vec v;
#pragma unroll
  for (int j = 0; j < 4; j++) v.w[j] = pack<D>(y[2 * j] * scale, y[2 * j + 1] * scale);
  return v;
}

// Butterflies over the index r of y[r][...], at distances FIRST, 2 FIRST ... below LAST.
template <int R, int W, int FIRST, int LAST>
__device__ __forceinline__ void butterflies(float (&y)[R][W]) {
#pragma unroll
  for (int s = FIRST; s < LAST; s *= 2) {
#pragma unroll
    for (int r = 0; r < R; r++) {
      if (r & s) continue;
#pragma unroll
      for (int j = 0; j < W; j++) {
        const float a = y[r][j], b = y[r + s][j];
        y[r][j] = a + b;
        y[r + s][j] = a - b;
      }
    }
  }
}

// --- Rows of 2 ... 128 elements, any dtype: registers and lane exchanges, float32 throughout -----------------------------
//
// R vectors of 16 bytes a lane; a row lies in neighbouring lanes of one vector (N <= 32 * E) or also in R.

template <int D, int N, int R, int WARPS, bool SIGNS>
__device__ __forceinline__ void lanes_kernel(const Args& a) {
  constexpr int E = D == FP32 ? 4 : 8;         // elements of a vector
  constexpr int IN_R = N > 32 * E ? N / (32 * E) : 1;  // vectors of a row in one lane
  constexpr int BYTES = D == FP32 ? 4 : 2;
  const u32 lane = threadIdx.x & 31;
  const i64 unit = (i64)blockIdx.x * WARPS + (threadIdx.x >> 5);
  const i64 first = unit * (32 * E * R);       // of the flat index row * N + column
  const i64 total = a.rows * N;
  float y[R][E];
  i64 offset[R];
  Vec v[R];
#pragma unroll
  for (int r = 0; r < R; r++) {
    const i64 flat = first + (r * 32 + lane) * E;
    const i64 row = flat / N;
    offset[r] = flat % N;
    v[r] = Vec{{0, 0, 0, 0}};
    if (flat < total) {
      const char* p = (const char*)a.x + (row * a.x_stride + offset[r]) * BYTES;
      v[r] = load16(p);
    }
  }
#pragma unroll
  for (int r = 0; r < R; r++) {
    if constexpr (D == FP32) {
#pragma unroll
      for (int j = 0; j < 4; j++) y[r][j] = __uint_as_float(v[r].w[j]);
    } else {
#pragma unroll
      for (int j = 0; j < 4; j++) unpack<D>(v[r].w[j], y[r][2 * j], y[r][2 * j + 1]);
    }
    if constexpr (SIGNS) {
      const i64 flat = first + (r * 32 + lane) * E;
      if (flat < total) {
        const signed char* s = a.signs + (flat / N % a.sign_rows) * N + offset[r];
#pragma unroll
        for (int j = 0; j < E; j++) y[r][j] = s[j] < 0 ? -y[r][j] : y[r][j];
      }
    }
#pragma unroll
    for (int s = 1; s < E && s < N; s *= 2) {
#pragma unroll
      for (int j = 0; j < E; j++) {
        if (j & s) continue;
        const float p = y[r][j], q = y[r][j + s];
        y[r][j] = p + q;
        y[r][j + s] = p - q;
      }
    }
#pragma unroll
    for (int s = 1; s < 32 && s * E < N; s *= 2) {
      const float sign = lane & s ? -1.f : 1.f;
#pragma unroll
      for (int j = 0; j < E; j++) {
        const float other = __shfl_xor_sync(0xFFFFFFFFu, y[r][j], s);
        y[r][j] = fmaf(y[r][j], sign, other);
      }
    }
  }
  butterflies<R, E, 1, IN_R>(y);
#pragma unroll
  for (int r = 0; r < R; r++) {
    const i64 flat = first + (r * 32 + lane) * E;
    Vec out;
    if constexpr (D == FP32) {
#pragma unroll
      for (int j = 0; j < 4; j++) out.w[j] = __float_as_uint(y[r][j] * a.scale);
    } else {
      out = pack8<D>(y[r], a.scale);
    }
    if (flat < total) store16((char*)a.y + (flat / N * a.y_stride + offset[r]) * BYTES, out);
  }
}

// --- Rows of 32, 64, 128 elements in 16 bits: one exact product, the other bits in registers ----------------------------
//
// Lane l holds, of row l/4 of each group of eight, the vectors at columns 32 r + 8 (l%4). The product transforms
// e0 l0 l1 e2; e1 and r are butterflies.

template <int D, int N, int R, int WARPS, bool SIGNS>
__device__ __forceinline__ void quad_kernel(const Args& a) {
  constexpr int IN_R = N / 32;
  static_assert(IN_R >= 1 && IN_R <= R, "a row must fit in a lane's vectors");
  const u32 lane = threadIdx.x & 31;
  const i64 unit = (i64)blockIdx.x * WARPS + (threadIdx.x >> 5);
  const i64 first_row = unit * (8 * R / IN_R) + (lane >> 2);
  const u32 h = sylvester16<D>();
  Vec v[R];
#pragma unroll
  for (int r = 0; r < R; r++) {
    const i64 row = first_row + r / IN_R * 8;
    const int column = r % IN_R * 32 + (lane & 3) * 8;
    v[r] = Vec{{0, 0, 0, 0}};
    if (row < a.rows) {
      v[r] = load16((const char*)a.x + (row * a.x_stride + column) * 2);
      if constexpr (SIGNS) apply_signs16(v[r], a.signs + (row % a.sign_rows) * N + column);
    }
  }
  float y[R][8];
#pragma unroll
  for (int r = 0; r < R; r++) {
#pragma unroll
    for (int e2 = 0; e2 < 2; e2++) {
      float d[4] = {0.f, 0.f, 0.f, 0.f};
      mma16<D>(d, v[r].w[0], v[r].w[1], v[r].w[2], v[r].w[3], h, e2 ? h ^ 0x80008000u : h);
      y[r][4 * e2 + 0] = d[0] + d[2];
      y[r][4 * e2 + 1] = d[1] + d[3];
      y[r][4 * e2 + 2] = d[0] - d[2];
      y[r][4 * e2 + 3] = d[1] - d[3];
    }
  }
  butterflies<R, 8, 1, IN_R>(y);
#pragma unroll
  for (int r = 0; r < R; r++) {
    const i64 row = first_row + r / IN_R * 8;
    const int column = r % IN_R * 32 + (lane & 3) * 8;
    if (row < a.rows) store16((char*)a.y + (row * a.y_stride + column) * 2, pack8<D>(y[r], a.scale));
  }
}

// --- Rows of 256 ... 4096 elements in 16 bits: a row in a warp's registers --------------------------------------------

template <int D, int N, int R, int WARPS, bool SIGNS>
__device__ __forceinline__ void warp_kernel(const Args& a) {
  constexpr int IN_R = N / 256;
  static_assert(IN_R >= 1 && IN_R <= R, "a row must fit in a lane's vectors");
  const u32 lane = threadIdx.x & 31;
  const i64 unit = (i64)blockIdx.x * WARPS + (threadIdx.x >> 5);
  const i64 first_row = unit * (R / IN_R);
  const u32 h = sylvester16<D>();
  const Sylvester8 h8 = sylvester8();
  Vec v[R];
#pragma unroll
  for (int r = 0; r < R; r++) {
    const i64 row = first_row + r / IN_R;
    const int column = r % IN_R * 256 + lane * 8;
    v[r] = Vec{{0, 0, 0, 0}};
    if (row < a.rows) {
      v[r] = load16((const char*)a.x + (row * a.x_stride + column) * 2);
      if constexpr (SIGNS) apply_signs16(v[r], a.signs + (row % a.sign_rows) * N + column);
    }
  }
  float y[R][8];
#pragma unroll
  for (int r = 0; r < R; r++) {
    float d[2][4];
    first_product<D>(d, h, v[r]);
    second_product(y[r], h8, d);
  }
  butterflies<R, 8, 1, IN_R>(y);
#pragma unroll
  for (int r = 0; r < R; r++) {
    const i64 row = first_row + r / IN_R;
    const int column = r % IN_R * 256 + lane * 8;
    if (row < a.rows) store16((char*)a.y + (row * a.y_stride + column) * 2, pack8<D>(y[r], a.scale));
  }
}

// --- Shared memory, bulk copies and barriers ---------------------------------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 bar) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra.uni leave;\nbra.uni again;\nleave:\n}\n"
      ::"r"(bar), "r"(parity) : "memory");
}

__device__ __forceinline__ void bulk_load(u32 to, const void* from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(bar)
               : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(u32 (&b)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(address));
}

__device__ __forceinline__ float4 load_shared16(u32 address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address));
  return v;
}

__device__ __forceinline__ void store_shared8(u32 address, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}

// --- Rows of K * T * 256 elements in 16 bits: a row in a thread block ------------------------------------------------------
//
// The row is K x T x 256 in memory. Bulk copies bring its K pieces to shared memory, 16 bytes apart so that eight of them
// meet different banks. Phase 1, for eight columns at a time: H_K as the constant operand, then butterflies over T. The
// sums cross to phase 2 in float32; there a warp takes 256 contiguous elements. While phase 2 runs, the bulk copies of the
// block's next row are in flight.

// Bit k of BASE[m][k / 32] is set where H[k][m] is -1; defined by the program for a K that is no power of two.
template <int K>
struct Base;

template <int D, int K>
struct BaseOperand {  // H_K^T, K <= 32, padded to multiples of 16 (padded columns meet zeros, padded rows are dropped)
  static constexpr int TILES = (K + 15) / 16;
  u32 a[TILES][TILES][4];

  __device__ __forceinline__ BaseOperand() {
    const u32 lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    const u32 one = D == BF16 ? 0x3F80u : 0x3C00u;
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
      for (int j = 0; j < TILES; j++)
#pragma unroll
        for (int r = 0; r < 4; r++) {
          const u32 m = 16 * i + g + 8 * (r & 1), k = 16 * j + 2 * q + 8 * (r >> 1);
          const u32 bits = Base<K>::row(m) >> k;
          a[i][j][r] = (one | ((bits & 1) << 15)) | ((one | ((bits & 2) << 14)) << 16);
        }
  }
};

template <int K>
struct PowerRow {
  __device__ __forceinline__ static u32 row(u32 m) {
    u32 bits = 0;
    for (u32 k = 0; k < K; k++) bits |= (__popc(m & k) & 1) << k;
    return bits;
  }
};
template <>
struct Base<8> : PowerRow<8> {};
template <>
struct Base<16> : PowerRow<16> {};
template <>
struct Base<32> : PowerRow<32> {};

template <int K, int T, int STAGES>
struct BlockLayout {
  static constexpr int N = K * T * 256;
  static constexpr int IN_ROW = T * 512 + 16;    // bytes of one of the K pieces of the input
  static constexpr int IN = (K * IN_ROW + 127) / 128 * 128;
  static constexpr int OUT_ROW = T * 1024 + 32;  // and of the float32 sums
  static constexpr int OUT = K * OUT_ROW;
  static constexpr int HEAD = 128;               // barriers, then 16 bytes of zeros that stand for rows past K
  static constexpr int ZEROS = 64;
  static constexpr int BYTES = HEAD + STAGES * IN + OUT;
};

template <int D, int K, int T, int WARPS, int STAGES, bool SIGNS>
__device__ __forceinline__ void block_kernel(const Args& a) {
  using L = BlockLayout<K, T, STAGES>;
  constexpr int TILES = (K + 15) / 16;
  constexpr int BLOCKS = TILES == 1 && T == 1 ? 2 : T;  // groups of eight columns worked on together
  extern __shared__ __align__(128) unsigned char shared[];
  const u32 base = shared_address(shared);
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = lane & 3;
  const u32 inputs = base + L::HEAD, sums = inputs + STAGES * L::IN;

  const BaseOperand<D, K> h;
  const Sylvester8 h8 = sylvester8();

  auto fetch = [&](i64 row, int stage) {  // by one whole warp
    const u32 bar = base + stage * 8;
    if (lane == 0) barrier_expect(bar, L::N * 2);
    __syncwarp();
    for (int k = lane; k < K; k += 32) {
      bulk_load(inputs + stage * L::IN + k * L::IN_ROW, (const char*)a.x + (row * a.x_stride + k * T * 256) * 2, T * 512,
                bar);
    }
  };

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) barrier_init(base + s * 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (threadIdx.x < 4) reinterpret_cast<u32*>(shared + L::ZEROS)[threadIdx.x] = 0;
  __syncthreads();
  if (warp == 0) {
    for (int s = 0; s < STAGES; s++) {
      const i64 row = blockIdx.x + (i64)s * gridDim.x;
      if (row < a.rows) fetch(row, s);
    }
  }

  // Each lane names one of 32 matrix rows; those past K are the zeros.
  const u32 k_lane = TILES == 1 ? (lane & 15) : lane;
  const bool real = k_lane < K;
  const u32 in_lane = real ? k_lane * L::IN_ROW : 0;
  const u32 sums_lane = sums + g * L::OUT_ROW + (q & 1) * 8;

  int stage = 0;
  u32 parity = 0;
  for (i64 row = blockIdx.x; row < a.rows; row += gridDim.x) {
    barrier_wait(base + stage * 8, parity);
    const u32 input = inputs + stage * L::IN;
    if constexpr (SIGNS) {
      const signed char* signs = a.signs + (row % a.sign_rows) * L::N;
      for (int i = threadIdx.x; i < L::N / 8; i += WARPS * 32) {
        const int k = i / (T * 32);
        Vec* p = reinterpret_cast<Vec*>(shared + L::HEAD + stage * L::IN + k * L::IN_ROW + (i % (T * 32)) * 16);
        Vec v = *p;
        apply_signs16(v, signs + i * 8);
        *p = v;
      }
      // These stores come before the next bulk copy into this buffer, which is the other proxy's.
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncthreads();
    }

    const u32 from = real ? input + in_lane : base + L::ZEROS;
#pragma unroll 1
    for (int item = warp; item < 32 * T / BLOCKS; item += WARPS) {
      float d[BLOCKS][TILES * 4];
      // Block b is t = b of the column group `item`, or, where T is 1, the column group 2 * item + b.
      if constexpr (TILES == 1) {
#pragma unroll
        for (int pair = 0; pair < BLOCKS / 2; pair++) {
          const u32 b = 2 * pair + (lane >> 4);
          const u32 column = T == 1 ? (2 * item + b) * 16 : item * 16 + b * 512;
          u32 f[4];
          load_matrices_transposed(f, real ? from + column : from);
#pragma unroll
          for (int i = 0; i < 2; i++) {
            float o[4] = {0.f, 0.f, 0.f, 0.f};
            mma16<D>(o, h.a[0][0][0], h.a[0][0][1], h.a[0][0][2], h.a[0][0][3], f[2 * i], f[2 * i + 1]);
#pragma unroll
            for (int j = 0; j < 4; j++) d[2 * pair + i][j] = o[j];
          }
        }
      } else {
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
          const u32 column = item * 16 + b * 512;
          u32 f[4];
          load_matrices_transposed(f, real ? from + column : from);
#pragma unroll
          for (int i = 0; i < TILES; i++) {
            float o[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (int j = 0; j < TILES; j++)
              mma16<D>(o, h.a[i][j][0], h.a[i][j][1], h.a[i][j][2], h.a[i][j][3], f[2 * j], f[2 * j + 1]);
#pragma unroll
            for (int j = 0; j < 4; j++) d[b][4 * i + j] = o[j];
          }
        }
      }
      butterflies<BLOCKS, TILES * 4, 1, T>(d);
#pragma unroll
      for (int b = 0; b < BLOCKS; b++) {
        const u32 group = T == 1 && BLOCKS == 2 ? 2 * item + b : item, t = T == 1 ? 0 : b;
        // 16-byte units swap within pairs in every other 128 bytes, so that phase 2's reads meet all banks.
        const u32 unit = (2 * group + (q >> 1)) ^ ((group >> 2) & 1);
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) {
          if (i * 8 + 8 <= K || i * 8 + g < K)
            store_shared8(sums_lane + i * 8 * L::OUT_ROW + t * 1024 + unit * 16, d[b][2 * i], d[b][2 * i + 1]);
        }
      }
    }
    __syncthreads();

    if (warp == 0) {
      const i64 next = row + (i64)STAGES * gridDim.x;
      if (next < a.rows) fetch(next, stage);
    }
    char* out = (char*)a.y + row * a.y_stride * 2;
#pragma unroll 1
    for (int c = warp; c < K * T; c += WARPS) {
      const u32 chunk = sums + c / T * L::OUT_ROW + c % T * 1024 + g * 128 + q * 32;
      const float4 p[2] = {load_shared16(chunk + (g & 1) * 16), load_shared16(chunk + (~g & 1) * 16)};
      float d[2][4], y[8];
      first_product(d, h8, p);
      second_product(y, h8, d);
      store16(out + (c * 256 + lane * 8) * 2, pack8<D>(y, a.scale));
    }
    __syncthreads();
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
}

}  // namespace quantrot
