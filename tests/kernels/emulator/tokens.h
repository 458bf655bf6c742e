// What kernels/mxfp4/tokens.cuh takes beside group.cuh, for the host.
#pragma once

inline void store_shared_words(u32 to, const Words& v) {
  if (to % 16) emulator::fail("a store of 16 bytes that is not aligned");
  emulator::ordinary_write(to, &v, 16);
}
