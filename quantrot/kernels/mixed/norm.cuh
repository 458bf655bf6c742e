// RMSNorm in front of a product of a few tokens (after multiply.cuh): x / sqrt(mean(x^2) + epsilon), rounded, times norm,
// rounded. One token goes through it in the product's kernel (decode.cuh); of more, each by a thread block of its own, whose
// product meanwhile asks for its codes.

namespace quantrot {

struct NormArgs {
  const void *x, *norm;  // [tokens, depth], [depth]
  void* y;               // contiguous
  i64 x_stride;          // in elements
  int depth;
  float epsilon;
  int early;  // whether no kernel that may still run writes norm
};

__device__ __forceinline__ float sum_of_warp(float a) {  // in the same order in each lane
#pragma unroll
  for (int s = 1; s < 32; s *= 2) a += __shfl_xor_sync(0xFFFFFFFFu, a, s);
  return a;
}

// Of x [depth] by so many warps, eight numbers at a time, VECTORS of them a thread at most: store(column, four pairs), also
// past the end, where they are zeros. x, but not norm, is read after the kernel before this one has ended. WARPS sums meet at
// `sums`.
template <int VECTORS, int WARPS, class T, class Store>
__device__ __forceinline__ void rms_norm(const void* x, const void* norm, int depth, float epsilon, u32 sums,
                                         const Store& store) {
  constexpr int THREADS = 32 * WARPS;
  Quad weight[VECTORS], v[VECTORS];
  auto at = [](int i) { return (int)(i * THREADS + threadIdx.x) * 8; };
  auto load = [&](Quad (&found)[VECTORS], const void* from) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      found[i] = Quad{};
      if (at(i) < depth) found[i] = *(const Quad*)((const unsigned short*)from + at(i));
    }
  };
  load(weight, norm);
  grid_wait();  // a second time where nothing may be read early
  load(v, x);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < VECTORS * 8; i++) {
    const float a = T::value(v[i / 8].w[i / 2 % 4] >> i % 2 * 16);
    sum = fmaf(a, a, sum);
  }
  sum = sum_of_warp(sum);
  if (lane_number() == 0) store_shared(sums + threadIdx.x / 32 * 4, sum);
  named_sync(1, THREADS);
  sum = sum_of_warp(lane_number() < WARPS ? load_shared(sums + lane_number() * 4) : 0.f);
  const float factor = inverse_root(sum * (1.f / depth) + epsilon);
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    Quad y;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const u32 pair = v[i].w[j];
      y.w[j] = multiply_pair<T>(T::pack(T::value(pair) * factor, T::value(pair >> 16) * factor), weight[i].w[j]);
    }
    store(at(i), y);
  }
}

template <int VECTORS, int WARPS, class T>
__device__ __forceinline__ void norm_kernel(const NormArgs& args) {
  launch_dependents();
  if (!args.early) grid_wait();
  const void* const x = (const unsigned short*)args.x + blockIdx.x * args.x_stride;
  unsigned short* const y = (unsigned short*)args.y + (i64)blockIdx.x * args.depth;
  rms_norm<VECTORS, WARPS, T>(x, args.norm, args.depth, args.epsilon, shared_memory(), [&](int at, const Quad& out) {
    if (at < args.depth) *(Quad*)(y + at) = out;
  });
}

}  // namespace quantrot
