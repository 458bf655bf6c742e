// Long rows of 16-bit elements as codes, by two asynchronous products (see flow.cuh, whose first one this shares).
//
// H = H_K (x) S_H (x) S_2 (x) S_32: 64 rows of H_K^T multiply a row where the copy engine has put it, exactly; the sums then are
// the register operand of a product with S_32, rounded to bfloat16 once: an error of 1.7e-3, as that of a transform which leaves
// in bfloat16, where codes of four bits have 2.6e-2. (In two parts, which keep 17 bits, 5120 took 37.5 us for 30.0, 14336 32.3
// for 29.1.) S_H and S_2 are additions between a lane's own results, S_2 within the quantization: the larger of |x + y| and
// |x - y| is |x| + |y|, and f (x +- y) is f x +- f y.
// Codes leave through shared memory, by the copy engine, in whole lines (8192 28.0 us; stored 8 bytes a lane 28.9, and 28.3 even
// without the second product). A thread block is one warpgroup (or one for each 64 rows of H_K, one multiplying after the other),
// and what one waits for the others of its multiprocessor hide.
//
// Additions come last: before the second product, the compiler runs out of registers and lets the products wait for each other.

namespace quantrot {

// S_32 as the second operand, 64 of 128 bytes a row: column 8 t + 2 q + e of the product is column 8 q + 2 t + e of the 32.
template <int THREADS>
__device__ __forceinline__ void write_turn(u32 to) {
  for (u32 i = threadIdx.x; i < 128; i += THREADS) {
    const u32 n = i >> 2, unit = i & 3, column = (n >> 1 & 3) * 8 + (n >> 3) * 2 + (n & 1);
    Vec v;
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
      const u32 both = column & (unit * 8 + 2 * j), odd = both ^ both >> 1 ^ both >> 2 ^ both >> 3 ^ both >> 4;
      v.w[j] = 0x3F803F80u ^ (odd & 1) * 0x80008000u ^ (column & 1) << 31;
    }
    store_vector(to + swizzled(n, unit * 16), v);
  }
}

// Of each H neighbouring chunks.
template <int H, int L>
__device__ __forceinline__ void butterflies(float (&y)[L][2][16]) {
#pragma unroll
  for (int step = 1; step < H; step *= 2)
#pragma unroll
    for (int j = 0; j < L; j++)
#pragma unroll
      for (int n = 0; n < 32; n++)
        if (!(j & step)) {
          const float p = y[j][n / 16][n % 16], q = y[j + step][n / 16][n % 16];
          y[j][n / 16][n % 16] = p + q;
          y[j + step][n / 16][n % 16] = p - q;
        }
}

// The largest magnitudes of W groups in this lane's part of two chunks, whose halves are still to be added and subtracted. H = 1:
// chunk w / 2, rows w % 2; else rows w. EXACT tells inf - inf, a NaN, from inf.
template <int W, bool EXACT>
__device__ __forceinline__ void magnitudes(float (&amax)[W], const float (&y)[2][2][16]) {
#pragma unroll
  for (int w = 0; w < W; w++) {
    amax[w] = 0.f;
#pragma unroll
    for (int n = 0; n < 32; n++) {
      if ((W == 4 && n / 16 != w / 2) || n / 2 % 2 != w % 2) continue;
      const float p = y[n / 16][0][n % 16], q = y[n / 16][1][n % 16];
      amax[w] = larger(amax[w], EXACT ? larger(p + q, p - q) : fabsf(p) + fabsf(q));
    }
  }
}

// A thread block's tiles: CHUNK neighbours in its turn, and in place of the last turn of all and what is left, GRAIN neighbours
// that no other has taken, each time anew. Multiprocessors differ in how soon they get their rows: 8192 101.2 us, with fixed
// shares 105.3; 4096 99.2 and 103.1. No counter: at a fixed distance.
template <u32 CHUNK, u32 GRAIN>
struct Counted {
  u32* taken;
  u32 tiles, in_turns, grain, number = blockIdx.x - gridDim.x;

  __device__ __forceinline__ Counted(u32* taken, u32 tiles) : taken(taken), tiles(tiles) {
    const u32 turn = gridDim.x * CHUNK;
    in_turns = tiles < 2 * turn ? 0 : (tiles / turn - 1) * turn;
    grain = tiles < 4 * gridDim.x ? 1 : GRAIN;        // or few rows would leave blocks without any
  }

  __device__ __forceinline__ u32 first() const { return blockIdx.x * (in_turns ? CHUNK : grain); }

  // For a whole warp. What begins asks for what comes after it; a block that finds none left has counted, too.
  __device__ __forceinline__ u32 begun(u32 tile) {
    if (tile >= in_turns && tile < tiles)
      number = taken ? count_one(taken, (tiles - in_turns - 1) / grain) : number + gridDim.x;
    return tile;
  }

  __device__ __forceinline__ u32 after(u32 tile) {
    const bool turns = tile < in_turns;
    if (++tile % (turns ? CHUNK : grain)) return tile;
    if (!turns) return begun(in_turns + (gridDim.x + largest_of_warp(number)) * grain);
    tile += (gridDim.x - 1) * CHUNK;
    return begun(tile < in_turns ? tile : in_turns + blockIdx.x * grain);
  }
};

// H: 64 columns of a row, or (H = 1) of each of T rows, make a tile of 64 * L columns. `codes` is of lines of 128 bytes, a box is
// UNIT rows of H_K. COUNTED: tiles are taken as blocks come to them; which it is lies beside each (where additions bound it,
// waiting for that costs 2 to 4%: 14336, 28672).
template <int D, int K, int H, int T, int GROUPS, int STAGES, bool COUNTED, bool SIGNS>
__device__ __forceinline__ void twice_kernel(const TensorMap& map, const TensorMap& codes, const Args& a) {
  using S = Shape<K, 64 * H>;
  constexpr int L = H * T, INPUT = L * S::CHUNK, THREADS = 128 * GROUPS, N = K * 64 * H, IN_ROW = N / 128;
  constexpr int W = H == 1 ? 4 : 2, LANES = 2 * W;    // groups of two chunks of 16 rows, and the lanes that hold one
  constexpr int UNIT = K % 16 == 0 ? 16 : K % 8 == 0 ? 8 : 4, BOXES = 16 / UNIT;  // rows of a box of codes, a warp's
  constexpr u32 FEEDER = 4 * (GROUPS - 1);            // of the warpgroup that multiplies last
  constexpr u32 OWN = H == 1 ? 8 : 8 * H;             // a warp's groups of 128 in a row
  static_assert(GROUPS == S::TILES && L % 2 == 0 && (H == 1 || T == 1) && K % 4 == 0, "how rows are divided");
  const u32 warp = warp_number();
  const u32 inputs = shared_memory(), out = inputs + STAGES * INPUT, turn = out + THREADS * 32 * L, kept = turn + 4096;
  const u32 full = kept + 32 * IN_ROW, empty = full + 8 * STAGES, order = empty + 8 * STAGES, tile_at = order + 8 * GROUPS;
  const u32 leaving = out + warp * 1024 * L;
  const u32 tiles = (u32)((a.rows + T - 1) / T);
  const Pieces<8 / T> mine(tiles, gridDim.x, blockIdx.x);  // eight rows in turn: see stream.cuh
  Counted<8 / T, 2 / T> counted(a.taken, tiles);      // of the feeder
  const int pitch = (int)(a.x_stride / (64 * H));

  Operand<D, K, 64, 168, false> base;
  base.load(warp);
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < STAGES; s++) barrier_init(full + 8 * s, 1), barrier_init(empty + 8 * s, 4 * GROUPS);
    for (u32 g = 0; g < GROUPS; g++) barrier_init(order + 8 * g, 4);
    barrier_init_done();
  }
  fill_empty<K, 64 * H>(inputs, STAGES * T, THREADS);
  write_turn<THREADS>(turn);
  fence_async();
  block_sync();

  auto fetch = [&](u32 tile, u32 stage) {
    const u32 to = inputs + stage * INPUT, bar = full + 8 * stage;
    const u64 policy = cache_policy<NORMAL>();
    if constexpr (COUNTED) store_one(tile_at + 4 * stage, tile);
    barrier_expect(bar, !COUNTED || tile < tiles ? L * K * 128 : 0);
    if (COUNTED && tile >= tiles) return;
#pragma unroll
    for (int j = 0; j < L; j++)
      tensor_load(to + j * S::CHUNK, &map, 64 * (j % H), (int)(tile * T + j / H) * pitch, bar, policy);
  };
  u32 coming = COUNTED ? counted.first() : mine.first;  // of the feeder: the tile that it asked for last
  if (warp == FEEDER && coming < tiles)
#pragma unroll
    for (int j = 0; j < L; j++) tensor_warm(&map, 64 * (j % H), (int)(coming * T + j / H) * pitch);
  grid_wait();
  auto more = [&](u32 i) { return COUNTED ? coming < tiles : i < mine.count; };
  auto fetch_next = [&](u32 stage) { fetch(coming = COUNTED ? counted.after(coming) : mine.after(coming), stage); };
  if (warp == FEEDER) {
    if constexpr (COUNTED) counted.begun(coming);
    fetch(coming, 0);
    for (u32 i = 1; i < STAGES && more(i); i++) fetch_next(i);
  }

  u32 since = 0, end = 0;                             // rows whose scales are kept, of the same eight
  auto put_scales = [&] {                             // this warp's
    warp_sync();
    for (u32 i = lane_number(); i < 8 * OWN; i += 32) {
      const u32 row = since / 8 * 8 + i % 8, group = warp * OWN + i / 8;
      if (row < since || row >= end || row >= a.rows || group >= IN_ROW) continue;
      const float scale = load_shared(kept + (group * 8 + i % 8) * 4);
      if (a.in_row == IN_ROW) {
        a.scales[row * a.scale_row + group * a.scale_group] = scale;
      } else {
        store_scale(a, row * IN_ROW + group, scale);
      }
    }
    warp_sync();
  };

  const u64 turned = operand(turn, 0);
  u32 tile = mine.first;
  for (u32 i = 0; COUNTED || i < mine.count; i++) {
    const u32 stage = i % STAGES, input = inputs + stage * INPUT;
    barrier_wait(full + 8 * stage, i / STAGES & 1);
    if constexpr (COUNTED) {
      tile = __shfl_sync(0xFFFFFFFFu, lane_number() == 0 ? load_shared1(tile_at + 4 * stage) : 0, 0);  // who arrives has read
      if (since < end && (tile >= tiles || tile * T != end || end % 8 == 0)) put_scales();
      if (tile >= tiles) break;
    }
    const u32 row = tile * T;
    since = row != end || row % 8 == 0 ? row : since, end = row + T;
    if constexpr (SIGNS)
      for (int j = 0; j < T; j++) turn_signs<K, 64 * H, THREADS>(a, input + j * S::CHUNK, row + j, 1);
    float sums[32 * L], y[L][2][16];                  // y: lower and upper 32 columns of each 64
    const u64 data = operand_across(input, S::CHUNK);
    u32 h[2][4];
    if constexpr (GROUPS > 1) barrier_wait(order + 8 * (warp / 4), (i & 1) ^ (warp < 4));
#pragma unroll
    for (int s = 0; s < S::STEPS; s++) {
      if (s >= 2) product_wait<1>();
      base.make(h[s % 2], from_here(base.signs[s / 4]), s);
      product_fence();
      product_across<Number<D>>(sums, h[s % 2], data + (s * 2048 >> 4), s > 0);
      product_commit();
    }
    product_wait<0>();
    product_done(sums);
    if (lane_number() == 0) {
      barrier_arrive(empty + 8 * stage);
      if constexpr (GROUPS > 1) barrier_arrive(order + 8 * (warp / 4 + 1 == GROUPS ? 0 : warp / 4 + 1));
    }
    if (warp == FEEDER && more(i + STAGES)) {
      barrier_wait(empty + 8 * stage, i / STAGES & 1);
      fetch_next(stage);
    }
    u32 rounded[2 * L][2][4];                         // 16 columns each
#pragma unroll
    for (int i = 0; i < 16 * L; i++) rounded[i / 8][i / 4 % 2][i % 4] = Bf16::pack(sums[2 * i], sums[2 * i + 1]);
    product_fence();
#pragma unroll
    for (int j = 0; j < 4 * L; j++) product16<Bf16>(y[j / 4][j / 2 % 2], rounded[j / 2][j % 2], turned + 2 * (j % 2), j % 2);
    product_commit();
    product_wait<0>();
#pragma unroll
    for (int j = 0; j < L; j++) product_done(y[j][0]), product_done(y[j][1]);
    butterflies<H>(y);
    const u32 thread = from_here(threadIdx.x), lane = thread & 31, m0 = thread / 32 * 16, g = lane >> 2, q = lane & 3;
    tensor_store_wait<0>();                           // of the codes before
    warp_sync();
#pragma unroll
    for (int pair = 0; pair < L; pair += 2) {
      const float(&e)[2][2][16] = reinterpret_cast<const float(&)[2][2][16]>(y[pair]);
      float amax[W];
      magnitudes<W, false>(amax, e);
      float most = largest<W, LANES>(amax);
      if (__any_sync(0xFFFFFFFFu, !(most <= 0x1.fffffep127f))) {
        magnitudes<W, true>(amax, e);
        most = largest<W, LANES>(amax);
      }
      const float scale = scale_of(most * a.scale);
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
          float z[16];
#pragma unroll
          for (int k = 0; k < 8; k++) {
            const int n = k / 2 * 4 + 2 * b + k % 2;
            const float fq = e[j][1][n] * f;
            z[k] = fmaf(e[j][0][n], f, fq), z[8 + k] = fmaf(e[j][0][n], f, -fq);
          }
          const u32 at = H == 1 ? (pair + j) * 1024 + (g + 8 * b) * 64 : (g + 8 * b) * 64 * H + (pair + j) * 64;
          const u32 put = leaving + swizzled(at / 128, at % 128 + 8 * q);
          store_shared2(put, codes4(z[0], z[1], z[2], z[3]), codes4(z[4], z[5], z[6], z[7]));
          store_shared2(put ^ 32, codes4(z[8], z[9], z[10], z[11]), codes4(z[12], z[13], z[14], z[15]));
        }
    }
    fence_async();
    warp_sync();
    if (lane == 0)                                    // with numbers that all lanes share: the assembler takes them as they are
#pragma unroll
      for (int c = 0; c < T * BOXES; c++) {
        const u32 to = row + c / BOXES, m = warp * 16 + c % BOXES * UNIT;
        if (m < K && to < a.rows) tensor_store(&codes, 0, (int)(to * IN_ROW + m * H / 2), leaving + c * UNIT * 64 * H);
      }
    tensor_store_commit();
    if constexpr (!COUNTED) {
      tile = mine.after(tile);
      if (tile * T % 8 == 0 || tile * T != end || i + 1 == mine.count) put_scales();
    }
  }
  tensor_store_wait<0>();
}

}  // namespace quantrot
