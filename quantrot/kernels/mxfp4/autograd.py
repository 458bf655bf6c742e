"""Linear layers that train in MXFP4: QuEST forward, randomised Hadamard and stochastic rounding backward (Quartet).

    forward     y  = Q(x H) Q(w H)^T                 Q: QuEST's rule, nearest, with a clip mask
    backward    dx = c S(g D H) S(Q(w H)^T D H)^T    masked by x's clip mask, times H
                dw = c S(g^T D H) S(Q(x H)^T D H)^T  masked by w's clip mask, times H

H is the block Hadamard transform along the dimension that is summed over, D random signs, S the absmax34 rule (3/4 of
the value, hence c, 16/9 or what `stored_share` makes it) with stochastic rounding. Every operand is MXFP4; what is
saved for backward is 4.25 bits a value and one bit of mask. QuEST, arXiv:2502.05003; Quartet, arXiv:2505.14669,
algorithm 1.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from quantrot.kernels.hadamard import hadamard_transform
from quantrot.kernels.mxfp4 import steps
from quantrot.kernels.mxfp4.gemm import mxfp4_product
from quantrot.kernels.mxfp4.operators import (
    FLOATS,
    FUSED,
    check_fused,
    hadamard_quantize_mxfp4,
    masked_hadamard,
    requantize_mxfp4,
)
from quantrot.kernels.mxfp4.reference import Random, ScaleRule, stored_share
from quantrot.kernels.operators import check_device, implement, refuse_create_graph
from quantrot.orthogonal import random_signs

SIGN_VECTORS = 1024
RANK_FACTOR = 2 * 0x9E3779B9  # times a rank, and one: odd, below 2^63
STREAMS = 4  # random numbers of one backward pass: offsets 4 * offset ... 4 * offset + 3


class HadamardGemm(torch.autograd.Function):
    """F.linear(x H, w H) = F.linear(x, w): Mxfp4Gemm without the quantization. x [..., K], weight [N, K] of its dtype,
    hadamard of any order that divides K. Under autocast it stays in their dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, hadamard: int = 32) -> Tensor:
        _check_operands(x, weight, (x.dtype,))
        turned_x, turned_w = hadamard_transform(x, block=hadamard), hadamard_transform(weight, block=hadamard)
        ctx.save_for_backward(turned_x, turned_w)
        ctx.hadamard = hadamard
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(turned_x, turned_w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph()
        turned_x, turned_w = ctx.saved_tensors
        dx = _turned_back(grad @ turned_w, ctx.hadamard) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            g, rows = (t.reshape(-1, t.shape[-1]) for t in (grad, turned_x))
            dw = _turned_back(g.T @ rows, ctx.hadamard)
        return dx, dw, None


def _turned_back(x: Tensor, order: int) -> Tensor:
    """x times the transpose of H / sqrt(order), in blocks: not every order's matrix is symmetric."""
    return torch.ops.quantrot.hadamard(x, None, order, order**-0.5, True, "auto")


class Mxfp4Gemm(torch.autograd.Function):
    """F.linear(x, weight) with both operands in MXFP4, and both products of the backward pass too; see the file's top.

    x [..., K] and weight [N, K] in bfloat16, float16 or float32 (they may differ); y is x's dtype. hadamard: 32, 64 or
    128, dividing K and N (tokens are padded with zeros). random: (seed, offset) of the backward pass's signs and
    rounding, each pair to be used once, offset below 2^61, not under torch.compile; or those of `drawn_numbers`, which
    a step that is compiled or recorded in a CUDA graph draws anew; None rounds to nearest, without signs. outside: an
    integer tensor of one element that counts groups outside e4m3's window (they are rounded to its floor; a CPU has no
    window), or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        hadamard: int = 32,
        random: tuple[int, int] | Tensor | None = None,
        outside: Tensor | None = None,
    ) -> Tensor:
        _check(x, weight, hadamard, random, outside)
        rows = x.reshape(-1, x.shape[-1])
        drawn, pair = (random, None) if isinstance(random, Tensor) else (None, random)
        at_once = steps.forward(rows, weight, hadamard) if drawn is None and outside is None else None
        for_dx: tuple[Tensor, ...]
        for_dw: tuple[Tensor, ...]
        if at_once is not None:
            y, for_dx, for_dw = at_once[0], at_once[1:2], at_once[2:]
        else:
            (x_mask, *x_codes), (w_mask, *w_codes) = (_quantized(t, hadamard) for t in (rows, weight))
            y = mxfp4_product(*x_codes, *w_codes, dtype=x.dtype, exact=False, outside=outside, after=drawn)
            for_dx, for_dw = (x_mask, *w_codes), (w_mask, *x_codes)
        dx, dw = ctx.needs_input_grad[:2]  # a frozen weight has none: of x nothing but the mask is read again
        ctx.save_for_backward(drawn, *(for_dx if dx else ()), *(for_dw if dw else ()))
        ctx.options = hadamard, pair, outside, weight.shape, weight.dtype, at_once is not None
        # what a Function returns as a view cannot be written, as nn.ReLU(inplace=True) does
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph()
        drawn, *saved = ctx.saved_tensors
        hadamard, pair, outside, shape, weight_dtype, at_once = ctx.options
        wants_dx, wants_dw = ctx.needs_input_grad[:2]
        count = 1 if at_once else 3
        for_dx, for_dw = saved[:count] if wants_dx else None, saved[-count:] if wants_dw else None
        g = grad.reshape(-1, grad.shape[-1])
        signs: Tensor | None = None
        first: Any = None  # of the four streams' numbers
        if drawn is not None:
            signs, first = (1 - 2 * (drawn[2:] >> 32 & 1)).to(torch.float32), (0, 0, drawn[:2])
        elif pair is not None:
            signs, first = sign_vector(pair[0], pair[1], hadamard, g.device), (pair[0], STREAMS * pair[1])
        made = None
        if at_once:
            random = first and Random(*first)
            kept = for_dx and for_dx[0], for_dw and for_dw[0]
            made = steps.backward(g, *kept, shape, weight_dtype, hadamard, signs, random)
            if made is None:
                m, (n, k) = len(g), shape
                for_dx = for_dx and steps.operands(for_dx[0], m, n, k)
                for_dw = for_dw and steps.operands(for_dw[0], n, m, k)
        dx, dw = made or _gradients(g, for_dx, for_dw, weight_dtype, hadamard, signs, first, outside)
        return None if dx is None else dx.view(*grad.shape[:-1], shape[1]), dw, None, None, None


Operand = tuple[Tensor, Tensor, Tensor]  # a clip mask, packed codes and their scale


def _quantized(x: Tensor, hadamard: int) -> Operand:
    packed, scale, mask = hadamard_quantize_mxfp4(x, ScaleRule.quest, hadamard=hadamard, clip_mask=True)
    assert mask is not None
    return mask, packed, scale


def _gradients(
    g: Tensor,
    for_dx: Operand | None,
    for_dw: Operand | None,
    weight_dtype: torch.dtype,
    hadamard: int,
    signs: Tensor | None,
    first: Any,
    outside: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """dx [M, K] by x's mask and the weight's codes, and dw by the weight's mask and x's, of g [M, N]."""

    def stream(i: int) -> dict[str, Any]:
        random = None if first is None else (first[0], first[1] + i, *first[2:])
        return {"hadamard": hadamard, "signs": signs, "random": random}

    product: Any = {"dtype": g.dtype, "exact": False, "outside": outside}
    factor = stored_share(hadamard) ** -2
    dx = dw = None
    if for_dx:
        x_mask, wq, w_scale = for_dx
        gq, g_scale, _ = hadamard_quantize_mxfp4(g, ScaleRule.absmax34, **stream(0))
        wt, wt_scale = requantize_mxfp4(wq, w_scale, **stream(1))
        dx = mxfp4_product(gq, g_scale, wt, wt_scale, **product)
        dx = masked_hadamard(dx, x_mask, hadamard=hadamard, factor=factor)
    if for_dw:
        w_mask, xq, x_scale = for_dw
        rows = -g.shape[0] % hadamard
        g, xq, x_scale = (F.pad(t, (0, 0, 0, rows)) if rows else t for t in (g, xq, x_scale))
        gt, gt_scale, _ = hadamard_quantize_mxfp4(g, ScaleRule.absmax34, transpose=True, **stream(2))
        xt, xt_scale = requantize_mxfp4(xq, x_scale, **stream(3))
        dw = mxfp4_product(gt, gt_scale, xt, xt_scale, **product)
        dw = masked_hadamard(dw, w_mask, hadamard=hadamard, factor=factor, dtype=weight_dtype)
    return dx, dw


def _check_operands(x: Tensor, weight: Tensor, dtypes: tuple[torch.dtype, ...], outside: Tensor | None = None) -> None:
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x and weight: shapes {tuple(x.shape)} and {tuple(weight.shape)}; allowed: [..., K] and [N, K]"
        )
    if weight.dtype not in dtypes:
        raise ValueError(f"weight: {weight.dtype}; allowed here: {', '.join(map(str, dtypes))}; convert it")
    check_device(x=x, weight=weight, outside=outside)


def drawn_numbers(x: Tensor, weight: Tensor, hadamard: int, rank: int = 0) -> Tensor:
    """Random numbers of the backward pass of this product, int64 [2 + hadamard], by the generator of x's device:
    Philox's two, and a bit each for the signs. Ranks make different ones of the same draw."""
    return torch.ops.quantrot.mxfp4_draw(x, weight, 2 + hadamard, rank * RANK_FACTOR + 1)


# What a forward's outputs do not need torch.compile may make in the forward and again in the backward, here of other
# numbers: the forward's product comes after them. Two draws with the same arguments would be one to it.
torch.library.define(
    "quantrot::mxfp4_draw",
    "(Tensor x, Tensor weight, int count, int factor) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)


@implement("quantrot::mxfp4_draw")
def _draw(x: Tensor, weight: Tensor, count: int, factor: int) -> Tensor:
    numbers = torch.randint(1 << 61, (count,), device=x.device)
    return numbers if factor == 1 else numbers.mul_(factor)


@torch.library.register_fake("quantrot::mxfp4_draw")
def _draw_fake(x, weight, count, factor):
    return x.new_empty(count, dtype=torch.int64)


def _check(
    x: Tensor, weight: Tensor, hadamard: int, random: tuple[int, int] | Tensor | None, outside: Tensor | None
) -> None:
    check_fused(hadamard)
    if isinstance(random, Tensor):
        if random.dtype != torch.int64 or random.shape != (2 + hadamard,):
            raise ValueError(
                f"random: {random.dtype} {tuple(random.shape)}; allowed: int64 [2 + hadamard], of drawn_numbers"
            )
        check_device(x=x, random=random)
    elif random is not None and not (len(random) == 2 and 0 <= random[0] < 1 << 63 and 0 <= random[1] < 1 << 61):
        raise ValueError(f"random: {random}; allowed: (seed below 2^63, offset below 2^61), or None")
    _check_operands(x, weight, FLOATS, outside)
    if weight.shape[0] % hadamard or weight.shape[1] % hadamard:
        smaller = "use a smaller one, or " if hadamard > FUSED[0] else ""
        raise ValueError(
            f"weight: shape {tuple(weight.shape)}; both dimensions must be multiples of hadamard = {hadamard}; "
            f"{smaller}leave this layer in its own dtype"
        )


@lru_cache(maxsize=8)
def _sign_table(device: torch.device) -> Tensor:
    """float32 [SIGN_VECTORS, 128] of +-1 on the device: a step's signs are then a view, with no copy from the host."""
    return random_signs(SIGN_VECTORS * FUSED[-1], seed=0).view(SIGN_VECTORS, -1).to(device, torch.float32)


def sign_vector(seed: int, offset: int, hadamard: int, device: torch.device) -> Tensor:
    """The signs, float32 [hadamard], that (seed, offset) picks from a fixed table of random ones."""
    mixed = (seed * 0x9E3779B97F4A7C15 + offset * 0xBF58476D1CE4E5B9) % (1 << 64)
    mixed = ((mixed ^ (mixed >> 30)) * 0x94D049BB133111EB) % (1 << 64)
    return _sign_table(device)[mixed >> 54, :hadamard]
