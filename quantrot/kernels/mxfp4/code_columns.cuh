// Columns of MXFP4 codes that lie in rows, and their transform on tensor cores, on Hopper. Follows columns.cuh.

namespace quantrot {

constexpr int SPREAD = 12, LEAST_BYTE = 20, MOST_BYTE = 220;  // no power of two of a result is at float32's ends
constexpr u32 RUN = 4;  // neighbouring tiles that warps of a block take, so that they share lines of codes and of scales
constexpr u32 CODE_COLUMNS = 64, CODE_TILE = TALL * CODE_COLUMNS / 2;
constexpr u32 COLUMN_PITCH = 64;  // bytes of a column's codes: 16 of each group, of group n at n ^ column / 2 % 4
constexpr u32 POWER_PITCH = 80;   // bytes of 32 rows' powers of two: four lanes meet no bank twice
constexpr u32 POWERS = 8 * POWER_PITCH, SCRATCH = POWERS + 32 * COLUMN_PITCH;  // bytes of a warp, and 1024 of random numbers

struct Columns {  // 32 of a tile
  u32 codes;      // 128 rows of 32 bytes: unit u of row r lies at u ^ (r / 4 % 2)
  u32 unit;       // which half
  u32 powers, stage;
  u32 row, column;  // the first

  // Four words: two neighbouring rows of four neighbouring columns each; the lane's address is of row r.
  __device__ __forceinline__ Words words(u32 r) const { return load_columns(codes + r * 32 + (unit ^ r / 4 % 2) * 16); }
  __device__ __forceinline__ Words powers_of(u32 block) const {
    return load_shared_words(powers + (unit * 4 + block) * POWER_PITCH + (lane_number() & 3) * 16);
  }
  // Where lane (g, q) puts eight codes of column 4 g + c, rows 8 q and on of a block.
  __device__ __forceinline__ u32 codes_at(u32 c, u32 block) const {
    const u32 g = lane_number() >> 2, q = lane_number() & 3;
    return stage + (c * 8 + g) * COLUMN_PITCH + (block ^ g / 2) * 16 + q * 4;
  }
};

struct Scales {  // of a tile, a lane's rows 32 j + lane: a byte of each half
  u32 both[4];

  __device__ __forceinline__ u32 byte(u32 j, u32 half) const { return half ? both[j] >> 8 : both[j] & 255; }
  __device__ __forceinline__ Scales() {}
  __device__ __forceinline__ Scales(const TransposeArgs& args, u32 row, u32 column) {  // of the tile
    const u32 groups = args.rows / 32, pitch = args.columns / 32;
#pragma unroll
    for (u32 j = 0; j < 4; j++) {  // past the last row: the last 32; past the last column: the last
      const unsigned char* const from = args.in_scale + ((u64)min(row * 4 + j, groups - 1) * 32 + lane_number()) * pitch;
      if ((pitch | (u32)(u64)args.in_scale) % 2 == 0) both[j] = __ldg((const unsigned short*)(from + column * 2));
      else both[j] = __ldg(from + column * 2) | __ldg(from + min(column * 2 + 1, pitch - 1)) << 8;
    }
  }
};

// --- On tensor cores ---------------------------------------------------------------------------------------------------
//
// Products are [16 columns, 32 rows] by Sylvester's matrix. ldmatrix turns codes as it turns 16-bit elements: lane (g, q) has
// rows 2 q and the next of columns 4 g ... 4 g + 3, which are four words of the operand. Sylvester's columns are ordered so that
// the lane's eight results of a column lie side by side, a word of codes: column c of product i is element 8 (c / 2) +
// 4 (i / 2) + 2 (c % 2) + i % 2.

// Sylvester's matrix of 32 in a lane: rows 8 t + 2 q and the next, product i's column g.
struct Sylvester {
  u32 words[4][4];

  __device__ __forceinline__ Sylvester() {
    const u32 g = lane_number() >> 2, q = lane_number() & 3;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int t = 0; t < 4; t++)
        words[i][t] = 0x3C003C00u ^ ((q & g ^ __popc(t & g >> 1) ^ (i & q) / 2) & 1) * 0x80008000u ^ (u32)(i & 1) << 31;
  }
};

#ifndef QUANTROT_EMULATED
__device__ __forceinline__ void load_shared_two(u32 from, u32 (&words)[2]) {
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(from) : "memory");
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
__device__ __forceinline__ void product_halves(u32 (&d)[2], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%0,%1};"
      : "+r"(d[0]), "+r"(d[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

__device__ __forceinline__ void product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { product_warp<Fp16>(d, a, b0, b1); }
__device__ __forceinline__ void product(u32 (&d)[2], const u32 (&a)[4], u32 b0, u32 b1) { product_halves(d, a, b0, b1); }

// A word of two rows of four columns: s00eem00, a byte above, is float16's 2^-14 of the code.
__device__ __forceinline__ void spread_codes(u32 word, u32& low, u32& high) {
  low = select_bits(word << 1, word << 4, 0x80808080u), high = select_bits(word >> 3, word, 0x80808080u);
}

// 32 rows of columns 4 g + 2 p and the next by Sylvester's matrix, of products i, in float32 or float16.
template <class T, int N>
__device__ __forceinline__ void turn_rows(T (&v)[2][4][N], const Words& codes, const Words& power, const Sylvester& h) {
  u32 a[2][4][2];
#pragma unroll
  for (int t = 0; t < 4; t++) {
    u32 low, high;
    spread_codes(codes.at(t), low, high);
    const auto times = [&](u32 two) { return times_half(two & 0x8E008E00u, power.at(t)); };
    a[0][t][0] = times(low << 8), a[0][t][1] = times(high << 8), a[1][t][0] = times(low), a[1][t][1] = times(high);
  }
#pragma unroll
  for (int t = 0; t < 4; t += 2)
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int p = 0; p < 2; p++)
        product(v[p][i], {a[p][t][0], a[p][t][1], a[p][t + 1][0], a[p][t + 1][1]}, h.words[i][t], h.words[i][t + 1]);
}

__device__ __forceinline__ u32 other_word(u32 v, int across) {
  return __float_as_uint(other_lane(__uint_as_float(v), across));
}

__device__ __forceinline__ u32 word_of(u32 v, u32 lane) {
  return __float_as_uint(__shfl_sync(0xFFFFFFFFu, __uint_as_float(v), lane));
}

// Random words of a lane's eight rows of columns 4 g ... 4 g + 3: four lanes make a column's each, and hand them out
// through shared memory, laid down so that neither stores nor loads meet a bank twice.
struct Randoms {
  u32 store, load;

  __device__ __forceinline__ Randoms(u32 at) {
    const u32 g = lane_number() >> 2, q = lane_number() & 3;
    const auto unit = [&](u32 column, u32 half) {  // of 16 bytes
      return (g / 2 | half << 2) * 8 + (g % 2 | (column % 2 ^ g / 2 % 2) << 1 | (column / 2 ^ half) << 2);
    };
    store = at + unit(q, 0) * 16, load = at + unit(0, q / 2) * 16 + q % 2 * 8;
  }
  __device__ __forceinline__ void share(const Random& mine, u32 (&words)[4][2]) const {
    warp_sync();
    store_shared_words(store, {mine.words[0], mine.words[1], mine.words[2], mine.words[3]});
    store_shared_words((store ^ 64) + 512, {mine.words[4], mine.words[5], mine.words[6], mine.words[7]});
    warp_sync();
#pragma unroll
    for (u32 c = 0; c < 4; c++) load_shared_two(load ^ c * 32, words[c]);
  }
};

// Powers of two of a tile as float16, with this exponent for a byte of 0, as lanes (g, q) take them: of 32 rows, rows 8 t + 2 q
// and the next, t = 0 ... 3, lie side by side; WIDE: of blocks of 128 rows 32 q + 8 m + t and the next but three.
template <bool WIDE_BLOCK>
__device__ __forceinline__ void store_powers(u32 powers, const Scales& scales, u32 negative, int exponent) {
  const u32 r = lane_number();
  const u32 at = WIDE_BLOCK ? r / 8 * POWER_PITCH + r % 4 * 4 + r / 4 % 2 * 2 : r % 8 / 2 * 16 + r / 8 * 4 + r % 2 * 2;
#pragma unroll
  for (u32 i = 0; i < 8; i++)
    store_shared16(powers + i / 4 * 4 * POWER_PITCH + i % 4 * (WIDE_BLOCK ? 16 : POWER_PITCH) + at,
                   (u32)(exponent + (int)scales.byte(i % 4, i / 4)) << 10 | (negative << (15 - i % 4) & 0x8000));
}

// Codes of a lane's group of 32 columns and its exponents' byte `mine`, written; of column 4 g + i that of block q in `others`.
__device__ __forceinline__ void write_columns(const TransposeArgs& args, const Columns& tile, u32 mine, u32 others) {
  const u32 g = lane_number() >> 2, q = lane_number() & 3, groups = args.rows / 32;
  const i64 group = (i64)(tile.column + 4 * g) * groups + tile.row / 32;
  unsigned char *packed = args.packed + (group + q) * 16, *scale = args.scale + group + q;
  const u32 from = tile.stage + g * COLUMN_PITCH + (q ^ g / 2) * 16;
  warp_sync();
  if (groups % 4 == 0) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) store_words(packed + (i64)(i * groups) * 16, load_shared_words(from + i * (8 * COLUMN_PITCH)));
    *(u32*)(args.scale + group + (i64)q * groups) = mine;
  } else if (tile.row / 32 + q < groups) {
#pragma unroll
    for (u32 i = 0; i < 4; i++, packed += (i64)groups * 16, scale += groups) {
      store_words(packed, load_shared_words(from + i * (8 * COLUMN_PITCH)));
      *scale = (unsigned char)(others >> 8 * i);
    }
  }
  warp_sync();
}

// Of four words, a block's bytes of four columns each, a word of four blocks' bytes of column q.
__device__ __forceinline__ u32 of_column(const u32 (&blocks)[4], u32 q) {
  const u32 select = q | (q + 4) << 4;
  return __byte_perm(__byte_perm(blocks[0], blocks[1], select), __byte_perm(blocks[2], blocks[3], select), 0x5410);
}
__device__ __forceinline__ u32 of_block(const u32 (&blocks)[4], u32 q) {
  return q & 2 ? q & 1 ? blocks[3] : blocks[2] : q & 1 ? blocks[1] : blocks[0];
}

}  // namespace quantrot
