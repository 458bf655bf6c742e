"""From a narrow code to the wide type, exactly, in a handful of instructions for two values.

The tensor core multiplies equal types, so every code of the narrow operand becomes a bfloat16 or float16 on its way.
Integer-to-float conversions run at a fraction of the rate of everything else; the ones below are a byte permutation,
which puts the code into the low mantissa bits of a float, and packed arithmetic on pairs of floats. All are exact for
all 256 codes. Below, b is the byte, l its low seven bits, and hex numbers are the bits of one float.

float16 has ten mantissa bits, so a byte fits under the exponent of 1024, where the last bit is worth 1:

    uint8             64bb = 1024 + b                      subtract 1024:         b
    packed (q + 128)  64bb = 1024 + 128 + q                subtract 1152:         q
    int8              64bb, bit 7 flipped = 1152 + q       subtract 1152:         q

bfloat16 has seven. Under the exponent of 128 the last bit is worth 1, but bit 7 of the byte falls into the exponent:
f = 43bb is 128 + l when it is clear, and 256 + 2 l when it is set. Hence, with relu(t) = max(t, 0), which a fused
multiply-add does on the way:

    uint8             f / 2 - relu(128 - f / 2)            clear: f - 128 = l; set: f / 2 = 128 + l
    packed (q + 128)  the same with 128 less               clear: l - 128;     set: l
    int8              (43bb & ff7f) - (43bb & ff80)        128 + l minus 128 (clear) or 256 (set: 4380)

Every intermediate has at most eight significant bits, so nothing rounds. e4m3 codes go through the hardware's own
conversion to float16 where there is one, and through float32 to bfloat16; without, seven bits are moved under
float16's exponent and a multiplication by 2^8 moves the exponent's bias (exact for subnormals too), with NaN put back
by hand.

A zero point is an integer of the codes' range: |code - zero| <= 255 has eight significant bits, so subtracting it in
the wide type is exact as well.

Source of the permutation and of widening in registers: Manish Gupta, "Mixed-input matrix multiplication performance
optimizations", Google Research, 2024. The bfloat16 formulas here need no detour through float32.
"""

import re
from functools import lru_cache
from itertools import product

import triton
import triton.language as tl

KINDS = ("int8", "uint8", "packed", "e4m3")
_F16 = 0x64646464
_BF16 = 0x43434343
_STEPS: dict[tuple[str, str], tuple[int, dict[str, int], tuple[str, ...]]] = {
    ("uint8", "fp16"): (_F16, {"base": 0x6400}, ("sub.rn.f16x2 out, t, base",)),
    ("packed", "fp16"): (_F16, {"base": 0x6480}, ("sub.rn.f16x2 out, t, base",)),
    ("int8", "fp16"): (_F16, {"base": 0x6480, "sign": 0x0080}, ("xor.b32 t, t, sign", "sub.rn.f16x2 out, t, base")),
    ("uint8", "bf16"): (
        _BF16,
        {"half": 0x3F00, "minus_half": 0xBF00, "base": 0x4300},
        ("fma.rn.relu.bf16x2 r, t, minus_half, base", "neg.bf16x2 r, r", "fma.rn.bf16x2 out, t, half, r"),
    ),
    ("packed", "bf16"): (
        _BF16,
        {"half": 0x3F00, "minus_half": 0xBF00, "base": 0x4300, "minus_base": 0xC300, "minus_one": 0xBF80},
        (
            "fma.rn.relu.bf16x2 r, t, minus_half, base",
            "fma.rn.bf16x2 t, t, half, minus_base",
            "fma.rn.bf16x2 out, r, minus_one, t",
        ),
    ),
    ("int8", "bf16"): (
        _BF16,
        {"magnitude": 0xFF7F, "sign": 0xFF80, "minus_one": 0xBF80},
        ("and.b32 r, t, sign", "and.b32 t, t, magnitude", "fma.rn.bf16x2 out, r, minus_one, t"),
    ),
}


_CODES, _UPPER, _ZEROS = "0x5150", "0x5352", "0x5454"  # permutations of a word of codes and a constant
_FUNCTIONS = (("pair", 0, "0x4140", "c0"), ("upper", 16, "0x4342", "c1"), ("chosen", 0, "$2", "c0"))


def _program(pairs: int, high: int, constants: dict[str, int], steps: tuple[str, ...]) -> str:
    """PTX for a register of 2 * pairs codes: t becomes two floats with the constant high byte and a code in the low
    one, then the steps turn t into out, for each pair."""
    lines = [f".reg .b32 high, r, t0, t1, {', '.join(constants)};", f"mov.b32 high, {high:#x};"]
    lines += [f"mov.b32 {name}, {value:#06x}{value:04x};" for name, value in constants.items()]
    if pairs == 1:
        lines += ["cvt.u32.u16 t0, $1;", "prmt.b32 t0, t0, high, 0x4140;"]
    else:
        lines += ["prmt.b32 t0, $2, high, 0x4140;", "prmt.b32 t1, $2, high, 0x4342;"]
    for pair in range(pairs):
        lines += [re.sub(r"\bt\b", f"t{pair}", step).replace("out", f"${pair}") + ";" for step in steps]
    return "{ " + " ".join(lines) + " }"


def _hardware(pairs: int) -> str:
    """PTX for e4m3 to bfloat16: the hardware's float16, then float32, rounded (exactly) to packed bfloat16."""
    lines = [".reg .b16 c0, c1, lo, hi;", ".reg .b32 t;", ".reg .f32 a, b;"]
    lines += ["mov.b16 c0, $1;"] if pairs == 1 else ["mov.b32 {c0, c1}, $2;"]
    for pair in range(pairs):
        lines += [
            f"cvt.rn.f16x2.e4m3x2 t, c{pair};",
            "mov.b32 {lo, hi}, t;",
            "cvt.f32.f16 a, lo;",
            "cvt.f32.f16 b, hi;",
        ]
        lines += [f"cvt.rn.bf16x2.f32 ${pair}, b, a;"]
    return "{ " + " ".join(lines) + " }"


@lru_cache(maxsize=64)
def program(kind: str, wide: str, pairs: int, arch: int) -> str:
    """The PTX that `widen` runs for codes of this kind on this compute capability (90 for 9.0; 0: not NVIDIA).

    pairs: 1 or 2 pairs of codes come in one register. "": none, `widen` uses the compiler's own conversions.
    """
    if kind == "e4m3":
        return _hardware(pairs) if arch >= 89 and wide == "bf16" else ""
    if arch < 80 or wide not in ("fp16", "bf16"):
        return ""
    return _program(pairs, *_STEPS[kind, wide])


def device_functions() -> str:
    """C++: `Widen<KIND, T>::pair(codes)` and `upper(codes)`, the values of the two codes in a word's low or high bytes
    as a pair of T, exactly; `chosen(codes, which)`, those of `pair`, of `upper` or two zeros, at no instruction more:
    which of `chosen_codes`, `chosen_upper` or `chosen_zeros` (not for e4m3, where NaN times zero is not zero).

    On the host (QUANTROT_EMULATED) by plain arithmetic, from `code_value` of the tests' emulator.
    """
    found = ["#ifdef QUANTROT_EMULATED", '#include "mixed.h"', "#endif"]
    found += ["namespace quantrot {", "enum Kind { INT8, UINT8, PACKED, E4M3 };", "template <int KIND, class T>"]
    choices = f"chosen_codes = {_CODES}, chosen_upper = {_UPPER}, chosen_zeros = {_ZEROS}"
    found += ["struct Widen;", f"[[maybe_unused]] constexpr u32 {choices};"]
    for kind, (wide, name) in product(KINDS, (("bf16", "Bf16"), ("fp16", "Fp16"))):
        found += [f"template <>\nstruct Widen<{kind.upper()}, {name}> {{"]
        for function, shift, select, half in _FUNCTIONS[: 2 if kind == "e4m3" else 3]:
            text = program(kind, wide, 1, 90) or "{ .reg .b16 c0, c1; mov.b16 c0, $1; cvt.rn.f16x2.e4m3x2 $0, c0; }"
            chooses = function == "chosen"
            inputs = '"r"(codes), "r"(which)' if chooses else '"r"(codes)'
            if chooses:  # the permutation takes the low bytes from the codes, or from the constant: the code for zero
                high = _F16 if wide == "fp16" else _BF16
                text = text.replace(f"{high:#x}", f"{high & 0xFF00FF00 | (0x00800080 if kind == 'packed' else 0):#x}")
            text = text.replace("cvt.u32.u16 t0, $1", "mov.b32 t0, $1").replace(
                "mov.b16 c0, $1", "mov.b32 {c0, c1}, $1"
            )
            text = re.sub(r"(e4m3x2 \S+) c0", rf"\1 {half}", text).replace("0x4140", select)
            text = re.sub(r"\$(\d)", r"%\1", text.replace("%", "%%"))
            found += [
                f"  __device__ __forceinline__ static u32 {function}(u32 codes{', u32 which' * chooses}) {{",
                "#ifdef QUANTROT_EMULATED",
                f"    constexpr int K = {kind.upper()};",
                *(["    if (which == chosen_zeros) return 0;"] * chooses),
                *(["    if (which == chosen_upper) codes >>= 16;"] * chooses),
                f"    codes >>= {shift};",
                f"    return {name}::pack(code_value<K>(codes & 255), code_value<K>(codes >> 8));",
                "#else",
                "    u32 wide;",
                f'    asm("{text}" : "=r"(wide) : {inputs});',
                "    return wide;",
                "#endif",
                "  }",
            ]
        found += ["};"]
    return "\n".join([*found, "}  // namespace quantrot", ""])


@triton.jit
def widen(u, KIND: tl.constexpr, WIDE: tl.constexpr, PROGRAM: tl.constexpr, PAIRS: tl.constexpr, ARCH: tl.constexpr):
    """Codes u, bytes of any shape -> their values as WIDE, exactly. PROGRAM: `program(...)` of the same arguments."""
    if PROGRAM != "":
        if PAIRS == 1:
            wide = tl.inline_asm_elementwise(PROGRAM, "=r,h", [u], WIDE.value, is_pure=True, pack=2)
        else:
            wide = tl.inline_asm_elementwise(PROGRAM, "=r,=r,r", [u], WIDE.value, is_pure=True, pack=4)
    elif KIND == "int8":
        wide = u.to(tl.int8, bitcast=True).to(WIDE)
    elif KIND == "uint8":
        wide = u.to(WIDE)
    elif KIND == "packed":
        wide = (u.to(tl.int16) - 128).to(WIDE)
    elif ARCH >= 89:
        wide = u.to(tl.float8e4nv, bitcast=True).to(WIDE)
    else:
        wide = _e4m3(u, WIDE)
    return wide


@triton.jit
def _e4m3(u, WIDE: tl.constexpr):
    """e4m3 by moving bits: s eeee mmm under float16's exponent is the value times 2^-8."""
    bits = u.to(tl.int16)
    half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), half).to(WIDE)
