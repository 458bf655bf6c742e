// Rows whose length is a power of two, of any dtype: additions in registers, lane exchanges and, of long rows, shared memory.
//
// R vectors of 16 bytes a lane; a row lies in neighbouring lanes of one vector (N <= 32 * E) or also in R, or in SHARE warps.

namespace quantrot {

// Where vector r of lane i's lies in shared memory: what a warp reads or writes at a time meets all banks.
__device__ __forceinline__ u32 turned_at(u32 i, u32 r) {
  return r * 512 + (i & 24) * 16 + ((i ^ (i >> 3 & 1) ^ r) & 7) * 16;
}

// The five bits of the column number that are the lane's number, of R vectors of four floats: a lane takes the same float of
// all lanes' vectors r, adds, and puts the sums back where they were. A lane exchange is one instruction an element and bit,
// of which a multiprocessor takes one a clock: 32768 0.78 of a copy with them, 0.87 so.
template <int R>
__device__ __forceinline__ void across_lanes(const float (&y)[R][4], u32 sums) {
  static_assert(R % 8 == 0, "32 lanes take one float each of eight vectors");
  const u32 lane = threadIdx.x & 31;
#pragma unroll
  for (int r = 0; r < R; r++) store_shared16(sums + turned_at(lane, r), y[r][0], y[r][1], y[r][2], y[r][3]);
  __syncthreads();  // a warp's own would do, but the assembler drops a __syncwarp of lanes that have not diverged: racecheck
                    // then sees none
#pragma unroll
  for (int r = 0; r < R; r += 8) {
    const u32 from = sums + r * 512 + lane % 4 * 4;
    float v[32];
#pragma unroll
    for (int i = 0; i < 32; i++) load_shared4(from + turned_at(i, lane / 4), v[i]);
    butterflies_within<32, 32>(v);
#pragma unroll
    for (int i = 0; i < 32; i++) store_shared4(from + turned_at(i, lane / 4), v[i]);
  }
}

// LATER: a block asks L2 for the row of the block so many further on, once its own has come.
template <int D, int N, int R, int WARPS, int SHARE, int LATER, bool SIGNS>
__device__ __forceinline__ void lanes_kernel(const Args& a) {
  constexpr int E = D == FP32 ? 4 : 8;         // elements of a vector
  constexpr int IN_R = SHARE > 1 ? R : N > 32 * E ? N / (32 * E) : 1;  // vectors of a row in one lane
  static_assert(SHARE == 1 ? IN_R <= R : SHARE == WARPS && N == 32 * E * R * SHARE, "how rows are divided");
  constexpr int BYTES = D == FP32 ? 4 : 2;
  constexpr bool TURNED = D == FP32 && SHARE > 1 && R >= 8;  // lane bits through shared memory, after the vectors'
  const u32 lane = threadIdx.x & 31;
  const u64 unit = (u64)blockIdx.x * WARPS + (threadIdx.x >> 5);
  const u64 first = unit * (32 * E * R);       // of the flat index row * N + column
  const u64 total = (u64)a.rows * N;
  float y[R][E];
  Vec v[R];
#pragma unroll
  for (int r = 0; r < R; r++) {
    const u64 flat = first + (r * 32 + lane) * E;
    v[r] = Vec{{0, 0, 0, 0}};
    if constexpr (SHARE > 1) {                   // a row in a thread block
      v[r] = load16((const char*)a.x + (blockIdx.x * a.x_stride + threadIdx.x / 32 * (32 * E * R) + lane * E) * BYTES + r * 512);
    } else if (flat < total) {
      v[r] = load16((const char*)a.x + (flat / N * a.x_stride + flat % N) * BYTES);
    }
  }
#pragma unroll
  for (int r = 0; r < R; r++) {
    if constexpr (D == FP32) {
#pragma unroll
      for (int j = 0; j < 4; j++) y[r][j] = __uint_as_float(v[r].w[j]);
    } else {
#pragma unroll
      for (int j = 0; j < 4; j++) unpack<D>(v[r].w[j], y[r][2 * j], y[r][2 * j + 1]);
    }
    if constexpr (SIGNS) {
      const u64 flat = first + (r * 32 + lane) * E;
      if (flat < total) {
#pragma unroll
        for (int j = 0; j < E; j++)
          y[r][j] = a.signs[(flat + j) / N % a.sign_rows * N + (flat + j) % N] < 0 ? -y[r][j] : y[r][j];
      }
    }
    butterflies_within<E, N>(y[r]);
#pragma unroll
    for (int s = 1; !TURNED && s < 32 && s * E < N; s *= 2) {
      const float sign = lane & s ? -1.f : 1.f;
#pragma unroll
      for (int j = 0; j < E; j++) {
        const float other = __shfl_xor_sync(0xFFFFFFFFu, y[r][j], s);
        y[r][j] = fmaf(y[r][j], sign, other);
      }
    }
  }
  butterflies<R, E, 1, IN_R>(y);
  if constexpr (SHARE > 1) {
    constexpr int PART = E * R / WARPS;
    const u32 sums = shared_memory();
    float z[WARPS][PART];
    if constexpr (TURNED) {
      across_lanes<R>(y, sums + (threadIdx.x >> 5) * R * 512);
      if constexpr (LATER > 0) warm_rows<N * 4, 1>(a.x, a.rows, a.x_stride * 4, (i64)blockIdx.x + LATER);
      __syncthreads();
#pragma unroll
      for (int w = 0; w < WARPS; w++)
#pragma unroll
        for (int j = 0; j < PART; j += 4) {
          const u32 vector = j / 4 * 32 * WARPS + threadIdx.x;
          const float4 f = load_shared16(sums + w * R * 512 + turned_at(vector % 32, vector / 32));
          z[w][j] = f.x, z[w][j + 1] = f.y, z[w][j + 2] = f.z, z[w][j + 3] = f.w;
        }
      butterflies<WARPS, PART, 1, WARPS / 2>(z);
      last_butterfly(z, a.scale);
    } else {
      across_warps(z, y, sums, a.scale);
    }
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const int column = w * R * 32 * E + threadIdx.x * (D == FP32 ? 4 : PART);
      store_part<D, 512 * WARPS>((char*)a.y + (blockIdx.x * a.y_stride + column) * BYTES, z[w]);
    }
    return;
  }
#pragma unroll
  for (int r = 0; r < R; r++) {
    const u64 flat = first + (r * 32 + lane) * E;
    Vec out;
    if constexpr (D == FP32) {
#pragma unroll
      for (int j = 0; j < 4; j++) out.w[j] = __float_as_uint(y[r][j] * a.scale);
    } else {
      out = pack8<D>(y[r], a.scale);
    }
    if (flat < total) store16((char*)a.y + (flat / N * a.y_stride + flat % N) * BYTES, out);
  }
}

}  // namespace quantrot
