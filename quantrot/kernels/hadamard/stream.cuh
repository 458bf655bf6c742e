// Rows of 32 ... 4096 elements in 16 bits as codes (see words.cuh): a warp's pieces come through its own ring of buffers.
//
// A warp transforms R * 256 neighbouring elements at a time, which are whole rows, by the two products of common.cuh and
// additions over the R vectors. While it works on one piece, the next STAGES - 1 are on their way to shared memory, each
// lane's own 16 bytes by its own copies: no lane waits for another, and what a piece needs once is done once for all.

namespace quantrot {

#ifndef QUANTROT_EMULATED
// Without a cache policy: the assembler of CUDA 13.0 loses the registers of one where the target is a register plus a
// uniform one, which the GPU answers with "illegal instruction".
__device__ __forceinline__ void copy_ahead(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void warp_sync() { __syncwarp(); }

// The line comes to L2, or does not: nothing depends on it, so it may be asked for before grid_wait.
__device__ __forceinline__ void warm_line(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
#endif

// sylvester8 for rows of N elements: zeros where it would mix lane bits that tell rows apart.
template <int N>
__device__ __forceinline__ Sylvester8 sylvester8_of() {
  const u32 lane = threadIdx.x & 31, g = lane >> 2;
  const u32 l2 = g & 1, l3 = g >> 1 & 1, l4 = g >> 2, c3 = lane & 1, c4 = lane >> 1 & 1;  // of the row, of the column
  const u32 odd = (N >= 128 ? l3 & c3 : 0) ^ (N >= 256 ? l4 & c4 : 0);
  const bool mixes = (N < 128 && l3 != c3) || (N < 256 && l4 != c4);
  const u32 f0 = mixes || (N < 64 && l2) ? 0 : 0x3F800000u | odd << 31;
  const u32 f2 = mixes || (N < 64 && !l2) ? 0 : 0x3F800000u | (N >= 64 ? odd ^ l2 : odd) << 31;
  const u32 minus = 0x80000000u;
  return {{{f0, f0, f2, f2}, {f0, f0 ^ minus, f2, f2 ^ minus}}};
}

// step_tf32 in two parts; what it makes of an infinity is NaN.
__device__ __forceinline__ void step_parts(float (&d)[4], const Sylvester8& h, float p0, float p1, float r0, float r1) {
  const auto rest = [](float f) { return f - __uint_as_float(__float_as_uint(f) & 0xFFFFE000u); };
  d[0] = d[1] = d[2] = d[3] = 0.f;
  mma_tf32(d, h.a[0], rest(p0), rest(p1));
  mma_tf32(d, h.a[1], rest(r0), rest(r1));
  mma_tf32(d, h.a[0], p0, p1);
  mma_tf32(d, h.a[1], r0, r1);
}

// 256 elements by additions only: infinities stay what they are, and in their rows.
template <int D, int N>
__device__ __forceinline__ void add_up(float (&y)[8], const Vec& v) {
#pragma unroll
  for (int j = 0; j < 4; j++) unpack<D>(v.w[j], y[2 * j], y[2 * j + 1]);
  butterflies_within<8, N>(y);
#pragma unroll
  for (int s = 1; s < 32 && s * 8 < N; s *= 2) {
    const float sign = threadIdx.x & s ? -1.f : 1.f;
#pragma unroll
    for (int j = 0; j < 8; j++) y[j] = fmaf(y[j], sign, __shfl_xor_sync(0xFFFFFFFFu, y[j], s));
  }
}

// The scale of this lane's group of 128: group_of<R, 16> of the half warp's R.
template <int R>
__device__ __forceinline__ float own_scale(const float (&y)[R][8], float factor) {
  float amax[R];
#pragma unroll
  for (int r = 0; r < R; r++) {
    amax[r] = fabsf(y[r][0]);
#pragma unroll
    for (int j = 1; j < 8; j++) amax[r] = larger(amax[r], y[r][j]);
  }
  return scale_of(largest<R, 16>(amax) * factor);
}

// A warp takes eight neighbouring rows: with scales in columns ([K / 128, M]) theirs are 32 bytes, the least that L2
// takes, and are stored as such. (Stored as they come, 4 bytes each, they cost 1.8 us of 29 at 1024.)
template <int D, int N, int R, int WARPS, int STAGES, bool SIGNS>
__device__ __forceinline__ void stream_kernel(const Args& a) {
  constexpr int PIECE = R * 256, GROUPS = PIECE / 128;
  constexpr int IN_R = N > 256 ? N / 256 : 1, ROWS = N > 256 ? 1 : 256 / N;  // rows of IN_R vectors
  constexpr int IN_ROW = N > 128 ? N / 128 : 1, KEPT = 8 * IN_ROW > 32 ? 8 * IN_ROW : 32;  // groups
  static_assert(R <= 16 && R % IN_R == 0 && STAGES >= 2, "whole rows, one group a lane at most");
  const u32 lane = threadIdx.x & 31, warp = warp_number();
  const u32 own = shared_memory() + (warp * STAGES * R * 32 + lane) * 16;
  const u32 kept = shared_memory() + WARPS * STAGES * R * 512 + warp * KEPT * 4;
  const i64 total = a.rows * N;
  const u32 pieces = (u32)((total + PIECE - 1) / PIECE);  // 32 bits count 2^39 elements
  const Pieces<KEPT / GROUPS> mine(pieces, gridDim.x * WARPS, blockIdx.x * WARPS + warp);
  const int count = mine.count;
  const int left_at_end = (int)(total - (i64)(pieces - 1) * PIECE) - (int)lane * 8;

  // Where this lane reads and writes codes.
  const u32 lane_row = N >= 256 ? 0 : lane * 8 / N, lane_column = N >= 256 ? lane * 8 : lane * 8 % N;
  const char* const x = (const char*)a.x + (lane_row * a.x_stride + lane_column) * 2;
  char* const y_at = (char*)a.y + lane * 8;
  const u32 group = group_of<R, 16>() * 2 + (lane >> 4);

  auto vector_at = [&](u32 piece, int r) {
    return x + ((i64)piece * (PIECE / N) * a.x_stride + r / IN_R * ROWS * a.x_stride + r % IN_R * 256) * 2;
  };
  auto copy = [&](u32 piece, u32 slot, int left) {
#pragma unroll
    for (int r = 0; r < R; r++)
      if (r * 256 < left) copy_ahead(own + (slot * R + r) * 512, vector_at(piece, r));
  };
  auto fetch = [&](u32 piece, u32 slot) {
    if (piece + 1 < pieces) {
      copy(piece, slot, PIECE);
    } else {
      copy(piece, slot, left_at_end);
    }
  };
  // The scales kept, of groups `least` up to `end`: neighbouring lanes have neighbours in memory, of a column or of a row.
  auto put_scales = [&](u32 least, u32 end) {
    constexpr u32 ROWS_KEPT = KEPT / IN_ROW;
    const u32 start = (end - 1) / KEPT * KEPT, row = start / a.in_row;
    const bool down = a.scale_row < a.scale_group;
    warp_sync();
#pragma unroll
    for (u32 i = lane; i < KEPT; i += 32) {
      const u32 r = down ? i % ROWS_KEPT : i / IN_ROW, column = down ? i / ROWS_KEPT : i % IN_ROW;
      const u32 group = start + r * IN_ROW + column;
      if (group < least || group >= end) continue;
      float scale;
      load_shared4(kept + (group - start) * 4, scale);
      if (a.in_row == IN_ROW) {
        a.scales[(row + r) * a.scale_row + column * a.scale_group] = scale;
      } else {
        store_scale(a, group, scale);
      }
    }
    warp_sync();
  };
  i64 row = 0;
  auto vector = [&](u32 slot, int r) {
    Vec v = load_vec_shared(own + (slot * R + r) * 512);
    if constexpr (SIGNS)
      apply_signs16(v, a.signs + (row + r / IN_R * ROWS) % a.sign_rows * N + lane_column + r % IN_R * 256);
    return v;
  };

  // What is left to do on a piece's vectors, and this lane's scale.
  auto whole = [&](float(&y)[R][8]) {
    butterflies<R, 8, 1, IN_R>(y);
    return own_scale(y, a.scale);
  };

  Sylvester16 h = sylvester16<D>();
  Sylvester8 h8 = sylvester8_of<N>();
  keep_apart(h.a, 0), keep_apart(h8.a[0], 4), keep_apart(h8.a[1], 8);
  if (count && mine.first + 1 < pieces) {
#pragma unroll
    for (int r = 0; r < R; r++) warm_line(vector_at(mine.first, r));
  }
  grid_wait();
  u32 slot = 0, piece = mine.first, coming = piece, least = piece;
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++, coming = mine.after(coming)) {
    if (s < count) fetch(coming, s);
    copies_commit();
  }
  for (int i = 0; i < count; i++) {
    copies_wait<STAGES - 2>();
    if (i + STAGES - 1 < count) fetch(coming, (slot ? slot : STAGES) - 1);
    coming = mine.after(coming);
    copies_commit();
    if constexpr (SIGNS) row = (i64)piece * (PIECE / N) + lane_row;
    float y[R][8];
#pragma unroll
    for (int r = 0; r < R; r++) {
      float d[2][4];
      first_product<D>(d, h, vector(slot, r));
#pragma unroll
      for (int e1 = 0; e1 < 2; e1++) {
        float o[4];
        step_parts(o, h8, d[0][2 * e1], d[0][2 * e1 + 1], d[1][2 * e1], d[1][2 * e1 + 1]);
#pragma unroll
        for (int j = 0; j < 4; j++) y[r][2 * e1 + j % 2 + j / 2 * 4] = o[j];
      }
    }
    float scale = whole(y);
    if (__any_sync(0xFFFFFFFFu, !(scale <= 0x1.fffffep127f))) {
#pragma unroll
      for (int r = 0; r < R; r++) add_up<D, N>(y[r], vector(slot, r));
      scale = whole(y);
    }
    const float factor = a.scale * to_codes(scale);
    u32 words[R][2];
#pragma unroll
    for (int r = 0; r < R; r++) {
      const float f = from_group<R, 16>(factor, r);
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const float* z = y[r] + 4 * k;
        words[r][k] = codes4(z[0] * f, z[1] * f, z[2] * f, z[3] * f);
      }
    }
    if (lane % 16 < R) store_shared4(kept + (piece * GROUPS % KEPT + group) * 4, scale);
    auto put = [&](int left) {
      char* to = y_at + (i64)piece * PIECE;
#pragma unroll
      for (int r = 0; r < R; r++)
        if (r * 256 < left) store8(to + r * 256, words[r][0], words[r][1]);
    };
    if (piece + 1 < pieces) {
      put(PIECE);
    } else {
      put(left_at_end);
    }
    const u32 next = mine.after(piece);
    if (next % (KEPT / GROUPS) == 0 || next != piece + 1 || i + 1 == count) {
      put_scales(least * GROUPS, min((piece + 1) * GROUPS, (u32)(total / 128)));
      least = next;
    }
    piece = next;
    if (++slot == STAGES) slot = 0;
  }
}

}  // namespace quantrot
