"""FP8 attention in plain torch: the definition every kernel is held to, and the CPU implementation.

    quantize_heads     x [B, H, T, D] float -> e4m3 [B, H, T, D], scale bytes uint8 [B, H, groups]
                                            or int8 [B, H, T, D], scales float32 [B, H, groups]
    transposed_values  e4m3 [B, H, T, D]    -> [B, H, D, T padded to 128 by zeros], V's storage
    attention          scores, softmax and sums in float32, probabilities in e4m3

A scale byte e means 2^(e - 127) (e8m0), and x ~= qdata * scale: the least power of two with which the group's largest
magnitude is at most 448, so nothing saturates, and both directions are exact. e4m3 has its own exponent, so a power of
two costs no accuracy against amax / 448. An all-zero group has byte 127, one that holds a NaN or an infinity has byte
255, which stands for NaN, and codes 0.

int8 has no exponent of its own: its scale is the group's largest magnitude (2^-100 at least) times 1 / 127, rounded to
float32, and a code is the nearest integer, ties to even, to x times that scale's reciprocal. NaN and codes 0 as above.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from quantrot.kernels.fp8 import E4M3, E4M3_MAX
from quantrot.kernels.hadamard.reference import hadamard_reference
from quantrot.kernels.operators import check_device

BLOCK = 128  # tokens that share a scale under `block`, and V's storage is a multiple of
LARGEST_BLOCK_HEAD = 128  # head_dim up to which the kernel that quantizes has a block's values in registers at once
P_BITS = 8  # probabilities are in e4m3 times 2^8: the largest lies in (128, 256]
NAN_BYTE = 255
LOG2E = 1.4426950408889634
LEAST = 2.0**-100  # what a group's largest magnitude counts as under int8: no scale or reciprocal leaves float32
ROWS = 1 << 24  # scores worked on at a time


class Granularity(StrEnum):
    """Which values share a scale.

    tensor  all of them
    head    a sequence's head
    block   128 consecutive tokens of a sequence's head
    token   one token of a head
    """

    tensor = "tensor"
    head = "head"
    block = "block"
    token = "token"


GRANULARITIES = {each.value: each for each in Granularity}  # torch 2.11 does not compile Granularity(name)


@dataclass(frozen=True)
class Inputs:
    """What quantrot::fp8_attention takes, checked."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor
    mask: Tensor | None
    lengths: Tensor | None
    query_lengths: Tensor | None
    causal: bool
    scale: float


class Turn(NamedTuple):
    """What queries and keys of S tokens go through on their way to a cache: RoPE, as transformers has it, then a
    Hadamard matrix."""

    cos: Tensor | None = None  # [1 or B, S, D] in their dtype; None: no RoPE
    sin: Tensor | None = None
    order: int = 0  # of the matrix, D, or 0 for none
    signs: Tensor | None = None  # +-1 int8 [D], multiply what it multiplies

    def each(self, change: Callable[[Tensor], Tensor]) -> "Turn":
        """Of changed tensors."""
        cos, sin, signs = (None if t is None else change(t) for t in (self.cos, self.sin, self.signs))
        return Turn(cos, sin, self.order, signs)


def scale_byte(largest: Tensor) -> Tensor:
    """The byte for a largest magnitude, given as its float32 bits (int32; NaN is above infinity, that above all)."""
    byte = (((largest + 0x1FFFFF) >> 23) - 8).clamp(1, 254)  # 448 = 1.75 * 2^8: a mantissa above 1.75 carries
    byte = torch.where(largest == 0, 127, byte)
    return torch.where(largest >= 0x7F800000, NAN_BYTE, byte).to(torch.uint8)


def power(byte: Tensor) -> Tensor:
    """2^(byte - 127) as float32, NaN for 255."""
    value = (byte.to(torch.int32) << 23).view(torch.float32)
    return torch.where(byte == NAN_BYTE, torch.nan, value)


def step(largest: Tensor) -> Tensor:
    """int8's scale for a largest magnitude, given as its float32 bits (int32)."""
    value = largest.view(torch.float32).clamp(min=LEAST) * (1 / 127)
    return torch.where(largest >= 0x7F800000, torch.nan, value)


def factor(scale: Tensor) -> Tensor:
    """What codes are multiplied by: float32 scales themselves, or bytes' powers of two."""
    return power(scale) if scale.dtype == torch.uint8 else scale


def granularity_of(name: Granularity | str) -> Granularity:
    if name not in GRANULARITIES:
        raise ValueError(f"granularity: {name!r}; allowed: {', '.join(GRANULARITIES)}")
    return GRANULARITIES[name]


def group_of(scale: Tensor, tokens: int) -> int:
    """How many tokens share a scale of [B, H, groups]: 1, BLOCK, or 0 for all."""
    groups = scale.shape[-1]
    if groups == 1:
        return 0
    return 1 if groups == tokens else BLOCK


def span(t: Tensor) -> int:
    """Elements of its storage from the first to the last."""
    return sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1


def spread(scale: Tensor, tokens: int) -> Tensor:
    """scales [B, H, groups] -> one a token, [B, H, tokens]. ValueError for other numbers of groups than there are."""
    groups = scale.shape[-1] if scale.dim() == 3 else -1
    if groups != tokens and groups != 1 and groups != -(-tokens // BLOCK):  # in this order: export knows the first
        allowed = sorted({1, -(-tokens // BLOCK), tokens})
        raise ValueError(
            f"scale: {tuple(scale.shape)} of {tokens} tokens; allowed: [B, H, groups], groups in {allowed}"
        )
    group = group_of(scale, tokens)
    if group == 1:
        return scale
    if group == 0:
        return scale.expand(*scale.shape[:2], tokens)
    return scale.repeat_interleave(BLOCK, -1)[..., :tokens]


def merged(scale: Tensor, granularity: Granularity) -> Tensor:
    """Single tokens' [B, H, T] -> those of a coarser granularity, of which a group has its largest one."""
    if granularity is Granularity.tensor:
        largest = scale.amax() if scale.numel() else scale.new_zeros(())
        return largest.expand(*scale.shape[:2], 1)
    if granularity is Granularity.head:
        return F.pad(scale, (0, int(scale.shape[-1] == 0))).amax(-1, keepdim=True)  # of no tokens: 0
    if granularity is Granularity.block:
        return F.pad(scale, (0, -scale.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK)).amax(-1)
    return scale


def encode(x: Tensor, scale: Tensor) -> Tensor:
    """float32 [B, H, T, D] by scale bytes a token [B, H, T] -> e4m3; past 448 scales it saturates."""
    bad = (scale == NAN_BYTE).unsqueeze(-1)
    inverse = ((254 - scale.to(torch.int32)).clamp(min=0) << 23).view(torch.float32).unsqueeze(-1)
    return torch.where(bad, 0.0, x * inverse).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)


def quantize_heads(
    x: Tensor, granularity: Granularity | str = Granularity.token, codes: torch.dtype = E4M3
) -> tuple[Tensor, Tensor]:
    """Quantize [B, H, T, D] of any float dtype, any strides: e4m3 [B, H, T, D], scale uint8 [B, H, groups]; with codes
    torch.int8: int8, scale float32.

    groups: 1 for tensor and head, ceil(T / 128) for block, T for token. Rounding is to nearest, ties to even.
    """
    if x.dim() != 4 or not x.shape[3] or not x.is_floating_point() or codes not in (E4M3, torch.int8):
        raise ValueError(f"x: {x.dtype} {tuple(x.shape)}, codes: {codes}; allowed: floats [B, H, T, D], {E4M3} or int8")
    granularity = granularity_of(granularity)
    values = x.to(torch.float32)
    largest = (values.contiguous().view(torch.int32) & 0x7FFFFFFF).amax(-1) if x.numel() else values.int()[..., 0]
    if codes == torch.int8:
        scale = step(merged(largest, granularity))
        each = spread(scale, x.shape[2]).unsqueeze(-1)
        rounded = torch.where(each.isnan(), 0.0, values * each.reciprocal()).round_()
        return rounded.to(torch.int8).contiguous(), scale.contiguous()
    bytes_ = torch.where(largest == 0, 0, scale_byte(largest))  # an all-zero token does not raise its group's scale
    scale = merged(bytes_.to(torch.uint8), granularity)
    scale = torch.where(scale == 0, 127, scale).to(torch.uint8)
    return encode(values, spread(scale, x.shape[2])).contiguous(), scale.contiguous()


def dequantize_heads(qdata: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[B, H, T, D] in `dtype` from quantize_heads' result; of e4m3 exact in float32 and bfloat16."""
    kind = {E4M3: torch.uint8, torch.int8: torch.float32}.get(qdata.dtype)
    if qdata.dim() != 4 or scale.dtype != kind or scale.shape[:-1] != qdata.shape[:2] or not dtype.is_floating_point:
        raise ValueError(
            f"qdata: {qdata.dtype} {tuple(qdata.shape)}, scale: {scale.dtype} {tuple(scale.shape)}, dtype: {dtype}; "
            f"allowed: {E4M3} [B, H, T, D] with bytes (uint8) [B, H, groups], or int8 with float32, as quantize_heads "
            "makes them, and a dtype of floats"
        )
    check_device(qdata=qdata, scale=scale)
    return (qdata.to(torch.float32) * factor(spread(scale, qdata.shape[2])).unsqueeze(-1)).to(dtype)


def transposed_values(qdata: Tensor) -> Tensor:
    """e4m3 [B, H, T, D] -> [B, H, D, T'], contiguous, T' the next multiple of 128, zeros behind T."""
    if qdata.dtype != E4M3 or qdata.dim() != 4:
        raise ValueError(f"qdata: {qdata.dtype} {tuple(qdata.shape)}; allowed: {E4M3} [B, H, T, D]")
    tokens = qdata.shape[2]
    out = torch.zeros(
        *qdata.shape[:2], qdata.shape[3], -(-tokens // BLOCK) * BLOCK, dtype=torch.uint8, device=qdata.device
    )
    out[..., :tokens] = qdata.view(torch.uint8).transpose(2, 3)
    return out.view(E4M3)


def key_rows(tokens: int) -> int:
    """Rows of K's storage a head: Hopper's kernel reads them in sixteens. Those behind the last token are not set."""
    return -(-tokens // 16) * 16


@torch.no_grad()  # codes have no gradient, and the rotation's sums are written in place
def rope_hadamard_quantize_reference(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, signs: Tensor | None, order: int,
    granularity: Granularity, codes: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """q [B, S, H, D], k and v [B, S, G, D] -> q, q_scale, k, k_scale, v, v_scale; order 0: no rotation; signs [D];
    codes: of q and k."""
    coarse = granularity in (Granularity.tensor, Granularity.head)
    turned = [_turned(t, cos, sin, signs, order).transpose(1, 2) for t in (q, k)]
    q, q_scale = quantize_heads(turned[0], granularity if coarse else Granularity.token, codes)
    k, k_scale = quantize_heads(turned[1], granularity, codes)
    v, v_scale = quantize_heads(v.transpose(1, 2), granularity)
    stored = k.new_empty(*k.shape[:2], key_rows(k.shape[2]), k.shape[3])[:, :, : k.shape[2]]
    k = stored.copy_(k)
    return q, q_scale, k, k_scale, transposed_values(v), v_scale


def _turned(x: Tensor, cos: Tensor | None, sin: Tensor | None, signs: Tensor | None, order: int) -> Tensor:
    """RoPE, then the rotation, of x [B, S, heads, D]; float32 where it was rotated, a zero sum +0."""
    half = x.shape[-1] // 2
    if cos is not None and sin is not None:
        c, s = (t[..., :half].to(torch.float32).unsqueeze(2) for t in (cos, sin))
        first, second = x[..., :half].to(torch.float32), x[..., half:].to(torch.float32)
        x = torch.cat([first * c - second * s, second * c + first * s], -1).to(x.dtype)
    return hadamard_reference(x.to(torch.float32), signs, order, order**-0.5) + 0.0 if order else x


# --- Attention -------------------------------------------------------------------------------------------------------


def visible_keys(
    batch: int, queries: int, keys: int, mask: Tensor | None, lengths: Tensor | None, query_lengths: Tensor | None,
    causal: bool, device: torch.device,
) -> Tensor:  # fmt: skip
    """bool [B, 1, S, T]: what each query sees."""
    key, query = torch.arange(keys, device=device), torch.arange(queries, device=device)[:, None]
    used = torch.full((batch,), keys, device=device) if lengths is None else lengths.long().clamp(max=keys)
    asked = (
        torch.full((batch,), queries, device=device)
        if query_lengths is None
        else query_lengths.long().clamp(max=queries)
    )
    used, asked = used.view(-1, 1, 1, 1), asked.view(-1, 1, 1, 1)
    seen = (key < used) & (query < asked)
    if causal:
        seen = seen & (key <= query + used - asked)
    return seen if mask is None else seen & mask


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor, seen: Tensor, scale: float,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """[B, S, H, D] in `dtype` from q [B, H, S, D] and k [B, G, T, D], both e4m3 or int8, v e4m3 [B, G, D, T'], their
    scales, and who sees whom, bool [B, 1, S, T]. Per query, with x the scores in bits:

        x = (q k) * q_scale * k_scale * scale * log2(e);   m = ceil(max x);   p = 2^(x - m)
        y = sum e4m3(2^8 * p * v_scale / u) * v * u / sum e4m3(2^8 * p)

    where u is the largest scale of the head's values that a query sees.
    The sum below is of rounded probabilities, too, so that they are weights whose sum is one: on normal data 5 to 20%
    less error than by the sum of p, the more the fewer keys matter, and 20 to 25% less where values have a mean.
    """
    heads, groups, tokens = q.shape[1], q.shape[1] // k.shape[1], k.shape[2]
    left = dequantize_heads(q, q_scale, torch.float32) * (scale * LOG2E)
    right = dequantize_heads(k, k_scale, torch.float32).repeat_interleave(groups, 1)
    values = v[..., :tokens].to(torch.float32).transpose(2, 3).repeat_interleave(groups, 1)
    v_bytes = spread(v_scale, tokens).repeat_interleave(groups, 1).unsqueeze(2)
    counts = seen.any(2, keepdim=True) & (v_bytes != NAN_BYTE)  # what lies behind a cache's tokens does not
    unit = torch.where(counts, v_bytes, 1).amax(-1, keepdim=True) if tokens else v_bytes.new_ones(1, 1, 1, 1)
    relative = power(v_bytes) / power(unit)
    out = torch.empty(q.shape[0], q.shape[2], heads, q.shape[3], dtype=dtype, device=q.device)
    step = max(1, ROWS // max(1, q.shape[0] * heads * tokens))
    for start in range(0, q.shape[2], step):
        rows = slice(start, start + step)
        sees = seen[:, :, rows]
        x = (left[:, :, rows] @ right.transpose(2, 3)).masked_fill_(~sees, -torch.inf)
        top = x.amax(-1, keepdim=True).ceil_() if tokens else x.new_zeros(1)
        p = torch.exp2(x - torch.where(top == -torch.inf, 0.0, top))
        total = (p * 2**P_BITS).to(E4M3).to(torch.float32).sum(-1, keepdim=True)
        codes = torch.where(sees, p * relative * 2**P_BITS, 0.0).to(E4M3).to(torch.float32)
        y = (codes @ values) * torch.where(total == 0, 0.0, power(unit) / total)
        out[:, rows] = y.transpose(1, 2).to(dtype)
    return out
