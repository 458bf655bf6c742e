// Parts of an attention that were computed apart, added up: each is sums of values, the largest score that they are counted
// from and the sum of their probabilities.
//
// Blocks that a key head is dealt out to leave theirs in global memory, and the block of the head that was the last to start
// adds them up, always in the same order. They meet at the start, when all wait for their tiles: each makes its place zeros and
// counts itself, so that the last one knows that all places are, and later that whatever is not 0 has come. (Counted at the
// end, when all has been written: a fence and an atomic more in the way of the next kernel.) No block waits for one that may
// not have started, so there may be more of them than run at once.

namespace quantrot {

// What blocks leave for the last one is never the bits of 0, which stand for what is not there yet.
__device__ __forceinline__ float no_zero(float x) { return x == 0.f ? -0.f : x; }
__device__ __forceinline__ u32 least_bits(float a, float b) { return min(__float_as_uint(a), __float_as_uint(b)); }

// What a part whose largest score is `top` counts.
__device__ __forceinline__ float weight_of(float top, float highest) {
  return exp2_fast(top - (highest == minus_infinity() ? 0.f : highest));
}

// y / sum, zeros where nothing was seen.
template <class Out>
__device__ __forceinline__ void write_quad(unsigned short* out, const float (&y)[4], float sum) {
  const float inverse = sum == 0.f ? 0.f : 1.f / sum;
  *(u64*)out = Out::pack(y[0] * inverse, y[1] * inverse) | (u64)Out::pack(y[2] * inverse, y[3] * inverse) << 32;
}

// The sums that `count` blocks leave of a head's queries, [count][SHARE][D + 4] with the largest score and the probabilities'
// sum at D, added up by THREADS threads: they take turns over the blocks, four columns of a query each. base: room for six
// numbers of each thread.
template <int D, int SHARE, int THREADS, class Out>
__device__ __forceinline__ void add_parts(const float* parts, int count, unsigned short* out, u32 base) {
  constexpr int QUADS = SHARE * D / 4, TURNS = QUADS < THREADS ? THREADS / QUADS : 1, BATCH = 8, ROW = D + 4;
  const u32 turn = threadIdx.x / QUADS;
#pragma unroll 1
  for (int at = threadIdx.x % QUADS; at < QUADS && turn < TURNS; at += THREADS) {
    const float* row = parts + at * 4 / D * ROW;
    float highest = minus_infinity(), sum = 0.f, y[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
    for (int first = turn; first < count; first += TURNS * BATCH) {
      float4 x[BATCH];
      float2 stat[BATCH];  // the largest score, the probabilities' sum
      float high = highest;
      u32 least;  // of their bits
      do {
        least = ~0u;
#pragma unroll
        for (int n = 0; n < BATCH; n++) {
          const float* from = row + (i64)min(first + n * TURNS, count - 1) * SHARE * ROW;
          x[n] = load_fresh4(from + at * 4 % D), stat[n] = load_fresh2(from + D);
        }
#pragma unroll
        for (int n = 0; n < BATCH; n++)
          least = min(least, min(min(least_bits(x[n].x, x[n].y), least_bits(x[n].z, x[n].w)), least_bits(stat[n].x, stat[n].y)));
      } while (least == 0);
#pragma unroll
      for (int n = 0; n < BATCH; n++) {
        if (first + n * TURNS >= count) stat[n].x = minus_infinity();
        high = fmaxf(high, stat[n].x);
      }
      const float shrink = weight_of(highest, high);
      highest = high, sum *= shrink;
#pragma unroll
      for (int e = 0; e < 4; e++) y[e] *= shrink;
#pragma unroll
      for (int n = 0; n < BATCH; n++) {
        const float weight = weight_of(stat[n].x, highest);
        sum = fmaf(stat[n].y, weight, sum);
        y[0] = fmaf(x[n].x, weight, y[0]), y[1] = fmaf(x[n].y, weight, y[1]);
        y[2] = fmaf(x[n].z, weight, y[2]), y[3] = fmaf(x[n].w, weight, y[3]);
      }
    }
    if constexpr (TURNS > 1) {
      const u32 to = base + threadIdx.x * 24;
      store_shared(to, highest), store_shared(to + 4, sum);
#pragma unroll
      for (int e = 0; e < 4; e++) store_shared(to + 8 + 4 * e, y[e]);
    } else {
      write_quad<Out>(out + at * 4, y, sum);
    }
  }
  if constexpr (TURNS > 1) {
    named_sync(1, THREADS);
    if (threadIdx.x >= QUADS) return;
    float highest = minus_infinity(), sum = 0.f, y[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int n = 0; n < TURNS; n++) highest = fmaxf(highest, load_shared(base + (n * QUADS + threadIdx.x) * 24));
#pragma unroll
    for (int n = 0; n < TURNS; n++) {
      const u32 from = base + (n * QUADS + threadIdx.x) * 24;
      const float weight = weight_of(load_shared(from), highest);
      sum = fmaf(load_shared(from + 4), weight, sum);
#pragma unroll
      for (int e = 0; e < 4; e++) y[e] = fmaf(load_shared(from + 8 + 4 * e), weight, y[e]);
    }
    write_quad<Out>(out + threadIdx.x * 4, y, sum);
  }
}

}  // namespace quantrot
