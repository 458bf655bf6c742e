// A 16-bit matrix as codes and, read once, its transpose as codes (after blocks.cuh): in 1 x 128 blocks, which run along the rows
// of each and have scales of their own, or in 128 x 128 blocks, whose codes turn with them.
//
// A thread block has 128 x 128 elements and keeps them in registers: a lane eight neighbouring rows of eight neighbouring
// columns, so that it makes eight neighbouring bytes of every row of both results. Those of the transpose cross shared memory,
// from where whole lines leave. There eight bytes of a column lie where the column's unit, too, decides: the 16 lanes that
// write at once, of 16 units, meet in no bank.

namespace quantrot {

struct BothWaysArgs {
  const void* x;
  void *q, *turned;  // contiguous; [rows, columns] and [columns, padded]
  float *scales, *turned_scales;
  i64 x_stride, scale_row, scale_column, turned_scale_row, turned_scale_column;  // in elements
  u32 rows, columns, padded;  // rows to the next multiple of 128: what is behind them in `turned` are zeros
};

constexpr u32 TILE = 128, TILE_UNITS = TILE / 8, TILE_THREADS = 256;
constexpr u32 TILE_MAXIMA = TILE_THREADS / 32 * TILE * 2, TILE_RECIPROCALS = TILE * 8;  // bytes, in this order, then codes

// Of a column's reciprocal in the tile: the 16 units' columns of one number lie side by side.
__device__ __forceinline__ u32 reciprocal_at(u32 column) { return column % 8 / 2 * 256 + column / 8 * 16 + column % 2 * 8; }

template <int D, bool SQUARE>
__device__ __forceinline__ void both_ways_kernel(const BothWaysArgs& a) {
  const u32 across = (a.columns + TILE - 1) / TILE, down = blockIdx.x / across, right = blockIdx.x - down * across;
  const u32 lane = lane_number(), warp = warp_number(), unit = lane % TILE_UNITS, eight = warp * 2 + lane / TILE_UNITS;
  const u32 row = down * TILE + eight * 8, column = right * TILE + unit * 8;
  const int rows = row < a.rows ? a.rows - row : 0, left = column < a.columns ? rows : 0;
  const u32 maxima = shared_memory(), reciprocals = maxima + TILE_MAXIMA, codes_at = reciprocals + TILE_RECIPROCALS;
  const char* from = (const char*)a.x + (row * a.x_stride + column) * 2;
  char* to = (char*)a.q + (i64)row * a.columns + column;

  grid_wait();
  Vec v[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    v[i] = Vec{{0, 0, 0, 0}};
    if (i < left) v[i] = load16(from + i * a.x_stride * 2);
  }
  Vec most;  // of each column
#pragma unroll
  for (int j = 0; j < 4; j++) {
    most.w[j] = v[0].w[j] & 0x7FFF7FFFu;
#pragma unroll
    for (int i = 1; i < 8; i++) most.w[j] = larger_halves(most.w[j], v[i].w[j] & 0x7FFF7FFFu);
    most.w[j] = larger_halves(most.w[j], __shfl_xor_sync(0xFFFFFFFFu, most.w[j], TILE_UNITS));
  }
  if (lane < TILE_UNITS) store_vector(maxima + warp * (TILE * 2) + unit * 16, most);
  block_sync();

  u32 codes[8][2];
  float whole = 1.f;  // the scale of a square
  if constexpr (SQUARE) {
    u32 largest = 0;
#pragma unroll
    for (u32 i = 0; i < TILE_MAXIMA / 512; i++) {
      const Vec some = load_vector(maxima + i * 512 + lane * 16);
#pragma unroll
      for (int j = 0; j < 4; j++) largest = larger_halves(largest, some.w[j]);
    }
    float amax, none;
    unpack<D>(largest_of_warp(max(largest >> 16, largest & 0xFFFF)), amax, none);
    whole = scale_of(amax);
    if (threadIdx.x == 0) {
      a.scales[down * a.scale_row + right * a.scale_column] = whole;
      a.turned_scales[right * a.turned_scale_row + down * a.turned_scale_column] = whole;
    }
    const Reciprocal by(whole);
#pragma unroll
    for (int i = 0; i < 8; i++) quotients<D>(codes[i], v[i], by);
  } else {
    if (threadIdx.x < TILE) {
      const u32 own = threadIdx.x;
      u32 largest = 0;
#pragma unroll
      for (u32 i = 0; i < TILE_THREADS / 32; i++) largest = max(largest, load_shared_u16(maxima + i * (TILE * 2) + own * 2));
      float amax, none;
      unpack<D>(largest, amax, none);
      const float scale = scale_of(amax);
      const Reciprocal by(scale);
      store_shared2(reciprocals + reciprocal_at(own), __float_as_uint(by.high), __float_as_uint(by.low));
      if (right * TILE + own < a.columns)
        a.turned_scales[(right * TILE + own) * a.turned_scale_row + down * a.turned_scale_column] = scale;
    }
    group_codes<D>(codes, v, [&](float scale) {
      const u32 own = group_of<8, 16>();
      if (unit < 8 && (int)own < rows) a.scales[(row + own) * a.scale_row + right * a.scale_column] = scale;
    });
  }
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (i < left) store8(to + (i64)i * a.columns, codes[i][0], codes[i][1]);

  if constexpr (!SQUARE) block_sync();
#pragma unroll
  for (u32 j = 0; j < 4; j++) {  // two columns
    Reciprocal by[2] = {Reciprocal(whole), Reciprocal(whole)};
    if constexpr (!SQUARE) {
      const Vec two = load_vector(reciprocals + j * 256 + unit * 16);
#pragma unroll
      for (int e = 0; e < 2; e++) by[e] = Reciprocal(__uint_as_float(two.w[2 * e]), __uint_as_float(two.w[2 * e + 1]));
    }
    float x[2][8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      unpack<D>(v[i].w[j], x[0][i], x[1][i]);
#pragma unroll
      for (int e = 0; e < 2; e++) x[e][i] = by[e].times(x[e][i]);
    }
#pragma unroll
    for (u32 e = 0; e < 2; e++)
      store_shared2(codes_at + (unit * 8 + 2 * j + e) * TILE + (eight ^ unit) * 8, codes4(x[e][0], x[e][1], x[e][2], x[e][3]),
                    codes4(x[e][4], x[e][5], x[e][6], x[e][7]));
  }
  block_sync();
#pragma unroll
  for (u32 i = 0; i < TILE; i += TILE_THREADS / 8) {
    const u32 own = i + threadIdx.x / 8, part = threadIdx.x % 8, key = own / 8;
    const Vec found = load_vector(codes_at + own * TILE + ((2 * part ^ key) & 14) * 8);
    const u32 first = key % 2 * 2;
    const Vec line = {{first ? found.w[2] : found.w[0], first ? found.w[3] : found.w[1], first ? found.w[0] : found.w[2],
                       first ? found.w[1] : found.w[3]}};
    if (right * TILE + own < a.columns)
      store16((char*)a.turned + (i64)(right * TILE + own) * a.padded + down * TILE + part * 16, line);
  }
}

}  // namespace quantrot
