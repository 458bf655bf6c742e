// Columns of MXFP4 codes that lie in rows, and their transform on tensor cores, on Hopper. Follows columns.cuh.

namespace quantrot {

constexpr int SPREAD = 12, LEAST_BYTE = 20, MOST_BYTE = 220;  // no power of two of a result is at float32's ends
constexpr u32 TEAM = 4;  // warps that share a tile: of 128 rows a line of codes and 16 bytes of scales, half of them the tile's
constexpr u32 STRIP = 64, CODE_TILE = TALL * TEAM * STRIP / 2, SCALE_TILE = TALL * 16;  // columns of a warp; bytes
constexpr u32 COLUMN_PITCH = 64;  // bytes of a column's codes, 4 g + c is the 8 c + g-th: 16 a group, group n's at n ^ g / 2
constexpr u32 POWER_PITCH = 80;   // bytes of 32 rows' powers of two: four lanes meet no bank twice

// A warp's own memory: codes on their way out, and elsewhere scales, powers of two, half of a block's random numbers.
constexpr u32 WRITTEN = 32 * COLUMN_PITCH, TO_POWERS = STRIP * 32, TO_RANDOM = TO_POWERS + 8 * POWER_PITCH, HALF_RANDOM = 512;

// Of a strip's column c, of the n-th of eight tiles.
__device__ __forceinline__ u32 word_of_scales(u32 scales, u32 c, u32 n) { return scales + (c * 8 + (n ^ c / 4) % 8) * 4; }

struct Columns {  // 32 of a tile
  u32 codes;      // 128 rows of 128 bytes: unit u of row r lies at u ^ r % 8
  u32 unit;       // that of these columns
  u32 written;    // the warp's codes on their way out
  u32 scales;     // those on their way out, of a strip, and behind them powers of two and random numbers
  u32 powers;     // of these columns, as float16
  int exponent;   // that these have for a byte of 0
  u32 row, column;  // the first

  // Four words: two rows of four neighbouring columns each; the lane's address is of row r.
  __device__ __forceinline__ Words words(u32 r) const { return load_columns(codes + r * 128 + (unit ^ r % 8) * 16); }
  __device__ __forceinline__ Words words_of(u32 block) const {  // of 32 rows, in the order of products
    const u32 lane = lane_number();
    return words(block * 32 + lane / 8 % 2 * 16 + lane % 8 / 4 * 8 + lane / 16 * 4 + lane % 4);
  }
  __device__ __forceinline__ Words powers_of(u32 block) const {
    return load_shared_words(powers + block * POWER_PITCH + (lane_number() & 3) * 16);
  }
  // The number of its first group of column c, in the result.
  __device__ __forceinline__ u64 group_of(u32 c, u32 rows) const { return (u64)(column + c) * (rows / 32) + row / 32; }
  // Where the scales of column c go, a byte of each block.
  __device__ __forceinline__ u32 scale_word(u32 c) const { return word_of_scales(scales, column % STRIP + c, row / TALL); }
  // Where word q of the codes of column 4 g + c goes, of the lane's g, of a block's rows.
  __device__ __forceinline__ u32 codes_at(u32 c, u32 block, u32 q) const {
    const u32 g = lane_number() >> 2;
    return (written + g * COLUMN_PITCH + g / 2 * 16 + q * 4 ^ block * 16) + c * 8 * COLUMN_PITCH;
  }
};

// --- On tensor cores ---------------------------------------------------------------------------------------------------
//
// Products are [16 columns, 16 rows] by Sylvester's matrix of 16: of a row's five bits they turn by four. An addition and a
// subtraction are the fifth, for a product keeps the pipe of multiplications for eight cycles, an addition for one. ldmatrix turns
// codes as it turns 16-bit elements: lane (g, q) has two rows of columns 4 g ... 4 g + 3, four words of the operand. At half b
// of word t is row 16 (t % 2) + 8 (q / 2) + 4 (t / 2) + 2 (q % 2) + b (eight rows of a word that meet two by two in a bank). The
// matrix's columns are ordered so that the lane's eight results of a column lie side by side, a word of codes: column 2 q + b of
// product i is element 8 q + 4 (i / 2) + 2 b + i % 2. The matrix is multiplied by the rows' powers of two and signs, since a lane
// has fewer words of it than of codes.

// Sylvester's matrix in a lane, of products i and words t: ones and signs, taken by multiplications, in half of an exclusive or's
// time.
struct Sylvester {
  u32 words[2][2];

  __device__ __forceinline__ Sylvester() {
    const u32 g = lane_number() >> 2, q = lane_number() & 3, odd = __popc(g & q) & 1;
#pragma unroll
    for (u32 i = 0; i < 2; i++)
      words[i][0] = 0x3C003C00u ^ odd * 0x80008000u ^ i << 31, words[i][1] = words[i][0] ^ (g >> 2) * 0x80008000u;
  }
  __device__ __forceinline__ u32 times(int i, int t, u32 power) const { return times_half(power, words[i % 2][t % 2]); }
};

#ifndef QUANTROT_EMULATED
__device__ __forceinline__ void load_shared_two(u32 from, u32 (&words)[2]) {
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(from) : "memory");
}
__device__ __forceinline__ void store_shared_byte(u32 to, u32 v) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}
__device__ __forceinline__ u32 larger_halves(u32 a, u32 b) {  // of two 16-bit numbers each
  u32 r;
  asm("max.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ u32 larger_magnitudes(u32 a, u32 b) {  // of two float16 numbers each, with some sign
  u32 r;
  asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// The larger of the magnitudes of a + b and a - b, of two float16 numbers each.
__device__ __forceinline__ u32 sum_of_magnitudes(u32 a, u32 b) {
  u32 r;
  asm("{.reg .b32 x, y;\nabs.f16x2 x, %1;\nabs.f16x2 y, %2;\nadd.rn.f16x2 %0, x, y;\n}" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// Both numbers of a times the first or the second of b.
template <int SECOND>
__device__ __forceinline__ u32 times_one_half(u32 a, u32 b) {
  u32 r;
  if constexpr (SECOND)
    asm("{.reg .b16 l, h;\n.reg .b32 twice;\nmov.b32 {l, h}, %2;\nmov.b32 twice, {h, h};\nmul.rn.f16x2 %0, %1, twice;\n}"
        : "=r"(r) : "r"(a), "r"(b));
  else
    asm("{.reg .b16 l, h;\n.reg .b32 twice;\nmov.b32 {l, h}, %2;\nmov.b32 twice, {l, l};\nmul.rn.f16x2 %0, %1, twice;\n}"
        : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// product_warp<Fp16> with float16 sums: d[h] is row g + 8 h, columns 2 q and the next.
__device__ __forceinline__ void product(u32 (&d)[2], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%0,%1};"
      : "+r"(d[0]), "+r"(d[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// Staged scales: where a tile's 8 bytes of a row begin in a row of the map. Boxes have the unit of 16 bytes that they are half of
// (others are illegal instructions); of two rows that are one of the map the odd ones lie behind the even ones.
__device__ __forceinline__ u32 staged_from(u32 odd, u32 pitch, u32 tile) { return odd * pitch + tile * 8; }
// Those of a lane's first row, in tiles of an even number; in the others the other half of the unit.
__device__ __forceinline__ u32 staged_at(const TransposeArgs& args) {
  const u32 lane = lane_number(), down = args.staged == 2, odd = lane & down;
  return odd * (SCALE_TILE / 2) + (lane >> down) * 16 + staged_from(odd, args.columns / 32, 0) % 16;
}

struct Scales {  // of a strip's rows, a lane's 32 j + lane: a byte of each 32 columns, in 16 bits
  u32 both[4];

  __device__ __forceinline__ u32 byte(u32 j, u32 half) const { return half ? both[j] >> 16 : both[j] & 255; }
  __device__ __forceinline__ int most() const { return most_of(both[0], both[1], both[2], both[3]); }
  __device__ __forceinline__ int least() const { return 255 - most_of(~both[0], ~both[1], ~both[2], ~both[3]); }
  // Of eight bytes of each lane; what is above them is the same in all.
  __device__ __forceinline__ static int most_of(u32 a, u32 b, u32 c, u32 d) {
    const u32 most = larger_halves(larger_halves(a, b), larger_halves(c, d));
    return warp_max(max(most & 255, most >> 16 & 255));
  }
  // From row and column on, or if staged from `at` on. Past the last row: the last 32; past the last column, which staged ones
  // are not: the last.
  __device__ __forceinline__ Scales(const TransposeArgs& args, u32 row, u32 column, u32 at) {
    const u32 last = args.rows - 32 - row, next = column + 32 < (u32)args.columns;
    if (args.staged) {
#pragma unroll
      for (u32 j = 0; j < 4; j++)
        both[j] = __byte_perm(load_shared_u16(at + (min(32 * j, last) * 16 >> args.staged - 1)), 0, 0x4140);
    } else {
#pragma unroll
      for (u32 j = 0; j < 4; j++) {
        const u64 group = (u64)(row + min(32 * j, last) + lane_number()) * (args.columns / 32) + column / 32;
        both[j] = __ldg(args.in_scale + group) | __ldg(args.in_scale + group + next) << 16;
      }
    }
  }
};

__device__ __forceinline__ void product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { product_warp<Fp16>(d, a, b0, b1); }

// A sum and a difference, of a number or of two float16 numbers, which each holds.
__device__ __forceinline__ void add_subtract(float& x, float& y) {
  const float sum = __fadd_rn(x, y);
  y = __fsub_rn(x, y), x = sum;
}
__device__ __forceinline__ void add_subtract(u32& x, u32& y) {
  const u32 sum = fma_half(y, 0x3C003C00u, x);
  y = fma_half(y, 0xBC00BC00u, x), x = sum;
}

// 32 rows of columns 4 g + 2 p and the next by Sylvester's matrix, but for the fifth bit, of four products, each two float16
// words or four float32.
template <class T, int N>
__device__ __forceinline__ void turn_rows(T (&v)[4][N], const Words& codes, const Words& power, const Sylvester& h, int p) {
  u32 a[4][2];
#pragma unroll
  for (int t = 0; t < 4; t++) {  // s000eem0, in half a word's upper byte, is float16's 2^-14 of a code
    const u32 two = codes.at(t), up = p ? 0 : 8;  // rows of four columns
    a[t][0] = select_bits(two << 1, two << 4, 0x80808080u) << up & 0x8E008E00u;
    a[t][1] = select_bits(two >> 3, two, 0x80808080u) << up & 0x8E008E00u;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
#pragma unroll
    for (int t = 0; t < 4; t += 2)
      product(v[t + i], {a[t][0], a[t][1], a[t + 1][0], a[t + 1][1]}, h.times(i, t, power.at(t)),
              h.times(i, t + 1, power.at(t + 1)));
  }
}

template <class T, int N>
__device__ __forceinline__ void turn_fifth(T (&v)[4][N]) {
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int e = 0; e < N; e++) add_subtract(v[i][e], v[2 + i][e]);
}

// Sylvester's matrix between blocks of 32 rows.
template <class T, int SPAN, int P, int N>
__device__ __forceinline__ void turn_blocks(T (&v)[SPAN][P][4][N]) {
#pragma unroll
  for (int half = SPAN / 2; half; half /= 2)
#pragma unroll
    for (int n = 0; n < SPAN; n++)
      if (!(n & half))
#pragma unroll
        for (int i = 0; i < P * 4 * N; i++)
          add_subtract(v[n][i / (4 * N)][i / N % 4][i % N], v[n + half][i / (4 * N)][i / N % 4][i % N]);
}

__device__ __forceinline__ u32 other_word(u32 v, int across) {
  return __float_as_uint(other_lane(__uint_as_float(v), across));
}

// Random words of a lane's eight rows of columns 4 g ... 4 g + 3: four lanes make a column's each, and hand them out through
// shared memory, four words in the warp's own, four where the last block's codes will lie, so that no bank is met twice.
struct Randoms {
  u32 store[2], load[2], next;  // of columns 4 g and 4 g + 2; bits that turn these into those of the next

  __device__ __forceinline__ Randoms(const Columns& tile) {
    const u32 g = lane_number() >> 2, q = lane_number() & 3;
    const auto own = [&](u32 c) { return tile.scales + TO_RANDOM + g * 64 + (g / 2 ^ c) * 16; };
    const auto last = [&](u32 c) { return tile.written + (c * 8 + (g ^ 2 * c)) * COLUMN_PITCH + (3 ^ g / 2 ^ c) * 16; };
    const auto from = [&](u32 c) { return (q < 2 ? own(c) : last(c)) + q % 2 * 8; };
    store[0] = own(q), store[1] = last(q), load[0] = from(0), load[1] = from(2), next = from(0) ^ from(1);
  }
  // Those of COLUMNS columns from 4 g + first on.
  template <int COLUMNS>
  __device__ __forceinline__ void share(const Random& mine, u32 first, u32 (&words)[COLUMNS][2]) const {
    if (COLUMNS == 4 || lane_number() % 4 / COLUMNS == first / COLUMNS) {
      store_shared_words(store[0], {mine.words[0], mine.words[1], mine.words[2], mine.words[3]});
      store_shared_words(store[1], {mine.words[4], mine.words[5], mine.words[6], mine.words[7]});
    }
    warp_sync();
#pragma unroll
    for (u32 c = 0; c < COLUMNS; c++) load_shared_two((first + c < 2 ? load[0] : load[1]) ^ c % 2 * next, words[c]);
    warp_sync();
  }
};

// Powers of two of a strip as float16, with this exponent for a byte of 0, in the order in which lanes (g, q) take a block's
// rows. What is returned is their sum in 2^6, if each lane's is below 1024; else more.
__device__ __forceinline__ u32 store_powers(u32 powers, const Scales& scales, const u32 (&signs)[4], int exponent) {
  const u32 r = lane_number();
  u32 sum = 0;
  const u32 at = r / 8 % 2 * 32 + r / 2 % 2 * 16 + r / 4 % 2 * 8 + r / 16 * 4 + r % 2 * 2;
#pragma unroll
  for (u32 j = 0; j < 4; j++) {
    const u32 power = scales.both[j] * 1024 + (u32)exponent * 0x04000400u, both = power ^ signs[j];
    sum = fma_half(power, 0x24002400u, sum);  // 2^-6
    store_shared16(powers + j * POWER_PITCH + at, both);
    store_shared16(powers + (4 + j) * POWER_PITCH + at, both >> 16);
  }
  const u32 bits = fma_half(sum, 0x3C003C00u, fma_half(__byte_perm(sum, sum, 0x1032), 0x3C003C00u, 0x64006400u));  // 1024 more
  return warp_sum((bits & 0x7FFF) - 0x6400);
}

// Until the copy engine has read the codes that were written last.
__device__ __forceinline__ void codes_free() {
  if (lane_number() == 0) tensor_store_wait<0>();
  warp_sync();
}

// Codes of 32 columns, from the warp's memory to [columns, rows / 2].
__device__ __forceinline__ void write_codes(const TensorMap* packed, const Columns& tile) {
  fence_async();
  warp_sync();
  if (lane_number() == 0) {
    tensor_store_dealt(packed, tile.row / 2, tile.column / 4, tile.written);
    tensor_store_commit();
  }
}

// Of four words, a block's bytes of four columns each, a word of four blocks' bytes of column q.
__device__ __forceinline__ u32 of_column(const u32 (&blocks)[4], u32 q) {
  const u32 select = q | (q + 4) << 4;
  return __byte_perm(__byte_perm(blocks[0], blocks[1], select), __byte_perm(blocks[2], blocks[3], select), 0x5410);
}

// Scales of a strip's tiles `from` ... `to` - 1 of eight that follow each other down from this row, written: if all, 32 bytes a
// column, a sector, of which L2 takes parts so slowly that they were a tenth of the time.
__device__ __forceinline__ void write_scales(const TransposeArgs& args, u32 scales, u32 row, u32 column, u32 from, u32 to) {
  const u32 groups = args.rows / 32, n = lane_number() % 8, c = lane_number() / 8, first = row / 32 + n * 4;
  const u32 columns = min(STRIP, args.columns - column), some = groups % 4 ? min(4u, groups - first) : 0;
  unsigned char* scale = args.scale + (u64)(column + c) * groups + first;
  const auto word = [&](u32 i) { return load_shared32(word_of_scales(scales, 4 * i + c, n)); };
  const bool own = n >= from && n < to;
  warp_sync();
  if (own && some)
#pragma unroll 1
    for (u32 i = 0; i < columns / 4; i++, scale += 4 * groups)
      for (u32 j = 0; j < some; j++) scale[j] = (unsigned char)(word(i) >> 8 * j);
  if (own && !some)
#pragma unroll
    for (u32 i = 0; i < STRIP / 4; i++, scale += 4 * groups)
      if (i < 8 || columns == STRIP) *(u32*)scale = word(i);
  warp_sync();
}

}  // namespace quantrot
