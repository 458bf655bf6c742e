// Rows of K * C elements in 16 bits, held in registers as the operand of every product: see columns.cuh for the second one.

namespace quantrot {

// --- Rows of K * C elements, H = H_K (x) S_C, C = 16, or 64 a warp ---------------------------------------------------
//
// A warp has 64 columns of all K pieces of a row (of C = 16, the pieces of four rows). It reads them straight into registers,
// where they stay: a lane's vectors at pieces 4 i + q are, two by two, the second operand of a product with 16 rows of H_K
// (q = lane % 4, g = lane / 4). The product is exact, and leaves a lane with eight neighbours of columns 8 q and of 8 q + 32
// in rows g and g + 8. Two column bits are then additions in the lane and four products that leave their results where they
// are. Columns from 64 on cross between warps in float32, 16 rows at a time through shared memory, so that a row
// takes no more registers than its own 16 bits and one product's sums: four rows of 14336 on a multiprocessor.

// The signs of H_K as m16n8k16 takes its rows, defined by the program: word w of rows 16 * tile ... + 15 has a lane's of four
// steps of 16 pieces. Bit 4 * (step % 4) + register is the lower piece's, 16 further up the higher one's.
template <int K>
struct HeldSigns {
  __device__ __forceinline__ static u32 word(u32 tile, u32 w);
};

// 16 rows of 64 columns, with unit 16-byte swapped in odd rows, so that a lane's stores 32 bytes apart meet all banks.
__device__ __forceinline__ u32 held_at(u32 piece, u32 row, u32 unit) {
  return ((piece * 16 + row) * 16 + (unit ^ (row & 1))) * 16;
}

template <int D, int K, int C, int WARPS, int P, bool SIGNS>
__device__ __forceinline__ void held_kernel(const Args& a) {
  constexpr int LOADS = K / 4, STEPS = (K + 15) / 16, WORDS = (STEPS + 3) / 4, PIECES = C > 64 ? C / 64 : 1;
  constexpr int UNROLL = STEPS <= (PIECES > 1 ? 2 : 3) ? STEPS : 1;  // 12288: 112 registers, 36 bytes spill at 3
  static_assert(K % 4 == 0 && (C == 16 || C % 64 == 0) && (PIECES == 1 || PIECES == WARPS), "how a row is divided");
  const u32 lane = threadIdx.x & 31, warp = warp_number(), g = lane >> 2, q = lane & 3;
  const u32 unit = g / 2 + g % 2 * 4;                 // this lane's eight columns, of 64
  i64 first = blockIdx.x;                             // row, of this warp's first
  if constexpr (PIECES == 1) first = (first * WARPS + warp) * (C == 16 ? 4 : 1);
  const i64 row = first + (C == 16 ? unit / 2 : 0);
  const u32 column = C == 16 ? unit % 2 * 8 : (PIECES > 1 ? warp * 64 : 0) + unit * 8;
  const float scale = D == BF16 && P == CUT && C > 16 ? a.scale * 1.00035f : a.scale;  // the mean of what is cut

  Vec in[LOADS];
  const char* x = (const char*)a.x + (row * a.x_stride + q * C + column) * 2;
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    in[i] = Vec{{0, 0, 0, 0}};
    if (PIECES > 1 || row < a.rows) in[i] = load16(x + i * 8 * C);
  }
  u32 words[WORDS];
#pragma unroll
  for (int w = 0; w < WORDS; w++) words[w] = HeldSigns<K>::word(0, w);
  if constexpr (SIGNS) {
    const signed char* signs = a.signs + row % a.sign_rows * (K * C) + q * C + column;
#pragma unroll
    for (int i = 0; i < LOADS; i++) apply_signs16(in[i], signs + i * 4 * C);
  }
  u32 held[STEPS][2][8];
#pragma unroll
  for (int s = 0; s < STEPS; s++)
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int c = 0; c < 8; c++) {
        const int i = 4 * s + 2 * h, j = i + 1;       // zeros past K
        const u32 low = i < LOADS ? in[i < LOADS ? i : 0].w[c / 2] : 0, high = j < LOADS ? in[j < LOADS ? j : 0].w[c / 2] : 0;
        held[s][h][c] = bytes_of(low, high, c % 2 ? 0x7632 : 0x5410);
      }

  const u32 one = (D == BF16 ? 0x3F803F80u : 0x3C003C00u) ^ (u32)(a.rows >> 63);  // a register: one instruction less an operand
  constexpr int TOGETHER = C == 16 ? 1 : 2;           // neighbours of the eight, by the same products
  Eights eights(lane);
  if constexpr (P == PAIR) {
    keep_apart(eights.pairs, 0);
  } else {
    eights.b0 = from_here(eights.b0), eights.b1 = from_here(eights.b1);
  }
  constexpr int PART = WARPS <= 8 ? 4 : 2, LANES = 64 / PART;  // columns of each piece that a lane finishes, lanes at a row
  u32 to = 0, from = 0;
  char* y = (char*)a.y;
  if constexpr (PIECES > 1) {
    const u32 r = warp * (32 / LANES) + lane / LANES, part = lane % LANES;
    const u32 sums = shared_memory();
    to = from_here(sums + held_at(warp, g, 2 * q));
    from = from_here(sums + held_at(0, r, part * PART / 4) + part * PART % 4 * 4);
    y += (row * a.y_stride + r * C + part * PART) * 2;
  }
#pragma unroll UNROLL
  for (int tile = 0; tile < STEPS; tile++) {
    float d[8][4];
#pragma unroll
    for (int c = 0; c < 8; c++) d[c][0] = d[c][1] = d[c][2] = d[c][3] = 0.f;
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      u32 h[4];
#pragma unroll
      for (int i = 0; i < 4; i++) h[i] = one ^ (words[s / 4] << (15 - s % 4 * 4 - i) & 0x80008000u);
#pragma unroll
      for (int c = 0; c < 8; c++) mma16<D>(d[c], h[0], h[1], h[2], h[3], held[s][0][c], held[s][1][c]);
    }
#pragma unroll
    for (int w = 0; w < WORDS; w++) words[w] = HeldSigns<K>::word(tile + 1 < STEPS ? tile + 1 : 0, w);
    butterflies<8, 4, TOGETHER, 4>(d);
    if constexpr (PIECES == 1) last_butterfly(d, scale);
    if constexpr (C == 16) {
      const float sign = lane & 1 ? -1.f : 1.f;
#pragma unroll
      for (int c = 0; c < 8; c++)
#pragma unroll
        for (int i = 0; i < 4; i++) d[c][i] = fmaf(d[c][i], sign, __shfl_xor_sync(0xFFFFFFFFu, d[c][i], 1));
    } else {
      eights.template turn<P, TOGETHER>(d);
    }
    // Sums that a product leaves are stored in fours of one column; additions after it put them where four columns are stored.
    if constexpr (PIECES > 1) butterflies<8, 4, 4, 8>(d);
    // d[c][2 h + b] is row g + 8 h of the tile, column 8 (q + 4 b) + c.
    if constexpr (PIECES == 1) {
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int b = 0; b < 2; b++) {
          const u32 k = tile * 16 + h * 8 + g, to = q + 4 * b;
          const i64 out = first + (C == 16 ? to / 2 : 0);
          Vec v;
#pragma unroll
          for (int j = 0; j < 4; j++) v.w[j] = pack<D>(d[2 * j][2 * h + b], d[2 * j + 1][2 * h + b]);
          if (k < K && out < a.rows)
            store16((char*)a.y + (out * a.y_stride + k * C + (C == 16 ? to % 2 : to) * 8) * 2, v);
        }
    } else {
      const u32 buffer = tile % 2 * (C * 64);
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int b = 0; b < 2; b++)
#pragma unroll
          for (int j = 0; j < 2; j++) {
            const int i = 2 * h + b;
            store_shared16((to ^ j * 16) + buffer + h * 2048 + b * 128, d[4 * j][i], d[4 * j + 1][i], d[4 * j + 2][i],
                           d[4 * j + 3][i]);
          }
      __syncthreads();  // one is enough: who writes here again has passed the next tile's
      constexpr int ROWS = WARPS * 32 / LANES;        // rows of the tile at a time
#pragma unroll
      for (int i = 0; i < 16 / ROWS; i++) {
        if (K % 16 && tile * 16 + i * ROWS + (int)(warp * (32 / LANES) + lane / LANES) >= K) continue;
        float z[PIECES][PART];
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
          const u32 at = from + buffer + p * 4096 + i * (ROWS * 256);
          if constexpr (PART == 4) {
            const float4 f = load_shared16(at);
            z[p][0] = f.x, z[p][1] = f.y, z[p][2] = f.z, z[p][3] = f.w;
          } else {
            load_shared8(at, z[p][0], z[p][1]);
          }
        }
        butterflies<PIECES, PART, 1, PIECES / 2>(z);
        last_butterfly(z, scale);
#pragma unroll
        for (int p = 0; p < PIECES; p++) store_part<D>(y + i * (ROWS * C * 2) + p * 128, z[p]);
      }
      y += 16 * C * 2;
    }
  }
}

}  // namespace quantrot
