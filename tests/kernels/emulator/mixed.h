// What the conversions of kernels/mixed take on the host: a code's value.
#pragma once

namespace quantrot {

template <int KIND>
inline float code_value(u32 byte) {
  if (KIND == 0) return (float)(signed char)byte;
  if (KIND == 1) return (float)(byte & 255);
  if (KIND == 2) return (float)(byte & 255) - 128;
  return emulator::from_e4m3(byte & 255);
}

}  // namespace quantrot
