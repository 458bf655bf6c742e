// Codes of eight bits and what they are multiplied by, as attention has them: reference.py.

namespace quantrot {

constexpr int P_BITS = 8;  // probabilities are in e4m3 times 2^8

// 2^(byte - 127), NaN for 255.
__device__ __forceinline__ float power_of(int byte) {
  return byte == 255 ? __uint_as_float(0x7FC00000u) : __uint_as_float((u32)byte << 23);
}

// The byte for a largest magnitude, given as float32 bits (reference.scale_byte): the least power of two with which it
// is at most 448; 255 where it is no finite number.
__device__ __forceinline__ int scale_byte(u32 largest) {
  const int byte = (int)((largest + 0x1FFFFF) >> 23) - 8;
  if (largest >= 0x7F800000) return 255;
  return largest == 0 ? 127 : min(max(byte, 1), 254);
}

// 1 / power_of, 0 for 255.
__device__ __forceinline__ float inverse_of(int byte) {
  return byte == 255 ? 0.f : __uint_as_float((u32)(254 - byte) << 23);
}

// Of four numbers in e4m3.
__device__ __forceinline__ float sum_of_codes(u32 codes) {
  u32 low, high;
  unpack_e4m3(codes, low, high);
  auto both = [](u32 w) { return Fp16::value((unsigned short)w) + Fp16::value((unsigned short)(w >> 16)); };
  return both(low) + both(high);
}

// Codes in e4m3 with a power of two, or in int8 with a float. scale_of: for a largest magnitude, given as float32 bits;
// NaN stands for one that is no finite number, and then codes are 0.
struct E4m3 {
  using Scale = unsigned char;  // as it is stored
  using Sum = float;            // of products
  __device__ __forceinline__ static int scale_of(u32 largest) { return scale_byte(largest); }
  __device__ __forceinline__ static float value(int scale) { return power_of(scale); }
  __device__ __forceinline__ static float inverse(int scale) { return inverse_of(scale); }
  __device__ __forceinline__ static bool known(int scale) { return scale != 255; }
  __device__ __forceinline__ static u32 pack(float a, float b, float c, float d) { return to_e4m3(a, b, c, d); }
};

struct Int8 {
  using Scale = float;
  using Sum = int;
  __device__ __forceinline__ static float scale_of(u32 largest) {
    if (largest >= 0x7F800000) return __uint_as_float(0x7FC00000u);
    return __fmul_rn(fmaxf(__uint_as_float(largest), __uint_as_float(27u << 23)), 1.f / 127);  // 2^-100
  }
  __device__ __forceinline__ static float value(float scale) { return scale; }
  __device__ __forceinline__ static float inverse(float scale) { return 1.f / scale; }
  __device__ __forceinline__ static bool known(float scale) { return scale == scale; }
  // An integer is in the last bits of its sum with 1.5 * 2^23.
  __device__ __forceinline__ static u32 pack(float a, float b, float c, float d) {
    const u32 low = __byte_perm(bits_of_sum(a), bits_of_sum(b), 0x0040);
    return __byte_perm(low, __byte_perm(bits_of_sum(c), bits_of_sum(d), 0x0040), 0x5410);
  }
  __device__ __forceinline__ static u32 bits_of_sum(float x) { return __float_as_uint(__fadd_rn(x, 12582912.f)); }
};

}  // namespace quantrot
