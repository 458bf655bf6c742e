// The softmax of FP8 attention of many queries (prefill.cuh): from the scores of a tile of 128 keys to e4m3 probabilities,
// with the running maximum and sum of a row.

namespace quantrot {

// A score is a float32, or an integer in the last bits of 1.5 * 2^23, where those below 2^22 have room (128 codes of 127
// squared are 2^21): the sums of products start there (at `from` in shared memory, four of it), so that they are float32s
// that are BIAS larger, without a conversion.
template <class Sum>
struct Score;
template <>
struct Score<float> {
  static constexpr float BIAS = 0.f;
  __device__ __forceinline__ static float hidden() { return minus_infinity(); }  // of a key out of sight
  __device__ __forceinline__ static float biased(float x) { return x; }
  __device__ __forceinline__ static float larger(float x, float y) { return fmaxf(x, y); }
  __device__ __forceinline__ static void start(float (&)[64], u32) {}
  // Else the compiler keeps a score until the next product writes there.
  __device__ __forceinline__ static void forget(float& score, float x) { score = x; }
};
template <>
struct Score<int> {
  static constexpr float BIAS = 12582912.f;
  __device__ __forceinline__ static int hidden() { return (int)0xFF800000u; }
  __device__ __forceinline__ static float biased(int x) { return __int_as_float(x); }
  __device__ __forceinline__ static int larger(int x, int y) { return max(x, y); }
  __device__ __forceinline__ static void start(int (&s)[64], u32 from) {
#pragma unroll
    for (int i = 0; i < 64; i += 4) load_shared4(from, s[i], s[i + 1], s[i + 2], s[i + 3]);
  }
  __device__ __forceinline__ static void forget(int&, float) {}
};

// What a thread keeps of its two rows while it walks the keys. SHORT: head_dim 64, where edges are compared with constants
// (938 instructions in the loop for 1078).
//
// A row's probabilities are added up by the tensor cores: a product of their codes with ones (`start_values`) in place of
// 62 additions a thread. Codes have V's scale in them, so where that is more than 2^CLOSE below the unit, and they could
// vanish, the codes that they would have without it are added one by one. What few tiles have waits in shared memory
// (`own`): a thread at head_dim 64 has no registers left.
template <class Sum, bool SHORT>
struct Softmax {
  using Of = Score<Sum>;
  static constexpr int CLOSE = 2;
  float top[2], total[2];  // the running maximum, and the sum in units of 2^-P, but for what is on its way
  float rows[2];           // of a score, times K's scale: bits
  int limit[2];            // keys the row sees: those below
  int unit;                // the byte of the scale in which the sums of products are
  float kept[2];           // after `step`: what `total` and the sums of products must be multiplied by
  float more;              // and what the sum of the tile's codes: a magnitude, 0 where `own` has it; negative: unit rose

  // The largest of a row's 32 scores in each of four lanes, in all of them.
  __device__ __forceinline__ static Sum largest_of(const Sum (&s)[64], int r) {
    Sum m[4] = {s[2 * r], s[2 * r + 1], s[2 * r + 4], s[2 * r + 5]};
#pragma unroll
    for (int j = 2; j < 16; j++) {
      m[j % 2 * 2] = Of::larger(m[j % 2 * 2], s[4 * j + 2 * r]);
      m[j % 2 * 2 + 1] = Of::larger(m[j % 2 * 2 + 1], s[4 * j + 2 * r + 1]);
    }
    Sum largest = Of::larger(Of::larger(m[0], m[1]), Of::larger(m[2], m[3]));
    largest = Of::larger(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
    return Of::larger(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2));
  }

  // Scores s of the tile of keys from `start` -> probabilities times 2^P and V's scale over the unit, as left operands.
  // first: the tile's scale becomes the unit.
  template <bool EDGE>
  __device__ __forceinline__ void step(u32 (&p)[4][4], Sum (&s)[64], int start, float k_scale, int v_byte, u32 sums,
                                       bool first) {
    const int next = v_byte == 255 ? unit : max(unit, v_byte), below = min(next - v_byte, 32);
    const bool rises = next != unit;
    if (rises) store_shared(own(sums) + 8, power_of(max(unit - next, -32) + 127));
    unit = next;
    // It is the same in all lanes; so said, it takes fewer registers.
    if (first || __builtin_expect(!__any_sync(0xFFFFFFFFu, below > CLOSE), true)) {
      encode<EDGE, false>(p, s, start, k_scale, v_byte, below, sums);
      more = v_byte == 255 ? 1.f : power_of(127 + below);
    } else {
      encode<EDGE, true>(p, s, start, k_scale, v_byte, below, sums);
      more = 0.f;
    }
    if (rises) more = -more;
  }

  // This thread's place in shared memory: a tile's sums of two rows, and what a rise of the unit takes from the sums of
  // products. Not the compiler's constant: that would take a register through the loop.
  __device__ __forceinline__ static u32 own(u32 sums) {
    u32 thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    return sums + thread * 16;
  }

  // ADDS: their sums -> `own(sums)`.
  template <bool EDGE, bool ADDS>
  __device__ __forceinline__ void encode(u32 (&p)[4][4], Sum (&s)[64], int start, float k_scale, int v_byte, int below,
                                         u32 sums) {
    if constexpr (EDGE) {
      const int first = start + 4 * (lane_number() % 4);
#pragma unroll
      for (int i = 0; i < 64; i++) {
        const int token = i / 8 * 16 + i / 4 % 2 * 2 + i % 2, r = i / 2 % 2;
        if (SHORT ? token >= limit[r] - first : first + token >= limit[r]) s[i] = Of::hidden();
      }
    }
    const float less = v_byte == 255 ? __uint_as_float(0x7FC00000u) : 8388608.f - __uint_as_float(0x4B000000u + below);
    const float up = power_of(127 + below);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      // A row that sees no key of the tile does not see its scales, which may be no numbers; one that does becomes one.
      // What is out of sight must stay infinite, so nothing is multiplied by 0.
      const bool blind = EDGE && start >= limit[r];
      float by = blind ? 1.f : rows[r] * k_scale;
      if (EDGE && by == 0.f) by = __uint_as_float(0x00800000u);
      const float largest = Of::biased(largest_of(s, r)) - Of::BIAS;
      const float now = fmaxf(top[r], round_up(largest * by)), point = now == minus_infinity() ? 0.f : now;
      const float minus = (blind ? 0.f : less) + (float)P_BITS - point;
      // The bias is taken off here, rounded once: by up to 3/4 of what a score of 1 is in bits, the same for all keys.
      const float from = Of::BIAS == 0.f ? minus : fmaf(-Of::BIAS, by, minus);
      kept[r] = exp2_fast(top[r] - point);
      top[r] = now;
      float x[4], sum = 0.f;
#pragma unroll
      for (int j = 0; j < 16; j++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int n = j % 2 * 2 + e;
          x[n] = exp2_fast(fmaf(Of::biased(s[4 * j + 2 * r + e]), by, from));
          Of::forget(s[4 * j + 2 * r + e], x[n]);
        }
        if (j % 2 == 0) continue;
        if (ADDS) sum += sum_of_codes(to_e4m3(x[0] * up, x[1] * up, x[2] * up, x[3] * up));
        p[(j - 1) / 4][(j - 1) % 4 + r] = to_e4m3(x[0], x[1], x[2], x[3]);
      }
      if (ADDS) {
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
        store_shared(own(sums) + r * 4, sum);
      }
    }
  }

  // codes: the sums of a tile's codes, in every column of a row; `more` was of that tile.
  __device__ __forceinline__ void add(const float (&codes)[4], float more) {
#pragma unroll
    for (int r = 0; r < 2; r++) total[r] = fmaf(codes[2 * r], fabsf(more), total[r]);
  }

  // After `step`.
  __device__ __forceinline__ void scale_total(u32 sums) {
    total[0] *= kept[0], total[1] *= kept[1];
    if (more == 0.f) {
      const float2 sum = load_shared2(own(sums));
      total[0] += sum.x, total[1] += sum.y;
    }
  }
  __device__ __forceinline__ float down(u32 sums) const {
    return __float_as_uint(more) >> 31 ? load_shared(own(sums) + 8) : 1.f;
  }
};

}  // namespace quantrot
