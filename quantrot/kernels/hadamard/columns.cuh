// Five bits of the columns of a product's float32 sums: two that tell a lane's sums apart, and three that lie in the lanes.

namespace quantrot {

// How float32 sums enter a product: cut to tf32 by the hardware (11 bits), as the sum of two tf32 parts (22), or of two bfloat16
// parts (17).
enum Precision { CUT = 0, SPLIT = 1, PAIR = 2 };

#ifdef QUANTROT_EMULATED
inline u32 pack_finite(float lo, float hi) {
  const auto finite = [](float f) { return f != f ? f : std::max(-0x1.fep127f, std::min(f, 0x1.fep127f)); };
  return Bf16::pack(finite(lo), finite(hi));
}

inline void product8(float (&d)[4], u32 a0, u32 a1, u32 b, const float (&c)[4]) {
  const std::vector<u32> left[2] = {exchange(a0), exchange(a1)}, right = exchange(b);
  const u32 g = lane_number() / 4, q = lane_number() % 4;
  for (u32 i = 0; i < 4; i++) d[i] = c[i];
  for (u32 i = 0; i < 4; i++)
    for (u32 k = 0; k < 8; k++)
      d[i] += Bf16::value(left[i / 2][g * 4 + k / 2] >> k % 2 * 16) * Bf16::value(right[(q * 2 + i % 2) * 4 + k / 2] >> k % 2 * 16);
}

inline void sum_tf32(float (&d)[4], const float (&a)[4], float b0, float b1, const float (&c)[4]) {
  float sums[4] = {c[0], c[1], c[2], c[3]};
  product_tf32(sums, a, b0, b1);
  memcpy(d, sums, 16);
}

inline void sum_pairs(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c)[4]) {
  float sums[4] = {c[0], c[1], c[2], c[3]};
  product_warp<Bf16>(sums, a, b0, b1);
  memcpy(d, sums, 16);
}
#else
__device__ __forceinline__ u32 pack_finite(float lo, float hi) {  // as bfloat16; infinities become the largest number
  u32 r;
  asm("cvt.rn.satfinite.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

// d [16, 8] = a [16, 8] b [8, 8] + c in bfloat16 by a warp.
__device__ __forceinline__ void product8(float (&d)[4], u32 a0, u32 a1, u32 b, const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%9,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a0), "r"(a1), "r"(b), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// d [16, 8] = a [16, 8] b [8, 8] + c, float32 cut to tf32: a is row g + 8 (i % 2), column q + 4 (i / 2), b0 and b1 rows q and q + 4.
// Not d += ...: where one sum goes on in several ways, that would copy it first.
__device__ __forceinline__ void sum_tf32(float (&d)[4], const float (&a)[4], float b0, float b1, const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// d [16, 8] = a [16, 16] b [16, 8] + c in bfloat16.
__device__ __forceinline__ void sum_pairs(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}
#endif

// f as the tf32 number below it in magnitude (the product cuts f to it by itself), and the rest. An infinity's rest
// would be inf - inf; the minimum replaces that NaN by a number too small to matter (a true rest is at most 2^117),
// while a NaN stays one in f.
__device__ __forceinline__ float rest_tf32(float f) {
  return fminf(f - __uint_as_float(__float_as_uint(f) & 0xFFFFE000u), 0x1p118f);
}

// The same values, which the compiler takes for different ones: it keeps each in a register of its own, where it would
// make the four of an operand from one before every product. (A lane's number counts modulo 32.)
template <int W>
__device__ __forceinline__ void keep_apart(u32 (&a)[W], u32 salt) {
#pragma unroll
  for (int i = 0; i < W; i++) a[i] = __shfl_sync(0xFFFFFFFFu, a[i], threadIdx.x % 32 + 32 * (salt + i));
}

// Float32 sums of a product, as a product leaves them in a lane, as the sum of two bfloat16 parts: 17 bits. What the first
// part leaves is itself a product, with minus the identity, exact: four conversions and half a product for four numbers,
// where cutting bits off each of them takes twelve instructions. Of an infinity the first part is the largest number, so
// that what is left is an infinity and not inf - inf; a NaN is one in both.
struct Parts {
  u32 high[2], low[2];  // rows lane / 4 and + 8
};

__device__ __forceinline__ u32 minus_identity(u32 lane) {
  const u32 g = lane >> 2, q = lane & 3;
  return g / 2 != q ? 0 : g % 2 ? 0xBF800000u : 0xBF80u;
}

__device__ __forceinline__ Parts parts_of(float p0, float p1, float r0, float r1, u32 minus) {
  const u32 high[2] = {pack_finite(p0, p1), pack_finite(r0, r1)};
  float left[4];
  product8(left, high[0], high[1], minus, {p0, p1, r0, r1});
  return {{high[0], high[1]}, {pack<BF16>(left[0], left[1]), pack<BF16>(left[2], left[3])}};
}

// S_8 from the right, for sums as a product leaves them.
struct Eights {
  float b0, b1;  // S_8[2 q][g], S_8[2 q + 1][g]
  u32 pairs[4], minus;

  __device__ __forceinline__ explicit Eights(u32 lane) {
    const u32 g = lane >> 2;
    const u32 even = ((g >> 1 & lane) ^ (g >> 2 & lane >> 1)) & 1, odd = even ^ (g & 1);
    b0 = even ? -1.f : 1.f, b1 = odd ? -1.f : 1.f;
    const u32 both = 0x3F803F80u | even << 15 | odd << 31;
    pairs[0] = pairs[1] = both, pairs[2] = pairs[3] = both ^ 0x80008000u;
    minus = minus_identity(lane);
  }

  // d[i] is a group of eight columns; T (1, 2 or 4) groups in a row also sum over theirs, by 1, 3 or 11 products.
  template <int P, int T, int W>
  __device__ __forceinline__ void turn(float (&d)[W][4]) const {
    static_assert(T == 1 || T == 2 || T == 4, "groups of two, or of two twice");
#pragma unroll
    for (int t = 0; t < W; t += T) {
      float sums[T][4] = {};
#pragma unroll
      for (int j = 0; j < T; j++) {
        const float(&e)[4] = d[t + j];
        u32 w[4];
        if constexpr (P == PAIR) {
          const Parts v = parts_of(e[0], e[1], e[2], e[3], minus);
          w[0] = v.high[0], w[1] = v.high[1], w[2] = v.low[0], w[3] = v.low[1];
        }
        const int before = j < 2 ? 1 : j < 3 ? 2 : 4, after = j < 1 ? 1 : j < 2 ? 2 : 4;  // sums that differ
#pragma unroll
        for (int i = after - 1; i >= 0; i--) {
          const bool negative = (i & j ^ (i & j) >> 1) & 1;
          const float p0 = negative ? -b0 : b0, p1 = negative ? -b1 : b1;
          if constexpr (P == PAIR) {
            sum_pairs(sums[i], w, pairs[2 * negative], pairs[2 * negative + 1], sums[i % before]);
          } else {
            sum_tf32(sums[i], {e[0], e[2], e[1], e[3]}, p0, p1, sums[i % before]);
          }
          if constexpr (P == SPLIT)
            sum_tf32(sums[i], {rest_tf32(e[0]), rest_tf32(e[2]), rest_tf32(e[1]), rest_tf32(e[3])}, p0, p1, sums[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < T; i++)
#pragma unroll
        for (int k = 0; k < 4; k++) d[t + i][k] = sums[i][k];
    }
  }
};

}  // namespace quantrot
