// Rows behind RMSNorm, and behind an addition before it, as e4m3 for products on FP8 tensor cores: of MXFP4's groups, or with a
// scale a row. Follows rms.cuh, tokens.cuh and few_rows.cuh.
//
// What a product reads is one byte a number, where the norm alone would write two and read two more. The norm's sum has the same
// order in both kernels.

namespace quantrot {

struct NormedArgs {
  QuantizeArgs to;     // x bfloat16, no signs; with a scale a row: e4m3 and row_scale alone
  const void* norm;    // bfloat16 [columns]
  const void* added;   // as x, or null: what is normed is x + added, rounded, which is kept
  void* total;
  float epsilon;
  int settled;         // whether no kernel that may still run writes norm
};

// x + y, rounded.
__device__ __forceinline__ Words sum_of(const Words& x, const Words& y) {
  u32 z[4];
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const u32 a = x.at(k), b = y.at(k);
    z[k] = Bf16::pack(Bf16::value((unsigned short)a) + Bf16::value((unsigned short)b),
                      Bf16::value((unsigned short)(a >> 16)) + Bf16::value((unsigned short)(b >> 16)));
  }
  return {z[0], z[1], z[2], z[3]};
}

// RMSNorm's factor of a row, of which thread threadIdx.x has these eights of columns: number(i) is where the ith is.
template <int UNITS, class Number>
__device__ __forceinline__ float factor_of_row(const Words (&v)[UNITS], const Number& number, u32 columns, float epsilon, u32 sums) {
#pragma unroll
  for (int i = 0; i < UNITS; i++) {
    const Words unit[1] = {v[i]};
    const float sum = sum_of_half(square_sum(unit));
    if (lane_number() % 16 == 0) store_shared(sums + number(i) / 16 * 4, sum);
  }
  block_sync();
  return norm_factor(sums, columns / 128, 4, columns, epsilon);
}

// Such a row as codes with one scale; zeros where there is no column. maxima: room for a number of each warp.
template <int THREADS, int RULE, bool ARRANGED, int UNITS, class Number>
__device__ __forceinline__ void store_codes(const QuantizeArgs& to, i64 row, const Words (&v)[UNITS], const Number& number, u32 maxima) {
  const TokenScale by(token_scale_of<THREADS, RULE>(larger_magnitude(0, v), maxima));
  if (threadIdx.x == 0) to.row_scale[row] = by.scale;
#pragma unroll
  for (int i = 0; i < UNITS; i++) {
    const u32 fours[2] = {four_codes<0>(v[i], by), four_codes<1>(v[i], by)};
    if (number(i) < to.row_groups * 4)
      store_unit<ARRANGED>(to.mask, row * to.row_groups + number(i) / 4, number(i) % 4, fours);
  }
}

// A thread block a row, all of it in registers, for rows that are not many more than multiprocessors. RULE: MXFP4's, after
// Sylvester's matrix of SPAN groups, or FP8's. ARRANGED: in the order of batch.cuh, whose kernel may start beside this one.
template <int THREADS, int UNITS, int SPAN, int RULE, bool ARRANGED>
__device__ __forceinline__ void quantize_few_normed(const NormedArgs& args) {
  const u32 units = (u32)args.to.row_groups * 4, sums = shared_memory() + THREADS / 32 * 12;  // behind the numbers of expand_by_unit
  const i64 row = blockIdx.x;
  if constexpr (ARRANGED) launch_dependents();
  if (!args.settled) grid_wait();
  Words weight[UNITS], v[UNITS], added[UNITS];
#pragma unroll
  for (int i = 0; i < UNITS; i++) weight[i] = unit_of(i) < units ? ((const Words*)args.norm)[unit_of(i)] : Words{};
  grid_wait();
  const auto load = [&](const void* from, int i) {
    return unit_of(i) < units ? load_fresh_words((const char*)from + (row * units + unit_of(i)) * 16) : Words{};
  };
#pragma unroll
  for (int i = 0; i < UNITS; i++) {
    v[i] = load(args.to.x, i);
    if (args.added) added[i] = load(args.added, i);
  }
  if (args.added)
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
      v[i] = sum_of(v[i], added[i]);
      if (unit_of(i) < units) store_words((char*)args.total + (row * units + unit_of(i)) * 16, v[i]);
    }
  const float factor = factor_of_row(v, unit_of, units * 8, args.epsilon, sums);
#pragma unroll
  for (int i = 0; i < UNITS; i++) v[i] = normed(v[i], factor, weight[i]);
  if constexpr (is_fp8<RULE>())
    store_codes<THREADS, RULE, ARRANGED>(args.to, row, v, unit_of, shared_memory());
  else
    expand_by_unit<Bf16, SPAN, RULE, ARRANGED>(args.to, row, v, block_numbers(0));
}

// Many rows, which thread blocks take in turns; rows and what is added come through shared memory, some rows ahead. A warp has
// 1024 columns: of sums and codes with one scale a lane has eight beside its neighbour's, of MXFP4 a group.
template <int THREADS, int SPAN, int RULE, bool ARRANGED, bool ADDED, int STAGES>
__device__ __forceinline__ void quantize_normed(const NormedArgs& args) {
  constexpr u32 SLOT = ADDED ? 2 * TILE : TILE, WARPS = THREADS / 32, NUMBERS = WARPS * (STAGES * SLOT + TILE);
  const u32 lane = lane_number(), warp = warp_number(), units = (u32)args.to.row_groups * 4;
  const u32 ring = shared_memory() + warp * (STAGES * SLOT), gain = shared_memory() + WARPS * (STAGES * SLOT) + warp * TILE;
  const u32 sums = shared_memory() + NUMBERS + WARPS * 12, own = (lane ^ lane / 8) * 16;  // see start_tile
  const i64 row_groups = args.to.row_groups, mine = (i64)warp * 32;
  const auto number = [&](int i) { return warp * 128 + i * 32 + lane; };
  if constexpr (ARRANGED) launch_dependents();
  if (!args.settled) grid_wait();
  start_tile<1>(gain, args.norm, mine, row_groups);
  copies_commit();
  grid_wait();
  const auto copy = [&](u32 row, u32 to) {
    const i64 first = row * row_groups;
    start_tile<1>(to, args.to.x, first + mine, first + row_groups);
    if constexpr (ADDED) start_tile<1>(to + TILE, args.added, first + mine, first + row_groups);
  };
  each_row<SLOT, STAGES>((u32)args.to.rows, ring, copy, [&](u32 row, u32 tile) {
    Words v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      v[i] = load_shared_words(tile + own + i * 512);
      if constexpr (ADDED) {
        v[i] = sum_of(v[i], load_shared_words(tile + own + i * 512 + TILE));
        if (number(i) < units) store_words((char*)args.total + ((i64)row * units + number(i)) * 16, v[i]);
        if constexpr (!is_fp8<RULE>()) store_shared_words(tile + own + i * 512, v[i]);
      }
    }
    const float factor = factor_of_row(v, number, units * 8, args.epsilon, sums);
    if constexpr (is_fp8<RULE>()) {
#pragma unroll
      for (int i = 0; i < 4; i++)
        v[i] = number(i) < units ? normed(v[i], factor, load_shared_words(gain + own + i * 512)) : Words{};
      store_codes<THREADS, RULE, ARRANGED>(args.to, row, v, number, shared_memory() + NUMBERS);
    } else {
      Group x[1];
      const auto made = [&](const Words& words, u32 from) { return normed(words, factor, load_shared_words(from - tile + gain)); };
      read_groups<Bf16, 1, false>(x, tile, 0, made);
      expand_by_group<Bf16, SPAN, RULE, ARRANGED>(args.to, x[0], row, block_numbers(NUMBERS));
    }
  });
}

}  // namespace quantrot
