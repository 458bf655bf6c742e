"""Hadamard rows as codes, a warp's pieces through its own ring: run by the emulator, against the float32 definition."""

import ctypes

import pytest
import torch

from quantrot.kernels import nvrtc
from quantrot.kernels.fp8.reference import hadamard_quantize_reference
from quantrot.kernels.hadamard.codes import plan_for_codes
from quantrot.kernels.hadamard.hopper import Plan, launch
from quantrot.orthogonal import random_signs

INF, NAN = float("inf"), float("nan")
RUN = """
static std::string message;
extern "C" const char* run(const quantrot::Args* args, unsigned blocks, unsigned seed) {{
  message = emulator::launch({{blocks, 1, 1}}, 1, {threads}, {shared}, seed, [&] {{ quantrot::{call}(*args); }});
  return message.c_str();
}}
"""


class Args(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("signs", ctypes.c_void_p),
        *((name, ctypes.c_longlong) for name in ("rows", "x_stride", "y_stride")),
        ("sign_rows", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("scales", ctypes.c_void_p),
        ("scale_row", ctypes.c_longlong),
        ("scale_group", ctypes.c_longlong),
        ("in_row", ctypes.c_uint),
    ]


@pytest.mark.parametrize(
    ("n", "rows", "across", "plan", "dtype", "rule", "signed"),
    [
        (32, 79, 1, Plan("stream", 2, 1, vectors=2, stages=2), torch.bfloat16, "exact", True),
        (64, 36, 1, Plan("stream", 1, 1, vectors=4, stages=3), torch.bfloat16, "bf16", False),
        (128, 45, 1, Plan("stream", 2, 1, vectors=4, stages=3), torch.bfloat16, "exact", True),
        (128, 140, 5, Plan("stream", 1, 1, vectors=2, stages=2), torch.bfloat16, "exact", False),
        (256, 29, 1, Plan("stream", 2, 1, vectors=2, stages=2), torch.float16, "pow2", False),
        (512, 87, 3, Plan("stream", 1, 1, vectors=4, stages=2), torch.bfloat16, "exact", False),
        (1024, 41, 1, Plan("stream", 1, 1, vectors=8, stages=3), torch.bfloat16, "exact", True),
        (4096, 5, 1, Plan("stream", 1, 1, vectors=16, stages=2), torch.bfloat16, "exact", False),
    ],
)
def test_emulated_codes_are_those_of_the_float32_transform(emulated, n, rows, across, plan, dtype, rule, signed):
    torch.manual_seed(n)
    source = plan.source(n, dtype, signed, rule=rule)
    shape = {"threads": 32 * plan.warps, "shared": plan.shared_bytes(n)}
    run = RUN.format(call=plan.call(n, dtype, signed, dtype), **shape)
    library = emulated('#include "emulator.h"\n' + source[: source.index('extern "C" __global__')] + run)
    library.run.restype = ctypes.c_char_p
    x = torch.randn(rows, n).to(dtype)
    x[1], x[2, 7], x[3, 9] = 0, INF, NAN
    if rows * n % 128:
        x = x[: rows // (128 // n) * (128 // n)].contiguous()
    width = max(n, 128) * across  # of a row of x, of which the kernel sees rows of n
    rows, groups = x.shape[0], width // 128
    apart = torch.full((rows, n + 8), NAN, dtype=dtype)
    apart[:, :n] = x
    signs = random_signs(n, 1)
    q, scales = (
        torch.full((rows * n // width, width), 0.5).to(torch.float8_e4m3fn),
        torch.zeros(groups, rows * n // width).T,
    )
    if across == 3:  # scales in rows
        scales = scales.contiguous()
    args = Args(
        apart.data_ptr(), q.data_ptr(), signs.data_ptr(), rows, n + 8, n, 1, n**-0.5, scales.data_ptr(),
        *scales.stride(), groups,
    )  # fmt: skip
    expected, expected_scales = hadamard_quantize_reference(
        x.view(-1, width), signs if signed else None, n, n**-0.5, (1, 128), rule
    )
    for blocks in (plan.grid(rows, 1, n, dtype, 2), plan.grid(rows, 1, n, dtype, 1)):
        assert library.run(ctypes.byref(args), blocks, blocks) == b""
        torch.testing.assert_close(scales, expected_scales, rtol=1e-5, atol=0, equal_nan=True)
        wrong = q.view(torch.uint8) != expected.view(torch.uint8)
        special = ~(expected_scales.isfinite().all(1)) & (n >= 128 and across == 1)
        assert wrong.float().mean() < 1e-3 and not wrong[special].any()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "signed", "dtype"),
    [(n, n in (32, 256), torch.float16 if n == 2048 else torch.bfloat16) for n in (32, 128, 256, 2048)],
)
def test_gpu_codes_where_a_warp_has_more_pieces_than_buffers(n, signed, dtype):
    if not (torch.cuda.is_available() and nvrtc.available(torch.device("cuda"))):
        pytest.skip("needs sm_90 and cuda.core")
    plan = plan_for_codes(n, max(n, 128), dtype)
    assert plan.kind == "stream"
    torch.manual_seed(n)
    width = max(n, 128)
    x = torch.randn(7 * 132 * plan.resident * plan.warps * plan.vectors * 256 // width + 3, width, device="cuda").to(
        dtype
    )
    x[1], x[-2, 7], x[-3, 9] = 0, INF, NAN
    signs = random_signs(n, 1).cuda() if signed else None
    expected, expected_scales = hadamard_quantize_reference(x, signs, n, n**-0.5, (1, 128), "exact")
    for _ in range(5):
        q, scales = torch.full_like(expected, 0.5), torch.zeros_like(expected_scales)
        launch(x.view(-1, n), q.view(-1, n), signs, n**-0.5, plan, scales=scales, rule="exact")
        torch.testing.assert_close(scales, expected_scales, rtol=1e-5, atol=0, equal_nan=True)
        wrong = q.view(torch.uint8) != expected.view(torch.uint8)
        assert wrong.float().mean() < 1e-3 and not (n >= 128 and wrong[[1, -2, -3]].any())
