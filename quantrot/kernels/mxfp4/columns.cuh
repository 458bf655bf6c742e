// MXFP4 of a transpose, on Hopper: groups along the rows of 16-bit elements. Follows rows.cuh.
//
// A thread block of 8 warps copies tiles of 128 rows by 128 bytes, some ahead; a warp takes 16 bytes of every row. Lane
// (c, s) owns the group of rows 32 s ... 32 s + 31 of column c: the four lanes of a column write 64 bytes side by side,
// and hold a Hadamard block of 64 or 128 together. 16-byte unit u of row r lies at u ^ (r / 32) ^ 4 (r % 2), so that
// the four meet no bank twice, nor do the two rows of each that ldmatrix reads and turns at once.

namespace quantrot {

struct TransposeArgs {
  const void* x;                  // [rows, columns] 16-bit elements, or codes [rows, columns / 2]
  const unsigned char* in_scale;  // of codes: [rows, columns / 32]
  const float* signs;             // [32 * SPAN], +-1
  unsigned char* packed;          // [columns, rows / 2]
  unsigned char* scale;           // [columns, rows / 32]
  u32* mask;                      // [columns, rows / 32]
  i64 pitch;                      // of x in bytes
  int rows, columns;
  float root;
  Key key;
  int down;                       // whether one tile follows another down the rows, not along them
};

constexpr u32 TALL = 128, WIDE = 128, TRANSPOSE_TILE = TALL * WIDE;  // bytes

// A tile's place, carried along: dividing by a number that the compiler does not know takes some twenty instructions, which
// wait for each other.
struct Place {
  u32 row, column;

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

// Tiles in lines of `each`, by number (less than 2^24): a division by a number that the compiler does not know, in ten instructions.
struct Lines {
  u32 each;
  float inverse;

  __device__ __forceinline__ Lines(u32 each) : each(each), inverse(__fdividef(1.0f, (float)each)) {}
  __device__ __forceinline__ void find(u32 number, u32& line, u32& place) const {
    line = (u32)__fmul_rn((float)number, inverse), place = number - line * each;
    if ((int)place < 0) line--, place += each;
    else if (place >= each) line++, place -= each;
  }
};

__device__ __forceinline__ void start_transpose(u32 to, const TransposeArgs& args, u32 row, u32 byte, u32 width) {
  const u32 unit = threadIdx.x % 8, at = min(byte + unit * 16, width - 16), last = args.rows - 1;
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    const u32 r = i * 32 + threadIdx.x / 8;
    copy16(to + r * WIDE + (unit ^ i ^ r % 2 * 4) * 16, (const char*)args.x + min(row + r, last) * args.pitch + at);
  }
}

// A lane's group of a column, lane % 4 of the column's four from `first_row` on, turned, quantized and written.
template <int SPAN, int RULE, bool MASK, bool DITHER>
__device__ __forceinline__ void write_column(Group& x, const TransposeArgs& args, u32 first_row, u32 column) {
  const u32 groups = args.rows / 32, row_group = first_row / 32 + lane_number() % 4;
  const i64 group = (i64)column * groups + row_group;
  x.turn_across<SPAN>();
  const Exponent exponent = exponent_of<RULE, SPAN != 0>(x, args.root);
  u32 within;
  Words codes = codes_of<RULE, MASK, DITHER>(x, fine_factor<RULE>(exponent.value, args.root), group, args.key, within);
  if (!exponent.finite) codes = {}, within = 0;
  if (column < (u32)args.columns && row_group < groups) {
    store_words(args.packed + group * 16, codes);
    args.scale[group] = exponent.byte();
    if constexpr (MASK) args.mask[group] = within;
  }
}

template <class IN, int SPAN, bool SIGNS, int RULE, bool MASK, bool DITHER, int STAGES>
__device__ __forceinline__ void transpose(const TransposeArgs& args) {
  constexpr u32 COLUMNS = 64;  // of a tile
  const u32 lane = lane_number(), warp = warp_number(), c = lane >> 2, s = lane & 3;
  const u32 ring = shared_memory(), groups = args.rows / 32, width = args.columns * 2;
  const u32 row_tiles = (args.rows + TALL - 1) / TALL, column_tiles = (args.columns + COLUMNS - 1) / COLUMNS;
  const u32 flips = ring + STAGES * TRANSPOSE_TILE;  // sign bits of 32 rows, for each s
  if constexpr (SIGNS) {
    for (u32 i = 0; i < 4; i += SPAN) store_signs(flips + i * SIGN_PITCH * 4, args.signs, SPAN);
    block_sync();
  }
  const Place by(gridDim.x, row_tiles, column_tiles, args.down);
  Place here(blockIdx.x, row_tiles, column_tiles, args.down), there = here;
  const auto inside = [&](const Place& p) { return p.row < row_tiles && p.column < column_tiles; };
  const auto start_ahead = [&](u32 to) {
    if (inside(there)) start_transpose(to, args, there.row * TALL, there.column * WIDE, width);
    copies_commit();
    there.advance(by, row_tiles, column_tiles, args.down);
  };
  u32 into = 0, slot = 0;
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++, into += TRANSPOSE_TILE) start_ahead(ring + into);
  while (inside(here)) {
    const u32 first_row = here.row * TALL, first_column = here.column * COLUMNS + warp * 8;
    here.advance(by, row_tiles, column_tiles, args.down);
    copies_wait<STAGES - 2>();
    block_sync();  // all have copied this tile, and read the one that is overwritten now
    start_ahead(ring + into);
    const u32 r = lane % 8, rows_at = ring + slot + (r / 2 * 32 + lane / 8 * 2 + r % 2) * WIDE + (warp ^ r / 2 ^ r % 2 * 4) * 16;
    into = into == (STAGES - 1) * TRANSPOSE_TILE ? 0 : into + TRANSPOSE_TILE;
    slot = slot == (STAGES - 1) * TRANSPOSE_TILE ? 0 : slot + TRANSPOSE_TILE;
    Group x;
#pragma unroll
    for (int i = 0; i < 32; i += 8) {
      const Words rows = load_columns(rows_at + i * WIDE);
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const Words flip = SIGNS ? load_shared_words(flips + (s * SIGN_PITCH + i + j * 2) * 4) : Words{};
        x.v[i + j * 2] = signed_value<IN, false>(rows.at(j), flip.x);
        x.v[i + j * 2 + 1] = signed_value<IN, true>(rows.at(j), flip.y);
        x.v[i + j * 2 + 2] = signed_value<IN, false>(rows.at(j + 1), flip.z);
        x.v[i + j * 2 + 3] = signed_value<IN, true>(rows.at(j + 1), flip.w);
      }
    }
    write_column<SPAN, RULE, MASK, DITHER>(x, args, first_row, first_column + c);
  }
}

}  // namespace quantrot
