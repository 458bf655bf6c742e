"""The operators that make, change and read MXFP4 tensors: checks, torch.library, dispatch. See the package."""

from typing import Any

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.mxfp4.reference import (
    GROUP,
    Random,
    ScaleRule,
    dequantize_reference,
    expand_reference,
    masked_hadamard_reference,
    quantize_reference,
    round_trip_reference,
)
from quantrot.kernels.mxfp4.round_trip import MOST_TURNED, round_trip_even
from quantrot.kernels.operators import (
    check_backend,
    check_device,
    check_signs,
    constant,
    has_triton,
    implement,
    number,
    refuse_tangents,
    uses_triton,
)
from quantrot.kernels.ready import Ready, Run, like, unseen
from quantrot.orthogonal import hadamard_factors

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
FUSED = (32, 64, 128)  # Hadamard widths that one program turns and quantizes
RULES = tuple(rule.value for rule in ScaleRule)  # Dynamo of torch 2.11 cannot iterate over an Enum
BACKENDS = ("auto", "triton", "reference")
QUANTIZERS, REQUANTIZERS, MASKED = Ready(), Ready(), Ready()
_RANDOM = "bool stochastic, int seed, int offset, Tensor? drawn"

torch.library.define(
    "quantrot::mxfp4_quantize",
    f"(Tensor x, Tensor? signs, str rule, int hadamard, bool transpose, {_RANDOM}, bool mask, str backend)"
    " -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "quantrot::mxfp4_requantize",
    f"(Tensor packed, Tensor scale, Tensor? signs, str rule, int hadamard, {_RANDOM}, str backend) -> (Tensor, Tensor)",
)
torch.library.define(
    "quantrot::mxfp4_dequantize", "(Tensor packed, Tensor scale, ScalarType dtype, str backend) -> Tensor"
)
torch.library.define("quantrot::mxfp4_round_trip", "(Tensor x, str rule, int hadamard, str backend) -> Tensor")
torch.library.define("quantrot::mxfp4_expand", "(Tensor packed, Tensor scale, str backend) -> (Tensor, Tensor, Tensor)")
torch.library.define(
    "quantrot::mxfp4_quantize_expanded",
    "(Tensor x, Tensor? signs, str rule, int hadamard, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "quantrot::masked_hadamard",
    "(Tensor x, Tensor mask, int hadamard, float scale, ScalarType dtype, str backend) -> Tensor",
)


# --- The public functions --------------------------------------------------------------------------------------------


def quantize_mxfp4(
    x: Tensor, scale_rule: ScaleRule | str = ScaleRule.even, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Quantize to MXFP4.

    x: [..., K] float32, float16 or bfloat16, K a multiple of 32; any strides. scale_rule: see ScaleRule.
    Returns (packed uint8 [..., K/2], scale uint8 [..., K/32]), contiguous. ValueError if K does not fit, or for a
    backend that cannot run here.
    """
    _check(x, x.shape[-1] if x.dim() else 0, 0, None, backend)
    packed, scale, _ = torch.ops.quantrot.mxfp4_quantize(
        x, None, rule_name(scale_rule), 0, False, False, 0, 0, None, False, backend
    )
    return packed, scale


def dequantize_mxfp4(
    packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16, *, backend: str = "auto"
) -> Tensor:
    """[..., K] in `dtype` from packed uint8 [..., K/2] and scale uint8 [..., K/32]; exact in bfloat16 and
    float32, but for scales of 2^126 and 2^127, which nothing here writes: their largest codes are infinite.

    float16 rounds to nearest even and overflows past 65504. ValueError where the shapes do not belong together.
    """
    check_packed("packed", packed, scale)
    if dtype not in FLOATS:
        raise ValueError(f"dtype: {dtype}; allowed: {', '.join(map(str, FLOATS))}")
    check_backend(backend, BACKENDS)
    return torch.ops.quantrot.mxfp4_dequantize(packed, scale, dtype, backend)


def hadamard_quantize_mxfp4(
    x: Tensor,
    scale_rule: ScaleRule | str = ScaleRule.even,
    *,
    hadamard: int = GROUP,
    signs: Tensor | None = None,
    transpose: bool = False,
    random: tuple[int, int] | tuple[int, int, Tensor] | None = None,
    clip_mask: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize (x * signs) H / sqrt(hadamard), in blocks of `hadamard` columns, to MXFP4: one read, one write.

    x: [..., K] float32, float16 or bfloat16, any strides. The float32 values of the transform are quantized directly.
    hadamard: 32, 64 or 128 (fused), or any order of `hadamard_factors` that is a multiple of 32 (the transform, rounded
    to x's dtype, then the quantization). signs: +-1 of any dtype, [hadamard], or None. transpose: x is [M, K], and what
    is transformed and quantized is its transpose, in groups along M. random: (seed, offset), 64-bit numbers, for
    stochastic rounding: uniform 9-bit dither from Philox4x32-7 of (a quarter of the group's number in the result,
    offset) under the key `seed`; only with absmax34, which never saturates. (seed, offset, drawn): int64 [2] on x's
    device is added to the two when the kernel runs, so that replays of a CUDA graph can round by other numbers.
    clip_mask: also return which elements were not clipped.

    Returns (packed uint8 [..., K/2], scale uint8 [..., K/32], mask uint8 [..., K/8] or None); bit j of the mask's byte
    i is set where |element 8i + j| <= 6 scales. ValueError for sizes, options or a backend that do not fit.
    """
    key, rule, numbers = None, rule_name(scale_rule), _numbers(scale_rule, random, x)
    if x.is_cuda and backend == "auto" and unseen(x, signs, numbers and numbers.drawn):
        key = like(x), like(signs), rule, hadamard, transpose, clip_mask
        if (again := QUANTIZERS.find(key)) is not None:
            packed, scale, mask = again(x, signs, numbers)
            return packed, scale, mask if clip_mask else None
    if transpose and x.dim() != 2:
        raise ValueError(f"x: shape {tuple(x.shape)}; transpose takes [M, K]: flatten the leading dimensions")
    if hadamard < 1:
        raise ValueError(f"hadamard: {hadamard}; allowed: multiples of 32; quantize_mxfp4 turns nothing")
    _check(x, x.shape[0 if transpose else -1] if x.dim() else 0, hadamard, signs, backend)
    if hadamard not in FUSED:
        from quantrot.kernels.hadamard import hadamard_transform

        hadamard_factors(hadamard)
        x = hadamard_transform(x.T if transpose else x, block=hadamard, signs=signs)
        key, hadamard, signs, transpose = None, 0, None, False
    if key and uses_triton(x, backend):
        run = _quantizer(x, ScaleRule(rule), hadamard, transpose, clip_mask, backend)
        packed, scale, mask = QUANTIZERS.keep(key, run, x.get_device())(x, signs, numbers)
    else:
        packed, scale, mask = torch.ops.quantrot.mxfp4_quantize(
            x, signs, rule, hadamard, transpose, *_flat(numbers), clip_mask, backend
        )
    return packed, scale, mask if clip_mask else None


def round_trip_mxfp4(
    x: Tensor, scale_rule: ScaleRule | str = ScaleRule.even, *, hadamard: int = 0, backend: str = "auto"
) -> Tensor:
    """x quantized and dequantized to its dtype, as a product of MXFP4 sees it; the packed form is left out on a CPU.

    x: [..., K] float32, float16 or bfloat16, any strides. hadamard: of the transform before, 32, 64 or 128, or 0 for
    none. The result has no gradient. ValueError for sizes, options or a backend that do not fit.
    """
    _check(x, x.shape[-1] if x.dim() else 0, hadamard, None, backend)
    if hadamard:
        check_fused(hadamard)
    return torch.ops.quantrot.mxfp4_round_trip(x.detach(), rule_name(scale_rule), hadamard, backend)


def requantize_mxfp4(
    packed: Tensor,
    scale: Tensor,
    scale_rule: ScaleRule | str = ScaleRule.absmax34,
    *,
    hadamard: int = GROUP,
    signs: Tensor | None = None,
    random: tuple[int, int] | tuple[int, int, Tensor] | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The transpose of an MXFP4 matrix, transformed and quantized again: one read, one write.

    packed [M, K/2], scale [M, K/32] -> packed [K, M/2], scale [K, M/32] of (w^T * signs) H / sqrt(hadamard), in blocks
    and groups along M; hadamard is 32, 64 or 128 and divides M. The other arguments and errors are
    `hadamard_quantize_mxfp4`'s.
    """
    key, rule, numbers = None, rule_name(scale_rule), _numbers(scale_rule, random, packed)
    if packed.is_cuda and backend == "auto" and unseen(packed, scale, signs, numbers and numbers.drawn):
        key = like(packed), like(scale), like(signs), rule, hadamard
        if (again := REQUANTIZERS.find(key)) is not None:
            made: tuple[Tensor, Tensor] = again(packed, scale, signs, numbers)
            return made
    check_packed("packed", packed, scale)
    if packed.dim() != 2:
        raise ValueError(f"packed: shape {tuple(packed.shape)}; requantize_mxfp4 takes [M, K/2]")
    check_fused(hadamard)
    _check_width("packed", packed.shape[0], hadamard, "rows")
    _check_signs(signs, hadamard, packed)
    check_backend(backend, BACKENDS)
    if key and uses_triton(packed, backend):
        run = _requantizer(packed, ScaleRule(rule), hadamard, backend)
        made = REQUANTIZERS.keep(key, run, packed.get_device())(packed, scale, signs, numbers)
        return made
    return torch.ops.quantrot.mxfp4_requantize(packed, scale, signs, rule, hadamard, *_flat(numbers), backend)


def expand_mxfp4(packed: Tensor, scale: Tensor, *, backend: str = "auto") -> tuple[Tensor, Tensor, Tensor]:
    """The same values as e4m3 and one power of two a row, which FP8 tensor cores multiply.

    packed uint8 [N, K/2], scale uint8 [N, K/32] -> (e4m3 [N, K], row scale float32 [N], outside int32 [N]) with
    value = e4m3 * row scale. A row's scale is 2^(top - 6), top its largest exponent (at least -120). e2m1 * 2^d is
    exact in e4m3 for the 15 exponents d = -8 ... 6, so a row is exact when its groups' exponents lie in top - 14 ...
    top. `outside` counts its groups below that which hold a code other than zero; these are rounded to nearest even
    multiples of 2^-9 row scales. A NaN group becomes e4m3's NaN.
    """
    check_packed("packed", packed, scale)
    if packed.dim() != 2:
        raise ValueError(f"packed: shape {tuple(packed.shape)}; expand_mxfp4 takes [N, K/2]")
    check_backend(backend, BACKENDS)
    return torch.ops.quantrot.mxfp4_expand(packed, scale, backend)


def masked_hadamard(
    x: Tensor,
    mask: Tensor,
    *,
    hadamard: int = GROUP,
    factor: float = 1.0,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """factor * x where the mask is set, 0 elsewhere, times H / sqrt(hadamard): a clipped gradient turned back.

    x: [..., K] float32, float16 or bfloat16; mask: uint8 [..., K/8] of `hadamard_quantize_mxfp4`; hadamard: 32, 64 or
    128. Returns x's shape, contiguous, in `dtype`, x's when left out; sums in float32, rounded once.
    """
    key, factor, dtype = None, number("factor", factor), dtype or x.dtype
    if x.is_cuda and backend == "auto" and unseen(x, mask):
        key = like(x), like(mask), hadamard, dtype
        if (again := MASKED.find(key)) is not None:
            y: Tensor = again(x, mask, factor * hadamard**-0.5)
            return y
    _check(x, x.shape[-1] if x.dim() else 0, hadamard, None, backend)
    check_fused(hadamard)
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError("x: requires a gradient, which masked_hadamard has not; detach it")
    if mask.dtype != torch.uint8 or mask.shape != (*x.shape[:-1], x.shape[-1] // 8):
        raise ValueError(f"mask: {mask.dtype} {tuple(mask.shape)}; x {tuple(x.shape)} needs uint8 with K/8 columns")
    if dtype not in FLOATS:
        raise ValueError(f"dtype: {dtype}; allowed: {', '.join(map(str, FLOATS))}")
    check_device(x=x, mask=mask)
    scale = factor * hadamard**-0.5
    if key and uses_triton(x, backend):
        y = MASKED.keep(key, _turner(x, hadamard, dtype, backend), x.get_device())(x, mask, scale)
        return y
    return torch.ops.quantrot.masked_hadamard(x, mask, hadamard, scale, dtype, backend)


# --- Checks ----------------------------------------------------------------------------------------------------------


def _check(x: Tensor, width: int, hadamard: int, signs: Tensor | None, backend: str) -> None:
    if x.dtype not in FLOATS:
        raise ValueError(f"x: dtype {x.dtype}; allowed: {', '.join(map(str, FLOATS))}; convert it first")
    if x.dim() < 1:
        raise ValueError("x: a scalar; MXFP4 needs at least one dimension, a multiple of 32 long")
    refuse_tangents(x)
    if width % GROUP:
        raise ValueError(f"x has {width} columns; MXFP4 needs a multiple of {GROUP}")
    if hadamard:
        _check_width("x", width, hadamard, "columns")
    _check_signs(signs, hadamard, x)
    check_backend(backend, BACKENDS)


def check_fused(hadamard: int) -> None:
    if hadamard not in FUSED:
        raise ValueError(f"hadamard: {hadamard}; allowed: {', '.join(map(str, FUSED))}")


def _check_width(name: str, width: int, hadamard: int, what: str) -> None:
    if hadamard < 1 or hadamard % GROUP:
        raise ValueError(
            f"hadamard: {hadamard}; allowed: a multiple of {GROUP} ({', '.join(map(str, FUSED))} are fused)"
        )
    if width % hadamard:
        raise ValueError(
            f"hadamard: {hadamard} does not divide {name}'s {width} {what} along the groups; give a divisor of it, "
            "or pad with zeros"
        )


def _check_signs(signs: Tensor | None, hadamard: int, x: Tensor) -> None:
    if signs is None:
        return
    if signs.dim() != 1 or signs.numel() != hadamard:
        raise ValueError(f"signs: shape {tuple(signs.shape)}; allowed: [{hadamard}], one +-1 a column of a block")
    if signs.device != x.device:
        raise ValueError(f"signs: on {signs.device}, the data on {x.device}; move them to the same device")
    check_signs(signs)


def rule_name(scale_rule: ScaleRule | str) -> str:
    if scale_rule not in RULES:
        raise ValueError(f"scale_rule: {scale_rule!r}; allowed: {', '.join(RULES)}")
    return str(scale_rule)


def whole_rule(scale_rule: ScaleRule | str) -> str:
    """The name of a rule by which values are stored as they are, and not 3/4 of them."""
    rule = rule_name(scale_rule)
    if rule == ScaleRule.absmax34:
        allowed = ", ".join(name for name in RULES if name != rule)
        raise ValueError(f"scale_rule: absmax34 stores 3/4 of each value, for who makes up for it; allowed: {allowed}")
    return rule


def _numbers(scale_rule: ScaleRule | str, random: Any, x: Tensor) -> Random | None:
    """What `random` gives for rounding an x at random by this rule."""
    if random is None:
        return None
    if scale_rule != ScaleRule.absmax34:
        raise ValueError(
            f"scale_rule: {scale_rule} saturates, so rounding at random would be biased; allowed: absmax34"
        )
    if (
        not isinstance(random, tuple | list)
        or not 2 <= len(random) <= 3
        or any(not 0 <= n < 1 << 63 for n in random[:2])
    ):
        raise ValueError(f"random: {random}; allowed: (seed, offset), both from 0 to 2^63 - 1, and drawn numbers")
    numbers = Random(*random)
    if (drawn := numbers.drawn) is not None:
        if drawn.dtype != torch.int64 or drawn.shape != (2,) or not drawn.is_contiguous():
            found = f"{drawn.dtype} {tuple(drawn.shape)}"
            raise ValueError(f"random: drawn numbers {found}; allowed: int64 [2], contiguous")
        check_device(x=x, random=drawn)
    return numbers


def _flat(numbers: Random | None) -> tuple[bool, int, int, Tensor | None]:
    """The same as arguments of an operator, which `_random` takes back."""
    return (False, 0, 0, None) if numbers is None else (True, *numbers)


def check_packed(name: str, packed: Tensor, scale: Tensor) -> None:
    """ValueError unless packed uint8 [..., K/2] and scale uint8 [..., K/32] belong together."""
    groups = packed.shape[-1] // (GROUP // 2) if packed.dim() else -1
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise ValueError(f"{name}: dtypes {packed.dtype} and {scale.dtype} (scale); allowed: torch.uint8")
    if packed.dim() < 1 or packed.shape[-1] % (GROUP // 2) or scale.shape != (*packed.shape[:-1], groups):
        raise ValueError(
            f"{name}: shapes {tuple(packed.shape)} and {tuple(scale.shape)} (scale); allowed: [..., K/2] and "
            f"[..., K/{GROUP}] with K a multiple of {GROUP}"
        )
    if packed.device != scale.device:
        raise ValueError(f"{name}: on {packed.device}, its scale on {scale.device}; move them to the same device")


# --- Operators -------------------------------------------------------------------------------------------------------


@constant
def has_kernels(device: torch.device) -> bool:
    """Whether packed tensors on this device are multiplied as they are."""
    return device.type == "cuda" and has_triton()


def _columns_module(x: Tensor, backend: str) -> Any:
    """The kernels of a transpose that run this call, when `uses_triton`; x: elements or packed bytes, [M, ...]."""
    from quantrot.kernels.mxfp4 import triton_columns

    if backend == "auto" and nvrtc.available(x.device):
        from quantrot.kernels.mxfp4 import hopper_columns

        if hopper_columns.fits(x):
            return hopper_columns
    return triton_columns


def _rows_module(x: Tensor, backend: str, row: bool = False) -> Any:
    """The kernels along rows that run this call, when `uses_triton`; row: whole rows of x at a time."""
    from quantrot.kernels.mxfp4 import triton_rows

    if backend == "auto" and nvrtc.available(x.device):
        from quantrot.kernels.mxfp4 import hopper_rows

        if hopper_rows.fits(x, row):
            return hopper_rows
    return triton_rows


def _quantizer(x: Tensor, rule: ScaleRule, hadamard: int, transpose: bool, mask: bool, backend: str) -> Run:
    """The kernel for an x like this, when `uses_triton`, as a function of x, signs and random numbers."""
    run = _columns_module(x, backend).quantize_columns if transpose else _rows_module(x, backend).quantize
    return lambda x, signs, random: run(x, rule, hadamard, signs, random, mask)


def _requantizer(packed: Tensor, rule: ScaleRule, hadamard: int, backend: str) -> Run:
    """The same of codes, as a function of packed, scale, signs and random numbers."""
    run = _columns_module(packed, backend).requantize
    return lambda packed, scale, signs, random: run(packed, scale, rule, hadamard, signs, random)


def _random(stochastic: bool, seed: int, offset: int, drawn: Tensor | None) -> Random | None:
    return Random(seed, offset, drawn) if stochastic else None


@implement("quantrot::mxfp4_quantize")
def _quantize(
    x: Tensor,
    signs: Tensor | None,
    rule: str,
    hadamard: int,
    transpose: bool,
    stochastic: bool,
    seed: int,
    offset: int,
    drawn: Tensor | None,
    mask: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    random = _random(stochastic, seed, offset, drawn)
    if uses_triton(x, backend):
        made: tuple[Tensor, Tensor, Tensor]
        made = _quantizer(x, ScaleRule(rule), hadamard, transpose, mask, backend)(x, signs, random)
        return made
    source = x.T if transpose else x
    packed, scale, bits = quantize_reference(
        source, ScaleRule(rule), hadamard=hadamard, signs=signs, random=random, mask=mask
    )
    return packed, scale, packed.new_empty(0) if bits is None else bits


@torch.library.register_fake("quantrot::mxfp4_quantize")
def _quantize_fake(x, signs, rule, hadamard, transpose, stochastic, seed, offset, drawn, mask, backend):
    *lead, width = reversed(x.shape) if transpose else x.shape
    packed = x.new_empty((*lead, width // 2), dtype=torch.uint8)
    bits = packed.new_empty((*lead, width // 8) if mask else 0)
    return packed, packed.new_empty((*lead, width // GROUP)), bits


@implement("quantrot::mxfp4_requantize")
def _requantize(
    packed: Tensor,
    scale: Tensor,
    signs: Tensor | None,
    rule: str,
    hadamard: int,
    stochastic: bool,
    seed: int,
    offset: int,
    drawn: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    random = _random(stochastic, seed, offset, drawn)
    if uses_triton(packed, backend):
        made: tuple[Tensor, Tensor] = _requantizer(packed, ScaleRule(rule), hadamard, backend)(
            packed, scale, signs, random
        )
        return made
    wide = dequantize_reference(packed, scale, torch.float32).T
    codes, scales, _ = quantize_reference(wide, ScaleRule(rule), hadamard=hadamard, signs=signs, random=random)
    return codes, scales


@torch.library.register_fake("quantrot::mxfp4_requantize")
def _requantize_fake(packed, scale, signs, rule, hadamard, stochastic, seed, offset, drawn, backend):
    rows, width = packed.shape
    return packed.new_empty(2 * width, rows // 2), packed.new_empty(2 * width, rows // GROUP)


@implement("quantrot::mxfp4_dequantize")
def _dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    if uses_triton(packed, backend):
        from quantrot.kernels.mxfp4 import hopper_rows, triton_rows

        hopper = backend == "auto" and packed.numel() and nvrtc.available(packed.device)
        return (hopper_rows if hopper else triton_rows).dequantize(packed, scale, dtype)
    return dequantize_reference(packed, scale, dtype)


@torch.library.register_fake("quantrot::mxfp4_dequantize")
def _dequantize_fake(packed, scale, dtype, backend):
    return packed.new_empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=dtype)


@implement("quantrot::mxfp4_round_trip")
def _round_trip(x: Tensor, rule: str, hadamard: int, backend: str) -> Tensor:
    if not uses_triton(x, backend):
        if x.device.type == "cpu" and rule == ScaleRule.even and not (hadamard and x.numel() > MOST_TURNED):
            return round_trip_even(x, hadamard)
        return round_trip_reference(x, ScaleRule(rule), hadamard=hadamard)
    packed, scale, _ = _quantize(x, None, rule, hadamard, False, False, 0, 0, None, False, backend)
    return _dequantize(packed, scale, x.dtype, backend)


@torch.library.register_fake("quantrot::mxfp4_round_trip")
def _round_trip_fake(x, rule, hadamard, backend):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@implement("quantrot::mxfp4_expand")
def expand(packed: Tensor, scale: Tensor, backend: str = "auto") -> tuple[Tensor, Tensor, Tensor]:
    """expand_mxfp4 of what is checked, past the dispatcher."""
    if uses_triton(packed, backend):
        from quantrot.kernels.mxfp4 import hopper_rows, triton_rows

        if backend == "auto" and packed.numel() and nvrtc.available(packed.device):
            return hopper_rows.expand(packed, scale)
        return triton_rows.expand(packed, scale)
    return expand_reference(packed, scale)


def expand_both(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], ...]:
    """`expand` of two matrices."""
    if uses_triton(a, "auto") and a.numel() and b.numel() and nvrtc.available(a.device):
        from quantrot.kernels.mxfp4 import hopper_rows

        return hopper_rows.expand_both(a, a_scale, b, b_scale)
    return expand(a, a_scale), expand(b, b_scale)


def _expanded_fake(rows: int, width: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (
        like.new_empty((rows, width), dtype=torch.float8_e4m3fn),
        like.new_empty(rows, dtype=torch.float32),
        like.new_empty(rows, dtype=torch.int32),
    )


@torch.library.register_fake("quantrot::mxfp4_expand")
def _expand_fake(packed, scale, backend):
    return _expanded_fake(packed.shape[0], 2 * packed.shape[1], packed)


@implement("quantrot::mxfp4_quantize_expanded")
def _quantize_expanded(
    x: Tensor, signs: Tensor | None, rule: str, hadamard: int, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """expand(quantize(x)) without the packed form in between, x [M, K].

    Returns (e4m3, row scale, outside, packed, scale); the last two are written only in rows with outside > 0.
    """
    if uses_triton(x, backend):
        module = _rows_module(x, backend, row=True)
        if _rows_module(x, backend) is module:  # else it is Hopper that has no rows of float32, or so long, at once
            return module.quantize_expanded(x, ScaleRule(rule), hadamard, signs)
    packed, scale, _ = _quantize(x, signs, rule, hadamard, False, False, 0, 0, None, False, backend)
    return *expand(packed, scale, backend), packed, scale


def prepare_expanded(x: Tensor, rule: str, hadamard: int, gated: bool = False) -> Run:
    """The operator, without signs, as a function of an x like this one. gated: of gate and up, which hopper_rows takes
    (see quantizes_gated)."""
    if uses_triton(x, "auto"):
        from quantrot.kernels.mxfp4 import hopper_rows

        if gated or _rows_module(x, "auto", row=True) is hopper_rows:
            return hopper_rows.prepare_expanded(x, ScaleRule(rule), hadamard, None, gated=gated)
    return lambda x: _quantize_expanded(x, None, rule, hadamard, "auto")


@torch.library.register_fake("quantrot::mxfp4_quantize_expanded")
def _quantize_expanded_fake(x, signs, rule, hadamard, backend):
    rows, width = x.shape
    packed = x.new_empty((rows, width // 2), dtype=torch.uint8)
    return *_expanded_fake(rows, width, x), packed, packed.new_empty((rows, width // GROUP))


def _turner(x: Tensor, hadamard: int, dtype: torch.dtype, backend: str) -> Run:
    """The kernel of masked_hadamard for an x like this, when `uses_triton`, as a function of x, mask and scale."""
    from quantrot.kernels.mxfp4 import hopper_rows, triton_rows

    fits = x.dtype in hopper_rows.IN and dtype in (x.dtype, torch.float32) and x.numel() > 0
    module: Any = hopper_rows if backend == "auto" and fits and nvrtc.available(x.device) else triton_rows
    return lambda x, mask, scale: module.masked_hadamard(x, mask, hadamard, scale, dtype)


@implement("quantrot::masked_hadamard")
def _masked_hadamard(x: Tensor, mask: Tensor, hadamard: int, scale: float, dtype: torch.dtype, backend: str) -> Tensor:
    if uses_triton(x, backend):
        y: Tensor = _turner(x, hadamard, dtype, backend)(x, mask, scale)
        return y
    return masked_hadamard_reference(x, mask, hadamard, scale, dtype)


@torch.library.register_fake("quantrot::masked_hadamard")
def _masked_hadamard_fake(x, mask, hadamard, scale, dtype, backend):
    return torch.empty(x.shape, dtype=dtype, device=x.device)
