"""One token and an INT4 cache in CUDA C++: the kernel in the emulator, compiled, and on a GPU."""

import ctypes

import pytest
import torch

from quantrot.kernels.attention import int4_hopper
from quantrot.kernels.attention.int4_hopper import Plan
from quantrot.kernels.attention.int4_token import NO_TURN
from quantrot.kernels.nvrtc import MAX_SHARED, SM_SHARED
from tests.kernels.covering import few_or_every
from tests.kernels.test_attention_int4 import BF16, FP16, SPACE, check, exact, operands

gpu = pytest.mark.gpu

# plan, head_dim, query heads a key head, groups of a head, dtype
KERNELS = [
    (Plan(2, 2, 1, 3), 64, 4, 1, BF16),
    (Plan(2, 4), 128, 3, 2, FP16),
    (Plan(4, 1, 2), 128, 8, 1, BF16),
    (Plan(1, 2, 1, 1), 256, 1, 4, BF16),
    (Plan(2, 1), 256, 7, 2, FP16),
    (Plan(8, 3), 128, 4, 2, BF16),
]
OTHERS = [  # that are launched, too
    (Plan(8, 3, 2), 128, 4, 2, BF16),
    (Plan(8, 16), 64, 4, 1, FP16),
    (Plan(4, 1, 4), 128, 8, 2, FP16),
    (Plan(4, 1, 4), 64, 8, 1, BF16),
    (Plan(8, 1, 2), 64, 4, 1, BF16),
]
RUN = """
#include <string>
static std::string message;

using Args = quantrot::CodedTokenArgs;
extern "C" const char* run(int which, const Args* args, int split, int rows, int threads, int shared, int seed) {
  static void (*const kernels[])(Args) = {NAMES};
  message = emulator::launch({(unsigned)split, (unsigned)rows, 1}, 1, threads, shared, seed,
                             [&] { kernels[which](*args); });
  for (const unsigned counter : counters)
    if (counter) message = "a counter that is not zero again";
  return message.c_str();
}
"""


def entries(kernels):
    names = [f"attend_{i}" for i in range(len(kernels))]
    made = [
        int4_hopper.entry(*kernel).replace("attend_codes(", f"{n}(", 1)
        for n, kernel in zip(names, kernels, strict=True)
    ]
    return "".join(made), names


@pytest.fixture(scope="module")
def emulator(emulated):
    """The kernels on the host: emulator(number, seed, advance) is what `check` takes."""
    ours, names = entries(KERNELS)
    source = int4_hopper.device_functions()
    for header, first in (("one_token.h", "struct TokenArgs"), ("int4_token.h", "struct CodedTokenArgs")):
        begin = f"namespace quantrot {{\n\n{first}"
        assert begin in source
        source = source.replace(begin, f'#include "{header}"\n{begin}', 1)
    source += ours.replace('extern "C" __global__', "__global__")
    library = emulated(source + RUN.replace("NAMES", ", ".join(names)))
    library.run.restype = ctypes.c_char_p

    def attend_by(number, seed=0, advance=True):
        plan, dim, share, groups, _ = KERNELS[number]

        def attend(q, k, v, cache, count, at, mask, turn=NO_TURN):
            assert int4_hopper.unsupported(q, cache) is None
            out = torch.full((len(q), 1, q.shape[1], dim), float("nan"), dtype=q.dtype)
            counted, scale = count is not None, dim**-0.5
            shared, rows = plan.bytes_of(dim, share, groups), len(q) * cache[0].shape[1]
            parts = torch.full((rows * share * plan.split * (dim + 4),), float("nan"))
            rest = cache[0].shape[2], mask, scale, counted and advance, out, parts, number
            args = int4_hopper.arguments(q, k, v, turn, cache, count, at, *rest)
            message = library.run(number, ctypes.byref(args), plan.split, rows, plan.threads, shared, seed)
            assert message == b"", message.decode()
            assert not counted or int(count) == at + advance
            return out

        return attend

    return attend_by


@pytest.mark.parametrize(
    ("number", "tokens"),
    [(0, 0), (0, 1), (0, 15), (0, 16), (0, 150), (1, 33), (1, 200), (2, 70), (3, 40), (4, 100), (5, 17), (5, 260)],
)
def test_the_kernel_in_the_emulator_meets_float64(emulator, number, tokens):
    _, dim, share, groups, dtype = KERNELS[number]
    case = 2, share, 2, dim, tokens, tokens // 8 * 8 + 8, dtype
    for i in range(2):
        how = {"group": dim // groups, "turned": ("", "rope", "rotated", "both")[tokens % 2 + 2 * i]}
        check(emulator(number, i, advance=i == 0), case, i == 0, tokens % 3 > 0 or i == 0, **how)


def test_what_is_hidden_or_behind_may_be_nan_and_a_nan_that_is_seen_is_its_heads(emulator):
    q, k, v, cache = operands(2, 4, 2, 64, 100, 128, BF16)
    for part in cache[1], cache[2], cache[4], cache[5]:
        part[:, :, 101:] = float("nan")
        part[0, :, 5] = float("nan")
    mask = torch.ones(2, 1, 1, 128, dtype=torch.bool)
    mask[0, ..., 5], mask[1] = False, False
    wanted = [t.nan_to_num(0) for t in SPACE["stored"](k, v, cache, 100)]
    y = emulator(0)(q, k, v, cache, torch.tensor(100), 100, mask)
    expected = exact(q, wanted, 100, mask)
    assert not y[1].any() and (y - expected).norm() <= SPACE["TOLERANCE"][BF16] * expected.norm()
    assert emulator(0)(q, k, v, cache, torch.tensor(100), 100, None)[0].isnan().all()


def test_a_new_token_of_infinities_or_nan_is_coded_as_quantize_int4_does(emulator):
    q, k, v, cache = operands(2, 3, 2, 128, 70, 80, FP16)
    k[0, 0, 0, 70], k[1, 0, 0, 3], k[1, 1, 0, :64] = float("inf"), float("-inf"), 0.5
    v[1, 1, 0, 3], v[0, 1, 0, 64:] = float("nan"), -0.0
    wanted = SPACE["stored"](k, v, cache, 70)
    y = emulator(1)(q, k, v, cache, torch.tensor(70), 70, None)
    for mine, its in zip(cache, wanted, strict=True):
        assert torch.equal(mine.nan_to_num(99), its.nan_to_num(99))
    assert torch.equal(y.isnan(), exact(q, wanted, 70).isnan()) and 0 < y.isnan().sum() < y.numel()


@pytest.mark.parametrize("number", [0, 1, 3])
def test_scales_and_queries_of_any_size_are_met(emulator, number):
    _, dim, share, groups, dtype = KERNELS[number]
    q, k, v, cache = operands(2, share, 2, dim, 140, 144, dtype, group=dim // groups)
    q = q * torch.tensor([2.0**-12, 30.0]).view(2, 1, 1, 1).to(dtype)
    powers = torch.randint(-60, 60, cache[4].shape, generator=torch.Generator().manual_seed(1)) - 50 * (dtype == FP16)
    powers = torch.exp2(powers.float()).to(BF16)
    cache = *cache[:4], cache[4] * powers, cache[5] * powers
    wanted = SPACE["stored"](k, v, cache, 140)
    y = emulator(number)(q, k, v, cache, torch.tensor(140), 140, None).double()
    expected = exact(q, wanted, 140)
    for i in range(2):  # of each sequence by itself
        assert (y[i] - expected[i]).norm() <= SPACE["TOLERANCE"][dtype] * expected[i].norm()


def test_a_full_cache_stores_nothing(emulator):
    q, k, v, cache = operands(1, 4, 1, 64, 32, 32, BF16)
    before = [t.clone() for t in cache]
    assert emulator(0)(q, k, v, cache, torch.tensor(32), 32, None).isnan().all()
    assert all(map(torch.equal, cache, before))


def test_what_it_does_not_take_is_named():
    def why(share=4, dim=128, group=64):
        q, _, _, cache = operands(1, share, 2, dim, 5, 8, BF16, group=group)
        return int4_hopper.unsupported(q, cache)

    assert why() is None and why(group=128) is None and why(dim=256) is None
    for given in ({"dim": 96}, {"dim": 64, "group": 32}, {"share": 9}):
        assert "query heads a key head" in why(**given)
    q, _, _, cache = operands(1, 4, 1, 64, 5, 9, BF16)
    assert "do not start at 16 bytes" in int4_hopper.unsupported(q, tuple(t[:, :, 1:] for t in cache))


def test_plans_fit_the_processors():
    for dim, groups in ((64, 1), (128, 2), (256, 4)):
        for pairs in (1, 8, 16, 32, 64, 128, 133, 256, 4096):
            for room in (64, 2048, 8192, 8200, 1 << 17):
                plan = int4_hopper.plan_for(dim, pairs, room, 132)
                assert plan.bytes_of(dim, 8, groups) <= MAX_SHARED and plan.threads <= 1024
                assert plan.blocks * (plan.bytes_of(dim, 4, groups) + 1024) <= SM_SHARED
                assert plan.split == 1 or pairs * plan.split <= 2 * 132


@few_or_every
def test_the_kernels_compile_for_sm_90a_without_spills(compiled_cuda, chosen):
    kernels = chosen(KERNELS + OTHERS)
    made = compiled_cuda(int4_hopper.device_functions() + entries(kernels)[0])
    assert made.spilled == made.stacks == [0] * len(kernels), made.log


# --- On a GPU --------------------------------------------------------------------------------------------------------


def by_plan(plan=None):
    def attend(q, k, v, cache, count, at, mask, turn=NO_TURN):
        counted = count is not None
        given = q, cache, counted, counted, cache[0].shape[2], mask, q.shape[3] ** -0.5
        return int4_hopper.prepare(*given, plan)(q, k, v, turn, cache, count, at, mask)

    return attend


@gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("share", [1, 3, 4, 8])
@pytest.mark.parametrize(("dim", "group"), [(64, 64), (128, 64), (128, 128), (256, 64), (256, 128)])
def test_the_kernel_meets_float64(dim, group, share, dtype):
    for batch, heads, tokens, room in (
        (1, 8, 127, 128), (4, 2, 2000, 2048), (32, 2, 700, 1000), (40, 8, 33, 64), (1, 1, 0, 16), (2, 3, 31, 32),
        (2, 4, 9000, 9216),
    ):  # fmt: skip
        for masked in (False, True):
            how = {"group": group, "turned": "both" if masked else "rotated" if tokens % 2 else "rope"}
            check(by_plan(), (batch, share, heads, dim, tokens, room, dtype), masked, masked, "cuda", **how)


@gpu
@pytest.mark.parametrize(
    "plan", [(8, 16, 2), (16, 8, 1), (8, 16), (8, 33, 2, 1), (4, 4, 4, 3), (8, 2, 2), (4, 1, 4), (8, 1, 2)]
)
def test_each_launch_meets_float64(plan):
    for tokens, room in ((0, 104), (200, 304), (5001, 8192), (32767, 32768)):
        check(by_plan(Plan(*plan)), (1, 4, 8, 128, tokens, room, BF16), tokens > 0, device="cuda")


@gpu
def test_a_hundred_runs_are_bit_equal_and_scales_of_many_binades_are_met():
    q, k, v, cache = operands(2, 4, 4, 128, 3000, 3072, BF16, device="cuda")
    powers = torch.exp2(torch.randint(-60, 60, cache[4].shape, device="cuda").float()).to(BF16)
    cache = *cache[:4], cache[4] * powers, cache[5] * powers
    wanted = SPACE["stored"](k, v, cache, 3000)
    expected, first = exact(q, wanted, 3000), None
    for _ in range(100):
        y = by_plan()(q, k, v, tuple(t.clone() for t in cache), torch.tensor(3000, device="cuda"), 3000, None)
        first = y if first is None else first
        assert torch.equal(y, first)
    assert (first - expected).norm() <= SPACE["TOLERANCE"][BF16] * expected.norm()


@gpu
def test_compute_sanitizer_finds_nothing(sanitized):
    sanitized(
        "import sys; sys.path.insert(0, 'tests/kernels'); import test_attention_int4_hopper as t\n"
        "for c in ((2, 4, 1, 64, 99, 128, t.BF16), (1, 3, 2, 128, 300, 304, t.FP16), (1, 1, 1, 128, 0, 8, t.BF16)):\n"
        "    t.check(t.by_plan(), c, masked=True, device='cuda', turned='both')\n"
    )
