// Products on tensor cores, by a warpgroup (wgmma) and by a warp (mma). After hopper.cuh; the emulator has its own.
//
// Sources: PTX ISA 8.x, sections on wgmma, its matrix descriptor, and mma.

#ifndef QUANTROT_EMULATED
namespace quantrot {

// --- Products by a warpgroup -----------------------------------------------------------------------------------------
//
// d [64, N] (+)= a [64, 32] b [N, 32]^T, e4m3 by e4m3 in float32; the hardware keeps about 14 bits of a sum. Warp w of
// the warpgroup holds rows 16 w + g and + 8 (g = lane / 4, q = lane % 4): d[4 j + 2 h + e] is row g + 8 h, column
// 8 j + 2 q + e. Nothing may touch d between the product and the wait for it.

__device__ __forceinline__ void product_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void product_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int N>
__device__ __forceinline__ void product_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Says that d changes here: the compiler must not move its uses over a wait.
template <int W>
__device__ __forceinline__ void product_done(float (&d)[W]) {
#pragma unroll
  for (int i = 0; i < W; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int W>
__device__ __forceinline__ void product_done(int (&d)[W]) {
#pragma unroll
  for (int i = 0; i < W; i++) asm volatile("" : "+r"(d[i])::"memory");
}
__device__ __forceinline__ void product_done(float& x) { asm volatile("" : "+f"(x)::"memory"); }

#define QR_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define QR_8(i) QR_4(i), QR_4(i + 4)
#define QR_16(i) QR_8(i), QR_8(i + 8)
#define QR_32(i) QR_16(i), QR_16(i + 16)
#define QR_64(i) QR_32(i), QR_32(i + 32)
#define QR_WHOLE4(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define QR_WHOLE16(i) QR_WHOLE4(i), QR_WHOLE4(i + 4), QR_WHOLE4(i + 8), QR_WHOLE4(i + 12)
#define QR_WHOLE64(i) QR_WHOLE16(i), QR_WHOLE16(i + 16), QR_WHOLE16(i + 32), QR_WHOLE16(i + 48)
#define QR_TEXT4 "%0,%1,%2,%3"
#define QR_TEXT8 QR_TEXT4 ",%4,%5,%6,%7"
#define QR_TEXT16 QR_TEXT8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define QR_TEXT32 QR_TEXT16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define QR_TEXT64 QR_TEXT32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52," \
                            "%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define QR_40(i) QR_32(i), QR_8(i + 32)
#define QR_48(i) QR_32(i), QR_16(i + 32)
#define QR_80(i) QR_64(i), QR_16(i + 64)
#define QR_96(i) QR_64(i), QR_32(i + 64)
#define QR_112(i) QR_96(i), QR_16(i + 96)
#define QR_128(i) QR_64(i), QR_64(i + 64)
#define QR_56(i) QR_48(i), QR_8(i + 48)
#define QR_72(i) QR_64(i), QR_8(i + 64)
#define QR_88(i) QR_80(i), QR_8(i + 80)
#define QR_104(i) QR_96(i), QR_8(i + 96)
#define QR_120(i) QR_112(i), QR_8(i + 112)
#define QR_TEXT40 QR_TEXT32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define QR_TEXT48 QR_TEXT32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define QR_TEXT80 QR_TEXT64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define QR_TEXT96 QR_TEXT80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define QR_TEXT112 QR_TEXT96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define QR_TEXT56 QR_TEXT48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define QR_TEXT72 QR_TEXT64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define QR_TEXT88 QR_TEXT80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define QR_TEXT104 QR_TEXT96 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define QR_TEXT120 QR_TEXT112 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define QR_TEXT128 QR_TEXT112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define QR_PRODUCT(N, W, A, B, S)                                                                                   \
  asm volatile("{.reg .pred add;\nsetp.ne.b32 add, %" S ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N                \
               "k32.f32.e4m3.e4m3 {" QR_TEXT##W "}, %" A ", %" B ", add, 1, 1;}"                                    \
               : QR_##W(0)                                                                                          \
               : "l"(a), "l"(b), "r"((int)add))
#define QR_PRODUCT_REGISTERS(N, W, A0, A1, A2, A3, B, S)                                                            \
  asm volatile("{.reg .pred add;\nsetp.ne.b32 add, %" S ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N                \
               "k32.f32.e4m3.e4m3 {" QR_TEXT##W "}, {%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" B ", add, 1, 1;}"      \
               : QR_##W(0)                                                                                          \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add))

// a and b are operands in shared memory (see `operand`); without `add`, d is overwritten.
template <int W>
__device__ __forceinline__ void product(float (&d)[W], u64 a, u64 b, bool add) {
  static_assert(W == 4 || W == 8 || W == 16 || W == 32 || (W >= 40 && W <= 96 && W % 8 == 0), "N is 2 W");
  if constexpr (W == 4) QR_PRODUCT(8, 4, "4", "5", "6");
  if constexpr (W == 8) QR_PRODUCT(16, 8, "8", "9", "10");
  if constexpr (W == 16) QR_PRODUCT(32, 16, "16", "17", "18");
  if constexpr (W == 32) QR_PRODUCT(64, 32, "32", "33", "34");
  if constexpr (W == 40) QR_PRODUCT(80, 40, "40", "41", "42");
  if constexpr (W == 48) QR_PRODUCT(96, 48, "48", "49", "50");
  if constexpr (W == 56) QR_PRODUCT(112, 56, "56", "57", "58");
  if constexpr (W == 64) QR_PRODUCT(128, 64, "64", "65", "66");
  if constexpr (W == 72) QR_PRODUCT(144, 72, "72", "73", "74");
  if constexpr (W == 80) QR_PRODUCT(160, 80, "80", "81", "82");
  if constexpr (W == 88) QR_PRODUCT(176, 88, "88", "89", "90");
  if constexpr (W == 96) QR_PRODUCT(192, 96, "96", "97", "98");
}

// a in registers: a[2 h + r] holds row g + 8 r, columns 16 h + 4 q ... + 3, of the warp's 16 rows.
template <int W>
__device__ __forceinline__ void product(float (&d)[W], const u32 (&a)[4], u64 b, bool add) {
  static_assert(W == 4 || W == 8 || W == 16 || W == 32 || W == 48 || W == 64 || W == 96 || W == 128,
                "N is 2 W: 8, 16, 32, 64, 96, 128, 192 or 256");
  if constexpr (W == 4) QR_PRODUCT_REGISTERS(8, 4, "4", "5", "6", "7", "8", "9");
  if constexpr (W == 8) QR_PRODUCT_REGISTERS(16, 8, "8", "9", "10", "11", "12", "13");
  if constexpr (W == 16) QR_PRODUCT_REGISTERS(32, 16, "16", "17", "18", "19", "20", "21");
  if constexpr (W == 32) QR_PRODUCT_REGISTERS(64, 32, "32", "33", "34", "35", "36", "37");
  if constexpr (W == 48) QR_PRODUCT_REGISTERS(96, 48, "48", "49", "50", "51", "52", "53");
  if constexpr (W == 64) QR_PRODUCT_REGISTERS(128, 64, "64", "65", "66", "67", "68", "69");
  if constexpr (W == 96) QR_PRODUCT_REGISTERS(192, 96, "96", "97", "98", "99", "100", "101");
  if constexpr (W == 128) QR_PRODUCT_REGISTERS(256, 128, "128", "129", "130", "131", "132", "133");
}

// The same of int8 codes, with exact sums.
__device__ __forceinline__ void product(int (&d)[64], const u32 (&a)[4], u64 b, bool add) {
  asm volatile("{.reg .pred add;\nsetp.ne.b32 add, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {" QR_TEXT64
               "}, {%64, %65, %66, %67}, %68, add;}"
               : QR_WHOLE64(0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
}

#define QR_PRODUCT16(N, W, TYPE, TURNED, A0, A1, A2, A3, B, S)                                                      \
  asm volatile("{.reg .pred add;\nsetp.ne.b32 add, %" S ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N                \
               "k16.f32." TYPE "." TYPE " {" QR_TEXT##W "}, {%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" B              \
               ", add, 1, 1, " TURNED ";}"                                                                          \
               : QR_##W(0)                                                                                          \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add))
#define QR_PRODUCT16_TYPES(N, W, TURNED, A0, A1, A2, A3, B, S)                                                      \
  if constexpr (T::BRAIN) {                                                                                         \
    QR_PRODUCT16(N, W, "bf16", TURNED, A0, A1, A2, A3, B, S);                                                       \
  } else {                                                                                                          \
    QR_PRODUCT16(N, W, "f16", TURNED, A0, A1, A2, A3, B, S);                                                        \
  }

// d [64, N] (+)= a [64, 16] b [16, N] in 16 bits (T: Bf16, Fp16), b contiguous along N (see `operand_across`): exact
// products, float32 sums. a[2 h + r] holds row g + 8 r, columns 8 h + 2 q and the next.
template <class T, int W>
__device__ __forceinline__ void product_across(float (&d)[W], const u32 (&a)[4], u64 b, bool add) {
  static_assert(W == 32 || W == 64 || W == 128, "N is 2 W: 64, 128 or 256");
  if constexpr (W == 32) QR_PRODUCT16_TYPES(64, 32, "1", "32", "33", "34", "35", "36", "37");
  if constexpr (W == 64) QR_PRODUCT16_TYPES(128, 64, "1", "64", "65", "66", "67", "68", "69");
  if constexpr (W == 128) QR_PRODUCT16_TYPES(256, 128, "1", "128", "129", "130", "131", "132", "133");
}

// The same with b [N, 16] contiguous along the sum: `operand`, whose numbers k are then of 16 columns.
template <class T, int W>
__device__ __forceinline__ void product16(float (&d)[W], const u32 (&a)[4], u64 b, bool add) {
  static_assert(W == 4 || W == 8 || W == 16 || W == 32 || (W >= 48 && W <= 128 && W % 8 == 0), "N is 2 W");
  if constexpr (W == 4) QR_PRODUCT16_TYPES(8, 4, "0", "4", "5", "6", "7", "8", "9");
  if constexpr (W == 8) QR_PRODUCT16_TYPES(16, 8, "0", "8", "9", "10", "11", "12", "13");
  if constexpr (W == 16) QR_PRODUCT16_TYPES(32, 16, "0", "16", "17", "18", "19", "20", "21");
  if constexpr (W == 32) QR_PRODUCT16_TYPES(64, 32, "0", "32", "33", "34", "35", "36", "37");
  if constexpr (W == 48) QR_PRODUCT16_TYPES(96, 48, "0", "48", "49", "50", "51", "52", "53");
  if constexpr (W == 56) QR_PRODUCT16_TYPES(112, 56, "0", "56", "57", "58", "59", "60", "61");
  if constexpr (W == 64) QR_PRODUCT16_TYPES(128, 64, "0", "64", "65", "66", "67", "68", "69");
  if constexpr (W == 72) QR_PRODUCT16_TYPES(144, 72, "0", "72", "73", "74", "75", "76", "77");
  if constexpr (W == 80) QR_PRODUCT16_TYPES(160, 80, "0", "80", "81", "82", "83", "84", "85");
  if constexpr (W == 88) QR_PRODUCT16_TYPES(176, 88, "0", "88", "89", "90", "91", "92", "93");
  if constexpr (W == 96) QR_PRODUCT16_TYPES(192, 96, "0", "96", "97", "98", "99", "100", "101");
  if constexpr (W == 104) QR_PRODUCT16_TYPES(208, 104, "0", "104", "105", "106", "107", "108", "109");
  if constexpr (W == 112) QR_PRODUCT16_TYPES(224, 112, "0", "112", "113", "114", "115", "116", "117");
  if constexpr (W == 120) QR_PRODUCT16_TYPES(240, 120, "0", "120", "121", "122", "123", "124", "125");
  if constexpr (W == 128) QR_PRODUCT16_TYPES(256, 128, "0", "128", "129", "130", "131", "132", "133");
}

// --- Products by a warp ----------------------------------------------------------------------------------------------

// d [16, 8] += a [16, 8] b [8, 8], float32 cut to 11 bits: a is row g + 8 (i % 2), column q + 4 (i / 2), b0 and b1 rows q
// and q + 4, column g; d[2 h + e] is row g + 8 h, column 2 q + e.
__device__ __forceinline__ void product_tf32(float (&d)[4], const float (&a)[4], float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
        "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// d [16, 8] += a [16, 16] b [16, 8] in 16 bits (T: Bf16, Fp16), by a warp: a is row g + 8 (i % 2), columns 2 q + 8 (i / 2) and
// the next, b0 and b1 rows 2 q (+ 8) and the next, column g; d[2 h + e] is row g + 8 h, column 2 q + e.
template <class T>
__device__ __forceinline__ void product_warp(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (T::BRAIN) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

}  // namespace quantrot
#endif

namespace quantrot {

// --- Operands in shared memory ---------------------------------------------------------------------------------------

// A wgmma operand of rows of 128 bytes along K as the copy engine lays it down with the 128-byte swizzle: 16-byte unit
// u of row r lies at u ^ (r % 8), eight rows are 1024 bytes. `address` is the tile's; `k` is the product's number along
// K, 32 bytes each: the swizzle is of address bits, so the hardware finds the units again.
__device__ __forceinline__ u64 operand(u32 address, int k) {
  const u32 low = ((address & 0x3FFFF) >> 4 | 1 << 16) + k * 2, high = 1024 >> 4 | 1 << 30;
  return (u64)high << 32 | low;
}

// The operand that lies so many units of 16 bytes behind this one.
__device__ __forceinline__ u64 operand_after(u64 first, u32 units) { return first >> 32 << 32 | ((u32)first + units); }

// The same of rows of 64 bytes in the 64-byte swizzle: unit u of row r at u ^ (r / 2 % 4), eight rows are 512 bytes.
__device__ __forceinline__ u64 operand_short(u32 address, int k) {
  const u32 low = ((address & 0x3FFFF) >> 4 | 1 << 16) + k * 2, high = 512 >> 4 | 2u << 30;
  return (u64)high << 32 | low;
}

// An operand of 8 rows without a swizzle: 16-byte unit u of row r lies at u * lead + r * 16. `lead` may be less than 128: rows
// are then read from other units' places, for whoever leaves their results. `address` is the first unit's.
__device__ __forceinline__ u64 operand_plain(u32 address, u32 lead) {
  return (u64)((address & 0x3FFFF) >> 4 | lead >> 4 << 16) | (u64)(lead >> 4) << 32;  // the last: from 8 rows to the next
}

// An operand of 16-bit rows that are contiguous across the product: pieces of 64 columns, 128 bytes a row, swizzled as
// above; `piece` bytes from 64 columns to the next. `address` is the tile's plus 2048 bytes for each 16 rows.
__device__ __forceinline__ u64 operand_across(u32 address, u32 piece) {
  return (u64)((address & 0x3FFFF) >> 4) | (u64)(piece >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

}  // namespace quantrot
