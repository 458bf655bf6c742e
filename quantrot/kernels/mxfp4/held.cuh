// One token that a thread block keeps in its shared memory for as long as it multiplies by it, as integers. Follows tokens.cuh.
//
// MXFP4's numbers are halves of integers up to 12 times a power of two a group: a byte each. Others, bfloat16 as it comes or e4m3's
// codes, become integers of 16 bits times a power of two a group of 32, which all of the group's largest number takes: two bytes,
// high * 256 + low, both with a sign. What is lost of a number is less than 2^-15 of the group's largest one.
//
// Every block does this for itself: 32 columns are some five hundred instructions of one lane, done while the weight's first
// stages are on their way, and a kernel of its own costs its launch and a trip through memory.

namespace quantrot {

constexpr int HELD_STEP = 576, HELD_POWERS = 512;  // bytes from eight groups of a token to the next; to these groups' powers
constexpr u32 SIGNS_OF_CODES = 0x88888888u;

// Twice the magnitudes of four codes, the low ones of a word, that are not negative, a byte each; zeros for the others: a code's
// sign asks for that of the byte which its other bits pick. small: 0x03020100.
__device__ __forceinline__ u32 positive(u32 codes, u32 small) { return pick_bytes(small, 0x0C080604u, codes); }

// Where 16 bytes of a group lie: 0 and 1 the only bytes of its numbers, or the high ones; 2 and 3 the low ones. Eight lanes that
// write those of neighbouring groups meet no bank twice.
__device__ __forceinline__ u32 held_unit(u32 to, int group, u32 unit) {
  return to + group / 8 * HELD_STEP + group % 8 * 64 + (unit ^ group / 2 % 4) * 16;
}

// A group's powers of two, of the high and of the low bytes.
__device__ __forceinline__ void keep_powers(u32 to, int group, float high, float low) {
  store_shared2(to + group / 8 * HELD_STEP + HELD_POWERS + group % 8 * 8, __float_as_uint(high), __float_as_uint(low));
}

// 32 columns of x [.., columns], or zeros.
__device__ __forceinline__ void load_group(Words (&words)[4], const void* x, int columns, int column, bool inside) {
  const char* const from = (const char*)x + (u64)column * 2;
#pragma unroll
  for (int p = 0; p < 4; p++) words[p] = inside ? load_fresh_words(from + p * 16) : Words{};
}

// Of 32 numbers in bfloat16.
struct Group32 {
  const Words (&words)[4];

  __device__ __forceinline__ float at(int i) const { return Bf16::value((unsigned short)(words[i / 8].at(i / 2 % 4) >> i % 2 * 16)); }
};

// Group number `group` of a token, turned and quantized, to its place, if it is one.
template <int SPAN, int RULE>
__device__ __forceinline__ void keep_mxfp4(const Words (&words)[4], int group, int groups, float root, u32 to) {
  Group x;
#pragma unroll
  for (int i = 0; i < 32; i++) x.v[i] = Group32{words}.at(i);
  x.template turn_across<SPAN>();  // by all lanes of a warp
  const Exponent exponent = exponent_of<RULE, SPAN != 0>(x, root);
  const float factor = fine_factor<RULE>(exponent.value, root);
  u32 bytes[8];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    u32 p[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int at = 8 * j + i / 2 * 4 + i % 2;
      p[i] = Fp16::pack(__fmul_rn(x.v[at], factor), __fmul_rn(x.v[at + 2], factor));
      if constexpr (clamps<RULE>()) p[i] = clamp_half(p[i], SIX);
      p[i] = to_nearest(p[i]);
    }
    const u32 codes = code_word(p[0], p[1], p[2], p[3]), turned = codes ^ SIGNS_OF_CODES;
#pragma unroll
    for (int half = 0; half < 2; half++) {  // no byte borrows from the next
      const u32 plus = positive(codes >> 16 * half, 0x03020100u), minus = positive(turned >> 16 * half, 0x03020100u);
      bytes[2 * j + half] = ((plus | 0x80808080u) - minus) ^ 0x80808080u;
    }
  }
  if (group >= groups) return;
  store_shared_words(held_unit(to, group, 0), {bytes[0], bytes[1], bytes[2], bytes[3]});
  store_shared_words(held_unit(to, group, 1), {bytes[4], bytes[5], bytes[6], bytes[7]});
  keep_powers(to, group, exponent.finite ? __uint_as_float(max((u32)(exponent.value + 127) << 23, 0x00400000u)) : __uint_as_float(0x7FC00000u), 0.f);
}

__device__ __forceinline__ float two_to(int exponent) { return __fmul_rn(power(exponent / 2), power(exponent - exponent / 2)); }

// The same of numbers as they are. Infinities become ones times infinity, the others beside them zeros; beside a NaN all is NaN.
__device__ __forceinline__ void keep_numbers(const Words (&words)[4], int group, int groups, u32 to) {
  if (group >= groups) return;
  const u32 most = larger_magnitude(0, words), field = max(most >> 7, 1u);
  const bool finite = most < 0x7F80;
  const int up = finite ? 141 - (int)field : -129;  // the largest is 2^14 or more
  const float first = power(up / 2), second = power(up - up / 2), limit = finite ? 32639.f : 257.f;
  u32 high[8], low[8];
#pragma unroll
  for (int j = 0; j < 8; j++) {
    u32 n[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float scaled = __fmul_rn(__fmul_rn(Group32{words}.at(4 * j + i), first), second);
      n[i] = __float_as_uint(__fadd_rn(fminf(fmaxf(scaled, -limit), limit), 12582912.f));  // an integer in its low half
    }
    low[j] = __byte_perm(__byte_perm(n[0], n[1], 0x0040), __byte_perm(n[2], n[3], 0x0040), 0x5410);
#pragma unroll
    for (int i = 0; i < 4; i++) n[i] += 128;
    high[j] = __byte_perm(__byte_perm(n[0], n[1], 0x0051), __byte_perm(n[2], n[3], 0x0051), 0x5410);
  }
#pragma unroll
  for (int u = 0; u < 2; u++) {
    store_shared_words(held_unit(to, group, u), {high[4 * u], high[4 * u + 1], high[4 * u + 2], high[4 * u + 3]});
    store_shared_words(held_unit(to, group, 2 + u), {low[4 * u], low[4 * u + 1], low[4 * u + 2], low[4 * u + 3]});
  }
  const float all = __uint_as_float(most > 0x7F80 ? 0x7FC00000u : 0x7F800000u);
  keep_powers(to, group, finite ? two_to(8 - up) : all, finite ? two_to(-up) : all);
}

// Any group, but of e4m3's codes.
template <int SPAN, int RULE>
__device__ __forceinline__ void keep_group(const Words (&words)[4], int group, int groups, float root, u32 to) {
  if constexpr (RULE == AS_IS)
    keep_numbers(words, group, groups, to);
  else
    keep_mxfp4<SPAN, RULE>(words, group, groups, root, to);
}

// The same of e4m3's codes.
__device__ __forceinline__ void keep_codes(const Words (&words)[4], const TokenScale& by, int group, int groups, u32 to) {
  const Words codes[4] = {codes_of(words[0], by), codes_of(words[1], by), codes_of(words[2], by), codes_of(words[3], by)};
  keep_numbers(codes, group, groups, to);
}

// `groups` groups, a multiple of 8, of a token x [columns] from column `first` on, to their places from `to` on; zeros where there
// is no column. By THREADS threads, whole warps.
template <int THREADS, int SPAN, int RULE>
__device__ __forceinline__ void hold(const void* x, int columns, int first, int groups, float root, u32 to) {
  Words next[4];
  const auto fetch = [&](int group) {
    load_group(next, x, columns, first + group * 32, group < groups && first + group * 32 < columns);
  };
  fetch(threadIdx.x);
  for (int group = threadIdx.x; group - (int)lane_number() < groups; group += THREADS) {
    Words words[4] = {next[0], next[1], next[2], next[3]};
    if (group + THREADS - (int)lane_number() < groups) fetch(group + THREADS);
    keep_group<SPAN, RULE>(words, group, groups, root, to);
  }
}

// The same of e4m3's codes, of all of a token; its scale. Until that is known the token lies there as it came, each
// group by the thread that will make codes of it.
template <int THREADS, int RULE>
__device__ __forceinline__ float hold_codes(const void* x, int columns, int groups, u32 to, u32 maxima) {
  u32 most = 0;
  for (int group = threadIdx.x; group < groups; group += THREADS) {
    Words words[4];
    load_group(words, x, columns, group * 32, group * 32 < columns);
    most = larger_magnitude(most, words);
#pragma unroll
    for (int j = 0; j < 4; j++) store_shared_words(held_unit(to, group, j), words[j]);
  }
  const TokenScale by(token_scale_of<THREADS, RULE>(most, maxima));
  for (int group = threadIdx.x; group < groups; group += THREADS) {
    Words words[4];
#pragma unroll
    for (int j = 0; j < 4; j++) words[j] = load_shared_words(held_unit(to, group, j));
    keep_codes(words, by, group, groups, to);
  }
  return by.scale;
}

// The same of all of x, which first goes through RMSNorm: x / sqrt(mean(x^2) + epsilon), rounded, times norm, rounded. A
// thread has at most NORM groups. `squares`, `maxima`: room for a number of each warp. Waits for the kernel before behind its
// loads of norm. The scale of e4m3's codes, else 1.
template <int THREADS, int SPAN, int RULE, int NORM>
__device__ __forceinline__ float hold_normed(const void* x, const void* norm, float epsilon, int columns, int groups, float root,
                                             u32 to, u32 squares, u32 maxima) {
  Words weight[NORM][4], v[NORM][4];
  const auto group = [](int i) { return (int)(i * THREADS + threadIdx.x); };
#pragma unroll
  for (int i = 0; i < NORM; i++)
#pragma unroll
    for (int j = 0; j < 4; j++)
      weight[i][j] = group(i) * 32 < columns ? ((const Words*)norm)[group(i) * 4 + j] : Words{};
  grid_wait();
#pragma unroll
  for (int i = 0; i < NORM; i++) load_group(v[i], x, columns, group(i) * 32, group(i) * 32 < columns);
  const float factor = norm_factor<THREADS>(reinterpret_cast<Words(&)[NORM * 4]>(v), columns, epsilon, squares);
  u32 most = 0;
#pragma unroll
  for (int i = 0; i < NORM; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) v[i][j] = normed(v[i][j], factor, weight[i][j]);
    if constexpr (is_fp8<RULE>())
      most = larger_magnitude(most, v[i]);
    else
      keep_group<SPAN, RULE>(v[i], group(i), groups, root, to);
  }
  if constexpr (!is_fp8<RULE>()) return 1.f;
  const TokenScale by(token_scale_of<THREADS, RULE>(most, maxima));
#pragma unroll
  for (int i = 0; i < NORM; i++) keep_codes(v[i], by, group(i), groups, to);
  return by.scale;
}

}  // namespace quantrot
