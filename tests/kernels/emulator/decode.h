// What kernels/attention/decode.cuh takes beside hopper.cuh, for the host.
#pragma once

namespace quantrot {

inline void line_load(u32 to, const void* from, u32 bytes, u32 bar) {
  if (!elect_one()) return;
  if ((u64)from % 16 || bytes % 16 || to % 16) fail("a copy that the hardware does not take");
  emulator::Block* block = self().block;
  emulator::scheduler.events.push_back([=] {
    memcpy(block->at(to, bytes), from, bytes);
    emulator::Barrier& barrier = block->barrier(bar);
    barrier.bytes -= bytes;
    barrier.settle();
  });
}

inline float4 load_fresh4(const float* p) { return fresh4(p); }
inline float2 load_fresh2(const float* p) { return fresh2(p); }

inline void store_byte(u32 address, u32 a) { emulator::ordinary_write(address, &a, 1); }
inline void store_two_bytes(u32 address, u32 a) { emulator::ordinary_write(address, &a, 2); }

}  // namespace quantrot
