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
  const void* x;  // [m, k], 16 bits; gated: [m, 2 k], gate and up
  i64 stride;     // of its rows, elements
};

// Of THREADS threads: codes and a_scale * b_scale -> shared memory. A half-warp has a token, and V of its groups of 128
// columns at once.
template <int D, bool GATED, int V, int THREADS, bool CHANNEL>
__device__ __forceinline__ void quantize_tokens(const Tokens& tokens, const GemmArgs& args, int m, int thread, int column,
                                                int first, int count, u32 codes, u32 scales) {
  constexpr int HALVES = THREADS / 16;
  const int in = lane_number() % 16, half = thread / 16, own = group_of<V, 16>();
  const int apart = HALVES / m, begin = half / m, token = half - begin * m;  // groups
  const int whole = begin < apart ? count : 0;  // a half-warp too many has none
  const int real = min(whole, (args.k - first * 128 - in * 8 + 127) / 128);  // groups that have this lane's columns
  const char* const x = (const char*)tokens.x + (token * tokens.stride + first * 128 + in * 8) * 2;
  const float* const b = args.b.data + args.b.row(min(column, args.n - 1));
  codes += (in / 2 * m + token) * 16 + in % 2 * 8, scales += token * 4;
  grid_wait();
  for (int start = begin; start - begin < count; start += apart * V) {
    Vec v[V], up[GATED ? V : 1];
#pragma unroll
    for (int j = 0; j < V; j++) {
      const int k = start + j * apart;
      v[j] = Vec{{0, 0, 0, 0}};
      if (k < real) v[j] = load16(x + (i64)k * 256);
      if constexpr (GATED) {
        up[j] = Vec{{0, 0, 0, 0}};
        if (k < real) up[j] = load16(x + (i64)k * 256 + (i64)args.k * 2);
      }
    }
    const int own_k = start + own * apart;
    const bool stores = in < V && own_k < whole;
    float other = 1.f;
    if (!CHANNEL && stores) other = __ldg(b + args.b.column(first + own_k));
    if constexpr (GATED) {
      all_loaded(v, up);
#pragma unroll
      for (int j = 0; j < V; j++) v[j] = gated<D>(v[j], up[j]);
    }
    u32 found[V][2];
    group_codes<D>(found, v, [&](float scale) {
      if (stores) store_shared(scales + own_k * 32, scale * other);
    });
#pragma unroll
    for (int j = 0; j < V; j++) {
      const int k = start + j * apart;
      if (k < whole) store_shared2(codes + k * 128 * m, found[j][0], found[j][1]);
    }
  }
}

// ONE: there is one token. HELPERS: warpgroups that quantize beside those that multiply. V: see quantize_tokens.
template <bool ONE, int COLUMNS, int STAGES, int SPLIT, int EARLY, int HELPERS, int V, bool GATED, int D, bool CHANNEL,
          class Out, int BIAS>
__device__ __forceinline__ void linear(const TensorMap* b, const GemmArgs& args, const Tokens& tokens) {
  constexpr int TOKENS = 8;
  using Shape = DecodeShape<TOKENS, COLUMNS, STAGES, true>;
  constexpr int OWN = 128 * Shape::GROUPS, THREADS = OWN + 128 * HELPERS;
  const DecodePart<Shape, TOKENS, STAGES, SPLIT> part(args);
  const u32 warp = warp_number();
  const int m = ONE ? 1 : args.m;
  if (warp == Shape::GROUPS * 4 && lane_number() == 0) tensor_prefetch(b);
  decode_start<STAGES, THREADS / 32 + 1, Shape::GROUPS * 4>(part.full, part.empty);
  if (warp == Shape::GROUPS * 4) {
    if constexpr (EARLY == 0) grid_wait();
    decode_load<Shape, STAGES, EARLY>(nullptr, b, part.token, part.column, part.first, part.count, true, part.base,
                                      part.full, part.empty);
  } else {
    const int thread = warp < Shape::GROUPS * 4 ? threadIdx.x : threadIdx.x - 32;
    quantize_tokens<D, GATED, V, THREADS, CHANNEL>(tokens, args, m, thread, part.column, part.first, part.count, part.codes,
                                                   part.scales);
    fence_async();
    if (warp < Shape::GROUPS * 4) {
      named_sync(2, THREADS);
      decode_part(part, m);
    } else {
      named_arrive(2, THREADS);
    }
  }
  decode_end<Shape, TOKENS, STAGES, SPLIT, CHANNEL, Out, BIAS>(part, args);
}

}  // namespace quantrot
