// MXFP4 of a transpose of MXFP4, on Hopper. Follows code_columns.cuh.
//
// A team of four warps has tiles of 128 rows by 256 columns' codes, whole lines, brought with their scales by the copy engine.
// Each warp works on a strip of 64 columns: on 32, which have one power of two a row, then on the others. Where a strip's powers
// of two lie within SPREAD binades, they are float16 numbers, and so are the codes times them. Sums of 128 of these have at most
// 24 bits: every order gives the same float32 number, so that tensor cores give the bits of the butterfly, but for zeros' signs.
// So columns of which a group is zero are turned by lanes, each a group, like those of other powers; what is left are zeros in
// groups that are not, of which the butterfly makes -0 where half of their rows are -0 and the others cancel: here they are 0.
// Where most rows are near the least one, sums are tried in float16. Rows past the last count as zeros: lanes have their tiles.

namespace quantrot {

// --- By tensor cores, in float16 -----------------------------------------------------------------------------------------
//
// A unit is half a code of the strip's least power of two. Sums of less than 2048 units are float16 numbers, and each part of
// such a sum that tensor cores or additions round is half the sum or the difference of two results, no larger than one.

constexpr u32 UNIT_POWER = 21;  // float16's exponent of the strip's least power of two: a unit is 2^-9
constexpr u32 LEAST_FIELD = 6;  // of a group's largest times the root: one unit

// Of two numbers a word. The factor has 11 bits: its product, rounded once, is the definition's. To nearest the definition sends
// ties to even: up to MOST_FIELD there are none but of blocks of 64, where a factor that is less by its last bit and an addition
// end there as well, which a test tries of all numbers.
template <int SPAN, bool DITHER>
struct HalfRounding {
  static constexpr u32 TWICE = 0x00010001;
  static constexpr u32 TIMES_ROOT = SPAN == 2 ? 0 : 599 * TWICE;  // to the exponent from 1.4142 on
  static constexpr u32 FACTOR = (SPAN == 2 ? 17 << 10 | (DITHER ? 512 : 511) : 18 << 10 | 62) * TWICE;
  static constexpr int DOWN = SPAN == 4 ? 13 : 12;  // of a scale's byte: a field and the least byte less this
  static constexpr u32 MOST_FIELD = DITHER ? 16 : 15;  // 1448 units, of blocks of 64 2047; to nearest 724 and 1023
  // Up to so many binades, and such a sum of a strip's powers of two in the least one, sums are tried: of SmolLM2's activations
  // and weights nearly all of these fit, and few of the others.
  static constexpr int BINADES = DITHER ? 6 : 5;
  static constexpr u32 POWERS = 2 * TALL * (SPAN == 4 ? 2.2f : 4.6f) * (DITHER ? 2 : 1);

  // float16's exponent fields, in their place, of groups' largest times the root; and what a group's elements are multiplied by.
  __device__ __forceinline__ static u32 fields(u32 largest) { return largest + TIMES_ROOT & 0x7C007C00u; }
  __device__ __forceinline__ static u32 factors(u32 fields) { return FACTOR - fields; }
};

// code_word's of products that are rounded here, to nearest: half of the last place is the lowest bit of a byte s000cccx, so that
// four are rounded at once. By multiplications with one, which the compiler must not know: the other pipe is full.
__device__ __forceinline__ u32 rounded_word(const u32 (&p)[4], u32 one) {
  const u32 even = __byte_perm(p[0], p[2], 0x7531) * one + 0x01010101u, odd = __byte_perm(p[1], p[3], 0x7531);
  return select_bits(select_bits(even >> 1, even >> 4, 0x08080808u), select_bits(odd * (8 * one) + 0x08080808u, odd, 0x80808080u),
                     0xF0F0F0F0u);
}

// Whether it was done: else codes are to be written again.
template <int SPAN, bool DITHER>
__device__ __forceinline__ bool by_halves(const TransposeArgs& args, const Sylvester& h, const Columns& tile) {
  using Rounding = HalfRounding<SPAN, DITHER>;
  const u32 g = lane_number() >> 2, q = lane_number() & 3, one = min(args.rows, 1);
  const u64 number = tile.group_of(4 * g + q, args.rows);  // whose random numbers this lane makes
  const Randoms randoms(tile);
  Philox four;
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
    for (int n = 0; n < SPAN; n++)
#pragma unroll
      for (int p = 0; p < 2; p++) turn_rows(v[n][p], codes[n], power[n], h, p);
    if (block + SPAN < 4) load(block + SPAN);  // while the products are made
    turn_blocks(v);  // before the fifth bit, whose larger results are sums of magnitudes
    if (block == 0) codes_free();
#pragma unroll
    for (int n = 0; n < SPAN; n++) {
      u32 random[4][2];
      if constexpr (DITHER) {
        Random mine;
        if (args.rows % TALL) {
          mine = Random(Philox((number + block + n) / 4, args.key), number + block + n);
        } else {  // number is a multiple of four
          if (block + n == 0) four = Philox(number / 4, args.key);
          mine = Random(four, block + n);
        }
        randoms.share(mine, 0, random);
      }
      u32 two[2];  // columns' largest, then their fields
#pragma unroll
      for (int p = 0; p < 2; p++) {
        u32 most[2];
#pragma unroll
        for (int e = 0; e < 2; e++)
          most[e] = larger_magnitudes(sum_of_magnitudes(v[n][p][0][e], v[n][p][2][e]),
                                      sum_of_magnitudes(v[n][p][1][e], v[n][p][3][e]));
        turn_fifth(v[n][p]);
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
          p[i] = c % 2 ? times_one_half<1>(x, factors) : times_one_half<0>(x, factors);
          if constexpr (DITHER) p[i] = i % 2 ? with_bits<true>(p[i], random[c][i / 2]) : with_bits<false>(p[i], random[c][i / 2]);
        }
        const u32 word = DITHER ? code_word(p[0], p[1], p[2], p[3]) : rounded_word(p, one);
        store_shared32(tile.codes_at(c, block + n, q), word);
      }
    }
  }
  const u32 mine = of_column(fields, q);
  const u32 below = mine - LEAST_FIELD * 0x04040404u, above = mine + (31 - Rounding::MOST_FIELD) * 0x04040404u;
  if (__any_sync(0xFFFFFFFFu, ((below | above) & 0x80808080u) != 0)) return false;
  const int least = (int)UNIT_POWER - tile.exponent;  // the byte of the least power of two
  store_shared32(tile.scale_word(4 * g + q), (mine >> 2) + (u32)(least - Rounding::DOWN) * 0x01010101u);
  return true;
}

// --- By tensor cores, in float32 -----------------------------------------------------------------------------------------

// Whether it was done: else codes are to be written again.
template <int SPAN, bool DITHER>
__device__ __forceinline__ bool by_products(const TransposeArgs& args, const Sylvester& h, const Columns& tile) {
  constexpr int AT_ONCE = SPAN == 4 ? 2 : 4;  // columns of a lane: there are no registers for more
  const u32 g = lane_number() >> 2, q = lane_number() & 3;
  const u32 base = __float_as_uint(__fmul_rn(three_quarters(args.root), FINE)) + (129u << 23);
  bool zero = false;
#pragma unroll 1
  for (u32 first = 0; first < 4; first += AT_ONCE) {
    Philox four;
#pragma unroll 1
    for (u32 block = 0; block < 4; block += SPAN) {  // four at once: 77 us for 80, but 85 for 73 beside float16's code
      float v[SPAN][AT_ONCE / 2][4][4] = {};
#pragma unroll
      for (int n = 0; n < SPAN; n++) {
        const Words codes = tile.words_of(block + n), power = tile.powers_of(block + n);
#pragma unroll
        for (int p = 0; p < AT_ONCE / 2; p++) turn_rows(v[n][p], codes, power, h, first / 2 + p), turn_fifth(v[n][p]);
      }
      turn_blocks(v);
      if (block == 0 && first == 0) codes_free();
#pragma unroll
      for (int n = 0; n < SPAN; n++) {
        u32 random[AT_ONCE][2];
        if constexpr (DITHER) {
          const u64 number = tile.group_of(4 * opaque(g) + q, args.rows);  // opaque: kept for all blocks it would spill
          const Randoms randoms(tile);
          if (block + n == 0 || args.rows % TALL) four = Philox((number + block + n) / 4, args.key);
          randoms.share(Random(four, number + block + n), first, random);
        }
        const auto value = [&](int c, int i) { return v[n][c / 2][i / 2][c % 2 * 2 + i % 2]; };
        float amax[AT_ONCE];
#pragma unroll
        for (int c = 0; c < AT_ONCE; c++) {
          amax[c] = fabsf(value(c, 0));
#pragma unroll
          for (int i = 1; i < 8; i++) amax[c] = fmaxf(amax[c], fabsf(value(c, i)));
        }
        u32 two[AT_ONCE / 2];  // columns' exponents, with what is below them in half a word
#pragma unroll
        for (int p = 0; p < AT_ONCE / 2; p++)
          two[p] = __byte_perm(__float_as_uint(__fmul_rn(amax[2 * p], args.root)),
                               __float_as_uint(__fmul_rn(amax[2 * p + 1], args.root)), 0x7632);
#pragma unroll
        for (int across = 1; across < 4; across *= 2)
#pragma unroll
          for (int p = 0; p < AT_ONCE / 2; p++) two[p] = larger_halves(two[p], other_word(two[p], across));
#pragma unroll
        for (int c = 0; c < AT_ONCE; c++) {
          const u32 field = (c % 2 ? two[c / 2] : two[c / 2] << 16) & INFINITE;
          zero |= field == 0;
          if (q == c) store_shared_byte(tile.scale_word(4 * g + first + c) + block + n, (field >> 23) - tile.exponent - 100);
          const float factor = __uint_as_float(base - field);
          u32 p[4];
#pragma unroll
          for (int i = 0; i < 4; i++) {
            p[i] = Fp16::pack(__fmul_rn(value(c, 2 * i), factor), __fmul_rn(value(c, 2 * i + 1), factor));
            if constexpr (!DITHER) p[i] = to_nearest(p[i]);
            else p[i] = i % 2 ? with_bits<true>(p[i], random[c][i / 2]) : with_bits<false>(p[i], random[c][i / 2]);
          }
          store_shared32(tile.codes_at(first + c, block + n, q), code_word(p[0], p[1], p[2], p[3]));
        }
      }
    }
  }
  return !__any_sync(0xFFFFFFFFu, zero);
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
    const u64 group = tile.group_of(column, args.rows) + block;
    random = Random(Philox(group / 4, args.key), group);
  }
  Words codes = codes_of<Bf16, SPAN, RULE, false, DITHER>(x, fine_factor<RULE>(exponent.value, args.root), random, within);
  if (!exponent.finite) codes = {};
  store_shared_words(tile.codes_at(c, block, 0), codes);
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
  constexpr u32 MINE = TO_RANDOM + (DITHER ? HALF_RANDOM : 0);
  const u32 all_scales = shared_memory() + warps / TEAM * (STAGES * CODE_TILE);
  const u32 all_scratch = all_scales + warps / TEAM * (STAGES * SCALE_TILE);
  const u32 codes_at = shared_memory() + team * (STAGES * CODE_TILE), scales_at = all_scales + team * (STAGES * SCALE_TILE);
  const u32 written = all_scratch + warp * WRITTEN, mine = all_scratch + warps * WRITTEN + warp * MINE;
  const u32 full = all_scratch + warps * (WRITTEN + MINE) + team * (STAGES * 16), empty = full + STAGES * 8;
  if (strip == 0 && lane == 0) {
    for (u32 i = 0; i < STAGES; i++) barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, TEAM);
    barrier_init_done();
  }
  block_sync();
  const u32 row_tiles = (args.rows + TALL - 1) / TALL, tiles = row_tiles * ((args.columns + TEAM * STRIP - 1) / (TEAM * STRIP));
  const u32 teams = gridDim.x * (warps / TEAM), me = blockIdx.x * (warps / TEAM) + team, runs = (tiles + args.run - 1) / args.run;
  const u32 each = runs / teams, left = runs % teams;  // left times a team's number has 32 bits
  const auto start_of = [&](u32 team) { return min((each * team + left * team / teams) * args.run, tiles); };
  const u32 end = start_of(me + 1);
  u32 number = start_of(me), first = number % row_tiles % 8;  // of eight tiles whose scales are written at once
  const Sylvester h;
  const u32 staged = staged_at(args);
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
                  staged_from(odd, args.columns / 32, next.column) / 16 * 16, next.row * TALL / args.staged, bar, policy);
    next.advance({1, 0}, row_tiles, 1, true), ahead.next();
  };
  grid_wait();
  if (strip == 0 && number < end) start();
  u32 signs[4] = {};  // of rows 32 j + lane, which their powers take
  if constexpr (SIGNS)
#pragma unroll
    for (int j = 0; j < 4; j++) signs[j] = (__float_as_uint(args.signs[(32 * j + lane) % (32 * SPAN)]) >> 31) * 0x80008000u;
  for (; number < end; number++, ring.next(), there.advance({1, 0}, row_tiles, 1, true)) {
    if (strip == 0 && number + 1 < end) start();
    const u32 row = there.row * TALL, column = there.column * (TEAM * STRIP) + strip * STRIP;
    barrier_wait(full + ring.stage * 8, ring.parity);
    if (column < (u32)args.columns) {
      const u32 staged_scales = scales_at + ring.stage * SCALE_TILE + (staged ^ there.column % 2 * 8) + strip * 2;
      const Scales scales(args, row, column, staged_scales);
      // Or the compiler makes addresses, for the few that read again, in any case: 48.4 us for 47.2.
      const auto again = [&] { return Scales(args, opaque(row), opaque(column), opaque(staged_scales)); };
      const int top = scales.most(), low = scales.least();
      const bool near = RULE == ABSMAX34 && top <= low + SPREAD && low >= LEAST_BYTE && top <= MOST_BYTE &&
                        row + TALL <= (u32)args.rows;
      const int exponent = min((int)UNIT_POWER - low, 30 - top);
      u32 sum = 0;  // of powers of two
      const auto store = [&](const Scales& of, bool near) {
        if (near) sum = store_powers(mine + TO_POWERS, of, signs, exponent);
        else store_wide_powers(mine + TO_POWERS, of, signs);
        warp_sync();
      };
      store(scales, near);
#pragma unroll 1
      for (u32 half = 0; half < 2 && column + half * 32 < (u32)args.columns; half++) {
        const u32 codes = codes_at + ring.stage * CODE_TILE, powers = mine + TO_POWERS + half * (4 * POWER_PITCH);
        const Columns tile = {codes, strip * 2 + half, written, mine, powers, exponent, row, column + half * 32};
        if constexpr (RULE == ABSMAX34)
          if (near) {
            using Halves = HalfRounding<SPAN, DITHER>;
            bool done = top <= low + Halves::BINADES && sum <= Halves::POWERS && by_halves<SPAN, DITHER>(args, h, tile);
            if (!done) warp_sync(), done = by_products<SPAN, DITHER>(args, h, tile);
            if (done) {
              write_codes(packed, tile);  // here and below: one for both costs Hadamard 128 3%
              continue;
            }
            warp_sync();
            store(again(), false);
          }
        by_lanes<SPAN, RULE, DITHER>(args, tile);
        write_codes(packed, tile);
        if (near && half == 0) warp_sync(), store(again(), true);
      }
    }
    warp_sync();
    if (lane == 0) barrier_arrive(empty + ring.stage * 8);  // what is left is in the warp's own memory
    if (column < (u32)args.columns && (there.row % 8 == 7 || there.row + 1 == row_tiles || number + 1 == end)) {
      write_scales(args, mine, row / (8 * TALL) * (8 * TALL), column, first, there.row % 8 + 1);
      first = 0;
    }
  }
  codes_free();  // a block's shared memory ends with it
}

}  // namespace quantrot
