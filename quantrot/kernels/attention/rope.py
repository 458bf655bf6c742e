"""RoPE, Hadamard and 8-bit codes in one Triton kernel, from the projections' outputs to what attention reads.

A program holds a tile of tokens of a few heads, one after another. Head dimensions are worked on in halves, which RoPE
mixes: the rotation is two products with a quarter of the matrix, or four, whatever its order and block; +-1 and the
16-bit input make every term exact. V's tiles are transposed on their way out.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantrot.kernels.attention import prepare
from quantrot.kernels.attention.reference import BLOCK, LARGEST_BLOCK_HEAD, key_rows
from quantrot.kernels.attention.triton import PTX, encode, magnitude, scale_byte, step, whole
from quantrot.kernels.fp8 import E4M3
from quantrot.kernels.operators import kept, shared_bytes
from quantrot.orthogonal import hadamard

FEW = 16  # tokens: a decoding step's tile
SHARE = 4  # heads a program turns one after another, with the same cosines and the same matrix


@dataclass(frozen=True)
class Config:
    """A launch: tokens of q and k a program holds, tokens of v, heads one after another, warps, heads in flight."""

    tile: int
    values: int
    share: int
    warps: int
    stages: int


def config_for(tokens: int, dim: int, kind: int, dtype: torch.dtype) -> Config:
    """The launch for this many tokens. Nothing spills up to head_dim 128, 120 bytes a thread do at 256."""
    wide = dim > LARGEST_BLOCK_HEAD
    if tokens <= FEW:
        return Config(FEW, 64 if wide else BLOCK, 1, 8 if wide else 4, 1)
    if wide:
        return Config(64, 64, SHARE, 8, 1)
    if kind == 3 or dtype == torch.float32:
        return Config(BLOCK, BLOCK, SHARE, 8, 1)
    return Config(BLOCK, BLOCK, SHARE, 8, 3) if dim <= 64 else Config(BLOCK, BLOCK, SHARE, 16, 2)


@triton.jit
def _turn(
    x_ptr, cos_ptr, sin_ptr, signs_ptr, matrix_ptr, out_ptr, scale_ptr, x_token, x_head, cos_token, first, last, tile,
    tokens, rows, blocks, factor, HALF: tl.constexpr, HP: tl.constexpr, TILE: tl.constexpr, ROPE: tl.constexpr,
    SIGNS: tl.constexpr, ROTATE: tl.constexpr, BY_BLOCK: tl.constexpr, PRECISION: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """A tile of tokens of heads first ... last - 1 of q or k. The pointers are at the sequence's first head; rows: from
    a head to the next in the output."""
    d = tl.arange(0, HP)
    t = tile * TILE + tl.arange(0, TILE)
    inside = (t < tokens)[:, None] & (d < HALF)[None, :]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    WHOLE: tl.constexpr = out_ptr.dtype.element_ty == tl.int8
    if ROPE:
        at = t[:, None] * cos_token + d[None, :]
        c = tl.load(cos_ptr + at, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if SIGNS:
        low_signs = tl.load(signs_ptr + d, mask=d < HALF, other=1)[None, :]
        high_signs = tl.load(signs_ptr + HALF + d, mask=d < HALF, other=1)[None, :]
    if ROTATE:
        h_at = matrix_ptr + d[:, None] * HP + d[None, :]
        h = tl.load(h_at)
    x_at = x_ptr + t[:, None].to(tl.int64) * x_token + d[None, :]
    out_at = out_ptr + t[:, None].to(tl.int64) * (2 * HALF) + d[None, :]
    for head in tl.range(first, last):
        head = tl.full((), 0, tl.int64) + head  # 32 heads of 524288 tokens have 2^31 elements
        low = tl.load(x_at + head * x_head, mask=inside, other=0.0)
        high = tl.load(x_at + head * x_head + HALF, mask=inside, other=0.0)
        if ROPE:
            one, two = low.to(tl.float32), high.to(tl.float32)
            low = (one * c - two * s).to(dtype)
            high = (two * c + one * s).to(dtype)
        if SIGNS:
            low = (low * low_signs).to(dtype)
            high = (high * high_signs).to(dtype)
        if ROTATE == 1:
            one = tl.dot(low, h, input_precision=PRECISION)
            two = tl.dot(high, h, input_precision=PRECISION)
            low, high = (one + two) * factor, (one - two) * factor
        elif ROTATE == 2:
            low = tl.dot(low, h, input_precision=PRECISION) * factor
            high = tl.dot(high, h, input_precision=PRECISION) * factor
        elif ROTATE == 3:
            one = tl.dot(low, h, input_precision=PRECISION)
            one = tl.dot(high, tl.load(h_at + 2 * HP * HP), one, input_precision=PRECISION) * factor
            two = tl.dot(low, tl.load(h_at + HP * HP), input_precision=PRECISION)
            high = tl.dot(high, tl.load(h_at + 3 * HP * HP), two, input_precision=PRECISION) * factor
            low = one
        else:
            low, high = low.to(tl.float32), high.to(tl.float32)
        largest = tl.maximum(tl.max(magnitude(low), 1), tl.max(magnitude(high), 1))
        if BY_BLOCK:
            scale = step(tl.max(largest, 0)) if WHOLE else scale_byte(tl.max(largest, 0))
            tl.store(scale_ptr + head * blocks + tile, scale.to(scale_ptr.dtype.element_ty))
        else:
            scale = step(largest) if WHOLE else scale_byte(largest)
            tl.store(scale_ptr + head * tokens + t, scale.to(scale_ptr.dtype.element_ty), mask=t < tokens)
            scale = scale[:, None]
        codes_at = out_at + head * rows * (2 * HALF)
        tl.store(codes_at, whole(low, scale) if WHOLE else encode(low, scale, PTX), mask=inside)
        tl.store(codes_at + HALF, whole(high, scale) if WHOLE else encode(high, scale, PTX), mask=inside)


@triton.jit
def _values(
    x_ptr, out_ptr, scale_ptr, x_token, tile, tokens, padded, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    BY_BLOCK: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """A tile of tokens of one value head, [TILE, D] -> [D, TILE]; zeros behind the last token."""
    d = tl.arange(0, DP)
    t = tile * TILE + tl.arange(0, TILE)
    inside = (t < tokens)[:, None] & (d < D)[None, :]
    x = tl.load(x_ptr + t[:, None].to(tl.int64) * x_token + d[None, :], mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(magnitude(x), 1)
    if BY_BLOCK:
        byte = scale_byte(tl.max(largest, 0))
        tl.store(scale_ptr + tile, byte.to(tl.uint8))
    else:
        byte = scale_byte(largest)
        tl.store(scale_ptr + t, byte.to(tl.uint8), mask=t < tokens)
        byte = byte[:, None]
    codes = tl.trans(encode(x, byte, PTX))
    tl.store(
        out_ptr + d[:, None].to(tl.int64) * padded + t[None, :], codes, mask=(d < D)[:, None] & (t < padded)[None, :]
    )


@triton.jit(do_not_specialize=["tokens", "k_rows"])
def _quantize_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, signs_ptr, matrix_ptr, q_out, q_scale, k_out, k_scale, v_out, v_scale,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, cos_batch, cos_token, tokens, k_rows,
    padded, heads, groups, factor, HALF: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    VALUES: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr, ROPE: tl.constexpr, SIGNS: tl.constexpr,
    ROTATE: tl.constexpr, BY_BLOCK: tl.constexpr, PRECISION: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    part = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    q_parts, k_parts = tl.cdiv(heads, SHARE), tl.cdiv(groups, SHARE)
    blocks = padded // BLOCK
    cos_ptr += batch * cos_batch
    sin_ptr += batch * cos_batch
    if part < q_parts:
        _turn(
            q_ptr + batch * q_batch, cos_ptr, sin_ptr, signs_ptr, matrix_ptr, q_out + batch * heads * tokens * 2 * HALF,
            q_scale + batch * heads * tokens, q_token, q_head, cos_token, part * SHARE,
            tl.minimum((part + 1) * SHARE, heads), tile, tokens, tokens, blocks, factor, HALF, HP, TILE, ROPE, SIGNS,
            ROTATE, False, PRECISION, PTX,
        )  # fmt: skip
    elif part < q_parts + k_parts:
        part -= q_parts
        _turn(
            k_ptr + batch * k_batch, cos_ptr, sin_ptr, signs_ptr, matrix_ptr,
            k_out + batch * groups * k_rows * 2 * HALF, k_scale + batch * groups * (blocks if BY_BLOCK else tokens),
            k_token, k_head, cos_token, part * SHARE, tl.minimum((part + 1) * SHARE, groups), tile, tokens, k_rows,
            blocks, factor, HALF, HP, TILE, ROPE, SIGNS, ROTATE, BY_BLOCK, PRECISION, PTX,
        )  # fmt: skip
    else:
        head = (part - q_parts - k_parts).to(tl.int64)
        group = batch * groups + head
        _values(
            v_ptr + batch * v_batch + head * v_head, v_out + group * padded * 2 * HALF,
            v_scale + group * (blocks if BY_BLOCK else tokens), v_token, tile, tokens, padded, 2 * HALF, DP, VALUES,
            BY_BLOCK, PTX,
        )  # fmt: skip


def _kind(order: int, dim: int) -> int:
    """How the rotation's quarters relate. 0: there is none; 1: Sylvester's, all are the first up to the last's sign; 2:
    blocks within a half, the first and the last are equal, the others zero; 3: four different ones."""
    if not order:
        return 0
    if order == dim and order & (order - 1) == 0:
        return 1
    return 2 if dim // 2 % order == 0 else 3


@kept
def _matrix(order: int, dim: int, half: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The quarters of the block-diagonal +-1 matrix, each zero-padded: [4, half, half], upper left, upper right, ..."""
    whole = torch.block_diag(*[hadamard(order)] * (dim // order))
    quarters = torch.zeros(2, 2, half, half)
    quarters[:, :, : dim // 2, : dim // 2] = whole.view(2, dim // 2, 2, dim // 2).transpose(1, 2)
    return quarters.to(device, dtype)


def supports(dim: int, order: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether its tiles fit into a multiprocessor: a rotation of float32 takes 128 KB of it, of more than 128 numbers
    224, which Ada and consumer Blackwell (99 KB) do not have."""
    needs = (128 if dim <= LARGEST_BLOCK_HEAD else 224) << 10
    return not order or dtype != torch.float32 or dim <= 64 or shared_bytes(device) >= needs


def quantize(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, signs: Tensor | None, order: int,
    by_block: bool, codes: torch.dtype = E4M3, config: Config | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """rope_hadamard_quantize_reference's result for granularity block or token."""
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    batch, tokens, heads, dim = q.shape
    groups, padded = k.shape[2], -(-tokens // BLOCK) * BLOCK
    out = prepare.outputs(q, k, by_block, codes)
    if not k.numel():
        return out
    unread = k
    if cos is not None and sin is not None:
        cos, sin = cos.expand(batch, -1, -1), sin.expand(batch, -1, -1)
        if cos.stride(-1) != 1 or cos.stride() != sin.stride():
            cos, sin = cos.contiguous(), sin.contiguous()
    half = max(16, triton.next_power_of_2(dim // 2))
    kind = _kind(order, dim)
    config = config or config_for(tokens, dim, kind, q.dtype)
    parts = triton.cdiv(heads, config.share) + triton.cdiv(groups, config.share) + groups
    tiles = max(triton.cdiv(tokens, config.tile), padded // config.values)
    _quantize_kernel[tiles, parts, batch](
        q, k, v, unread if cos is None else cos, unread if sin is None else sin, unread if signs is None else signs,
        _matrix(order, dim, half, q.dtype, q.device) if order else unread, *out,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *((0, 0) if cos is None else cos.stride()[:2]),
        tokens, key_rows(tokens), padded, heads, groups, order**-0.5 if order else 1.0, HALF=dim // 2, HP=half,
        DP=2 * half, TILE=config.tile, VALUES=config.values, SHARE=config.share, BLOCK=BLOCK, ROPE=cos is not None,
        SIGNS=signs is not None, ROTATE=kind, BY_BLOCK=by_block, PRECISION="tf32x3" if PTX else "ieee", PTX=PTX,
        num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out
