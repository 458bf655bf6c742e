"""The Hadamard transform as one asynchronous product: run by the emulator, against the definition in float64."""

import ctypes

import pytest
import torch

from quantrot.kernels.hadamard.hopper import Plan, launch
from quantrot.kernels.hadamard.reference import MAX_RELATIVE_ERROR
from quantrot.orthogonal import random_signs

RUN = """
static std::string message;
extern "C" const char* run(const void* x, void* y, const signed char* signs, long long rows, long long x_stride,
                           long long y_stride, float scale, unsigned blocks, unsigned seed) {{
  message = emulator::launch({{blocks, 1, 1}}, 1, 128, {shared}, seed, [&] {{
    quantrot::{call}({{x, y, signs, rows, x_stride, y_stride, 1, scale}});
  }});
  return message.c_str();
}}
"""


@pytest.mark.parametrize(
    ("n", "columns", "side", "dtype", "signed", "transposed"),
    [
        (48 * 64, 64, 2, torch.bfloat16, True, False),  # 12 x 4 x 64: rows of zeros, two rows of x in a product
        (108 * 64, 64, 1, torch.float16, False, True),  # two tiles of 64, the second part empty; an asymmetric base
        (56 * 256, 256, 1, torch.bfloat16, True, True),
    ],
)
def test_the_emulated_kernel_is_the_definition(emulated, n, columns, side, dtype, signed, transposed):
    torch.manual_seed(0)
    plan = Plan("wgmma", 4, 2, tiles=columns // 8, share=side)
    source = plan.source(n, dtype, signed, transposed)
    call = plan.call(n, dtype, signed, dtype)
    library = emulated(
        source[: source.index('extern "C" __global__')] + RUN.format(shared=plan.shared_bytes(n), call=call)
    )
    library.run.restype = ctypes.c_char_p
    rows, signs = side + 1, random_signs(n, 1)
    x, y = torch.randn(rows, n + 8).to(dtype), torch.full((rows, n), float("nan"), dtype=dtype)
    numbers = [ctypes.c_longlong(v) for v in (rows, n + 8, n)]
    scale, blocks = ctypes.c_float(n**-0.5), -(-rows // side)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, y, signs)]
    for seed in range(2):
        assert library.run(*pointers, *numbers, scale, blocks, seed) == b""
        x64 = x[:, :n].double() * (signs if signed else 1)
        exact = torch.ops.quantrot.hadamard(x64, None, n, n**-0.5, transposed, "auto")
        assert ((y.double() - exact).norm() / exact.norm()).item() <= MAX_RELATIVE_ERROR[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("n", "columns", "side"),
    [(3072, 64, 4), (5120, 128, 1), (11008, 64, 2), (14336, 256, 1), (16384, 128, 1), (18944, 128, 1), (53248, 256, 1)],
)
def test_on_a_gpu_every_run_gives_the_same_right_bits(n, columns, side, dtype):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    torch.manual_seed(0)
    plan = Plan("wgmma", 4, 2, tiles=columns // 8, share=side)
    for rows in (1, 3, 63, 257):
        x = torch.randn(rows, n + 64, device="cuda").to(dtype)[:, :n]
        signs = random_signs(n, 1).to("cuda")
        y = torch.full((rows, n), float("nan"), dtype=dtype, device="cuda")
        launch(x, y, signs, n**-0.5, plan)
        exact = torch.ops.quantrot.hadamard(x.double(), signs, n, n**-0.5, False, "reference")
        assert ((y.double() - exact).norm() / exact.norm()).item() <= MAX_RELATIVE_ERROR[dtype]
        again = x.clone()
        for _ in range(100 if rows == 257 else 1):
            launch(again.copy_(x), again, signs, n**-0.5, plan)
            assert torch.equal(again, y)
