"""Norms and gates between products, of eager mode: the gate emulated and compiled, what is left to torch, a GPU."""

import ctypes

import pytest
import torch
from torch.nn import functional as F

from quantrot.kernels import between
from quantrot.kernels.between import try_gate, try_norm
from quantrot.kernels.fp8.reference import rms_norm

BF16, FP16 = torch.bfloat16, torch.float16
RUN = """
#include <string>
static std::string message;
extern "C" const char* run(const quantrot::GateArgs* args, int x, int threads, int seed) {
  message = emulator::launch({(unsigned)x, 1, 1}, 1, threads, 0, seed, [&] { gate(*args); });
  return message.c_str();
}
"""
gpu = pytest.mark.gpu


def every_number(dtype: torch.dtype, device: str = "cpu"):
    """Each of 16 bits, as rows of gate and up, up in another order."""
    every = torch.arange(1 << 16, device=device).to(torch.int16).view(dtype)
    return torch.cat([every.view(-1, 64), every.roll(12345).view(-1, 64)], 1)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_a_gate_is_two_rounded_operations(emulated, dtype):
    library = emulated(between.gate_source(dtype).replace('extern "C" __global__', "__global__") + RUN)
    library.run.restype = ctypes.c_char_p
    x = every_number(dtype)[:1021]  # the last threads have nothing
    y = torch.full((len(x), 64), float("nan"), dtype=dtype)
    args = between.gate_arguments(x, y)
    message = library.run(ctypes.byref(args), between.gate_grid(y), between.THREADS, 0)
    assert message == b"", message.decode()
    gate, up = x.chunk(2, 1)
    wide = (gate.double() / (1 + (-gate.double()).exp())).nan_to_num(nan=0.0)  # of -inf 0 / inf
    finite = gate.isfinite() & up.isfinite()
    ours, wanted = y[finite].double(), (wide.to(dtype) * up)[finite].double()
    assert torch.isclose(
        ours, wanted, rtol=2 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).tiny, equal_nan=True
    ).all()


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_no_gate_spills(dtype, compiled_cuda):
    made = compiled_cuda(between.gate_source(dtype))
    assert "warning" not in made.log and made.stacks == made.spilled == [0], made.log


def test_what_is_left_to_torch():
    x, weight = torch.randn(1, 3, 256).bfloat16(), torch.ones(256).bfloat16()
    assert between.takes_norm(x, weight, None) and between.takes_norm(x, weight, x.clone())
    assert try_norm(x, weight, 1e-5) is None and try_gate(x) is None  # on a CPU
    strided = torch.randn(1, 3, 512).bfloat16()[..., :256]
    for given in (
        (x[:, :0], weight, None),
        (x, weight[:128], None),
        (x, weight.to("meta"), None),
        (x, weight.half(), None),
        (x.float(), weight.float(), None),
        (strided, weight, None),
        (x, weight, strided),
        (x, weight, x[:, :1]),
        (x, weight, x.half()),
        (x, weight, x.to("meta")),
    ):
        assert not between.takes_norm(*given)
    assert between.takes_gate(x)
    for given in (x.float(), strided, x[:, :0], torch.randn(2, 24).half(), torch.empty(1 << 35, device="meta").half()):
        assert not between.takes_gate(given)


@gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_a_gpus_gates_have_the_bits_of_torch(dtype):
    x = every_number(dtype, "cuda")
    with torch.no_grad():
        for rows in (1024, 1, 77):
            y, (gate, up) = try_gate(x[None, :rows]), x[None, :rows].chunk(2, -1)
            torch.testing.assert_close(y, F.silu(gate) * up, rtol=0, atol=0, equal_nan=True)
    assert try_gate(x) is None  # a gradient may be recorded


@gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("size", [(1, 512, 4096), (2, 65, 2048), (3, 16384), (8192, 576)], ids=str)
def test_a_gpus_norms_are_torchs_but_for_a_few_neighbours(size, dtype):
    torch.manual_seed(0)
    weight = torch.rand(size[-1], device="cuda").to(dtype)
    for _ in range(2):  # launched, and launched again
        x, added = (torch.randn(size, device="cuda").to(dtype) for _ in range(2))
        with torch.no_grad():
            alone, same = try_norm(x, weight, 1e-5)
            assert try_norm(x, weight, 1e-5, added[..., : size[-1] // 2]) is None
            summed, total = try_norm(x, weight, 1e-5, added)
        assert same is x and torch.equal(total, x + added)
        for y, wanted in ((alone, rms_norm(x, weight, 1e-5)), (summed, rms_norm(x + added, weight, 1e-5))):
            assert y.shape == x.shape and (y != wanted).double().mean() <= 1e-3
            assert torch.isclose(y.double(), wanted.double(), rtol=2 * torch.finfo(dtype).eps, atol=1e-6).all()
    assert try_norm(x, weight, 1e-5) is None  # a gradient may be recorded


@gpu
def test_long_prompts_in_any_order_of_launches():
    """Each kernel may start while the one before it ends."""
    torch.manual_seed(0)
    x, weight = torch.randn(20000, 4096, device="cuda").bfloat16(), torch.rand(2048, device="cuda").bfloat16()
    with torch.no_grad():
        for _ in range(10):
            y, _ = try_norm(try_gate(x), weight, 1e-5)
            wanted = rms_norm(F.silu(x[:, :2048]) * x[:, 2048:], weight, 1e-5)
            assert (y != wanted).double().mean() <= 1e-3


SANITIZED = """
from torch.nn.functional import silu
from quantrot.kernels.between import try_gate, try_norm
from quantrot.kernels.fp8.reference import rms_norm
torch.set_grad_enabled(False)
for rows, columns in ((1, 8), (1021, 64), (3, 1000), (33, 4104)):
    x, added = (torch.randn(rows, columns).bfloat16() for _ in range(2))
    weight, both = torch.rand(columns).bfloat16(), torch.randn(rows, 2 * columns).bfloat16()
    gate, up = both.chunk(2, 1)
    y, total = (t.cpu() for t in try_norm(x.cuda(), weight.cuda(), 1e-5, added.cuda()))
    alone, _ = try_norm(x.cuda(), weight.cuda(), 1e-5)
    pairs = [(total, x + added), (y, rms_norm(x + added, weight, 1e-5)), (alone.cpu(), rms_norm(x, weight, 1e-5))]
    for got, wanted in (*pairs, (try_gate(both.cuda()).cpu(), silu(gate) * up)):
        torch.testing.assert_close(got, wanted, rtol=2**-7, atol=1e-6)
"""


@gpu
def test_compute_sanitizer_finds_nothing(sanitized):
    sanitized(SANITIZED)
