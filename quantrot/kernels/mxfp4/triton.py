"""MXFP4 in Triton: every quantizer, one read and one write.

A thread owns what a group needs. A tile is a tuple of vectors: element j of the tuple is column j of every thread's
own block of 32, 64 or 128 (or row j, where the transpose is quantized). The transform, its sums and the packing are
then plain register arithmetic in the order of the reference, with no shuffle, no shared memory and no layout left to
the compiler, and the bits are the reference's. Products and sums are never fused, except where the product is exact.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantrot.kernels.mxfp4.reference import GROUP, LEAST_TOP, QUEST_SQUARE, TOP, WINDOW, ScaleRule

EXACT = {"enable_fp_fusion": False}  # x * y + z is two roundings, as in the reference
LARGEST_ROW = 512  # threads that hold a row whose e4m3 operand is written at once

_GROUP = tl.constexpr(GROUP)
_QUEST_SQUARE = tl.constexpr(QUEST_SQUARE)
_TOP = tl.constexpr(TOP)
_LEAST_TOP = tl.constexpr(LEAST_TOP)
_WINDOW = tl.constexpr(WINDOW)
_MAGIC = tl.constexpr(0.75 * 2.0**23)
_MIDDLE = tl.constexpr(1.5 - 2.0**-17)
_TWO126 = tl.constexpr(2.0**126)
_SIGN = tl.constexpr(-0x80000000)


# --- Tuples ----------------------------------------------------------------------------------------------------------


@triton.jit
def _halves(x):
    """[n, 2 m] -> its even and its odd columns, [n, m] each."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def _columns(x):
    """[n, 4 or 8] -> the tuple of its columns, [n]."""
    even, odd = _halves(x)
    a, b = _halves(even)
    c, d = _halves(odd)
    if x.shape[1] == 4:
        return (tl.reshape(a, (x.shape[0],)), tl.reshape(c, (x.shape[0],)),
                tl.reshape(b, (x.shape[0],)), tl.reshape(d, (x.shape[0],)))  # fmt: skip
    else:
        a0, a4 = tl.split(a)
        b2, b6 = tl.split(b)
        c1, c5 = tl.split(c)
        d3, d7 = tl.split(d)
        return (a0, c1, b2, d3, a4, c5, b6, d7)


@triton.jit
def _matrix4(a, b, c, d):
    """[..., n] four times -> [..., n, 4]."""
    pairs = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(pairs, a.shape + (4,))


@triton.jit
def _load_block(ptr, thread, inside, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """The block of each thread as a tuple of BLOCK float32 vectors, by loads of VECTOR neighbours."""
    x = ()
    for q in tl.static_range(BLOCK // VECTOR):
        at = thread[:, None] * BLOCK + q * VECTOR + tl.arange(0, VECTOR)[None, :]
        x = x + _columns(tl.load(ptr + at, mask=inside[:, None], other=0.0).to(tl.float32))
    return x


@triton.jit
def _stage(x, HALF: tl.constexpr):
    y = ()
    for i in tl.static_range(len(x)):
        if i & HALF == 0:
            y = y + (x[i] + x[i + HALF],)
        else:
            y = y + (x[i - HALF] - x[i],)
    return y


@triton.jit
def _butterfly(x, H: tl.constexpr):
    """Sylvester's matrix times the tuple, from the widest stride down."""
    y = _stage(x, H // 2)
    y = _stage(y, H // 4)
    y = _stage(y, H // 8)
    y = _stage(y, H // 16)
    y = _stage(y, H // 32)
    if H >= 64:
        y = _stage(y, H // 64)
    if H >= 128:
        y = _stage(y, H // 128)
    return y


@triton.jit
def _times(x, factor):
    y = ()
    for i in tl.static_range(len(x)):
        y = y + (x[i] * factor,)
    return y


@triton.jit
def _times_each(x, s):
    y = ()
    for i in tl.static_range(len(x)):
        y = y + (x[i] * s[i],)
    return y


@triton.jit
def _part(x, FIRST: tl.constexpr, COUNT: tl.constexpr):
    y = ()
    for i in tl.static_range(COUNT):
        y = y + (x[FIRST + i],)
    return y


@triton.jit
def _add_halves(x, HALF: tl.constexpr):
    y = ()
    for i in tl.static_range(HALF):
        y = y + (x[i] + x[i + HALF],)
    return y


@triton.jit
def _sum32(x):
    """The halving tree of the reference."""
    return _add_halves(_add_halves(_add_halves(_add_halves(_add_halves(x, 16), 8), 4), 2), 1)[0]


@triton.jit
def _amax32(x):
    """The largest magnitude; NaN where there is one."""
    y = tl.maximum(tl.abs(x[0]), tl.abs(x[1]), propagate_nan=tl.PropagateNan.ALL)
    for i in tl.static_range(2, 32):
        y = tl.maximum(y, tl.abs(x[i]), propagate_nan=tl.PropagateNan.ALL)
    return y


# --- A group ---------------------------------------------------------------------------------------------------------


@triton.jit
def _power(exponent):
    """2.0^exponent for int32 exponents in [-126, 127]."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _binade(y):
    """1, 2 or 4: the power of two at or below y, at least 1."""
    bits = tl.maximum(y, 1.0).to(tl.int32, bitcast=True) & 0x7F800000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _squared_error(x, factor):
    errors = ()
    for i in tl.static_range(32):
        y = tl.abs(x[i]) * factor
        clipped = tl.minimum(y, 6.0)
        magic = _binade(clipped) * _MAGIC
        error = ((clipped + magic) - magic) - y
        errors = errors + (error * error,)
    return _sum32(errors)


@triton.jit
def _exponent(x, root, RULE: tl.constexpr):
    """(unbiased exponent, whether the group is finite) of a tuple of 32, times root; see the reference."""
    if RULE == "quest":
        mean = _sum32(x) * 0.03125
        square = _sum32(_times_each(x, x)) * 0.03125
        variance = tl.maximum(square - mean * mean, 0.0) * (root * root)
        bits = (variance * _QUEST_SQUARE).to(tl.int32, bitcast=True)
        exponent = tl.where(bits < 0x00800000, -127, ((bits >> 23) - 127) >> 1)
        finite = square < float("inf")
    else:
        amax = _amax32(x) * root
        bits = amax.to(tl.int32, bitcast=True)
        finite = amax < float("inf")
        if RULE == "even":
            exponent = ((bits + 0x200000) >> 23) - 129
        else:
            exponent = (bits >> 23) - 129
        if RULE == "rceil":
            most = _power(tl.minimum(tl.maximum(exponent, -126), 125)) * 6.0
            exponent += (amax > most).to(tl.int32)
        if RULE == "mse":
            exponent = tl.minimum(tl.maximum(exponent, -126), 125)
            once = _squared_error(x, _power(-exponent) * root)
            twice = _squared_error(x, _power(-exponent) * (root * 0.5)) * 4.0
            exponent += (twice < once).to(tl.int32)
    return tl.minimum(tl.maximum(exponent, -127), 126), finite


@triton.jit
def _philox(low, high, o0, o1, s0, s1):
    """Four uint32 vectors: Philox4x32-10 of the counters (low, high, o0, o1) under the key (s0, s1)."""
    c0, c1 = low, high
    c2 = tl.zeros_like(low) + o0
    c3 = tl.zeros_like(low) + o1
    k0, k1 = s0, s1
    for _ in tl.static_range(10):
        a = c0.to(tl.uint64) * 0xD2511F53
        b = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = b.to(tl.uint32)
        c3 = a.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def _dither(group, key):
    """A tuple of 32 uniform vectors in (-1/2, 1/2) for group number `group` (int64) of the result."""
    u = ()
    s0 = key[0].to(tl.uint32, bitcast=True)
    s1 = key[1].to(tl.uint32, bitcast=True)
    o0 = key[2].to(tl.uint32, bitcast=True)
    o1 = key[3].to(tl.uint32, bitcast=True)
    for q in tl.static_range(4):
        counter = group * 4 + q
        words = _philox(counter.to(tl.uint32), (counter >> 32).to(tl.uint32), o0, o1, s0, s1)
        for i in tl.static_range(4):
            low = ((words[i] << 7) & 0x007FFF80) | 0x3F800000  # 1 + r * 2^-16
            high = ((words[i] >> 9) & 0x007FFF80) | 0x3F800000
            u = u + (low.to(tl.float32, bitcast=True) - _MIDDLE, high.to(tl.float32, bitcast=True) - _MIDDLE)
    return u


@triton.jit
def _rounded(value, u, factor, CLAMP: tl.constexpr, DITHER: tl.constexpr):
    """(|value| * factor + magic, binade): adding magic = 1.5 * 2^23 steps rounds to a multiple of the step."""
    y = tl.abs(value) * factor
    if CLAMP:
        y = tl.minimum(y, 6.0)
    binade = _binade(y)
    if DITHER:
        y = tl.fma(u, binade * 0.5, y)
    return tl.fma(binade, _MAGIC, y), binade


@triton.jit
def _word(x, u, factor, FIRST: tl.constexpr, CLAMP: tl.constexpr, DITHER: tl.constexpr):
    """Eight codes, from element FIRST on, as one int32.

    The multiple of the step lies in the low bits of the rounded sum; the code is that plus twice the binade's
    logarithm, and lies in the top nibble after a shift by 28. A funnel shift appends it.
    """
    word = tl.zeros_like(x[0]).to(tl.int32)
    for j in tl.static_range(8):
        value = x[FIRST + 7 - j]
        shifted, binade = _rounded(value, u[FIRST + 7 - j], factor, CLAMP, DITHER)
        top = (shifted.to(tl.int32, bitcast=True) << 28) + (binade.to(tl.int32, bitcast=True) << 6) + 0x20000000
        top = top | (value.to(tl.int32, bitcast=True) & _SIGN)
        word = (word << 4) | ((top >> 28) & 15)
    return word


@triton.jit
def _e2m1(value, factor, CLAMP: tl.constexpr):
    """The nearest e2m1 value to value * factor, with value's sign."""
    shifted, binade = _rounded(value, value, factor, CLAMP, False)
    magnitude = (shifted - binade * _MAGIC).to(tl.int32, bitcast=True)
    return (magnitude | (value.to(tl.int32, bitcast=True) & _SIGN)).to(tl.float32, bitcast=True)


@triton.jit
def _kept(x, factor):
    """Bit i: whether element i is within 6 scales, from the sign of what is left of them."""
    clipped = tl.zeros_like(x[0]).to(tl.int32)
    for j in tl.static_range(32):
        left = (6.0 - tl.abs(x[31 - j]) * factor).to(tl.int32, bitcast=True)
        clipped = (clipped << 1) | ((left >> 31) & 1)
    return ~clipped


@triton.jit
def _factor(exponent, root, RULE: tl.constexpr):
    """What an element is multiplied by before it is rounded."""
    if RULE == "absmax34":
        return _power(-exponent) * (root * 0.75)
    else:
        return _power(-exponent) * root


@triton.jit
def _clamps(RULE: tl.constexpr):
    """Whether elements may reach 7, where rounding would pass the largest code."""
    return RULE != "even" and RULE != "absmax34"


@triton.jit
def _codes(x, u, factor, finite, RULE: tl.constexpr, DITHER: tl.constexpr):
    """The four words of a tuple of 32."""
    words = ()
    for q in tl.static_range(4):
        words = words + (tl.where(finite, _word(x, u, factor, 8 * q, _clamps(RULE), DITHER), 0),)
    return words


@triton.jit
def _quantize(x, group, root, key, RULE: tl.constexpr, DITHER: tl.constexpr):
    """(four words of codes, scale byte, factor, finite) of a tuple of 32 times root; key: 4 random words."""
    exponent, finite = _exponent(x, root, RULE)
    factor = _factor(exponent, root, RULE)
    if DITHER:
        u = _dither(group, key)
    else:
        u = x
    words = _codes(x, u, factor, finite, RULE, DITHER)
    return words, tl.where(finite, exponent + 127, 255).to(tl.uint8), factor, finite


@triton.jit
def _value(word, SHIFT: tl.constexpr):
    """The e2m1 value of the code at this bit of an int32, float32: exponent and mantissa of 2^-126 times it."""
    if SHIFT <= 22:
        magnitude = (word << (22 - SHIFT)) & 0x01C00000
    else:
        magnitude = (word >> (SHIFT - 22)) & 0x01C00000
    bits = magnitude | ((word << (28 - SHIFT)) & _SIGN)
    return bits.to(tl.float32, bitcast=True) * _TWO126


@triton.jit
def _scale_value(byte):
    """float32 of e8m0 bytes; infinity for 255, which the callers turn into NaN or do not tell from it."""
    return tl.maximum(byte.to(tl.int32) << 23, 0x00400000).to(tl.float32, bitcast=True)


# --- Along rows ------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["threads", "root", "s0", "s1", "o0", "o1"])
def _quantize_rows_kernel(
    x_ptr, signs_ptr, packed_ptr, scale_ptr, mask_ptr, threads, root, s0, s1, o0, o1,
    BLOCK: tl.constexpr, TILE: tl.constexpr, VECTOR: tl.constexpr, HADAMARD: tl.constexpr, SIGNS: tl.constexpr,
    RULE: tl.constexpr, DITHER: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * TILE
    thread = tl.arange(0, TILE)
    inside = thread < threads - first
    x = _load_block(x_ptr + first * BLOCK, thread, inside, BLOCK, VECTOR)
    if SIGNS:
        x = _times_each(x, _load_block(signs_ptr, thread * 0, inside, BLOCK, 4))
    if HADAMARD:
        x = _butterfly(x, BLOCK)
    GROUPS: tl.constexpr = BLOCK // _GROUP
    for g in tl.static_range(GROUPS):
        part = _part(x, g * _GROUP, _GROUP)
        local = thread * GROUPS + g
        key = (s0, s1, o0, o1)
        words, scale, factor, finite = _quantize(part, first * GROUPS + local, root, key, RULE, DITHER)
        codes = _matrix4(words[0], words[1], words[2], words[3])
        at = local[:, None] * 4 + tl.arange(0, 4)[None, :]
        tl.store(packed_ptr + first * GROUPS * 4 + at, codes, mask=inside[:, None])
        tl.store(scale_ptr + first * GROUPS + local, scale, mask=inside)
        if MASK:
            kept = tl.where(finite, _kept(part, factor), 0)
            tl.store(mask_ptr + first * GROUPS + local, kept, mask=inside)


def _vector(x: Tensor) -> int:
    """Neighbours in a load of 16 bytes."""
    return 16 // x.element_size()


def _float_signs(signs: Tensor | None, like: Tensor) -> Tensor:
    return like if signs is None else signs.to(torch.float32).contiguous()


def _key(random: tuple[int, int] | None) -> list[int]:
    """seed and offset as four signed 32-bit words, low ones first."""
    words = [n >> shift & 0xFFFFFFFF for n in random or (0, 0) for shift in (0, 32)]
    return [word - (1 << 32) if word >> 31 else word for word in words]


def quantize(
    x: Tensor,
    rule: ScaleRule,
    hadamard: int,
    signs: Tensor | None,
    random: tuple[int, int] | None,
    mask: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., K] -> packed, scale, mask (empty unless asked for). Checked by the caller."""
    x = _floats(x).contiguous()
    packed, scale, bits = _outputs(x, x.shape, mask)
    if x.numel():
        block = hadamard or GROUP
        threads, tile = x.numel() // block, 128
        _quantize_rows_kernel[(triton.cdiv(threads, tile),)](
            x, _float_signs(signs, x), packed.view(torch.int32), scale, bits.view(torch.int32) if mask else scale,
            threads, float(hadamard or 1) ** -0.5, *_key(random), BLOCK=block, TILE=tile, VECTOR=_vector(x),
            HADAMARD=hadamard > 0, SIGNS=signs is not None, RULE=str(rule), DITHER=random is not None, MASK=mask,
            num_warps=tile // 32, **EXACT,
        )  # fmt: skip
    return packed, scale, bits


def _floats(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.bfloat16, torch.float16, torch.float32) else x.to(torch.float32)


def _outputs(x: Tensor, shape: torch.Size | tuple[int, ...], mask: bool) -> tuple[Tensor, Tensor, Tensor]:
    *lead, width = shape
    options = {"dtype": torch.uint8, "device": x.device}
    bits = torch.empty((*lead, width // 8) if mask else 0, **options)
    return torch.empty((*lead, width // 2), **options), torch.empty((*lead, width // GROUP), **options), bits


@triton.jit
def _row_part(first, row, count, COUNT: tl.constexpr):
    """Numbers of the groups `first` ... of a row, those past `count` masked."""
    group = first + tl.arange(0, COUNT)
    return group, group < count


@triton.jit
def _matrix4x4(a, b, c, d):
    """[n, 4] four times -> [n, 16], one after the other."""
    pairs = tl.join(tl.join(a, c), tl.join(b, d))  # [n, 4, 2, 2]
    return tl.reshape(tl.permute(pairs, (0, 2, 3, 1)), (a.shape[0], 16))


@triton.jit
def _store_e4m3(ptr, values, power, at, inside):
    """A tuple of 32 e2m1 values times a power of two as e4m3, to nearest even where it is not exact, 16 at a time."""
    for half in tl.static_range(2):
        quads = ()
        for q in tl.static_range(4):
            four = _part(values, half * 16 + q * 4, 4)
            quads = quads + (_matrix4(four[0], four[1], four[2], four[3]),)
        row = _matrix4x4(quads[0], quads[1], quads[2], quads[3]) * power[:, None]
        codes = row.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        tl.store(ptr + at[:, None] + half * 16 + tl.arange(0, 16)[None, :], codes, mask=inside[:, None])


@triton.jit
def _used(words):
    """Whether a group has a code other than +-0."""
    return ((words[0] | words[1] | words[2] | words[3]) & 0x77777777) != 0


@triton.jit
def _window(exponent, finite, top):
    """(2^(exponent relative to the row's scale) or NaN, whether a group lies below the window)."""
    shift = exponent - top + _TOP
    power = _power(tl.minimum(tl.maximum(shift, -126), _TOP))
    return tl.where(finite, power, float("nan")), finite & (shift <= _TOP - _WINDOW)


@triton.jit
def _load_words(ptr, at, inside):
    """The four int32 words of codes of each thread's group."""
    codes = tl.load(ptr + at[:, None] * 4 + tl.arange(0, 4)[None, :], mask=inside[:, None], other=0)
    return _columns(codes)


@triton.jit
def _expand_kernel(
    packed_ptr, scale_ptr, out_ptr, row_scale_ptr, outside_ptr, groups,
    TILE: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    everyone = tl.arange(0, ALL)
    bytes_ = tl.load(scale_ptr + row * groups + everyone, mask=everyone < groups, other=0).to(tl.int32)
    top = tl.max(tl.where(bytes_ == 255, 0, bytes_), axis=0) - 127
    top = tl.maximum(top, _LEAST_TOP)
    tl.store(row_scale_ptr + row, _power(top - _TOP))
    count = tl.zeros((TILE,), tl.int32)
    for start in range(0, groups, TILE):
        group, inside = _row_part(start, row, groups, TILE)
        words = _load_words(packed_ptr + row * groups * 4, group, inside)
        byte = tl.load(scale_ptr + row * groups + group, mask=inside, other=0).to(tl.int32)
        finite = byte != 255
        power, below = _window(byte - 127, finite, top)
        count += (below & _used(words)).to(tl.int32)
        values = ()
        for w in tl.static_range(4):
            for i in tl.static_range(8):
                values = values + (_value(words[w], 4 * i),)
        _store_e4m3(out_ptr + row * groups * 32, values, power, group * 32, inside)
    tl.store(outside_ptr + row, tl.sum(count, axis=0))


def expand(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """packed [N, K/2], scale [N, K/32] -> e4m3 [N, K], row scale [N], outside [N]: a program a row."""
    rows, groups = scale.shape
    out, row_scale, outside = _expanded(rows, groups * GROUP, packed.device)
    if not groups:
        row_scale.fill_(2.0 ** (LEAST_TOP - TOP))
        outside.zero_()
    elif rows:
        tile = min(128, max(32, triton.next_power_of_2(groups)))
        _expand_kernel[(rows,)](
            packed.contiguous().view(torch.int32), scale.contiguous(), out.view(torch.uint8), row_scale, outside, groups,
            TILE=tile, ALL=triton.next_power_of_2(groups), num_warps=tile // 32, **EXACT,
        )  # fmt: skip
    return out, row_scale, outside


def _expanded(rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.int32, device=device),
    )


@triton.jit
def _load_row(
    x_ptr, signs_ptr, row, threads, BLOCK: tl.constexpr, TILE: tl.constexpr, VECTOR: tl.constexpr,
    HADAMARD: tl.constexpr, SIGNS: tl.constexpr,
):  # fmt: skip
    thread = tl.arange(0, TILE)
    inside = thread < threads
    x = _load_block(x_ptr + row * threads * BLOCK, thread, inside, BLOCK, VECTOR)
    if SIGNS:
        x = _times_each(x, _load_block(signs_ptr, thread * 0, inside, BLOCK, 4))
    if HADAMARD:
        x = _butterfly(x, BLOCK)
    return x


@triton.jit(do_not_specialize=["root"])
def _quantize_expanded_kernel(
    x_ptr, signs_ptr, out_ptr, row_scale_ptr, outside_ptr, packed_ptr, scale_ptr, threads, root,
    BLOCK: tl.constexpr, TILE: tl.constexpr, VECTOR: tl.constexpr, HADAMARD: tl.constexpr, SIGNS: tl.constexpr,
    RULE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    thread = tl.arange(0, TILE)
    inside = thread < threads
    x = _load_row(x_ptr, signs_ptr, row, threads, BLOCK, TILE, VECTOR, HADAMARD, SIGNS)
    GROUPS: tl.constexpr = BLOCK // _GROUP
    exponents = ()
    finites = ()
    top = tl.full((TILE,), -127, tl.int32)
    for g in tl.static_range(GROUPS):
        exponent, finite = _exponent(_part(x, g * 32, 32), root, RULE)
        exponents = exponents + (exponent,)
        finites = finites + (finite,)
        top = tl.maximum(top, tl.where(finite & inside, exponent, -127))
    largest = tl.maximum(tl.max(top, axis=0), _LEAST_TOP)
    tl.store(row_scale_ptr + row, _power(largest - _TOP))
    rare = tl.zeros((TILE,), tl.int32)
    for g in tl.static_range(GROUPS):
        power, below = _window(exponents[g], finites[g], largest)
        rare = rare | (below & inside).to(tl.int32)
        values = ()
        for i in tl.static_range(32):
            values = values + (_e2m1(x[g * 32 + i], _factor(exponents[g], root, RULE), _clamps(RULE)),)
        at = (thread * GROUPS + g) * 32
        _store_e4m3(out_ptr + row * threads * BLOCK, values, power, at, inside)
    if tl.max(rare, axis=0) == 0:
        tl.store(outside_ptr + row, 0)
    else:  # groups of zeros, or outside the window: count these, and keep the row for who multiplies it exactly
        count = tl.zeros((TILE,), tl.int32)
        again = _load_row(x_ptr, signs_ptr, row, threads, BLOCK, TILE, VECTOR, HADAMARD, SIGNS)  # frees x's registers
        for g in tl.static_range(GROUPS):
            words, byte, _, finite = _quantize(_part(again, g * 32, 32), thread, root, (0, 0, 0, 0), RULE, False)
            _, below = _window(byte.to(tl.int32) - 127, finite, largest)
            count += (below & _used(words) & inside).to(tl.int32)
            group = row * threads * GROUPS + thread * GROUPS + g
            codes = _matrix4(words[0], words[1], words[2], words[3])
            tl.store(packed_ptr + group[:, None] * 4 + tl.arange(0, 4)[None, :], codes, mask=inside[:, None])
            tl.store(scale_ptr + group, byte, mask=inside)
        tl.store(outside_ptr + row, tl.sum(count, axis=0))


def quantize_expanded(
    x: Tensor, rule: ScaleRule, hadamard: int, signs: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [M, K] -> e4m3, row scale, outside; packed and scale, written where a row's outside is not 0."""
    x = _floats(x).contiguous()
    rows, width = x.shape
    block = hadamard or GROUP
    threads = width // block
    tile = max(32, triton.next_power_of_2(threads))
    if tile > LARGEST_ROW or not threads:
        packed, scale, _ = quantize(x, rule, hadamard, signs, None, False)
        return *expand(packed, scale), packed, scale
    out, row_scale, outside = _expanded(rows, width, x.device)
    packed, scale, _ = _outputs(x, x.shape, False)
    if rows:
        _quantize_expanded_kernel[(rows,)](
            x, _float_signs(signs, x), out.view(torch.uint8), row_scale, outside, packed.view(torch.int32), scale,
            threads, float(hadamard or 1) ** -0.5, BLOCK=block, TILE=tile, VECTOR=_vector(x), HADAMARD=hadamard > 0,
            SIGNS=signs is not None, RULE=str(rule), num_warps=tile // 32, **EXACT,
        )  # fmt: skip
    return out, row_scale, outside, packed, scale


@triton.jit
def _dequantize_kernel(packed_ptr, scale_ptr, out_ptr, groups, TILE: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * TILE
    thread = tl.arange(0, TILE)
    inside = thread < groups - first
    words = _load_words(packed_ptr + first * 4, thread, inside)
    byte = tl.load(scale_ptr + first + thread, mask=inside, other=0)
    power = tl.where(byte == 255, float("nan"), _scale_value(byte))
    for q in tl.static_range(4):
        low = _matrix4(_value(words[q], 0), _value(words[q], 4), _value(words[q], 8), _value(words[q], 12))
        high = _matrix4(_value(words[q], 16), _value(words[q], 20), _value(words[q], 24), _value(words[q], 28))
        both = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (TILE, 8)) * power[:, None]
        at = thread[:, None] * 32 + q * 8 + tl.arange(0, 8)[None, :]
        tl.store(out_ptr + first * 32 + at, both.to(out_ptr.dtype.element_ty), mask=inside[:, None])


def dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., K] in `dtype`: a thread a group."""
    out = torch.empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=dtype, device=packed.device)
    groups, tile = scale.numel(), 128
    if groups:
        _dequantize_kernel[(triton.cdiv(groups, tile),)](
            packed.contiguous().view(torch.int32), scale.contiguous(), out, groups, TILE=tile, num_warps=4, **EXACT
        )
    return out


@triton.jit(do_not_specialize=["root"])
def _masked_hadamard_kernel(
    x_ptr, mask_ptr, y_ptr, threads, root, BLOCK: tl.constexpr, TILE: tl.constexpr, VECTOR: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * TILE
    thread = tl.arange(0, TILE)
    inside = thread < threads - first
    GROUPS: tl.constexpr = BLOCK // _GROUP
    x = _load_block(x_ptr + first * BLOCK, thread, inside, BLOCK, VECTOR)
    kept = ()
    for g in tl.static_range(GROUPS):
        bits = tl.load(mask_ptr + first * GROUPS + thread * GROUPS + g, mask=inside, other=0)
        for i in tl.static_range(32):
            kept = kept + (tl.where(((bits >> i) & 1) != 0, x[g * 32 + i], 0.0),)
    y = _times(_butterfly(kept, BLOCK), root)
    for q in tl.static_range(BLOCK // 4):
        at = thread[:, None] * BLOCK + q * 4 + tl.arange(0, 4)[None, :]
        four = _matrix4(y[4 * q], y[4 * q + 1], y[4 * q + 2], y[4 * q + 3])
        tl.store(y_ptr + first * BLOCK + at, four.to(y_ptr.dtype.element_ty), mask=inside[:, None])


def masked_hadamard(x: Tensor, mask: Tensor, hadamard: int, scale: float) -> Tensor:
    """x where the mask is set, turned: a thread a block."""
    x = x.contiguous()
    y = torch.empty_like(x)
    threads, tile = x.numel() // hadamard, 128
    if threads:
        _masked_hadamard_kernel[(triton.cdiv(threads, tile),)](
            x, mask.contiguous().view(torch.int32), y, threads, scale, BLOCK=hadamard, TILE=tile, VECTOR=_vector(x),
            num_warps=4, **EXACT,
        )  # fmt: skip
    return y
