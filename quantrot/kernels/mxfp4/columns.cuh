// MXFP4 of a transpose, on Hopper: groups along the rows of 16-bit elements, or of a packed matrix. Follows rows.cuh.
//
// A thread block of 8 warps copies tiles of 128 rows by 128 bytes, some ahead; a warp takes 16 bytes of every row. Lane
// (c, s) owns the group of rows 32 s ... 32 s + 31 of column c: the four lanes of a column write 64 bytes side by side,
// and hold a Hadamard block of 64 or 128 as in rows.cuh. 16-byte unit u of row r lies at u ^ (r / 32), so that the four
// meet no bank twice.

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
constexpr u32 SCALE_PITCH = 36;  // floats of 32 rows

__device__ __forceinline__ void start_transpose(u32 to, const TransposeArgs& args, u32 row, u32 byte, u32 width) {
  const u32 unit = threadIdx.x % 8, at = min(byte + unit * 16, width - 16), last = args.rows - 1;
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    const u32 r = i * 32 + threadIdx.x / 8;
    copy16(to + r * WIDE + (unit ^ i) * 16, (const char*)args.x + min(row + r, last) * args.pitch + at);
  }
}

// The value of code c of a word, times 2^-126.
__device__ __forceinline__ float code_value(u32 word, u32 c) {
  const u32 top = word << (28 - 4 * c);
  return __uint_as_float((top & 0x80000000u) | (top >> 6 & 0x01C00000u));
}

// A 16-bit element, negative where `flip` has the sign bit; of bfloat16 shift and flip are one instruction.
template <class IN>
__device__ __forceinline__ float signed_value(u32 bits, u32 flip) {
  if constexpr (IN::BRAIN) return __uint_as_float(bits * 65536u + flip);
  return __uint_as_float(__float_as_uint(IN::value((unsigned short)bits)) ^ flip);
}

template <class IN, bool PACKED, int SPAN, bool SIGNS, int RULE, bool MASK, bool DITHER, int STAGES>
__device__ __forceinline__ void transpose(const TransposeArgs& args) {
  constexpr int PASSES = PACKED ? 4 : 1, COLUMNS = PACKED ? 256 : 64;  // of a tile
  const u32 lane = lane_number(), warp = warp_number(), c = lane >> 2, s = lane & 3;
  const u32 ring = shared_memory(), powers = ring + STAGES * TRANSPOSE_TILE + warp * (4 * SCALE_PITCH * 4);
  const u32 groups = args.rows / 32, width = PACKED ? args.columns / 2 : args.columns * 2;
  const u32 row_tiles = (args.rows + TALL - 1) / TALL, column_tiles = (args.columns + COLUMNS - 1) / COLUMNS;
  const u32 tiles = row_tiles * column_tiles;
  const u32 flips = ring + STAGES * TRANSPOSE_TILE;  // elements: sign bits of 32 rows, for each s
  u32 flip[4];  // codes: those of rows lane, 32 + lane, ..., which their powers take
  if constexpr (SIGNS && PACKED)
#pragma unroll
    for (int i = 0; i < 4; i++) flip[i] = __float_as_uint(args.signs[i % SPAN * 32 + lane]) & 0x80000000u;
  if constexpr (SIGNS && !PACKED) {
    if (threadIdx.x < 128)
      store_shared32(flips + (warp * SCALE_PITCH + lane) * 4, __float_as_uint(args.signs[warp % SPAN * 32 + lane]) & 0x80000000u);
    block_sync();
  }
  const auto row_tile = [&](u32 t) { return args.down ? t % row_tiles : t / column_tiles; };
  const auto column_tile = [&](u32 t) { return args.down ? t / row_tiles : t % column_tiles; };
  u32 ahead = blockIdx.x;
  u32 into = 0, slot = 0;
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++, ahead += gridDim.x, into += TRANSPOSE_TILE) {
    if (ahead < tiles) start_transpose(ring + into, args, row_tile(ahead) * TALL, column_tile(ahead) * WIDE, width);
    copies_commit();
  }
  for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x, ahead += gridDim.x) {
    const u32 first_row = row_tile(tile) * TALL, first_column = column_tile(tile) * COLUMNS + warp * (8 * PASSES);
    if constexpr (PACKED) {  // lane l: rows l, 32 + l, ...
      const u32 pitch = args.columns / 32, at = min(first_column / 32, pitch - 1);
      warp_sync();
#pragma unroll
      for (u32 i = 0; i < 4; i++) {
        const u32 byte = __ldg(args.in_scale + (u64)min(first_row + i * 32 + lane, args.rows - 1u) * pitch + at);
        const u32 bits = byte == 255 ? 0x7FC00000u : byte ? byte << 23 : 0x00400000u;
        store_shared32(powers + (i * SCALE_PITCH + lane) * 4, SIGNS ? bits ^ flip[i] : bits);
      }
      warp_sync();
    }
    copies_wait<STAGES - 2>();
    block_sync();  // all have copied this tile, and read the one that is overwritten now
    if (ahead < tiles) start_transpose(ring + into, args, row_tile(ahead) * TALL, column_tile(ahead) * WIDE, width);
    copies_commit();
    const u32 from = ring + slot + s * 32 * WIDE + (warp ^ s) * 16;
    into = into == (STAGES - 1) * TRANSPOSE_TILE ? 0 : into + TRANSPOSE_TILE;
    slot = slot == (STAGES - 1) * TRANSPOSE_TILE ? 0 : slot + TRANSPOSE_TILE;
#pragma unroll 1
    for (int pass = 0; pass < PASSES; pass++) {
      Group x;
      if constexpr (PACKED) {
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
          const Words power4 = load_shared_words(powers + (s * SCALE_PITCH + i) * 4);
          const u32 power[4] = {power4.x, power4.y, power4.z, power4.w};
#pragma unroll
          for (int j = 0; j < 4; j++) {
            const float value = code_value(load_shared32(from + (i + j) * WIDE + pass * 4), c);
            x.v[i + j] = __fmul_rn(__fmul_rn(value, 0x1p126f), __uint_as_float(power[j]));
          }
        }
      } else {
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
          const Words flip4 = SIGNS ? load_shared_words(flips + (s * SCALE_PITCH + i) * 4) : Words{};
#pragma unroll
          for (int j = 0; j < 4; j++) x.v[i + j] = signed_value<IN>(load_shared16(from + (i + j) * WIDE + c * 2), flip4.at(j));
        }
      }
      x.turn_across<SPAN>();
      const u32 column = first_column + pass * 8 + c;
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
