// One new token a sequence and an INT4 KV cache, for sm_90a: RoPE and rotation of its queries and key, its codes and their
// place in the cache, and its attention to all that is cached, in one launch. Follows one_token.cuh, whose sums of warps these
// are; a key head's blocks meet as gather.cuh has it.
//
// A warp takes 32 tokens at a time, on its own: their codes, scales and lows lie one after another, and the copy engine brings
// them to its ring of STAGES tiles. No number of the cache is made of them. Tensor cores add up queries times codes, and
// weights times codes less 8, which are exact in float16; what a number is beside that is the same for all of a token's group.
// So a score is scale * (its sum) + low * (the sum of the query's columns), and an output has weight * (low + 8 scale) beside
// it, in float32. A query is multiplied by a power of two, so that it is exact in float16 (of bfloat16, what is some 2^25
// times less than its largest number is cut off); so are weights times scales, by one of the largest scale of a group so far,
// which leaves them float16's 11 bits down to 2^-21 of that.
//
// A score may be LAZY above what the weights so far are counted from: only then are its sums made smaller, and is the largest
// one of a tile looked for.
//
// A lane (g = lane / 4, q = lane % 4) has words of eight codes: of K's rows, two tokens of 16, quarter q of every group's
// columns; of V's, four tokens, eighth g.

namespace quantrot {

struct CodedTokenArgs {
  const unsigned short *q, *k, *v, *cos, *sin;                    // the new token's, 16 bits; cos null: no RoPE
  const signed char* signs;                                       // +-1 [D] before the rotation, or null
  unsigned char *key, *value;                                     // codes [batch, groups, room, D / 2]
  unsigned short *key_scale, *key_low, *value_scale, *value_low;  // bfloat16 [batch, groups, room, GROUPS]
  u64* count;                 // tokens in the cache, 2^32 and up is 0 between launches; or null
  const unsigned char* mask;  // [batch, tokens] or null: 0 where a token is not seen
  unsigned short* out;        // [batch, heads, D]
  float* parts;               // [batch * groups, blocks, SHARE, D + 4] for several blocks: see gather.cuh
  i64 q_batch, q_head, k_batch, k_head, v_batch, v_head, cos_batch, sin_batch, mask_batch;  // elements
  int heads, groups, room, limit, at, advance;  // at: tokens in the cache, where there is no count
  int counter;                                  // the first of [batch * groups] counters for several blocks
  float scale, factor;                          // of the scores, times log2(e); of the rotation, 0 for none
};

// Shared memory behind TokenShape's: [WARPS][STAGES] tiles, each of K's codes, V's, K's scales and lows, V's; barriers; a new
// token's rows, each codes, then 8 bytes of scales and 8 of lows; queries, [SHARE][Q_ROW].
template <int D, int GROUPS, int SHARE, int WARPS, int STAGES>
struct CodedShape : TokenShape<D, SHARE, WARPS, 1> {
  static constexpr int TOKENS = 32, CODES = TOKENS * D / 2, STEPS = TOKENS * GROUPS * 2, TILE = 2 * CODES + 4 * STEPS;
  static constexpr int RING = TokenShape<D, SHARE, WARPS, 1>::GAINS, BARRIERS = RING + WARPS * STAGES * TILE;
  static constexpr int NEW_ROW = D / 2 + 16, NEW = BARRIERS + WARPS * STAGES * 8;
  static constexpr int Q_ROW = D * 2 + 16, QUERIES = (NEW + 2 * NEW_ROW + 15) / 16 * 16;
};

#ifndef QUANTROT_EMULATED
// a b + c of two float16 numbers each.
__device__ __forceinline__ u32 times_plus(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
#endif

constexpr float LAZY = 8.f;

// What takes codes out of words, as float16: of codes i and i + 4 of the eight the bits, below those of 1024; where i is odd
// they lie four bits up. Constants in registers, for of one that the compiler knows it makes a copy for each use, since an
// instruction takes one (105 of 890 instructions a tile).
struct Codes {
  u32 low, high;

  __device__ __forceinline__ explicit Codes(u32 zero) : low(0x000F000F | zero), high(0x00F000F0 | zero) {}
  __device__ __forceinline__ u32 at(u32 word, int i) const {
    return ((word >> i / 2 * 8) & (i % 2 ? high : low)) | 0x64006400u;
  }
  // Less 8.
  __device__ __forceinline__ u32 centred(u32 word, int i) const {
    return i % 2 ? times_plus(at(word, i), 0x2C002C00u, 0xD480D480u) : plus<Fp16>(at(word, i), 0xE408E408u);  // / 16 - 72; - 1032
  }
};

template <int N>
__device__ __forceinline__ void load_row(u32 (&w)[N], u32 from) {
  if constexpr (N == 1) {
    w[0] = load_shared1(from);
  } else if constexpr (N == 2) {
    const float2 two = load_shared2(from);
    w[0] = __float_as_uint(two.x), w[1] = __float_as_uint(two.y);
  } else {
    int x[4];
    load_shared4(from, x[0], x[1], x[2], x[3]);
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = (u32)x[i];
  }
}

// A token's scales and lows, which lie `apart` from each other.
template <int GROUPS>
struct Steps {
  u32 scales[(GROUPS + 1) / 2], lows[(GROUPS + 1) / 2];

  __device__ __forceinline__ Steps(u32 from, u32 apart) {
    if constexpr (GROUPS == 1) {
      scales[0] = load_shared_u16(from), lows[0] = load_shared_u16(from + apart);
    } else {
      load_row(scales, from), load_row(lows, from + apart);
    }
  }
  __device__ __forceinline__ static float number(const u32* w, int i) {
    return __uint_as_float(i % 2 ? w[i / 2] & 0xFFFF0000u : w[i / 2] << 16);
  }
  __device__ __forceinline__ float scale(int i) const { return number(scales, i); }
  __device__ __forceinline__ float low(int i) const { return number(lows, i); }
};

// Of positive numbers up to one whose exponent field this is, from 20 up: what brings them below 2^7, and back.
__device__ __forceinline__ float up_from(int field) { return __uint_as_float((u32)(260 - field) << 23); }
__device__ __forceinline__ float back_to(int field) { return __uint_as_float((u32)(field - 6) << 23); }
__device__ __forceinline__ int field_of(float x) { return min(max((int)(__float_as_uint(x) >> 23), 20), 254); }

__device__ __forceinline__ float nearest_bf16(float x) {  // infinities and NaN stay
  const u32 bits = __float_as_uint(x);
  return fabsf(x) < -minus_infinity() ? __uint_as_float(bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000u) : x;
}

// A row of numbers, as quantize_int4 has it: to shared memory, and if `kept` to the cache.
template <int D, int GROUPS, class T>
__device__ __forceinline__ void code_row(const Neighbours<D>& row, unsigned char* codes, unsigned short* scales,
                                         unsigned short* lows, bool kept, u32 to) {
  constexpr int EACH = D / 32, LANES = 32 / GROUPS;  // columns of a lane, lanes of a group
  const u32 lane = lane_number();
  float v[EACH];
  bool nan = false;
#pragma unroll
  for (int i = 0; i < EACH; i++) v[i] = T::value((unsigned short)(row.x[i / 2] >> i % 2 * 16));
  float least = v[0], most = v[0];
#pragma unroll
  for (int i = 0; i < EACH; i++) least = fminf(least, v[i]), most = fmaxf(most, v[i]), nan |= v[i] != v[i];
  const u32 mine = LANES == 32 ? 0xFFFFFFFFu : ((1u << LANES % 32) - 1) << lane / LANES * LANES;
  nan = (__ballot_sync(0xFFFFFFFFu, nan) & mine) != 0;
#pragma unroll
  for (int lanes = 1; lanes < LANES; lanes *= 2) {
    least = fminf(least, __shfl_xor_sync(0xFFFFFFFFu, least, lanes));
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, lanes));
  }
  const float none = __uint_as_float(0x7FC00000u), low = nan ? none : __fadd_rn(nearest_bf16(least), 0.f);  // no -0
  float scale = nearest_bf16(__fmul_rn(__fsub_rn(most, low), 1.f / 15.f));
  if (scale == 0.f) scale = 1.f;
  const bool finite = fabsf(scale) < -minus_infinity();
  u32 word = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const float step = finite ? __fdiv_rn(__fsub_rn(v[i], low), scale) : 0.f;
    const float code = __fadd_rn(fminf(fmaxf(step, 0.f), 15.f), 12582912.f);  // 1.5 2^23: to nearest even
    word |= (__float_as_uint(code) & 15) << 4 * i;
  }
#pragma unroll
  for (int n = EACH; n < 8; n *= 2)
    word |= __shfl_xor_sync(0xFFFFFFFFu, word, n / EACH) << 4 * n;
  const u32 scale_bits = __float_as_uint(finite ? scale : none) >> 16, low_bits = __float_as_uint(low) >> 16;
  if (lane % (8 / EACH) == 0) {
    const u32 i = lane * EACH / 8;
    store_shared(to + i * 4, word);
    if (kept) ((u32*)codes)[i] = word;
  }
  if (lane % LANES == 0) {
    const u32 i = lane / LANES;
    store_two_bytes(to + D / 2 + i * 2, scale_bits), store_two_bytes(to + D / 2 + 8 + i * 2, low_bits);
    if (kept) scales[i] = (unsigned short)scale_bits, lows[i] = (unsigned short)low_bits;
  }
}

template <int D, int GROUPS, int SHARE, int WARPS, int STAGES, class T>
__device__ __forceinline__ void attend_codes(const CodedTokenArgs& args) {
  using Shape = CodedShape<D, GROUPS, SHARE, WARPS, STAGES>;
  constexpr int GROUP = D / GROUPS, KW = GROUP / 32, VW = GROUP / 64;  // columns of a group, a lane's words of one
  constexpr int TOKENS = Shape::TOKENS, ROW = D + 4, ROWS = (SHARE + WARPS - 1) / WARPS;
  const u32 lane = lane_number(), g = lane / 4, q = lane % 4, warp = warp_number(), base = shared_memory();
  const int split = gridDim.x, rank = blockIdx.x, stride = split * WARPS;
  const u32 ring_at = base + Shape::RING + warp * (STAGES * Shape::TILE);
  const u32 landed = base + Shape::BARRIERS + warp * (STAGES * 8), new_k = base + Shape::NEW, new_v = new_k + Shape::NEW_ROW;
  const int batch = blockIdx.y / args.groups, group = blockIdx.y % args.groups;
  if (lane == 0) {
    for (u32 i = 0; i < STAGES; i++) barrier_init(landed + i * 8, 1);
    barrier_init_done();
  }
  grid_wait();
  const bool first = rank == 0 && warp == 0;  // it has the new token
  Neighbours<D> rows[ROWS], k = {}, v = {}, cos, sin;
  if (threadIdx.x == 0) store_shared(base + Shape::WORD, args.count ? load_count(args.count) : (u32)args.at);
  // Queries are turned by a warp each, the last first: the first one has the new token.
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    const int head = min(i * WARPS + WARPS - 1 - (int)warp, SHARE - 1);
    rows[i].load(args.q + batch * args.q_batch + (group * SHARE + head) * args.q_head);
  }
  if (args.cos) cos.load(args.cos + batch * args.cos_batch), sin.load(args.sin + batch * args.sin_batch);
  if (first) {
    k.load(args.k + batch * args.k_batch + group * args.k_head);
    v.load(args.v + batch * args.v_batch + group * args.v_head);
  }
  block_sync();
  const u32 counted = load_shared1(base + Shape::WORD);
  const bool full = counted >= (u32)args.limit;  // no place for the token
  const int position = full ? args.limit - 1 : (int)counted, steps = position / TOKENS + 1;
  const i64 row = (i64)blockIdx.y * args.room;
  unsigned char *const keys = args.key + row * (D / 2), *const values = args.value + row * (D / 2);
  unsigned short *const key_scale = args.key_scale + row * GROUPS, *const key_low = args.key_low + row * GROUPS;
  unsigned short *const value_scale = args.value_scale + row * GROUPS, *const value_low = args.value_low + row * GROUPS;
  const unsigned char* const mask = args.mask ? args.mask + batch * args.mask_batch : nullptr;
  auto start = [&](int step, u32 stage, int count) {  // of so many tokens
    const int token = step * TOKENS;
    const u32 to = ring_at + stage * Shape::TILE, bar = landed + stage * 8, steps_at = to + 2 * Shape::CODES;
    barrier_expect(bar, count * (D + 8 * GROUPS));
    line_load(to, keys + token * (D / 2), count * (D / 2), bar);
    line_load(steps_at, key_scale + token * GROUPS, count * (2 * GROUPS), bar);
    line_load(steps_at + Shape::STEPS, key_low + token * GROUPS, count * (2 * GROUPS), bar);
    line_load(to + Shape::CODES, values + token * (D / 2), count * (D / 2), bar);
    line_load(steps_at + 2 * Shape::STEPS, value_scale + token * GROUPS, count * (2 * GROUPS), bar);
    line_load(steps_at + 3 * Shape::STEPS, value_low + token * GROUPS, count * (2 * GROUPS), bar);
  };
  // Tokens of a tile: row g of 16 is one whose lowest bits are changed, so that V's rows meet fewer banks twice.
  const u32 own = (g & 4) | (g & 1) << 1 | (g >> 1 & 1), other = (q & 2) << 1 | (q & 1);  // and 2 q; 2 q + 1 is 2 further on
  u32 open[4] = {1, 1, 1, 1};
  auto load_mask = [&](int step) {
    if (!mask || step < 0) return;
#pragma unroll
    for (int r = 0; r < 4; r++) open[r] = mask[min(step * TOKENS + (int)own + 8 * r, position)];
  };
  int step = steps - 1 - (rank + split * (int)warp);
  const bool counting = args.advance && warp == WARPS - 1;
#pragma unroll
  for (int i = 0; i < STAGES; i++) {  // of a tile that ends the room, what is there
    const int ahead = step - i * stride;
    if (ahead >= 0) start(ahead, i, min(args.room - ahead * TOKENS, TOKENS));
  }
  load_mask(step);
  const auto turn = [&](Neighbours<D>& row) {
    if (args.cos) row.template turn<T>(cos, sin);
    if (args.factor != 0.f) row.template rotate<T>(args.signs, args.factor);
  };
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    const int head = i * WARPS + WARPS - 1 - (int)warp;
    if (head >= SHARE) continue;
    turn(rows[i]);
#pragma unroll
    for (int n = 0; n < D / 64; n++)
      store_shared(base + Shape::QUERIES + head * Shape::Q_ROW + (lane * (D / 64) + n) * 4, rows[i].x[n]);
  }
  if (first) turn(k);
  block_sync();
  Quad queries[GROUPS][KW];  // heads past the share are the last one again, and are not kept
#pragma unroll
  for (int i = 0; i < GROUPS * KW; i++) {
    const int column = i / KW * GROUP + q * (GROUP / 4) + i % KW * 8;
    load_row(queries[i / KW][i % KW].w, base + Shape::QUERIES + min((int)g, SHARE - 1) * Shape::Q_ROW + column * 2);
  }
  // Queries, in the order of codes, 16 times as large where codes do not lie four bits up; 16 times the sum of a query's
  // columns; what a product of codes of 0 gives, negated; what a score is multiplied by.
  u32 b[GROUPS][KW][4];
  float sums[GROUPS][4] = {}, origin[GROUPS][4] = {}, factor[2];
  if (step >= 0) {
    const auto value = [&](int i, int w, int c) {
      return T::value((unsigned short)(queries[i][w].w[c / 2] >> c % 2 * 16));
    };
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < D / 4; i++) most = fmaxf(most, fabsf(value(i / 8 / KW, i / 8 % KW, i % 8)));
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, lanes));
    const int field = field_of(most);
#pragma unroll
    for (int h = 0; h < 2; h++)
      factor[h] = args.scale * (1 / 16.f) * back_to((int)__shfl_sync(0xFFFFFFFFu, (u32)field, 8 * q + 4 * h));
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
#pragma unroll
      for (int w = 0; w < KW; w++) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
          const float up = up_from(field) * (n % 2 ? 1.f : 16.f);
          b[i][w][n] = Fp16::pack(value(i, w, n) * up, value(i, w, n + 4) * up);
        }
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
          product_warp<Fp16>(sums[i], {0x3C003C00u, 0x3C003C00u, 0x4C004C00u, 0x4C004C00u}, b[i][w][n], b[i][w][n + 1]);
          product_warp<Fp16>(origin[i], {0xE400E400u, 0xE400E400u, 0xE400E400u, 0xE400E400u}, b[i][w][n], b[i][w][n + 1]);
        }
      }
    }
  }
  u64 arrivals = 0;
  if (counting) arrivals = count_arrival(args.count);  // after this block has read it, while the tiles are on their way
  const int others = min(split, steps) - 1;            // blocks that have a step, but one
  float* const all_parts = args.parts + (i64)blockIdx.y * split * SHARE * ROW;
  float* const parts = all_parts + rank * SHARE * ROW;
  bool adds = false;
  if (warp == WARPS - 1 && others > 0 && rank <= others) {
    for (int i = lane; i < SHARE * ROW / 4; i += 32) ((float4*)parts)[i] = {0.f, 0.f, 0.f, 0.f};
    warp_sync();
    adds = lane == 0 && count_in_turn(counters + args.counter + blockIdx.y, others) == (u32)others;
  }
  bool last = first;  // the next tile is the new token's
  if (first) {
    code_row<D, GROUPS, T>(k, keys + position * (D / 2), key_scale + position * GROUPS, key_low + position * GROUPS, !full,
                           new_k);
    code_row<D, GROUPS, T>(v, values + position * (D / 2), value_scale + position * GROUPS, value_low + position * GROUPS,
                           !full, new_v);
    warp_sync();
  }
  float top[2] = {minus_infinity(), minus_infinity()}, point[2] = {}, total[2] = {}, beside[GROUPS][2] = {}, o[D / 16][4] = {};
  int unit[GROUPS] = {};  // exponent field of the largest scale of V so far
  const Codes code(counted & 0x80000000u);
  Ring<STAGES> at;
#pragma unroll 1
  for (; step >= 0; step -= stride) {
    const u32 tile = ring_at + at.stage * Shape::TILE, steps_at = tile + 2 * Shape::CODES;
    barrier_wait(landed + at.stage * 8, at.parity);
    if (last) {
      const u32 token = position % TOKENS;
      if (lane < D / 8) {
        store_shared(tile + token * (D / 2) + lane * 4, load_shared1(new_k + lane * 4));
        store_shared(tile + Shape::CODES + token * (D / 2) + lane * 4, load_shared1(new_v + lane * 4));
      }
      if (lane < 4 * GROUPS) {
        const u32 from = (lane & 2 ? new_v : new_k) + D / 2 + lane % 2 * 8 + lane / 4 * 2;
        store_two_bytes(steps_at + lane % 4 * Shape::STEPS + (token * GROUPS + lane / 4) * 2, load_shared_u16(from));
      }
      warp_sync();
      last = false;
    }
    bool seen[4];
    float s[4][2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32 at_k = tile + (half * 16 + own) * (D / 2) + q * (GROUP / 8);
      float x[GROUPS][4];
#pragma unroll
      for (int i = 0; i < GROUPS; i++) {
        u32 a[2][KW];
        load_row(a[0], at_k + i * (GROUP / 2)), load_row(a[1], at_k + 4 * D + i * (GROUP / 2));
#pragma unroll
        for (int e = 0; e < 4; e++) x[i][e] = origin[i][e];
#pragma unroll
        for (int w = 0; w < KW; w++) {
#pragma unroll
          for (int n = 0; n < 4; n += 2)
            product_warp<Fp16>(x[i], {code.at(a[0][w], n), code.at(a[1][w], n), code.at(a[0][w], n + 1), code.at(a[1][w], n + 1)},
                               b[i][w][n], b[i][w][n + 1]);
        }
      }
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int n = 2 * half + r, token = own + 8 * n;
        const Steps<GROUPS> steps(steps_at + token * (GROUPS * 2), Shape::STEPS);
        seen[n] = open[n] != 0 && step * TOKENS + token <= position;
#pragma unroll
        for (int h = 0; h < 2; h++) {
          float y = 0.f;
#pragma unroll
          for (int i = 0; i < GROUPS; i++) y = fmaf(steps.scale(i), x[i][2 * r + h], fmaf(steps.low(i), sums[i][h], y));
          s[n][h] = seen[n] ? y : minus_infinity();
        }
      }
    }
    load_mask(step - stride);
    float scale[4][GROUPS], middle[4][GROUPS], largest[2];
    u32 most[GROUPS] = {};
    bool moved = false;
#pragma unroll
    for (int n = 0; n < 4; n++) {
      const Steps<GROUPS> steps(steps_at + 2 * Shape::STEPS + (own + 8 * n) * (GROUPS * 2), Shape::STEPS);
#pragma unroll
      for (int i = 0; i < GROUPS; i++) {
        scale[n][i] = seen[n] ? steps.scale(i) : 0.f;  // what is hidden may be NaN
        middle[n][i] = seen[n] ? fmaf(8.f, steps.scale(i), steps.low(i)) : 0.f;
        most[i] = max(most[i], __float_as_uint(scale[n][i]));
      }
    }
#pragma unroll
    for (int i = 0; i < GROUPS; i++) moved |= (int)(most[i] >> 23) > unit[i];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      largest[h] = fmaxf(fmaxf(s[0][h], s[1][h]), fmaxf(s[2][h], s[3][h])) * factor[h];
      moved |= largest[h] > top[h] + LAZY;
    }
    if (__any_sync(0xFFFFFFFFu, moved)) {
      float shrink[2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2)
          largest[h] = fmaxf(largest[h], __shfl_xor_sync(0xFFFFFFFFu, largest[h], lanes));
        largest[h] = fmaxf(largest[h], top[h]);
        shrink[h] = weight_of(top[h], largest[h]);
        top[h] = largest[h], point[h] = top[h] == minus_infinity() ? 0.f : top[h];
        total[h] *= shrink[h];
      }
#pragma unroll
      for (int i = 0; i < GROUPS; i++) {
        const int now = max(unit[i], field_of(__uint_as_float(largest_of_warp(most[i]))));
        const float down = __uint_as_float((u32)max(127 + unit[i] - now, 0) << 23);
        unit[i] = now;
        beside[i][0] *= shrink[0], beside[i][1] *= shrink[1];
#pragma unroll
        for (int m = 0; m < 4 * VW; m++) {
#pragma unroll
          for (int e = 0; e < 4; e++) o[i * 4 * VW + m][e] *= shrink[e % 2] * down;
        }
      }
    }
    float weight[4][2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int n = 0; n < 4; n++) {
        weight[n][h] = exp2_fast(fmaf(s[n][h], factor[h], -point[h]));
        total[h] += weight[n][h];
#pragma unroll
        for (int i = 0; i < GROUPS; i++) beside[i][h] = fmaf(weight[n][h], middle[n][i], beside[i][h]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32 at_v = tile + Shape::CODES + (half * 16 + other) * (D / 2) + g * (GROUP / 16);
#pragma unroll
      for (int i = 0; i < GROUPS; i++) {
        u32 p[2], a[4][VW];  // weights times scales, turned; tokens 2 q, the next, and those 8 further on
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const int n = 2 * half + r;
          const float up = scale[n][i] * up_from(unit[i]);
          p[r] = matrix_turned(Fp16::pack(weight[n][0] * up, weight[n][1] * up));
        }
#pragma unroll
        for (int r = 0; r < 4; r++) load_row(a[r], at_v + (r % 2 * 2 + r / 2 * 8) * (D / 2) + i * (GROUP / 2));
#pragma unroll
        for (int m = 0; m < VW * 2; m++) {  // of a word's columns the first four, the last four: two a product
          const u32 halves = m % 2 ? 0x7632 : 0x5410;
          const u32 near = __byte_perm(a[0][m / 2], a[1][m / 2], halves), far = __byte_perm(a[2][m / 2], a[3][m / 2], halves);
#pragma unroll
          for (int n = 0; n < 4; n += 2)
            product_warp<Fp16>(o[(i * VW * 2 + m) * 2 + n / 2], {code.centred(near, n), code.centred(near, n + 1),
                               code.centred(far, n), code.centred(far, n + 1)}, p[0], p[1]);
        }
      }
    }
    fence_async();
    warp_sync();
    if (step >= STAGES * stride) start(step - STAGES * stride, at.stage, TOKENS);
    at.next();
  }
  const int active = with_steps(steps, rank, split, WARPS);
  if ((int)warp < active) {  // those that had no step leave nothing
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int head = 2 * q + h;
      float sum = total[h];
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) {
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lanes);
#pragma unroll
        for (int i = 0; i < GROUPS; i++) beside[i][h] += __shfl_xor_sync(0xFFFFFFFFu, beside[i][h], lanes);
      }
      if (head >= SHARE) continue;
      const u32 to = base + ((warp * SHARE + head) * Shape::PITCH + g * (GROUP / 8)) * 4;
#pragma unroll
      for (int m = 0; m < D / 16; m += 2) {  // four columns
        const int i = m / (4 * VW), column = i * GROUP + m % (4 * VW) * 2;
        const float back = back_to(unit[i]), y = beside[i][h];
        store_shared4(to + column * 4, fmaf(o[m][h], back, y), fmaf(o[m][2 + h], back, y), fmaf(o[m + 1][h], back, y),
                      fmaf(o[m + 1][2 + h], back, y));
      }
      if (g == 0) {
        const u32 stats = base + Shape::STATS + (warp * SHARE + head) * 8;
        store_shared(stats, top[h]), store_shared(stats + 4, sum);
      }
    }
  }
  unsigned short* const out = args.out + ((i64)batch * args.heads + group * SHARE) * D;
  if (others == 0) {
    if (active > 0) add_warps<D, SHARE, WARPS, 1, T>(base, 0, active, full, out);
  } else if (active > 0) {
    block_sync();
    add_block<D, SHARE, WARPS>(base, active, [&](int at, int, int, float2 y, float highest, float sum) {
      float* const to = parts + at / (D / 2) * ROW;
      ((float2*)to)[at % (D / 2)] = {no_zero(y.x), no_zero(y.y)};
      if (full) sum = __uint_as_float(0x7FC00000u);
      if (at % (D / 2) == 0) ((float2*)to)[D / 2] = {no_zero(highest), no_zero(sum)};
    });
    static_assert(WARPS * 32 * 24 <= WARPS * STAGES * Shape::TILE, "all tiles have been read: add_parts takes their place");
    if (block_any(adds)) add_parts<D, SHARE, WARPS * 32, T>(all_parts, others + 1, out, base + Shape::RING);
  }
  // Every block has read the count: the last to say so sets it.
  if (counting && arrivals >> 32 == gridDim.x * gridDim.y - 1) *args.count = counted + 1ull;
}

}  // namespace quantrot
