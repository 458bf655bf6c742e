// One token that a thread block keeps in its shared memory for as long as it multiplies by it, as integers. Follows tokens.cuh.
//
// MXFP4's numbers are halves of integers up to 12 times a power of two a group: a byte each. Others, bfloat16 as it comes or
// e4m3's codes, become integers of 16 bits, of which the group's largest takes 15 or more, times a power of two a group of 32:
// two bytes, high * 256 + low, both with a sign. What is lost of a number is at most 1/32640 of the group's largest one.
//
// Every block does this for itself, four lanes a group, while the weight's first stages are on their way: a kernel of its own
// costs its launch and a trip through memory. Where there is one anyway, for silu(gate) * up, it makes MXFP4's bytes, too
// (arrange.cuh).

namespace quantrot {

constexpr int HELD_STEP = 576, HELD_POWERS = 512;  // bytes from eight groups of a token to the next; to these groups' powers
constexpr u32 SIGNS_OF_CODES = 0x88888888u;

// Twice the magnitudes of four codes, the low ones of a word, that are not negative, a byte each; zeros for the others: a
// code's sign asks for that of the byte which its other bits pick. small: 0x03020100.
__device__ __forceinline__ u32 positive(u32 codes, u32 small) { return pick_bytes(small, 0x0C080604u, codes); }

// Where 16 bytes of a group lie: 0 and 1 the only bytes of its numbers, or the high ones; 2 and 3 the low ones. Sixteen lanes
// that write eight bytes each of four groups meet no bank twice.
__device__ __forceinline__ u32 held_unit(u32 to, int group, u32 unit) {
  return to + group / 8 * HELD_STEP + group % 8 * 64 + (unit ^ group & 2) * 16;
}

// A group's powers of two, of the high and of the low bytes.
__device__ __forceinline__ void keep_powers(u32 to, int group, float high, float low) {
  store_shared2(to + group / 8 * HELD_STEP + HELD_POWERS + group % 8 * 8, __float_as_uint(high), __float_as_uint(low));
}

// Eight columns each, parts number `part`, `part` + THREADS, ... of x from column `first` on, or zeros.
template <int THREADS, int N>
__device__ __forceinline__ void load_parts(Words (&words)[N], const void* x, int columns, int first, int part, int parts) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int at = part + i * THREADS, column = first + at * 8;
    words[i] = at < parts && column < columns ? load_fresh_words((const char*)x + (u64)column * 2) : Words{};
  }
}
__device__ __forceinline__ float number(const Words& part, int i) {
  return Bf16::value((unsigned short)(part.at(i / 2) >> i % 2 * 16));
}

// Eight columns of a token, turned and quantized: twice their values, a byte each, and the group's power of two.
struct HeldPart {
  u32 bytes[2];
  float power;
};

// By whole warps.
template <int SPAN, int RULE>
__device__ __forceinline__ HeldPart held_part(const Words& words, float root) {
  GroupOf<4> x;
#pragma unroll
  for (int i = 0; i < 8; i++) x.v[i] = number(words, i);
  x.template turn_across<SPAN>();
  const Exponent exponent = exponent_of<RULE, SPAN != 0>(x, root);
  const float factor = fine_factor<RULE>(exponent.value, root);
  HeldPart part;
  u32 p[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int at = i / 2 * 4 + i % 2;
    p[i] = Fp16::pack(__fmul_rn(x.v[at], factor), __fmul_rn(x.v[at + 2], factor));
    if constexpr (clamps<RULE>()) p[i] = clamp_half(p[i], SIX);
    p[i] = to_nearest(p[i]);
  }
  const u32 codes = code_word(p[0], p[1], p[2], p[3]), turned = codes ^ SIGNS_OF_CODES;
#pragma unroll
  for (int half = 0; half < 2; half++) {  // no byte borrows from the next
    const u32 plus = positive(codes >> 16 * half, 0x03020100u), minus = positive(turned >> 16 * half, 0x03020100u);
    part.bytes[half] = ((plus | 0x80808080u) - minus) ^ 0x80808080u;
  }
  part.power = __uint_as_float(exponent.finite ? max((u32)(exponent.value + 127) << 23, 0x00400000u) : 0x7FC00000u);
  return part;
}

// Part number `part` of a token, turned and quantized, to its place; by whole warps.
template <int SPAN, int RULE>
__device__ __forceinline__ void keep_mxfp4(const Words& words, int part, float root, u32 to) {
  const HeldPart held = held_part<SPAN, RULE>(words, root);
  store_shared2(held_unit(to, part / 4, part % 4 / 2) + part % 2 * 8, held.bytes[0], held.bytes[1]);
  if (part % 4 == 0) keep_powers(to, part / 4, held.power, 0.f);
}

// The rule of a token that is held_parts in memory: bytes [columns], then powers [columns / 32]. Like MXFP4's, not negative.
constexpr int AS_HELD = 100;

__device__ __forceinline__ float two_to(int exponent) { return __fmul_rn(power(exponent / 2), power(exponent - exponent / 2)); }

// The same of numbers as they are. Infinities become ones times infinity, the others beside them zeros (of two in a group,
// infinity may come where NaN should); beside a NaN all is NaN.
__device__ __forceinline__ void keep_numbers(const Words& words, int part, u32 to) {
  u32 most = larger_magnitude(0, {words});
#pragma unroll
  for (int across = 1; across < 4; across *= 2) most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, across));
  const bool finite = most < 0x7F80;
  const int up = finite ? 141 - (int)max(most >> 7, 1u) : -129;  // the largest is 2^14 or more
  const float first = power(up / 2), second = power(up - up / 2), limit = finite ? 32639.f : 257.f;
  u32 n[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float scaled = __fmul_rn(__fmul_rn(number(words, i), first), second);
    n[i] = __float_as_uint(__fadd_rn(fminf(fmaxf(scaled, -limit), limit), 12582912.f));  // an integer in its low half
  }
  const auto gathered = [&](int i, u32 two) {
    return __byte_perm(__byte_perm(n[i], n[i + 1], two), __byte_perm(n[i + 2], n[i + 3], two), 0x5410);
  };
  warp_sync();  // all have read what may lie there
  store_shared2(held_unit(to, part / 4, 2 + part % 4 / 2) + part % 2 * 8, gathered(0, 0x0040), gathered(4, 0x0040));
#pragma unroll
  for (int i = 0; i < 8; i++) n[i] += 128;
  store_shared2(held_unit(to, part / 4, part % 4 / 2) + part % 2 * 8, gathered(0, 0x0051), gathered(4, 0x0051));
  const float all = __uint_as_float(most > 0x7F80 ? 0x7FC00000u : 0x7F800000u);
  if (part % 4 == 0) keep_powers(to, part / 4, finite ? two_to(8 - up) : all, finite ? two_to(-up) : all);
}

// Any part, but of e4m3's codes.
template <int SPAN, int RULE>
__device__ __forceinline__ void keep_part(const Words& words, int part, float root, u32 to) {
  if constexpr (RULE == AS_IS)
    keep_numbers(words, part, to);
  else
    keep_mxfp4<SPAN, RULE>(words, part, root, to);
}

constexpr int AT_ONCE = 4;  // parts that a thread asks for before it needs the first

// A token x [columns] from column `first` on, so many parts of it, a multiple of 32, to their places from `to` on; zeros where
// there is no column. By THREADS threads, whole warps.
template <int THREADS, int SPAN, int RULE>
__device__ __forceinline__ void hold(const void* x, int columns, int first, int parts, float root, u32 to) {
  for (int part = threadIdx.x; part < parts; part += AT_ONCE * THREADS) {
    Words words[AT_ONCE];
    load_parts<THREADS>(words, x, columns, first, part, parts);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      if (part + i * THREADS < parts) keep_part<SPAN, RULE>(words[i], part + i * THREADS, root, to);
  }
}

// The same of a token that comes AS_HELD, all of it.
template <int THREADS>
__device__ __forceinline__ void hold_laid(const void* x, int columns, int parts, u32 to) {
  const char* const bytes = (const char*)x;
  for (int half = threadIdx.x; half < parts / 2; half += AT_ONCE * THREADS) {  // of a group
    Words words[AT_ONCE];
    float power[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int at = half + i * THREADS;
      const bool inside = at < parts / 2 && at * 16 < columns;
      words[i] = inside ? load_fresh_words(bytes + at * 16) : Words{};
      power[i] = inside && at % 2 == 0 ? fresh1((const float*)(bytes + columns) + at / 2) : 0.f;
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int at = half + i * THREADS;
      if (at >= parts / 2) break;
      store_shared_words(held_unit(to, at / 2, at % 2), words[i]);
      if (at % 2 == 0) keep_powers(to, at / 2, power[i], 0.f);
    }
  }
}

// The same of e4m3's codes, of all of a token; its scale. Until that is known the token lies there as it came, each
// part by the thread that will make codes of it.
template <int THREADS, int RULE>
__device__ __forceinline__ float hold_codes(const void* x, int columns, int parts, u32 to, u32 maxima) {
  u32 most = 0;
  for (int part = threadIdx.x; part < parts; part += AT_ONCE * THREADS) {
    Words words[AT_ONCE];
    load_parts<THREADS>(words, x, columns, 0, part, parts);
    most = larger_magnitude(most, words);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      if (const int at = part + i * THREADS; at < parts) store_shared_words(held_unit(to, at / 4, at % 4), words[i]);
  }
  const TokenScale by(token_scale_of<THREADS, RULE>(most, maxima));
  for (int part = threadIdx.x; part < parts; part += THREADS)
    keep_numbers(codes_of(load_shared_words(held_unit(to, part / 4, part % 4)), by), part, to);
  return by.scale;
}

// The same of all of x, which first goes through RMSNorm: x / sqrt(mean(x^2) + epsilon), rounded, times norm, rounded. A
// thread has at most NORM parts. `squares`, `maxima`: room for a number of each warp. Waits for the kernel before behind its
// loads of norm. The scale of e4m3's codes, else 1.
template <int THREADS, int SPAN, int RULE, int NORM>
__device__ __forceinline__ float hold_normed(const void* x, const void* norm, float epsilon, int columns, int parts, float root,
                                             u32 to, u32 squares, u32 maxima) {
  Words weight[NORM], v[NORM];
  const auto part = [](int i) { return (int)(i * THREADS + threadIdx.x); };
#pragma unroll
  for (int i = 0; i < NORM; i++) weight[i] = part(i) * 8 < columns ? ((const Words*)norm)[part(i)] : Words{};
  grid_wait();
  load_parts<THREADS>(v, x, columns, 0, threadIdx.x, parts);
  const float factor = norm_factor<THREADS>(v, columns, epsilon, squares);
  u32 most = 0;
#pragma unroll
  for (int i = 0; i < NORM; i++) {
    v[i] = normed(v[i], factor, weight[i]);
    if constexpr (is_fp8<RULE>())
      most = larger_magnitude(most, {v[i]});
    else if (part(i) < parts)
      keep_part<SPAN, RULE>(v[i], part(i), root, to);
  }
  if constexpr (!is_fp8<RULE>()) return 1.f;
  const TokenScale by(token_scale_of<THREADS, RULE>(most, maxima));
#pragma unroll
  for (int i = 0; i < NORM; i++)
    if (part(i) < parts) keep_numbers(codes_of(v[i], by), part(i), to);
  return by.scale;
}

}  // namespace quantrot
