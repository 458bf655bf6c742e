"""Few tokens times an FP8 weight in one kernel for Hopper, which quantizes the tokens itself: CUDA C++ (linear.cuh, and
decode.cuh, whose plans and order of operations these are), compiled at first use.

    linear       x [M, K] -> quantized in 1 x 128 blocks, times the transpose of b [N, K], + bias: [M, N]
    unsupported  why these operands are not for it, or None; `supports` is the same as a bool

Bits are those of quantize_fp8_block and fp8_block_gemm one after the other. Every thread block quantizes all of its
slice of K: arithmetic that hides while the first of its weights arrive, as long as there is little of it, so M * K is
limited. The norm in front of the quantization in a decoder layer can be done there too, and what comes after the
product, an MLP's gate or the residual, at its end.
"""

import ctypes
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.fp8 import blocks, hopper
from quantrot.kernels.fp8.hopper import Decode, GemmArgs
from quantrot.kernels.nvrtc import MAX_SHARED, SM_SHARED, load_kernel
from quantrot.kernels.ready import Run, address

TOKENS = 8  # that a kernel takes at most, the columns of a tensor core's product
FEW, MOST = 2, 14336  # tokens, and of M * K, up to which one kernel has been found faster than two
ENTRY = """extern "C" __global__ void {cluster}__launch_bounds__({threads}, {resident}) {name}(
    const __grid_constant__ quantrot::TensorMap b, const __grid_constant__ quantrot::GemmArgs args,
    const __grid_constant__ quantrot::Tokens tokens) {{
  quantrot::{call};
}}
"""


@dataclass(frozen=True)
class Work:
    """What a kernel computes."""

    parts: int = 1  # of K, of which a cluster's thread blocks take one each
    norm: bool = False  # in front
    dtype: torch.dtype = torch.bfloat16
    rule: str = "bf16"
    channel: bool = False  # b has a scale a row
    bias: int = 0  # bytes of an element of it, 0 for none
    add: bool = False  # a residual
    gates: bool = False  # b is that of gate and up, silu(gate) * up the result


@dataclass(frozen=True)
class Held(Decode):
    """A Decode of 8 tokens, whose codes are made and held by each thread block."""

    tokens: int = TOKENS
    together: int = 4  # groups of 128 columns that a half-warp reads before it codes them

    def stage_bytes(self) -> int:
        return self.columns * 128 + 16

    def held_bytes(self, segment: int, m: int, norm: bool, gates: bool) -> int:
        """Of shared memory, with the stages and m tokens."""
        more = segment * 4 * (TOKENS * (gates + norm) - 1)  # the scales of what is gated, and sums; b's are in a's
        return self.shared_bytes(segment) + segment * 128 * m + (TOKENS - m) * 16 + more

    def holds_all(self, segment: int, m: int) -> bool:
        """Whether the tokens are all in registers at once, which a norm takes."""
        return segment <= (self.threads - 32) // 16 // m * self.together

    def source(self, work: Work) -> str:
        return device_functions(work.rule) + self.entry(work)

    def entry(self, work: Work, name: str = "linear") -> str:
        """C++ of the kernel `name`."""
        pairs, late, norm, channel, add, gates = (
            str(flag).lower() for flag in (self.pairs, self.late, work.norm, work.channel, work.add, work.gates)
        )
        plan = f"{self.columns}, {self.stages}, {work.parts}, {self.early}, {pairs}, {late}, {self.together}, {norm}"
        dtype = f"quantrot::{blocks.DTYPES[work.dtype]}, {channel}, quantrot::{hopper.OUT[work.dtype]}"
        return ENTRY.format(
            cluster=f"__cluster_dims__({work.parts}, 1, 1) " if work.parts > 1 else "",
            threads=self.threads,
            resident=self.resident,
            name=name,
            call=f"linear<{plan}, {dtype}, {work.bias}, {add}, {gates}>(&b, args, tokens)",
        )


@lru_cache(maxsize=4)
def device_functions(rule: str) -> str:
    """The C++ that every kernel starts with."""
    shared = nvrtc.sources("hopper", "products", "hadamard/words", "gate")
    text = shared + nvrtc.sources("rms", "fp8/blocks", "fp8/gemm", "fp8/decode", "fp8/linear")
    return f"#define SCALE_RULE {blocks.SCALE_RULES.index(rule) + 1}\n{blocks.CACHE_HINTS}{text}"


@lru_cache(maxsize=4096)
def plan_for(
    m: int, n: int, k: int, parts: int, norm: bool = False, gates: bool = False, settled: bool = False
) -> Held | None:
    """The plan of these sizes, by rule; None where two kernels are the better choice."""
    if m > FEW or m * k > MOST or (norm and parts > 1):
        return None
    base, segment = hopper.decode_plan(m, n, k, parts), hopper.segment_of(k, parts)
    columns = max(base.columns, 32 if gates else 16)  # gates have warps of their own, of 16 columns
    plan = Held(columns=columns, resident=base.resident, stages=0)
    groups = hopper._ceil(segment, (plan.threads - 32) // 16 // m)
    plan = replace(plan, together=next(v for v in (2, 4, 8) if v >= min(groups, 8)))
    budget = min(MAX_SHARED, SM_SHARED // plan.resident - 1024) - plan.held_bytes(segment, m, norm, gates)
    in_flight = (192 << 10) // plan.resident // (plan.columns * 128)
    plan = replace(plan, stages=max(0, min(budget // plan.stage_bytes(), in_flight)))
    plan = replace(plan, pairs=plan.resident == 1 and plan.stages >= 4 and segment > hopper.SHORT)
    if plan.stages < 2 or (norm and not plan.holds_all(segment, m)):
        return None
    return replace(plan, early=hopper.early_blocks(plan, segment)) if settled else plan


def takes_one(n: int, k: int) -> bool:
    """Whether one token by a weight of this size is for `linear`."""
    return k % 16 == 0 and n % 8 == 0 and plan_for(1, n, k, hopper.parts_of(n, k)) is not None


# --- What can be run -------------------------------------------------------------------------------------------------


def unsupported(
    x: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_block: tuple[int, int],
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    residual: Tensor | None = None,
    gates: bool = False,
) -> str | None:
    """Why `linear` does not take these operands (whatever the device), or None."""
    (n, k), m = b.shape, x.shape[0]
    if x.dtype not in blocks.DTYPES or b.dtype != hopper.E4M3:
        return f"x is {x.dtype}, b is {b.dtype}; x must be bfloat16 or float16, b {hopper.E4M3}"
    if x.shape[1] != k or k == 0 or n == 0 or k % 16 or n % 8 or max(n, k) >= 1 << 30:
        return f"x is {list(x.shape)}, b is {[n, k]}; K must be a multiple of 16, N of 8"
    for name, rows in (("x", x), ("residual", residual), ("norm", norm if norm is None else norm[None])):
        if rows is not None and not (hopper.readable(rows) and rows.dtype == x.dtype):
            return f"{name} is not of x's dtype, its columns not contiguous or its rows not aligned to 16 bytes"
    if gates and (n % 128 or hopper.is_channel(b, b_block) or residual is not None):
        return "a gate at the end takes N a multiple of 128, scales of blocks, and no residual"
    if not 1 <= m <= TOKENS or plan_for(m, n, k, hopper.parts_of(n, k), norm is not None, gates) is None:
        return f"x is {list(x.shape)}; it takes up to {FEW} tokens, and {MOST} elements"
    return hopper.unsupported_scale("b", b, b_scale, b_block) or hopper.unsupported_bias(n, x.dtype, bias)


def supports(
    x: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_block: tuple[int, int],
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    residual: Tensor | None = None,
    gates: bool = False,
) -> bool:
    """Whether `linear` takes this product: operands, device and installation."""
    on_device = 1 <= x.shape[0] <= FEW and x.device.type == "cuda" and nvrtc.available(x.device)
    return on_device and unsupported(x, b, b_scale, b_block, bias, norm, residual, gates) is None


# --- Launch ----------------------------------------------------------------------------------------------------------


class Tokens(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("stride", ctypes.c_longlong),
        ("norm", ctypes.c_void_p),
        ("epsilon", ctypes.c_float),
    ]


class _Arguments(ctypes.Structure):
    _fields_ = [("b", ctypes.c_ubyte * 128), ("args", GemmArgs), ("tokens", Tokens)]


def arguments(
    x: Tensor,
    b: Tensor,
    b_scale: Tensor,
    c: Tensor | None,
    b_block: tuple[int, int],
    bias: Tensor | None,
    parts: int,
    norm: Tensor | None = None,
    epsilon: float = 0.0,
    residual: Tensor | None = None,
) -> tuple[GemmArgs, Tokens]:
    """The kernel's last parameters."""
    n, k = b.shape
    bias_at, norm_at, c_at = (None if t is None else t.data_ptr() for t in (bias, norm, c))
    none, scales, segment = hopper.Scales(), hopper.scales_of(b, b_scale, b_block), hopper.segment_of(k, parts)
    tokens = Tokens(x.data_ptr(), x.stride(0), norm_at, epsilon)
    sizes = x.shape[0], n, k, segment, 0, 0
    return GemmArgs(none, scales, bias_at, c_at, *sizes, *hopper.residual_of(residual)), tokens


@lru_cache(maxsize=1024)
def _kernel(plan: Held, work: Work, shared: int, device: int) -> Any:
    """The function, ready to launch on this device."""
    return load_kernel(plan.source(work), "linear", shared, device)


def linear(
    x: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_block: tuple[int, int],
    rule: str,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    epsilon: float = 0.0,
    residual: Tensor | None = None,
    gates: bool = False,
    *,
    b_settled: bool = False,
    plan: Held | None = None,
    parts: int | None = None,
) -> Tensor:
    """x [M, K] times the transpose of b [N, K] (e4m3 with block scales) + bias: [M, N] in x's dtype, contiguous.

    x is quantized in 1 x 128 blocks, by the scale rule `rule`. norm [K]: x / sqrt(mean(x^2) + epsilon) * norm is.
    residual [M, N]: is added to the rounded result. gates: b is gate and up, [2 N', K], and the result silu(gate) * up,
    [M, N']. b_settled: no kernel that may still run writes b or norm, which may be read before the kernel before this
    one has ended. plan and parts: instead of the rules' (to measure). ValueError for what `unsupported` names.
    """
    reason = unsupported(x, b, b_scale, b_block, bias, norm, residual, gates)
    if reason and (plan is None or "it takes up to" not in reason):
        raise ValueError(f"{reason}; use another backend")
    given = x, b, b_scale, b_block, rule, bias, norm, epsilon, residual, gates
    return prepare(*given, b_settled=b_settled, plan=plan, parts=parts)(x, b, b_scale, bias, norm, residual)


def prepare(
    x: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_block: tuple[int, int],
    rule: str,
    bias: Tensor | None,
    norm: Tensor | None,
    epsilon: float,
    residual: Tensor | None,
    gates: bool,
    *,
    b_settled: bool,
    plan: Held | None = None,
    parts: int | None = None,
) -> Run:
    """`linear` of operands that it takes, as a function of x, b, its scales, bias, norm and residual like these."""
    m, (n, k), normed, read = x.shape[0], b.shape, norm is not None, hopper.aligned(b)
    parts = parts or hopper.parts_of(n, k)
    plan = plan or plan_for(m, n, k, parts, normed, gates, b_settled and read is b)
    assert plan is not None and m <= TOKENS and (norm is None or plan.holds_all(hopper.segment_of(k, parts), m))
    device, shared = x.get_device(), plan.held_bytes(hopper.segment_of(k, parts), m, normed, gates)
    map_b, lies = nvrtc.map_of(read, (plan.columns // (1 + gates), 128, 128)), read is b
    args, tokens = arguments(x, b, b_scale, None, b_block, bias, parts, norm, epsilon, residual)
    values = _Arguments(args=args, tokens=tokens)
    bias_bytes = bias.itemsize if bias is not None else 0
    work = Work(parts, normed, x.dtype, rule, hopper.is_channel(b, b_block), bias_bytes, residual is not None, gates)
    function = _kernel(plan, work, shared, device)
    launch = nvrtc.Launch(function, (plan.grid(m, n, parts),), plan.threads, shared, device, overlap=plan.overlap)
    made: Any = {"size": (m, n // (1 + gates)), "dtype": x.dtype, "device": x.device}

    def run(
        x: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, norm: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        c, b = torch.empty(**made), b if lies else hopper.aligned(b)
        bias = bias if bias is None else bias.contiguous()
        now = _Arguments.from_buffer_copy(values)
        ctypes.memmove(now.b, map_b(b), 128)
        args, tokens = now.args, now.tokens
        args.b.data, args.bias = b_scale.data_ptr(), address(bias)
        args.c, args.residual = c.data_ptr(), address(residual)
        tokens.x, tokens.norm = x.data_ptr(), address(norm)
        launch(now)
        return c

    return run
