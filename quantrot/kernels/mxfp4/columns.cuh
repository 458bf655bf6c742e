// MXFP4 of a transpose, on Hopper: groups along the rows of 16-bit elements, or of a packed matrix. Follows rows.cuh.
//
// A thread block of 8 warps copies tiles of 128 rows by 128 bytes, some ahead; a warp takes 16 bytes of every row. Lane
// (c, s) owns the group of rows 32 s ... 32 s + 31 of column c: the four lanes of a column write 64 bytes side by side,
// and hold a Hadamard block of 64 or 128 as in rows.cuh. 16-byte unit u of row r lies at u ^ (r / 32) ^ 4 (r % 2), so that
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
constexpr u32 SIGN_PITCH = 36;   // words of 32 rows
constexpr u32 POWER_PITCH = 80;  // bytes of 32 rows' bfloat16: four lanes meet no bank twice

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

__device__ __forceinline__ void start_transpose(u32 to, const TransposeArgs& args, u32 row, u32 byte, u32 width) {
  const u32 unit = threadIdx.x % 8, at = min(byte + unit * 16, width - 16), last = args.rows - 1;
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    const u32 r = i * 32 + threadIdx.x / 8;
    copy16(to + r * WIDE + (unit ^ i ^ r % 2 * 4) * 16, (const char*)args.x + min(row + r, last) * args.pitch + at);
  }
}

// The low (HIGH: the high) 16-bit element of a word, negative where `flip` has the sign bit; of bfloat16 one instruction.
template <class IN, bool HIGH>
__device__ __forceinline__ float signed_value(u32 two, u32 flip) {
  if constexpr (IN::BRAIN) return __uint_as_float(HIGH ? (two & 0xFFFF0000u) ^ flip : two * 65536u + flip);
  return __uint_as_float(__float_as_uint(IN::value((unsigned short)(HIGH ? two >> 16 : two))) ^ flip);
}

template <class IN, bool PACKED, int SPAN, bool SIGNS, int RULE, bool MASK, bool DITHER, int STAGES>
__device__ __forceinline__ void transpose(const TransposeArgs& args) {
  constexpr int PASSES = PACKED ? 4 : 1, COLUMNS = PACKED ? 256 : 64;  // of a tile
  const u32 lane = lane_number(), warp = warp_number(), c = lane >> 2, s = lane & 3;
  const u32 ring = shared_memory(), powers = ring + STAGES * TRANSPOSE_TILE + warp * (4 * POWER_PITCH);
  const u32 groups = args.rows / 32, width = PACKED ? args.columns / 2 : args.columns * 2;
  const u32 row_tiles = (args.rows + TALL - 1) / TALL, column_tiles = (args.columns + COLUMNS - 1) / COLUMNS;
  const u32 flips = ring + STAGES * TRANSPOSE_TILE;  // elements: sign bits of 32 rows, for each s
  u32 flip[4];  // codes: those of rows lane, 32 + lane, ..., which their powers take
  if constexpr (SIGNS && PACKED)
#pragma unroll
    for (int i = 0; i < 4; i++) flip[i] = __float_as_uint(args.signs[i % SPAN * 32 + lane]) & 0x80000000u;
  if constexpr (SIGNS && !PACKED) {
    if (threadIdx.x < 128)
      store_shared32(flips + (warp * SIGN_PITCH + lane) * 4, __float_as_uint(args.signs[warp % SPAN * 32 + lane]) & 0x80000000u);
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
    const u32 first_row = here.row * TALL, first_column = here.column * COLUMNS + warp * (8 * PASSES);
    here.advance(by, row_tiles, column_tiles, args.down);
    if constexpr (PACKED) {  // lane l: rows l, 32 + l, ...
      const u32 pitch = args.columns / 32, at = min(first_column / 32, pitch - 1);
      warp_sync();
#pragma unroll
      for (u32 i = 0; i < 4; i++) {
        const u32 byte = __ldg(args.in_scale + (u64)min(first_row + i * 32 + lane, args.rows - 1u) * pitch + at);
        const u32 bits = (byte == 255 ? 0x7FC00000u : byte ? byte << 23 : 0x00400000u) ^ (SIGNS ? flip[i] : 0);
        const u32 next = __float_as_uint(other_lane(__uint_as_float(bits), 1));
        if (lane % 2 == 0) store_shared32(powers + i * POWER_PITCH + lane * 2, __byte_perm(bits, next, 0x7632));
      }
      warp_sync();
    }
    copies_wait<STAGES - 2>();
    block_sync();  // all have copied this tile, and read the one that is overwritten now
    start_ahead(ring + into);
    const u32 r = lane % 8, rows_at = ring + slot + (r / 2 * 32 + lane / 8 * 2 + r % 2) * WIDE + (warp ^ r / 2 ^ r % 2 * 4) * 16;
    into = into == (STAGES - 1) * TRANSPOSE_TILE ? 0 : into + TRANSPOSE_TILE;
    slot = slot == (STAGES - 1) * TRANSPOSE_TILE ? 0 : slot + TRANSPOSE_TILE;
#pragma unroll 1
    for (int pass = 0; pass < PASSES; pass++) {
      Group x;
      if constexpr (PACKED) {
#pragma unroll
        for (int i = 0; i < 32; i += 8) {
          const Words rows = load_columns(rows_at + i * WIDE), power = load_shared_words(powers + s * POWER_PITCH + i * 2);
#pragma unroll
          for (int j = 0; j < 4; j++) {
            const u32 two = times_bf16(times_bf16(pair<0>(rows.at(j) >> 4 * pass), 0x7E807E80u), power.at(j));  // 2^126
            x.v[i + j * 2] = __uint_as_float(two << 16), x.v[i + j * 2 + 1] = __uint_as_float(two & 0xFFFF0000u);
          }
        }
      } else {
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
      }
      x.turn_across<SPAN>();
      const u32 column = first_column + (PACKED ? c * 4 + pass : c);
      const i64 group = (i64)column * groups + (first_row / 32 + s);
      const Exponent exponent = exponent_of<RULE, SPAN != 0>(x, args.root);
      u32 within;
      Words codes =
          codes_of<RULE, MASK, DITHER>(x, fine_factor<RULE>(exponent.value, args.root), group, args.key, within);
      if (!exponent.finite) codes = {}, within = 0;
      if (column < (u32)args.columns && first_row / 32 + s < groups) {
        store_words(args.packed + group * 16, codes);
        args.scale[group] = exponent.byte();
        if constexpr (MASK) args.mask[group] = within;
      }
    }
  }
}

}  // namespace quantrot
