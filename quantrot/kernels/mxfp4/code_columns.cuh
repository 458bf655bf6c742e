// Columns of MXFP4 codes that lie in rows, and their transform on tensor cores, on Hopper. Follows columns.cuh.

namespace quantrot {

constexpr int SPREAD = 12, LEAST_BYTE = 20, MOST_BYTE = 220;  // no power of two of a result is at float32's ends
constexpr u32 TEAM = 4;  // warps that share a tile: of 128 rows a line of codes and 16 bytes of scales, half of them the tile's
constexpr u32 STRIP = 64, CODE_TILE = TALL * TEAM * STRIP / 2, SCALE_TILE = TALL * 16;  // columns of a warp; bytes
constexpr u32 COLUMN_PITCH = 64;  // bytes of a column's codes, 4 g + c is the 8 c + g-th: 16 of each group, group n's at n ^ g / 2
constexpr u32 POWER_PITCH = 80;   // bytes of 32 rows' powers of two: four lanes meet no bank twice

// A warp's own memory: codes on their way out, scales, powers of two, random numbers.
constexpr u32 TO_SCALES = 32 * COLUMN_PITCH, TO_POWERS = TO_SCALES + STRIP * 32, TO_RANDOM = TO_POWERS + 1024;

struct Columns {  // 32 of a tile
  u32 codes;      // 128 rows of 128 bytes: unit u of row r lies at u ^ r % 8
  u32 unit;       // that of these columns
  u32 mine;       // the warp's own memory
  u32 powers;     // in it, of these columns
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
  // Where the scales of column c go, a byte of each block; all columns of a strip have words of eight tiles.
  __device__ __forceinline__ u32 scale_word(u32 c) const {
    c += column % STRIP;
    return mine + TO_SCALES + (c * 8 + (row / TALL ^ c / 4) % 8) * 4;
  }
  // Where the codes of column 4 g + c go, of the lane's g, of a block's rows.
  __device__ __forceinline__ u32 codes_at(u32 c, u32 block) const {
    const u32 g = lane_number() >> 2;
    return mine + (c * 8 + g) * COLUMN_PITCH + (block ^ g / 2) * 16;
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

// Where a tile's scales of 8 groups begin in a row of the map; boxes begin at multiples of 16 (others are illegal instructions).
__device__ __forceinline__ u32 staged_at(u32 odd, u32 pitch, u32 tile) { return odd * pitch + tile * 8; }

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
  // From row and column on. Past the last row: the last 32; past the last column: the last. If staged, the tile's lie at `tile`,
  // 16 bytes a row; if two rows are one of the map, the odd ones behind the even ones.
  __device__ __forceinline__ Scales(const TransposeArgs& args, u32 row, u32 column, u32 tile) {
    const u32 last = args.rows - 32 - row, lane = lane_number(), staged = args.staged, group = column / 32;
    const u32 next = column + 32 < (u32)args.columns;
    if (staged) {
      const u32 down = staged - 1, odd = lane & down, within = staged_at(odd, args.columns / 32, group / 8) % 16 + group % 8;
      const u32 from = tile + odd * (SCALE_TILE / 2) + (lane >> down) * 16 + within;
#pragma unroll
      for (u32 j = 0; j < 4; j++)
        both[j] = __byte_perm(load_shared_u16(from + (min(32 * j, last) >> down) * 16), 0, next ? 0x4140 : 0x4040);
    } else {
#pragma unroll
      for (u32 j = 0; j < 4; j++) {
        const unsigned char* const from = args.in_scale + (u64)(row + min(32 * j, last) + lane) * (args.columns / 32) + group;
        both[j] = __ldg(from) | __ldg(from + next) << 16;
      }
    }
  }
};

// A word of two rows of four columns: s000eem0, a byte above, is float16's 2^-14 of the code.
__device__ __forceinline__ void spread_codes(u32 word, u32& low, u32& high) {
  low = select_bits(word << 1, word << 4, 0x80808080u), high = select_bits(word >> 3, word, 0x80808080u);
}

// A sum and a difference, of a number or of two float16 numbers, which each holds.
__device__ __forceinline__ void add_subtract(float& x, float& y) {
  const float sum = __fadd_rn(x, y);
  y = __fsub_rn(x, y), x = sum;
}
__device__ __forceinline__ void add_subtract(u32& x, u32& y) {
  const u32 sum = fma_half(y, 0x3C003C00u, x);
  y = fma_half(y, 0xBC00BC00u, x), x = sum;
}

// Sums and differences of products of words 0 and 1 and of words 2 and 3, which add(to, word, sign) adds. In float32 a product
// more is less than so many additions.
template <class T, int N, class F>
__device__ __forceinline__ void fifth_bit(T (&x)[N], T (&y)[N], const F& add) {
  add(x, 0, 0);
  if constexpr (N == 4) {
#pragma unroll
    for (int e = 0; e < N; e++) y[e] = x[e];
    add(x, 2, 0), add(y, 2, 0x80008000u);
  } else {
    add(y, 2, 0);
#pragma unroll
    for (int e = 0; e < N; e++) add_subtract(x[e], y[e]);
  }
}

// 32 rows of columns 4 g + 2 p and the next by Sylvester's matrix, of products i, in float32 or float16.
template <class T, int N>
__device__ __forceinline__ void turn_rows(T (&v)[2][4][N], const Words& codes, const Words& power, const Sylvester& h) {
  u32 a[2][4][2];
#pragma unroll
  for (int t = 0; t < 4; t++) {
    u32 low, high;
    spread_codes(codes.at(t), low, high);
    a[0][t][0] = low << 8 & 0x8E008E00u, a[0][t][1] = high << 8 & 0x8E008E00u;
    a[1][t][0] = low & 0x8E008E00u, a[1][t][1] = high & 0x8E008E00u;
  }
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int p = 0; p < 2; p++) {
      const auto add = [&](T (&to)[N], int t, u32 sign) {
        product(to, {a[p][t][0], a[p][t][1], a[p][t + 1][0], a[p][t + 1][1]}, h.times(i, t, power.at(t) ^ sign),
                h.times(i, t + 1, power.at(t + 1) ^ sign));
      };
      fifth_bit(v[p][i], v[p][2 + i], add);
    }
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

// Powers of two of a tile as float16, with this exponent for a byte of 0, in the order in which lanes (g, q) take rows: 32 of a
// block; WIDE_BLOCK: of blocks of 128 rows 32 q + 8 m + t and the next but three.
template <bool WIDE_BLOCK>
__device__ __forceinline__ void store_powers(u32 powers, const Scales& scales, const u32 (&signs)[4], int exponent) {
  const u32 r = lane_number();
  const u32 at = WIDE_BLOCK ? r / 8 * POWER_PITCH + r % 4 * 4 + r / 4 % 2 * 2
                            : r / 8 % 2 * 32 + r / 2 % 2 * 16 + r / 4 % 2 * 8 + r / 16 * 4 + r % 2 * 2;
#pragma unroll
  for (u32 j = 0; j < 4; j++) {
    const u32 both = scales.both[j] * 1024 + (u32)exponent * 0x04000400u ^ signs[j];
    store_shared16(powers + j * (WIDE_BLOCK ? 16 : POWER_PITCH) + at, both);
    store_shared16(powers + 4 * POWER_PITCH + j * (WIDE_BLOCK ? 16 : POWER_PITCH) + at, both >> 16);
  }
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
    tensor_store_dealt(packed, tile.row / 2, tile.column / 4, tile.mine);
    tensor_store_commit();
  }
}

// Of four words, a block's bytes of four columns each, a word of four blocks' bytes of column q.
__device__ __forceinline__ u32 of_column(const u32 (&blocks)[4], u32 q) {
  const u32 select = q | (q + 4) << 4;
  return __byte_perm(__byte_perm(blocks[0], blocks[1], select), __byte_perm(blocks[2], blocks[3], select), 0x5410);
}

// Scales of a strip's tiles `from` ... `to` - 1 of eight that follow each other down the rows, written: if all, 32 bytes a column,
// a sector, of which L2 takes parts so slowly that they were a tenth of the time.
__device__ __forceinline__ void write_scales(const TransposeArgs& args, const Columns& strip, u32 from, u32 to) {
  const u32 groups = args.rows / 32, n = lane_number() % 8, c = lane_number() / 8, first = strip.row / 32 + n * 4;
  const u32 columns = min(STRIP, args.columns - strip.column), some = groups % 4 ? min(4u, groups - first) : 0;
  unsigned char* scale = args.scale + (u64)(strip.column + c) * groups + first;
  const auto word = [&](u32 i) { return load_shared32(strip.mine + TO_SCALES + (4 * i + c) * 32 + (n ^ i % 8) * 4); };
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
