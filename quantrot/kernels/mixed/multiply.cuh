// What mixed-input products for sm_90a are made of: codes [rows, depth] in 8 bits by a wide matrix [columns, depth] in 16;
// the sums are turned into y [columns, rows] where the codes are the weight (WEIGHT), y [rows, columns] where they are
// activations.
//
// The tensor core multiplies equal types and takes its first operand from registers, so the codes come to shared memory
// as they are, a lane reads those of its part of the operand two by two (they are neighbours in a row), widens them
// (`Widen`, from conversions.py) and multiplies; the wide operand goes from shared memory straight into the tensor core.
// All of K is summed in the tensor core's registers (see Multiplier), GROUP = 1, 2 blocks of 64 columns at a time if
// scales belong to groups of columns.

namespace quantrot {

struct MixedArgs {
  const void* scale;          // [rows, groups]
  const unsigned char* zero;  // [rows, groups], or null
  const void* bias;           // [rows] (WEIGHT) or [columns], or null
  void* y;
  int rows, columns, depth;
  int groups, group_blocks;  // scales a row, and how many blocks of 64 share one
  int segment;               // blocks of 64 of a part of K, a multiple of four (decode.cuh: of 128, of the teams)
  int tile_group;            // rows of tiles that run together, so that what they read stays in L2
  int early;                 // what belongs to the weight may be read before the kernel before this one has ended
  float epsilon;
  const void *token, *norm, *residual;  // of a product of one token (decode.cuh), of type T: [depth] twice, [rows]
  float* parts;  // of tiles whose K is in two clusters' halves: each one's sums
  int counter;   // and the first of a count for every warpgroup of such a tile
  int box;  // rows that a copy brings of the wide operand: a tile's, or its share's, or fewer where there are no more
};

struct Fp32 {};
struct None {};

template <class S>
__device__ __forceinline__ u32 number_bits(const void* p, i64 at) {
  return __ldg((const unsigned short*)p + at);
}
template <>
__device__ __forceinline__ u32 number_bits<Fp32>(const void* p, i64 at) {
  return __float_as_uint(__ldg((const float*)p + at));
}
template <class S>
__device__ __forceinline__ float number_of(u32 bits) {
  return S::value(bits);
}
template <>
__device__ __forceinline__ float number_of<Fp32>(u32 bits) {
  return __uint_as_float(bits);
}
template <class S>
__device__ __forceinline__ float number(const void* p, i64 at) {
  return number_of<S>(number_bits<S>(p, at));
}
template <>
__device__ __forceinline__ float number<None>(const void*, i64) {
  return 0.f;
}

#ifdef QUANTROT_EMULATED
template <class T>
inline u32 subtract_pair(u32 a, u32 b) {
  return T::pack(T::value(a) - T::value(b), T::value(a >> 16) - T::value(b >> 16));
}
template <class T>
inline u32 multiply_pair(u32 a, u32 b) {
  return T::pack(T::value(a) * T::value(b), T::value(a >> 16) * T::value(b >> 16));
}
template <class T>
inline u32 add_pair(u32 a, u32 b) {
  return T::pack(T::value(a) + T::value(b), T::value(a >> 16) + T::value(b >> 16));
}
inline float quotient(float a, float b) { return a / b; }
#else
#define QR_PAIR(OPERATION)                                                                                          \
  u32 r;                                                                                                            \
  if constexpr (T::BRAIN) {                                                                                         \
    asm(OPERATION ".rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));                                             \
  } else {                                                                                                          \
    asm(OPERATION ".rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));                                              \
  }                                                                                                                 \
  return r
template <class T>
__device__ __forceinline__ u32 subtract_pair(u32 a, u32 b) {
  QR_PAIR("sub");
}
template <class T>
__device__ __forceinline__ u32 multiply_pair(u32 a, u32 b) {
  QR_PAIR("mul");
}
template <class T>
__device__ __forceinline__ u32 add_pair(u32 a, u32 b) {
  QR_PAIR("add");
}
__device__ __forceinline__ float quotient(float a, float b) {  // to 2 ulp, without a call
  float q;
  asm("div.full.f32 %0, %1, %2;" : "=f"(q) : "f"(a), "f"(b));
  return q;
}
#endif

__device__ __forceinline__ int parts_of(int size, int part) { return (size + part - 1) / part; }

// --- What a kernel is made for ---------------------------------------------------------------------------------------

// KIND of codes, wide type T, blocks that share a scale (0: all); ZERO: there are zero points; S, B: types of
// scales and bias.
template <int KIND_, class T_, bool WEIGHT_, int GROUP_, bool ZERO_, class S_, class B_>
struct Operands {
  static constexpr int KIND = KIND_, GROUP = GROUP_;
  static constexpr bool WEIGHT = WEIGHT_, ZERO = ZERO_;
  using T = T_;
  using S = S_;
  using B = B_;
  // Blocks that the loop takes at a time; a part of K is padded to a multiple of it, with zeros from the copy engine.
  static constexpr int STEP = GROUP == 2 ? 2 : 1;
  static constexpr int ZERO_KIND = KIND == UINT8 ? UINT8 : INT8;
};

// ODD: an odd number of rows of tiles, see MixedTiles. HALVES: a block's products start two by two. TEAMS: see parts.cuh.
// APART: also. A product has 256 columns at most: more are PASSES = 2 products by the same codes, stored in two halves.
template <int GROUPS_, int COLUMNS_, int STAGES_, int SPLIT_, int SHARE_, bool ODD_, bool HALVES_, int TEAMS_ = 1,
          int BLOCKS_ = 1, int APART_ = 1>
struct Tile {
  static constexpr int TEAMS = TEAMS_, BLOCKS = BLOCKS_, APART = APART_;
  static constexpr bool ODD = ODD_ && SHARE_ > 1, HALVES = HALVES_;
  static constexpr int GROUPS = GROUPS_, COLUMNS = COLUMNS_, STAGES = STAGES_, SPLIT = SPLIT_, SHARE = SHARE_;
  static constexpr int ROWS = 64 * GROUPS, W = COLUMNS / 2, CLUSTER = SPLIT * SHARE, PART = COLUMNS / SHARE;
  static constexpr int LINE = 64;  // bytes of a row of codes in a block
  static constexpr int CODES = BLOCKS * ROWS * LINE, STAGE = CODES + BLOCKS * COLUMNS * 128;
  static constexpr int PASSES = COLUMNS > 256 ? 2 : 1, STORED = COLUMNS / PASSES;
  static constexpr int FIRST = PASSES == 2 ? COLUMNS / 4 + COLUMNS / 4 % 8 : W;  // of a lane's sums, the first product's
  static constexpr int PIECES = SHARE > PASSES ? SHARE : PASSES;         // copies that bring the wide tile
  static constexpr int HALF = STORED % 32;                               // of a box of y, past the last whole one
  static constexpr int OUTPUT = 64 * (STORED + HALF) * 2;                // of a warpgroup's sums in 16 bits
  static_assert(COLUMNS % SHARE == 0 && PART % 8 == 0, "a share of the wide tile is whole groups of eight rows");
};

// --- Loading ---------------------------------------------------------------------------------------------------------

// Fills a ring of stages: the codes' tile, LINE bytes a row, and the wide tile, 128 bytes a row, of which each of those that
// share it brings `box` rows. apart: the blocks of a cluster have different wide tiles for once.
template <class P>
struct Loader {
  const TensorMap *codes, *wide;
  u32 base, full, empty, rank;
  u64 codes_policy, wide_policy;
  u32 box;
  Ring<P::STAGES> ring;

  __device__ __forceinline__ void load_codes(u32 stage, int k, int row) const {
    barrier_expect(full + stage * 8, P::CODES + P::BLOCKS * P::PIECES * box * 128);
    tensor_load(base + stage * P::STAGE, codes, k * P::LINE, row, full + stage * 8, codes_policy);
  }
  __device__ __forceinline__ void load_wide(u32 stage, int k, int column, bool apart) const {
    const u32 to = base + stage * P::STAGE + P::CODES, bar = full + stage * 8;
    if constexpr (P::BLOCKS > 1) {
      static_assert(P::PIECES == 1, "its own");
      for (int i = 0; i < P::BLOCKS; i++) tensor_load(to + i * P::COLUMNS * 128, wide, (k + i) * 64, column, bar, wide_policy);
    } else if (P::PIECES > P::SHARE || (P::ODD && apart)) {
      for (int i = 0; i < P::PIECES; i++)
        tensor_load(to + i * box * 128, wide, k * 64, column + i * box, bar, wide_policy);
    } else if constexpr (P::SHARE > 1) {
      const u32 share = rank % P::SHARE;
      tensor_load_all(to + share * box * 128, wide, k * 64, column + share * box, bar, wide_policy,
                      ((1 << P::SHARE) - 1) << (rank - share));
    } else {
      tensor_load(to, wide, k * 64, column, bar, wide_policy);
    }
  }

  // The first tile's first blocks of K, from number `first` on, of `count`; how many. early: the codes, before the
  // kernel before this one has ended.
  __device__ __forceinline__ int start(int first, int count, int row, int column, bool apart, bool early) {
    const int ahead = min(count, P::STAGES);
    for (int k = 0; k < ahead; k++) load_codes(k, first + k, row);
    if (early) grid_wait();
    for (int k = 0; k < ahead; k++, ring.next()) load_wide(k, first + k, column, apart);
    return ahead;
  }
  __device__ __forceinline__ void next(int k, int row, int column, bool apart) {
    barrier_wait(empty + ring.stage * 8, ring.parity ^ 1);
    load_codes(ring.stage, k, row);
    load_wide(ring.stage, k, column, apart);
    ring.next();
  }
};

// --- Multiplying -----------------------------------------------------------------------------------------------------

// Where a lane finds its codes in a tile: two rows, eight apart, and in each 16 columns two pairs.
struct Lane {
  u32 rows[2];     // of the matrix, not past its end
  u32 offsets[4];  // in the tile: of the first row's first pair, each 16 columns

  __device__ __forceinline__ Lane(u32 group) {
    const u32 row = group * 64 + warp_number() % 4 * 16 + lane_number() / 4;
#pragma unroll
    for (u32 j = 0; j < 4; j++) offsets[j] = swizzled64(row, j * 16) + lane_number() % 4 * 2;
  }
  __device__ __forceinline__ void at(int row, int rows_there) {  // row: the warpgroup's first
    const int mine = row + warp_number() % 4 * 16 + lane_number() / 4;
    rows[0] = min(mine, rows_there - 1), rows[1] = min(mine + 8, rows_there - 1);
  }
};

// A stage is handed back to the blocks that fill it.
template <class P>
__device__ __forceinline__ void hand_back(u32 bar, u32 rank) {
  if constexpr (P::SHARE > 1) {
    if (lane_number() < P::SHARE) barrier_arrive_cluster(in_block(bar, rank / P::SHARE * P::SHARE + lane_number()));
  } else {
    if (lane_number() == 0) barrier_arrive(bar);
  }
}

// A warpgroup's sums over `count` blocks of K from number `first` on.
//
// The tensor core takes a product's first operand from the registers as it starts it, so a warp that issues several in a
// row does nothing else meanwhile. Hence one at a time (HALVES: two), of 16 columns of K: while it runs, the columns
// after the next are widened, and those after them come from shared memory.
//
// With groups the sums stay where they are, in units of the scale of the group that is added: before the next one they
// are multiplied by (this scale / next scale), after the last by its scale. A group whose scale is 0, or less than 2^-64
// of the one before it, counts as zeros and leaves the unit alone. What belongs to a group is found without a branch and
// without touching what was just loaded: the compiler moved widening behind such a branch, between the next products, and had
// a warp wait for a scale as soon as it was asked for (64 tokens took 1 to 6 % longer, 256 to 4096 up to 3 %).
template <class P, class O>
struct Multiplier {
  static constexpr int GROUP = O::GROUP ? O::GROUP : 1;
  static constexpr bool CHOOSES = O::KIND != E4M3 && !O::ZERO;
  using T = typename O::T;
  const MixedArgs& args;
  Lane lane;
  u32 base, full, empty, rank, previous = 0;
  Ring<P::STAGES> ring;
  u32 codes[2][4], a[4][4];  // of 16 columns each: [2 h + r] is the row r of the lane, columns 8 h + 2 q and the next
  u32 zero[2], live[2];  // of each row: pairs that are subtracted; which codes count, or pairs of 1 or 0
  float unit[2], ratio[2], coming[2];  // of each row: of the sums, from the unit before, of the next group
  u32 coming_zero[2];
  int group, left;  // number of the next group, and how many of its blocks are to come

  __device__ __forceinline__ Multiplier(const MixedArgs& args, u32 group, u32 base, u32 full, u32 empty, u32 rank)
      : args(args), lane(group), base(base), full(full), empty(empty), rank(rank) {}

  __device__ __forceinline__ void find() {  // what the next group has; past the end, where x is zeros, the last one's
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const i64 at = (i64)lane.rows[r] * args.groups + min(group, args.groups - 1);
      if constexpr (O::GROUP != 0) coming[r] = number<typename O::S>(args.scale, at);
      if constexpr (O::ZERO) coming_zero[r] = __ldg(args.zero + at);
    }
  }
  __device__ __forceinline__ void enter() {  // what is widened from here on is of the next group
#pragma unroll
    for (int r = 0; r < 2; r++) {
      if constexpr (O::GROUP != 0) {
        const bool dead = coming[r] == 0.f || fabsf(unit[r]) > 0x1p64f * fabsf(coming[r]);
        const float step = quotient(unit[r], coming[r]);
        ratio[r] = dead || unit[r] == coming[r] ? 1.f : step;
        unit[r] = dead ? unit[r] : coming[r];
        live[r] = CHOOSES ? (dead ? chosen_zeros : chosen_codes) : dead ? 0u : T::BRAIN ? 0x3F803F80u : 0x3C003C00u;
      }
      if constexpr (O::ZERO) zero[r] = Widen<O::ZERO_KIND, T>::pair(coming_zero[r] * 0x101);
    }
    if constexpr (O::GROUP != 0) {
      left -= GROUP;
      if (left <= 0) left += args.group_blocks, group++;
      find();
    }
  }

  __device__ __forceinline__ void begin(int first) {
    // Always codes, but not for the compiler, who copies a constant for each permutation: 13 of 147 instructions a block.
    live[0] = live[1] = lane.rows[0] + args.columns > 0 ? chosen_codes : chosen_zeros;
    unit[0] = 0.f, unit[1] = 0.f, group = first / args.group_blocks, left = args.group_blocks - first % args.group_blocks;
    find();
    enter();
  }

  // Number j of a block's four products; its codes in codes[j % 2], widened in a[j], unless said otherwise.
  __device__ __forceinline__ void load(int j, u32 tile) { load(j, tile, j % 2); }
  __device__ __forceinline__ void load(int j, u32 tile, int to) { load(j, tile, codes[to]); }
  __device__ __forceinline__ void load(int j, u32 tile, u32 (&to)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = load_shared_u16(tile + lane.offsets[j] + i % 2 * 512 + i / 2 * 8);
  }
  __device__ __forceinline__ void widen(int j) { widen(j % 2, j); }
  __device__ __forceinline__ void widen(int from, int to) { widen(codes[from], a[to]); }
  __device__ __forceinline__ void widen(const u32 (&from)[4], u32 (&to)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if constexpr (CHOOSES) {
        to[i] = Widen<O::KIND, T>::chosen(from[i], live[i % 2]);
      } else {
        u32 pair = Widen<O::KIND, T>::pair(from[i]);
        if constexpr (O::ZERO) pair = subtract_pair<T>(pair, zero[i % 2]);
        to[i] = O::GROUP ? multiply_pair<T>(pair, live[i % 2]) : pair;
      }
    }
  }
  __device__ __forceinline__ void multiply(float (&d)[P::W], int j, u32 tile, bool add) { multiply(d, j, j, tile, add); }
  __device__ __forceinline__ void multiply(float (&d)[P::W], int from, int j, u32 tile, bool add) {
    product_fence();
    if constexpr (P::PASSES == 1) {
      product16<T>(d, a[from], operand(tile + P::CODES, j), add);
    } else {
      constexpr int REST = P::W - P::FIRST;
      product16<T>((float(&)[P::FIRST])d[0], a[from], operand(tile + P::CODES, j), add);
      product16<T>((float(&)[REST])d[P::FIRST], a[from], operand(tile + P::CODES + P::FIRST * 256, j), add);
    }
    product_commit();
  }
  __device__ __forceinline__ void back() { hand_back<P>(empty + previous * 8, rank); }

  // LAST: of all; ENDS: of a group.
  template <bool LAST, bool ENDS>
  __device__ __forceinline__ void block(float (&d)[P::W], bool begun) {
    if constexpr (P::HALVES) {
      halves<LAST, ENDS>(d, begun);
      return;
    }
    const u32 tile = base + ring.stage * P::STAGE;
    multiply(d, 0, tile, begun);
    load(3, tile);
    product_wait<2>();
    widen(2);
    multiply(d, 1, tile, true);
    product_wait<2>();
    if (begun) back();
    previous = ring.stage;
    ring.next();
    const u32 after = base + ring.stage * P::STAGE;
    if constexpr (!LAST) {
      barrier_wait(full + ring.stage * 8, ring.parity);
      load(0, after);
    }
    widen(3);
    multiply(d, 2, tile, true);
    if constexpr (!LAST) {
      load(1, after);
      if constexpr (ENDS) enter();
      product_wait<2>();
      widen(0);
    }
    multiply(d, 3, tile, true);
    if constexpr (!LAST) {
      load(2, after);
      product_wait<2>();
      widen(1);
    }
    finish<LAST, ENDS>(d);
  }
  template <bool LAST, bool ENDS>
  __device__ __forceinline__ void halves(float (&d)[P::W], bool begun) {
    const u32 tile = base + ring.stage * P::STAGE;
    multiply2(d, 0, tile, begun);
    load(2, tile), load(3, tile);
    product_wait<1>();
    if (begun) back();
    previous = ring.stage;
    ring.next();
    widen(2), widen(3);
    multiply2(d, 2, tile, true);
    if constexpr (!LAST) {
      const u32 after = base + ring.stage * P::STAGE;
      barrier_wait(full + ring.stage * 8, ring.parity);
      load(0, after), load(1, after);
      if constexpr (ENDS) enter();
      product_wait<1>();
      widen(0), widen(1);
    }
    finish<LAST, ENDS>(d);
  }
  __device__ __forceinline__ void multiply2(float (&d)[P::W], int j, u32 tile, bool add) {
    product_fence();
    product16<T>(d, a[j], operand(tile + P::CODES, j), add);
    product16<T>(d, a[j + 1], operand(tile + P::CODES, j + 1), true);
    product_commit();
  }
  template <bool LAST>
  __device__ __forceinline__ void scale(float (&d)[P::W]) {
#pragma unroll
    for (int i = 0; i < P::W; i++) d[i] *= LAST ? unit[i / 2 % 2] : ratio[i / 2 % 2];
  }
  template <bool LAST, bool ENDS>
  __device__ __forceinline__ void finish(float (&d)[P::W]) {
    if constexpr (LAST || ENDS) {
      product_wait<0>();
      product_done(d);
      if constexpr (LAST) back();
    }
    if constexpr (ENDS) scale<LAST>(d);
  }

  // count: whole groups of blocks.
  __device__ __forceinline__ void run(float (&sum)[P::W], int first, int count) {
    constexpr bool ENDS = O::GROUP != 0;
    begin(first);
    const u32 tile = base + ring.stage * P::STAGE;
    barrier_wait(full + ring.stage * 8, ring.parity);
#pragma unroll
    for (int j = 0; j < 2; j++) load(j, tile), widen(j);
    if constexpr (!P::HALVES) load(2, tile);
    for (int k = 0; k + GROUP < count; k += GROUP) {
      if constexpr (GROUP == 2) block<false, false>(sum, k > 0);
      block<false, ENDS>(sum, GROUP == 2 || k > 0);
    }
    if constexpr (GROUP == 2) block<false, false>(sum, count > GROUP);
    block<true, ENDS>(sum, GROUP == 2 || count > GROUP);
  }
};

// A Multiplier for those who have few registers beside their sums: four warpgroups a thread block, or tiles of more than
// 256 columns. Three others' products, or long ones, hide what it waits for, so it keeps the operands of two products and
// the codes of one.
template <class P, class O>
struct Patient : Multiplier<P, O> {
  using Base = Multiplier<P, O>;
  using Base::args, Base::base, Base::full, Base::ring, Base::previous;
  __device__ __forceinline__ Patient(const MixedArgs& args, u32 group, u32 base, u32 full, u32 empty, u32 rank)
      : Base(args, group, base, full, empty, rank) {
    from = swizzled(group * 64 + warp_number() % 4 * 16 + lane_number() / 4, 0) + lane_number() % 4 * 2;
  }

  u32 from;  // of 128 columns: the lane's first pair
  __device__ __forceinline__ u32 tile() const { return base + ring.stage * P::STAGE; }
  __device__ __forceinline__ void read(int j, u32 tile) {
    if constexpr (P::BLOCKS == 1) {
      this->load(j, tile, 0);
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++)
        this->codes[0][i] = load_shared_u16((tile + from ^ j << 4) + i % 2 * 1024 + i / 2 * 8);
    }
  }
  __device__ __forceinline__ void come() {  // the stage of the next block
    barrier_wait(full + ring.stage * 8, ring.parity);
    read(0, tile());
  }
  // ENDS: of a group. Its first codes are on their way.
  template <bool LAST, bool ENDS>
  __device__ __forceinline__ void block(float (&d)[P::W], bool begun) {
    const u32 at = tile();
#pragma unroll
    for (int j = 0; j < 4 * P::BLOCKS; j++) {
      product_wait<1>();  // the operand before the last may be overwritten
      if (j == 1 && begun) this->back();
      this->widen(0, j % 2);
      if (j + 1 < 4 * P::BLOCKS) read(j + 1, at);
      this->multiply(d, j % 2, j % 4, at + j / 4 * P::COLUMNS * 128, begun || j > 0);
    }
    previous = ring.stage;
    ring.next();
    if constexpr (!LAST) come();
    if constexpr (LAST || ENDS) {
      if constexpr (ENDS && !LAST) this->enter();
      product_wait<0>();
      product_done(d);
      if constexpr (LAST) this->back();
    }
    if constexpr (ENDS) this->template scale<LAST>(d);
  }
  __device__ __forceinline__ void run(float (&sum)[P::W], int first, int count) {
    constexpr bool ENDS = O::GROUP != 0;
    constexpr int GROUP = P::BLOCKS == 2 ? 2 : Base::GROUP;
    constexpr bool TWO = GROUP > P::BLOCKS;
    static_assert(P::BLOCKS == 1 || O::GROUP != 1, "a group ends with a stage");
    this->begin(first);
    come();
    for (int k = 0; k + GROUP < count; k += GROUP) {
      if constexpr (TWO) block<false, false>(sum, k > 0);
      block<false, ENDS>(sum, TWO || k > 0);
    }
    if constexpr (TWO) block<false, false>(sum, count > GROUP);
    block<true, ENDS>(sum, TWO || count > GROUP);
  }
};

// A Multiplier for two warpgroups, tiles of 256 columns and groups of 128 or more: they take turns of a block of K, four
// products one after another, and in the other's turn a warpgroup widens its next operands and multiplies its sums. What
// the next group has is found a block before it is used, so that both turns of a group have alike to do.
template <class P, class O>
struct Turns : Multiplier<P, O> {
  using Base = Multiplier<P, O>;
  using Base::base, Base::full, Base::ring, Base::previous, Base::live, Base::zero, Base::load, Base::widen;
  using T = typename O::T;
  static constexpr u32 TURN = 8;  // a named barrier for each warpgroup
  u32 which, next_live[2], next_zero[2];
  u32 ready[2][4][4];  // widened, of a group's first block and of its second
  __device__ __forceinline__ Turns(const MixedArgs& args, u32 group, u32 base, u32 full, u32 empty, u32 rank)
      : Base(args, group, base, full, empty, rank), which(group) {
    if (group == 1) named_arrive(TURN, 256);
  }

  __device__ __forceinline__ void change() {  // what is widened: of this group, or of the next
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const u32 l = live[r], z = zero[r];
      live[r] = next_live[r], zero[r] = next_zero[r], next_live[r] = l, next_zero[r] = z;
    }
  }
  __device__ __forceinline__ void prepare() {
#pragma unroll
    for (int r = 0; r < 2; r++) next_live[r] = live[r], next_zero[r] = zero[r];
    this->enter();
    change();
  }
  __device__ __forceinline__ void come(u32 (&to)[4][4]) {  // the stage of the next block
    u32 pairs[4][4];
    barrier_wait(full + ring.stage * 8, ring.parity);
#pragma unroll
    for (int j = 0; j < 4; j++) load(j, base + ring.stage * P::STAGE, pairs[j]);
#pragma unroll
    for (int j = 0; j < 4; j++) widen(pairs[j], to[j]);
  }
  // A group's first block or the one that ENDS it; LAST: of the last group.
  template <bool LAST, bool ENDS>
  __device__ __forceinline__ void block(float (&d)[P::W], bool begun) {
    const u32 tile = base + ring.stage * P::STAGE;
    named_sync(TURN + which, 256);
    product_fence();
#pragma unroll
    for (int j = 0; j < 4; j++) product16<T>(d, ready[ENDS][j], operand(tile + P::CODES, j), begun || j > 0);
    product_commit();
    named_arrive(TURN + (which ^ 1), 256);
    if constexpr (!LAST && !ENDS) prepare();
    previous = ring.stage;
    ring.next();
    if constexpr (!LAST || !ENDS) {
      if constexpr (ENDS) change();
      come(ready[!ENDS]);
    }
    product_wait<0>();
    product_done(d);
    this->back();
    if constexpr (ENDS) this->template scale<LAST>(d);
  }
  __device__ __forceinline__ void run(float (&sum)[P::W], int first, int count) {
    this->begin(first);
    come(ready[0]);
    for (int k = 0; k + 2 < count; k += 2) {
      block<false, false>(sum, k > 0);
      block<false, true>(sum, true);
    }
    block<true, false>(sum, count > 2);
    block<true, true>(sum, true);
  }
};

enum How { ALIKE, PATIENT, IN_TURNS };
template <class P, class O>
constexpr How how = P::GROUPS * P::TEAMS == 4 || P::PASSES == 2 ? PATIENT
                    : O::GROUP == 2 && P::GROUPS == 2 && P::TEAMS * P::SPLIT == 1 && P::COLUMNS == 256 ? IN_TURNS : ALIKE;
template <class P, class O, How HOW = how<P, O>>
struct Chosen {
  using Type = Multiplier<P, O>;
};
template <class P, class O>
struct Chosen<P, O, PATIENT> {
  using Type = Patient<P, O>;
};
template <class P, class O>
struct Chosen<P, O, IN_TURNS> {
  using Type = Turns<P, O>;
};

// A sum -> its result in float32: the scale of whole rows, then the bias; not fused.
template <class O>
__device__ __forceinline__ float finished(float sum, float scale, float bias) {
  return (O::GROUP ? sum : __fmul_rn(sum, scale)) + bias;
}

}  // namespace quantrot
