// Rows of MXFP4 as e4m3 with one power of two a row, on Hopper: what products on FP8 tensor cores read. Follows gated.cuh and
// rows.cuh.

namespace quantrot {

constexpr int TOP = 6, WINDOW = 15, LEAST_TOP = -120;

// What a group's codes are multiplied by, twice, as float16: from -13 on all are zero; NaN.
__device__ __forceinline__ u32 window_unit(int shift, bool finite) { return finite ? half_power(max(shift, -14)) : 0x7FFF7FFFu; }

// Two elements, rounded, times such a unit.
__device__ __forceinline__ u32 codes_to_e4m3(u32 rounded, u32 unit) {
  return half_to_e4m3(times_half(times_half(rounded & 0x8E008E00u, half_power(14)), unit));
}

// A row of which each lane has a group: as e4m3, or ARRANGED, the words of 128 columns as batch.cuh reads them, word w of group
// q at 4 w + q; where a group lies below e4m3's window (or is zero) the packed row, too. set: [top, -least, count][warps].
template <class IN, int SPAN, int RULE, bool ARRANGED>
__device__ __forceinline__ void expand_by_group(const QuantizeArgs& args, Group& x, i64 row, int* set) {
  const u32 lane = lane_number(), warp = warp_number(), warps = blockDim.x / 32;
  const bool inside = (i64)warp * 32 + lane < args.row_groups;
  x.turn_across<SPAN>();
  const Exponent exponent = exponent_of<RULE, SPAN != 0>(x, args.root);
  const bool counts = exponent.finite && inside;
  const int most = warp_max(counts ? max(exponent.value, LEAST_TOP) : LEAST_TOP), least = warp_max(counts ? -exponent.value : -127);
  if (lane == 0) set[warp] = most, set[warps + warp] = least;
  block_sync();
  const int top = warp_max(lane < warps ? set[lane] : LEAST_TOP);
  const int bottom = warp_max(lane < warps ? set[warps + lane] : -127);
  const int shift = exponent.value - top + TOP;
  const float factor = fine_factor<RULE>(exponent.value, args.root);
  const u32 unit = window_unit(shift, exponent.finite);
  const i64 group = row * args.row_groups + warp * 32 + lane;
  u32 words[8];
#pragma unroll
  for (int w = 0; w < 8; w++) {
    u32 e[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      u32 p = fine_pair<IN, SPAN, RULE>(x.v[w * 4 + 2 * i], x.v[w * 4 + 2 * i + 1], factor);
      if constexpr (clamps<RULE>()) p = clamp_half(p, SIX);
      e[i] = codes_to_e4m3(to_nearest(p), unit);
    }
    words[w] = e[0] | e[1] << 16;
  }
  if (ARRANGED && inside) {
    u32* const to = (u32*)args.mask + group / 4 * 32 + group % 4;
#pragma unroll
    for (int w = 0; w < 8; w++) to[w * 4] = words[w];
  } else if (inside) {
    store_words((char*)args.mask + group * 32, {words[0], words[1], words[2], words[3]});
    store_words((char*)args.mask + group * 32 + 16, {words[4], words[5], words[6], words[7]});
  }
  int outside = 0;
  if (-bottom <= top - WINDOW) {  // the same for all threads
    u32 within;
    Words codes = codes_of<IN, SPAN, RULE, false, false>(x, factor, Random(), within);
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

// Rows of a thread block in turns, STAGES of them on their way or in hand, SLOT bytes of a ring each: copy(row, to) starts a row's
// copies of this warp, work(row, where it lies).
template <u32 SLOT, int STAGES, class Copy, class Work>
__device__ __forceinline__ void each_row(u32 rows, u32 ring, const Copy& copy, const Work& work) {
  u32 ahead = blockIdx.x, into = 0, slot = 0;
  const auto start = [&] {
    if (ahead < rows) copy(ahead, ring + into);
    copies_commit();
    ahead += gridDim.x, into = into == (STAGES - 1) * SLOT ? 0 : into + SLOT;
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) start();
  for (u32 row = blockIdx.x; row < rows; row += gridDim.x) {
    warp_sync();
    start();
    copies_wait<STAGES - 1>();
    warp_sync();
    const u32 at = ring + slot;
    slot = slot == (STAGES - 1) * SLOT ? 0 : slot + SLOT;
    work(row, at);
  }
}

// A thread block a row at a time. The kernel after this one may start when its blocks have: see `expand`. GATED: a row of
// x is gate and up side by side, and what is quantized silu(gate) * up.
template <class IN, int SPAN, bool SIGNS, int RULE, bool ARRANGED, bool GATED, int STAGES>
__device__ __forceinline__ void quantize_expanded(const QuantizeArgs& args) {
  constexpr u32 SLOT = GATED ? 2 * TILE : TILE;
  const u32 lane = lane_number(), warp = warp_number(), warps = blockDim.x / 32;
  const u32 ring = shared_memory() + warp * (STAGES * SLOT);
  const u32 signs_at = warps * (STAGES * SLOT), flips = shared_memory() + signs_at;
  int* numbers = block_numbers(signs_at + (SPAN ? SPAN : 1) * (SIGN_PITCH * 4));  // three sets of [top, -least, count][warps], in turn
  const i64 row_groups = args.row_groups, mine = (i64)warp * 32;
  if constexpr (ARRANGED) launch_dependents();
  grid_wait();
  if constexpr (SIGNS) {
    store_signs(flips, args.signs, SPAN);
    block_sync();
  }
  u32 turn = 0;
  const auto copy = [&](u32 row, u32 to) {
    const i64 first = row * row_groups * (GATED ? 2 : 1), second = first + row_groups;
    start_tile<1>(to, args.x, first + mine, second);
    if constexpr (GATED) start_tile<1>(to + TILE, args.x, second + mine, second + row_groups);
  };
  each_row<SLOT, STAGES>((u32)args.rows, ring, copy, [&](u32 row, u32 tile) {  // rows: less than 2^31
    Group x[1];
    const auto made = [](const Words& words, u32 from) { return GATED ? gated(words, load_shared_words(from + TILE)) : words; };
    read_groups<IN, 1, SIGNS>(x, tile, flips + lane % (SPAN ? SPAN : 1) * (SIGN_PITCH * 4), made);
    expand_by_group<IN, SPAN, RULE, ARRANGED>(args, x[0], row, numbers + turn * warps * 3);
    turn = turn == 2 ? 0 : turn + 1;
  });
}

}  // namespace quantrot
