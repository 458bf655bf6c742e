"""The CUDA kernel that multiplies a few tokens by a packed MXFP4 weight: emulated on the host, compiled, on a GPU."""

import ctypes
import shutil
import subprocess

import pytest
import torch

from quantrot.kernels.mxfp4 import dequantize_mxfp4, hopper, quantize_mxfp4
from quantrot.kernels.mxfp4.hopper import Plan

gpu = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# plan, tiles of eight tokens, output
CASES = {
    "one": (Plan(1, 8, 4, 1, 1), 1, BF16),
    "one_deep": (Plan(2, 2, 3, 1, 1), 1, FP16),
    "two": (Plan(2, 4, 2, 1, 2), 2, FP32),
    "four": (Plan(4, 2, 2, 1, 1), 4, BF16),
    "slices": (Plan(1, 2, 2, 3, 2), 1, FP32),
    "one_arranged": (Plan(2, 4, 2, 2, 2, True), 1, FP32),
    "two_arranged": (Plan(2, 4, 4, 1, 1, True, 1, 1 << 20), 2, BF16),
    "four_arranged": (Plan(4, 1, 2, 1, 1, True), 4, FP16),
    "one_tall": (Plan(1, 8, 2, 1, 1, False, 2), 1, BF16),
    "one_tall_arranged": (Plan(2, 2, 2, 1, 1, True, 2), 1, BF16),
    "two_tall": (Plan(2, 2, 2, 1, 1, False, 2, 64), 2, BF16),
    "four_tall": (Plan(1, 4, 2, 2, 1, True, 2, 1024), 4, FP32),
}
DRIVER = """
static std::string message;
extern "C" const char* arranged(int tiles, const void* x, void* y, int tokens, int columns, int blocks) {
  using Kernel = void(const void*, void*, int, int);
  static Kernel* const kernels[] = {arrange_1, arrange_2, nullptr, arrange_4};
  message = emulator::launch({(unsigned)blocks, 1, 1}, 1, 256, 0, 0, [&] {
    kernels[tiles - 1](x, y, tokens, columns);
  });
  return message.c_str();
}

extern "C" const char* run(int which, const void* x, const unsigned char* packed, const unsigned char* scale,
                           const float* token_scale, void* y, int tokens, int rows, int columns, int slice_steps,
                           int ahead, int blocks, int slices, int threads, int shared, int seed) {
  using Kernel = void(const void*, const unsigned char*, const unsigned char*, const float*, void*, int, int, int, int,
                      int);
  static Kernel* const kernels[] = {NAMES};
  message = emulator::launch({(unsigned)blocks, (unsigned)slices, 1}, 1, threads, shared, seed, [&] {
    kernels[which](x, packed, scale, token_scale, y, tokens, rows, columns, slice_steps, ahead);
  });
  return message.c_str();
}
"""


@pytest.fixture(scope="module")
def emulator(emulated):
    """emulator(case, tokens, token_scale, packed, scale) -> y, or its slices added in order."""
    entries = "".join(hopper.entry(plan, tiles, out, f"decode_{name}") for name, (plan, tiles, out) in CASES.items())
    names = ", ".join(f"decode_{name}" for name in CASES)
    entries += "".join(hopper.ARRANGE.format(name=f"arrange_{tiles}", tiles=tiles) for tiles in (1, 2, 4))
    library = emulated(hopper.device_functions() + entries + DRIVER.replace("NAMES", names))
    library.run.restype = library.arranged.restype = ctypes.c_char_p

    def arrange(x, tiles):
        words = -(-x.shape[1] // hopper.STEP) * tiles * 128
        y = torch.full((words * 8,), float("nan"), dtype=BF16)
        pointers = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr())
        message = library.arranged(tiles, *pointers, *x.shape, -(-words // 256))
        assert message == b"", message.decode()
        return y

    def run(name, tokens, token_scale, packed, scale, seed=0):
        plan, tiles, out = CASES[name]
        rows, columns = packed.shape[0], tokens.shape[1]
        blocks, slices = plan.grid(rows, columns)
        y = torch.full((slices, len(tokens), rows), float("nan"), dtype=out)
        x = arrange(tokens, tiles) if plan.arranged else None
        parameters = hopper.arguments(tokens, token_scale, packed, scale, y, plan, x)
        pointers = [ctypes.c_void_p(getattr(parameters, field)) for field, _ in parameters._fields_[:5]]
        numbers = [getattr(parameters, field) for field, _ in parameters._fields_[5:]]
        message = library.run(
            list(CASES).index(name), *pointers, *numbers, blocks, slices, plan.threads, plan.shared_bytes(tiles), seed
        )
        assert message == b"", message.decode()
        return y.sum(0) if slices > 1 else y[0]

    return run


def operands(tokens: int, rows: int, columns: int, seed: int = 0):
    """Small integers and powers of two: their sums are exact in float32 in any order."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-8, 9, (tokens, columns), generator=generator).to(BF16)
    packed = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(124, 130, (rows, columns // 32), generator=generator).to(torch.uint8)
    return x, packed, scale


def exact(x, packed, scale) -> torch.Tensor:
    return x.double() @ dequantize_mxfp4(packed, scale, FP32, backend="reference").double().T


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (40, 416), (130, 1120)])
def test_every_plan_is_exact_on_integers(emulator, name, rows, columns):
    _, tiles, out = CASES[name]
    for tokens in {1, 8 * tiles - 3, 8 * tiles}:
        x, packed, scale = operands(tokens, rows, columns, tokens)
        y = emulator(name, x, None, packed, scale, seed=tokens)
        assert torch.equal(y.double(), exact(x, packed, scale).to(out).double())


def test_each_token_has_its_scale(emulator):
    x, packed, scale = operands(5, 48, 256)
    tokens = torch.tensor([1.0, 0.5, 3.0, 2.0**-20, -1.0])
    expected = (exact(x, packed, scale) * tokens[:, None]).to(BF16)
    assert torch.equal(emulator("one", x, tokens, packed, scale), expected)


def test_every_scale_of_a_sane_weight_is_exact_and_others_are_loud(emulator):
    """Each exponent from -62 to 65, one a row; past that nothing finite. Zeros stay zeros."""
    rows = 130
    x = torch.zeros(1, 32, dtype=BF16)
    x[0, :16] = torch.arange(16).to(BF16)
    packed = torch.full((rows, 16), 0x21, dtype=torch.uint8)  # 0.5, 1
    scale = torch.arange(65, 65 + rows).to(torch.uint8).unsqueeze(1)
    scale[128:] = torch.tensor([[254], [255]])
    packed[7], scale[7] = 0, 0
    y = emulator("slices", x, None, packed, scale)[0].double()
    assert torch.equal(y[:128], exact(x, packed, scale)[0, :128])
    assert not torch.isfinite(y[128:]).any()


def test_nan_and_infinite_tokens_reach_their_own_rows_only(emulator):
    x, packed, scale = operands(8, 48, 256)
    x[2, 7], x[5, 100] = float("nan"), float("inf")
    y = emulator("one", x, None, packed | 0x11, scale)
    assert torch.isfinite(y).all(1).logical_not().nonzero().flatten().tolist() == [2, 5]


def test_bits_do_not_depend_on_what_runs_first_nor_on_other_tokens(emulator):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(13, 1120, generator=generator).to(BF16)
    packed, scale = quantize_mxfp4(torch.randn(48, 1120, generator=generator))
    first, *others = (emulator("two", x, None, packed, scale, seed) for seed in range(3))
    assert all(torch.equal(first, other) for other in others)
    assert torch.equal(emulator("two", x[4:5].clone(), None, packed, scale), first[4:5])
    assert ((first - exact(x, packed, scale)).norm() / first.double().norm()).item() < 1e-6


@pytest.mark.parametrize("name", CASES)
def test_every_kernel_compiles_for_sm_90a_without_spills(name, tmp_path):
    if not shutil.which("nvcc"):
        pytest.skip("needs nvcc")
    (tmp_path / "kernel.cu").write_text(hopper.device_functions() + hopper.entry(*CASES[name]))
    target = "-gencode arch=compute_90a,code=sm_90a -std=c++17 -Xptxas -v -cubin -o /dev/null".split()
    run = subprocess.run(["nvcc", *target, str(tmp_path / "kernel.cu")], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert ", 0 bytes spill stores" in run.stderr, run.stderr[-400:]


def test_rules_fit_the_multiprocessor():
    for tokens in range(1, 33):
        for rows, columns in [(32, 32), (4096, 4096), (8192, 8192), (28672, 4096), (4096, 14336), (1000, 96)]:
            plan = hopper.plan_for(tokens, rows, columns)
            blocks, slices = plan.grid(rows, columns)
            assert blocks * plan.rows >= rows and slices * plan.slice_steps(columns) * 128 >= columns
            assert plan.threads <= 1024 and plan.shared_bytes(hopper.tiles_of(tokens)) <= 48 << 10


@gpu
@pytest.mark.parametrize("tokens", [1, 3, 8, 13, 16, 32])
@pytest.mark.parametrize("shape", [(48, 32), (1000, 416), (4096, 4096), (28672, 4096), (4096, 14336)])
def test_on_the_gpu(tokens, shape):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    x, packed, scale = (t.cuda() for t in operands(tokens, *shape))
    scales = torch.full((tokens,), 2.0, device="cuda")
    expected = exact(x, packed, scale) * 2
    for dtype in (FP32, BF16, FP16):
        y = hopper.decode(x, scales, packed, scale, dtype)
        assert torch.equal(y.double(), expected.to(dtype).double())
    for plan in (Plan(1, 8, 2, 1, 1), Plan(2, 4, 4, 3, 1), Plan(4, 2, 2, 2, 1), Plan(4, 2, 2, 2, 1, True)):
        assert torch.equal(hopper.decode(x, scales, packed, scale, FP32, plan).double(), expected)
