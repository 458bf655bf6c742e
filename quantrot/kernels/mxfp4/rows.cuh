// MXFP4 along rows, on Hopper: quantization. expanded_rows.cuh makes e4m3 of a row.
//
// A lane owns a Hadamard block, one, two or four groups of 32 columns; or a group, where neighbouring lanes exchange the
// widest stages (as e4m3). A warp's 32 groups are 2 KiB of 16-bit elements, or 4 of float32: they come through shared memory, copied
// asynchronously some tiles ahead, 16 coalesced bytes a lane, and laid down so that the lanes' own reads meet no bank twice.
//
// Every sum and product is rounded on its own, in the order of the reference: the bits are the reference's.

namespace quantrot {

struct Key {  // of the random numbers: seed and offset, low words first
  u32 s0, s1, o0, o1;

  // With the two numbers added that `drawn` points to: a CUDA graph's replay finds others there.
  __device__ __forceinline__ Key with(const u64* drawn) const {
    const u64 seed = ((u64)s1 << 32 | s0) + drawn[0], offset = ((u64)o1 << 32 | o0) + drawn[1];
    return {(u32)seed, (u32)(seed >> 32), (u32)offset, (u32)(offset >> 32)};
  }
};

struct QuantizeArgs {
  const void* x;           // [groups, 32], 16-bit elements; packed: or float32
  const float* signs;      // [32 * SPAN], +-1
  unsigned char* packed;   // [groups, 16]
  unsigned char* scale;    // [groups]
  void* mask;              // [groups], 32 bits each; e4m3: the operand, [groups, 32]
  float* row_scale;        // e4m3: [rows]
  int* outside;            // e4m3: [rows]
  i64 rows, row_groups;    // packed: one row of all groups
  float root;              // Hadamard's 1 / sqrt
  Key key;
  const u64* drawn;        // of a kernel that adds them to the key

  __device__ __forceinline__ QuantizeArgs with_drawn() const {
    QuantizeArgs now = *this;
    now.key = key.with(drawn);
    return now;
  }
};

#ifdef QUANTROT_EMULATED
#include "rows.h"
#else
__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ u32 load_shared32(u32 from) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared32(u32 to, u32 v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}
__device__ __forceinline__ void store_shared16(u32 to, u32 v) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"((unsigned short)v) : "memory");
}
__device__ __forceinline__ u32 half_to_e4m3(u32 pair) {
  unsigned short r;
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(r) : "r"(pair));
  return r;
}
__device__ __forceinline__ int warp_max(int v) { return __reduce_max_sync(0xFFFFFFFFu, v); }
__device__ __forceinline__ int warp_sum(int v) { return __reduce_add_sync(0xFFFFFFFFu, v); }
// 0, 1, 2, ... to whichever warp of the block asks; the counter starts as 0. (Of `add` the compiler makes one for all lanes that
// may have come, 11 instructions more.)
__device__ __forceinline__ u32 next_number(u32 counter) {
  u32 number = 0;
  if (lane_number() == 0) asm volatile("atom.shared.inc.u32 %0, [%1], 0x7FFFFFFF;" : "=r"(number) : "r"(counter) : "memory");
  return __shfl_sync(0xFFFFFFFFu, number, 0);
}
__device__ __forceinline__ int* block_numbers(int at) {
  extern __shared__ __align__(1024) unsigned char quantrot_shared[];
  return (int*)(quantrot_shared + at);
}
#endif

// Philox4x32-7 of (counter, offset) under the key.
struct Philox {
  u32 words[4];

  __device__ __forceinline__ Philox() {}
  __device__ __forceinline__ Philox(u64 counter, const Key& key) {
    u32 c0 = (u32)counter, c1 = (u32)(counter >> 32), c2 = key.o0, c3 = key.o1, k0 = key.s0, k1 = key.s1;
#pragma unroll
    for (int i = 0; i < 7; i++) {
      const u64 a = (u64)c0 * 0xD2511F53u, b = (u64)c2 * 0xCD9E8D57u;
      c0 = (u32)(b >> 32) ^ c1 ^ k0, c2 = (u32)(a >> 32) ^ c3 ^ k1, c1 = (u32)b, c3 = (u32)a;
      k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
  }
};

// Nine bits for each of a group's 32 elements, for four elements of each word from bit 0, 7, 16 and 23 on, which is where
// pairs of elements take them: the words that Philox made of four groups, and the sums of three of them; of all but the first
// group each with the sum of two words, their halves exchanged.
struct Random {
  u32 words[8];

  __device__ __forceinline__ Random() {}
  __device__ __forceinline__ Random(const Philox& four, u64 group) {
    u32 a = four.words[0], b = four.words[1], c = four.words[2], d = four.words[3];
    const u32 odd = 0u - ((u32)group & 1), second = 0u - ((u32)group >> 1 & 1);  // all ones, or none
    const u32 two = (b ^ c) & odd ^ (a ^ b) & second, more = __byte_perm(two, two, 0x1032);
    a ^= more, b ^= more, c ^= more, d ^= more;
    words[0] = a, words[1] = b, words[2] = c, words[3] = d;
    words[4] = a ^ b ^ c, words[5] = a ^ b ^ d, words[6] = a ^ c ^ d, words[7] = b ^ c ^ d;
  }
};

// A pair of elements, with the word's bits from 0 and 16 on added, or (ODD) from 7 and 23 on: two instructions each.
template <bool ODD>
__device__ __forceinline__ u32 with_bits(u32 pair, u32 word) {
  return ODD ? pair + (select_bits(0, word, 0xFF80FF80u) >> 7) : pair + (word & 0x01FF01FFu);
}

// Codes of a group and, of MASK, which elements are within 6 scales (bit i: element i); factor: see fine_factor.
template <class IN, int SPAN, int RULE, bool MASK, bool DITHER>
__device__ __forceinline__ Words codes_of(const Group& x, float factor, const Random& random, u32& within) {
  // Bits are collected as sums of float16's subnormals, of eight elements a word, on a pipe that has room (91.7 us for 93.8 with
  // ors, blocks of 64): bit 4 k + r of a word's lower half is element 4 k + r, bit 4 k + 2 + r of its upper one that element.
  constexpr u32 BIT[4] = {0x00040001u, 0x00080002u, 0x00400010u, 0x00800020u};
  u32 words[4], kept[4] = {};
#pragma unroll
  for (int half = 0; half < 2; half++) {
    u32 p[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int low = half * 16 + i / 2 * 4 + i % 2;
      p[i] = fine_pair<IN, SPAN, RULE>(x.v[low], x.v[low + 2], factor);
      if constexpr (MASK) kept[low / 8] = fma_half(within_half(p[i], SIX), BIT[i % 4], kept[low / 8]);
      if constexpr (clamps<RULE>()) p[i] = clamp_half(p[i], SIX);
    }
    if constexpr (DITHER) {
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        p[i] = with_bits<false>(p[i], random.words[half * 4 + i / 2]);
        p[i + 1] = with_bits<true>(p[i + 1], random.words[half * 4 + i / 2]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) p[i] = to_nearest(p[i]);
    }
    words[half * 2] = code_word(p[0], p[1], p[2], p[3]), words[half * 2 + 1] = code_word(p[4], p[5], p[6], p[7]);
  }
  const u32 first = kept[0] + (kept[1] << 8), last = kept[2] + (kept[3] << 8);
  within = __byte_perm(first, last, 0x5410) | __byte_perm(first, last, 0x7632);
  return {words[0], words[1], words[2], words[3]};
}

// N groups of a lane as codes, which `keep` takes, clip bits, and their scales' bytes. SPAN: if not 0, after Sylvester's matrix
// of 32. DITHER: with random(n) of the nth.
template <class IN, int SPAN, int RULE, bool MASK, bool DITHER, int N, class Numbers, class Keep>
__device__ __forceinline__ u32 quantize_groups(Group (&x)[N], float root, const Numbers& random, u32 (&kept)[N], const Keep& keep) {
  constexpr bool ESTIMATES = RULE == QUEST && SPAN != 0;
  u32 squares[N], lost = 0, scales = 0;  // lost: ones in the bytes of groups that are not finite
  if constexpr (ESTIMATES) lost = quest_squares(x, squares, root);
  if constexpr (ESTIMATES && N == 4)  // 96 us; each before its codes, which is faster with fewer of them, 98
#pragma unroll
    for (int n = 0; n < N; n++) x[n].turn_within();
#pragma unroll
  for (int n = 0; n < N; n++) {
    int exponent;
    if constexpr (ESTIMATES) {
      if constexpr (N < 4) x[n].turn_within();
      exponent = quest_exponent(squares[n]);
    } else {
      const Exponent found = exponent_of<RULE, SPAN != 0>(x[n], root);
      exponent = found.value;
      if (!found.finite) x[n] = {}, lost |= 255u << 8 * n;
    }
    const float factor = fine_factor<RULE>(exponent, root);
    Random numbers;
    if constexpr (DITHER) numbers = random(n);
    const Words codes = codes_of<IN, SPAN, RULE, MASK, DITHER>(x[n], factor, numbers, kept[n]);
    scales |= (u32)(exponent + 127) << 8 * n;
    keep(n, codes);
  }
  if (MASK && lost)
#pragma unroll
    for (int n = 0; n < N; n++)
      if (lost >> 8 * n & 255) kept[n] = 0;
  return scales | lost;
}

// N bytes, or words, at once.
template <int N>
__device__ __forceinline__ void store_part(unsigned char* p, u32 bytes) {
  if constexpr (N == 1) *p = (unsigned char)bytes;
  if constexpr (N == 2) *(unsigned short*)p = (unsigned short)bytes;
  if constexpr (N == 4) *(u32*)p = bytes;
}
template <int N>
__device__ __forceinline__ void store_each(u32* p, const u32 (&words)[N]) {
  if constexpr (N == 1) *p = words[0];
  if constexpr (N == 2) *(u64*)p = words[0] | (u64)words[1] << 32;
  if constexpr (N == 4) store_words(p, {words[0], words[1], words[2], words[3]});
}

// --- Tiles -------------------------------------------------------------------------------------------------------------

constexpr u32 TILE = 2048;  // bytes: 32 groups of 16-bit elements

struct Fp32 {
  static constexpr bool BRAIN = false;
  static constexpr int BYTES = 4;
};
template <class IN>
constexpr int HALVES = IN::BYTES / 2;  // pieces of 64 bytes that a group is: one of 16-bit elements, two of float32

// Where a lane's 16-byte units are turned to, so that eight lanes that read one each meet no bank twice.
template <int N>
__device__ __forceinline__ u32 turned_by(u32 lane) { return N == 1 ? lane / 2 % 4 : lane % 8; }

// Start copying 32 N pieces of 64 bytes (see HALVES) from `first` on, N to a lane, those past `end` from the last one. Unit u of a
// lane's 4 N goes to u ^ turned_by(lane).
template <int N>
__device__ __forceinline__ void start_tile(u32 to, const void* x, i64 first, i64 end) {
  const u32 lane = lane_number(), at = to | (lane ^ (N == 1 ? lane / 8 : lane / (4 * N))) * 16;
  const char* const from = (const char*)x + first * 64 + lane * 16;
  const bool whole = end - first >= 32 * N;
  const u32 last = (u32)(end - first) * 4 - 1;
  if (whole) {
#pragma unroll
    for (u32 i = 0; i < 4 * N; i++) copy16((at ^ i * (8 / N) % 8 * 16) + i * 512, from + i * 512);
  } else {
#pragma unroll
    for (u32 i = 0; i < 4 * N; i++)
      copy16((at ^ i * (8 / N) % 8 * 16) + i * 512, (const char*)x + first * 64 + min(i * 32 + lane, last) * 16);
  }
}

constexpr u32 SIGN_PITCH = 36;  // words of 32 sign bits: four lanes that read those of different groups meet no bank twice

// The sign bits of `count` groups' factors, a word each, by the first threads of a block.
__device__ __forceinline__ void store_signs(u32 to, const float* signs, u32 count) {
  for (u32 i = threadIdx.x; i < count * 32; i += blockDim.x)
    store_shared32(to + (i / 32 * SIGN_PITCH + i % 32) * 4, __float_as_uint(signs[i]) & 0x80000000u);
}

// The low (HIGH: the high) 16-bit element of a word, negative where `flip` has the sign bit; of bfloat16 one instruction.
template <class IN, bool HIGH>
__device__ __forceinline__ float signed_value(u32 two, u32 flip) {
  if constexpr (IN::BRAIN) return __uint_as_float(HIGH ? (two & 0xFFFF0000u) ^ flip : two * 65536u + flip);
  return __uint_as_float(__float_as_uint(IN::value((unsigned short)(HIGH ? two >> 16 : two))) ^ flip);
}

// Elements from `first` on of 16 bytes of them; flips: sign bits of the group's (see store_signs).
template <class IN, bool SIGNS>
__device__ __forceinline__ void take_unit(Group& x, int first, const Words& unit, u32 flips) {
#pragma unroll
  for (int i = 0; i < 16 / IN::BYTES; i += 4) {
    float* const v = x.v + first + i;
    const Words flip = SIGNS ? load_shared_words(flips + (first + i) * 4) : Words{};
    if constexpr (IN::BYTES == 4) {
#pragma unroll
      for (int k = 0; k < 4; k++) v[k] = __uint_as_float(unit.at(k) ^ flip.at(k));
    } else {
      v[0] = signed_value<IN, false>(unit.at(i / 2), flip.x), v[1] = signed_value<IN, true>(unit.at(i / 2), flip.y);
      v[2] = signed_value<IN, false>(unit.at(i / 2 + 1), flip.z), v[3] = signed_value<IN, true>(unit.at(i / 2 + 1), flip.w);
    }
  }
}

struct AsTheyAre {
  __device__ __forceinline__ Words operator()(const Words& words, u32) const { return words; }
};

// A lane's N groups of a tile; flips: of the first. made(words, from): what is taken of the 16 bytes that lie at `from`.
template <class IN, int N, bool SIGNS, class Made = AsTheyAre>
__device__ __forceinline__ void read_groups(Group (&x)[N], u32 tile, u32 flips, const Made& made = {}) {
  constexpr int M = HALVES<IN> * N, UNITS = 4 * HALVES<IN>;
  const u32 at = tile + lane_number() * (64 * M) + turned_by<M>(lane_number()) * 16;
#pragma unroll
  for (int p = 0; p < UNITS; p++)
#pragma unroll
    for (int n = 0; n < N; n++) {
      const int unit = n * UNITS + p;
      const u32 from = (at ^ unit % 8 * 16) + unit / 8 * 128;
      take_unit<IN, SIGNS>(x[n], p * (16 / IN::BYTES), made(load_shared_words(from), from), flips + n * (SIGN_PITCH * 4));
    }
}

// Sylvester's matrix of N groups of a lane.
template <int N>
__device__ __forceinline__ void turn_groups(Group (&x)[N]) {
#pragma unroll
  for (int half = N / 2; half; half /= 2)
#pragma unroll
    for (int n = 0; n < N; n++)
      if (!(n & half))
#pragma unroll
        for (int i = 0; i < 32; i++) {
          const float a = x[n].v[i], b = x[n + half].v[i];
          x[n].v[i] = __fadd_rn(a, b), x[n + half].v[i] = __fsub_rn(a, b);
        }
}

// Tiles of 32 N of x's pieces of 64 bytes, by the warps of all blocks: work(number, where it lies in shared memory), after ahead(number), while
// it is on its way. A block's warps take its tiles in turn, each the next when it is ready for one: where every warp had its own
// from the start, 12 of a multiprocessor's 16 were active on average. ring: of this warp; counter: zero.
template <int N, int STAGES, class Ahead, class Work>
__device__ __forceinline__ void each_tile(const void* x, u32 groups, u32 ring, u32 counter, const Ahead& ahead, const Work& work) {
  constexpr u32 PIECE = N * TILE;
  const u32 tiles = (groups + 32 * N - 1) / (32 * N);
  u32 taken[STAGES];  // the tile in hand, and those on their way
  u32 into = 0, slot = 0;
  const auto start = [&] {
    const u32 tile = blockIdx.x + next_number(counter) * gridDim.x;
    if (tile < tiles) start_tile<N>(ring + into, x, (i64)tile * (32 * N), groups);
    copies_commit();
    into = into == (STAGES - 1) * PIECE ? 0 : into + PIECE;
    return tile;
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) taken[s] = start();
  while (taken[0] < tiles) {
    warp_sync();  // all lanes have read what is overwritten now
    taken[STAGES - 1] = start();
    ahead(taken[0]);
    copies_wait<STAGES - 1>();
    warp_sync();
    work(taken[0], ring + slot);
    slot = slot == (STAGES - 1) * PIECE ? 0 : slot + PIECE;
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) taken[s] = taken[s + 1];
  }
}

template <class IN, int SPAN, bool SIGNS, int RULE, bool MASK, bool DITHER, int STAGES>
__device__ __forceinline__ void quantize(const QuantizeArgs& args) {
  constexpr int N = SPAN ? SPAN : 1, M = HALVES<IN> * N;
  constexpr u32 PIECE = M * TILE;
  const u32 lane = lane_number(), warps = blockDim.x / 32, ring = shared_memory() + warp_number() * (STAGES * PIECE);
  const u32 flips = shared_memory() + warps * (STAGES * PIECE), counter = flips + N * SIGN_PITCH * 4;
  const u32 groups = (u32)(args.rows * args.row_groups);
  if constexpr (SIGNS) store_signs(flips, args.signs, SPAN);
  if (threadIdx.x == 0) store_shared32(counter, 0);
  block_sync();
  const auto work = [&](u32 tile_number, u32 tile) {
    Group x[N];
    read_groups<IN, N, SIGNS>(x, tile, flips);
    turn_groups<N>(x);
    const u32 group = (tile_number * 32 + lane) * N;
    u32 kept[N];
    Philox four;
    const auto random = [&](int n) {
      if (n == 0) four = Philox(group / 4, args.key);
      return Random(four, group | n);
    };
    const auto keep = [&](int n, const Words& codes) {
      if constexpr (N < 4) {
        if (group < groups) store_words(args.packed + (i64)group * 16 + n * 16, codes);
      } else {
        if (n == 0) warp_sync();
        store_shared_words(tile + lane * 64 ^ (n ^ lane / 2 % 4) * 16, codes);
      }
    };
    const u32 scales = quantize_groups<IN, SPAN, RULE, MASK, DITHER>(x, args.root, random, kept, keep);
    if constexpr (N == 4) {  // so that whole lines are written: 106 us for 112 (bulk copies of what lanes left in a row 101 for 97)
      warp_sync();
      const u32 first = tile_number * (32 * N), left = groups - first, from = tile + (lane ^ lane / 8) * 16;
      unsigned char* const to = args.packed + (u64)(first + lane) * 16;
      if (left >= 32 * N) {
#pragma unroll
        for (u32 n = 0; n < N; n++) store_words(to + n * 512, load_shared_words(from + n * 512));
      } else {
#pragma unroll
        for (u32 n = 0; n < N; n++)
          if (lane + n * 32 < left) store_words(to + n * 512, load_shared_words(from + n * 512));
      }
    }
    if (group < groups) {
      store_part<N>(args.scale + group, scales);
      if constexpr (MASK) store_each<N>((u32*)args.mask + group, kept);
    }
  };
  each_tile<M, STAGES>(args.x, HALVES<IN> * groups, ring, counter, [](u32) {}, work);
}

}  // namespace quantrot
