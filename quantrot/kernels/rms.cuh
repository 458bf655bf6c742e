// RMSNorm's factor of a row by the threads that share it: a sum of each 128 columns, then of those, in an order that is the same
// for any number of threads. Follows hopper.cuh.

namespace quantrot {

// The sum over 16 lanes, in the same order in each.
__device__ __forceinline__ float sum_of_half(float a) {
#pragma unroll
  for (int s = 1; s < 16; s *= 2) a += __shfl_xor_sync(0xFFFFFFFFu, a, s);
  return a;
}

// What RMSNorm multiplies a row of so many columns by, from the sums of squares of its `count` groups of 128, which lie `step`
// bytes apart at `sums`; by each half-warp, in one order.
__device__ __forceinline__ float norm_factor(u32 sums, int count, int step, int columns, float epsilon) {
  float sum = 0.f;
  for (int k = threadIdx.x % 16; k < count; k += 16) sum += load_shared(sums + k * step);
  return inverse_root(sum_of_half(sum) * (1.f / columns) + epsilon);
}

}  // namespace quantrot
