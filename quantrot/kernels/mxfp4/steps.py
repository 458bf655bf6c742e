"""Mxfp4Gemm's kernels on Hopper, one behind the other on addresses: what its operators do, with the same bits.

In eager mode the host sets the pace of a small training step: eleven operators a linear, each of which looks for its
launch and makes tensors of what only the next one reads, took it 1.2 ms where bfloat16's products take 0.14. Here a
forward, and a backward, is looked for once, and what passes between its kernels is parts of one buffer.

    forward    y, and what each gradient reads
    backward   dx and dw of those
    operands   such a thing as the operators' tensors

What a gradient reads is a uint8 buffer: the other operand's packed codes, 16 bytes a group, the clip mask of the one
whose gradient it is, 4 bytes a group, and the codes' scales, a byte a group.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from quantrot.kernels import nvrtc
from quantrot.kernels.mxfp4 import tuned
from quantrot.kernels.mxfp4.quantized import scaled_product
from quantrot.kernels.mxfp4.reference import GROUP, Random, ScaleRule, stored_share
from quantrot.kernels.operators import has_triton
from quantrot.kernels.ready import Ready, Run, lies_well, like, unseen

FORWARD, BACKWARD = Ready(), Ready()
E4M3, BYTES = torch.float8_e4m3fn, torch.uint8


def forward(x: Tensor, weight: Tensor, hadamard: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """y of x [M, K] and the weight [N, K], and what dx and dw read; None where operators do it."""
    if not x.is_cuda or not unseen(x, weight):
        return None
    key = like(x), like(weight), hadamard
    if (again := FORWARD.find(key)) is None:
        if not _fits(x, weight):
            return None
        again = FORWARD.keep(key, prepare_forward(x, weight, hadamard), x.get_device())
    made: tuple[Tensor, Tensor, Tensor] = again(x, weight)
    return made


def backward(
    grad: Tensor,
    for_dx: Tensor | None,
    for_dw: Tensor | None,
    shape: torch.Size,
    dtype: torch.dtype,
    hadamard: int,
    signs: Tensor | None,
    random: Random | None,
) -> tuple[Tensor | None, Tensor | None] | None:
    """dx and dw of grad [M, N], for a weight of this shape, [N, K], and dtype, each if what it reads is given; None
    where operators do it.

    signs: float32 [hadamard], with random numbers. random: of the first of the four that are rounded at random.
    """
    if not unseen(grad, for_dx, for_dw) or not (lies_well(for_dx) and lies_well(for_dw)):
        return None  # hooks may have put other tensors in the place of those that were saved
    grad = grad if lies_well(grad) else grad.clone(memory_format=torch.contiguous_format)
    wanted = for_dx is not None, for_dw is not None
    key = like(grad), wanted, shape, dtype, hadamard, random is None
    if (again := BACKWARD.find(key)) is None:
        run = prepare_backward(grad, wanted, shape[1], dtype, hadamard, random is not None)
        again = BACKWARD.keep(key, run, grad.get_device())
    made: tuple[Tensor | None, Tensor | None] = again(grad, for_dx, for_dw, signs, random)
    return made


def operands(kept: Tensor, masked: int, rows: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """What a gradient reads as its mask [masked, k/8], packed [rows, k/2] and scale [rows, k/32], without the rows of
    zeros that may stand behind these."""
    groups = k // GROUP
    codes = (len(kept) - 4 * groups * masked) // 17
    packed, mask, scale = kept.split([16 * codes, 4 * groups * masked, codes])
    return mask.view(masked, -1), packed.view(-1, k // 2)[:rows], scale.view(-1, groups)[:rows]


def _fits(x: Tensor, weight: Tensor) -> bool:
    if not (has_triton() and nvrtc.available(x.device) and x.numel() and weight.numel()):
        return False
    from quantrot.kernels.mxfp4 import hopper_rows

    dtypes = x.dtype in hopper_rows.IN and weight.dtype in (x.dtype, torch.float32)
    return dtypes and lies_well(x) and lies_well(weight)


def _padded(rows: int, hadamard: int) -> int:
    """Tokens, along which dw's operands are transformed."""
    return -(-rows // hadamard) * hadamard


def prepare_forward(x: Tensor, weight: Tensor, hadamard: int) -> Run:
    """`forward` of operands like these, as a function of them."""
    from quantrot.kernels.mxfp4 import hopper_rows

    (m, k), n, on = x.shape, len(weight), x.device
    groups, padded = k // GROUP, _padded(m, hadamard)
    room = torch.empty if padded == m else torch.zeros  # rows behind x's are zeros
    multiply = _product(m, n, k, x)

    def quantizer(x: Tensor) -> Run:
        plan = hopper_rows.plan_of(x.dtype, hadamard, True, False)
        how = ScaleRule.quest, hadamard, False, True, False, False, x.get_device()
        return hopper_rows.launched(plan, x.numel() // GROUP, x.dtype, *how)

    quantize_x, quantize_w = quantizer(x), quantizer(weight)

    def run(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        for_dx = torch.empty(groups * (17 * n + 4 * m), dtype=BYTES, device=on)
        for_dw = room(groups * (17 * padded + 4 * n), dtype=BYTES, device=on)
        a, b = for_dw.data_ptr(), for_dx.data_ptr()
        w_mask, x_mask = a + groups * 16 * padded, b + groups * 16 * n
        a_scale, b_scale = w_mask + groups * 4 * n, x_mask + groups * 4 * m
        quantize_x(x.data_ptr(), None, a, a_scale, x_mask, None)
        quantize_w(weight.data_ptr(), None, b, b_scale, w_mask, None)
        return multiply(a, a_scale, b, b_scale), for_dx, for_dw

    return run


def _product(m: int, n: int, k: int, x: Tensor) -> Run:
    """a [m, k] times the transpose of b [n, k] in x's dtype, as a function of where their codes and scales lie; groups
    outside e4m3's window are rounded to its floor."""
    from quantrot.kernels.mxfp4 import hopper_rows

    expand, on, dtype = hopper_rows.expand_launch(m, n, x.get_device()), x.device, x.dtype

    def run(a: int, a_scale: int, b: int, b_scale: int) -> Tensor:
        left, right = torch.empty((m, k), dtype=E4M3, device=on), torch.empty((n, k), dtype=E4M3, device=on)
        left_scale = torch.empty((m, 1), dtype=torch.float32, device=on)
        right_scale = torch.empty((1, n), dtype=torch.float32, device=on)
        first = hopper_rows.ExpandArguments(a, a_scale, left.data_ptr(), left_scale.data_ptr(), None, m, k // GROUP)
        second = hopper_rows.ExpandArguments(b, b_scale, right.data_ptr(), right_scale.data_ptr(), None, n, k // GROUP)
        expand(hopper_rows.Both(first, second))
        return scaled_product(left, left_scale, right, right_scale, dtype)

    return run


def prepare_backward(
    grad: Tensor, wanted: tuple[bool, bool], k: int, dtype: torch.dtype, hadamard: int, random: bool
) -> Run:
    """`backward` of gradients like this one, as a function of them, of what was kept, signs and random numbers."""
    from quantrot.kernels.mxfp4 import hopper_columns, hopper_rows

    (m, n), device, on = grad.shape, grad.get_device(), grad.device
    padded = _padded(m, hadamard)
    how = ScaleRule.absmax34, hadamard, random, False, random, False, device  # with signs where at random

    def columns(rows: int, wide: int, kind: torch.dtype) -> Run:
        return hopper_columns.launched(hopper_columns.plan_of(kind, random, hadamard), rows, wide, wide, kind, *how)

    def gradient(quantize: Run, rows: int, depth: int, to: torch.dtype) -> Run:
        """Of grad, quantized to [rows, depth], by codes of [depth, k], requantized to [k, depth]: [rows, k]."""
        requantize, multiply = columns(depth, k // 2, BYTES), _product(rows, k, depth, grad)
        plan, factor = tuned.HOPPER_MASKED[hadamard], stored_share(hadamard) ** -2 * hadamard**-0.5
        turn = hopper_rows.masked(plan, rows * k // GROUP, grad.dtype, hadamard, to != grad.dtype, device)
        groups, groups_a, groups_b = depth * k // GROUP, rows * depth // GROUP, k * depth // GROUP

        def run(grad: Tensor, kept: Tensor, signs: int | None, numbers: list[Random | None]) -> Tensor:
            room = torch.empty(17 * (groups_a + groups_b), dtype=BYTES, device=on)
            codes, a = kept.data_ptr(), room.data_ptr()
            b = a + 16 * groups_a
            b_scale = b + 16 * groups_b
            a_scale, mask = b_scale + groups_b, codes + 16 * groups  # groups_b is of 32s: a_scale takes stores of four
            quantize(grad.data_ptr(), signs, a, a_scale, None, numbers[0])
            requantize(codes, mask + rows * k // 8, signs, b, b_scale, None, numbers[1])
            y = multiply(a, a_scale, b, b_scale)
            made = torch.empty((rows, k), dtype=to, device=on)
            turn(y.data_ptr(), mask, made.data_ptr(), factor)
            return made

        return run

    if wanted[0]:
        plan = hopper_rows.plan_of(grad.dtype, hadamard, False, random)
        to_dx = gradient(hopper_rows.launched(plan, grad.numel() // GROUP, grad.dtype, *how), m, n, grad.dtype)
    if wanted[1]:
        turned = columns(padded, n, grad.dtype)
        to_dw = gradient(lambda x, *rest: turned(x, None, *rest), n, padded, dtype)

    def run(
        grad: Tensor, for_dx: Tensor | None, for_dw: Tensor | None, signs: Tensor | None, random: Random | None
    ) -> tuple[Tensor | None, Tensor | None]:
        at = None if signs is None else signs.data_ptr()
        streams = [random and Random(random.seed, random.offset + i) for i in range(4)]
        dx = None if for_dx is None else to_dx(grad, for_dx, at, streams[:2])
        if for_dw is None:
            return dx, None
        rows = grad if padded == m else F.pad(grad, (0, 0, 0, padded - m))
        return dx, to_dw(rows, for_dw, at, streams[2:])

    return run
