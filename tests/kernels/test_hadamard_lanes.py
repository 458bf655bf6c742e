"""Rows of float32 in registers and shared memory: run by the emulator, against the definition in float64."""

import ctypes

import pytest
import torch

from quantrot.kernels.hadamard.hopper import Plan
from quantrot.kernels.hadamard.reference import MAX_RELATIVE_ERROR
from quantrot.orthogonal import random_signs

INF, NAN = float("inf"), float("nan")
RUN = """
static std::string message;
extern "C" const char* run(const void* x, void* y, const signed char* signs, long long rows, long long x_stride,
                           long long y_stride, float scale, unsigned blocks, unsigned seed) {{
  message = emulator::launch({{blocks, 1, 1}}, 1, {threads}, {shared}, seed, [&] {{
    quantrot::{call}({{x, y, signs, rows, x_stride, y_stride, 1, scale, nullptr, 0, 0, 0}});
  }});
  return message.c_str();
}}
"""


@pytest.mark.parametrize(
    ("n", "plan", "signed"),
    [
        (128, Plan("lanes", 2, 1, vectors=2), True),
        (2048, Plan("lanes", 4, 1, vectors=4, share=4), False),  # across lanes by lane exchange
        (4096, Plan("lanes", 4, 1, vectors=8, share=4), True),  # through shared memory
        (8192, Plan("lanes", 8, 1, vectors=8, share=8), False),
        (16384, Plan("lanes", 8, 1, vectors=16, share=8), True),  # each lane takes two floats of every lane
        (32768, Plan("lanes", 16, 1, vectors=16, share=16), False),
    ],
)
def test_the_emulated_kernel_is_the_definition(emulated, n, plan, signed):
    torch.manual_seed(0)
    source = plan.source(n, torch.float32, signed)
    shape = {"threads": 32 * plan.warps, "shared": plan.shared_bytes(n)}
    run = RUN.format(call=plan.call(n, torch.float32, signed, torch.float32), **shape)
    library = emulated('#include "emulator.h"\n' + source[: source.index('extern "C" __global__')] + run)
    library.run.restype = ctypes.c_char_p
    rows, signs = 3, random_signs(n, 1)
    x, y = torch.randn(rows, n + 8), torch.full((rows, n), NAN)
    numbers = [ctypes.c_longlong(v) for v in (rows, n + 8, n)]
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, y, signs)]
    blocks = plan.grid(rows, 1, n, torch.float32, 132)
    for seed in range(2):
        assert library.run(*pointers, *numbers, ctypes.c_float(n**-0.5), blocks, seed) == b""
        x64 = x[:, :n].double() * (signs if signed else 1)
        exact = torch.ops.quantrot.hadamard(x64, None, n, n**-0.5, False, "auto")
        assert ((y.double() - exact).norm() / exact.norm()).item() <= MAX_RELATIVE_ERROR[torch.float32]
