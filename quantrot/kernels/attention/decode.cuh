// FP8 attention of one query a sequence for sm_90a: bound by the reading of K and V, whose bytes go straight from memory
// to registers.
//
// A warp takes 64 tokens at a time, on its own: products with tokens as the rows and up to 8 (16) query heads of a key
// head as the columns, softmax, products with V's columns as the rows. A lane (g = lane / 4, q = lane % 4) loads 16 bytes
// of a row of K or of V^T; what the products sum over may be in any order, so those 16 bytes are four steps of a product
// as they lie. Probabilities, transposed by 8 x 8, go to the lanes that have their tokens of V where row g of eight of K's
// rows is token 16 (g / 2) + g % 2 (+ 2 for the next eight). e4m3 is exact in float16, whose products are the tensor
// cores' own for a warp.
//
// Warps take turns within a block's share of the tokens; their sums meet in shared memory, and the blocks' in global
// memory, where the last to finish adds them up, always in the same order.

namespace quantrot {

struct DecodeArgs {
  const unsigned char *q, *k, *v, *q_scale, *k_scale, *v_scale;
  const int* lengths;  // [batch], or null
  void* out;           // [batch, heads, D], 16 bits
  float *part, *stats;  // [batch * groups, splits, share, D] and [.., 2]: the largest score, the sum
  unsigned int* arrived;  // [batch * groups], zeros before and after
  i64 q_batch, q_head, k_batch, k_head, v_batch, v_head, v_row;  // bytes
  i64 qs_batch, qs_head, ks_batch, ks_head, vs_batch, vs_head;
  int heads, groups, keys, splits;
  float scale;  // of the scores, times log2(e)
};

constexpr int P_BITS = 8;  // probabilities are in e4m3 times 2^8

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000u); }

__device__ __forceinline__ Quad quad_at(const unsigned char* p) { return *(const Quad*)p; }

// What a warp has summed up, for heads 8 t + 2 q and the next.
template <int D, int TILES>
struct Sums {
  float top[TILES][2], total[TILES][2];  // the largest score, rounded up; the sum of powers in units of 2^-P
  float o[TILES][D / 16][4];  // columns 16 m + g of both heads, then columns 16 m + 8 + g: in units of `unit`
  int unit;
};

// 64 tokens from `start` on, of which those below `used` are seen. x: their scores, without scales.
template <int D, int TILES>
__device__ __forceinline__ void decode_softmax(Sums<D, TILES>& sums, u32 (&p)[TILES][8], const float (&x)[TILES][4][4],
                                               const float (&rows)[TILES][2], const Quad& k_bytes, const Quad& v_bytes,
                                               int start, int used) {
  const u32 g = lane_number() / 4;
  const int first = start + g / 2 * 16 + g % 2;
  int k_byte[8], v_byte[8], most = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    k_byte[i] = k_bytes.w[i / 2] >> (g % 2 * 8 + i % 2 * 16) & 255, v_byte[i] = v_bytes.w[i / 2] >> (g % 2 * 8 + i % 2 * 16) & 255;
    if (first + 2 * i < used && v_byte[i] != 255) most = max(most, v_byte[i]);
  }
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) most = max(most, (int)__shfl_xor_sync(0xFFFFFFFFu, (u32)most, lanes));
  const int unit = max(sums.unit, most);
  const float down = power_of(max(sums.unit - unit, -32) + 127);
  sums.unit = unit;
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    float y[8][2], shrink[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float largest = minus_infinity(), sum = 0.f;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float s = x[t][i / 2][i % 2 * 2 + h] * (rows[t][h] * power_of(k_byte[i]));
        y[i][h] = first + 2 * i < used ? s : minus_infinity();
        largest = fmaxf(largest, y[i][h]);
      }
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, lanes));
      const float now = fmaxf(sums.top[t][h], ceilf(largest)), point = now == minus_infinity() ? 0.f : now;
      shrink[h] = exp2_fast(sums.top[t][h] - point);
      sums.top[t][h] = now;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float power = exp2_fast(y[i][h] - (point - (float)P_BITS));
        sum += power;
        const float less = v_byte[i] == 255 ? power_of(255) : power_of(max(v_byte[i] - unit, -32) + 127);
        y[i][h] = first + 2 * i < used ? power * less : 0.f;
      }
      sums.total[t][h] = fmaf(sums.total[t][h], shrink[h], sum);
      shrink[h] *= down;
    }
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      u32 low, high;
      unpack_e4m3(to_e4m3(y[i][0], y[i][1], y[i + 1][0], y[i + 1][1]), low, high);
      p[t][i] = matrix_turned(low), p[t][i + 1] = matrix_turned(high);
    }
#pragma unroll
    for (int m = 0; m < D / 16; m++) {
#pragma unroll
      for (int e = 0; e < 4; e++) sums.o[t][m][e] *= shrink[e % 2];
    }
  }
}

// Shared memory: floats [WARPS][8 TILES][D], then [WARPS][8 TILES][2], then a word.
template <int D, int TILES, int WARPS>
struct DecodeShape {
  static constexpr int HEADS = 8 * TILES, STATS = WARPS * HEADS * D * 4, LAST = STATS + WARPS * HEADS * 8;
  static constexpr int SHARED = LAST + 16;
};

// What a part whose largest score is `top` counts.
__device__ __forceinline__ float weight_of(float top, float highest) {
  return exp2_fast(top - (highest == minus_infinity() ? 0.f : highest));
}

template <int D, int TILES, int WARPS, class Out>
__device__ __forceinline__ void decode(const DecodeArgs& args) {
  using Shape = DecodeShape<D, TILES, WARPS>;
  constexpr int PIECES = D / 64, THREADS = WARPS * 32;
  grid_wait();
  const u32 lane = lane_number(), g = lane / 4, q = lane % 4, warp = warp_number(), base = shared_memory();
  const int batch = blockIdx.y / args.groups, group = blockIdx.y % args.groups, share = args.heads / args.groups;
  const int used = args.lengths ? min(__ldg(args.lengths + batch), args.keys) : args.keys;
  const int steps = (used + 63) / 64, each = (steps + args.splits - 1) / args.splits;
  const int last = min(((int)blockIdx.x + 1) * each, steps);
  const unsigned char* k = args.k + batch * args.k_batch + group * args.k_head + (g / 2 * 16 + g % 2) * D + 16 * q;
  const unsigned char* v = args.v + batch * args.v_batch + group * args.v_head + g * args.v_row + 16 * q;
  const unsigned char* k_scale = args.k_scale + batch * args.ks_batch + group * args.ks_head + g / 2 * 16;
  const unsigned char* v_scale = args.v_scale + batch * args.vs_batch + group * args.vs_head + g / 2 * 16;
  Quad kx[8][PIECES] = {}, vx[D / 8], k_bytes, v_bytes;
  auto load_k = [&](int step) {
    const int start = step * 64, left = args.keys - start - (int)(g / 2 * 16 + g % 2);
    const unsigned char* from = k + (i64)start * D;
#pragma unroll
    for (int t = 0; t < 8; t++) {
#pragma unroll
      for (int c = 0; c < PIECES; c++)
        if (2 * t < left) kx[t][c] = quad_at(from + 2 * t * D + 64 * c);
    }
    // Rows of scales start at multiples of 16: past the last token there is the rest of sixteen.
    k_bytes = quad_at(k_scale + (start + (int)(g / 2 * 16) < args.keys ? start : 0));
  };
  auto load_v = [&](int step) {
    const int start = step * 64;
    const unsigned char* from = v + start;
#pragma unroll
    for (int n = 0; n < D / 8; n++, from += 8 * args.v_row) vx[n] = quad_at(from);
    v_bytes = quad_at(v_scale + (start + (int)(g / 2 * 16) < args.keys ? start : 0));
  };
  int step = blockIdx.x * each + warp;
  if (step < last) load_k(step), load_v(step);
  u32 b[TILES][PIECES * 4][2];  // queries, in float16
  Sums<D, TILES> sums;
  float rows[TILES][2];
  sums.unit = 0;
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int c = 0; c < PIECES; c++) {
      Quad x = {{0, 0, 0, 0}};
      if (8 * t + g < share)
        x = quad_at(args.q + batch * args.q_batch + (group * share + 8 * t + g) * args.q_head + 64 * c + 16 * q);
#pragma unroll
      for (int w = 0; w < 4; w++) unpack_e4m3(x.w[w], b[t][4 * c + w][0], b[t][4 * c + w][1]);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int head = 8 * t + 2 * q + h;
      rows[t][h] = 1.f, sums.top[t][h] = minus_infinity(), sums.total[t][h] = 0.f;
      if (head < share)
        rows[t][h] = args.scale * power_of(__ldg(args.q_scale + batch * args.qs_batch + (group * share + head) * args.qs_head));
    }
#pragma unroll
    for (int m = 0; m < D / 16; m++) {
#pragma unroll
      for (int e = 0; e < 4; e++) sums.o[t][m][e] = 0.f;
    }
  }
#pragma unroll 1
  for (; step < last; step += WARPS) {
    float x[TILES][4][4];
#pragma unroll
    for (int n = 0; n < 4; n++) {
#pragma unroll
      for (int t = 0; t < TILES; t++) {
#pragma unroll
        for (int e = 0; e < 4; e++) x[t][n][e] = 0.f;
      }
#pragma unroll
      for (int i = 0; i < PIECES * 4; i++) {
        u32 a[4];
        unpack_e4m3(kx[2 * n][i / 4].w[i % 4], a[0], a[2]);
        unpack_e4m3(kx[2 * n + 1][i / 4].w[i % 4], a[1], a[3]);
#pragma unroll
        for (int t = 0; t < TILES; t++) product_warp<Fp16>(x[t][n], a, b[t][i][0], b[t][i][1]);
      }
    }
    const Quad now = k_bytes;
    if (step + WARPS < last) load_k(step + WARPS);
    u32 p[TILES][8];
    decode_softmax<D, TILES>(sums, p, x, rows, now, v_bytes, step * 64, used);
#pragma unroll
    for (int m = 0; m < D / 16; m++) {
#pragma unroll
      for (int w = 0; w < 4; w++) {
        u32 a[4];
        unpack_e4m3(vx[2 * m].w[w], a[0], a[2]);
        unpack_e4m3(vx[2 * m + 1].w[w], a[1], a[3]);
#pragma unroll
        for (int t = 0; t < TILES; t++) product_warp<Fp16>(sums.o[t][m], a, p[t][2 * w], p[t][2 * w + 1]);
      }
    }
    if (step + WARPS < last) load_v(step + WARPS);
  }
  // The warps' sums.
  const float unit = power_of(sums.unit);
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const u32 head = 8 * t + 2 * q + h, to = base + (warp * Shape::HEADS + head) * D * 4;
#pragma unroll
      for (int m = 0; m < D / 8; m++) store_shared(to + (8 * m + g) * 4, sums.o[t][m / 2][m % 2 * 2 + h] * unit);
      float total = sums.total[t][h];
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) total += __shfl_xor_sync(0xFFFFFFFFu, total, lanes);
      if (g == 0) {
        store_shared(base + Shape::STATS + (warp * Shape::HEADS + head) * 8, sums.top[t][h]);
        store_shared(base + Shape::STATS + (warp * Shape::HEADS + head) * 8 + 4, total);
      }
    }
  }
  block_sync();
  float* stats = args.stats + (i64)blockIdx.y * args.splits * share * 2;
  float* part = args.part + (i64)blockIdx.y * args.splits * share * D;
  unsigned short* out = (unsigned short*)args.out + ((i64)batch * args.heads + group * share) * D;
  for (int at = threadIdx.x; at < share * D / 2; at += THREADS) {  // two columns of a head
    const int head = at / (D / 2);
    float highest = minus_infinity(), sum = 0.f, y[2] = {0.f, 0.f};
#pragma unroll
    for (int w = 0; w < WARPS; w++)
      highest = fmaxf(highest, load_shared(base + Shape::STATS + (w * Shape::HEADS + head) * 8));
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float2 stat = load_shared2(base + Shape::STATS + (w * Shape::HEADS + head) * 8);
      const float2 two = load_shared2(base + (w * Shape::HEADS * D + at * 2) * 4);
      const float weight = weight_of(stat.x, highest);
      sum = fmaf(stat.y, weight, sum), y[0] = fmaf(two.x, weight, y[0]), y[1] = fmaf(two.y, weight, y[1]);
    }
    if (args.splits == 1) {
      const float inverse = sum == 0.f ? 0.f : 1.f / sum;
      *(u32*)(out + at * 2) = Out::pack(y[0] * inverse, y[1] * inverse);
    } else {
      float* to = part + (i64)blockIdx.x * share * D + at * 2;
      to[0] = y[0], to[1] = y[1];
      if (at % (D / 2) == 0) {
        float* numbers = stats + ((i64)blockIdx.x * share + head) * 2;
        numbers[0] = highest, numbers[1] = sum;
      }
    }
  }
  if (args.splits == 1) return;
  global_fence();
  block_sync();
  if (threadIdx.x == 0) {
    const u32 before = atomicAdd(args.arrived + blockIdx.y, 1u);
    store_shared(base + Shape::LAST, (u32)(before == args.splits - 1));
  }
  block_sync();
  if (load_shared1(base + Shape::LAST) == 0) return;
  global_fence();
  // The blocks' sums, by the last of them: threads take turns over the parts of four columns of a head.
  const int outputs = share * D / 4, turns = max(THREADS / outputs, 1);
  auto write = [&](int at, float sum, const float (&y)[4]) {
    const float inverse = sum == 0.f ? 0.f : 1.f / sum;
    *(u64*)(out + at * 4) = Out::pack(y[0] * inverse, y[1] * inverse) | (u64)Out::pack(y[2] * inverse, y[3] * inverse) << 32;
  };
  for (int i = threadIdx.x; i < outputs * turns; i += THREADS) {
    const int at = i % outputs, head = at / (D / 4);
    float highest = minus_infinity(), sum = 0.f, y[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 8
    for (int s = i / outputs; s < args.splits; s += turns) highest = fmaxf(highest, fresh(stats + (s * share + head) * 2));
#pragma unroll 8
    for (int s = i / outputs; s < args.splits; s += turns) {
      const float* stat = stats + (s * share + head) * 2;
      const float4 x = fresh4(part + (i64)s * share * D + at * 4);
      const float weight = weight_of(fresh(stat), highest);
      sum = fmaf(fresh(stat + 1), weight, sum);
      y[0] = fmaf(x.x, weight, y[0]), y[1] = fmaf(x.y, weight, y[1]);
      y[2] = fmaf(x.z, weight, y[2]), y[3] = fmaf(x.w, weight, y[3]);
    }
    if (turns == 1) {
      write(at, sum, y);
    } else {
#pragma unroll
      for (int e = 0; e < 4; e++) store_shared(base + i * 24 + 4 * e, y[e]);
      store_shared(base + i * 24 + 16, highest), store_shared(base + i * 24 + 20, sum);
    }
  }
  if (threadIdx.x == 0) args.arrived[blockIdx.y] = 0;
  if (turns == 1) return;
  block_sync();
  for (int at = threadIdx.x; at < outputs; at += THREADS) {
    float highest = minus_infinity(), sum = 0.f, y[4] = {0.f, 0.f, 0.f, 0.f};
    for (int i = 0; i < turns; i++) highest = fmaxf(highest, load_shared(base + (i * outputs + at) * 24 + 16));
    for (int i = 0; i < turns; i++) {
      const u32 from = base + (i * outputs + at) * 24;
      const float weight = weight_of(load_shared(from + 16), highest);
      sum = fmaf(load_shared(from + 20), weight, sum);
#pragma unroll
      for (int e = 0; e < 4; e++) y[e] = fmaf(load_shared(from + 4 * e), weight, y[e]);
    }
    write(at, sum, y);
  }
}

}  // namespace quantrot
