"""The mixed product in Triton: y = narrow operand [R, K] times the transpose of the wide operand [C, K].

With the weight narrow, R counts output features and C tokens; with the activations narrow it is the other way round.
Either way the narrow operand is the product's first, because that is the one which the tensor cores of Hopper take
from registers: codes go from memory to shared memory as they are, from there to registers, are widened in place
(`conversions`) and multiplied. The wide operand goes from shared memory straight into the tensor core.

    decode   C <= 16, bound by reading the codes. A program owns some rows and all of K: its warps share K out among
             themselves in a fixed pattern and add their sums up in a fixed order. One launch, and a token's bits do not
             depend on the other tokens, nor on their number.
    prefill  otherwise: tiles of R by C, with K split over several programs where there are few tiles; their sums are
             then added in order by a second kernel.
    expand   (code - zero) * scale, rounded to the wide type: for cuBLAS, and for the backward pass.
"""

import os
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quantrot.kernels.mixed.conversions import program, widen
from quantrot.kernels.mixed.plans import Decode, Prefill, plan_for
from quantrot.kernels.operators import shared_bytes

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
WIDE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
TILES_BESIDE = 8  # tiles of R that share a tile of C, and so its way through L2


@triton.jit
def _scaled(total, scale):
    return total * scale.to(tl.float32)


@triton.jit
def _decode_kernel(
    codes_ptr, wide_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr, R, C, K, codes_stride, wide_stride, out_r, out_c,
    KIND: tl.constexpr, PROGRAM: tl.constexpr, ARCH: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    BIAS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLICES: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """GROUP: columns of K that share a scale, or 0 for the whole of K. EVEN: no step reaches past K.

    A group's sum is scaled a step late: the load of its scale, too narrow for an asynchronous copy, has a step's time,
    and the multiplications interleave with the next codes' conversion.
    """
    WIDE: tl.constexpr = wide_ptr.dtype.element_ty
    r, c, slices = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, SLICES)
    row = tl.minimum(r, R - 1).to(tl.int64)
    k = slices[:, None] * DEPTH + tl.arange(0, DEPTH)[None, :]
    codes = codes_ptr + row[None, :, None] * codes_stride + k[:, None, :]
    wide = wide_ptr + c[None, :, None] * wide_stride + k[:, None, :]
    present = (c < C)[None, :, None]
    groups = K // GROUP if GROUP else 1
    if GROUP:
        partial = tl.zeros((SLICES, ROWS, COLUMNS), tl.float32)
        scale = tl.zeros((SLICES, ROWS), scale_ptr.dtype.element_ty)
        if ZERO:
            g = tl.minimum(slices * DEPTH // GROUP, groups - 1)
            zero = tl.load(zero_ptr + row[None, :] * groups + g[:, None])
    elif ZERO:
        zero = tl.load(zero_ptr + row)[None, :]
    total = tl.zeros((SLICES, ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, K, SLICES * DEPTH, num_stages=STAGES):
        if EVEN:
            u = tl.load(codes)
            x = tl.load(wide, mask=present, other=0.0)
        else:
            inside = (start + k < K)[:, None, :]
            u = tl.load(codes, mask=inside, other=0)
            x = tl.load(wide, mask=inside & present, other=0.0)
        w = widen(u, KIND, WIDE, PROGRAM, 2, ARCH)
        if ZERO:
            w -= zero.to(WIDE)[:, :, None]
        if GROUP:
            total += _scaled(partial, scale[:, :, None])
            partial = tl.dot(w, tl.permute(x, (0, 2, 1)))
            at = start + slices * DEPTH
            scale = tl.load(
                scale_ptr + row[None, :] * groups + (at // GROUP)[:, None], mask=(at < K)[:, None], other=0.0
            )
            if ZERO:
                g = tl.minimum((start + (SLICES + slices) * DEPTH) // GROUP, groups - 1)
                zero = tl.load(zero_ptr + row[None, :] * groups + g[:, None])
        else:
            total = tl.dot(w, tl.permute(x, (0, 2, 1)), total)
        codes += SLICES * DEPTH
        wide += SLICES * DEPTH
    if GROUP:
        total += _scaled(partial, scale[:, :, None])
    y = tl.sum(total, 0)
    if not GROUP:
        y = _scaled(y, tl.load(scale_ptr + row)[:, None])
    if BIAS:
        y += tl.load(bias_ptr + row)[:, None].to(tl.float32)
    out = out_ptr + r.to(tl.int64)[:, None] * out_r + c[None, :] * out_c
    tl.store(out, y.to(WIDE), mask=(r < R)[:, None] & (c < C)[None, :])


@triton.jit
def _prefill_kernel(
    codes_tiles, wide_tiles, codes_ptr, wide_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr, R, C, K, codes_stride,
    wide_stride, out_r, out_c,
    part_k, part_out, KIND: tl.constexpr, PROGRAM: tl.constexpr, ARCH: tl.constexpr, GROUP: tl.constexpr,
    ZERO: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr, BESIDE: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """GROUP, EVEN as above. BIAS: 0, 1 along R, 2 along C. A program of `part_k` columns of K; with SPLIT, it leaves
    its float32 sum, and the scale of whole rows and the bias, to `_sum_kernel`."""
    WIDE: tl.constexpr = wide_ptr.dtype.element_ty
    tiles_r, tiles_c = tl.cdiv(R, ROWS), tl.cdiv(C, COLUMNS)
    tile, part = tl.program_id(0), tl.program_id(1)
    first = tile // (BESIDE * tiles_c) * BESIDE
    height = tl.minimum(tiles_r - first, BESIDE)
    tile_r, tile_c = first + tile % (BESIDE * tiles_c) % height, tile % (BESIDE * tiles_c) // height
    r, c = tile_r * ROWS + tl.arange(0, ROWS), tile_c * COLUMNS + tl.arange(0, COLUMNS)
    row, column = tl.minimum(r, R - 1).to(tl.int64), tl.minimum(c, C - 1).to(tl.int64)
    k = tl.arange(0, DEPTH)
    begin = part * part_k
    end = tl.minimum(begin + part_k, K)
    tl.assume(end > begin)  # without it, the loop's guard makes the assembler wait for every tensor core instruction
    codes = codes_ptr + row[:, None] * codes_stride + (begin + k)[None, :]
    wide = wide_ptr + column[:, None] * wide_stride + (begin + k)[None, :]
    groups = K // GROUP if GROUP else 1
    if GROUP:
        scales = scale_ptr + row * groups
        zeros = zero_ptr + row * groups
        partial = tl.zeros((ROWS, COLUMNS), tl.float32)
        scale = tl.zeros((ROWS,), scale_ptr.dtype.element_ty)
        if ZERO:
            zero = tl.load(zeros + begin // GROUP)
    elif ZERO:
        zero = tl.load(zero_ptr + row)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(begin, end, DEPTH, num_stages=STAGES):
        if BULK:  # by the tensor memory accelerator, which pads with zeros
            u = codes_tiles.load([tile_r * ROWS, start])
            x = wide_tiles.load([tile_c * COLUMNS, start])
        elif EVEN:
            u, x = tl.load(codes), tl.load(wide)
        else:
            inside = (start + k < end)[None, :]
            u, x = tl.load(codes, mask=inside, other=0), tl.load(wide, mask=inside, other=0.0)
        w = widen(u, KIND, WIDE, PROGRAM, 1, ARCH)
        if ZERO:
            w -= zero.to(WIDE)[:, None]
        if GROUP:
            total += _scaled(partial, scale[:, None])
            partial = tl.dot(w, tl.trans(x))
            scale = tl.load(scales + start // GROUP)
            if ZERO:
                zero = tl.load(zeros + tl.minimum((start + DEPTH) // GROUP, groups - 1))
        else:
            total = tl.dot(w, tl.trans(x), total)
        if not BULK:
            codes += DEPTH
            wide += DEPTH
    if GROUP:
        total += _scaled(partial, scale[:, None])
    inside = (r < R)[:, None] & (c < C)[None, :]
    out = out_ptr + r.to(tl.int64)[:, None] * out_r + c.to(tl.int64)[None, :] * out_c
    if SPLIT:
        tl.store(out + part.to(tl.int64) * part_out, total, mask=inside)
    else:
        if not GROUP:
            total = _scaled(total, tl.load(scale_ptr + row)[:, None])
        if BIAS == 1:
            total += tl.load(bias_ptr + row)[:, None].to(tl.float32)
        elif BIAS == 2:
            total += tl.load(bias_ptr + column)[None, :].to(tl.float32)
        tl.store(out, total.to(WIDE), mask=inside)


@triton.jit
def _sum_kernel(
    sums_ptr, scale_ptr, bias_ptr, out_ptr, size, width, SPLIT: tl.constexpr, SCALE: tl.constexpr,
    BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [size / width, width] = the SPLIT sums added in order, scaled and biased. SCALE: 0 none, 1 one a column of
    out, 2 one a row."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.load(sums_ptr + at, mask=inside, other=0.0)
    for part in tl.static_range(1, SPLIT):
        total += tl.load(sums_ptr + size * part + at, mask=inside, other=0.0)
    if SCALE == 1:
        total = _scaled(total, tl.load(scale_ptr + at % width, mask=inside, other=0.0))
    elif SCALE == 2:
        total = _scaled(total, tl.load(scale_ptr + at // width, mask=inside, other=0.0))
    if BIAS:
        total += tl.load(bias_ptr + at % width, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _expand_kernel(
    codes_ptr, scale_ptr, zero_ptr, out_ptr, K, codes_stride, GROUP: tl.constexpr, KIND: tl.constexpr,
    ARCH: tl.constexpr, ZERO: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """PIECE: columns that certainly share a scale, as many as a thread reads at once."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK // PIECE) * PIECE
    k = start[:, None] + tl.arange(0, PIECE)[None, :]
    u = tl.load(codes_ptr + row * codes_stride + k, mask=k < K, other=0)
    exact = widen(u, KIND, tl.float32, "", 1, ARCH)
    g = row * (K // GROUP) + start // GROUP
    if ZERO:
        exact -= tl.load(zero_ptr + g, mask=start < K, other=0).to(tl.float32)[:, None]
    y = exact * tl.load(scale_ptr + g, mask=start < K, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptr + row * K + k, y.to(out_ptr.dtype.element_ty), mask=k < K)


# --- Launches --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def architecture(device: torch.device) -> int:
    """The compute capability that kernels for this device, the current one, are compiled for, 90 for 9.0; 0 in the
    interpreter and on other makes."""
    if INTERPRETED:
        return 0
    target = triton.runtime.driver.active.get_current_target()
    return int(target.arch) if target.backend == "cuda" else 0


def launch_decode(
    y: Tensor, wide: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, kind: str,
    plan: Decode,
) -> None:  # fmt: skip
    """y [C, R] = wide [C, K] times the transpose of the codes' values [R, K]."""
    (columns, depth), rows = wide.shape, scale.shape[0]
    group = 0 if scale.shape[1] == 1 else depth // scale.shape[1]
    arch = architecture(codes.device)
    step = plan.slices * plan.depth
    _decode_kernel[(triton.cdiv(rows, plan.rows),)](
        codes, wide, scale, scale if zero is None else zero, scale if bias is None else bias, y, rows, columns, depth,
        codes.stride(0), wide.stride(0), y.stride(1), y.stride(0), KIND=kind,
        PROGRAM=program(kind, WIDE_NAMES[wide.dtype], 2, arch), ARCH=arch, GROUP=group, ZERO=zero is not None,
        BIAS=bias is not None, EVEN=depth % step == 0, ROWS=plan.rows, COLUMNS=8 if columns <= 8 else 16,
        SLICES=plan.slices, DEPTH=plan.depth, STAGES=plan.stages, num_warps=plan.slices,
    )  # fmt: skip


@lru_cache(maxsize=16)
def _machine(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and the shared memory that a program may have; an H200's where there is no GPU."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    return processors, shared_bytes(device)


def _tileable(t: Tensor) -> bool:
    """Whether the tensor memory accelerator can address it."""
    return t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0


def launch_prefill(
    y: Tensor, wide: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, kind: str,
    narrow_weight: bool, plan: Prefill,
) -> None:  # fmt: skip
    """y [M, N] contiguous; the narrow operand [R, K] is the weight (R = N) or the activations (R = M)."""
    (columns, depth), rows = wide.shape, scale.shape[0]
    group = 0 if scale.shape[1] == 1 else depth // scale.shape[1]
    arch = architecture(codes.device)
    part = triton.cdiv(triton.cdiv(depth, plan.depth), plan.split) * plan.depth
    split = triton.cdiv(depth, part)
    sums = torch.empty(split, *y.shape, dtype=torch.float32, device=y.device) if split > 1 else y[None]
    out_r, out_c = (1, y.shape[1]) if narrow_weight else (y.shape[1], 1)
    some_bias = 0 if bias is None or split > 1 else 1 if narrow_weight else 2
    tiles = triton.cdiv(rows, plan.rows) * triton.cdiv(columns, plan.columns)
    # On capability 9.0, each step waits for its product: with the operand in registers, pipelined loops of Triton 3.6
    # returned wrong sums for most plans on an H200, for some of them now and then.
    stages = 1 if arch == 90 else plan.stages
    bulk = plan.bulk and (arch >= 90 or INTERPRETED) and _tileable(codes) and _tileable(wide)
    boxes = (codes, plan.rows), (wide, plan.columns)
    tiled = [TensorDescriptor(t, list(t.shape), list(t.stride()), [n, plan.depth]) if bulk else None for t, n in boxes]
    _prefill_kernel[(tiles, split)](
        *tiled, codes, wide, scale, scale if zero is None else zero, scale if bias is None else bias, sums, rows,
        columns, depth, codes.stride(0), wide.stride(0), out_r, out_c, part, sums.stride(0), KIND=kind,
        PROGRAM=program(kind, WIDE_NAMES[wide.dtype], 1, arch), ARCH=arch, GROUP=group, ZERO=zero is not None,
        BIAS=some_bias, EVEN=depth % plan.depth == 0, ROWS=plan.rows, COLUMNS=plan.columns, DEPTH=plan.depth,
        STAGES=stages, SPLIT=split > 1, BESIDE=TILES_BESIDE, BULK=bulk, num_warps=plan.warps,
    )  # fmt: skip
    if split > 1:
        block = 1024
        _sum_kernel[(triton.cdiv(y.numel(), block),)](
            sums, scale, scale if bias is None else bias, y, y.numel(), y.shape[1], SPLIT=split,
            SCALE=0 if group else 1 if narrow_weight else 2, BIAS=bias is not None, BLOCK=block,
        )  # fmt: skip


def expand(codes: Tensor, scale: Tensor, zero: Tensor | None, kind: str, out: Tensor) -> None:
    """out [R, K], contiguous, = (codes - zero) * scale, rounded once."""
    rows, depth = out.shape
    group = depth // scale.shape[1]
    block = max(16, min(4096, triton.next_power_of_2(depth)))
    _expand_kernel[(rows, triton.cdiv(depth, block))](
        codes, scale, scale if zero is None else zero, out, depth, codes.stride(0), GROUP=group, KIND=kind,
        ARCH=architecture(codes.device), ZERO=zero is not None, BLOCK=block, PIECE=16 if group % 16 == 0 else 1,
        num_warps=max(1, min(8, block // 512)),
    )  # fmt: skip


def multiply(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, kind: str,
    narrow_weight: bool, plan: Decode | Prefill | None = None,
) -> Tensor:  # fmt: skip
    """mixed_gemm for 16-bit wide operands, x [M, K], weight [N, K] (codes as bytes), by the plan or the best known."""
    y = torch.empty(x.shape[0], weight.shape[0], dtype=(x if narrow_weight else weight).dtype, device=x.device)
    wide, codes = (x, weight) if narrow_weight else (weight, x)
    if not y.numel():
        return y
    if plan is None:
        (columns, depth), rows = wide.shape, codes.shape[0]
        group = 0 if scale.shape[1] == 1 else depth // scale.shape[1]
        plan = plan_for(rows, columns, depth, group, narrow_weight, *_machine(x.device))
    if isinstance(plan, Decode):
        launch_decode(y, wide, codes, scale, zero, bias, kind, plan)
    else:
        launch_prefill(y, wide, codes, scale, zero, bias, kind, narrow_weight, plan)
    return y
