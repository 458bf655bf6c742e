// One new token a sequence, for sm_90a: norms and RoPE of its queries and key, its place in the KV cache, and its attention
// to all that is cached, in one launch. Bound by the reading of K and V, whose bytes go straight from memory to registers.
//
// A cluster of SPLIT blocks has a key head of a sequence. A warp takes 16 tokens at a time, on its own: products with
// tokens as the rows and up to 8 (16) query heads as the columns, softmax, products with V's columns as the rows. What
// a product sums over may be in any order, so the 16 bytes of a row of K that a lane (g = lane / 4, q = lane % 4)
// loads are two steps of a product as they lie, columns 32 j + 8 q ... + 7; of V it loads four tokens' columns
// 64 c + 8 g ... + 7 and puts tokens side by side. Steps go from the last token back: the new token, which is not read
// from the cache, is in the first step of the first warp, which also writes it there.
//
// Warps' sums meet in shared memory; then each block sends each other one the columns which that one finishes, and
// waits for what it is sent. Nothing else orders the blocks.

namespace quantrot {

struct TokenArgs {
  const unsigned short *q, *k, *v, *cos, *sin;  // the new token's, 16 bits
  unsigned short *keys, *values;                // [batch, groups, room, D], tokens adjacent
  u64* count;                                   // tokens in the cache, 2^32 and up is 0 between launches; or null
  const unsigned char* mask;                    // [batch, room], without a count [batch, at + 1], or null: 0: not seen
  const unsigned short *q_norm, *k_norm;        // [D], if NORM: gains of queries and of the key
  unsigned short* out;                          // [batch, heads, D]
  i64 q_batch, q_head, k_batch, k_head, v_batch, v_head, cos_batch, sin_batch;  // elements
  i64 keys_batch, keys_head, values_batch, values_head, mask_batch;
  int heads, groups, room, at, advance, settled;  // at: tokens in the cache, where there is no count
  float scale;  // of the scores, times log2(e)
  float epsilon;  // of the norms
};

#ifndef QUANTROT_EMULATED
// 16 bytes that no kernel in flight writes, and that are read once.
__device__ __forceinline__ Quad load_once(const unsigned short* p) {
  Quad v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "l"(p));
  return v;
}

__device__ __forceinline__ Quad load_plain(const unsigned short* p) { return *(const Quad*)p; }

// To another block's shared memory (of in_block, as its barrier), some time before its barrier has counted the 8 bytes.
__device__ __forceinline__ void send2(u32 mapped, u32 bar, float a, float b) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(mapped),
               "f"(a), "f"(b), "r"(bar)
               : "memory");
}

// An 8 x 8 matrix of 16-bit elements, row g, columns 2 q and the next in a lane, transposed.
__device__ __forceinline__ u32 matrix_turned(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Of both halves, each rounded to 16 bits. (.rn: or a product and a sum become one operation.)
template <class T>
__device__ __forceinline__ u32 times(u32 a, u32 b) {
  u32 r;
  if constexpr (T::BRAIN) {
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  } else {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  }
  return r;
}
template <class T>
__device__ __forceinline__ u32 plus(u32 a, u32 b) {
  u32 r;
  if constexpr (T::BRAIN) {
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  } else {
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  }
  return r;
}
#endif

// Columns 32 j + 8 q ... + 7 of a row, and of what goes with them in rotate_half.
template <int D>
struct Row {
  Quad x[D / 32], other[D % 64 ? D / 32 : 1];

  __device__ __forceinline__ void load(const unsigned short* row) {
    const int first = lane_number() % 4 * 8;
#pragma unroll
    for (int j = 0; j < D / 32; j++) {
      x[j] = load_plain(row + 32 * j + first);
      if constexpr (D % 64 != 0) other[j] = load_plain(row + (32 * j + first + D / 2) % D);
    }
  }

  // x over its root mean square, and that times the gain in shared memory, each rounded to 16 bits. Four lanes have the row.
  template <class T>
  __device__ __forceinline__ void normalize(u32 gain, float epsilon) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
      const u32 pair = x[i / 4].w[i % 4];
      const float low = T::value(pair), high = T::value(pair >> 16);
      sum = fmaf(low, low, sum), sum = fmaf(high, high, sum);
    }
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lanes);
    const float factor = inverse_root(sum * (1.f / D) + epsilon);
    const auto scale = [&](Quad& y, int column) {
      int g[4];
      load_shared4(gain + column * 2, g[0], g[1], g[2], g[3]);
#pragma unroll
      for (int w = 0; w < 4; w++)
        y.w[w] = times<T>((u32)g[w], T::pack(T::value(y.w[w]) * factor, T::value(y.w[w] >> 16) * factor));
    };
#pragma unroll
    for (int j = 0; j < D / 32; j++) {
      const int column = 32 * j + lane_number() % 4 * 8;
      scale(x[j], column);
      if constexpr (D % 64 != 0) scale(other[j], (column + D / 2) % D);
    }
  }

  // x cos + rotate_half(x) sin, each operation rounded to 16 bits.
  template <class T>
  __device__ __forceinline__ void turn(Quad (&y)[D / 32], const Row& cos, const Row& sin) const {
#pragma unroll
    for (int j = 0; j < D / 32; j++) {
      Quad half;
      if constexpr (D % 64 == 0) {
        half = x[(j + D / 64) % (D / 32)];
      } else {
        half = other[j];
      }
      const u32 sign = 32 * j + (int)(lane_number() % 4 * 8) < D / 2 ? 0x80008000u : 0u;
#pragma unroll
      for (int w = 0; w < 4; w++)
        y[j].w[w] = plus<T>(times<T>(x[j].w[w], cos.x[j].w[w]), times<T>(half.w[w] ^ sign, sin.x[j].w[w]));
    }
  }
};

// Shared memory: floats [WARPS][SHARE][PITCH], [WARPS][SHARE][2]; what comes from the cluster's blocks, [SPLIT][OWN][2]
// and [SPLIT][SHARE][2]; a barrier for that; a word; gains [2][D] of 16 bits, if there are norms.
template <int D, int SHARE, int WARPS, int SPLIT>
struct TokenShape {
  static constexpr int PITCH = D + 8;  // lanes meet different banks
  static constexpr int PAIRS = SHARE * D / 2, OWN = (PAIRS + SPLIT - 1) / SPLIT;  // of columns; that a block finishes
  static constexpr int STATS = WARPS * SHARE * PITCH * 4, LANDED = STATS + WARPS * SHARE * 8;
  static constexpr int NUMBERS = LANDED + SPLIT * OWN * 8, BARRIER = NUMBERS + SPLIT * SHARE * 8, WORD = BARRIER + 8;
  static constexpr int GAINS = (WORD + 4 + 15) / 16 * 16;
};

// The parts of a head: their largest scores and sums, of `count` of N, `pitch` bytes apart.
template <int N>
struct Parts {
  float weight[N], highest, sum;

  __device__ __forceinline__ Parts(u32 from, int pitch, int count) : highest(minus_infinity()), sum(0.f) {
    float2 stat[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
      stat[i] = {minus_infinity(), 0.f};
      if (i < count) stat[i] = load_shared2(from + i * pitch);
      highest = fmaxf(highest, stat[i].x);
    }
#pragma unroll
    for (int i = 0; i < N; i++) weight[i] = weight_of(stat[i].x, highest), sum = fmaf(stat[i].y, weight[i], sum);
  }

  // Two columns of the parts, added.
  __device__ __forceinline__ float2 add(u32 from, int pitch, int count) const {
    float2 y = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < N; i++) {
      float2 two = {0.f, 0.f};
      if (i < count) two = load_shared2(from + i * pitch);
      y.x = fmaf(two.x, weight[i], y.x), y.y = fmaf(two.y, weight[i], y.y);
    }
    return y;
  }
};

// Warps of `warps` that have one of `steps`, in a block that is one of `split`.
__device__ __forceinline__ int with_steps(int steps, int rank, int split, int warps) {
  return min(max((steps - rank + split - 1) / split, 0), warps);
}

// What `active` warps, one at least, have left in shared memory, added up over the block: put(pair of columns of all heads, its
// head, its first column there, the two sums, the largest score that these are counted from, the weights' sum).
template <int D, int SHARE, int WARPS, class Put>
__device__ __forceinline__ void add_block(u32 base, int active, const Put& put) {
  using Shape = TokenShape<D, SHARE, WARPS, 1>;
  for (int at = threadIdx.x; at < Shape::PAIRS; at += WARPS * 32) {
    const int head = at / (D / 2), column = at % (D / 2) * 2;
    const Parts<WARPS> parts(base + Shape::STATS + head * 8, SHARE * 8, active);
    const float2 y = parts.add(base + (head * Shape::PITCH + column) * 4, SHARE * Shape::PITCH * 4, active);
    put(at, head, column, y, parts.highest, parts.sum);
  }
}

// What those warps have left in shared memory, added up over the block and the cluster and divided: out [SHARE, D]. NaN where the
// cache was full.
template <int D, int SHARE, int WARPS, int SPLIT, class T>
__device__ __forceinline__ void add_warps(u32 base, u32 rank, int steps, bool full, unsigned short* out) {
  using Shape = TokenShape<D, SHARE, WARPS, SPLIT>;
  const int active = with_steps(steps, rank, SPLIT, WARPS);
  if constexpr (SPLIT > 1) {  // what the blocks that had a step will send here
    const int mine = min(max(Shape::PAIRS - (int)rank * Shape::OWN, 0), Shape::OWN);
    if (threadIdx.x < 32) barrier_expect(base + Shape::BARRIER, min(steps, SPLIT) * (mine + SHARE) * 8);
  }
  block_sync();
  auto write = [&](int pair, float2 y, float sum) {
    const float inverse = full ? __uint_as_float(0x7FC00000u) : sum == 0.f ? 0.f : 1.f / sum;
    *(u32*)(out + pair * 2) = T::pack(y.x * inverse, y.y * inverse);
  };
  if (active > 0) {
    add_block<D, SHARE, WARPS>(base, active, [&](int at, int head, int column, float2 y, float highest, float sum) {
      if constexpr (SPLIT == 1) {
        write(at, y, sum);
      } else {
        const u32 to = at / Shape::OWN, landed = base + Shape::LANDED + (rank * Shape::OWN + at % Shape::OWN) * 8;
        send2(in_block(landed, to), in_block(base + Shape::BARRIER, to), y.x, y.y);
        if (column == 0) {  // each block gets all heads' numbers
          const u32 numbers = base + Shape::NUMBERS + (rank * SHARE + head) * 8;
#pragma unroll 1
          for (u32 i = 0; i < SPLIT; i++) send2(in_block(numbers, i), in_block(base + Shape::BARRIER, i), highest, sum);
        }
      }
    });
  }
  if constexpr (SPLIT > 1) {
    barrier_wait(base + Shape::BARRIER, 0);
    for (int i = threadIdx.x; i < Shape::OWN; i += WARPS * 32) {
      const int at = rank * Shape::OWN + i;
      if (at >= Shape::PAIRS) break;
      const Parts<SPLIT> parts(base + Shape::NUMBERS + at / (D / 2) * 8, SHARE * 8, steps);
      write(at, parts.add(base + Shape::LANDED + i * 8, Shape::OWN * 8, steps), parts.sum);
    }
  }
}

template <int D, int SHARE, int WARPS, int SPLIT, bool NORM, class T>
__device__ __forceinline__ void attend_token(const TokenArgs& args) {
  using Shape = TokenShape<D, SHARE, WARPS, SPLIT>;
  constexpr int TILES = (SHARE + 7) / 8;
  constexpr int LOADS = D / 32, CHUNKS = (D + 63) / 64, THREADS = WARPS * 32, STRIDE = SPLIT * WARPS;
  const u32 lane = lane_number(), g = lane / 4, q = lane % 4, warp = warp_number(), base = shared_memory();
  const u32 rank = SPLIT > 1 ? cluster_rank() : 0;
  const int batch = blockIdx.y / args.groups, group = blockIdx.y % args.groups;
  if (SPLIT > 1 && threadIdx.x == 0) barrier_init(base + Shape::BARRIER, 1), barrier_init_done();
  if (!args.settled) grid_wait();
  if (threadIdx.x == 0) store_shared(base + Shape::WORD, args.count ? load_count(args.count) : (u32)args.at);
  if constexpr (NORM)
    for (int i = threadIdx.x; i < D; i += THREADS)
      store_shared(base + Shape::GAINS + i * 4, ((const u32*)(i < D / 2 ? args.q_norm : args.k_norm))[i % (D / 2)]);
  if constexpr (SPLIT > 1) cluster_start();  // the others' barriers are there
  block_sync();
  const u32 counted = load_shared1(base + Shape::WORD);
  const bool full = counted >= (u32)args.room;  // no place for the token
  const int position = full ? args.room - 1 : (int)counted, steps = position / 16 + 1;
  unsigned short* const keys = args.keys + batch * args.keys_batch + group * args.keys_head;
  unsigned short* const values = args.values + batch * args.values_batch + group * args.values_head;
  const unsigned char* const mask = args.mask ? args.mask + batch * args.mask_batch : nullptr;
  Quad kx[2][LOADS] = {}, vx[4][CHUNKS] = {};
  u32 open[2] = {1, 1};
  // Past the last cached token, that one: what is read for those counts for nothing.
  auto load_k = [&](int step) {
    if (step * 16 >= position) return;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const unsigned short* from = keys + (i64)min(step * 16 + (int)g + 8 * r, position - 1) * D + 8 * q;
#pragma unroll
      for (int j = 0; j < LOADS; j++) kx[r][j] = load_once(from + 32 * j);
    }
  };
  auto load_v = [&](int step) {
    if (step * 16 >= position) return;
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const int token = step * 16 + (int)(2 * q) + r % 2 + r / 2 * 8;
      const unsigned short* from = values + (i64)min(token, position - 1) * D + 8 * g;
#pragma unroll
      for (int c = 0; c < CHUNKS; c++)
        if (D % 64 == 0 || 64 * c + 8 * (int)g < D) vx[r][c] = load_once(from + 64 * c);
    }
  };
  auto load_mask = [&](int step) {
    if (!mask) return;
#pragma unroll
    for (int r = 0; r < 2; r++) open[r] = mask[min(step * 16 + (int)g + 8 * r, position)];
  };
  int step = steps - 1 - (int)(rank + SPLIT * warp);
  if (step >= 0) load_k(step), load_v(step);
  if (args.settled) grid_wait();
  Quad b[TILES][LOADS];
  float top[TILES][2], total[TILES][2], o[TILES][CHUNKS * 4][4];
  Row<D> cos, sin, key, row[TILES];
  Quad value[CHUNKS];
  const bool first = rank == 0 && warp == 0, counting = args.advance && warp == WARPS - 1;
  if (step >= 0) {
#pragma unroll
    for (int t = 0; t < TILES; t++)  // heads past the share are the last one again, and are not kept
      row[t].load(args.q + batch * args.q_batch + (group * SHARE + min(8 * t + (int)g, SHARE - 1)) * args.q_head);
    cos.load(args.cos + batch * args.cos_batch), sin.load(args.sin + batch * args.sin_batch);
    if (first) {
      key.load(args.k + batch * args.k_batch + group * args.k_head);
      const unsigned short* v = args.v + batch * args.v_batch + group * args.v_head + 8 * g;
#pragma unroll
      for (int c = 0; c < CHUNKS; c++)
        if (D % 64 == 0 || 64 * c + 8 * (int)g < D) value[c] = load_plain(v + 64 * c);
    }
    load_mask(step);
  }
  u64 arrivals = 0;
  if (counting) arrivals = count_arrival(args.count);  // after this block has read it, while the loads are on their way
  if (step >= 0) {
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      if constexpr (NORM) row[t].template normalize<T>(base + Shape::GAINS, args.epsilon);
      row[t].template turn<T>(b[t], cos, sin);
    }
    if (first) {  // the new token
      Quad turned[LOADS];
      if constexpr (NORM) key.template normalize<T>(base + Shape::GAINS + D * 2, args.epsilon);
      key.template turn<T>(turned, cos, sin);
      const int last = position % 16;
#pragma unroll
      for (int j = 0; j < LOADS; j++) {
        if ((int)g == last) kx[0][j] = turned[j];
        if ((int)g + 8 == last) kx[1][j] = turned[j];
        if (g == 0 && !full) *(Quad*)(keys + (i64)position * D + 32 * j + 8 * q) = turned[j];
      }
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) {
        if (D % 64 != 0 && 64 * c + 8 * (int)g >= D) continue;
#pragma unroll
        for (int r = 0; r < 4; r++)
          if ((int)(2 * q) + r % 2 + r / 2 * 8 == last) vx[r][c] = value[c];
        if (q == 0 && !full) *(Quad*)(values + (i64)position * D + 64 * c + 8 * g) = value[c];
      }
    }
  }
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int h = 0; h < 2; h++) top[t][h] = minus_infinity(), total[t][h] = 0.f;
#pragma unroll
    for (int m = 0; m < CHUNKS * 4; m++) {
#pragma unroll
      for (int e = 0; e < 4; e++) o[t][m][e] = 0.f;
    }
  }
#pragma unroll 1
  for (; step >= 0; step -= STRIDE) {
    u32 p[TILES][2];
    float x[TILES][2][4];  // two sums in turn: a product waits for the one before it
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
      for (int e = 0; e < 8; e++) x[t][e / 4][e % 4] = 0.f;
    }
#pragma unroll
    for (int i = 0; i < LOADS * 2; i++) {
      const int j = i / 2, w = i % 2 * 2;
      const u32 a[4] = {kx[0][j].w[w], kx[1][j].w[w], kx[0][j].w[w + 1], kx[1][j].w[w + 1]};
#pragma unroll
      for (int t = 0; t < TILES; t++) product_warp<T>(x[t][i % 2], a, b[t][j].w[w], b[t][j].w[w + 1]);
    }
    bool seen[2];
#pragma unroll
    for (int r = 0; r < 2; r++) seen[r] = open[r] != 0 && step * 16 + (int)g + 8 * r <= position;
    const bool more = step >= STRIDE;
    if (more) load_k(step - STRIDE), load_mask(step - STRIDE);
    float shrink[TILES][2];
    bool moved = false;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      float power[2][2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float s[2], largest = top[t][h];
#pragma unroll
        for (int r = 0; r < 2; r++) {
          s[r] = seen[r] ? (x[t][0][2 * r + h] + x[t][1][2 * r + h]) * args.scale : minus_infinity();
          largest = fmaxf(largest, s[r]);
        }
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2)
          largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, lanes));
        shrink[t][h] = weight_of(top[t][h], largest);
        moved |= largest != top[t][h];
        top[t][h] = largest;
#pragma unroll
        for (int r = 0; r < 2; r++) power[r][h] = weight_of(s[r], largest);
        total[t][h] = fmaf(total[t][h], shrink[t][h], power[0][h] + power[1][h]);
      }
#pragma unroll
      for (int r = 0; r < 2; r++) p[t][r] = matrix_turned(T::pack(power[r][0], power[r][1]));
    }
    if (__any_sync(0xFFFFFFFFu, moved)) {
#pragma unroll
      for (int t = 0; t < TILES; t++) {
#pragma unroll
        for (int m = 0; m < CHUNKS * 4; m++) {
#pragma unroll
          for (int e = 0; e < 4; e++) o[t][m][e] *= shrink[t][e % 2];
        }
      }
    }
#pragma unroll
    for (int m = 0; m < CHUNKS * 4; m++) {  // rows g: columns 64 c + 8 g + 2 i of V, rows g + 8: the next
      const int c = m / 4, i = m % 4;
      u32 a[4];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        a[2 * h] = __byte_perm(vx[2 * h][c].w[i], vx[2 * h + 1][c].w[i], 0x5410);
        a[2 * h + 1] = __byte_perm(vx[2 * h][c].w[i], vx[2 * h + 1][c].w[i], 0x7632);
      }
#pragma unroll
      for (int t = 0; t < TILES; t++) product_warp<T>(o[t][m], a, p[t][0], p[t][1]);
    }
    if (more) load_v(step - STRIDE);
  }
  // The warps' sums. Those that had no step leave nothing.
  if ((int)warp < with_steps(steps, rank, SPLIT, WARPS)) {
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int head = 8 * t + 2 * q + h;
        float sum = total[t][h];
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lanes);
        if (head >= SHARE) continue;
        const u32 to = base + ((warp * SHARE + head) * Shape::PITCH + 8 * g) * 4;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
          if (D % 64 != 0 && 64 * c + 8 * (int)g >= D) continue;
          float(&s)[CHUNKS * 4][4] = o[t];
          store_shared4(to + c * 256, s[4 * c][h], s[4 * c][2 + h], s[4 * c + 1][h], s[4 * c + 1][2 + h]);
          store_shared4(to + c * 256 + 16, s[4 * c + 2][h], s[4 * c + 2][2 + h], s[4 * c + 3][h], s[4 * c + 3][2 + h]);
        }
        if (g == 0) {
          const u32 at = base + Shape::STATS + (warp * SHARE + head) * 8;
          store_shared(at, top[t][h]), store_shared(at + 4, sum);
        }
      }
    }
  }
  add_warps<D, SHARE, WARPS, SPLIT, T>(base, rank, steps, full, args.out + ((i64)batch * args.heads + group * SHARE) * D);
  // Every block has read the count: the last to say so sets it.
  if (counting && arrivals >> 32 == gridDim.x * gridDim.y - 1) *args.count = counted + 1ull;
}

}  // namespace quantrot
