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

// LOAD and STREAM are the cache hints of the program: read and written once, or left in L2 for the next kernel. Not .nc,
// because the in-place operator reads what it writes.
__device__ __forceinline__ Vec load16(const void* p) {
  Vec v;
  asm volatile("ld.global" LOAD ".v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "l"(p));
  return v;
}

__device__ __forceinline__ void store16(void* p, const Vec& v) {
  asm volatile("st.global" STREAM ".v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3])
               : "memory");
}

__device__ __forceinline__ void store8(void* p, u32 a, u32 b) {
  asm volatile("st.global" STREAM ".v2.u32 [%0], {%1,%2};" ::"l"(p), "r"(a), "r"(b) : "memory");
}

__device__ __forceinline__ void store4(void* p, u32 a) {
  asm volatile("st.global" STREAM ".u32 [%0], %1;" ::"l"(p), "r"(a) : "memory");
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

// How float32 sums enter a tf32 product: as they are, cut to 10 fraction bits by the hardware; rounded to them; or as the
// sum of two parts, which loses nothing that 16 bits could show.
enum Precision { CUT = 0, NEAREST = 1, SPLIT = 2 };

// f as the tf32 number below it in magnitude (the product cuts f to it by itself), and the rest. An infinity's rest would
// be inf - inf; the minimum replaces that NaN by a number too small to matter (a true rest is at most 2^117), while a NaN
// stays one in f.
__device__ __forceinline__ float rest_tf32(float f) {
  return fminf(f - __uint_as_float(__float_as_uint(f) & 0xFFFFE000u), 0x1p118f);
}

__device__ __forceinline__ float nearest_tf32(float f) {
  u32 r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(f));
  return __uint_as_float(r);
}

// Sylvester's 16 x 16 matrix as an m16n8k16 operand. Each half of a register is the same +-1 in all but the last.
struct Sylvester16 {
  u32 a[4];
};

template <int D>
__device__ __forceinline__ Sylvester16 sylvester16() {
  const u32 lane = threadIdx.x & 31, g = lane >> 2, k = (lane & 3) * 2;
  const u32 one = D == BF16 ? 0x3F80u : 0x3C00u;
  const u32 lo = one | ((__popc(g & k) & 1) << 15), hi = one | ((__popc(g & (k + 1)) & 1) << 15);
  const u32 w = lo | (hi << 16);
  return {w, w, w, w ^ 0x80008000u};
}

// The same matrix with its index bits in the order that leaves data in place (row bits 0 1 2 3 against column bits
// 2 0 1 3), as two m16n8k8 operands.
struct Sylvester8 {
  u32 a[2][4];
};

__device__ __forceinline__ Sylvester8 sylvester8() {
  const u32 lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const u32 p = ((g >> 1) & q & 1) ^ ((g >> 2) & (q >> 1) & 1), minus = 0x80000000u;
  const u32 f0 = 0x3F800000u | (p << 31), f2 = f0 ^ (g << 31);
  return {{{f0, f0, f2, f2},
           {f0, f0 ^ minus, f2, f2 ^ minus}}};
}

__device__ __forceinline__ void mma_tf32(float (&d)[4], const u32 (&a)[4], float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// One 16 x 16 step on float32 data, four values in and out.
template <int P>
__device__ __forceinline__ void step_tf32(float (&d)[4], const Sylvester8& h, float p0, float p1, float r0, float r1) {
  d[0] = d[1] = d[2] = d[3] = 0.f;
  if constexpr (P == SPLIT) {
    mma_tf32(d, h.a[0], rest_tf32(p0), rest_tf32(p1));
    mma_tf32(d, h.a[1], rest_tf32(r0), rest_tf32(r1));
  }
  if constexpr (P == NEAREST) {
    p0 = nearest_tf32(p0), p1 = nearest_tf32(p1), r0 = nearest_tf32(r0), r1 = nearest_tf32(r1);
  }
  mma_tf32(d, h.a[0], p0, p1);
  mma_tf32(d, h.a[1], r0, r1);
}

// --- 256 contiguous elements in a warp ---------------------------------------------------------------------------------
//
// Lane l holds elements 8 l ... 8 l + 7. Element bits e0 e1 e2, lane bits l0 ... l4. The first product transforms
// e0 l0 l1 e1 and leaves them in l2 l3 l4 and a register: d[e2][2 e1 + l2], l3 l4 in the low lane bits. The second
// transforms l3 l4 l2 e2 and puts everything back.

template <int D>
__device__ __forceinline__ void first_product(float (&d)[2][4], const Sylvester16& h, const Vec& v) {
#pragma unroll
  for (int e2 = 0; e2 < 2; e2++) {
    d[e2][0] = d[e2][1] = d[e2][2] = d[e2][3] = 0.f;
    mma16<D>(d[e2], h.a[0], h.a[1], h.a[2], h.a[3], v.w[2 * e2], v.w[2 * e2 + 1]);
  }
}

// The same on float32 data: p[h] holds elements 4 h ... 4 h + 3 of the eight at 8 (l%4) of the 32 at 32 (l/4).
template <int P>
__device__ __forceinline__ void first_product(float (&d)[2][4], const Sylvester8& h, const float4 (&p)[2]) {
  step_tf32<P>(d[0], h, p[0].x, p[0].y, p[0].z, p[0].w);
  step_tf32<P>(d[1], h, p[1].x, p[1].y, p[1].z, p[1].w);
}

template <int P>
__device__ __forceinline__ void second_product(float (&y)[8], const Sylvester8& h, const float (&d)[2][4]) {
#pragma unroll
  for (int e1 = 0; e1 < 2; e1++) {
    float o[4];
    step_tf32<P>(o, h, d[0][2 * e1], d[0][2 * e1 + 1], d[1][2 * e1], d[1][2 * e1 + 1]);
#pragma unroll
    for (int j = 0; j < 4; j++) y[2 * e1 + j % 2 + j / 2 * 4] = o[j];
  }
}

template <int D>
__device__ __forceinline__ Vec pack8(const float* y, float scale) {
  Vec v;
#pragma unroll
  for (int j = 0; j < 4; j++) v.w[j] = pack<D>(y[2 * j] * scale, y[2 * j + 1] * scale);
  return v;
}

// Butterflies within y, at distances 1, 2 ... below LAST.
template <int W, int LAST>
__device__ __forceinline__ void butterflies_within(float (&y)[W]) {
#pragma unroll
  for (int s = 1; s < W && s < LAST; s *= 2) {
#pragma unroll
    for (int j = 0; j < W; j++) {
      if (j & s) continue;
      const float p = y[j], q = y[j + s];
      y[j] = p + q;
      y[j + s] = p - q;
    }
  }
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

// --- Shared memory, bulk copies and barriers ---------------------------------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 bar, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
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

// Stores and loads must agree on how long L2 keeps a line: 0.93 of copy against 0.91 where they do not, and for plain
// loads with L1::no_allocate, which L2 takes as a hint too, 1.00 against 0.95.
__device__ __forceinline__ void bulk_load(u32 to, const void* from, u32 bytes, u32 bar) {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_" KEEP ".b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(bar), "l"(policy)
      : "memory");
}

// A buffer is handed back to the bulk copies. Without the fence an arrival can overtake the reads before it, and the next
// row lands under them (seen: 2 rows in 65536, only while the load queue was full).
__device__ __forceinline__ void release(u32 bar) {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  if ((threadIdx.x & 31) == 0) barrier_arrive(bar);
}

__device__ __forceinline__ void load_matrices_transposed(u32 (&b)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(address));
}

__device__ __forceinline__ Vec load_vec_shared(u32 address) {
  Vec v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "r"(address));
  return v;
}

__device__ __forceinline__ float4 load_shared16(u32 address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address));
  return v;
}

__device__ __forceinline__ void load_shared4(u32 address, float& a) {
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(a) : "r"(address));
}

__device__ __forceinline__ void store_shared4(u32 address, float a) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(a) : "memory");
}

__device__ __forceinline__ void load_shared8(u32 address, float& a, float& b) {
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(a), "=f"(b) : "r"(address));
}

__device__ __forceinline__ void store_shared16(u32 address, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

__device__ __forceinline__ void store_shared8(u32 address, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}

// --- Butterflies across the warps of a block -----------------------------------------------------------------------------
//
// Every warp holds R vectors of E neighbouring floats a lane, a piece of R * 32 * E. They cross through shared memory, after
// which a lane holds the same E * R / WARPS neighbours of every warp's piece, and the warp's number is a register index.

// 16-byte units swap within pairs in every other 128 bytes, so that lanes 32 bytes apart meet different banks.
__device__ __forceinline__ u32 swapped(u32 unit) { return (unit ^ ((unit >> 3) & 1)) * 16; }

template <int R, int E, int WARPS>
__device__ __forceinline__ void across_warps(float (&z)[WARPS][E * R / WARPS], const float (&y)[R][E], u32 sums) {
  constexpr int PART = E * R / WARPS;
  static_assert(PART == 2 || PART == 4 || PART == 8, "a lane must be left with 8 to 32 neighbouring bytes");
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int r = 0; r < R; r++) {
#pragma unroll
    for (int j = 0; j < E; j += 4)
      store_shared16(sums + (warp * R + r) * 128 * E + swapped(lane * (E / 4) + j / 4), y[r][j], y[r][j + 1], y[r][j + 2],
                     y[r][j + 3]);
  }
  __syncthreads();
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    const u32 from = sums + w * R * 128 * E;
    if constexpr (PART == 2) {
      const u32 pair = warp * 32 + lane;
      load_shared8(from + swapped(pair / 2) + pair % 2 * 8, z[w][0], z[w][1]);
    } else {
#pragma unroll
      for (int j = 0; j < PART; j += 4) {
        const float4 f = load_shared16(from + swapped((warp * 32 + lane) * (PART / 4) + j / 4));
        z[w][j] = f.x, z[w][j + 1] = f.y, z[w][j + 2] = f.z, z[w][j + 3] = f.w;
      }
    }
  }
  butterflies<WARPS, PART, 1, WARPS>(z);
}

// PART results of a lane, neighbours in memory, as 16 bits or 32.
template <int D, int PART>
__device__ __forceinline__ void store_part(void* p, const float (&z)[PART], float scale) {
  if constexpr (D == FP32) {
    static_assert(PART % 4 == 0, "whole vectors");
#pragma unroll
    for (int j = 0; j < PART; j += 4) {
      Vec v;
#pragma unroll
      for (int i = 0; i < 4; i++) v.w[i] = __float_as_uint(z[j + i] * scale);
      store16((char*)p + j * 4, v);
    }
  } else if constexpr (PART == 8) {
    store16(p, pack8<D>(z, scale));
  } else if constexpr (PART == 4) {
    store8(p, pack<D>(z[0] * scale, z[1] * scale), pack<D>(z[2] * scale, z[3] * scale));
  } else {
    store4(p, pack<D>(z[0] * scale, z[1] * scale));
  }
}

// --- Rows of 2 ... 128 elements, any dtype: registers and lane exchanges, float32 throughout -----------------------------
//
// R vectors of 16 bytes a lane; a row lies in neighbouring lanes of one vector (N <= 32 * E) or also in R.

template <int D, int N, int R, int WARPS, int SHARE, bool SIGNS>
__device__ __forceinline__ void lanes_kernel(const Args& a) {
  constexpr int E = D == FP32 ? 4 : 8;         // elements of a vector
  constexpr int IN_R = SHARE > 1 ? R : N > 32 * E ? N / (32 * E) : 1;  // vectors of a row in one lane
  static_assert(SHARE == 1 ? IN_R <= R : SHARE == WARPS && N == 32 * E * R * SHARE, "how rows are divided");
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
#pragma unroll
        for (int j = 0; j < E; j++)
          y[r][j] = a.signs[(flat + j) / N % a.sign_rows * N + (flat + j) % N] < 0 ? -y[r][j] : y[r][j];
      }
    }
    butterflies_within<E, N>(y[r]);
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
  if constexpr (SHARE > 1) {
    constexpr int PART = E * R / WARPS;
    extern __shared__ __align__(128) unsigned char shared[];
    float z[WARPS][PART];
    across_warps(z, y, shared_address(shared));
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const int column = w * R * 32 * E + threadIdx.x * PART;
      store_part<D>((char*)a.y + (blockIdx.x * a.y_stride + column) * BYTES, z[w], a.scale);
    }
    return;
  }
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
    if (flat < total) store16((char*)a.y + (flat / N * a.y_stride + flat % N) * BYTES, out);
  }
}

// --- Rows of 32, 64, 128 elements in 16 bits: one exact product, the other bits in registers ----------------------------
//
// A warp's piece is contiguous. The product takes the data as its B operand, which leaves the row's bits e2 and l2 in registers and l3 in a neighbour
// lane. Rounded pairs then go back to their lanes by transposing 8 x 8 matrices of 16-bit words.

__device__ __forceinline__ u32 transpose8(u32 w) {
  u32 r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(w));
  return r;
}

template <int D, int N, int R, int WARPS, bool SIGNS>
__device__ __forceinline__ void turn_kernel(const Args& a) {
  static_assert(N == 32 || N == 64 || N == 128, "rows of one, two or four lane groups");
  const u32 lane = threadIdx.x & 31;
  const i64 unit = (i64)blockIdx.x * WARPS + (threadIdx.x >> 5);
  const i64 first_row = unit * (R * 256 / N) + lane * 8 / N;
  const int column = lane * 8 % N;
  const Sylvester16 h = sylvester16<D>();
  Vec v[R];
#pragma unroll
  for (int r = 0; r < R; r++) {
    const i64 row = first_row + r * (256 / N);
    v[r] = Vec{{0, 0, 0, 0}};
    if (row < a.rows) {
      v[r] = load16((const char*)a.x + (row * a.x_stride + column) * 2);
      if constexpr (SIGNS) apply_signs16(v[r], a.signs + (row % a.sign_rows) * N + column);
    }
  }
#pragma unroll
  for (int r = 0; r < R; r++) {
    float d[2][4];
    first_product<D>(d, h, v[r]);
    butterflies<2, 4, 1, 2>(d);  // e2
#pragma unroll
    for (int e2 = 0; e2 < 2; e2++) {
#pragma unroll
      for (int e1 = 0; e1 < 2; e1++) {
        float p = d[e2][2 * e1], q = d[e2][2 * e1 + 1];
        if constexpr (N >= 64) {  // l2
          const float t = p + q;
          q = p - q;
          p = t;
        }
        if constexpr (N >= 128) {  // l3, in lane bit 0
          const float sign = lane & 1 ? -1.f : 1.f;
          p = fmaf(p, sign, __shfl_xor_sync(0xFFFFFFFFu, p, 1));
          q = fmaf(q, sign, __shfl_xor_sync(0xFFFFFFFFu, q, 1));
        }
        v[r].w[e1 + 2 * e2] = transpose8(pack<D>(p * a.scale, q * a.scale));
      }
    }
    const i64 row = first_row + r * (256 / N);
    if (row < a.rows) store16((char*)a.y + (row * a.y_stride + column) * 2, v[r]);
  }
}

// --- Rows of 256 ... 2048 elements in 16 bits in a warp's registers -----------------------------------------------------

template <int D, int R>
struct WarpTransform {  // 256 elements in each of R vectors; the bits of the vector's number are the caller's
  const Sylvester16 h = sylvester16<D>();
  const Sylvester8 h8 = sylvester8();

  template <int P>
  __device__ __forceinline__ void run(float (&y)[R][8], const Vec (&v)[R]) const {
#pragma unroll
    for (int r = 0; r < R; r++) {
      float d[2][4];
      first_product<D>(d, h, v[r]);
      second_product<P>(y[r], h8, d);
    }
  }
};

template <int D, int N, int R, int WARPS, int P, bool SIGNS>
__device__ __forceinline__ void warp_kernel(const Args& a) {
  constexpr int IN_R = N / 256;
  static_assert(IN_R >= 1 && IN_R <= R, "a row must fit in a lane's vectors");
  const u32 lane = threadIdx.x & 31;
  const i64 first_row = ((i64)blockIdx.x * WARPS + (threadIdx.x >> 5)) * (R / IN_R);
  const WarpTransform<D, R> transform;
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
  transform.template run<P>(y, v);
  butterflies<R, 8, 1, IN_R>(y);
#pragma unroll
  for (int r = 0; r < R; r++) {
    const i64 row = first_row + r / IN_R;
    const int column = r % IN_R * 256 + lane * 8;
    if (row < a.rows) store16((char*)a.y + (row * a.y_stride + column) * 2, pack8<D>(y[r], a.scale));
  }
}

// --- Rows of 1024 ... 32768 elements in 16 bits in a block's registers ----------------------------------------------------

// A warp holds 256 * R neighbours. Without STAGES a block has one row and reads it straight into registers; with them it is
// persistent, and bulk copies bring its next rows to shared memory while it works on this one.
template <int D, int N, int R, int WARPS, int STAGES, int P, bool SIGNS>
__device__ __forceinline__ void share_kernel(const Args& a) {
  static_assert(N == 256 * R * WARPS, "how a row is divided");
  constexpr int PART = 8 * R / WARPS, HEAD = STAGES ? 128 : 0, EMPTY = 64;
  extern __shared__ __align__(128) unsigned char shared[];
  const u32 base = shared_address(shared), inputs = base + HEAD, sums = inputs + STAGES * N * 2;
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;

  auto fetch = [&](i64 row, int stage) {  // by one thread
    barrier_expect(base + stage * 8, N * 2);
    bulk_load(inputs + stage * N * 2, (const char*)a.x + row * a.x_stride * 2, N * 2, base + stage * 8);
  };
  if (STAGES && threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(base + s * 8, 1);
      barrier_init(base + EMPTY + s * 8, WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    for (int s = 0; s < STAGES; s++) {
      const i64 row = blockIdx.x + (i64)s * gridDim.x;
      if (row < a.rows) fetch(row, s);
    }
  }
  const WarpTransform<D, R> transform;
  if constexpr (STAGES > 0) __syncthreads();

  int stage = 0;
  u32 parity = 0;
  for (i64 row = blockIdx.x; row < a.rows; row += gridDim.x) {
    Vec v[R];
    if constexpr (STAGES > 0) barrier_wait(base + stage * 8, parity);
#pragma unroll
    for (int r = 0; r < R; r++) {
      const int column = (warp * R + r) * 256 + lane * 8;
      if constexpr (STAGES > 0) {
        v[r] = load_vec_shared(inputs + stage * N * 2 + column * 2);
      } else {
        v[r] = load16((const char*)a.x + (row * a.x_stride + column) * 2);
      }
      if constexpr (SIGNS) apply_signs16(v[r], a.signs + (row % a.sign_rows) * N + column);
    }
    if constexpr (STAGES > 0) {
      release(base + EMPTY + stage * 8);
      if (threadIdx.x == 0) {
        const i64 next = row + (i64)STAGES * gridDim.x;
        if (next < a.rows) {
          barrier_wait(base + EMPTY + stage * 8, parity);
          fetch(next, stage);
        }
      }
      __syncwarp();
    }
    float y[R][8], z[WARPS][PART];
    transform.template run<P>(y, v);
    butterflies<R, 8, 1, R>(y);
    if constexpr (STAGES > 0) __syncthreads();  // every warp has read the previous row's sums
    across_warps(z, y, sums);
    char* out = (char*)a.y + (row * a.y_stride + threadIdx.x * PART) * 2;
#pragma unroll
    for (int w = 0; w < WARPS; w++) store_part<D>(out + w * R * 512, z[w], a.scale);
    if constexpr (STAGES == 0) return;
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// --- Rows of K * C elements in 16 bits: a row in a thread block, C = 8 * TILES * WARPS a power of two --------------------------
//
// The row is K x C in memory. Bulk copies bring its K pieces to shared memory, 16 bytes apart so that eight of them meet
// different banks, as soon as the previous row has left that buffer. Phase 1: a warp takes TILES groups of eight columns,
// H_K is the constant operand of the products (exact), and the bits of the group's number are butterflies in registers.
// The sums cross in float32. Phase 2: a lane takes PART neighbouring columns of all WARPS column ranges, which leaves only
// butterflies in registers (and one lane exchange where PART is 4).

// Bit k of row(m) is set where H[k][m] is -1; defined by the program for a K that is no power of two.
template <int K>
struct Base {
  __device__ __forceinline__ static u32 row(u32 m) {
    u32 bits = 0;
    for (u32 k = 0; k < K; k++) bits |= (__popc(m & k) & 1) << k;
    return bits;
  }
};

template <int D, int K>
struct BaseOperand {  // H_K^T, K <= 32, padded to multiples of 16 (padded columns meet zeros, padded rows are dropped)
  static constexpr int STEPS = (K + 15) / 16;
  u32 a[STEPS][STEPS][4];

  __device__ __forceinline__ BaseOperand() {
    const u32 lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    const u32 one = D == BF16 ? 0x3F80u : 0x3C00u;
#pragma unroll
    for (int i = 0; i < STEPS; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const u32 row = Base<K>::row(16 * i + g + 8 * half);
#pragma unroll
        for (int j = 0; j < 2 * STEPS; j++) {
          const u32 bits = row >> (2 * q + 8 * j);
          a[i][j / 2][half + 2 * (j % 2)] = (one | ((bits & 1) << 15)) | ((one | ((bits & 2) << 14)) << 16);
        }
      }
  }
};

template <int K, int C, int STAGES>
struct BlockLayout {
  static constexpr int N = K * C;
  static constexpr int IN_ROW = C * 2 + 16;    // bytes of one of the K pieces of the input
  static constexpr int IN = (K * IN_ROW + 127) / 128 * 128;
  static constexpr int OUT_ROW = C * 4 + 32;   // and of the float32 sums
  static constexpr int HEAD = 128;             // barriers, then 16 bytes of zeros that stand for rows past K
  static constexpr int EMPTY = 32, ZEROS = 64;
};

template <int D, int K, int TILES, int WARPS, int PART, int STAGES, bool SIGNS>
__device__ __forceinline__ void block_kernel(const Args& a) {
  constexpr int C = 8 * TILES * WARPS;
  constexpr int STEPS = (K + 15) / 16;
  using L = BlockLayout<K, C, STAGES>;
  static_assert(K <= 32 && TILES % 2 == 0 && (PART == 4 || PART == 8), "sizes this kernel is made for");
  extern __shared__ __align__(128) unsigned char shared[];
  const u32 base = shared_address(shared);
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = lane & 3;
  const u32 inputs = base + L::HEAD, sums = inputs + STAGES * L::IN;

  auto fetch = [&](i64 row, int stage) {  // by one whole warp
    const u32 bar = base + stage * 8;
    if (lane == 0) barrier_expect(bar, L::N * 2);
    __syncwarp();
    if (K <= 32 && lane < K) {
      bulk_load(inputs + stage * L::IN + lane * L::IN_ROW, (const char*)a.x + (row * a.x_stride + lane * C) * 2, C * 2,
                bar);
    }
  };

  if (warp == 0) {
    if (lane < STAGES) {
      barrier_init(base + lane * 8, 1);
      barrier_init(base + L::EMPTY + lane * 8, WARPS);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    for (int s = 0; s < STAGES; s++) {
      const i64 row = blockIdx.x + (i64)s * gridDim.x;
      if (row < a.rows) fetch(row, s);
    }
  }
  if (threadIdx.x < 4) reinterpret_cast<u32*>(shared + L::ZEROS)[threadIdx.x] = 0;
  const BaseOperand<D, K> h;
  __syncthreads();

  // Each lane names one of 32 matrix rows of 16 bytes: row k of two column groups where K <= 16, else of one. Rows past K
  // are the zeros.
  const u32 k_lane = STEPS == 1 ? (lane & 15) : lane;
  const bool real = k_lane < K;
  const u32 from_lane = real ? k_lane * L::IN_ROW + warp * TILES * 16 + (STEPS == 1 ? lane >> 4 : 0) * 16 : 0;
  const u32 from_step = real ? 16 : 0;
  const u32 to = sums + g * L::OUT_ROW + warp * TILES * 32 + (q & 1) * 8, unit_lane = (q >> 1) * 16;

  int stage = 0;
  u32 parity = 0;
  for (i64 row = blockIdx.x; row < a.rows; row += gridDim.x) {
    barrier_wait(base + stage * 8, parity);
    const u32 input = inputs + stage * L::IN;
    if constexpr (SIGNS) {
      const signed char* signs = a.signs + (row % a.sign_rows) * L::N;
      for (int i = threadIdx.x; i < L::N / 8; i += WARPS * 32) {
        Vec* p = reinterpret_cast<Vec*>(shared + L::HEAD + stage * L::IN + i / (C / 8) * L::IN_ROW + i % (C / 8) * 16);
        Vec v = *p;
        apply_signs16(v, signs + i * 8);
        *p = v;
      }
      // The next bulk copy into this buffer is the other proxy's, and must come after these stores.
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncthreads();
    }

    float d[TILES][STEPS * 4];
    const u32 from = real ? input + from_lane : base + L::ZEROS;
#pragma unroll
    for (int t = 0; t < TILES; t += 3 - STEPS) {
      u32 f[4];
      load_matrices_transposed(f, from + t * from_step);
#pragma unroll
      for (int u = 0; u < 3 - STEPS; u++) {
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
          float o[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
          for (int j = 0; j < STEPS; j++)
            mma16<D>(o, h.a[i][j][0], h.a[i][j][1], h.a[i][j][2], h.a[i][j][3], f[2 * (j + u)], f[2 * (j + u) + 1]);
#pragma unroll
          for (int j = 0; j < 4; j++) d[t + u][4 * i + j] = o[j];
        }
      }
    }
    release(base + L::EMPTY + stage * 8);
    if (warp == 0) {
      const i64 next = row + (i64)STAGES * gridDim.x;
      if (next < a.rows) {
        barrier_wait(base + L::EMPTY + stage * 8, parity);
        fetch(next, stage);
      }
    }
    butterflies<TILES, STEPS * 4, 1, TILES>(d);
    __syncthreads();  // every warp has read the previous row's sums
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      // 16-byte units swap within pairs in every other 128 bytes, so that phase 2's reads meet all banks.
      const u32 unit = t * 32 + (unit_lane ^ (t & 4 ? 16 : 0));
#pragma unroll
      for (int i = 0; i < 2 * STEPS; i++) {
        if (i * 8 + 8 <= K || i * 8 + g < K)
          store_shared8(to + unit + i * 8 * L::OUT_ROW, d[t][2 * i], d[t][2 * i + 1]);
      }
    }
    __syncthreads();

    constexpr int LANES_A_ROW = TILES * 8 / PART;
    char* out = (char*)a.y + row * a.y_stride * 2;
#pragma unroll 1
    for (int first = warp * 32; first < K * LANES_A_ROW; first += WARPS * 32) {
      const u32 item = first + lane, k = item / LANES_A_ROW, part = item % LANES_A_ROW, tile = part * PART / 8;
      const bool mine = K * LANES_A_ROW % 32 == 0 || k < K;
      const u32 swap = tile & 4 ? 16 : 0;
      const u32 at = sums + (mine ? k : 0) * L::OUT_ROW + (PART == 8 ? part * 32 + swap : (part * 16) ^ swap);
      float y[WARPS][PART];
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
#pragma unroll
        for (int j = 0; j < PART; j += 4) {
          const float4 v = load_shared16(PART == 8 && j ? (at + w * TILES * 32) ^ 16 : at + w * TILES * 32);
          y[w][j] = v.x, y[w][j + 1] = v.y, y[w][j + 2] = v.z, y[w][j + 3] = v.w;
        }
        butterflies_within<PART, PART>(y[w]);
      }
      butterflies<WARPS, PART, 1, WARPS>(y);
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        char* p = out + (k * C + w * TILES * 8 + part * PART) * 2;
        if constexpr (PART == 8) {
          if (mine) store16(p, pack8<D>(y[w], a.scale));
        } else {
          const float sign = lane & 1 ? -1.f : 1.f;
#pragma unroll
          for (int j = 0; j < 4; j++)
            y[w][j] = fmaf(y[w][j], sign, __shfl_xor_sync(0xFFFFFFFFu, y[w][j], 1)) * a.scale;
          if (mine) store8(p, pack<D>(y[w][0], y[w][1]), pack<D>(y[w][2], y[w][3]));
        }
      }
    }
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// --- Rows of K * INNER * C elements in 16 bits with a dense base K: a row in a thread block -------------------------------------
//
// Signs of the K x K base come as bits, two instructions a register of the operand, used for WN column groups. A warp keeps
// all its sums, so that they can take the input's place in shared memory. INNER is the product of smaller bases, done
// there by additions; the power of two C is done in registers and lane exchanges on the way out.

// signs(i, j, lane): of the product of rows 16 i and columns 64 j, bit 4 s + r for step s and register r, and 16 above it.
template <int K>
struct DenseBase;

// A base of INNER, as an addition chain over v[B] with constant signs.
template <int B>
struct SmallBase;

template <int K, int COLUMNS, int WARPS>
__device__ __forceinline__ void inner_bases(u32 data);

// Base B of the columns (hi, B, STRIDE), in place.
template <int B, int STRIDE, int K, int COLUMNS, int WARPS>
__device__ __forceinline__ void small_base(u32 data) {
  constexpr int OUT_ROW = COLUMNS * 4 + 32;
  for (int item = threadIdx.x; item < K * COLUMNS / B; item += WARPS * 32) {
    const int k = item / (COLUMNS / B), rest = item % (COLUMNS / B);
    const u32 row = data + k * OUT_ROW, first = rest / STRIDE * STRIDE * B + rest % STRIDE;
    float v[B], o[B];
#pragma unroll
    for (int i = 0; i < B; i++) load_shared4(row + swapped((first + i * STRIDE) / 4) + (first + i * STRIDE) % 4 * 4, v[i]);
    SmallBase<B>::run(o, v);
#pragma unroll
    for (int i = 0; i < B; i++) store_shared4(row + swapped((first + i * STRIDE) / 4) + (first + i * STRIDE) % 4 * 4, o[i]);
  }
  __syncthreads();
}

template <int D, int K, int INNER, int C, int WARPS, int WM, int WN, bool SIGNS>
__device__ __forceinline__ void dense_kernel(const Args& a) {
  constexpr int COLUMNS = INNER * C, STEPS = (K + 15) / 16, WORDS = (STEPS + 3) / 4;
  constexpr int IN_ROW = COLUMNS * 2 + 16, OUT_ROW = COLUMNS * 4 + 32, HEAD = 128, ZEROS = 64;
  constexpr int ACROSS = COLUMNS / 8 / WN, DOWN = (STEPS + WM - 1) / WM, TASKS = (ACROSS * DOWN + WARPS - 1) / WARPS;
  static_assert(COLUMNS % (8 * WN) == 0 && WN % 2 == 0, "whole tasks");
  extern __shared__ __align__(128) unsigned char shared[];
  const u32 base = shared_address(shared), data = base + HEAD;
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = lane & 3;
  const i64 row = blockIdx.x;

  if (threadIdx.x == 0) {
    barrier_init(base, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    barrier_expect(base, K * COLUMNS * 2);
  }
  if (threadIdx.x < 4) reinterpret_cast<u32*>(shared + ZEROS)[threadIdx.x] = 0;
  __syncthreads();
  for (int k = threadIdx.x; k < K; k += WARPS * 32)
    bulk_load(data + k * IN_ROW, (const char*)a.x + (row * a.x_stride + k * COLUMNS) * 2, COLUMNS * 2, base);
  barrier_wait(base, 0);
  if constexpr (SIGNS) {
    const signed char* signs = a.signs + (row % a.sign_rows) * K * COLUMNS;
    for (int i = threadIdx.x; i < K * COLUMNS / 8; i += WARPS * 32) {
      Vec* p = reinterpret_cast<Vec*>(shared + HEAD + i / (COLUMNS / 8) * IN_ROW + i % (COLUMNS / 8) * 16);
      Vec v = *p;
      apply_signs16(v, signs + i * 8);
      *p = v;
    }
    __syncthreads();
  }

  const u32 one = D == BF16 ? 0x3F803F80u : 0x3C003C00u;
  float d[TASKS][WM][WN][4];
#pragma unroll
  for (int task = 0; task < TASKS; task++) {
    const int id = warp + task * WARPS, across = id % ACROSS, down = id / ACROSS;
#pragma unroll
    for (int i = 0; i < WM; i++)
#pragma unroll
      for (int n = 0; n < WN; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) d[task][i][n][j] = 0.f;
    if (down >= DOWN) continue;
#pragma unroll 1
    for (int word = 0; word < WORDS; word++) {
      u32 bits[WM];
#pragma unroll
      for (int i = 0; i < WM; i++) bits[i] = DenseBase<K>::signs(min(down * WM + i, STEPS - 1), word, lane);
#pragma unroll
      for (int s = 0; s < 4; s++) {
        if (word * 4 + s >= STEPS) break;
        const u32 k = (word * 4 + s) * 16 + (lane & 15);
        const u32 from = k < K ? data + k * IN_ROW + (across * WN + (lane >> 4)) * 16 : base + ZEROS;
        u32 f[WN / 2][4];
#pragma unroll
        for (int n = 0; n < WN / 2; n++) load_matrices_transposed(f[n], k < K ? from + n * 32 : from);
#pragma unroll
        for (int i = 0; i < WM; i++) {
          u32 h[4];
#pragma unroll
          for (int r = 0; r < 4; r++) h[r] = ((bits[i] << (15 - 4 * s - r)) & 0x80008000u) | one;
#pragma unroll
          for (int n = 0; n < WN; n++)
            mma16<D>(d[task][i][n], h[0], h[1], h[2], h[3], f[n / 2][n % 2 * 2], f[n / 2][n % 2 * 2 + 1]);
        }
      }
    }
  }
  __syncthreads();
#pragma unroll
  for (int task = 0; task < TASKS; task++) {
    const int id = warp + task * WARPS, across = id % ACROSS, down = id / ACROSS;
#pragma unroll
    for (int i = 0; i < WM; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int m = (down * WM + i) * 16 + half * 8 + g;
        if (m >= K) continue;
#pragma unroll
        for (int n = 0; n < WN; n++) {
          const u32 unit = 2 * (across * WN + n) + (q >> 1);
          store_shared8(data + m * OUT_ROW + swapped(unit) + (q & 1) * 8, d[task][i][n][2 * half], d[task][i][n][2 * half + 1]);
        }
      }
  }
  __syncthreads();
  inner_bases<K, COLUMNS, WARPS>(data);  // defined by the program: small_base of each base of INNER

  char* out = (char*)a.y + row * a.y_stride * 2;
  for (int first = warp * 32; first < K * COLUMNS / 8; first += WARPS * 32) {
    const int item = first + lane, k = item / (COLUMNS / 8), part = item % (COLUMNS / 8);
    const bool mine = item < K * COLUMNS / 8;
    const u32 at = data + (mine ? k : 0) * OUT_ROW + swapped(2 * part);
    const float4 u = load_shared16(at), v = load_shared16(at ^ 16);
    float y[1][8] = {{u.x, u.y, u.z, u.w, v.x, v.y, v.z, v.w}};
    butterflies_within<8, C>(y[0]);
#pragma unroll
    for (int s = 1; s * 8 < C; s *= 2) {
      const float sign = lane & s ? -1.f : 1.f;
#pragma unroll
      for (int j = 0; j < 8; j++) y[0][j] = fmaf(y[0][j], sign, __shfl_xor_sync(0xFFFFFFFFu, y[0][j], s));
    }
    if (mine) store16(out + item * 16, pack8<D>(y[0], a.scale));
  }
}

// --- Any base, one axis of a tensor, by additions: the fallback of sizes and dtypes without a kernel of their own --------------

template <int D>
__device__ __forceinline__ float load_one(const void* p, i64 i) {
  if constexpr (D == FP32) {
    return static_cast<const float*>(p)[i];
  } else {
    float lo, hi;
    unpack<D>(static_cast<const unsigned short*>(p)[i], lo, hi);
    return lo;
  }
}

// x [rows, K, x_stride] -> y, one thread a column; Axis<K>::signs(k, w) has bit m where H[k][32 w + m] is -1. x is not y.
template <int K>
struct Axis;

template <int IN, int OUT, int K>
__device__ __forceinline__ void axis_kernel(const Args& a) {
  const i64 column = (i64)blockIdx.x * 256 + threadIdx.x, inner = a.x_stride;
  if (column >= a.rows * inner) return;
  const i64 first = column / inner * inner * K + column % inner;
  for (int m = 0; m < K; m += 16) {
    float sum[16];
#pragma unroll
    for (int j = 0; j < 16; j++) sum[j] = 0.f;
    for (int k = 0; k < K; k++) {
      const u32 v = __float_as_uint(load_one<IN>(a.x, first + k * inner)), bits = Axis<K>::signs(k, m / 32) >> (m & 16);
#pragma unroll
      for (int j = 0; j < 16; j++) sum[j] += __uint_as_float(v ^ (bits << (31 - j) & 0x80000000u));
    }
#pragma unroll
    for (int j = 0; j < 16; j++) {
      if (m + j >= K) break;
      const i64 to = first + (m + j) * inner;
      if constexpr (OUT == FP32) {
        static_cast<float*>(a.y)[to] = sum[j] * a.scale;
      } else {
        static_cast<unsigned short*>(a.y)[to] = (unsigned short)pack<OUT>(sum[j] * a.scale, 0.f);
      }
    }
  }
}

}  // namespace quantrot
