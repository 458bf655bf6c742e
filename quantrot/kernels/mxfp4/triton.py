"""MXFP4 in Triton: what the quantizers are made of.

A thread owns what a group needs. A tile is a tuple of vectors: element j of the tuple is column j of every thread's
own block of 32, 64 or 128 (or row j, where the transpose is quantized). The transform, its sums and the packing are
then plain register arithmetic in the order of the reference, with no shuffle, no shared memory and no layout left to
the compiler, and the bits are the reference's. Products and sums are never fused, except where the product is exact.
"""

# mypy: disable-error-code="assignment, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantrot.kernels.mxfp4.reference import FINE, GROUP, QUEST_SQUARE, TURNED_LIMIT, Random

EXACT = {"enable_fp_fusion": False}  # x * y + z is two roundings, as in the reference

_GROUP = tl.constexpr(GROUP)
_QUEST_SQUARE = tl.constexpr(QUEST_SQUARE)
_MAGIC = tl.constexpr(0.75 * 2.0**23)
_FINE = tl.constexpr(FINE)
_UNFINE = tl.constexpr(1 / FINE)
_TURNED_LIMIT = tl.constexpr(TURNED_LIMIT)
_TWO126 = tl.constexpr(2.0**126)
_SIGN = tl.constexpr(-0x80000000)
_SIGN_AND_EXPONENT = tl.constexpr(-0x00800000)


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
def _turn_across(x, H: tl.constexpr):
    """The stages of Sylvester's matrix between groups of 32, from the widest stride down."""
    y = x
    if H >= 128:
        y = _stage(y, 64)
    if H >= 64:
        y = _stage(y, 32)
    return y


@triton.jit
def _turn_within(x):
    """Those inside of groups."""
    return _stage(_stage(_stage(_stage(_stage(x, 16), 8), 4), 2), 1)


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
    """1, 2 or 4: the power of two at or below |y|, at least 1, with the sign of y. The exponent of 1.0 is all ones
    below its top bit, so or-ing a smaller one changes nothing: one logical instruction takes exponent and sign."""
    bits = tl.maximum(tl.abs(y), 1.0).to(tl.int32, bitcast=True) | y.to(tl.int32, bitcast=True)
    return (bits & _SIGN_AND_EXPONENT).to(tl.float32, bitcast=True)


@triton.jit
def _squared_error(x, factor):
    errors = ()
    for i in tl.static_range(32):
        y = tl.abs(x[i] * factor)
        clipped = tl.minimum(y, 6.0)
        magic = _binade(clipped) * _MAGIC
        error = ((clipped + magic) - magic) - y
        errors = errors + (error * error,)
    return _sum32(errors)


@triton.jit
def _turned(x, RULE: tl.constexpr, TURN: tl.constexpr):
    """(a tuple of 32, turned if TURN; its variance; what is finite where its squares are), the last two for quest."""
    variance = x[0]
    square = x[0]
    if RULE == "quest":
        squares = _times_each(x, x)
        if TURN:
            variance = _sum32((tl.zeros_like(x[0]),) + _part(squares, 1, 31))
            square = variance + squares[0]
        else:
            mean = _sum32(x) * 0.03125
            square = _sum32(squares) * 0.03125
            variance = tl.maximum(square - mean * mean, 0.0)
    if TURN:
        return _turn_within(x), variance, square
    else:
        return x, variance, square


@triton.jit
def _exponent(turned, root, RULE: tl.constexpr, TURN: tl.constexpr):
    """(unbiased exponent, whether the group is finite) of `_turned`'s result, times root; see the reference."""
    x = turned[0]
    if RULE == "quest":
        square = turned[2]
        bits = (turned[1] * (root * root) * _QUEST_SQUARE).to(tl.int32, bitcast=True)
        exponent = tl.where(bits < 0x00800000, -127, ((bits >> 23) - 127) >> 1)
        finite = square < float("inf")
    else:
        amax = _amax32(x) * root
        bits = amax.to(tl.int32, bitcast=True)
        if TURN:
            finite = amax < _TURNED_LIMIT
        else:
            finite = amax < float("inf")
        if RULE == "even":
            exponent = ((bits + (0x201000 if TURN else 0x200000)) >> 23) - 129
        else:
            exponent = (bits >> 23) - 129
        if RULE == "rceil":
            exponent += ((bits & 0x7FFFFF) > 0x400000).to(tl.int32)
        if RULE == "mse":
            exponent = tl.minimum(tl.maximum(exponent, -126), 125)
            once = _squared_error(x, _power(-exponent) * root)
            twice = _squared_error(x, _power(-exponent) * (root * 0.5)) * 4.0
            exponent += ((twice < once) & (amax * _power(-exponent) > 7.0)).to(tl.int32)
    return tl.minimum(tl.maximum(exponent, -127), 126), finite


@triton.jit
def _philox(low, high, o0, o1, s0, s1):
    """Four uint32 vectors: Philox4x32-7 of the counters (low, high, o0, o1) under the key (s0, s1)."""
    c0, c1 = low, high
    c2 = tl.zeros_like(low) + o0
    c3 = tl.zeros_like(low) + o1
    k0, k1 = s0, s1
    for _ in tl.static_range(7):
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
def _key(s0, s1, o0, o1, drawn_ptr, DRAWN: tl.constexpr):
    """Seed and offset as four int32 words; DRAWN: with the two int64 numbers at drawn_ptr added."""
    if DRAWN:
        seed = tl.add(_long(s0, s1), tl.load(drawn_ptr), sanitize_overflow=False)
        offset = tl.add(_long(o0, o1), tl.load(drawn_ptr + 1), sanitize_overflow=False)
        s0, s1 = seed.to(tl.int32), (seed >> 32).to(tl.int32)
        o0, o1 = offset.to(tl.int32), (offset >> 32).to(tl.int32)
    return s0, s1, o0, o1


@triton.jit
def _long(low, high):
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _dither(group, key):
    """A tuple of 32 uniform vectors in (-1/2, 1/2) for group number `group` (int64) of the result."""
    u = ()
    s0 = key[0].to(tl.uint32, bitcast=True)
    s1 = key[1].to(tl.uint32, bitcast=True)
    o0 = key[2].to(tl.uint32, bitcast=True)
    o1 = key[3].to(tl.uint32, bitcast=True)
    a, b, c, d = _philox((group >> 2).to(tl.uint32), (group >> 34).to(tl.uint32), o0, o1, s0, s1)
    two = tl.where((group & 1) != 0, b ^ c, 0) ^ tl.where((group & 2) != 0, a ^ b, 0)
    more = (two >> 16) | (two << 16)
    a, b, c, d = a ^ more, b ^ more, c ^ more, d ^ more
    words = (a, b, c, d, a ^ b ^ c, a ^ b ^ d, a ^ c ^ d, b ^ c ^ d)
    for i in tl.static_range(8):
        w = words[i]
        u = u + (_nine_bits(w), _nine_bits(w >> 7), _nine_bits(w >> 16), _nine_bits(w >> 23))
    return u


@triton.jit
def _nine_bits(word):
    return (word & 511).to(tl.float32) * 0.001953125 - 0.4990234375  # (bits - 255.5) / 512


@triton.jit
def _scaled(value, factor, FINE: tl.constexpr):
    """value * factor; FINE: to a 512th of e2m1's step."""
    y = value * factor
    if FINE:
        y = (y * _FINE).to(tl.float16).to(tl.float32) * _UNFINE
    return y


@triton.jit
def _rounded(value, u, factor, CLAMP: tl.constexpr, DITHER: tl.constexpr, FINE: tl.constexpr):
    """(value * factor + magic, binade), both with value's sign: adding magic = 1.5 * 2^23 steps rounds to a multiple
    of the step."""
    y = _scaled(value, factor, FINE)
    if CLAMP:
        y = tl.minimum(tl.maximum(y, -6.0), 6.0)
    binade = _binade(y)
    if DITHER:
        y = tl.fma(u, binade * 0.5, y)
    return tl.fma(binade, _MAGIC, y), binade


@triton.jit
def _word(x, u, factor, FIRST: tl.constexpr, CLAMP: tl.constexpr, DITHER: tl.constexpr, FINE: tl.constexpr):
    """Eight codes, from element FIRST on, as one int32.

    The rounded sum is sign, exponent 149 + log2(binade), a one at bit 22, and the multiple n of the step in its low
    bits; the code is n + 2 log2(binade). Its product by 2^28 + 2^6 + 1 has in the top nibble, modulo 16,
    n + (2 (exponent % 8) + 1) + (8 sign + 4) = 8 sign + code - 1; nothing is carried into it: below, there are
    (exponent % 32) 2^23 + 2^22 + 65 n < 2^28. A funnel shift appends the nibble.
    """
    word = tl.zeros_like(x[0]).to(tl.int32)
    for j in tl.static_range(8):
        rounded, _ = _rounded(x[FIRST + 7 - j], u[FIRST + 7 - j], factor, CLAMP, DITHER, FINE)
        top = rounded.to(tl.int32, bitcast=True) * 0x10000041 + 0x10000000
        word = (word << 4) | ((top >> 28) & 15)
    return word


@triton.jit
def _e2m1(value, factor, CLAMP: tl.constexpr, FINE: tl.constexpr):
    """The nearest e2m1 value to value * factor, with value's sign."""
    rounded, binade = _rounded(value, value, factor, CLAMP, False, FINE)
    magnitude = tl.fma(binade, -_MAGIC, rounded).to(tl.int32, bitcast=True)  # exact
    return (magnitude | (value.to(tl.int32, bitcast=True) & _SIGN)).to(tl.float32, bitcast=True)


@triton.jit
def _kept(x, factor, FINE: tl.constexpr):
    """Bit i: whether element i is within 6 scales, from the sign of what is left of them."""
    clipped = tl.zeros_like(x[0]).to(tl.int32)
    for j in tl.static_range(32):
        left = (6.0 - tl.abs(_scaled(x[31 - j], factor, FINE))).to(tl.int32, bitcast=True)
        clipped = (clipped << 1) | ((left >> 31) & 1)
    return ~clipped


@triton.jit
def _factor(exponent, root, RULE: tl.constexpr):
    """What an element is multiplied by before it is rounded."""
    if RULE == "absmax34":
        return _power(-exponent) * tl.cast(tl.cast(root * 0.75, tl.float16), tl.float32)
    else:
        return _power(-exponent) * root


@triton.jit
def _clamps(RULE: tl.constexpr):
    """Whether elements may reach 7, where rounding would pass the largest code."""
    return RULE != "even" and RULE != "absmax34"


@triton.jit
def _fine(RULE: tl.constexpr, TURN: tl.constexpr):
    """Whether elements are rounded to a 512th of the step first."""
    return TURN or RULE == "absmax34"


@triton.jit
def _codes(x, u, factor, finite, RULE: tl.constexpr, DITHER: tl.constexpr, TURN: tl.constexpr):
    """The four words of a tuple of 32."""
    words = ()
    for q in tl.static_range(4):
        words = words + (tl.where(finite, _word(x, u, factor, 8 * q, _clamps(RULE), DITHER, _fine(RULE, TURN)), 0),)
    return words


@triton.jit
def _quantize(turned, group, root, key, RULE: tl.constexpr, DITHER: tl.constexpr, TURN: tl.constexpr):
    """(four words of codes, scale byte, factor, finite) of `_turned`'s result times root; key: 4 random words."""
    x = turned[0]
    exponent, finite = _exponent(turned, root, RULE, TURN)
    factor = _factor(exponent, root, RULE)
    if DITHER:
        u = _dither(group, key)
    else:
        u = x
    words = _codes(x, u, factor, finite, RULE, DITHER, TURN)
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


# --- Arguments -------------------------------------------------------------------------------------------------------


def vector_of(x: Tensor) -> int:
    """Neighbours in a load of 16 bytes."""
    return 16 // x.element_size()


def float_signs(signs: Tensor | None, like: Tensor) -> Tensor:
    return like if signs is None else signs.to(torch.float32).contiguous()


def key_of(random: Random | None) -> list[int]:
    """seed and offset as four signed 32-bit words, low ones first."""
    words = [n >> shift & 0xFFFFFFFF for n in (random or (0, 0))[:2] for shift in (0, 32)]
    return [word - (1 << 32) if word >> 31 else word for word in words]


def drawn_of(random: Random | None, like: Tensor) -> Tensor:
    """What a kernel adds to those, or any tensor for one that does not."""
    return like if random is None or random.drawn is None else random.drawn


def kind_of(random: Random | None) -> dict[str, bool]:
    """The kernel that takes such numbers: whether it rounds at random, and whether it adds drawn ones to its key."""
    return {"DITHER": random is not None, "DRAWN": random is not None and random.drawn is not None}


def floats(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.bfloat16, torch.float16, torch.float32) else x.to(torch.float32)


def outputs(x: Tensor, shape: torch.Size | tuple[int, ...], mask: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Empty (packed, scale, mask) of a tensor of this shape; the mask has no elements unless asked for."""
    *lead, width = shape

    def empty(columns: int) -> Tensor:
        return torch.empty((*lead, columns), dtype=torch.uint8, device=x.device)

    bits = empty(width // 8) if mask else torch.empty(0, dtype=torch.uint8, device=x.device)
    return empty(width // 2), empty(width // GROUP), bits
