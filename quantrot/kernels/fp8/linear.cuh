// Few tokens, quantized where they are multiplied (after blocks.cuh and decode.cuh).
//
// Every thread block quantizes its own slice of k of all tokens, 1 x 128 blocks, while its weights are on their way: up to
// eight tokens' codes are less than one token's weights, and no kernel, and no gap between kernels, comes before the
// product. Codes, scales and sums are those of blocks.cuh and decode.cuh, and so are the results' bits.
//
// Codes are held as [units of 16 along k][tokens][16 bytes], eight rows of the tensor core's operand starting at every
// unit: the rows past the tokens are the next units' codes, and nobody reads their sums.

namespace quantrot {

struct Tokens {
  const void* x;  // [m, k], 16 bits
  i64 stride;     // of its rows, elements
  const void* norm;  // [k], of x's type: x / sqrt(mean(x^2) + epsilon) * norm is what is quantized
  float epsilon;
};

// silu(gate) * up of the columns and of those that they gate, n / 2 apart, each rounded, -> c [m, n / 2].
template <class Shape, int D, int TOKENS, int SPLIT, class Out, int BIAS>
__device__ __forceinline__ void store_gated(const GemmArgs& args, int column, u32 rank, u32 parts) {
  constexpr int HALF = Shape::COLUMNS / 2, UNITS = HALF / 8, THREADS = 128 * Shape::GROUPS;
  const int n = args.n / 2;
  for (int i = rank * THREADS + threadIdx.x; i < TOKENS * UNITS; i += SPLIT * THREADS) {
    const int t = i / UNITS, c = i % UNITS * 8;
    if (t >= args.m || column + c >= n) continue;
    Vec v[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float y[8];
      add_parts<SPLIT>(y, parts + (t * Shape::PITCH + h * HALF + c) * 4);
#pragma unroll
      for (int j = 0; j < 8; j++) y[j] = finished<false, Out, BIAS>(args, y[j], h * n + column + c + j);
#pragma unroll
      for (int j = 0; j < 4; j++) v[h].w[j] = Out::pack(y[2 * j], y[2 * j + 1]);
    }
    *(Vec*)((unsigned short*)args.c + (i64)t * n + column + c) = gated<D>(v[0], v[1]);
  }
}

// Of THREADS threads: codes and a_scale * b_scale -> shared memory. A half-warp has a token, and V of its groups of 128
// columns at once.
//
// NORMED: all of k is this block's, and V groups a half-warp are all there are. The groups' sums of squares meet at `sums`.
template <int D, bool NORMED, int V, int EARLY, int THREADS, bool CHANNEL, class Shape>
__device__ __forceinline__ void quantize_tokens(const Tokens& tokens, const GemmArgs& args, int column, int first,
                                                int count, u32 codes, u32 scales, u32 sums) {
  const int m = args.m;
  constexpr bool GATES = Shape::GATES;
  constexpr int HALVES = THREADS / 16;
  const int in = lane_number() % 16, half = threadIdx.x / 16, own = group_of<V, 16>();
  const int apart = HALVES / m, begin = half / m, token = half - begin * m;  // groups
  const int whole = begin < apart ? count : 0;  // a half-warp too many has none
  const int real = min(whole, (args.k - first * 128 - in * 8 + 127) / 128);  // groups that have this lane's columns
  const char* const x = (const char*)tokens.x + (token * tokens.stride + first * 128 + in * 8) * 2;
  const float* const b = args.b.data + args.b.row(min(column, args.n - 1));
  const u32 to_gated = (codes - scales) / 2;
  codes += (in / 2 * m + token) * 16 + in % 2 * 8, scales += token * 4, sums += token * 4;
  Vec weight[NORMED ? V : 1];
  if constexpr (NORMED) {
    if constexpr (EARLY == 0) decode_wait<Shape>();  // the kernel before this one may write it
#pragma unroll
    for (int j = 0; j < V; j++) {
      weight[j] = Vec{{0, 0, 0, 0}};
      const int k = begin + j * apart;
      if (k < real) weight[j] = load16((const char*)tokens.norm + (i64)(k * 128 + in * 8) * 2);
    }
  }
  decode_wait<Shape>();
  for (int start = begin; start - begin < count; start += apart * V) {
    Vec v[V];
#pragma unroll
    for (int j = 0; j < V; j++) {
      const int k = start + j * apart;
      v[j] = Vec{{0, 0, 0, 0}};
      if (k < real) v[j] = load16(x + (i64)k * 256);
    }
    const int own_k = start + own * apart;
    const bool stores = in < V && own_k < whole;
    float other = 1.f, gated_other = 1.f;
    if (!CHANNEL && stores) other = __ldg(b + args.b.column(first + own_k));
    if (GATES && stores) gated_other = __ldg(args.b.data + args.b.row(column + args.n / 2) + args.b.column(first + own_k));
    if constexpr (NORMED) {
#pragma unroll
      for (int j = 0; j < V; j++) {
        const float sum = sum_of_half(square_sum<D>(v[j]));
        if (in == 0 && begin + j * apart < whole) store_shared(sums + (begin + j * apart) * 32, sum);
      }
      named_sync(3, THREADS);
      const float factor = norm_factor(sums, count, 32, args.k, tokens.epsilon);
#pragma unroll
      for (int j = 0; j < V; j++) v[j] = normed<D>(v[j], factor, weight[j]);
    }
    u32 found[V][2];
    group_codes<D>(found, v, [&](float scale) {
      if (stores) store_shared(scales + own_k * 32, scale * other);
      if (GATES && stores) store_shared(scales + to_gated + own_k * 32, scale * gated_other);
    });
#pragma unroll
    for (int j = 0; j < V; j++) {
      const int k = start + j * apart;
      if (k < whole) store_shared2(codes + k * 128 * m, found[j][0], found[j][1]);
    }
  }
}

// V: see quantize_tokens.
template <int COLUMNS, int STAGES, int SPLIT, int EARLY, bool PAIRS, bool LATE, int V, bool NORMED, int D, bool CHANNEL,
          class Out, int BIAS, bool ADD, bool GATES>
__device__ __forceinline__ void linear(const TensorMap* b, const GemmArgs& args, const Tokens& tokens) {
  static_assert(!NORMED || SPLIT == 1, "a block has the whole of a token");
  constexpr int TOKENS = 8;
  static_assert(!GATES || !(CHANNEL || ADD), "not made");
  using Shape = DecodeShape<TOKENS, COLUMNS, STAGES, false, PAIRS, LATE, true, GATES>;
  constexpr int WARPS = 4 * Shape::GROUPS, THREADS = 32 * WARPS;
  const DecodePart<Shape, TOKENS, STAGES, SPLIT> part(args);
  const u32 warp = warp_number();
  const int m = args.m;
  Addends<Shape, TOKENS, SPLIT> addends{};
  if (warp == WARPS && lane_number() == 0) tensor_prefetch(b);
  ring_init<STAGES, WARPS + 1>(warp_number(), part.full, part.empty, 1, WARPS);
  block_sync();
  if (warp == WARPS) {
    decode_load<Shape, STAGES, EARLY>(nullptr, b, part.token, part.column, part.first, part.count, true, part.base,
                                      part.full, part.empty, Shape::STAGE, args.n / 2);
  } else {
    const u32 sums = part.codes + part.count * 128 * m + (TOKENS - m) * 16;
    quantize_tokens<D, NORMED, V, EARLY, THREADS, CHANNEL, Shape>(tokens, args, part.column, part.first, part.count, part.codes,
                                                           part.scales, sums);
    fence_async();
    if constexpr (ADD) addends.load(args, part.token, part.column, part.rank);
    named_sync(2, THREADS);
    decode_part(part, m);
  }
  if constexpr (GATES) {
    if constexpr (SPLIT > 1) cluster_sync();
    if (warp < WARPS) store_gated<Shape, D, TOKENS, SPLIT, Out, BIAS>(args, part.column, part.rank, part.base);
    if constexpr (SPLIT > 1) cluster_sync();
  } else {
    decode_end<CHANNEL, Out, BIAS, ADD>(part, args, addends);
  }
}

}  // namespace quantrot
