// What a product of few tokens reads of them (see decode.cuh): as they are, or turned, quantized to MXFP4 and back, or as
// e4m3's codes, all of which bfloat16 holds exactly. Follows gated.cuh. Several are made so by a kernel in front
// (arrange.cuh), one by each block of the product for itself (held.cuh), but in front where that has a gate to do (W4A4) or the
// blocks have a part of it each (W4A8).

namespace quantrot {

constexpr int AS_IS = -1;  // a rule that rounds nothing
// e4m3, with a scale for all of a token: amax / 448 as it is, as a bfloat16, or the next power of two.
constexpr int FP8_EXACT = -2, FP8_BF16 = -3, FP8_POW2 = -4;
template <int RULE>
__device__ __forceinline__ constexpr bool is_fp8() { return RULE <= FP8_EXACT; }

// What a lane multiplies by word j of its group: of each half of 8 columns, k and k + 4 for k = 0, 1, 2, 3.
__device__ __forceinline__ Words arranged(const Words& v) {
  return {__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
          __byte_perm(v.y, v.w, 0x7632)};
}

// 2^exponent twice, or NaN, in bfloat16.
__device__ __forceinline__ u32 power_pair(int exponent, bool finite) {
  return finite ? max((u32)(exponent + 127) << 7, 0x40u) * 0x00010001u : 0x7FFF7FFFu;
}

// A lane's eight columns of a group that four lanes have, PAIRED as `arranged` or as they follow each other.
template <int SPAN, int RULE, bool PAIRED>
__device__ __forceinline__ void take(Words& words, float root) {
  static_assert(!is_fp8<RULE>(), "whose scale needs all of the token");
  if constexpr (RULE == AS_IS) {
    if constexpr (PAIRED) words = arranged(words);
  } else {
    GroupOf<4> x;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 two = words.at(i);
      x.v[2 * i] = Bf16::value((unsigned short)two), x.v[2 * i + 1] = Bf16::value((unsigned short)(two >> 16));
    }
    x.template turn_across<SPAN>();
    const Exponent exponent = exponent_of<RULE, SPAN != 0>(x, root);
    const float factor = fine_factor<RULE>(exponent.value, root);
    const u32 power = power_pair(exponent.value, exponent.finite);
    u32 pairs[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int low = PAIRED ? k : 2 * k, high = low + (PAIRED ? 4 : 1);
      u32 p = Fp16::pack(__fmul_rn(x.v[low], factor), __fmul_rn(x.v[high], factor));
      if constexpr (clamps<RULE>()) p = clamp_half(p, SIX);
      p = to_nearest(p);
      pairs[k] = times_bf16(times_bf16((p >> 3 & 0x01C001C0u) | (p & 0x80008000u), 0x7E807E80u), power);  // 2^-126 times it
    }
    words = {pairs[0], pairs[1], pairs[2], pairs[3]};
  }
}

// The larger magnitude, as bits: they order like the numbers and put NaN above infinity.
template <int WORDS>
__device__ __forceinline__ u32 larger_magnitude(u32 most, const Words (&words)[WORDS]) {
#pragma unroll
  for (int i = 0; i < 4 * WORDS; i++) {
    const u32 two = words[i / 4].at(i % 4) & 0x7FFF7FFFu;
    most = max(most, max(two & 0xFFFF, two >> 16));
  }
  return most;
}

// What e4m3's codes of a token are made with.
struct TokenScale {
  float scale;
  Reciprocal by;

  __device__ __forceinline__ explicit TokenScale(float scale) : scale(scale), by(scale) {}
  __device__ __forceinline__ float over(u32 bits) const { return by.times(Bf16::value((unsigned short)bits)); }
};

// The scale of a token by the threads' largest magnitudes: of amax / 448, 1 for zeros; NaN where it is not finite. `maxima`:
// room for a number of each warp.
template <int THREADS, int RULE>
__device__ __forceinline__ float token_scale_of(u32 most, u32 maxima) {
  most = largest_of_warp(most);
  if (lane_number() == 0) store_shared(maxima + threadIdx.x / 32 * 4, most);
  named_sync(1, THREADS);
  most = largest_of_warp(lane_number() < THREADS / 32 ? __float_as_uint(load_shared(maxima + lane_number() * 4)) : 0);
  if (most >= 0x7F80) return __uint_as_float(0x7FC00000u);
  const float scale = most ? fmaxf(__fdiv_rn(Bf16::value((unsigned short)most), 448.f), 0x1p-126f) : 1.f;
  if constexpr (RULE == FP8_BF16) return Bf16::value((unsigned short)Bf16::pack(scale, 0.f));
  if constexpr (RULE == FP8_POW2) return __uint_as_float((__float_as_uint(scale) + 0x7FFFFF) & 0xFF800000u);
  return scale;
}

// The first or last (HALF: 0, 1) four of eight columns as e4m3's codes.
template <int HALF>
__device__ __forceinline__ u32 four_codes(const Words& x, const TokenScale& by) {
  const u32 one = x.at(2 * HALF), two = x.at(2 * HALF + 1);
  return to_e4m3(by.over(one), by.over(one >> 16), by.over(two), by.over(two >> 16));
}

// Eight columns as e4m3's codes in bfloat16, which the scale does not multiply yet.
__device__ __forceinline__ Words codes_of(const Words& x, const TokenScale& by) {
  const u32 fours[2] = {four_codes<0>(x, by), four_codes<1>(x, by)};
  u32 y[4];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    u32 low, high;
    unpack_e4m3(fours[h], low, high);
    y[2 * h] = Bf16::pack(Fp16::value((unsigned short)low), Fp16::value((unsigned short)(low >> 16)));
    y[2 * h + 1] = Bf16::pack(Fp16::value((unsigned short)high), Fp16::value((unsigned short)(high >> 16)));
  }
  return {y[0], y[1], y[2], y[3]};
}

__device__ __forceinline__ float sum_of_warp(float a) {  // in the same order in each lane
#pragma unroll
  for (int s = 1; s < 32; s *= 2) a += __shfl_xor_sync(0xFFFFFFFFu, a, s);
  return a;
}

template <int WORDS>
__device__ __forceinline__ float square_sum(const Words (&words)[WORDS]) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < WORDS * 8; i++) {
    const float a = Bf16::value((unsigned short)(words[i / 8].at(i / 2 % 4) >> i % 2 * 16));
    sum = __fmaf_rn(a, a, sum);
  }
  return sum;
}

// What RMSNorm multiplies a token of `columns` by, of which a thread has these; `squares`: room for a number of each warp.
template <int THREADS, int WORDS>
__device__ __forceinline__ float norm_factor(const Words (&words)[WORDS], int columns, float epsilon, u32 squares) {
  float sum = square_sum(words);
  sum = sum_of_warp(sum);
  if (lane_number() == 0) store_shared(squares + threadIdx.x / 32 * 4, sum);
  named_sync(1, THREADS);
  sum = sum_of_warp(lane_number() < THREADS / 32 ? load_shared(squares + lane_number() * 4) : 0.f);
  return inverse_root(sum * (1.f / columns) + epsilon);
}

// x times the factor, rounded, times the norm's weight, rounded.
__device__ __forceinline__ Words normed(const Words& x, float factor, const Words& weight) {
  u32 y[4];
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const float low = Bf16::value((unsigned short)x.at(k)), high = Bf16::value((unsigned short)(x.at(k) >> 16));
    y[k] = times_bf16(Bf16::pack(__fmul_rn(low, factor), __fmul_rn(high, factor)), weight.at(k));
  }
  return {y[0], y[1], y[2], y[3]};
}

}  // namespace quantrot
