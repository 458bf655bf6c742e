// A few tokens by a narrow weight, bound by reading the codes: y[token, row] = sum over k of x[token, k] * w[row, k].
//
// Persistent thread blocks take tiles of rows and all of K. One warp keeps a ring of stages full through the copy engine
// (128 columns of the codes' tile, and of the tokens), which runs on into the next tile. The others multiply by
// mma.m16n8k16, the weight first, the tokens as its eight columns: ROW_WARPS of them take a stage, 16 * HEIGHT rows
// each, and KS such teams take turns along K; their sums are added in order at the end of a tile.
//
// Which column of K goes into which slot of a product is free, as long as weight and tokens agree. A lane (g, q) reads
// 16 codes at a time, columns 16 q ... + 15 of 64: word j of them is its part of product j, and the tokens' part is
// columns 4 j ... + 3 of the same 16, as they lie. Row g of a product is row `turned(g)` of eight in the tile, so that
// the eight lanes which shared memory serves at once meet different banks under the 128-byte swizzle.

namespace quantrot {

#ifndef QUANTROT_EMULATED
__device__ __forceinline__ Quad load_shared16bytes(u32 address) {
  Quad v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "r"(address)
               : "memory");
  return v;
}
#define QR_MULTIPLY(TYPE)                                                                                           \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                                                        \
      ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                                  \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                              \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <class T>
__device__ __forceinline__ void multiply16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (T::BRAIN) {
    QR_MULTIPLY("bf16");
  } else {
    QR_MULTIPLY("f16");
  }
}
#endif

// TOKENS: tiles of eight, or 0 for one token, which every lane then reads. KEEP: the tokens stay in shared memory. SPLIT:
// thread blocks of a cluster that share K, of one tile: the more rows a tile has, the fewer times the tokens are read.
// GATED: the matrix is gate over up, half of a tile's rows are of each, and y is silu(gate) * up.
//
// ADD: a residual is added to y. Of one token: NORM: it goes through RMSNorm on its way to shared memory, so many times 16
// bytes a thread. AHEAD: stages that are asked for before the kernel before this one has ended.
template <int TOKENS_, int HEIGHT_, int ROW_WARPS_, int KS_, int STAGES_, bool KEEP_, int SPLIT_, bool GATED_ = false,
          int NORM_ = 0, bool ADD_ = false, int AHEAD_ = STAGES_>
struct Decode {
  static constexpr bool GATED = GATED_, ADD = ADD_;
  static constexpr int NORM = NORM_, AHEAD = AHEAD_;
  static constexpr int SPLIT = SPLIT_;
  static constexpr int HEIGHT = HEIGHT_, ROW_WARPS = ROW_WARPS_, KS = KS_, STAGES = STAGES_;
  static constexpr bool ONE = TOKENS_ == 0, KEEP = KEEP_;
  static constexpr int TILES = ONE ? 1 : TOKENS_, COLUMNS = TILES * 8, USED = ONE ? 1 : COLUMNS;
  static constexpr int ROWS = 16 * HEIGHT * ROW_WARPS, WARPS = ROW_WARPS * KS;
  static constexpr int OUT = GATED ? ROWS / 2 : ROWS;           // of a tile, in y
  static constexpr int CODES = ROWS * 128, WIDE = USED * 256;  // bytes of a stage
  static constexpr int PITCH = ROWS + 4;                       // of a team's sums, floats: lanes meet different banks
  static constexpr int SUMS = STAGES * CODES, BARRIERS = SUMS + KS * USED * PITCH * 4;
  static constexpr int TOKENS_AT = (BARRIERS + STAGES * 16 + 1023) / 1024 * 1024;
  static constexpr int CHAINS = HEIGHT * TILES <= 2 ? 2 : 1;  // products in a row that wait for each other: 8 / CHAINS
  static_assert(SPLIT == 1 || !KEEP, "one tile reads its tokens once");
  static_assert(!NORM || (ONE && SPLIT == 1), "norm.cuh is in front of more");
  static_assert(!(GATED && ADD), "not made");
  static_assert(!NORM || KEEP, "all of the token is there before the first product");
  static_assert(STAGES % KS == 0, "a stage is always the same team's, who so never misses a phase of its barrier");
};

__device__ __forceinline__ u32 turned(u32 g) { return g >> 1 | (g & 1) << 2; }

// The group of a block of K, carried along: dividing by a number that the compiler does not know takes 20 instructions.
struct Cursor {
  int group, rest;  // and blocks of the group before this one

  __device__ __forceinline__ Cursor(int block, int group_blocks) : group(block / group_blocks), rest(block % group_blocks) {}
  __device__ __forceinline__ void advance(const Cursor& by, int group_blocks) {
    group += by.group, rest += by.rest;
    if (rest >= group_blocks) rest -= group_blocks, group++;
  }
};

// What a lane needs beside the codes, of its rows and the groups of a stage.
template <class P, class O>
struct Scales {
  static constexpr int G = O::GROUP == 1 ? 2 : 1;
  u32 scale[P::HEIGHT][2][G];  // bits: what is found of them where they are asked for, the warp waits for there
  u32 zero[P::HEIGHT][2][G];

  __device__ __forceinline__ void load(const MixedArgs& args, const int (&rows)[P::HEIGHT][2], const Cursor& cursor) {
#pragma unroll
    for (int i = 0; i < P::HEIGHT * 2 * G; i++) {
      const int m = i / (2 * G), r = i / G % 2, e = i % G;
      const int group = O::GROUP ? cursor.group + (e && cursor.rest + 1 == args.group_blocks) : 0;
      const i64 at = (i64)rows[m][r] * args.groups + min(group, args.groups - 1);
      if constexpr (O::GROUP != 0) {
        scale[m][r][e] = 0;
        if (group < args.groups) scale[m][r][e] = number_bits<typename O::S>(args.scale, at);
      }
      if constexpr (O::ZERO) zero[m][r][e] = __ldg(args.zero + at);
    }
  }
};

// One warp's sums over a tile.
template <class P, class O>
struct Decoder {
  using T = typename O::T;
  const MixedArgs& args;
  u32 codes_at, wide_at, swizzle;  // in a stage: of the lane's row and of its token
  int rows[P::HEIGHT][2];          // of the matrix, not past its end
  u32 which[2];                    // chosen_codes and chosen_upper
  float sums[P::HEIGHT][P::TILES][4];

  __device__ __forceinline__ Decoder(const MixedArgs& args, u32 row_warp) : args(args) {
    const u32 lane = lane_number(), g = lane / 4, q = lane % 4, row = turned(g);
    codes_at = (row_warp * 16 * P::HEIGHT + row) * 128 + ((q ^ row) << 4);
    wide_at = P::ONE ? q * 32 : g * 128 + ((2 * q ^ g) << 4);
    // Always these two, but not for the compiler, who copies a constant for each permutation, and without the shuffle
    // finds them again in every stage. 16 tokens take 201 instructions a stage for 232, with groups 213 for 259.
    which[0] = __shfl_sync(0xFFFFFFFFu, (int)lane + args.columns > 0 ? chosen_codes : chosen_zeros, 0);
    which[1] = __shfl_sync(0xFFFFFFFFu, (int)lane + args.columns > 0 ? chosen_upper : chosen_zeros, 0);
  }

  __device__ __forceinline__ void at(int tile, int row) {  // row: the warp's first in the tile
    const int mine = row + turned(lane_number() / 4);
#pragma unroll
    for (int m = 0; m < P::HEIGHT; m++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int inside = mine + 16 * m + 8 * r, half = args.rows / 2, up = inside >= P::OUT;
        if constexpr (P::GATED) {
          rows[m][r] = min(tile * P::OUT + inside - up * P::OUT, half - 1) + up * half;
        } else {
          rows[m][r] = min(tile * P::ROWS + inside, args.rows - 1);
        }
      }
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < P::HEIGHT * P::TILES * 4; i++) sums[i / (4 * P::TILES)][i / 4 % P::TILES][i % 4] = 0.f;
  }

  // The 16 values of a token that belong to a lane's 16 codes: half h of the stage, tile t.
  __device__ __forceinline__ Quad token(u32 wide, int h, int t, int i) const {
    if constexpr (P::ONE) return load_shared16bytes(wide + wide_at + h * 128 + i * 16);
    return load_shared16bytes(wide + h * (P::COLUMNS * 128) + t * 1024 + (wide_at ^ i << 4));
  }

  // Add a stage's columns.
  __device__ __forceinline__ void add(u32 codes, u32 wide, const Scales<P, O>& s) {
    float partial[P::CHAINS][P::HEIGHT][P::TILES][4];
    auto clear = [&](int first) {
#pragma unroll
      for (int c = first; c < P::CHAINS; c++)
#pragma unroll
        for (int i = 0; i < P::HEIGHT * P::TILES * 4; i++) partial[c][i / (4 * P::TILES)][i / 4 % P::TILES][i % 4] = 0.f;
    };
    auto promote = [&](int e) {
#pragma unroll
      for (int i = 0; i < P::HEIGHT * P::TILES * 4; i++) {
        const int m = i / (4 * P::TILES), t = i / 4 % P::TILES, v = i % 4;
        float sum = partial[0][m][t][v];
        if constexpr (P::CHAINS == 2) sum += partial[P::CHAINS - 1][m][t][v];
        if constexpr (O::GROUP != 0) {
          sums[m][t][v] = fmaf(sum, number_of<typename O::S>(s.scale[m][v / 2][e]), sums[m][t][v]);
        } else {
          sums[m][t][v] += sum;
        }
      }
    };
    clear(0);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      Quad c[P::HEIGHT][2];
#pragma unroll
      for (int m = 0; m < P::HEIGHT; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) c[m][r] = load_shared16bytes(codes + (codes_at ^ h << 6) + m * 2048 + r * 1024);
      u32 zero[P::HEIGHT][2];
      if constexpr (O::ZERO) {
#pragma unroll
        for (int m = 0; m < P::HEIGHT; m++)
#pragma unroll
          for (int r = 0; r < 2; r++)
            zero[m][r] = Widen<O::ZERO_KIND, T>::pair(s.zero[m][r][O::GROUP == 1 ? h : 0] * 0x101);
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        Quad x[P::TILES];
#pragma unroll
        for (int t = 0; t < P::TILES; t++) x[t] = token(wide, h, t, i);
#pragma unroll
        for (int j = 0; j < 2; j++) {
#pragma unroll
          for (int m = 0; m < P::HEIGHT; m++) {
            u32 a[4];
#pragma unroll
            for (int r = 0; r < 2; r++) {
              const u32 word = c[m][r].w[2 * i + j];
              if constexpr (O::KIND == E4M3) {
                a[r] = Widen<O::KIND, T>::pair(word), a[2 + r] = Widen<O::KIND, T>::upper(word);
              } else {
                a[r] = Widen<O::KIND, T>::chosen(word, which[0]), a[2 + r] = Widen<O::KIND, T>::chosen(word, which[1]);
              }
              if constexpr (O::ZERO) a[r] = subtract_pair<T>(a[r], zero[m][r]), a[2 + r] = subtract_pair<T>(a[2 + r], zero[m][r]);
            }
#pragma unroll
            for (int t = 0; t < P::TILES; t++)
              multiply16<T>(partial[j % P::CHAINS][m][t], a, x[t].w[2 * j], x[t].w[2 * j + 1]);
          }
        }
      }
      if constexpr (O::GROUP == 1) {
        promote(h);
        if (h == 0) clear(0);
      }
    }
    if constexpr (O::GROUP != 1) promote(0);
  }
};

// silu(gate) * up, as three operations on T: silu in float32.
template <class T>
__device__ __forceinline__ u32 gated_pair(u32 gate, u32 up) {
  float silu[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float x = T::value(gate >> 16 * i);
    silu[i] = quotient(x, 1.f + exp2_fast(-1.44269504f * x));
  }
  return multiply_pair<T>(T::pack(silu[0], silu[1]), up);
}

// x [depth] behind RMSNorm -> `to`, zeros behind it up to `size` numbers. By all warps that multiply; where their sums of
// squares meet, `sums`, nothing else is yet.
template <class P, class T>
__device__ __forceinline__ void normed_token(const MixedArgs& args, const void* x, int size, u32 to, u32 sums) {
  rms_norm<P::NORM, P::WARPS, T>(x, args.norm, args.depth, args.epsilon, sums, [&](int at, const Quad& y) {
    if (at < size) store_shared2(to + at * 2, y.w[0], y.w[1]), store_shared2(to + at * 2 + 8, y.w[2], y.w[3]);
  });
  named_sync(1, 32 * P::WARPS);
}

// The quads of y [tokens, rows] that this thread stores of a tile: four rows of a token each.
template <class P>
struct Quads {
  static constexpr int ACROSS = P::OUT / 4, STEP = P::SPLIT * 32 * P::WARPS;
  static constexpr int EACH = (P::USED * ACROSS + STEP - 1) / STEP;
  static_assert(32 * P::WARPS % ACROSS == 0, "the same rows of every token");
  u32 rank;  // of the thread block in its cluster

  __device__ __forceinline__ int token(int i) const { return (i * STEP + rank * 32 * P::WARPS + threadIdx.x) / ACROSS; }
  __device__ __forceinline__ static int row() { return threadIdx.x % ACROSS * 4; }  // in the tile
};

// A scale a row: those of the four rows, of both halves where GATED. They are read at the tile's start: at its end the
// whole block would wait for memory, 0.4 us of a product.
template <class P, class O>
struct RowScales {
  u32 scale[1 + P::GATED][4];

  __device__ __forceinline__ void load(const MixedArgs& args, int tile) {
    const int rows = P::GATED ? args.rows / 2 : args.rows;  // of y
    if constexpr (O::GROUP == 0) {
#pragma unroll
      for (int i = 0; i < (1 + P::GATED) * 4; i++) {
        const int row = i / 4 * rows + min(tile * P::OUT + Quads<P>::row(), rows - 4) + i % 4;
        scale[i / 4][i % 4] = number_bits<typename O::S>(args.scale, row);
      }
    }
  }
};

// A residual's numbers, read at the tile's start too.
template <class P>
struct Addends {
  uint2 pairs[Quads<P>::EACH];

  __device__ __forceinline__ void load(const MixedArgs& args, int tile, const Quads<P>& quads) {
    if constexpr (P::ADD) {
#pragma unroll
      for (int i = 0; i < Quads<P>::EACH; i++) {
        const int token = quads.token(i), at = tile * P::OUT + quads.row();
        pairs[i] = uint2{0, 0};
        if (token < min(P::USED, args.columns) && at < args.rows)
          pairs[i] = *(const uint2*)((const unsigned short*)args.residual + (i64)token * args.rows + at);
      }
    }
  }
};

// The teams' sums of a tile, of each part of K in the order of the teams -> y.
template <class P, class O>
__device__ __forceinline__ void store_teams(const MixedArgs& args, int tile, u32 sums, const Quads<P>& quads,
                                            const RowScales<P, O>& s, const Addends<P>& addends) {
  const int rows = P::GATED ? args.rows / 2 : args.rows;  // of y
#pragma unroll
  for (int i = 0; i < Quads<P>::EACH; i++) {
    const int token = quads.token(i), first = quads.row(), at = tile * P::OUT + first;  // rows are a multiple of eight
    if (token >= min(P::USED, args.columns) || at >= rows) continue;
    auto total = [&](int r, int row, const u32 (&scales)[4], u32 (&out)[2]) {  // of four rows: r in the tile, `row` in all
      float sum[4];
#pragma unroll
      for (int s = 0; s < P::SPLIT * P::KS; s++) {
        const u32 from = sums + ((s % P::KS * P::USED + token) * P::PITCH + r) * 4;
        float4 part;
        if constexpr (P::SPLIT > 1) {
          part = load_cluster4(in_block(from, s / P::KS));
        } else {
          const float2 lo = load_shared2(from), hi = load_shared2(from + 8);
          part = {lo.x, lo.y, hi.x, hi.y};
        }
        sum[0] = s ? sum[0] + part.x : part.x, sum[1] = s ? sum[1] + part.y : part.y;
        sum[2] = s ? sum[2] + part.z : part.z, sum[3] = s ? sum[3] + part.w : part.w;
      }
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float scale = O::GROUP ? 1.f : number_of<typename O::S>(scales[j]);
        sum[j] = finished<O>(sum[j], scale, number<typename O::B>(args.bias, row + j));
      }
      out[0] = O::T::pack(sum[0], sum[1]), out[1] = O::T::pack(sum[2], sum[3]);
    };
    u32 out[2], up[2];
    total(first, at, s.scale[0], out);
    if constexpr (P::GATED) {
      total(first + P::OUT, at + rows, s.scale[1], up);
      out[0] = gated_pair<typename O::T>(out[0], up[0]), out[1] = gated_pair<typename O::T>(out[1], up[1]);
    }
    if constexpr (P::ADD) {
      out[0] = add_pair<typename O::T>(out[0], addends.pairs[i].x);
      out[1] = add_pair<typename O::T>(out[1], addends.pairs[i].y);
    }
    u32* y = (u32*)((unsigned short*)args.y + (i64)token * rows + at);
    y[0] = out[0], y[1] = out[1];
  }
}

// With args.early the first stages' codes are loaded, and scales read, before the kernel before this one has ended.
template <class P, class O>
__device__ __forceinline__ void decode(const TensorMap* codes, const TensorMap* wide, const MixedArgs& args) {
  static_assert(O::WEIGHT, "few tokens by a narrow weight");
  const u32 base = shared_memory(), sums = base + P::SUMS, full = base + P::BARRIERS, empty = full + P::STAGES * 8;
  const u32 tokens = base + P::TOKENS_AT, warp = warp_number(), rank = P::SPLIT > 1 ? cluster_rank() : 0;
  const int tiles = parts_of(P::GATED ? args.rows / 2 : args.rows, P::OUT), first = blockIdx.x / P::SPLIT, step = gridDim.x / P::SPLIT;
  const int chunks = args.segment, first_chunk = rank * chunks;  // past the end, zeros from the copy engine
  if (warp == P::WARPS && lane_number() == 0) tensor_prefetch(codes), tensor_prefetch(wide);
  ring_init<P::STAGES, P::WARPS + 1>(warp, full, empty, 1, P::ROW_WARPS);
  block_sync();
  if (!args.early) grid_wait();
  Ring<P::STAGES> ring;
  auto skip = [&](u32 count) {  // at most STAGES
    ring.stage += count;
    if (ring.stage >= P::STAGES) ring.stage -= P::STAGES, ring.parity ^= 1;
  };
  if (warp == P::WARPS) {
    const u64 keep = cache_policy<LAST>(), stream = cache_policy<FIRST>();
    auto load_codes = [&](int tile, int c, u32 stage, bool fetch) {
      barrier_expect(full + stage * 8, P::CODES + (fetch ? args.box * 256 : 0));
      const u32 to = base + stage * P::CODES, bar = full + stage * 8;
      const int column = (first_chunk + c) * 128;
      tensor_load(to, codes, column, tile * P::OUT, bar, stream);
      if constexpr (P::GATED) tensor_load(to + P::CODES / 2, codes, column, args.rows / 2 + tile * P::OUT, bar, stream);
    };
    auto load_tokens = [&](int c, u32 stage) {
      const u32 bar = full + stage * 8, to = tokens + (P::KEEP ? c : stage) * P::WIDE;
      const int column = (first_chunk + c) * 128;
      tensor_load(to, wide, column, 0, bar, keep);
      if constexpr (!P::ONE) tensor_load(to + P::WIDE / 2, wide, column + 64, 0, bar, keep);
    };
    const int ahead = first < tiles ? min(chunks, P::AHEAD) : 0;
    for (int c = 0; c < ahead; c++) load_codes(first, c, c, !P::NORM);
    if (args.early) grid_wait();
    if constexpr (!P::NORM) {
      for (int c = 0; c < ahead; c++) load_tokens(c, c);
    }
    skip(ahead);
    for (int tile = first; tile < tiles; tile += step) {
      const bool fetch = !P::NORM && (!P::KEEP || tile == first);
      for (int c = tile == first ? ahead : 0; c < chunks; c++, ring.next()) {
        barrier_wait(empty + ring.stage * 8, ring.parity ^ 1);
        load_codes(tile, c, ring.stage, fetch);
        if (fetch) load_tokens(c, ring.stage);
      }
    }
    if constexpr (P::SPLIT > 1) cluster_sync();
  } else {
    const u32 team = warp / P::ROW_WARPS, row_warp = warp % P::ROW_WARPS, lane = lane_number();
    skip(team);
    Decoder<P, O> decoder(args, row_warp);
    const Cursor begins(2 * (first_chunk + team), args.group_blocks), each(2 * P::KS, args.group_blocks);
    Cursor cursor = begins;
    Scales<P, O> scales[2];
    auto begin = [&](int tile) {  // scales of the first two stages; later, those before a stage's come with it
      decoder.at(tile, row_warp * 16 * P::HEIGHT);
      cursor = begins;
      scales[0].load(args, decoder.rows, cursor);
      if (O::GROUP) cursor.advance(each, args.group_blocks), scales[1].load(args, decoder.rows, cursor);
    };
    const Quads<P> quads{rank};
    Addends<P> addends;
    RowScales<P, O> row_scales;
    if (first < tiles) begin(first), row_scales.load(args, first);
    if constexpr (P::NORM > 0) normed_token<P, typename O::T>(args, args.token, chunks * 128, tokens, sums);
    if constexpr (P::ADD) grid_wait();
    addends.load(args, first, quads);
    for (int tile = first; tile < tiles; tile += step) {
      decoder.clear();
      auto take = [&](int c, Scales<P, O>& its) {
        barrier_wait(full + ring.stage * 8, ring.parity);
        decoder.add(base + ring.stage * P::CODES, tokens + (P::KEEP ? c : ring.stage) * P::WIDE, its);
        fence_async();  // or the arrival may overtake the last loads on their way, and the next copy land under them
        warp_sync();
        if (lane == 0) barrier_arrive(empty + ring.stage * 8);
        skip(P::KS);
        if (O::GROUP) cursor.advance(each, args.group_blocks), its.load(args, decoder.rows, cursor);
      };
      for (int c = team; c < chunks; c += 2 * P::KS) {
        take(c, scales[0]);
        if (c + P::KS >= chunks) break;
        take(c + P::KS, scales[O::GROUP ? 1 : 0]);
      }
      if (tile + step < tiles) begin(tile + step);  // on their way while the sums are added
#pragma unroll
      for (int i = 0; i < P::HEIGHT * P::TILES * 4; i++) {
        const int m = i / (4 * P::TILES), t = i / 4 % P::TILES, v = i % 4;
        const u32 token = t * 8 + lane % 4 * 2 + v % 2;
        const u32 at = row_warp * 16 * P::HEIGHT + m * 16 + v / 2 * 8 + turned(lane / 4);
        if (token < P::USED) store_shared(sums + ((team * P::USED + token) * P::PITCH + at) * 4, decoder.sums[m][t][v]);
      }
      if constexpr (P::SPLIT > 1) {
        cluster_sync();
      } else {
        named_sync(1, 32 * P::WARPS);
      }
      store_teams<P, O>(args, tile, sums, quads, row_scales, addends);
      if (tile + step < tiles) row_scales.load(args, tile + step), addends.load(args, tile + step, quads);
      if (tile + step < tiles) named_sync(1, 32 * P::WARPS);
    }
  }
  if constexpr (P::SPLIT > 1) cluster_sync();  // a block that ended could still be read
}

}  // namespace quantrot
