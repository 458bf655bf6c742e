// Many tokens by a packed weight, bfloat16: prefill and parts of kernels/mixed, whose codes are MXFP4's.
//
// 32 bytes of a row are 64 columns, with a scale byte for each half. A code in bfloat16's bits, sign, low exponent bits and
// first bit of the mantissa, is the number times 2^-126; that times 2^(62 + scale byte) is exact, 2^-64 of the weight's value,
// and the sums are multiplied by 2^64 at the end. A group's scale past 2^65 acts as infinity, a value below 2^-62 as zero.

namespace quantrot {

template <int GROUPS_, int COLUMNS_, int STAGES_, int SPLIT_, int SHARE_, bool ODD_, bool HALVES_, int TEAMS_ = 1>
struct PackedTile : Tile<GROUPS_, COLUMNS_, STAGES_, SPLIT_, SHARE_, ODD_, HALVES_, TEAMS_> {
  static constexpr int LINE = 32, CODES = 64 * GROUPS_ * LINE, STAGE = CODES + COLUMNS_ * 128;
};

struct PackedOperands {
  static constexpr int GROUP = 1, STEP = 1;  // scaled when it comes to the end
  static constexpr bool WEIGHT = true;
  using T = Bf16;
  using S = None;
  using B = None;
};

// Two neighbours, a byte, times a factor twice.
__device__ __forceinline__ u32 neighbours(u32 codes, u32 factor) {
  return multiply_pair<Bf16>((codes * 0x1001 & 0x000F000F) * 0x1040 & 0x81C081C0, factor);
}

// See Multiplier of multiply.cuh, which this follows product by product.
template <class P>
struct PackedMultiplier {
  const MixedArgs& args;
  Lane lane;
  u32 from, base, full, empty, rank, previous = 0;
  Ring<P::STAGES> ring;
  u32 codes[2][4], a[4][4];  // of 16 columns each: [2 h + r] is the row r of the lane, columns 8 h + 2 q and the next
  u32 factor[2][2], coming[2];  // of each half of a block and row; the next block's scale bytes of each row
  const unsigned short* scale[2];
  int next;  // number of the block whose scales come

  __device__ __forceinline__ PackedMultiplier(const MixedArgs& args, u32 group, u32 base, u32 full, u32 empty, u32 rank)
      : args(args), lane(group), base(base), full(full), empty(empty), rank(rank) {
    const u32 row = group * 64 + warp_number() % 4 * 16 + lane_number() / 4;
    from = row * 32 + row / 4 % 2 * 16 + lane_number() % 4;  // unit u of row r lies at u ^ (r / 4 % 2)
  }

  __device__ __forceinline__ void find() {
#pragma unroll
    for (int r = 0; r < 2; r++) coming[r] = __ldg(scale[r] + min(next, args.group_blocks - 1));
    next++;
  }
  __device__ __forceinline__ void enter() {  // what is widened from here on is of the next block
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int h = 0; h < 2; h++) factor[h][r] = (min(coming[r] >> 8 * h & 255, 193u) + 62) * 0x00800080u;
    find();
  }

  // Number j of a block's four products; its codes in codes[j % 2], widened in a[j].
  __device__ __forceinline__ void load(int j, u32 tile) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      codes[j % 2][i] = load_shared_u8(tile + (from ^ j / 2 * 16) + j % 2 * 8 + i / 2 * 4 + i % 2 * 256);
  }
  __device__ __forceinline__ void widen(int j) {
#pragma unroll
    for (int i = 0; i < 4; i++) a[j][i] = neighbours(codes[j % 2][i], factor[j / 2][i % 2]);
  }
  __device__ __forceinline__ void multiply(float (&d)[P::W], int j, u32 tile, bool add) {
    product16<Bf16>(d, a[j], operand(tile + P::CODES, j), add);
  }
  __device__ __forceinline__ void multiply1(float (&d)[P::W], int j, u32 tile, bool add) {
    product_fence();
    multiply(d, j, tile, add);
    product_commit();
  }
  __device__ __forceinline__ void multiply2(float (&d)[P::W], int j, u32 tile, bool add) {
    product_fence();
    multiply(d, j, tile, add), multiply(d, j + 1, tile, true);
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
      multiply2(d, 0, tile, begun);
      load(2, tile), load(3, tile);
      product_wait<1>();
      leave(begun);
      widen(2), widen(3);
      multiply2(d, 2, tile, true);
    } else {
      multiply1(d, 0, tile, begun);
      load(3, tile);
      product_wait<2>();
      widen(2);
      multiply1(d, 1, tile, true);
      product_wait<2>();
      leave(begun);
      widen(3);
      multiply1(d, 2, tile, true);
    }
    if constexpr (!LAST) {
      const u32 after = base + ring.stage * P::STAGE;
      barrier_wait(full + ring.stage * 8, ring.parity);
      load(0, after), load(1, after);
      enter();
      product_wait<P::HALVES ? 1 : 2>();
      widen(0);
      if constexpr (P::HALVES) widen(1);
      if constexpr (!P::HALVES) {
        multiply1(d, 3, tile, true);
        load(2, after);
        product_wait<2>();
        widen(1);
      }
    } else {
      if constexpr (!P::HALVES) multiply1(d, 3, tile, true);
      product_wait<0>();
      product_done(d);
      hand_back<P>(empty + previous * 8, rank);
    }
  }

  // Past the last block there are zeros, times what scale there is.
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

template <class P>
struct Chosen<P, PackedOperands, false> {
  using Type = PackedMultiplier<P>;
};

}  // namespace quantrot
