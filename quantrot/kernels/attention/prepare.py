"""RoPE, Hadamard and 8-bit codes in one pass over memory, for Hopper: CUDA C++ (prepare.cuh), compiled at first use.

    quantize     what rope.quantize makes, from what it takes, for q, k and v in 16 bits
    unsupported  why these operands are not for it, or None

Head dimensions 64 and 128, all of a head turned by Sylvester's matrix or not at all, no signs, more than a few tokens.
"""

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.attention.reference import BLOCK, key_rows
from quantrot.kernels.fp8 import E4M3
from quantrot.kernels.nvrtc import load_kernel
from quantrot.kernels.ready import Run, address

TYPES = {torch.bfloat16: "Bf16", torch.float16: "Fp16", torch.float32: "Fp32", E4M3: "E4m3", torch.int8: "Int8"}
DIMS = (64, 128)
OUT = tuple(f"{name}_{what}" for name in "qkv" for what in ("out", "scale"))
THREADS = 256
FEW = 16  # tokens up to which tiles of 128 are mostly padding
ENTRY = """extern "C" __global__ void __launch_bounds__({threads}, {blocks}) prepare(
    const __grid_constant__ quantrot::PrepareArgs args) {{
  quantrot::prepare<{call}>(args);
}}
"""


@dataclass(frozen=True)
class Plan:
    """A launch: heads of q or k that a thread block takes one after another, 64 tokens of each (where k has a scale a
    tile: half as many, 128 tokens of each), and blocks a multiprocessor at least."""

    share: int
    blocks: int


def plan_for(dim: int, angles: torch.dtype | None, rotate: bool, rows: int) -> Plan:
    """The launch for so many tiles' heads. angles: of RoPE; with neither it nor a matrix, codes of what is there.

    A block's heads share their angles, but large blocks end late: at head_dim 128 four heads take 43 us for sixteen's
    48 at 8192 tokens of 32 heads, and 169 us for 161 at 32768.
    """
    if angles is None and not rotate:
        return Plan(2, 4)
    halves = rows * 128 // dim  # of head_dim 64: blocks half as long
    share = 16 if halves >= 8192 else 8 if halves >= 4096 else 4
    if dim == 128 and rotate and angles == torch.float32:  # for three there are too few registers: 250 us for 206
        return Plan(min(share, 8), 2)
    return Plan(share, 3)


class Arguments(ctypes.Structure):
    """PrepareArgs of prepare.cuh."""

    whole = True
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "cos", "sin")),
        *((name, ctypes.c_void_p) for name in OUT),
        *((f"{name}_{i}", ctypes.c_longlong) for name in "qkv" for i in ("batch", "token", "head")),
        ("cos_batch", ctypes.c_longlong),
        ("cos_token", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("tokens", "k_rows", "padded", "heads", "groups", "q_parts", "k_parts")),
        ("factor", ctypes.c_float),
    ]


def unsupported(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, signs: Tensor | None, order: int
) -> str | None:
    """Why `quantize` does not take these operands, or None. Does not look at the device."""
    dim, tokens = k.shape[3], k.shape[1]
    if dim not in DIMS or order not in (0, dim) or signs is not None:
        return f"head_dim {dim}, order {order}, signs {signs is not None}"
    if tokens <= FEW:
        return f"{tokens} tokens"
    if k.dtype not in (torch.bfloat16, torch.float16) or q.dtype != k.dtype or v.dtype != k.dtype:
        return f"{q.dtype}, {k.dtype}, {v.dtype}"
    angles = [t for t in (cos, sin) if t is not None]
    if any(t.dtype not in (k.dtype, torch.float32) for t in angles) or len({(t.dtype, t.stride()) for t in angles}) > 1:
        return "cosines and sines of another type than the rest, or of two layouts"
    if any(not aligned(t) for t in (q, k, v, *angles) if t.numel()):
        return "rows that do not start at multiples of 16 bytes"
    return None


def aligned(t: Tensor) -> bool:
    """Whether rows start at multiples of 16 bytes."""
    return t.stride(-1) == 1 and all(n * t.itemsize % 16 == 0 for n in (*t.stride()[:-1], t.data_ptr() // t.itemsize))


def supports(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, signs: Tensor | None, order: int
) -> bool:
    """Whether `quantize` takes these operands on their device."""
    device = k.device
    return device.type == "cuda" and nvrtc.available(device) and unsupported(q, k, v, cos, sin, signs, order) is None


def device_functions() -> str:
    """What every kernel is built on."""
    return nvrtc.sources("hopper", "products", "attention/codes", "attention/prepare")


def shared_bytes(dim: int) -> int:
    """Of a thread block: its largest numbers, and codes of v or the rotated rows of k that wait for their scale."""
    return 64 + dim * THREADS


def entry(
    plan: Plan, dim: int, dtype: torch.dtype, angles: torch.dtype | None, rotate: bool, by_block: bool,
    codes: torch.dtype = E4M3,
) -> str:  # fmt: skip
    """The source of one kernel, after device_functions."""
    types = (f"quantrot::{TYPES[t]}" for t in (dtype, angles or dtype, codes))
    numbers = (str(int(n)) for n in (dim, plan.share, angles is not None, rotate, by_block))
    return ENTRY.format(threads=THREADS, blocks=plan.blocks, call=", ".join([*types, *numbers]))


@lru_cache(maxsize=256)
def _kernel(plan: Plan, dim: int, *rest: Any) -> Any:
    """The function, ready to launch on the device that is the last argument."""
    *kind, device = rest
    return load_kernel(device_functions() + entry(plan, dim, *kind), "prepare", shared_bytes(dim), device)


def arguments(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, order: int, out: tuple[Tensor, ...],
    by_block: bool, plan: Plan,
) -> Arguments:  # fmt: skip
    """The kernel's parameter."""
    tokens, heads, groups = k.shape[1], q.shape[2], k.shape[2]
    return Arguments(
        *(t.data_ptr() if t is not None else None for t in (q, k, v, cos, sin)),
        *(t.data_ptr() for t in out),
        *(stride for t in (q, k, v) for stride in t.stride()[:3]),
        *((0, 0) if cos is None else ((0 if cos.shape[0] == 1 else cos.stride(0)), cos.stride(1))),
        tokens,
        key_rows(tokens),
        -(-tokens // BLOCK) * BLOCK,
        heads,
        groups,
        2 * -(-heads // plan.share),
        -(-groups // (plan.share // 2)) if by_block else 2 * -(-groups // plan.share),
        order**-0.5 if order else 1.0,
    )


def grid(args: Arguments, batch: int) -> tuple[int, int, int]:
    return args.padded // BLOCK, args.q_parts + args.k_parts + args.groups, batch


def outputs(q: Tensor, k: Tensor, by_block: bool, codes: torch.dtype = E4M3) -> tuple[Tensor, ...]:
    """Room for the codes and scales of q, k and v."""
    batch, tokens, heads, dim = q.shape
    groups, padded = k.shape[2], -(-tokens // BLOCK) * BLOCK
    scales = padded // BLOCK if by_block else tokens
    scale = torch.uint8 if codes == E4M3 else torch.float32

    def new(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=k.device)

    return (
        new(codes, batch, heads, tokens, dim), new(scale, batch, heads, tokens),
        new(codes, batch, groups, key_rows(tokens), dim)[:, :, :tokens], new(scale, batch, groups, scales),
        new(E4M3, batch, groups, dim, padded), new(torch.uint8, batch, groups, scales),
    )  # fmt: skip


def quantize(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, order: int, by_block: bool,
    codes: torch.dtype = E4M3, plan: Plan | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """rope_hadamard_quantize_reference's result for granularity block or token. q may have no heads."""
    made: tuple[Tensor, ...] = prepare(q, k, v, cos, sin, order, by_block, codes, plan)(q, k, v, cos, sin)
    return made


def prepare(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, order: int, by_block: bool,
    codes: torch.dtype = E4M3, plan: Plan | None = None,
) -> Run:  # fmt: skip
    """`quantize` as a function of q, k, v, cos and sin like these."""
    if not k.numel():
        return lambda q, k, v, cos, sin: outputs(q, k, by_block, codes)
    out, tokens = outputs(q, k, by_block, codes), k.shape[1]
    made: Any = [{"size": t.shape, "dtype": t.dtype, "device": t.device} for t in out]
    made[2]["size"] = *out[2].shape[:2], key_rows(tokens), out[2].shape[3]
    dim, device = k.shape[3], k.get_device()
    rows = -(-k.shape[1] // BLOCK) * k.shape[0] * max(q.shape[2], k.shape[2])
    angles = cos.dtype if cos is not None else None
    plan = plan or plan_for(dim, angles, order > 0, rows)
    values = arguments(q, k, v, cos, sin, order, out, by_block, plan)
    function = _kernel(plan, dim, k.dtype, angles, order > 0, by_block, codes, device)
    blocks = grid(values, k.shape[0])
    launch = nvrtc.Launch(function, blocks, THREADS, shared_bytes(dim), device, overlap=True)

    def run(q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, ...]:
        out, now = [torch.empty(**each) for each in made], Arguments.from_buffer_copy(values)
        now.q, now.k, now.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        now.cos, now.sin = address(cos), address(sin)
        for name, t in zip(OUT, out, strict=True):
            setattr(now, name, t.data_ptr())
        launch(now)
        out[2] = out[2][:, :, :tokens]
        return tuple(out)

    return run
