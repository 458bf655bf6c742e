// Some tokens, as columns (see gemm.cuh and prefill.cuh, which come before this file).

namespace quantrot {

// Two warpgroups multiply, each 64 rows of b (columns of c) by all TOKENS of the tile: of one thread block, or (PAIR) of two
// of a cluster, which share the tokens and have registers for two sets of sums each. The tensor core's columns are rounded up
// to 8 where its rows would be to 64, so that 129 tokens take 144 of them and not 192 or 256.
template <int TOKENS, int STAGES, bool PAIR>
struct AcrossShape {
  static constexpr int GROUPS = PAIR ? 1 : 2, CLUSTER = PAIR ? 2 : 1, SETS = PAIR ? 2 : 1;
  static constexpr int ROWS = TOKENS, COLUMNS = 64 * GROUPS, W = TOKENS / 2;  // W: sums of a thread
  static constexpr int DOWN = 1, RIGHT = CLUSTER;                             // a cluster's tiles
  static constexpr int A_BYTES = ROWS * 128, B_BYTES = COLUMNS * 128, STAGE = A_BYTES + B_BYTES;
  static constexpr int SCALES = ROWS * 4 + 16;    // of a stage: a token's each, then b's
  static constexpr int OUTPUT = TOKENS * 64 * 2;  // of a warpgroup: c on its way, in rows of 64 columns
  static_assert(STAGES * (STAGE + SCALES + 16) + GROUPS * OUTPUT <= 227 << 10, "shared memory");
  static_assert(TOKENS % 16 == 0, "whole matrices, and boxes of whole groups of eight");
};

// A warpgroup's sums -> 16 bits -> shared memory, turned -> c; row, column: its first token and column.
template <class Shape, bool CHANNEL, class Out, int BIAS>
__device__ __forceinline__ void store_across(const TensorMap* c, const GemmArgs& args, const float (&sum)[Shape::W],
                                             int row, int column, u32 output, u32 barrier) {
  const u32 lane = lane_number(), warp = warp_number() % 4;
  const bool leader = threadIdx.x % 128 == 0;
  if (leader) tensor_store_wait<0>();  // the tile before this one
  named_sync(barrier, 128);
  const int own = column + (int)(warp * 16 + lane / 4), at[2] = {min(own, args.n - 1), min(own + 8, args.n - 1)};
#pragma unroll
  for (int j = 0; j < Shape::ROWS / 8; j += 2) {  // 16 tokens
    u32 word[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int first = 4 * (j + i / 2) + i % 2 * 2;
      word[i] = Out::pack(finished<CHANNEL, Out, BIAS>(args, sum[first], at[i % 2]),
                          finished<CHANNEL, Out, BIAS>(args, sum[first + 1], at[i % 2]));
    }
    const u32 which = lane / 8, line = (j + which / 2) * 8 + lane % 8;
    store_matrices_turned(output + swizzled(line, (warp * 2 + which % 2) * 16), word[0], word[1], word[2], word[3]);
  }
  fence_async();
  named_sync(barrier, 128);
  if (leader) {
    tensor_store(c, column, row, output);
    tensor_store_commit();
  }
}

// With two SETS of the tensor cores' sums one block of k is promoted while the next is multiplied.
template <class Shape, int STAGES, bool CHANNEL, class Out, int BIAS>
__device__ __forceinline__ void across_multiply(const TensorMap* c, const GemmArgs& args, Tiles<Shape> tiles,
                                                int blocks, u32 base, u32 output, u32 scales, u32 full, u32 empty) {
  constexpr int CLUSTER = Shape::CLUSTER, W = Shape::W;
  const u32 group = warp_number() / 4, rank = CLUSTER > 1 ? cluster_rank() : 0, own = lane_number() % 4 * 8;
  Ring<STAGES> ring, behind;
  for (int i = blockIdx.x / CLUSTER; i < tiles.count(); i += gridDim.x / CLUSTER) {
    float sum[W], d[Shape::SETS][W];
#pragma unroll
    for (int j = 0; j < W; j++) sum[j] = 0.f;
    auto open = [&](int set) {
      const u32 a = base + ring.stage * Shape::STAGE, b = a + Shape::A_BYTES + group * 8192;
      barrier_wait(full + ring.stage * 8, ring.parity);
      product128(d[set], b, a);
      ring.next();
    };
    auto close = [&](int set) {
      constexpr int PIECES = W > 88 ? 2 : 1, EACH = W / 4 / PIECES;  // more scales at once would not fit
      const u32 from = scales + behind.stage * Shape::SCALES;
      const float by = CHANNEL ? 1.f : load_shared(from + Shape::ROWS * 4);
#pragma unroll
      for (int piece = 0; piece < PIECES; piece++) {
        float2 scale[EACH];  // before the sums are touched: between them the compiler would wait for the next products
#pragma unroll
        for (int j = 0; j < EACH; j++) scale[j] = load_shared2(from + own + (piece * EACH + j) * 32);
        if (piece == 0) product_done(d[set]);
        if (piece + 1 == PIECES) {
          warp_sync();  // every lane has its scales
          release<CLUSTER>(empty + behind.stage * 8);
        }
#pragma unroll
        for (int j = 0; j < W / PIECES; j++) {
          const float2 mine = scale[j / 4];
          float& to = sum[piece * EACH * 4 + j];
          to = fmaf(d[set][piece * EACH * 4 + j], (j % 2 ? mine.y : mine.x) * by, to);
        }
      }
      behind.next();
    };
    if constexpr (Shape::SETS == 1) {
      for (int k = 0; k < blocks; k++) {
        open(0);
        product_wait<0>();
        close(0);
      }
    } else {
      open(0);
      int k = 1;
      for (; k + 1 < blocks; k += 2) {
        open(1);
        product_wait<1>();
        close(0);
        open(0);
        product_wait<1>();
        close(1);
      }
      if (k < blocks) {
        open(1);
        product_wait<1>();
        close(0);
        product_wait<0>();
        close(1);
      } else {
        product_wait<0>();
        close(0);
      }
    }
    int row, column;
    tiles.at(i, rank, row, column);
    store_across<Shape, CHANNEL, Out, BIAS>(c, args, sum, row, column + group * 64, output + group * Shape::OUTPUT,
                                            1 + group);
  }
  if (threadIdx.x % 128 == 0) tensor_store_wait<0>();
}

template <int TOKENS, int STAGES, bool PAIR, bool EARLY, bool CHANNEL, class Out, int BIAS>
__device__ __forceinline__ void across(const TensorMap* a, const TensorMap* b, const TensorMap* c,
                                       const GemmArgs& args) {
  using Shape = AcrossShape<TOKENS, STAGES, PAIR>;
  constexpr int GROUPS = Shape::GROUPS;
  const u32 base = shared_memory(), output = base + STAGES * Shape::STAGE, scales = output + GROUPS * Shape::OUTPUT;
  const u32 full = scales + STAGES * Shape::SCALES, empty = full + STAGES * 8, warp = warp_number();
  const Tiles<Shape> tiles(args);
  const int blocks = blocks_of(args.k, 128);
  prefill_start<Shape, STAGES>(a, b, c, full, empty);
  if (!EARLY || warp != GROUPS * 4) grid_wait();
  if (warp >= GROUPS * 4) {
    if constexpr (!PAIR) give_registers<24>();
    if (warp == GROUPS * 4) prefill_load<Shape, STAGES, EARLY>(a, b, tiles, blocks, base, full, empty, args.box);
    if (warp == GROUPS * 4 + 1) prefill_scales<Shape, STAGES, CHANNEL>(args, tiles, blocks, scales, full, empty);
  } else {
    if constexpr (!PAIR) take_registers<240>();
    across_multiply<Shape, STAGES, CHANNEL, Out, BIAS>(c, args, tiles, blocks, base, output, scales, full, empty);
  }
  if constexpr (PAIR) cluster_sync();  // a block that ended could still be written to
}

}  // namespace quantrot
