// A group of MXFP4, 32 float32 numbers of one lane, on Hopper: what its power of two is and what it rounds to. Follows
// hopper.cuh.
//
// Every sum and product is rounded on its own, in the order of the reference: the bits are the reference's.

namespace quantrot {

enum Rule { FLOOR, EVEN, RCEIL, QUEST, ABSMAX34, MSE };

struct Words {
  u32 x, y, z, w;

  __device__ __forceinline__ u32 at(int j) const { return j == 0 ? x : j == 1 ? y : j == 2 ? z : w; }
};

#ifdef QUANTROT_EMULATED
#include "group.h"
#else
__device__ __forceinline__ Words load_shared_words(u32 from) {
  Words v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ void store_words(void* p, const Words& v) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ float max_nan(float a, float b) {  // NaN where there is one
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
__device__ __forceinline__ u32 times_bf16(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ float other_lane(float v, int across) { return __shfl_xor_sync(0xFFFFFFFFu, v, across); }
#endif

__device__ __forceinline__ float power(int exponent) { return __uint_as_float((u32)(exponent + 127) << 23); }

// The sum of 16, halved again and again.
__device__ __forceinline__ float halved(const float (&s)[16]) {
  float t[8];
#pragma unroll
  for (int i = 0; i < 8; i++) t[i] = __fadd_rn(s[i], s[i + 8]);
#pragma unroll
  for (int i = 0; i < 4; i++) t[i] = __fadd_rn(t[i], t[i + 4]);
  return __fadd_rn(__fadd_rn(t[0], t[2]), __fadd_rn(t[1], t[3]));
}

struct Group {
  float v[32];

  // Sylvester's matrix of SPAN lanes' 32 numbers, from the widest stride down.
  template <int SPAN>
  __device__ __forceinline__ void turn() {
#pragma unroll
    for (int across = SPAN / 2; across; across /= 2) {
      const float sign = lane_number() & across ? -1.0f : 1.0f;
#pragma unroll
      for (int i = 0; i < 32; i++) v[i] = __fmaf_rn(v[i], sign, other_lane(v[i], across));
    }
#pragma unroll
    for (int half = 16; half; half /= 2)
#pragma unroll
      for (int i = 0; i < 32; i++)
        if (!(i & half)) {
          const float a = v[i], b = v[i + half];
          v[i] = __fadd_rn(a, b), v[i + half] = __fsub_rn(a, b);
        }
  }

  __device__ __forceinline__ float sum() const {
    float s[16];
#pragma unroll
    for (int i = 0; i < 16; i++) s[i] = __fadd_rn(v[i], v[i + 16]);
    return halved(s);
  }

  __device__ __forceinline__ float square_sum() const {
    float s[16];
#pragma unroll
    for (int i = 0; i < 16; i++) s[i] = __fadd_rn(__fmul_rn(v[i], v[i]), __fmul_rn(v[i + 16], v[i + 16]));
    return halved(s);
  }

  __device__ __forceinline__ float amax() const {
    float a[4];  // of every fourth: less that waits for the one before
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = fabsf(v[i]);
#pragma unroll
    for (int i = 4; i < 32; i++) a[i % 4] = max_nan(a[i % 4], fabsf(v[i]));
    return max_nan(max_nan(a[0], a[1]), max_nan(a[2], a[3]));
  }
};

// 1, 2 or 4: the power of two at or below |y|, at least 1, with y's sign (1.0's exponent is ones below its top bit).
__device__ __forceinline__ float binade(float y) {
  return __uint_as_float((__float_as_uint(fmaxf(fabsf(y), 1.0f)) | __float_as_uint(y)) & 0xFF800000u);
}

constexpr float MAGIC = 6291456.0f;  // 1.5 * 2^23 / 2: times two steps, it rounds a sum to a multiple of the step

__device__ __forceinline__ float squared_error(const Group& x, float factor) {
  Group errors;
#pragma unroll
  for (int i = 0; i < 32; i++) {
    const float y = fabsf(__fmul_rn(x.v[i], factor)), clipped = fminf(y, 6.0f);
    const float magic = __fmul_rn(binade(clipped), MAGIC);
    const float error = __fsub_rn(__fsub_rn(__fadd_rn(clipped, magic), magic), y);
    errors.v[i] = __fmul_rn(error, error);
  }
  return errors.sum();
}

// (unbiased exponent, whether the group is finite) of root times the group.
template <int RULE>
__device__ __forceinline__ int exponent_of(const Group& x, float root, bool& finite) {
  int exponent;
  if constexpr (RULE == QUEST) {
    const float mean = __fmul_rn(x.sum(), 0.03125f), square = __fmul_rn(x.square_sum(), 0.03125f);
    const float spread = fmaxf(__fsub_rn(square, __fmul_rn(mean, mean)), 0.0f);
    const u32 bits = __float_as_uint(__fmul_rn(__fmul_rn(spread, __fmul_rn(root, root)), QUEST_SQUARE));
    exponent = bits < 0x00800000u ? -127 : ((int)(bits >> 23) - 127) >> 1;
    finite = square < __uint_as_float(0x7F800000u);
  } else {
    const float amax = __fmul_rn(x.amax(), root);
    const u32 bits = __float_as_uint(amax);
    finite = amax < __uint_as_float(0x7F800000u);
    exponent = (int)((RULE == EVEN ? bits + 0x200000u : bits) >> 23) - 129;
    if constexpr (RULE == RCEIL) exponent += amax > __fmul_rn(power(min(max(exponent, -126), 125)), 6.0f);
    if constexpr (RULE == MSE) {
      exponent = min(max(exponent, -126), 125);
      const float once = squared_error(x, __fmul_rn(power(-exponent), root));
      const float twice = __fmul_rn(squared_error(x, __fmul_rn(power(-exponent), __fmul_rn(root, 0.5f))), 4.0f);
      exponent += twice < once;
    }
  }
  return min(max(exponent, -127), 126);
}

// What an element is multiplied by before it is rounded.
template <int RULE>
__device__ __forceinline__ float factor_of(int exponent, float root) {
  return __fmul_rn(power(-exponent), RULE == ABSMAX34 ? __fmul_rn(root, 0.75f) : root);
}

// Rounded to a multiple of its step, in the low bits of y + magic; `b` is the binade.
template <int RULE>
__device__ __forceinline__ float rounded(float y, float& b) {
  if constexpr (RULE != EVEN && RULE != ABSMAX34) y = fminf(fmaxf(y, -6.0f), 6.0f);
  b = binade(y);
  return __fmaf_rn(b, MAGIC, y);
}

}  // namespace quantrot
