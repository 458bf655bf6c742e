// Heads of queries and keys behind RoPE and a rotation, for sm_90a: a head by a warp, as the kernel of one token turns its own,
// and as torch does, bit by bit. Follows one_token.cuh.

namespace quantrot {

// A row of 16-bit numbers, D / 32 neighbours a lane: as they lie, behind RoPE (each operation rounded), behind the rotation.
template <int D>
struct Neighbours {
  static constexpr int EACH = D / 32;
  u32 x[EACH / 2];

  __device__ __forceinline__ void load(const unsigned short* row) {
#pragma unroll
    for (int i = 0; i < EACH / 2; i++) x[i] = ((const u32*)row)[lane_number() * (EACH / 2) + i];
  }
  __device__ __forceinline__ void store(unsigned short* row) const {
#pragma unroll
    for (int i = 0; i < EACH / 2; i++) ((u32*)row)[lane_number() * (EACH / 2) + i] = x[i];
  }
  template <class T>
  __device__ __forceinline__ void turn(const Neighbours& cos, const Neighbours& sin) {
#pragma unroll
    for (int i = 0; i < EACH / 2; i++) {
      const u32 half = __shfl_xor_sync(0xFFFFFFFFu, x[i], 16) ^ (lane_number() < 16 ? 0x80008000u : 0u);
      x[i] = plus<T>(times<T>(x[i], cos.x[i]), times<T>(half, sin.x[i]));
    }
  }
  // By Sylvester's matrix times factor, behind signs; the sums of hadamard/reference.py.
  template <class T>
  __device__ __forceinline__ void rotate(const signed char* signs, float factor) {
    float v[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      v[i] = T::value((unsigned short)(x[i / 2] >> i % 2 * 16));
      if (signs && signs[lane_number() * EACH + i] < 0) v[i] = -v[i];
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const float other = __shfl_xor_sync(0xFFFFFFFFu, v[i], lanes);
        v[i] = lane_number() & lanes ? other - v[i] : v[i] + other;
      }
    }
#pragma unroll
    for (int apart = EACH / 2; apart > 0; apart /= 2) {
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        if (i & apart) continue;
        const float a = v[i], b = v[i + apart];
        v[i] = a + b, v[i + apart] = a - b;
      }
    }
#pragma unroll
    for (int i = 0; i < EACH / 2; i++) x[i] = T::pack(v[2 * i] * factor, v[2 * i + 1] * factor);
  }
};

struct TurnArgs {
  const unsigned short *q, *k, *cos, *sin;  // rows of D numbers; cos and sin null: no RoPE
  const signed char* signs;                 // +-1 [D] before the rotation, or null
  unsigned short *q_out, *k_out;            // [batch, tokens, heads or groups, D]
  i64 q_batch, q_token, q_head, k_batch, k_token, k_head, cos_batch, cos_token, sin_batch, sin_token;  // elements
  int tokens, heads, groups;
  float factor;  // of the rotation, 0 for none
};

// SHARE heads of a token, of its queries' and then its keys', a warp; a sequence's tokens along x, sequences along y.
template <int D, class T, int SHARE>
__device__ __forceinline__ void turn_heads(const TurnArgs& args) {
  const int count = args.heads + args.groups, parts = (count + SHARE - 1) / SHARE;
  const u32 item = blockIdx.x * (blockDim.x / 32) + warp_number();
  const i64 batch = blockIdx.y, token = item / parts, first = item % parts * SHARE;
  if (token >= args.tokens) return;
  grid_wait();
  Neighbours<D> row[SHARE], cos, sin;
#pragma unroll
  for (int i = 0; i < SHARE; i++) {
    const i64 head = min((int)first + i, count - 1), key = head - args.heads;
    row[i].load(key < 0 ? args.q + batch * args.q_batch + token * args.q_token + head * args.q_head
                        : args.k + batch * args.k_batch + token * args.k_token + key * args.k_head);
  }
  if (args.cos) {
    cos.load(args.cos + batch * args.cos_batch + token * args.cos_token);
    sin.load(args.sin + batch * args.sin_batch + token * args.sin_token);
  }
#pragma unroll
  for (int i = 0; i < SHARE; i++) {
    const i64 head = first + i, key = head - args.heads, place = batch * args.tokens + token;
    if (head >= count) break;
    if (args.cos) row[i].template turn<T>(cos, sin);
    if (args.factor != 0.f) row[i].template rotate<T>(args.signs, args.factor);
    row[i].store(key < 0 ? args.q_out + (place * args.heads + head) * D : args.k_out + (place * args.groups + key) * D);
  }
}

}  // namespace quantrot
