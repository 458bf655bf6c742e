// The functions of kernels/hopper.cuh and products.cuh for the host. What is asynchronous on the hardware is
// asynchronous here, and late or early at random: copies land at a random moment in a random order; a product reads its operands anywhere between
// its issue and the wait for it, and until then its registers hold NaN. So a missing wait, a buffer handed back too
// soon, a missing fence or a wrong parity shows as a wrong result, a message or a deadlock, for some seed.
//
// Use: compile a kernel that keeps to hopper.cuh, and launch.cpp, with -DQUANTROT_EMULATED (the fixture `emulated`), make
// TensorMaps of pointers and sizes, call emulator::launch(grid, cluster, threads, shared bytes, seed, [&] { kernel(...); }); it
// returns what went wrong, or "". Try several seeds: they differ in order, in delays and in who lags behind.
//
// Not modelled: instruction order within a thread, and the hardware's 14-bit sums. Ordinary races between threads show
// only through the order that a seed gives.
#pragma once

#include <algorithm>

#include "machine.h"

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __restrict__
#define __align__(n) alignas(n)

#define threadIdx (emulator::Dim3{emulator::self().index, 0, 0})
#define blockIdx \
  (emulator::Dim3{emulator::self().block->index[0], emulator::self().block->index[1], emulator::self().block->index[2]})
#define blockDim (emulator::block_size)
#define gridDim (emulator::grid_size)

struct float2 {
  float x, y;
};
struct uint2 {
  unsigned x, y;
};
struct float4 {
  float x, y, z, w;
};

template <class T>
inline T __ldg(const T* p) {
  return *p;
}
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t select) {
  const uint64_t bytes = (uint64_t)y << 32 | x;
  uint32_t r = 0;
  for (int i = 0; i < 4; i++) r |= (uint32_t)(bytes >> (select >> 4 * i & 7) * 8 & 255) << 8 * i;
  return r;
}
inline float __uint_as_float(uint32_t bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1 / a; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
using std::max;
using std::min;

namespace emulator {

inline const auto e4m3_numbers = [] {
  std::vector<float> t(256);
  for (int i = 0; i < 256; i++) {
    const int exponent = i >> 3 & 15, fraction = i & 7;
    float v = exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9);
    if ((i & 127) == 127) v = NAN;
    t[i] = i & 128 ? -v : v;
  }
  return t;
}();
inline float from_e4m3(unsigned char c) { return e4m3_numbers[c]; }

inline u32 to_bf16(float f) {
  u32 b;
  memcpy(&b, &f, 4);
  return f != f ? 0x7FFF : (b + 0x7FFF + (b >> 16 & 1)) >> 16;
}

inline u32 to_fp16(float f) {
  u32 b;
  memcpy(&b, &f, 4);
  const u32 sign = b >> 16 & 0x8000;
  const float m = std::fabs(f);
  if (f != f) return 0x7FFF;
  if (m >= 65520.f) return sign | 0x7C00;
  if (m == 0.f) return sign;
  int e;
  std::frexp(m, &e);  // ulp of 11 significant bits, at least 2^-24
  const int ulp = std::max(e - 11, -24);
  const float n = std::nearbyint(std::ldexp(m, -ulp));
  return sign | (ulp == -24 ? (u32)n : (u32)(ulp + 24) * 1024 + (u32)n);
}

// The block that a shared address names, and the address there.
inline Block& block_of(u32& address) {
  const u32 rank = address >> 24;
  address &= 0xFFFFFF;
  Block& block = rank ? *self().block->cluster->blocks.at(rank - 1) : *self().block;
  block.must_run();
  return block;
}

void ordinary_write(u32 address, const void* from, u32 bytes);

// The address of byte k of row `row` of an operand: K-major, 128-byte, 64-byte or no swizzle, the layouts that are used.
inline u32 operand_at(u64 descriptor, u32 row, u32 k) {
  const u32 start = (descriptor & 0x3FFF) << 4, stride = (descriptor >> 32 & 0x3FFF) << 4, kind = descriptor >> 62;
  const u32 lead = (descriptor >> 16 & 0x3FFF) << 4;
  if (kind == 3 || (descriptor >> 49 & 7) != 0) fail("an operand that is not in a swizzle known here");
  if (kind == 0) return start + row / 8 * stride + row % 8 * 16 + k / 16 * lead + k % 16;
  const u32 address = start + row / 8 * stride + row % 8 * (kind == 1 ? 128 : 64) + k;
  return address ^ (address >> 7 & (kind == 1 ? 7 : 3)) << 4;
}

inline float from_code(unsigned char c, bool whole) { return whole ? (signed char)c : from_e4m3(c); }

void execute_before(u32 group);

void issue(Product p);
void settle(u32 left);

}  // namespace emulator

namespace quantrot {

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
using emulator::fail;
using emulator::self;

struct TensorMap {  // a matrix [rows, columns] of elements, copied in boxes
  unsigned char* base;
  u64 columns, rows, pitch;  // pitch in bytes
  u32 box_columns, box_rows, element;  // bytes of an element
  u32 swizzled;                        // by 128 bytes (64, 32 where a line of the box is no longer), or not at all
  u32 folded = 0;                      // for tensor_load_folded
  u32 fresh = 0;                       // written by the kernel before: copied after grid_wait only
  u32 dealt = 0;                       // for tensor_store_dealt
};

inline u32 lane_number() { return self().lane(); }
inline u32 shared_memory() { return emulator::SHARED_START; }
inline u32 cluster_rank() { return self().block->rank; }
inline void grid_wait() { self().waited = true; }
inline void grid_wait_only() { self().waited = true; }
inline void launch_dependents() {}
inline u32 in_block(u32 address, u32 rank) { return address | (rank + 1) << 24; }

inline void warp_sync() { self().block->warps[self().warp()].meeting.meet(32, "the warp"); }

// Of a whole warp, one lane acts.
inline bool elect_one() {
  warp_sync();
  return lane_number() == 0;
}

// --- Barriers --------------------------------------------------------------------------------------------------------

inline void barrier_init(u32 bar, u32 arrivals) {
  self().block->at(bar, 8);
  self().block->barriers[bar].init(arrivals);
}
inline void barrier_init_done() {}
inline void barrier_arrive(u32 bar) { self().block->barrier(bar).arrive(); }
inline void barrier_arrive_cluster(u32 mapped) {
  emulator::Block& block = emulator::block_of(mapped);
  block.barrier(mapped).arrive();
}
inline void barrier_expect(u32 bar, u32 bytes) {
  if (!elect_one()) return;
  emulator::Barrier& b = self().block->barrier(bar);
  b.bytes += bytes;
  b.arrive();
}
inline void barrier_expect_in(u32 mapped, u32 bytes) {
  if (!elect_one()) return;
  emulator::Barrier& barrier = emulator::block_of(mapped).barrier(mapped & 0xFFFFFF);
  barrier.bytes += bytes;
  barrier.arrive();
}
// At a random moment later.
void send_word(u32 mapped, u32 word, u32 bar);
inline void barrier_wait(u32 bar, u32 parity) {
  emulator::Barrier& b = self().block->barrier(bar);
  emulator::wait_until(b, "a barrier", [&] { return b.ended(parity); });
}

inline void block_sync() { self().block->named[0].meet(emulator::block_size.x, "the block"); }
inline bool block_any(bool own) {
  bool& any = self().block->any;
  if (own) any = true;
  block_sync();
  const bool result = any;
  block_sync();
  any = false;
  block_sync();
  return result;
}
inline void cluster_sync() {
  emulator::Cluster& cluster = *self().block->cluster;
  cluster.meeting.meet(emulator::block_size.x * cluster.blocks.size(), "the cluster");
}
inline void cluster_start() { cluster_sync(); }
inline void named_sync(u32 id, u32 threads) { self().block->named[id].meet(threads, "a named barrier"); }
inline void named_arrive(u32 id, u32 threads) { self().block->named[id].arrive(threads); }

// What every lane of the warp gave: of each of N values, 32.
struct Lanes {
  u32 values[32];
  u32 operator[](u32 lane) const { return values[lane]; }
  const u32* begin() const { return values; }
  const u32* end() const { return values + 32; }
  operator std::vector<u32>() const { return {begin(), end()}; }
};
template <int N>
struct Exchanged {
  Lanes of[N];
  const Lanes& operator[](u32 i) const { return of[i]; }
};
template <int N>
inline Exchanged<N> exchange(const u32 (&mine)[N]) {
  static_assert(N <= 8);  // as many as a warp has room for
  emulator::Warp& warp = self().block->warps[self().warp()];
  auto& values = warp.values[warp.meeting.round % 2];
  for (u32 i = 0; i < N; i++) values[i][self().lane()] = mine[i];
  warp.meeting.meet(32, "the warp");
  Exchanged<N> all;
  memcpy(&all, values, sizeof all);
  return all;
}
inline Lanes exchange(u32 value) {
  const u32 one[1] = {value};
  return exchange(one)[0];
}

// Lane 0's, so that all lanes must ask: under a branch that some do not take it would wait for ever.
inline u32 warp_number() { return exchange(self().warp())[0]; }

// --- The tensor copy engine ------------------------------------------------------------------------------------------

inline void fence_async() {
  for (u32 w : self().written)
    if (self().block->unfenced[w] == self().index + 1) {
      self().block->unfenced[w] = 0;
      self().block->unfenced_words--;
    }
  self().written.clear();
}
inline void tensor_prefetch(const TensorMap*) {}

enum Keep { NORMAL, FIRST, LAST };
template <Keep K>
inline u64 cache_policy() {
  return 0;
}

void check_map(const TensorMap& map, u32 address);

void tensor_load_all(u32 to, const TensorMap* map, int x, int y, u32 bar, u64, unsigned short blocks);

inline void tensor_load(u32 to, const TensorMap* map, int x, int y, u32 bar, u64 policy) {
  tensor_load_all(to, map, x, y, bar, policy, 1 << cluster_rank());
}

inline void tensor_warm(const TensorMap* map, int, int) { check_map(*map, 0); }
inline void warm_line(const void*) {}
inline void warm_bytes(const void* at, u32 bytes) {
  if ((u64)at % 16 || bytes % 16) fail("a copy that the hardware does not take");
}

inline void tensor_load_folded(u32 to, const TensorMap* map, int y, u32 bar, u64 policy) {
  if (!map->folded) fail("a map that does not fold");
  tensor_load(to, map, 0, 16 * y, bar, policy);
}

void line_load(u32 to, const void* from, u32 bytes, u32 bar);

void tensor_store(const TensorMap* map, int x, int y, u32 from);

inline void tensor_store_dealt(const TensorMap* map, int x, int y, u32 from) {
  if (!map->dealt) fail("a map that does not deal rows out");
  tensor_store(map, x, 4 * y, from);
}

void tensor_store_commit();

template <int N>
inline void tensor_store_wait() {
  auto& stores = self().stores;
  if (stores.size() <= N) return;
  emulator::wait_until(self().stored, "stores", [&] {
    for (size_t i = 0; i + N < stores.size(); i++)
      if (*stores[i]) return false;
    return true;
  });
  stores.erase(stores.begin(), stores.end() - N);
}

// --- Copies by every thread ------------------------------------------------------------------------------------------

// Bytes land between the copy and the wait, as ordinary writes of this thread.
inline void copy16(u32 to, const void* from, bool inside) {
  unsigned char bytes[16] = {};
  if (inside) memcpy(bytes, from, 16);
  self().copies.push_back({to, {bytes, bytes + 16}});
}
inline void copies_wait() {
  for (auto& [to, bytes] : self().copies) emulator::ordinary_write(to, bytes.data(), 16);
  for (auto& [to, bytes] : self().small) emulator::ordinary_write(to, bytes.data(), 4);
  self().copies.clear(), self().small.clear();
}

// A group's bytes land when it is waited for, no sooner.
inline void copies_commit() { self().copies.push_back({0, {}}); }
template <int LEFT>
inline void copies_wait() {
  auto& copies = self().copies;
  int groups = -LEFT;
  for (const auto& [to, bytes] : copies) groups += to == 0;
  while (groups > 0) {
    const auto [to, bytes] = copies.front();
    copies.erase(copies.begin());
    if (to) emulator::ordinary_write(to, bytes.data(), 16);
    groups -= to == 0;
  }
}

// Without copies_wait, bytes land, and the arrival comes, at some later moment: never unfenced, since only ordinary loads are to read them.
inline void copy4(u32 to, const void* from) {
  self().small.push_back({to, std::vector<unsigned char>((const unsigned char*)from, (const unsigned char*)from + 4)});
}
inline void copies_arrive(u32 bar) {
  emulator::Block* block = self().block;
  emulator::scheduler.events.push_back([=, copies = std::move(self().small)] {
    for (auto& [to, bytes] : copies) memcpy(block->at(to, 4), bytes.data(), 4);
    block->barrier(bar).arrive();
  });
  self().small.clear();
}

// --- Global memory between blocks ------------------------------------------------------------------------------------

inline u32 count_in_turn(u32* p, u32 last) {
  const u32 before = *p;
  *p = before >= last ? 0 : before + 1;
  return before;
}
inline u32 count_one(u32* p, u32 last) { return elect_one() ? count_in_turn(p, last) : 0; }
inline u32 load_count(const u64* p) { return (u32)*p; }
inline u64 count_arrival(u64* p) { return elect_one() ? (*p += 1ull << 32) - (1ull << 32) : 0; }
inline float fresh1(const float* p) {
  if (!self().waited) emulator::fail("a load before grid_wait of what the kernel before writes");
  return *p;
}
inline float2 fresh2(const float* p) { return {p[0], p[1]}; }
inline float4 fresh4(const float* p) { return {p[0], p[1], p[2], p[3]}; }
inline float2 load_fresh2(const float* p) { return fresh2(p); }
inline float4 load_fresh4(const float* p) { return fresh4(p); }
inline void store_fresh4(float* p, float4 v) { p[0] = v.x, p[1] = v.y, p[2] = v.z, p[3] = v.w; }
inline int load_fresh(const int* p) { return *p; }

// --- Registers, ordinary shared memory -------------------------------------------------------------------------------

template <int N>
inline void give_registers() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256);
}
template <int N>
inline void take_registers() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256);
}

inline void store_shared(u32 address, u32 a) { emulator::ordinary_write(address, &a, 4); }
inline void store_shared(u32 address, float a) { emulator::ordinary_write(address, &a, 4); }
inline void store_shared4(u32 address, float a, float b, float c, float d) {
  const float four[4] = {a, b, c, d};
  emulator::ordinary_write(address, four, 16);
}
inline void store_shared2(u32 address, u32 a, u32 b) {
  const u32 v[2] = {a, b};
  emulator::ordinary_write(address, v, 8);
}
inline void store_two_bytes(u32 address, u32 a) { emulator::ordinary_write(address, &a, 2); }
inline u32 load_shared_u16(u32 address) {
  unsigned short v;
  memcpy(&v, self().block->at(address, 2), 2);
  return v;
}
inline u32 high_half(u32 word) { return word >> 16; }
inline u32 pick_bytes(u32 a, u32 b, u32 which) {
  const u64 both = (u64)b << 32 | a;
  u32 picked = 0;
  for (u32 i = 0; i < 4; i++) {
    const u32 byte = (u32)(both >> (which >> 4 * i & 7) * 8) & 255;
    picked |= (which >> 4 * i & 8 ? byte >> 7 ? 255 : 0 : byte) << 8 * i;
  }
  return picked;
}

inline u32 load_shared_u8(u32 address) { return *self().block->at(address, 1); }
inline float load_shared(u32 address) {
  float v;
  memcpy(&v, self().block->at(address, 4), 4);
  return v;
}
inline u32 load_shared1(u32 address) {
  u32 v;
  memcpy(&v, self().block->at(address, 4), 4);
  return v;
}
inline void store_one(u32 to, u32 a) {
  if (elect_one()) emulator::ordinary_write(to, &a, 4);
}
inline u32 address_after(u32 address, u32) { return address; }
inline void load_shared4(u32 address, int& a, int& b, int& c, int& d) {
  int v[4];
  memcpy(v, self().block->at(address, 16), 16);
  a = v[0], b = v[1], c = v[2], d = v[3];
}
inline float2 load_shared2(u32 address) {
  float2 v;
  memcpy(&v, self().block->at(address, 8), 8);
  return v;
}
inline void store_matrices(u32 row, u32 a, u32 b, u32 c, u32 d) {
  const auto all = exchange({a, b, c, d});
  const u32 lane = self().lane();
  emulator::ordinary_write(row, &all[lane / 8].values[lane % 8 * 4], 16);
}
inline void store_matrices_turned(u32 row, u32 a, u32 b, u32 c, u32 d) {
  const auto all = exchange({a, b, c, d});
  const u32 lane = self().lane(), column = lane % 8;
  unsigned short turned[8];
  for (u32 i = 0; i < 8; i++) turned[i] = all[lane / 8][i * 4 + column / 2] >> 16 * (column % 2);
  emulator::ordinary_write(row, turned, 16);
}
inline void load_matrices(u32 (&r)[4], u32 row) {
  if (row % 16) emulator::fail("a row of 16 bytes that is not aligned");
  u32 mine[4];
  memcpy(mine, self().block->at(row, 16), 16);
  const auto rows = exchange(mine);
  const u32 lane = self().lane();
  for (u32 tile = 0; tile < 4; tile++) r[tile] = rows[lane % 4][tile * 8 + lane / 4];
}
inline float4 load_cluster4(u32 mapped) {
  emulator::Block& block = emulator::block_of(mapped);
  float4 v;
  memcpy(&v, block.at(mapped, 16), 16);
  return v;
}

inline void store_cluster(u32 mapped, u32 a) {
  emulator::Block& block = emulator::block_of(mapped);
  memcpy(block.at(mapped, 4), &a, 4);
}

inline u32 largest_of_warp(u32 x) {
  for (u32 y : exchange(x)) x = max(x, y);
  return x;
}

// --- Products --------------------------------------------------------------------------------------------------------

// wgmma's instructions are executed by whole warps: lanes meet at the fence, and at the wait before and after.
inline void product_fence() {
  warp_sync();
  self().fenced = true;
}
inline void product_commit() { self().group++; }

template <int N>
inline void product_wait() {
  emulator::settle(N);
}

template <int W>
inline void product_done(float (&)[W]) {}
template <int W>
inline void product_done(int (&)[W]) {}
inline void product_done(float&) {}

template <int W>
inline void product(float (&d)[W], u64 a, u64 b, bool add) {
  emulator::issue({d, W, a, b, add, false, {}, 0, false, nullptr});
}

inline void issue_codes(float* d, int width, const u32 (&a)[4], u64 b, bool add, bool whole) {
  emulator::Product p{d, width, 0, b, add, true, {}, 0, false, nullptr, whole};
  const auto all = exchange(a);
  for (u32 i = 0; i < 4; i++)
    for (u32 byte = 0; byte < 16; byte++)
      p.rows[i % 2][i / 2 * 16 + byte] =
          emulator::from_code(all[i][lane_number() / 4 * 4 + byte / 4] >> byte % 4 * 8 & 255, whole);
  emulator::issue(p);
}

template <int W>
inline void product(float (&d)[W], const u32 (&a)[4], u64 b, bool add) {
  issue_codes(d, W, a, b, add, false);
}
inline void product(int (&d)[64], const u32 (&a)[4], u64 b, bool add) { issue_codes((float*)d, 64, a, b, add, true); }

template <class T>
inline void eight_values(const unsigned char* at, float* out) {
  for (u32 k = 0; k < 8; k++) out[k] = T::value(at[2 * k] | at[2 * k + 1] << 8);
}
template <class T, int W>
inline void product16(float (&d)[W], const u32 (&a)[4], u64 b, bool add) {
  emulator::Product p{d, W, 0, b, add, true, {}, 0, false, &eight_values<T>};
  const auto all = exchange(a);
  for (u32 i = 0; i < 4; i++)
    for (u32 k = 0; k < 8; k++)
      p.rows[i % 2][i / 2 * 8 + k] = T::value(all[i][lane_number() / 4 * 4 + k / 2] >> 16 * (k % 2));
  emulator::issue(p);
}

// 16-bit operands, b contiguous across the product: at once, since nothing but the wait may look at d.
template <class T, int W>
inline void product_across(float (&d)[W], const u32 (&a)[4], u64 b, bool add) {
  const auto all = exchange(a);
  const u32 g = lane_number() / 4, q = lane_number() % 4;
  const u32 start = (b & 0x3FFF) << 4, piece = (b >> 16 & 0x3FFF) << 4, group = (b >> 32 & 0x3FFF) << 4;
  if (b >> 62 != 1) fail("product_across wants the 128-byte swizzle");
  for (u32 i = 0; i < W; i += 4) {
    for (u32 e = 0; e < 2; e++) {
      const u32 n = 2 * i + 2 * q + e;
      float sums[2] = {add ? d[i + e] : 0.f, add ? d[i + 2 + e] : 0.f};
      for (u32 k = 0; k < 16; k++) {
        u32 at = start + n / 64 * piece + k / 8 * group + k % 8 * 128 + n % 64 * 2;
        at ^= (at >> 7 & 7) << 4;
        self().block->must_be_fenced(at & ~15u, 16, "wgmma");
        unsigned short bits;
        memcpy(&bits, self().block->at(at & ~15u, 16) + at % 16, 2);
        for (u32 h = 0; h < 2; h++)
          sums[h] += T::value(all[h + 2 * (k / 8)][4 * g + k % 8 / 2] >> 16 * (k % 2)) * T::value(bits);
      }
      d[i + e] = sums[0], d[i + 2 + e] = sums[1];
    }
  }
}

// --- Products by a warp ----------------------------------------------------------------------------------------------

inline u32 bits_of(float f) {
  u32 bits;
  memcpy(&bits, &f, 4);
  return bits;
}

inline void product_tf32(float (&d)[4], const float (&a)[4], float b0, float b1) {
  const auto cut = [](u32 bits) {
    bits &= 0xFFFFE000u;
    float f;
    memcpy(&f, &bits, 4);
    return f;
  };
  const auto all = exchange({bits_of(a[0]), bits_of(a[1]), bits_of(a[2]), bits_of(a[3]), bits_of(b0), bits_of(b1)});
  const u32 g = lane_number() / 4, q = lane_number() % 4;
  for (u32 i = 0; i < 4; i++)
    for (u32 k = 0; k < 8; k++)
      d[i] += cut(all[i / 2 + k / 4 * 2][4 * g + k % 4]) * cut(all[4 + k / 4][4 * (2 * q + i % 2) + k % 4]);
}

// --- Numbers ---------------------------------------------------------------------------------------------------------

struct Bf16 {
  static constexpr bool BRAIN = true;
  static constexpr int BYTES = 2;
  static u32 pack(float lo, float hi) { return emulator::to_bf16(lo) | emulator::to_bf16(hi) << 16; }
  static float value(unsigned short bits) {
    const u32 wide = (u32)bits << 16;
    float f;
    memcpy(&f, &wide, 4);
    return f;
  }
};
inline void unpack_e4m3(u32 codes, u32& low, u32& high) {
  u32 halves[4];
  for (int i = 0; i < 4; i++) halves[i] = emulator::to_fp16(emulator::from_e4m3(codes >> 8 * i & 255));
  low = halves[0] | halves[1] << 16, high = halves[2] | halves[3] << 16;
}
// By mma.m16n8k16, whose operands are gathered from the lanes that hold them.
inline unsigned products_by_warps = 0;
template <class T>
inline void product_warp(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  products_by_warps++;
  const auto all = exchange({a[0], a[1], a[2], a[3], b0, b1});
  const u32 g = lane_number() / 4, q = lane_number() % 4;
  for (u32 k = 0; k < 16; k++) {
    const u32 half = k / 8, lane = k % 8 / 2, shift = k % 2 * 16;
    float x[2], y[2];
    for (u32 i = 0; i < 2; i++) {
      x[i] = T::value(all[i + half * 2][g * 4 + lane] >> shift);
      y[i] = T::value(all[4 + half][(q * 2 + i) * 4 + lane] >> shift);
    }
    for (u32 i = 0; i < 4; i++) d[i] += x[i / 2] * y[i % 2];
  }
}

inline u32 to_e4m3(float a, float b, float c, float d) {
  u32 r = 0;
  const float values[4] = {a, b, c, d};
  for (int i = 0; i < 4; i++) {
    const float m = std::min(std::fabs(values[i]), 448.f);
    int e;
    std::frexp(m, &e);  // the step of four significant bits, at least 2^-9
    const int step = std::max(e - 4, -9);
    const float n = std::nearbyint(std::ldexp(m, -step));
    const u32 code = values[i] != values[i] ? 0x7F : m == 0.f ? 0 : step == -9 ? (u32)n : (u32)(step + 9) * 8 + (u32)n;
    r |= (code | (values[i] == values[i] && std::signbit(values[i]) ? 0x80u : 0u)) << 8 * i;
  }
  return r;
}
inline float exp2_fast(float x) { return std::exp2(x); }
inline float inverse_root(float a) { return 1 / std::sqrt(a); }
inline float round_up(float x) { return std::ceil(x); }

struct Fp16 {
  static constexpr bool BRAIN = false;
  static constexpr int BYTES = 2;
  static u32 pack(float lo, float hi) { return emulator::to_fp16(lo) | emulator::to_fp16(hi) << 16; }
  static float value(unsigned short bits) {
    const u32 sign = (u32)(bits >> 15) << 31, exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float least = (float)fraction * 0x1p-24f;
    const u32 wide = sign | (exponent ? (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13 : bits_of(least));
    float f;
    memcpy(&f, &wide, 4);
    return f;
  }
};

}  // namespace quantrot

inline uint32_t __float_as_uint(float f) { return quantrot::bits_of(f); }
inline int __float_as_int(float f) { return (int)quantrot::bits_of(f); }
inline float __int_as_float(int bits) { return __uint_as_float((uint32_t)bits); }

inline uint32_t __shfl_xor_sync(uint32_t, uint32_t value, int mask) {
  return quantrot::exchange(value)[(threadIdx.x % 32) ^ mask];
}
inline uint32_t __ballot_sync(uint32_t, int value) {
  uint32_t votes = 0, lane = 0;
  for (uint32_t v : quantrot::exchange(value != 0)) votes |= v << lane++;
  return votes;
}
inline int __any_sync(uint32_t mask, int value) { return __ballot_sync(mask, value) != 0; }
inline uint32_t __shfl_sync(uint32_t, uint32_t value, int lane) { return quantrot::exchange(value)[lane & 31]; }
inline float __shfl_sync(uint32_t, float value, int lane) {
  return __uint_as_float(quantrot::exchange(__float_as_uint(value))[lane & 31]);
}
inline int __shfl_xor_sync(uint32_t mask, int value, int lanes) { return (int)__shfl_xor_sync(mask, (uint32_t)value, lanes); }
inline float __shfl_xor_sync(uint32_t mask, float value, int lanes) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  bits = __shfl_xor_sync(mask, bits, lanes);
  memcpy(&value, &bits, 4);
  return value;
}
