// What kernels/mixed takes beside hopper.cuh, for the host: a code's value, 16 bytes of shared memory, of this block and
// another one's, and mma.m16n8k16.
#pragma once

namespace quantrot {

template <int KIND>
inline float code_value(u32 byte) {
  if (KIND == 0) return (float)(signed char)byte;
  if (KIND == 1) return (float)(byte & 255);
  if (KIND == 2) return (float)(byte & 255) - 128;
  return emulator::from_e4m3(byte & 255);
}

inline Quad load_shared16bytes(u32 address) {
  if (address % 16) emulator::fail("a load of 16 bytes that is not aligned");
  Quad v;
  memcpy(&v, self().block->at(address, 16), 16);
  return v;
}

inline void cluster_arrive() {
  emulator::Cluster& cluster = *self().block->cluster;
  cluster.meeting.arrive(emulator::block_size.x * cluster.blocks.size());
}
inline void cluster_wait() {  // the first of a kernel
  emulator::Cluster& cluster = *self().block->cluster;
  emulator::wait_until(cluster.meeting, "the cluster", [&] { return cluster.meeting.round > 0; });
}

inline void store_shared(u32 to, const float (&v)[4]) { emulator::ordinary_write(to, v, 16); }

// At a random moment later.
inline void send(u32 to, const float (&v)[4], u32 bar) {
  u32 address = to, arrives = bar;
  emulator::Block& block = emulator::block_of(address);
  if (&block != &emulator::block_of(arrives)) emulator::fail("sent to one block, counted on another's barrier");
  if (block.cluster->meeting.round == 0) emulator::fail("sent to a block that may not have started");
  const std::vector<float> floats(v, v + 4);
  emulator::scheduler.events.push_back([&block, address, arrives, floats] {
    block.must_run();
    memcpy(block.at(address, 16), floats.data(), 16);
    emulator::Barrier& barrier = block.barrier(arrives);
    barrier.bytes -= 16;
    barrier.settle();
  });
}

template <class T>
inline void multiply16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  product_warp<T>(d, a, b0, b1);
}

}  // namespace quantrot
