// Some ten to 4096 tokens in e4m3 by a packed weight: parts of kernels/mixed (multiply.cuh, gemm.cuh, parts.cuh), whose
// codes are MXFP4's and whose products are e4m3's.
//
// A block of K is 128 columns: 64 bytes of codes a row, 128 of a token. Lane q of a row takes group q of the block, whose
// word j is its part of product j; so tokens lie in that order (`arranged` of hopper_batch.py): of 128 columns, byte
// 32 j + 16 h + 4 q + i is column 32 q + 8 j + 4 h + i.
//
// The e4m3 of a group's eight magnitudes, value * 2^d with d = exponent - top + 6, are 8 bytes of a table in shared memory, from
// which codes pick theirs by byte permutations: 9 instructions for eight codes. `top` is the largest exponent of the
// row in this part of K; the sums are multiplied by 2^(top - 6), which is exact, before the parts are added. A group more than
// 14 binades below the top is zeros in the table; if its codes are not, what is missing is added at the end (`add_missing`),
// slowly, as it is of a token's groups that its e4m3 does not hold.

namespace quantrot {

struct BatchArgs : MixedArgs {  // scale: the bytes [rows, groups]; token: e4m3, arranged
  const unsigned char* packed;  // [rows, groups, 16]
  const float* token_scale;     // [columns]
  // Null, or of tokens that were MXFP4, by powers of two: above zero where e4m3 lacks a group, which these hold.
  const int* outside;                  // [columns]
  const unsigned char* token_packed;   // [columns, groups, 16]
  const unsigned char* token_bytes;    // [columns, groups]
};

template <class T_>
struct BatchOperands {
  static constexpr int GROUP = 1;  // the sums are scaled when they come to the end
  static constexpr bool WEIGHT = true;
  using T = T_;
  using S = None;
  using B = None;
};

constexpr int E4M3_TOP = 6, E4M3_WINDOW = 15, LEAST_BYTE = 7;  // of a top: 2^(top - 6) stays a normal float32
constexpr int NAN_BYTE = 255, TABLE = 512;                       // entries of 8 bytes; number 255 is that of the top

// From shared memory: its lower address first.
struct Magnitudes {
  u32 low, high;
};

// 2^(byte - 127).
__device__ __forceinline__ float power_of(u32 byte) { return __uint_as_float(byte ? byte << 23 : 0x00400000u); }

// Eight codes -> e4m3, four a word.
__device__ __forceinline__ void widen(u32 word, const Magnitudes& of, u32& first, u32& second) {
  const u32 which = word & 0x77777777u, even = word << 4;  // sign bits to the end of a byte
  first = __byte_perm(of.low, of.high, which) | (__byte_perm(even, word, 0x5140) & 0x80808080u);
  second = __byte_perm(of.low, of.high, which >> 16) | (__byte_perm(even, word, 0x7362) & 0x80808080u);
}

// The product of four e4m3 and four.
__device__ __forceinline__ float dot(u32 a, u32 b) {
  u32 x[2], y[2];
  unpack_e4m3(a, x[0], x[1]), unpack_e4m3(b, y[0], y[1]);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++)
    sum += Fp16::value((unsigned short)(x[i / 2] >> 16 * (i % 2))) * Fp16::value((unsigned short)(y[i / 2] >> 16 * (i % 2)));
  return sum;
}

template <class P>
struct BatchMultiplier {
  static constexpr int ALL = P::TEAMS * P::GROUPS;
  static constexpr u32 TABLE_AT = P::TEAMS * P::STAGES * (P::STAGE + 16) + ALL * (256 * P::W / P::TEAMS + 8);  // after parts'
  const BatchArgs& args;
  Lane lane;
  u32 base, full, empty, rank;
  Ring<P::STAGES> ring;
  u32 from, scales;  // the lane's codes in a tile, of the first row; its first scale byte, of the first row
  u32 nearest[2];    // of each row: the table's entry of the scale byte 0
  u32 missing = 0;           // bit r: whether row r of the lane has codes below the window
  Quad words[2];
  Magnitudes now[2];
  u32 a[2][4];

  __device__ __forceinline__ BatchMultiplier(const MixedArgs& given, u32 group, u32 base, u32 full, u32 empty, u32 rank)
      : args(static_cast<const BatchArgs&>(given)), lane(group), base(base), full(full), empty(empty), rank(rank) {
    const u32 row = group * 64 + warp_number() % 4 * 16 + lane_number() / 4, byte = lane_number() % 4 * 16;
    from = P::BLOCKS == 1 ? swizzled64(row, byte) : swizzled(row, byte);
  }

  __device__ __forceinline__ static u32 table() { return shared_memory() + TABLE_AT; }

  __device__ __forceinline__ int top(int r) const { return NAN_BYTE - (int)(nearest[r] - table()) / 8; }

  __device__ __forceinline__ void fill_table() const {
    for (int i = threadIdx.x; i < TABLE; i += 128 * ALL) {
      const int d = i - NAN_BYTE + E4M3_TOP;
      const float p = d <= E4M3_TOP - E4M3_WINDOW || d > E4M3_TOP ? 0.f : __uint_as_float((u32)(127 + d) << 23);
      const u32 nan = d > E4M3_TOP ? 0x7F7F7F7Fu : 0u;
      store_shared2(table() + i * 8, to_e4m3(0.f, 0.5f * p, p, 1.5f * p) | nan, to_e4m3(2 * p, 3 * p, 4 * p, 6 * p) | nan);
    }
  }

  // What the lane's two rows have for a window.
  __device__ __forceinline__ void find_tops(int first, int blocks) {
    const int q = lane_number() % 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const u32 at = scales - q + r * 8 * scales_pitch(args.segment);
      int most = LEAST_BYTE, least = NAN_BYTE;
      for (int c = q; c < blocks; c += 4) {
        const u32 bytes = load_shared1(at + c * 4);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int byte = bytes >> 8 * i & 255;
          most = max(most, byte == NAN_BYTE ? 0 : byte), least = min(least, byte);
        }
      }
#pragma unroll
      for (int across = 1; across < 4; across *= 2) {
        most = max(most, (int)__shfl_xor_sync(0xFFFFFFFFu, (u32)most, across));
        least = min(least, (int)__shfl_xor_sync(0xFFFFFFFFu, (u32)least, across));
      }
      u32 found = 0;
      if (least <= most - E4M3_WINDOW) found = below(lane.rows[r], at, first, blocks, most);
      found |= __shfl_xor_sync(0xFFFFFFFFu, found, 1);
      found |= __shfl_xor_sync(0xFFFFFFFFu, found, 2);
      missing |= (u32)(found != 0) << r;
      nearest[r] = table() + (NAN_BYTE - most) * 8;
    }
  }
  // Codes that are not zero in groups below the window, of the quarter of the blocks that is the lane's.
  __device__ __forceinline__ u32 below(int row, u32 at, int first, int blocks, int most) const {
    u32 found = 0;
    for (int c = lane_number() % 4; c < blocks; c += 4) {
      const u32 bytes = load_shared1(at + c * 4);
      for (int i = 0; i < 4; i++) {
        const int group = (first + c) * 4 + i;
        if ((int)(bytes >> 8 * i & 255) > most - E4M3_WINDOW || group >= args.groups) continue;
        const u32* const codes = (const u32*)args.packed + ((i64)row * args.groups + group) * 4;
        for (int w = 0; w < 4; w++) found |= __ldg(codes + w) & 0x77777777u;
      }
    }
    return found;
  }

  __device__ __forceinline__ void come(int k, int b) {  // block k, number b of its stage
    const u32 tile = base + ring.stage * P::STAGE;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float2 entry = load_shared2(nearest[r] + load_shared_u8(scales + r * 8 * scales_pitch(args.segment) + k * 4) * 8);
      now[r] = {__float_as_uint(entry.x), __float_as_uint(entry.y)};
    }
    if (b == 0) barrier_wait(full + ring.stage * 8, ring.parity);
#pragma unroll
    for (int r = 0; r < 2; r++) words[r] = load_shared16bytes(tile + (from ^ b * 64) + r * (512 * P::BLOCKS));
  }

  __device__ __forceinline__ void back() const {  // the stage before this one
    hand_back<P>(empty + (ring.stage ? ring.stage - 1 : P::STAGES - 1) * 8, rank);
  }

  // The sums over `count` blocks of K from number `first` on.
  __device__ __forceinline__ void run(float (&sum)[P::W], int first, int count) {
    const int unit = blockIdx.x / P::SPLIT, tiles = parts_of(args.columns, P::COLUMNS);
    const int row = start_of(unit / tiles * P::ROWS, args.rows, P::ROWS) + warp_number() % (P::GROUPS * 4) * 16;
    fill_table();
    const u32 pitch = scales_pitch(args.segment);
    scales = take_scales(args, table() + TABLE * 8, pitch, row, first, count, [](u32 bytes) { return bytes; });
    scales += lane_number() % 4;
    find_tops(first, count);
    named_sync(1, 128 * ALL);
    come(0, 0);
    for (int k = 0; k < count; k += P::BLOCKS) {
#pragma unroll
      for (int b = 0; b < P::BLOCKS; b++) {
        const u32 at = base + ring.stage * P::STAGE + P::CODES + b * (P::COLUMNS * 128);
#pragma unroll
        for (int j = 0; j < 4; j++) {
          product_wait<1>();  // the operand before the last may be overwritten
          if (b == 0 && j == 1 && k > 0) back();
          u32(&to)[4] = a[j % 2];
#pragma unroll
          for (int r = 0; r < 2; r++) widen(words[r].w[j], now[r], to[r], to[2 + r]);
          product_fence();
          product(sum, to, operand(at, j), k > 0 || b > 0 || j > 0);
          product_commit();
        }
        if (b + 1 < P::BLOCKS) {
          come(k + b + 1, b + 1);
        } else {
          ring.next();
          if (k + P::BLOCKS < count) come(k + P::BLOCKS, 0);
        }
      }
    }
    product_wait<0>();
    product_done(sum);
    grid_wait();  // before the tokens' scales are read
    const int column = start_of(unit % tiles * P::COLUMNS, args.columns, P::COLUMNS) + lane_number() % 4 * 2;
    u32 lacking = missing;
    if (args.outside)
      for (int n = lane_number() / 4; n < P::W / 2; n += 8)  // eight lanes have the same columns
        lacking |= __ldg(args.outside + min(column + n / 2 * 8 + n % 2, args.columns - 1));
    const float scale[2] = {power_of(top(0) - E4M3_TOP), power_of(top(1) - E4M3_TOP)};
#pragma unroll
    for (int i = 0; i < P::W; i++)
      sum[i] *= scale[i / 2 % 2] * __ldg(args.token_scale + min(column + i / 4 * 8 + i % 2, args.columns - 1));
    if (__any_sync(0xFFFFFFFFu, lacking)) add_missing(sum, first, count, column);
  }

  // Products with groups that are zeros in e4m3, of the weight or of a token.
  __device__ __forceinline__ void add_missing(float (&sum)[P::W], int first, int count, int column) const {
    const Magnitudes plain = {0x3C383000u, 0x4C484440u};  // 0, 0.5, 1, 1.5; 2, 3, 4, 6
#pragma unroll 1
    for (int n = 0; n < P::W / 2; n++) {
      const int token = column + n / 2 * 8 + n % 2;
      if (token >= args.columns) break;
      const float unit = __ldg(args.token_scale + token);
      const bool apart = args.outside && __ldg(args.outside + token) > 0;
      if (!apart && !missing) continue;
      const int lowest = (int)(__float_as_uint(unit) >> 23) + E4M3_TOP - E4M3_WINDOW;  // of a token that is apart
      float add[2] = {0.f, 0.f};
#pragma unroll 1
      for (int group = first * 4; group < min((first + count) * 4, args.groups); group++) {
        const i64 in_token = (i64)token * args.groups + group;
        const int byte = apart ? __ldg(args.token_bytes + in_token) : NAN_BYTE;
        const bool lost = byte <= lowest;
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const i64 in_row = (i64)lane.rows[r] * args.groups + group;
          const int scale = __ldg((const unsigned char*)args.scale + in_row);
          if (!lost && (!(missing >> r & 1) || scale > top(r) - E4M3_WINDOW)) continue;
          float products = 0.f;
#pragma unroll 1
          for (int w = 0; w < 4; w++) {
            u32 a[2], b[2];
            widen(__ldg((const u32*)args.packed + in_row * 4 + w), plain, a[0], a[1]);
            if (lost) {
              widen(__ldg((const u32*)args.token_packed + in_token * 4 + w), plain, b[0], b[1]);
            } else {
              const u32* const at = (const u32*)args.token + ((i64)token * args.groups + group / 4 * 4) * 8 + group % 4;
              b[0] = __ldg(at + w * 8), b[1] = __ldg(at + w * 8 + 4);
            }
            products += dot(a[0], b[0]) + dot(a[1], b[1]);
          }
          add[r] += products * power_of(scale) * (lost ? power_of(byte) : unit);
        }
      }
#pragma unroll
      for (int i = 0; i < P::W; i++)
        if (i / 4 * 2 + i % 2 == n) sum[i] += add[i / 2 % 2];
    }
  }
};

template <class P, class T>
struct Chosen<P, BatchOperands<T>, ALIKE> {
  using Type = BatchMultiplier<P>;
};
template <class P, class T>
struct Chosen<P, BatchOperands<T>, PATIENT> {
  using Type = BatchMultiplier<P>;
};

}  // namespace quantrot
