// Many tokens in e4m3 by a packed weight: prefill of kernels/mixed, whose codes are MXFP4's, on FP8 tensor cores.
//
// 64 bytes of a row are 128 columns, four groups; a block of the tokens is 128 bytes a row, too. A group's eight magnitudes in
// e4m3, relative to its row's scale, are eight bytes of a table (MAGNITUDES, made by hopper_prefill.py), from which four codes
// pick theirs by one permutation of bytes. The bits are those of `expand`.

namespace quantrot {

struct CodesOperands {
  static constexpr int GROUP = 0, STEP = 1;
  static constexpr bool WEIGHT = true;
  using T = Bf16;
  using S = Fp32;
  using B = None;
};

// args.scale: a power of two a row; args.zero: the groups' scale bytes; args.token: a scale a token, float32. Columns are
// counted in pairs. See Multiplier of multiply.cuh, which this follows product by product.
template <class P>
struct CodesMultiplier {
  const MixedArgs& args;
  Lane lane;
  u32 base, full, empty, rank, table, previous = 0;
  Ring<P::STAGES> ring;
  u32 codes[2][4], a[4][4];  // of 32 columns each: [2 h + r] is the row r of the lane, columns 16 h + 4 q ... + 3
  float2 magnitudes[2][2];   // of each group and row
  u32 bytes[2], coming[2];   // scales of each row in this block and in the next
  int least[2];              // byte of each row's group for which the table begins
  const u32* scale[2];
  int next;  // number of the block whose scales come

  __device__ __forceinline__ CodesMultiplier(const MixedArgs& args, u32 group, u32 base, u32 full, u32 empty, u32 rank)
      : args(args), lane(group), base(base), full(full), empty(empty), rank(rank), table(empty + P::STAGES * 8) {
    if (threadIdx.x < LENGTH) store_shared2(table + threadIdx.x * 8, MAGNITUDES[threadIdx.x][0], MAGNITUDES[threadIdx.x][1]);
    named_sync(3, 128 * P::GROUPS);
  }

  __device__ __forceinline__ void find() {
#pragma unroll
    for (int r = 0; r < 2; r++) coming[r] = __ldg(scale[r] + min(next, args.group_blocks - 1));
    next++;
  }
  __device__ __forceinline__ void enter() {  // what is loaded from here on is of the next block
    bytes[0] = coming[0], bytes[1] = coming[1];
    find();
  }

  // Number j of a block's four products; its codes in codes[j % 2], widened in a[j].
  __device__ __forceinline__ void load(int j, u32 tile) {
#pragma unroll
    for (int i = 0; i < 4; i++) codes[j % 2][i] = load_shared_u16(tile + lane.offsets[j] + i % 2 * 512 + i / 2 * 8);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int byte = bytes[r] >> 8 * j & 255;
      magnitudes[j % 2][r] = load_shared2(table + min(max(byte - least[r], 0), LENGTH - 1) * 8);
    }
  }
  __device__ __forceinline__ void widen(int j) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 m = magnitudes[j % 2][i % 2];
      const u32 four = codes[j % 2][i], signs = pick_bytes(0x80808080u, 0x80808080u, four);  // 0xFF of negative codes
      a[j][i] = pick_bytes(__float_as_uint(m.x), __float_as_uint(m.y), four & 0x7777u) | (signs << 7 & 0x80808080u);
    }
  }
  __device__ __forceinline__ void multiply(float (&d)[P::W], int j, u32 tile, bool add) {
    product(d, a[j], operand(tile + P::CODES, j), add);
  }
  __device__ __forceinline__ void multiply1(float (&d)[P::W], int j, u32 tile, bool add) {
    product_fence();
    multiply(d, j, tile, add);
    product_commit();
  }
  __device__ __forceinline__ void multiply2(float (&d)[P::W], int j, u32 tile, bool add) {
    product_fence();
    multiply(d, j, tile, add), multiply(d, j + 1, tile, true);
    product_commit();
  }
  __device__ __forceinline__ void leave(bool begun) {  // the products of the block before have read their stage
    if (begun) hand_back<P>(empty + previous * 8, rank);
    previous = ring.stage;
    ring.next();
  }

  template <bool LAST>
  __device__ __forceinline__ void block(float (&d)[P::W], bool begun) {
    const u32 tile = base + ring.stage * P::STAGE;
    if constexpr (P::HALVES) {
      multiply2(d, 0, tile, begun);
      load(2, tile), load(3, tile);
      product_wait<1>();
      leave(begun);
      widen(2), widen(3);
      multiply2(d, 2, tile, true);
    } else {
      multiply1(d, 0, tile, begun);
      load(3, tile);
      product_wait<2>();
      widen(2);
      multiply1(d, 1, tile, true);
      product_wait<2>();
      leave(begun);
      widen(3);
      multiply1(d, 2, tile, true);
    }
    if constexpr (!LAST) {
      const u32 after = base + ring.stage * P::STAGE;
      enter();
      barrier_wait(full + ring.stage * 8, ring.parity);
      load(0, after), load(1, after);
      product_wait<P::HALVES ? 1 : 2>();
      widen(0);
      if constexpr (P::HALVES) widen(1);
      if constexpr (!P::HALVES) {
        multiply1(d, 3, tile, true);
        load(2, after);
        product_wait<2>();
        widen(1);
      }
    } else {
      if constexpr (!P::HALVES) multiply1(d, 3, tile, true);
      product_wait<0>();
      product_done(d);
      hand_back<P>(empty + previous * 8, rank);
    }
  }

  __device__ __forceinline__ void run(float (&sum)[P::W], int first, int count) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      scale[r] = (const u32*)args.zero + (i64)lane.rows[r] * args.group_blocks;
      least[r] = (int)(__float_as_uint(number<Fp32>(args.scale, lane.rows[r])) >> 23) - SHIFTS;
    }
    next = first;
    find();
    enter();
    const u32 tile = base + ring.stage * P::STAGE;
    barrier_wait(full + ring.stage * 8, ring.parity);
#pragma unroll
    for (int j = 0; j < 2; j++) load(j, tile), widen(j);
    if constexpr (!P::HALVES) load(2, tile);
    for (int k = 0; k + 1 < count; k++) block<false>(sum, k > 0);
    block<true>(sum, count > 1);
#pragma unroll
    for (int j = 0; j < P::W / 4; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float token = number<Fp32>(args.token, min(lane.column + j * 8 + (int)lane_number() % 4 * 2 + e, args.columns - 1));
        sum[4 * j + e] *= token, sum[4 * j + 2 + e] *= token;
      }
  }
};

template <class P>
struct Chosen<P, CodesOperands, false> {
  using Type = CodesMultiplier<P>;
};

}  // namespace quantrot
