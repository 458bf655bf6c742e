"""A batch of e4m3 tokens by a packed weight on Hopper: emulated on the host, compiled for sm_90a, run on a GPU."""

import ctypes
import re
import shutil
import subprocess

import pytest
import torch

from quantrot.kernels.mxfp4 import dequantize_mxfp4, mxfp4_gemm, quantize_mxfp4

pytest.importorskip("triton", reason="triton is not installed")

from quantrot.kernels.mxfp4 import hopper_batch  # noqa: E402
from quantrot.kernels.mxfp4.hopper_batch import Plan  # noqa: E402

gpu = pytest.mark.gpu
BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
CASES = {
    "teams": (Plan(64, 2, groups=1, stages=2), BF16),
    "split": (Plan(128, 2, 2, groups=1, stages=2), FP16),
    "tall": (Plan(96, 1, 2, groups=2, stages=3), BF16),
    "four": (Plan(64, 2, 2, groups=2, stages=2), BF16),
    "alone": (Plan(192, 1, groups=1, stages=2), BF16),
    "wide": (Plan(256, 2, 2, groups=1, stages=2), BF16),
}
DRIVER = """
static std::string message;

// Matrices as {data, rows, columns, pitch in bytes, rows of a box, columns of a box, bytes of an element, swizzle}.
static quantrot::TensorMap map(const unsigned long long* m) {
  return {(unsigned char*)m[0], m[2], m[1], m[3], (unsigned)m[5], (unsigned)m[4], (unsigned)m[6], (unsigned)m[7]};
}

extern "C" const char* run(int which, const unsigned long long (*m)[8], const quantrot::BatchArgs* args, int blocks,
                           int cluster, int threads, int shared, int seed) {
  using Kernel = void(quantrot::TensorMap, quantrot::TensorMap, quantrot::TensorMap, quantrot::BatchArgs);
  static Kernel* const kernels[] = {NAMES};
  auto codes = map(m[0]), wide = map(m[1]), y = map(m[2]);
  codes.fresh = !args->early, wide.fresh = 1;
  message = emulator::launch({(unsigned)blocks, 1, 1}, cluster, threads, shared, seed,
                             [&] { kernels[which](codes, wide, y, *args); });
  return message.c_str();
}
"""


@pytest.fixture(scope="module")
def emulator(emulated):
    """Every case's kernel on the host: emulator(case, tokens, token_scale, packed, scale, seed) -> y, outside."""
    entries = "".join(plan.entry(out, f"batch_{name}") for name, (plan, out) in CASES.items())
    names = ", ".join(f"batch_{name}" for name in CASES)
    library = emulated(hopper_batch.device_functions() + entries + DRIVER.replace("NAMES", names))
    library.run.restype = ctypes.c_char_p

    def run(name, tokens, token_scale, packed, scale, seed=0, settled=False):
        plan, out = CASES[name]
        (count, depth), rows = tokens.shape, packed.shape[0]
        assert hopper_batch.fits(tokens.to(out), rows) and plan.splits(depth)
        wide = hopper_batch.arrange(tokens, hopper_batch.room(count, depth, plan, tokens.device))
        y = torch.full((count, rows), float("nan"), dtype=out)
        outside = hopper_batch.flags(rows, plan, tokens.device).fill_(-1)
        args = hopper_batch.arguments(token_scale, packed, scale, y, outside, plan, settled)
        maps = (ctypes.c_ulonglong * 24)()
        for i, (t, box) in enumerate(zip(hopper_batch.matrices(packed, wide, y), plan.boxes(True), strict=True)):
            maps[8 * i : 8 * i + 8] = (t.data_ptr(), *t.shape, t.stride(0) * t.itemsize, *box[:2], t.itemsize, box[2])
        message = library.run(
            list(CASES).index(name), maps, ctypes.byref(args), plan.grid(rows, count, 4), plan.cluster,
            plan.threads, plan.bytes_for(depth), seed,
        )  # fmt: skip
        assert message == b"", message.decode()
        bits = outside[:, :, None] >> torch.arange(16) & 1
        return y, bits.view(plan.parts, -1)[:, :rows] > 0

    return run


def operands(count, rows, columns, seed=0, spread=4):
    """Small integers and powers of two: their sums are exact in float32 in any order."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(-8, 9, (count, columns), generator=generator).float().to(E4M3)
    token_scale = 2.0 ** torch.randint(-3, 4, (count,), generator=generator)
    packed = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(120, 120 + spread, (rows, columns // 32), generator=generator).to(torch.uint8)
    return tokens, token_scale, packed, scale


def exact(tokens, token_scale, packed, scale):
    wide = dequantize_mxfp4(packed, scale, torch.float32, backend="reference").double()
    return tokens.double() @ wide.T * token_scale.double()[:, None]


# --- In the emulator -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("count", "rows", "columns"), [(33, 136, 2176), (70, 72, 2560)])
def test_every_plan_is_exact_on_integers(emulator, name, count, rows, columns):
    given = operands(count, rows, columns, count)
    y, outside = emulator(name, *given, seed=count, settled=count == 70)
    assert torch.equal(y, exact(*given).to(y.dtype)) and not outside.any()


@pytest.mark.parametrize("name", ["teams", "tall"])
def test_every_exponent_of_the_window_is_exact_and_groups_below_it_are_told(emulator, name):
    """Row r has one group 2^(r - 20) of its largest scale, in the last part of K; row 3 another one of zeros."""
    rows, columns = 24, 2176
    tokens, token_scale, packed, scale = operands(34, rows, columns, spread=1)
    scale[:, -3] = scale[:, -3] + torch.arange(rows) - 20  # 18 binades below ... 3 above
    packed[3, -48:-32] = 0x80  # +-0
    packed[4, -33] |= 1
    y, outside = emulator(name, tokens, token_scale, packed, scale)
    last = torch.arange(rows) <= 20 - 15
    last[3] = False
    assert not outside[:-1].any() and torch.equal(outside[-1], last)
    inside = ~outside.any(0)
    assert torch.equal(y[:, inside], exact(tokens, token_scale, packed, scale)[:, inside].to(y.dtype))


def test_a_nan_reaches_its_own_row_or_token_only(emulator):
    tokens, token_scale, packed, scale = operands(40, 72, 2048)
    scale[5, 7], token_scale[9] = 255, float("nan")
    tokens[11, 40] = float("nan")
    y, outside = emulator("split", tokens, token_scale, packed, scale)
    bad = torch.zeros(40, 72, dtype=torch.bool)
    bad[:, 5] = bad[9] = bad[11] = True
    assert torch.equal(y.isnan(), bad) and not outside.any()


def test_scales_at_the_ends_of_what_a_byte_holds(emulator):
    """The least top is 2^-120: lower ones stay exact as far as the window goes."""
    tokens, _, packed, scale = operands(34, 16, 1024)
    scale[0], scale[1], scale[2] = 252, 8, 0
    packed[1, ::2] = 0x22
    y, outside = emulator("teams", tokens, torch.full((34,), 2.0**-60), packed, scale)
    expected = exact(tokens, torch.full((34,), 2.0**-60), packed, scale)
    assert torch.equal(y[:, 0].double(), expected[:, 0].to(y.dtype).double()) and not outside.any()
    y, _ = emulator("teams", tokens, torch.full((34,), 2.0**60), packed, scale)
    expected = exact(tokens, torch.full((34,), 2.0**60), packed, scale)
    assert torch.equal(y[:, 1:3], expected[:, 1:3].to(y.dtype))


@pytest.mark.parametrize("name", ["teams", "four"])
def test_bits_do_not_depend_on_what_runs_first_or_on_neighbours(emulator, name):
    tokens, token_scale, packed, scale = operands(40, 136, 2048)
    tokens = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(1)).to(E4M3)
    first, *others = (emulator(name, tokens, token_scale, packed, scale, seed, seed == 2)[0] for seed in range(3))
    assert all(torch.equal(first, other) for other in others)
    assert torch.equal(first[3:37], emulator(name, tokens[3:37], token_scale[3:37], packed, scale, 5)[0])


# --- Plans and compiling ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4096, 4096), (28672, 4096), (4096, 14336), (8192, 28672), (200, 384), (8, 128)])
@pytest.mark.parametrize("tokens", [33, 64, 65, 128, 200, 256, 300, 512])
def test_every_plan_fits(shape, tokens):
    plan = hopper_batch.plan_for(tokens, *shape)
    assert plan.stages >= 2 and plan.bytes_for(shape[1]) <= 227 << 10 and plan.splits(shape[1])
    assert hopper_batch.padded(tokens, plan) >= tokens


@pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not installed")
@pytest.mark.parametrize("name", ["teams", "tall", "wide"])
def test_kernels_compile_without_spills(name, tmp_path):
    source = tmp_path / "kernel.cu"
    source.write_text(hopper_batch.device_functions() + CASES[name][0].entry(BF16))
    target = ["-gencode", "arch=compute_90a,code=sm_90a"]
    command = ["nvcc", "-cubin", "-std=c++17", *target, "-Xptxas", "-v", "-o", str(tmp_path / "out"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"(\d+) bytes spill stores", done.stderr) == ["0"] and "C7508" not in done.stderr
    assert "serialized" not in done.stderr


# --- On a GPU --------------------------------------------------------------------------------------------------------


def relative(y, expected):
    return ((y.double() - expected).norm() / expected.norm()).item()


@gpu
@pytest.mark.parametrize("activations", ["fp8", "mxfp4"])
@pytest.mark.parametrize("shape", [(4096, 4096), (4096, 14336), (8192, 8192), (6144, 4096), (208, 11008), (8, 128)])
def test_a_gpu_gives_the_product_of_the_dequantized_operands(shape, activations):
    rows, columns = shape
    generator = torch.Generator().manual_seed(0)
    packed, scale = quantize_mxfp4(torch.randn(rows, columns, generator=generator) * 0.05)
    wide = dequantize_mxfp4(packed, scale, torch.float32).double().cuda()
    for tokens in (33, 64, 100, 128, 200, 256, 320, 512):
        x = torch.randn(tokens, columns, generator=generator).to(BF16).cuda()
        operand = x.double()
        if activations == "mxfp4":
            operand = dequantize_mxfp4(*quantize_mxfp4(x), torch.float32).double()
        else:
            token = (x.float().abs().amax(1, keepdim=True) / 448).to(BF16).float()
            operand = (x.float() / token).to(E4M3).double() * token
        given = x, packed.cuda(), scale.cuda()
        y = mxfp4_gemm(*given, activations=activations, backend="hopper", settled=True)
        assert relative(y, operand @ wide.T) <= 2e-3
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = mxfp4_gemm(*given, activations=activations, backend="hopper", settled=True)
        graph.replay()
        assert torch.equal(again, y)


@gpu
def test_rows_and_tokens_outside_of_a_window_are_multiplied_once_more():
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(70, 1024, generator=generator), torch.randn(4096, 1024, generator=generator)
    x[3, :32] *= 2.0**20
    x[60, 64:96] *= 2.0**-18
    w[17, 32:64] *= 2.0**17
    w[4000, -32:] *= 2.0**-17
    a, b = quantize_mxfp4(x.to(BF16).cuda()), quantize_mxfp4(w.cuda())
    expected = dequantize_mxfp4(*a, torch.float32).double() @ dequantize_mxfp4(*b, torch.float32).double().T
    y = mxfp4_gemm(x.to(BF16).cuda(), *b, activations="mxfp4", backend="hopper")
    error = (y.double() - expected).norm(dim=0) / expected.norm(dim=0)
    assert error.max() <= 3e-3
    error = (y.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() <= 3e-3
