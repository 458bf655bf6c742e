// Few tiles: fewer than the device has multiprocessors, so a tile's K is in parts, each with a ring of stages of its own.
//
// TEAMS of GROUPS warpgroups in a thread block take a part each: while one widens, waits or rescales, the others'
// products run. SPLIT = 2 blocks of a cluster halve K again. At the end warpgroups that have the same rows swap halves of
// their sums, first between the teams (four: twice), through shared memory, then between the blocks, straight into the
// other's: a sum crosses from one multiprocessor to the other once, and every warpgroup finishes as many columns as the
// others.
//
// APART = 2: K is halved once more, by clusters that need not run at once. Both leave their sums in memory, and the warpgroup
// that comes last adds the other's to its own, which gives the same bits whichever it is.

namespace quantrot {

#ifndef QUANTROT_EMULATED
// The start of a cluster, in two: before the wait, a block may not reach into another one.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ void store_shared(u32 to, const float (&v)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}

// To another block of the cluster; the 16 bytes count on that block's barrier (addresses of in_block).
__device__ __forceinline__ void send(u32 to, const float (&v)[4], u32 bar) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(to),
               "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(bar)
               : "memory");
}
#endif

// The half of a lane's first N sums that it keeps comes first, the other one after it.
template <int N, int W>
__device__ __forceinline__ void keep_half(float (&sum)[W], bool upper) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) {
    const float lo = sum[i], hi = sum[N / 2 + i];
    sum[i] = upper ? hi : lo, sum[N / 2 + i] = upper ? lo : hi;
  }
}

// What another warpgroup's same lane left at `from`, for the first N sums. a + b is b + a: both add alike.
template <int N, int W>
__device__ __forceinline__ void add_half(float (&sum)[W], u32 from) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const Quad other = load_shared16bytes(from + i * 512);
#pragma unroll
    for (int j = 0; j < 4; j++) sum[i + j] += __uint_as_float(other.w[j]);
  }
}

// Of each lane's first N sums a half for the warpgroup BIT from this one, whose other half is added to what stays.
template <int N, int BIT, int W>
__device__ __forceinline__ void swap_halves(float (&sum)[W], u32 space, u32 own, u32 barrier) {
  const u32 mine = threadIdx.x % 128 * 16;
  keep_half<N>(sum, own & BIT);
#pragma unroll
  for (int i = 0; i < N / 2; i += 4) {
    const float given[4] = {sum[N / 2 + i], sum[N / 2 + i + 1], sum[N / 2 + i + 2], sum[N / 2 + i + 3]};
    store_shared(space + (own ^ BIT) * (N * 256) + mine + i * 512, given);
  }
  named_sync(barrier, 256);
  add_half<N / 2>(sum, space + own * (N * 256) + mine);
}

template <class P>
__device__ u32 counters[1 << 17];  // IN_TURN of nvrtc.py

// A warpgroup's sums and those of the other cluster's warpgroup of the same rows and columns, which are next to it in
// `parts`: whether it came last and has both.
template <int N>
__device__ __forceinline__ bool add_apart(float (&sum)[N], float* parts, u32 which, u32* counter, u32 word, u32 barrier) {
  float *mine = parts + which * (N * 128) + threadIdx.x % 128 * 4;
  const float* other = parts + (which ^ 1) * (N * 128) + threadIdx.x % 128 * 4;
#pragma unroll
  for (int i = 0; i < N; i += 4) store_fresh4(mine + i * 128, {sum[i], sum[i + 1], sum[i + 2], sum[i + 3]});
  named_sync(barrier, 128);
  if (threadIdx.x % 128 == 0) store_shared(word, count_in_turn(counter, 1));
  named_sync(barrier, 128);
  if (load_shared1(word) == 0) return false;
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const float4 there = fresh4(other + i * 128);
    sum[i] += there.x, sum[i + 1] += there.y, sum[i + 2] += there.z, sum[i + 3] += there.w;
  }
  return true;
}

template <class P, class O>
__device__ __forceinline__ void parts(const TensorMap* codes, const TensorMap* wide, const TensorMap* y,
                                      const MixedArgs& args) {
  constexpr int TEAMS = P::TEAMS, ALL = TEAMS * P::GROUPS, RINGS = TEAMS * P::STAGES, W = P::W;
  constexpr int HALF = W / TEAMS, OWN = HALF / P::SPLIT;  // a lane's sums of its team's columns, and those it finishes
  constexpr int AREA = 256 * OWN * P::SPLIT;              // bytes that a warpgroup is sent; then its part of y
  static_assert(O::WEIGHT, "few tokens by a narrow weight");
  static_assert(P::SPLIT <= 2 && (TEAMS <= 2 || TEAMS == 4) && P::SHARE == 1 && ALL <= 4, "halves");
  static_assert(OWN % 4 == 0 && OWN <= 128, "matrices");
  static_assert(TEAMS == 1 || ALL * W * (TEAMS == 4 ? 384 : 256) <= RINGS * P::STAGE, "swapped sums take the stages' place");
  static_assert(RINGS * (P::STAGE + 16) + ALL * (AREA + 8) <= 227 << 10, "shared memory");
  const u32 base = shared_memory(), areas = base + RINGS * P::STAGE, full = areas + ALL * AREA;
  const u32 empty = full + RINGS * 8, sent = empty + RINGS * 8;
  const u32 warp = warp_number(), half = P::SPLIT > 1 ? cluster_rank() : 0;
  const int clusters = gridDim.x / P::CLUSTER / P::APART, apart = blockIdx.x / P::CLUSTER / clusters;
  const int unit = blockIdx.x / P::CLUSTER % clusters, tiles = parts_of(args.columns, P::COLUMNS);
  const int column = start_of(unit % tiles * P::COLUMNS, args.columns, P::COLUMNS);
  const int row = start_of(unit / tiles * P::ROWS, args.rows, P::ROWS);
  const int first = (apart * P::SPLIT + half) * TEAMS * args.segment;  // of the first team; past the end, zeros
  if (warp == ALL * 4 && lane_number() == 0) {
    tensor_prefetch(codes), tensor_prefetch(wide), tensor_prefetch(y);
    for (int s = 0; s < RINGS; s++) {
      barrier_init(full + s * 8, 1);
      barrier_init(empty + s * 8, 4 * P::GROUPS);
    }
    for (int i = 0; i < ALL; i++) barrier_init(sent + i * 8, 1);
    barrier_init_done();
  }
  if constexpr (P::SPLIT > 1) cluster_arrive();
  block_sync();
  if (!args.early) grid_wait();
  if (warp >= ALL * 4) {
    if constexpr (ALL == 3) {
      give_registers<32>();
    } else if constexpr (ALL > 1) {
      give_registers<24>();
    }
    if (warp == ALL * 4) {
      if constexpr (P::SPLIT > 1)
        for (int i = 0; i < ALL; i++) barrier_expect(sent + i * 8, AREA);
      const u64 keep = cache_policy<LAST>(), stream = tiles == 1 ? cache_policy<FIRST>() : cache_policy<NORMAL>();
      Loader<P> loader{codes, wide, base, full, empty, half, stream, keep, (u32)args.box, {}};
      const int steps = args.segment / P::BLOCKS, ahead = min(steps, P::STAGES);
      auto block = [&](int k, int t) { return first + t * args.segment + k * P::BLOCKS; };
      for (int i = 0; i < ahead * TEAMS; i++)
        loader.load_codes(i % TEAMS * P::STAGES + i / TEAMS, block(i / TEAMS, i % TEAMS), row);
      if (args.early) grid_wait();
      for (int i = 0; i < ahead * TEAMS; i++)
        loader.load_wide(i % TEAMS * P::STAGES + i / TEAMS, block(i / TEAMS, i % TEAMS), column, false);
      for (int k = 0; k < ahead; k++) loader.ring.next();
      for (int k = ahead; k < steps; k++, loader.ring.next()) {
        for (int t = 0; t < TEAMS; t++) {
          const int stage = t * P::STAGES + loader.ring.stage;
          barrier_wait(empty + stage * 8, loader.ring.parity ^ 1);
          loader.load_codes(stage, block(k, t), row);
          loader.load_wide(stage, block(k, t), column, false);
        }
      }
    }
  } else {
    if constexpr (ALL == 2) take_registers<240>();
    if constexpr (ALL == 3) take_registers<160>();
    if constexpr (ALL == 4) take_registers<112>();
    const u32 own = warp / 4, group = own % P::GROUPS, team = own / P::GROUPS, ring = team * P::STAGES;
    const u32 mine = threadIdx.x % 128 * 16;
    float sum[W];
    typename Chosen<P, O>::Type multiplier(args, group, base + ring * P::STAGE, full + ring * 8, empty + ring * 8, half);
    multiplier.lane.at(row + group * 64, args.rows);
    multiplier.run(sum, first + team * args.segment, args.segment);
    const Ends<O> ends(args, multiplier.lane);  // on their way while sums are swapped
    if constexpr (TEAMS > 1) named_sync(1, 128 * ALL);  // every warp's products have read the stages
    if constexpr (TEAMS == 4) swap_halves<W, 2 * P::GROUPS>(sum, base + ALL * W * 128, own, 8 + own % 2);
    if constexpr (TEAMS > 1) swap_halves<2 * HALF, P::GROUPS>(sum, base, own, 2 + own / (2 * P::GROUPS) * P::GROUPS + group);
    const u32 area = areas + own * AREA;
    if constexpr (P::SPLIT == 2) {
      const u32 to = in_block(area + mine, half ^ 1), bar = in_block(sent + own * 8, half ^ 1);
      keep_half<HALF>(sum, half);
      cluster_wait();
#pragma unroll
      for (int i = 0; i < OWN; i += 4) {
        const float given[4] = {sum[OWN + i], sum[OWN + i + 1], sum[OWN + i + 2], sum[OWN + i + 3]};
        send(to + i * 512, given, bar);
      }
      barrier_wait(sent + own * 8, 0);
      add_half<OWN>(sum, area + mine);
    }
    float last[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) last[i] = sum[i];
    bool whole = true;
    if constexpr (P::APART == 2) {
      const u32 number = (unit * P::SPLIT + half) * ALL + own;
      whole = add_apart(last, args.parts, number * 2 + apart, counters<P> + args.counter + number, area, 4 + own);
    }
    if (whole) {
      store_tile<O>(y, args, ends, last, row + group * 64, column + 2 * (team * HALF + half * OWN), area, 4 + own);
      if (threadIdx.x % 128 == 0) tensor_store_wait<0>();
    }
  }
}

}  // namespace quantrot
