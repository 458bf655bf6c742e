// Few tokens (see gemm.cuh, which comes before this file).

namespace quantrot {

// SPLIT blocks of a cluster share k. With fewer than 64 columns, for matrices of few rows, the operand of 64 rows runs
// on into whatever follows and those sums are left: the memory, not the tensor cores, has to be kept busy, and by many
// blocks. TURNED: the tokens are the operand of 64 rows, of which a lane then has two scales a block. The tokens come with
// each stage, or (HELD) all of them are in shared memory before the first product. GATES: half of the columns are gates, and
// half are what they gate, from the second half of b. PAIRS: two blocks of k are multiplied at once, each to sums of its own:
// a product this small waits for the one before it on the same sums. LATE: the kernel after this one may start once all of b
// is asked for, so that what it asks for early comes behind it; else as soon as this one waits no more.
template <int TOKENS, int COLUMNS_, int STAGES, bool TURNED_, bool PAIRS_, bool LATE_, bool HELD_ = false,
          bool GATES_ = false>
struct DecodeShape {
  static constexpr bool HELD = HELD_, GATES = GATES_, TURNED = TURNED_, LATE = LATE_;
  static constexpr int TOGETHER = PAIRS_ ? 2 : 1;
  static constexpr int COLUMNS = COLUMNS_, GROUPS = (COLUMNS + 63) / 64;
  static constexpr int SUMS = (TURNED ? COLUMNS / GROUPS : TOKENS) / 2;  // of a thread
  static constexpr int B_BYTES = COLUMNS * 128, A_BYTES = HELD ? 0 : TOKENS * 128, STAGE = A_BYTES + B_BYTES;
  static constexpr int PAD = TURNED ? 8192 - A_BYTES : GROUPS * 8192 - B_BYTES;  // what the last stage's rows run on into
  static constexpr int PITCH = COLUMNS + 4;  // of the parts, floats: lanes meet different banks
  static_assert(TOKENS * PITCH * 4 <= STAGES * STAGE, "the parts take the stages' place");
  static_assert(2 * TOGETHER <= STAGES, "two sets of products on their way");
  static_assert(COLUMNS % 64 == 0 || COLUMNS == 32 || COLUMNS == 16, "whole warps, each with 16 columns");
  static_assert(!GATES || COLUMNS >= 32, "a warp's columns have one scale of b: all are gates, or none");
  __device__ __forceinline__ static bool counts() {
    if (TURNED) return TOKENS == 64 || warp_number() % 4 * 16 < TOKENS;
    return COLUMNS % 64 == 0 || warp_number() * 16 < COLUMNS;
  }
};

template <class Shape>
__device__ __forceinline__ void decode_wait() {
  if constexpr (Shape::LATE) {
    grid_wait_only();
  } else {
    grid_wait();
  }
}

// bytes: of a stage, of the weight and of the tokens there are. The first EARLY blocks of the weight are asked for while the
// kernel before this one may still run. Where the tokens come with the stages, not more of them than the memory's latency
// takes: the tokens' first block arrives behind them, and no product starts without it.
template <class Shape, int STAGES, int EARLY>
__device__ __forceinline__ void decode_load(const TensorMap* a, const TensorMap* b, int token, int column, int first,
                                            int count, bool once, u32 base, u32 full, u32 empty, u32 bytes,
                                            int gated = 0) {
  const u64 keep = cache_policy<LAST>(), stream = once ? cache_policy<FIRST>() : cache_policy<NORMAL>();
  auto weights = [&](int k, u32 stage) {
    const u32 to = base + stage * Shape::STAGE;
    barrier_expect(full + stage * 8, bytes);
    tensor_load(to, b, (first + k) * 128, column, full + stage * 8, stream);
    if constexpr (Shape::GATES)
      tensor_load(to + Shape::B_BYTES / 2, b, (first + k) * 128, column + gated, full + stage * 8, stream);
  };
  auto tokens = [&](int k, u32 stage) {
    if constexpr (Shape::HELD) return;
    const u32 to = base + stage * Shape::STAGE + Shape::B_BYTES;
    tensor_load(to, a, (first + k) * 128, token, full + stage * 8, keep);
  };
  static_assert(EARLY <= STAGES, "a stage each");
  const int ahead = min(count, EARLY);
#pragma unroll 1
  for (int k = 0; k < ahead; k++) weights(k, k);
  decode_wait<Shape>();
  Ring<STAGES> ring;
#pragma unroll 1
  for (int k = 0; k < ahead; k++, ring.next()) tokens(k, k);
  if constexpr (!Shape::HELD) named_sync(2, 128 * Shape::GROUPS + 32);  // the scales are on their way
#pragma unroll 1
  for (int k = ahead; k < count; k++, ring.next()) {
    barrier_wait(empty + ring.stage * 8, ring.parity ^ 1);
    weights(k, ring.stage);
    tokens(k, ring.stage);
  }
  if constexpr (Shape::LATE) launch_dependents();
}

// The scales of every block of k of this part -> shared memory, a's of every token [count, TOKENS] and b's behind them. The
// warp that loads the tokens lets them go first: behind 200 KB of those they came 3400 cycles after the wait.
template <int TOKENS, int THREADS, bool CHANNEL>
__device__ __forceinline__ void decode_scales(const GemmArgs& args, int token, int column, int first, int count,
                                              u32 scales) {
  static_assert(THREADS % TOKENS == 0, "a thread has one token");
  const float* a = args.a.data + args.a.row(min(token + (int)threadIdx.x % TOKENS, args.m - 1));
  const float* b = args.b.data + args.b.row(min(column, args.n - 1));
  u32 to = scales + threadIdx.x * 4;
#pragma unroll 4
  for (int k = threadIdx.x / TOKENS; k < count; k += THREADS / TOKENS, to += THREADS * 4)
    copy4(to, a + args.a.column(first + k));
  scales += args.segment * (TOKENS * 4);
#pragma unroll 1
  for (int k = threadIdx.x; k < count; k += THREADS) {
    if constexpr (CHANNEL) {
      store_shared(scales + k * 4, 1.f);
    } else {
      copy4(scales + k * 4, b + args.b.column(first + k));
    }
  }
  named_arrive(2, THREADS + 32);
}

// sum [64 columns of c (or fewer), TOKENS] over this block's part of k, two sets of sums in turn, of TOGETHER blocks each.
// scales: of both, or of a, and b_scales. codes, held: where the tokens are held, and how many (see operand_plain).
template <class Shape, int TOKENS, int STAGES>
__device__ __forceinline__ void decode_multiply(float (&sum)[Shape::SUMS], int count, u32 base, u32 scales,
                                                u32 b_scales, u32 full, u32 empty, u32 codes = 0, u32 held = 0) {
  constexpr int W = Shape::SUMS, V = Shape::TURNED ? 1 : W / 4, TOGETHER = Shape::TOGETHER;
  float d[2][TOGETHER][W], b_scale[2][TOGETHER];
  float2 scale[2][TOGETHER][V];
  Ring<STAGES> ring, behind;
  const bool counts = Shape::counts();
  const u64 weights = operand(base + warp_number() / 4 * 8192, 0), tokens = operand(base + Shape::B_BYTES, 0);
  scales += Shape::TURNED ? (warp_number() % 4 * 16 + lane_number() / 4) * 4 : lane_number() % 4 * 8;
  auto open = [&](int set, int many) {
    u32 from[TOGETHER];
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) {
      if (i == many) break;
      from[i] = ring.stage * (Shape::STAGE / 16);
      barrier_wait(full + ring.stage * 8, ring.parity);
      ring.next();
    }
    product_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) {
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) {
        if (i == many) break;
        float(&to)[W] = d[set][i];
        const u64 a = operand_after(tokens, from[i] + k * 2), b = operand_after(weights, from[i] + k * 2);
        if constexpr (Shape::HELD) {
          product(to, b, operand_plain(codes + (i * 128 + k * 32) * held, held * 16), k > 0);
        } else if constexpr (Shape::TURNED) {
          product(to, a, b, k > 0);
        } else {
          product(to, b, a, k > 0);
        }
      }
    }
    product_commit();
    codes += many * 128 * held;
  };
  auto load_scales = [&](int set, int many) {
#pragma unroll
    for (int i = 0; i < TOGETHER; i++, scales += TOKENS * 4, b_scales += 4) {
      if (i == many) break;
      if (!counts) continue;  // long before they are multiplied: their latency would come between two products
      if constexpr (Shape::TURNED) {
        scale[set][i][0] = float2{load_shared(scales), load_shared(scales + 32)};
      } else {
#pragma unroll
        for (int j = 0; j < V; j++) scale[set][i][j] = load_shared2(scales + j * 32);
      }
      if constexpr (!Shape::HELD) b_scale[set][i] = load_shared(b_scales);
    }
  };
  auto close = [&](int set, int many, bool last) {
    if (last) {
      product_wait<0>();
    } else {
      product_wait<1>();
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; i++, behind.next()) {
      if (i == many) break;
      product_done(d[set][i]);
      if (lane_number() == 0) barrier_arrive(empty + behind.stage * 8);
    }
    if (!counts) return;
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) {
      if (i == many) break;
      if constexpr (!Shape::HELD) {
#pragma unroll
        for (float2& by : scale[set][i]) by.x *= b_scale[set][i], by.y *= b_scale[set][i];
      }
#pragma unroll
      for (int j = 0; j < W; j++) {
        const float2 by = scale[set][i][Shape::TURNED ? 0 : j / 4];
        sum[j] = fmaf(d[set][i][j], (Shape::TURNED ? j / 2 : j) % 2 ? by.y : by.x, sum[j]);
      }
    }
  };
  auto scales_there = [&] {
    if constexpr (!Shape::HELD) {
      copies_wait();
      named_sync(1, 128 * Shape::GROUPS);
    }
  };
  auto next = [&](int set, int many) {
    open(set, many);
    load_scales(set, many);
  };
  const int whole = count / TOGETHER;
  if (whole > 0) {
    open(0, TOGETHER);
    scales_there();
    load_scales(0, TOGETHER);
    int k = 1;
    for (; k + 1 < whole; k += 2) {
      next(1, TOGETHER);
      close(0, TOGETHER, false);
      next(0, TOGETHER);
      close(1, TOGETHER, false);
    }
    if (k < whole) {
      next(1, TOGETHER);
      close(0, TOGETHER, false);
      close(1, TOGETHER, true);
    } else {
      close(0, TOGETHER, true);
    }
  } else {
    scales_there();
  }
  for (int k = whole * TOGETHER; k < count; k++) {
    next(0, 1);
    close(0, 1, true);
  }
}

// Two numbers of 16 bits and two others, each sum rounded.
template <class Out>
__device__ __forceinline__ u32 sum_of_pairs(u32 a, u32 b) {
  return Out::pack(Out::value(a) + Out::value(b), Out::value(a >> 16) + Out::value(b >> 16));
}

// A unit's parts, in the order of k.
template <int SPLIT>
__device__ __forceinline__ void add_parts(float (&y)[8], u32 from) {
  if constexpr (SPLIT == 1) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const float2 pair = load_shared2(from + j * 4);
      y[j] = pair.x, y[j + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int p = 0; p < SPLIT; p++) {
      const u32 mapped = in_block(from, p);
      const float4 lo = load_cluster4(mapped), hi = load_cluster4(mapped + 16);
      const float part[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
      for (int j = 0; j < 8; j++) y[j] = p ? y[j] + part[j] : part[j];
    }
  }
}

// What is added to the rounded results of a tile by this thread, of each token's units of eight columns, in decode_store's order.
template <class Shape, int TOKENS, int SPLIT>
struct Addends {
  static constexpr int UNITS = Shape::COLUMNS / 8, THREADS = 128 * Shape::GROUPS;
  static constexpr int EACH = (TOKENS * UNITS - 1) / (SPLIT * THREADS) + 1;
  Quad v[EACH];

  __device__ __forceinline__ void load(const GemmArgs& args, int token, int column, u32 rank) {
#pragma unroll
    for (int n = 0; n < EACH; n++) {
      const int i = (n * SPLIT + rank) * THREADS + threadIdx.x, t = i / UNITS, c = i % UNITS * 8;
      v[n] = Quad{};
      if (t < TOKENS && token + t < args.m && column + c < args.n) v[n] = args.addend(token + t, column + c);
    }
  }
};

// The parts of the cluster's blocks, added in the order of k -> c.
template <class Shape, int TOKENS, int SPLIT, bool CHANNEL, class Out, int BIAS, bool ADD>
__device__ __forceinline__ void decode_store(const GemmArgs& args, int token, int column, u32 rank, u32 parts,
                                             const Addends<Shape, TOKENS, SPLIT>& addends) {
  using A = Addends<Shape, TOKENS, SPLIT>;
#pragma unroll
  for (int n = 0; n < A::EACH; n++) {
    const int i = (n * SPLIT + rank) * A::THREADS + threadIdx.x, t = i / A::UNITS, c = i % A::UNITS * 8;
    if (t >= TOKENS || token + t >= args.m || column + c >= args.n) continue;
    float y[8];
    add_parts<SPLIT>(y, parts + (t * Shape::PITCH + c) * 4);
    Quad out;
#pragma unroll
    for (int j = 0; j < 8; j++) y[j] = finished<CHANNEL, Out, BIAS>(args, y[j], column + c + j);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      out.w[j] = Out::pack(y[2 * j], y[2 * j + 1]);
      if constexpr (ADD) out.w[j] = sum_of_pairs<Out>(out.w[j], addends.v[n].w[j]);
    }
    *(Quad*)((unsigned short*)args.c + (i64)(token + t) * args.n + column + c) = out;
  }
}

// What a thread block is to do, and where its things are in shared memory.
template <class Shape, int TOKENS, int STAGES, int SPLIT>
struct DecodePart {
  u32 base, full, empty, scales, codes, rank;
  int token_tiles, token, column, first, count;

  __device__ __forceinline__ explicit DecodePart(const GemmArgs& args) {
    base = shared_memory(), full = base + STAGES * Shape::STAGE + Shape::PAD, empty = full + STAGES * 8;
    scales = empty + STAGES * 8, codes = scales + args.segment * (TOKENS * 4 * (Shape::GATES ? 2 : 1));
    rank = SPLIT > 1 ? cluster_rank() : 0;
    const int unit = blockIdx.x / SPLIT, blocks = blocks_of(args.k, 128);
    token_tiles = blocks_of(args.m, TOKENS);
    token = start_of(unit % token_tiles * TOKENS, args.m, TOKENS), column = unit / token_tiles * (Shape::COLUMNS / (Shape::GATES ? 2 : 1));
    first = min((int)rank * args.segment, blocks), count = min(args.segment, blocks - first);
  }
};

// Of the warps that multiply: the products -> sum.
template <class Shape, int TOKENS, int STAGES, int SPLIT>
__device__ __forceinline__ void decode_sums(float (&sum)[Shape::SUMS],
                                            const DecodePart<Shape, TOKENS, STAGES, SPLIT>& part, u32 held) {
#pragma unroll
  for (int j = 0; j < Shape::SUMS; j++) sum[j] = 0.f;
  const u32 own_scales = Shape::GATES && warp_number() * 16 >= Shape::COLUMNS / 2 ? (part.codes - part.scales) / 2 : 0;
  decode_multiply<Shape, TOKENS, STAGES>(sum, part.count, part.base, part.scales + own_scales, part.codes, part.full,
                                         part.empty, part.codes, held);
}

// The same -> this block's part, in the stages' place.
template <class Shape, int TOKENS, int STAGES, int SPLIT>
__device__ __forceinline__ void decode_part(const DecodePart<Shape, TOKENS, STAGES, SPLIT>& part, u32 held) {
  float sum[Shape::SUMS];
  decode_sums(sum, part, held);
  named_sync(1, 128 * Shape::GROUPS);  // every warp's products have read the stages
  const u32 lane = lane_number(), warp = warp_number();
  if (Shape::counts()) {
#pragma unroll
    for (int j = 0; j < Shape::SUMS; j++) {
      const u32 row = lane / 4 + j / 2 % 2 * 8, across = j / 4 * 8 + lane % 4 * 2 + j % 2;
      const u32 token = Shape::TURNED ? warp % 4 * 16 + row : across;
      const u32 column = Shape::TURNED ? warp / 4 * 64 + across : warp * 16 + row;
      store_shared(part.base + (token * Shape::PITCH + column) * 4, sum[j]);
    }
  }
  if constexpr (SPLIT == 1) named_sync(1, 128 * Shape::GROUPS);
}

// Four lanes' words, of which lane i gets the i-th of each.
__device__ __forceinline__ Quad quad_turned(const u32 (&w)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  u32 v[4];
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const u32 other = __shfl_xor_sync(0xFFFFFFFFu, odd ? w[i] : w[i + 1], 1);
    v[i] = odd ? other : w[i], v[i + 1] = odd ? w[i + 1] : other;
  }
  Quad out;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 other = __shfl_xor_sync(0xFFFFFFFFu, upper ? v[i] : v[i + 2], 2);
    out.w[i] = upper ? other : v[i], out.w[i + 2] = upper ? v[i + 2] : other;
  }
  return out;
}

// TURNED, of which a lane's sums are of two tokens: the products -> c, without a detour through shared memory.
template <class Shape, bool CHANNEL, class Out, int BIAS, bool ADD, int TOKENS, int STAGES>
__device__ __forceinline__ void decode_rows(const DecodePart<Shape, TOKENS, STAGES, 1>& part, const GemmArgs& args) {
  constexpr int FOURS = Shape::SUMS / 16;  // of units of eight columns
  const int lane = lane_number(), warp = warp_number();
  const int row = part.token + warp % 4 * 16 + lane / 4, left = part.column + warp / 4 * 64 + lane % 4 * 8;
  const auto inside = [&](int f, int h) { return row + 8 * h < args.m && left + f * 32 < args.n; };
  Quad addends[ADD ? FOURS : 1][2] = {};
  if constexpr (ADD)
#pragma unroll
    for (int i = 0; i < 2 * FOURS; i++)
      if (Shape::counts() && inside(i / 2, i % 2)) addends[i / 2][i % 2] = args.addend(row + i % 2 * 8, left + i / 2 * 32);
  float sum[Shape::SUMS];
  decode_sums(sum, part, 0);
  if (!Shape::counts()) return;
#pragma unroll
  for (int f = 0; f < FOURS; f++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      u32 w[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int j = (f * 4 + i) * 4 + 2 * h;
        const int at = min(part.column + warp / 4 * 64 + (f * 4 + i) * 8 + lane % 4 * 2, args.n - 2);
        w[i] = Out::pack(finished<CHANNEL, Out, BIAS>(args, sum[j], at), finished<CHANNEL, Out, BIAS>(args, sum[j + 1], at + 1));
      }
      Quad unit = quad_turned(w);
      if constexpr (ADD)
#pragma unroll
        for (int i = 0; i < 4; i++) unit.w[i] = sum_of_pairs<Out>(unit.w[i], addends[f][h].w[i]);
      if (inside(f, h)) *(Quad*)((unsigned short*)args.c + (i64)(row + 8 * h) * args.n + left + f * 32) = unit;
    }
  }
}

template <bool CHANNEL, class Out, int BIAS, bool ADD, class Shape, int TOKENS, int STAGES, int SPLIT>
__device__ __forceinline__ void decode_end(const DecodePart<Shape, TOKENS, STAGES, SPLIT>& part, const GemmArgs& args,
                                           const Addends<Shape, TOKENS, SPLIT>& addends) {
  if constexpr (SPLIT > 1) cluster_sync();
  if (warp_number() < Shape::GROUPS * 4)
    decode_store<Shape, TOKENS, SPLIT, CHANNEL, Out, BIAS, ADD>(args, part.token, part.column, part.rank, part.base,
                                                                addends);
  if constexpr (SPLIT > 1) cluster_sync();  // a block that ended could still be read
}

template <int TOKENS, int COLUMNS, int STAGES, int SPLIT, int EARLY, bool TURNED, bool PAIRS, bool LATE, bool CHANNEL,
          class Out, int BIAS, bool ADD>
__device__ __forceinline__ void decode(const TensorMap* a, const TensorMap* b, const GemmArgs& args) {
  using Shape = DecodeShape<TOKENS, COLUMNS, STAGES, TURNED, PAIRS, LATE>;
  constexpr int WARPS = Shape::GROUPS * 4;
  constexpr bool ROWS = TURNED && SPLIT == 1 && COLUMNS >= 32;
  const DecodePart<Shape, TOKENS, STAGES, SPLIT> part(args);
  Addends<Shape, TOKENS, SPLIT> addends{};  // but for ROWS
  if (warp_number() == WARPS && lane_number() == 0) tensor_prefetch(a), tensor_prefetch(b);
  ring_init<STAGES, WARPS + 1>(warp_number(), part.full, part.empty, 1, WARPS);
  block_sync();
  if (warp_number() == WARPS) {
    decode_load<Shape, STAGES, EARLY>(a, b, part.token, part.column, part.first, part.count, part.token_tiles == 1,
                                      part.base, part.full, part.empty, Shape::B_BYTES + args.box * 128);
  } else {
    decode_wait<Shape>();
    decode_scales<TOKENS, 32 * WARPS, CHANNEL>(args, part.token, part.column, part.first, part.count, part.scales);
    if constexpr (ROWS) {
      decode_rows<Shape, CHANNEL, Out, BIAS, ADD>(part, args);
    } else {
      if constexpr (ADD) addends.load(args, part.token, part.column, part.rank);
      decode_part(part, 0);
    }
  }
  if constexpr (!ROWS) decode_end<CHANNEL, Out, BIAS, ADD>(part, args, addends);
}

}  // namespace quantrot
