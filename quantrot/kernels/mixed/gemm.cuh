// Mixed-input products for sm_90a: codes [rows, depth] in 8 bits by a wide matrix [columns, depth] in 16; the sums are
// turned into y [columns, rows] where the codes are the weight (WEIGHT), y [rows, columns] where they are activations.
//
// The tensor core multiplies equal types and takes its first operand from registers, so the codes come to shared memory
// as they are, a lane reads those of its part of the operand two by two (they are neighbours in a row), widens them
// (`Widen`, from conversions.py) and multiplies; the wide operand goes from shared memory straight into the tensor core.
// Two sets of operand registers: a block of 64 columns is widened while the one before it is multiplied.
//
//   one scale a row   sums of all of K in the tensor core's registers, scaled at the end
//   GROUP = 1, 2      blocks of 64 that are summed before sum = fma(block's sum, scale, sum); with SETS = 2 that is done
//                     while the next group is multiplied
//
//   prefill  persistent thread blocks; one warp feeds a ring of stages through the copy engine, GROUPS warpgroups of 64
//            rows multiply; the blocks of a cluster are neighbours in rows and share the wide tile.
//   few      one tile a block: few columns, bound by reading the codes, or too few tiles for the device. SPLIT blocks
//            of a cluster share K and add their parts, in order, through each other's shared memory; SHARE of them
//            share the wide tile.

namespace quantrot {

struct MixedArgs {
  const void* scale;          // [rows, groups]
  const unsigned char* zero;  // [rows, groups], or null
  const void* bias;           // [rows] (WEIGHT) or [columns], or null
  void* y;
  int rows, columns, depth;
  int groups, group_blocks;  // scales a row, and how many blocks of 64 share one
  int segment;               // blocks of 64 of a part of K, a multiple of four; each part has some
  int tile_group;            // rows of tiles that run together, so that what they read stays in L2
};

struct Fp32 {};
struct None {};

template <class S>
__device__ __forceinline__ float number(const void* p, i64 at) {
  return S::value(__ldg((const unsigned short*)p + at));
}
template <>
__device__ __forceinline__ float number<Fp32>(const void* p, i64 at) {
  return __ldg((const float*)p + at);
}
template <>
__device__ __forceinline__ float number<None>(const void*, i64) {
  return 0.f;
}

#ifdef QUANTROT_EMULATED
template <class T>
inline u32 subtract_pair(u32 a, u32 b) {
  return T::pack(T::value(a) - T::value(b), T::value(a >> 16) - T::value(b >> 16));
}
#else
template <class T>
__device__ __forceinline__ u32 subtract_pair(u32 a, u32 b) {
  u32 r;
  if constexpr (T::BRAIN) {
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  } else {
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  }
  return r;
}
#endif

__device__ __forceinline__ int parts_of(int size, int part) { return (size + part - 1) / part; }

// --- What a kernel is made for ---------------------------------------------------------------------------------------

// KIND of codes, wide type T, blocks that are summed before scaling (0: all), sets of sums; ZERO: there are zero points;
// S, B: types of scales and bias.
template <int KIND_, class T_, bool WEIGHT_, int GROUP_, int SETS_, bool ZERO_, class S_, class B_>
struct Operands {
  static constexpr int KIND = KIND_, GROUP = GROUP_, SETS = SETS_;
  static constexpr bool WEIGHT = WEIGHT_, ZERO = ZERO_;
  using T = T_;
  using S = S_;
  using B = B_;
  // Blocks that the loop takes at a time; a part of K is padded to a multiple of it, with zeros from the copy engine.
  static constexpr int STEP = GROUP == 1 && SETS == 2 ? 1 : 2;
  static constexpr int ZERO_KIND = KIND == UINT8 ? UINT8 : INT8;
};

template <int GROUPS_, int COLUMNS_, int STAGES_, int SPLIT_, int SHARE_>
struct Tile {
  static constexpr int GROUPS = GROUPS_, COLUMNS = COLUMNS_, STAGES = STAGES_, SPLIT = SPLIT_, SHARE = SHARE_;
  static constexpr int ROWS = 64 * GROUPS, W = COLUMNS / 2, CLUSTER = SPLIT * SHARE, PART = COLUMNS / SHARE;
  static constexpr int CODES = ROWS * 64, STAGE = CODES + COLUMNS * 128;  // bytes
  static constexpr int HALF = COLUMNS % 32;                              // of a box of y, past the last whole one
  static constexpr int OUTPUT = 64 * (COLUMNS + HALF) * 2;               // of a warpgroup's sums in 16 bits
  static constexpr int PITCH = ROWS + 4;  // of the parts, floats: lanes meet different banks
  static_assert(COLUMNS % SHARE == 0 && PART % 8 == 0, "a share of the wide tile is whole groups of eight rows");
};

// --- Loading ---------------------------------------------------------------------------------------------------------

// A stage: the codes' tile, 64 bytes a row, and the wide tile, 128 bytes a row.
template <class P>
__device__ __forceinline__ void load_stage(const TensorMap* codes, const TensorMap* wide, u32 to, u32 bar, int k, int row,
                                           int column, u32 rank, u64 codes_policy, u64 wide_policy) {
  barrier_expect(bar, P::STAGE);
  tensor_load(to, codes, k * 64, row, bar, codes_policy);
  if constexpr (P::SHARE > 1) {
    const u32 share = rank % P::SHARE;
    tensor_load_all(to + P::CODES + share * P::PART * 128, wide, k * 64, column + share * P::PART, bar, wide_policy,
                    ((1 << P::SHARE) - 1) << (rank - share));
  } else {
    tensor_load(to + P::CODES, wide, k * 64, column, bar, wide_policy);
  }
}

// --- Multiplying -----------------------------------------------------------------------------------------------------

// Where a lane finds its codes in a tile: two rows, eight apart, and in each 16 columns two pairs.
struct Lane {
  u32 rows[2];     // of the matrix, not past its end
  u32 offsets[4];  // in the tile: of the first row's first pair, each 16 columns

  __device__ __forceinline__ Lane(u32 group) {
    const u32 row = group * 64 + warp_number() % 4 * 16 + lane_number() / 4;
#pragma unroll
    for (u32 j = 0; j < 4; j++) offsets[j] = swizzled64(row, j * 16) + lane_number() % 4 * 2;
  }
  __device__ __forceinline__ void at(int row, int rows_there) {  // row: the warpgroup's first
    const int mine = row + warp_number() % 4 * 16 + lane_number() / 4;
    rows[0] = min(mine, rows_there - 1), rows[1] = min(mine + 8, rows_there - 1);
  }
};

// A block's codes -> the operand's registers: a[j][2 h + r] is the row r of the lane, columns 16 j + 8 h + 2 q and next.
template <class O>
__device__ __forceinline__ void widen_block(u32 (&a)[4][4], u32 tile, const Lane& lane, const u32 (&zero)[2]) {
  u32 codes[16];
#pragma unroll
  for (int i = 0; i < 16; i++)
    codes[i] = load_shared_u16(tile + lane.offsets[i / 4] + i % 2 * 512 + i / 2 % 2 * 8);
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const u32 pair = Widen<O::KIND, typename O::T>::pair(codes[i]);
    a[i / 4][i % 4] = O::ZERO ? subtract_pair<typename O::T>(pair, zero[i % 2]) : pair;
  }
}

// A stage is handed back to the blocks that fill it.
template <class P>
__device__ __forceinline__ void hand_back(u32 bar, u32 rank) {
  if constexpr (P::SHARE > 1) {
    if (lane_number() < P::SHARE) barrier_arrive_cluster(in_block(bar, rank / P::SHARE * P::SHARE + lane_number()));
  } else {
    if (lane_number() == 0) barrier_arrive(bar);
  }
}

// A warpgroup's sums over `count` blocks of K from number `first` on.
template <class P, class O>
struct Multiplier {
  const MixedArgs& args;
  Lane lane;
  u32 base, full, empty, rank, previous = 0;
  Ring<P::STAGES> ring;

  __device__ __forceinline__ Multiplier(const MixedArgs& args, u32 group, u32 base, u32 full, u32 empty, u32 rank)
      : args(args), lane(group), base(base), full(full), empty(empty), rank(rank) {}

  // Scale and zero point of a row and the group of block k; a block past the end has the scale 0.
  __device__ __forceinline__ float scale(int r, int k) const {
    const int g = k / args.group_blocks;
    return g < args.groups ? number<typename O::S>(args.scale, (i64)lane.rows[r] * args.groups + g) : 0.f;
  }
  __device__ __forceinline__ u32 zero_pair(int r, int k) const {
    const u32 code = __ldg(args.zero + ((i64)lane.rows[r] * args.groups + min(k / args.group_blocks, args.groups - 1)));
    return Widen<O::ZERO_KIND, typename O::T>::pair(code * 0x101);
  }
  __device__ __forceinline__ void zeros(u32 (&zero)[2], int k) const {
    if constexpr (O::ZERO) zero[0] = zero_pair(0, k), zero[1] = zero_pair(1, k);
  }

  __device__ __forceinline__ void widen(u32 (&a)[4][4], const u32 (&zero)[2]) {
    barrier_wait(full + ring.stage * 8, ring.parity);
    widen_block<O>(a, base + ring.stage * P::STAGE, lane, zero);
  }
  __device__ __forceinline__ void multiply(float (&d)[P::W], const u32 (&a)[4][4], bool add) {
    const u32 wide = base + ring.stage * P::STAGE + P::CODES;
    product_fence();
#pragma unroll
    for (int j = 0; j < 4; j++) product16<typename O::T>(d, a[j], operand(wide, j), add || j > 0);
    product_commit();
  }
  __device__ __forceinline__ void next() {
    previous = ring.stage;
    ring.next();
  }
  __device__ __forceinline__ void back() { hand_back<P>(empty + previous * 8, rank); }

  // All of K into the same sums.
  __device__ __forceinline__ void whole(float (&d)[P::W], int first, int count) {
    u32 a[2][4][4], zero[2];
    zeros(zero, 0);
    widen(a[0], zero);
    multiply(d, a[0], false);
    next();
    for (int k = 1;; k += 2) {
      widen(a[1], zero);
      multiply(d, a[1], true);
      product_wait<1>();
      back();
      next();
      if (k + 1 >= count) break;
      widen(a[0], zero);
      multiply(d, a[0], true);
      product_wait<1>();
      back();
      next();
    }
    product_wait<0>();
    product_done(d);
    back();
  }

  __device__ __forceinline__ void promote(float (&sum)[P::W], float (&d)[P::W], const float (&scales)[2]) {
#pragma unroll
    for (int i = 0; i < P::W; i++) sum[i] = fmaf(d[i], scales[i / 2 % 2], sum[i]);
  }

  // A group at a time, one set of sums: the other warpgroup multiplies while this one scales.
  __device__ __forceinline__ void groups_one(float (&sum)[P::W], int first, int count) {
    float d[P::W], scales[2];
    u32 a[2][4][4], zero[2];
    auto group = [&](u32 (&its)[4][4], int k, bool begins) {  // up to where its last product runs
      zeros(zero, first + k);
      widen(its, zero);
      if (!begins) {
        product_wait<0>();
        product_done(d);
        back();
        promote(sum, d, scales);
      }
      multiply(d, its, false);
      next();
      scales[0] = scale(0, first + k), scales[1] = scale(1, first + k);
      if constexpr (O::GROUP == 2) {
        widen(a[1], zero);
        multiply(d, a[1], true);
        product_wait<1>();
        back();
        next();
      }
    };
    group(a[0], 0, true);
    if constexpr (O::GROUP == 1) group(a[1], 1, false);
    for (int k = 2; k < count; k += 2) {
      group(a[0], k, false);
      if constexpr (O::GROUP == 1) group(a[1], k + 1, false);
    }
    product_wait<0>();
    product_done(d);
    back();
    promote(sum, d, scales);
  }

  // Two sets of sums: one group is scaled while the next is multiplied.
  __device__ __forceinline__ void groups_two(float (&sum)[P::W], int first, int count) {
    float d[2][P::W], scales[2][2];
    u32 a[2][4][4], zero[2];
    auto group = [&](float (&now)[P::W], float (&its)[2], float (&before)[P::W], float (&older)[2], u32 (&first_a)[4][4],
                     int k, bool begins) {
      zeros(zero, first + k);
      its[0] = scale(0, first + k), its[1] = scale(1, first + k);
      widen(first_a, zero);
      multiply(now, first_a, false);
      if (!begins) {
        product_wait<1>();
        product_done(before);
        back();
      }
      next();
      if constexpr (O::GROUP == 2) {
        widen(a[1], zero);
        multiply(now, a[1], true);
        if (!begins) promote(sum, before, older);
        product_wait<1>();
        back();
        next();
      } else {
        if (!begins) promote(sum, before, older);
      }
    };
    constexpr int G = O::GROUP;
    group(d[0], scales[0], d[1], scales[1], a[0], 0, true);
    int k = G;
    for (; k + G < count; k += 2 * G) {
      group(d[1], scales[1], d[0], scales[0], a[G == 1], k, false);
      group(d[0], scales[0], d[1], scales[1], a[0], k + G, false);
    }
    auto end = [&](float (&last)[P::W], const float (&its)[2]) {
      product_wait<0>();
      product_done(last);
      back();
      promote(sum, last, its);
    };
    if (k < count) {  // the assembler serializes products unless both ends are there
      group(d[1], scales[1], d[0], scales[0], a[G == 1], k, false);
      end(d[1], scales[1]);
    } else {
      end(d[0], scales[0]);
    }
  }

  // count: at least one, padded here.
  __device__ __forceinline__ void run(float (&sum)[P::W], int first, int count) {
    count = parts_of(count, O::STEP) * O::STEP;
    if constexpr (O::GROUP == 0) {
      whole(sum, first, count);
    } else {
#pragma unroll
      for (int i = 0; i < P::W; i++) sum[i] = 0.f;
      if constexpr (O::SETS == 1) {
        groups_one(sum, first, count);
      } else {
        groups_two(sum, first, count);
      }
    }
  }
};

// A sum -> its result in float32: the scale of whole rows, then the bias; not fused.
template <class O>
__device__ __forceinline__ float finished(float sum, float scale, float bias) {
  return (O::GROUP ? sum : __fmul_rn(sum, scale)) + bias;
}

// --- Many columns ----------------------------------------------------------------------------------------------------

// The tiles of y, in groups of rows, columns inside; a cluster takes neighbours in rows.
struct MixedTiles {
  int rows, columns, group;

  __device__ __forceinline__ int count() const { return rows * columns; }
  __device__ __forceinline__ void at(int i, int& row, int& column) const {
    const int first = i / (group * columns) * group, inside = i - first * columns;
    const int height = min(group, rows - first);
    row = first + inside % height;
    column = inside / height;
  }
};

// A warpgroup's sums -> 16 bits -> shared memory -> y; row, column: its first.
template <class P, class O>
__device__ __forceinline__ void store_tile(const TensorMap* y, const MixedArgs& args, const Lane& at,
                                           const float (&sum)[P::W], int row, int column, u32 output, u32 barrier) {
  const u32 lane = lane_number(), warp = warp_number() % 4;
  const bool leader = threadIdx.x % 128 == 0;
  if (leader) tensor_store_wait<0>();
  float scale[2] = {1.f, 1.f}, bias[2] = {0.f, 0.f};
#pragma unroll
  for (int r = 0; r < 2; r++) {
    if (O::GROUP == 0) scale[r] = number<typename O::S>(args.scale, at.rows[r]);
    if (O::WEIGHT) bias[r] = number<typename O::B>(args.bias, at.rows[r]);
  }
  named_sync(barrier, 128);
#pragma unroll
  for (int j = 0; j < P::COLUMNS / 8; j += 2) {  // 16 columns
    u32 pairs[2][2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int n = j + i / 2, r = i % 2;
      float across[2] = {0.f, 0.f};
      if constexpr (!O::WEIGHT) {
#pragma unroll
        for (int e = 0; e < 2; e++)
          across[e] = number<typename O::B>(args.bias, min(column + n * 8 + (int)lane % 4 * 2 + e, args.columns - 1));
      }
      const float lo = finished<O>(sum[4 * n + 2 * r], scale[r], O::WEIGHT ? bias[r] : across[0]);
      const float hi = finished<O>(sum[4 * n + 2 * r + 1], scale[r], O::WEIGHT ? bias[r] : across[1]);
      pairs[i / 2][r] = O::T::pack(lo, hi);
    }
    const u32 inside = lane % 8, which = lane / 8;  // of the matrices: row r, then columns
    if constexpr (O::WEIGHT) {
      const u32 line = (j + which / 2) * 8 + inside;
      store_matrices_turned(output + swizzled(line, (warp * 2 + which % 2) * 16), pairs[0][0], pairs[0][1], pairs[1][0],
                            pairs[1][1]);
    } else {
      const u32 line = warp * 16 + which % 2 * 8 + inside;
      auto put = [&](int at) {
        store_matrices(output + at / 4 * 4096 + swizzled64(line, (at % 4 + which / 2) * 16), pairs[0][0], pairs[0][1],
                       pairs[1][0], pairs[1][1]);
      };
      put(P::HALF && j == P::COLUMNS / 8 - 2 ? j + 2 : j);
      if (P::HALF && j == P::COLUMNS / 8 - 4) put(j + 2);  // the last box begins in the middle of the one before
    }
  }
  fence_async();
  named_sync(barrier, 128);
  if (leader) {
    if constexpr (O::WEIGHT) {
      tensor_store(y, row, column, output);
    } else {
      for (int c = 0; c < P::COLUMNS; c += 32) tensor_store(y, column + min(c, P::COLUMNS - 32), row, output + c * 128);
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
  const MixedTiles tiles{parts_of(args.rows, P::ROWS * P::SHARE), parts_of(args.columns, P::COLUMNS), args.tile_group};
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
  grid_wait();
  if (warp >= P::GROUPS * 4) {
    if constexpr (P::GROUPS == 2) give_registers<24>();
    if constexpr (P::GROUPS == 3) give_registers<32>();
    if (warp == P::GROUPS * 4) {
      const u64 policy = cache_policy<NORMAL>();
      Ring<P::STAGES> ring;
      for (int i = blockIdx.x / P::SHARE; i < tiles.count(); i += gridDim.x / P::SHARE) {
        int row, column;
        tiles.at(i, row, column);
        row = (row * P::SHARE + rank) * P::ROWS, column *= P::COLUMNS;
        for (int k = 0; k < blocks; k++, ring.next()) {
          barrier_wait(empty + ring.stage * 8, ring.parity ^ 1);
          load_stage<P>(codes, wide, base + ring.stage * P::STAGE, full + ring.stage * 8, k, row, column, rank, policy,
                        policy);
        }
      }
    }
  } else {
    if constexpr (P::GROUPS == 2) take_registers<240>();
    if constexpr (P::GROUPS == 3) take_registers<160>();
    const u32 group = warp / 4;
    Multiplier<P, O> multiplier(args, group, base, full, empty, rank);
    for (int i = blockIdx.x / P::SHARE; i < tiles.count(); i += gridDim.x / P::SHARE) {
      int row, column;
      tiles.at(i, row, column);
      row = (row * P::SHARE + rank) * P::ROWS + group * 64, column *= P::COLUMNS;
      multiplier.lane.at(row, args.rows);
      float sum[P::W];
      multiplier.run(sum, 0, blocks);
      store_tile<P, O>(y, args, multiplier.lane, sum, row, column, output + group * P::OUTPUT, 1 + group);
    }
    if (threadIdx.x % 128 == 0) tensor_store_wait<0>();
  }
  if constexpr (P::SHARE > 1) cluster_sync();  // a block that ended could still be written to
}

// --- Few columns, or few tiles ---------------------------------------------------------------------------------------

// The parts of the cluster's blocks, added in the order of K -> y [columns, rows].
template <class P, class O>
__device__ __forceinline__ void store_parts(const MixedArgs& args, int row, int column, u32 rank, u32 parts) {
  constexpr int UNITS = P::ROWS / 8, THREADS = 128 * P::GROUPS;  // units of eight rows
  for (int i = rank / P::SHARE * THREADS + threadIdx.x; i < P::COLUMNS * UNITS; i += P::SPLIT * THREADS) {
    const int c = i / UNITS, r = i % UNITS * 8;
    if (column + c >= args.columns || row + r >= args.rows) continue;
    float sum[8];
#pragma unroll
    for (int p = 0; p < P::SPLIT; p++) {
      const u32 from = in_block(parts + (c * P::PITCH + r) * 4, p * P::SHARE + rank % P::SHARE);
      const float4 lo = load_cluster4(from), hi = load_cluster4(from + 16);
      const float part[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
      for (int j = 0; j < 8; j++) sum[j] = p ? sum[j] + part[j] : part[j];
    }
    Quad out;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float scale = O::GROUP ? 1.f : number<typename O::S>(args.scale, row + r + j);
      sum[j] = finished<O>(sum[j], scale, number<typename O::B>(args.bias, row + r + j));
    }
#pragma unroll
    for (int j = 0; j < 4; j++) out.w[j] = O::T::pack(sum[2 * j], sum[2 * j + 1]);
    *(Quad*)((unsigned short*)args.y + (i64)(column + c) * args.rows + row + r) = out;
  }
}

// HEAVY: a whole warpgroup loads, and leaves its registers to those that multiply.
template <class P, class O, bool HEAVY, bool WARM>
__device__ __forceinline__ void few(const TensorMap* codes, const TensorMap* wide, const MixedArgs& args) {
  static_assert(O::WEIGHT, "few tokens by a narrow weight");
  static_assert(P::COLUMNS * P::PITCH * 4 <= P::STAGES * P::STAGE, "the parts take the stages' place");
  const u32 base = shared_memory(), full = base + P::STAGES * P::STAGE, empty = full + P::STAGES * 8;
  const u32 warp = warp_number(), rank = P::CLUSTER > 1 ? cluster_rank() : 0;
  const int unit = blockIdx.x / P::CLUSTER, tiles = parts_of(args.columns, P::COLUMNS);
  const int column = unit % tiles * P::COLUMNS, row = (unit / tiles * P::SHARE + rank % P::SHARE) * P::ROWS;
  const int first = rank / P::SHARE * args.segment, count = min(args.segment, parts_of(args.depth, 64) - first);
  const int padded = parts_of(count, O::STEP) * O::STEP;
  if (warp == P::GROUPS * 4) {
    if (lane_number() == 0) {
      tensor_prefetch(codes), tensor_prefetch(wide);
      for (int s = 0; s < P::STAGES; s++) {
        barrier_init(full + s * 8, 1);
        barrier_init(empty + s * 8, 4 * P::GROUPS * P::SHARE);
      }
      barrier_init_done();
    }
    warp_sync();
    if constexpr (WARM)
      for (int k = 0; k < min(padded, P::STAGES); k++) tensor_warm(codes, (first + k) * 64, row);
  }
  if constexpr (P::SHARE > 1) {
    cluster_start();
  } else {
    block_sync();
  }
  grid_wait();
  if (warp >= P::GROUPS * 4) {
    if constexpr (HEAVY) give_registers<24>();
    if (warp == P::GROUPS * 4) {
      const u64 keep = cache_policy<LAST>(), stream = tiles == 1 ? cache_policy<FIRST>() : cache_policy<NORMAL>();
      Ring<P::STAGES> ring;
      for (int k = 0; k < padded; k++, ring.next()) {
        barrier_wait(empty + ring.stage * 8, ring.parity ^ 1);
        load_stage<P>(codes, wide, base + ring.stage * P::STAGE, full + ring.stage * 8, first + k, row, column, rank,
                      stream, keep);
      }
    }
    if constexpr (P::CLUSTER > 1) cluster_sync();
  } else {
    if constexpr (HEAVY) take_registers<240>();
    const u32 group = warp / 4;
    float sum[P::W];
    Multiplier<P, O> multiplier(args, group, base, full, empty, rank);
    multiplier.lane.at(row + group * 64, args.rows);
    multiplier.run(sum, first, count);
    named_sync(1, 128 * P::GROUPS);  // every warp's products have read the stages
    const u32 lane = lane_number(), n = warp * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < P::W; j++)
      store_shared(base + ((j / 4 * 8 + lane % 4 * 2 + j % 2) * P::PITCH + n + j / 2 % 2 * 8) * 4, sum[j]);
    if constexpr (P::CLUSTER == 1) {
      named_sync(1, 128 * P::GROUPS);
    } else {
      cluster_sync();
    }
    store_parts<P, O>(args, row, column, rank, base);  // here, with the registers that were taken
  }
  if constexpr (P::SPLIT > 1) cluster_sync();  // a block that ended could still be read
}

}  // namespace quantrot
