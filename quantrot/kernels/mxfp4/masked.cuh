// A gradient that was clipped, turned back, on Hopper: zeros where the mask has none, Sylvester's matrix, times a factor.
// Follows rows.cuh, whose tiles it takes: a lane owns a Hadamard block, and puts it back where it read it, so that the warp
// writes whole sectors.

namespace quantrot {

struct MaskedArgs {
  const void* x;    // [groups, 32], 16-bit elements
  const u32* mask;  // [groups]: bit i of a word is element i
  void* y;          // [groups, 32], as x or float32
  i64 groups;
  float factor;
};

// N words from p on.
template <int N>
__device__ __forceinline__ void load_each(u32 (&words)[N], const u32* p) {
#pragma unroll
  for (int n = 0; n < N; n++) words[n] = __ldg(p + n);
}

// What a lane puts into 16 bytes: eight columns of a group from `first` on times a factor, or (WIDE) four.
template <class IN, bool WIDE>
__device__ __forceinline__ Words unit_of(const Group& x, int first, float factor) {
  const auto times = [&](int i) { return __fmul_rn(x.v[first + i], factor); };
  u32 w[4];
#pragma unroll
  for (int i = 0; i < 4; i++) w[i] = WIDE ? __float_as_uint(times(i)) : IN::pack(times(2 * i), times(2 * i + 1));
  return {w[0], w[1], w[2], w[3]};
}

// N groups of a lane times a factor to memory, through the tile that they were read from; `left`: groups from its first on.
template <class IN, bool WIDE, int N>
__device__ __forceinline__ void write_groups(const Group (&x)[N], float factor, u32 tile, char* y, u32 left) {
  const u32 lane = lane_number(), own = tile + lane * (64 * N) + turned_by<N>(lane) * 16;
  const u32 from = tile | (lane ^ (N == 1 ? lane / 8 : lane / (4 * N))) * 16;
  const u32 own_left = left > lane / 4 ? left - lane / 4 : 0;  // a quarter of a warp has its first group
#pragma unroll
  for (int half = 0; half < (WIDE ? 2 : 1); half++) {
    warp_sync();
#pragma unroll
    for (int unit = 0; unit < 4 * N; unit++) {
      const int first = WIDE ? half * 16 + unit % 4 * 4 : unit % 4 * 8;
      store_shared_words((own ^ unit % 8 * 16) + unit / 8 * 128, unit_of<IN, WIDE>(x[unit / 4], first, opaque(factor)));
    }
    warp_sync();
    char* const to = y + (WIDE ? lane / 4 * 128 + half * 64 + lane % 4 * 16 : lane * 16);
#pragma unroll
    for (u32 i = 0; i < 4 * N; i++)
      if (i * 8 < own_left)
        store_words(to + i * (WIDE ? 1024 : 512), load_shared_words((from ^ i * (8 / N) % 8 * 16) + i * 512));
  }
}

template <class IN, bool WIDE, int N, int STAGES>
__device__ __forceinline__ void masked_hadamard(const MaskedArgs& args) {
  constexpr u32 PIECE = N * TILE;
  const u32 lane = lane_number(), warps = blockDim.x / 32, ring = shared_memory() + warp_number() * (STAGES * PIECE);
  const u32 groups = (u32)args.groups, counter = shared_memory() + warps * (STAGES * PIECE);
  if (threadIdx.x == 0) store_shared32(counter, 0);
  block_sync();
  u32 kept[N];
  const auto ahead = [&](u32 number) { load_each(kept, args.mask + min((number * 32 + lane) * N, groups - N)); };
  const auto work = [&](u32 number, u32 tile) {
    Group x[N];
    read_groups<IN, N, false>(x, tile, 0);
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < 32; i++) x[n].v[i] = kept[n] >> i & 1 ? x[n].v[i] : 0.f;
    turn_groups<N>(x);
#pragma unroll
    for (int n = 0; n < N; n++) x[n].turn_within();
    const u32 first = number * (32 * N);
    char* const to = (char*)args.y + (i64)first * (WIDE ? 128 : 64);
    write_groups<IN, WIDE, N>(x, args.factor, tile, to, groups - first);
  };
  each_tile<N, STAGES>(args.x, groups, ring, counter, ahead, work);
}

}  // namespace quantrot
