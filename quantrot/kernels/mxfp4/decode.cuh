// A few tokens by a packed MXFP4 weight, on Hopper: y[token, row] = sum over k of x[token, k] * w[row, k].
//
// The weight is the first operand of mma.m16n8k16, the tokens the second. A warp owns 16 rows; a lane (g, q) loads whole
// groups: the 16 bytes that are 32 columns of row g, and of row g + 8. Four neighbouring lanes read 64 bytes of a row.
// Which of its codes a lane puts in which slot of the product is free, as long as the tokens agree: a pair is the codes
// p and p + 4 of a 32-bit word, whose bits then move by the same shift in both halves. Several tokens are laid down in
// that order by a kernel before (arrange), so that a lane finds its part of two products in 16 bytes beside its
// neighbours'; the weight's first loads are on their way meanwhile.
//
// A code becomes bfloat16 by its bits: sign to bit 15, the three others to bits 8 ... 6, which is the value times 2^-126
// (e2m1's subnormal is bfloat16's). One integer product moves both: the two copies of a code that it adds do not touch,
// and what is not wanted of them is masked. One packed product by 2^(e + 62) makes it the value times 2^(e - 64), exactly; the
// sums are multiplied by 2^64 at the end. A group's scale past 2^65 acts as infinity, a value below 2^-62 as zero.
//
// Sums: the tensor core's in float32 along a warp's steps, then the warps' and the slices' in their order.

namespace quantrot {

struct DecodeArgs {
  const void* x;               // bfloat16 [tokens, columns], or what arrange made of it
  const unsigned char* packed; // [rows, columns / 2]
  const unsigned char* scale;  // [rows, columns / 32]
  const float* token_scale;    // [tokens], or null
  void* y;                     // OUT [tokens, rows]; float32 [slices, tokens, rows] where there are several
  int tokens, rows, columns, slice_steps;  // a step is 128 columns
};

struct Words {
  u32 x, y, z, w;
};

#ifdef QUANTROT_EMULATED
#include "mma.h"
#else
__device__ __forceinline__ Words load_once(const void* p) {
  Words v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ Words load_words(const void* p) {
  Words v;
  asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ u32 times_bf16(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ float* partial_sums() {
  extern __shared__ __align__(1024) unsigned char quantrot_shared[];
  return (float*)quantrot_shared;
}
#endif

// Codes P and P + 4 of a word (P: 0, 1), as bfloat16 times 2^-126.
template <int P>
__device__ __forceinline__ u32 pair(u32 word) {
  const u32 codes = word & (0x000F000Fu << 4 * P);
  return codes * ((64u + 4096u) >> 4 * P) & 0x81C081C0u;
}

// 2^(e + 62) of a scale byte, twice.
__device__ __forceinline__ u32 multiplier(u32 byte) { return (min(byte, 193u) + 62) * 0x00800080u; }

// One step of a lane: the groups of rows g and g + 8.
struct Step {
  Words a, b;
  u32 a_scale, b_scale;
};

struct Rows {  // where a lane reads
  const unsigned char *a, *b, *a_scale, *b_scale;

  __device__ __forceinline__ Step at(int step) const {
    return {load_once(a + step * 64), load_once(b + step * 64), __ldg(a_scale + step * 4), __ldg(b_scale + step * 4)};
  }
};

// What a lane multiplies by word j of its group: of each half of 8 columns, k and k + 4 for k = 0, 1, 2, 3.
__device__ __forceinline__ Words arranged(const Words& v) {
  return {__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
          __byte_perm(v.y, v.w, 0x7632)};
}

// Tokens bfloat16 [tokens, columns] as [step][tile][word][lane] of 16 bytes; zeros where there is no token or column.
template <int TILES>
__device__ __forceinline__ void arrange(const void* x, void* y, int tokens, int columns) {
  launch_dependents();
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  const int lane = at % 32, word = at / 32 % 4, tile = at / 128 % TILES, step = at / (128 * TILES);
  const int token = tile * 8 + lane / 4, column = step * 128 + lane % 4 * 32 + word * 8;
  if (step * 128 >= columns) return;
  Words v = {};
  if (token < tokens && column < columns) v = load_words((const char*)x + ((u64)token * columns + column) * 2);
  ((Words*)y)[at] = arranged(v);
}

// Where a lane finds the tokens: the token of each tile, in the lane's quarter of a step; arranged, the lane's place in
// the first step. inside: whether the lane's group exists.
template <int TILES, bool ARRANGED>
struct Tokens {
  const unsigned char* at[TILES];

  __device__ __forceinline__ Tokens(const DecodeArgs& args, u32 lane) {
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      const int token = min((int)(lane >> 2) + 8 * t, args.tokens - 1);
      at[t] = (const unsigned char*)args.x + (u64)token * args.columns * 2 + (lane & 3) * 64;
    }
  }
  __device__ __forceinline__ Words operator()(int step, int t, int j, bool inside) const {
    Words v = {};
    if (inside) v = load_words(at[t] + step * 256 + j * 16);
    return arranged(v);
  }
};

template <int TILES>
struct Tokens<TILES, true> {
  const unsigned char* at;

  __device__ __forceinline__ Tokens(const DecodeArgs& args, u32 lane)
      : at((const unsigned char*)args.x + lane * 16) {}
  __device__ __forceinline__ Words operator()(int step, int t, int j, bool) const {
    return load_words(at + (i64)step * (TILES * 2048) + (t * 2048 + j * 512));
  }
};

// Add one step to the sums; inside: whether the lane's group exists.
template <int TILES, bool ARRANGED>
__device__ __forceinline__ void add(float (&sums)[TILES][4], const Step& s, const Tokens<TILES, ARRANGED>& x, int step,
                                    bool inside) {
  const u32 a_factor = multiplier(s.a_scale), b_factor = multiplier(s.b_scale);
  const u32 a_words[4] = {s.a.x, s.a.y, s.a.z, s.a.w}, b_words[4] = {s.b.x, s.b.y, s.b.z, s.b.w};
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const u32 a = a_words[j], b = b_words[j], a_high = a >> 8, b_high = b >> 8;
    const u32 a0 = times_bf16(pair<0>(a), a_factor), a1 = times_bf16(pair<1>(a), a_factor);
    const u32 a2 = times_bf16(pair<0>(a_high), a_factor), a3 = times_bf16(pair<1>(a_high), a_factor);
    const u32 b0 = times_bf16(pair<0>(b), b_factor), b1 = times_bf16(pair<1>(b), b_factor);
    const u32 b2 = times_bf16(pair<0>(b_high), b_factor), b3 = times_bf16(pair<1>(b_high), b_factor);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      const Words v = x(step, t, j, inside);
      multiply(sums[t], a0, b0, a1, b1, v.x, v.y);
      multiply(sums[t], a2, b2, a3, b3, v.z, v.w);
    }
  }
}

// TILES of eight tokens; ROW_WARPS * SLICE_WARPS warps; DEPTH steps of a warp on their way. Rows and tokens that do not
// exist read the last one that does: their results are not stored.
template <int TILES, int ROW_WARPS, int SLICE_WARPS, int DEPTH, bool ARRANGED, class OUT>
__device__ __forceinline__ void decode(const DecodeArgs& args) {
  const u32 lane = lane_number(), warp = warp_number(), g = lane >> 2, q = lane & 3;
  const int row_warp = warp % ROW_WARPS, slice_warp = warp / ROW_WARPS, groups = args.columns / 32;
  const int first_row = (blockIdx.x * ROW_WARPS + row_warp) * 16;
  const int row_a = min(first_row + (int)g, args.rows - 1), row_b = min(first_row + (int)g + 8, args.rows - 1);
  const Rows rows = {args.packed + ((u64)row_a * groups + q) * 16, args.packed + ((u64)row_b * groups + q) * 16,
                     args.scale + (u64)row_a * groups + q, args.scale + (u64)row_b * groups + q};
  const Tokens<TILES, ARRANGED> x(args, lane);
  const int begin = blockIdx.y * args.slice_steps + slice_warp;
  const int end = min(((int)blockIdx.y + 1) * args.slice_steps, groups / 4);  // of whole steps
  float sums[TILES][4] = {};

  Step ring[DEPTH];
#pragma unroll
  for (int d = 0; d < DEPTH; d++)
    if (begin + d * SLICE_WARPS < end) ring[d] = rows.at(begin + d * SLICE_WARPS);
  if constexpr (ARRANGED) grid_wait();  // the weight was there before the kernel that arranges the tokens began
  for (int first = begin; first < end; first += DEPTH * SLICE_WARPS) {
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
      const int step = first + d * SLICE_WARPS;
      if (step >= end) break;
      add(sums, ring[d], x, step, true);
      if (step + DEPTH * SLICE_WARPS < end) ring[d] = rows.at(step + DEPTH * SLICE_WARPS);
    }
  }
  const int rest = groups / 4;  // the step that is not whole
  if (groups % 4 && rest / args.slice_steps == (int)blockIdx.y && rest % SLICE_WARPS == slice_warp) {
    const bool inside = (int)q < groups % 4;
    Step s = {};
    if (inside) s = rows.at(rest);
    add(sums, s, x, rest, inside);
  }

  constexpr int ROWS = 16 * ROW_WARPS, TOKENS = 8 * TILES;
  float* const shared = partial_sums();  // [SLICE_WARPS][TOKENS][ROWS]
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int token = t * 8 + q * 2 + i % 2, row = row_warp * 16 + g + i / 2 * 8;
      shared[(slice_warp * TOKENS + token) * ROWS + row] = sums[t][i] * 18446744073709551616.0f;
    }
  block_sync();
  const bool whole = gridDim.y == 1;
  for (int i = threadIdx.x; i < TOKENS * ROWS; i += 32 * ROW_WARPS * SLICE_WARPS) {
    const int token = i / ROWS, row = blockIdx.x * ROWS + i % ROWS;
    if (token >= args.tokens || row >= args.rows) continue;
    float sum = shared[i];
    for (int s = 1; s < SLICE_WARPS; s++) sum += shared[s * TOKENS * ROWS + i];
    if (!whole) {
      ((float*)args.y)[((u64)blockIdx.y * args.tokens + token) * args.rows + row] = sum;
    } else {
      if (args.token_scale) sum = __fmul_rn(sum, __ldg(args.token_scale + token));
      OUT::store(args.y, (u64)token * args.rows + row, sum);
    }
  }
}

struct OutBf16 {
  __device__ __forceinline__ static void store(void* y, u64 at, float v) {
    ((unsigned short*)y)[at] = (unsigned short)Bf16::pack(v, 0.0f);
  }
};
struct OutFp16 {
  __device__ __forceinline__ static void store(void* y, u64 at, float v) {
    ((unsigned short*)y)[at] = (unsigned short)Fp16::pack(v, 0.0f);
  }
};
struct OutFp32 {
  __device__ __forceinline__ static void store(void* y, u64 at, float v) { ((float*)y)[at] = v; }
};

}  // namespace quantrot
