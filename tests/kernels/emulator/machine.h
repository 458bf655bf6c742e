// A cluster of thread blocks: shared memory, barriers, the copy engine's maps, and the launch of a grid.
//
// Shared memory starts as garbage (0xFF: NaN as e4m3, bfloat16 and float32). Its addresses start at 1024, as they do on
// the hardware; a mapped address of another block carries that block's rank + 1 above bit 24.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <set>

#include "fibers.h"

namespace emulator {

typedef uint32_t u32;
typedef uint64_t u64;

constexpr u32 SHARED_START = 1024;

struct Barrier : Awaited {
  int arrivals = 0, pending = 0;
  long bytes = 0;
  u32 phase = 0;

  void init(int count) {
    arrivals = pending = count, bytes = 0, phase = 0;
    changed();
  }
  void settle() {
    if (pending == 0 && bytes == 0) {
      phase++;
      pending = arrivals;
      changed();
    }
  }
  void arrive() {
    if (pending == 0) fail("more arrivals on a barrier than it was made for");
    pending--;
    settle();
  }
  bool ended(u32 parity) const { return (phase & 1) != parity; }
};

struct Meeting : Awaited {  // of the threads of a block, a cluster or a warp, again and again
  u32 count = 0, round = 0;

  void arrive(u32 expected) {
    if (++count == expected) {
      count = 0;
      round++;
      changed();
    }
  }
  void meet(u32 expected, const char* what) {
    const u32 mine = round;
    arrive(expected);
    wait_until(*this, what, [&] { return round != mine; });
  }
};

struct Warp {
  Meeting meeting;
  u32 values[2][8][32];  // what its lanes give each other, by turns: who is late still reads those before
};

struct Cluster;

struct Block {
  Cluster* cluster;
  u32 rank, index[3], running;
  bool any = false;  // of block_any's threads
  std::vector<unsigned char> memory;
  std::vector<uint16_t> unfenced;  // a 4-byte word's last ordinary writer + 1, until that thread fences
  u32 unfenced_words = 0;
  std::map<u32, Barrier> barriers;
  Meeting named[16];
  std::vector<Warp> warps;
  std::vector<std::vector<std::pair<u64, u64>>> products;  // of each warpgroup: the operands in order

  [[noreturn]] void outside(u32 address, u32 bytes) const;
  unsigned char* at(u32 address, u32 bytes) {
    if (address < SHARED_START || address + bytes > SHARED_START + memory.size() || address % std::min(bytes, 16u))
      outside(address, bytes);
    return memory.data() + (address - SHARED_START);
  }
  void must_run() const {
    if (running == 0) fail("shared memory of a block that has ended");
  }
  Barrier& barrier(u32 address);
  void must_be_fenced(u32 address, u32 bytes, const char* reader) const;
};

struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  Meeting meeting;
};

struct Product {  // one wgmma that a thread takes part in
  float* d;
  int width;
  u64 a, b;
  bool add, a_given;
  float rows[2][32];  // of a, where it comes from registers
  u32 group;
  bool executed;
  void (*wide)(const unsigned char*, float*);  // 16 bytes of 16-bit elements; null: the operands are e4m3, or int8 (`whole`)
  bool whole = false;             // d are int32, at the same address
};

struct Result {  // what a product's registers will hold
  std::vector<double> sums;
  bool whole;
};

struct Thread : Fiber {
  Block* block;
  u32 index;
  std::vector<u32> written;                      // shared words written and not fenced
  std::vector<Product> products;                 // issued, not waited for
  std::map<float*, Result> results;              // of those
  u32 group = 0, issued = 0;                     // of the next product
  std::vector<std::pair<u32, std::vector<unsigned char>>> copies;  // started, not waited for
  std::vector<std::pair<u32, std::vector<unsigned char>>> small;   // copies of 4 bytes, before their arrival
  bool fenced = false;
  bool waited = false;  // for the kernel before this one
  Awaited stored;
  std::vector<std::shared_ptr<int>> stores;      // committed groups: copies still reading shared memory
  std::vector<std::function<void()>> open;       // stores before their commit
  u32 warp() const { return index / 32; }
  u32 lane() const { return index % 32; }
};

inline Thread& self() { return *(Thread*)scheduler.current; }

struct Dim3 {
  u32 x, y, z;
};

inline Dim3 block_size, grid_size;

std::string launch(Dim3 grid, u32 cluster_size, u32 threads, u32 shared, u32 seed, const std::function<void()>& kernel);

}  // namespace emulator
