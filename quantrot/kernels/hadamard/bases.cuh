// Rows of K * 2^m with a dense base K, and any base as one axis of a tensor: see common.cuh.

namespace quantrot {

// --- Rows of K * C elements in 16 bits: a row in a thread block, C = 8 * TILES * WARPS a power of two ----------------
//
// The row is K x C in memory. Bulk copies bring its K pieces to shared memory, 16 bytes apart so that eight of them
// meet different banks, as soon as the previous row has left that buffer. Phase 1: a warp takes TILES groups of eight
// columns, H_K is the constant operand of the products (exact), and the bits of the group's number are butterflies in
// registers. The sums cross in float32. Phase 2: a lane takes PART neighbouring columns of all WARPS column ranges,
// which leaves only butterflies in registers (and one lane exchange where PART is 4, two where it is 2).

// Bit k of row(m) is set where H[k][m] is -1; defined by the program for a K that is no power of two.
template <int K>
struct Base {
  __device__ __forceinline__ static u32 row(u32 m) {
    u32 bits = 0;
    for (u32 k = 0; k < K; k++) bits |= (__popc(m & k) & 1) << k;
    return bits;
  }
};

template <int D, int K>
struct BaseOperand {  // H_K^T, K <= 32, padded to multiples of 16 (padded columns meet zeros, padded rows are dropped)
  static constexpr int STEPS = (K + 15) / 16;
  u32 a[STEPS][STEPS][4];

  __device__ __forceinline__ BaseOperand() {
    const u32 lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    const u32 one = D == BF16 ? 0x3F80u : 0x3C00u;
#pragma unroll
    for (int i = 0; i < STEPS; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const u32 row = Base<K>::row(16 * i + g + 8 * half);
#pragma unroll
        for (int j = 0; j < 2 * STEPS; j++) {
          const u32 bits = row >> (2 * q + 8 * j);
          a[i][j / 2][half + 2 * (j % 2)] = (one | ((bits & 1) << 15)) | ((one | ((bits & 2) << 14)) << 16);
        }
      }
  }
};

template <int K, int C, int STAGES>
struct BlockLayout {
  static constexpr int N = K * C;
  static constexpr int IN_ROW = C * 2 + 16;    // bytes of one of the K pieces of the input
  static constexpr int IN = (K * IN_ROW + 127) / 128 * 128;
  static constexpr int OUT_ROW = C * 4 + 32;   // and of the float32 sums
  static constexpr int HEAD = 128;             // barriers, then 16 bytes of zeros that stand for rows past K
  static constexpr int ZEROS = 64;
};

template <int D, int K, int TILES, int WARPS, int PART, int STAGES, bool SIGNS>
__device__ __forceinline__ void block_kernel(const Args& a) {
  constexpr int C = 8 * TILES * WARPS;
  constexpr int STEPS = (K + 15) / 16;
  using L = BlockLayout<K, C, STAGES>;
  static_assert(K <= 32 && TILES % 2 == 0 && (PART == 2 || PART == 4 || PART == 8), "sizes this kernel is made for");
  extern __shared__ __align__(128) unsigned char shared[];
  const u32 base = shared_address(shared);
  const u32 lane = threadIdx.x & 31, warp = warp_number(), g = lane >> 2, q = lane & 3;
  const u32 inputs = base + L::HEAD, sums = inputs + STAGES * L::IN;

  auto fetch = [&](i64 row, int stage) {  // by one whole warp
    const u32 bar = base + stage * 8;
    if (lane == 0) barrier_expect(bar, L::N * 2);
    __syncwarp();
    if (K <= 32 && lane < K) {
      bulk_load(inputs + stage * L::IN + lane * L::IN_ROW, (const char*)a.x + (row * a.x_stride + lane * C) * 2, C * 2,
                bar);
    }
  };

  if (warp == 0) {
    if (lane < STAGES) {
      barrier_init(base + lane * 8, 1);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    for (int s = 0; s < STAGES; s++) {
      const i64 row = blockIdx.x + (i64)s * gridDim.x;
      if (row < a.rows) fetch(row, s);
    }
  }
  if (threadIdx.x < 4) reinterpret_cast<u32*>(shared + L::ZEROS)[threadIdx.x] = 0;
  const BaseOperand<D, K> h;
  __syncthreads();

  // Each lane names one of 32 matrix rows of 16 bytes: row k of two column groups where K <= 16, else of one. Rows
  // past K are the zeros.
  const u32 k_lane = STEPS == 1 ? (lane & 15) : lane;
  const bool real = k_lane < K;
  const u32 from_lane = real ? k_lane * L::IN_ROW + warp * TILES * 16 + (STEPS == 1 ? lane >> 4 : 0) * 16 : 0;
  const u32 from_step = real ? 16 : 0;
  const u32 to = sums + g * L::OUT_ROW + warp * TILES * 32 + (q & 1) * 8, unit_lane = (q >> 1) * 16;

  int stage = 0;
  u32 parity = 0;
  for (i64 row = blockIdx.x; row < a.rows; row += gridDim.x) {
    barrier_wait(base + stage * 8, parity);
    const u32 input = inputs + stage * L::IN;
    if constexpr (SIGNS) {
      const signed char* signs = a.signs + (row % a.sign_rows) * L::N;
      for (int i = threadIdx.x; i < L::N / 8; i += WARPS * 32) {
        Vec* p = reinterpret_cast<Vec*>(shared + L::HEAD + stage * L::IN + i / (C / 8) * L::IN_ROW + i % (C / 8) * 16);
        Vec v = *p;
        apply_signs16(v, signs + i * 8);
        *p = v;
      }
      // The next bulk copy into this buffer is the other proxy's, and must come after these stores.
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncthreads();
    }

    constexpr int HALVES = (K + 7) / 8;  // groups of eight result rows that are not all padding
    float d[TILES][HALVES * 2];
    const u32 from = real ? input + from_lane : base + L::ZEROS;
#pragma unroll
    for (int t = 0; t < TILES; t += 3 - STEPS) {
      u32 f[4];
      load_matrices_transposed(f, from + t * from_step);
#pragma unroll
      for (int u = 0; u < 3 - STEPS; u++) {
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
          float o[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
          for (int j = 0; j < STEPS; j++)
            mma16<D>(o, h.a[i][j][0], h.a[i][j][1], h.a[i][j][2], h.a[i][j][3], f[2 * (j + u)], f[2 * (j + u) + 1]);
#pragma unroll
          for (int j = 0; j < 4 && 4 * i + j < 2 * HALVES; j++) d[t + u][4 * i + j] = o[j];
        }
      }
    }
    release_input();  // and the previous row's sums
    const i64 next = row + (i64)STAGES * gridDim.x;
    if (warp == 0 && next < a.rows) fetch(next, stage);
    butterflies<TILES, 2 * HALVES, 1, TILES>(d);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      // 16-byte units swap within pairs in every other 128 bytes, so that phase 2's reads meet all banks.
      const u32 unit = t * 32 + (unit_lane ^ (t & 4 ? 16 : 0));
#pragma unroll
      for (int i = 0; i < HALVES; i++) {
        if (i * 8 + 8 <= K || i * 8 + g < K)
          store_shared8(to + unit + i * 8 * L::OUT_ROW, d[t][2 * i], d[t][2 * i + 1]);
      }
    }
    __syncthreads();

    constexpr int LANES_A_ROW = TILES * 8 / PART;
    char* out = (char*)a.y + row * a.y_stride * 2;
#pragma unroll 1
    for (int first = warp * 32; first < K * LANES_A_ROW; first += WARPS * 32) {
      const u32 item = first + lane, k = item / LANES_A_ROW, part = item % LANES_A_ROW, tile = part * PART / 8;
      const bool mine = K * LANES_A_ROW % 32 == 0 || k < K;
      const u32 swap = tile & 4 ? 16 : 0;
      const u32 at = sums + (mine ? k : 0) * L::OUT_ROW + (PART == 8 ? part * 32 + swap : (part * PART * 4) ^ swap);
      float y[WARPS][PART];
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        if constexpr (PART == 2) {
          load_shared8(at + w * TILES * 32, y[w][0], y[w][1]);
        } else {
#pragma unroll
          for (int j = 0; j < PART; j += 4) {
            const float4 v = load_shared16(j ? (at + w * TILES * 32) ^ 16 : at + w * TILES * 32);
            y[w][j] = v.x, y[w][j + 1] = v.y, y[w][j + 2] = v.z, y[w][j + 3] = v.w;
          }
        }
        butterflies_within<PART, PART>(y[w]);
      }
      if constexpr (WARPS > 1) {
        butterflies<WARPS, PART, 1, WARPS / 2>(y);
        last_butterfly(y, a.scale);
      } else {
#pragma unroll
        for (int j = 0; j < PART; j++) y[0][j] *= a.scale;
      }
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
#pragma unroll
        for (int s = 1; s * PART < 8; s *= 2) {
          const float sign = lane & s ? -1.f : 1.f;
#pragma unroll
          for (int j = 0; j < PART; j++) y[w][j] = fmaf(y[w][j], sign, __shfl_xor_sync(0xFFFFFFFFu, y[w][j], s));
        }
        if (mine) store_part<D>(out + (k * C + w * TILES * 8 + part * PART) * 2, y[w]);
      }
    }
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// --- Rows of K * INNER * C elements in 16 bits with a dense base K: a row in a thread block --------------------------
//
// Signs of the K x K base come as bits, two instructions a register of the operand, used for WN column groups. With
// OVER a warp keeps all its sums, so that they can take the input's place in shared memory. INNER is the product of
// smaller bases, done there by additions; the power of two C is done in registers and lane exchanges on the way out.

// signs(i, j, lane): of the product of rows 16 i and columns 64 j, bit 4 s + r for step s and register r, and 16
// above it.
template <int K>
struct DenseBase;

// A base of INNER, as an addition chain over v[B] with constant signs.
template <int B>
struct SmallBase;

template <int K, int COLUMNS, int WARPS>
__device__ __forceinline__ void inner_bases(u32 data);

// Base B of the columns (hi, B, STRIDE), in place.
template <int B, int STRIDE, int K, int COLUMNS, int WARPS>
__device__ __forceinline__ void small_base(u32 data) {
  constexpr int OUT_ROW = COLUMNS * 4 + 32;
  for (int item = threadIdx.x; item < K * COLUMNS / B; item += WARPS * 32) {
    const int k = item / (COLUMNS / B), rest = item % (COLUMNS / B);
    const u32 row = data + k * OUT_ROW, first = rest / STRIDE * STRIDE * B + rest % STRIDE;
    float v[B], o[B];
#pragma unroll
    for (int i = 0; i < B; i++)
      load_shared4(row + swapped((first + i * STRIDE) / 4) + (first + i * STRIDE) % 4 * 4, v[i]);
    SmallBase<B>::run(o, v);
#pragma unroll
    for (int i = 0; i < B; i++)
      store_shared4(row + swapped((first + i * STRIDE) / 4) + (first + i * STRIDE) % 4 * 4, o[i]);
  }
  __syncthreads();
}

template <int D, int K, int INNER, int C, int WARPS, int WM, int WN, bool OVER, bool SIGNS>
__device__ __forceinline__ void dense_kernel(const Args& a) {
  constexpr int COLUMNS = INNER * C, STEPS = (K + 15) / 16, WORDS = (STEPS + 3) / 4;
  constexpr int IN_ROW = COLUMNS * 2 + 16, OUT_ROW = COLUMNS * 4 + 32, ZEROS = 128;
  constexpr int ACROSS = COLUMNS / 8 / WN, DOWN = (STEPS + WM - 1) / WM;
  static_assert(COLUMNS % (8 * WN) == 0 && WN % 2 == 0, "whole tasks");
  // Column groups of a task whose number is transformed while its sums are in registers, where they lie within one C.
  constexpr int TREE = (WN & (WN - 1)) == 0 && C % (8 * WN) == 0 ? WN : 1;
  extern __shared__ __align__(128) unsigned char shared[];
  const u32 zeros = shared_address(shared), input = zeros + ZEROS;
  const u32 data = OVER ? input : input + (K * IN_ROW + 127) / 128 * 128;  // of the float32 sums
  const u32 lane = threadIdx.x & 31, warp = warp_number(), g = lane >> 2, q = lane & 3;
  const i64 row = blockIdx.x;

  // Plain loads: bulk copies of as little as 64 bytes, one for each of 344 rows, took longer than the products.
  if (threadIdx.x == 0) store_shared16(zeros, 0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
  for (int i = threadIdx.x; i < K * COLUMNS / 8; i += WARPS * 32) {
    Vec v = load16((const char*)a.x + (row * a.x_stride + i * 8) * 2);
    if constexpr (SIGNS) apply_signs16(v, a.signs + (row % a.sign_rows) * K * COLUMNS + i * 8);
    store_shared16(input + i / (COLUMNS / 8) * IN_ROW + i % (COLUMNS / 8) * 16, __uint_as_float(v.w[0]),
                   __uint_as_float(v.w[1]), __uint_as_float(v.w[2]), __uint_as_float(v.w[3]));
  }
  __syncthreads();

  const u32 one = D == BF16 ? 0x3F803F80u : 0x3C003C00u;
  // A task is WM row tiles of WN column groups: down = id / ACROSS, across = id % ACROSS.
  auto products = [&](float (&d)[WM][WN][4], int id) {
    const int across = id % ACROSS, down = id / ACROSS;
#pragma unroll
    for (int i = 0; i < WM; i++)
#pragma unroll
      for (int n = 0; n < WN; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) d[i][n][j] = 0.f;
#pragma unroll 1
    for (int word = 0; word < WORDS; word++) {
      u32 bits[WM];
#pragma unroll
      for (int i = 0; i < WM; i++) bits[i] = DenseBase<K>::signs(min(down * WM + i, STEPS - 1), word, lane);
#pragma unroll
      for (int s = 0; s < 4; s++) {
        if (word * 4 + s >= STEPS) break;
        const u32 k = (word * 4 + s) * 16 + (lane & 15);
        const u32 from = k < K ? input + k * IN_ROW + (across * WN + (lane >> 4)) * 16 : zeros;
        u32 f[WN / 2][4];
#pragma unroll
        for (int n = 0; n < WN / 2; n++) load_matrices_transposed(f[n], k < K ? from + n * 32 : from);
#pragma unroll
        for (int i = 0; i < WM; i++) {
          u32 h[4];
#pragma unroll
          for (int r = 0; r < 4; r++) h[r] = ((bits[i] << (15 - 4 * s - r)) & 0x80008000u) | one;
#pragma unroll
          for (int n = 0; n < WN; n++)
            mma16<D>(d[i][n], h[0], h[1], h[2], h[3], f[n / 2][n % 2 * 2], f[n / 2][n % 2 * 2 + 1]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < WM; i++) butterflies<WN, 4, 1, TREE>(d[i]);
  };
  auto keep = [&](const float (&d)[WM][WN][4], int id) {
    const int across = id % ACROSS, down = id / ACROSS;
#pragma unroll
    for (int i = 0; i < WM; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int m = (down * WM + i) * 16 + half * 8 + g;
        if (m >= K) continue;
#pragma unroll
        for (int n = 0; n < WN; n++) {
          const u32 unit = 2 * (across * WN + n) + (q >> 1);
          store_shared8(data + m * OUT_ROW + swapped(unit) + (q & 1) * 8, d[i][n][2 * half], d[i][n][2 * half + 1]);
        }
      }
  };
  if constexpr (OVER) {
    constexpr int TASKS = (ACROSS * DOWN + WARPS - 1) / WARPS;
    float d[TASKS][WM][WN][4];
#pragma unroll
    for (int task = 0; task < TASKS; task++)
      if (warp + task * WARPS < ACROSS * DOWN) products(d[task], warp + task * WARPS);
    __syncthreads();
#pragma unroll
    for (int task = 0; task < TASKS; task++)
      if (warp + task * WARPS < ACROSS * DOWN) keep(d[task], warp + task * WARPS);
  } else {
    for (int id = warp; id < ACROSS * DOWN; id += WARPS) {
      float d[WM][WN][4];
      products(d, id);
      keep(d, id);
    }
  }
  __syncthreads();
  inner_bases<K, COLUMNS, WARPS>(data);  // defined by the program: small_base of each base of INNER

  char* out = (char*)a.y + row * a.y_stride * 2;
  for (int first = warp * 32; first < K * COLUMNS / 8; first += WARPS * 32) {
    const int item = first + lane, k = item / (COLUMNS / 8), part = item % (COLUMNS / 8);
    const bool mine = item < K * COLUMNS / 8;
    const u32 at = data + (mine ? k : 0) * OUT_ROW + swapped(2 * part);
    const float4 u = load_shared16(at), v = load_shared16(at ^ 16);
    float y[1][8] = {{u.x, u.y, u.z, u.w, v.x, v.y, v.z, v.w}};
    butterflies_within<8, C>(y[0]);
#pragma unroll
    for (int s = TREE; s * 8 < C; s *= 2) {
      const float sign = lane & s ? -1.f : 1.f;
#pragma unroll
      for (int j = 0; j < 8; j++) y[0][j] = fmaf(y[0][j], sign, __shfl_xor_sync(0xFFFFFFFFu, y[0][j], s));
    }
    if (mine) store16(out + item * 16, pack8<D>(y[0], a.scale));
  }
}

// --- Any base, one axis of a tensor, by additions: the fallback of sizes and dtypes without a kernel of their own ----

template <int D>
__device__ __forceinline__ float load_one(const void* p, i64 i) {
  if constexpr (D == FP32) {
    return static_cast<const float*>(p)[i];
  } else {
    float lo, hi;
    unpack<D>(static_cast<const unsigned short*>(p)[i], lo, hi);
    return lo;
  }
}

// x [rows, K, x_stride] -> y, one thread a column; Axis<K>::signs(k, w) has bit m where H[k][32 w + m] is -1. x is
// not y.
template <int K>
struct Axis;

template <int IN, int OUT, int K>
__device__ __forceinline__ void axis_kernel(const Args& a) {
  const i64 column = (i64)blockIdx.x * 256 + threadIdx.x, inner = a.x_stride;
  if (column >= a.rows * inner) return;
  const i64 first = column / inner * inner * K + column % inner;
  for (int m = 0; m < K; m += 16) {
    float sum[16];
#pragma unroll
    for (int j = 0; j < 16; j++) sum[j] = 0.f;
    for (int k = 0; k < K; k++) {
      const u32 v = __float_as_uint(load_one<IN>(a.x, first + k * inner)), bits = Axis<K>::signs(k, m / 32) >> (m & 16);
#pragma unroll
      for (int j = 0; j < 16; j++) sum[j] += __uint_as_float(v ^ (bits << (31 - j) & 0x80000000u));
    }
#pragma unroll
    for (int j = 0; j < 16; j++) {
      if (m + j >= K) break;
      const i64 to = first + (m + j) * inner;
      if constexpr (OUT == FP32) {
        static_cast<float*>(a.y)[to] = sum[j] * a.scale;
      } else {
        static_cast<unsigned short*>(a.y)[to] = (unsigned short)pack<OUT>(sum[j] * a.scale, 0.f);
      }
    }
  }
}

}  // namespace quantrot
