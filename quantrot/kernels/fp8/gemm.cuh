// Block-scaled FP8 products for sm_90a: c [m, n] = sum over blocks of 128 along k of (a b^T) * a_scale * b_scale
// (+ bias).
//
// a [m, k] and b [n, k] are e4m3 with k contiguous. The tensor cores add 128 products in about 14 bits; each such sum
// is promoted, multiplied by the product of its two scales and added to float32 registers:
//
//   sum = fma(block, a_scale * b_scale, sum)    for the blocks in order
//
// With a scale of b for each of its rows, constant along k (CHANNEL), the last step is sum * b_scale instead.
//
// The kernels below do exactly this for every element, whatever the shape of their tiles, so that a token's result has
// the same bits in any batch. Where k is split between thread blocks for a few tokens, the parts are added in order,
// and the kernel for many tokens adds the same parts (SEGMENTED).
//
//   prefill.cuh  many tokens: persistent thread blocks; one warp feeds a ring of stages through the copy engine,
//                another brings the scales along, two warpgroups multiply, each a slab of 64 rows by 128 columns, in
//                clusters of two neighbours that share the tokens, or (WIDE) two slabs side by side, in quarters.
//   across.cuh   some hundred tokens: the same ring, but the weights are the operand of 64 rows and the tokens are its
//                columns, of which tiles have any multiple of 16.
//   decode.cuh   few tokens: the weights are the operand of 64 rows and the tokens are its columns, so that no tile is
//                padded to 64 rows of nothing; the blocks of a cluster split k and add their parts through each other's
//                shared memory.

namespace quantrot {

// Scales of a matrix: of row r and block of 128 columns k at data[(r >> row_shift) * row_stride + (k >> k_shift) *
// k_stride].
struct Scales {
  const float* data;
  int row_shift, k_shift;
  u32 row_stride, k_stride;

  __device__ __forceinline__ u32 row(int r) const { return (u32)(r >> row_shift) * row_stride; }
  __device__ __forceinline__ u32 column(int k) const { return (u32)(k >> k_shift) * k_stride; }
};

struct GemmArgs {
  Scales a, b;
  const void* bias;  // [n]
  void* c;
  int m, n, k;
  int segment;     // blocks of k whose sum is one part
  int tile_group;  // rows of tiles that run together, so that what they read stays in L2
  int box;         // rows that a copy brings of a: a tile's, or its share's, or fewer where there are no more
  const void* residual;  // [m, n], of c's type: few tokens' results, rounded, are added to it
  i64 residual_stride;   // of its rows, elements

  __device__ __forceinline__ Quad addend(int row, int column) const {
    return *(const Quad*)((const unsigned short*)residual + row * residual_stride + column);
  }
};

__device__ __forceinline__ int blocks_of(int size, int block) { return (size + block - 1) / block; }

// A column's sum -> its result in float32. CHANNEL: it has its own scale of b. BIAS: bytes of an element of the bias, 4
// (float32), 2 (Out) or 0 (there is none).
template <bool CHANNEL, class Out, int BIAS>
__device__ __forceinline__ float finished(const GemmArgs& args, float sum, int column) {
  const float y = CHANNEL ? __fmul_rn(sum, __ldg(args.b.data + args.b.row(column))) : sum;  // not fused with the bias
  if constexpr (BIAS == 4) return y + __ldg((const float*)args.bias + column);
  if constexpr (BIAS == 2) return y + Out::value(__ldg((const unsigned short*)args.bias + column));
  return y;
}

// d = a tile of 64 rows times `W * 2` rows of b, both in shared memory, over 128 of k.
template <int W>
__device__ __forceinline__ void product128(float (&d)[W], u32 a, u32 b) {
  product_fence();
#pragma unroll
  for (int k = 0; k < 4; k++) product(d, operand(a, k), operand(b, k), k > 0);
  product_commit();
}

}  // namespace quantrot
