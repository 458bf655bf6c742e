// What kernels/mxfp4/rows.cuh takes beside hopper.cuh, for the host: asynchronous copies land where they are issued.
#pragma once

inline void copy16(u32 to, const void* from) {
  if ((uintptr_t)from % 16 || to % 16) emulator::fail("a copy of 16 bytes that is not aligned");
  memcpy(self().block->at(to, 16), from, 16);
}

inline u32 load_shared32(u32 from) {
  u32 v;
  memcpy(&v, self().block->at(from, 4), 4);
  return v;
}
inline u32 next_number(u32 counter) {
  u32 number = 0;
  if (lane_number() == 0) {
    unsigned char* const at = self().block->at(counter, 4);
    memcpy(&number, at, 4);
    const u32 next = number + 1;
    memcpy(at, &next, 4);
  }
  return exchange(number)[0];
}
inline void store_shared16(u32 to, u32 v) { memcpy(self().block->at(to, 2), &v, 2); }
inline void store_shared32(u32 to, u32 v) { memcpy(self().block->at(to, 4), &v, 4); }

inline u32 to_e4m3_one(float f) {
  if (f != f) return 0x7F;
  const u32 sign = std::signbit(f) ? 0x80 : 0;
  const float m = std::min(std::fabs(f), 448.0f);
  if (m == 0) return sign;
  int e;
  std::frexp(m, &e);  // units in the last place of four significant bits, at least 2^-9
  const int ulp = std::max(e - 4, -9);
  const u32 n = (u32)std::nearbyint(std::ldexp(m, -ulp));
  return sign | (ulp == -9 ? n : (u32)(ulp + 9) * 8 + n);
}
inline u32 half_to_e4m3(u32 pair) { return to_e4m3_one(Fp16::value(pair)) | to_e4m3_one(Fp16::value(pair >> 16)) << 8; }

inline u32 __funnelshift_l(u32 low, u32 high, u32 shift) { return (u32)(((u64)high << 32 | low) << shift >> 32); }

inline int warp_max(int v) {
  int most = v;
  for (u32 other : exchange(v)) most = std::max(most, (int)other);
  return most;
}
inline int warp_sum(int v) {
  int sum = 0;
  for (u32 other : exchange(v)) sum += (int)other;
  return sum;
}
inline int* block_numbers(int at) { return (int*)(self().block->memory.data() + at); }
