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
};

struct alignas(16) Vec {
  u32 w[4];
};

#ifdef QUANTROT_EMULATED
inline Vec load_vector(u32 from) {
  Vec v;
  memcpy(&v, self().block->at(from, 16), 16);
  return v;
}

inline void store_vector(u32 to, const Vec& v) { emulator::ordinary_write(to, &v, 16); }

inline void store16(void* p, const Vec& v) { memcpy(p, &v, 16); }

template <int D>
inline u32 pack(float lo, float hi) {
  return D == BF16 ? Bf16::pack(lo, hi) : Fp16::pack(lo, hi);
}
#else
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
