// What kernels/mxfp4/decode.cuh takes beside hopper.cuh, for the host: loads, bfloat16 pairs, and
// mma.m16n8k16, whose operands are gathered from the lanes that hold them.
#pragma once

inline void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const std::vector<u32> a[4] = {exchange(a0), exchange(a1), exchange(a2), exchange(a3)};
  const std::vector<u32> b[2] = {exchange(b0), exchange(b1)};
  const u32 g = lane_number() / 4, q = lane_number() % 4;
  for (u32 i = 0; i < 4; i++) {
    const u32 row = g + i / 2 * 8, column = q * 2 + i % 2;
    for (u32 k = 0; k < 16; k++) {
      const u32 left = a[row / 8 + k / 8 * 2][row % 8 * 4 + k % 8 / 2], right = b[k / 8][column * 4 + k % 8 / 2];
      d[i] += Bf16::value(left >> k % 2 * 16) * Bf16::value(right >> k % 2 * 16);
    }
  }
}

inline u32 load_shared_byte(u32 from) { return *self().block->at(from, 1); }

template <u32 SELECT>
inline u32 select_bytes(u32 a, u32 b) {
  const u64 bytes = (u64)b << 32 | a;
  u32 v = 0;
  for (int i = 0; i < 4; i++) {
    const u32 which = SELECT >> 4 * i & 15, byte = bytes >> (which & 7) * 8 & 255;
    v |= (which < 8 ? byte : byte >> 7 ? 255u : 0u) << 8 * i;
  }
  return v;
}
