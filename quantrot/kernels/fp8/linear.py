"""Few tokens times an FP8 weight in one kernel for Hopper, which quantizes the tokens itself: CUDA C++ (linear.cuh, and
decode.cuh, whose plans and order of operations these are), compiled at first use.

    linear       x [M, K] -> quantized in 1 x 128 blocks, times the transpose of b [N, K], + bias: [M, N]
    unsupported  why these operands are not for it, or None; `supports` is the same as a bool

Bits are those of quantize_fp8_block and fp8_block_gemm one after the other. Every thread block quantizes all of its
slice of K: arithmetic that hides while the first of its weights arrive, as long as there is little of it, so M * K is
limited.
"""

import ctypes
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.fp8 import blocks, hopper
from quantrot.kernels.fp8.hopper import Decode, GemmArgs
from quantrot.kernels.nvrtc import MAX_SHARED, SM_SHARED, load_kernel

TOKENS = 8  # at most, the columns of a tensor core's product
MOST = 32768  # of M * K: codes that a thread block makes and holds
ENTRY = """extern "C" __global__ void {cluster}__launch_bounds__({threads}, {resident}) {name}(
    const __grid_constant__ quantrot::TensorMap b, const __grid_constant__ quantrot::GemmArgs args,
    const __grid_constant__ quantrot::Tokens tokens) {{
  quantrot::{call};
}}
"""


@dataclass(frozen=True)
class Held(Decode):
    """A Decode of 8 tokens, whose codes are made and held by each thread block."""

    tokens: int = TOKENS
    one: bool = False  # a single token: fewer addresses to compute
    helpers: int = 0  # warpgroups that quantize beside those that multiply
    together: int = 4  # groups of 128 columns that a half-warp reads before it codes them

    @property
    def threads(self) -> int:
        return super().threads + 128 * self.helpers

    def stage_bytes(self) -> int:
        return self.columns * 128 + 16

    def held_bytes(self, segment: int, m: int) -> int:
        """Of shared memory, with the stages and m tokens."""
        return self.shared_bytes(segment) + segment * 128 * m + (TOKENS - m) * 16

    def source(self, parts: int, gated: bool, dtype: torch.dtype, rule: str, channel: bool, bias: int) -> str:
        return device_functions(rule) + self.entry(parts, gated, dtype, channel, bias)

    def entry(self, parts: int, gated: bool, dtype: torch.dtype, channel: bool, bias: int, name: str = "linear") -> str:
        """C++ of the kernel `name`. channel: b has a scale a row; bias: the bytes of an element of it, 0 for none."""
        numbers = f"{str(self.one).lower()}, {self.columns}, {self.stages}, {parts}, {self.early}, "
        numbers += f"{self.helpers}, {self.together}"
        flags = f"{str(gated).lower()}, quantrot::{blocks.DTYPES[dtype]}, {str(channel).lower()}"
        return ENTRY.format(
            cluster=f"__cluster_dims__({parts}, 1, 1) " if parts > 1 else "",
            threads=self.threads,
            resident=self.resident,
            name=name,
            call=f"linear<{numbers}, {flags}, quantrot::{hopper.OUT[dtype]}, {bias}>(&b, args, tokens)",
        )


@lru_cache(maxsize=4)
def device_functions(rule: str) -> str:
    """The C++ that every kernel starts with."""
    kernels = Path(__file__).parent.parent
    files = (
        kernels / "hadamard/words.cuh",
        *(kernels / f"fp8/{name}.cuh" for name in ("blocks", "gemm", "decode", "linear")),
    )
    text = "".join(file.read_text() for file in (kernels / "hopper.cuh", *files))
    return f"#define SCALE_RULE {blocks.SCALE_RULES.index(rule) + 1}\n{blocks.HINTS[False]}{text}"


def fitted(plan: Held, m: int, n: int, k: int, parts: int) -> Held:
    """With as many stages as shared memory, and the memory's latency, take."""
    plan = replace(plan, stages=0)
    budget = min(MAX_SHARED, SM_SHARED // plan.resident - 1024) - plan.held_bytes(hopper.segment_of(k, parts), m)
    in_flight = (192 << 10) // plan.resident // (plan.columns * 128)
    return replace(plan, stages=max(0, min(budget // plan.stage_bytes(), in_flight)))


@lru_cache(maxsize=4096)
def plan_for(m: int, n: int, k: int, parts: int, gated: bool = False, settled: bool = False) -> Held | None:
    """The plan of these sizes, by rule; None where two kernels are the better choice."""
    if m > TOKENS or m * k > MOST:
        return None
    base = hopper.decode_plan(m, n, k, parts)
    plan = Held(columns=base.columns, resident=base.resident, one=m == 1)
    plan = fitted(plan, m, n, k, parts)
    groups = -(-hopper.segment_of(k, parts) * m // (plan.threads // 16))
    plan = replace(plan, together=next(v for v in (2, 4, 8) if v >= min(groups, 8)))
    if settled:
        plan = replace(plan, early=plan.stages)
    return plan if plan.stages >= 2 else None


# --- What can be run -------------------------------------------------------------------------------------------------


def unsupported(
    x: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_block: tuple[int, int],
    gated: bool = False,
    bias: Tensor | None = None,
) -> str | None:
    """Why `linear` does not take these operands (whatever the device), or None."""
    (n, k), m = b.shape, x.shape[0]
    if x.dtype not in blocks.DTYPES or b.dtype != hopper.E4M3:
        return f"x is {x.dtype}, b is {b.dtype}; x must be bfloat16 or float16, b {hopper.E4M3}"
    if x.shape[1] != k * (1 + gated) or k == 0 or n == 0 or k % 16 or n % 8 or max(n, k) >= 1 << 30:
        return f"x is {list(x.shape)}, b is {[n, k]}; K must be a multiple of 16, N of 8"
    if x.stride(1) != 1 or (m > 1 and x.stride(0) % 8) or x.data_ptr() % 16:
        return "x's columns are not contiguous or its rows not aligned to 16 bytes"
    if not 1 <= m <= TOKENS or plan_for(m, n, k, hopper.parts_of(n, k)) is None:
        return f"x is {list(x.shape)}; it takes up to {TOKENS} tokens, and {MOST} elements"
    return hopper.unsupported_scale("b", b, b_scale, b_block) or hopper.unsupported_bias(n, x.dtype, bias)


def supports(
    x: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_block: tuple[int, int],
    gated: bool = False,
    bias: Tensor | None = None,
) -> bool:
    """Whether `linear` takes this product: operands, device and installation."""
    on_device = 1 <= x.shape[0] <= TOKENS and x.device.type == "cuda" and nvrtc.available(x.device)
    return on_device and unsupported(x, b, b_scale, b_block, gated, bias) is None


# --- Launch ----------------------------------------------------------------------------------------------------------


class Tokens(ctypes.Structure):
    _fields_ = [("x", ctypes.c_void_p), ("stride", ctypes.c_longlong)]


class _Arguments(ctypes.Structure):
    _fields_ = [("b", ctypes.c_ubyte * 128), ("args", GemmArgs), ("tokens", Tokens)]


def arguments(
    x: Tensor, b: Tensor, b_scale: Tensor, c: Tensor, b_block: tuple[int, int], bias: Tensor | None, parts: int
) -> tuple[GemmArgs, Tokens]:
    """The kernel's last parameters."""
    n, k = b.shape
    bias_at = bias.data_ptr() if bias is not None else None
    none, scales, segment = hopper.Scales(), hopper.scales_of(b, b_scale, b_block), hopper.segment_of(k, parts)
    return GemmArgs(none, scales, bias_at, c.data_ptr(), x.shape[0], n, k, segment, 0), Tokens(
        x.data_ptr(), x.stride(0)
    )


@lru_cache(maxsize=1024)
def _kernel(
    plan: Held,
    parts: int,
    gated: bool,
    dtype: torch.dtype,
    rule: str,
    channel: bool,
    bias: int,
    shared: int,
    device: int,
) -> Any:
    """The function, ready to launch on this device."""
    return load_kernel(plan.source(parts, gated, dtype, rule, channel, bias), "linear", shared, device)


def linear(
    x: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_block: tuple[int, int],
    rule: str,
    gated: bool = False,
    bias: Tensor | None = None,
    *,
    b_settled: bool = False,
    plan: Held | None = None,
    parts: int | None = None,
) -> Tensor:
    """x [M, K] times the transpose of b [N, K] (e4m3 with block scales) + bias: [M, N] in x's dtype, contiguous.

    x is quantized in 1 x 128 blocks, by the scale rule `rule`. gated: x is [M, 2 K], gate and up, and silu(gate) * up
    is what is quantized. b_settled: the kernel before this one on the stream does not write b, which may be read before
    that one has ended. plan and parts: instead of the rules' (to measure). ValueError for what `unsupported` names.
    """
    reason = unsupported(x, b, b_scale, b_block, gated, bias)
    if reason and (plan is None or "it takes up to" not in reason):
        raise ValueError(f"{reason}; use another backend")
    m, (n, k) = x.shape[0], b.shape
    c = torch.empty((m, n), dtype=x.dtype, device=x.device)
    given, b, bias = b, hopper.aligned(b), bias.contiguous() if bias is not None else None
    parts = parts or hopper.parts_of(n, k)
    plan = plan or plan_for(m, n, k, parts, gated, b_settled and b is given)
    assert plan is not None
    device, shared = x.get_device(), plan.held_bytes(hopper.segment_of(k, parts), m)
    box = nvrtc.tensor_map(b.data_ptr(), n, k, b.stride(0), (plan.columns, 128), b.dtype)
    args, tokens = arguments(x, b, b_scale, c, b_block, bias, parts)
    values = _Arguments(args=args, tokens=tokens)
    ctypes.memmove(values.b, box, 128)
    channel, bias_bytes = hopper.is_channel(b, b_block), bias.itemsize if bias is not None else 0
    function = _kernel(plan, parts, gated, x.dtype, rule, channel, bias_bytes, shared, device)
    nvrtc.launch(function, (plan.grid(m, n, parts),), plan.threads, shared, values, device, overlap=plan.overlap)
    return c
