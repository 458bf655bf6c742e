// MXFP4 of a transpose of MXFP4, on Hopper. Follows code_columns.cuh.
//
// A team of four warps has tiles of 128 rows by 256 columns' codes, whole lines, brought with their scales by the copy engine.
// Each warp works on a strip of 64 columns: on 32, which have one power of two a row, then on the others. Where a strip's powers
// of two lie within SPREAD binades (to nearest HALF_SPREAD), they are float16 numbers, and so are the codes times them. Sums of 128 of these have at most 24
// bits: every order gives the same float32 number, so that tensor cores give the bits of the butterfly, but for zeros' signs.
// So columns of which a group is zero are turned by lanes, each a group, like those of other powers; what is left are zeros in
// groups that are not, of which the butterfly makes -0 where half of their rows are -0 and the others cancel: here they are 0.
// Rows past the last count as zeros. Stochastic rounding is of such sums; rounding to nearest is of sums that are float16 numbers, too.

namespace quantrot {

// --- By tensor cores ---------------------------------------------------------------------------------------------------

// Stochastic rounding. Whether it was done, of blocks of 32 and 64: else codes are to be written again. top: the byte of the power of two
// that is 2^15.
template <int SPAN>
__device__ __forceinline__ bool by_products(const TransposeArgs& args, const Sylvester& h, const Columns& tile, int top) {
  const u32 lane = lane_number(), g = lane >> 2, q = lane & 3, groups = args.rows / 32;
  const Randoms randoms(tile.mine + TO_RANDOM);
  u32 fields[4];  // of a block each: its columns' exponents, as float32 has them, a byte each
  Philox four;
  const u32 base = __float_as_uint(__fmul_rn(args.root, 0.75f * FINE)) + (129u << 23);
#pragma unroll SPAN == 1 ? 4 : 1
  for (u32 block = 0; block < 4; block += SPAN) {  // four at once 77 us for 82; with two blocks a step there are no registers
    float v[SPAN][2][4][4] = {};
#pragma unroll
    for (int n = 0; n < SPAN; n++) turn_rows(v[n], tile.words_of(block + n), tile.powers_of(block + n), h);
#pragma unroll
    for (int half = SPAN / 2; half; half /= 2)
#pragma unroll
      for (int n = 0; n < SPAN; n++)
        if (!(n & half))
#pragma unroll
          for (int i = 0; i < 32; i++)
            add_subtract(v[n][i / 16][i / 4 % 4][i % 4], v[n + half][i / 16][i / 4 % 4][i % 4]);
    if (block == 0) codes_free();
#pragma unroll
    for (int n = 0; n < SPAN; n++) {
      u32 random[4][2];
      const u64 number = (u64)(tile.column + 4 * g + q) * groups + tile.row / 32 + block + n;
      if (SPAN > 1 ? n == 0 : block == 0 || groups % 4) four = Philox(number / 4, args.key);  // of two for both: kept it spills
      randoms.share(Random(four, number), random);
      const auto value = [&](int column, int i) { return v[n][column / 2][i / 2][column % 2 * 2 + i % 2]; };
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
      const u32 field = __byte_perm(two[0] << 1, two[1] << 1, 0x7531);
#pragma unroll
      for (int i = 0; i < 4; i++) fields[i] = i == block + n ? field : fields[i];
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const float factor = __uint_as_float(base - ((c % 2 ? two[c / 2] : two[c / 2] << 16) & 0x7F800000u));
        u32 p[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          p[i] = Fp16::pack(__fmul_rn(value(c, 2 * i), factor), __fmul_rn(value(c, 2 * i + 1), factor));
          p[i] = i % 2 ? with_bits<true>(p[i], random[c][i / 2]) : with_bits<false>(p[i], random[c][i / 2]);
        }
        store_shared32(tile.codes_at(c, block + n) + q * 4, code_word(p[0], p[1], p[2], p[3]));
      }
    }
  }
  const u32 mine = of_column(fields, q), down = (u32)(top - 130);
  if (__any_sync(0xFFFFFFFFu, ((mine - 0x01010101u) & ~mine & 0x80808080u) != 0)) return false;  // one is 0
  store_shared32(tile.scale_word(4 * g + q), mine + down * 0x01010101u);
  return true;
}

// --- Blocks of 128 by tensor cores ---------------------------------------------------------------------------------------
//
// Products turn by five of a row's seven bits, two of which tell a block's groups apart, and additions by the other two. Of row
// 32 q + 8 m + 4 b + t of a block, lane (g, q) has half b of word t of product m; results lie alike. So a lane comes to hold a
// whole group of a column: it finds its power of two, its random numbers and its 16 bytes by itself.

// Stochastic rounding. Whether it was done: else codes are to be written again. top: the byte of the power of two that
// is 2^15.
__device__ __forceinline__ bool by_wide_products(const TransposeArgs& args, const Columns& tile, int top) {
  const u32 lane = lane_number(), g = lane >> 2, q = lane & 3, groups = args.rows / 32;
  const u32 powers = tile.powers + q * 16;
  // Sylvester's matrix: of odd words and odd products times -1.
  const u32 signs = 0x3C003C00u ^ (__popc(g / 2 & q) & 1) * 0x80008000u ^ (g & 1) << 31;
  const u32 base = __float_as_uint(__fmul_rn(args.root, 0.75f * FINE)) + (129u << 23);
  Words power[4];
  u32 low[4][4], high[4][4];
#pragma unroll
  for (int m = 0; m < 4; m++) {
    const Words codes = tile.words(lane % 8 / 2 * 32 + m * 8 + lane % 2 * 4 + lane / 8);
    power[m] = load_shared_words(powers + m * POWER_PITCH);
#pragma unroll
    for (int t = 0; t < 4; t++) spread_codes(codes.at(t), low[m][t], high[m][t]);
  }
  // Four lanes have the four groups of each of four columns: each makes the words of one.
  const Philox mine(((u64)(tile.column + 4 * g + q) * groups + tile.row / 32) / 4, args.key);
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
        a[t][0] = low[m][t] << up & 0x8E008E00u, a[t][1] = high[m][t] << up & 0x8E008E00u;
      }
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const auto add = [&](float (&to)[4], int t, u32 sign) {
          product(to, {a[t][0], a[t][1], a[t + 1][0], a[t + 1][1]}, times_half(power[m].at(t), signs ^ sign),
                  times_half(power[m].at(t + 1), signs ^ sign ^ n * 0x80008000u));
        };
        fifth_bit(v[m][n], v[m][2 + n], add);
      }
    }
#pragma unroll
    for (int half = 2; half; half /= 2)
#pragma unroll
      for (int m = 0; m < 4; m++)
        if (!(m & half))
#pragma unroll
          for (int i = 0; i < 16; i++) add_subtract(v[m][i / 4][i % 4], v[m + half][i / 4][i % 4]);
    const auto value = [&](int c, int i) { return v[i / 8][i % 4][c * 2 + i / 4 % 2]; };
    if (pair == 0) codes_free();
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
      const u32 from = 2 * pair + c;
      Philox four;
#pragma unroll
      for (int i = 0; i < 4; i++) four.words[i] = word_of(mine.words[i], lane & 28 | from);
      const Random random(four, q);
      u32 words[4];
#pragma unroll
      for (int m = 0; m < 4; m++) {
        u32 p[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int at = m * 8 + i / 2 * 4 + i % 2;
          p[i] = Fp16::pack(__fmul_rn(value(c, at), factor), __fmul_rn(value(c, at + 2), factor));
          const u32 bits = random.words[m * 2 + i / 2];
          p[i] = i % 2 ? with_bits<true>(p[i], bits) : with_bits<false>(p[i], bits);
        }
        words[m] = code_word(p[0], p[1], p[2], p[3]);
      }
      store_shared_words(tile.codes_at(from, q), {words[0], words[1], words[2], words[3]});
      store_shared_byte(tile.scale_word(4 * g + from) + q, (fields[c] >> 23) + top - 130);
    }
  }
  return !__any_sync(0xFFFFFFFFu, zero);
}

// --- In float16 --------------------------------------------------------------------------------------------------------
//
// A unit is half a code of the tile's least power of two. Sums of less than 2048 units are float16 numbers, and each part of such
// a sum that tensor cores or additions round is half the sum or the difference of two results, no larger than one.

constexpr u32 UNIT_POWER = 22;  // float16's exponent of the tile's least power of two: a unit is 2^-8
constexpr int HALF_SPREAD = 30 - UNIT_POWER;
constexpr u32 LEAST_FIELD = 7, MOST_FIELD = 16;  // of a group's largest times the root: one unit; 724 units, of blocks of 64 1023

// Rounding to nearest, of two numbers a word. The definition takes a float32 product, rounded to float16, ties to even; up to
// MOST_FIELD a float16 product with one factor of 11 bits and an addition end there as well, which a test tries of all numbers.
template <int SPAN>
struct Nearest {
  static constexpr u32 TWICE = 0x00010001, ROUND = (SPAN == 2 ? 256 : 255) * TWICE;
  static constexpr u32 TIMES_ROOT = SPAN == 2 ? 0 : 599 * TWICE;  // to the exponent from 1.4142 on
  static constexpr u32 FACTOR = (SPAN == 2 ? 17 << 10 | 511 : 18 << 10 | 63) * TWICE;
  static constexpr int DOWN = SPAN == 4 ? 14 : 13;  // of a scale's byte: a field and the least byte less this

  // float16's exponent fields, in their place, of groups' largest times the root; and what a group's elements are multiplied by.
  __device__ __forceinline__ static u32 fields(u32 largest) { return largest + TIMES_ROOT & 0x7C007C00u; }
  __device__ __forceinline__ static u32 factors(u32 fields) { return FACTOR - fields; }
};

// Rounding to nearest. Whether it was done: else codes are to be written again. least: the byte of the tile's least power of two.
template <int SPAN>
__device__ __forceinline__ bool by_halves(const TransposeArgs& args, const Sylvester& h, const Columns& tile, int least) {
  using Rounding = Nearest<SPAN>;
  const u32 g = lane_number() >> 2, q = lane_number() & 3, one = min(args.rows, 1);  // unknown to the compiler: rounding by IMAD
  Words codes[SPAN], power[SPAN];
  const auto load = [&](u32 block) {
#pragma unroll
    for (int n = 0; n < SPAN; n++) codes[n] = tile.words_of(block + n), power[n] = tile.powers_of(block + n);
  };
  load(0);
  u32 fields[4];  // of a block each: its columns' exponents times 4, a byte each
#pragma unroll
  for (u32 block = 0; block < 4; block += SPAN) {
    u32 v[SPAN][2][4][2] = {};
#pragma unroll
    for (int n = 0; n < SPAN; n++) turn_rows(v[n], codes[n], power[n], h);
    if (block + SPAN < 4) load(block + SPAN);  // while the products are made
#pragma unroll
    for (int half = SPAN / 2; half; half /= 2)
#pragma unroll
      for (int n = 0; n < SPAN; n++)
        if (!(n & half))
#pragma unroll
          for (int i = 0; i < 16; i++)
            add_subtract(v[n][i / 8][i / 2 % 4][i % 2], v[n + half][i / 8][i / 2 % 4][i % 2]);
    if (block == 0) codes_free();
#pragma unroll
    for (int n = 0; n < SPAN; n++) {
      u32 two[2];  // columns' largest, then their fields
#pragma unroll
      for (int p = 0; p < 2; p++) {
        u32 most[2];
#pragma unroll
        for (int e = 0; e < 2; e++)
          most[e] = larger_magnitudes(larger_magnitudes(v[n][p][0][e], v[n][p][1][e]),
                                      larger_magnitudes(v[n][p][2][e], v[n][p][3][e]));
        two[p] = larger_magnitudes(__byte_perm(most[0], most[1], 0x5410), __byte_perm(most[0], most[1], 0x7632));
      }
#pragma unroll
      for (int across = 1; across < 4; across *= 2)
#pragma unroll
        for (int p = 0; p < 2; p++) two[p] = larger_magnitudes(two[p], other_word(two[p], across));
#pragma unroll
      for (int p = 0; p < 2; p++) two[p] = Rounding::fields(two[p]);
      fields[block + n] = __byte_perm(two[0], two[1], 0x7531);
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const u32 factors = Rounding::factors(two[c / 2]);
        u32 p[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const u32 x = v[n][c / 2][i][c % 2];
          p[i] = (c % 2 ? times_one_half<1>(x, factors) : times_one_half<0>(x, factors)) * one + Rounding::ROUND;
        }
        store_shared32(tile.codes_at(c, block + n) + q * 4, code_word(p[0], p[1], p[2], p[3]));
      }
    }
  }
  const u32 mine = of_column(fields, q), below = mine - LEAST_FIELD * 0x04040404u, above = mine + (31 - MOST_FIELD) * 0x04040404u;
  if (__any_sync(0xFFFFFFFFu, ((below | above) & 0x80808080u) != 0)) return false;
  store_shared32(tile.scale_word(4 * g + q), (mine >> 2) + (u32)(least - Rounding::DOWN) * 0x01010101u);
  return true;
}

// --- By lanes ----------------------------------------------------------------------------------------------------------

// Powers of two of a tile as bfloat16.
__device__ __forceinline__ void store_wide_powers(u32 powers, const Scales& scales, const u32 (&signs)[4]) {
#pragma unroll
  for (u32 i = 0; i < 8; i++) {
    const u32 byte = scales.byte(i % 4, i / 4), bits = byte == 255 ? 0x7FC0u : byte ? byte << 7 : 0x0040u;
    store_shared16(powers + i * POWER_PITCH + lane_number() * 2, bits ^ (signs[i % 4] & 0x8000));
  }
}

// A lane's group of column 4 g + c, lane % 4 of its four, turned, quantized and written to shared memory.
template <int SPAN, int RULE, bool DITHER>
__device__ __forceinline__ void write_column(Group& x, const TransposeArgs& args, const Columns& tile, u32 c) {
  const u32 column = lane_number() / 4 * 4 + c, block = lane_number() % 4;
  x.turn_across<SPAN>();
  const Exponent exponent = exponent_of<RULE, SPAN != 0>(x, args.root);
  u32 within;
  Random random;
  if constexpr (DITHER) {
    const u64 group = (u64)(tile.column + column) * (args.rows / 32) + tile.row / 32 + block;
    random = Random(Philox(group / 4, args.key), group);
  }
  Words codes = codes_of<RULE, false, DITHER>(x, fine_factor<RULE>(exponent.value, args.root), random, within);
  if (!exponent.finite) codes = {};
  store_shared_words(tile.codes_at(c, block), codes);
  store_shared_byte(tile.scale_word(column) + block, exponent.byte());
}

// Lane (c, s) has rows 32 s ... 32 s + 31 of columns 4 c ... 4 c + 3, one after another.
template <int SPAN, int RULE, bool DITHER>
__device__ __forceinline__ void by_lanes(const TransposeArgs& args, const Columns& tile) {
  const u32 lane = lane_number(), s = lane & 3, r = lane % 8 / 2 * 32 + lane / 8 * 2 + lane % 2;
  codes_free();
#pragma unroll 1
  for (int pass = 0; pass < 4; pass++) {
    Group x;
#pragma unroll
    for (int i = 0; i < 32; i += 8) {
      const Words rows = tile.words(r + i);
      const Words power = load_shared_words(tile.powers + s * POWER_PITCH + i * 2);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const u32 two = times_bf16(times_bf16(pair<0>(rows.at(j) >> 4 * pass), 0x7E807E80u), power.at(j));  // 2^126
        x.v[i + j * 2] = __uint_as_float(two << 16), x.v[i + j * 2 + 1] = __uint_as_float(two & 0xFFFF0000u);
      }
    }
    write_column<SPAN, RULE, DITHER>(x, args, tile, pass);
  }
}

// --- The kernel --------------------------------------------------------------------------------------------------------

template <int SPAN, bool SIGNS, int RULE, bool DITHER, int STAGES>
__device__ __forceinline__ void requantize(const TensorMap* code_map, const TensorMap* scale_map, const TensorMap* packed,
                                           const TransposeArgs& args) {
  const u32 lane = lane_number(), warp = warp_number(), warps = blockDim.x / 32, team = warp / TEAM, strip = warp % TEAM;
  constexpr u32 MINE = TO_RANDOM + (DITHER ? 1024 : 0);
  const u32 all_scales = shared_memory() + warps / TEAM * (STAGES * CODE_TILE);
  const u32 all_scratch = all_scales + warps / TEAM * (STAGES * SCALE_TILE);
  const u32 codes_at = shared_memory() + team * (STAGES * CODE_TILE), scales_at = all_scales + team * (STAGES * SCALE_TILE);
  const u32 mine = all_scratch + warp * MINE, powers = mine + TO_POWERS;
  const u32 full = all_scratch + warps * MINE + team * (STAGES * 16), empty = full + STAGES * 8;
  if (strip == 0 && lane == 0) {
    for (u32 i = 0; i < STAGES; i++) barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, TEAM);
    barrier_init_done();
  }
  block_sync();
  u32 signs[4] = {};  // of rows 32 j + lane, which their powers take
  if constexpr (SIGNS)
#pragma unroll
    for (int j = 0; j < 4; j++) signs[j] = (__float_as_uint(args.signs[(32 * j + lane) % (32 * SPAN)]) >> 31) * 0x80008000u;
  const u32 row_tiles = (args.rows + TALL - 1) / TALL, tiles = row_tiles * ((args.columns + TEAM * STRIP - 1) / (TEAM * STRIP));
  const u32 teams = gridDim.x * (warps / TEAM), me = blockIdx.x * (warps / TEAM) + team, runs = (tiles + args.run - 1) / args.run;
  const auto start_of = [&](u32 team) { return min((u32)((u64)runs * team / teams) * args.run, tiles); };
  const u32 end = start_of(me + 1);
  u32 number = start_of(me), first = number % row_tiles % 8;  // of eight tiles whose scales are written at once
  const Sylvester h;
  const u64 policy = cache_policy<LAST>();  // of scales, lines are other teams', too; of codes (53.5 us; NORMAL 55.2; FIRST 57.8)
  Place there(number, row_tiles, 1, true), next = there;
  Ring<STAGES> ahead, ring;
  const auto start = [&] {  // by a team's first warp, a tile ahead of the one that it works on
    const u32 bar = full + ahead.stage * 8;
    barrier_wait(empty + ahead.stage * 8, ahead.parity ^ 1);
    barrier_expect(bar, CODE_TILE + (args.staged ? SCALE_TILE : 0));
    tensor_load(codes_at + ahead.stage * CODE_TILE, code_map, next.column * (TEAM * STRIP / 2), next.row * TALL, bar, policy);
#pragma unroll 1
    for (u32 odd = 0; odd < (u32)args.staged; odd++)
      tensor_load(scales_at + ahead.stage * SCALE_TILE + odd * (SCALE_TILE / 2), scale_map,
                  staged_at(odd, args.columns / 32, next.column) / 16 * 16, next.row * TALL / args.staged, bar, policy);
    next.advance({1, 0}, row_tiles, 1, true), ahead.next();
  };
  if (strip == 0 && number < end) start();
  for (; number < end; number++, ring.next(), there.advance({1, 0}, row_tiles, 1, true)) {
    if (strip == 0 && number + 1 < end) start();
    const u32 row = there.row * TALL, column = there.column * (TEAM * STRIP) + strip * STRIP;
    barrier_wait(full + ring.stage * 8, ring.parity);
    if (column < (u32)args.columns) {
      const auto of_strip = [&] { return Scales(args, row, column, scales_at + ring.stage * SCALE_TILE); };
      const Scales scales = of_strip();
      const int top = scales.most(), low = scales.least();
      const bool near = RULE == ABSMAX34 && top <= low + (DITHER ? SPREAD : HALF_SPREAD) && low >= LEAST_BYTE && top <= MOST_BYTE;
      const auto store_near = [&](const Scales& of) {
        store_powers<DITHER && SPAN == 4>(powers, of, signs, DITHER ? 30 - top : (int)UNIT_POWER - low);
      };
      if (near) store_near(scales);
      else store_wide_powers(powers, scales, signs);
      warp_sync();
#pragma unroll 1
      for (u32 half = 0; half < 2; half++) {
        const Columns tile = {codes_at + ring.stage * CODE_TILE, strip * 2 + half, mine, powers + half * (4 * POWER_PITCH), row,
                              column + half * 32};
        if (tile.column >= (u32)args.columns) break;
        if constexpr (RULE == ABSMAX34)
          if (near) {
            bool done;
            if constexpr (!DITHER) done = by_halves<SPAN>(args, h, tile, low);
            else if constexpr (SPAN == 4) done = by_wide_products(args, tile, top);
            else done = by_products<SPAN>(args, h, tile, top);
            if (done) {
              write_codes(packed, tile);
              continue;
            }
            warp_sync();
            store_wide_powers(powers, of_strip(), signs);
            warp_sync();
          }
        by_lanes<SPAN, RULE, DITHER>(args, tile);
        write_codes(packed, tile);
        if (near && half == 0) {
          warp_sync();
          store_near(of_strip());
          warp_sync();
        }
      }
    }
    warp_sync();
    if (lane == 0) barrier_arrive(empty + ring.stage * 8);  // what is left is in the warp's own memory
    if (column < (u32)args.columns && (there.row % 8 == 7 || there.row + 1 == row_tiles || number + 1 == end)) {
      const Columns eight = {0, 0, mine, 0, row / (8 * TALL) * (8 * TALL), column};
      write_scales(args, eight, first, there.row % 8 + 1);
      first = 0;
    }
  }
  codes_free();  // a block's shared memory ends with it
}

}  // namespace quantrot
