// MXFP4 of a transpose, on Hopper: groups along the rows of 16-bit elements, or of float32. Follows rows.cuh.
//
// A thread block of two warps copies tiles of 128 rows by 64 columns, whole lines, ahead; a warp takes half of every row. A
// lane owns the 128 rows of a column, and with them a Hadamard block of up to 128. 16-byte unit u of row r, of 16-bit
// elements, lies at u ^ 4 (r % 2), so that the two rows of each of four units that ldmatrix reads and turns at once meet no
// bank twice; float32 is read column beside column.

namespace quantrot {

struct TransposeArgs {
  const void* x;                  // [rows, columns] elements, or codes [rows, columns / 2]
  const unsigned char* in_scale;  // of codes: [rows, columns / 32]
  const float* signs;             // [32 * SPAN], +-1
  unsigned char* packed;          // [columns, rows / 2]
  unsigned char* scale;           // [columns, rows / 32]
  u32* mask;                      // [columns, rows / 32]
  i64 pitch;                      // of x in bytes
  int rows, columns;
  float root;
  Key key;
  int down;                       // of elements: whether one tile follows another down the rows, not along them
  int staged;                     // of codes: one or two rows of in_scale are whole units of 16 bytes, a row of a map; 0: none
  int run;                        // of codes: tiles that come together
  const u64* drawn;               // of a kernel that adds them to the key

  __device__ __forceinline__ TransposeArgs with_drawn() const {
    grid_wait();
    TransposeArgs now = *this;
    now.key = key.with(drawn);
    return now;
  }
};

constexpr u32 TALL = 128;
template <class IN>
constexpr u32 WIDE = 64 * IN::BYTES;  // bytes of a tile's row

// A tile's place, carried along: dividing by a number that the compiler does not know takes some twenty instructions, which
// wait for each other.
struct Place {
  u32 row, column;

  __device__ __forceinline__ Place(u32 row, u32 column) : row(row), column(column) {}
  __device__ __forceinline__ Place(u32 tile, u32 row_tiles, u32 column_tiles, bool down)
      : row(down ? tile % row_tiles : tile / column_tiles), column(down ? tile / row_tiles : tile % column_tiles) {}
  __device__ __forceinline__ void advance(const Place& by, u32 row_tiles, u32 column_tiles, bool down) {
    row += by.row, column += by.column;
    if (down && row >= row_tiles) row -= row_tiles, column++;
    if (!down && column >= column_tiles) column -= column_tiles, row++;
  }
};

#ifdef QUANTROT_EMULATED
#include "columns.h"
#else
// Four 8 x 8 tiles of 16-bit elements: lane l's address is of row l % 8 of tile l / 8, and it gets rows 2 (l % 4) and the next
// of column l / 4 of each.
__device__ __forceinline__ Words load_columns(u32 from) {
  Words v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}
#endif

template <class IN>
__device__ __forceinline__ void start_transpose(u32 to, const TransposeArgs& args, u32 row, u32 byte, u32 width) {
  constexpr u32 UNITS = WIDE<IN> / 16, AT_ONCE = 64 / UNITS;  // rows that the block copies in one go
  const u32 unit = threadIdx.x % UNITS, r = threadIdx.x / UNITS;
  const u32 at = min(byte + unit * 16, width - 16), last = args.rows - 1;
  to += r * WIDE<IN> + (IN::BYTES == 2 ? unit ^ r % 2 * 4 : unit) * 16;
  if (row + TALL <= args.rows) {
    const char* const from = (const char*)args.x + (row + r) * args.pitch + at;
#pragma unroll
    for (u32 i = 0; i < TALL; i += AT_ONCE) copy16(to + i * WIDE<IN>, from + i * args.pitch);
  } else {
#pragma unroll
    for (u32 i = 0; i < TALL; i += AT_ONCE)
      copy16(to + i * WIDE<IN>, (const char*)args.x + min(row + r + i, last) * args.pitch + at);
  }
}

// A lane's 32 N rows of a column from the tile's row `first` on, of which `at` is the address that ldmatrix takes of the lane,
// or that of its column.
template <class IN, int N, bool SIGNS>
__device__ __forceinline__ void read_columns(Group (&x)[N], u32 at, u32 first, u32 flips) {
  constexpr int ROWS = IN::BYTES == 2 ? 8 : 4;  // at once
#pragma unroll
  for (int i = 0; i < 32; i += ROWS)
#pragma unroll
    for (int n = 0; n < N; n++) {
      const u32 from = at + (first + n * 32 + i) * WIDE<IN>;
      float* const v = x[n].v + i;
      const auto flip = [&](int j) { return SIGNS ? load_shared_words(flips + (n * SIGN_PITCH + i + j) * 4) : Words{}; };
      if constexpr (IN::BYTES == 2) {
        const Words rows = load_columns(from);
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
          const Words f = flip(j);
          v[j] = signed_value<IN, false>(rows.at(j / 2), f.x), v[j + 1] = signed_value<IN, true>(rows.at(j / 2), f.y);
          v[j + 2] = signed_value<IN, false>(rows.at(j / 2 + 1), f.z), v[j + 3] = signed_value<IN, true>(rows.at(j / 2 + 1), f.w);
        }
      } else {
        const Words f = flip(0);
#pragma unroll
        for (int j = 0; j < 4; j++) v[j] = __uint_as_float(load_shared32(from + j * WIDE<IN>) ^ f.at(j));
      }
    }
}

template <class IN, int SPAN, bool SIGNS, int RULE, bool MASK, bool DITHER, int STAGES>
__device__ __forceinline__ void transpose(const TransposeArgs& args) {
  constexpr u32 COLUMNS = 64, LINE = WIDE<IN>, TRANSPOSE_TILE = TALL * LINE;  // of a tile; bytes
  constexpr bool HALF = IN::BYTES == 2;
  constexpr int N = SPAN ? SPAN : 1;
  const u32 lane = lane_number(), warp = warp_number(), mine = HALF ? lane % 4 * 8 + lane / 4 : lane;  // of the warp's 32
  const u32 ring = shared_memory(), groups = args.rows / 32, width = args.columns * IN::BYTES;
  const u32 row_tiles = (args.rows + TALL - 1) / TALL, column_tiles = (args.columns + COLUMNS - 1) / COLUMNS;
  const u32 flips = ring + STAGES * TRANSPOSE_TILE;
  if constexpr (SIGNS) {
    store_signs(flips, args.signs, SPAN);
    block_sync();
  }
  const Place by(gridDim.x, row_tiles, column_tiles, args.down);
  Place here(blockIdx.x, row_tiles, column_tiles, args.down), there = here;
  const auto inside = [&](const Place& p) { return p.row < row_tiles && p.column < column_tiles; };
  const auto start_ahead = [&](u32 to) {
    if (inside(there)) start_transpose<IN>(to, args, there.row * TALL, there.column * LINE, width);
    copies_commit();
    there.advance(by, row_tiles, column_tiles, args.down);
  };
  u32 into = 0, slot = 0;
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++, into += TRANSPOSE_TILE) start_ahead(ring + into);
  const u32 r = lane / 8 * 2 + lane % 2;
  const u32 rows_at = HALF ? r * LINE + (warp * 4 + lane % 8 / 2 ^ r % 2 * 4) * 16 : (warp * 32 + lane) * 4;
  // A column's codes come to lie in a row of the tile, in the warp's half of it.
  const auto unit_at = [&](u32 column, u32 unit) {
    const u32 turned = unit ^ column / 2 % 4, other = column % 2 * 4;
    return slot + column * LINE + (HALF ? warp * 4 + turned ^ other : warp * 8 + turned + other) * 16;
  };
  while (inside(here)) {
    const u32 first_column = here.column * COLUMNS + warp * 32, column = first_column + mine, row_group = here.row * 4;
    const i64 group = (i64)column * groups + row_group;
    here.advance(by, row_tiles, column_tiles, args.down);
    copies_wait<STAGES - 2>();
    block_sync();  // both have copied this tile, and are done with the one that is overwritten next
    u32 scales = 0, kept[4];
    Words codes[4];
    Philox four;
    const bool whole = SPAN == 4 || groups % 4 == 0;  // the lane's groups are four that share a call
#pragma unroll
    for (int first = 0; first < 4; first += N) {
      Group x[N];
      u32 bits[N];
      read_columns<IN, N, SIGNS>(x, ring + slot + rows_at, first * 32, flips);
      turn_groups<N>(x);
      const auto random = [&](int n) {
        if (first + n == 0 || !whole) four = Philox((u64)(group + first + n) / 4, args.key);
        return Random(four, SPAN == 4 ? first + n : group + first + n);
      };
      const auto keep = [&](int n, const Words& c) {
        codes[first + n] = c;
        if (first + n == 0) start_ahead(ring + into);  // with registers free: 100 us for 101, random 118 for 131 (blocks of 128)
      };
      scales |= quantize_groups<IN, SPAN, RULE, MASK, DITHER>(x, args.root, random, bits, keep) << 8 * first;
#pragma unroll
      for (int n = 0; n < N; n++) kept[first + n] = bits[n];
    }
    warp_sync();  // all have read what is overwritten now
#pragma unroll
    for (u32 k = 0; k < 4; k++) store_shared_words(ring + unit_at(mine, k), codes[k]);
    warp_sync();
    const u32 wide = first_column < (u32)args.columns ? args.columns - first_column : 0;
    if (row_group + lane % 4 < groups) {
      unsigned char* const to = args.packed + ((i64)(first_column + lane / 4) * groups + (row_group + lane % 4)) * 16;
#pragma unroll
      for (u32 n = 0; n < 32; n += 8)
        if (n + lane / 4 < wide) store_words(to + (u64)groups * (n * 16), load_shared_words(ring + unit_at(n + lane / 4, lane % 4)));
    }
    if (mine < wide && groups % 4 == 0) {
      store_part<4>(args.scale + group, scales);
      if constexpr (MASK) store_each<4>(args.mask + group, kept);
    } else if (mine < wide) {
#pragma unroll
      for (u32 n = 0; n < 4; n++)
        if (row_group + n < groups) {
          args.scale[group + n] = (unsigned char)(scales >> 8 * n);
          if constexpr (MASK) args.mask[group + n] = kept[n];
        }
    }
    into = into == (STAGES - 1) * TRANSPOSE_TILE ? 0 : into + TRANSPOSE_TILE;
    slot = slot == (STAGES - 1) * TRANSPOSE_TILE ? 0 : slot + TRANSPOSE_TILE;
  }
}

}  // namespace quantrot
