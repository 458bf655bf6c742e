// What a Hopper kernel is made of: barriers in shared memory, the tensor copy engine, clusters, narrow numbers. Its
// products are in products.cuh.
//
// One function an instruction (or a pair that always goes together). With QUANTROT_EMULATED the same functions come
// from an emulator that runs a kernel on the host, every CUDA thread a fiber: a kernel that keeps to them can be tested
// without a GPU. Shared memory addresses are 32-bit numbers; a tile for the copy engine and for wgmma starts at a
// multiple of 1024 bytes.
//
// Sources: PTX ISA 8.x, sections on mbarrier, cp.async.bulk.tensor and the tensor proxy.

#ifdef QUANTROT_EMULATED
#include "emulator.h"
#else
namespace quantrot {

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct alignas(64) TensorMap {  // the driver's, 128 opaque bytes
  u64 opaque[16];
};

// --- Where a thread is -----------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 lane_number() { return threadIdx.x & 31; }

// The same in all lanes, and the compiler sees it.
__device__ __forceinline__ u32 warp_number() { return __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 5, 0); }

// The block's dynamic shared memory, which starts at a multiple of 1024.
__device__ __forceinline__ u32 shared_memory() {
  extern __shared__ __align__(1024) unsigned char quantrot_shared[];
  return (u32)__cvta_generic_to_shared(quantrot_shared);
}

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The address, in the cluster, of the same place in another block's shared memory.
__device__ __forceinline__ u32 in_block(u32 address, u32 rank) {
  u32 mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// Launched as a programmatic dependent, a kernel starts while the one before it still runs. What comes before the wait
// must not touch global memory; the kernel after this one may start from here on. Otherwise it does nothing.
__device__ __forceinline__ void grid_wait() {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
}

// The wait alone: the kernel after this one may start from launch_dependents on.
__device__ __forceinline__ void grid_wait_only() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The kernel after this one may start even before the wait: before kernels that this one waits for have ended, too.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// --- Barriers --------------------------------------------------------------------------------------------------------
//
// A barrier's phase ends when as many arrivals as it was made for and all the expected bytes have come. Waiting on
// parity p returns once a phase of that parity has ended: the first phase is 0, so a wait on 1 passes at first.

// By one lane, in straight code: where lanes make one each, or a loop is not unrolled, every one waits for a fence, and 48 take
// 2.4 us for 0.45.
__device__ __forceinline__ void barrier_init(u32 bar, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}

// After the last barrier_init of a thread: the copy engine and the cluster see them. A block or cluster barrier
// follows.
__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// The barrier of another block (an address of in_block). It orders nothing between the blocks' memories: what it hands
// back has been read by products that were waited for. (.release.cluster is a fence of all memory, in every stage.)
__device__ __forceinline__ void barrier_arrive_cluster(u32 mapped) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapped) : "memory");
}

#define QR_ONE_LANE "{.reg .pred one;\nelect.sync _|one, 0xFFFFFFFF;\n@one "

// `bytes` more are to come, and an arrival. This and the loads below are for a whole warp, of which one lane acts: the
// compiler then knows that there is one, and keeps addresses in uniform registers.
__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
  asm volatile(QR_ONE_LANE "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n}" ::"r"(bar), "r"(bytes)
               : "memory");
}

// The same for a barrier of any block of the cluster (an address of in_block); it orders nothing.
__device__ __forceinline__ void barrier_expect_in(u32 mapped, u32 bytes) {
  asm volatile(QR_ONE_LANE "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;\n}" ::"r"(mapped), "r"(bytes)
               : "memory");
}

// A word to a block of the cluster, some time before its barrier has counted the 4 bytes (both addresses of in_block). Illegal in
// a kernel without clusters.
__device__ __forceinline__ void send_word(u32 mapped, u32 word, u32 bar) {
  asm volatile(QR_ONE_LANE "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];\n}" ::"r"(mapped),
               "r"(word), "r"(bar)
               : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra.uni leave;\nbra.uni again;\nleave:\n}\n"
      ::"r"(bar), "r"(parity) : "memory");
}

__device__ __forceinline__ void block_sync() { __syncthreads(); }
__device__ __forceinline__ bool block_any(bool own) { return __syncthreads_or(own); }  // and a block_sync
__device__ __forceinline__ void warp_sync() { __syncwarp(); }

// Every thread of the cluster; orders shared memory between its blocks.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same for barriers that were just made (after barrier_init_done); orders nothing else.
__device__ __forceinline__ void cluster_start() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Barriers 1 to 15 of a block, among `threads` of them.
__device__ __forceinline__ void named_sync(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_arrive(u32 id, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --- The tensor copy engine ------------------------------------------------------------------------------------------

// Ordinary writes to shared memory before this, by this thread, are seen by the copy engine and by wgmma after it.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void tensor_prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

enum Keep { NORMAL, FIRST, LAST };  // how soon L2 gives a line up: FIRST for what is read once

template <Keep K>
__device__ __forceinline__ u64 cache_policy() {
  u64 policy;
  if constexpr (K == FIRST) {
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  } else if constexpr (K == LAST) {
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  } else {
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  }
  return policy;
}

// The map's box at element column x, row y -> shared memory; its bytes (all of the box, zeros past the edges) count on
// the barrier.
__device__ __forceinline__ void tensor_load(u32 to, const TensorMap* map, int x, int y, u32 bar, u64 policy) {
  asm volatile(QR_ONE_LANE
               "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
               "[%1, {%3, %4}], [%2], %5;\n}" ::"r"(to), "l"(map), "r"(bar), "r"(x), "r"(y), "l"(policy)
               : "memory");
}

// A map of five dimensions that folds rows by 16: [rows / 16, 2, 4, 2, columns], row 4 q + 2 b + e at [.., b, q, e, ..].
// The box that starts at rows 16 y is laid down in that order, row 8 b + 2 q + e of each 16.
__device__ __forceinline__ void tensor_load_folded(u32 to, const TensorMap* map, int y, u32 bar, u64 policy) {
  asm volatile(QR_ONE_LANE
               "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
               "[%1, {%3, %3, %3, %3, %4}], [%2], %5;\n}" ::"r"(to), "l"(map), "r"(bar), "r"(0), "r"(y), "l"(policy)
               : "memory");
}

// The same as tensor_load into every block of the cluster whose bit is set in `blocks`, at the same address and on the same barrier.
__device__ __forceinline__ void tensor_load_all(u32 to, const TensorMap* map, int x, int y, u32 bar, u64 policy,
                                                unsigned short blocks) {
  asm volatile(QR_ONE_LANE
               "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
               ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %6, %5;\n}" ::"r"(to), "l"(map), "r"(bar), "r"(x),
               "r"(y), "l"(policy), "h"(blocks)
               : "memory");
}

// The box comes to L2, or does not: nothing depends on it, so it may be asked for before grid_wait.
__device__ __forceinline__ void tensor_warm(const TensorMap* map, int x, int y) {
  asm volatile(QR_ONE_LANE "cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];\n}" ::"l"(map), "r"(x), "r"(y)
               : "memory");
}

// The same for the line of 128 bytes at an address.
__device__ __forceinline__ void warm_line(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// The same for many bytes, a multiple of 16, by a whole warp.
__device__ __forceinline__ void warm_bytes(const void* at, u32 bytes) {
  asm volatile(QR_ONE_LANE "cp.async.bulk.prefetch.L2.global [%0], %1;\n}" ::"l"(at), "r"(bytes) : "memory");
}

// A multiple of 16 bytes from a multiple of 16, by one lane of a whole warp, as tensor_load.
__device__ __forceinline__ void line_load(u32 to, const void* from, u32 bytes, u32 bar) {
  asm volatile(QR_ONE_LANE
               "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n}" ::"r"(to),
               "l"(from), "r"(bytes), "r"(bar)
               : "memory");
}

// Shared memory -> the map's box; nothing is written past the edges.
__device__ __forceinline__ void tensor_store(const TensorMap* map, int x, int y, u32 from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from),
               "r"(x), "r"(y)
               : "memory");
}

// A map of three dimensions that deals rows out by fours: [4, rows / 4, columns]. The box of 32 rows from row 4 y on has row
// 4 g + c of them at 8 c + g.
__device__ __forceinline__ void tensor_store_dealt(const TensorMap* map, int x, int y, u32 from) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(from), "r"(x),
               "r"(y), "r"(0)
               : "memory");
}

__device__ __forceinline__ void tensor_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until all but the last N of this thread's committed stores have read their shared memory.
template <int N>
__device__ __forceinline__ void tensor_store_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// --- Copies by every thread ------------------------------------------------------------------------------------------

// 16 bytes of global memory -> shared memory, or zeros, some time before copies_wait. What reads them other than by
// ordinary loads needs fence_async after that.
__device__ __forceinline__ void copy16(u32 to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}

__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all but the last N groups of this thread's copies, each ended by copies_commit, have landed.
template <int N>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// 4 bytes of global memory -> shared memory, for ordinary loads, before this thread's next copies_arrive arrives.
__device__ __forceinline__ void copy4(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// This thread arrives on the barrier, once its copies so far have landed; it does not wait for that.
__device__ __forceinline__ void copies_arrive(u32 bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

// --- Global memory between blocks ------------------------------------------------------------------------------------

// A number that another kernel may be writing: what is in L2.
__device__ __forceinline__ int load_fresh(const int* p) {
  int x;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

// Adds one, or goes back to 0 from `last`, and gives what was there. What the thread has written, and has seen written by
// its block, is there for the thread that counts next, and its block.
__device__ __forceinline__ u32 count_in_turn(u32* p, u32 last) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(last) : "memory");
  return before;
}

// The same for a whole warp, of which one lane counts and gets what was there, the others 0; it orders nothing.
__device__ __forceinline__ u32 count_one(u32* p, u32 last) {
  u32 before = 0;
  asm volatile(QR_ONE_LANE "atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;\n}" : "+r"(before) : "l"(p), "r"(last) : "memory");
  return before;
}

// A number below 2^32, on which blocks also count themselves once they have read it: in the bits above, until the last one
// sets it.
__device__ __forceinline__ u32 load_count(const u64* p) {
  u32 count;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(p) : "memory");
  return count;
}

// For a whole warp, of which one lane counts and gets what was there before, the others 0. (Without QR_ONE_LANE the
// compiler adds up what lanes count, and has them exchange the result.)
__device__ __forceinline__ u64 count_arrival(u64* p) {
  u64 before = 0;
  asm volatile(QR_ONE_LANE "atom.relaxed.gpu.global.add.u64 %0, [%1], %2;\n}"
               : "+l"(before)
               : "l"(p), "l"(1ull << 32)
               : "memory");
  return before;
}

// Numbers that other blocks are writing, asked for every time.
__device__ __forceinline__ float4 load_fresh4(const float* p) {
  float4 x;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(p)
               : "memory");
  return x;
}

__device__ __forceinline__ float2 load_fresh2(const float* p) {
  float2 x;
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(p) : "memory");
  return x;
}

// What other blocks have written: from L2, whatever this multiprocessor has read before.
__device__ __forceinline__ float fresh1(const float* p) { return __ldcg(p); }
__device__ __forceinline__ float2 fresh2(const float* p) { return __ldcg((const float2*)p); }
__device__ __forceinline__ float4 fresh4(const float* p) { return __ldcg((const float4*)p); }
__device__ __forceinline__ void store_fresh4(float* p, float4 v) { __stcg((float4*)p, v); }

// --- Registers between warpgroups ------------------------------------------------------------------------------------

template <int N>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// --- Shared memory by ordinary loads and stores ----------------------------------------------------------------------

__device__ __forceinline__ void store_shared(u32 address, u32 a) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(a) : "memory");
}

__device__ __forceinline__ void store_shared(u32 address, float a) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(a) : "memory");
}

__device__ __forceinline__ void store_shared2(u32 address, u32 a, u32 b) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}

__device__ __forceinline__ void store_shared4(u32 address, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

__device__ __forceinline__ void store_two_bytes(u32 address, u32 a) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"((unsigned short)a) : "memory");
}

__device__ __forceinline__ u32 load_shared_u16(u32 address) {  // two bytes, zeros above
  u32 v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ u32 load_shared_u8(u32 address) {  // a byte, zeros above
  u32 v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ float load_shared(u32 address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ u32 load_shared1(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

// The address, once `seen`, which was loaded, has come back: an arrival there does not overtake the loads before it.
__device__ __forceinline__ u32 address_after(u32 address, u32 seen) {
  u32 zero;
  asm volatile("{\n.reg .u32 ones;\npopc.b32 ones, %1;\nshr.u32 %0, ones, 6;\n}" : "=r"(zero) : "r"(seen) : "memory");
  return address + zero;
}

// For a whole warp, of which one lane stores: that which also arrives in barrier_expect.
__device__ __forceinline__ void store_one(u32 address, u32 a) {
  asm volatile(QR_ONE_LANE "st.shared.u32 [%0], %1;\n}" ::"r"(address), "r"(a) : "memory");
}

// Every time anew: of equal loads the compiler makes one, and a copy of a register in the place of each other.
__device__ __forceinline__ void load_shared4(u32 address, int& a, int& b, int& c, int& d) {
  asm volatile("ld.volatile.shared.v4.s32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(address));
}
__device__ __forceinline__ float2 load_shared2(u32 address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}

// Four 8 x 8 matrices of 16-bit elements: a lane gives row lane / 4, columns 2 * (lane % 4) and the next of each, and the
// address of row lane % 8 of matrix lane / 8.
__device__ __forceinline__ void store_matrices(u32 row, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

// The same, each matrix transposed on its way: a lane gives rows 2 * (lane % 4) and the next, column lane / 4.
__device__ __forceinline__ void store_matrices_turned(u32 row, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

// The way back: a lane gets row lane / 4, 16-bit columns 2 * (lane % 4) and the next of each matrix.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

__device__ __forceinline__ float4 load_cluster4(u32 mapped) {  // of in_block
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(mapped)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_cluster(u32 mapped, u32 a) {  // of in_block
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(mapped), "r"(a) : "memory");
}

// --- A warp --------------------------------------------------------------------------------------------------------

// Of what its lanes have.
__device__ __forceinline__ u32 largest_of_warp(u32 x) {
  u32 y;
  asm volatile("redux.sync.max.u32 %0, %1, 0xFFFFFFFF;" : "=r"(y) : "r"(x));
  return y;
}

// --- Numbers ---------------------------------------------------------------------------------------------------------

struct Bf16 {
  static constexpr bool BRAIN = true;
  static constexpr int BYTES = 2;
  __device__ __forceinline__ static u32 pack(float lo, float hi) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
  }
  __device__ __forceinline__ static float value(unsigned short bits) { return __uint_as_float((u32)bits << 16); }
};

// Bytes of a and b by the four nibbles of `which`: three bits say which byte, the fourth asks for its sign, eight times.
__device__ __forceinline__ u32 pick_bytes(u32 a, u32 b, u32 which) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(which));
  return r;
}

// word >> 16 by the pipe that multiplies, where the one that shifts and permutes is full.
__device__ __forceinline__ u32 high_half(u32 word) {
  u32 high;
  asm("dp2a.lo.u32.u32 %0, %1, 256, 0;" : "=r"(high) : "r"(word));  // the low half by 0, the high one by 1
  return high;
}

// To nearest even, in order from the lowest byte; past 448 saturated, NaN is 0x7F.
__device__ __forceinline__ u32 to_e4m3(float a, float b, float c, float d) {
  u32 r;
  asm("{.reg .b16 lo, hi;\ncvt.rn.satfinite.e4m3x2.f32 lo, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 hi, %4, %3;\n"
      "mov.b32 %0, {lo, hi};\n}"
      : "=r"(r)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}

// Four codes as two pairs of float16, exactly.
__device__ __forceinline__ void unpack_e4m3(u32 codes, u32& low, u32& high) {
  asm("{.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
}

// 2^x to 2 ulp, subnormals are zero.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float inverse_root(float a) { return rsqrtf(a); }

// The least integer that is not below x (for |x| < 2^22; past that, one a few ulp above).
__device__ __forceinline__ float round_up(float x) {
  float y;
  asm("add.rp.f32 %0, %1, 0f4B400000;" : "=f"(y) : "f"(x));  // 1.5 * 2^23, whose ulp is 1
  return y - 12582912.f;
}

struct Fp16 {
  static constexpr bool BRAIN = false;
  static constexpr int BYTES = 2;
  __device__ __forceinline__ static u32 pack(float lo, float hi) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
  }
  __device__ __forceinline__ static float value(unsigned short bits) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
    return f;
  }
};

}  // namespace quantrot
#endif

namespace quantrot {

// Where the 128-byte swizzle puts byte `column` of row `row` of a tile of 128-byte rows.
__device__ __forceinline__ u32 swizzled(u32 row, u32 column) { return row * 128 + (column ^ (row & 7) << 4); }

// The same for rows of 64 bytes and the 64-byte swizzle.
__device__ __forceinline__ u32 swizzled64(u32 row, u32 column) { return row * 64 + (column ^ (row >> 1 & 3) << 4); }

// Where a tile begins: the last one so early that it ends with the operand, and repeats what the one before has. Rows that
// are not there cost the copy engine 4 cycles each, more than those that are.
__device__ __forceinline__ int start_of(int at, int size, int tile) {
  const int last = size > tile ? size - tile : 0;
  return at < last ? at : last;
}

// 1 / divisor in two floats, to 47 bits: quotients of 16-bit numbers by it are correctly rounded wherever that decides a code
// (see fp8/blocks.cuh), in two operations. With low >= 0 zeros keep their signs. NaN of a divisor that is not finite.
struct Reciprocal {
  float high, low;

  __device__ __forceinline__ explicit Reciprocal(float divisor) {
    high = __frcp_rn(divisor);
    if (fmaf(-divisor, high, 1.f) < 0.f) high = __uint_as_float(__float_as_uint(high) - 1);
    low = fmaf(-divisor, high, 1.f) * high;
  }
  __device__ __forceinline__ Reciprocal(float high, float low) : high(high), low(low) {}
  __device__ __forceinline__ float times(float x) const { return fmaf(x, high, x * low); }
};

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000u); }

struct alignas(16) Quad {
  u32 w[4];
};

// The barriers of a ring, whose phases take so many arrivals, by the first lane of each of the block's WARPS warps. A block or
// cluster barrier follows.
template <int STAGES, int WARPS>
__device__ __forceinline__ void ring_init(u32 warp, u32 full, u32 empty, u32 fills, u32 empties) {
  if (lane_number() == 0) {
#pragma unroll
    for (int i = 0; i < STAGES; i += WARPS) {
      if (i + WARPS > STAGES && i + warp >= STAGES) break;
      barrier_init(full + (i + warp) * 8, fills);
      barrier_init(empty + (i + warp) * 8, empties);
    }
    barrier_init_done();
  }
}

// A ring of buffers: `stage` of STAGES, and the parity of its next phase.
template <int STAGES>
struct Ring {
  u32 stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace quantrot
