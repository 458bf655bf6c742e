// What kernels/hadamard/common.cuh and stream.cuh take beside words.cuh, for the host: products by a warp,
// and shared memory by ordinary loads and stores.
#pragma once

struct longlong2 {
  long long x, y;
};
inline void __syncthreads() { block_sync(); }
inline void __syncwarp() { warp_sync(); }
template <int BYTES, int ROWS>
inline void warm_rows(const void*, long long, long long, long long) {}
using std::min;

template <int D>
inline void mma16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  product_warp<std::conditional_t<D == BF16, Bf16, Fp16>>(d, {a0, a1, a2, a3}, b0, b1);
}

inline void mma_tf32(float (&d)[4], const u32 (&a)[4], float b0, float b1) {
  float wide[4];
  for (int i = 0; i < 4; i++) memcpy(&wide[i], &a[i], 4);
  product_tf32(d, wide, b0, b1);
}

inline void copy_ahead(u32 to, const void* from) { copy16(to, from, true); }

inline Vec load_vec_shared(u32 from) { return load_vector(from); }
inline float4 load_shared16(u32 from) {
  float4 v;
  memcpy(&v, self().block->at(from, 16), 16);
  return v;
}
inline void store_shared16(u32 to, float a, float b, float c, float d) {
  const float v[4] = {a, b, c, d};
  emulator::ordinary_write(to, v, 16);
}
inline void load_shared8(u32 from, float& a, float& b) {
  memcpy(&a, self().block->at(from, 4), 4), memcpy(&b, self().block->at(from + 4, 4), 4);
}
inline void load_shared4(u32 from, float& a) { memcpy(&a, self().block->at(from, 4), 4); }
inline void store_shared4(u32 to, float a) { emulator::ordinary_write(to, &a, 4); }
