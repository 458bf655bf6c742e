// What kernels/attention/decode.cuh takes beside hopper.cuh, for the host.
#pragma once

namespace quantrot {

inline void store_byte(u32 address, u32 a) { emulator::ordinary_write(address, &a, 1); }

}  // namespace quantrot
