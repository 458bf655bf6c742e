// What kernels/attention/int4_token.cuh takes beside one_token.h, for the host.
#pragma once

namespace quantrot {

inline u32 times_plus(u32 a, u32 b, u32 c) {
  const auto at = [&](u32 n) { return (double)Fp16::value(a >> n) * Fp16::value(b >> n) + Fp16::value(c >> n); };
  return Fp16::pack((float)at(0), (float)at(16));  // exact in float32 for the codes' operands
}

}  // namespace quantrot
