// MXFP4 of a transpose of MXFP4, on Hopper. Follows columns.cuh.
//
// A warp has tiles of 128 rows by 64 columns' codes, 32 bytes a row, on their way by the copy engine; it works on 32 columns,
// which have one power of two a row, and then on the others. Where a tile's powers of two lie within SPREAD binades, they
// are float16 numbers, and so are the codes times them. Sums of 128 of these have at most 24 bits: every order gives the
// same float32 number, so that tensor cores give the bits of the butterfly. But for zeros' signs, which is why columns of
// which a group is zero, like those of other powers, are turned by lanes, each a group. Rows past the last count as zeros.

namespace quantrot {

constexpr int SPREAD = 12, LEAST_BYTE = 20, MOST_BYTE = 220;  // no power of two of a result is at float32's ends
constexpr u32 RUN = 4;  // neighbouring tiles that warps of a block take, so that they share lines of codes and of scales
constexpr u32 CODE_COLUMNS = 64, CODE_TILE = TALL * CODE_COLUMNS / 2;
constexpr u32 COLUMN_PITCH = 80;  // bytes of a column's codes: eight lanes that write a word each meet no bank twice
constexpr u32 POWER_PITCH = 80;   // bytes of 32 rows' powers of two: four lanes meet no bank twice
constexpr u32 POWERS = 8 * POWER_PITCH, SCRATCH = POWERS + 32 * COLUMN_PITCH + 1024;  // bytes of a warp

struct Columns {  // 32 of a tile
  u32 codes;      // 128 rows of 32 bytes: unit u of row r lies at u ^ (r / 4 % 2)
  u32 unit;       // which half
  u32 powers, stage;
  u32 row, column;  // the first

  // Four words: two neighbouring rows of four neighbouring columns each; the lane's address is of row r.
  __device__ __forceinline__ Words words(u32 r) const { return load_columns(codes + r * 32 + (unit ^ r / 4 % 2) * 16); }
};

// --- By tensor cores ---------------------------------------------------------------------------------------------------
//
// Products are [16 columns, 32 rows] by Sylvester's matrix. ldmatrix turns codes as it turns 16-bit elements: lane (g, q) has
// rows 2 q and the next of columns 4 g ... 4 g + 3, which are four words of the operand. Sylvester's columns are ordered so
// that the lane's eight results of a column lie side by side, a word of codes.

// Sylvester's matrix of 32 in a lane: rows 8 t + 2 q and the next, column 8 (g / 2) + 2 n + g % 2.
struct Sylvester {
  u32 words[4][4];

  __device__ __forceinline__ Sylvester() {
    const u32 g = lane_number() >> 2, q = lane_number() & 3;
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
      for (int t = 0; t < 4; t++) {
        const u32 both = __popc((8 * t + 2 * q) & (8 * (g / 2) + 2 * n)) & 1;
        words[n][t] = 0x3C003C00u ^ both * 0x80008000u ^ (g & 1) << 31;
      }
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
#endif

__device__ __forceinline__ u32 other_word(u32 v, int across) {
  return __float_as_uint(other_lane(__uint_as_float(v), across));
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
  __device__ __forceinline__ void make(u64 counter, const Key& key, u32 (&words)[4][2]) const {
    const Random mine(counter, key);
    warp_sync();
    store_shared_words(store, {mine.words[0], mine.words[1], mine.words[2], mine.words[3]});
    store_shared_words((store ^ 64) + 512, {mine.words[4], mine.words[5], mine.words[6], mine.words[7]});
    warp_sync();
#pragma unroll
    for (u32 c = 0; c < 4; c++) load_shared_two(load ^ c * 32, words[c]);
  }
};

// Powers of two of a tile as float16, `top` as 2^15, as lanes (g, q) take them: of 32 rows, rows 8 t + 2 q and the next, t =
// 0 ... 3, lie side by side; of blocks of 128 rows 32 q + 8 m + t and the next but three.
template <int SPAN>
__device__ __forceinline__ void store_powers(u32 powers, const u32 (&bytes)[8], u32 negative, int top) {
  const u32 lane = lane_number();
#pragma unroll
  for (u32 i = 0; i < 8; i++) {
    const u32 r = i % 2 * 16 + lane / 2;
    const u32 at = SPAN == 4 ? r / 8 * POWER_PITCH + i / 2 * 16 + r % 4 * 4 + r / 4 % 2 * 2
                             : i / 2 * POWER_PITCH + r % 8 / 2 * 16 + r / 8 * 4 + r % 2 * 2;
    store_shared16(powers + lane % 2 * 4 * POWER_PITCH + at,
                   (u32)(30 - top + (int)bytes[i]) << 10 | (negative << (15 - i) & 0x8000));
  }
}

// Whether it was done, of blocks of 32 and 64: else nothing was written. top: the byte of the power of two that is 2^15.
template <int SPAN, bool DITHER>
__device__ __forceinline__ bool by_products(const TransposeArgs& args, const Sylvester& h, const Columns& tile, int top) {
  const u32 lane = lane_number(), g = lane >> 2, q = lane & 3, groups = args.rows / 32;
  const u32 powers = tile.powers + tile.unit * 4 * POWER_PITCH, columns = tile.stage;
  Words codes[SPAN], power[SPAN];
  const auto load = [&](u32 block) {
#pragma unroll
    for (int n = 0; n < SPAN; n++)
      power[n] = load_shared_words(powers + (block + n) * POWER_PITCH + q * 16),
      codes[n] = tile.words((block + n) * 32 + lane);
  };
  constexpr bool LATE = DITHER && SPAN == 2;  // for want of registers
  if constexpr (!LATE) load(0);
  const Randoms randoms(columns + 32 * COLUMN_PITCH);
  u32 fields[4] = {};  // exponents of a column's blocks of rows, as float32 has them, a byte each
  const u32 base = __float_as_uint(__fmul_rn(args.root, 0.75f * FINE)) + (129u << 23);
  const auto step = [&](u32 block, bool more) {
    if constexpr (LATE) load(block);
    float v[2][SPAN][4][4] = {};  // by pairs of columns, 4 g + 2 p and the next
#pragma unroll
    for (int n = 0; n < SPAN; n++) {
      u32 a[2][4][2];  // s00eem00, a byte above, is float16's 2^-14 of the code
#pragma unroll
      for (int t = 0; t < 4; t++) {
        const u32 word = codes[n].at(t), low = select_bits(word << 1, word << 4, 0x80808080u),
                  high = select_bits(word >> 3, word, 0x80808080u);
        const auto times = [&](u32 two) { return times_half(two & 0x8E008E00u, power[n].at(t)); };
        a[0][t][0] = times(low << 8), a[0][t][1] = times(high << 8), a[1][t][0] = times(low), a[1][t][1] = times(high);
      }
#pragma unroll
      for (int p = 0; p < 2; p++)
#pragma unroll
        for (int t = 0; t < 4; t += 2)
#pragma unroll
          for (int i = 0; i < 4; i++)
            product_warp<Fp16>(v[p][n][i], {a[p][t][0], a[p][t][1], a[p][t + 1][0], a[p][t + 1][1]}, h.words[i][t],
                               h.words[i][t + 1]);
    }
    if (more && !LATE) load(block + SPAN & 3);  // while the products are made
#pragma unroll
    for (int half = SPAN / 2; half; half /= 2)
#pragma unroll
      for (int n = 0; n < SPAN; n++)
        if (!(n & half))
#pragma unroll
          for (int i = 0; i < 32; i++) {
            const float x = v[i / 16][n][i / 4 % 4][i % 4], y = v[i / 16][n + half][i / 4 % 4][i % 4];
            v[i / 16][n][i / 4 % 4][i % 4] = __fadd_rn(x, y), v[i / 16][n + half][i / 4 % 4][i % 4] = __fsub_rn(x, y);
          }
#pragma unroll
    for (int n = 0; n < SPAN; n++) {
      u32 random[4][2];
      if constexpr (DITHER) {
        randoms.make((u64)(tile.column + 4 * g + q) * groups + tile.row / 32 + block + n, args.key, random);
      }
      const auto value = [&](int column, int i) { return v[column / 2][n][i / 2][column % 2 * 2 + i % 2]; };
      float amax[4];  // of a column each; all four at once, for each waits for other lanes
#pragma unroll
      for (int c = 0; c < 4; c++) {
        amax[c] = fabsf(value(c, 0));
#pragma unroll
        for (int i = 1; i < 8; i++) amax[c] = fmaxf(amax[c], fabsf(value(c, i)));
      }
      u32 two[2];  // columns' exponents, with what is below them in half a word
#pragma unroll
      for (int p = 0; p < 2; p++)
        two[p] = __byte_perm(__float_as_uint(__fmul_rn(amax[2 * p], args.root)),
                             __float_as_uint(__fmul_rn(amax[2 * p + 1], args.root)), 0x7632);
#pragma unroll
      for (int across = 1; across < 4; across *= 2)
#pragma unroll
        for (int p = 0; p < 2; p++) two[p] = larger_halves(two[p], other_word(two[p], across));
#pragma unroll
      for (int c = 0; c < 4; c++) fields[c] = __byte_perm(fields[c], two[c / 2] << 1, c % 2 ? 0x7321 : 0x5321);
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const float factor = __uint_as_float(base - ((c % 2 ? two[c / 2] : two[c / 2] << 16) & 0x7F800000u));
        u32 p[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int first = i / 2 * 4 + i % 2;
          p[i] = Fp16::pack(__fmul_rn(value(c, first), factor), __fmul_rn(value(c, first + 2), factor));
          if constexpr (DITHER) p[i] = i % 2 ? with_bits<true>(p[i], random[c][i / 2]) : with_bits<false>(p[i], random[c][i / 2]);
          else p[i] = to_nearest(p[i]);
        }
        store_shared32(columns + (c * 8 + g) * COLUMN_PITCH + (block + n) * 16 + q * 4, code_word(p[0], p[1], p[2], p[3]));
      }
    }
  };
  if constexpr (DITHER) {  // random numbers take the registers that steps at once would
#pragma unroll 1
    for (u32 block = 0; block < 4; block += SPAN) step(block, true);
  } else {
#pragma unroll
    for (u32 block = 0; block < 4; block += SPAN) step(block, block + SPAN < 4);
  }
  u32 zero = 0;  // a byte's top bit where it is 0
#pragma unroll
  for (int c = 0; c < 4; c++) zero |= (fields[c] - 0x01010101u) & ~fields[c];
  if (__any_sync(0xFFFFFFFFu, (zero & 0x80808080u) != 0)) return false;
  warp_sync();
  const i64 group = (i64)(tile.column + 4 * g) * groups + tile.row / 32;
  unsigned char *packed = args.packed + (group + q) * 16, *scale = args.scale + group + q;
  const u32 from = columns + g * COLUMN_PITCH + q * 16, down = (u32)(top - 130) * 0x01010101u;
  if (groups % 4 == 0) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) store_words(packed + (i64)(i * groups) * 16, load_shared_words(from + i * (8 * COLUMN_PITCH)));
    const u32 a = q & 1 ? fields[1] : fields[0], b = q & 1 ? fields[3] : fields[2];
    *(u32*)(args.scale + group + (i64)q * groups) = (q & 2 ? b : a) + down;
  } else if (tile.row / 32 + q < groups) {
#pragma unroll
    for (u32 i = 0; i < 4; i++, packed += (i64)groups * 16, scale += groups) {
      store_words(packed, load_shared_words(from + i * (8 * COLUMN_PITCH)));
      *scale = (unsigned char)(fields[i] + down >> 8 * q);
    }
  }
  warp_sync();
  return true;
}

// --- Blocks of 128 by tensor cores ---------------------------------------------------------------------------------------
//
// Products turn by five of a row's seven bits, two of which tell a block's groups apart, and additions by the other two. Of row
// 32 q + 8 m + 4 b + t of a block, lane (g, q) has half b of word t of product m; results lie alike. So a lane comes to hold a
// whole group of a column: it finds its power of two, its random numbers and its 16 bytes by itself.

// The words of Sylvester's matrix that such products take: but for signs of popcount(n & t), which the compiler knows, one.
struct SylvesterWord {
  u32 words[2];

  __device__ __forceinline__ SylvesterWord() {
    const u32 g = lane_number() >> 2, q = lane_number() & 3;
    words[0] = 0x3C003C00u ^ (__popc(g / 2 & q) & 1) * 0x80008000u ^ (g & 1) << 31, words[1] = words[0] ^ 0x80008000u;
  }
  __device__ __forceinline__ u32 at(int n, int t) const { return words[((n & t) ^ (n & t) >> 1) & 1]; }
};

// Whether all was done: else some was written that is to be written again. top: the byte of the power of two that is 2^15.
template <bool DITHER>
__device__ __forceinline__ bool by_wide_products(const TransposeArgs& args, const SylvesterWord& h, const Columns& tile, int top) {
  const u32 lane = lane_number(), g = lane >> 2, q = lane & 3, groups = args.rows / 32, group = tile.row / 32 + q;
  const u32 powers = tile.powers + tile.unit * 4 * POWER_PITCH + q * 16;
  const u32 base = __float_as_uint(__fmul_rn(args.root, 0.75f * FINE)) + (129u << 23);
  Words power[4];
  u32 low[4][4], high[4][4];  // s00eem00, a byte above, is float16's 2^-14 of the code
#pragma unroll
  for (int m = 0; m < 4; m++) {
    const Words codes = tile.words(lane % 8 / 2 * 32 + m * 8 + lane % 2 * 4 + lane / 8);
    power[m] = load_shared_words(powers + m * POWER_PITCH);
#pragma unroll
    for (int t = 0; t < 4; t++) {
      const u32 word = codes.at(t);
      low[m][t] = select_bits(word << 1, word << 4, 0x80808080u), high[m][t] = select_bits(word >> 3, word, 0x80808080u);
    }
  }
  u32 zero = 0;
#pragma unroll
  for (int pair = 0; pair < 2; pair++) {  // of columns, 4 g + 2 pair and the next
    float v[4][4][4] = {};
#pragma unroll
    for (int m = 0; m < 4; m++) {
      u32 a[4][2];
#pragma unroll
      for (int t = 0; t < 4; t++) {
        const u32 up = pair ? 0 : 8;
        a[t][0] = times_half(low[m][t] << up & 0x8E008E00u, power[m].at(t));
        a[t][1] = times_half(high[m][t] << up & 0x8E008E00u, power[m].at(t));
      }
#pragma unroll
      for (int t = 0; t < 4; t += 2)
#pragma unroll
        for (int n = 0; n < 4; n++)
          product_warp<Fp16>(v[m][n], {a[t][0], a[t][1], a[t + 1][0], a[t + 1][1]}, h.at(n, t), h.at(n, t + 1));
    }
#pragma unroll
    for (int half = 2; half; half /= 2)
#pragma unroll
      for (int m = 0; m < 4; m++)
        if (!(m & half))
#pragma unroll
          for (int i = 0; i < 16; i++) {
            const float x = v[m][i / 4][i % 4], y = v[m + half][i / 4][i % 4];
            v[m][i / 4][i % 4] = __fadd_rn(x, y), v[m + half][i / 4][i % 4] = __fsub_rn(x, y);
          }
    const auto value = [&](int c, int i) { return v[i / 8][i % 4][c * 2 + i / 4 % 2]; };
    u32 fields[2];  // columns' exponents, as float32 has them
#pragma unroll
    for (int c = 0; c < 2; c++) {
      float most[2] = {fabsf(value(c, 0)), fabsf(value(c, 1))};
#pragma unroll
      for (int i = 2; i < 32; i++) most[i % 2] = fmaxf(most[i % 2], fabsf(value(c, i)));
      fields[c] = __float_as_uint(__fmul_rn(fmaxf(most[0], most[1]), args.root)) & INFINITE, zero |= fields[c] == 0;
    }
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const float factor = __uint_as_float(base - fields[c]);
      const i64 to = (i64)(tile.column + 4 * g + 2 * pair + c) * groups + group;
      u32 random[8], words[4];
      if constexpr (DITHER) {
        const Random mine(to, args.key);
#pragma unroll
        for (int i = 0; i < 8; i++) random[i] = mine.words[i];
      }
#pragma unroll
      for (int m = 0; m < 4; m++) {
        u32 p[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int at = m * 8 + i / 2 * 4 + i % 2;
          p[i] = Fp16::pack(__fmul_rn(value(c, at), factor), __fmul_rn(value(c, at + 2), factor));
          if constexpr (!DITHER) p[i] = to_nearest(p[i]);
          else p[i] = i % 2 ? with_bits<true>(p[i], random[m * 2 + i / 2]) : with_bits<false>(p[i], random[m * 2 + i / 2]);
        }
        words[m] = code_word(p[0], p[1], p[2], p[3]);
      }
      if (group < groups) {  // always; without the branch the compiler mixes columns, and spills
        store_words(args.packed + to * 16, {words[0], words[1], words[2], words[3]});
        args.scale[to] = (unsigned char)((fields[c] >> 23) + top - 130);
      }
    }
  }
  return !__any_sync(0xFFFFFFFFu, zero);
}

// --- By lanes ----------------------------------------------------------------------------------------------------------

// Powers of two of a tile as bfloat16.
__device__ __forceinline__ void store_wide_powers(u32 powers, const u32 (&bytes)[8], u32 negative) {
  const u32 lane = lane_number();
#pragma unroll
  for (u32 i = 0; i < 8; i++) {
    const u32 bits = bytes[i] == 255 ? 0x7FC0u : bytes[i] ? bytes[i] << 7 : 0x0040u;
    store_shared16(powers + (lane % 2 * 4 + i / 2) * POWER_PITCH + (i % 2 * 16 + lane / 2) * 2,
                   bits ^ (negative << (15 - i) & 0x8000));
  }
}

// A lane's group of a column, lane % 4 of the column's four from `first_row` on, turned, quantized and written.
template <int SPAN, int RULE, bool DITHER>
__device__ __forceinline__ void write_column(Group& x, const TransposeArgs& args, u32 first_row, u32 column) {
  const u32 groups = args.rows / 32, row_group = first_row / 32 + lane_number() % 4;
  const i64 group = (i64)column * groups + row_group;
  x.turn_across<SPAN>();
  const Exponent exponent = exponent_of<RULE, SPAN != 0>(x, args.root);
  u32 within;
  Words codes = codes_of<RULE, false, DITHER>(x, fine_factor<RULE>(exponent.value, args.root), group, args.key, within);
  if (!exponent.finite) codes = {};
  if (column < (u32)args.columns && row_group < groups) {
    store_words(args.packed + group * 16, codes);
    args.scale[group] = exponent.byte();
  }
}

// Lane (c, s) has rows 32 s ... 32 s + 31 of columns 4 c ... 4 c + 3, one after another.
template <int SPAN, int RULE, bool DITHER>
__device__ __forceinline__ void by_lanes(const TransposeArgs& args, const Columns& tile) {
  const u32 lane = lane_number(), c = lane >> 2, s = lane & 3, r = lane % 8 / 2 * 32 + lane / 8 * 2 + lane % 2;
#pragma unroll 1
  for (int pass = 0; pass < 4; pass++) {
    Group x;
#pragma unroll
    for (int i = 0; i < 32; i += 8) {
      const Words rows = tile.words(r + i);
      const Words power = load_shared_words(tile.powers + (tile.unit * 4 + s) * POWER_PITCH + i * 2);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const u32 two = times_bf16(times_bf16(pair<0>(rows.at(j) >> 4 * pass), 0x7E807E80u), power.at(j));  // 2^126
        x.v[i + j * 2] = __uint_as_float(two << 16), x.v[i + j * 2 + 1] = __uint_as_float(two & 0xFFFF0000u);
      }
    }
    write_column<SPAN, RULE, DITHER>(x, args, tile.row, tile.column + c * 4 + pass);
  }
}

// --- The kernel --------------------------------------------------------------------------------------------------------

template <int SPAN, bool SIGNS, int RULE, bool DITHER, int STAGES>
__device__ __forceinline__ void requantize(const TensorMap* map, const TransposeArgs& args) {
  const u32 lane = lane_number(), warp = warp_number(), warps = blockDim.x / 32;
  const u32 groups = args.rows / 32, pitch = args.columns / 32;
  const u32 ring_at = shared_memory() + warp * (STAGES * CODE_TILE);
  const u32 scratch = shared_memory() + warps * (STAGES * CODE_TILE) + warp * SCRATCH;
  const u32 counter = shared_memory() + warps * (STAGES * CODE_TILE + SCRATCH), full = counter + 16 + warp * (STAGES * 8);
  const u32 row_tiles = (args.rows + TALL - 1) / TALL, column_tiles = (args.columns + CODE_COLUMNS - 1) / CODE_COLUMNS;
  if (threadIdx.x == 0) store_shared32(counter, 0);
  if (lane == 0) {
    for (u32 i = 0; i < STAGES; i++) barrier_init(full + i * 8, 1);
    barrier_init_done();
  }
  block_sync();
  u32 negative = 0;  // bit i: sign of row 16 i + lane / 2, which its power takes
  if constexpr (SIGNS)
#pragma unroll
    for (int i = 0; i < 8; i++) negative |= __float_as_uint(args.signs[(16 * i + lane / 2) % (32 * SPAN)]) >> 31 << i;
  const Lines lines(args.down ? row_tiles : column_tiles);
  const u32 in_runs = row_tiles * column_tiles / (RUN * gridDim.x) * RUN;
  const Sylvester h;
  const SylvesterWord word;
  const u64 policy = cache_policy<FIRST>();
  struct Taken {  // a tile, and scales of rows 16 i + lane / 2 of its half lane % 2
    u32 row, column, bytes[8];
  };
  // A tile's scales until it is done. Random numbers want the registers: loading the scales again, which is rare, saves spills.
  constexpr bool KEEPS = !DITHER;
  const auto load_bytes = [&](u32 (&bytes)[8], u32 row, u32 column) {
    const u32 mine = lane / 2 * pitch + min(lane % 2, pitch - 1 - column * 2);
#pragma unroll
    for (u32 i = 0; i < 4; i++) {  // past the last row: the last 32
      const unsigned char* const from = args.in_scale + ((u64)min(row * 4 + i, groups - 1) * 32 * pitch + column * 2);
      bytes[2 * i] = __ldg(from + mine), bytes[2 * i + 1] = __ldg(from + (mine + 16 * pitch));
    }
  };
  u32 into = 0;
  const auto start = [&] {
    const u32 next = next_number(counter);
    const u32 number = next < in_runs ? next / RUN * RUN * gridDim.x + blockIdx.x * RUN + next % RUN : next * gridDim.x + blockIdx.x;
    u32 line, place;
    lines.find(number, line, place);
    Taken t = {args.down ? place : line, args.down ? line : place, {}};
    if (t.row < row_tiles && t.column < column_tiles) {
      barrier_expect(full + into * 8, CODE_TILE);
      tensor_load(ring_at + into * CODE_TILE, map, t.column * 32, t.row * TALL, full + into * 8, policy);
      load_bytes(t.bytes, t.row, t.column);
    }
    into = into == STAGES - 1 ? 0 : into + 1;
    return t;
  };
  Taken taken[STAGES];
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) taken[s] = start();
  Ring<STAGES> ring;
  while (taken[0].row < row_tiles && taken[0].column < column_tiles) {
    warp_sync();  // all lanes have read what is overwritten now
    taken[STAGES - 1] = start();
    const u32 (&b)[8] = taken[0].bytes;
    u32 most = b[0], least = b[0];
#pragma unroll
    for (int i = 1; i < 8; i++) most = max(most, b[i]), least = min(least, b[i]);
    const int top = warp_max((int)most), low = -warp_max(-(int)least);
    const bool near = RULE == ABSMAX34 && top <= low + SPREAD && low >= LEAST_BYTE && top <= MOST_BYTE;
    if (near) store_powers<SPAN>(scratch, b, negative, top);
    else store_wide_powers(scratch, b, negative);
    barrier_wait(full + ring.stage * 8, ring.parity);
    warp_sync();
#pragma unroll 1
    for (u32 half = 0; half < 2; half++) {
      const Columns tile = {ring_at + ring.stage * CODE_TILE, half, scratch, scratch + POWERS, taken[0].row * TALL,
                            taken[0].column * CODE_COLUMNS + half * 32};
      if (tile.column >= (u32)args.columns) break;
      if constexpr (RULE == ABSMAX34)
        if (near) {
          bool done;
          if constexpr (SPAN == 4) done = by_wide_products<DITHER>(args, word, tile, top);
          else done = by_products<SPAN, DITHER>(args, h, tile, top);
          if (done) continue;
          warp_sync();
          if constexpr (KEEPS) {
            store_wide_powers(scratch, b, negative);
          } else {
            u32 again[8];
            load_bytes(again, taken[0].row, taken[0].column);
            store_wide_powers(scratch, again, negative);
          }
          warp_sync();
        }
      by_lanes<SPAN, RULE, DITHER>(args, tile);
      if (near && half == 0) {
        warp_sync();
        if constexpr (KEEPS) {
          store_powers<SPAN>(scratch, b, negative, top);
        } else {
          u32 again[8];
          load_bytes(again, taken[0].row, taken[0].column);
          store_powers<SPAN>(scratch, again, negative, top);
        }
        warp_sync();
      }
    }
    ring.next();
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) taken[s] = taken[s + 1];
  }
}

}  // namespace quantrot
