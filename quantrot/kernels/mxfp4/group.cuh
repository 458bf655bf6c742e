// A group of MXFP4, 32 float32 numbers, on Hopper: what its power of two is and what it rounds to. Follows
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
__device__ __forceinline__ void store_shared_words(u32 to, const Words& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// Of what a kernel before may have written: stays behind grid_wait.
__device__ __forceinline__ Words load_fresh_words(const void* p) {
  Words v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
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
__device__ __forceinline__ u32 clamp_half(u32 a, u32 limit) {  // float16, to [-limit, limit]
  u32 r;
  asm("min.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(limit));
  return r;
}
__device__ __forceinline__ u32 within_half(u32 a, u32 limit) {  // 1.0 where |a| <= limit, 0.0 elsewhere
  u32 r;
  asm("{.reg .b32 m;\nabs.f16x2 m, %1;\nset.le.f16x2.f16x2 %0, m, %2;\n}" : "=r"(r) : "r"(a), "r"(limit));
  return r;
}
__device__ __forceinline__ u32 fma_half(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
__device__ __forceinline__ u32 times_half(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// The bits of b where the mask has ones, of a elsewhere; as an instruction: the compiler would take two where it moves the
// masks behind shifts.
__device__ __forceinline__ u32 select_bits(u32 a, u32 b, u32 mask) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, 0xD8;" : "=r"(r) : "r"(a), "r"(b), "r"(mask));
  return r;
}
__device__ __forceinline__ u32 truncated_halves(float low, float high) {  // float16, towards zero
  u32 r;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float opaque(float v) {  // v, but the compiler does not know it
  float r;
  asm volatile("mov.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
__device__ __forceinline__ u32 opaque(u32 v) {
  u32 r;
  asm volatile("mov.u32 %0, %1;" : "=r"(r) : "r"(v));
  return r;
}
__device__ __forceinline__ float other_lane(float v, int across) { return __shfl_xor_sync(0xFFFFFFFFu, v, across); }
#endif

__device__ __forceinline__ float power(int exponent) { return __uint_as_float((u32)(exponent + 127) << 23); }

// A group of 32 numbers, a share of each of LANES lanes; what is returned of all of them, each lane has.
template <int LANES>
struct GroupOf {
  static_assert(LANES == 1 || LANES == 4, "a lane has all of it, or eight numbers");
  static constexpr int N = 32 / LANES;
  float v[N];

  // Sylvester's matrix of SPAN groups' numbers, from the widest stride down: the stages between groups, those of a group.
  template <int SPAN>
  __device__ __forceinline__ void turn_across() {
#pragma unroll
    for (int across = SPAN / 2; across; across /= 2) between(across * LANES);
  }
  __device__ __forceinline__ void turn_within() {
#pragma unroll
    for (int across = LANES / 2; across; across /= 2) between(across);
#pragma unroll
    for (int half = N / 2; half; half /= 2)
#pragma unroll
      for (int i = 0; i < N; i++)
        if (!(i & half)) {
          const float a = v[i], b = v[i + half];
          v[i] = __fadd_rn(a, b), v[i + half] = __fsub_rn(a, b);
        }
  }
  __device__ __forceinline__ void between(int across) {
    const float sign = lane_number() & across ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = __fmaf_rn(v[i], sign, other_lane(v[i], across));
  }

  // The sum of what `of` makes of each, halved again and again, the two halves of all first. FIRST: with the group's first.
  template <bool FIRST = true, class F>
  __device__ __forceinline__ static float halved(const F& of) {
    float t[8];
    if constexpr (LANES == 1) {
      float s[16];
#pragma unroll
      for (int i = 0; i < 16; i++) {
        s[i] = of(i + 16);
        if (FIRST || i) s[i] = __fadd_rn(of(i), s[i]);
      }
#pragma unroll
      for (int i = 0; i < 8; i++) t[i] = __fadd_rn(s[i], s[i + 8]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        t[i] = FIRST || i || !is_first() ? of(i) : 0.f;
        t[i] = __fadd_rn(t[i], other_lane(t[i], 2));
        t[i] = __fadd_rn(t[i], other_lane(t[i], 1));
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) t[i] = __fadd_rn(t[i], t[i + 4]);
    return __fadd_rn(__fadd_rn(t[0], t[2]), __fadd_rn(t[1], t[3]));
  }
  __device__ __forceinline__ float sum() const {
    return halved([&](int i) { return v[i]; });
  }
  template <bool FIRST = true>
  __device__ __forceinline__ float square_sum() const {
    return halved<FIRST>([&](int i) { return __fmul_rn(v[i], v[i]); });
  }

  // square_sum<false> to 2^-20 of it, in half the instructions; where no square that counts is a subnormal.
  __device__ __forceinline__ float near_square_sum() const {
    static_assert(LANES == 1, "of one lane");
    float s[4];
#pragma unroll
    for (int i = 1; i < 32; i++) s[i % 4] = i <= 4 ? __fmul_rn(v[i], v[i]) : __fmaf_rn(v[i], v[i], s[i % 4]);
    return __fadd_rn(__fadd_rn(s[0], s[1]), __fadd_rn(s[2], s[3]));
  }

  __device__ __forceinline__ void times(float by) {
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = __fmul_rn(v[i], by);
  }

  __device__ __forceinline__ float amax() const {
    float a[4];  // of every fourth: less that waits for the one before
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = fabsf(v[i]);
#pragma unroll
    for (int i = 4; i < N; i++) a[i % 4] = max_nan(a[i % 4], fabsf(v[i]));
    float most = max_nan(max_nan(a[0], a[1]), max_nan(a[2], a[3]));
#pragma unroll
    for (int across = LANES / 2; across; across /= 2) most = max_nan(most, other_lane(most, across));
    return most;
  }

  // The group's first number, in each lane.
  __device__ __forceinline__ float first() const {
    return LANES == 1 ? v[0] : __shfl_sync(0xFFFFFFFFu, v[0], lane_number() / LANES * LANES);
  }
  __device__ __forceinline__ static bool is_first() { return lane_number() % LANES == 0; }
};
using Group = GroupOf<1>;

// 1, 2 or 4: the power of two at or below |y|, at least 1, with y's sign (1.0's exponent is ones below its top bit).
__device__ __forceinline__ float binade(float y) {
  return __uint_as_float((__float_as_uint(fmaxf(fabsf(y), 1.0f)) | __float_as_uint(y)) & 0xFF800000u);
}

constexpr float MAGIC = 6291456.0f;  // 1.5 * 2^23 / 2: times two steps, it rounds a sum to a multiple of the step

template <int LANES>
__device__ __forceinline__ float squared_error(const GroupOf<LANES>& x, float factor) {
  GroupOf<LANES> errors;
#pragma unroll
  for (int i = 0; i < x.N; i++) {
    const float y = fabsf(__fmul_rn(x.v[i], factor)), clipped = fminf(y, 6.0f);
    const float magic = __fmul_rn(binade(clipped), MAGIC);
    const float error = __fsub_rn(__fsub_rn(__fadd_rn(clipped, magic), magic), y);
    errors.v[i] = __fmul_rn(error, error);
  }
  return errors.sum();
}

// A group's power of two.
struct Exponent {
  int value;  // unbiased
  bool finite;

  __device__ __forceinline__ u32 byte() const { return finite ? value + 127 : 255; }
};

constexpr u32 INFINITE = 0x7F800000u, TURNED_LIMIT = 0x76800000u;  // bits of 2^110

constexpr u32 NO_SQUARE = 0xC0800000u;  // in place of bits of less than a normal number: its exponent is -127

// Of quest: the bits of the clipped deviation's square, and its exponent.
__device__ __forceinline__ u32 quest_square(float variance, float root) {
  const u32 bits = __float_as_uint(__fmul_rn(__fmul_rn(variance, __fmul_rn(root, root)), QUEST_SQUARE));
  return bits < 0x00800000u ? NO_SQUARE : bits;
}
__device__ __forceinline__ int quest_exponent(u32 square) { return ((int)square >> 23) - 127 >> 1; }

// Of root times the group, which is turned by Sylvester's matrix of 32 if TURN.
template <int RULE, bool TURN, int LANES>
__device__ __forceinline__ Exponent exponent_of(GroupOf<LANES>& x, float root) {
  if constexpr (RULE == QUEST && TURN) {  // the first is the outputs' mean, the others' squares are their variance
    const float mean = x.first(), variance = x.template square_sum<false>(), square = __fadd_rn(variance, __fmul_rn(mean, mean));
    x.turn_within();
    return {quest_exponent(quest_square(variance, root)), square < __uint_as_float(INFINITE)};
  } else if constexpr (RULE == QUEST) {
    const float mean = __fmul_rn(x.sum(), 0.03125f), square = __fmul_rn(x.square_sum(), 0.03125f);
    const float variance = fmaxf(__fsub_rn(square, __fmul_rn(mean, mean)), 0.0f);
    return {quest_exponent(quest_square(variance, root)), square < __uint_as_float(INFINITE)};
  } else {
    if constexpr (TURN) x.turn_within();
    const float amax = __fmul_rn(x.amax(), root);
    const u32 bits = __float_as_uint(amax);
    int exponent = (int)((RULE == EVEN ? bits + (TURN ? 0x201000u : 0x200000u) : bits) >> 23) - 129;
    if constexpr (RULE == RCEIL) exponent += (bits & 0x7FFFFFu) > 0x400000u;  // past 1.5, 6 scales
    if constexpr (RULE == MSE) {
      exponent = min(max(exponent, -126), 125);
      const float once = squared_error(x, __fmul_rn(power(-exponent), root));
      const float twice = __fmul_rn(squared_error(x, __fmul_rn(power(-exponent), __fmul_rn(root, 0.5f))), 4.0f);
      exponent += twice < once;
    }
    return {min(max(exponent, -127), 126), amax < __uint_as_float(TURN ? TURNED_LIMIT : INFINITE)};
  }
}

// What quest_exponent takes of N groups before their last five stages. It is estimated, in an instruction an element less; where the
// estimate might have another exponent (within 32 units in the last place of a power of two; the two are less apart) or is near an
// end of float32, a warp takes the definition. Groups that are not finite become zeros, and ones in their byte of what is returned.
template <int N>
__device__ __forceinline__ u32 quest_squares(Group (&x)[N], u32 (&squares)[N], float root) {
  u32 lost = 0;
  bool sure = true;
#pragma unroll
  for (int n = 0; n < N; n++) {
    const float near = x[n].near_square_sum();
    squares[n] = __float_as_uint(__fmul_rn(near, __fmul_rn(__fmul_rn(root, root), QUEST_SQUARE)));
    sure = sure && (squares[n] + 32 & 0x007FFFFFu) >= 64 && near > 0x1p-90f && __fmaf_rn(x[n].v[0], x[n].v[0], near) < 0x1p120f;
  }
  if (__any_sync(0xFFFFFFFFu, !sure)) {
    const float one = opaque(1.0f);  // or the compiler would square everything twice in any case
#pragma unroll
    for (int n = 0; n < N; n++) {
      x[n].times(one);
      const float variance = x[n].template square_sum<false>(), square = __fadd_rn(variance, __fmul_rn(x[n].v[0], x[n].v[0]));
      squares[n] = quest_square(variance, root);
      if (!(square < __uint_as_float(INFINITE))) x[n] = {}, squares[n] = NO_SQUARE, lost |= 255u << 8 * n;
    }
  }
  return lost;
}

// --- Rounding in float16 ----------------------------------------------------------------------------------------------
//
// Where e2m1's least normal number, 1, is float16's, a number's float16 bits are a sign, its code (three bits) and what
// is left of the step, in 512ths: rounding is an integer addition. Elements go through it in pairs, 4 k and 4 k + 2,
// 4 k + 1 and 4 k + 3, whose high bytes then lie in the order of the codes.

constexpr float FINE = 0x1p-14f;
constexpr u32 SIX = 0x0E000E00u;  // 6 * FINE, twice

// 3/4 of a transform's root (of 1, 32, 64 or 128), as a float16 number.
__device__ __forceinline__ float three_quarters(float x) {
  return __uint_as_float(__float_as_uint(__fmul_rn(x, 0.75f)) + 0x1000u & 0xFFFFE000u);
}

// What an element is multiplied by before it is rounded.
template <int RULE>
__device__ __forceinline__ float fine_factor(int exponent, float root) {
  return __fmul_rn(power(-exponent), __fmul_rn(RULE == ABSMAX34 ? three_quarters(root) : root, FINE));
}

// Two elements times such a factor as float16 numbers, which are rounded again. Of what no transform made the definition, but
// for absmax34, has one rounding: float16 takes no bfloat16 to a tie, and of elements with more bits those that it cuts get an
// odd last bit, which leaves them on their side of every tie.
template <class IN, int SPAN, int RULE>
__device__ __forceinline__ u32 fine_pair(float low, float high, float factor) {
  low = __fmul_rn(low, factor), high = __fmul_rn(high, factor);
  if constexpr (IN::BRAIN || SPAN || RULE == ABSMAX34) return Fp16::pack(low, high);
  const u32 two = truncated_halves(low, high);
  const bool rests[2] = {Fp16::value((unsigned short)two) != low, Fp16::value((unsigned short)(two >> 16)) != high};
  return two | (rests[0] ? 1u : 0u) | (rests[1] ? 0x10000u : 0u);
}

// 2^exponent twice, for exponents from -14 to 15.
__device__ __forceinline__ u32 half_power(int exponent) { return (u32)(exponent + 15) * 0x04000400u; }

template <int RULE>
__device__ __forceinline__ constexpr bool clamps() { return RULE != EVEN && RULE != ABSMAX34; }

// Rounded to nearest, ties to even: 255 is added, and the code's last bit; below the code bits are what they come to be. That bit
// and 255 as float16's subnormals are a product and a sum, in a pipe with more room than the one that shifts (92 us for 95).
__device__ __forceinline__ u32 to_nearest(u32 pair) { return pair + fma_half(pair & 0x02000200u, 0x18001800u, 0x00FF00FFu); }

// Two by two codes, rounded (0 and 2, 1 and 3, 4 and 6, 5 and 7), as a word.
__device__ __forceinline__ u32 code_word(u32 p02, u32 p13, u32 p46, u32 p57) {
  const u32 even = __byte_perm(p02, p46, 0x7531), odd = __byte_perm(p13, p57, 0x7531);  // s000cccx each
  return select_bits(select_bits(even >> 1, even >> 4, 0x08080808u), select_bits(odd << 3, odd, 0x80808080u), 0xF0F0F0F0u);
}

}  // namespace quantrot
