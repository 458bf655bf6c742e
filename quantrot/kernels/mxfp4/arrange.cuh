// A kernel in front of a product of few tokens, which lays them down as the product takes them: as they are, or turned, quantized
// to MXFP4 and back, or as e4m3's codes; behind RMSNorm, or silu(gate) * up. Follows held.cuh.

namespace quantrot {

struct ArrangeArgs {
  const void* x;     // bfloat16 [tokens, columns], [tokens, 2 * columns] where gated; columns: a multiple of 128
  const void* norm;  // bfloat16 [columns]
  Words* y;          // written: bfloat16 [tokens, columns], or one token as HELD
  float* scales;     // [tokens], of e4m3's codes, which they do not multiply yet
  float root, epsilon;
  int columns;
  int settled;       // whether no kernel that may still run writes norm
};

enum Front { NO_FRONT, NORMED, GATED };
// How tokens lie: as they were; GROUPED, for products by a warpgroup, 16 columns of each product's side by side; HELD, one token
// that is turned and quantized, which a product takes AS_HELD.
enum Laid { PLAIN, GROUPED, HELD };

// SHARES thread blocks a token. A token is WORDS times 8 columns of each of THREADS threads: that much of it each block reads
// where it needs all of it, for e4m3's scale or the norm's sum, and WORDS / SHARES it writes.
template <int THREADS, int WORDS, int SHARES, int SPAN, int RULE, int LAID, int FRONT>
__device__ __forceinline__ void arrange(const ArrangeArgs& args) {
  static_assert(LAID != HELD || RULE >= 0, "bytes of MXFP4");
  constexpr int MINE = WORDS / SHARES;
  constexpr int READ = is_fp8<RULE>() || FRONT == NORMED ? WORDS : MINE;  // words
  const int token = blockIdx.x / SHARES, share = blockIdx.x % SHARES;
  const auto column = [&](int word) { return (int)(word * THREADS + threadIdx.x) * 8; };
  const auto inside = [&](int word) { return column(word) < args.columns; };
  const int first = READ == WORDS ? 0 : share * MINE;
  launch_dependents();
  Words words[READ], beside[FRONT == NO_FRONT ? 1 : READ];
  if (FRONT == NORMED && !args.settled) grid_wait();
  if constexpr (FRONT == NORMED)
#pragma unroll
    for (int i = 0; i < READ; i++) beside[i] = inside(first + i) ? ((const Words*)args.norm)[column(first + i) / 8] : Words{};
  grid_wait();
  const char* const from = (const char*)args.x + (u64)token * args.columns * (FRONT == GATED ? 4 : 2);
#pragma unroll
  for (int i = 0; i < READ; i++) words[i] = inside(first + i) ? load_fresh_words(from + column(first + i) * 2) : Words{};
  if constexpr (FRONT == GATED) {
#pragma unroll
    for (int i = 0; i < READ; i++)
      beside[i] = inside(first + i) ? load_fresh_words(from + (column(first + i) + args.columns) * 2) : Words{};
#pragma unroll
    for (int i = 0; i < READ; i++) words[i] = gated(words[i], beside[i]);
  }
  if constexpr (FRONT == NORMED) {
    const float factor = norm_factor<THREADS>(words, args.columns, args.epsilon, shared_memory() + 128);
#pragma unroll
    for (int i = 0; i < READ; i++) words[i] = normed(words[i], factor, beside[i]);
  }
  float scale = 1.f;
  if constexpr (is_fp8<RULE>()) scale = token_scale_of<THREADS, RULE>(larger_magnitude(0, words), shared_memory());
  const TokenScale by(scale);
  if (is_fp8<RULE>() && threadIdx.x == 0 && share == 0) args.scales[token] = scale;
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    Words mine = words[i];
    if constexpr (READ > MINE)
#pragma unroll
      for (int s = 1; s < SHARES; s++)
        if (s == share) mine = words[s * MINE + i];
    const int at = column(share * MINE + i), group = at / 32 % 4, quarter = at / 8 % 4;
    if constexpr (LAID == HELD) {
      const HeldPart part = held_part<SPAN, RULE>(mine, args.root);
      if (at < args.columns) ((uint2*)args.y)[at / 8] = {part.bytes[0], part.bytes[1]};
      if (at < args.columns && quarter == 0) ((float*)((char*)args.y + args.columns))[at / 32] = part.power;
      continue;
    } else if constexpr (is_fp8<RULE>()) {
      mine = codes_of(mine, by);
      if constexpr (LAID == GROUPED) mine = arranged(mine);
    } else {
      take<SPAN, RULE, LAID == GROUPED>(mine, args.root);
    }
    if (at >= args.columns) continue;
    Words* const to = args.y + (u64)token * (args.columns / 8);
    if constexpr (LAID == GROUPED) {
#pragma unroll
      for (int k = 0; k < 4; k++) ((u32*)(to + at / 128 * 16))[(quarter * 4 + k) * 4 + group] = mine.at(k);
    } else {
      store_words(to + at / 8, mine);
    }
  }
}

}  // namespace quantrot
