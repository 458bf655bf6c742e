"""The laws of the mixed-input product for Hopper: emulated on the host, compiled for sm_90a, run on a GPU."""

import ctypes
import re
from dataclasses import replace

import pytest
import torch

from quantrot.kernels.fp8.reference import gate, rms_norm
from quantrot.kernels.mixed import KINDS, hopper, hopper_plans, mixed_gemm
from quantrot.kernels.mixed.hopper_plans import Decode, Kernel, Plan
from quantrot.kernels.mixed.reference import MAX_RELATIVE_ERROR
from quantrot.kernels.mixed.tuned import DECODE
from tests.kernels.covering import few_or_every
from tests.kernels.test_mixed import exact_product, relative
from tests.kernels.test_mixed import operands as random_operands

gpu = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# plan, and the kernel's kind, wide type, whether the weight is narrow, blocks a group, zero points, scale, bias
CASES = {
    "prefill": (Plan(64, share=2, stages=3, halves=False), Kernel("packed", BF16, True, 0, False, BF16, None)),
    "prefill_wide": (Plan(224, stages=2), Kernel("uint8", FP16, True, 0, True, FP32, FP16)),
    "prefill_group": (Plan(64, share=2, stages=3, halves=False), Kernel("packed", BF16, True, 2, False, BF16, BF16)),
    "prefill_group64": (Plan(32, stages=3, groups=1), Kernel("int8", BF16, True, 1, True, BF16, None)),
    "prefill_96": (Plan(96, stages=3), Kernel("int8", FP16, True, 2, True, FP16, FP32)),
    "prefill_group64_64": (Plan(64, stages=4), Kernel("e4m3", BF16, True, 1, False, BF16, None)),
    "prefill_x": (Plan(96, share=2, odd=True, stages=3), Kernel("int8", BF16, False, 0, True, BF16, BF16)),
    "prefill_x240": (Plan(240, share=2, odd=True, stages=2), Kernel("uint8", BF16, False, 0, False, BF16, BF16)),
    "prefill_240": (Plan(240, share=2, odd=True, stages=2), Kernel("uint8", BF16, True, 0, False, BF16, BF16)),
    "prefill_256": (Plan(256, share=2, stages=2), Kernel("packed", BF16, True, 2, False, BF16, None)),
    "prefill_256_odd": (Plan(256, share=2, odd=True, stages=2), Kernel("uint8", FP16, True, 2, True, FP32, FP16)),
    "prefill_x_group": (Plan(64, stages=3), Kernel("uint8", FP16, False, 2, True, BF16, None)),
    "decode1": (Decode(0, stages=4), Kernel("packed", BF16, True, 0, False, BF16, None)),
    "decode1_group": (Decode(0, 1, 2, 2, stages=4, keep=1024), Kernel("packed", BF16, True, 2, False, BF16, BF16)),
    "decode8": (Decode(1, 3, 3, stages=6), Kernel("int8", FP16, True, 0, True, FP32, FP16)),
    "decode8_group64": (Decode(1, 2, 2, 1, 4, 1024), Kernel("e4m3", BF16, True, 1, False, BF16, None)),
    "decode16": (Decode(2, 1, 2, 2, stages=2), Kernel("packed", BF16, True, 1, True, BF16, None)),
    "decode16_group": (Decode(2, 2, 4, 1, 8), Kernel("uint8", FP16, True, 2, True, FP16, FP32)),
    "decode16_split": (Decode(2, 2, 2, 2, 4, split=2), Kernel("packed", BF16, True, 2, False, BF16, FP16)),
    "decode24": (Decode(3, 1, 2, 2, stages=4), Kernel("int8", BF16, True, 2, True, BF16, BF16)),
    "decode64": (Decode(8, 2, 1, stages=2), Kernel("packed", BF16, True, 0, False, BF16, None)),
    "gated1": (Decode(0, 2, 2, 1, 4, gated=True), Kernel("packed", BF16, True, 0, False, BF16, BF16)),
    "gated8_group": (Decode(1, 1, 2, 1, 4, gated=True), Kernel("packed", BF16, True, 2, False, BF16, None)),
    "gated16": (Decode(2, 3, 2, 2, 4, gated=True), Kernel("uint8", FP16, True, 1, True, FP32, FP16)),
    "gated16_split": (Decode(2, 1, 2, 2, 4, split=2, gated=True), Kernel("int8", FP16, True, 0, False, FP16, None)),
    "parts64": (Plan(64, 2, 2, stages=3), Kernel("packed", BF16, True, 2, False, BF16, None)),
    "parts128": (Plan(128, 1, 2, halves=False, stages=3), Kernel("packed", BF16, True, 2, False, BF16, None)),
    "parts_teams": (Plan(128, 2, 2, stages=2), Kernel("packed", BF16, True, 2, False, BF16, BF16)),
    "parts_group64": (Plan(128, 2, 2), Kernel("int8", FP16, True, 1, True, FP16, None)),
    "parts_192_rows": (Plan(128, 1, 2, groups=3, stages=3), Kernel("uint8", BF16, True, 0, True, BF16, BF16)),
    "parts_192_alone": (Plan(128, 1, groups=3, halves=False), Kernel("packed", BF16, True, 2, False, BF16, None)),
    "parts_192_alone64": (Plan(128, 1, groups=3, halves=False), Kernel("int8", FP16, True, 1, True, FP16, BF16)),
    "parts256": (Plan(256, 1, 2, stages=3), Kernel("packed", BF16, True, 0, False, FP32, FP32)),
    "parts256_group": (Plan(256, 1, 2, stages=3), Kernel("packed", BF16, True, 2, False, BF16, BF16)),
    "parts_long": (Plan(128, 2, 2, blocks=2), Kernel("packed", BF16, True, 0, False, BF16, None)),
    "parts_64_rows": (Plan(128, 2, groups=1, halves=False), Kernel("e4m3", BF16, True, 2, False, BF16, None)),
    "parts_64_split": (Plan(128, 2, 2, groups=1), Kernel("packed", BF16, True, 2, False, BF16, None)),
    "parts_64_192": (Plan(192, 2, 2, groups=1), Kernel("packed", BF16, True, 0, False, BF16, None)),
    "parts_192_192": (Plan(192, 1, groups=3, halves=False), Kernel("int8", BF16, True, 2, False, BF16, BF16)),
    "prefill_four": (Plan(64, share=2, groups=4, stages=3), Kernel("packed", BF16, True, 2, False, BF16, None)),
    "prefill_three": (
        Plan(144, share=2, odd=True, groups=3, stages=3), Kernel("packed", BF16, True, 2, False, BF16, None)
    ),
    "prefill_272": (Plan(272, share=2, odd=True, stages=3), Kernel("packed", BF16, True, 2, False, BF16, BF16)),
    "prefill_384": (Plan(384, stages=3), Kernel("int8", FP16, True, 1, True, BF16, None)),
    "prefill_x320": (Plan(320, share=2, stages=3), Kernel("uint8", BF16, False, 0, False, BF16, BF16)),
    "parts_352": (Plan(352, 1, 2), Kernel("packed", BF16, True, 0, False, BF16, None)),
    "parts_352_group": (Plan(352, 1, 2), Kernel("packed", BF16, True, 2, False, BF16, None)),
    "parts_apart": (Plan(128, 1, 2, apart=2), Kernel("packed", BF16, True, 2, False, BF16, BF16)),
    "parts_apart_256": (Plan(256, 1, 2, apart=2), Kernel("packed", BF16, True, 2, False, BF16, None)),
    "parts_apart_teams": (Plan(128, 2, 2, apart=2), Kernel("uint8", FP16, True, 0, True, BF16, None)),
    "prefill_x112": (Plan(112, share=2, odd=True, stages=3), Kernel("uint8", FP16, False, 0, False, BF16, None)),
}  # fmt: skip


def normed(plan: Decode) -> Decode:
    """The same with a norm in front of up to 1024 numbers."""
    return replace(plan.normed(1024), stages=plan.stages)


# with what is before and behind the product; the same without, by the same order of sums, is `apart`
AROUND = {
    "normed": (normed(Decode(0, 1, 4, 2, 8)), Kernel("packed", BF16, True, 0, False, BF16, BF16)),
    "normed_group": (normed(Decode(0, 1, 2, 1, 4, ahead=2)), Kernel("int8", FP16, True, 2, True, BF16, None)),
    "normed_gated": (normed(Decode(0, 2, 2, 1, 6, gated=True)), Kernel("packed", BF16, True, 2, False, BF16, None)),
    "added": (Decode(0, 2, 4, 1, 4, add=True), Kernel("packed", BF16, True, 0, False, BF16, BF16)),
    "added_group": (Decode(0, 1, 2, 2, 4, 1024, add=True), Kernel("packed", FP16, True, 2, False, BF16, None)),
    "both": (normed(Decode(0, 1, 2, 1, 4, add=True)), Kernel("uint8", FP16, True, 1, True, FP16, FP16)),
    "added8": (Decode(1, 3, 4, 1, 8, 1024, add=True), Kernel("packed", BF16, True, 0, False, BF16, BF16)),
    "added16_group": (Decode(2, 1, 2, 2, 4, add=True), Kernel("packed", FP16, True, 2, False, BF16, None)),
    "added16_split": (Decode(2, 2, 1, 1, 4, split=2, add=True), Kernel("int8", BF16, True, 1, True, BF16, FP16)),
}
ALL = CASES | AROUND
ALL |= {f"{name}_apart": (replace(plan, norm=0, add=False, ahead=0), kernel) for name, (plan, kernel) in AROUND.items()}
DRIVER = """
static std::string message;

// Matrices as {data, rows, columns, pitch in bytes, rows of a box, columns of a box, bytes of an element, swizzle}.
static quantrot::TensorMap map(const unsigned long long* m) {
  return {(unsigned char*)m[0], m[2], m[1], m[3], (unsigned)m[5], (unsigned)m[4], (unsigned)m[6], (unsigned)m[7]};
}

extern "C" const char* run(int which, const unsigned long long (*m)[8], const quantrot::MixedArgs* args, int blocks,
                           int cluster, int threads, int shared, int seed) {
  using Kernel = void(quantrot::TensorMap, quantrot::TensorMap, quantrot::TensorMap, quantrot::MixedArgs);
  static Kernel* const kernels[] = {NAMES};
  const auto codes = map(m[0]), wide = map(m[1]), y = map(m[2]);
  message = emulator::launch({(unsigned)blocks, 1, 1}, cluster, threads, shared, seed,
                             [&] { kernels[which](codes, wide, y, *args); });
  return message.c_str();
}
"""


@pytest.fixture(scope="module")
def emulator(emulated):
    """Every case's kernel on the host: emulator(case, x, weight, scale, zero, bias, seed) -> y."""
    entries = "".join(hopper.entry(*case, name=f"mixed_{name}") for name, case in ALL.items())
    names = ", ".join(f"mixed_{name}" for name in ALL)
    library = emulated(hopper.device_functions() + entries + DRIVER.replace("NAMES", names))
    library.run.restype = ctypes.c_char_p

    def run(name, x, weight, scale, zero=None, bias=None, seed=0, processors=4, early=False, **more):
        plan, kernel = ALL[name]
        wide, codes = (x, weight) if kernel.weight else (weight, x)
        columns, rows = wide.shape[0], codes.shape[0]
        codes = codes.view(torch.uint8)
        assert hopper.unsupported(codes, wide, scale, kernel.weight) is None
        assert hopper.kernel_of(wide, scale, zero, bias, kernel.kind, kernel.weight) == kernel
        assert isinstance(plan, Plan) or (plan.splits(wide.shape[1]) and columns <= plan.columns)
        y = torch.full((x.shape[0], weight.shape[0] >> is_gated(name)), float("nan"), dtype=wide.dtype)
        more["parts"] = hopper.scratch(plan, rows, columns, y.device)
        args = hopper.arguments(y, wide, scale, zero, bias, plan, early, **more)
        maps = (ctypes.c_ulonglong * 24)()
        for i, (t, box) in enumerate(zip((codes, wide, y), plan.boxes(columns, kernel.weight), strict=True)):
            maps[8 * i : 8 * i + 8] = (t.data_ptr(), *t.shape, t.stride(0) * t.itemsize, *box[:2], t.itemsize, box[2])
        message = library.run(
            list(ALL).index(name), maps, ctypes.byref(args), plan.grid(rows, columns, processors), plan.cluster,
            plan.threads, plan.shared_bytes(), seed,
        )  # fmt: skip
        assert message == b"", message.decode()
        return y

    return run


def is_gated(name: str) -> bool:
    return getattr(ALL[name][0], "gated", False)


def agrees(name: str, y: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether a kernel's y is the rounded product. Gated, but for an element and one in a thousand a rounding away:
    silu to 2 ulp of float32 may fall on the other side of a tie, or be 0 where it is below 2^-120."""
    exact = exact.to(y.dtype)
    if not is_gated(name):
        return torch.equal(y, exact)
    wanted = gate(exact)
    differs = (y.double() - wanted.double()).abs() > 2.0**-110
    near = torch.isclose(y.double(), wanted.double(), rtol=2.0**-6, atol=1e-30)
    return y.dtype == exact.dtype and bool(near.all()) and differs.sum().item() <= 1 + y.numel() / 1000


def tokens(name: str, m: int) -> int:
    """As many of m as the case's plan takes."""
    plan = CASES[name][0]
    return min(m, plan.columns) if isinstance(plan, Decode) else m


def operands(name: str, m: int, n: int, k: int, exact: bool = True, device: str = "cpu"):
    """(x, weight, scale, zero, bias) as the case's kernel takes them; exact: no float32 sum rounds."""
    kernel = ALL[name][1]
    groups = k // (64 * kernel.group) if kernel.group else 1
    narrow = "weight" if kernel.weight else "x"
    x, weight, scale, zero = random_operands(kernel.kind, kernel.wide, m, n, k, groups, narrow, exact, device)
    bias = None if kernel.bias is None else torch.randint(-8, 9, (n,), device=device).to(kernel.bias)
    return x, weight, scale.to(kernel.scale), zero if kernel.zero else None, bias


# --- In the emulator -------------------------------------------------------------------------------------------------


# Each second case by one of the others, too, by turns: three of each took a minute.
LARGEST, *OTHERS = (70, 264, 896), (1, 136, 640), (130, 72, 1024)
SHAPES = [(name, *shape) for i, name in enumerate(CASES) for shape in (LARGEST, *OTHERS[i // 2 % 2 :][: i % 2])]


@pytest.mark.parametrize(("name", "m", "n", "k"), SHAPES)
def test_every_kernel_is_exact_where_no_sum_rounds(emulator, name, m, n, k):
    torch.manual_seed(m)
    if CASES[name][1].group == 2 and k % 128:
        k += 64
    given = operands(name, tokens(name, m), n, k)
    y = emulator(name, *given, seed=m, early=m == 70)
    assert agrees(name, y, exact_product(*given))


WIDE = ["prefill_272", "prefill_384", "prefill_x320", "parts_352", "parts_352_group"]


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("m", [257, 400])
def test_a_tile_may_have_more_columns_than_a_product(emulator, name, m):
    torch.manual_seed(m)
    given = operands(name, m, 136, 384)
    if not CASES[name][1].weight:
        given = operands(name, 136, m - m % 8, 384)
    y = emulator(name, *given, seed=m)
    assert agrees(name, y, exact_product(*given))


@pytest.mark.parametrize("name", ["prefill", "prefill_x", "decode1", "decode8", "prefill_wide"])
def test_k_need_not_be_whole_blocks(emulator, name):
    torch.manual_seed(0)
    for k in (16, 80, 592):
        given = operands(name, tokens(name, 5), 40, k)
        y = emulator(name, *given, seed=k)
        assert torch.equal(y, exact_product(*given).to(y.dtype))


@pytest.mark.parametrize(
    "name",
    [
        "prefill",
        "prefill_96",
        "prefill_256",
        "decode8_group64",
        "decode16_group",
        "parts256",
        "parts_teams",
        "parts_apart",
    ],
)
def test_bits_do_not_depend_on_what_runs_first(emulator, name):
    torch.manual_seed(0)
    given = operands(name, tokens(name, 40), 264, 1024, exact=False)
    first, *others = (emulator(name, *given, seed=seed, processors=2 + seed % 3) for seed in range(4))
    assert all(torch.equal(first, other) for other in others)
    assert relative(first, exact_product(*given)) <= MAX_RELATIVE_ERROR[first.dtype]


GROUPED = [
    "prefill_group64_64",
    "prefill_group",
    "prefill_256",
    "prefill_x_group",
    "parts128",
    "parts_teams",
    "parts_apart",
]


@pytest.mark.parametrize("name", GROUPED)
def test_a_scale_of_infinity_spoils_its_row_only(emulator, name):
    torch.manual_seed(0)
    x, weight, scale, zero, bias = operands(name, 16, 16, 384)
    scale[3, 1], scale[4, 0], scale[4, 1] = float("inf"), float("inf"), float("nan")
    y = emulator(name, x, weight, scale, zero, bias)
    y, exact = (t if CASES[name][1].weight else t.T for t in (y, exact_product(x, weight, scale, zero, bias)))
    rest = [i for i in range(16) if i not in (3, 4)]
    assert torch.equal(y[:, rest], exact[:, rest].to(y.dtype)) and not y[:, 3:5].isfinite().any()


@pytest.mark.parametrize("name", ["prefill_group64_64", "prefill_group", "prefill_256"])
def test_scales_of_any_size_leave_each_row_its_error(emulator, name):
    torch.manual_seed(0)
    x, weight, scale, zero, bias = operands(name, 40, 64, 1024, exact=False)
    scale *= torch.exp2(torch.randint(-30, 30, scale.shape)).to(scale.dtype)
    y = emulator(name, x, weight, scale, zero, None if bias is None else torch.zeros_like(bias)).double()
    exact = exact_product(x, weight, scale, zero)
    assert ((y - exact).norm(dim=0) / exact.norm(dim=0)).max() <= 1.3 * MAX_RELATIVE_ERROR[x.dtype]  # of 40 elements


@pytest.mark.parametrize("name", GROUPED)
def test_groups_without_a_scale_add_nothing(emulator, name):
    """The sums are kept in units of the last scale: neither 0 nor one that is too small to matter may become it."""
    torch.manual_seed(0)
    x, weight, scale, zero, bias = operands(name, 16, 16, 640)
    scale[0], scale[1, 0], scale[2, -1], scale[3, 1:3] = 0, 0, 0, 0
    scale[4, 1:] *= -1
    if scale.dtype != torch.float16:
        scale[5, 1], scale[6, 0] = 2.0**-100, 2.0**-100
    y = emulator(name, x, weight, scale, zero, bias)
    assert torch.equal(y, exact_product(x, weight, scale, zero, bias).to(y.dtype))


def around_operands(name: str, n: int, k: int, exact: bool, device: str = "cpu"):
    """What AROUND's kernel takes, and its norm, epsilon and residual. exact: no sum of squares rounds."""
    plan = AROUND[name][0]
    x, weight, scale, zero, bias = operands(name, plan.columns - (plan.columns > 1), n, k, exact, device)
    dtype = x.dtype
    norm = (torch.rand(k, device=device) + 0.5).to(dtype) if plan.norm else None
    residual = torch.randn(len(x), n, device=device).to(dtype) if plan.add else None
    return (x, weight, scale, zero, bias), {"norm": norm, "epsilon": 0.1, "residual": residual}


def through_norm(x, norm, epsilon, residual):
    """Of the tokens; the mean as a multiplication, as GPUs have it."""
    if norm is None:
        return x
    mean = x.float().square().sum(-1, keepdim=True) * torch.tensor(1 / x.shape[1])
    return norm * (x.float() * torch.rsqrt(mean + epsilon)).to(x.dtype)


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize(("n", "k"), [(16, 256), (136, 640), (264, 1024)])
def test_a_product_has_the_bits_of_norm_product_gate_and_residual_apart(emulator, name, n, k):
    torch.manual_seed(k)
    n += 8 * is_gated(name) if n == 136 else 0
    k += -48 if k == 640 and not AROUND[name][1].group else 0
    (x, *rest), more = around_operands(name, n, k, True)
    want = emulator(f"{name}_apart", through_norm(x, **more), *rest, seed=n)
    want = want if more["residual"] is None else want + more["residual"]
    for seed in range(3):
        y = emulator(name, x, *rest, seed=seed, early=seed != 1, processors=2 + seed, **more)
        assert torch.equal(y, want)


@pytest.mark.parametrize("name", ["normed", "normed_group", "both"])
def test_one_token_meets_float64(emulator, name):
    torch.manual_seed(0)
    (x, *rest), more = around_operands(name, 136, 1024, False)
    first, *others = (emulator(name, x, *rest, seed=seed, early=True, **more) for seed in range(3))
    assert all(torch.equal(first, other) for other in others)
    wide = {key: t.double() if isinstance(t, torch.Tensor) else t for key, t in more.items()}
    want = x.double() * torch.rsqrt(x.double().square().mean() + 0.1) * wide["norm"]
    want = exact_product(want, *rest) + (0 if wide["residual"] is None else wide["residual"])
    assert relative(first, want) <= 2.5 * MAX_RELATIVE_ERROR[x.dtype]  # the token is rounded twice before


# --- Plans and what is supported -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "k"), [(4096, 4096), (8192, 8192), (28672, 4096), (6144, 4096), (4096, 14336), (1024, 512), (64, 192)]
)
@pytest.mark.parametrize("group", [0, 1, 2])
@pytest.mark.parametrize("weight", [True, False])
def test_every_plan_fits(n, k, group, weight):
    for m in (1, 7, 16, 33, 64, 65, 200, 257, 384, 512, 640, 1024, 4096):
        rows, columns = (n, m) if weight else (m, n)
        plan = hopper_plans.plan_for(rows, columns, k, group, weight)
        assert plan.depth >= 2 and (plan.shared_bytes() + 1024) * plan.resident <= 228 << 10
        assert plan.cluster <= 2 and plan.splits(k)
        if isinstance(plan, Plan):
            assert not plan.teams or (weight and plan.grid(rows, columns, 132) <= 132)
            assert plan.odd == (plan.share == 2 and -(-rows // plan.rows) % 2 == 1)
        else:
            assert weight
        assert plan.grid(rows, columns, 132) % plan.cluster == 0


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "group", "expected"),
    [
        (4096, 4096, 4096, 0, Plan(256, share=2, halves=False)),
        (4096, 4096, 4096, 2, Plan(256, share=2)),
        (28672, 1024, 4096, 2, Plan(256, share=2)),
        (28672, 256, 4096, 0, Plan(256, share=2)),
        (4096, 512, 4096, 2, Plan(256, 1, 2)),
        (8192, 256, 8192, 0, Plan(256, 1, 2)),
        (8192, 256, 8192, 2, Plan(256, 1, 2)),
        (6144, 256, 4096, 0, Plan(128, 1, 2, groups=3, halves=False)),
        (6144, 256, 4096, 2, Plan(128, 1, 2, groups=3, halves=False)),
        (6144, 512, 4096, 0, Plan(128, 1, groups=3, halves=False)),
        (6144, 512, 4096, 2, Plan(128, 1, groups=3, halves=False)),
        (4096, 256, 4096, 0, Plan(128, 2, groups=1, halves=False)),
        (4096, 256, 4096, 2, Plan(128, 2, groups=1, halves=False)),
        (4096, 256, 14336, 0, Plan(128, 2, 2, blocks=2, halves=False)),
        (4096, 256, 14336, 2, Plan(256, 1, 2, apart=2)),
        (2048, 128, 8192, 0, Plan(128, 2, 2, groups=1, halves=False, apart=2)),
        (2048, 256, 2048, 2, Plan(128, 2, 2, groups=1, halves=False)),
        (3584, 192, 3584, 2, Plan(96, 2, groups=1, halves=False)),
        (4096, 128, 4096, 0, Plan(128, 2, 2, groups=1, halves=False)),
        (4096, 128, 4096, 2, Plan(128, 2, 2, groups=1, halves=False)),
        (8192, 64, 8192, 0, Plan(64, 2, groups=1, halves=False)),
        (8192, 64, 8192, 2, Plan(64, 2, 2, halves=False)),
        (28672, 129, 4096, 0, Plan(144, share=2)),
        (28672, 128, 4096, 0, Plan(128, share=2, groups=4)),
        (4096, 129, 14336, 0, Plan(160, 1, 2, apart=2)),
        (4096, 257, 4096, 2, Plan(160, 2, groups=1)),
        (6144, 257, 4096, 0, Plan(160, 1, 2, groups=3, halves=False)),
        (28672, 257, 4096, 2, Plan(272, share=2)),
        (28672, 384, 4096, 0, Plan(384, share=2)),
        (8192, 257, 8192, 0, Plan(288, 1, 2)),
        (17920, 129, 1536, 0, Plan(144, 1, groups=3, halves=False)),
        (17920, 256, 1536, 2, Plan(128, share=2, groups=3)),
        (28672, 32, 4096, 2, Decode(4, 7, 2).fitted()),
        (6144, 32, 4096, 2, Decode(4, 3, 4).fitted()),
        (28672, 64, 4096, 0, Plan(64, share=2, groups=4)),
        (28672, 64, 4096, 2, Plan(64, share=2, groups=4)),
    ],
)
def test_the_rule_chooses_what_was_fastest(rows, columns, depth, group, expected):
    assert hopper_plans.plan_for(rows, columns, depth, group, True) == expected


def test_the_rule_chooses_what_was_fastest_for_narrow_activations():
    assert hopper_plans.plan_for(3456, 4096, 2048, 0, False) == Plan(224, share=2, odd=True)


def test_codes_that_are_no_bytes_are_refused():
    x, weight, scale, _ = random_operands("packed", BF16, 16, 64, 256, 1)
    with pytest.raises(AssertionError, match="bytes"):
        hopper.multiply(x, weight, scale, None, None, "packed", True)


def test_an_odd_row_of_tiles_takes_half_as_many_clusters():
    assert Plan(224, share=2, odd=True).tiles(27 * 128, 4096) == 13 * 19 + 10
    assert Plan(224, share=2).tiles(27 * 128, 4096) == 14 * 19
    assert Plan(256, share=2, odd=True).tiles(28 * 128, 4096) == 14 * 16


def test_measured_plans_are_the_ones_that_run():
    for (n, k, group, m), plan in DECODE.items():
        found = hopper_plans.plan_for(n, m, k, group // 64, True)
        assert isinstance(found, Decode) and found.stages % found.teams == 0 and found.columns >= m
        assert found == Decode(*plan) and found.splits(k)
    assert hopper_plans.plan_for(4096, 7, 4096, 0, True) == hopper_plans.plan_for(4096, 8, 4096, 0, True)


def test_what_it_does_not_take_is_named():
    def why(kind="int8", n=64, k=128, wide=BF16, groups=1):
        x, weight, scale, _ = random_operands(kind, wide, 4, n, k, groups)
        return hopper.unsupported(weight, x, scale, True)

    assert why() is None
    assert "multiple of 16" in why(k=24)
    assert "N of 8" in why(n=60)
    assert "groups of 32" in why(groups=4)
    assert "the wide operand is" in why(wide=FP32)


# --- Compiled for sm_90a ---------------------------------------------------------------------------------------------


def registers(plan: Plan | Decode) -> int:
    """That a thread may have."""
    return 65536 // plan.threads // plan.resident


def one_of_a_kind(kernels):
    """Of kernels that hold the same in registers the one that may have fewest: of those for a few tokens that differ in
    warps, teams, stages or the type of scale and bias; of others that differ in stages or these types."""
    found = {}
    for plan, kernel in kernels:
        kind: tuple = (replace(plan, stages=0),) if isinstance(plan, Plan) else ()
        if isinstance(plan, Decode):
            kind = plan.tokens, plan.height, plan.gated, plan.norm > 0, plan.add, plan.split > 1, plan.keep > 0
        kind += kernel.kind, kernel.wide, kernel.weight, kernel.group, kernel.zero
        before, _ = found.setdefault(kind, (plan, kernel))
        if registers(plan) < registers(before):
            found[kind] = plan, kernel
    return list(found.values())


@few_or_every
@pytest.mark.parametrize("part", range(2))
def test_no_kernel_spills_or_serializes_its_products(compiled_cuda, chosen, part):
    kernels = {}
    tokens = [(1, 24, 48, 128, 384, 1024), (1, 64, 4096), (1, 16, 32, 64, 256, 512, 4096)]
    for group, some in enumerate(tokens):  # a scale a channel, or in groups of 64 or 128: most tiles with one of them
        for m in some:
            kernel = Kernel("packed", BF16, True, group, False, BF16, None)
            for n, k in [(4096, 4096), (4096, 14336), (6144, 4096), (8192, 8192), (28672, 4096)]:
                kernels[hopper_plans.plan_for(n, m, k, group, True), kernel] = None
        for n, k, *rest in [
            (6144, 4096, True, False, False),
            (28672, 4096, True, True, False),
            (4096, 14336, False, False, True),
        ]:
            kernels[hopper_plans.token_plan(n, k, group, *rest), kernel] = None
        for m in (8, 16):
            for n, k, rest in [
                (28672, 4096, {"gated": True}),
                (4096, 4096, {"add": True}),
                (4096, 14336, {"add": True}),
                (8192, 8192, {"add": True}),
            ]:
                kernels[replace(hopper_plans.plan_for(n, m, k, group, True), **rest), kernel] = None
    for n, k, group, m in DECODE:
        kernel = Kernel("packed", BF16, True, group // 64, False, BF16, None)
        kernels[hopper_plans.plan_for(n, m, k, group // 64, True), kernel] = None
    kernels[hopper_plans.plan_for(3456, 4096, 2048, 0, False), Kernel("int8", BF16, False, 0, False, BF16, None)] = None
    ours = chosen(one_of_a_kind([*kernels, *CASES.values(), *AROUND.values()]), ("stages", "keep"))[part::2]
    entries = "".join(hopper.entry(*kernel, name=f"mixed{i}") for i, kernel in enumerate(ours))
    made = compiled_cuda(hopper.device_functions() + entries)
    assert "warning" not in made.log and "C75" not in made.log, made.log  # C7510 and others: products one after another
    assert made.stacks == made.spilled == [0] * len(ours), made.log


def test_a_stage_is_handed_back_behind_a_fence(ptx_of):
    """Without it the arrival overtakes loads of codes on their way, and the copy engine writes under them; this needs
    a GPU to be seen, so here it is read off the instructions."""
    cases = [case for case in (CASES | AROUND).values() if isinstance(case[0], Decode)]
    kernels = {(p.tokens > 0, p.keep > 0, p.split > 1, p.gated, p.norm > 0, p.add): (p, k) for p, k in cases}.values()
    entries = "".join(hopper.entry(*kernel, name=f"mixed{i}") for i, kernel in enumerate(kernels))
    wanted = r"ld\.shared|fence\.proxy\.async|mbarrier\.arrive(?!\.expect_tx)"
    found = re.findall(wanted, ptx_of(hopper.device_functions() + entries))
    before = [found[i - 1] for i, what in enumerate(found) if what == "mbarrier.arrive"]
    assert len(before) >= len(kernels) and set(before) == {"fence.proxy.async"}


# --- On a GPU --------------------------------------------------------------------------------------------------------


def run_case(name, x, weight, scale, zero, bias):
    plan, kernel = CASES[name]
    if isinstance(plan, Decode) and plan.keep:
        plan = replace(plan, keep=x.shape[1])
    x, weight = (t.view(torch.uint8) if t.dtype in KINDS else t for t in (x, weight))
    gated = is_gated(name)
    return hopper.multiply(x, weight, scale, zero, bias, kernel.kind, kernel.weight, plan, gated=gated)


@gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 136, 1024), (70, 264, 2048), (300, 1000, 4096)])
def test_gpu_kernels_are_exact_where_no_sum_rounds(name, m, n, k):
    torch.manual_seed(m)
    given = operands(name, tokens(name, m), n, k, device="cuda")
    y = run_case(name, *given)
    assert agrees(name, y, exact_product(*given))


@gpu
@pytest.mark.parametrize("name", CASES)
def test_gpu_runs_are_bit_equal_and_meet_float64(name):
    torch.manual_seed(0)
    given = operands(name, tokens(name, 130), 2056, 4096, exact=False, device="cuda")
    first = run_case(name, *given)
    if not is_gated(name):
        assert relative(first, exact_product(*given)) <= MAX_RELATIVE_ERROR[first.dtype]
    for _ in range(50):
        assert torch.equal(run_case(name, *given), first)


@gpu
@pytest.mark.parametrize("kind", ["int8", "uint8", "packed", "e4m3"])
@pytest.mark.parametrize("wide", [BF16, FP16], ids=str)
@pytest.mark.parametrize("groups", [1, 4])
def test_gpu_all_codes_are_exact(kind, wide, groups):
    x = torch.eye(256, device="cuda", dtype=wide)
    codes = torch.arange(256, device="cuda", dtype=torch.uint8).repeat(64, 1)
    dtype = {"int8": torch.int8, "uint8": torch.uint8, "packed": torch.int32, "e4m3": torch.float8_e4m3fn}[kind]
    weight, scale = codes.view(dtype), torch.ones(64, groups, device="cuda")
    y = mixed_gemm(x, weight, scale, backend="hopper")
    expected = torch.cat([mixed_gemm(row[None].cpu(), weight.cpu(), scale.cpu()) for row in x])
    finite = expected.isfinite()  # a NaN code spoils its row of the product
    assert torch.equal(y.cpu()[finite], expected[finite])


@gpu
@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize(("n", "k"), [(144, 1024), (2064, 512)])
def test_gpu_a_product_has_the_bits_of_norm_product_gate_and_residual_apart(name, n, k):
    torch.manual_seed(0)
    plan, kernel = AROUND[name]
    (x, weight, *rest), more = around_operands(name, n, k, True, "cuda")
    codes, flags = weight.view(torch.uint8), (kernel.kind, True)
    h = x if more["norm"] is None else rms_norm(x, more["norm"], more["epsilon"])
    want = hopper.multiply(h, codes, *rest, *flags, ALL[f"{name}_apart"][0], gated=plan.gated)
    want = want if more["residual"] is None else want + more["residual"]
    for ready in (True, False) * 25:
        y = hopper.multiply(x, codes, *rest, *flags, plan, ready=ready, gated=plan.gated, **more)
        assert torch.equal(y, want)
