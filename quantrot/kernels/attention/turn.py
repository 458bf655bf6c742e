"""RoPE and R3 of queries and keys in one kernel for Hopper: CUDA C++ (turn.cuh), compiled at first use.

    try_turn     queries and keys as the projections leave them -> behind a Turn, or None where torch has to do it
    unsupported  why these operands are not for the kernel, or None

Eager mode's RoPE is ten kernels a layer and R3 two, which take the host longer than the GPU. torch.compile makes one
kernel of RoPE by itself; where a gradient may be recorded, torch does it.
"""

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.attention.one_token import DTYPES
from quantrot.kernels.attention.prepare import aligned
from quantrot.kernels.attention.reference import Turn
from quantrot.kernels.nvrtc import load_kernel
from quantrot.kernels.ready import Ready, Run, address, like, unseen

DIMS = (64, 128, 256)
SHARE, WARPS = 4, 8  # heads of a warp, warps of a thread block
READY = Ready()
ENTRY = """extern "C" __global__ void __launch_bounds__({threads}) turn_heads(quantrot::TurnArgs args) {{
  quantrot::turn_heads<{dim}, quantrot::{dtype}, {share}>(args);
}}
"""


class Arguments(ctypes.Structure):
    """TurnArgs of turn.cuh."""

    whole = True
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "cos", "sin", "signs", "q_out", "k_out")),
        *((f"{name}_{i}", ctypes.c_longlong) for name in "qk" for i in ("batch", "token", "head")),
        *((f"{name}_{i}", ctypes.c_longlong) for name in ("cos", "sin") for i in ("batch", "token")),
        *((name, ctypes.c_int) for name in ("tokens", "heads", "groups")),
        ("factor", ctypes.c_float),
    ]


def try_turn(q: Tensor, k: Tensor, turn: Turn) -> tuple[Tensor, Tensor] | None:
    """q [B, S, H, D] and k [B, S, G, D] in 16 bits, any strides between rows, behind a Turn whose cos and sin are
    [1 or B, S, D]: the same, contiguous, with transformers' bits of RoPE and the definition's of the rotation. None
    where this is no eager inference on Hopper, or operands that the kernel does not take."""
    if not q.is_cuda or not unseen(q, k, turn.cos, turn.sin, turn.signs):
        return None
    key = like(q), like(k), like(turn.cos), like(turn.sin), turn.order, like(turn.signs)
    if (again := READY.find(key)) is None:
        if not nvrtc.available(q.device) or unsupported(q, k, turn):
            return None
        again = READY.keep(key, prepare(q, k, turn), q.get_device())
    made: tuple[Tensor, Tensor] = again(q, k, turn)
    return made


def unsupported(q: Tensor, k: Tensor, turn: Turn) -> str | None:
    """Why these operands are not for the kernel, or None. Does not look at the device."""
    (batch, tokens, _, dim), (cos, sin, order, signs) = q.shape, turn
    if dim not in DIMS or q.dtype not in DTYPES or k.dtype != q.dtype or not q.numel() or not k.numel():
        return f"q {q.dtype} {tuple(q.shape)}, k {k.dtype} {tuple(k.shape)}"
    if k.shape != (batch, tokens, k.shape[2], dim) or batch > 65535:
        return f"k {tuple(k.shape)}, q {tuple(q.shape)}"
    if (cos is None) != (sin is None) or order not in (0, dim) or (cos is None and not order):
        return f"cos {cos is not None}, sin {sin is not None}, order {order}"
    angles = [t for t in (cos, sin) if t is not None]
    if any(t.dtype != q.dtype or t.shape not in ((1, tokens, dim), (batch, tokens, dim)) for t in angles):
        return f"cos or sin that is no {q.dtype} [1 or {batch}, {tokens}, {dim}]"
    if signs is not None and (signs.dtype != torch.int8 or signs.shape != (dim,) or not signs.is_contiguous()):
        return f"signs {signs.dtype} {tuple(signs.shape)}"
    if any(t.device != q.device for t in (k, *angles, *([] if signs is None else [signs]))):
        return "operands on several devices"
    if not all(aligned(t) for t in (q, k, *angles)):
        return "rows that do not start at multiples of 16 bytes"
    return None


def device_functions() -> str:
    """What every kernel is built on."""
    return nvrtc.sources("hopper", "products", "attention/gather", "attention/one_token", "attention/turn")


def entry(dim: int, dtype: torch.dtype) -> str:
    """The source of one kernel, after device_functions."""
    return ENTRY.format(threads=32 * WARPS, dim=dim, dtype=DTYPES[dtype], share=SHARE)


@lru_cache(maxsize=64)
def _kernel(dim: int, dtype: torch.dtype, device: int) -> int:
    """The function, ready to launch on this device."""
    return load_kernel(device_functions() + entry(dim, dtype), "turn_heads", 0, device)


def arguments(q: Tensor, k: Tensor, turn: Turn, q_out: Tensor, k_out: Tensor) -> Arguments:
    """The kernel's parameter."""
    steps = ((0, 0) if t is None else (t.stride(0) if t.shape[0] > 1 else 0, t.stride(1)) for t in turn[:2])
    return Arguments(
        *(address(t) for t in (q, k, turn.cos, turn.sin, turn.signs, q_out, k_out)),
        *(stride for t in (q, k) for stride in t.stride()[:3]),
        *(step for each in steps for step in each),
        *(q.shape[1], q.shape[2], k.shape[2]),
        turn.order**-0.5 if turn.order else 0.0,
    )


def grid(q: Tensor, k: Tensor) -> tuple[int, int]:
    parts = -(-(q.shape[2] + k.shape[2]) // SHARE)
    return -(-(q.shape[1] * parts) // WARPS), q.shape[0]


def prepare(q: Tensor, k: Tensor, turn: Turn) -> Run:
    """try_turn's kernel as a function of operands like these."""
    device, sizes = q.get_device(), (q.shape, k.shape)
    launch = nvrtc.Launch(_kernel(q.shape[3], q.dtype, device), grid(q, k), 32 * WARPS, 0, device, overlap=True)
    values = arguments(q, k, turn, q, k)

    def run(q: Tensor, k: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        q_out, k_out = (torch.empty(size, dtype=q.dtype, device=q.device) for size in sizes)
        now = Arguments.from_buffer_copy(values)
        now.q, now.k, now.q_out, now.k_out = q.data_ptr(), k.data_ptr(), q_out.data_ptr(), k_out.data_ptr()
        now.cos, now.sin, now.signs = address(turn.cos), address(turn.sin), address(turn.signs)
        launch(now)
        return q_out, k_out

    return run
