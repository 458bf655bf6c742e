"""A batch of e4m3 tokens by a packed weight on Hopper: emulated on the host, compiled for sm_90a, run on a GPU."""

import ctypes
from functools import partial

import pytest
import torch

from quantrot.kernels.fp8 import Fp8ScaleRule, quantize_fp8_block
from quantrot.kernels.mxfp4 import dequantize_mxfp4, mxfp4_gemm, quantize_mxfp4
from quantrot.kernels.mxfp4.reference import expand_reference

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
    "wide": (Plan(256, 1, 2, groups=2, stages=2), BF16),
    "tallest": (Plan(64, 1, groups=4, stages=2), BF16),
    "wide_teams": (Plan(192, 2, 2, groups=1, stages=2), BF16),
    "four_teams": (Plan(64, 4, groups=1, stages=2), BF16),
    "few": (Plan(32, 4, groups=1, stages=2, blocks=2), BF16),
    "two_blocks": (Plan(64, 2, groups=2, stages=2, blocks=2), BF16),
    "few_split": (Plan(32, 2, 2, groups=1, stages=2), FP16),
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
    """Every case's kernel on the host: emulator(case, tokens, token_scale, packed, scale, seed) -> y."""
    entries = "".join(plan.entry(out, f"batch_{name}") for name, (plan, out) in CASES.items())
    names = ", ".join(f"batch_{name}" for name in CASES)
    library = emulated(hopper_batch.device_functions() + entries + DRIVER.replace("NAMES", names))
    library.run.restype = ctypes.c_char_p

    def run(name, tokens, token_scale, packed, scale, seed=0, settled=False, codes=None):
        plan, out = CASES[name]
        (count, depth), rows = tokens.shape, packed.shape[0]
        assert hopper_batch.fits(tokens.to(out), rows) and plan.splits(depth)
        wide = hopper_batch.arrange(tokens)
        y = torch.full((count, rows), float("nan"), dtype=out)
        args = hopper_batch.arguments(wide, token_scale, packed, scale, y, codes, plan, settled)
        maps = (ctypes.c_ulonglong * 24)()
        for i, (t, box) in enumerate(zip(hopper_batch.matrices(packed, wide, y), plan.boxes(count, True), strict=True)):
            maps[8 * i : 8 * i + 8] = (t.data_ptr(), *t.shape, t.stride(0) * t.itemsize, *box[:2], t.itemsize, box[2])
        message = library.run(
            list(CASES).index(name), maps, ctypes.byref(args), plan.grid(rows, count, 4), plan.cluster,
            plan.threads, plan.bytes_for(depth), seed,
        )  # fmt: skip
        assert message == b"", message.decode()
        return y

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


def relative(y, expected):
    return ((y.double() - expected).norm() / expected.norm()).item()


def rounded_once(y, tokens, token_scale, packed, scale) -> bool:
    """Whether every element is within a rounding of the product, but for what float32 sums lose to larger terms."""
    terms = exact(tokens.abs(), token_scale.abs(), packed & 0x77, scale)
    expected = exact(tokens, token_scale, packed, scale)
    return bool(((y.double() - expected).abs() <= 2.0**-8 * expected.abs() + 2.0**-20 * terms).all())


# --- In the emulator -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("count", "rows", "columns"), [(33, 136, 2176), (70, 72, 2560)])
def test_every_plan_is_exact_on_integers(emulator, name, count, rows, columns):
    given = operands(count, rows, columns, count)
    y = emulator(name, *given, seed=count, settled=count == 70)
    assert torch.equal(y, exact(*given).to(y.dtype))


@pytest.mark.parametrize("name", ["teams", "tall", "few"])
def test_groups_at_any_distance_from_a_rows_largest_are_exact(emulator, name):
    """Row r has one group 2^(r - 20) of its largest scale, in the last part of K; row 3 another one of zeros."""
    rows, columns = 24, 2176
    tokens, token_scale, packed, scale = operands(34, rows, columns, spread=1)
    scale[:, -3] = scale[:, -3] + torch.arange(rows) - 20  # 20 binades below ... 3 above
    scale[4, 5:9] -= 17
    packed[3, -48:-32] = 0x80  # +-0
    tokens[20:, : columns - 160] = 0  # so that what is small counts
    given = tokens, token_scale, packed, scale
    y = emulator(name, *given)
    assert rounded_once(y, *given)


@pytest.mark.parametrize("name", ["split", "four"])
def test_groups_of_a_token_that_its_e4m3_lacks_are_added(emulator, name):
    """Beside a weight that has such groups too, and a token whose codes are not to be read."""
    rows, columns = 72, 2048
    _, _, packed, scale = operands(1, rows, columns)
    scale[7, 3], scale[7, 40], scale[9, 60:] = 134, 110, 100
    _, _, codes, bytes_ = operands(36, 36, columns, 1, spread=2)
    bytes_[5, 2], bytes_[5, 40] = 139, 140  # most of both are below
    bytes_[30, 17] = 90
    e4m3, token_scale, outside = expand_reference(codes, bytes_)
    assert outside.nonzero().flatten().tolist() == [5, 30]
    wide = dequantize_mxfp4(codes, bytes_, torch.float32, backend="reference").double()
    codes[8], bytes_[8] = 0xFF, 0xFF
    y = emulator(name, e4m3, token_scale, packed, scale, codes=(outside, codes, bytes_))
    assert rounded_once(y, wide, torch.ones(36), packed, scale)


def test_a_nan_reaches_its_own_row_or_token_only(emulator):
    tokens, token_scale, packed, scale = operands(40, 72, 2048)
    scale[5, 7], token_scale[9] = 255, float("nan")
    tokens[11, 40] = float("nan")
    y = emulator("split", tokens, token_scale, packed, scale)
    bad = torch.zeros(40, 72, dtype=torch.bool)
    bad[:, 5] = bad[9] = bad[11] = True
    assert torch.equal(y.isnan(), bad)


def test_scales_at_the_ends_of_what_a_byte_holds(emulator):
    """The least top is 2^-120: lower ones stay exact as far as the window goes."""
    tokens, _, packed, scale = operands(34, 16, 1024)
    scale[0], scale[1], scale[2] = 252, 8, 0
    packed[1, ::2] = 0x22
    y = emulator("teams", tokens, torch.full((34,), 2.0**-60), packed, scale)
    expected = exact(tokens, torch.full((34,), 2.0**-60), packed, scale)
    assert torch.equal(y[:, 0].double(), expected[:, 0].to(y.dtype).double())
    y = emulator("teams", tokens, torch.full((34,), 2.0**60), packed, scale)
    expected = exact(tokens, torch.full((34,), 2.0**60), packed, scale)
    assert torch.equal(y[:, 1:3], expected[:, 1:3].to(y.dtype))


@pytest.mark.parametrize("name", ["teams", "four", "four_teams", "few"])
def test_bits_do_not_depend_on_what_runs_first_or_on_neighbours(emulator, name):
    tokens, token_scale, packed, scale = operands(40, 136, 2048)
    tokens = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(1)).to(E4M3)
    first, *others = (emulator(name, tokens, token_scale, packed, scale, seed, seed == 2) for seed in range(3))
    assert all(torch.equal(first, other) for other in others)
    assert torch.equal(first[3:37], emulator(name, tokens[3:37], token_scale[3:37], packed, scale, 5))


# --- Plans and compiling ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4096, 4096), (28672, 4096), (4096, 14336), (8192, 28672), (200, 384), (8, 128)])
@pytest.mark.parametrize("tokens", [1, 16, 32, 33, 64, 65, 128, 200, 256, 300, 512, 1024, 4096])
def test_every_plan_fits(shape, tokens):
    plan = hopper_batch.plan_for(tokens, *shape)
    assert plan.stages >= 2 and plan.bytes_for(shape[1]) <= 227 << 10 and plan.splits(shape[1])


@pytest.mark.parametrize("name", ["four", "wide", "tallest", "wide_teams", "four_teams", "few", "two_blocks"])
def test_kernels_compile_without_spills(name, compiled_cuda):
    made = compiled_cuda(hopper_batch.device_functions() + CASES[name][0].entry(BF16))
    assert made.spilled == [0], made.log
    assert "C7508" not in made.log and "serialized" not in made.log, made.log


# --- On a GPU --------------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("activations", ["fp8", "mxfp4"])
@pytest.mark.parametrize("shape", [(4096, 4096), (4096, 14336), (8192, 8192), (6144, 4096), (208, 11008), (8, 128)])
def test_a_gpu_gives_the_product_of_the_dequantized_operands(shape, activations):
    rows, columns = shape
    torch.manual_seed(0)
    packed, scale = quantize_mxfp4(torch.randn(rows, columns, device="cuda") * 0.05)
    wide = dequantize_mxfp4(packed, scale, torch.float32).double()
    for tokens in (33, 64, 96, 128, 192, 256, 320, 512, 1024, 1600, 4096):
        x = torch.randn(tokens, columns, device="cuda").to(BF16)
        operand = dequantize_mxfp4(*quantize_mxfp4(x), torch.float32).double()
        if activations == "fp8":
            token = (x.float().abs().amax(1, keepdim=True) / 448).to(BF16).float()
            operand = (x.float() / token).to(E4M3).double() * token
        run = partial(mxfp4_gemm, x, packed, scale, activations=activations, backend="hopper", settled=True)
        y = run()
        assert relative(y, operand @ wide.T) <= 2e-3
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = [run() for _ in range(3)]
        graph.replay()
        assert all(torch.equal(other, y) for other in again)


@gpu
@pytest.mark.parametrize("shape", [(4096, 4096), (4096, 14336), (8192, 8192), (28672, 4096), (208, 11008), (8, 128)])
def test_a_gpu_multiplies_few_tokens_by_tiles_of_their_own(shape):
    rows, columns = shape
    torch.manual_seed(0)
    packed, scale = quantize_mxfp4(torch.randn(rows, columns, device="cuda") * 0.05)
    wide = dequantize_mxfp4(packed, scale, torch.float32).double()
    for tokens in (1, 7, 16, 32):
        q, token = hopper_batch.quantize(torch.randn(tokens, columns, device="cuda").to(BF16), "bf16")
        run = partial(hopper_batch.multiply, q, token, packed, scale, BF16, settled=True)
        y = run()
        unarranged = q.view(torch.int32).view(tokens, columns // 128, 8, 4).transpose(2, 3).reshape(tokens, -1)
        operand = unarranged.contiguous().view(E4M3).double() * token.double()[:, None]
        assert relative(y, operand @ wide.T) <= 2e-3
        assert all(torch.equal(run(), y) for _ in range(20))


def token_codes(device, dtype, shape):
    """Whether `quantize` gives the reference's codes, arranged, of ordinary rows, zeros, and what is not finite."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).to(dtype)
    x[1], x[2, 5], x[3, 7], x[4] = 0, float("inf"), float("nan"), x[4] * 1e-6
    same = []
    for rule in Fp8ScaleRule:
        expected, scale = quantize_fp8_block(x, (1, 0), rule, backend="reference")
        q, token = (t.cpu() for t in hopper_batch.quantize(x.to(device), rule))
        same.append(torch.equal(q.view(torch.uint8), hopper_batch.arrange(expected).view(torch.uint8)))
        same.append(torch.equal(token.view(torch.int32), scale.view(-1).view(torch.int32)))
    return all(same)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_tokens_are_quantized_as_by_the_reference_and_arranged(dtype):
    assert token_codes("cpu", dtype, (5, 384))


@gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("shape", [(5, 128), (33, 4096), (1024, 14336), (7, 32768), (6, 32896)])
def test_tokens_are_quantized_on_a_gpu_as_by_the_reference_and_arranged(dtype, shape):
    assert token_codes("cuda", dtype, shape)


@gpu
@pytest.mark.parametrize("name", CASES)
def test_every_plan_on_a_gpu(name):
    """To the rounding of the result: of a sum of e4m3's products the tensor core keeps 14 bits."""
    plan, out = CASES[name]
    tokens, token_scale, packed, scale = given = operands(150, 1000, 2560)
    expected = exact(*given)
    wide = hopper_batch.arrange(tokens.cuda())
    for settled in (False, True):
        y = hopper_batch.multiply(
            wide, token_scale.cuda(), packed.cuda(), scale.cuda(), out, None, plan, settled=settled
        )
        assert relative(y.cpu(), expected) <= 2e-3


@gpu
def test_rows_and_tokens_outside_of_a_window_are_exact_on_a_gpu():
    """To the rounding of the result, and 14 bits of all that is added; where the large group meets zeros, the others,
    which e4m3 lacks, are the sum."""
    torch.manual_seed(0)
    x, w = torch.randn(70, 1024, device="cuda"), torch.randn(4096, 1024, device="cuda")
    x[3, :32] *= 2.0**20
    x[60, 64:96] *= 2.0**-18
    w[17, 32:64] *= 2.0**17
    w[4000, -32:] *= 2.0**-17
    w[5, :32], x[7, 32:64] = 0, 0
    a, b = quantize_mxfp4(x.to(BF16)), quantize_mxfp4(w)
    left, right = (dequantize_mxfp4(*t, torch.float32).double() for t in (a, b))
    y, expected = mxfp4_gemm(x.to(BF16), *b, activations="mxfp4", backend="hopper").double(), left @ right.T
    assert ((y - expected).abs() <= 2.0**-8 * expected.abs() + 2.0**-12 * (left.abs() @ right.abs().T)).all()
    assert expected[3, 5].abs() > 1 and expected[7, 17].abs() > 1


@gpu
@pytest.mark.parametrize("tokens", [8, 64, 1024, 5000])
@pytest.mark.parametrize("activations", ["none", "fp8", "mxfp4"])
def test_a_gpu_takes_tokens_whose_columns_are_not_adjacent(tokens, activations):
    weight = quantize_mxfp4(torch.randn(512, 1024, device="cuda"))
    x = torch.randn(tokens, 1024, 2, device="cuda").bfloat16()
    for rows in (x[..., 1], x[:, :1, :1].expand(-1, 1024, 1)[..., 0], x[:1, :, 0].expand(tokens, -1)):
        expected = mxfp4_gemm(rows.contiguous(), *weight, activations=activations)
        assert torch.equal(mxfp4_gemm(rows, *weight, activations=activations), expected)
