// A few tokens by a packed MXFP4 weight: y[token, row] = sum over k of x[token, k] * w[row, k]. Follows held.cuh.
//
// Thread blocks take tiles of rows. One warp keeps a ring of stages of 256 columns full (by the copy engine), so
// that what is on its way needs no registers. TEAMS of ROW_WARPS take turns at the stages, and a warp of a team multiplies
// 16 * TALL rows of its stage; the teams' sums are added in their order. What bounds many tokens is the instructions that
// turn codes into numbers, and the products, which do not run beside them.
//
// The SPLIT blocks of a cluster may share a tile, each with a part of K and of the tokens, and add their sums, in order,
// through each other's shared memory.
//
// The weight is the first operand of mma.m16n8k16, the tokens the second. A lane (g, q) takes whole groups: the 16 bytes
// that are 32 columns of a row, and of the row eight further. Which of its codes a lane puts in which slot of the product
// is free, as long as the tokens agree. A pair is two neighbours, as the tokens lie; or, PAIRED, the codes p and p + 4 of a
// 32-bit word, whose bits then move by the same shift in both halves. That takes 17 instructions in place of 19 for eight
// codes, and tokens in that order: they are put in it as they are read, by four instructions for 16 bytes, where that is
// less; for products by warpgroups by a kernel before (arrange). Row g of a product is row `turned(g)` of eight in the tile,
// so that the eight lanes which shared memory serves at once meet different banks under the swizzle.
//
// A code becomes bfloat16 by its bits: sign to bit 15, the three others to bits 8 ... 6, which is the value times 2^-126
// (e2m1's subnormal is bfloat16's). One integer product moves both: the two copies of a code that it adds do not touch,
// and what is not wanted of them is masked. One packed product by 2^(e + 62) makes it the value times 2^(e - 64),
// exactly; the sums are multiplied by 2^64 at the end. A group's scale past 2^65 acts as infinity, a value below 2^-62 as zero.
//
// One token, which each block holds as integers (held.cuh), is multiplied by mma.m16n8k32 of bytes, exactly, with the positive
// and with the negative part of the codes: a permutation that picks magnitudes by codes puts zeros where a code is negative, so
// that of a word and of the same with all signs turned come both, 8 instructions for eight codes with the product. Permutations
// fill their pipe, which is that of shifts: the upper half of a word comes by another (high_half, 141 cycles for 167). The seven
// columns of a product that one token leaves free keep groups apart: a group's sum is multiplied by its scale in place of 32
// codes. (In bfloat16, 14 instructions: before high_half 28672 x 4096 19.1 us for 17.9, 4096 x 14336 11.5 for 10.5.)

namespace quantrot {

struct DecodeArgs {
  const unsigned char* scale;  // [rows, columns / 32]
  const float* token_scale;    // [tokens], or null
  const void* x;               // of one token: bfloat16 [columns], or AS_HELD
  const void* norm;            // of one token that goes through RMSNorm first: bfloat16 [columns], its weight
  const void* residual;        // bfloat16 [tokens, rows], what is added to y
  void* y;                     // OUT [tokens, rows]
  float root;                  // of a Hadamard transform: 1 / sqrt
  float epsilon;               // of the norm
  int tokens, rows, columns;   // columns: a multiple of 128
  int mapped;                  // whether the copy engine takes the scales
  int settled;                 // whether no kernel that may still run writes the weight
};

#ifdef QUANTROT_EMULATED
#include "mma.h"
#else
__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_bytes(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 load_shared_byte(u32 from) {
  u32 v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
#endif

// Two codes, at bits 0 and 16, as bfloat16 times 2^-126.
__device__ __forceinline__ u32 tiny(u32 codes) { return codes * (64u + 4096u) & 0x81C081C0u; }

// Codes P and P + 4 of a word (P: 0, 1).
template <int P>
__device__ __forceinline__ u32 pair(u32 word) {
  const u32 codes = word & (0x000F000Fu << 4 * P);
  return codes * ((64u + 4096u) >> 4 * P) & 0x81C081C0u;
}

// Codes 2 I and 2 I + 1: byte I of the words of even and of odd codes.
template <int I>
__device__ __forceinline__ u32 neighbours(u32 even, u32 odd) {
  return tiny(pick_bytes(even, odd, I | (8 + I) << 4 | (4 + I) << 8 | (12 + I) << 12));
}

// 2^(e + 62) of a scale byte, twice.
__device__ __forceinline__ u32 multiplier(u32 byte) { return (min(byte, 193u) + 62) * 0x00800080u; }

// A word of a group as four pairs, times the group's scale.
template <bool PAIRED>
struct Pairs {
  u32 v[4];

  __device__ __forceinline__ Pairs(u32 word, u32 factor) {
    if constexpr (PAIRED) {
      const u32 high = word >> 8;
      v[0] = pair<0>(word), v[1] = pair<1>(word), v[2] = pair<0>(high), v[3] = pair<1>(high);
    } else {
      const u32 even = word & 0x0F0F0F0F, odd = word >> 4 & 0x0F0F0F0F;
      v[0] = neighbours<0>(even, odd), v[1] = neighbours<1>(even, odd);
      v[2] = neighbours<2>(even, odd), v[3] = neighbours<3>(even, odd);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = times_bf16(v[i], factor);
  }
};

// Four neighbours, `at` a multiple of four, or one.
template <class T>
struct OutHalves {
  __device__ __forceinline__ static void store4(void* y, u64 at, const float (&v)[4]) {
    ((uint2*)y)[at / 4] = uint2{T::pack(v[0], v[1]), T::pack(v[2], v[3])};
  }
  __device__ __forceinline__ static void store(void* y, u64 at, float v) {
    ((unsigned short*)y)[at] = (unsigned short)T::pack(v, 0.0f);
  }
};
using OutBf16 = OutHalves<Bf16>;
using OutFp16 = OutHalves<Fp16>;
struct OutFp32 {
  __device__ __forceinline__ static void store4(void* y, u64 at, const float (&v)[4]) {
    ((float4*)y)[at / 4] = float4{v[0], v[1], v[2], v[3]};
  }
  __device__ __forceinline__ static void store(void* y, u64 at, float v) { ((float*)y)[at] = v; }
};

// TILES_: of eight tokens; 0: one token, for which there is room beside the ring. ONCE: a block has one tile, and
// its sums take the ring's place. GROUPED: four warps multiply at once, by wgmma: their codes from registers, the tokens,
// which a kernel before (arrange.cuh) has laid down for that, from shared memory, once for the four.
template <int TILES_, int TALL_, int ROW_WARPS_, int TEAMS_, int STAGES_, int SPLIT_, bool ONCE_,
          bool GROUPED_ = false>
struct Plan {
  static constexpr bool ONE = TILES_ == 0, ONCE = ONCE_, GROUPED = GROUPED_;
  static constexpr int TILES = ONE ? 1 : TILES_, TOKENS = ONE ? 1 : 8 * TILES;
  static constexpr bool PAIRED = GROUPED || TALL_ >= TILES;
  static constexpr int TALL = TALL_, ROW_WARPS = ROW_WARPS_, TEAMS = TEAMS_, STAGES = STAGES_, SPLIT = SPLIT_;
  static constexpr int ROWS = 16 * TALL * ROW_WARPS, WARPS = ROW_WARPS * TEAMS;
  static constexpr int BOX = TILES * 1024 + (GROUPED ? 0 : 256);  // bytes from 64 columns of tokens to the next: other banks
  static constexpr int BOXES = ONE ? 0 : 4, LOADED = BOXES * TILES * 1024, WIDE = BOXES * BOX;
  static constexpr int CODES = ROWS * 128, SCALES = ROWS * 16;  // of a stage; the scales of two, where they are mapped
  static constexpr int WIDE_AT = STAGES * CODES, SCALES_AT = WIDE_AT + STAGES * WIDE;
  static constexpr int BARRIERS = SCALES_AT + STAGES * SCALES;
  static constexpr int PITCH = ROWS + 4;  // of a team's sums, floats: lanes meet different banks
  static constexpr int SUMS = ONCE ? 0 : BARRIERS + STAGES * 16;
  static constexpr int ZEROS_AT = BARRIERS + STAGES * 16 + (ONCE ? 0 : TEAMS * TOKENS * PITCH * 4);  // 16 bytes
  static constexpr int SQUARES_AT = ZEROS_AT + 16, MAXIMA_AT = SQUARES_AT + 64;  // a warp's share of a norm, of a scale
  static constexpr int HELD_AT = MAXIMA_AT + 64;                                  // the token
  static constexpr int CHAINS = TALL * TILES <= 2 && !GROUPED && !ONE ? 2 : 1;  // of products that wait for each other, in turn
  static_assert(STAGES % TEAMS == 0, "a stage is always the same team's, who so never misses a phase of its barrier");
  static_assert(SPLIT == 1 || ONCE, "blocks that share a tile have one");
  static_assert(!GROUPED || (!ONE && ROW_WARPS % 4 == 0), "warpgroups multiply tokens that are laid down for them");
  static_assert(!ONCE || TEAMS * TOKENS * PITCH * 4 <= BARRIERS, "the sums fit where the ring was");
};

__device__ __forceinline__ u32 turned(u32 g) { return g >> 1 | (g & 1) << 2; }

// One warp's sums over a tile.
template <class P>
struct Sums {
  float v[P::CHAINS][P::TALL][P::TILES][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < P::CHAINS * P::TALL * P::TILES * 4; i++)
      v[i / (4 * P::TILES * P::TALL)][i / (4 * P::TILES) % P::TALL][i / 4 % P::TILES][i % 4] = 0.f;
  }

  // Add a stage to the sums of one token, of which 256 columns and their powers of two lie at `held`. LIMBS: bytes
  // of a number of it. Of one, group j has column 2 j of the second operand, group 4 + j column 2 j + 1; of two, group j, and
  // then group 4 + j, has both. Returns bits of what was read last.
  template <int LIMBS>
  __device__ __forceinline__ u32 add_held(u32 codes, u32 scales, u32 held, u32 zeros, u32 small) {
    const u32 lane = lane_number(), q = lane & 3, column = lane >> 2;
    int parts[2][LIMBS][P::TALL][4] = {};  // of the codes that are positive, and of those that are negative
    codes ^= q << 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      Words a[P::TALL], b[P::TALL];
#pragma unroll
      for (int r = 0; r < P::TALL; r++) {
        const u32 row = (codes ^ h << 6) + r * 2048;
        a[r] = load_shared_words(row), b[r] = load_shared_words(row + 1024);
      }
      const u32 unit = (LIMBS == 2 ? column % 2 * 2 : 0) ^ q & 2, group = held + (h * 4 + q) * 64;
      const bool mine = LIMBS == 2 ? column / 2 == q : column == 2 * q + h;
      const u32 low = mine ? group + unit * 16 : zeros, high = mine ? group + (unit ^ 1) * 16 : zeros;
      const Words x[2] = {load_shared_words(low), load_shared_words(high)};
#pragma unroll
      for (int j = 0; j < 4; j++)
#pragma unroll
        for (int r = 0; r < P::TALL; r++) {
          const u32 first = x[j / 2].at(j % 2 * 2), second = x[j / 2].at(j % 2 * 2 + 1);
          u32 above = a[r].at(j), below = b[r].at(j);
#pragma unroll
          for (int sign = 0; sign < 2; sign++) {
            multiply_bytes(parts[sign][LIMBS == 2 ? h : 0][r], positive(above, small), positive(below, small),
                           positive(high_half(above), small), positive(high_half(below), small), first, second);
            above ^= SIGNS_OF_CODES, below ^= SIGNS_OF_CODES;
          }
        }
    }
    const u32 powers = held + HELD_POWERS + q * 8;
    u32 seen = 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float2 power = load_shared2(powers + h * 32);
      seen |= __float_as_uint(power.x);
#pragma unroll
      for (int r = 0; r < P::TALL; r++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const u32 byte = load_shared_byte(scales + r * 256 + i * 128 + q + h * 4);
          float& sum = v[0][r][0][i];
#pragma unroll
          for (int l = 0; l < LIMBS; l++) {
            const int from = LIMBS == 2 ? h : 0, at = 2 * i + (LIMBS == 2 ? l : h);
            const int part = parts[0][from][r][at] - parts[1][from][r][at] + 0x4B400000;  // and 1.5 * 2^23, as a float32
            const float scaled = __fmul_rn(__fsub_rn(__uint_as_float((u32)part), 12582912.f), l ? power.y : power.x);
            sum = __fmaf_rn(scaled, __uint_as_float(byte << 23), sum);
          }
          seen |= byte;
        }
    }
    return seen;
  }

  // Add a stage; addresses of its codes and scales at the lane's first row, of its tokens.
  __device__ __forceinline__ u32 add(u32 codes, u32 scales, u32 wide) {
    const u32 lane = lane_number(), q = lane & 3;
    u32 seen = 0;
    codes ^= q << 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      Words a[P::TALL], b[P::TALL];
      u32 a_factor[P::TALL], b_factor[P::TALL];
#pragma unroll
      for (int r = 0; r < P::TALL; r++) {
        const u32 row = (codes ^ h << 6) + r * 2048, scale = scales + q + h * 4 + r * 256;
        a[r] = load_shared_words(row), b[r] = load_shared_words(row + 1024);
        a_factor[r] = multiplier(load_shared_byte(scale));
        b_factor[r] = multiplier(load_shared_byte(scale + 128));
      }
      u32 token = wide + (h * 2 + q / 2) * P::BOX + (lane >> 2) * 128 + q % 2 * 64;
      token ^= (token >> 7 & 7) << 4;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        Words x[P::TILES];
#pragma unroll
        for (int t = 0; t < P::TILES; t++)
          x[t] = load_shared_words((token ^ j << 4) + t * 1024);
        if constexpr (P::PAIRED)
#pragma unroll
          for (int t = 0; t < P::TILES; t++) x[t] = arranged(x[t]);
        if (h == 1 && j == 3)
#pragma unroll
          for (int t = 0; t < P::TILES; t++) seen |= x[t].x;
#pragma unroll
        for (int r = 0; r < P::TALL; r++) {
          const Pairs<P::PAIRED> above(a[r].at(j), a_factor[r]), below(b[r].at(j), b_factor[r]);
#pragma unroll
          for (int t = 0; t < P::TILES; t++) {
            multiply(v[0][r][t], above.v[0], below.v[0], above.v[1], below.v[1], x[t].x, x[t].y);
            multiply(v[P::CHAINS - 1][r][t], above.v[2], below.v[2], above.v[3], below.v[3], x[t].z, x[t].w);
          }
        }
      }
    }
    return seen;
  }

  // The same by a warpgroup: number 2 j + i of the eight products of 128 columns takes half i of word j of the lanes' codes.
  // While two run, the next word's codes are widened.
  __device__ __forceinline__ u32 add_grouped(u32 codes, u32 scales, u32 wide) {
    const u32 q = lane_number() & 3;
    codes ^= q << 4;
    u32 pairs[2][P::TALL][2][4], seen = 0;
    Words a[2][P::TALL], b[2][P::TALL];
    u32 a_factor[2][P::TALL], b_factor[2][P::TALL];
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int r = 0; r < P::TALL; r++) {
        const u32 row = (codes ^ h << 6) + r * 2048, scale = scales + q + h * 4 + r * 256;
        a[h][r] = load_shared_words(row), b[h][r] = load_shared_words(row + 1024);
        a_factor[h][r] = multiplier(load_shared_byte(scale));
        b_factor[h][r] = multiplier(load_shared_byte(scale + 128));
        seen |= a[h][r].x | b[h][r].x;
      }
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        auto& to = pairs[j % 2];
#pragma unroll
        for (int r = 0; r < P::TALL; r++) {
          const Pairs<true> above(a[h][r].at(j), a_factor[h][r]), below(b[h][r].at(j), b_factor[h][r]);
#pragma unroll
          for (int i = 0; i < 4; i++) to[r][i / 2][i % 2 * 2] = above.v[i], to[r][i / 2][i % 2 * 2 + 1] = below.v[i];
        }
        product_fence();
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
          for (int r = 0; r < P::TALL; r++)
            product16<Bf16>(reinterpret_cast<float(&)[P::TILES * 4]>(v[0][r]), to[r][i],
                            operand(wide + (h * 2 + j / 2) * P::BOX, j % 2 * 2 + i), true);
        product_commit();
        if (h == 1 && j == 3)
          product_wait<0>();
        else
          product_wait<1>();
      }
#pragma unroll
    for (int r = 0; r < P::TALL; r++) product_done(reinterpret_cast<float(&)[P::TILES * 4]>(v[0][r]));
    return seen;
  }

  // To [tokens][PITCH] at `to`, the warp's first row, times a power of two.
  __device__ __forceinline__ void store(u32 to, float power) const {
    const u32 g = lane_number() >> 2, q = lane_number() & 3;
    if constexpr (P::ONE) {
#pragma unroll
      for (int r = 0; r < P::TALL; r++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float sum = v[0][r][0][i];
          sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
          sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
          if (q == 0) store_shared(to + (r * 16 + turned(g) + i * 8) * 4, sum * power);
        }
      return;
    }
#pragma unroll
    for (int r = 0; r < P::TALL; r++)
#pragma unroll
      for (int t = 0; t < P::TILES; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const u32 token = t * 8 + q * 2 + i % 2, row = r * 16 + turned(g) + i / 2 * 8;
          float sum = v[0][r][t][i];
          if constexpr (P::CHAINS == 2) sum += v[P::CHAINS - 1][r][t][i];
          if (token < P::TOKENS) store_shared(to + (token * P::PITCH + row) * 4, sum * power);
        }
  }
};

// What is added to a tile, whose first row is `row`, by this thread: four numbers at a time, in store_tile's order; rows are a
// multiple of four.
template <class P>
struct Addends {
  static constexpr int FOURS = P::ROWS / 4, THREADS = 32 * P::WARPS, EACH = (P::TOKENS * FOURS - 1) / (P::SPLIT * THREADS) + 1;
  uint2 v[EACH];

  __device__ __forceinline__ void load(const DecodeArgs& args, int row, u32 rank) {
#pragma unroll
    for (int n = 0; n < EACH; n++) {
      const int i = (n * P::SPLIT + rank) * THREADS + threadIdx.x, token = i / FOURS, r = row + i % FOURS * 4;
      v[n] = {};
      if (token >= min(P::TOKENS, args.tokens) || r >= args.rows) continue;
      const float2 two = fresh2((const float*)args.residual + ((u64)token * args.rows + r) / 2);
      v[n] = {__float_as_uint(two.x), __float_as_uint(two.y)};
    }
  }
};

// The sums of a tile, of the cluster's blocks and of their teams in order -> y. A block of a cluster does its share. SCALED:
// they are of one token, whose scale this is.
template <class P, class OUT, bool ADD = false, bool SCALED = false>
__device__ __forceinline__ void store_tile(const DecodeArgs& args, int row, u32 rank, u32 sums, const Addends<P>& addends = {}, float scale = 1.f) {
  using A = Addends<P>;
#pragma unroll(ADD ? A::EACH : 1)
  for (int n = 0; n < A::EACH; n++) {
    const int i = (n * P::SPLIT + rank) * A::THREADS + threadIdx.x, token = i / A::FOURS, r = i % A::FOURS * 4;
    if (token >= min(P::TOKENS, args.tokens)) break;
    float v[4] = {};
#pragma unroll
    for (int s = 0; s < P::SPLIT * P::TEAMS; s++) {
      const u32 at = sums + ((s % P::TEAMS * P::TOKENS + token) * P::PITCH + r) * 4;
      float part[4];
      if constexpr (P::SPLIT > 1) {
        const float4 p = load_cluster4(in_block(at, s / P::TEAMS));
        part[0] = p.x, part[1] = p.y, part[2] = p.z, part[3] = p.w;
      } else {
        const Words p = load_shared_words(at);
#pragma unroll
        for (int e = 0; e < 4; e++) part[e] = __uint_as_float(p.at(e));
      }
#pragma unroll
      for (int e = 0; e < 4; e++) v[e] += part[e];
    }
    if (SCALED || args.token_scale) {
      const float factor = SCALED ? scale : fresh1(args.token_scale + token);
#pragma unroll
      for (int e = 0; e < 4; e++) v[e] = __fmul_rn(v[e], factor);
    }
    if constexpr (ADD)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const u32 two = e < 2 ? addends.v[n].x : addends.v[n].y;
        v[e] = Bf16::value((unsigned short)Bf16::pack(v[e], 0.f)) + Bf16::value((unsigned short)(two >> e % 2 * 16));
      }
    const u64 at = (u64)token * args.rows + row + r;
    if (args.rows % 4 == 0) {
      if (row + r < args.rows) OUT::store4(args.y, at, v);
    } else {
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (row + r + e < args.rows) OUT::store(args.y, at + e, v[e]);
    }
  }
}

// A stage that this warp has read goes back to the producer, with bits of what was read last: the compiler lets an
// arrival go before the last loads have come back, and it overtakes them on the way to shared memory, so that the next
// copies land under them (of 100 calls each of six plans with one stage a team, 6 to 100 gave wrong numbers). An address
// that waits for the loads cannot. A fence of all that a thread has read (fence_async) is right as well, in 0.95 to 1.04
// of the time; the dependence stays because the machine code shows it, and a test can ask every plan for it.
__device__ __forceinline__ void hand_back(u32 bar, u32 seen) {
  warp_sync();
  bar = address_after(bar, seen);
  if (lane_number() == 0) barrier_arrive(bar);
}

// Four scales of a row and the four after them, of `row` and chunk `c`, in their place among 16; the last ones there are,
// past the end.
template <class P>
__device__ __forceinline__ void copy_scales(const DecodeArgs& args, int row, int c, u32 to) {
  const int groups = args.columns / 32, first = min(c * 8, groups - 4), second = min(c * 8 + 4, groups - 4);
#pragma unroll
  for (int i = 0; i < (P::ROWS + 31) / 32; i++) {
    const int r = i * 32 + lane_number();
    if (P::ROWS % 32 && r >= P::ROWS) break;
    const unsigned char* const from = args.scale + (u64)min(row + r, args.rows - 1) * groups;
    copy4(to + r * 16 + c % 2 * 8, from + first);
    copy4(to + r * 16 + c % 2 * 8 + 4, from + second);
  }
}

// What a stage is asked for: chunk `c` (256 columns) of the tile at `row`.
template <class P>
struct Asks {
  const TensorMap *codes, *wide, *scale;
  const DecodeArgs& args;
  u32 base;
  u64 once, keep;

  __device__ __forceinline__ u32 bar(int stage) const { return base + P::BARRIERS + stage * 8; }

  __device__ __forceinline__ void weight(int stage, int row, int c) const {
    barrier_expect(bar(stage), P::CODES + P::LOADED + (args.mapped ? P::SCALES : 0));
    tensor_load(base + stage * P::CODES, codes, c * 128, row, bar(stage), once);
  }
  __device__ __forceinline__ void tokens(int stage, int c) const {
    const u32 to = base + P::WIDE_AT + stage * P::WIDE;
#pragma unroll
    for (int b = 0; b < P::BOXES; b++) tensor_load(to + b * P::BOX, wide, c * 256 + b * 64, 0, bar(stage), keep);
  }
  __device__ __forceinline__ void scales(int stage, int row, int c) const {
    const u32 to = base + P::SCALES_AT + stage * P::SCALES;
    if (args.mapped) {
      tensor_load(to, scale, c / 2 * 16, row, bar(stage), keep);
    } else {
      copy_scales<P>(args, row, c, to);
      copies_arrive(bar(stage));
    }
  }
};

// codes: a map of bytes [rows, columns / 2], boxes [ROWS, 128] in the 128-byte swizzle. wide, of more than one token:
// bfloat16 [tokens, columns], boxes [8 * TILES, 64] in the swizzle. scale, where it is mapped: bytes [rows, columns / 32], boxes
// [ROWS, 16]. SPAN, RULE: of one token, see `keep_part`; AS_HELD, see `hold_laid`.
//
// Before the kernel before this one has ended, the ring is asked for as much of the weight as it holds, if that is settled;
// else the first codes are asked for, into L2.
template <class P, class OUT, int SPAN, int RULE, int NORM = 0, bool ADD = false>
__device__ __forceinline__ void decode(const TensorMap* codes, const TensorMap* wide, const TensorMap* scale,
                                       const DecodeArgs& args) {
  constexpr int LIMBS = RULE >= 0 ? 1 : 2;  // bytes of a number of one token
  constexpr float POWER = !P::ONE ? 0x1p64f : LIMBS == 1 ? 0.25f : 0.5f;  // the weight's integers are twice its values, too
  static_assert(!NORM || (P::ONE && P::SPLIT == 1), "each thread block norms all of a token that it holds");
  static_assert(!is_fp8<RULE>() || (P::ONE && P::SPLIT == 1), "each thread block has all of a token that it gives a scale");
  static_assert(RULE != AS_HELD || (P::ONE && P::SPLIT == 1 && !NORM), "each thread block takes all of a token, as it is");
  const u32 base = shared_memory(), full = base + P::BARRIERS, empty = full + P::STAGES * 8, zeros = base + P::ZEROS_AT, held = base + P::HELD_AT;
  const u32 warp = warp_number(), rank = P::SPLIT > 1 ? cluster_rank() : 0;
  const int tiles = (args.rows + P::ROWS - 1) / P::ROWS, step = gridDim.x / P::SPLIT;
  const int each = P::SPLIT * P::TEAMS, chunks = ((args.columns + 255) / 256 + each - 1) / each * P::TEAMS;
  const int first = blockIdx.x / P::SPLIT, first_chunk = rank * chunks;
  if (warp == P::WARPS && lane_number() == 0) {
    tensor_prefetch(codes);
    if (!P::ONE) tensor_prefetch(wide);
    if (args.mapped) tensor_prefetch(scale);
  }
  ring_init<P::STAGES, P::WARPS + 1>(warp, full, empty, args.mapped ? 1 : 1 + 32, P::ROW_WARPS);
  if (P::ONE && threadIdx.x == 0) store_shared_words(zeros, Words{});
  block_sync();
  Ring<P::STAGES> ring;
  if (warp == P::WARPS) {
    const Asks<P> ask = {codes, wide, scale, args, base, cache_policy<FIRST>(), cache_policy<LAST>()};
    int tile = first, c = 0;
    const auto next = [&] {
      ring.next();
      if (++c == chunks) c = 0, tile += step;
    };
    if (args.settled) {
#pragma unroll 1
      for (int s = 0; s < P::STAGES && tile < tiles; s++, next()) {
        ask.weight(s, tile * P::ROWS, first_chunk + c);
        ask.scales(s, tile * P::ROWS, first_chunk + c);
      }
    } else {
#pragma unroll 1
      for (int s = 0; s < min(chunks, P::STAGES); s++) tensor_warm(codes, (first_chunk + s) * 128, first * P::ROWS);
    }
    grid_wait();
    if (!P::ONE && args.settled) {
      const int asked = (tile - first) / step * chunks + c;
#pragma unroll 1
      for (int s = 0; s < asked; s++) ask.tokens(s, first_chunk + s % chunks);
    }
    for (; tile < tiles; next()) {
      barrier_wait(empty + ring.stage * 8, ring.parity ^ 1);
      ask.weight(ring.stage, tile * P::ROWS, first_chunk + c);
      ask.tokens(ring.stage, first_chunk + c);
      ask.scales(ring.stage, tile * P::ROWS, first_chunk + c);
    }
  } else {
    float token_scale = 1.f;  // of e4m3's codes
    if constexpr (NORM > 0) {
      if (!args.settled) grid_wait();
      token_scale = hold_normed<32 * P::WARPS, SPAN, RULE, NORM>(args.x, args.norm, args.epsilon, args.columns, chunks * 32,
                                                                 args.root, held, base + P::SQUARES_AT, base + P::MAXIMA_AT);
    } else {
      grid_wait();
      if constexpr (is_fp8<RULE>())
        token_scale = hold_codes<32 * P::WARPS, RULE>(args.x, args.columns, chunks * 32, held, base + P::MAXIMA_AT);
      else if constexpr (RULE == AS_HELD)
        hold_laid<32 * P::WARPS>(args.x, args.columns, chunks * 32, held);
      else if constexpr (P::ONE)
        hold<32 * P::WARPS, SPAN, RULE>(args.x, args.columns, first_chunk * 256, chunks * 32, args.root, held);
    }
    if constexpr (P::ONE) named_sync(1, 32 * P::WARPS);
    const u32 team = warp / P::ROW_WARPS, row_warp = warp % P::ROW_WARPS;
    const u32 row = row_warp * 16 * P::TALL, mine = row + turned(lane_number() >> 2);
    const u32 codes_at = base + swizzled(mine, 0), scales_at = base + P::SCALES_AT + mine * 16;
    // Always this, but not for the compiler, who would put a constant into a register for each permutation.
    const u32 small = __shfl_sync(0xFFFFFFFFu, (int)lane_number() + args.columns > 0 ? 0x03020100u : 0, 0);
    ring.stage = team;
    for (int tile = first; tile < tiles; tile += step) {
      Sums<P> sums;
      sums.clear();
      Addends<P> addends = {};
      if constexpr (ADD && P::SPLIT == 1) addends.load(args, tile * P::ROWS, 0);
      for (int c = team; c < chunks; c += P::TEAMS) {
        barrier_wait(full + ring.stage * 8, ring.parity);
        const u32 tokens = P::ONE ? held + c * HELD_STEP : base + P::WIDE_AT + ring.stage * P::WIDE;
        const u32 codes_here = codes_at + ring.stage * P::CODES, scales_here = scales_at + ring.stage * P::SCALES + (first_chunk + c) % 2 * 8;
        u32 seen;
        if constexpr (P::ONE) {
          seen = sums.template add_held<LIMBS>(codes_here, scales_here, tokens, zeros, small);
        } else if constexpr (P::GROUPED) {
          seen = sums.add_grouped(codes_here, scales_here, tokens);
        } else {
          seen = sums.add(codes_here, scales_here, tokens);
        }
        hand_back(empty + ring.stage * 8, seen);
        ring.stage += P::TEAMS;
        if (ring.stage >= P::STAGES) ring.stage = team, ring.parity ^= 1;
      }
      if constexpr (P::ONCE) named_sync(1, 32 * P::WARPS);  // the ring has been read
      sums.store(base + P::SUMS + (team * P::TOKENS * P::PITCH + row) * 4, POWER);
      if constexpr (P::SPLIT == 1) {
        named_sync(1, 32 * P::WARPS);
        store_tile<P, OUT, ADD, is_fp8<RULE>()>(args, tile * P::ROWS, 0, base + P::SUMS, addends, token_scale);
        if (tile + step < tiles) named_sync(1, 32 * P::WARPS);
      }
    }
  }
  if constexpr (P::SPLIT > 1) {
    Addends<P> addends = {};
    if (ADD && warp != P::WARPS) addends.load(args, first * P::ROWS, rank);
    cluster_sync();
    if (warp != P::WARPS) store_tile<P, OUT, ADD>(args, first * P::ROWS, rank, base + P::SUMS, addends);
    cluster_sync();  // a block that has ended has no shared memory
  }
}

}  // namespace quantrot
