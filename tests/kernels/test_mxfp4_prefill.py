"""Bfloat16 tokens by a packed weight on Hopper: emulated on the host, compiled for sm_90a, run on a GPU."""

import ctypes
from dataclasses import replace

import pytest
import torch

from quantrot.kernels.mxfp4 import dequantize_mxfp4, mxfp4_gemm, quantize_mxfp4

pytest.importorskip("triton", reason="triton is not installed")

from quantrot.kernels.mxfp4 import hopper_prefill  # noqa: E402
from quantrot.kernels.mxfp4.hopper_prefill import Plan  # noqa: E402
from tests.kernels.test_mixed_hopper import DRIVER  # noqa: E402

gpu = pytest.mark.gpu
BF16 = torch.bfloat16
CASES = {
    "alone": Plan(64, stages=3, halves=False),
    "shared": Plan(96, share=2, stages=3),
    "odd": Plan(128, share=2, odd=True, stages=2, halves=False),
    "wide": Plan(256, share=2, stages=2),
    "parts": Plan(256, 1, 2, stages=3),
    "parts_teams": Plan(128, 2, groups=1, halves=False, stages=2),
    "parts_192_rows": Plan(128, 1, 2, groups=3, halves=False, stages=3),
    "parts_192_alone": Plan(128, 1, groups=3, halves=False, stages=3),
    "deep": Plan(32, 2, groups=1, blocks=2, stages=2),
    "deep_split": Plan(32, 2, 2, groups=1, blocks=2, stages=3),
    "deep_four": Plan(64, 2, 2, groups=2, blocks=2, stages=2),
    "deep_tall": Plan(96, 1, groups=4, blocks=2, stages=2),
    "deeper": Plan(32, 2, groups=2, blocks=4, stages=2),
}


@pytest.fixture(scope="module")
def library(emulated):
    entries = "".join(hopper_prefill.entry(plan, f"prefill_{name}") for name, plan in CASES.items())
    names = ", ".join(f"prefill_{name}" for name in CASES)
    library = emulated(hopper_prefill.device_functions() + entries + DRIVER.replace("NAMES", names))
    library.run.restype = ctypes.c_char_p
    return library


def run(library, name, packed, x, y, args, seed, processors):
    plan = CASES[name]
    maps = (ctypes.c_ulonglong * 24)()
    for i, (t, box) in enumerate(zip((packed, x, y), plan.boxes(len(x)), strict=True)):
        maps[8 * i : 8 * i + 8] = (t.data_ptr(), *t.shape, t.stride(0) * t.itemsize, *box[:2], t.itemsize, box[2])
    message = library.run(
        list(CASES).index(name), maps, ctypes.byref(args), plan.grid(*y.T.shape, processors), plan.cluster,
        plan.threads, plan.bytes_for(x.shape[1]), seed,
    )  # fmt: skip
    assert message == b"", message.decode()


@pytest.fixture(scope="module")
def emulator(library):
    """Every case's kernel on the host: emulator(case, x, packed, scale, seed) -> y."""

    def multiply(name, x, packed, scale, seed=0, processors=4, settled=False):
        assert hopper_prefill.fits(x, packed.shape[0])
        y = torch.full((x.shape[0], packed.shape[0]), float("nan"), dtype=x.dtype)
        args = hopper_prefill.arguments(x, scale, y, CASES[name], settled)
        run(library, name, packed, x, y, args, seed, processors)
        return y

    return multiply


def operands(m, n, k, spread=3, device="cpu"):
    """x of small integers, random codes, scales of `spread` binades: no sum in float32 rounds."""
    x = torch.randint(-8, 9, (m, k)).to(BF16)
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scale = torch.randint(120, 120 + spread, (n, k // 32), dtype=torch.uint8)
    return x.to(device), packed.to(device), scale.to(device)


def exact(x, packed, scale):
    return x.double() @ dequantize_mxfp4(packed, scale, torch.float32).double().T


# --- In the emulator -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("m", "n", "k"), [(33, 136, 64), (70, 264, 640), (130, 72, 448)])
def test_every_kernel_is_exact_where_no_sum_rounds(emulator, name, m, n, k):
    torch.manual_seed(m)
    k = k if CASES[name].splits(k) and k % (64 * CASES[name].blocks) == 0 else 1024
    given = operands(m, n, k)
    y = emulator(name, *given, seed=m, settled=m == 70)
    assert torch.equal(y, exact(*given).to(BF16))


@pytest.mark.parametrize("name", ["alone", "shared", "parts", "parts_teams", "deep"])
def test_bits_do_not_depend_on_what_runs_first(emulator, name):
    torch.manual_seed(0)
    x, packed, scale = operands(40, 264, 512)
    x = torch.randn(x.shape).to(BF16)
    first, *others = (emulator(name, x, packed, scale, seed=seed, processors=2 + seed % 3) for seed in range(4))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("name", ["alone", "deep"])
def test_scales_at_the_ends_of_what_is_taken_and_past_them(emulator, name):
    """From 2^-62 to 2^65 exactly; infinity past that, and of NaN."""
    torch.manual_seed(0)
    x, packed, scale = operands(33, 64, 64 if name == "alone" else 512)
    x[:] = 1
    scale[0], scale[1], scale[2] = 65, 192, 255
    packed[3, 16:], scale[4, 1] = 0, 193
    packed[4, 16:] = 0x22
    y = emulator(name, x, packed, scale)
    rest = [i for i in range(64) if i not in (2, 4)]
    assert torch.equal(y[:, rest], exact(x, packed, scale)[:, rest].to(BF16))
    assert not y[:, [2, 4]].isfinite().any()


@pytest.mark.parametrize("name", ["alone", "deep"])
def test_a_token_of_inf_or_nan_is_so_by_itself(emulator, name):
    torch.manual_seed(0)
    x, packed, scale = operands(36, 72, 512)
    x[3, 7], x[5, 300], x[9] = torch.inf, torch.nan, 0
    packed[:, 3] = packed[:, 3] & 0x0F | 0x20  # column 7 is 1
    y = emulator(name, x, packed, scale)
    assert y[3].isinf().all() and y[5].isnan().all() and not y[9].any()
    rest = [i for i in range(36) if i not in (3, 5)]
    assert torch.equal(y[rest], exact(x[rest], packed, scale).to(BF16))


# --- Plans and compiling ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (28672, 4096), (4096, 14336), (200, 192), (8, 64)])
@pytest.mark.parametrize("m", [33, 64, 90, 128, 200, 256, 512, 1024, 8192])
def test_every_plan_fits(n, k, m):
    plan = hopper_prefill.plan_for(m, n, k)
    assert plan.depth >= 2 and plan.bytes_for(k) <= 227 << 10 and plan.splits(k)
    assert plan.odd == (plan.share == 2 and -(-n // 128) % 2 == 1)


@pytest.mark.parametrize(
    "name", ["alone", "wide", "parts", "parts_192_alone", "deep", "deep_four", "deep_tall", "deeper"]
)
def test_kernels_compile_without_spills(name, compiled_cuda):
    made = compiled_cuda(hopper_prefill.device_functions() + hopper_prefill.entry(CASES[name]))
    assert made.spilled == [0], made.log
    assert "C7508" not in made.log and "serialized" not in made.log, made.log


# --- On a GPU --------------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (33, 4096, 4096),
        (64, 4096, 14336),
        (70, 28672, 4096),
        (96, 200, 1152),
        (128, 8192, 8192),
        (256, 8192, 8192),
        (130, 6144, 4096),
        (1024, 4096, 14336),
        (1000, 8200, 8192),
        (4097, 384, 640),
    ],
)
def test_a_gpu_gives_the_exact_product_once_rounded(m, n, k):
    torch.manual_seed(m)
    given = operands(m, n, k, 2, "cuda")
    for settled in (False, True):
        y = mxfp4_gemm(*given, settled=settled)
        assert torch.equal(y, exact(*given).to(BF16))


@gpu
@pytest.mark.parametrize("plan", [plan for plan, _ in hopper_prefill.DEEP])
def test_every_deep_plan_gives_the_exact_product_once_rounded(plan):
    for m, n, k in ((plan.columns, 4096, 2048), (plan.columns - 15, 1000, 3200)):
        given = operands(m, n, k, 2, "cuda")
        for split in (1, 2):
            y = hopper_prefill.multiply(*given, replace(plan, split=split).fitted(k))
            assert torch.equal(y, exact(*given).to(BF16))


@gpu
def test_every_plan_of_one_part_gives_the_same_bits():
    x = torch.randn(700, 1024, device="cuda", dtype=BF16)
    packed, scale = quantize_mxfp4(torch.randn(1160, 1024, device="cuda") / 32, "mse")
    expected = hopper_prefill.multiply(x, packed, scale, Plan(256))
    for width in (64, 96, 128, 160, 192, 224, 240, 256):
        for share, halves in ((1, True), (2, True), (2, False)):
            plan = Plan(width, share=share, odd=share == 2 and -(-1160 // 128) % 2 == 1, halves=halves)
            assert torch.equal(hopper_prefill.multiply(x, packed, scale, plan), expected)
