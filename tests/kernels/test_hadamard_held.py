"""The Hadamard transform of rows in registers (`held`, `lanes`): by the emulator, against the definition in float64."""

import ctypes

import pytest
import torch

from quantrot.kernels.hadamard.hopper import Plan, launch, plan_for
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


def held(columns: int, warps: int, resident: int = 1, precision: str = "PAIR", **options: int) -> Plan:
    return Plan("held", warps, resident, tiles=columns // 8, precision=precision, **options)


@pytest.mark.parametrize(
    ("n", "plan", "dtype", "signed", "transposed"),
    [
        (36 * 16, held(16, 2), torch.bfloat16, True, False),  # four rows a warp, a last step of one vector
        (24 * 64, held(64, 2, precision="SPLIT"), torch.float16, False, False),
        (76 * 64, held(64, 1), torch.bfloat16, True, True),  # two words of signs
        (20 * 256, held(256, 4), torch.float16, True, False),
        (108 * 128, held(128, 2, precision="CUT"), torch.bfloat16, False, True),  # an asymmetric base
        (56 * 512, held(512, 8), torch.bfloat16, True, False),
        (64 * 256, held(256, 4), torch.float16, False, False),
        (52 * 1024, held(1024, 16, precision="CUT"), torch.bfloat16, False, False),
        (128, Plan("lanes", 2, 1, vectors=2), torch.float32, True, False),
        (1024, Plan("lanes", 2, 1, vectors=4, share=2), torch.float32, True, False),  # a lane ends with two vectors
        (2048, Plan("lanes", 4, 1, vectors=4, share=4), torch.float32, False, False),  # across lanes by lane exchange
        (4096, Plan("lanes", 4, 1, vectors=8, share=4), torch.float32, True, False),  # through shared memory
        (8192, Plan("lanes", 8, 1, vectors=8, share=8), torch.float32, False, False),
        (
            16384,
            Plan("lanes", 8, 1, vectors=16, share=8, later=2),
            torch.float32,
            True,
            False,
        ),  # two floats of every lane
        (32768, Plan("lanes", 16, 1, vectors=16, share=16), torch.float32, False, False),
    ],
)
def test_the_emulated_kernel_is_the_definition(emulated, n, plan, dtype, signed, transposed):
    torch.manual_seed(0)
    source = plan.source(n, dtype, signed, transposed)
    shape = {"threads": 32 * plan.warps, "shared": plan.shared_bytes(n)}
    run = RUN.format(call=plan.call(n, dtype, signed, dtype), **shape)
    library = emulated('#include "emulator.h"\n' + source[: source.index('extern "C" __global__')] + run)
    library.run.restype = ctypes.c_char_p
    rows, signs = 11 if n < 5000 else 3, random_signs(n, 1)
    x, y = torch.randn(rows, n + 8).to(dtype), torch.full((rows, n), NAN, dtype=dtype)
    numbers = [ctypes.c_longlong(v) for v in (rows, n + 8, n)]
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, y, signs)]
    blocks = plan.grid(rows, 1, n, dtype, 132)
    short = n < 20000  # an emulated launch of the longest rows takes seconds
    for seed in range(2 if short else 1):
        assert library.run(*pointers, *numbers, ctypes.c_float(n**-0.5), blocks, seed) == b""
        x64 = x[:, :n].double() * (signs if signed else 1)
        exact = torch.ops.quantrot.hadamard(x64, None, n, n**-0.5, transposed, "auto")
        assert ((y.double() - exact).norm() / exact.norm()).item() <= MAX_RELATIVE_ERROR[dtype]
    clean = y.clone()
    for value in (INF, -INF, NAN) if short else (-INF,):
        x[1, n // 3] = value
        assert library.run(*pointers, *numbers, ctypes.c_float(n**-0.5), blocks, 0) == b""
        special = x[1:2, :n].float() * (signs if signed else 1)
        sums = torch.ops.quantrot.hadamard(special, None, n, 1.0, transposed, "auto")
        assert torch.equal(y[[0, 2]], clean[[0, 2]])
        assert torch.equal(y[1:2].isnan(), sums.isnan()) and torch.equal(y[1:2].isinf(), sums.isinf())
        assert value != value or torch.equal(y[1:2].sign(), sums.sign().to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("n", "plan"),
    [
        (576, held(16, 2, 8, overlap=True, ahead=8)),
        (1536, held(64, 1, 20, overlap=True, ahead=20)),
        (4864, held(64, 1, 12, overlap=True)),
        (5120, held(128, 2, 8, overlap=True, ahead=8)),
        (12288, held(256, 4, 4, overlap=True, ahead=4)),
        (14336, held(512, 8, 2)),
        (14336, held(512, 8, 2, overlap=True, ahead=2)),
        (16384, held(512, 8, 2, overlap=True, ahead=2)),
        (17408, held(256, 4, 3, overlap=True, ahead=3)),
    ],
)
def test_on_a_gpu_every_run_gives_the_same_right_bits(n, plan, transposed):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    torch.manual_seed(0)
    for rows in (1, 3, 63, 601):
        x = torch.randn(rows, n + 8, device="cuda").half()[:, :n]
        signs = random_signs(n, 1).to("cuda")
        y = torch.full((rows, n), NAN, dtype=x.dtype, device="cuda")
        launch(x, y, signs, n**-0.5, plan, transpose=transposed)
        turned = torch.ops.quantrot.hadamard(x.double() * signs, None, n, n**-0.5, transposed, "reference")
        assert ((y.double() - turned).norm() / turned.norm()).item() <= MAX_RELATIVE_ERROR[x.dtype]
        again = x.clone()
        for _ in range(100 if rows == 601 else 1):
            launch(again.copy_(x), again, signs, n**-0.5, plan, transpose=transposed)
            assert torch.equal(again, y)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "dtype"),
    [
        *((n, torch.bfloat16) for n in (576, 2048, 5120, 17408, 16384)),
        *((n, torch.float32) for n in (1024, 8192, 32768)),
    ],
    ids=str,
)
def test_on_a_gpu_rows_asked_for_early_are_those_that_the_kernel_before_writes(n, dtype):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    plan = plan_for(n, dtype)
    assert plan is not None and (plan.ahead or plan.later) and plan.overlap
    x = torch.randn((8 << 20) // n, n, device="cuda").to(dtype)
    y, z = torch.empty_like(x), torch.empty_like(x)

    def run(wait: bool) -> torch.Tensor:
        y.zero_()
        launch(x, y, None, n**-0.5, plan)
        if wait:
            torch.cuda.synchronize()
        launch(y, z, None, n**-0.5, plan)
        y.zero_()  # not before it is read
        return z.clone()

    expected = run(True)
    for _ in range(20):
        assert torch.equal(run(False), expected)
