"""A decoder layer's products one behind the other, as a model runs them for a token or a few, in one CUDA graph.

Every kernel waits for what the one before it makes, and has a weight of its own, which no cache holds: what a kernel
costs here is what it costs a model, its start and the gap before it included. The shapes are Llama 3.1 8B's: queries,
keys and values in one product, o_proj, gate and up in one, down_proj. Attention is left out. `norm` and `gate` are
Triton kernels that do as little as can be done.

Without a GPU, every benchmark on this file runs each of its ways once: tiny, by the reference operators, Triton
interpreted, the times nan.
"""

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
GPU = torch.cuda.is_available()
if not GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from timing import time_us  # noqa: E402
from torch import Tensor  # noqa: E402

from quantrot.kernels.mixed import pack_int8  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
HIDDEN, INNER, LAYERS = (4096, 14336, 8) if GPU else (256, 512, 2)
SHAPES = ((HIDDEN * 3 // 2, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))  # N, K
EPSILON = 1e-5


def weights(make: Callable[[int, int], Any], count: int = LAYERS) -> list[list[Any]]:
    """make(N, K) for each of SHAPES, for so many layers."""
    return [[make(n, k) for n, k in SHAPES] for _ in range(count)]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)


def int8_weight(n: int, k: int, group: int = 0) -> tuple[Tensor, Tensor]:
    """Packed codes, and the scales (one a row, or for so many columns) that make products as large as their input."""
    codes = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=DEVICE)
    scale = torch.full((n, k // (group or k)), k**-0.5 / 73, dtype=torch.bfloat16, device=DEVICE)
    return pack_int8(codes), scale


def chain(layers: list[list[Any]], x: Tensor, first: Callable, up: Callable, last: Callable) -> Tensor:
    """What the layers make of x: last(first(x, qkv)'s queries, o, x), and of that last(up(x, gate_up), down, x)."""
    for qkv, o, gate_up, down in layers:
        x = last(first(x, qkv)[:, :HIDDEN], o, x)
        x = last(up(x, gate_up), down, x)
    return x


def layer_us(run: Callable[[], Any], count: int = LAYERS) -> float:
    """Microseconds a layer of a chain of so many."""
    if GPU:
        return time_us([run]) / count
    run()
    return math.nan


@triton.jit
def _norm(x, residual, weight, total, y, N: tl.constexpr, EPSILON: tl.constexpr):
    i = tl.arange(0, N)
    at = tl.program_id(0) * N + i
    v = (tl.load(x + at).to(tl.float32) + tl.load(residual + at).to(tl.float32)).to(tl.bfloat16).to(tl.float32)
    tl.store(total + at, v.to(tl.bfloat16))
    v = v * tl.rsqrt(tl.sum(v * v) / N + EPSILON) * tl.load(weight + i).to(tl.float32)
    tl.store(y + at, v.to(tl.bfloat16))


@triton.jit
def _gate(x, y, N: tl.constexpr, BLOCK: tl.constexpr):
    row, i = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * 2 * N + i).to(tl.float32)
    on = (gate / (1 + tl.exp(-gate))).to(tl.bfloat16).to(tl.float32)
    tl.store(y + row * N + i, (on * tl.load(x + row * 2 * N + N + i).to(tl.float32)).to(tl.bfloat16))


def norm(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    """RMS norm of x + residual; the sum is written too, as a model's next residual."""
    total, y = torch.empty_like(x), torch.empty_like(x)
    _norm[(len(x),)](x, residual, weight, total, y, x.shape[1], EPSILON, num_warps=8)
    return y


def gate(x: Tensor) -> Tensor:
    """silu of one half times the other."""
    rows, inner = len(x), x.shape[1] // 2
    y, block = x.new_empty(rows, inner), min(1024, inner)
    _gate[(inner // block, rows)](x, y, inner, block)
    return y
