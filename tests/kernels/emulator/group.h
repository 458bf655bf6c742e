// What kernels/mxfp4/group.cuh takes beside hopper.cuh, for the host.
#pragma once

inline Words load_shared_words(u32 from) {
  if (from % 16) emulator::fail("a load of 16 bytes that is not aligned");
  Words v;
  memcpy(&v, self().block->at(from, 16), 16);
  return v;
}
inline void store_shared_words(u32 to, const Words& v) {
  if (to % 16) emulator::fail("a store of 16 bytes that is not aligned");
  emulator::ordinary_write(to, &v, 16);
}
inline Words load_fresh_words(const void* p) {
  if (!self().waited) emulator::fail("a load before grid_wait of what the kernel before writes");
  if ((uintptr_t)p % 16) emulator::fail("a load of 16 bytes that is not aligned");
  Words v;
  memcpy(&v, p, 16);
  return v;
}
inline void store_words(void* p, const Words& v) {
  if ((uintptr_t)p % 16) emulator::fail("a store of 16 bytes that is not aligned");
  memcpy(p, &v, 16);
}

inline float max_nan(float a, float b) { return a != a || b != b ? NAN : std::max(a, b); }
inline u32 times_bf16(u32 a, u32 b) {
  return Bf16::pack(Bf16::value(a) * Bf16::value(b), Bf16::value(a >> 16) * Bf16::value(b >> 16));
}

template <class F>
inline u32 halves(u32 a, u32 b, const F& f) {
  return Fp16::pack(f(Fp16::value(a), Fp16::value(b)), f(Fp16::value(a >> 16), Fp16::value(b >> 16)));
}
inline u32 clamp_half(u32 a, u32 limit) {
  return halves(a, limit, [](float v, float most) { return v != v ? most : std::clamp(v, -most, most); });
}
inline u32 within_half(u32 a, u32 limit) {
  return halves(a, limit, [](float v, float most) { return std::fabs(v) <= most ? 1.f : 0.f; });
}
inline u32 fma_half(u32 a, u32 b, u32 c) {
  const u32 product = halves(a, b, [](float v, float w) { return v * w; });  // exact where it is taken
  return halves(product, c, [](float v, float w) { return v + w; });
}
inline u32 times_half(u32 a, u32 b) {
  return halves(a, b, [](float v, float w) { return v * w; });
}

inline u32 select_bits(u32 a, u32 b, u32 mask) { return (a & ~mask) | (b & mask); }
inline float __uint_as_float(u32 u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
inline u32 __float_as_uint(float f) {
  u32 u;
  memcpy(&u, &f, 4);
  return u;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline int __popc(u32 v) { return __builtin_popcount(v); }

inline float other_lane(float v, int across) {
  return __uint_as_float(exchange(__float_as_uint(v))[lane_number() ^ across]);
}
inline u32 truncated_halves(float low, float high) {
  u32 halves[2] = {Fp16::pack(low, 0), Fp16::pack(high, 0)};
  for (int i = 0; i < 2; i++) halves[i] -= std::fabs(Fp16::value(halves[i])) > std::fabs(i ? high : low);
  return halves[0] | halves[1] << 16;
}
inline float opaque(float v) { return v; }
inline u32 opaque(u32 v) { return v; }
