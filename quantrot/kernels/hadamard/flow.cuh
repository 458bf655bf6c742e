// Long rows of 16-bit elements through a ring of buffers that the copy engine fills, and one asynchronous product.

namespace quantrot {

// --- Rows of K * C elements, H = H_K (x) S_C, C = 64, 128 or 256 -----------------------------------------------------
//
// A row is K x C in memory and lies in shared memory as it is. A warp feeds the ring with rows while GROUPS warpgroups
// multiply: 64 rows of H_K^T are the register operand of wgmma, made from sign bits, the data is the shared memory
// operand, read across its rows (the hardware transposes), so nothing is ever moved. The product is exact, and it
// leaves each lane with two neighbouring columns of every eight: S_C is then additions between a lane's own sums, and
// a tf32 product for the three lowest bits of the column number.
//
// What bounds a row of 14336 is how much of all this happens at once. With a thread block a row, loads, products and
// stores took turns (60% of the issue slots, 0.66 of a copy for 108 * 128); here the buffer is free as soon as the
// product has read it, and different warpgroups are in different steps.

template <int D>
struct Number : Fp16 {};
template <>
struct Number<BF16> : Bf16 {};

// The signs of H_K^T as wgmma takes its rows, defined by the program: word w of rows 16 * block ... + 15 has a lane's of
// columns 64 w ... + 63. Bit 4 * (step % 4) + register is the lower column's, 16 further up the higher one's.
template <int K>
struct Signs {
  __device__ __forceinline__ static u32 word(u32 block, u32 w);
};

template <int K, int C>
struct Shape {
  static constexpr int TILES = (K + 63) / 64;         // 64 rows of the product
  static constexpr int STEPS = (K + 15) / 16;
  static constexpr int WORDS = (STEPS + 3) / 4;
  static constexpr int CHUNK = STEPS * 2048;          // bytes of 64 columns, 128 bytes a row, swizzled
  static constexpr int INPUT = C / 64 * CHUNK;
  static constexpr int EMPTY = (STEPS * 16 - K) * 8;  // vectors of the rows past K, which no load writes
  static_assert(K % 2 == 0 && K <= 256, "rows of a box");
};

constexpr int STAGE = 2048;  // bytes of a warp's 16 rows of 64 columns on their way out

template <int D, int K, int C, int GROUPS, int STAGES, int CLUSTER, bool PACED>
struct FlowLayout : Shape<K, C> {
  using S = Shape<K, C>;
  static constexpr int ALL = GROUPS * CLUSTER;                           // warpgroups that see a row
  static constexpr int SHARE = (S::TILES < ALL ? S::TILES : ALL) / CLUSTER;  // of a block, at a row
  static constexpr int TURNS = GROUPS / SHARE;                           // rows in work
  static constexpr int BARRIERS = STAGES * S::INPUT + GROUPS * 4 * STAGE;
  static constexpr int REGISTERS = GROUPS == 3 ? 160 : 240;  // the feeders keep 24 of theirs
  static_assert(GROUPS == 2 || GROUPS == 3, "four leave a thread 112 registers, too few for 64 sums");
  static_assert(SHARE > 0 && GROUPS % SHARE == 0, "warpgroups divide into rows");
  static_assert(STAGES % TURNS == 0, "a buffer belongs to the same warpgroups: they have seen the phase before");
  static_assert(CLUSTER == 1 || (S::TILES % (SHARE * CLUSTER) == 0 && C / 64 % CLUSTER == 0), "blocks share alike");
  static_assert(!PACED || S::TILES % SHARE == 0, "as many products for each");
};

// 64 rows of H_K^T: as signs, from which an operand is made while the product before it runs, or (HOLD) as operands made
// once, where a warpgroup multiplies by the same ones again and again and has the registers. Codes gain 2% by holding, on
// the average of twelve orders; plain rows lose 0.3%. What is past K only meets zeros.
template <int D, int K, int C, int REGISTERS, bool HOLD>
struct Operand {
  using S = Shape<K, C>;
  static constexpr int SPARE = (REGISTERS - C / 2 - (C == 256 ? 80 : 56) - (D == BF16 ? 0 : 16)) / 4;
  static constexpr int BATCH = HOLD || S::STEPS <= SPARE ? S::STEPS : SPARE < 4 ? 1 : SPARE < 8 ? 2 : 4;
  u32 signs[S::WORDS], held[HOLD ? S::STEPS : 1][4];

  // Columns 16 * step ... + 15 from their word of signs.
  __device__ __forceinline__ static void make(u32 (&h)[4], u32 word, int step) {
    constexpr u32 one = D == BF16 ? 0x3F803F80u : 0x3C003C00u;
#pragma unroll
    for (int i = 0; i < 4; i++) h[i] = one ^ (word << (15 - step % 4 * 4 - i) & 0x80008000u);
  }

  __device__ __forceinline__ void load(u32 block) {
#pragma unroll
    for (int w = 0; w < S::WORDS; w++) signs[w] = Signs<K>::word(block, w);
#pragma unroll
    for (int s = 0; HOLD && s < S::STEPS; s++) {
      make(held[s], signs[s / 4], s);
#pragma unroll
      for (int i = 0; i < 4; i++) held[s][i] = from_here(held[s][i]);
    }
  }

  // The rows' product with the input: d[4 t + j] is row 16 * warp + lane / 4 + 8 * (j / 2), column
  // 8 t + 2 * (lane % 4) + j % 2. The caller says product_done once it has told others that the product is over, which
  // otherwise comes after its sums.
  __device__ __forceinline__ void multiply(float (&d)[C / 2], u32 input) const {
    u32 h[2][BATCH][4];
#pragma unroll
    for (int first = 0; first < S::STEPS; first += BATCH) {
      if (first >= 2 * BATCH) product_wait<1>();
      u32 now[S::WORDS];
#pragma unroll
      for (int w = 0; !HOLD && w < S::WORDS; w++) now[w] = from_here(signs[w]);
#pragma unroll
      for (int s = first; !HOLD && s < first + BATCH; s++)
        if (s < S::STEPS) make(h[first / BATCH % 2][s - first], now[s / 4], s);
      product_fence();
#pragma unroll
      for (int s = first; s < first + BATCH; s++) {
        if (s >= S::STEPS) continue;
        const u32(&operand)[4] = *(HOLD ? &held[HOLD ? s : 0] : &h[first / BATCH % 2][s - first]);
        product_across<Number<D>>(d, operand, operand_across(input + s * 2048, S::CHUNK), s > 0);
      }
      product_commit();
    }
    product_wait<0>();
  }
};

// Zeros past K in `buffers` inputs, by all threads.
template <int K, int C>
__device__ __forceinline__ void fill_empty(u32 inputs, u32 buffers, u32 threads) {
  using S = Shape<K, C>;
  if constexpr (S::EMPTY > 0) {
    for (u32 i = threadIdx.x; i < buffers * (C / 64) * S::EMPTY; i += threads)
      store_vector(inputs + i / S::EMPTY * S::CHUNK + K * 128 + i % S::EMPTY * 16, Vec{{0, 0, 0, 0}});
    fence_async();
  }
}

// A warp's rows by S_C and the scale. The tf32 product cuts its operand to 11 bits: bfloat16 does not notice once the
// mean of what is cut, 0.72 * 2^-11, is given back in the scale; float16, and codes, are multiplied in two parts. (More bits
// of the column number in the products, as held.cuh does, are fewer additions, but here the tensor cores are busy: 53248 0.70
// of a copy with two bits more, 0.76 without.)
template <int D, int C>
__device__ __forceinline__ void turn_columns(float (&d)[C / 2], float scale, u32 lane) {
#pragma unroll
  for (int step = 4; step < C / 4; step *= 2) {       // column bits from 3 up
#pragma unroll
    for (int i = 0; i < C / 2; i++)
      if (!(i & step)) {
        const float x = d[i], y = d[i + step];
        d[i] = x + y;
        d[i + step] = x - y;
      }
  }
  constexpr Precision P = D == BF16 && SCALE_RULE == 0 ? CUT : PAIR;
  if constexpr (P == CUT) scale *= 1.00035f;
#pragma unroll
  for (int i = 0; i < C / 4; i++) {                   // the last one scales
    const float x = d[i], y = d[i + C / 4] * scale;
    d[i] = fmaf(x, scale, y);
    d[i + C / 4] = fmaf(x, scale, -y);
  }
  Eights eights(lane);
  if constexpr (P == PAIR) keep_apart(eights.pairs, 0);
  eights.template turn<P, 1>(reinterpret_cast<float(&)[C / 8][4]>(d));
}

// The warpgroups at a row turn its elements by the rotation's signs where they lie.
template <int K, int C, int THREADS>
__device__ __forceinline__ void turn_signs(const Args& a, u32 input, i64 row, u32 meeting) {
  const signed char* signs = a.signs + row % a.sign_rows * (K * C);
#pragma unroll 1
  for (u32 i = threadIdx.x % THREADS; i < K * C / 8; i += THREADS) {
    const u32 unit = i % (C / 8), to = input + unit / 8 * Shape<K, C>::CHUNK + swizzled(i / (C / 8), unit % 8 * 16);
    Vec v = load_vector(to);
    apply_signs16(v, signs + i * 8);
    store_vector(to, v);
  }
  fence_async();
  named_sync(meeting, THREADS);
}

// A warp's 16 rows of the product from m on, 8 rows of 64 columns at a time through one half of its own piece of shared memory
// and then the other, as 16-byte vectors: what comes back is stored after the next 8 rows have gone there. (Stored at once, a
// fifth of a tile's additions, conversions and stores was waiting for it.)
template <int D, int K, int C>
__device__ __forceinline__ void store_rows(char* y, const float (&d)[C / 2], u32 stage, u32 m, u32 lane) {
  const u32 row = lane >> 3, unit = lane & 7;
  char* const to = from_here(y + ((m + row) * C + 8 * unit) * 2);
  const u32 put = from_here(stage + swizzled(unit, row * 16)), get = from_here(stage + swizzled(row, unit * 16));
  const int left = K - (int)(m + row);
  Vec back[2][2];
#pragma unroll
  for (int step = 0; step <= C / 32; step++) {        // 64 columns, the lower and the upper 8 rows of them
    if (step < C / 32) {
      const int half = step % 2;
#pragma unroll
      for (int t = 0; t < 8; t += 4) {
        const float* e = d + 4 * (step / 2 * 8 + t) + 2 * half;
        store_matrices((put ^ t * 16) + half * 1024, pack<D>(e[0], e[1]), pack<D>(e[4], e[5]), pack<D>(e[8], e[9]),
                       pack<D>(e[12], e[13]));
      }
      warp_sync();
#pragma unroll
      for (int i = 0; i < 2; i++) back[half][i] = load_vector((get ^ i * 64) + i * 512 + half * 1024);
    }
    if (step > 0) {
      const int before = (step - 1) % 2;
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (K % 64 == 0 || 8 * before + 4 * i < left)
          store16(to + ((8 * before + 4 * i) * C + (step - 1) / 2 * 64) * 2, back[before][i]);
    }
  }
}

// The same as codes, 128 columns at a time. A lane's pairs of eight columns t and of t + 1 leave as one register, so the
// pairs lie alternately in shared memory until they are read.
template <int K, int C>
__device__ __forceinline__ void store_rows_codes(const Args& a, i64 row, const float (&d)[C / 2], u32 stage, u32 m) {
  const u32 lane = lane_number();
  char* const y = (char*)a.y + row * a.y_stride;
  constexpr int W = C / 64;                           // groups: 128 columns of rows lane / 4 and + 8
  float amax[W], own;
#pragma unroll
  for (int w = 0; w < W; w++) {
    amax[w] = 0.f;
#pragma unroll
    for (int i = 0; i < 64; i += 4) {
      const float* e = d + w / 2 * 64 + i + w % 2 * 2;
      amax[w] = larger(amax[w], larger(e[0], e[1]));
    }
  }
  {
    const float scale = scale_of(largest<W, 4>(amax));
    own = to_codes(scale);
    const u32 group = group_of<W, 4>(), r = m + lane / 4 + group % 2 * 8;
    if (lane % 4 < W && r < K) store_scale(a, (u32)row * (K * C / 128) + r * (C / 128) + group / 2, scale);
  }
#pragma unroll
  for (int chunk = 0; chunk < C / 128; chunk++) {
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; h++) factor[h] = from_group<W, 4>(own, 2 * chunk + h);
#pragma unroll
    for (int t = 0; t < 8; t += 2) {                  // units of 16 columns
      u32 w[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float *e = d + 64 * chunk + 8 * (t + i / 2) + 2 * (i % 2), f = factor[i % 2];
        w[i] = codes2(e[0] * f, e[1] * f) | codes2(e[4] * f, e[5] * f) << 16;
      }
      store_matrices(stage + swizzled(lane & 15, (t + (lane >> 4)) * 16), w[0], w[1], w[2], w[3]);
    }
    warp_sync();
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      const u32 r = 4 * i + (lane >> 3), unit = lane & 7;
      const Vec v = load_vector(stage + swizzled(r, unit * 16));
      if (m + r < K)
        store16(y + (m + r) * C + 128 * chunk + 16 * unit,
                Vec{{bytes_of(v.w[0], v.w[1], 0x5410), bytes_of(v.w[2], v.w[3], 0x5410),
                     bytes_of(v.w[0], v.w[1], 0x7632), bytes_of(v.w[2], v.w[3], 0x7632)}});
    }
    warp_sync();
  }
}

// A tile's sums by S_C, and out.
template <int D, int K, int C>
__device__ __forceinline__ void finish(const Args& a, i64 row, float (&d)[C / 2], u32 stage, u32 m, u32 lane) {
  turn_columns<D, C>(d, a.scale, lane);
  if constexpr (SCALE_RULE > 0) {
    store_rows_codes<K, C>(a, row, d, stage, m);
  } else {
    store_rows<D, K, C>((char*)a.y + row * a.y_stride * 2, d, stage, m, lane);
  }
}

// A cluster's rows, asked for one at a time: FIXED at a fixed distance, and then each time the next that no other has taken.
// Multiprocessors differ by a fifth in how soon they get their rows: with fixed shares 32768 reaches 0.88 of a copy, not 0.94.
template <u32 FIXED>
struct Rows {
  u32* taken;
  u32 rows, apart, row, number = 0;

  __device__ __forceinline__ Rows(const Args& a, u32 first, u32 apart)
      : taken(a.taken), rows((u32)a.rows), apart(apart), row(first - apart) {
    if (rows <= FIXED * apart) taken = nullptr;
  }

  __device__ __forceinline__ bool fixed() const { return taken == nullptr || row + apart < FIXED * apart; }

  __device__ __forceinline__ void ask() {             // a cluster that finds none left has counted, too
    if (!fixed() && row < rows) number = count_one(taken, rows - (FIXED - 1) * apart - 1);
  }

  __device__ __forceinline__ u32 get() {
    if (fixed()) {
      row += apart;
    } else if (row < rows) {
      row = FIXED * apart + largest_of_warp(number);
    }
    return row;
  }
};

// PACED: the warpgroups multiply one after the other. Those at the same row all see it arrive; they would multiply at
// the same time and then add at the same time, one unit idle after the other.
// SHIFT: every row a tile goes to another warpgroup, and its 16 rows to another warp, and those past K do nothing. Where 3 of
// 16 warps have only such (53248), the others do not wait for the one that never has (float16: 0.75 of a copy, 0.71 without).
template <int D, int K, int C, int GROUPS, int STAGES, int CLUSTER, bool PACED, bool SHIFT, bool SIGNS>
__device__ __forceinline__ void flow_kernel(const TensorMap& map, const Args& a) {
  using L = FlowLayout<D, K, C, GROUPS, STAGES, CLUSTER, PACED>;
  const u32 inputs = shared_memory(), full = inputs + L::BARRIERS, empty = full + 8 * STAGES, order = empty + 8 * STAGES,
            row_at = order + 8 * GROUPS;
  const u32 warp = warp_number(), lane = from_here(lane_number()), rank = CLUSTER > 1 ? cluster_rank() : 0;
  const u32 first = blockIdx.x / CLUSTER, apart = gridDim.x / CLUSTER, rows = (u32)a.rows;
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < STAGES; s++) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, 4 * L::SHARE * CLUSTER);
    }
    for (u32 g = 0; PACED && g < GROUPS; g++) barrier_init(order + 8 * g, 4);
    barrier_init_done();
  }
  fill_empty<K, C>(inputs, STAGES, 128 * (GROUPS + 1));
  if constexpr (CLUSTER > 1) {
    cluster_sync();
  } else {
    block_sync();
  }

  Ring<STAGES> ring;
  if (warp >= 4 * GROUPS) {
    give_registers<24>();
    if (warp == 4 * GROUPS && rank == 0) {
      const int pitch = (int)(a.x_stride / C);
      // Where a buffer is filled only once its row is done with, L2 is asked for the row after (28672 0.85 of a copy without,
      // 0.91 with; 13824, of four buffers, 0.94 without, 0.91 with, as blocks with rows of their own lose by it).
      constexpr bool WARM = CLUSTER > 1 && STAGES == L::TURNS;
      for (u32 row = first, s = 0; s < STAGES && row < rows; row += apart, s++)
        for (u32 chunk = 0; chunk < C / 64; chunk++) tensor_warm(&map, 64 * chunk, (int)row * pitch);
      grid_wait();
      Rows<STAGES> taken(a, first, apart);
      u32 row = taken.get();
      taken.ask();
      for (u32 left = L::TURNS; left > 0; ring.next()) {
        const u32 bar = full + 8 * ring.stage, at = row_at + 4 * ring.stage;
        barrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
        if constexpr (CLUSTER > 1) {
#pragma unroll
          for (u32 i = 0; i < CLUSTER; i++) {
            barrier_expect_in(in_block(bar, i), row < rows ? K * C * 2 + 4 : 4);
            send_word(in_block(at, i), row, in_block(bar, i));
          }
        } else {
          store_one(at, row);
          barrier_expect(bar, row < rows ? K * C * 2 : 0);
        }
        if (row >= rows) {                            // every group sees one that is not there
          left--;
          continue;
        }
        const u64 policy = cache_policy<NORMAL>();
#pragma unroll
        for (u32 chunk = 0; chunk < C / 64; chunk++) {
          const u32 to = inputs + ring.stage * L::INPUT + chunk * L::CHUNK;
          if constexpr (CLUSTER > 1) {
            tensor_load_all(to, &map, 64 * chunk, (int)row * pitch, bar, policy, (1 << CLUSTER) - 1);
          } else {
            tensor_load(to, &map, 64 * chunk, (int)row * pitch, bar, policy);
          }
        }
        row = taken.get();
        taken.ask();
        if (WARM && row >= STAGES * apart && row < rows)
#pragma unroll
          for (u32 i = 0; i < CLUSTER; i++)
            warm_bytes((const char*)a.x + row * a.x_stride * 2 + i * (K * C * 2 / CLUSTER), K * C * 2 / CLUSTER);
      }
      // Once all buffers have been handed back no block needs the other any more: each leaves when it is done.
      for (u32 s = L::TURNS; s < STAGES; s++, ring.next()) barrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
    }
  } else {
    take_registers<L::REGISTERS>();
    const u32 group = warp / 4, tile0 = rank + CLUSTER * (group % L::SHARE);
    u32 block = warp & 3, mine = tile0;
    const u32 stage = inputs + STAGES * L::INPUT + warp * STAGE;
    constexpr bool SAME = L::SHARE * CLUSTER == L::TILES;  // tile, every time
    constexpr int OTHERS = 64 + (C == 256 ? 20 : 0);  // registers
    static_assert(SAME || !SHIFT, "a warpgroup with one tile of a row");
    constexpr bool HOLD = !SHIFT && SCALE_RULE > 0 && SAME && 4 * L::STEPS + C / 2 + OTHERS <= L::REGISTERS;
    Operand<D, K, C, L::REGISTERS, HOLD> operand;
    u32 turn = 0, round = 0;
    operand.load(4 * tile0 + block);
    grid_wait();
    for (;; ring.next(), turn = turn + 1 == L::TURNS ? 0 : turn + 1) {
      if (turn != group / L::SHARE) continue;
      const u32 input = inputs + ring.stage * L::INPUT;
      barrier_wait(full + 8 * ring.stage, ring.parity);
      const u32 row = __shfl_sync(0xFFFFFFFFu, lane == 0 ? load_shared1(row_at + 4 * ring.stage) : 0, 0);  // who arrives has read
      if (row >= (u32)a.rows) break;
      if constexpr (SIGNS) turn_signs<K, C, 128 * L::SHARE>(a, input, row, 1 + group / L::SHARE);
#pragma unroll 1
      for (u32 pass = tile0; pass < L::TILES; pass += L::SHARE * CLUSTER) {
        const u32 tile = SHIFT ? mine : pass;
        if constexpr (!SAME) operand.load(4 * tile + block);
        float d[C / 2];
        if constexpr (PACED) barrier_wait(order + 8 * group, (round++ & 1) ^ (group == 0));
        operand.multiply(d, input);
        if (lane == 0) {
          if constexpr (PACED) barrier_arrive(order + 8 * (group + 1 == GROUPS ? 0 : group + 1));
          if (pass + L::SHARE * CLUSTER >= L::TILES) {
            if constexpr (CLUSTER > 1) {
              barrier_arrive_cluster(in_block(empty + 8 * ring.stage, 0));
            } else {
              barrier_arrive(empty + 8 * ring.stage);
            }
          }
        }
        const u32 m = 64 * tile + 16 * block;
        if constexpr (SHIFT) {
          if (++mine == L::TILES) mine = 0, block = (block + 1) & 3;
          operand.load(4 * mine + block);
        }
        if (a.sign_rows < 0) return;  // never: ptxas puts the sums before an arrival, but not before a branch
        product_done(d);
        if (!SHIFT || m < K) finish<D, K, C>(a, row, d, stage, m, lane);
      }
    }
  }
}

}  // namespace quantrot
