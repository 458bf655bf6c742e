// Quantization in blocks of ROWS x COLUMNS with one scale, of 16-bit matrices (after gate.cuh).
//
// A block is shared by the CLUSTER thread blocks of a cluster, each of which keeps its rows in registers: small enough
// that several are resident and one loads while another stores. Their largest magnitudes meet in each other's shared
// memory, between two cluster barriers.
//
// Magnitudes are compared as integers, which order like the numbers and put NaN above infinity.
//
// A code is that of x / scale, rounded to float32 first. A scale has the significand of a 16-bit number over 448 or one of 8
// bits, so there are few: a test takes each by every bfloat16, and x times the reciprocal in two parts always has the same code.

namespace quantrot {

#ifdef QUANTROT_EMULATED
inline u32 larger_halves(u32 a, u32 b) { return std::max(a >> 16, b >> 16) << 16 | std::max(a & 0xFFFF, b & 0xFFFF); }
inline u32 zero_after(u32) { return 0; }
#else
__device__ __forceinline__ u32 larger_halves(u32 a, u32 b) {
  u32 r;
  asm("max.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// Zero, once `seen` is there.
__device__ __forceinline__ u32 zero_after(u32 seen) {
  u32 zero;
  asm volatile("{\n.reg .u32 ones;\npopc.b32 ones, %1;\nshr.u32 %0, ones, 6;\n}" : "=r"(zero) : "r"(seen));
  return zero;
}
#endif

struct BlockArgs {
  const void* x;
  void* q;  // contiguous
  float* scales;
  i64 x_stride, scale_row, scale_column;  // in elements
  u32 rows, columns;
};

// Eight elements over their scale, as codes.
template <int D>
__device__ __forceinline__ void quotients(u32 (&codes)[2], const Vec& v, const Reciprocal& by) {
  float q[8];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    unpack<D>(v.w[j], q[2 * j], q[2 * j + 1]);
    q[2 * j] = by.times(q[2 * j]), q[2 * j + 1] = by.times(q[2 * j + 1]);
  }
#pragma unroll
  for (int j = 0; j < 2; j++) codes[j] = codes4(q[4 * j], q[4 * j + 1], q[4 * j + 2], q[4 * j + 3]);
}

// APART: a unit's two words lie 16 bytes from each other.
template <int D, bool APART = false, int V>
__device__ __forceinline__ void store_quotients(const Vec (&v)[V], float scale, char* to, i64 step, int apart, int left) {
  const Reciprocal by(scale);
#pragma unroll
  for (int i = 0; i < V; i++) {
    u32 codes[2];
    quotients<D>(codes, v[i], by);
    if (i * apart >= left) continue;
    if constexpr (APART) {
      u32* const words = (u32*)(to + i * step);
      words[0] = codes[0], words[4] = codes[1];
    } else {
      store8(to + i * step, codes[0], codes[1]);
    }
  }
}

template <int D, int ROWS, int COLUMNS, int CLUSTER, int THREADS>
__device__ __forceinline__ void blocks_kernel(const BlockArgs& a) {
  constexpr int PART = ROWS / CLUSTER, UNITS = COLUMNS / 8, WARPS = THREADS / 32;  // units of eight elements
  constexpr int V = PART * UNITS / THREADS, APART = THREADS / UNITS;               // of a thread, and rows between them
  static_assert(V * APART == PART && V > 0 && UNITS * APART == THREADS, "whole rows of units");
  const u32 across = (a.columns + COLUMNS - 1) / COLUMNS, rank = CLUSTER > 1 ? cluster_rank() : 0;
  const u32 block = blockIdx.x / CLUSTER, down = block / across, right = block - down * across;
  const u32 row = down * ROWS + rank * PART + threadIdx.x / UNITS, column = right * COLUMNS + threadIdx.x % UNITS * 8;
  const int left = column < a.columns && row < a.rows ? min(a.rows - row, (u32)ROWS) : 0;  // rows, of this thread's on
  const char* from = (const char*)a.x + (row * a.x_stride + column) * 2;
  char* to = (char*)a.q + (i64)row * a.columns + column;
  const i64 from_step = a.x_stride * (APART * 2), to_step = (i64)a.columns * APART;

  grid_wait();
  Vec v[V];
#pragma unroll
  for (int i = 0; i < V; i++) {
    v[i] = Vec{{0, 0, 0, 0}};
    if (i * APART < left) v[i] = load16(from + i * from_step);
  }
  if constexpr (CLUSTER > 1) cluster_start();  // the others have begun: their memory may be written
  u32 most = 0;
#pragma unroll
  for (int i = 0; i < V; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) most = larger_halves(most, v[i].w[j] & 0x7FFF7FFFu);
  }
  most = largest_of_warp(most >> 16 > (most & 0xFFFF) ? most >> 16 : most & 0xFFFF);
  const u32 maxima = shared_memory(), lane = lane_number();
  const u32 own = maxima + (rank * WARPS + warp_number()) * 4;
  if constexpr (CLUSTER > 1) {
    if (lane < CLUSTER) store_cluster(in_block(own, lane), most);
    cluster_sync();
  } else {
    if (lane == 0) store_shared(own, most);
    block_sync();
  }
  most = 0;
  for (u32 i = lane; i < CLUSTER * WARPS; i += 32) most = max(most, __float_as_uint(load_shared(maxima + i * 4)));
  most = largest_of_warp(most);
  float amax, none;
  unpack<D>(most, amax, none);
  const float scale = scale_of(amax);
  if (rank == 0 && threadIdx.x == 0) a.scales[down * a.scale_row + right * a.scale_column] = scale;
  store_quotients<D>(v, scale, to, to_step, APART, left);
}

// --- Whole rows --------------------------------------------------------------------------------------------------------

// A row a thread block, V units of eight elements a thread. ARRANGED: the words of each 128 columns as mxfp4/batch.cuh reads them,
// word w of 32 columns' number q at 4 w + q; that kernel, which waits for this one's end, may start at once and ask for its weight.
template <int D, int V, int THREADS, bool ARRANGED>
__device__ __forceinline__ void rows_kernel(const BlockArgs& a) {
  constexpr int WARPS = THREADS / 32, STEP = THREADS * 8;
  const u32 column = threadIdx.x * 8;
  const int left = column < a.columns ? a.columns - column : 0;
  const char* from = (const char*)a.x + (blockIdx.x * a.x_stride + column) * 2;
  if constexpr (ARRANGED) launch_dependents();
  grid_wait();
  Vec v[V];
#pragma unroll
  for (int i = 0; i < V; i++) {
    v[i] = Vec{{0, 0, 0, 0}};
    if (i * STEP < left) v[i] = load16(from + i * STEP * 2);
  }
  u32 most = 0;
#pragma unroll
  for (int i = 0; i < V; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) most = larger_halves(most, v[i].w[j] & 0x7FFF7FFFu);
  }
  most = largest_of_warp(most >> 16 > (most & 0xFFFF) ? most >> 16 : most & 0xFFFF);
  if constexpr (WARPS > 1) {
    const u32 maxima = shared_memory(), lane = lane_number(), own = maxima + warp_number() * 4;
    if (lane == 0) store_shared(own, most);
    block_sync();
    most = largest_of_warp(lane < WARPS ? __float_as_uint(load_shared(maxima + lane * 4)) : 0);
  }
  float amax, none;
  unpack<D>(most, amax, none);
  const float scale = scale_of(amax);
  if (threadIdx.x == 0) a.scales[blockIdx.x * a.scale_row] = scale;
  const u32 place = ARRANGED ? column / 128 * 128 + column / 32 % 4 * 4 + column % 32 * 4 : column;
  char* const to = (char*)a.q + (i64)blockIdx.x * a.columns + place;
  store_quotients<D, ARRANGED>(v, scale, to, STEP, STEP, left);
}

// --- 1 x 128 ---------------------------------------------------------------------------------------------------------
//
// A warp has 256 neighbouring columns, two groups, of V rows (a power of two up to 16), a thread block's warps lie side by
// side. The lanes of a group divide its V scales among them, so that neighbouring rows' scales are written together.

// The largest of W numbers of 16 lanes each: lane i gets that of number group_of<W, 16>.
template <int W, int S = 1>
__device__ __forceinline__ u32 largest_of_group(const u32 (&most)[W]) {
  if constexpr (W == 1) {
    u32 a = most[0];
#pragma unroll
    for (int s = S; s < 16; s *= 2) a = max(a, __shfl_xor_sync(0xFFFFFFFFu, a, s));
    return a;
  } else {
    const bool upper = threadIdx.x & S;
    u32 half[W / 2];
#pragma unroll
    for (int j = 0; j < W / 2; j++) {
      const u32 other = __shfl_xor_sync(0xFFFFFFFFu, upper ? most[j] : most[j + W / 2], S);
      half[j] = max(upper ? most[j + W / 2] : most[j], other);
    }
    return largest_of_group<W / 2, 2 * S>(half);
  }
}

// Eight elements each of V groups -> their scales, own group's (`group_of<V, 16>`) in every lane, and their codes.
template <int D, int V, class Scaled>
__device__ __forceinline__ void group_codes(u32 (&codes)[V][2], const Vec (&v)[V], const Scaled& scaled) {
  u32 most[V];
#pragma unroll
  for (int i = 0; i < V; i++) {
    u32 m = v[i].w[0] & 0x7FFF7FFFu;
#pragma unroll
    for (int j = 1; j < 4; j++) m = larger_halves(m, v[i].w[j] & 0x7FFF7FFFu);
    most[i] = max(m >> 16, m & 0xFFFF);
  }
  float amax, none;
  unpack<D>(largest_of_group(most), amax, none);
  const float scale = scale_of(amax);
  scaled(scale);
  const Reciprocal own(scale);
#pragma unroll
  for (int i = 0; i < V; i++) {
    const Reciprocal by(from_group<V, 16>(own.high, i), from_group<V, 16>(own.low, i));
    quotients<D>(codes[i], v[i], by);
  }
}

// Holds arithmetic on v back until all of v and w is there: the compiler would start on the first of it, and ask for the rest
// in between.
template <int V, int W>
__device__ __forceinline__ void all_loaded(Vec (&v)[V], const Vec (&w)[W]) {
  u32 seen = 0;
#pragma unroll
  for (int i = 0; i < V; i++) seen |= v[i].w[0];
#pragma unroll
  for (int i = 0; i < W; i++) seen |= w[i].w[0];
  const u32 zero = zero_after(seen);
#pragma unroll
  for (int i = 0; i < V * 4; i++) v[i / 4].w[i % 4] ^= zero;
}

// GATED: x has 2 * columns columns, gate and up, and gated(gate, up) is quantized. The first WARM
// thread blocks ask L2 for their rows (of gate) while the kernel before this one may still run.
template <int D, int V, int WARPS, bool GATED, int WARM>
__device__ __forceinline__ void groups_kernel(const BlockArgs& a) {
  const u32 across = (a.columns + WARPS * 256 - 1) / (WARPS * 256), lane = lane_number();
  const u32 down = blockIdx.x / across, right = blockIdx.x - down * across;
  const u32 row = down * V, column = (right * WARPS + warp_number()) * 256 + lane * 8;
  const int rows = min(a.rows - row, (u32)V), left = column < a.columns ? rows : 0;
  const char* from = (const char*)a.x + (row * a.x_stride + column) * 2;
  char* to = (char*)a.q + (i64)row * a.columns + column;

  if constexpr (V == 1) launch_dependents();  // few rows, of which a product may follow that has weights to ask for
  if ((int)blockIdx.x < WARM && lane % 8 == 0) {
#pragma unroll
    for (int i = 0; i < V; i++)
      if (i < left) warm_line(from + i * a.x_stride * 2);
  }
  grid_wait();
  Vec v[V];
#pragma unroll
  for (int i = 0; i < V; i++) {
    v[i] = Vec{{0, 0, 0, 0}};
    if (i < left) v[i] = load16(from + i * a.x_stride * 2);
  }
  if constexpr (GATED) {
    Vec up[V];
#pragma unroll
    for (int i = 0; i < V; i++) {
      up[i] = Vec{{0, 0, 0, 0}};
      if (i < left) up[i] = load16(from + (i * a.x_stride + a.columns) * 2);
    }
    all_loaded(v, up);
#pragma unroll
    for (int i = 0; i < V; i++) v[i] = gated<D>(v[i], up[i]);
  }
  u32 codes[V][2];
  group_codes<D>(codes, v, [&](float scale) {
    const u32 own = group_of<V, 16>();
    if (lane % 16 < V && (int)own < rows && column / 128 * 128 < a.columns)
      a.scales[(row + own) * a.scale_row + column / 128 * a.scale_column] = scale;
  });
#pragma unroll
  for (int i = 0; i < V; i++)
    if (i < left) store8(to + (i64)i * a.columns, codes[i][0], codes[i][1]);
}

// --- 1 x 128 behind RMSNorm ------------------------------------------------------------------------------------------
//
// Each row by a thread block, V units of eight elements a thread. x / sqrt(mean(x^2) + epsilon), rounded, times the norm's
// weight, rounded, is quantized: the bits of linear.cuh, which does the same for one token. MANY: a block takes rows in turns,
// the next one on its way, and x may be x + added, rounded, which is kept.

struct NormArgs {
  const void* weight;  // [columns]
  const void* added;   // as x, which then is contiguous, or null
  void* total;         // x + added
  float epsilon;
  int settled;         // whether no kernel that may still run writes the weight
};

template <int D>
__device__ __forceinline__ float square_sum(const Vec& v) {
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    float a, b;
    unpack<D>(v.w[j], a, b);
    sum = fmaf(b, b, fmaf(a, a, sum));
  }
  return sum;
}

// x * factor, rounded to 16 bits, times weight, rounded.
template <int D>
__device__ __forceinline__ Vec normed(const Vec& x, float factor, const Vec& weight) {
  Vec y;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    float a, b, c, d;
    unpack<D>(x.w[j], a, b);
    unpack<D>(weight.w[j], c, d);
    unpack<D>(pack<D>(a * factor, b * factor), a, b);
    y.w[j] = pack<D>(a * c, b * d);
  }
  return y;
}

template <int D>
__device__ __forceinline__ Vec sum_of(const Vec& x, const Vec& y) {
  Vec z;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    float a, b, c, d;
    unpack<D>(x.w[j], a, b);
    unpack<D>(y.w[j], c, d);
    z.w[j] = pack<D>(a + c, b + d);
  }
  return z;
}

template <int D, int V, int THREADS, bool MANY>
__device__ __forceinline__ void normed_kernel(const BlockArgs& a, const NormArgs& by) {
  constexpr int STEP = THREADS * 8;
  const u32 column = threadIdx.x * 8, lane = lane_number(), groups = V * THREADS / 16;
  const int left = column < a.columns ? a.columns - column : 0;
  launch_dependents();
  if (!by.settled) grid_wait();
  Vec weight[V], coming[V], added[V];
#pragma unroll
  for (int i = 0; i < V; i++) {
    weight[i] = Vec{{0, 0, 0, 0}};
    if (i * STEP < left) weight[i] = load16((const char*)by.weight + (i64)(column + i * STEP) * 2);
  }
  auto fetch = [&](u32 row) {
#pragma unroll
    for (int i = 0; i < V; i++) {
      coming[i] = Vec{{0, 0, 0, 0}};
      if (row >= a.rows || i * STEP >= left) continue;
      const i64 at = row * a.x_stride + column + i * STEP;
      coming[i] = load16((const char*)a.x + at * 2);
      if (MANY && by.added) added[i] = load16((const char*)by.added + at * 2);
    }
  };
  grid_wait();
  fetch(blockIdx.x);
  const u32 sums = shared_memory();                   // of two rows in turn
  u32 row = blockIdx.x, odd = 0;
  do {
    const i64 at = (i64)row * a.columns + column;
    Vec v[V];
#pragma unroll
    for (int i = 0; i < V; i++) {
      v[i] = coming[i];
      if (MANY && by.added && i * STEP < left) {
        v[i] = sum_of<D>(v[i], added[i]);
        store16((char*)by.total + (at + i * STEP) * 2, v[i]);
      }
    }
    if constexpr (MANY) fetch(row + gridDim.x);
#pragma unroll
    for (int i = 0; i < V; i++) {
      const float sum = sum_of_half(square_sum<D>(v[i]));
      if (lane % 16 == 0) store_shared(sums + (odd * groups + (column + i * STEP) / 128) * 4, sum);
    }
    block_sync();
    const float factor = norm_factor(sums + odd * groups * 4, (a.columns + 127) / 128, 4, a.columns, by.epsilon);
#pragma unroll
    for (int i = 0; i < V; i++) v[i] = normed<D>(v[i], factor, weight[i]);
    u32 codes[V][2];
    group_codes<D>(codes, v, [&](float scale) {
      const u32 own = column / 128 * 128 + group_of<V, 16>() * STEP;
      if (lane % 16 < V && own < a.columns) a.scales[row * a.scale_row + own / 128 * a.scale_column] = scale;
    });
#pragma unroll
    for (int i = 0; i < V; i++)
      if (i * STEP < left) store8((char*)a.q + at + i * STEP, codes[i][0], codes[i][1]);
    odd ^= 1;
  } while (MANY && (row += gridDim.x) < a.rows);
}

}  // namespace quantrot
