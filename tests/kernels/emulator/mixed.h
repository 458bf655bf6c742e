// What kernels/mixed takes beside hopper.cuh, for the host: a code's value, 16 bytes of shared memory, and
// mma.m16n8k16, whose operands are gathered from the lanes that hold them.
#pragma once

namespace quantrot {

template <int KIND>
inline float code_value(u32 byte) {
  if (KIND == 0) return (float)(signed char)byte;
  if (KIND == 1) return (float)(byte & 255);
  if (KIND == 2) return (float)(byte & 255) - 128;
  return emulator::from_e4m3(byte & 255);
}

inline Quad load_shared16bytes(u32 address) {
  if (address % 16) emulator::fail("a load of 16 bytes that is not aligned");
  Quad v;
  memcpy(&v, self().block->at(address, 16), 16);
  return v;
}

template <class T>
inline void multiply16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const std::vector<u32> left[4] = {exchange(a[0]), exchange(a[1]), exchange(a[2]), exchange(a[3])};
  const std::vector<u32> right[2] = {exchange(b0), exchange(b1)};
  const u32 g = lane_number() / 4, q = lane_number() % 4;
  for (u32 i = 0; i < 4; i++) {
    const u32 row = g + i / 2 * 8, column = q * 2 + i % 2;
    for (u32 k = 0; k < 16; k++) {
      const u32 pair = left[row / 8 + k / 8 * 2][row % 8 * 4 + k % 8 / 2], other = right[k / 8][column * 4 + k % 8 / 2];
      d[i] += T::value(pair >> k % 2 * 16) * T::value(other >> k % 2 * 16);
    }
  }
}

}  // namespace quantrot
