// What kernels/mxfp4/columns.cuh takes beside rows.cuh, for the host: ldmatrix of four tiles, turned.
#pragma once

inline float __fdividef(float a, float b) { return a / b; }
inline u32 larger_halves(u32 a, u32 b) { return std::max(a & 0xFFFF, b & 0xFFFF) | std::max(a >> 16, b >> 16) << 16; }

inline Words load_columns(u32 from) {
  Words mine;
  if (from % 16) emulator::fail("a row of 16 bytes that is not aligned");
  memcpy(&mine, self().block->at(from, 16), 16);
  const std::vector<u32> rows[4] = {exchange(mine.x), exchange(mine.y), exchange(mine.z), exchange(mine.w)};
  const u32 column = lane_number() / 4, row = lane_number() % 4 * 2;
  u32 words[4];
  for (u32 tile = 0; tile < 4; tile++) {
    const auto element = [&](u32 r) { return rows[column / 2][tile * 8 + r] >> 16 * (column % 2) & 0xFFFF; };
    words[tile] = element(row) | element(row + 1) << 16;
  }
  return {words[0], words[1], words[2], words[3]};
}
inline void load_shared_two(u32 from, u32 (&words)[2]) { memcpy(words, self().block->at(from, 8), 8); }
