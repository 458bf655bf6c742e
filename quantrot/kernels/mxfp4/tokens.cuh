// Tokens in the order in which a product reads them (see decode.cuh): as they are, or turned, quantized to MXFP4 and back,
// which bfloat16 holds exactly. Follows group.cuh.
//
// One token a thread block keeps in its shared memory for as long as it multiplies by it (hold). Every block does this for
// itself: 32 columns are some five hundred instructions of one lane, done while the weight's first stages are on their
// way, and a kernel of its own costs its launch and a trip through memory. For more, there is that kernel (arrange).

namespace quantrot {

constexpr int AS_IS = -1;  // a rule that rounds nothing

#ifdef QUANTROT_EMULATED
#include "tokens.h"
#else
// Of what a kernel before may have written: stays behind grid_wait.
__device__ __forceinline__ Words load_fresh_words(const void* p) {
  Words v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared_words(u32 to, const Words& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
#endif

// What a lane multiplies by word j of its group: of each half of 8 columns, k and k + 4 for k = 0, 1, 2, 3.
__device__ __forceinline__ Words arranged(const Words& v) {
  return {__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
          __byte_perm(v.y, v.w, 0x7632)};
}

// Times 2^62.
__device__ __forceinline__ Words raised(const Words& v) {
  constexpr u32 by = 0x5E805E80u;
  return {times_bf16(v.x, by), times_bf16(v.y, by), times_bf16(v.z, by), times_bf16(v.w, by)};
}

// 2^exponent twice, or NaN, in bfloat16.
__device__ __forceinline__ u32 power_pair(int exponent, bool finite) {
  return finite ? max((u32)(exponent + 127) << 7, 0x40u) * 0x00010001u : 0x7FFF7FFFu;
}

// A group of one token: words[j] of 8 columns, PAIRED as `arranged` or as they follow each other.
template <int SPAN, int RULE, bool PAIRED>
__device__ __forceinline__ void take(Words (&words)[4], float root) {
  if constexpr (RULE == AS_IS) {
    if constexpr (PAIRED)
#pragma unroll
      for (int j = 0; j < 4; j++) words[j] = arranged(words[j]);
  } else {
    Group x;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const u32 two = words[i / 4].at(i % 4);
      x.v[2 * i] = Bf16::value((unsigned short)two), x.v[2 * i + 1] = Bf16::value((unsigned short)(two >> 16));
    }
    x.turn_across<SPAN>();
    const Exponent exponent = exponent_of<RULE, SPAN != 0>(x, root);
    const float factor = fine_factor<RULE>(exponent.value, root);
    const u32 power = power_pair(exponent.value, exponent.finite);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      u32 pairs[4];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const int low = 8 * j + (PAIRED ? k : 2 * k), high = low + (PAIRED ? 4 : 1);
        u32 p = Fp16::pack(__fmul_rn(x.v[low], factor), __fmul_rn(x.v[high], factor));
        if constexpr (clamps<RULE>()) p = clamp_half(p, SIX);
        p = to_nearest(p);
        pairs[k] = times_bf16(times_bf16((p >> 3 & 0x01C001C0u) | (p & 0x80008000u), 0x7E807E80u), power);  // 2^-126 times it
      }
      words[j] = {pairs[0], pairs[1], pairs[2], pairs[3]};
    }
  }
}

// 32 columns of x [.., columns], or zeros.
__device__ __forceinline__ void load_group(Words (&words)[4], const void* x, int columns, int token, int column, bool inside) {
  const char* const from = (const char*)x + ((u64)token * columns + column) * 2;
#pragma unroll
  for (int p = 0; p < 4; p++) words[p] = inside ? load_fresh_words(from + p * 16) : Words{};
}

// Tokens bfloat16 [tokens, columns], columns a multiple of 128, to y [8 * TILES, columns], zeros where there is no token.
// GROUPED, for products by a warpgroup: 16 columns of each product's side by side.
template <int TILES, int SPAN, int RULE, bool GROUPED>
__device__ __forceinline__ void arrange(const void* x, Words* y, int tokens, int columns, float root) {
  launch_dependents();
  grid_wait();
  const int at = blockIdx.x * blockDim.x + threadIdx.x, tile = at / 32 % TILES, step = at / (32 * TILES);
  const int lane = lane_number(), token = tile * 8 + lane / 4;
  if (step * 128 >= columns) return;
  Words words[4];
  load_group(words, x, columns, token, step * 128 + lane % 4 * 32, token < tokens);
  take<SPAN, RULE, GROUPED>(words, root);
  u32* const to = (u32*)y + ((i64)token * columns + step * 128) / 2;
  if constexpr (GROUPED) {
#pragma unroll
    for (int i = 0; i < 16; i++) to[i * 4 + lane % 4] = words[i / 4].at(i % 4);
  } else {
#pragma unroll
    for (int j = 0; j < 4; j++) store_words((Words*)to + lane % 4 * 4 + j, words[j]);
  }
}

// Group number `group` of a token to its place, if it is one; all lanes of a warp.
template <int SPAN, int RULE>
__device__ __forceinline__ void keep_group(Words (&words)[4], int group, int groups, float root, u32 to) {
  take<SPAN, RULE, true>(words, root);
  const u32 at = to + group / 4 * 256 + group % 4 * 16;
  if (group < groups)
#pragma unroll
    for (int j = 0; j < 4; j++) store_shared_words(at + j * 64, raised(words[j]));
}

// `groups` groups, a multiple of 4, of a token x [columns] from column `first` on -> [step of 128 columns][word][group] of
// 16 bytes at `to`; zeros where there is no column. By THREADS threads, whole warps.
template <int THREADS, int SPAN, int RULE>
__device__ __forceinline__ void hold(const void* x, int columns, int first, int groups, float root, u32 to) {
  Words next[4];
  const auto fetch = [&](int group) {
    load_group(next, x, columns, 0, first + group * 32, group < groups && first + group * 32 < columns);
  };
  fetch(threadIdx.x);
  for (int group = threadIdx.x; group - (int)lane_number() < groups; group += THREADS) {
    Words words[4] = {next[0], next[1], next[2], next[3]};
    if (group + THREADS - (int)lane_number() < groups) fetch(group + THREADS);
    keep_group<SPAN, RULE>(words, group, groups, root, to);
  }
}

__device__ __forceinline__ float sum_of_warp(float a) {  // in the same order in each lane
#pragma unroll
  for (int s = 1; s < 32; s *= 2) a += __shfl_xor_sync(0xFFFFFFFFu, a, s);
  return a;
}

// The same of all of x, which first goes through RMSNorm: x / sqrt(mean(x^2) + epsilon), rounded, times norm, rounded. A
// thread has at most NORM groups. `squares`: room for a number of each warp. Waits for the kernel before, norm is not its.
template <int THREADS, int SPAN, int RULE, int NORM>
__device__ __forceinline__ void hold_normed(const void* x, const void* norm, float epsilon, int columns, int groups, float root,
                                            u32 to, u32 squares) {
  Words weight[NORM][4], v[NORM][4];
  const auto group = [](int i) { return (int)(i * THREADS + threadIdx.x); };
#pragma unroll
  for (int i = 0; i < NORM; i++)
#pragma unroll
    for (int j = 0; j < 4; j++)
      weight[i][j] = group(i) * 32 < columns ? ((const Words*)norm)[group(i) * 4 + j] : Words{};
  grid_wait();
#pragma unroll
  for (int i = 0; i < NORM; i++) load_group(v[i], x, columns, 0, group(i) * 32, group(i) * 32 < columns);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < NORM * 32; i++) {
    const float a = Bf16::value((unsigned short)(v[i / 32][i / 8 % 4].at(i / 2 % 4) >> i % 2 * 16));
    sum = __fmaf_rn(a, a, sum);
  }
  sum = sum_of_warp(sum);
  if (lane_number() == 0) store_shared(squares + threadIdx.x / 32 * 4, sum);
  named_sync(1, THREADS);
  sum = sum_of_warp(lane_number() < THREADS / 32 ? load_shared(squares + lane_number() * 4) : 0.f);
  const float factor = inverse_root(sum * (1.f / columns) + epsilon);
#pragma unroll
  for (int i = 0; i < NORM; i++) {
    Words words[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      u32 y[4];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const u32 two = v[i][j].at(k);
        const float low = Bf16::value((unsigned short)two), high = Bf16::value((unsigned short)(two >> 16));
        y[k] = times_bf16(Bf16::pack(__fmul_rn(low, factor), __fmul_rn(high, factor)), weight[i][j].at(k));
      }
      words[j] = {y[0], y[1], y[2], y[3]};
    }
    keep_group<SPAN, RULE>(words, group(i), groups, root, to);
  }
}

}  // namespace quantrot
