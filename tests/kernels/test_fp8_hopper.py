"""The laws of the block-scaled FP8 product for Hopper: emulated on the host, compiled for sm_90a, run on a GPU."""

import ctypes
import shutil
import subprocess

import pytest
import torch

from quantrot.kernels.fp8 import dequantize_fp8_block
from quantrot.kernels.fp8 import hopper
from quantrot.kernels.fp8.hopper import Decode, Prefill

gpu = pytest.mark.gpu
BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn

# plan, parts, output, bytes of a bias element; every branch of the source, in shared memory that two fit in
CASES = {
    "prefill": (Prefill(stages=3), 1, BF16, 0),
    "prefill_alone": (Prefill(slabs=1, stages=4, cluster=1, ordered=False), 1, FP16, 2),
    "prefill_parts": (Prefill(slabs=1, stages=2), 2, BF16, 4),
    "prefill_sets": (Prefill(slabs=1, sets=2, stages=3), 1, BF16, 0),
    "prefill_three": (Prefill(groups=3, slabs=1, stages=2, cluster=1), 1, BF16, 0),
    "decode8": (Decode(8, stages=4), 1, BF16, 4),
    "decode16_parts": (Decode(16, stages=3), 2, FP16, 0),
    "decode32_share": (Decode(32, stages=3, share=2), 1, BF16, 2),
    "decode64_both": (Decode(64, stages=2, share=2), 2, BF16, 0),
    "decode64_two": (Decode(64, groups=2, stages=2, resident=1), 1, BF16, 0),
}
DRIVER = """
static std::string message;

// Matrices as {data, rows, columns, pitch in bytes, rows of a box, columns of a box, bytes of an element}.
static quantrot::TensorMap map(const unsigned long long* m) {
  return {(unsigned char*)m[0], m[2], m[1], m[3], (unsigned)m[5], (unsigned)m[4], (unsigned)m[6], 1};
}

extern "C" const char* run(int which, const unsigned long long (*m)[7], const quantrot::GemmArgs* args, int blocks,
                           int cluster, int threads, int shared, int seed) {
  using Kernel = void(quantrot::TensorMap, quantrot::TensorMap, quantrot::TensorMap, quantrot::GemmArgs);
  static Kernel* const kernels[] = {NAMES};
  const auto a = map(m[0]), b = map(m[1]), c = map(m[2]);
  message = emulator::launch({(unsigned)blocks, 1, 1}, cluster, threads, shared, seed,
                             [&] { kernels[which](a, b, c, *args); });
  return message.c_str();
}
"""


@pytest.fixture(scope="module")
def emulator(emulated):
    """Every case's kernel on the host: emulator(case, a, a_scale, b, b_scale, blocks..., bias, seed) -> c."""
    entries = "".join(hopper.entry(*case, name=f"gemm_{name}") for name, case in CASES.items())
    names = ", ".join(f"gemm_{name}" for name in CASES)
    library = emulated(hopper.device_functions() + entries + DRIVER.replace("NAMES", names))
    library.run.restype = ctypes.c_char_p

    def run(name, a, a_scale, b, b_scale, a_block=(1, 128), b_block=(128, 128), bias=None, seed=0, processors=4):
        plan, parts, out, _ = CASES[name]
        (m, k), n = a.shape, b.shape[0]
        assert hopper.supports(a, a_scale, b, b_scale, a_block, b_block, out, bias)
        c = torch.full((m, n), float("nan"), dtype=out)
        args = hopper.arguments(a, a_scale, b, b_scale, c, a_block, b_block, bias, plan, parts)
        maps = (ctypes.c_ulonglong * 21)()
        for i, (x, box) in enumerate(zip((a, b, c), plan.boxes(), strict=False)):
            maps[7 * i : 7 * i + 7] = (x.data_ptr(), *x.shape, x.stride(0) * x.itemsize, *box, x.itemsize)
        prefill = isinstance(plan, Prefill)
        blocks = plan.grid(m, n, processors if prefill else parts)
        cluster = plan.cluster if prefill else plan.share * parts
        shared = plan.shared_bytes(hopper.segment_of(k, parts))
        message = library.run(
            list(CASES).index(name), maps, ctypes.byref(args), blocks, cluster, plan.threads, shared, seed
        )
        assert message == b"", message.decode()
        return c

    return run


def integers(m: int, n: int, k: int, a_block=(1, 128), b_block=(128, 128)):
    """Operands whose result is exact in float32: small integers, scales that are powers of two."""

    def one(rows, block):
        codes = torch.randint(-4, 5, (rows, k)).float().to(E4M3)
        scale = torch.randint(-2, 2, hopper._grid_of(codes.shape, block)).float().exp2()
        return codes, scale

    return *one(m, a_block), *one(n, b_block)


def exact(a, a_scale, b, b_scale, a_block=(1, 128), b_block=(128, 128), bias=None) -> torch.Tensor:
    """The product in float64."""
    left = dequantize_fp8_block(a, a_scale, a_block, torch.float64)
    right = dequantize_fp8_block(b, b_scale, b_block, torch.float64)
    return left @ right.T + (0 if bias is None else bias.double())


def bias_of(name: str, n: int) -> torch.Tensor | None:
    _, _, out, size = CASES[name]
    return torch.randint(-8, 9, (n,)).to(torch.float32 if size == 4 else out) if size else None


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 128, 512), (63, 264, 272), (257, 384, 640)])
def test_every_kernel_is_exact_on_integers(emulator, name, m, n, k):
    if name.startswith("decode") and m == 257:
        m = 65
    torch.manual_seed(m)
    operands, bias = integers(m, n, k), bias_of(name, n)
    c = emulator(name, *operands, bias=bias, seed=m)
    assert torch.equal(c.double(), exact(*operands, bias=bias).to(c.dtype).double())
