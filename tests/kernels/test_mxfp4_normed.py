"""Many tokens through RMSNorm, and an addition before it, in the kernel that makes e4m3 of them: emulated, compiled for
sm_90a, run on a GPU."""

import ctypes
import itertools
from functools import partial

import pytest
import torch

from quantrot.kernels import nvrtc
from quantrot.kernels.fp8 import quantize_fp8_block
from quantrot.kernels.fp8.reference import rms_norm
from quantrot.kernels.mxfp4 import has_normed, hopper, hopper_batch, hopper_normed, mxfp4_gemm, mxfp4_normed
from quantrot.kernels.mxfp4.hopper_normed import Plan
from quantrot.kernels.mxfp4.operators import quantize_mxfp4
from quantrot.kernels.mxfp4.reference import ScaleRule, expand_reference, quantize_reference
from tests.kernels.covering import few_or_every

gpu = pytest.mark.gpu
pytest.importorskip("triton", reason="triton is not installed")
BF16, EPSILON = torch.bfloat16, 1e-5
# activations, rule, Hadamard, arranged, columns, plan
CASES = {
    "few_even": ("mxfp4", "even", 32, True, 1408, Plan(192, 1, 1)),
    "few_quest": ("mxfp4", "quest", 128, False, 1408, Plan(64, 1, 3)),
    "few_mse": ("mxfp4", "mse", 0, True, 384, Plan(32, 1, 2)),
    "few_exact": ("fp8", "exact", 0, True, 1408, Plan(96, 1, 2)),
    "few_bf16": ("fp8", "bf16", 0, False, 2176, Plan(288, 1, 1)),
    "even": ("mxfp4", "even", 32, False, 1408, Plan(64, 4)),
    "quest": ("mxfp4", "quest", 128, True, 1408, Plan(64, 4, stages=3)),
    "floor": ("mxfp4", "floor", 64, False, 128, Plan(32, 2)),
    "bf16": ("fp8", "bf16", 0, False, 2176, Plan(96, 4)),
    "pow2": ("fp8", "pow2", 0, True, 128, Plan(32, 4, stages=3)),
}
KERNELS = [(name, added) for name in CASES for added in (False, True)]
DRIVER = """
static std::string message;
extern "C" const char* run(int which, const quantrot::NormedArgs* args, int blocks, int threads, int shared, int seed) {
  static void (*const kernels[])(quantrot::NormedArgs) = {NAMES};
  message = emulator::launch({(unsigned)blocks, 1, 1}, 1, threads, shared, seed, [&] { kernels[which](*args); });
  return message.c_str();
}
"""


def source(case: str, added: bool, plan: Plan | None = None, **more) -> str:
    activations, rule, hadamard, arranged, _, own = CASES[case]
    return (plan or own).entry(hopper.turn_of(activations, rule, hadamard), arranged, added, **more)


def built(emulated, functions: str):
    names = [f"normed_{case}_{added}" for case, added in KERNELS]
    entries = "".join(source(*kernel, name=name) for kernel, name in zip(KERNELS, names, strict=True))
    library = emulated(functions + entries + DRIVER.replace("NAMES", ", ".join(names)))
    library.run.restype = ctypes.c_char_p
    return library


@pytest.fixture(scope="module")
def library(emulated):
    return built(emulated, hopper_normed.device_functions())


def tokens(rows: int, columns: int, device="cpu"):
    """x, what is added, the norm's gain: rows of other sizes, small groups, zeros, what is not finite."""
    torch.manual_seed(rows + columns)
    x, added, norm = torch.randn(rows, columns), torch.randn(rows, columns), torch.rand(columns) + 0.5
    x[::3] *= 100
    norm[-32:] = 2.0**-18
    if rows > 4:
        x[1], added[1] = 0, 0
        x[2, 7], added[3, columns // 2] = float("nan"), float("inf")
    return x.to(BF16).to(device), added.to(BF16).to(device), norm.to(BF16).to(device)


def halving(sums: torch.Tensor) -> torch.Tensor:
    """Of 16 lanes, neighbours first."""
    for step in (1, 2, 4, 8):
        sums = sums + sums[..., torch.arange(16) ^ step]
    return sums[..., 0]


def normed(x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """RMSNorm with the kernel's order of sums: of eight columns, of 16 such, then every sixteenth of those."""
    rows, columns = x.shape
    squares, sums = x.float().square().view(rows, -1, 16, 8), torch.zeros(rows, columns // 128, 16)
    for i in range(8):
        sums = sums + squares[..., i]
    groups = torch.nn.functional.pad(halving(sums), (0, -(columns // 128) % 16)).view(rows, -1, 16)
    lanes = torch.zeros(rows, 16)
    for i in range(groups.shape[1]):
        lanes = lanes + groups[:, i]
    inverse = torch.tensor(1.0) / torch.tensor(columns, dtype=torch.float32)
    factor = 1 / (halving(lanes) * inverse + EPSILON).sqrt()
    return (x.float() * factor[:, None]).to(x.dtype) * norm


def expected(name: str, y: torch.Tensor):
    """(e4m3, scale of each token, and of MXFP4 outside, packed, scale) of normed tokens."""
    activations, rule, hadamard, arranged, *_ = CASES[name]
    if activations == "fp8":
        codes, scales = quantize_fp8_block(y, (1, 0), rule)
        made = codes, scales.view(-1)
    else:
        packed, scale, _ = quantize_reference(y, ScaleRule(rule), hadamard=hadamard)
        codes, tops, counts = expand_reference(packed, scale)
        made = codes, tops, counts, packed, scale
    return (hopper_batch.arrange(made[0]) if arranged else made[0]), *made[1:]


def emulate(library, name: str, x, norm, added, blocks: int, settled=True, seed=0):
    """As hopper_normed.prepare's function, of which this has the launch to itself."""
    _, _, hadamard, _, columns, plan = CASES[name]
    rows, groups = len(x), columns // 32
    made = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn), torch.zeros(rows)
    codes = (
        torch.full((rows,), -1, dtype=torch.int32),
        *(torch.full((rows, width), 0xAA, dtype=torch.uint8) for width in (columns // 2, groups)),
    )
    total = torch.zeros_like(x)
    to = hopper_normed.hopper_rows.arguments(
        x, None, (codes[1], codes[2], *made, codes[0]), rows, groups, hadamard, None
    )
    at = None if added is None else added.data_ptr()
    args = hopper_normed.NormedArguments(to, norm.data_ptr(), at, total.data_ptr(), EPSILON, settled)
    which, given = KERNELS.index((name, added is not None)), ctypes.byref(args)
    message = library.run(
        which, given, rows if plan.units else blocks, plan.threads, plan.shared_bytes(added is not None), seed
    )
    return message.decode(), (*made, codes, total)


def agree(name: str, found, wanted):
    """Whether codes, scales and, of rows that e4m3 does not hold, MXFP4's are the same bits."""
    codes, scales, rest = found
    assert torch.equal(codes.view(torch.uint8), wanted[0].view(torch.uint8))
    assert torch.equal(scales.view(torch.int32), wanted[1].view(torch.int32))
    if CASES[name][0] == "mxfp4":
        outside, packed, scale = rest
        needed = outside > 0
        assert torch.equal(outside, wanted[2])
        assert torch.equal(packed[needed], wanted[3][needed]) and torch.equal(scale[needed], wanted[4][needed])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (7, 2), (5, 5)])
@pytest.mark.parametrize("adds", [False, True])
def test_bits_are_those_of_what_is_normed(library, name, rows, blocks, adds):
    x, added, norm = tokens(rows, CASES[name][4])
    total = x + added if adds else x
    wanted = expected(name, normed(total, norm))
    for seed in range(3):  # which warp runs first
        message, (*found, kept) = emulate(library, name, x, norm, added if adds else None, blocks, seed=seed)
        assert message == "", message
        agree(name, found, wanted)
    if adds:
        torch.testing.assert_close(kept, total, rtol=0, atol=0, equal_nan=True)
    assert CASES[name][0] == "fp8" or wanted[2].max() > 0 or CASES[name][2] == 128 or CASES[name][4] == 128


def test_the_norm_is_read_before_the_kernel_in_front_has_ended_only_where_it_is_settled(emulated):
    """The loads of norm become such as the emulator refuses before the wait."""
    functions = hopper_normed.device_functions()
    load, copies = "((const Words*)args.norm)[unit_of(i)]", "start_tile<1>(gain, args.norm,"
    assert functions.count(f"? {load} :") == functions.count(copies) == 1
    functions = functions.replace(load, "load_fresh_words((const char*)args.norm + unit_of(i) * 16)")
    strict = built(emulated, functions.replace(copies, f"load_fresh_words(args.norm), {copies}"))
    for name in CASES:
        x, _, norm = tokens(2, CASES[name][4])
        assert "grid_wait" in emulate(strict, name, x, norm, None, 2)[0]
        assert emulate(strict, name, x, norm, None, 2, settled=False)[0] == ""


@few_or_every
def test_the_kernels_compile_for_sm_90a_without_spills(compiled_cuda, chosen):
    planned = []
    for name, columns in itertools.product(CASES, (1024, 4096, 8192, 16384)):
        few, added = bool(CASES[name][5].units), columns != 4096
        for rows in (64, 132 * 1024 // min(columns // 8, 1024)) if few else (8192,):
            plan = hopper_normed.plan_for(rows, columns, added)
            assert bool(plan.units) == few
            planned.append((plan, CASES[name], name, added))
    kept = chosen([(plan, *case[:4], added) for plan, case, _, added in planned])
    ours = [(name, added, plan) for plan, case, name, added in planned if (plan, *case[:4], added) in kept]
    sources = [source(*each, name=f"normed_{i}") for i, each in enumerate(ours)]
    made = compiled_cuda(hopper_normed.device_functions() + "".join(sources))
    assert made.spilled == [0] * len(ours), made.log


@pytest.mark.parametrize("rows", [1, 132, 133, 264, 265, 528, 5000])
@pytest.mark.parametrize(("columns", "at_once"), [(128, 32), (2048, 4), (4096, 2), (5120, 1), (8192, 1), (16384, 1)])
@pytest.mark.parametrize("added", [False, True])
def test_a_plan_has_room_for_a_row(rows, columns, at_once, added):
    plan = hopper_normed.plan_for(rows, columns, added)
    assert plan.threads % 32 == 0 and plan.threads <= 1024 and columns <= plan.threads * (plan.units or 4) * 8
    assert plan.threads * plan.resident <= 1024 and bool(plan.units) == (rows <= 132 * at_once)
    assert plan.resident * (plan.shared_bytes(added) + 1024) <= nvrtc.SM_SHARED


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("activations", ["none", "fp8", "mxfp4"])
def test_without_a_kernel_it_is_the_operators_one_after_the_other(dtype, activations):
    x, added, norm = (t.to(dtype) for t in tokens(40, 256))
    packed, bias = quantize_mxfp4(torch.randn(96, 256)), torch.randn(96).to(dtype)
    options = {"activations": activations, "hadamard": 32}
    for beside, rest in ((None, ()), (added, (bias,))):
        total = x if beside is None else x + beside
        given = x.view(2, 20, 256), norm, EPSILON, *packed, *rest
        y, kept = mxfp4_normed(*given, added=beside if beside is None else beside.view(2, 20, 256), **options)
        wanted = mxfp4_gemm(rms_norm(total, norm, EPSILON), *packed, *rest, **options)
        torch.testing.assert_close(y, wanted.view(2, 20, 96), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(kept, total.view(2, 20, 256), rtol=0, atol=0, equal_nan=True)


def test_a_wide_bias_does_not_widen_the_result():
    x, _, norm = tokens(3, 256)
    y, _ = mxfp4_normed(x, norm, EPSILON, *quantize_mxfp4(torch.randn(96, 256)), torch.randn(96))
    assert y.dtype == BF16


def test_no_tokens_are_no_products():
    x, added, norm = tokens(0, 256)
    y, total = mxfp4_normed(x, norm, EPSILON, *quantize_mxfp4(torch.randn(96, 256)), added=added)
    assert y.shape == (0, 96) and total.shape == (0, 256) and not has_normed(96, 256, x.device)


@pytest.mark.parametrize("adds", [False, True])
def test_operator_registration(adds):
    x, added, norm = tokens(3, 256)
    packed = quantize_mxfp4(torch.randn(96, 256))
    for lie in (lambda t: t, lambda t: t.T.contiguous().T):
        given = (lie(x), norm, EPSILON, lie(added) if adds else None, *packed, "mxfp4", "even", 32, False)
        torch.library.opcheck(torch.ops.quantrot.mxfp4_normed, given)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"norm": torch.ones(255)}, "norm"),
        ({"norm": None}, "norm: None; allowed"),
        ({"added": torch.ones(3, 128)}, "added"),
        ({"added": 1.0}, "added: 1.0; allowed"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"bias": torch.ones(95)}, "bias"),
        ({"activations": "int8"}, "activations"),
        ({"scale_rule": "half"}, "scale_rule"),
        ({"hadamard": 48}, "hadamard"),
    ],
)
def test_what_does_not_fit_is_named(change, says):
    packed, scale = quantize_mxfp4(torch.randn(96, 256))
    given = {"norm": torch.ones(256), "epsilon": EPSILON, "packed": packed, "scale": scale} | change
    with pytest.raises(ValueError, match=says):
        mxfp4_normed(torch.ones(3, 256), **given)


def test_a_gradient_is_refused():
    x, _, norm = tokens(3, 256)
    y, _ = mxfp4_normed(x.requires_grad_(), norm, EPSILON, *quantize_mxfp4(torch.randn(96, 256)))
    with pytest.raises(RuntimeError, match="not differentiable"):
        y.sum().backward()


@gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("rows", "columns"), [(40, 128), (33, 1408), (300, 4096), (3001, 2048), (700, 8192), (40, 16384)]
)
def test_gpu_a_row_has_the_bits_that_it_has_alone(name, rows, columns):
    """The reference's but for the order of the norm's sum; after a sum, that sum's."""
    activations, rule, hadamard, arranged, *_ = CASES[name]
    turn, (x, added, norm) = hopper.turn_of(activations, rule, hadamard), tokens(rows, columns, "cuda")
    for beside in (None, added):
        total = x if beside is None else x + beside
        run = hopper_normed.prepare(x, EPSILON, turn, beside is not None, arranged=arranged, settled=True)
        wanted = [t.cuda() for t in expected(name, rms_norm(total, norm, EPSILON).cpu())]
        for _ in range(3):
            codes, scales, rest, kept = run(x, norm, beside)
            torch.testing.assert_close(kept, total, rtol=0, atol=0, equal_nan=True)
            off = codes.view(torch.uint8) != wanted[0].view(torch.uint8)
            assert off.float().mean() < 0.01
            same = ~off.any(1) & (scales == wanted[1])
            assert same.float().mean() > 0.2
            if rest is not None:
                outside, packed, scale = rest
                assert torch.equal(outside[same], wanted[2][same])
                needed = same & (outside > 0)
                assert torch.equal(packed[needed], wanted[3][needed]) and torch.equal(scale[needed], wanted[4][needed])
            for i in (0, 1, rows // 3, rows - 1):
                one = hopper_normed.prepare(total[:1], EPSILON, turn, False, arranged=arranged, settled=False)
                alone = one(total[i : i + 1].clone(), norm, None)
                assert torch.equal(alone[0].view(torch.uint8), codes[i : i + 1].view(torch.uint8))
                assert torch.equal(alone[1].view(torch.int32), scales[i : i + 1].view(torch.int32))


@gpu
@pytest.mark.parametrize("options", [{"activations": "mxfp4", "hadamard": 32}, {"activations": "fp8"}])
@pytest.mark.parametrize(
    ("rows", "n", "k"), [(40, 512, 1024), (300, 6144, 4096), (5000, 512, 1024), (4500, 4096, 4096)]
)
def test_gpu_a_product_is_that_of_what_is_normed(options, rows, n, k):
    """A batch's, and cuBLAS'."""
    x, added, norm = tokens(rows, k, "cuda")
    x, added = x.nan_to_num(), added.nan_to_num(posinf=1)
    packed, bias = quantize_mxfp4(torch.randn(n, k, device="cuda")), torch.randn(n, device="cuda").to(BF16)
    total = x + added
    wanted = mxfp4_gemm(rms_norm(total, norm, EPSILON), *packed, bias, **options)
    call = partial(mxfp4_normed, x, norm, EPSILON, *packed, bias, **options, settled=True)
    with torch.no_grad():
        assert has_normed(n, k, x.device)
        for y, kept in (call(added=added), call(added=added), torch.compile(call)(added=added)):
            assert torch.equal(kept, total)
            assert (y.float() - wanted.float()).norm() < 4e-3 * wanted.float().norm()
            assert torch.equal(y, call(added=added)[0])
        assert torch.equal(mxfp4_normed(total, norm, EPSILON, *packed, bias, **options)[0], y)
