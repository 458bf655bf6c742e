// What kernels/fp8/prompt.cuh takes beside hopper.cuh, for the host. Thread blocks run one after another here: one that waited
// for another would wait for ever.
#pragma once

inline emulator::Awaited counts_seen;

inline u32 take_one(u32* p) { return elect_one() ? (*p)++ : 0; }
inline void fence_async_global() {}
inline void count_done(u32* p) { ++*p, counts_seen.changed(); }
inline void wait_count(const u32* p, u32 count) {
  emulator::wait_until(counts_seen, "a count", [&] { return *p >= count; });
}

inline u32 larger_magnitudes(u32 a, u32 b) {
  const u32 high = std::max(a >> 16 & 0x7FFF, b >> 16 & 0x7FFF), low = std::max(a & 0x7FFF, b & 0x7FFF);
  return high << 16 | low;
}
