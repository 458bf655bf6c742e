// A few tokens by a packed MXFP4 weight, on Hopper: y[token, row] = sum over k of x[token, k] * w[row, k].
//
// The weight is the first operand of mma.m16n8k16, the tokens the second. A warp owns 16 rows, or a few times 16; a lane (g, q)
// loads whole groups: the 16 bytes that are 32 columns of row g, and of row g + 8. Four neighbouring lanes read 64 bytes of a row.
// Which of its codes a lane puts in which slot of the product is free, as long as the tokens agree: a pair is the codes
// p and p + 4 of a 32-bit word, whose bits then move by the same shift in both halves. Several tokens are laid down in
// that order by a kernel before (arrange), so that a lane finds its part of two products in 16 bytes beside its
// neighbours'; the weight's first loads are on their way meanwhile.
//
// A code becomes bfloat16 by its bits: sign to bit 15, the three others to bits 8 ... 6, which is the value times 2^-126
// (e2m1's subnormal is bfloat16's). One integer product moves both: the two copies of a code that it adds do not touch,
// and what is not wanted of them is masked. One packed product by 2^(e + 62) makes it the value times 2^(e - 64),
// exactly; the sums are multiplied by 2^64 at the end. A group's scale past 2^65 acts as infinity, a value below 2^-62 as zero.
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
  int ahead;                               // bytes of each row that are asked for before the kernel before has ended
};

struct Words {
  u32 x, y, z, w;

  __device__ __forceinline__ u32 at(int j) const { return j == 0 ? x : j == 1 ? y : j == 2 ? z : w; }
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
__device__ __forceinline__ void prefetch_l2(const void* p, u32 bytes) {  // both multiples of 16
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
}
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
  grid_wait();
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

// A word of a group as four pairs, times the group's scale.
struct Pairs {
  u32 v[4];

  __device__ __forceinline__ Pairs(u32 word, u32 factor) {
    const u32 high = word >> 8;
    v[0] = times_bf16(pair<0>(word), factor), v[1] = times_bf16(pair<1>(word), factor);
    v[2] = times_bf16(pair<0>(high), factor), v[3] = times_bf16(pair<1>(high), factor);
  }
};

// Add one step to the sums; inside: whether the lane's group exists.
template <int TALL, int TILES, bool ARRANGED>
__device__ __forceinline__ void add(float (&sums)[TALL][TILES][4], const Step (&s)[TALL],
                                    const Tokens<TILES, ARRANGED>& x, int step, bool inside) {
  u32 a_factor[TALL], b_factor[TALL];
#pragma unroll
  for (int r = 0; r < TALL; r++) a_factor[r] = multiplier(s[r].a_scale), b_factor[r] = multiplier(s[r].b_scale);
#pragma unroll
  for (int j = 0; j < 4; j++) {
    Words v[TILES];
#pragma unroll
    for (int t = 0; t < TILES; t++) v[t] = x(step, t, j, inside);
#pragma unroll
    for (int r = 0; r < TALL; r++) {
      const Pairs a(s[r].a.at(j), a_factor[r]), b(s[r].b.at(j), b_factor[r]);
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        multiply(sums[r][t], a.v[0], b.v[0], a.v[1], b.v[1], v[t].x, v[t].y);
        multiply(sums[r][t], a.v[2], b.v[2], a.v[3], b.v[3], v[t].z, v[t].w);
      }
    }
  }
}

// TALL times 16 rows a warp, which share what it reads of the tokens; TILES of eight tokens; ROW_WARPS * SLICE_WARPS
// warps; DEPTH steps of a warp on their way. Rows and tokens that do not exist read the last one that does: their
// results are not stored.
//
// The kernel may start before the one before it has ended: until then it only asks for its weight to be brought to the
// L2 cache, which is right whoever wrote the weight. What comes after it may start as early.
template <int TALL, int TILES, int ROW_WARPS, int SLICE_WARPS, int DEPTH, bool ARRANGED, class OUT>
__device__ __forceinline__ void decode(const DecodeArgs& args) {
  constexpr int ROWS = 16 * TALL * ROW_WARPS, TOKENS = 8 * TILES;
  launch_dependents();
  const u32 lane = lane_number(), warp = warp_number(), g = lane >> 2, q = lane & 3;
  const int row_warp = warp % ROW_WARPS, slice_warp = warp / ROW_WARPS, groups = args.columns / 32;
  const int first_step = blockIdx.y * args.slice_steps;
  const int begin = first_step + slice_warp, end = min(first_step + args.slice_steps, groups / 4);  // of whole steps
  if (args.ahead && end > first_step) {
    const u32 bytes = min(args.ahead, (end - first_step) * 64);
    constexpr int WARPS = ROW_WARPS * SLICE_WARPS;  // which share the rows: the lanes of a warp ask one after the other
    for (int i = lane * WARPS + warp; i < ROWS && (int)blockIdx.x * ROWS + i < args.rows; i += 32 * WARPS)
      prefetch_l2(args.packed + ((u64)(blockIdx.x * ROWS + i) * groups + first_step * 4) * 16, bytes);
  }
  Rows rows[TALL];
#pragma unroll
  for (int r = 0; r < TALL; r++) {
    const int first_row = blockIdx.x * ROWS + (row_warp * TALL + r) * 16;
    const u64 a = (u64)min(first_row + (int)g, args.rows - 1) * groups + q;
    const u64 b = (u64)min(first_row + (int)g + 8, args.rows - 1) * groups + q;
    rows[r] = {args.packed + a * 16, args.packed + b * 16, args.scale + a, args.scale + b};
  }
  const Tokens<TILES, ARRANGED> x(args, lane);
  float sums[TALL][TILES][4] = {};

  Step ring[DEPTH][TALL];
  grid_wait();
#pragma unroll
  for (int d = 0; d < DEPTH; d++)
    if (begin + d * SLICE_WARPS < end)
#pragma unroll
      for (int r = 0; r < TALL; r++) ring[d][r] = rows[r].at(begin + d * SLICE_WARPS);
  for (int first = begin; first < end; first += DEPTH * SLICE_WARPS) {
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
      const int step = first + d * SLICE_WARPS;
      if (step >= end) break;
      add(sums, ring[d], x, step, true);
      if (step + DEPTH * SLICE_WARPS < end)
#pragma unroll
        for (int r = 0; r < TALL; r++) ring[d][r] = rows[r].at(step + DEPTH * SLICE_WARPS);
    }
  }
  const int rest = groups / 4;  // the step that is not whole
  if (groups % 4 && rest / args.slice_steps == (int)blockIdx.y && rest % SLICE_WARPS == slice_warp) {
    const bool inside = (int)q < groups % 4;
    Step s[TALL] = {};
#pragma unroll
    for (int r = 0; r < TALL; r++)
      if (inside) s[r] = rows[r].at(rest);
    add(sums, s, x, rest, inside);
  }

  float* const shared = partial_sums();  // [SLICE_WARPS][TOKENS][ROWS]
#pragma unroll
  for (int r = 0; r < TALL; r++)
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int token = t * 8 + q * 2 + i % 2, row = (row_warp * TALL + r) * 16 + g + i / 2 * 8;
        shared[(slice_warp * TOKENS + token) * ROWS + row] = sums[r][t][i] * 18446744073709551616.0f;
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
