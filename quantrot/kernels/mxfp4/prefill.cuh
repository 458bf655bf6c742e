// Many tokens by a packed weight: prefill and parts of kernels/mixed, whose codes are MXFP4's.
//
//   Sixteen  bfloat16 tokens: 32 bytes of a row of codes are a block of 64 columns
//   Eight    e4m3 tokens: 64 bytes are a block of 128 columns, which count in pairs

namespace quantrot {

// --- The loop --------------------------------------------------------------------------------------------------------

// Multiplier of multiply.cuh, product by product, for a Self that knows its codes:
//
//   load(j, tile)   number j of a block's four products: what lies in the tile, into codes[j % 2] and what is beside it
//   widen(j)        that, into a[j]
//   product(d, j, b, add)
//   enter()         what is loaded and widened from here on is of the next block; calls `find`
template <class P, class Word, class Self>
struct PackedLoop {
  const MixedArgs& args;
  Lane lane;
  u32 base, full, empty, rank, previous = 0;
  Ring<P::STAGES> ring;
  u32 codes[2][4], a[4][4];  // [2 h + r] is of row r of the lane, half h of the product's columns
  const Word* scale[2];      // the scale bytes of each row, a word a block
  u32 coming[2];             // the next block's
  int next;                  // number of the block after that

  __device__ __forceinline__ PackedLoop(const MixedArgs& args, u32 group, u32 base, u32 full, u32 empty, u32 rank)
      : args(args), lane(group), base(base), full(full), empty(empty), rank(rank) {}
  __device__ __forceinline__ Self& self() { return *static_cast<Self*>(this); }

  __device__ __forceinline__ void find() {  // past the last block there are zeros, times what scale there is
#pragma unroll
    for (int r = 0; r < 2; r++) coming[r] = __ldg(scale[r] + min(next, args.group_blocks - 1));
    next++;
  }
  template <int COUNT>
  __device__ __forceinline__ void multiply(float (&d)[P::W], int j, u32 tile, bool add) {
    product_fence();
#pragma unroll
    for (int i = 0; i < COUNT; i++) self().product(d, j + i, operand(tile + P::CODES, j + i), add || i > 0);
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
      self().load(2, tile), self().load(3, tile);
      product_wait<1>();
      leave(begun);
      self().widen(2), self().widen(3);
      multiply<2>(d, 2, tile, true);
    } else {
      multiply<1>(d, 0, tile, begun);
      self().load(3, tile);
      product_wait<2>();
      self().widen(2);
      multiply<1>(d, 1, tile, true);
      product_wait<2>();
      leave(begun);
      self().widen(3);
      multiply<1>(d, 2, tile, true);
    }
    if constexpr (!LAST) {
      const u32 after = base + ring.stage * P::STAGE;
      self().enter();
      barrier_wait(full + ring.stage * 8, ring.parity);
      self().load(0, after), self().load(1, after);
      product_wait<P::HALVES ? 1 : 2>();
      self().widen(0);
      if constexpr (P::HALVES) self().widen(1);
      if constexpr (!P::HALVES) {
        multiply<1>(d, 3, tile, true);
        self().load(2, after);
        product_wait<2>();
        self().widen(1);
      }
    } else {
      if constexpr (!P::HALVES) multiply<1>(d, 3, tile, true);
      product_wait<0>();
      product_done(d);
      hand_back<P>(empty + previous * 8, rank);
    }
  }

  // bytes: all scale bytes.
  __device__ __forceinline__ void loop(float (&sum)[P::W], int first, int count, const void* bytes) {
#pragma unroll
    for (int r = 0; r < 2; r++) scale[r] = (const Word*)bytes + (i64)lane.rows[r] * args.group_blocks;
    next = first;
    find();
    self().enter();
    const u32 tile = base + ring.stage * P::STAGE;
    barrier_wait(full + ring.stage * 8, ring.parity);
#pragma unroll
    for (int j = 0; j < 2; j++) self().load(j, tile), self().widen(j);
    if constexpr (!P::HALVES) self().load(2, tile);
    for (int k = 0; k + 1 < count; k++) block<false>(sum, k > 0);
    block<true>(sum, count > 1);
  }
};

// --- bfloat16 tokens -------------------------------------------------------------------------------------------------

template <int GROUPS_, int COLUMNS_, int STAGES_, int SPLIT_, int SHARE_, bool ODD_, bool HALVES_, int TEAMS_ = 1>
struct PackedTile : Tile<GROUPS_, COLUMNS_, STAGES_, SPLIT_, SHARE_, ODD_, HALVES_, TEAMS_> {
  static constexpr int LINE = 32, CODES = 64 * GROUPS_ * LINE, STAGE = CODES + COLUMNS_ * 128;
};

struct SixteenOperands {
  static constexpr int GROUP = 1, STEP = 1;  // scaled when it comes to the end
  static constexpr bool WEIGHT = true;
  using T = Bf16;
  using S = None;
  using B = None;
};

// A code in bfloat16's bits, sign, low exponent bits and first bit of the mantissa, is the number times 2^-126; that times
// 2^(62 + scale byte) is exact, 2^-64 of the weight's value, and the sums are multiplied by 2^64 at the end. A group's scale past
// 2^65 acts as infinity, a value below 2^-62 as zero.
template <class P>
struct Sixteen : PackedLoop<P, unsigned short, Sixteen<P>> {
  using Loop = PackedLoop<P, unsigned short, Sixteen<P>>;
  u32 from, factor[2][2];  // of each half of a block and row

  __device__ __forceinline__ Sixteen(const MixedArgs& args, u32 group, u32 base, u32 full, u32 empty, u32 rank)
      : Loop(args, group, base, full, empty, rank) {
    const u32 row = group * 64 + warp_number() % 4 * 16 + lane_number() / 4;
    from = row * 32 + row / 4 % 2 * 16 + lane_number() % 4;  // unit u of row r lies at u ^ (r / 4 % 2)
  }
  __device__ __forceinline__ void enter() {
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int h = 0; h < 2; h++) factor[h][r] = (min(this->coming[r] >> 8 * h & 255, 193u) + 62) * 0x00800080u;
    this->find();
  }
  __device__ __forceinline__ void load(int j, u32 tile) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      this->codes[j % 2][i] = load_shared_u8(tile + (from ^ j / 2 * 16) + j % 2 * 8 + i / 2 * 4 + i % 2 * 256);
  }
  __device__ __forceinline__ void widen(int j) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 two = (this->codes[j % 2][i] * 0x1001 & 0x000F000F) * 0x1040 & 0x81C081C0;
      this->a[j][i] = multiply_pair<Bf16>(two, factor[j / 2][i % 2]);
    }
  }
  __device__ __forceinline__ void product(float (&d)[P::W], int j, u64 b, bool add) {
    product16<Bf16>(d, this->a[j], b, add);
  }
  __device__ __forceinline__ void run(float (&sum)[P::W], int first, int count) {
    this->loop(sum, first, count, this->args.scale);
#pragma unroll
    for (int i = 0; i < P::W; i++) sum[i] *= 0x1p64f;
  }
};

template <class P>
struct Chosen<P, SixteenOperands, false> {
  using Type = Sixteen<P>;
};

// --- e4m3 tokens -----------------------------------------------------------------------------------------------------

struct EightOperands {
  static constexpr int GROUP = 0, STEP = 1;
  static constexpr bool WEIGHT = true;
  using T = Bf16;
  using S = Fp32;
  using B = None;
};

// A group's eight magnitudes in e4m3, relative to its row's scale, are eight bytes of a table (MAGNITUDES, made by
// hopper_prefill.py), from which four codes pick theirs by one permutation of bytes. The bits are those of `expand`.
//
// args.scale: a power of two a row; args.zero: the groups' scale bytes; args.token: a scale a token, float32.
template <class P>
struct Eight : PackedLoop<P, u32, Eight<P>> {
  using Loop = PackedLoop<P, u32, Eight<P>>;
  u32 table, bytes[2];      // a block's scales of each row
  int least[2];             // byte of each row's group for which the table begins
  float2 magnitudes[2][2];  // of a product's group and row

  __device__ __forceinline__ Eight(const MixedArgs& args, u32 group, u32 base, u32 full, u32 empty, u32 rank)
      : Loop(args, group, base, full, empty, rank), table(empty + P::STAGES * 8) {
    const u32 i = threadIdx.x;
    if (i < LENGTH) store_shared2(table + i * 8, MAGNITUDES[i][0], MAGNITUDES[i][1]);
    named_sync(3, 128 * P::GROUPS);
  }
  __device__ __forceinline__ void enter() {
    bytes[0] = this->coming[0], bytes[1] = this->coming[1];
    this->find();
  }
  __device__ __forceinline__ void load(int j, u32 tile) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      this->codes[j % 2][i] = load_shared_u16(tile + this->lane.offsets[j] + i % 2 * 512 + i / 2 * 8);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int byte = bytes[r] >> 8 * j & 255;
      magnitudes[j % 2][r] = load_shared2(table + min(max(byte - least[r], 0), LENGTH - 1) * 8);
    }
  }
  __device__ __forceinline__ void widen(int j) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 m = magnitudes[j % 2][i % 2];
      const u32 four = this->codes[j % 2][i];
      const u32 signs = pick_bytes(0x80808080u, 0x80808080u, four) << 7 & 0x80808080u;  // 0xFF of negative codes
      this->a[j][i] = pick_bytes(__float_as_uint(m.x), __float_as_uint(m.y), four & 0x7777u) | signs;
    }
  }
  __device__ __forceinline__ void product(float (&d)[P::W], int j, u64 b, bool add) {
    quantrot::product(d, this->a[j], b, add);
  }
  __device__ __forceinline__ void run(float (&sum)[P::W], int first, int count) {
    const MixedArgs& args = this->args;
#pragma unroll
    for (int r = 0; r < 2; r++)
      least[r] = (int)(__float_as_uint(number<Fp32>(args.scale, this->lane.rows[r])) >> 23) - SHIFTS;
    this->loop(sum, first, count, args.zero);
    const int column = this->lane.column + (int)lane_number() % 4 * 2;
#pragma unroll
    for (int j = 0; j < P::W / 4; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float token = number<Fp32>(args.token, min(column + j * 8 + e, args.columns - 1));
        sum[4 * j + e] *= token, sum[4 * j + 2 + e] *= token;
      }
  }
};

template <class P>
struct Chosen<P, EightOperands, false> {
  using Type = Eight<P>;
};

}  // namespace quantrot
