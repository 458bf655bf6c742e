// What kernels/attention/one_token.cuh takes beside hopper.cuh, for the host.
#pragma once


namespace quantrot {

inline Quad load_plain(const unsigned short* p) {
  if ((uintptr_t)p % 16) emulator::fail("a load of 16 bytes that is not aligned");
  Quad v;
  memcpy(&v, p, 16);
  return v;
}
inline Quad load_once(const unsigned short* p) { return load_plain(p); }

// Lands at some later moment.
inline void send2(u32 mapped, u32 bar, float a, float b) {
  emulator::Block* block = &emulator::block_of(mapped);
  if (&emulator::block_of(bar) != block) fail("a barrier of another block than what is sent");
  emulator::scheduler.events.push_back([=] {
    const float both[2] = {a, b};
    memcpy(block->at(mapped, 8), both, 8);
    emulator::Barrier& barrier = block->barrier(bar);
    barrier.bytes -= 8;
    barrier.settle();
  });
}

inline u32 matrix_turned(u32 x) {
  const auto all = exchange(x);
  const u32 g = lane_number() / 4, q = lane_number() % 4;
  auto at = [&](u32 row) { return all[row * 4 + g / 2] >> g % 2 * 16 & 0xFFFF; };
  return at(2 * q) | at(2 * q + 1) << 16;
}

template <class T>
inline u32 times(u32 a, u32 b) {
  return T::pack(T::value(a) * T::value(b), T::value(a >> 16) * T::value(b >> 16));
}
template <class T>
inline u32 plus(u32 a, u32 b) {
  return T::pack(T::value(a) + T::value(b), T::value(a >> 16) + T::value(b >> 16));
}

}  // namespace quantrot
