// What a Hopper kernel is made of: barriers in shared memory, the tensor copy engine, products by warpgroups, clusters.
//
// One function an instruction (or a pair that always goes together). With QUANTROT_EMULATED the same functions come
// from an emulator that runs a kernel on the host, every CUDA thread a fiber: a kernel that keeps to them can be tested
// without a GPU. Shared memory addresses are 32-bit numbers; a tile for the copy engine and for wgmma starts at a
// multiple of 1024 bytes.
//
// Sources: PTX ISA 8.x, sections on mbarrier, cp.async.bulk.tensor, wgmma and the tensor proxy.

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

// Shared memory -> the map's box; nothing is written past the edges.
__device__ __forceinline__ void tensor_store(const TensorMap* map, int x, int y, u32 from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from),
               "r"(x), "r"(y)
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

// What other blocks have written: from L2, whatever this multiprocessor has read before.
__device__ __forceinline__ float2 fresh2(const float* p) { return __ldcg((const float2*)p); }
__device__ __forceinline__ float4 fresh4(const float* p) { return __ldcg((const float4*)p); }

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

// --- Products by a warpgroup -----------------------------------------------------------------------------------------
//
// d [64, N] (+)= a [64, 32] b [N, 32]^T, e4m3 by e4m3 in float32; the hardware keeps about 14 bits of a sum. Warp w of
// the warpgroup holds rows 16 w + g and + 8 (g = lane / 4, q = lane % 4): d[4 j + 2 h + e] is row g + 8 h, column
// 8 j + 2 q + e. Nothing may touch d between the product and the wait for it.

__device__ __forceinline__ void product_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void product_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int N>
__device__ __forceinline__ void product_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Says that d changes here: the compiler must not move its uses over a wait.
template <int W>
__device__ __forceinline__ void product_done(float (&d)[W]) {
#pragma unroll
  for (int i = 0; i < W; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int W>
__device__ __forceinline__ void product_done(int (&d)[W]) {
#pragma unroll
  for (int i = 0; i < W; i++) asm volatile("" : "+r"(d[i])::"memory");
}
__device__ __forceinline__ void product_done(float& x) { asm volatile("" : "+f"(x)::"memory"); }

#define QR_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define QR_8(i) QR_4(i), QR_4(i + 4)
#define QR_16(i) QR_8(i), QR_8(i + 8)
#define QR_32(i) QR_16(i), QR_16(i + 16)
#define QR_64(i) QR_32(i), QR_32(i + 32)
#define QR_WHOLE4(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define QR_WHOLE16(i) QR_WHOLE4(i), QR_WHOLE4(i + 4), QR_WHOLE4(i + 8), QR_WHOLE4(i + 12)
#define QR_WHOLE64(i) QR_WHOLE16(i), QR_WHOLE16(i + 16), QR_WHOLE16(i + 32), QR_WHOLE16(i + 48)
#define QR_TEXT4 "%0,%1,%2,%3"
#define QR_TEXT8 QR_TEXT4 ",%4,%5,%6,%7"
#define QR_TEXT16 QR_TEXT8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define QR_TEXT32 QR_TEXT16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define QR_TEXT64 QR_TEXT32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52," \
                            "%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define QR_48(i) QR_32(i), QR_16(i + 32)
#define QR_80(i) QR_64(i), QR_16(i + 64)
#define QR_96(i) QR_64(i), QR_32(i + 64)
#define QR_112(i) QR_96(i), QR_16(i + 96)
#define QR_128(i) QR_64(i), QR_64(i + 64)
#define QR_120(i) QR_112(i), QR_8(i + 112)
#define QR_TEXT48 QR_TEXT32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define QR_TEXT80 QR_TEXT64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define QR_TEXT96 QR_TEXT80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define QR_TEXT112 QR_TEXT96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define QR_TEXT120 QR_TEXT112 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define QR_TEXT128 QR_TEXT112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define QR_PRODUCT(N, W, A, B, S)                                                                                   \
  asm volatile("{.reg .pred add;\nsetp.ne.b32 add, %" S ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N                \
               "k32.f32.e4m3.e4m3 {" QR_TEXT##W "}, %" A ", %" B ", add, 1, 1;}"                                    \
               : QR_##W(0)                                                                                          \
               : "l"(a), "l"(b), "r"((int)add))
#define QR_PRODUCT_REGISTERS(N, W, A0, A1, A2, A3, B, S)                                                            \
  asm volatile("{.reg .pred add;\nsetp.ne.b32 add, %" S ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N                \
               "k32.f32.e4m3.e4m3 {" QR_TEXT##W "}, {%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" B ", add, 1, 1;}"      \
               : QR_##W(0)                                                                                          \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add))

// a and b are operands in shared memory (see `operand`); without `add`, d is overwritten.
template <int W>
__device__ __forceinline__ void product(float (&d)[W], u64 a, u64 b, bool add) {
  static_assert(W == 4 || W == 8 || W == 16 || W == 32 || W == 64, "N is 2 W: 8, 16, 32, 64 or 128");
  if constexpr (W == 4) QR_PRODUCT(8, 4, "4", "5", "6");
  if constexpr (W == 8) QR_PRODUCT(16, 8, "8", "9", "10");
  if constexpr (W == 16) QR_PRODUCT(32, 16, "16", "17", "18");
  if constexpr (W == 32) QR_PRODUCT(64, 32, "32", "33", "34");
  if constexpr (W == 64) QR_PRODUCT(128, 64, "64", "65", "66");
}

// a in registers: a[2 h + r] holds row g + 8 r, columns 16 h + 4 q ... + 3, of the warp's 16 rows.
template <int W>
__device__ __forceinline__ void product(float (&d)[W], const u32 (&a)[4], u64 b, bool add) {
  static_assert(W == 4 || W == 8 || W == 16 || W == 32 || W == 48 || W == 64 || W == 96 || W == 128,
                "N is 2 W: 8, 16, 32, 64, 96, 128, 192 or 256");
  if constexpr (W == 4) QR_PRODUCT_REGISTERS(8, 4, "4", "5", "6", "7", "8", "9");
  if constexpr (W == 8) QR_PRODUCT_REGISTERS(16, 8, "8", "9", "10", "11", "12", "13");
  if constexpr (W == 16) QR_PRODUCT_REGISTERS(32, 16, "16", "17", "18", "19", "20", "21");
  if constexpr (W == 32) QR_PRODUCT_REGISTERS(64, 32, "32", "33", "34", "35", "36", "37");
  if constexpr (W == 48) QR_PRODUCT_REGISTERS(96, 48, "48", "49", "50", "51", "52", "53");
  if constexpr (W == 64) QR_PRODUCT_REGISTERS(128, 64, "64", "65", "66", "67", "68", "69");
  if constexpr (W == 96) QR_PRODUCT_REGISTERS(192, 96, "96", "97", "98", "99", "100", "101");
  if constexpr (W == 128) QR_PRODUCT_REGISTERS(256, 128, "128", "129", "130", "131", "132", "133");
}

// The same of int8 codes, with exact sums.
__device__ __forceinline__ void product(int (&d)[64], const u32 (&a)[4], u64 b, bool add) {
  asm volatile("{.reg .pred add;\nsetp.ne.b32 add, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {" QR_TEXT64
               "}, {%64, %65, %66, %67}, %68, add;}"
               : QR_WHOLE64(0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
}

#define QR_PRODUCT16(N, W, TYPE, TURNED, A0, A1, A2, A3, B, S)                                                      \
  asm volatile("{.reg .pred add;\nsetp.ne.b32 add, %" S ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N                \
               "k16.f32." TYPE "." TYPE " {" QR_TEXT##W "}, {%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" B              \
               ", add, 1, 1, " TURNED ";}"                                                                          \
               : QR_##W(0)                                                                                          \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add))
#define QR_PRODUCT16_TYPES(N, W, TURNED, A0, A1, A2, A3, B, S)                                                      \
  if constexpr (T::BRAIN) {                                                                                         \
    QR_PRODUCT16(N, W, "bf16", TURNED, A0, A1, A2, A3, B, S);                                                       \
  } else {                                                                                                          \
    QR_PRODUCT16(N, W, "f16", TURNED, A0, A1, A2, A3, B, S);                                                        \
  }

// d [64, N] (+)= a [64, 16] b [16, N] in 16 bits (T: Bf16, Fp16), b contiguous along N (see `operand_across`): exact
// products, float32 sums. a[2 h + r] holds row g + 8 r, columns 8 h + 2 q and the next.
template <class T, int W>
__device__ __forceinline__ void product_across(float (&d)[W], const u32 (&a)[4], u64 b, bool add) {
  static_assert(W == 32 || W == 64 || W == 128, "N is 2 W: 64, 128 or 256");
  if constexpr (W == 32) QR_PRODUCT16_TYPES(64, 32, "1", "32", "33", "34", "35", "36", "37");
  if constexpr (W == 64) QR_PRODUCT16_TYPES(128, 64, "1", "64", "65", "66", "67", "68", "69");
  if constexpr (W == 128) QR_PRODUCT16_TYPES(256, 128, "1", "128", "129", "130", "131", "132", "133");
}

// The same with b [N, 16] contiguous along the sum: `operand`, whose numbers k are then of 16 columns.
template <class T, int W>
__device__ __forceinline__ void product16(float (&d)[W], const u32 (&a)[4], u64 b, bool add) {
  static_assert(W == 4 || W == 8 || W == 120 || (W <= 128 && W % 16 == 0), "N is 2 W: 8, 16, 240, or 32 to 256 by 32");
  if constexpr (W == 4) QR_PRODUCT16_TYPES(8, 4, "0", "4", "5", "6", "7", "8", "9");
  if constexpr (W == 8) QR_PRODUCT16_TYPES(16, 8, "0", "8", "9", "10", "11", "12", "13");
  if constexpr (W == 16) QR_PRODUCT16_TYPES(32, 16, "0", "16", "17", "18", "19", "20", "21");
  if constexpr (W == 32) QR_PRODUCT16_TYPES(64, 32, "0", "32", "33", "34", "35", "36", "37");
  if constexpr (W == 48) QR_PRODUCT16_TYPES(96, 48, "0", "48", "49", "50", "51", "52", "53");
  if constexpr (W == 64) QR_PRODUCT16_TYPES(128, 64, "0", "64", "65", "66", "67", "68", "69");
  if constexpr (W == 80) QR_PRODUCT16_TYPES(160, 80, "0", "80", "81", "82", "83", "84", "85");
  if constexpr (W == 96) QR_PRODUCT16_TYPES(192, 96, "0", "96", "97", "98", "99", "100", "101");
  if constexpr (W == 112) QR_PRODUCT16_TYPES(224, 112, "0", "112", "113", "114", "115", "116", "117");
  if constexpr (W == 120) QR_PRODUCT16_TYPES(240, 120, "0", "120", "121", "122", "123", "124", "125");
  if constexpr (W == 128) QR_PRODUCT16_TYPES(256, 128, "0", "128", "129", "130", "131", "132", "133");
}

// --- A warp --------------------------------------------------------------------------------------------------------

// Of what its lanes have.
__device__ __forceinline__ u32 largest_of_warp(u32 x) {
  u32 y;
  asm volatile("redux.sync.max.u32 %0, %1, 0xFFFFFFFF;" : "=r"(y) : "r"(x));
  return y;
}

// --- Products by a warp ----------------------------------------------------------------------------------------------

// d [16, 8] += a [16, 8] b [8, 8], float32 cut to 11 bits: a is row g + 8 (i % 2), column q + 4 (i / 2), b0 and b1 rows q
// and q + 4, column g; d[2 h + e] is row g + 8 h, column 2 q + e.
__device__ __forceinline__ void product_tf32(float (&d)[4], const float (&a)[4], float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
        "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
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

// d [16, 8] += a [16, 16] b [16, 8] in 16 bits (T: Bf16, Fp16), by a warp: a is row g + 8 (i % 2), columns 2 q + 8 (i / 2) and
// the next, b0 and b1 rows 2 q (+ 8) and the next, column g; d[2 h + e] is row g + 8 h, column 2 q + e.
template <class T>
__device__ __forceinline__ void product_warp(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (T::BRAIN) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

}  // namespace quantrot
#endif

namespace quantrot {

// A wgmma operand of rows of 128 bytes along K as the copy engine lays it down with the 128-byte swizzle: 16-byte unit
// u of row r lies at u ^ (r % 8), eight rows are 1024 bytes. `address` is the tile's; `k` is the product's number along
// K, 32 bytes each: the swizzle is of address bits, so the hardware finds the units again.
__device__ __forceinline__ u64 operand(u32 address, int k) {
  const u32 low = ((address & 0x3FFFF) >> 4 | 1 << 16) + k * 2, high = 1024 >> 4 | 1 << 30;
  return (u64)high << 32 | low;
}

// The operand that lies so many units of 16 bytes behind this one.
__device__ __forceinline__ u64 operand_after(u64 first, u32 units) { return first >> 32 << 32 | ((u32)first + units); }

// The same of rows of 64 bytes in the 64-byte swizzle: unit u of row r at u ^ (r / 2 % 4), eight rows are 512 bytes.
__device__ __forceinline__ u64 operand_short(u32 address, int k) {
  const u32 low = ((address & 0x3FFFF) >> 4 | 1 << 16) + k * 2, high = 512 >> 4 | 2u << 30;
  return (u64)high << 32 | low;
}

// An operand of 8 rows without a swizzle: 16-byte unit u of row r lies at u * lead + r * 16. `lead` may be less than 128: rows
// are then read from other units' places, for whoever leaves their results. `address` is the first unit's.
__device__ __forceinline__ u64 operand_plain(u32 address, u32 lead) {
  return (u64)((address & 0x3FFFF) >> 4 | lead >> 4 << 16) | (u64)(lead >> 4) << 32;  // the last: from 8 rows to the next
}

// An operand of 16-bit rows that are contiguous across the product: pieces of 64 columns, 128 bytes a row, swizzled as
// above; `piece` bytes from 64 columns to the next. `address` is the tile's plus 2048 bytes for each 16 rows.
__device__ __forceinline__ u64 operand_across(u32 address, u32 piece) {
  return (u64)((address & 0x3FFFF) >> 4) | (u64)(piece >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

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

struct alignas(16) Quad {
  u32 w[4];
};

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
