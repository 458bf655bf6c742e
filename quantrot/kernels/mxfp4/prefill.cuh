// Bfloat16 tokens by a packed weight: prefill and parts of kernels/mixed, whose codes are MXFP4's, 32 bytes of a row a
// block of 64 columns. After scales.cuh.

namespace quantrot {

template <int GROUPS_, int COLUMNS_, int STAGES_, int SPLIT_, int SHARE_, bool ODD_, bool HALVES_, int TEAMS_ = 1,
          int BLOCKS_ = 1>
struct PackedTile : Tile<GROUPS_, COLUMNS_, STAGES_, SPLIT_, SHARE_, ODD_, HALVES_, TEAMS_, BLOCKS_> {
  static constexpr int LINE = 32, CODES = BLOCKS_ * 64 * GROUPS_ * LINE, STAGE = CODES + BLOCKS_ * COLUMNS_ * 128;
};

struct PackedOperands {
  static constexpr int GROUP = 1, STEP = 1;  // scaled when it comes to the end
  static constexpr bool WEIGHT = true;
  using T = Bf16;
  using S = None;
  using B = None;
};

// Multiplier of multiply.cuh, product by product:
//
//   enter()         what is loaded and widened from here on is of the next block
//   load(j, tile)   number j of a block's four products: what lies in the tile, into codes[j % 2]
//   widen(j)        that, into a[j]
//
// A code in bfloat16's bits, sign, low exponent bits and first bit of the mantissa, is the number times 2^-126; that times
// 2^(62 + scale byte) is exact, 2^-64 of the weight's value, and the sums are multiplied by 2^64 at the end. A group's scale past
// 2^65 acts as infinity, a value below 2^-62 as zero.
template <class P>
struct Packed {
  const MixedArgs& args;
  Lane lane;
  u32 base, full, empty, rank, previous = 0;
  Ring<P::STAGES> ring;
  u32 codes[2][4], a[4][4];        // [2 h + r] is of row r of the lane, half h of the product's columns
  const unsigned short* scale[2];  // the scale bytes of each row, two a block
  u32 coming[2];                   // the next block's
  int next;                        // number of the block after that
  u32 from, factor[2][2];          // of each half of a block and row

  __device__ __forceinline__ Packed(const MixedArgs& args, u32 group, u32 base, u32 full, u32 empty, u32 rank)
      : args(args), lane(group), base(base), full(full), empty(empty), rank(rank) {
    const u32 row = group * 64 + warp_number() % 4 * 16 + lane_number() / 4;
    from = row * 32 + row / 4 % 2 * 16 + lane_number() % 4;  // unit u of row r lies at u ^ (r / 4 % 2)
  }

  __device__ __forceinline__ void find() {  // past the last block there are zeros, times what scale there is
#pragma unroll
    for (int r = 0; r < 2; r++) coming[r] = __ldg(scale[r] + min(next, args.group_blocks - 1));
    next++;
  }
  __device__ __forceinline__ void enter() {
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int h = 0; h < 2; h++) factor[h][r] = (min(coming[r] >> 8 * h & 255, 193u) + 62) * 0x00800080u;
    find();
  }
  __device__ __forceinline__ void load(int j, u32 tile) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      codes[j % 2][i] = load_shared_u8(tile + (from ^ j / 2 * 16) + j % 2 * 8 + i / 2 * 4 + i % 2 * 256);
  }
  __device__ __forceinline__ void widen(int j) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 two = (codes[j % 2][i] * 0x1001 & 0x000F000F) * 0x1040 & 0x81C081C0;
      a[j][i] = multiply_pair<Bf16>(two, factor[j / 2][i % 2]);
    }
  }
  __device__ __forceinline__ void product(float (&d)[P::W], int j, u64 b, bool add) {
    product16<Bf16>(d, a[j], b, add);
  }
  template <int COUNT>
  __device__ __forceinline__ void multiply(float (&d)[P::W], int j, u32 tile, bool add) {
    product_fence();
#pragma unroll
    for (int i = 0; i < COUNT; i++) product(d, j + i, operand(tile + P::CODES, j + i), add || i > 0);
    product_commit();
  }
  __device__ __forceinline__ void leave(bool begun) {  // the products of the block before have read their stage
    if (begun) hand_back<P>(empty + previous * 8, rank);
    previous = ring.stage;
    ring.next();
  }

  template <bool LAST>
  __device__ __forceinline__ void block(float (&d)[P::W], bool begun) {
    const u32 tile = base + ring.stage * P::STAGE;
    if constexpr (P::HALVES) {
      multiply<2>(d, 0, tile, begun);
      load(2, tile), load(3, tile);
      product_wait<1>();
      leave(begun);
      widen(2), widen(3);
      multiply<2>(d, 2, tile, true);
    } else {
      multiply<1>(d, 0, tile, begun);
      load(3, tile);
      product_wait<2>();
      widen(2);
      multiply<1>(d, 1, tile, true);
      product_wait<2>();
      leave(begun);
      widen(3);
      multiply<1>(d, 2, tile, true);
    }
    if constexpr (!LAST) {
      const u32 after = base + ring.stage * P::STAGE;
      enter();
      barrier_wait(full + ring.stage * 8, ring.parity);
      load(0, after), load(1, after);
      product_wait<P::HALVES ? 1 : 2>();
      widen(0);
      if constexpr (P::HALVES) widen(1);
      if constexpr (!P::HALVES) {
        multiply<1>(d, 3, tile, true);
        load(2, after);
        product_wait<2>();
        widen(1);
      }
    } else {
      if constexpr (!P::HALVES) multiply<1>(d, 3, tile, true);
      product_wait<0>();
      product_done(d);
      hand_back<P>(empty + previous * 8, rank);
    }
  }

  __device__ __forceinline__ void run(float (&sum)[P::W], int first, int count) {
#pragma unroll
    for (int r = 0; r < 2; r++) scale[r] = (const unsigned short*)args.scale + (i64)lane.rows[r] * args.group_blocks;
    next = first;
    find();
    enter();
    const u32 tile = base + ring.stage * P::STAGE;
    barrier_wait(full + ring.stage * 8, ring.parity);
#pragma unroll
    for (int j = 0; j < 2; j++) load(j, tile), widen(j);
    if constexpr (!P::HALVES) load(2, tile);
    for (int k = 0; k + 1 < count; k++) block<false>(sum, k > 0);
    block<true>(sum, count > 1);
#pragma unroll
    for (int i = 0; i < P::W; i++) sum[i] *= 0x1p64f;
  }
};

// Four scale bytes, as Packed's factors begin.
__device__ __forceinline__ u32 raised_scales(u32 bytes) {
  u32 raised = 0;
#pragma unroll
  for (int i = 0; i < 32; i += 8) raised |= min(bytes >> i & 255, 193u) + 62 << i;
  return raised;
}

// The same for some tens of tokens, by stages of two or four blocks: scale bytes come first, and the lane keeps operands of
// four products and codes of two, which leaves room for four warpgroups (64 tokens by 4096 x 14336 20.3 us, by Packed 39.7).
template <class P>
struct PackedDeep {
  static constexpr int PAIRS = P::BLOCKS / 2, LINE = 32 * P::BLOCKS;  // of blocks; bytes of a row of codes
  static constexpr u32 SCALES_AT = P::TEAMS * (P::STAGES * (P::STAGE + 16) + P::GROUPS * (256 * P::W / P::TEAMS + 8));  // after parts'
  const MixedArgs& args;
  Lane lane;
  u32 base, full, empty, rank;
  Ring<P::STAGES> ring;
  u32 from;            // the lane's first code in a tile
  u32 codes[2][2][4];  // of two products each: [2 h + r]
  u32 a[2][2][4];

  __device__ __forceinline__ PackedDeep(const MixedArgs& args, u32 group, u32 base, u32 full, u32 empty, u32 rank)
      : args(args), lane(group), base(base), full(full), empty(empty), rank(rank) {
    const u32 row = group * 64 + warp_number() % 4 * 16 + lane_number() / 4;
    from = (PAIRS == 1 ? swizzled64(row, 0) : swizzled(row, 0)) + lane_number() % 4;
  }

  __device__ __forceinline__ void load(int u, u32 tile) {  // of products 2 u and 2 u + 1
#pragma unroll
    for (int s = 0; s < 2; s++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        codes[u % 2][s][i] = load_shared_u8(tile + (from ^ u * 16) + s * 8 + i / 2 * 4 + i % 2 * (8 * LINE));
  }
  __device__ __forceinline__ void widen(int u, const u32 (&bytes)[2]) {
    u32 factor[2];
#pragma unroll
    for (int r = 0; r < 2; r++) factor[r] = (bytes[r] >> 8 * u & 255) * 0x00800080u;
#pragma unroll
    for (int s = 0; s < 2; s++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const u32 two = (codes[u % 2][s][i] * 0x1001 & 0x000F000F) * 0x1040 & 0x81C081C0;
        a[u % 2][s][i] = multiply_pair<Bf16>(two, factor[i % 2]);
      }
  }

  __device__ __forceinline__ void come() {  // the next stage
    barrier_wait(full + ring.stage * 8, ring.parity);
    load(0, base + ring.stage * P::STAGE);
  }

  __device__ __forceinline__ void run(float (&sum)[P::W], int first, int blocks) {
    const int count = blocks / 2, unit = blockIdx.x / P::SPLIT, tiles = parts_of(args.columns, P::COLUMNS);
    const int row = start_of(unit / tiles * P::ROWS, args.rows, P::ROWS) + warp_number() % (P::GROUPS * 4) * 16;
    const u32 pitch = scales_pitch(args.segment / 2);
    const u32 scales = take_scales(args, shared_memory() + SCALES_AT, pitch, row, first / 2, count, raised_scales);
    come();
    for (int k = 0; k < count; k += PAIRS) {
      const u32 tile = base + ring.stage * P::STAGE, before = empty + (ring.stage ? ring.stage - 1 : P::STAGES - 1) * 8;
#pragma unroll
      for (int pair = 0; pair < PAIRS; pair++) {
        const u32 bytes[2] = {load_shared1(scales + (k + pair) * 4), load_shared1(scales + 8 * pitch + (k + pair) * 4)};
#pragma unroll
        for (int u = 0; u < 4; u++) {
          const u32 wide = tile + P::CODES + (pair * 2 + u / 2) * (P::COLUMNS * 128);
          const bool begun = k > 0 || pair > 0 || u > 0;
          if (pair * 4 + u + 1 < PAIRS * 4) load(pair * 4 + u + 1, tile);
          product_wait<1>();  // the operands before the last may be overwritten
          if (pair == 0 && u == 1 && k > 0) hand_back<P>(before, rank);
          widen(u, bytes);
          product_fence();
#pragma unroll
          for (int s = 0; s < 2; s++) product16<Bf16>(sum, a[u % 2][s], operand(wide, u % 2 * 2 + s), begun || s > 0);
          product_commit();
        }
      }
      ring.next();
      if (k + PAIRS < count) come();
    }
    product_wait<0>();
    product_done(sum);
#pragma unroll
    for (int i = 0; i < P::W; i++) sum[i] *= 0x1p64f;
  }
};

template <class P, bool DEEP>
struct PackedBy {
  using Type = Packed<P>;
};
template <class P>
struct PackedBy<P, true> {
  using Type = PackedDeep<P>;
};
template <class P>
struct Chosen<P, PackedOperands, ALIKE> {
  using Type = typename PackedBy<P, (P::BLOCKS > 1)>::Type;
};
template <class P>
struct Chosen<P, PackedOperands, PATIENT> {
  using Type = PackedDeep<P>;
};

}  // namespace quantrot
