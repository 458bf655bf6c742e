// What kernels/mxfp4/decode.cuh takes beside hopper.cuh, for the host: loads, bfloat16 pairs, a product by a warp.
#pragma once

inline void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  product_warp<Bf16>(d, {a0, a1, a2, a3}, b0, b1);
}

inline void multiply_bytes(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const auto all = exchange({a0, a1, a2, a3, b0, b1});
  const u32 g = lane_number() / 4, q = lane_number() % 4;
  for (u32 k = 0; k < 32; k++) {
    const u32 half = k / 16, lane = k % 16 / 4, shift = k % 4 * 8;
    for (u32 i = 0; i < 4; i++) {
      const u32 a = all[i / 2 + half * 2][g * 4 + lane] >> shift, b = all[4 + half][(q * 2 + i % 2) * 4 + lane] >> shift;
      d[i] += (signed char)a * (signed char)b;
    }
  }
}

inline u32 load_shared_byte(u32 from) { return *self().block->at(from, 1); }
