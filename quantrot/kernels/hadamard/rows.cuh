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

// A warp holds 256 * R neighbours. Without STAGES a block has one row and reads it straight into registers; with one it is
// persistent: its first row comes as if it were the only one, and bulk copies bring the next one to shared memory while it
// works on this one. Each half of a row is asked for by a warp of the half of the block that waits for it, which tells its
// barrier before it meets the others. (16384 in place: 14.1 us without all that, 13.9 with the first row read directly, 13.6
// with two warps that ask, 13.5 with all.)
template <int D, int N, int R, int WARPS, int STAGES, int P, bool SIGNS>
__device__ __forceinline__ void share_kernel(const Args& a) {
  static_assert(N == 256 * R * WARPS && STAGES <= 1, "how a row is divided");
  constexpr int PART = 8 * R / WARPS, HEAD = STAGES ? 128 : 0;
  extern __shared__ __align__(128) unsigned char shared[];
  const u32 base = shared_address(shared), input = base + HEAD, sums = input + STAGES * N * 2;
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, half = warp / (WARPS / 2), bar = base + half * 8;

  if (STAGES && threadIdx.x == 0) {
    barrier_init(base, 1), barrier_init(base + 8, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  const WarpTransform<D, R, P> transform;
  if constexpr (STAGES > 0) {
    __syncthreads();
    grid_wait();
  }

  u32 parity = 1;
  for (i64 row = blockIdx.x; row < a.rows; row += gridDim.x, parity ^= 1) {
    Vec v[R];
    if (STAGES && row != blockIdx.x) {
      barrier_wait(bar, parity);
#pragma unroll
      for (int r = 0; r < R; r++) v[r] = load_vec_shared(input + (warp * R + r) * 512 + lane * 16);
    } else {
#pragma unroll
      for (int r = 0; r < R; r++)
        v[r] = load16((const char*)a.x + (row * a.x_stride + (warp * R + r) * 256 + lane * 8) * 2);
    }
    if constexpr (SIGNS) {
#pragma unroll
      for (int r = 0; r < R; r++)
        apply_signs16(v[r], a.signs + (row % a.sign_rows) * N + (warp * R + r) * 256 + lane * 8);
    }
    if constexpr (STAGES > 0) {
      const i64 next = row + gridDim.x;
      const bool asks = lane == 0 && warp % (WARPS / 2) == 0 && next < a.rows;
      if (asks) barrier_expect(bar, N);
      release_input();  // and the sums of the row before have been read
      if (asks) bulk_load(input + half * N, (const char*)a.x + next * a.x_stride * 2 + half * N, N, bar);
      __syncwarp();
    }
    float y[R][8], z[WARPS][PART];
    transform.run(y, v);
    butterflies<R, 8, 1, R>(y);
    across_warps(z, y, sums, a.scale);
    char* out = (char*)a.y + (row * a.y_stride + threadIdx.x * PART) * 2;
#pragma unroll
    for (int w = 0; w < WARPS; w++) store_part<D>(out + w * R * 512, z[w]);
    if constexpr (STAGES == 0) return;
  }
}

}  // namespace quantrot
