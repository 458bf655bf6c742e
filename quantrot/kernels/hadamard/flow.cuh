// Long rows of 16-bit elements through a ring of buffers that the copy engine fills, and one asynchronous product.

namespace quantrot {

// --- Rows of K * C elements, H = H_K (x) S_C, C = 64, 128 or 256 -----------------------------------------------------
//
// A row is K x C in memory and lies in shared memory as it is. A warp feeds the ring with rows while GROUPS warpgroups
// multiply: 64 rows of H_K^T are the register operand of wgmma, made from sign bits, the data is the shared memory
// operand, read across its rows (the hardware transposes), so nothing is ever moved. The product is exact, and it
// leaves each lane with two neighbouring columns of every eight: S_C is then additions between a lane's own sums, and
// a tf32 product for the three lowest bits of the column number.
//
// What bounds a row of 14336 is how much of all this happens at once. With a thread block a row, loads, products and
// stores took turns (60% of the issue slots, 0.66 of a copy for 108 * 128); here the buffer is free as soon as the
// product has read it, and different warpgroups are in different steps.

template <int D>
struct Number : Fp16 {};
template <>
struct Number<BF16> : Bf16 {};

// Row m of H_K^T is -1 where bit k of word k / 32 is set; defined by the program.
template <int K>
struct Signs {
  __device__ __forceinline__ static u32 word(u32 m, u32 w);
};

template <int D, int K, int C, int GROUPS, int STAGES>
struct FlowLayout {
  static constexpr int TILES = (K + 63) / 64;
  static constexpr int SHARE = TILES < GROUPS ? TILES : GROUPS;  // warpgroups at a row
  static constexpr int TURNS = GROUPS / SHARE;                 // rows in work
  static constexpr int STEPS = (K + 15) / 16;
  static constexpr int CHUNK = STEPS * 2048;                   // bytes of 64 columns, 128 bytes a row, swizzled
  static constexpr int INPUT = C / 64 * CHUNK;
  static constexpr int STAGE = 2048;                           // a warp's 16 rows of 64 columns on their way out
  static constexpr int BARRIERS = STAGES * INPUT + GROUPS * 4 * STAGE;
  static constexpr int REGISTERS = GROUPS == 3 ? 160 : 240;  // the feeders keep 24 of theirs
  // A warpgroup keeps its rows of H_K^T in registers where it always has the same and they fit.
  static constexpr bool HOLD = SHARE == TILES && 4 * STEPS + C / 2 + (D == BF16 ? 48 : 64) <= REGISTERS;
  static_assert(K % 2 == 0 && K <= 256, "rows of a box");
  static_assert(GROUPS == 2 || GROUPS == 3, "four leave a thread 112 registers, too few for 64 sums");
  static_assert(GROUPS % SHARE == 0, "warpgroups divide into rows");
  static_assert(STAGES % TURNS == 0, "a buffer belongs to the same warpgroups: they have seen the phase before");
};

// Columns 16 * step ... of rows m and m + 8 of H_K^T, as wgmma takes them; what is past K only meets zeros.
template <int D, int K>
__device__ __forceinline__ void operand_rows(u32 (&h)[4], u32 m, u32 step, u32 q) {
  constexpr u32 one = D == BF16 ? 0x3F803F80u : 0x3C003C00u;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const u32 word = Signs<K>::word(m + 8 * half, step / 2) >> (16 * (step % 2) + 2 * q);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const u32 bits = word >> (8 * j);
      h[half + 2 * j] = one ^ ((bits & 1) << 15) ^ ((bits & 2) << 30);
    }
  }
}

// The tile's 64 rows of the product: d[4 t + j] is row 16 * warp + lane / 4 + 8 * (j / 2), column
// 8 t + 2 * (lane % 4) + j % 2.
template <int D, int K, int C, class L>
__device__ __forceinline__ void multiply(float (&d)[C / 2], const u32 (&held)[L::HOLD ? L::STEPS : 1][4], u32 input,
                                         u32 m, u32 q) {
  constexpr int BATCH = L::HOLD ? L::STEPS : C == 256 ? 2 : 4;  // products in flight: sums leave few registers
#pragma unroll
  for (int first = 0; first < L::STEPS; first += BATCH) {
    u32 h[BATCH][4];
#pragma unroll
    for (int s = 0; s < BATCH; s++) {
      if constexpr (L::HOLD) {
#pragma unroll
        for (int i = 0; i < 4; i++) h[s][i] = held[s][i];
      } else if (first + s < L::STEPS) {
        operand_rows<D, K>(h[s], m, first + s, q);
      }
    }
    product_fence();
#pragma unroll
    for (int s = 0; s < BATCH; s++)
      if (first + s < L::STEPS)
        product_across<Number<D>>(d, h[s], operand_across(input + (first + s) * 2048, L::CHUNK), first + s > 0);
    product_commit();
    product_wait<0>();
    product_done(d);
  }
}

// A warp's rows by S_C and the scale. The tf32 product cuts its operand to 11 bits: bfloat16 does not notice once the
// mean of what is cut, 0.72 * 2^-11, is given back in the scale; for float16, and for codes, the rest is a second
// product. An infinity's rest would be inf - inf: the minimum replaces that NaN, while a NaN stays one in the first
// product.
template <int D, int C>
__device__ __forceinline__ void turn_columns(float (&d)[C / 2], float scale) {
#pragma unroll
  for (int step = 4; step < C / 4; step *= 2) {       // column bits from 3 up
#pragma unroll
    for (int i = 0; i < C / 2; i++)
      if (!(i & step)) {
        const float x = d[i], y = d[i + step];
        d[i] = x + y;
        d[i + step] = x - y;
      }
  }
  constexpr bool CUT = D == BF16 && SCALE_RULE == 0;
  if constexpr (CUT) scale *= 1.00035f;
#pragma unroll
  for (int i = 0; i < C / 4; i++) {                   // the last one scales
    const float x = d[i], y = d[i + C / 4] * scale;
    d[i] = fmaf(x, scale, y);
    d[i + C / 4] = fmaf(x, scale, -y);
  }
  const u32 lane = lane_number(), g = lane >> 2;
  const u32 even = ((g >> 1 & lane) ^ (g >> 2 & lane >> 1)) & 1, odd = even ^ (g & 1);
  const float b0 = even ? -1.f : 1.f, b1 = odd ? -1.f : 1.f;  // S_8[2 q][g], S_8[2 q + 1][g]
#pragma unroll
  for (int t = 0; t < C / 8; t++) {
    const float a[4] = {d[4 * t], d[4 * t + 2], d[4 * t + 1], d[4 * t + 3]};
    float sums[4] = {0.f, 0.f, 0.f, 0.f};
    if constexpr (!CUT) {
      float rest[4];
#pragma unroll
      for (int i = 0; i < 4; i++) rest[i] = fminf(a[i] - __uint_as_float(__float_as_uint(a[i]) & 0xFFFFE000u), 0x1p118f);
      product_tf32(sums, rest, b0, b1);
    }
    product_tf32(sums, a, b0, b1);
#pragma unroll
    for (int i = 0; i < 4; i++) d[4 * t + i] = sums[i];
  }
}

// The warpgroups at a row turn its elements by the rotation's signs where they lie.
template <int K, int C, class L>
__device__ __forceinline__ void turn_signs(const Args& a, u32 input, i64 row, u32 thread, u32 meeting) {
  const signed char* signs = a.signs + row % a.sign_rows * (K * C);
#pragma unroll 1
  for (u32 i = thread; i < K * C / 8; i += 128 * L::SHARE) {
    const u32 unit = i % (C / 8), to = input + unit / 8 * L::CHUNK + swizzled(i / (C / 8), unit % 8 * 16);
    Vec v = load_vector(to);
    apply_signs16(v, signs + i * 8);
    store_vector(to, v);
  }
  fence_async();
  named_sync(meeting, 128 * L::SHARE);
}

// A warp's 16 rows of the product from m on, 64 columns at a time through its own piece of shared memory, as 16-byte
// vectors.
template <int D, int K, int C>
__device__ __forceinline__ void store_rows(char* y, const float (&d)[C / 2], u32 stage, u32 m) {
  const u32 lane = lane_number();
#pragma unroll
  for (int chunk = 0; chunk < C / 64; chunk++) {
#pragma unroll
    for (int t = 0; t < 8; t += 2) {
      const float* e = d + 4 * (8 * chunk + t);
      store_matrices(stage + swizzled(lane & 15, (t + (lane >> 4)) * 16), pack<D>(e[0], e[1]), pack<D>(e[2], e[3]),
                     pack<D>(e[4], e[5]), pack<D>(e[6], e[7]));
    }
    warp_sync();
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      const u32 r = 4 * i + (lane >> 3), unit = lane & 7;
      if (m + r < K)
        store16(y + ((m + r) * C + 64 * chunk + 8 * unit) * 2, load_vector(stage + swizzled(r, unit * 16)));
    }
    warp_sync();
  }
}

// The same as codes, 128 columns at a time. A lane's pairs of eight columns t and of t + 1 leave as one register, so the
// pairs lie alternately in shared memory until they are read.
template <int K, int C>
__device__ __forceinline__ void store_rows_codes(const Args& a, i64 row, const float (&d)[C / 2], u32 stage, u32 m) {
  const u32 lane = lane_number();
  char* const y = (char*)a.y + row * a.y_stride;
  constexpr int W = C / 64;                           // groups: 128 columns of rows lane / 4 and + 8
  float amax[W], own;
#pragma unroll
  for (int w = 0; w < W; w++) {
    amax[w] = 0.f;
#pragma unroll
    for (int i = 0; i < 64; i += 4) {
      const float* e = d + w / 2 * 64 + i + w % 2 * 2;
      amax[w] = larger(amax[w], larger(e[0], e[1]));
    }
  }
  {
    const float scale = scale_of(largest<W, 4>(amax));
    own = to_codes(scale);
    const u32 group = group_of<W, 4>(), r = m + lane / 4 + group % 2 * 8;
    if (lane % 4 < W && r < K) store_scale(a, (u32)row * (K * C / 128) + r * (C / 128) + group / 2, scale);
  }
#pragma unroll
  for (int chunk = 0; chunk < C / 128; chunk++) {
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; h++) factor[h] = from_group<W, 4>(own, 2 * chunk + h);
#pragma unroll
    for (int t = 0; t < 8; t += 2) {                  // units of 16 columns
      u32 w[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float *e = d + 64 * chunk + 8 * (t + i / 2) + 2 * (i % 2), f = factor[i % 2];
        w[i] = codes2(e[0] * f, e[1] * f) | codes2(e[4] * f, e[5] * f) << 16;
      }
      store_matrices(stage + swizzled(lane & 15, (t + (lane >> 4)) * 16), w[0], w[1], w[2], w[3]);
    }
    warp_sync();
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      const u32 r = 4 * i + (lane >> 3), unit = lane & 7;
      const Vec v = load_vector(stage + swizzled(r, unit * 16));
      if (m + r < K)
        store16(y + (m + r) * C + 128 * chunk + 16 * unit,
                Vec{{bytes_of(v.w[0], v.w[1], 0x5410), bytes_of(v.w[2], v.w[3], 0x5410),
                     bytes_of(v.w[0], v.w[1], 0x7632), bytes_of(v.w[2], v.w[3], 0x7632)}});
    }
    warp_sync();
  }
}

template <int D, int K, int C, int GROUPS, int STAGES, bool SIGNS>
__device__ __forceinline__ void flow_kernel(const TensorMap& map, const Args& a) {
  using L = FlowLayout<D, K, C, GROUPS, STAGES>;
  const u32 inputs = shared_memory(), full = inputs + L::BARRIERS, empty = full + 8 * STAGES;
  const u32 warp = warp_number(), lane = lane_number();
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < STAGES; s++) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, 4 * L::SHARE);
    }
    barrier_init_done();
  }
  constexpr u32 EMPTY = (L::STEPS * 16 - K) * 8;      // vectors of the rows past K, which no load writes
  for (u32 i = threadIdx.x; i < STAGES * (C / 64) * EMPTY; i += 128 * (GROUPS + 1))
    store_vector(inputs + i / EMPTY * L::CHUNK + K * 128 + i % EMPTY * 16, Vec{{0, 0, 0, 0}});
  fence_async();
  block_sync();

  Ring<STAGES> ring;
  if (warp >= 4 * GROUPS) {
    give_registers<24>();
    if (warp != 4 * GROUPS) return;
    const u64 policy = cache_policy<KEEP_INPUT>();
    const int pitch = (int)(a.x_stride / C);
    for (i64 row = blockIdx.x; row < a.rows; row += gridDim.x, ring.next()) {
      barrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
      barrier_expect(full + 8 * ring.stage, K * C * 2);
#pragma unroll
      for (int chunk = 0; chunk < C / 64; chunk++)
        tensor_load(inputs + ring.stage * L::INPUT + chunk * L::CHUNK, &map, 64 * chunk, (int)row * pitch,
                    full + 8 * ring.stage, policy);
    }
    return;
  }
  take_registers<L::REGISTERS>();

  const u32 group = warp / 4, q = lane & 3, top = 16 * (warp & 3) + (lane >> 2);
  const u32 stage = inputs + STAGES * L::INPUT + warp * L::STAGE;
  u32 held[L::HOLD ? L::STEPS : 1][4];
  if constexpr (L::HOLD) {
#pragma unroll
    for (u32 s = 0; s < L::STEPS; s++) operand_rows<D, K>(held[s], 64 * (group % L::SHARE) + top, s, q);
  }
  u32 turn = 0;
  for (i64 row = blockIdx.x; row < a.rows; row += gridDim.x, ring.next(), turn = turn + 1 == L::TURNS ? 0 : turn + 1) {
    if (turn != group / L::SHARE) continue;
    const u32 input = inputs + ring.stage * L::INPUT;
    barrier_wait(full + 8 * ring.stage, ring.parity);
    if constexpr (SIGNS)
      turn_signs<K, C, L>(a, input, row, threadIdx.x % (128 * L::SHARE), 1 + group / L::SHARE);
#pragma unroll 1
    for (u32 tile = group % L::SHARE; tile < L::TILES; tile += L::SHARE) {
      float d[C / 2];
      multiply<D, K, C, L>(d, held, input, 64 * tile + top, q);
      if (tile + L::SHARE >= L::TILES && lane == 0) barrier_arrive(empty + 8 * ring.stage);
      turn_columns<D, C>(d, a.scale);
      if constexpr (SCALE_RULE > 0) {
        store_rows_codes<K, C>(a, row, d, stage, 64 * tile + 16 * (warp & 3));
      } else {
        store_rows<D, K, C>((char*)a.y + row * a.y_stride * 2, d, stage, 64 * tile + 16 * (warp & 3));
      }
    }
  }
}

}  // namespace quantrot
