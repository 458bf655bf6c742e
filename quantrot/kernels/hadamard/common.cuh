// The Hadamard transform for sm_90a as device functions, compiled at first use by NVRTC and callable from fused kernels.
//
// A row index is split into bits, and each bit is transformed where it already is:
//
//   registers   a bit held in a lane's registers is one butterfly addition an element, in float32.
//   lanes       four bits spread over a warp are one tensor core product with a 16 x 16 Hadamard matrix, whose operand
//               is built from the lane number, never loaded. With the data as the B operand the product also exchanges
//               lane/4 with lane%4, so two products transform the eight bits of 256 contiguous elements and leave each
//               lane with the eight neighbours it loaded: no shuffle, no shared memory.
//   warps       bits spread over warps cross once through shared memory, in float32.
//   a base      of K rows is a product that reads the 16-bit input from shared memory.
//
// The first product takes the 16-bit input as it is, so it is exact; a later one takes float32 sums split into two tf32
// parts, which keeps 22 bits. The only rounding to 16 bits is the last.

namespace quantrot {

#ifdef QUANTROT_EMULATED
#include "hadamard.h"
#else
// The warp's number, in a way that lets the compiler see that it is the same in all lanes (a lane exchange inside a
// loop over it otherwise costs two more instructions).
__device__ __forceinline__ u32 warp_number() { return __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 5, 0); }

// Launched as a programmatic dependent, a kernel starts while the one before it still runs, and does nothing before this.
// The next kernel may start from here on, not before: its blocks would take the places of this one's, and wait.
__device__ __forceinline__ void grid_wait() {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
}

// The ROWS rows of a thread block come to L2, or do not: nothing depends on it, so it may be asked for before grid_wait.
template <int BYTES, int ROWS>
__device__ __forceinline__ void warm_rows(const void* x, i64 rows, i64 pitch, i64 block) {
  const i64 row = block * ROWS + threadIdx.x;
  if (threadIdx.x < ROWS && row < rows)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"((const char*)x + row * pitch), "r"(BYTES) : "memory");
}

// grid_wait, in which the rows of the first WAVE blocks come to L2, and then, but where the kernel itself asks for them later,
// those of the block WAVE further on: blocks that start together load together and compute together, while memory has nothing
// to do (14336 in two blocks of eight warps on a multiprocessor: 0.82 of a copy's speed, 0.92 with this).
template <int BYTES, int ROWS, int WAVE, bool NOW>
__device__ __forceinline__ void grid_wait_ahead(const void* x, i64 rows, i64 pitch) {
  if (blockIdx.x < WAVE) warm_rows<BYTES, ROWS>(x, rows, pitch, blockIdx.x);
  grid_wait();
  if constexpr (NOW) warm_rows<BYTES, ROWS>(x, rows, pitch, (i64)blockIdx.x + WAVE);
}

// --- Tensor core products with constant Hadamard operands ------------------------------------------------------------

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

__device__ __forceinline__ void mma_tf32(float (&d)[4], const u32 (&a)[4], float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
#endif

// Parity of (lane / 4) & 2 (lane % 4), and of the same with the next column: the signs of Sylvester's matrix that a
// lane holds.
__device__ __forceinline__ void lane_signs(u32& even, u32& odd) {
  const u32 lane = threadIdx.x & 31, g = lane >> 2;
  even = ((g >> 1 & lane) ^ (g >> 2 & lane >> 1)) & 1;
  odd = even ^ (g & 1);
}

// Sylvester's 16 x 16 matrix as an m16n8k16 operand. Each half of a register is the same +-1 in all but the last.
struct Sylvester16 {
  u32 a[4];
};

template <int D>
__device__ __forceinline__ Sylvester16 sylvester16() {
  u32 even, odd;
  lane_signs(even, odd);
  const u32 w = (D == BF16 ? 0x3F803F80u : 0x3C003C00u) | even << 15 | odd << 31;
  return {w, w, w, w ^ 0x80008000u};
}

// The same matrix with its index bits in the order that leaves data in place (row bits 0 1 2 3 against column bits
// 2 0 1 3), as two m16n8k8 operands.
struct Sylvester8 {
  u32 a[2][4];
};

__device__ __forceinline__ Sylvester8 sylvester8() {
  u32 even, odd;
  lane_signs(even, odd);
  const u32 f0 = 0x3F800000u | even << 31, f2 = 0x3F800000u | odd << 31, minus = 0x80000000u;
  return {{{f0, f0, f2, f2}, {f0, f0 ^ minus, f2, f2 ^ minus}}};
}

// One 16 x 16 step on float32 data, four values in and out.
template <int P>
__device__ __forceinline__ void step_tf32(float (&d)[4], const Sylvester8& h, float p0, float p1, float r0, float r1) {
  d[0] = d[1] = d[2] = d[3] = 0.f;
  if constexpr (P == SPLIT) {
    mma_tf32(d, h.a[0], rest_tf32(p0), rest_tf32(p1));
    mma_tf32(d, h.a[1], rest_tf32(r0), rest_tf32(r1));
  }
  mma_tf32(d, h.a[0], p0, p1);
  mma_tf32(d, h.a[1], r0, r1);
}

// --- 256 contiguous elements in a warp -------------------------------------------------------------------------------
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

// The same on two bfloat16 parts (PAIR), by sylvester16<BF16>.
__device__ __forceinline__ void second_product(float (&y)[8], const Sylvester16& h, u32 minus, const float (&d)[2][4]) {
  Parts v[2];
#pragma unroll
  for (int e2 = 0; e2 < 2; e2++) v[e2] = parts_of(d[e2][0], d[e2][1], d[e2][2], d[e2][3], minus);
#pragma unroll
  for (int e1 = 0; e1 < 2; e1++) {
    float o[4] = {0.f, 0.f, 0.f, 0.f};
    mma16<BF16>(o, h.a[0], h.a[1], h.a[2], h.a[3], v[0].low[e1], v[1].low[e1]);
    mma16<BF16>(o, h.a[0], h.a[1], h.a[2], h.a[3], v[0].high[e1], v[1].high[e1]);
#pragma unroll
    for (int j = 0; j < 4; j++) y[2 * e1 + j % 2 + j / 2 * 4] = o[j];
  }
}

template <int D>
__device__ __forceinline__ Vec pack8(const float* y) {
  Vec v;
#pragma unroll
  for (int j = 0; j < 4; j++) v.w[j] = pack<D>(y[2 * j], y[2 * j + 1]);
  return v;
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

// The last level of butterflies over r, with the scale: a product and two fused additions for two additions and two
// products.
template <int R, int W>
__device__ __forceinline__ void last_butterfly(float (&y)[R][W], float scale) {
#pragma unroll
  for (int r = 0; r < R / 2; r++) {
#pragma unroll
    for (int j = 0; j < W; j++) {
      const float a = y[r][j] * scale, b = y[r + R / 2][j];
      y[r][j] = fmaf(b, scale, a);
      y[r + R / 2][j] = fmaf(-b, scale, a);
    }
  }
}

// --- Shared memory, bulk copies and barriers -------------------------------------------------------------------------

#ifndef QUANTROT_EMULATED
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ u32 shared_memory() {
  extern __shared__ __align__(128) unsigned char shared[];
  return shared_address(shared);
}

__device__ __forceinline__ void barrier_init(u32 bar, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
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
  if constexpr (KEEP[0] == 'n') {  // as any other line: no policy has to be made
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar)
                 : "memory");
  } else {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_" KEEP ".b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(to), "l"(from), "r"(bytes), "r"(bar), "l"(policy)
        : "memory");
  }
}

// All threads of the block have read their input: the bulk copies may have its buffer. Without the fence the next row can
// land under reads that are still queued (seen: 2 rows in 65536, only while the load queue was full). A barrier of the
// block rather than an arrival of one lane for its warp, because the block has to meet anyway before its sums' place is
// written again, and because the assembler drops a __syncwarp where the warp has not diverged, so that racecheck sees 31
// of 32 readers never arrive.
__device__ __forceinline__ void release_input() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
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

#endif

// --- Butterflies across the warps of a block -------------------------------------------------------------------------
//
// Every warp holds R vectors of E neighbouring floats a lane, a piece of R * 32 * E. They cross through shared
// memory, after which a lane holds the same E * R / WARPS columns of every warp's piece, and the warp's number is
// a register index: of 16-bit rows neighbours, of float32 rows one or two vectors of four, so that the lanes of a warp
// store whole lines at a time.

// 16-byte units swap within pairs in every other 128 bytes, so that lanes 32 bytes apart meet different banks.
__device__ __forceinline__ u32 swapped(u32 unit) { return (unit ^ ((unit >> 3) & 1)) * 16; }

template <int R, int E, int WARPS>
__device__ __forceinline__ void across_warps(float (&z)[WARPS][E * R / WARPS], const float (&y)[R][E], u32 sums,
                                             float scale) {
  constexpr int PART = E * R / WARPS;
  static_assert(PART == 2 || PART == 4 || PART == 8, "a lane must be left with 8 to 32 neighbouring bytes");
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int r = 0; r < R; r++) {
#pragma unroll
    for (int j = 0; j < E; j += 4)
      store_shared16(sums + (warp * R + r) * 128 * E + swapped(lane * (E / 4) + j / 4), y[r][j], y[r][j + 1],
                     y[r][j + 2],
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
        const u32 unit = E == 4 ? j / 4 * 32 * WARPS + threadIdx.x : threadIdx.x * (PART / 4) + j / 4;
        const float4 f = load_shared16(from + swapped(unit));
        z[w][j] = f.x, z[w][j + 1] = f.y, z[w][j + 2] = f.z, z[w][j + 3] = f.w;
      }
    }
  }
  butterflies<WARPS, PART, 1, WARPS / 2>(z);
  last_butterfly(z, scale);
}

// PART results of a lane: neighbours as 16 bits, or as 32 bits vectors of four that lie APART bytes apart.
template <int D, int APART = 16, int PART>
__device__ __forceinline__ void store_part(void* p, const float (&z)[PART]) {
  if constexpr (D == FP32) {
    static_assert(PART % 4 == 0, "whole vectors");
#pragma unroll
    for (int j = 0; j < PART; j += 4) {
      Vec v;
#pragma unroll
      for (int i = 0; i < 4; i++) v.w[i] = __float_as_uint(z[j + i]);
      store16((char*)p + j / 4 * APART, v);
    }
  } else if constexpr (PART == 8) {
    store16(p, pack8<D>(z));
  } else if constexpr (PART == 4) {
    store8(p, pack<D>(z[0], z[1]), pack<D>(z[2], z[3]));
  } else {
    store4(p, pack<D>(z[0], z[1]));
  }
}

}  // namespace quantrot
