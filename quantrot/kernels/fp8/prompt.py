"""Many tokens times an FP8 weight in one kernel for Hopper, which quantizes the tokens itself: CUDA C++ (prompt.cuh,
and prefill.cuh, whose order of operations this is), compiled at first use.

    linear    x [M, K] bfloat16 -> quantized in 1 x 128 blocks, times the transpose of b [N, K], + bias: [M, N]
    supports  whether it takes these operands, and has been found faster than two kernels for them

Bits are those of quantize_fp8_block and fp8_block_gemm one after the other. Some of each thread block's warps quantize
while the others multiply, in the order in which the products need the tokens.
"""

import ctypes
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.fp8 import blocks, hopper
from quantrot.kernels.fp8.hopper import E4M3, GemmArgs, Prefill
from quantrot.kernels.nvrtc import load_kernel, processors

PLAN = replace(hopper.PAIRED, tile_group=4)  # fewer rows at once: the first products wait for fewer codes
CHUNK, PIECE, QUANTIZERS = 8, 2048, 3  # as in prompt.cuh: blocks of K of a patch; bytes; warps
FEWEST, LEAST = 2048, 1 << 24  # tokens, and elements of x, from which one kernel has been found faster than two
ROWS = range(4096, 6144 + 1)  # of b: with 2560 the products wait for codes (78 us for 70), with 8192 two are as fast
COUNTERS = nvrtc.Counters(1 << 20, 1 << 12)
ENTRY = """extern "C" __global__ void {cluster}__launch_bounds__({threads}, 1) {name}(
    const __grid_constant__ quantrot::TensorMap a, const __grid_constant__ quantrot::TensorMap b,
    const __grid_constant__ quantrot::TensorMap c, const __grid_constant__ quantrot::GemmArgs args,
    const __grid_constant__ quantrot::BlockArgs tokens, int first) {{
  quantrot::{call}(&a, &b, &c, args, tokens, counters + first);
}}
"""


@lru_cache(maxsize=4)
def device_functions(rule: str) -> str:
    """The C++ that every kernel starts with."""
    shared = nvrtc.sources("hopper", "products", "hadamard/words", "gate")
    text = shared + nvrtc.sources("rms", "fp8/blocks", "fp8/gemm", "fp8/prefill", "fp8/prompt")
    rule_number = blocks.SCALE_RULES.index(rule) + 1
    return f"#define SCALE_RULE {rule_number}\n{blocks.CACHE_HINTS}{COUNTERS.declaration}{text}"


def entry(plan: Prefill, channel: bool, bias: int, name: str = "prompt") -> str:
    """C++ of the kernel `name`. channel: b has a scale a row; bias: the bytes of an element of it, 0 for none."""
    early, by_row = (str(flag).lower() for flag in (plan.early, channel))
    call = f"prompt<{plan.stages}, {plan.cluster}, {plan.lag}, {early}, {by_row}, quantrot::Bf16, {bias}>"
    return ENTRY.format(cluster=hopper.cluster_of(plan.cluster), threads=plan.threads, name=name, call=call)


def shared_bytes(plan: Prefill) -> int:
    """With two boxes of results a warp, for the product's three, and two pieces of tokens for each that quantizes."""
    return plan.shared_bytes(0) - (8 << 10) + 2 * QUANTIZERS * PIECE


def counts_of(m: int, k: int) -> int:
    """Counters of a launch."""
    return 2 + -(-m // 128) * -(-k // (128 * CHUNK))


# --- What can be run -------------------------------------------------------------------------------------------------


def unsupported(x: Tensor, b: Tensor, b_scale: Tensor, b_block: tuple[int, int], bias: Tensor | None) -> str | None:
    """Why `linear` does not take these operands (whatever the device), or None."""
    (m, k), n = x.shape, b.shape[0]
    if x.dtype != torch.bfloat16 or b.dtype != E4M3:
        return f"x is {x.dtype}, b is {b.dtype}; x must be bfloat16, b {E4M3}"
    if b.shape[1] != k or k < 256 or k % 128 or n == 0 or n % 8 or max(m, n, k) >= 1 << 30:
        return f"x is {list(x.shape)}, b is {list(b.shape)}; K must be a multiple of 128 from 256 on, N of 8"
    if m < 128 or hopper.parts_of(n, k) > 1:
        return f"x is {list(x.shape)}, b is {list(b.shape)}; it takes 128 tokens or more, and no K in parts"
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        return "x's columns are not contiguous, or its rows not aligned to 16 bytes"
    return hopper.unsupported_scale("b", b, b_scale, b_block) or hopper.unsupported_bias(n, x.dtype, bias)


def supports(x: Tensor, b: Tensor, b_scale: Tensor, b_block: tuple[int, int], bias: Tensor | None) -> bool:
    """Whether `linear` takes this product, and is the better choice: operands, device and installation."""
    (m, k), n = x.shape, b.shape[0]
    if not pays(m, n, k) or x.device.type != "cuda" or not nvrtc.available(x.device):
        return False
    if unsupported(x, b, b_scale, b_block, bias) is not None:
        return False
    return COUNTERS.first(x.get_device(), counts_of(m, k), peek=True) is not None


def pays(m: int, n: int, k: int) -> bool:
    """Whether one kernel has been found faster than two for these sizes, by rule."""
    if m < FEWEST or m * k < LEAST or n not in ROWS:
        return False
    plan = hopper.plan_for(m, n, k, hopper.parts_of(n, k))
    return isinstance(plan, Prefill) and plan.wide


# --- Launch ----------------------------------------------------------------------------------------------------------


class _Arguments(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ubyte * 128) for name in "abc"] + [
        ("args", GemmArgs),
        ("tokens", blocks.Arguments),
        ("first", ctypes.c_int),
    ]


def token_arguments(x: Tensor, q: Tensor, scale: Tensor) -> blocks.Arguments:
    return blocks.Arguments(x.data_ptr(), q.data_ptr(), scale.data_ptr(), x.stride(0), *scale.stride(), *x.shape)


@lru_cache(maxsize=256)
def _kernel(plan: Prefill, channel: bool, rule: str, bias: int, device: int) -> Any:
    """The function, ready to launch on this device."""
    return load_kernel(device_functions(rule) + entry(plan, channel, bias), "prompt", shared_bytes(plan), device)


def linear(
    x: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_block: tuple[int, int],
    rule: str,
    bias: Tensor | None = None,
    *,
    b_settled: bool = False,
) -> Tensor:
    """x [M, K] times the transpose of b [N, K] (e4m3 with block scales) + bias: [M, N] in bfloat16, contiguous.

    x is quantized in 1 x 128 blocks, by the scale rule `rule`. b_settled: no kernel that may still run writes b, which
    may be read before the kernel before this one has ended. ValueError for what `unsupported` names.
    """
    reason = unsupported(x, b, b_scale, b_block, bias)
    if reason:
        raise ValueError(f"{reason}; use another backend")
    (m, k), n, device = x.shape, b.shape[0], x.get_device()
    c = torch.empty((m, n), dtype=x.dtype, device=x.device)
    q = torch.empty((m, k), dtype=E4M3, device=x.device)
    scale = torch.empty((k // 128, m), dtype=torch.float32, device=x.device).T
    given, b, bias = b, hopper.aligned(b), hopper.aligned_bias(bias)
    plan = replace(PLAN, early=b_settled and b is given)
    first = COUNTERS.first(device, counts_of(m, k))
    assert first is not None, "see supports"
    args = hopper.arguments(q, scale, b, b_scale, c, (1, 128), b_block, bias, plan, 1)
    values = _Arguments(args=args, tokens=token_arguments(x, q, scale), first=first)
    for field, each, box in zip("abc", (q, b, c), plan.boxes(m), strict=True):
        rows, columns = each.shape
        of = nvrtc.tensor_map(each.data_ptr(), rows, columns, each.stride(0) * each.itemsize, box, each.dtype)
        ctypes.memmove(getattr(values, field), of, 128)
    bias_bytes = bias.itemsize if bias is not None else 0
    function = _kernel(plan, hopper.is_channel(b, b_block), rule, bias_bytes, device)
    grid = plan.grid(m, n, processors(device))
    nvrtc.launch(function, (grid,), plan.threads, shared_bytes(plan), values, device, overlap=plan.overlap)
    return c
