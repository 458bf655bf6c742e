// silu(gate) * up of 16-bit matrices (after hopper.cuh and hadamard/words.cuh).

namespace quantrot {

// x / (1 + exp(-x)), rounded to 16 bits as torch's is. Of a bfloat16 by three fast operations, which a test compares for every
// one (2048 x 14336: 44 us for 64): the divisor, and with it x, by 16, as long as exp(-x) is finite its reciprocal is no
// subnormal. A float16 is nearer to a tie. There the quotient is correctly rounded without a branch: two corrections by the exact
// remainder. Where x or the divisor is infinite there is none, and -0 minus a remainder of nothing would be +0.
template <int D>
__device__ __forceinline__ float silu(float x) {
  if constexpr (D == BF16) return x * 0.0625f * reciprocal(fmaf(exp2_fast(x * -1.44269504f), 0.0625f, 0.0625f));
  const float below = 1.f + expf(-x), by = below > 0x1p64f ? 0x1p-64f : 1.f;
  const float top = x * by, bottom = below * by, rough = reciprocal(bottom);
  const float inverse = fmaf(fmaf(-bottom, rough, 1.f), rough, rough);
  float q = top * inverse;
#pragma unroll
  for (int i = 0; i < 2; i++) q = fmaf(fmaf(-bottom, q, top), inverse, q);
  return q == q ? copysignf(q, x) : top * rough;
}

// silu(gate) * up, each rounded to 16 bits.
template <int D>
__device__ __forceinline__ Vec gated(const Vec& gate, const Vec& up) {
  Vec y;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    float a, b, c, d;
    unpack<D>(gate.w[j], a, b);
    unpack<D>(up.w[j], c, d);
    unpack<D>(pack<D>(silu<D>(a), silu<D>(b)), a, b);
    y.w[j] = pack<D>(a * c, b * d);
  }
  return y;
}

struct GateArgs {
  const unsigned short* x;  // rows of gate and up, `columns` numbers each, contiguous
  unsigned short* y;        // rows of `columns`, contiguous
  u32 vectors;              // of eight numbers, of y
  u32 across;               // of those, of a row
};

// EACH vectors a thread, a thread block's side by side: all are asked for before the first is used.
template <int D, int EACH, int THREADS>
__device__ __forceinline__ void gate_kernel(const GateArgs& args) {
  const u32 first = blockIdx.x * (EACH * THREADS) + threadIdx.x;
  Vec gate[EACH], up[EACH];
  launch_dependents();
  grid_wait();
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const u32 at = first + i * THREADS;
    if (at >= args.vectors) break;
    const unsigned short* const from = args.x + ((i64)at + at / args.across * args.across) * 8;
    gate[i] = load16(from), up[i] = load16(from + args.across * 8);
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const u32 at = first + i * THREADS;
    if (at < args.vectors) store16(args.y + (i64)at * 8, gated<D>(gate[i], up[i]));
  }
}

}  // namespace quantrot
