// FP8 attention of many queries for sm_90a: y = softmax(q k^T) v, e4m3 operands, float32 sums and softmax.
//
// q rows of D bytes, k rows of D bytes, v transposed: rows of tokens. A thread block takes 64 queries for each of its
// GROUPS warpgroups that multiply, and walks the keys they see in tiles of 128, from the last to the first: so the
// tiles that a mask cuts come first. One warp feeds rings of K and V tiles through the copy engine. A warpgroup starts
// the scores of a tile and the products with V of the tile before, and computes the softmax of the former while the
// tensor cores finish the latter. Warpgroups that take turns to start lose: 692 us against 660 (D = 128, 8192 queries).
//
// A thread's scores of a row are columns 8 j + 2 q, + 1 of a product (q = lane % 4), and as the left operand of the
// next product it must give columns 4 q ... + 3 of each 16. So K's rows are laid in shared memory in another order,
// row 8 b + 2 q + e of each 16 holds token 4 q + 2 b + e (tensor_load_folded), and no value changes its thread.
//
// The running maximum is rounded up to a whole power of two, in which the reference has its argument.

namespace quantrot {

struct AttentionArgs {
  const unsigned char *q_scale, *k_scale, *v_scale;  // e8m0
  const int *lengths, *query_lengths;                // [batch], or null
  void* out;                                         // [batch, queries, heads, D], 16 bits
  i64 qs_batch, qs_head, qs_row, ks_batch, ks_head, ks_tile, vs_batch, vs_head, vs_tile;
  int q_shift;  // queries that share a scale, 2^q_shift
  int q_batch, q_head;  // rows of q from a batch or head to the next
  int k_batch, k_head;  // the same of k, in 16 rows
  int v_batch, v_head;  // rows of v
  int batch, heads, share, queries, keys, blocks;  // share: query heads of a key head; blocks: of queries
  float scale;  // of the scores, times log2(e)
};

constexpr int P_BITS = 8;  // probabilities are in e4m3 times 2^8

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000u); }

// 2^(byte - 127), NaN for 255.
__device__ __forceinline__ float power_of(int byte) {
  return byte == 255 ? __uint_as_float(0x7FC00000u) : __uint_as_float((u32)byte << 23);
}

template <int D, int GROUPS, int STAGES>
struct AttentionShape {
  static constexpr int ROWS = 64 * GROUPS, KEYS = 128;
  static constexpr int Q_BYTES = ROWS * D, TILE = KEYS * D;  // of K, and of V
  static constexpr int K_AT = Q_BYTES, V_AT = K_AT + STAGES * TILE, BARRIERS = V_AT + STAGES * TILE;
  static constexpr int SHARED = BARRIERS + (2 + 4 * STAGES) * 8;
  static_assert(SHARED <= 227 << 10, "shared memory");
};

// One block of queries of one head.
struct Work {
  int batch, head, first;  // query
  int used, asked, offset, tiles;

  template <bool CAUSAL, int ROWS>
  __device__ __forceinline__ static Work at(const AttentionArgs& args, int i) {
    Work w;
    const int all = args.batch * args.heads, which = i % all;
    w.batch = which / args.heads;
    w.head = which % args.heads;
    w.first = (args.blocks - 1 - i / all) * ROWS;  // the longest first
    w.used = args.lengths ? min(__ldg(args.lengths + w.batch), args.keys) : args.keys;
    w.asked = args.query_lengths ? min(__ldg(args.query_lengths + w.batch), args.queries) : args.queries;
    w.offset = w.used - w.asked;
    const int end = CAUSAL ? min(w.used, max(w.offset + w.first + ROWS, 0)) : w.used;
    w.tiles = w.first < w.asked ? (end + 127) / 128 : 0;
    return w;
  }
};

template <class Shape, int D, int STAGES, bool CAUSAL>
__device__ __forceinline__ void attention_load(const TensorMap* q, const TensorMap* k, const TensorMap* v,
                                               const AttentionArgs& args, u32 base) {
  const u64 policy = cache_policy<NORMAL>();
  const u32 full_q = base + Shape::BARRIERS, empty_q = full_q + 8, full = empty_q + 8, empty = full + STAGES * 16;
  Ring<STAGES> ring;
  u32 parity = 0;
  for (int i = blockIdx.x; i < args.blocks * args.batch * args.heads; i += gridDim.x) {
    const Work w = Work::at<CAUSAL, Shape::ROWS>(args, i);
    if (w.tiles == 0) continue;
    const int group = w.head / args.share;
    barrier_wait(empty_q, parity ^ 1);
    parity ^= 1;
    barrier_expect(full_q, Shape::Q_BYTES);
    tensor_load(base, q, 0, w.batch * args.q_batch + w.head * args.q_head + w.first, full_q, policy);
    const int k_row = w.batch * args.k_batch + group * args.k_head, v_row = w.batch * args.v_batch + group * args.v_head;
    for (int j = w.tiles - 1; j >= 0; j--, ring.next()) {
      const u32 bar = ring.stage * 16;
      barrier_wait(empty + bar, ring.parity ^ 1);
      barrier_expect(full + bar, Shape::TILE);
      tensor_load_folded(base + Shape::K_AT + ring.stage * Shape::TILE, k, k_row + j * 8, full + bar, policy);
      barrier_wait(empty + bar + 8, ring.parity ^ 1);
      barrier_expect(full + bar + 8, Shape::TILE);
      tensor_load(base + Shape::V_AT + ring.stage * Shape::TILE, v, j * 128, v_row, full + bar + 8, policy);
    }
  }
}

// What a thread keeps of its two rows while it walks the keys.
struct Softmax {
  float top[2], total[2];  // the running maximum, and this thread's part of the sum in units of 2^-P
  float rows[2];           // of a score, times K's scale: bits
  int limit[2];            // keys the row sees: those below
  int unit;                // the byte of the scale in which the sums of products are
  float shrink[2];         // what those must be multiplied by, after `step`

  // Scores s of the tile of keys from `start` -> probabilities times 2^P and V's scale over the unit.
  template <bool EDGE>
  __device__ __forceinline__ void step(float (&s)[64], int start, int k_byte, int v_byte) {
    const int q = lane_number() % 4;
    if constexpr (EDGE) {
#pragma unroll
      for (int i = 0; i < 64; i++) {
        const int token = start + i / 8 * 16 + 4 * q + i / 4 % 2 * 2 + i % 2;
        if (token >= limit[i / 2 % 2]) s[i] = minus_infinity();
      }
    }
    const float k_scale = power_of(k_byte);
    const int next = v_byte == 255 ? unit : max(unit, v_byte);
    const float less = v_byte == 255 ? __uint_as_float(0x7FC00000u) : (float)max(v_byte - next, -32);
    const float more = v_byte == 255 ? 1.f : exp2_fast(-less);
    const float down = unit == next ? 1.f : power_of(max(unit - next, -32) + 127);
    unit = next;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float m[4] = {s[2 * r], s[2 * r + 1], s[2 * r + 4], s[2 * r + 5]};
#pragma unroll
      for (int j = 2; j < 16; j++) {
        m[j % 2 * 2] = fmaxf(m[j % 2 * 2], s[4 * j + 2 * r]);
        m[j % 2 * 2 + 1] = fmaxf(m[j % 2 * 2 + 1], s[4 * j + 2 * r + 1]);
      }
      float largest = fmaxf(fmaxf(m[0], m[1]), fmaxf(m[2], m[3]));
      largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2));
      const float by = rows[r] * k_scale;
      const float now = fmaxf(top[r], ceilf(largest * by)), point = now == minus_infinity() ? 0.f : now;
      const float minus = less + (float)P_BITS - point, kept = exp2_fast(top[r] - point);
      shrink[r] = kept * down;
      top[r] = now;
      float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int j = 0; j < 16; j++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& x = s[4 * j + 2 * r + e];
          x = exp2_fast(fmaf(x, by, minus));
          if constexpr (EDGE) {  // a scale that is NaN stays out of rows that do not see it
            if (start + j / 2 * 16 + 4 * q + j % 2 * 2 + e >= limit[r]) x = 0.f;
          }
          sum[j % 2 * 2 + e] += x;
        }
      }
      total[r] = fmaf(total[r], kept, ((sum[0] + sum[1]) + (sum[2] + sum[3])) * more);
    }
  }
};

// d = the scores of 64 queries at `q` and 128 keys at `k`.
template <int D>
__device__ __forceinline__ void start_scores(float (&d)[64], u32 q, u32 k) {
#pragma unroll
  for (int i = 0; i < D / 32; i++) {
    if constexpr (D == 128) {
      product(d, operand(q, i), operand(k, i), i > 0);
    } else {
      product(d, operand_short(q, i), operand_short(k, i), i > 0);
    }
  }
  product_commit();
}

// o += p v, over 128 tokens.
template <int W>
__device__ __forceinline__ void start_values(float (&o)[W], const u32 (&p)[4][4], u32 v) {
#pragma unroll
  for (int i = 0; i < 4; i++) product(o, p[i], operand(v, i), true);
  product_commit();
}

__device__ __forceinline__ void pack(u32 (&p)[4][4], const float (&s)[64]) {
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const int from = i / 4 * 16 + i % 4 / 2 * 8 + i % 2 * 2;
    p[i / 4][i % 4] = to_e4m3(s[from], s[from + 1], s[from + 4], s[from + 5]);
  }
}

// Four lanes hold a row's columns 2 q, 2 q + 1 of four groups of eight; then each has all columns of group q.
__device__ __forceinline__ void gather(u32 (&w)[4]) {
  const u32 q = lane_number() % 4;
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i & bit) continue;
      const u32 out = q & bit ? w[i] : w[i | bit], in = __shfl_xor_sync(0xFFFFFFFFu, out, bit);
      if (q & bit) {
        w[i] = in;
      } else {
        w[i | bit] = in;
      }
    }
  }
}

template <class Shape, int D, int GROUPS, int STAGES, bool CAUSAL, class Out>
__device__ __forceinline__ void attention_multiply(const AttentionArgs& args, u32 base) {
  const u32 full_q = base + Shape::BARRIERS, empty_q = full_q + 8, full = empty_q + 8, empty = full + STAGES * 16;
  const u32 group = warp_number() / 4, lane = lane_number(), own_q = base + group * 64 * D;
  Ring<STAGES> keys, values;
  u32 parity = 0;
  for (int i = blockIdx.x; i < args.blocks * args.batch * args.heads; i += gridDim.x) {
    const Work w = Work::at<CAUSAL, Shape::ROWS>(args, i);
    const int first = w.first + group * 64, row = first + warp_number() % 4 * 16 + lane / 4, kv = w.head / args.share;
    const unsigned char* k_scale = args.k_scale + w.batch * args.ks_batch + kv * args.ks_head;
    const unsigned char* v_scale = args.v_scale + w.batch * args.vs_batch + kv * args.vs_head;
    int whole = CAUSAL ? min(w.used, max(w.offset + first + 1, 0)) : w.used;  // all rows see the keys below
    if (args.query_lengths && first + 64 > w.asked) whole = 0;
    Softmax softmax;
    softmax.unit = 0;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int m = row + 8 * r;
      const unsigned char* at = args.q_scale + w.batch * args.qs_batch + w.head * args.qs_head;
      softmax.top[r] = minus_infinity(), softmax.total[r] = 0.f;
      softmax.limit[r] = m >= w.asked ? 0 : CAUSAL ? min(w.used, w.offset + m + 1) : w.used;
      softmax.rows[r] = m >= w.asked ? 1.f : power_of(__ldg(at + (i64)(m >> args.q_shift) * args.qs_row)) * args.scale;
    }
    float s[64], o[D / 2];
    u32 p[4][4];
#pragma unroll
    for (int j = 0; j < D / 2; j++) o[j] = 0.f;
    if (w.tiles > 0) {
      auto step = [&](int j, int k_byte, int v_byte) {
        if (j * 128 + 128 > whole) {
          softmax.template step<true>(s, j * 128, k_byte, v_byte);
        } else {
          softmax.template step<false>(s, j * 128, k_byte, v_byte);
        }
      };
      auto release = [&](u32 bar) {
        if (lane == 0) barrier_arrive(bar);
      };
      int j = w.tiles - 1;
      int k_byte = __ldg(k_scale + j * args.ks_tile), v_byte = __ldg(v_scale + j * args.vs_tile);
      int k_next = __ldg(k_scale + max(j - 1, 0) * args.ks_tile), v_next = __ldg(v_scale + max(j - 1, 0) * args.vs_tile);
      barrier_wait(full_q, parity);
      parity ^= 1;
      barrier_wait(full + keys.stage * 16, keys.parity);
      product_fence();
      start_scores<D>(s, own_q, base + Shape::K_AT + keys.stage * Shape::TILE);
      product_wait<0>();
      product_done(s);
      release(empty + keys.stage * 16);
      keys.next();
      step(j, k_byte, v_byte);
      pack(p, s);
      for (j--; j >= 0; j--) {
        k_byte = k_next, v_byte = v_next;
        k_next = __ldg(k_scale + max(j - 1, 0) * args.ks_tile), v_next = __ldg(v_scale + max(j - 1, 0) * args.vs_tile);
        barrier_wait(full + keys.stage * 16, keys.parity);
        product_fence();
        start_scores<D>(s, own_q, base + Shape::K_AT + keys.stage * Shape::TILE);
        barrier_wait(full + values.stage * 16 + 8, values.parity);
        product_fence();
        start_values(o, p, base + Shape::V_AT + values.stage * Shape::TILE);
        product_wait<1>();
        product_done(s);
        release(empty + keys.stage * 16);
        keys.next();
        step(j, k_byte, v_byte);
        product_wait<0>();
        product_done(o);
        release(empty + values.stage * 16 + 8);
        values.next();
        if (__any_sync(0xFFFFFFFFu, !(softmax.shrink[0] == 1.f && softmax.shrink[1] == 1.f))) {
#pragma unroll
          for (int n = 0; n < D / 2; n++) o[n] *= softmax.shrink[n / 2 % 2];
        }
        pack(p, s);
      }
      release(empty_q);
      barrier_wait(full + values.stage * 16 + 8, values.parity);
      product_fence();
      start_values(o, p, base + Shape::V_AT + values.stage * Shape::TILE);
      product_wait<0>();
      product_done(o);
      release(empty + values.stage * 16 + 8);
      values.next();
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float total = softmax.total[r];
      total += __shfl_xor_sync(0xFFFFFFFFu, total, 1);
      total += __shfl_xor_sync(0xFFFFFFFFu, total, 2);
      const float inverse = total == 0.f ? 0.f : power_of(softmax.unit) / total;
      const int m = row + 8 * r;
      unsigned short* to = (unsigned short*)args.out + (((i64)w.batch * args.queries + m) * args.heads + w.head) * D;
#pragma unroll
      for (int j = 0; j < D / 8; j += 4) {
        Quad y;
#pragma unroll
        for (int n = 0; n < 4; n++)
          y.w[n] = Out::pack(o[4 * (j + n) + 2 * r] * inverse, o[4 * (j + n) + 2 * r + 1] * inverse);
        gather(y.w);
        if (m < args.queries) *(Quad*)(to + (j + lane % 4) * 8) = y;
      }
    }
  }
}

template <int D, int GROUPS, int STAGES, bool CAUSAL, class Out>
__device__ __forceinline__ void attention(const TensorMap* q, const TensorMap* k, const TensorMap* v,
                                          const AttentionArgs& args) {
  using Shape = AttentionShape<D, GROUPS, STAGES>;
  const u32 base = shared_memory(), bars = base + Shape::BARRIERS, warp = warp_number();
  if (warp == GROUPS * 4 && lane_number() == 0) {
    tensor_prefetch(q), tensor_prefetch(k), tensor_prefetch(v);
    barrier_init(bars, 1);
    barrier_init(bars + 8, 4 * GROUPS);
    for (int s = 0; s < 2 * STAGES; s++) {
      barrier_init(bars + 16 + s * 8, 1);
      barrier_init(bars + 16 + STAGES * 16 + s * 8, 4 * GROUPS);
    }
    barrier_init_done();
  }
  block_sync();
  if (warp >= GROUPS * 4) {
    if constexpr (GROUPS == 2) give_registers<24>();
    if constexpr (GROUPS == 3) give_registers<32>();
    if (warp == GROUPS * 4) attention_load<Shape, D, STAGES, CAUSAL>(q, k, v, args, base);
  } else {
    if constexpr (GROUPS == 2) take_registers<240>();
    if constexpr (GROUPS == 3) take_registers<160>();
    attention_multiply<Shape, D, GROUPS, STAGES, CAUSAL, Out>(args, base);
  }
}

}  // namespace quantrot
