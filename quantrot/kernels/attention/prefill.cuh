// FP8 attention of many queries for sm_90a: y = softmax(q k^T) v, q and k in e4m3 or int8, v and the probabilities in
// e4m3, softmax in float32.
//
// q rows of D bytes, or of D 16-bit numbers, which are then quantized here; k rows of D bytes, v transposed: rows of
// tokens. A thread block takes 64 queries for each of its GROUPS warpgroups that multiply, and walks the keys they see
// in tiles of 128, from the last to the first: so the tiles that a mask cuts come first. One warp feeds rings of K and V
// tiles through the copy engine, their scales by ordinary stores. A warpgroup holds its queries in registers, starts the
// scores of a tile and the products with V of the tile before, and computes the softmax of the former (softmax.cuh, which
// comes before this file) while the tensor cores finish the latter.
//
// A thread's scores of a row are columns 8 j + 2 q, + 1 of a product (q = lane % 4), and as the left operand of the
// next product it must give columns 4 q ... + 3 of each 16. So K's rows are laid in shared memory in another order,
// row 8 b + 2 q + e of each 16 holds token 4 q + 2 b + e (tensor_load_folded), and no value changes its thread.
//
// The running maximum is rounded up to a whole power of two, in which the reference has its argument.

namespace quantrot {

struct AttentionArgs {
  const void *q_scale, *k_scale;  // of their codes; q's is not read where q is wide
  const unsigned char* v_scale;   // e8m0
  const int *lengths, *query_lengths;                // [batch], or null
  void* out;                                         // [batch, queries, heads, D], 16 bits
  i64 qs_batch, qs_head, qs_row, ks_batch, ks_head, ks_tile, vs_batch, vs_head, vs_tile;
  int q_shift;  // queries that share a scale, 2^q_shift
  int q_batch, q_head, q_column;  // rows of q from a batch or head to the next, and bytes
  int k_batch, k_head;  // the same of k, in 16 rows
  int v_batch, v_head;  // rows of v
  int batch, heads, share, queries, keys, blocks;  // share: query heads of a key head; blocks: of queries
  float scale;  // of the scores, times log2(e)
  int counter;  // which of the kernel's says what comes next; negative: none
  int dealt;    // whether thread block b takes places[starts[b]] ... places[starts[b + 1] - 1], and no counter is asked
  unsigned short starts[146], places[512];
};

// Queries that are codes already.
struct Codes {
  static constexpr int BYTES = 1;
};

template <class Code>
__device__ __forceinline__ typename Code::Scale scale_at(const void* scales, i64 i) {
  return __ldg((const typename Code::Scale*)scales + i);
}

template <int D, int GROUPS, int STAGES, class Q>
struct AttentionShape {
  static constexpr int ROWS = 64 * GROUPS, KEYS = 128;
  static constexpr int Q_LINE = D * Q::BYTES < 128 ? D * Q::BYTES : 128, Q_PIECES = D * Q::BYTES / Q_LINE;  // bytes
  static constexpr int Q_PIECE = ROWS * Q_LINE, TILE = KEYS * D;  // of K, and of V
  static constexpr int K_AT = Q_PIECES * Q_PIECE, V_AT = K_AT + STAGES * TILE, BARRIERS = V_AT + STAGES * TILE;
  static constexpr int SCALES = BARRIERS + (2 + 4 * STAGES) * 8, PLACE = SCALES + STAGES * 8;
  static constexpr int START = (PLACE + 4 + 15) / 16 * 16;
  static constexpr int ONES = (START + 16 + 127) / 128 * 128, SUMS = ONES + 1024, SHARED = SUMS + GROUPS * 2048;
  static_assert(SHARED <= 227 << 10, "shared memory");
};

// One block of queries of one head. Blocks end at the last 64 queries: the first of a head may start before query 0, with
// warpgroups that have nothing to do.
struct Work {
  int batch, head, first;  // query
  int used, asked, offset;

  template <int ROWS>
  __device__ __forceinline__ static Work place(const AttentionArgs& args, int i) {
    Work w;
    const int all = args.batch * args.heads, which = i % all;
    w.batch = which / args.heads;
    w.head = which % args.heads;
    w.first = (args.queries + 63) / 64 * 64 - (i / all + 1) * ROWS;  // the longest first
    return w;
  }

  template <int ROWS>
  __device__ __forceinline__ static Work at(const AttentionArgs& args, int i) {
    Work w = place<ROWS>(args, i);
    w.used = args.lengths ? min(__ldg(args.lengths + w.batch), args.keys) : args.keys;
    w.asked = args.query_lengths ? min(__ldg(args.query_lengths + w.batch), args.queries) : args.queries;
    w.offset = w.used - w.asked;
    return w;
  }

  // Tiles of keys that the queries from `from` up to `to` see.
  template <bool CAUSAL>
  __device__ __forceinline__ int tiles(int from, int to) const {
    const int end = CAUSAL ? min(used, max(offset + to, 0)) : used;
    return from < asked && to > 0 ? (end + 127) / 128 : 0;
  }

  // Rows of q before the first.
  __device__ __forceinline__ int row(const AttentionArgs& args) const {
    return batch * args.q_batch + head * args.q_head + first;
  }
};

// The blocks of queries that a thread block takes, longest first: what the host dealt out to it; or one, and then by the counter
// each time the next that no other has taken, for multiprocessors differ in speed (8192 tokens: 460 us for 463 at head_dim 64,
// 631 for 637 at 128); or without a counter there and back again, so that with falling lengths all get about the same.
struct Places {
  const AttentionArgs& args;
  u32* counter;
  int turn = 0;

  __device__ __forceinline__ int own(int t) const {
    if (args.dealt) {
      const int at = args.starts[blockIdx.x] + t;
      return at < args.starts[blockIdx.x + 1] ? args.places[at] : 0x7FFFFFFF;
    }
    return t * gridDim.x + (t % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  }
  // `all` where there is none left. Who finds none has counted, too, so that the counter is 0 again at the end.
  __device__ __forceinline__ int next(int all) {
    const int t = turn++;
    if (t == 0 || args.dealt || args.counter < 0) return min(own(t), all);
    return min((int)(gridDim.x + largest_of_warp(count_one(counter, all - 1))), all);
  }
};

template <class Shape, class Code, int STAGES, bool CAUSAL>
__device__ __forceinline__ void attention_load(const TensorMap* q, const TensorMap* k, const TensorMap* v,
                                               const AttentionArgs& args, u32* counter, u32 base) {
  const u64 policy = cache_policy<NORMAL>();
  const u32 full_q = base + Shape::BARRIERS, empty_q = full_q + 8, full = empty_q + 8, empty = full + STAGES * 16;
  const int all = args.blocks * args.batch * args.heads;
  Ring<STAGES> ring;
  u32 parity = 0;
  Places places = {args, counter};
  for (int place = 0; place < all;) {
    place = places.next(all);
    const Work w = Work::at<Shape::ROWS>(args, min(place, all - 1));
    const int tiles = place < all ? w.tiles<CAUSAL>(w.first, w.first + Shape::ROWS) : 0, group = w.head / args.share;
    barrier_wait(empty_q, parity ^ 1);
    parity ^= 1;
    store_one(base + Shape::PLACE, place);
    barrier_expect(full_q, tiles > 0 ? Shape::Q_PIECES * Shape::Q_PIECE : 0);
    if (tiles == 0) continue;
#pragma unroll
    for (int i = 0; i < Shape::Q_PIECES; i++)
      tensor_load(base + i * Shape::Q_PIECE, q, w.head * args.q_column + i * 128, w.row(args), full_q, policy);
    const int k_row = w.batch * args.k_batch + group * args.k_head, v_row = w.batch * args.v_batch + group * args.v_head;
    const i64 k_scale = w.batch * args.ks_batch + group * args.ks_head;
    const unsigned char* v_scale = args.v_scale + w.batch * args.vs_batch + group * args.vs_head;
    auto k_next = scale_at<Code>(args.k_scale, k_scale + (tiles - 1) * args.ks_tile);
    int v_next = __ldg(v_scale + (tiles - 1) * args.vs_tile);
    for (int j = tiles - 1; j >= 0; j--, ring.next()) {
      const u32 bar = ring.stage * 16, at = max(j - 1, 0);
      const float k_value = Code::value(k_next);
      const int v_byte = v_next;
      k_next = scale_at<Code>(args.k_scale, k_scale + at * args.ks_tile), v_next = __ldg(v_scale + at * args.vs_tile);
      barrier_wait(empty + bar, ring.parity ^ 1);
      if (lane_number() == 0) {
        store_shared(base + Shape::SCALES + ring.stage * 8, k_value);
        store_shared(base + Shape::SCALES + ring.stage * 8 + 4, (u32)v_byte);
      }
      warp_sync();
      barrier_expect(full + bar, Shape::TILE);
      tensor_load_folded(base + Shape::K_AT + ring.stage * Shape::TILE, k, k_row + j * 8, full + bar, policy);
      barrier_wait(empty + bar + 8, ring.parity ^ 1);
      barrier_expect(full + bar + 8, Shape::TILE);
      tensor_load(base + Shape::V_AT + ring.stage * Shape::TILE, v, j * 128, v_row, full + bar + 8, policy);
    }
  }
}

// A warp's 16 queries at row `row` of the block's as left operands, and in `scales` those of a thread's two rows where
// they are made here.
template <class Shape, class Q, class Code, int D>
__device__ __forceinline__ void take_queries(u32 (&a)[D / 32][4], float (&scales)[2], u32 base, u32 row) {
  const u32 q = lane_number() % 4;
  row += lane_number() / 4;
  auto address = [&](int r, u32 column) {  // of a byte, in the swizzle
    const u32 m = row + 8 * r, within = column % Shape::Q_LINE, turn = Shape::Q_LINE == 128 ? m % 8 : m / 2 % 4;
    return base + column / Shape::Q_LINE * Shape::Q_PIECE + m * Shape::Q_LINE + (within ^ turn << 4);
  };
  if constexpr (Q::BYTES == 1) {
#pragma unroll
    for (int i = 0; i < D / 8; i++) a[i / 4][i % 4] = load_shared1(address(i % 2, i / 4 * 32 + i % 4 / 2 * 16 + 4 * q));
  } else {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float2 wide[D / 16];
      u32 low = 0, high = 0;
#pragma unroll
      for (int i = 0; i < D / 16; i++) {
        wide[i] = load_shared2(address(r, (i * 16 + 4 * q) * 2));
        const u32 x = __float_as_uint(wide[i].x), y = __float_as_uint(wide[i].y);
        low = max(low, max(x & 0x7FFF, y & 0x7FFF)), high = max(high, max(x & 0x7FFF0000, y & 0x7FFF0000));
      }
      low = max(low, high >> 16);
      low = max(low, __shfl_xor_sync(0xFFFFFFFFu, low, 1));
      low = max(low, __shfl_xor_sync(0xFFFFFFFFu, low, 2));
      const auto scale = Code::scale_of(__float_as_uint(Q::value((unsigned short)low)));
      scales[r] = Code::value(scale);
      const float inverse = Code::inverse(scale);
      auto code = [&](u32 bits) {  // 0 times an infinity is no number
        return Code::known(scale) ? __fmul_rn(Q::value((unsigned short)bits), inverse) : 0.f;
      };
#pragma unroll
      for (int i = 0; i < D / 16; i++) {
        const u32 x = __float_as_uint(wide[i].x), y = __float_as_uint(wide[i].y);
        a[i / 2][i % 2 * 2 + r] = Code::pack(code(x), code(x >> 16), code(y), code(y >> 16));
      }
    }
  }
}

// d = the scores of a warpgroup's 64 queries and 128 keys at `k`, once d is where they start.
template <int D, class Sum>
__device__ __forceinline__ void start_scores(Sum (&d)[64], const u32 (&q)[D / 32][4], u32 k) {
#pragma unroll
  for (int i = 0; i < D / 32; i++)
    product(d, q[i], D == 128 ? operand(k, i) : operand_short(k, i), i > 0 || Score<Sum>::BIAS > 0.f);
  product_commit();
}

// o += p v, over 128 tokens, and `codes` = the sums of p's rows, each eight times; in turn, so that a short product does not
// wait for the one before it.
template <int W>
__device__ __forceinline__ void start_values(float (&o)[W], float (&codes)[4], const u32 (&p)[4][4], u32 v, u32 ones) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    product(codes, p[i], operand(ones, i), i > 0);
    product(o, p[i], operand(v, i), true);
  }
  product_commit();
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

// FLOW: a block's last products run while the next one's queries are taken, and that one's first scores while the results
// are written. Products do not depend on branches: where there is nothing to multiply, they are made for nothing.
template <class Shape, int D, int STAGES, bool FLOW, bool CAUSAL, class Q, class Code, class Out>
__device__ __forceinline__ void attention_multiply(const AttentionArgs& args, u32 base) {
  const u32 full_q = base + Shape::BARRIERS, empty_q = full_q + 8, full = empty_q + 8, empty = full + STAGES * 16;
  const u32 warp = warp_number(), group = warp / 4, lane = lane_number(), rows_at = warp * 16;
  const int all = args.blocks * args.batch * args.heads;
  Ring<STAGES> keys, values;
  u32 parity = 0;
  Softmax<typename Code::Sum, D == 64> softmax;
  using Of = Score<typename Code::Sum>;
  typename Code::Sum s[64];
  float o[D / 2], codes[4], more = 0.f;  // more: of the tile whose codes are in p
  u32 p[4][4], next[4][4], q[D / 32][4];
  float2 scales;
  int j, whole;
  i64 place;  // of the first of this thread's rows in the output, in rows
  int left;   // rows from that on to the end
  // V's tile that goes with the last of K's. At head_dim 64 a ring of its own would be in vector registers, from which each
  // product's operand must come through moves: 512 us for 483 (8192 tokens).
  auto place_of_v = [&] {
    Ring<STAGES> last = keys;
    last.stage = keys.stage == 0 ? STAGES - 1 : keys.stage - 1, last.parity ^= keys.stage == 0;
    return D == 64 ? last : values;
  };
  auto release = [&](u32 bar) {
    if (lane == 0) barrier_arrive(bar);
  };
  int tiles, own;  // of keys that the block sees, and this warpgroup
  bool is;
  // Takes up a block of queries, or none.
  auto take_up = [&] {
    barrier_wait(full_q, parity);
    parity ^= 1;
    const int next = __float_as_int(load_shared(base + Shape::PLACE));
    is = next < all;
    const Work w = Work::at<Shape::ROWS>(args, is ? next : 0);
    const int first = w.first + group * 64, row = first + warp % 4 * 16 + lane / 4;
    tiles = is ? w.tiles<CAUSAL>(w.first, w.first + Shape::ROWS) : 0, own = w.tiles<CAUSAL>(first, first + 64);
    whole = CAUSAL ? min(w.used, max(w.offset + first + 1, 0)) : w.used;  // all rows see the keys below
    if (args.query_lengths && first + 64 > w.asked) whole = 0;
    place = ((i64)w.batch * args.queries + row) * args.heads + w.head;
    left = first < 0 ? 0 : args.queries - row;
    softmax.unit = 0;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int m = row + 8 * r;
      softmax.top[r] = minus_infinity(), softmax.total[r] = 0.f, softmax.rows[r] = 1.f;
      softmax.limit[r] = m >= w.asked ? 0 : CAUSAL ? min(w.used, w.offset + m + 1) : w.used;
      if constexpr (Q::BYTES == 1) {
        const i64 at = w.batch * args.qs_batch + w.head * args.qs_head + (i64)(m >> args.q_shift) * args.qs_row;
        if ((u32)m < (u32)w.asked) softmax.rows[r] = Code::value(scale_at<Code>(args.q_scale, at)) * args.scale;
      }
    }
    u32 seen = next;
    if (tiles > 0) {
      float scale[2];
      u32 at = rows_at;  // not the compiler's constant: it would keep seven addresses through the loop, in local memory
      asm volatile("" : "+r"(at));
      take_queries<Shape, Q, Code, D>(q, scale, base, at);
#pragma unroll
      for (int i = 0; i < D / 8; i++) seen |= q[i / 4][i % 4];
      if constexpr (Q::BYTES > 1) {
#pragma unroll
        for (int r = 0; r < 2; r++)
          if (row + 8 * r < w.asked) softmax.rows[r] = scale[r] * args.scale;
      }
    }
    warp_sync();
    release(address_after(empty_q, seen));
  };
  // Its first scores; without keys, scores for nothing. No stage of V may be held: it waits for all that are out of sight.
  auto start = [&] {
    for (j = tiles - 1; j >= own; j--) {  // out of this warpgroup's sight
      barrier_wait(full + keys.stage * 16, keys.parity);
      warp_sync();
      release(empty + keys.stage * 16);
      keys.next();
      const Ring<STAGES> v = place_of_v();
      barrier_wait(full + v.stage * 16 + 8, v.parity);
      warp_sync();
      release(empty + v.stage * 16 + 8);
      values.next();
    }
    Of::start(s, base + Shape::START);
    if (j >= 0) barrier_wait(full + keys.stage * 16, keys.parity);
    product_fence();
    start_scores<D>(s, q, base + Shape::K_AT + keys.stage * Shape::TILE);
    scales = load_shared2(base + Shape::SCALES + keys.stage * 8);
  };
  auto step = [&](bool first) {
    const int v_byte = __float_as_int(scales.y);
    if (j * 128 + 128 > whole) {
      softmax.template step<true>(next, s, j * 128, scales.x, v_byte, base + Shape::SUMS, first);
    } else {
      softmax.template step<false>(next, s, j * 128, scales.x, v_byte, base + Shape::SUMS, first);
    }
    Of::start(s, base + Shape::START);
  };
  auto take = [&] {  // once the products with the codes before have read theirs
    u32 nothing = 0;
    asm volatile("" : "+r"(nothing));
#pragma unroll
    for (int i = 0; i < 16; i++) p[i / 4][i % 4] = next[i / 4][i % 4] ^ nothing;
    more = softmax.more;
  };
#pragma unroll
  for (int i = 0; i < 16; i++) p[i / 4][i % 4] = 0;
#pragma unroll
  for (int i = 0; i < D / 8; i++) q[i / 4][i % 4] = 0;
  take_up();
  if (FLOW) start();
#pragma unroll 1
  while (is) {
    if (!FLOW) start();
#pragma unroll
    for (int n = 0; n < D / 2; n++) o[n] = 0.f;
    const bool any = j >= 0;
    product_wait<0>();
    product_done(s);
    if (any) {
      release(address_after(empty + keys.stage * 16, __float_as_uint(scales.y)));
      keys.next();
      step(true);
      take();
    }
    for (j--; j >= 0; j--) {
      barrier_wait(full + keys.stage * 16, keys.parity);
      product_fence();
      start_scores<D>(s, q, base + Shape::K_AT + keys.stage * Shape::TILE);
      scales = load_shared2(base + Shape::SCALES + keys.stage * 8);
      const Ring<STAGES> v = place_of_v();
      barrier_wait(full + v.stage * 16 + 8, v.parity);
      product_fence();
      start_values(o, codes, p, base + Shape::V_AT + v.stage * Shape::TILE, base + Shape::ONES);
      product_wait<1>();
      product_done(s);
      release(address_after(empty + keys.stage * 16, __float_as_uint(scales.y)));
      keys.next();
      step(false);
      product_wait<0>();
      product_done(o);
      product_done(codes);
      release(empty + v.stage * 16 + 8);
      values.next();
      softmax.add(codes, more);
      softmax.scale_total(base + Shape::SUMS);
      const float down = softmax.down(base + Shape::SUMS), shrink[2] = {softmax.kept[0] * down, softmax.kept[1] * down};
      if (__any_sync(0xFFFFFFFFu, !(shrink[0] == 1.f && shrink[1] == 1.f))) {
#pragma unroll
        for (int n = 0; n < D / 2; n++) o[n] *= shrink[n / 2 % 2];
      }
      take();
    }
    const Ring<STAGES> v = place_of_v();
    if (any) barrier_wait(full + v.stage * 16 + 8, v.parity);
    product_fence();
    start_values(o, codes, p, base + Shape::V_AT + v.stage * Shape::TILE, base + Shape::ONES);
    const float last = more;
    const float before[2] = {softmax.total[0], softmax.total[1]};
    const int unit = softmax.unit, end = left;
    unsigned short* to = (unsigned short*)args.out + place * D;
    const u32 done = empty + v.stage * 16 + 8;
    if (any) values.next();
    if (FLOW) take_up();
    product_wait<0>();
    product_done(o);
    product_done(codes);
    if (any) release(done);
    const float totals[2] = {fmaf(codes[0], fabsf(last), before[0]), fmaf(codes[2], fabsf(last), before[1])};
    if (FLOW) start();
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float total = totals[r];
      const float inverse = total == 0.f ? 0.f : power_of(unit) / total;
#pragma unroll
      for (int j = 0; j < D / 8; j += 4) {
        Quad y;
#pragma unroll
        for (int n = 0; n < 4; n++)
          y.w[n] = Out::pack(o[4 * (j + n) + 2 * r] * inverse, o[4 * (j + n) + 2 * r + 1] * inverse);
        gather(y.w);
        if (!any) y = {{0, 0, 0, 0}};
        if (8 * r < end) *(Quad*)(to + (i64)8 * r * args.heads * D + (j + lane % 4) * 8) = y;
      }
    }
    if (!FLOW) take_up();
  }
  if (FLOW) {
    product_wait<0>();
    product_done(s);
  }
}

// Q: Codes, or the type of 16-bit queries. Code: E4m3 or Int8, what queries and keys are multiplied in.
template <int D, int GROUPS, int STAGES, bool FLOW, bool CAUSAL, class Q, class Code, class Out>
__device__ __forceinline__ void attention(const TensorMap* q, const TensorMap* k, const TensorMap* v,
                                          const AttentionArgs& args, u32* counters) {
  using Shape = AttentionShape<D, GROUPS, STAGES, Q>;
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
    const float bias = Score<typename Code::Sum>::BIAS;
    store_shared4(base + Shape::START, bias, bias, bias, bias);
  }
  if (warp == GROUPS * 4) {
    for (u32 i = lane_number() * 4; i < 1024; i += 128) store_shared(base + Shape::ONES + i, 0x38383838u);  // e4m3's 1
    fence_async();
  }
  if (warp == GROUPS * 4) {  // queries that are not in L2 are on their way there while the kernel before ends
    const Work w = Work::place<Shape::ROWS>(args, Places{args}.own(0));
#pragma unroll
    for (int i = 0; i < Shape::Q_PIECES; i++) tensor_warm(q, w.head * args.q_column + i * 128, w.row(args));
  }
  block_sync();
  grid_wait();
  if (warp >= GROUPS * 4) {
    if constexpr (GROUPS == 2) give_registers<24>();
    if constexpr (GROUPS == 3) give_registers<32>();
    if (warp == GROUPS * 4) attention_load<Shape, Code, STAGES, CAUSAL>(q, k, v, args, counters + args.counter, base);
  } else {
    if constexpr (GROUPS == 2) take_registers<240>();
    if constexpr (GROUPS == 3) take_registers<160>();
    attention_multiply<Shape, D, STAGES, FLOW, CAUSAL, Q, Code, Out>(args, base);
  }
}

}  // namespace quantrot
