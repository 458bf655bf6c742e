// FP8 attention of one query a sequence for sm_90a, in one launch: bound by the reading of K and V.
//
// The tiles of 128 tokens of a key head are dealt out to the TEAMS warpgroups of several blocks. A team has a ring of its
// own, STAGES tiles that the copy engine fills. Products are transposed, tokens by query heads and values by
// probabilities: K and V are the rows of a warpgroup's product, and the few query heads of a key head its columns. A thread
// (warp w of the team, g = lane / 4, q = lane % 4) has the scores of tokens 64 a + 16 w + 8 h + g, heads 2 q and the next.
//
// Teams leave their sums in global memory; the last block of a head to do so adds them up, always in the same order. What
// a team reads first it has asked L2 for while the kernel before it ended.

namespace quantrot {

struct DecodeArgs {
  const unsigned char *q, *q_scale, *k_scale, *v_scale;
  const int* lengths;         // [batch], or null
  const unsigned char* mask;  // [batch, keys], where there is one: 0 where a token is not seen
  unsigned short* out;        // [batch, heads, D]
  float *parts, *stats;       // [batch * groups, teams, SHARE, D] and [.., 2]: the largest score, the sum
  int counter;                // the first of [batch * groups] counters
  i64 q_batch, q_head;        // bytes
  i64 qs_batch, qs_head, ks_batch, ks_head, vs_batch, vs_head, mask_batch;
  int k_batch, k_head, v_batch, v_head;  // rows
  int heads, groups, keys;
  float scale;  // of the scores, times log2(e)
};

// Shared memory: the teams' rings, [TEAMS][STAGES] of K and V; their probabilities; queries; a byte a token, [TEAMS][STAGES]
// of k's scales, v's and the mask; numbers that a team's warps exchange; barriers; what threads add up, six numbers each
// (not in the rings' place: a team has not waited for the other's copies itself).
template <int D, int SHARE, int TEAMS, int STAGES>
struct DecodeShape {
  static constexpr int KEYS = 128, TILE = KEYS * D, TILES = (SHARE + 7) / 8, HEADS = 8 * TILES;
  static constexpr int P_AT = TEAMS * STAGES * 2 * TILE, Q_AT = P_AT + TEAMS * HEADS * KEYS;
  static constexpr int SCALES = Q_AT + HEADS * D, MET = SCALES + TEAMS * STAGES * 3 * KEYS;
  static constexpr int BARRIERS = MET + TEAMS * 4 * HEADS * 4, SUMS = BARRIERS + TEAMS * STAGES * 8;
};

#ifndef QUANTROT_EMULATED
// A multiple of 16 bytes from a multiple of 16, by one lane of a whole warp, as tensor_load.
__device__ __forceinline__ void line_load(u32 to, const void* from, u32 bytes, u32 bar) {
  asm volatile(QR_ONE_LANE
               "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n}" ::"r"(to),
               "l"(from), "r"(bytes), "r"(bar)
               : "memory");
}

__device__ __forceinline__ void store_byte(u32 address, u32 a) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(a) : "memory");
}
#endif

// Operands with rows of D bytes.
template <int D>
__device__ __forceinline__ u64 operand_of(u32 address, int k) {
  return D == 128 ? operand(address, k) : operand_short(address, k);
}
template <int D>
__device__ __forceinline__ u32 place_of(u32 row, u32 column) {
  return D == 128 ? swizzled(row, column) : swizzled64(row, column);
}

// 2^(byte - unit) for byte <= unit. Below 2^-31 a probability's code is zero whatever it is.
__device__ __forceinline__ float down_to(int byte, int unit) {
  return __uint_as_float((u32)(max(byte - unit, -32) + 127) << 23);
}

// What a part whose largest score is `top` counts.
__device__ __forceinline__ float weight_of(float top, float highest) {
  return exp2_fast(top - (highest == minus_infinity() ? 0.f : highest));
}

// y / sum, zeros where nothing was seen.
template <class Out>
__device__ __forceinline__ void write_quad(unsigned short* out, const float (&y)[4], float sum) {
  const float inverse = sum == 0.f ? 0.f : 1.f / sum;
  *(u64*)out = Out::pack(y[0] * inverse, y[1] * inverse) | (u64)Out::pack(y[2] * inverse, y[3] * inverse) << 32;
}

// The sums that `count` teams have left of a head's queries, added up by the whole block: threads take turns over the teams
// of four columns of a query.
template <int D, int SHARE, int THREADS, class Out>
__device__ __forceinline__ void add_parts(const float* parts, const float* stats, int count, unsigned short* out, u32 base) {
  constexpr int QUADS = SHARE * D / 4, TURNS = THREADS / QUADS > 1 ? THREADS / QUADS : 1, BATCH = 8;
  const u32 turn = threadIdx.x / QUADS;
#pragma unroll 1
  for (int at = threadIdx.x % QUADS; at < QUADS && turn < TURNS; at += THREADS) {
    const int head = at * 4 / D;
    float highest = minus_infinity(), sum = 0.f, y[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
    for (int first = turn; first < count; first += TURNS * BATCH) {
      float4 x[BATCH];
      float2 stat[BATCH];
      float high = highest;
#pragma unroll
      for (int n = 0; n < BATCH; n++) {
        const int i = min(first + n * TURNS, count - 1) * SHARE;
        x[n] = fresh4(parts + (i64)i * D + at * 4), stat[n] = fresh2(stats + (i + head) * 2);
        if (first + n * TURNS >= count) stat[n] = {minus_infinity(), 0.f};
      }
#pragma unroll
      for (int n = 0; n < BATCH; n++) high = fmaxf(high, stat[n].x);
      const float shrink = weight_of(highest, high);
      highest = high, sum *= shrink;
#pragma unroll
      for (int e = 0; e < 4; e++) y[e] *= shrink;
#pragma unroll
      for (int n = 0; n < BATCH; n++) {
        const float weight = weight_of(stat[n].x, highest);
        sum = fmaf(stat[n].y, weight, sum);
        y[0] = fmaf(x[n].x, weight, y[0]), y[1] = fmaf(x[n].y, weight, y[1]);
        y[2] = fmaf(x[n].z, weight, y[2]), y[3] = fmaf(x[n].w, weight, y[3]);
      }
    }
    if constexpr (TURNS > 1) {
      const u32 to = base + threadIdx.x * 24;
      store_shared(to, highest), store_shared(to + 4, sum);
#pragma unroll
      for (int e = 0; e < 4; e++) store_shared(to + 8 + 4 * e, y[e]);
    } else {
      write_quad<Out>(out + at * 4, y, sum);
    }
  }
  if constexpr (TURNS > 1) {
    block_sync();
    if (threadIdx.x >= QUADS) return;
    float highest = minus_infinity(), sum = 0.f, y[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int n = 0; n < TURNS; n++) highest = fmaxf(highest, load_shared(base + (n * QUADS + threadIdx.x) * 24));
#pragma unroll
    for (int n = 0; n < TURNS; n++) {
      const u32 from = base + (n * QUADS + threadIdx.x) * 24;
      const float weight = weight_of(load_shared(from), highest);
      sum = fmaf(load_shared(from + 4), weight, sum);
#pragma unroll
      for (int e = 0; e < 4; e++) y[e] = fmaf(load_shared(from + 8 + 4 * e), weight, y[e]);
    }
    write_quad<Out>(out + threadIdx.x * 4, y, sum);
  }
}

template <int D, int SHARE, int TEAMS, int STAGES, bool MASK, int WARM, class Out>
__device__ __forceinline__ void decode(const TensorMap* k, const TensorMap* v, const DecodeArgs& args) {
  using Shape = DecodeShape<D, SHARE, TEAMS, STAGES>;
  constexpr int KEYS = Shape::KEYS, TILE = Shape::TILE, TILES = Shape::TILES;
  constexpr int THREADS = 128 * TEAMS, UNITS = D / 16;
  const u32 lane = lane_number(), g = lane / 4, q = lane % 4, warp = warp_number(), team = warp / 4, w = warp % 4;
  const u32 base = shared_memory();
  const int batch = blockIdx.y / args.groups, group = blockIdx.y % args.groups;
  const int teams = gridDim.x * TEAMS, part = team * gridDim.x + blockIdx.x;
  const int k_row = batch * args.k_batch + group * args.k_head, v_row = batch * args.v_batch + group * args.v_head;
  const u32 ring = base + team * STAGES * 2 * TILE, scales = base + Shape::SCALES + team * STAGES * 3 * KEYS;
  const u32 full = base + Shape::BARRIERS + team * STAGES * 8;
  // The length may still be the one before: it is read again. No more than that is asked for of a cache with room.
  auto length = [&] { return args.lengths ? min(load_fresh(args.lengths + batch), args.keys) : args.keys; };
  const int likely = length();
  if (w == 0) {
#pragma unroll 1
    for (int tile = part, n = 0; n < WARM && tile * KEYS < likely; n++, tile += teams)
      tensor_warm(k, 0, k_row + tile * KEYS), tensor_warm(v, tile * KEYS, v_row);
  }
  if (threadIdx.x == 0) {
    tensor_prefetch(k), tensor_prefetch(v);
    for (int i = 0; i < TEAMS * STAGES; i++) barrier_init(base + Shape::BARRIERS + i * 8, 1);
    barrier_init_done();
  }
  block_sync();
  grid_wait();
  const int used = length(), tiles = (used + KEYS - 1) / KEYS, count = max((tiles - part + teams - 1) / teams, 0);
  const int blocks = min(max(tiles, 1), (int)gridDim.x);  // that have a tile, or write zeros
  if ((int)blockIdx.x >= blocks) return;
  const u64 policy = cache_policy<FIRST>();  // or it drives out of L2 what the next kernel has asked for
  auto load = [&](int i) {  // this team's i-th tile, or nothing
    if (i >= count) return;
    const int start = (part + i * teams) * KEYS, slot = i % STAGES, bytes = min((args.keys - start + 15) / 16 * 16, KEYS);
    const u32 bar = full + slot * 8, to = ring + slot * 2 * TILE, line = scales + slot * 3 * KEYS;
    barrier_expect(bar, 2 * TILE + (MASK ? 3 : 2) * bytes);
    tensor_load(to, k, 0, k_row + start, bar, policy);
    line_load(line, args.k_scale + batch * args.ks_batch + group * args.ks_head + start, bytes, bar);
    tensor_load(to + TILE, v, start, v_row, bar, policy);
    line_load(line + KEYS, args.v_scale + batch * args.vs_batch + group * args.vs_head + start, bytes, bar);
    if (MASK) line_load(line + 2 * KEYS, args.mask + batch * args.mask_batch + start, bytes, bar);
  };
  if (w == 0) {
#pragma unroll 1
    for (int i = 0; i < STAGES; i++) load(i);
  }
  for (u32 at = threadIdx.x; at < Shape::HEADS * UNITS; at += THREADS) {
    const u32 row = at / UNITS, to = base + Shape::Q_AT + place_of<D>(row, at % UNITS * 16);
    Quad x = {{0, 0, 0, 0}};
    if (row < SHARE)
      x = *(const Quad*)(args.q + batch * args.q_batch + (group * SHARE + row) * args.q_head + at % UNITS * 16);
    store_shared2(to, x.w[0], x.w[1]), store_shared2(to + 8, x.w[2], x.w[3]);
  }
  float rows[TILES][2], top[TILES][2], total[TILES][2], acc[D / 64][4 * TILES];
  int unit = 0;
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int head = 8 * t + 2 * q + e;
      rows[t][e] = 1.f, top[t][e] = minus_infinity(), total[t][e] = 0.f;
      if (head < SHARE)
        rows[t][e] = args.scale * power_of(args.q_scale[batch * args.qs_batch + (group * SHARE + head) * args.qs_head]);
    }
  }
#pragma unroll
  for (int m = 0; m < D / 64; m++) {
#pragma unroll
    for (int i = 0; i < 4 * TILES; i++) acc[m][i] = 0.f;
  }
  fence_async();
  block_sync();
  const u32 met = base + Shape::MET + team * 4 * Shape::HEADS * 4, p_at = base + Shape::P_AT + team * Shape::HEADS * KEYS;
  float x[2][4 * TILES], up[4], down[4], step;
  bool seen[4];
  Ring<STAGES> at;
  auto scores = [&] {
    barrier_wait(full + at.stage * 8, at.parity);
    product_fence();
#pragma unroll
    for (int a = 0; a < 2; a++) {
#pragma unroll
      for (int n = 0; n < D / 32; n++)
        product(x[a], operand_of<D>(ring + at.stage * 2 * TILE + a * 64 * D, n), operand_of<D>(base + Shape::Q_AT, n), n > 0);
    }
    product_commit();
  };
  // The scales of the team's i-th tile, while the tensor cores work.
  auto weigh = [&](int i) {
    const u32 bytes = scales + at.stage * 3 * KEYS;
    const int left = used - (part + i * teams) * KEYS;  // tokens from here on
    u32 word = load_shared1(bytes + KEYS + lane * 4);  // a lane's share of the tile's tokens
    word = ((word & 0x7F7F7F7F) + 0x01010101) ^ (word & 0x80808080);  // each byte one more, and 0 for no number
    const int inside = left - 4 * (int)lane;
    if (inside < 4) word &= inside > 0 ? (1u << 8 * inside) - 1 : 0;
    const u32 most = max(max(word & 255, word >> 8 & 255), max(word >> 16 & 255, word >> 24));
    const int before = unit;
    unit = max(unit, (int)largest_of_warp(most) - 1);
    step = down_to(before, unit);
#pragma unroll
    for (int n = 0; n < 4; n++) {  // the tokens whose scores it will have
      const u32 token = n / 2 * 64 + 16 * w + n % 2 * 8 + g, four = bytes + token / 4 * 4, shift = token % 4 * 8;
      const int byte = load_shared1(four + KEYS) >> shift & 255;
      seen[n] = (int)token < left && (!MASK || (load_shared1(four + 2 * KEYS) >> shift & 255));
      up[n] = power_of(load_shared1(four) >> shift & 255);
      down[n] = byte == 255 ? power_of(255) : down_to(byte, unit);
    }
  };
  if (count > 0) {
    scores();
    weigh(0);
    product_wait<0>();
    product_done(x[0]), product_done(x[1]);
  }
#pragma unroll 1
  for (int i = 0; i < count; i++) {
    float largest[TILES][2];
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        largest[t][e] = minus_infinity();
#pragma unroll
        for (int n = 0; n < 4; n++) {
          float& s = x[n / 2][4 * t + n % 2 * 2 + e];
          s = seen[n] ? s * (rows[t][e] * up[n]) : minus_infinity();
          largest[t][e] = fmaxf(largest[t][e], s);
        }
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2)
          largest[t][e] = fmaxf(largest[t][e], __shfl_xor_sync(0xFFFFFFFFu, largest[t][e], lanes));
      }
      if (g == 0)
        store_shared2(met + (w * Shape::HEADS + 8 * t + 2 * q) * 4, __float_as_uint(largest[t][0]),
                      __float_as_uint(largest[t][1]));
    }
    named_sync(1 + team, 128);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const float2 two = load_shared2(met + (n * Shape::HEADS + 8 * t + 2 * q) * 4);
        largest[t][0] = fmaxf(largest[t][0], two.x), largest[t][1] = fmaxf(largest[t][1], two.y);
      }
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float now = fmaxf(top[t][e], ceilf(largest[t][e])), point = now == minus_infinity() ? 0.f : now;
        const float shrink = exp2_fast(top[t][e] - point);
        top[t][e] = now;
        float z[4], sum = 0.f;
#pragma unroll
        for (int n = 0; n < 4; n++) {
          const float power = exp2_fast(x[n / 2][4 * t + n % 2 * 2 + e] - (point - (float)P_BITS));
          sum += power;
          z[n] = seen[n] ? power * down[n] : 0.f;  // a scale that is NaN stays out of what is not seen
        }
        total[t][e] = fmaf(total[t][e], shrink, sum);
#pragma unroll
        for (int m = 0; m < D / 64; m++) {
#pragma unroll
          for (int h = 0; h < 2; h++) acc[m][4 * t + 2 * h + e] *= shrink * step;
        }
        const u32 codes = to_e4m3(z[0], z[1], z[2], z[3]);
#pragma unroll
        for (int n = 0; n < 4; n++)
          store_byte(p_at + swizzled(8 * t + 2 * q + e, n / 2 * 64 + 16 * w + n % 2 * 8 + g), codes >> 8 * n);
      }
    }
    fence_async();
    named_sync(1 + team, 128);
    product_fence();
#pragma unroll
    for (int m = 0; m < D / 64; m++) {
#pragma unroll
      for (int n = 0; n < KEYS / 32; n++)
        product(acc[m], operand(ring + at.stage * 2 * TILE + TILE + m * 64 * KEYS, n), operand(p_at, n), true);
    }
    product_commit();
    if (w == 0 && i > 0) load(i - 1 + STAGES);  // no warp is at the tile before
    at.next();
    if (i + 1 < count) {
      scores();
      weigh(i + 1);
    }
    product_wait<0>();
#pragma unroll
    for (int m = 0; m < D / 64; m++) product_done(acc[m]);
    product_done(x[0]), product_done(x[1]);
  }
  // The team's sums.
  const i64 all = (i64)blockIdx.y * teams;
  const float by = power_of(unit);
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2)
        total[t][e] += __shfl_xor_sync(0xFFFFFFFFu, total[t][e], lanes);
      const int head = 8 * t + 2 * q + e;
      if (g == 0) store_shared(met + (w * Shape::HEADS + head) * 4, total[t][e]);
      if (head >= SHARE || count == 0) continue;
      float* to = args.parts + ((all + part) * SHARE + head) * D + 16 * w + g;
#pragma unroll
      for (int m = 0; m < D / 64; m++) to[64 * m] = acc[m][4 * t + e] * by, to[64 * m + 8] = acc[m][4 * t + 2 + e] * by;
    }
  }
  named_sync(1 + team, 128);
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int head = 8 * t + 2 * q + e;
      if (head >= SHARE || count == 0 || w + g > 0) continue;
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < 4; n++) sum += load_shared(met + (n * Shape::HEADS + head) * 4);
      float* to = args.stats + ((all + part) * SHARE + head) * 2;
      to[0] = top[t][e], to[1] = sum;
    }
  }
  block_sync();
  const u32 last = blocks - 1;
  if (last > 0 && !block_any(threadIdx.x == 0 && count_in_turn(counters + args.counter + blockIdx.y, last) == last)) return;
  const i64 first = (i64)blockIdx.y * teams * SHARE;
  add_parts<D, SHARE, THREADS, Out>(args.parts + first * D, args.stats + first * 2, min(tiles, teams),
                                    args.out + ((i64)batch * args.heads + group * SHARE) * D, base + Shape::SUMS);
}

}  // namespace quantrot
