// A packed MXFP4 weight as e4m3 with one power of two a row, and as bfloat16, on Hopper. Follows expanded_rows.cuh.

namespace quantrot {

struct ExpandArgs {
  const u64* packed;           // [rows, groups, 2]
  const unsigned char* scale;  // [rows, groups]
  Words* e4m3;                 // [rows, groups, 2]
  float* row_scale;            // [rows]
  int* outside;                // [rows], or null: they are not counted
  int rows, groups;
};

// Sixteen codes. A group's eight magnitudes are two words of bytes, from which codes pick theirs.
__device__ __forceinline__ Words expand_codes(u64 codes, u32 byte, int top) {
  const bool finite = byte != 255;
  const u32 unit = window_unit((int)byte - 127 - top + TOP, finite);
  const auto two = [&](u32 halves) { return half_to_e4m3(times_half(halves, unit)); };
  const u32 low = two(0x38000000u) | two(0x3E003C00u) << 16, high = two(0x42004000u) | two(0x46004400u) << 16;
  u32 e4m3[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 four = finite ? (u32)(codes >> 16 * i) : 0;
    const u32 signs = pick_bytes(0x80808080u, 0x80808080u, four);  // 0xFF of negative codes
    e4m3[i] = select_bits(pick_bytes(low, high, four & 0x7777u), signs << 7, 0x80808080u);
  }
  return {e4m3[0], e4m3[1], e4m3[2], e4m3[3]};
}

// A packed weight as e4m3, a warp a row. Launched as a programmatic dependent of a kernel that has waited for all before
// it, and whose results this one does not read, it runs beside that kernel, and ends after it.
__device__ __forceinline__ void expand(const ExpandArgs& args, int block) {
  constexpr int EACH = 8;
  const int lane = lane_number(), row = block * (blockDim.x / 32) + warp_number(), units = args.groups * 2;
  if (row < args.rows) {
    const u64* const packed = args.packed + (i64)row * units;
    const unsigned char* const scale = args.scale + (i64)row * args.groups;
    u64 codes[EACH];
    const auto load = [&](int first) {
#pragma unroll
      for (int i = 0; i < EACH; i++) codes[i] = __ldg(packed + min(first + i * 32 + lane, units - 1));
    };
    load(0);
    int most = 0, least = 254;
    for (int g = lane; g < args.groups; g += 32) {
      const int byte = scale[g];
      if (byte != 255) most = max(most, byte), least = min(least, byte);
    }
    const int top = max(warp_max(most) - 127, LEAST_TOP), bottom = -warp_max(-least) - 127;
    for (int first = 0; first < units; first += 32 * EACH) {
      if (first) load(first);
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const int unit = first + i * 32 + lane;
        if (unit < units) store_words(args.e4m3 + (i64)row * units + unit, expand_codes(codes[i], scale[unit / 2], top));
      }
    }
    int outside = 0;
    if (bottom <= top - WINDOW) {
      for (int g = lane; g < args.groups; g += 32) {
        const bool used = ((packed[2 * g] | packed[2 * g + 1]) & 0x7777777777777777u) != 0;
        outside += used && scale[g] != 255 && scale[g] - 127 <= top - WINDOW;
      }
      outside = warp_sum(outside);
    }
    float* const count = args.outside ? (float*)args.outside : args.row_scale;  // or where the scale goes next: a branch spills
    if (lane == 0) count[row] = __int_as_float(outside), args.row_scale[row] = power(top - TOP);
  }
  if (blockIdx.x == gridDim.x - 1) grid_wait();
}

// One matrix, or the second by the blocks behind the first's.
__device__ __forceinline__ void expand_both(const ExpandArgs& first, const ExpandArgs& second) {
  const int each = blockDim.x / 32, blocks = (first.rows + each - 1) / each, block = blockIdx.x;
  block < blocks ? expand(first, block) : expand(second, block - blocks);
}

// --- Dequantization ----------------------------------------------------------------------------------------------------

// Codes P and P + 4 of a word (P: 0, 1), as bfloat16 times 2^-126: see decode.cuh.
template <int P>
__device__ __forceinline__ u32 pair(u32 word) {
  return (word & (0x000F000Fu << 4 * P)) * ((64u + 4096u) >> 4 * P) & 0x81C081C0u;
}

// Codes, and their groups' scales, to 16 bytes of numbers at a time, EACH a thread. bfloat16 has every value that float32 has.
template <class OUT, int EACH>
__device__ __forceinline__ void dequantize(const void* packed, const unsigned char* scale, void* y, i64 units) {
  constexpr int CODES = 16 / OUT::BYTES;
  const i64 first = (i64)blockIdx.x * (blockDim.x * EACH) + threadIdx.x;
  u32 word[EACH], byte[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const i64 at = min(first + i * (i64)blockDim.x, units - 1);
    word[i] = CODES == 8 ? __ldg((const u32*)packed + at) : __ldg((const unsigned short*)packed + at);
    byte[i] = __ldg(scale + at / (32 / CODES));
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const i64 at = first + i * (i64)blockDim.x;
    const u32 factor = byte[i] == 255 ? 0x7FFF7FFFu : max(byte[i] << 7, 0x40u) * 0x00010001u, high = word[i] >> 8;
    constexpr u32 UNIT = 0x7E807E80u;  // 2^126
    const u32 a = times_bf16(times_bf16(pair<0>(word[i]), UNIT), factor);  // numbers 0 and 4
    const u32 b = times_bf16(times_bf16(pair<1>(word[i]), UNIT), factor);
    const u32 c = times_bf16(times_bf16(pair<0>(high), UNIT), factor);
    const u32 d = times_bf16(times_bf16(pair<1>(high), UNIT), factor);
    if (at >= units) continue;
    if constexpr (CODES == 4) {
      store_words((char*)y + at * 16, {a << 16, b << 16, c << 16, d << 16});
    } else {
      Words v = {__byte_perm(a, b, 0x5410), __byte_perm(c, d, 0x5410), __byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x7632)};
      const auto narrow = [](u32 two) {
        return OUT::pack(__uint_as_float(two << 16), __uint_as_float(two & 0xFFFF0000u));
      };
      if constexpr (!OUT::BRAIN) v = {narrow(v.x), narrow(v.y), narrow(v.z), narrow(v.w)};
      store_words((char*)y + at * 16, v);
    }
  }
}

}  // namespace quantrot
