// Rows of 16-bit elements whose length is a power of two: see common.cuh for how their bits are divided.

namespace quantrot {

// --- Rows of 32, 64, 128 elements in 16 bits: one exact product, the other bits in registers -------------------------
//
// A warp's piece is contiguous. The product takes the data as its B operand, which leaves the row's bits e2 and l2 in
// registers and l3 in a neighbour lane. Rounded pairs then go back to their lanes by transposing 8 x 8 matrices of
// 16-bit words.

__device__ __forceinline__ u32 transpose8(u32 w) {
  u32 r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(w));
  return r;
}

template <int D, int N, int R, int WARPS, bool SIGNS>
__device__ __forceinline__ void turn_kernel(const Args& a) {
  static_assert(N == 32 || N == 64 || N == 128, "rows of one, two or four lane groups");
  const u32 lane = threadIdx.x & 31;
  const i64 unit = (i64)blockIdx.x * WARPS + (threadIdx.x >> 5);
  const i64 first_row = unit * (R * 256 / N) + lane * 8 / N;
  const int column = lane * 8 % N;
  const Sylvester16 h = sylvester16<D>();
  Vec v[R];
#pragma unroll
  for (int r = 0; r < R; r++) {
    const i64 row = first_row + r * (256 / N);
    v[r] = Vec{{0, 0, 0, 0}};
    if (row < a.rows) {
      v[r] = load16((const char*)a.x + (row * a.x_stride + column) * 2);
      if constexpr (SIGNS) apply_signs16(v[r], a.signs + (row % a.sign_rows) * N + column);
    }
  }
#pragma unroll
  for (int r = 0; r < R; r++) {
    float d[2][4];
    first_product<D>(d, h, v[r]);
    butterflies<2, 4, 1, 2>(d);  // e2
#pragma unroll
    for (int e2 = 0; e2 < 2; e2++) {
#pragma unroll
      for (int e1 = 0; e1 < 2; e1++) {
        float &p = d[e2][2 * e1], &q = d[e2][2 * e1 + 1];
        if constexpr (N >= 64) {  // l2
          const float t = p + q;
          q = p - q;
          p = t;
        }
        if constexpr (N >= 128) {  // l3, in lane bit 0
          const float sign = lane & 1 ? -1.f : 1.f;
          p = fmaf(p, sign, __shfl_xor_sync(0xFFFFFFFFu, p, 1));
          q = fmaf(q, sign, __shfl_xor_sync(0xFFFFFFFFu, q, 1));
        }
      }
    }
    const i64 row = first_row + r * (256 / N);
#pragma unroll
    for (int e2 = 0; e2 < 2; e2++) {
#pragma unroll
      for (int e1 = 0; e1 < 2; e1++) {
        const float p = d[e2][2 * e1] * a.scale, q = d[e2][2 * e1 + 1] * a.scale;
        v[r].w[e1 + 2 * e2] = transpose8(pack<D>(p, q));
      }
    }
    if (row < a.rows) store16((char*)a.y + (row * a.y_stride + column) * 2, v[r]);
  }
}

// --- Rows of 256 ... 2048 elements in 16 bits in a warp's registers --------------------------------------------------

template <int D, int R, int P>
struct WarpTransform {  // 256 elements in each of R vectors; the bits of the vector's number are the caller's
  Sylvester16 h = sylvester16<D>(), pair = sylvester16<BF16>();
  const Sylvester8 h8 = sylvester8();
  const u32 minus = minus_identity(threadIdx.x & 31);

  __device__ __forceinline__ WarpTransform() {
    if constexpr (P == PAIR) keep_apart(h.a, 0), keep_apart(pair.a, 4);
  }

  __device__ __forceinline__ void run(float (&y)[R][8], const Vec (&v)[R]) const {
#pragma unroll
    for (int r = 0; r < R; r++) {
      float d[2][4];
      first_product<D>(d, h, v[r]);
      if constexpr (P == PAIR) {
        second_product(y[r], pair, minus, d);
      } else {
        second_product<P>(y[r], h8, d);
      }
    }
  }
};

template <int D, int N, int R, int WARPS, int P, bool SIGNS>
__device__ __forceinline__ void warp_kernel(const Args& a) {
  constexpr int IN_R = N / 256;
  static_assert(IN_R >= 1 && IN_R <= R, "a row must fit in a lane's vectors");
  const u32 lane = threadIdx.x & 31;
  const i64 first_row = ((i64)blockIdx.x * WARPS + (threadIdx.x >> 5)) * (R / IN_R);
  const WarpTransform<D, R, P> transform;
  Vec v[R];
#pragma unroll
  for (int r = 0; r < R; r++) {
    const i64 row = first_row + r / IN_R;
    const int column = r % IN_R * 256 + lane * 8;
    v[r] = Vec{{0, 0, 0, 0}};
    if (row < a.rows) {
      v[r] = load16((const char*)a.x + (row * a.x_stride + column) * 2);
      if constexpr (SIGNS) apply_signs16(v[r], a.signs + (row % a.sign_rows) * N + column);
    }
  }
  float y[R][8];
  transform.run(y, v);
  butterflies<R, 8, 1, IN_R>(y);
#pragma unroll
  for (int r = 0; r < R; r++) {
    const i64 row = first_row + r / IN_R;
    const int column = r % IN_R * 256 + lane * 8;
    if (row < a.rows) store16((char*)a.y + (row * a.y_stride + column) * 2, pack8<D>(y[r], a.scale));
  }
}

// --- Rows of 1024 ... 32768 elements in 16 bits in a block's registers -----------------------------------------------

// Whether this is the last warp, which has waited until all of the block have read their input, so that the bulk copies may
// have its place. The others go on: the first half of a row is multiplied while the second one comes (16384 in place 14.3 us
// and not 14.5, in float16 14.7 and not 15.3).
template <int WARPS>
__device__ __forceinline__ bool read_by_all(u32 warp) {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // see release_input
  if (warp < WARPS - 1) {
    asm volatile("bar.arrive 1, %0;" ::"n"(WARPS * 32) : "memory");
    return false;
  }
  asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");
  return true;
}

// A warp holds 256 * R neighbours. Without STAGES a block has one row and reads it straight into registers; with them
// it is persistent, and bulk copies bring its next rows to shared memory while it works on this one.
template <int D, int N, int R, int WARPS, int STAGES, int P, bool SIGNS>
__device__ __forceinline__ void share_kernel(const Args& a) {
  static_assert(N == 256 * R * WARPS, "how a row is divided");
  constexpr int PART = 8 * R / WARPS, HEAD = STAGES ? 128 : 0;
  extern __shared__ __align__(128) unsigned char shared[];
  const u32 base = shared_address(shared), inputs = base + HEAD, sums = inputs + STAGES * N * 2;
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;

  auto fetch = [&](i64 row, int stage) {  // by one thread, in halves, which half of the warps wait for
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32 bar = base + (2 * stage + half) * 8;
      barrier_expect(bar, N);
      bulk_load(inputs + (2 * stage + half) * N, (const char*)a.x + row * a.x_stride * 2 + half * N, N, bar);
    }
  };
  if (STAGES && threadIdx.x == 0) {
    for (int s = 0; s < 2 * STAGES; s++) barrier_init(base + s * 8, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  const WarpTransform<D, R, P> transform;
  if constexpr (STAGES > 0) {
    __syncthreads();
    grid_wait();
    for (int s = 0; threadIdx.x == 0 && s < STAGES; s++) {
      const i64 row = blockIdx.x + (i64)s * gridDim.x;
      if (row < a.rows) fetch(row, s);
    }
  }

  int stage = 0;
  u32 parity = 0;
  for (i64 row = blockIdx.x; row < a.rows; row += gridDim.x) {
    Vec v[R];
    if constexpr (STAGES > 0) barrier_wait(base + (2 * stage + (warp >= WARPS / 2)) * 8, parity);
#pragma unroll
    for (int r = 0; r < R; r++) {
      const int column = (warp * R + r) * 256 + lane * 8;
      if constexpr (STAGES > 0) {
        v[r] = load_vec_shared(inputs + stage * N * 2 + column * 2);
      } else {
        v[r] = load16((const char*)a.x + (row * a.x_stride + column) * 2);
      }
      if constexpr (SIGNS) apply_signs16(v[r], a.signs + (row % a.sign_rows) * N + column);
    }
    if constexpr (STAGES > 0) {
      const i64 next = row + (i64)STAGES * gridDim.x;
      if (read_by_all<WARPS>(warp) && lane == 0 && next < a.rows) fetch(next, stage);
      __syncwarp();
    }
    float y[R][8], z[WARPS][PART];
    transform.run(y, v);
    butterflies<R, 8, 1, R>(y);
    if constexpr (STAGES > 0) __syncthreads();  // the previous row's sums have been read
    across_warps(z, y, sums, a.scale);
    char* out = (char*)a.y + (row * a.y_stride + threadIdx.x * PART) * 2;
#pragma unroll
    for (int w = 0; w < WARPS; w++) store_part<D>(out + w * R * 512, z[w]);
    if constexpr (STAGES == 0) return;
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
}

}  // namespace quantrot
