// Small kernels that try the emulator: right ones, and the same with one thing left out (BUG).
#include "hopper.cuh"
#include "products.cuh"

namespace quantrot {

// y [64, 16] = sum over tiles of a [64, 128 tiles] b [16, 128 tiles]^T, through a ring of two stages filled by a warp,
// by a warpgroup; y leaves by the copy engine. BUG names what is wrong.
enum Bug {
  NONE,
  NO_LOAD_WAIT,     // reads a stage before it is full
  NO_PRODUCT_WAIT,  // uses sums before the product is done
  EARLY_RELEASE,    // hands a stage back while the product may still read it
  WRONG_PARITY,
  TOO_FEW_BYTES,    // the barrier expects fewer bytes than come
  NO_PRODUCT_FENCE,
  NO_STORE_FENCE,  // the copy engine reads ordinary writes
  NO_STORE_SYNC,   // one thread stores what others have not written yet
  NO_STORE_WAIT,   // the block ends before its store has read shared memory
};

template <int BUG>
void tiles(const TensorMap* a, const TensorMap* b, const TensorMap* y, int count) {
  const u32 base = shared_memory(), full = base + 2 * 10240 + 4096, empty = full + 16;
  if (threadIdx.x == 0) {
    for (int s = 0; s < 2; s++) barrier_init(full + s * 8, 1), barrier_init(empty + s * 8, 4);
    barrier_init_done();
  }
  block_sync();
  if (threadIdx.x >= 128) {
    Ring<2> ring;
    for (int i = 0; i < count; i++, ring.next()) {
      const u32 bar = full + ring.stage * 8, to = base + ring.stage * 10240;
      barrier_wait(empty + ring.stage * 8, ring.parity ^ (BUG == WRONG_PARITY ? 0 : 1));
      barrier_expect(bar, BUG == TOO_FEW_BYTES ? 8192 : 10240);
      tensor_load(to, a, i * 128, 0, bar, 0);
      tensor_load(to + 8192, b, i * 128, 0, bar, 0);
    }
  } else {
    float sum[8] = {}, d[8];
    Ring<2> ring;
    for (int i = 0; i < count; i++, ring.next()) {
      const u32 from = base + ring.stage * 10240;
      if (BUG != NO_LOAD_WAIT) barrier_wait(full + ring.stage * 8, ring.parity);
      if (BUG != NO_PRODUCT_FENCE) product_fence();
      for (int k = 0; k < 4; k++) product(d, operand(from, k), operand(from + 8192, k), k > 0);
      product_commit();
      if (BUG == EARLY_RELEASE && lane_number() == 0) barrier_arrive(empty + ring.stage * 8);
      if (BUG != NO_PRODUCT_WAIT) product_wait<0>();
      if (BUG != EARLY_RELEASE && lane_number() == 0) barrier_arrive(empty + ring.stage * 8);
      for (int j = 0; j < 8; j++) sum[j] += d[j];
    }
    if (BUG == NO_PRODUCT_WAIT) product_wait<0>();
    const u32 row = warp_number() * 16 + lane_number() / 4, out = base + 2 * 10240;
    for (int j = 0; j < 8; j++)
      store_shared(out + (row + j / 2 % 2 * 8) * 64 + (j / 4 * 8 + lane_number() % 4 * 2 + j % 2) * 4, sum[j]);
    if (BUG != NO_STORE_FENCE) fence_async();
    if (BUG != NO_STORE_SYNC) named_sync(1, 128);
    if (threadIdx.x == 0) {
      tensor_store(y, 0, 0, out);
      tensor_store_commit();
      if (BUG != NO_STORE_WAIT) tensor_store_wait<0>();
    }
  }
}

// The same product of one tile, a taken from registers, b sent to both blocks of a cluster by halves; each block writes
// what the other one's shared memory holds.
void shared_tile(const TensorMap* b, const unsigned char* a, float* y) {
  const u32 base = shared_memory(), full = base + 2048 + 4096, rank = cluster_rank();
  if (threadIdx.x == 0) {
    barrier_init(full, 1);
    barrier_init_done();
  }
  cluster_sync();
  if (warp_number() == 0) {
    barrier_expect(full, 2048);
    tensor_load_all(base + rank * 1024, b, 0, rank * 8, full, 0, 3);
  }
  barrier_wait(full, 0);
  const u32 row = warp_number() * 16 + lane_number() / 4;
  float d[8];
  product_fence();
  for (int k = 0; k < 4; k++) {
    u32 r[4];
    for (int i = 0; i < 4; i++)
      r[i] = *(const u32*)(a + (row + i % 2 * 8) * 128 + k * 32 + i / 2 * 16 + lane_number() % 4 * 4);
    product(d, r, operand(base, k), k > 0);
  }
  product_commit();
  product_wait<0>();
  const u32 out = base + 2048;
  for (int j = 0; j < 8; j++)
    store_shared(out + (row + j / 2 % 2 * 8) * 64 + (j / 4 * 8 + lane_number() % 4 * 2 + j % 2) * 4, d[j]);
  cluster_sync();
  for (u32 i = threadIdx.x; i < 256; i += 128) {
    const float4 v = load_cluster4(in_block(out + i * 16, rank ^ 1));
    memcpy(y + rank * 1024 + i * 4, &v, 16);
  }
  cluster_sync();
}

}  // namespace quantrot

using quantrot::TensorMap;

template <int BUG>
std::string run_tiles(unsigned char* a, unsigned char* b, float* y, int count, int seed) {
  const unsigned long k = 128 * count;
  const TensorMap ma{a, k, 64, k, 128, 64, 1, 1}, mb{b, k, 16, k, 128, 16, 1, 1};
  const TensorMap my{(unsigned char*)y, 16, 64, 64, 16, 64, 4, 0};
  return emulator::launch({1, 1, 1}, 1, 160, 2 * 10240 + 4096 + 32, seed,
                          [&] { quantrot::tiles<BUG>(&ma, &mb, &my, count); });
}

static std::string message;

extern "C" const char* tiles(int bug, unsigned char* a, unsigned char* b, float* y, int count, int seed) {
  using Run = std::string(unsigned char*, unsigned char*, float*, int, int);
  static Run* const runs[] = {run_tiles<0>, run_tiles<1>, run_tiles<2>, run_tiles<3>, run_tiles<4>,
                              run_tiles<5>, run_tiles<6>, run_tiles<7>, run_tiles<8>, run_tiles<9>};
  return (message = runs[bug](a, b, y, count, seed)).c_str();
}

extern "C" const char* shared_tile(unsigned char* a, unsigned char* b, float* y, int seed) {
  const TensorMap mb{b, 128, 16, 128, 128, 8, 1, 1};
  message = emulator::launch({2, 1, 1}, 2, 128, 2048 + 4096 + 16, seed, [&] { quantrot::shared_tile(&mb, a, y); });
  return message.c_str();
}
