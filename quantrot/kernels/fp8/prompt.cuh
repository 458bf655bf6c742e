// Many tokens times an FP8 weight in one kernel, which quantizes them in 1 x 128 blocks (after prefill.cuh and blocks.cuh).
//
// Two warpgroups multiply as in prefill.cuh. Of the third's warps one brings tiles and scales, and three quantize, in the
// order in which tiles need their tokens: on three of the four schedulers, since two warps on two of them held the products
// up longer (24 us at 4096 x 4096 x 4096 for 9). They take strips of four rows from one counter, so that nobody
// waits for a thread block that does not run yet. 128 rows by CHUNK blocks of k are a patch; its strips are counted as they
// are done, and whoever brings a tile waits for the counts of its patches.

namespace quantrot {

#ifdef QUANTROT_EMULATED
#include "prompt.h"
#else
// Adds one, by a lane of the warp, which gets what was there, the others 0; it orders nothing.
__device__ __forceinline__ u32 take_one(u32* p) {
  u32 before = 0;
  asm volatile(QR_ONE_LANE "atom.relaxed.gpu.global.add.u32 %0, [%1], 1;\n}" : "+r"(before) : "l"(p) : "memory");
  return before;
}

// What this thread has written, and seen its warp write, is there for who sees the count, copy engine and all.
__device__ __forceinline__ void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

__device__ __forceinline__ void count_done(u32* p) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p) : "memory");
}

__device__ __forceinline__ void wait_count(const u32* p, u32 count) {
  u32 seen;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(p) : "memory");
  } while (seen < count);
}

// Of two bfloat16 each, by magnitude, a NaN the largest; the signs are any.
__device__ __forceinline__ u32 larger_magnitudes(u32 a, u32 b) {
  u32 r;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
#endif

constexpr int CHUNK = 8, STRIPS = 32;  // blocks of k of a patch, and its strips: PIECES of 4 rows by 256 columns
constexpr int PIECES = CHUNK / 2, PIECE = 4 * 512, QUANTIZERS = 3;

// Counts, zeros before and after: [0] strips taken, [1] warps that have ended, then each patch's strips done. They are
// taken in the order in which `Tiles` needs them.
template <class Shape>
struct Patches {
  u32* counts;
  int rows, across, group;

  __device__ __forceinline__ Patches(const Tiles<Shape>& tiles, int blocks, u32* counts)
      : counts(counts), rows(blocks_of(tiles.m, 128)), across(blocks_of(blocks, CHUNK)), group(tiles.group * Shape::DOWN) {}
  __device__ __forceinline__ u32 count() const { return rows * across; }
  __device__ __forceinline__ void at(int i, int& row, int& column) const {
    const int first = i / (group * across) * group, inside = i - first * across, height = min(group, rows - first);
    row = first + inside % height, column = inside / height;
  }
  __device__ __forceinline__ u32* done(int row, int column) const { return counts + 2 + row * across + column; }

  // Until a tile's rows are coded from block k of its columns on, where that begins a patch.
  __device__ __forceinline__ void wait(int row, int k) const {
    if (k % CHUNK) return;
    wait_count(done(row / 128, k / CHUNK), STRIPS);
    if (row % 128) wait_count(done(row / 128 + 1, k / CHUNK), STRIPS);  // the last tile ends with the matrix
    fence_async_global();
  }

  // By each warp that takes or waits: the last to end leaves zeros.
  __device__ __forceinline__ void leave() const {
    const u32 lane = lane_number(), last = gridDim.x * (1 + QUANTIZERS) - 1;
    u32 ended = 0;
    warp_sync();
    if (lane == 0) ended = count_in_turn(counts + 1, last);
    if (largest_of_warp(ended) < last) return;
    if (lane == 0) counts[0] = 0;
    for (u32 i = lane; i < count(); i += 32) counts[2 + i] = 0;
  }
};

// Tiles and scales of every block of k -> stages, by a warp (see prefill_load and prefill_scales).
template <class Shape, int STAGES, bool EARLY, bool CHANNEL>
__device__ __forceinline__ void prompt_load(const TensorMap* a, const TensorMap* b, const GemmArgs& args, Tiles<Shape> tiles,
                                            const Patches<Shape>& patches, int blocks, u32 base, u32 scales, u32 full,
                                            u32 empty) {
  constexpr int EACH = Shape::ROWS / 32, CLUSTER = Shape::CLUSTER;
  const u64 policy = cache_policy<NORMAL>();
  const u32 lane = lane_number(), rank = CLUSTER > 1 ? cluster_rank() : 0, bytes = Shape::B_BYTES + args.box * 128;
  const int start = blockIdx.x / CLUSTER;
  auto open_stage = [&](int k, int column, u32 stage) {
    barrier_expect(full + stage * 8, bytes);
    load_b<Shape>(b, k, column, base + stage * Shape::STAGE + Shape::A_BYTES, full + stage * 8, policy);
  };
  int row, column, ahead = 0;  // blocks whose part of b is on its way
  if constexpr (EARLY) {
    tiles.at(start, rank, row, column);
    for (; ahead < min(blocks, STAGES); ahead++) open_stage(ahead, column, ahead);
    grid_wait();
  }
  Ring<STAGES> ring;
  for (int i = start; i < tiles.count(); i += gridDim.x / CLUSTER) {
    tiles.at(i, rank, row, column);
    const float* const b_scale = args.b.data + args.b.row(min(column + (int)lane * 128, args.n - 1));
    u32 rows[EACH];
#pragma unroll
    for (int j = 0; j < EACH; j++) rows[j] = args.a.row(min(row + j * 32 + (int)lane, args.m - 1));
    for (int k = 0; k < blocks; k++, ring.next()) {
      const u32 bar = full + ring.stage * 8, to = scales + ring.stage * Shape::SCALES + lane * 4;
      patches.wait(row, k);  // while the stage is still read
      if (ahead > 0) {
        ahead--;
      } else {
        barrier_wait(empty + ring.stage * 8, ring.parity ^ 1);
        open_stage(k, column, ring.stage);
      }
      tensor_load(base + ring.stage * Shape::STAGE, a, k * 128, row, bar, policy);
#pragma unroll
      for (int j = 0; j < EACH; j++) copy4(to + j * 128, args.a.data + (rows[j] + args.a.column(k)));
      if (!CHANNEL && lane * 128 < Shape::COLUMNS) copy4(to + Shape::ROWS * 4, b_scale + args.b.column(k));
      copies_arrive(bar);
    }
  }
}

// Four rows by 256 columns, this lane's eight of each 512 bytes from `slot` on in shared memory, -> codes and scales.
__device__ __forceinline__ void code_piece(const BlockArgs& a, u32 row, u32 column, u32 slot) {
  u32 most[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const Vec v = load_vector(slot + i * 512);
    const u32 m = larger_magnitudes(larger_magnitudes(v.w[0], v.w[1]), larger_magnitudes(v.w[2], v.w[3])) & 0x7FFF7FFFu;
    most[i] = max(m >> 16, m & 0xFFFF);
  }
  float amax, none;
  unpack<BF16>(largest_of_group(most), amax, none);
  const float scale = scale_of(amax);
  if (lane_number() % 16 < 4) a.scales[(row + group_of<4, 16>()) * a.scale_row + column / 128 * a.scale_column] = scale;
  const Reciprocal own(scale);
  char* to = (char*)a.q + (i64)row * a.columns + column;
#pragma unroll
  for (int i = 0; i < 4; i++, to += a.columns) {
    u32 codes[2];
    const Reciprocal by(from_group<4, 16>(own.high, i), from_group<4, 16>(own.low, i));
    quotients<BF16>(codes, load_vector(slot + i * 512), by);
    store8(to, codes[0], codes[1]);
  }
}

// Strips, as long as there are any, by a warp; `room`: of two pieces, one of which comes while the other is coded. What would
// reach past the matrix's edges ends with it, and repeats what others have.
template <class Shape>
__device__ __forceinline__ void prompt_quantize(const BlockArgs& a, const Patches<Shape>& patches, u32 room) {
  const u32 strips = patches.count() * STRIPS, slot = room + lane_number() * 16;
  u32 asked = take_one(patches.counts);
  for (;;) {
    const u32 strip = largest_of_warp(asked);
    if (strip >= strips) return;
    asked = take_one(patches.counts);
    int down, across;
    patches.at(strip / STRIPS, down, across);
    const u32 row = min(down * 128 + strip % STRIPS * 4, a.rows - 4);
    auto column = [&](int p) { return min((u32)(across * (CHUNK * 128) + p * 256), a.columns - 256) + lane_number() * 8; };
    auto fetch = [&](int p) {
      const char* from = (const char*)a.x + (row * a.x_stride + column(p)) * 2;
#pragma unroll
      for (int i = 0; i < 4; i++, from += a.x_stride * 2) copy16(slot + p % 2 * PIECE + i * 512, from, true);
    };
    fetch(0);
    copies_commit();
#pragma unroll 1
    for (int p = 0; p < PIECES; p++) {
      if (p + 1 < PIECES) fetch(p + 1);
      copies_commit();
      copies_wait<1>();
      code_piece(a, row, column(p), slot + p % 2 * PIECE);
    }
    fence_async_global();
    warp_sync();
    if (lane_number() == 0) count_done(patches.done(down, across));
  }
}

template <int STAGES, int CLUSTER, int LAG, bool EARLY, bool CHANNEL, class Out, int BIAS>
__device__ __forceinline__ void prompt(const TensorMap* a, const TensorMap* b, const TensorMap* c, const GemmArgs& args,
                                       const BlockArgs& tokens, u32* counts) {
  using Shape = PrefillShape<STAGES, CLUSTER, true, 2>;
  constexpr int MULTIPLIERS = 4 * Shape::GROUPS;
  const u32 base = shared_memory(), output = base + STAGES * Shape::STAGE, scales = output + MULTIPLIERS * Shape::OUTPUT;
  const u32 full = scales + STAGES * Shape::SCALES, empty = full + STAGES * 8, room = empty + STAGES * 8;
  const u32 last = room + QUANTIZERS * (2 * PIECE), warp = warp_number();
  const Tiles<Shape> tiles(args);
  const int blocks = blocks_of(args.k, 128);
  const Patches<Shape> patches(tiles, blocks, counts);
  prefill_start<Shape, STAGES>(a, b, c, full, empty);
  if (!EARLY || warp != MULTIPLIERS) grid_wait();
  if (warp >= MULTIPLIERS) {
    give_registers<40>();
    if (warp == MULTIPLIERS) {
      prompt_load<Shape, STAGES, EARLY, CHANNEL>(a, b, args, tiles, patches, blocks, base, scales, full, empty);
    } else {
      prompt_quantize(tokens, patches, room + (warp - MULTIPLIERS - 1) * (2 * PIECE));
    }
    patches.leave();
  } else {
    take_registers<232>();
    prefill_multiply<Shape, 2, STAGES, LAG, false, CHANNEL, Out, BIAS>(c, args, tiles, blocks, base, output, scales, full,
                                                                       empty, last);
  }
  if constexpr (CLUSTER > 1) cluster_sync();  // a block that ended could still be written to
}

}  // namespace quantrot
