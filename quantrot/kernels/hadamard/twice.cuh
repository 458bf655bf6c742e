// Long rows of 16-bit elements as codes, by two asynchronous products (see flow.cuh, whose first one this shares).
//
// H = H_K (x) S_H (x) S_64: 64 rows of H_K^T multiply a row where the copy engine has put it, exactly; the sums then are the
// register operand of a product with S_64, in two bfloat16 parts, which keeps 16 bits; S_H is additions between a lane's own
// results. The columns of that S_64 are in an order that leaves a lane with 16 neighbours: their codes leave as one vector. A thread
// block is one warpgroup (or one for each 64 rows of H_K), and what one waits for the others of its multiprocessor hide.
//
// Additions come last: before the second product, the compiler runs out of registers and lets the products wait for each other.

namespace quantrot {

// S_64 as the second operand: column 8 t + 2 q + e of the product is column 16 q + 2 t + e of the row.
template <int THREADS>
__device__ __forceinline__ void write_turn(u32 to) {
  for (u32 i = threadIdx.x; i < 512; i += THREADS) {
    const u32 n = i >> 3, unit = i & 7, column = (n >> 1 & 3) * 16 + (n >> 3) * 2 + (n & 1);
    const u32 high = column >> 3 & unit, odd = (high ^ high >> 1 ^ high >> 2) & 1;  // of the bits that both have
    const u32 first = 0x3F803F80u ^ odd * 0x80008000u ^ (column & 1) << 31;
    Vec v;
#pragma unroll
    for (u32 j = 0; j < 4; j++) v.w[j] = first ^ (((column >> 1 & j) ^ (column >> 2 & j >> 1)) & 1) * 0x80008000u;
    store_vector(to + swizzled(n, unit * 16), v);
  }
}

// 16 columns of a lane's sums as two operands whose sum they are to 16 bits: the nearest bfloat16, and the rest, which is no NaN
// where a sum is infinite.
__device__ __forceinline__ void parts(u32 (&high)[4], u32 (&low)[4], const float* d) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    high[i] = Bf16::pack(d[2 * i], d[2 * i + 1]);
    const float a = __uint_as_float(high[i] << 16), b = __uint_as_float(high[i] & 0xFFFF0000u);
    low[i] = least16(Bf16::pack(d[2 * i] - a, d[2 * i + 1] - b));
  }
}

// Of each H neighbouring chunks.
template <int H, int L>
__device__ __forceinline__ void butterflies(float (&d)[L][32]) {
#pragma unroll
  for (int step = 1; step < H; step *= 2)
#pragma unroll
    for (int j = 0; j < L; j++)
#pragma unroll
      for (int n = 0; n < 32; n++)
        if (!(j & step)) {
          const float x = d[j][n], y = d[j + step][n];
          d[j][n] = x + y;
          d[j + step][n] = x - y;
        }
}

// H: 64 columns of a row, or (H = 1) of each of T rows, make a tile of 64 * L columns.
template <int D, int K, int H, int T, int GROUPS, int STAGES, bool SIGNS>
__device__ __forceinline__ void twice_kernel(const TensorMap& map, const Args& a) {
  using S = Shape<K, 64 * H>;
  constexpr int L = H * T, INPUT = L * S::CHUNK, THREADS = 128 * GROUPS, N = K * 64 * H, IN_ROW = N / 128;
  constexpr int W = H == 1 ? 4 : 2, LANES = 2 * W;    // groups of two chunks of 16 rows, and the lanes that hold one
  static_assert(GROUPS == S::TILES && L % 2 == 0 && (H == 1 || T == 1) && (H > 1 || K % 16 == 0), "how rows are divided");
  const u32 inputs = shared_memory(), turn = inputs + STAGES * INPUT, kept = turn + 8192;
  const u32 full = kept + 32 * IN_ROW;
  const u32 warp = warp_number(), lane = lane_number(), g = lane >> 2, q = lane & 3;
  const Pieces<8 / T> mine((u32)((a.rows + T - 1) / T), gridDim.x, blockIdx.x);  // eight rows in turn: see stream.cuh
  const int pitch = (int)(a.x_stride / (64 * H));

  Operand<D, K, 64, 168, false> operand;
  operand.load(warp);
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < STAGES; s++) barrier_init(full + 8 * s, 1);
    barrier_init_done();
  }
  fill_empty<K, 64 * H>(inputs, STAGES * T, THREADS);
  write_turn<THREADS>(turn);
  fence_async();
  block_sync();

  auto fetch = [&](u32 tile, u32 stage) {
    const u32 to = inputs + stage * INPUT, bar = full + 8 * stage;
    const u64 policy = cache_policy<NORMAL>();
    barrier_expect(bar, L * K * 128);
#pragma unroll
    for (int j = 0; j < L; j++)
      tensor_load(to + j * S::CHUNK, &map, 64 * (j % H), (int)(tile * T + j / H) * pitch, bar, policy);
  };
  if (warp == 0 && mine.count > 0)
#pragma unroll
    for (int j = 0; j < L; j++) tensor_warm(&map, 64 * (j % H), (int)(mine.first * T + j / H) * pitch);
  grid_wait();
  u32 coming = mine.first;                            // of warp 0
  if (warp == 0)
    for (u32 i = 0; i < STAGES && i < mine.count; i++, coming = mine.after(coming)) fetch(coming, i);

  auto put_scales = [&](u32 end) {                    // of the rows before, of the same eight
    const u32 start = (end - 1) / 8 * 8, least = start < mine.in_turns * T ? start : mine.rest * T;
    block_sync();
    for (u32 i = threadIdx.x; i < 8 * IN_ROW; i += THREADS) {
      const u32 row = start + i % 8;
      if (row < least || row >= end || row >= a.rows) continue;
      const float scale = load_shared(kept + i * 4);
      if (a.in_row == IN_ROW) {
        a.scales[row * a.scale_row + i / 8 * a.scale_group] = scale;
      } else {
        store_scale(a, row * IN_ROW + i / 8, scale);
      }
    }
  };

  const u32 m0 = 16 * warp;
  u32 tile = mine.first;
  for (u32 i = 0; i < mine.count; i++) {
    const u32 row = tile * T;
    const u32 stage = i % STAGES, input = inputs + stage * INPUT;
    barrier_wait(full + 8 * stage, i / STAGES & 1);
    if constexpr (SIGNS)
      for (int j = 0; j < T; j++) turn_signs<K, 64 * H, THREADS>(a, input + j * S::CHUNK, row + j, 1);
    float d[L][32];
    u32 h[S::STEPS][4];
#pragma unroll
    for (int s = 0; s < S::STEPS; s++) operand.make(h[s], from_here(operand.signs[s / 4]), s);
    product_fence();
#pragma unroll
    for (int j = 0; j < L; j++)
#pragma unroll
      for (int s = 0; s < S::STEPS; s++)
        product_across<Number<D>>(d[j], h[s], operand_across(input + j * S::CHUNK + s * 2048, S::CHUNK), s > 0);
    product_commit();
    product_wait<0>();
#pragma unroll
    for (int j = 0; j < L; j++) product_done(d[j]);
    block_sync();
    if (warp == 0 && i + STAGES < mine.count) {
      fetch(coming, stage);
      coming = mine.after(coming);
    }
#pragma unroll
    for (int j = 0; j < L; j++) {                     // in the sums' own registers
      u32 high[4][4], low[4][4];
      product_done(d[j]);
#pragma unroll
      for (int s = 0; s < 4; s++) parts(high[s], low[s], d[j] + 8 * s);
      product_fence();
#pragma unroll
      for (int s = 0; s < 4; s++) product16<Bf16>(d[j], low[s], quantrot::operand(turn, s), s > 0);
#pragma unroll
      for (int s = 0; s < 4; s++) product16<Bf16>(d[j], high[s], quantrot::operand(turn, s), true);
      product_commit();
      product_wait<0>();
      product_done(d[j]);
    }
    butterflies<H>(d);
#pragma unroll
    for (int pair = 0; pair < L; pair += 2) {
      const float(&e)[2][32] = reinterpret_cast<const float(&)[2][32]>(d[pair]);
      float amax[W];
#pragma unroll
      for (int w = 0; w < W; w++) {                   // H = 1: chunk w / 2, half w % 2; else half w
        amax[w] = 0.f;
#pragma unroll
        for (int n = 0; n < 64; n += 4)
          if (W == 2 || n / 32 == w / 2) amax[w] = larger(amax[w], larger(e[n / 32][n % 32 + w % 2 * 2], e[n / 32][n % 32 + w % 2 * 2 + 1]));
      }
      const float scale = scale_of(largest<W, LANES>(amax) * a.scale);
      const float own = a.scale * to_codes(scale);
      const u32 group = group_of<W, LANES>(), m = m0 + g + group % 2 * 8;
      const u32 own_row = row + (H == 1 ? pair + group / 2 : 0);
      if (lane % LANES < W && m < K)
        store_shared(kept + ((H == 1 ? m / 2 : m * (H / 2) + pair / 2) * 8 + own_row % 8) * 4, scale);
#pragma unroll
      for (int j = 0; j < 2; j++)
#pragma unroll
        for (int b = 0; b < 2; b++) {
          const float f = from_group<W, LANES>(own, H == 1 ? 2 * j + b : b);
          const float* z = e[j] + 2 * b;
          Vec v;
#pragma unroll
          for (int k = 0; k < 4; k++) v.w[k] = codes4(z[8 * k] * f, z[8 * k + 1] * f, z[8 * k + 4] * f, z[8 * k + 5] * f);
          const u32 to = row + (H == 1 ? pair + j : 0);
          if (m0 + g + 8 * b < K && to < a.rows)
            store16((char*)a.y + (i64)to * a.y_stride + (m0 + g + 8 * b) * 64 * H + (H == 1 ? 0 : pair + j) * 64 + 16 * q, v);
        }
    }
    tile = mine.after(tile);
    if (tile * T % 8 == 0 || tile * T != row + T || i + 1 == mine.count) put_scales(row + T);
  }
}

}  // namespace quantrot
