// FP8 attention of one query a sequence for sm_90a, in one launch: bound by the reading of K and V.
//
// The tiles of 16 KB of K and of V (128 tokens at head_dim 128, 256 at 64) of a key head are dealt out to several blocks, each
// of one warpgroup that multiplies, a warp that fills its ring of STAGES tiles by the copy engine, and one that arranges
// the end. Products are transposed, tokens by query heads and values by probabilities: K and V are the rows of a warpgroup's
// product, and the few query heads of a key head its columns. The copy engine reads rows of 128 bytes, of K FOLD tokens each:
// two at head_dim 64, of which a product takes the left halves of the rows or the right ones. A thread (warp w, g = lane / 4,
// q = lane % 4) has the scores of tokens FOLD (64 a + 16 w + 8 h + g) and the next FOLD - 1, heads 2 q and the next.
//
// Blocks' sums meet as gather.cuh has it.

namespace quantrot {

struct DecodeArgs {
  const unsigned char *q, *q_scale, *k_scale, *v_scale;
  const int* lengths;         // [batch], or null
  const unsigned char* mask;  // [batch, keys], where there is one: 0 where a token is not seen
  unsigned short* out;        // [batch, heads, D]
  float* parts;               // [batch * groups, blocks, SHARE, D + 4]: sums, the largest score, the probabilities' sum, two more
  int counter;                // the first of [batch * groups] counters
  i64 q_batch, q_head;        // bytes
  i64 qs_batch, qs_head, ks_batch, ks_head, vs_batch, vs_head, mask_batch;
  int k_batch, k_head, v_batch, v_head;  // rows, of K those of 128 bytes
  int heads, groups, keys;
  float scale;  // of the scores, times log2(e)
};

// The next kernel may start when so many tiles are left: a tile takes 1 us where all read, a start 3. (A chain of this kernel
// itself is as fast with 1 or 99: see plan_for.)
constexpr int EARLY = 3;

// Shared memory: the ring, [STAGES] of K and V; probabilities, in pieces of 128 tokens; queries; a byte a token, [STAGES] of
// k's scales, v's and the mask; numbers that warps exchange; barriers: K's tile and the bytes have come, V's has, [STAGES], and
// K's has been read, and V's before it, [STAGES]; what threads add up, six numbers each.
template <int D, int SHARE, int STAGES>
struct DecodeShape {
  static constexpr int KEYS = 16384 / D, TILE = KEYS * D, FOLD = 128 / D, TILES = (SHARE + 7) / 8, HEADS = 8 * TILES;
  static constexpr int P_AT = STAGES * 2 * TILE, Q_AT = P_AT + HEADS * KEYS;
  static constexpr int SCALES = Q_AT + HEADS * D, MET = SCALES + STAGES * 3 * KEYS;
  static constexpr int BARRIERS = MET + 4 * HEADS * 4, SUMS = BARRIERS + 3 * STAGES * 8;
};

#ifndef QUANTROT_EMULATED
__device__ __forceinline__ void store_byte(u32 address, u32 a) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(a) : "memory");
}
#endif

// Queries: operands with rows of D bytes.
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

template <int D, int SHARE, int STAGES, bool MASK, class Out>
__device__ __forceinline__ void decode(const TensorMap* k, const TensorMap* v, const DecodeArgs& args) {
  using Shape = DecodeShape<D, SHARE, STAGES>;
  constexpr int KEYS = Shape::KEYS, TILE = Shape::TILE, BOX = D * 128, ROWS = KEYS / 32, TILES = Shape::TILES;
  constexpr int UNITS = D / 16, ROW = D + 4, FOLD = Shape::FOLD;
  const u32 lane = lane_number(), g = lane / 4, q = lane % 4, w = warp_number();
  const u32 base = shared_memory();
  const int batch = blockIdx.y / args.groups, group = blockIdx.y % args.groups;
  const int parts = gridDim.x, part = blockIdx.x;
  const int k_row = batch * args.k_batch + group * args.k_head, v_row = batch * args.v_batch + group * args.v_head;
  const u32 p_at = base + Shape::P_AT, scales = base + Shape::SCALES, met = base + Shape::MET;
  const u32 full = base + Shape::BARRIERS, freed = full + STAGES * 16;
  // The length may still be the one before: it is read again. No more than that is asked for of a cache with room.
  auto length = [&] { return args.lengths ? min(load_fresh(args.lengths + batch), args.keys) : args.keys; };
  const int likely = length();
  if (w == 4) {
#pragma unroll
    for (int n = 0; n < FOLD; n++) {
      const int at = part * KEYS + n * 128;
      if (n == 0 && at < likely) tensor_warm(k, 0, k_row + at / FOLD);
      if (at < likely) tensor_warm(v, at, v_row);
    }
    if (lane == 0) {
      tensor_prefetch(k), tensor_prefetch(v);
      for (int i = 0; i < 2 * STAGES; i++) barrier_init(full + i * 8, 1);
      for (int i = 0; i < STAGES; i++) barrier_init(freed + i * 8, 4);
      barrier_init_done();
    }
  }
  block_sync();
  int used = likely;
  grid_wait_only();
  if (args.lengths) used = length();
  // The block's tiles start at tokens first, first + stride, ... below `used`. (Counted, by a division, and with all that
  // the first loads need behind the wait: 0.1 to 0.25 us more, of 3 to 7.)
  const int first = part * KEYS, stride = parts * KEYS;
  if (part > 0 && first >= used) return;
  const int blocks = min((used + KEYS - 1) / KEYS, parts);  // that have a tile
  float* const mine = args.parts + ((i64)blockIdx.y * parts + part) * SHARE * ROW;
  const u32 others = max(blocks, 1) - 1;
  if (w == 4) {
    const u64 policy = cache_policy<FIRST>();  // or it drives out of L2 what the next kernel has asked for
    const unsigned char* const k_line = args.k_scale + batch * args.ks_batch + group * args.ks_head;
    const unsigned char* const v_line = args.v_scale + batch * args.vs_batch + group * args.vs_head;
    auto load_k = [&](int slot, int start) {  // a tile of K and the bytes a token
      const u32 to = base + slot * 2 * TILE, bar = full + slot * 16, line = scales + slot * 3 * KEYS;
      const int bytes = min((args.keys - start + 15) / 16 * 16, KEYS);
      barrier_expect(bar, TILE + (MASK ? 3 : 2) * bytes);
      tensor_load(to, k, 0, k_row + start / FOLD, bar, policy);
      line_load(line, k_line + start, bytes, bar);
      line_load(line + KEYS, v_line + start, bytes, bar);
      if (MASK) line_load(line + 2 * KEYS, args.mask + batch * args.mask_batch + start, bytes, bar);
    };
    auto load_v = [&](int slot, int start) {
      const u32 to = base + slot * 2 * TILE + TILE, bar = full + slot * 16 + 8;
      barrier_expect(bar, TILE);
#pragma unroll
      for (int n = 0; n < FOLD; n++) tensor_load(to + n * BOX, v, start + n * 128, v_row, bar, policy);
    };
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
      if (first + i * stride < used) load_k(i, first + i * stride), load_v(i, first + i * stride);
    }
    Ring<STAGES> at;
    int before = 0;
#pragma unroll 1
    for (int start = first; start < used; start += stride) {
      if (start + EARLY * stride >= used) launch_dependents();
      barrier_wait(freed + at.stage * 8, at.parity);
      const int next = start + STAGES * stride;
      if (next < used) load_k(at.stage, next);
      if (start > first && next - stride < used) load_v(before, next - stride);
      before = at.stage;
      at.next();
    }
    block_any(false);
    return;
  }
  if (w == 5) {
    bool last = others == 0;
    if (others > 0) {
      for (int i = lane; i < SHARE * ROW / 4; i += 32) ((float4*)mine)[i] = {0.f, 0.f, 0.f, 0.f};
      named_arrive(2, 160);  // the block's sums come after
      warp_sync();
      last = lane == 0 && count_in_turn(counters + args.counter + blockIdx.y, others) == others;
    }
    block_any(last);
    return;
  }
  for (u32 at = threadIdx.x; at < Shape::HEADS * UNITS; at += 128) {
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
  named_sync(1, 128);
  float x[KEYS / 64][4 * TILES], up[ROWS], down[ROWS], step;
  bool seen[ROWS];
  Ring<STAGES> at;
  auto scores = [&] {
    barrier_wait(full + at.stage * 16, at.parity);
    product_fence();
#pragma unroll
    for (int a = 0; a < KEYS / 64; a++) {
#pragma unroll
      for (int n = 0; n < D / 32; n++)
        product(x[a], operand(base + at.stage * 2 * TILE + a / FOLD * 8192, a % FOLD * 2 + n),
                operand_of<D>(base + Shape::Q_AT, n), n > 0);
    }
    product_commit();
  };
  auto scored = [&] {
#pragma unroll
    for (int a = 0; a < KEYS / 64; a++) product_done(x[a]);
  };
  // The scales of a tile with `left` tokens from there on, while the tensor cores work.
  auto weigh = [&](int left) {
    const u32 bytes = scales + at.stage * 3 * KEYS;
    u32 most = 0;
#pragma unroll
    for (int at = 4 * lane; at < KEYS; at += 128) {  // a lane's share of the tile's tokens
      u32 word = load_shared1(bytes + KEYS + at);
      word = ((word & 0x7F7F7F7F) + 0x01010101) ^ (word & 0x80808080);  // each byte one more, and 0 for no number
      const int inside = left - at;
      if (inside < 4) word &= inside > 0 ? (1u << 8 * inside) - 1 : 0;
      most = max(most, max(max(word & 255, word >> 8 & 255), max(word >> 16 & 255, word >> 24)));
    }
    const int before = unit;
    unit = max(unit, (int)largest_of_warp(most) - 1);
    step = down_to(before, unit);
#pragma unroll
    for (int n = 0; n < ROWS; n++) {  // the tokens whose scores it will have
      const u32 token = FOLD * (n / 2 / FOLD * 64 + 16 * w + n % 2 * 8 + g) + n / 2 % FOLD;
      const u32 four = bytes + token / 4 * 4, shift = token % 4 * 8;
      const int byte = load_shared1(four + KEYS) >> shift & 255;
      seen[n] = (int)token < left && (!MASK || (load_shared1(four + 2 * KEYS) >> shift & 255));
      up[n] = power_of(load_shared1(four) >> shift & 255);
      down[n] = byte == 255 ? power_of(255) : down_to(byte, unit);
    }
  };
  if (first < used) {
    scores();
    weigh(used - first);
    product_wait<0>();
    scored();
  }
#pragma unroll 1
  for (int start = first; start < used; start += stride) {
    warp_sync();
    if (lane == 0) barrier_arrive(freed + at.stage * 8);  // K's tile, and V's before it
    float largest[TILES][2];
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        largest[t][e] = minus_infinity();
#pragma unroll
        for (int n = 0; n < ROWS; n++) {
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
    named_sync(1, 128);
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
        float z[ROWS], sum = 0.f;
#pragma unroll
        for (int n = 0; n < ROWS; n++) z[n] = exp2_fast(x[n / 2][4 * t + n % 2 * 2 + e] - (point - (float)P_BITS));
#pragma unroll
        for (int n = 0; n < ROWS; n += 4) sum += sum_of_codes(to_e4m3(z[n], z[n + 1], z[n + 2], z[n + 3]));
#pragma unroll
        for (int n = 0; n < ROWS; n++) z[n] = seen[n] ? z[n] * down[n] : 0.f;  // a NaN scale stays out of what is not seen
        total[t][e] = fmaf(total[t][e], shrink, sum);
#pragma unroll
        for (int m = 0; m < D / 64; m++) {
#pragma unroll
          for (int h = 0; h < 2; h++) acc[m][4 * t + 2 * h + e] *= shrink * step;
        }
#pragma unroll
        for (int n = 0; n < ROWS; n += 4) {  // 128 tokens
          const u32 codes = to_e4m3(z[n], z[n + 2], z[n + 1], z[n + 3]);
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const u32 row = 8 * t + 2 * q + e, column = FOLD * (16 * w + 8 * i + g), to = p_at + n * Shape::HEADS * 32;
            if (FOLD == 2) {
              store_two_bytes(to + swizzled(row, column), codes >> 16 * i);
            } else {
              store_byte(to + swizzled(row, column), codes >> 16 * i);
              store_byte(to + swizzled(row, column + 64), codes >> 16 * i + 8);
            }
          }
        }
      }
    }
    fence_async();
    named_sync(1, 128);
    barrier_wait(full + at.stage * 16 + 8, at.parity);
    product_fence();
#pragma unroll
    for (int m = 0; m < D / 64; m++) {
#pragma unroll
      for (int n = 0; n < KEYS / 32; n++)
        product(acc[m], operand(base + at.stage * 2 * TILE + TILE + n / 4 * BOX + m * 8192, n % 4),
                operand(p_at + n / 4 * Shape::HEADS * 128, n % 4), true);
    }
    product_commit();
    at.next();
    if (start + stride < used) {
      scores();
      weigh(used - start - stride);
    }
    product_wait<0>();
#pragma unroll
    for (int m = 0; m < D / 64; m++) product_done(acc[m]);
    scored();
  }
  // The block's sums.
  if (others > 0) named_sync(2, 160);
  const float by = power_of(unit);
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int head = 8 * t + 2 * q + e;
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2)
        total[t][e] += __shfl_xor_sync(0xFFFFFFFFu, total[t][e], lanes);
      if (g == 0) store_shared(met + (w * Shape::HEADS + head) * 4, total[t][e]);
      if (head >= SHARE || first >= used) continue;
      float* to = mine + head * ROW + 16 * w + g;
#pragma unroll
      for (int m = 0; m < D / 64; m++)
        to[64 * m] = no_zero(acc[m][4 * t + e] * by), to[64 * m + 8] = no_zero(acc[m][4 * t + 2 + e] * by);
    }
  }
  named_sync(1, 128);
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int head = 8 * t + 2 * q + e;
      if (head >= SHARE || first >= used || w + g > 0) continue;
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < 4; n++) sum += load_shared(met + (n * Shape::HEADS + head) * 4);
      mine[head * ROW + D] = no_zero(top[t][e]), mine[head * ROW + D + 1] = no_zero(sum);
    }
  }
  if (!block_any(false)) return;
  add_parts<D, SHARE, 128, Out>(args.parts + (i64)blockIdx.y * parts * SHARE * ROW, blocks,
                           args.out + ((i64)batch * args.heads + group * SHARE) * D, base + Shape::SUMS);
}

}  // namespace quantrot
