"""MXFP4 in plain torch: the definition of every operator, bit for bit, and the CPU implementation.

Every operation is float32 in a fixed order (sums are halving trees, the Hadamard transform is a butterfly), powers of
two are built from bits, and random numbers are Philox4x32-7 of the group's number, so that a kernel can give the same
codes, scales and masks whatever its tiles.
"""

import struct
from collections.abc import Iterator
from enum import StrEnum
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from quantrot.kernels.scratch import LARGEST, scratch

GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
MIN_EXPONENT, MAX_EXPONENT = -127, 126  # float32 amax never asks for e8m0's 2^127
QUEST_CLIP = 2.92247856  # the Gaussian's MSE-optimal e2m1 range, in standard deviations
QUEST_SQUARE = (QUEST_CLIP / E2M1_MAX) ** 2
CHUNK = LARGEST  # elements at a time: with two threads, steps on fewer wait for the interpreter's lock (19 s for 14 s)
E4M3 = torch.float8_e4m3fn
TOP, WINDOW = (
    6,
    15,
)  # e2m1 * 2^d is exact in e4m3 for the 15 exponents d = 6, 5, ... -8: 6 * 2^6 = 384, 0.5 * 2^-8 = 2^-9
LEAST_TOP = -120  # of a row's largest exponent: 2^(top - 6) stays a normal float32
NINE_BITS_FROM = (0, 7, 16, 23)  # of a random word, for four neighbours: two pairs share two bits each
FINE = 2.0**-14  # e2m1's least normal number times this is float16's
TURNED_LIMIT = 2.0**110  # a turned group that reaches this is NaN, so that 2^-e times FINE stays a normal float32


class ScaleRule(StrEnum):
    """How a group's power of two is chosen from its largest magnitude `amax`, or from its spread.

    floor     2^(floor(log2 amax) - 2), the OCP rule: amax lands in [4, 8), so up to a quarter of it saturates
    even      the same after rounding amax to one mantissa bit: amax lands in [3.5, 7)
    rceil     the least power of two with amax / scale <= 6: nothing saturates
    quest     2^floor(log2(2.92247856 / 6 * std)): for training on Gaussian data
    absmax34  floor's power of two, and 3/4 of the value is stored: nothing saturates, which unbiased stochastic
              rounding needs; the consumer divides by `stored_share`
    mse       floor's power of two or twice it, whichever leaves the least squared error (half of it never did on
              normal or heavy-tailed data)
    """

    floor = "floor"
    even = "even"
    rceil = "rceil"
    quest = "quest"
    absmax34 = "absmax34"
    mse = "mse"


class Random(NamedTuple):
    """Of stochastic rounding: the key of Philox and the upper half of its counters, 64-bit numbers.

    drawn: int64 [2], added to them where they are used, so that what a CUDA graph replays finds other numbers there.
    """

    seed: int
    offset: int
    drawn: Tensor | None = None

    def numbers(self) -> tuple[int, int]:
        """(seed, offset) with the drawn ones."""
        seed, offset = (0, 0) if self.drawn is None else self.drawn.tolist()
        return (self.seed + seed) % (1 << 64), (self.offset + offset) % (1 << 64)


def power_of_two(exponent: Tensor) -> Tensor:
    """2.0^exponent as float32, exact, for int32 exponents in [-127, 127]: the bits are built, no libm is called."""
    if exponent.dtype != torch.int32:
        raise ValueError(f"exponent: {exponent.dtype}; allowed: torch.int32; convert it")
    bits = (exponent + 127) << 23
    return bits.clamp_(min=1 << 22).view(torch.float32)  # 2^-127 is a subnormal, half of the least normal number


def _floor_log2(x: Tensor) -> Tensor:
    """floor(log2 x) of float32 x >= 0 as int32, from the exponent bits: -127 for zero and subnormals."""
    return (x.view(torch.int32) >> 23) - 127


def float32(x: float) -> float:
    """The nearest float32 number, so that a Python float multiplies as one."""
    return struct.unpack("f", struct.pack("f", x))[0]


def float16(x: float) -> float:
    """The nearest float16 number."""
    return struct.unpack("e", struct.pack("e", x))[0]


def stored_share(hadamard: int) -> float:
    """What absmax34 stores of each value, behind a Hadamard in blocks of `hadamard` (0: none): 3/4; in blocks of 32 and
    128 so that times the root it is a float16 number, whose product with another one is exact in float32."""
    return 543 / 512 * 0.5**0.5 if hadamard in (32, 128) else 0.75  # numbers: of globals torch.compile makes symbols


def tree_sum(x: Tensor) -> Tensor:
    """The sum over the first dimension, a power of two, in the order x[i] + x[i + half], halved again and again."""
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        x = x[:half] + x[half:]
    return x[0]


# --- Quantization ----------------------------------------------------------------------------------------------------
#
# Inside, a piece of a tensor lies as [32, groups], so that every step is a run over contiguous memory, and the steps
# write into buffers that stay.


def _buffers(n: int, device: torch.device) -> list[Tensor]:
    """Five float32 [32, n] to work in; on a CPU the thread's own, the same in every call."""
    if device.type != "cpu":
        return [torch.empty(GROUP, n, dtype=torch.float32, device=device) for _ in range(5)]
    return [buffer.view(GROUP, n) for buffer in scratch(5, GROUP * n)]


def _spread(groups: Tensor) -> tuple[Tensor, Tensor]:
    """(variance, what is finite where the squares are) of float32 groups [32, n]."""
    mean, square = tree_sum(groups) * 2.0**-5, tree_sum(groups * groups) * 2.0**-5
    return (square - mean * mean).clamp_(min=0), square


def _spread_before_turning(groups: Tensor) -> tuple[Tensor, Tensor]:
    """The same of what Sylvester's matrix of 32 makes of the groups: its first input is the outputs' mean, and the
    squares' sum is their mean square (Parseval), so that the other inputs' squares are the variance."""
    squares = groups * groups
    squares[0] = 0
    variance = tree_sum(squares)
    return variance, variance + groups[0] * groups[0]


def _quest_exponents(variance: Tensor, root: float) -> Tensor:
    """log2 of the clipped deviation is half its square's."""
    bits = (variance * float32(root * root)).mul_(QUEST_SQUARE).view(torch.int32)
    return torch.where(bits < 0x00800000, MIN_EXPONENT, ((bits >> 23) - 127) >> 1)


def _exponents(
    magnitude: Tensor,
    rule: ScaleRule,
    root: float,
    spread: tuple[Tensor, Tensor] | None,
    turned: bool,
    work: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """(unbiased exponent int32 [n], finite bool [n]) of root times float32 magnitudes [32, n]; buffers to work in."""
    if spread is not None:
        variance, square = spread
        return _quest_exponents(variance, root).clamp_(MIN_EXPONENT, MAX_EXPONENT), torch.isfinite(square)
    amax = magnitude.amax(0).mul_(root)
    if rule is ScaleRule.even:  # half a unit of the one mantissa bit that is kept, and of float16's last
        half = (1 << 21) + ((1 << 12) if turned else 0)
        exponents = ((amax.view(torch.int32) + half) >> 23) - 129
    else:
        exponents = _floor_log2(amax) - 2
    if rule is ScaleRule.rceil:
        exponents += ((amax.view(torch.int32) & 0x7FFFFF) > 0x400000).int()  # past 1.5, 6 scales
    if rule is ScaleRule.mse:
        exponents = _least_error(magnitude, amax, exponents.clamp_(MIN_EXPONENT + 1, MAX_EXPONENT - 1), root, work)
    return exponents.clamp_(MIN_EXPONENT, MAX_EXPONENT), amax < (TURNED_LIMIT if turned else torch.inf)


def _round_e2m1(y: Tensor, magic: Tensor, dither: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Round float32 magnitudes y <= 6 to e2m1 in a form that has both answers, (shifted, magic), in y and magic.

    Adding magic = 1.5 * 2^23 steps makes the adder round to a multiple of the step, ties to even, and leaves the
    multiple in the low mantissa bits: shifted - magic is the value, `_code` reads the code. On a CPU that is half a
    dozen vector operations, under 1 ns an element against 13 ns through a table search. `dither`, in steps, is added
    before: uniform in (-1/2, 1/2), it makes the rounding stochastic and leaves multiples where they are.
    """
    torch.clamp(y, min=1.0, out=magic).view(torch.int32).bitwise_and_(0x7F800000)  # the binade, 1, 2 or 4: two steps
    if dither is not None:
        y.add_(dither.mul_(magic).mul_(0.5))
    return y.add_(magic.mul_(0.75 * 2**23)), magic


def _code(shifted: Tensor, magic: Tensor) -> Tensor:
    """The unsigned codes, int32, of `_round_e2m1`'s result: the multiple of the step, plus 2 for each binade."""
    twice_binade = magic.view(torch.int32).bitwise_right_shift_(22)  # 299 + 2 * log2(binade)
    return shifted.view(torch.int32).bitwise_and_(15).add_(twice_binade).sub_(299)


def _least_error(magnitude: Tensor, amax: Tensor, centre: Tensor, root: float, work: list[Tensor]) -> Tensor:
    """The exponent among centre and centre + 1 with the least squared error; ties to the first.

    Only groups whose maximum is more than 7 of the first's units are compared, about a fifth: below, no element is
    nearer to the second's grid, whose points up to 6 are the first's too, and 7 is as far from its 8 as from 6.
    """
    far = (amax * power_of_two(-centre) > 7).nonzero().squeeze(1)
    scaled, y, magic = (buffer.view(-1)[: GROUP * far.numel()].view(GROUP, -1) for buffer in work)
    torch.index_select(magnitude, 1, far, out=scaled).mul_(power_of_two(-centre[far]).mul_(root))
    shifted, magic = _round_e2m1(torch.clamp(scaled, max=E2M1_MAX, out=y), magic)
    once = tree_sum(shifted.sub_(magic).sub_(scaled).square_())
    shifted, magic = _round_e2m1(torch.clamp(scaled.mul_(0.5), max=E2M1_MAX, out=y), magic)
    twice = tree_sum(shifted.sub_(magic).sub_(scaled).square_()).mul_(4)
    return centre.index_add(0, far, (twice < once).int())


def _pack_bits(bits: Tensor) -> Tensor:
    """bool [32, n] -> uint8 [n, 4], element 8 i + j in bit j of byte i."""
    words = bits[0].to(torch.int32)
    for j in range(1, GROUP):
        words |= bits[j].to(torch.int32) << j
    return words.view(torch.uint8).view(-1, 4)


def unpack_bits(packed: Tensor) -> Tensor:
    """The inverse of the mask's packing: uint8 [..., K / 8] -> bool [..., K]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(-2).bool()


class _Rounded(NamedTuple):
    """root times float32 groups [32, n], rounded to e2m1: what packing and dequantizing both start from.

    In the thread's buffers; the next piece overwrites them.
    """

    shifted: Tensor  # of magnitudes, as `_round_e2m1` has them
    magic: Tensor
    signed: Tensor  # whose signs are the elements'
    exponents: Tensor  # int32 [n], unbiased
    finite: Tensor  # bool [n]
    kept: Tensor | None  # uint8 [n, 4], the mask

    def scale(self) -> Tensor:
        """uint8 [n]."""
        return torch.where(self.finite, self.exponents + 127, 255).to(torch.uint8)

    def packed(self, spare: Tensor) -> Tensor:
        """uint8 [16, n]; overwrites `shifted`, `magic` and `spare`."""
        code = _code(self.shifted, self.magic)
        sign = torch.bitwise_right_shift(self.signed.view(torch.int32), 28, out=spare.view(torch.int32))
        code.bitwise_or_(sign.bitwise_and_(8)).mul_(self.finite)
        return code[1::2].bitwise_left_shift_(4).bitwise_or_(code[0::2]).to(torch.uint8)

    def values(self) -> Tensor:
        """float32 [32, n], what the codes and scales stand for; overwrites `shifted` and `signed`."""
        signs = self.signed.view(torch.int32).bitwise_and_(-0x80000000)
        power = torch.where(self.finite, power_of_two(self.exponents), torch.nan)
        values = self.shifted.sub_(self.magic).mul_(power)
        values.view(torch.int32).bitwise_or_(signs)  # 35 us for 2^18; copysign 66
        return values


def _round_groups(
    groups: Tensor, spare: list[Tensor], rule: ScaleRule, root: float, turned: bool, dither: Tensor | None, mask: bool
) -> _Rounded:
    """root times float32 [32, n], rounded; root is a float32 number. Overwrites the groups and the four in `spare`.

    turned: Sylvester's matrix of 32 is still to be applied. What comes of it, and what absmax34 stores, is rounded to a
    512th of e2m1's step before it is rounded to e2m1: to float16, scaled so that e2m1's least normal number is its own.
    """
    spread = None
    if rule is ScaleRule.quest:
        spread = _spread_before_turning(groups) if turned else _spread(groups)
    magnitude, *work = spare
    if turned:
        groups, magnitude = _butterfly(groups, magnitude, GROUP // 2, 1)
    torch.abs(groups, out=magnitude)
    exponents, finite = _exponents(magnitude, rule, root, spread, turned, work)
    factor = power_of_two(-exponents).mul_(float16(root * 0.75) if rule is ScaleRule.absmax34 else root)
    if turned or rule is ScaleRule.absmax34:
        magnitude.copy_(magnitude.mul_(factor.mul_(FINE)).to(torch.float16)).mul_(1 / FINE)
    else:
        magnitude.mul_(factor)
    kept = _pack_bits((magnitude <= E2M1_MAX).logical_and_(finite)) if mask else None
    shifted, magic = _round_e2m1(magnitude.clamp_(max=E2M1_MAX), work[0], dither)
    return _Rounded(shifted, magic, groups, exponents, finite, kept)


def _pieces(
    x: Tensor, rule: ScaleRule, hadamard: int, signs: Tensor | None, random: Random | None, mask: bool
) -> Iterator[tuple[slice, _Rounded, Tensor]]:
    """(which of x's groups, these rounded, a spare buffer), piece by piece."""
    block, root = hadamard or GROUP, float32((hadamard or 1) ** -0.5)
    blocks = x.detach().reshape(-1, block)
    column = None if signs is None else signs.to(torch.float32).unsqueeze(1)
    numbers = None if random is None else random.numbers()
    for start in range(0, blocks.shape[0], CHUNK // block):
        rows = blocks[start : start + CHUNK // block]
        first, n = start * (block // GROUP), rows.numel() // GROUP
        part, *spare = _buffers(n, x.device)
        turning = part.view(block, -1).copy_(rows.T)
        if column is not None:
            turning.mul_(column)
        if block > GROUP:
            turning, other = _butterfly(turning, spare[0].view(block, -1), block // 2, GROUP)
            groups = turning.view(block // GROUP, GROUP, -1).permute(1, 2, 0)
            part, spare[0] = other.view(groups.shape).copy_(groups).view(GROUP, n), turning.view(GROUP, n)
        dither = None
        if numbers is not None:
            dither = dither_of(first * GROUP, n * GROUP, *numbers, x.device).view(-1, GROUP).T.contiguous()
        yield slice(first, first + n), _round_groups(part, spare, rule, root, hadamard > 0, dither, mask), spare[3]


def quantize_reference(
    x: Tensor,
    rule: ScaleRule,
    *,
    hadamard: int = 0,
    signs: Tensor | None = None,
    random: Random | None = None,
    mask: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x [..., K] -> packed [..., K/2], scale [..., K/32], mask [..., K/8] or None. No checks.

    hadamard: the width of the block transform before it, (x * signs) H / sqrt(hadamard) in float32; 0 for none. The
    root and the group's power of two are one factor.
    random: of stochastic rounding.
    """
    groups, (*lead, width) = x.numel() // GROUP, x.shape
    packed = torch.empty(groups, GROUP // 2, dtype=torch.uint8, device=x.device)
    scale = torch.empty(groups, dtype=torch.uint8, device=x.device)
    bits = torch.empty(groups, GROUP // 8, dtype=torch.uint8, device=x.device) if mask else None
    for here, rounded, spare in _pieces(x, rule, hadamard, signs, random, mask):
        scale[here] = rounded.scale()
        packed[here].T.copy_(rounded.packed(spare))
        if bits is not None and rounded.kept is not None:
            bits[here] = rounded.kept
    codes, scales = packed.view(*lead, width // 2), scale.view(*lead, width // GROUP)
    return codes, scales, None if bits is None else bits.view(*lead, width // 8)


def round_trip_reference(x: Tensor, rule: ScaleRule, *, hadamard: int = 0) -> Tensor:
    """What `dequantize_reference` makes of `quantize_reference`'s result, in x's shape and dtype."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    groups = out.view(-1, GROUP)
    for here, rounded, _ in _pieces(x, rule, hadamard, None, None, False):
        groups[here].T.copy_(rounded.values().to(x.dtype))  # 0.12 ms for 2^18 elements; narrowed on its way 0.26
    return out


def _butterfly(x: Tensor, spare: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    """float32 [B, n]: the stages of Sylvester's matrix with strides first, first / 2, ... last, by additions.

    (the result, the other) of x and spare, which both are overwritten.
    """
    half = first
    while half >= last:
        (a, b), (plus, minus) = (t.view(-1, 2, half, x.shape[1]).unbind(1) for t in (x, spare))
        torch.add(a, b, out=plus)
        torch.sub(a, b, out=minus)
        x, spare, half = spare, x, half // 2
    return x, spare


def round_e2m1(x: Tensor) -> Tensor:
    """Float32 x, in units of its scale, to the nearest e2m1 values, as `quantize_reference` rounds."""
    y = x.abs().clamp_(max=E2M1_MAX)
    shifted, magic = _round_e2m1(y, torch.empty_like(y))
    return torch.copysign(shifted.sub_(magic), x)


def pack_e2m1(values: Tensor) -> Tensor:
    """e2m1 values, float32 [..., K] -> packed uint8 [..., K/2]."""
    y = values.abs()
    code = _code(*_round_e2m1(y, torch.empty_like(y))).add_(torch.signbit(values), alpha=8)
    return (code[..., 0::2] | (code[..., 1::2] << 4)).to(torch.uint8)


def scale_value(scale: Tensor) -> Tensor:
    """float32 of e8m0 bytes: 2^(byte - 127), NaN for 255."""
    return torch.where(scale == 255, torch.nan, power_of_two(scale.int() - 127))


@cache
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The two values of every byte, side by side in `dtype`, as 256 integers."""
    with torch.inference_mode(False):  # what is kept is of use in every mode
        values = torch.tensor((*E2M1, *(-value for value in E2M1)), dtype=dtype, device=device)
        pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), -1)
        return pairs.view(torch.int32 if dtype.itemsize == 2 else torch.int64).flatten()


def dequantize_reference(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[..., K] in `dtype` from packed uint8 [..., K/2] and scale uint8 [..., K/32]: dequantize_mxfp4."""
    work = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    pairs, bytes_, powers = _pairs(work, packed.device), packed.reshape(-1), scale.reshape(-1, 1)
    out = torch.empty(*packed.shape[:-1], packed.shape[-1] * 2, dtype=work, device=packed.device)
    groups, words = out.view(-1, GROUP), out.view(-1).view(pairs.dtype)
    step = CHUNK // GROUP
    for start in range(0, groups.shape[0], step):  # a table: 5 ms for 6 million elements, of bits 24
        here, codes = slice(start, start + step), slice(start * GROUP // 2, (start + step) * GROUP // 2)
        torch.index_select(pairs, 0, bytes_[codes].int(), out=words[codes])
        groups[here].mul_(scale_value(powers[here]).to(work))
    return out.to(dtype)


# --- Random numbers --------------------------------------------------------------------------------------------------


def philox(counter: Tensor, offset: int, seed: int) -> list[Tensor]:
    """Philox4x32-7 (Salmon et al. 2011) of the counters (counter, offset) under the key `seed`: four int64 tensors.

    counter: int64 of any shape; counter, offset and seed are 64-bit numbers, low word first. The results' low 32 bits
    are the random words; what is above is not specified.
    """
    low = 0xFFFFFFFF
    c0, c1 = counter & low, counter >> 32
    c2: Tensor = torch.full_like(c0, offset & low)
    c3: Tensor = torch.full_like(c0, (offset >> 32) & low)
    k0, k1 = seed & low, (seed >> 32) & low
    for _ in range(7):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # the wrapped 64 bits are the unsigned product's
        c0, c2 = (
            ((b >> 32) ^ c1).bitwise_xor_(k0).bitwise_and_(low),
            ((a >> 32) ^ c3).bitwise_xor_(k1).bitwise_and_(low),
        )
        c1, c3 = b, a
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return [c0, c1, c2, c3]


def dither_of(start: int, count: int, seed: int, offset: int, device: torch.device | str = "cpu") -> Tensor:
    """float32 [count], uniform on the 2^9 odd multiples of 2^-10 in (-1/2, 1/2), of elements start, start + 1, ...

    Element e takes nine bits of word e // 4 % 8 of a group's eight, from bit 0, 7, 16 or 23 on (e % 4 = 0, 1, 2, 3):
    Philox's four at counter e // 128, and each sum (xor) of three of them; in groups 1, 2 and 3 of four with b ^ c, a ^
    b and a ^ c added to each, its halves exchanged. Of the 32 words of four groups, and their halves, any three are
    independent. start and count are multiples of 32.
    """
    four = 4 * GROUP
    counter = torch.arange(start // four, -(-(start + count) // four), dtype=torch.int64, device=device)
    a, b, c, d = philox(counter, offset, seed)
    words = torch.stack((a, b, c, d, a ^ b ^ c, a ^ b ^ d, a ^ c ^ d, b ^ c ^ d), -1).unsqueeze(-1)
    two = torch.stack((torch.zeros_like(a), b ^ c, a ^ b, a ^ c), 1)
    words = words[:, None] ^ (((two >> 16) & 0xFFFF) | (two << 16))[:, :, None, None]
    bits = (words >> torch.tensor(NINE_BITS_FROM, device=device)) & 511
    first = start % four
    return bits.flatten()[first : first + count].to(torch.float32).sub_(255.5).mul_(2.0**-9)


# --- The e4m3 operand ------------------------------------------------------------------------------------------------


def expand_reference(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """packed [N, K/2], scale [N, K/32] -> e4m3 [N, K], row scale float32 [N], groups outside the window int32 [N]."""
    exponent = scale.int() - 127
    finite = scale != 255
    top = F.pad(torch.where(finite, exponent, MIN_EXPONENT), (0, 1), value=LEAST_TOP).amax(-1)
    shift = exponent - top.unsqueeze(-1) + TOP
    unit = torch.full_like(scale, 127)
    values = dequantize_reference(packed, unit, torch.float32).unflatten(-1, (-1, GROUP))
    values.mul_(power_of_two(shift.clamp(-126, TOP)).unsqueeze(-1))
    codes = values.to(E4M3).view(torch.uint8)
    codes.masked_fill_(~finite.unsqueeze(-1), 0x7F)
    used = (packed & 0x77).unflatten(-1, (-1, GROUP // 2)).amax(-1) > 0
    outside = (finite & used & (shift <= TOP - WINDOW)).sum(-1, dtype=torch.int32)
    return codes.flatten(-2).view(E4M3), power_of_two(top - TOP), outside


# --- Gradients --------------------------------------------------------------------------------------------------------


def masked_hadamard_reference(x: Tensor, mask: Tensor, hadamard: int, scale: float, dtype: torch.dtype) -> Tensor:
    """x [..., K] where the packed mask is set, 0 elsewhere, times scale * blocks of H; float32, rounded once."""
    blocks = x.reshape(-1, hadamard)
    bits = mask.reshape(-1, hadamard // 8)
    out = torch.empty(blocks.shape, dtype=dtype, device=x.device)
    for start in range(0, blocks.shape[0], CHUNK // hadamard):
        here = slice(start, start + CHUNK // hadamard)
        kept = torch.where(unpack_bits(bits[here]), blocks[here].to(torch.float32), 0.0)
        columns = kept.T.contiguous()
        turned, _ = _butterfly(columns, torch.empty_like(columns), hadamard // 2, 1)
        out[here] = turned.mul_(scale).T
    return out.view(x.shape)
