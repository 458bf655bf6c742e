// MXFP4 along rows, on Hopper: quantization (packed, or as e4m3 with one power of two a row) and dequantization.
//
// A lane owns a group of 32 columns; a Hadamard block of 64 or 128 is 2 or 4 neighbouring lanes, which exchange its widest
// stages. A warp's 32 groups are 2 KiB of 16-bit elements: they come through shared memory, copied asynchronously some
// tiles ahead, 16 coalesced bytes a lane, and laid down so that the lanes' own reads meet no bank twice.
//
// Every sum and product is rounded on its own, in the order of the reference: the bits are the reference's.

namespace quantrot {

struct Key {  // of the random numbers: seed and offset, low words first
  u32 s0, s1, o0, o1;
};

struct QuantizeArgs {
  const void* x;           // [groups, 32], 16-bit elements
  const float* signs;      // [32 * SPAN], +-1
  unsigned char* packed;   // [groups, 16]
  unsigned char* scale;    // [groups]
  void* mask;              // [groups], 32 bits each; e4m3: the operand, [groups, 32]
  float* row_scale;        // e4m3: [rows]
  int* outside;            // e4m3: [rows]
  i64 rows, row_groups;    // packed: one row of all groups
  float root;              // Hadamard's 1 / sqrt
  Key key;
};

#ifdef QUANTROT_EMULATED
#include "rows.h"
#else
__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ u32 load_shared32(u32 from) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared32(u32 to, u32 v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}
__device__ __forceinline__ u32 half_to_e4m3(u32 pair) {
  unsigned short r;
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(r) : "r"(pair));
  return r;
}
__device__ __forceinline__ int warp_max(int v) { return __reduce_max_sync(0xFFFFFFFFu, v); }
__device__ __forceinline__ int warp_sum(int v) { return __reduce_add_sync(0xFFFFFFFFu, v); }
__device__ __forceinline__ int* block_numbers(int at) {
  extern __shared__ __align__(1024) unsigned char quantrot_shared[];
  return (int*)(quantrot_shared + at);
}
#endif

// Philox4x32-7 of (counter, offset) under the key: sixteen times nine bits, for four elements of each word from bit 0, 7,
// 16 and 23 on, which is where pairs of elements take them.
struct Random {
  u32 words[4];

  __device__ __forceinline__ Random(u64 counter, const Key& key) {
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

// Codes of a group and, of MASK, which elements are within 6 scales (bit i: element i); factor: see factor_of.
template <int RULE, bool MASK, bool DITHER>
__device__ __forceinline__ Words codes_of(const Group& x, float factor, u64 number, const Key& key, u32& within) {
  u32 words[4], kept[2] = {};  // of 16 elements each; bit 4 k + r: elements 4 k + r and, 16 bits further, 4 k + 2 + r
#pragma unroll
  for (int half = 0; half < 2; half++) {
    u32 p[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int low = half * 16 + i / 2 * 4 + i % 2;
      p[i] = Fp16::pack(__fmul_rn(x.v[low], factor), __fmul_rn(x.v[low + 2], factor));
      if constexpr (MASK) kept[half] |= within_half(p[i], SIX) & 0x00010001u << (low % 16);
      if constexpr (clamps<RULE>()) p[i] = clamp_half(p[i], SIX);
    }
    if constexpr (DITHER) {
      const Random random(number * 2 + half, key);
#pragma unroll
      for (int i = 0; i < 8; i++) p[i] += random.words[i / 2] >> (i % 2 ? 7 : 0) & 0x01FF01FFu;
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) p[i] = to_nearest(p[i]);
    }
    words[half * 2] = code_word(p[0], p[1], p[2], p[3]), words[half * 2 + 1] = code_word(p[4], p[5], p[6], p[7]);
  }
  within = __byte_perm(kept[0], kept[1], 0x5410) | __byte_perm(kept[0], kept[1], 0x7632) << 2;
  return {words[0], words[1], words[2], words[3]};
}

// --- Tiles -------------------------------------------------------------------------------------------------------------

constexpr u32 TILE = 2048;  // bytes: 32 groups of 16-bit elements

// Start copying the groups `first` ... `first + 31`, those past `end` from the last one. Piece p of group g goes to
// p ^ (g / 2 % 4) of the group's four places.
__device__ __forceinline__ void start_tile(u32 to, const void* x, i64 first, i64 end) {
  const u32 lane = lane_number();
  const char* const from = (const char*)x + first * 64;
  to += ((lane & ~3u) | ((lane & 3) ^ (lane >> 3))) * 16;
  if (end - first >= 32) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) copy16(to + i * 512, from + lane * 16 + i * 512);
  } else {
    const u32 last = (u32)(end - first) * 4 - 1;
#pragma unroll
    for (u32 i = 0; i < 4; i++) copy16(to + i * 512, from + min(i * 32 + lane, last) * 16);
  }
}

// The sign bits to flip in each word of a lane's group.
template <int SPAN>
__device__ __forceinline__ void read_signs(u32 (&flips)[16], const float* signs) {
  signs += lane_number() % SPAN * 32;
#pragma unroll
  for (int i = 0; i < 16; i++)
    flips[i] = (signs[2 * i] < 0 ? 0x8000u : 0) | (signs[2 * i + 1] < 0 ? 0x80000000u : 0);
}

// The lane's 64 bytes of a tile; flips: the sign bits to be flipped in each word, or null.
template <class IN>
__device__ __forceinline__ void read_group(Group& x, u32 tile, const u32* flips) {
  const u32 lane = lane_number(), at = tile + lane * 64 + (lane >> 1 & 3) * 16;
#pragma unroll
  for (int p = 0; p < 4; p++) {
    const Words w = load_shared_words(at ^ p * 16);
    u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (flips) words[i] ^= flips[p * 4 + i];
      x.v[p * 8 + i * 2] = IN::value((unsigned short)words[i]);
      x.v[p * 8 + i * 2 + 1] = IN::value((unsigned short)(words[i] >> 16));
    }
  }
}

template <class IN, int SPAN, bool SIGNS, int RULE, bool MASK, bool DITHER, int STAGES>
__device__ __forceinline__ void quantize(const QuantizeArgs& args) {
  const u32 lane = lane_number(), warps = blockDim.x / 32, ring = shared_memory() + warp_number() * (STAGES * TILE);
  const i64 groups = args.rows * args.row_groups, stride = (i64)gridDim.x * warps;
  const i64 tiles = (groups + 31) / 32;
  u32 flips[16];
  if constexpr (SIGNS) read_signs<SPAN>(flips, args.signs);
  const i64 begin = (i64)blockIdx.x * warps + warp_number();
  i64 ahead = begin;
  u32 into = 0, slot = 0;
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++, ahead += stride, into += TILE) {
    if (ahead < tiles) start_tile(ring + into, args.x, ahead * 32, groups);
    copies_commit();
  }
  for (i64 tile = begin; tile < tiles; tile += stride, ahead += stride) {
    warp_sync();  // all lanes have read what is overwritten now
    if (ahead < tiles) start_tile(ring + into, args.x, ahead * 32, groups);
    copies_commit();
    copies_wait<STAGES - 1>();
    warp_sync();
    Group x;
    read_group<IN>(x, ring + slot, SIGNS ? flips : nullptr);
    into = into == (STAGES - 1) * TILE ? 0 : into + TILE, slot = slot == (STAGES - 1) * TILE ? 0 : slot + TILE;
    x.turn_across<SPAN>();
    const i64 group = tile * 32 + lane;
    const Exponent exponent = exponent_of<RULE, SPAN != 0>(x, args.root);
    u32 within;
    Words codes = codes_of<RULE, MASK, DITHER>(x, fine_factor<RULE>(exponent.value, args.root), group, args.key, within);
    if (!exponent.finite) codes = {}, within = 0;
    if (group < groups) {
      store_words(args.packed + group * 16, codes);
      args.scale[group] = exponent.byte();
      if constexpr (MASK) ((u32*)args.mask)[group] = within;
    }
  }
}

// --- As e4m3 -----------------------------------------------------------------------------------------------------------

constexpr int TOP = 6, WINDOW = 15, LEAST_TOP = -120;

// A thread block a row at a time. Where a group lies below e4m3's window (or is zero) the packed row is written too.
template <class IN, int SPAN, bool SIGNS, int RULE, int STAGES>
__device__ __forceinline__ void quantize_expanded(const QuantizeArgs& args) {
  const u32 lane = lane_number(), warp = warp_number(), warps = blockDim.x / 32;
  const u32 ring = shared_memory() + warp * (STAGES * TILE);
  int* numbers = block_numbers(warps * STAGES * TILE);  // three sets of [top, -least, count][warps], in turn
  const i64 row_groups = args.row_groups, mine = (i64)warp * 32;
  u32 flips[16];
  if constexpr (SIGNS) read_signs<SPAN>(flips, args.signs);
  i64 ahead = blockIdx.x;
  u32 into = 0, slot = 0, turn = 0;
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++, ahead += gridDim.x, into += TILE) {
    if (ahead < args.rows) start_tile(ring + into, args.x, ahead * row_groups + mine, (ahead + 1) * row_groups);
    copies_commit();
  }
  const bool inside = mine + lane < row_groups;
  for (i64 row = blockIdx.x; row < args.rows; row += gridDim.x, ahead += gridDim.x) {
    warp_sync();
    if (ahead < args.rows) start_tile(ring + into, args.x, ahead * row_groups + mine, (ahead + 1) * row_groups);
    copies_commit();
    copies_wait<STAGES - 1>();
    warp_sync();
    Group x;
    read_group<IN>(x, ring + slot, SIGNS ? flips : nullptr);
    into = into == (STAGES - 1) * TILE ? 0 : into + TILE, slot = slot == (STAGES - 1) * TILE ? 0 : slot + TILE;
    x.turn_across<SPAN>();
    const Exponent exponent = exponent_of<RULE, SPAN != 0>(x, args.root);
    const bool counts = exponent.finite && inside;
    int* const set = numbers + turn * warps * 3;
    turn = turn == 2 ? 0 : turn + 1;
    const int most = warp_max(counts ? max(exponent.value, LEAST_TOP) : LEAST_TOP), least = warp_max(counts ? -exponent.value : -127);
    if (lane == 0) set[warp] = most, set[warps + warp] = least;
    block_sync();
    const int top = warp_max(lane < warps ? set[lane] : LEAST_TOP);
    const int bottom = warp_max(lane < warps ? set[warps + lane] : -127);
    const int shift = exponent.value - top + TOP;
    const float factor = fine_factor<RULE>(exponent.value, args.root);
    const u32 unit = exponent.finite ? half_power(max(shift, -14)) : 0x7FFF7FFFu;  // from -13 on all are zero
    const i64 group = row * row_groups + mine + lane;
    u32 words[8];
#pragma unroll
    for (int w = 0; w < 8; w++) {
      u32 e[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        u32 p = Fp16::pack(__fmul_rn(x.v[w * 4 + 2 * i], factor), __fmul_rn(x.v[w * 4 + 2 * i + 1], factor));
        if constexpr (clamps<RULE>()) p = clamp_half(p, SIX);
        e[i] = half_to_e4m3(times_half(times_half(to_nearest(p) & 0x8E008E00u, half_power(14)), unit));
      }
      words[w] = e[0] | e[1] << 16;
    }
    if (inside) {
      store_words((char*)args.mask + group * 32, {words[0], words[1], words[2], words[3]});
      store_words((char*)args.mask + group * 32 + 16, {words[4], words[5], words[6], words[7]});
    }
    int outside = 0;
    if (-bottom <= top - WINDOW) {  // the same for all threads
      u32 within;
      Words codes = codes_of<RULE, false, false>(x, factor, 0, args.key, within);
      if (!exponent.finite) codes = {};
      if (inside) {
        store_words(args.packed + group * 16, codes);
        args.scale[group] = exponent.byte();
      }
      const bool used = ((codes.x | codes.y | codes.z | codes.w) & 0x77777777u) != 0;
      const int count = warp_sum(counts && used && shift <= TOP - WINDOW);
      if (lane == 0) set[2 * warps + warp] = count;
      block_sync();
      outside = warp_sum(lane < warps ? set[2 * warps + lane] : 0);
    }
    if (threadIdx.x == 0) args.row_scale[row] = power(top - TOP), args.outside[row] = outside;
  }
}

// --- Dequantization ----------------------------------------------------------------------------------------------------

// Codes P and P + 4 of a word (P: 0, 1), as bfloat16 times 2^-126: see decode.cuh.
template <int P>
__device__ __forceinline__ u32 pair(u32 word) {
  return (word & (0x000F000Fu << 4 * P)) * ((64u + 4096u) >> 4 * P) & 0x81C081C0u;
}

// Words of eight codes [words], and their groups' scales, to bfloat16 [words, 8]; EACH words a thread.
template <int EACH>
__device__ __forceinline__ void dequantize(const u32* packed, const unsigned char* scale, void* y, i64 words) {
  const i64 first = (i64)blockIdx.x * (blockDim.x * EACH) + threadIdx.x;
  u32 word[EACH], byte[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const i64 at = min(first + i * (i64)blockDim.x, words - 1);
    word[i] = __ldg(packed + at), byte[i] = __ldg(scale + at / 4);
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const i64 at = first + i * (i64)blockDim.x;
    const u32 factor = byte[i] == 255 ? 0x7FFF7FFFu : max(byte[i] << 7, 0x40u) * 0x00010001u, high = word[i] >> 8;
    constexpr u32 UNIT = 0x7E807E80u;  // 2^126
    const u32 a = times_bf16(times_bf16(pair<0>(word[i]), UNIT), factor);
    const u32 b = times_bf16(times_bf16(pair<1>(word[i]), UNIT), factor);
    const u32 c = times_bf16(times_bf16(pair<0>(high), UNIT), factor);
    const u32 d = times_bf16(times_bf16(pair<1>(high), UNIT), factor);
    if (at < words)
      store_words((char*)y + at * 16, {__byte_perm(a, b, 0x5410), __byte_perm(c, d, 0x5410), __byte_perm(a, b, 0x7632),
                                       __byte_perm(c, d, 0x7632)});
  }
}

}  // namespace quantrot
