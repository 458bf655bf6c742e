// What kernels/mxfp4/tokens.cuh takes beside group.cuh, for the host.
#pragma once

inline Words load_fresh_words(const void* p) {
  if (!self().waited) emulator::fail("a load before grid_wait of what the kernel before writes");
  if ((uintptr_t)p % 16) emulator::fail("a load of 16 bytes that is not aligned");
  Words v;
  memcpy(&v, p, 16);
  return v;
}
inline void store_shared_words(u32 to, const Words& v) {
  if (to % 16) emulator::fail("a store of 16 bytes that is not aligned");
  emulator::ordinary_write(to, &v, 16);
}
