// RMSNorm (after multiply.cuh): x / sqrt(mean(x^2) + epsilon), rounded, times norm, rounded. One token goes through it in its
// product's kernel (decode.cuh); of more, each by a thread block of its own. A few tokens' product meanwhile asks for its codes.

namespace quantrot {

struct NormArgs {
  const void *x, *norm;  // [tokens, depth], [depth]
  void* y;               // contiguous
  const void* added;     // contiguous, or null: x + added, rounded, is what is normed, and stored in total
  void* total;
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
// past the end, where they are zeros. x and added, but not norm, are read after the kernel before this one has ended. With
// added [depth], x + added, rounded, takes the place of x, and is stored in total. WARPS sums meet at `sums`.
template <int VECTORS, int WARPS, class T, class Store>
__device__ __forceinline__ void rms_norm(const void* x, const void* norm, int depth, float epsilon, u32 sums,
                                         const Store& store, const void* added = nullptr, void* total = nullptr) {
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
  if (added) {
    Quad more[VECTORS];
    load(more, added);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
#pragma unroll
      for (int j = 0; j < 4; j++) v[i].w[j] = add_pair<T>(v[i].w[j], more[i].w[j]);
      if (at(i) < depth) *(Quad*)((unsigned short*)total + at(i)) = v[i];
    }
  }
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
  const i64 row = (i64)blockIdx.x * args.depth;
  const auto store = [&](int at, const Quad& out) {
    if (at < args.depth) *(Quad*)((unsigned short*)args.y + row + at) = out;
  };
  const void* const added = args.added ? (const unsigned short*)args.added + row : nullptr;
  rms_norm<VECTORS, WARPS, T>(x, args.norm, args.depth, args.epsilon, shared_memory(), store, added,
                              (unsigned short*)args.total + row);
}

}  // namespace quantrot
