"""RMSNorm, in front of a few tokens' mixed product or by itself: emulated, compiled for sm_90a, on a GPU."""

import ctypes

import pytest
import torch

from quantrot.kernels.fp8.reference import rms_norm
from quantrot.kernels.mixed import norm
from tests.kernels.test_mixed import relative

BF16, FP16 = torch.bfloat16, torch.float16
CASES = [(vectors, dtype) for vectors in (1, 2, norm.VECTORS) for dtype in (BF16, FP16)]
DRIVER = """
static std::string message;
extern "C" const char* run(int which, const quantrot::NormArgs* args, int blocks, int threads, int shared, int seed) {
  static void (*const kernels[])(quantrot::NormArgs) = {NAMES};
  message = emulator::launch({(unsigned)blocks, 1, 1}, 1, threads, shared, seed, [&] { kernels[which](*args); });
  return message.c_str();
}
"""


def source() -> str:
    functions, _ = norm.source(1, BF16).split('extern "C"')
    entries = (norm.source(*case).removeprefix(functions) for case in CASES)
    return functions + "".join(e.replace(" normed(", f" normed{i}(") for i, e in enumerate(entries))


@pytest.fixture(scope="module")
def emulator(emulated):
    """norm.normed on the host."""
    names = ", ".join(f"normed{i}" for i in range(len(CASES)))
    library = emulated(source() + DRIVER.replace("NAMES", names))
    library.run.restype = ctypes.c_char_p

    def run(x, weight, epsilon, seed=0, added=None):
        y, total = (torch.full(x.shape, float("nan"), dtype=x.dtype) for _ in range(2))
        args, launch = norm.arguments(x, weight, epsilon, y, seed == 1), (len(x), 32 * norm.WARPS, 4 * norm.WARPS)
        if added is not None:
            args.added, args.total = added.data_ptr(), total.data_ptr()
        which = CASES.index((norm.vectors(x.shape[-1]), x.dtype))
        message = library.run(which, ctypes.byref(args), *launch, seed)
        assert message == b"", message.decode()
        return y if added is None else (y, total)

    return run


def operands(m: int, k: int, dtype: torch.dtype, device: str = "cpu"):
    """x, in columns of a wider matrix, with small and large tokens, and the norm's weight."""
    x = (torch.randn(m, k + 8, device=device) * torch.logspace(-3, 3, m, device=device)[:, None]).to(dtype)[:, :k]
    return x, (torch.rand(k, device=device) + 0.5).to(dtype)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("k", [16, 1000, 2048, 4096, 16384])
def test_tokens_meet_float64_and_are_the_same_alone(emulator, k, dtype):
    torch.manual_seed(k)
    x, weight = operands(3, k, dtype)
    assert norm.supports(x, weight)
    y = emulator(x, weight, 1e-5)
    wide = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    assert relative(y, wide * weight.double()) <= 2 * torch.finfo(dtype).eps  # two roundings
    assert all(torch.equal(emulator(x, weight, 1e-5, seed), y) for seed in (1, 2))
    assert torch.equal(torch.cat([emulator(row[None], weight, 1e-5) for row in x]), y)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("k", [16, 1000, 4096])
def test_a_sum_is_torchs_and_is_normed_as_it_would_be_alone(emulator, k, dtype):
    torch.manual_seed(k)
    x, weight = operands(3, k, dtype)
    x, added = x.contiguous(), operands(3, k, dtype)[0].flip(0).contiguous()
    y, total = emulator(x, weight, 1e-5, added=added)
    assert torch.equal(total, x + added) and torch.equal(y, emulator(x + added, weight, 1e-5))


def test_a_token_of_each_sequence_may_have_any_stride(emulator):
    torch.manual_seed(0)
    weight, x = torch.rand(256).bfloat16(), torch.randn(1, 4, 256).bfloat16().transpose(0, 1)
    assert x.is_contiguous() and x.stride(1) == 1024
    assert torch.equal(emulator(x, weight, 1e-5), emulator(x[:, 0], weight, 1e-5)[:, None])


def test_what_is_not_taken():
    x, weight = operands(2, 1024, BF16)
    assert not norm.supports(x, weight.half()) and not norm.supports(x.float(), weight.float())
    assert not norm.supports(x[:, :1020], weight[:1020])
    assert not norm.supports(x, torch.stack([weight, weight], 1)[:, 0])
    assert not norm.supports(*operands(1, norm.MOST_COLUMNS + 8, BF16))


def test_no_kernel_spills(compiled_cuda):
    made = compiled_cuda(source())
    assert "warning" not in made.log and made.stacks == made.spilled == [0] * len(CASES), made.log


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("k", [512, 4096, 8192, 16384])
def test_a_gpu_has_the_bits_of_torch_but_for_a_few_neighbours(k, dtype):
    torch.manual_seed(k)
    x, weight = operands(16, k, dtype, "cuda")
    y, wanted = norm.normed(x, weight, 1e-5, True), rms_norm(x, weight, 1e-5)
    assert (y != wanted).double().mean() <= 1e-3
    assert torch.isclose(y.double(), wanted.double(), rtol=2 * torch.finfo(dtype).eps, atol=1e-6).all()
    assert all(torch.equal(norm.normed(x[i : i + 1], weight, 1e-5), y[i : i + 1]) for i in range(16))
