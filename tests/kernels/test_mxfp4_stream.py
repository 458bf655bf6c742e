"""The CUDA kernel that streams a packed MXFP4 weight past a few tokens: emulated on the host, compiled, on a GPU."""

import ctypes
import shutil
import subprocess

import pytest
import torch

from quantrot.kernels.mxfp4 import hopper, hopper_stream, quantize_mxfp4
from quantrot.kernels.mxfp4.hopper_stream import Stream
from tests.kernels.test_mxfp4_hopper import exact, operands

gpu = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# plan, output
CASES = {
    "one": (Stream(0, 1, 2, 2, 4), BF16),
    "one_tall": (Stream(0, 2, 1, 4, 8), FP16),
    "one_split": (Stream(0, 1, 2, 2, 4, split=2, once=True), FP32),
    "eight": (Stream(1, 1, 2, 2, 4), BF16),
    "eight_arranged": (Stream(1, 1, 2, 2, 4, arranged=True), FP16),
    "sixteen": (Stream(2, 2, 1, 2, 2), FP32),
    "sixteen_arranged": (Stream(2, 2, 1, 2, 2, arranged=True), FP32),
    "thirty_two": (Stream(4, 1, 3, 1, 3, once=True), FP16),
    "thirty_two_split": (Stream(4, 2, 1, 2, 4, split=2, once=True), FP32),
    "thirty_two_split4": (Stream(4, 1, 2, 1, 3, split=4, once=True, arranged=True), BF16),
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

// Matrices as {data, rows, columns, pitch in bytes, rows of a box, columns of a box, bytes of an element, swizzle}.
static quantrot::TensorMap map(const unsigned long long* m) {
  return {(unsigned char*)m[0], m[2], m[1], m[3], (unsigned)m[5], (unsigned)m[4], (unsigned)m[6], (unsigned)m[7]};
}

extern "C" const char* run(int which, const unsigned long long (*m)[8], const quantrot::StreamArgs* args, int blocks,
                           int cluster, int threads, int shared, int seed) {
  using Kernel = void(quantrot::TensorMap, quantrot::TensorMap, quantrot::StreamArgs);
  static Kernel* const kernels[] = {NAMES};
  const auto codes = map(m[0]), wide = map(m[1]);
  message = emulator::launch({(unsigned)blocks, 1, 1}, cluster, threads, shared, seed,
                             [&] { kernels[which](codes, wide, *args); });
  return message.c_str();
}
"""


@pytest.fixture(scope="module")
def emulator(emulated):
    """emulator(case, tokens, token_scale, packed, scale, seed) -> y."""
    entries = "".join(hopper_stream.entry(*case, name=f"stream_{name}") for name, case in CASES.items())
    entries += "".join(hopper.ARRANGE.format(name=f"arrange_{tiles}", tiles=tiles) for tiles in (1, 2, 4))
    names = ", ".join(f"stream_{name}" for name in CASES)
    library = emulated(hopper_stream.device_functions() + entries + DRIVER.replace("NAMES", names))
    library.run.restype = library.arranged.restype = ctypes.c_char_p

    def arrange(x, tiles):
        words = x.shape[1] // hopper.STEP * tiles * 128
        y = torch.full((words * 8,), float("nan"), dtype=BF16)
        pointers = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr())
        message = library.arranged(tiles, *pointers, *x.shape, -(-words // 256))
        assert message == b"", message.decode()
        return y

    def run(name, tokens, token_scale, packed, scale, seed=0, processors=2):
        plan, out = CASES[name]
        y = torch.full((len(tokens), len(packed)), float("nan"), dtype=out)
        wide = hopper_stream.matrix_of(arrange(tokens, plan.tiles) if plan.arranged else tokens, plan)
        maps = (ctypes.c_ulonglong * 16)()
        for i, (t, box) in enumerate(zip((packed, wide), plan.boxes(), strict=True)):
            maps[8 * i : 8 * i + 8] = (t.data_ptr(), *t.shape, t.stride(0) * t.itemsize, *box[:2], t.itemsize, box[2])
        args = hopper_stream.arguments(token_scale, scale, y)
        message = library.run(
            list(CASES).index(name), maps, ctypes.byref(args), plan.grid(len(packed), processors), plan.split,
            plan.threads, plan.shared_bytes(), seed,
        )  # fmt: skip
        assert message == b"", message.decode()
        return y

    return run


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("rows", "columns"), [(16, 128), (40, 1152), (130, 2816)])
def test_every_plan_is_exact_on_integers(emulator, name, rows, columns):
    plan, out = CASES[name]
    for tokens in {1, max(1, plan.tokens - 3), plan.tokens}:
        x, packed, scale = operands(tokens, rows, columns, tokens)
        factors = torch.randint(-2, 3, (tokens,)).float()
        y = emulator(name, x, factors, packed, scale, seed=tokens)
        assert torch.equal(y.double(), (exact(x, packed, scale) * factors[:, None]).to(out).double())


def test_every_scale_of_a_sane_weight_is_exact_and_others_are_loud(emulator):
    """Each exponent from -62 to 65, one a row; past that nothing finite. Zeros stay zeros."""
    rows = 130
    x = torch.zeros(1, 128, dtype=BF16)
    x[0, :16] = torch.arange(16).to(BF16)
    packed = torch.full((rows, 64), 0x21, dtype=torch.uint8)  # 0.5, 1
    scale = torch.arange(65, 65 + rows).to(torch.uint8).unsqueeze(1).repeat(1, 4)
    scale[128:] = torch.tensor([[254], [255]])
    packed[7], scale[7] = 0, 0
    y = emulator("one_split", x, None, packed, scale)[0].double()
    assert torch.equal(y[:128], exact(x, packed, scale)[0, :128])
    assert not torch.isfinite(y[128:]).any()


@pytest.mark.parametrize("name", ["eight", "thirty_two_split"])
def test_nan_and_infinite_tokens_reach_their_own_rows_only(emulator, name):
    x, packed, scale = operands(8, 48, 256)
    x[2, 7], x[5, 100] = float("nan"), float("inf")
    y = emulator(name, x, None, packed | 0x11, scale)
    assert torch.isfinite(y).all(1).logical_not().nonzero().flatten().tolist() == [2, 5]


@pytest.mark.parametrize("name", ["sixteen", "thirty_two_split"])
def test_bits_do_not_depend_on_what_runs_first_nor_on_other_tokens(emulator, name):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(13, 1152, generator=generator).to(BF16)
    packed, scale = quantize_mxfp4(torch.randn(72, 1152, generator=generator))
    first, *others = (emulator(name, x, None, packed, scale, seed, 1 + seed) for seed in range(4))
    assert all(torch.equal(first, other) for other in others)
    assert torch.equal(emulator(name, x[4:5].clone(), None, packed, scale), first[4:5])
    assert ((first - exact(x, packed, scale)).norm() / first.double().norm()).item() < 1e-6


@pytest.mark.parametrize("name", CASES)
def test_every_kernel_compiles_for_sm_90a_without_spills(name, tmp_path):
    if not shutil.which("nvcc"):
        pytest.skip("needs nvcc")
    (tmp_path / "kernel.cu").write_text(hopper_stream.device_functions() + hopper_stream.entry(*CASES[name]))
    target = "-gencode arch=compute_90a,code=sm_90a -std=c++17 -Xptxas -v -cubin -o /dev/null".split()
    run = subprocess.run(["nvcc", *target, str(tmp_path / "kernel.cu")], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert ", 0 bytes spill stores" in run.stderr, run.stderr[-400:]


def test_the_rule_fits_the_multiprocessor():
    for tokens in range(1, 33):
        for rows, columns in [
            (32, 128),
            (1024, 8192),
            (4096, 4096),
            (28672, 4096),
            (4096, 14336),
            (128256, 4096),
            (1000, 384),
        ]:
            plan = hopper_stream.plan_for(tokens, rows, columns)
            assert hopper_stream.fits(tokens, columns) and plan.tokens >= tokens and (plan.tiles > 0) == (tokens > 1)
            assert plan.threads <= 1024 and plan.shared_bytes() <= 227 << 10 and plan.stages % plan.teams == 0
            assert plan.once or plan.split == 1
            if plan.once:
                assert plan.grid(rows, 132) * plan.rows >= rows * plan.split
                assert plan.teams * plan.tokens * (plan.rows + 4) * 4 <= plan.shared_bytes() - 16 * plan.stages


@gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(16, 128), (1000, 1152), (4096, 4096), (4096, 14336)])
def test_on_the_gpu(name, shape):
    """Sums that are exact, so that any order gives them, with a scale a token; again and in a graph the same bits."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    plan, out = CASES[name]
    for tokens in {1, max(1, plan.tokens - 3), plan.tokens}:
        x, packed, scale = (t.cuda() for t in operands(tokens, *shape))
        factors = torch.randint(-2, 3, (tokens,), device="cuda").float()
        expected = (exact(x, packed, scale) * factors[:, None]).to(out)
        call = lambda: hopper_stream.multiply(x, factors, packed, scale, out, plan)  # noqa: B023, E731
        assert torch.equal(call(), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [call() for _ in range(4)]
        for _ in range(3):
            for y in results:
                y.fill_(float("nan"))
            graph.replay()
            assert all(torch.equal(y, expected) for y in results)
