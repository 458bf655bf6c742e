// What kernels/mxfp4/decode.cuh takes beside hopper.cuh, for the host: loads, bfloat16 pairs, a product by a warp.
#pragma once

inline void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  product_warp<Bf16>(d, {a0, a1, a2, a3}, b0, b1);
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
