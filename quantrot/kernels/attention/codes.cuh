// Powers of two in a byte (e8m0), as attention's codes have them: reference.py.

namespace quantrot {

constexpr int P_BITS = 8;  // probabilities are in e4m3 times 2^8

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000u); }

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

}  // namespace quantrot
