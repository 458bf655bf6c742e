// Mixed-input products by tiles, on multiply.cuh.
//
//   prefill  persistent thread blocks; one warp feeds a ring of stages through the copy engine, GROUPS warpgroups of 64
//            rows multiply; the blocks of a cluster are neighbours in rows and share the wide tile.

namespace quantrot {

// --- Many columns ----------------------------------------------------------------------------------------------------

// The tiles of y for the blocks of a cluster, neighbours in rows: in groups of rows, columns inside. The last row of
// tiles of an odd number is for blocks that are neighbours in columns, and so do not share the wide tile.
template <class P>
struct MixedTiles {
  int rows, columns, group, odd;  // rows of clusters; whether there is another of tiles
  int size[2];                    // of y, in rows and columns

  __device__ __forceinline__ MixedTiles(const MixedArgs& args)
      : rows(P::ODD ? parts_of(args.rows, P::ROWS) / P::SHARE : parts_of(args.rows, P::ROWS * P::SHARE)),
        columns(parts_of(args.columns, P::COLUMNS)),
        group(args.tile_group),
        odd(P::ODD ? parts_of(args.rows, P::ROWS) % P::SHARE : 0),
        size{args.rows, args.columns} {}
  __device__ __forceinline__ int count() const { return rows * columns + odd * parts_of(columns, P::SHARE); }
  // The first row and column of the block `rank`'s tile, the last one's where there is none; whether the wide tile is its own.
  __device__ __forceinline__ bool at(int i, int rank, int& row, int& column) const {
    const bool apart = P::ODD && i >= rows * columns;
    if (apart) {
      row = rows * P::SHARE, column = (i - rows * columns) * P::SHARE + rank;
    } else {
      const int first = i / (group * columns) * group, inside = i - first * columns;
      const int height = min(group, rows - first);
      row = (first + inside % height) * P::SHARE + rank, column = inside / height;
    }
    row = start_of(row * P::ROWS, size[0], P::ROWS), column = start_of(column * P::COLUMNS, size[1], P::COLUMNS);
    return apart;
  }
};

// What a lane's two rows are finished with.
template <class O>
struct Ends {
  float scale[2] = {1.f, 1.f}, bias[2] = {0.f, 0.f};
  __device__ __forceinline__ Ends(const MixedArgs& args, const Lane& at) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      if (O::GROUP == 0) scale[r] = number<typename O::S>(args.scale, at.rows[r]);
      if (O::WEIGHT) bias[r] = number<typename O::B>(args.bias, at.rows[r]);
    }
  }
};

// A warpgroup's sums, of 2 W columns -> 16 bits -> shared memory -> y; row, column: its first.
template <class O, int W>
__device__ __forceinline__ void store_tile(const TensorMap* y, const MixedArgs& args, const Ends<O>& ends,
                                           const float (&sum)[W], int row, int column, u32 output, u32 barrier) {
  constexpr int COLUMNS = 2 * W;
  constexpr bool ALONE = COLUMNS % 16;  // the last matrix has no other beside it, and is stored twice
  static_assert(COLUMNS % (O::WEIGHT ? 8 : 16) == 0, "whole matrices");
  const u32 lane = lane_number(), warp = warp_number() % 4;
  const bool leader = threadIdx.x % 128 == 0;
  if (leader) tensor_store_wait<0>();
  named_sync(barrier, 128);
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; j += 2) {  // 16 columns
    u32 pairs[2][2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int n = ALONE ? min(j + i / 2, COLUMNS / 8 - 1) : j + i / 2, r = i % 2;
      float across[2] = {0.f, 0.f};
      if constexpr (!O::WEIGHT) {
#pragma unroll
        for (int e = 0; e < 2; e++)
          across[e] = number<typename O::B>(args.bias, min(column + n * 8 + (int)lane % 4 * 2 + e, args.columns - 1));
      }
      const float lo = finished<O>(sum[4 * n + 2 * r], ends.scale[r], O::WEIGHT ? ends.bias[r] : across[0]);
      const float hi = finished<O>(sum[4 * n + 2 * r + 1], ends.scale[r], O::WEIGHT ? ends.bias[r] : across[1]);
      pairs[i / 2][r] = O::T::pack(lo, hi);
    }
    const u32 inside = lane % 8, which = lane / 8;  // of the matrices: row r, then columns
    if constexpr (O::WEIGHT) {
      const u32 line = (ALONE && j == COLUMNS / 8 - 1 ? j : j + which / 2) * 8 + inside;
      store_matrices_turned(output + swizzled(line, (warp * 2 + which % 2) * 16), pairs[0][0], pairs[0][1], pairs[1][0],
                            pairs[1][1]);
    } else {
      const u32 line = warp * 16 + which % 2 * 8 + inside;
      auto put = [&](int at) {
        store_matrices(output + at / 4 * 4096 + swizzled64(line, (at % 4 + which / 2) * 16), pairs[0][0], pairs[0][1],
                       pairs[1][0], pairs[1][1]);
      };
      put(COLUMNS % 32 && j == COLUMNS / 8 - 2 ? j + 2 : j);
      if (COLUMNS % 32 && j == COLUMNS / 8 - 4) put(j + 2);  // the last box begins in the middle of the one before
    }
  }
  fence_async();
  named_sync(barrier, 128);
  if (leader) {
    if constexpr (O::WEIGHT) {
      tensor_store(y, row, column, output);
    } else {
      for (int c = 0; c < COLUMNS; c += 32) tensor_store(y, column + min(c, COLUMNS - 32), row, output + c * 128);
    }
    tensor_store_commit();
  }
}

template <class P, class O>
__device__ __forceinline__ void prefill(const TensorMap* codes, const TensorMap* wide, const TensorMap* y,
                                        const MixedArgs& args) {
  static_assert(P::SPLIT == 1 && P::COLUMNS % 16 == 0, "whole sums, boxes of 32 columns");
  static_assert(P::STAGES * (P::STAGE + 16) + P::GROUPS * P::OUTPUT <= 227 << 10, "shared memory");
  const u32 base = shared_memory(), output = base + P::STAGES * P::STAGE, full = output + P::GROUPS * P::OUTPUT;
  const u32 empty = full + P::STAGES * 8, warp = warp_number(), rank = P::SHARE > 1 ? cluster_rank() : 0;
  const MixedTiles<P> tiles(args);
  const int blocks = parts_of(parts_of(args.depth, 64), O::STEP) * O::STEP;
  if (warp == P::GROUPS * 4 && lane_number() == 0) {
    tensor_prefetch(codes), tensor_prefetch(wide), tensor_prefetch(y);
    for (int s = 0; s < P::STAGES; s++) {
      barrier_init(full + s * 8, 1);
      barrier_init(empty + s * 8, 4 * P::GROUPS * P::SHARE);
    }
    barrier_init_done();
  }
  if constexpr (P::SHARE > 1) {
    cluster_start();
  } else {
    block_sync();
  }
  if (!args.early) grid_wait();
  if (warp >= P::GROUPS * 4) {
    if constexpr (P::GROUPS == 2 || P::GROUPS == 4) give_registers<24>();
    if constexpr (P::GROUPS == 3) give_registers<32>();
    if (warp == P::GROUPS * 4) {
      const u64 policy = cache_policy<NORMAL>();
      const int first = blockIdx.x / P::SHARE;
      Loader<P> loader{codes, wide, base, full, empty, rank, policy, policy, (u32)args.box, {}};
      for (int i = first; i < tiles.count(); i += gridDim.x / P::SHARE) {
        int row, column;
        const bool apart = tiles.at(i, rank, row, column);
        for (int k = i == first ? loader.start(0, blocks, row, column, apart, args.early) : 0; k < blocks; k++)
          loader.next(k, row, column, apart);
      }
    }
  } else {
    if constexpr (P::GROUPS == 2) take_registers<240>();
    if constexpr (P::GROUPS == 3) take_registers<160>();
    if constexpr (P::GROUPS == 4) take_registers<112>();
    const u32 group = warp / 4;
    typename Chosen<P, O>::Type multiplier(args, group, base, full, empty, rank);
    for (int i = blockIdx.x / P::SHARE; i < tiles.count(); i += gridDim.x / P::SHARE) {
      int row, column;
      tiles.at(i, rank, row, column);
      row += group * 64;
      multiplier.lane.at(row, args.rows);
      float sum[P::W];
      multiplier.run(sum, 0, blocks);
      const Ends<O> ends(args, multiplier.lane);
#pragma unroll
      for (int p = 0; p < P::PASSES; p++) {
        float part[P::STORED / 2];
#pragma unroll
        for (int i = 0; i < P::STORED / 2; i++) part[i] = sum[p * (P::STORED / 2) + i];
        store_tile<O>(y, args, ends, part, row, column + p * P::STORED, output + group * P::OUTPUT, 1 + group);
      }
    }
    if (threadIdx.x % 128 == 0) tensor_store_wait<0>();
  }
  if constexpr (P::SHARE > 1) cluster_sync();  // a block that ended could still be written to
}

}  // namespace quantrot
