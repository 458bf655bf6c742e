// Many tokens (see gemm.cuh, which comes before this file).

namespace quantrot {

template <int STAGES, int CLUSTER_, bool WIDE_, int BOXES_ = 3>
struct PrefillShape {
  static constexpr bool WIDE = WIDE_;
  static constexpr int GROUPS = 2, SLABS = WIDE ? 2 : 1;  // warpgroups that multiply, tiles of 64 x 128 of each
  static constexpr int CLUSTER = CLUSTER_, ROWS = 64 * GROUPS, COLUMNS = 128 * SLABS;
  static constexpr int DOWN = WIDE ? CLUSTER : 1, RIGHT = CLUSTER / DOWN;  // a cluster's tiles, which share b or a
  static constexpr int A_BYTES = ROWS * 128, B_BYTES = COLUMNS * 128, STAGE = A_BYTES + B_BYTES;
  static constexpr int SCALES = ROWS * 4 + 16;             // of a stage: a row's of a each, then 128 columns' of b each
  static constexpr int BOXES = BOXES_, BOX = 8 * 64 * 2, OUTPUT = BOXES * BOX;  // of a warp: c on its way, 8 x 64 a box
  static constexpr int LAST = COLUMNS * 8;  // of a warpgroup: what is done to its columns at the end, see fetch_columns
  static_assert(STAGES * (STAGE + SCALES + 16) + GROUPS * (4 * OUTPUT + LAST) <= 227 << 10, "shared memory");
};

// The tiles of c by clusters, which take neighbours; in groups of rows, columns inside.
template <class Shape>
struct Tiles {
  int rows, columns, group, m;

  __device__ __forceinline__ explicit Tiles(const GemmArgs& args)
      : rows(blocks_of(args.m, Shape::ROWS * Shape::DOWN)),
        columns(blocks_of(args.n, Shape::COLUMNS * Shape::RIGHT)),
        group(args.tile_group),
        m(args.m) {}
  __device__ __forceinline__ int count() const { return rows * columns; }
  __device__ __forceinline__ void at(int i, int rank, int& row, int& column) const {  // of c
    const int first = i / (group * columns) * group, inside = i - first * columns;
    const int height = min(group, rows - first);
    row = start_of(((first + inside % height) * Shape::DOWN + rank % Shape::DOWN) * Shape::ROWS, m, Shape::ROWS);
    column = (inside / height * Shape::RIGHT + rank % Shape::RIGHT) * Shape::COLUMNS;
  }
};

// The barriers, by the warp that loads.
template <class Shape, int STAGES>
__device__ __forceinline__ void prefill_start(const TensorMap* a, const TensorMap* b, const TensorMap* c, u32 full,
                                              u32 empty) {
  if (warp_number() == Shape::GROUPS * 4 && lane_number() == 0) {
    tensor_prefetch(a), tensor_prefetch(b), tensor_prefetch(c);
    for (int s = 0; s < STAGES; s++) {
      barrier_init(full + s * 8, 1 + 32);  // for the tiles' bytes, and by every lane that copies scales
      barrier_init(empty + s * 8, 4 * Shape::GROUPS * Shape::CLUSTER);
    }
    barrier_init_done();
  }
  if constexpr (Shape::CLUSTER > 1) {
    cluster_start();
  } else {
    block_sync();
  }
}

// The part of b of a block of k: in a cluster that shares it each thread block brings a share to all.
template <class Shape>
__device__ __forceinline__ void load_b(const TensorMap* b, int k, int column, u32 to, u32 bar, u64 policy) {
  if constexpr (Shape::DOWN > 1) {
    constexpr u32 SHARE = Shape::COLUMNS / Shape::DOWN;
    const u32 first = cluster_rank() * SHARE;
    tensor_load_all(to + first * 128, b, k * 128, column + first, bar, policy, (1 << Shape::DOWN) - 1);
  } else {
    tensor_load(to, b, k * 128, column, bar, policy);
  }
}

// a_box: rows of a that a copy brings. EARLY: the first stages' part of b is asked for while the kernel before this one may
// still run.
template <class Shape, int STAGES, bool EARLY>
__device__ __forceinline__ void prefill_load(const TensorMap* a, const TensorMap* b, Tiles<Shape> tiles, int blocks,
                                             u32 base, u32 full, u32 empty, u32 a_box) {
  constexpr int CLUSTER = Shape::CLUSTER;
  const u64 policy = cache_policy<NORMAL>();
  const u32 rank = CLUSTER > 1 ? cluster_rank() : 0, bytes = Shape::B_BYTES + Shape::RIGHT * a_box * 128;
  auto open_stage = [&](int k, int column, u32 stage) {
    barrier_expect(full + stage * 8, bytes);
    load_b<Shape>(b, k, column, base + stage * Shape::STAGE + Shape::A_BYTES, full + stage * 8, policy);
  };
  auto load_a = [&](int k, int row, u32 stage) {
    const u32 to = base + stage * Shape::STAGE, bar = full + stage * 8;
    if constexpr (Shape::RIGHT > 1) {
      tensor_load_all(to + rank * a_box * 128, a, k * 128, row + rank * a_box, bar, policy, (1 << Shape::RIGHT) - 1);
    } else {
      tensor_load(to, a, k * 128, row, bar, policy);
    }
  };
  const int first = blockIdx.x / CLUSTER;
  int row, column, ahead = 0;  // blocks whose part of b is on its way
  if constexpr (EARLY) {
    if (first < tiles.count()) {
      tiles.at(first, rank, row, column);
      for (; ahead < min(blocks, STAGES); ahead++) open_stage(ahead, column, ahead);
    }
    grid_wait();
  }
  Ring<STAGES> ring;
  for (int i = first; i < tiles.count(); i += gridDim.x / CLUSTER) {
    tiles.at(i, rank, row, column);
    for (int k = 0; k < blocks; k++, ring.next()) {
      if (EARLY && ahead > 0) {
        ahead--;
      } else {
        barrier_wait(empty + ring.stage * 8, ring.parity ^ 1);
        open_stage(k, column, ring.stage);
      }
      load_a(k, row, ring.stage);
    }
  }
}

// A stage is handed back: by a lane a block of the cluster, since all of them fill it.
template <int CLUSTER>
__device__ __forceinline__ void release(u32 bar) {
  if constexpr (CLUSTER > 1) {
    if (lane_number() < CLUSTER) barrier_arrive_cluster(in_block(bar, lane_number()));
  } else {
    if (lane_number() == 0) barrier_arrive(bar);
  }
}

// The scales of every row of a's tile, and of the tile of b -> their stage, by a warp, as asynchronously as the tiles.
template <class Shape, int STAGES, bool CHANNEL>
__device__ __forceinline__ void prefill_scales(const GemmArgs& args, Tiles<Shape> tiles, int blocks, u32 scales,
                                               u32 full, u32 empty) {
  constexpr int EACH = (Shape::ROWS + 31) / 32, CLUSTER = Shape::CLUSTER;
  const u32 lane = lane_number(), rank = CLUSTER > 1 ? cluster_rank() : 0;
  Ring<STAGES> ring;
  for (int i = blockIdx.x / CLUSTER; i < tiles.count(); i += gridDim.x / CLUSTER) {
    int row, column;
    tiles.at(i, rank, row, column);
    u32 rows[EACH];
#pragma unroll
    for (int j = 0; j < EACH; j++) rows[j] = args.a.row(min(row + j * 32 + (int)lane, args.m - 1));
    const u32 b_row = args.b.row(min(column + (int)lane * 128, args.n - 1));
    for (int k = 0; k < blocks; k++, ring.next()) {
      const u32 to = scales + ring.stage * Shape::SCALES, along = args.a.column(k);
      barrier_wait(empty + ring.stage * 8, ring.parity ^ 1);
#pragma unroll
      for (int j = 0; j < EACH; j++) {
        if (j * 32 + lane < Shape::ROWS) copy4(to + (j * 32 + lane) * 4, args.a.data + (rows[j] + along));
      }
      if (!CHANNEL && lane * 128 < Shape::COLUMNS)
        copy4(to + (Shape::ROWS + lane) * 4, args.b.data + (b_row + args.b.column(k)));
      copies_arrive(full + ring.stage * 8);
    }
  }
}

// What a tile's columns are multiplied by and what is added to them -> shared memory, by a warpgroup, some time before
// copies_wait: read from memory at a tile's end, a scale a channel took 4096 x 4096 x 4096 from 119 us to 142 (H100).
template <class Shape, bool CHANNEL, int BIAS>
__device__ __forceinline__ void fetch_columns(const GemmArgs& args, int column, u32 to) {
#pragma unroll
  for (int i = threadIdx.x % 128; i < Shape::COLUMNS; i += 128) {
    const int at = min(column + i, args.n - 1);
    if (CHANNEL) copy4(to + i * 4, args.b.data + args.b.row(at));
    if (BIAS == 4) copy4(to + (Shape::COLUMNS + i) * 4, (const float*)args.bias + at);
    if (BIAS == 2 && i % 2 == 0) copy4(to + Shape::COLUMNS * 4 + i * 2, (const unsigned short*)args.bias + (at & ~1));
  }
}

// `finished` of two neighbours, the first of which is column `at` of the tile.
template <class Shape, bool CHANNEL, class Out, int BIAS>
__device__ __forceinline__ void finish(float& x, float& y, int at, u32 columns) {
  if constexpr (CHANNEL) {
    const float2 scale = load_shared2(columns + at * 4);
    x = __fmul_rn(x, scale.x), y = __fmul_rn(y, scale.y);
  }
  if constexpr (BIAS == 4) {
    const float2 bias = load_shared2(columns + (Shape::COLUMNS + at) * 4);
    x += bias.x, y += bias.y;
  }
  if constexpr (BIAS == 2) {
    const u32 bias = load_shared1(columns + Shape::COLUMNS * 4 + at * 2);
    x += Out::value((unsigned short)bias), y += Out::value((unsigned short)(bias >> 16));
  }
}

// A warp's 16 rows of slab number `slab` -> 16 bits -> shared memory -> c, in boxes whose memory is used in turn.
template <class Shape, bool CHANNEL, class Out, int BIAS>
__device__ __forceinline__ void store_slab(const TensorMap* c, const float* sum, int slab, int row, int column,
                                           u32 output, u32 columns) {
  const u32 lane = lane_number(), within = swizzled(lane % 8, lane / 8 * 16);
#pragma unroll
  for (int box = 0; box < 4; box++) {  // rows 0 to 7, then 8 to 15
    const int h = box / 2, left = box % 2 * 64;
    u32 word[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const int at = 4 * (left / 8 + j) + 2 * h;
      float x = sum[at], y = sum[at + 1];
      finish<Shape, CHANNEL, Out, BIAS>(x, y, slab * 128 + left + j * 8 + lane % 4 * 2, columns);
      word[j] = Out::pack(x, y);
    }
    const u32 to = output + (slab * 4 + box) % Shape::BOXES * Shape::BOX;
    if (lane == 0) {
      if (slab * 4 + box == 0) {
        tensor_store_wait<0>();  // the tile before this one
      } else {
        tensor_store_wait<Shape::BOXES - 1>();
      }
    }
    warp_sync();
    store_matrices(to + within, word[0], word[1], word[2], word[3]);
    store_matrices(to + (within ^ 64), word[4], word[5], word[6], word[7]);
    fence_async();
    warp_sync();
    if (lane == 0) {
      tensor_store(c, column + slab * 128 + left, row + 8 * h, to);
      tensor_store_commit();
    }
  }
}

__device__ __forceinline__ void promote(float* sum, const float (&d)[64], const float (&scale)[3]) {
#pragma unroll
  for (int i = 0; i < 64; i++) sum[i] = fmaf(d[i], scale[i / 2 % 2], sum[i]);
}

// With two SETS of the tensor cores' sums one block of k (WIDE: a quarter of one, 64 columns) is promoted while the next is
// multiplied. LAG: in every tile the second warpgroup starts so many blocks, less three quarters, behind the first, so that
// one promotes, and later writes its results, while the other multiplies.
template <class Shape, int SETS, int STAGES, int LAG, bool SEGMENTED, bool CHANNEL, class Out, int BIAS>
__device__ __forceinline__ void prefill_multiply(const TensorMap* c, const GemmArgs& args, Tiles<Shape> tiles,
                                                 int blocks, u32 base, u32 output, u32 scales, u32 full, u32 empty,
                                                 u32 last) {
  constexpr int CLUSTER = Shape::CLUSTER, SLABS = Shape::SLABS;
  constexpr bool FINISHES = CHANNEL || BIAS;
  const u32 group = warp_number() / 4, rank = CLUSTER > 1 ? cluster_rank() : 0, lane = lane_number();
  const u32 first_row = group * 64, warp_row = first_row + warp_number() % 4 * 16;
  const u32 own_scales = scales + (warp_row + lane / 4) * 4, columns = last + group * Shape::LAST;
  Ring<STAGES> ring;
  for (int i = blockIdx.x / CLUSTER; i < tiles.count(); i += gridDim.x / CLUSTER) {
    int row, column;
    if constexpr (FINISHES) {
      tiles.at(i, rank, row, column);
      named_sync(2 + group, 128);  // all have stored the tile before this one
      fetch_columns<Shape, CHANNEL, BIAS>(args, column, columns);
    }
    float sum[SLABS * 64], total[SEGMENTED ? 64 : 1];
#pragma unroll
    for (int j = 0; j < SLABS * 64; j++) sum[j] = 0.f;
    if constexpr (SEGMENTED) {
#pragma unroll
      for (int j = 0; j < 64; j++) total[j] = 0.f;
    }
    const bool lags = LAG > 0 && blocks > STAGES;  // else the first could be a whole tile ahead
    if (lags && group == 1) named_sync(1, 256);
    auto lead = [&](int block) {  // whose first quarter is done
      if (LAG > 0 && block == LAG - 1 && lags && group == 0) named_arrive(1, 256);
    };
    int left = args.segment;
    auto end_block = [&] {  // of a segment, perhaps
      if constexpr (SEGMENTED) {
        if (--left == 0) {
          left = args.segment;
#pragma unroll
          for (int j = 0; j < 64; j++) total[j] += sum[j], sum[j] = 0.f;
        }
      }
    };
    auto next_block = [&](bool last) {
      release<CLUSTER>(empty + ring.stage * 8);
      ring.next();
      if (last) return;
      barrier_wait(full + ring.stage * 8, ring.parity);
    };
    // What scales this stage's block of k: of a lane's two rows, and of b.
    auto load_scales = [&](float (&scale)[3]) {
      const u32 stage = ring.stage * Shape::SCALES;
      scale[2] = CHANNEL ? 1.f : load_shared(scales + stage + Shape::ROWS * 4);
      scale[0] = load_shared(own_scales + stage), scale[1] = load_shared(own_scales + stage + 32);
    };
    auto multiply_scales = [&](float (&scale)[3]) {  // once they are needed: the loads' latency passes behind products
#pragma unroll
      for (int j = 0; j < 2; j++) product_done(scale[j]), scale[j] *= scale[2];
    };
    auto begin = [&](float (&d)[64]) {
      const u32 a = base + ring.stage * Shape::STAGE;
      product128(d, a + first_row * 128, a + Shape::A_BYTES);
    };
    if constexpr (Shape::WIDE) {
      // a's rows are in registers for all four quarters: from shared memory, they and b would take all of its bandwidth.
      float d[2][32], scale[2][2];
      u32 rows[4][4];
      const u32 own_rows = (first_row + warp_number() % 4 * 16 + lane % 16) * 128 + ((lane / 16 ^ lane % 8) << 4);
      auto load_rows = [&] {
        const u32 from = base + ring.stage * Shape::STAGE + own_rows;
#pragma unroll
        for (int k = 0; k < 4; k++) load_matrices(rows[k], from ^ k << 5);
      };
      auto load_scales = [&] {  // of a lane's two rows, by those of both halves of b
        const u32 stage = ring.stage * Shape::SCALES;
        const float upper = load_shared(own_scales + stage), lower = load_shared(own_scales + stage + 32);
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float by = CHANNEL ? 1.f : load_shared(scales + stage + (Shape::ROWS + h) * 4);
          scale[h][0] = upper * by, scale[h][1] = lower * by;
        }
      };
      auto open = [&](int quarter) {
        const u32 b = base + ring.stage * Shape::STAGE + Shape::A_BYTES + quarter * 8192;
        product_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) product(d[quarter % 2], rows[k], operand(b, k), k > 0);
        product_commit();
      };
      auto close = [&](int quarter) {
        product_done(d[quarter % 2]);
#pragma unroll
        for (int j = 0; j < 32; j++) {
          float& to = sum[quarter * 32 + j];
          to = fmaf(d[quarter % 2][j], scale[quarter / 2][j / 2 % 2], to);
        }
      };
      auto multiply = [&](int k) {
        open(0);
        open(1);
        load_scales();
        product_wait<1>();
        close(0);
        lead(k);
        open(2);
        product_wait<1>();
        close(1);
        open(3);
        product_wait<1>();
        close(2);
        product_wait<0>();
        next_block(k + 1 == blocks);
      };
      barrier_wait(full + ring.stage * 8, ring.parity);
      load_rows();
      for (int k = 0; k + 1 < blocks; k++) {
        multiply(k);
        load_rows();
        close(3);
      }
      multiply(blocks - 1);
      close(3);
    } else if constexpr (SETS == 1) {
      float d[64], scale[3];
      barrier_wait(full + ring.stage * 8, ring.parity);
      for (int k = 0; k < blocks; k++) {
        begin(d);
        load_scales(scale);
        product_wait<0>();
        multiply_scales(scale);
        product_done(d);
        next_block(k + 1 == blocks);
        promote(sum, d, scale);
        end_block();
      }
    } else {
      float d[2][64], scale[2][3];
      u32 previous = 0;
      auto open = [&](int set) {
        barrier_wait(full + ring.stage * 8, ring.parity);
        begin(d[set]);
        load_scales(scale[set]);
      };
      auto close = [&](int set) {
        multiply_scales(scale[set]);
        product_done(d[set]);
        release<CLUSTER>(empty + previous * 8);
        previous = ring.stage;
        ring.next();
        promote(sum, d[set], scale[set]);
        end_block();
      };
      open(0);
      previous = ring.stage;
      ring.next();
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
        multiply_scales(scale[1]);
        product_done(d[1]);
        release<CLUSTER>(empty + previous * 8);
        promote(sum, d[1], scale[1]);
      } else {
        product_wait<0>();
        multiply_scales(scale[0]);
        product_done(d[0]);
        release<CLUSTER>(empty + previous * 8);
        promote(sum, d[0], scale[0]);
      }
      end_block();
    }
    if constexpr (SEGMENTED) {
#pragma unroll
      for (int j = 0; j < 64; j++) sum[j] += total[j];
    }
    if constexpr (FINISHES) {
      copies_wait();
      named_sync(2 + group, 128);
    }
    tiles.at(i, rank, row, column);  // here, where the products' registers are free
#pragma unroll
    for (int slab = 0; slab < SLABS; slab++)
      store_slab<Shape, CHANNEL, Out, BIAS>(c, sum + slab * 64, slab, row + (int)(threadIdx.x / 32 * 16), column,
                                            output + warp_number() * Shape::OUTPUT, columns);
  }
  if (lane_number() == 0) tensor_store_wait<0>();
}

template <int SETS, int STAGES, int CLUSTER, bool WIDE, int LAG, bool EARLY, bool SEGMENTED, bool CHANNEL, class Out,
          int BIAS>
__device__ __forceinline__ void prefill(const TensorMap* a, const TensorMap* b, const TensorMap* c,
                                        const GemmArgs& args) {
  using Shape = PrefillShape<STAGES, CLUSTER, WIDE>;
  constexpr int GROUPS = Shape::GROUPS;
  static_assert(!SEGMENTED || (SETS == 1 && !WIDE), "a third set of sums fits beside one");
  static_assert(SETS == 2 || !WIDE, "quarters take turns");
  static_assert(LAG == 0 || (WIDE && LAG < STAGES), "only the second waits");
  const u32 base = shared_memory(), output = base + STAGES * Shape::STAGE, scales = output + GROUPS * 4 * Shape::OUTPUT;
  const u32 full = scales + STAGES * Shape::SCALES, empty = full + STAGES * 8, warp = warp_number();
  const u32 last = empty + STAGES * 8;
  const Tiles<Shape> tiles(args);
  const int blocks = blocks_of(args.k, 128);
  prefill_start<Shape, STAGES>(a, b, c, full, empty);
  if (!EARLY || warp != GROUPS * 4) grid_wait();
  if (warp >= GROUPS * 4) {
    give_registers<24>();
    if (warp == GROUPS * 4) prefill_load<Shape, STAGES, EARLY>(a, b, tiles, blocks, base, full, empty, args.box);
    if (warp == GROUPS * 4 + 1)
      prefill_scales<Shape, STAGES, CHANNEL>(args, tiles, blocks, scales, full, empty);
  } else {
    take_registers<240>();
    prefill_multiply<Shape, SETS, STAGES, LAG, SEGMENTED, CHANNEL, Out, BIAS>(c, args, tiles, blocks, base, output,
                                                                              scales, full, empty, last);
  }
  if constexpr (CLUSTER > 1) cluster_sync();  // a block that ended could still be written to
}

}  // namespace quantrot
