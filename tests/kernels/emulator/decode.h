// What kernels/attention/decode.cuh takes beside hopper.cuh, for the host.
#pragma once

namespace quantrot {

inline float4 load_fresh4(const float* p) { return fresh4(p); }
inline float2 load_fresh2(const float* p) { return fresh2(p); }

inline void store_byte(u32 address, u32 a) { emulator::ordinary_write(address, &a, 1); }

}  // namespace quantrot
