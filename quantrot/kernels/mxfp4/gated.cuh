// silu(gate) * up of bfloat16, in words of eight. Follows group.cuh.

namespace quantrot {

#ifdef QUANTROT_EMULATED
inline float reciprocal(float a) { return 1 / a; }
#else
__device__ __forceinline__ float reciprocal(float a) {  // to 1 ulp
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
  return r;
}
#endif

// x / (1 + exp(-x)) of a bfloat16, to be rounded to one: divisor and x by 16, for as long as exp(-x) is finite the divisor's
// reciprocal then is no subnormal.
__device__ __forceinline__ float silu(u32 bits) {
  const float x = Bf16::value((unsigned short)bits);
  return x * 0.0625f * reciprocal(fmaf(exp2_fast(x * -1.44269504f), 0.0625f, 0.0625f));
}

// silu(gate) * up, each rounded.
__device__ __forceinline__ Words gated(const Words& gate, const Words& up) {
  u32 y[4];
#pragma unroll
  for (int k = 0; k < 4; k++) y[k] = times_bf16(Bf16::pack(silu(gate.at(k)), silu(gate.at(k) >> 16)), up.at(k));
  return {y[0], y[1], y[2], y[3]};
}

}  // namespace quantrot
