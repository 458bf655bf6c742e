// What kernels/mxfp4/columns.cuh takes beside rows.cuh, for the host: ldmatrix of four tiles, turned.
#pragma once

inline u32 larger_halves(u32 a, u32 b) { return std::max(a & 0xFFFF, b & 0xFFFF) | std::max(a >> 16, b >> 16) << 16; }
template <int SECOND>
inline u32 times_one_half(u32 a, u32 b) {
  return times_half(a, (SECOND ? b >> 16 : b & 0xFFFF) * 0x10001);
}
inline u32 larger_magnitudes(u32 a, u32 b) {  // float16's bits are in the order of magnitudes
  return larger_halves(a & 0x7FFF7FFF, b & 0x7FFF7FFF) | ((a ^ b) & 0x80008000);
}
inline u32 sum_of_magnitudes(u32 a, u32 b) { return fma_half(a & 0x7FFF7FFF, 0x3C003C00, b & 0x7FFF7FFF); }
inline unsigned products_in_float16 = 0;
inline void product(u32 (&d)[2], const u32 (&a)[4], u32 b0, u32 b1) {
  products_in_float16++;
  float sums[4] = {Fp16::value(d[0]), Fp16::value(d[0] >> 16), Fp16::value(d[1]), Fp16::value(d[1] >> 16)};
  product_warp<Fp16>(sums, a, b0, b1);
  d[0] = Fp16::pack(sums[0], sums[1]), d[1] = Fp16::pack(sums[2], sums[3]);
}

inline Words load_columns(u32 from) {
  Words mine;
  if (from % 16) emulator::fail("a row of 16 bytes that is not aligned");
  memcpy(&mine, self().block->at(from, 16), 16);
  const auto rows = exchange({mine.x, mine.y, mine.z, mine.w});
  const u32 column = lane_number() / 4, row = lane_number() % 4 * 2;
  u32 words[4];
  for (u32 tile = 0; tile < 4; tile++) {
    const auto element = [&](u32 r) { return rows[column / 2][tile * 8 + r] >> 16 * (column % 2) & 0xFFFF; };
    words[tile] = element(row) | element(row + 1) << 16;
  }
  return {words[0], words[1], words[2], words[3]};
}
inline void store_shared_byte(u32 to, u32 v) { *self().block->at(to, 1) = (unsigned char)v; }
inline void load_shared_two(u32 from, u32 (&words)[2]) { memcpy(words, self().block->at(from, 8), 8); }
