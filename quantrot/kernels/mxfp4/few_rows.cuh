// A few rows of MXFP4 as e4m3, in the order in which batch.cuh reads them, on Hopper. Follows expanded_rows.cuh.
//
// Where rows are fewer than multiprocessors, a kernel takes as long as one row: four lanes have a group, eight columns each, and
// nothing passes through shared memory but the row's largest and least exponent.

namespace quantrot {

// Four and four e4m3 of part `part` of group `number`.
template <bool ARRANGED>
__device__ __forceinline__ void store_unit(void* to, i64 number, u32 part, const u32 (&fours)[2]) {
  if constexpr (ARRANGED) {
    u32* const first = (u32*)to + number / 4 * 32 + number % 4 + part * 8;
    first[0] = fours[0], first[4] = fours[1];
  } else {
    *(u64*)((char*)to + number * 32 + part * 8) = fours[0] | (u64)fours[1] << 32;
  }
}

// Eight columns that thread number threadIdx.x has as its unit i.
__device__ __forceinline__ u32 unit_of(int i) { return i * blockDim.x + threadIdx.x; }

// A row, of which each thread has UNITS of eight columns, as e4m3, ARRANGED or not, and what quantize_expanded writes beside it.
// numbers: [top, -least, count][warps].
template <class IN, int SPAN, int RULE, bool ARRANGED, int UNITS>
__device__ __forceinline__ void expand_by_unit(const QuantizeArgs& args, i64 row, const Words (&words)[UNITS], int* numbers) {
  const u32 lane = lane_number(), warp = warp_number(), warps = blockDim.x / 32;
  const u32 row_groups = (u32)args.row_groups, units = row_groups * 4;
  GroupOf<4> x[UNITS];
  int exponents[UNITS], most = LEAST_TOP, least = -127;
  bool counts[UNITS], finite[UNITS];
#pragma unroll
  for (int i = 0; i < UNITS; i++) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
      x[i].v[2 * k] = IN::value((unsigned short)words[i].at(k));
      x[i].v[2 * k + 1] = IN::value((unsigned short)(words[i].at(k) >> 16));
    }
    x[i].template turn_across<SPAN>();
    const Exponent exponent = exponent_of<RULE, SPAN != 0>(x[i], args.root);
    exponents[i] = exponent.value, finite[i] = exponent.finite, counts[i] = exponent.finite && unit_of(i) < units;
    if (counts[i]) most = max(most, exponent.value), least = max(least, -exponent.value);
  }
  most = warp_max(most), least = warp_max(least);
  if (lane == 0) numbers[warp] = most, numbers[warps + warp] = least;
  block_sync();
  const int top = warp_max(lane < warps ? numbers[lane] : LEAST_TOP), bottom = warp_max(lane < warps ? numbers[warps + lane] : -127);
  const bool reaches_below = -bottom <= top - WINDOW;  // the same for all threads
  int outside = 0;
#pragma unroll
  for (int i = 0; i < UNITS; i++) {
    const int shift = exponents[i] - top + TOP;
    const float factor = fine_factor<RULE>(exponents[i], args.root);
    const u32 unit = window_unit(shift, finite[i]);
    const u32 group = unit_of(i) / 4, part = unit_of(i) % 4;
    const i64 number = row * row_groups + group;
    const auto rounded = [&](int first, int second) {
      u32 p = fine_pair<IN, SPAN, RULE>(x[i].v[first], x[i].v[second], factor);
      if constexpr (clamps<RULE>()) p = clamp_half(p, SIX);
      return to_nearest(p);
    };
    if (group < row_groups) {
      u32 fours[2];
#pragma unroll
      for (int w = 0; w < 2; w++) {
        u32 e[2];
#pragma unroll
        for (int h = 0; h < 2; h++) e[h] = codes_to_e4m3(rounded(w * 4 + 2 * h, w * 4 + 2 * h + 1), unit);
        fours[w] = e[0] | e[1] << 16;
      }
      store_unit<ARRANGED>(args.mask, number, part, fours);
    }
    if (reaches_below) {
      const u32 codes = finite[i] ? code_word(rounded(0, 2), rounded(1, 3), rounded(4, 6), rounded(5, 7)) : 0;
      if (group < row_groups) {
        ((u32*)args.packed)[number * 4 + part] = codes;
        if (part == 0) args.scale[number] = (unsigned char)(finite[i] ? exponents[i] + 127 : 255);
      }
      float used = (codes & 0x77777777u) ? 1.f : 0.f;  // of the group's four lanes
#pragma unroll
      for (int across = 1; across < 4; across *= 2) used += other_lane(used, across);
      outside += counts[i] && part == 0 && used > 0.f && shift <= TOP - WINDOW;
    }
  }
  if (reaches_below) {
    outside = warp_sum(outside);
    if (lane == 0) numbers[2 * warps + warp] = outside;
    block_sync();
    outside = warp_sum(lane < warps ? numbers[2 * warps + lane] : 0);
  }
  if (threadIdx.x == 0) args.row_scale[row] = power(top - TOP), args.outside[row] = outside;
}

// A thread block a row, UNITS of eight columns a thread. args, bits and GATED as quantize_expanded's.
template <class IN, int SPAN, int RULE, bool GATED, int UNITS>
__device__ __forceinline__ void quantize_few(const QuantizeArgs& args) {
  const u32 units = (u32)args.row_groups * 4;
  const i64 row = blockIdx.x;
  launch_dependents();
  grid_wait();
  Words words[UNITS];
#pragma unroll
  for (int i = 0; i < UNITS; i++) {
    const char* const from = (const char*)args.x + (row * (GATED ? 2 : 1) * units + unit_of(i)) * 16;
    const bool inside = unit_of(i) < units;
    words[i] = inside ? load_fresh_words(from) : Words{};
    if constexpr (GATED) words[i] = gated(words[i], inside ? load_fresh_words(from + units * 16) : Words{});
  }
  expand_by_unit<IN, SPAN, RULE, true>(args, row, words, block_numbers(0));
}

}  // namespace quantrot
