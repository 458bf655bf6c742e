// The transform's arguments, and 16-bit elements in 16-byte vectors.

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
  float* scales;                   // of codes: see SCALE_RULE
  i64 scale_row, scale_group;      // strides in elements
  u32 in_row;                      // groups of a row of x
  u32* taken;                      // counts rows, from 0 to 0 again; null: every cluster has a fixed share (flow)
};

struct alignas(16) Vec {
  u32 w[4];
};

// x, and the compiler does not see that it is: what is made of it is made here, and not kept in registers since the start, or is
// kept and not made again.
__device__ __forceinline__ u32 from_here(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ char* from_here(char* x) {
  asm volatile("" : "+l"(x));
  return x;
}
__device__ __forceinline__ float from_here(float x) {
  return __uint_as_float(from_here(__float_as_uint(x)));
}

// Which of `pieces` one of `takers` has: CHUNK neighbours in its turn, and of what no turn of all takes an equal share.
template <u32 CHUNK>
struct Pieces {
  u32 in_turns, count, first, rest;  // pieces taken in turns, its own, its first, its first of the rest
  u32 others;                        // pieces that the others take in a turn

  __device__ __forceinline__ Pieces(u32 pieces, u32 takers, u32 taker) {
    in_turns = pieces / (takers * CHUNK) * (takers * CHUNK);
    const u32 left = pieces - in_turns, share = left / takers, more = left - share * takers;
    rest = in_turns + taker * share + (taker < more ? taker : more);
    count = in_turns / takers + share + (taker < more);
    first = in_turns ? taker * CHUNK : rest;
    others = (takers - 1) * CHUNK;
  }

  __device__ __forceinline__ u32 after(u32 piece) const {
    if (++piece > in_turns || piece % CHUNK) return piece;
    piece += others;
    return piece < in_turns ? piece : rest;
  }
};

// With a SCALE_RULE, results leave as e4m3 codes of 128 neighbours and their scale amax / 448: 1 exact, 2 as the nearest
// bfloat16, 3 as the next power of two. They are quantized from float32.
#ifndef SCALE_RULE
#define SCALE_RULE 0
#endif

#ifdef QUANTROT_EMULATED
inline float larger(float a, float b) {
  a = fabsf(a), b = fabsf(b);
  return a != a || b != b ? NAN : a > b ? a : b;
}

inline u32 code(float f) {
  const float size = std::min(fabsf(f), 448.f);
  if (f != f) return 0x7F;
  int exponent = 0;
  frexpf(size, &exponent);
  exponent = std::max(exponent - 1, -6);
  const int steps = (int)nearbyintf(ldexpf(size, 3 - exponent));  // of 2^(exponent - 3); 16 is the next exponent's 8
  return (std::signbit(f) ? 0x80 : 0) + (steps < 8 ? steps : (exponent + 7) * 8 + steps - 8);
}

inline u32 codes2(float lo, float hi) { return code(lo) | code(hi) << 8; }

inline u32 codes4(float a, float b, float c, float d) { return codes2(a, b) | codes2(c, d) << 16; }

inline float reciprocal(float f) { return 1 / f; }

inline u32 least16(u32 two) {
  for (int i = 0; i < 2; i++)
    if (const u32 b = two >> 16 * i & 0xFFFF; (b & 0x7FFF) > 0x7F80 || (b > 0x7C00 && b < 0x8000))
      two = (two & ~(0xFFFFu << 16 * i)) | 0x7C00u << 16 * i;
  return two;
}

inline u32 bytes_of(u32 a, u32 b, u32 select) {
  const u64 all = (u64)b << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; i++) r |= (u32)(all >> 8 * (select >> 4 * i & 7) & 255) << 8 * i;
  return r;
}

inline Vec load_vector(u32 from) {
  Vec v;
  memcpy(&v, self().block->at(from, 16), 16);
  return v;
}

inline void store_vector(u32 to, const Vec& v) { emulator::ordinary_write(to, &v, 16); }

inline Vec load16(const void* p) {
  if ((uintptr_t)p % 16) emulator::fail("a load of 16 bytes that is not aligned");
  Vec v;
  memcpy(&v, p, 16);
  return v;
}

inline void store16(void* p, const Vec& v) { memcpy(p, &v, 16); }

inline void store8(void* p, u32 a, u32 b) {
  if ((uintptr_t)p % 8) emulator::fail("a store of 8 bytes that is not aligned");
  memcpy(p, &a, 4), memcpy((char*)p + 4, &b, 4);
}

inline void store4(void* p, u32 a) { memcpy(p, &a, 4); }

template <int D>
inline u32 pack(float lo, float hi) {
  return D == BF16 ? Bf16::pack(lo, hi) : Fp16::pack(lo, hi);
}

template <int D>
inline void unpack(u32 w, float& lo, float& hi) {
  lo = D == BF16 ? Bf16::value(w) : Fp16::value(w);
  hi = D == BF16 ? Bf16::value(w >> 16) : Fp16::value(w >> 16);
}
#else
__device__ __forceinline__ float larger(float a, float b) {  // of the magnitudes; a NaN wins
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(fabsf(a)), "f"(fabsf(b)));
  return r;
}

__device__ __forceinline__ u32 codes2(float lo, float hi) {
  unsigned short r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
  return r;
}

__device__ __forceinline__ u32 codes4(float a, float b, float c, float d) {
  u32 r;
  asm("{.reg .b16 lo, hi;\ncvt.rn.satfinite.e4m3x2.f32 lo, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 hi, %4, %3;\n"
      "mov.b32 %0, {lo, hi};}"
      : "=r"(r)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}

// Two bfloat16, each the smaller of it and 2^121, which a NaN becomes.
__device__ __forceinline__ u32 least16(u32 two) {
  u32 r;
  asm("min.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(two), "r"(0x7C007C00u));
  return r;
}

__device__ __forceinline__ float reciprocal(float f) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(f));
  return r;
}

__device__ __forceinline__ u32 bytes_of(u32 a, u32 b, u32 select) { return __byte_perm(a, b, select); }

// LOAD and STREAM are the cache hints of the program: read and written once, or left in L2 for the next kernel. Not
// .nc, because the in-place operator reads what it writes.
__device__ __forceinline__ Vec load16(const void* p) {
  Vec v;
  asm volatile("ld.global" LOAD ".v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "l"(p));
  return v;
}

__device__ __forceinline__ Vec load_vector(u32 from) {  // of shared memory
  Vec v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "r"(from)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_vector(u32 to, const Vec& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3])
               : "memory");
}

__device__ __forceinline__ void store16(void* p, const Vec& v) {
  asm volatile("st.global" STREAM ".v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]),
               "r"(v.w[3])
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

#endif

// The scale of a group whose largest magnitude this is: amax / 448, correctly rounded (a quotient by a constant needs
// one correction), no subnormal.
__device__ __forceinline__ float scale_of(float amax) {
  const float near = amax * (1 / 448.f), exact = fmaf(fmaf(near, -448.f, amax), 1 / 448.f, near);
  const float scale = amax == 0.f ? 1.f : amax <= 0x1.fffffep127f ? fmaxf(exact, 0x1p-126f) : amax;
  u32 bits = __float_as_uint(scale);
  if constexpr (SCALE_RULE == 2) bits = bits < 0x7F800000u ? (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000u : bits;
  if constexpr (SCALE_RULE == 3) bits = bits < 0x7F800000u ? (bits + 0x7FFFFF) & 0xFF800000u : bits;
  return __uint_as_float(bits > 0x7F800000u ? 0x7FC00000u : bits);
}

// What the values are multiplied by before they are coded; a NaN, which makes every code one, for a scale that is not
// finite. The reciprocal of a power of two is exact; another is off by no more than the sums before it are.
__device__ __forceinline__ float to_codes(float scale) {
  const u32 bits = __float_as_uint(scale);
  const float inverse = SCALE_RULE == 3 ? __uint_as_float(0x7F000000u - bits) : reciprocal(scale);
  return bits < 0x7F800000u ? inverse : __uint_as_float(0x7FC00000u);
}

// The largest magnitudes of W groups, each held by LANES neighbouring lanes of which every one gives its own: lane i of
// them gets that of group `group_of`, which saves computing it in all of them.
template <int W, int LANES>
__device__ __forceinline__ u32 group_of() {
  u32 group = 0;
#pragma unroll
  for (int s = 1, half = W / 2; half; s *= 2, half /= 2) group += threadIdx.x & s ? half : 0;
  return group;
}

template <int W, int LANES, int S = 1>
__device__ __forceinline__ float largest(const float (&amax)[W]) {
  static_assert(W * S <= LANES, "a group for every lane at most");
  if constexpr (W == 1) {
    float a = amax[0];
#pragma unroll
    for (int s = S; s < LANES; s *= 2) a = larger(a, __shfl_xor_sync(0xFFFFFFFFu, a, s));
    return a;
  } else {
    const bool upper = threadIdx.x & S;
    float half[W / 2];
#pragma unroll
    for (int j = 0; j < W / 2; j++) {
      const float other = __shfl_xor_sync(0xFFFFFFFFu, upper ? amax[j] : amax[j + W / 2], S);
      half[j] = larger(upper ? amax[j + W / 2] : amax[j], other);
    }
    return largest<W / 2, LANES, 2 * S>(half);
  }
}

// `value` of the lane that has group w.
template <int W, int LANES>
__device__ __forceinline__ float from_group(float value, int w) {
  u32 lane = threadIdx.x & 31 & ~(LANES - 1);
#pragma unroll
  for (int s = 1, half = W / 2; half; s *= 2, half /= 2) lane += w & half ? s : 0;
  return __shfl_sync(0xFFFFFFFFu, value, lane);
}

// Of group number `group` of all: 32 bits count 2^39 elements.
__device__ __forceinline__ void store_scale(const Args& a, u32 group, float scale) {
  const u32 row = group / a.in_row;
  a.scales[row * a.scale_row + (group - row * a.in_row) * a.scale_group] = scale;
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

}  // namespace quantrot
