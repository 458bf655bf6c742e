"""One token's attention with its RoPE and its place in the cache: the kernel in the emulator, and on a GPU."""

import ctypes
from functools import partial

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from quantrot.kernels.attention import one_token
from quantrot.kernels.fp8.reference import rms_norm

gpu = pytest.mark.gpu
BF16, FP16 = torch.bfloat16, torch.float16
ULP = {BF16: 2**-8, FP16: 2**-11}  # half a unit in the last place, relative

EPSILON = 1e-6

# plan, head_dim, query heads a key head, dtype, norms
KERNELS = [
    (one_token.Plan(2, 2), 64, 4, BF16, False),
    (one_token.Plan(2, 4), 128, 3, FP16, True),
    (one_token.Plan(2, 1), 96, 16, BF16, False),
    (one_token.Plan(1, 2), 256, 1, BF16, False),
    (one_token.Plan(2, 2), 96, 2, BF16, True),
    (one_token.Plan(4, 8, 3), 128, 4, BF16, True),
]
RUN = """
#include <string>
static std::string message;

extern "C" const char* run(int which, const quantrot::TokenArgs* args, int split, int rows, int threads, int shared,
                           int seed) {
  static void (*const kernels[])(quantrot::TokenArgs) = {NAMES};
  message = emulator::launch({(unsigned)split, (unsigned)rows, 1}, split, threads, shared, seed,
                             [&] { kernels[which](*args); });
  return message.c_str();
}
"""


@pytest.fixture(scope="module")
def emulator(emulated):
    """The kernels on the host: emulator(number, operands, seed) -> [B, 1, H, D]."""
    source, names = one_token.device_functions(), []
    source = source.replace(
        "namespace quantrot {\n\nstruct TokenArgs",
        '#include "one_token.h"\nnamespace quantrot {\n\nstruct TokenArgs',
        1,
    )
    for i, kernel in enumerate(KERNELS):
        names.append(f"attend_{i}")
        source += one_token.entry(*kernel).replace("attend_token(", f"attend_{i}(", 1)
    source = source.replace('extern "C" __global__', "__global__")
    library = emulated(source + RUN.replace("NAMES", ", ".join(names)))
    library.run.restype = ctypes.c_char_p

    def run(number, operands, *, seed, at=None):
        plan, dim, share, dtype, norms = KERNELS[number]
        assert one_token.unsupported(*operands) is None
        q = operands[0]
        out = torch.full_like(q, float("nan"), memory_format=torch.contiguous_format)
        args = one_token.arguments(*operands[:8], True, *operands[8:], EPSILON, dim**-0.5, seed % 2 == 0, out)
        if at is not None:  # the host knows how many, and the mask is of no more than there are
            count, mask = operands[7], operands[8]
            assert count.item() == at
            narrow = None if mask is None else mask[..., : at + 1].contiguous()
            assert one_token.unsupported(*operands[:7], at, narrow, operands[9]) is None
            given = *operands[:7], at, False, narrow, operands[9], EPSILON, dim**-0.5, seed % 2 == 0, out
            args = one_token.arguments(*given)
        rows, shared = q.shape[0] * q.shape[2] // share, plan.shared_bytes(dim, share, norms)
        message = library.run(number, ctypes.byref(args), plan.split, rows, plan.threads, shared, seed)
        assert message == b"", message.decode()
        return out

    return run


def relative(y, exact):
    return ((y.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-300)).item()


def options(given):
    """What rope_attend_one takes by name of such operands."""
    return {"mask": given[8], "norms": given[9], "epsilon": EPSILON}


def cloned(given):
    """Operands of which what is changed, the cache and its length, is a copy."""
    return [t.clone() if i in (5, 6, 7) else t for i, t in enumerate(given)]


def same_cache(one, other):
    """Whether keys and values have the same bits, NaN too."""
    return all(torch.equal(one[i].view(torch.int16), other[i].view(torch.int16)) for i in (5, 6))


def operands(batch, groups, share, length, room, dim, dtype, mask=None, device="cpu", norms=False):
    """Of rope_attend_one: a merged projection's slices, a cache with NaN behind its tokens. mask: None, "padded"."""
    heads = groups * share
    merged = torch.randn(batch, 1, (heads + 2 * groups) * dim, device=device).to(dtype)
    q, k, v = (t.view(batch, 1, -1, dim) for t in merged.split([heads * dim, groups * dim, groups * dim], dim=-1))
    angles = torch.rand(batch, 1, dim // 2, device=device) * 6.28
    cos, sin = (torch.cat((f, f), -1).to(dtype) for f in (angles.cos(), angles.sin()))
    keys, values = (torch.randn(batch, groups, room, dim, device=device).to(dtype) for _ in range(2))
    keys[:, :, length:], values[:, :, length:] = float("nan"), float("nan")
    if mask == "padded":
        hidden = torch.arange(batch, device=device).view(batch, 1, 1, 1) * 7 % max(length, 1)
        mask = (torch.arange(room, device=device) >= hidden) & (torch.arange(room, device=device) % 11 != 3)
        mask[..., length:] = True  # the new one is seen; those behind it are not, whatever this says
    gains = (torch.rand(2, dim, device=device) + 0.5).to(dtype)
    gains = (gains[0], gains[1]) if norms else None
    return q, k, v, cos, sin, keys, values, torch.tensor(length, device=device), mask, gains


def exact(q, k, v, cos, sin, keys, values, length, mask, norms):
    """In float64, from norms and RoPE in the dtype: (output, keys, values)."""
    at = length.item()
    if norms is not None:
        q, k = rms_norm(q, norms[0], EPSILON), rms_norm(k, norms[1], EPSILON)
    query, key = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    keys, values = keys.clone(), values.clone()
    keys[:, :, at], values[:, :, at] = key[:, 0], v[:, 0]
    share = q.shape[2] // keys.shape[1]
    wide = [t[:, :, : at + 1].double().repeat_interleave(share, 1) for t in (keys, values)]
    scores = query.double().transpose(1, 2) @ wide[0].transpose(2, 3) * q.shape[3] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask[..., : at + 1], float("-inf"))
    return (scores.softmax(-1).nan_to_num() @ wide[1]).transpose(1, 2), keys, values


def check(given, run):
    """run(operands) -> output is right, keys and values have the new token and are else as they were."""
    given = cloned(given)
    expected, keys, values = exact(*given)
    length, dtype = given[7].item(), given[0].dtype
    y = run(given)
    assert given[7].item() == length + 1
    if given[9] is not None:  # a sum of squares in another order: a neighbour, here and there
        new, wanted = given[5][:, :, length].float(), keys[:, :, length].float()
        assert ((new - wanted).abs() <= 4 * ULP[dtype] * wanted.abs().amax()).all()
        assert (new != wanted).float().mean() < 0.02
        given[5][:, :, length] = keys[:, :, length]
    for stored, wanted in ((given[5], keys), (given[6], values)):
        assert torch.equal(stored.view(torch.int16), wanted.view(torch.int16))
    assert relative(y, expected) <= 2 * ULP[dtype]  # the weights' rounding, and the result's
    return y


@pytest.mark.parametrize(
    ("number", "length", "mask"),
    [
        (0, 0, None), (0, 15, None), (0, 16, "padded"), (0, 150, "padded"), (0, 199, None), (1, 1, "padded"),
        (1, 170, None), (1, 31, "padded"), (2, 40, "padded"), (2, 95, None), (3, 70, None), (3, 33, "padded"),
        (4, 40, "padded"), (4, 0, None), (5, 170, "padded"),
    ],
)  # fmt: skip
def test_the_kernel_in_the_emulator_is_exact_but_for_two_roundings(emulator, number, length, mask):
    torch.manual_seed(0)
    _, dim, share, dtype, norms = KERNELS[number]
    given = operands(2, 2, share, length, 200, dim, dtype, mask, norms=norms)
    for seed in range(2):
        y = check(given, partial(emulator, number, seed=seed))
        check(given, lambda each: one_token.rope_attend_one(*each[:8], **options(each)))
    kept, counted = cloned(given), cloned(given)
    assert torch.equal(emulator(number, kept, seed=1, at=length), emulator(number, counted, seed=1))
    assert kept[7] == length and same_cache(kept, counted)
    if mask is None and length:
        given[5][:, 0, length // 2], given[6][:, 0, length // 3] = float("nan"), float("inf")
        y = emulator(number, cloned(given), seed=0)
        assert not y[:, 0, :share].isfinite().any() and y[:, 0, share:].isfinite().all()


def test_a_query_that_sees_nothing_gets_zero_and_a_full_cache_stores_nothing(emulator):
    given = operands(2, 1, 4, 50, 64, 64, BF16)
    mask = torch.ones(2, 1, 1, 64, dtype=torch.bool)
    mask[1] = False
    for run in (
        lambda each: emulator(0, each, seed=0),
        lambda each: one_token.rope_attend_one(*each[:8], **options(each)),
    ):
        y = run([*cloned(given)[:8], mask, None])
        assert y[0].isfinite().all() and y[0].any() and not y[1].any()
        full = cloned(given)[:8]
        full[5].nan_to_num_(), full[6].nan_to_num_()
        before = [t.clone() for t in full]
        full[7].fill_(64)
        assert run([*full, None, None]).isnan().all() and full[7] == 65
        assert torch.equal(full[5], before[5]) and torch.equal(full[6], before[6])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: lambda t: t.float()}, "float32"),
        ({0: lambda t: t.repeat(1, 2, 1, 1)}, "one token"),
        ({1: lambda t: t[:, :, :1]}, "one token"),
        ({2: lambda t: t[0]}, r"v \(1, 2, 64\), torch.bfloat16; four dimensions"),
        ({5: lambda t: t[:, :1]}, r"keys \(2, 1, 64, 64\); one token, as many key heads in each"),
        ({9: lambda t: (torch.ones(64, dtype=BF16),)}, "1 norms; two are needed"),
        ({3: lambda t: t[..., :32]}, "cos"),
        ({5: lambda t: t[:, :, :9]}, "keys"),
        ({6: lambda t: t.half()}, "dtypes"),
        ({7: lambda t: t.int()}, "length"),
        ({8: lambda t: torch.ones(2, 1, 1, 63, dtype=torch.bool)}, "mask"),
        ({8: lambda t: torch.zeros(2, 1, 1, 64)}, "mask"),
        ({9: lambda t: (torch.ones(64), torch.ones(64, dtype=BF16))}, "norms torch.float32"),
        ({9: lambda t: (torch.ones(64, dtype=BF16), torch.ones(32, dtype=BF16))}, "norms torch.bfloat16 .32,."),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    given = list(operands(2, 2, 4, 50, 64, 64, BF16))
    for i, how in change.items():
        given[i] = how(given[i])
    with pytest.raises(ValueError, match=message):
        one_token.rope_attend_one(*given[:8], **options(given))


def test_where_the_host_counts_a_mask_ends_with_the_new_token():
    given = operands(2, 2, 4, 50, 64, 64, BF16)[:7]
    mask = torch.ones(2, 1, 1, 51, dtype=torch.bool)
    assert one_token.unsupported(*given, 50, mask) is None
    assert "mask" in one_token.unsupported(*given, 49, mask) and "length 64" in one_token.unsupported(*given, 64, None)
    rest = {"mask": mask, "norms": None, "epsilon": 0.0, "scale": 0.125, "settled": False}
    assert one_token.try_attend_one(*given, 50, **rest) is None  # on a CPU


def test_a_mask_of_other_dimensions_is_left_to_torch(monkeypatch):
    class OnGpu(torch.Tensor):
        is_cuda = True

    for name in ("unseen", "runs_on"):
        monkeypatch.setattr(one_token, name, lambda *given: True)
    q, *rest = operands(2, 2, 4, 50, 64, 64, BF16)[:7]
    how = {"norms": None, "epsilon": 0.0, "scale": 0.125, "settled": False}
    for mask in (torch.ones(51, dtype=torch.bool), torch.ones(2, 51, dtype=torch.bool), torch.zeros(2, 1, 1, 51)):
        assert one_token.try_attend_one(q.as_subclass(OnGpu), *rest, 50, mask=mask, **how) is None


@pytest.mark.parametrize("at", range(5))
def test_a_tangent_is_refused(at):
    given = [*operands(2, 2, 4, 50, 64, 64, BF16)]
    with torch.autograd.forward_ad.dual_level():
        given[at] = torch.autograd.forward_ad.make_dual(given[at], torch.ones_like(given[at]))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            one_token.rope_attend_one(*given[:8], **options(given))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize(("advance", "norms"), [(False, False), (True, False), (True, True)])
def test_the_operator_says_what_it_changes(device, advance, norms):
    given = operands(1, 2, 4, 20, 32, 64, BF16, "padded", device, norms)
    given[5].nan_to_num_(), given[6].nan_to_num_()
    counts = (None, given[7]) if advance else (given[7], None)
    args = *given[:7], *counts, given[8], *(given[9] or (None, None)), EPSILON, 0.125, False
    torch.library.opcheck(torch.ops.quantrot.rope_attend_one.default, args)
    one_token.rope_attend_one(*given[:8], **options(given), advance=advance)
    assert given[7] == 20 + advance


def test_plans_fill_the_processors_and_no_more():
    for pairs in (1, 8, 32, 64, 256, 1024):
        for room in (1, 100, 4096, 1 << 17):
            for dim in one_token.DIMS:
                plan = one_token.plan_for(dim, 4, pairs, room, 132)
                assert plan.split in (1, 2, 4, 8, 16) and plan.shared_bytes(dim, 16) <= 200 << 10
                assert plan.split == 1 or pairs * plan.split <= 2 * 132
    rule = {(8, 256): (4, 8, 3), (32, 2104): (4, 8, 3), (8, 8248): (8, 8, 1), (8, 32824): (8, 16, 1)}  # as swept
    for (pairs, room), plan in (rule | {(64, 1056): (8, 2, 1), (128, 2104): (8, 1, 1), (256, 256): (8, 1, 1)}).items():
        assert one_token.plan_for(128, 4, pairs, room, 132) == one_token.Plan(*plan)


def test_the_kernels_compile_for_sm_90a_without_spills(compiled_cuda):
    """But for heads of 256, whose 255 registers are not enough."""
    entries = (one_token.entry(*kernel).replace("attend_token(", f"attend_{i}(", 1) for i, kernel in enumerate(KERNELS))
    made = compiled_cuda(one_token.device_functions() + "".join(entries))
    assert sorted(made.spilled)[: len(KERNELS) - 1] == [0] * (len(KERNELS) - 1), made.log


# --- On a GPU --------------------------------------------------------------------------------------------------------


def launched(plan=None, settled=False):
    return lambda each: one_token.launch(*each[:8], True, *each[8:], EPSILON, each[0].shape[3] ** -0.5, settled, plan)


@gpu
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("mask", [None, "padded"])
@pytest.mark.parametrize(
    ("dim", "share"), [(d, s) for d, most in one_token.DIMS.items() for s in (1, 3, 4, 8, 16) if s <= most]
)
def test_the_kernel_is_exact_but_for_two_roundings(dim, share, mask, norms):
    torch.manual_seed(0)
    for batch, groups, length, room, dtype in (
        (1, 8, 127, 128, BF16), (4, 2, 2000, 2048, FP16), (32, 2, 700, 1000, BF16), (40, 8, 33, 64, BF16),
        (1, 1, 0, 16, FP16), (2, 3, 16, 17, BF16),
    ):  # fmt: skip
        check(operands(batch, groups, share, length, room, dim, dtype, mask, "cuda", norms), launched())


@gpu
@torch.no_grad()
@pytest.mark.parametrize("mask", [None, "padded"])
@pytest.mark.parametrize("norms", [False, True])
def test_tokens_that_the_host_counts_have_the_bits_of_those_that_the_gpu_counts(norms, mask):
    torch.manual_seed(0)
    for settled in (False, True):
        for batch, groups, length, room in ((1, 8, 127, 160), (40, 8, 33, 64), (2, 3, 0, 17)):
            given = operands(batch, groups, 4, length, room, 128, BF16, mask, "cuda", norms)
            ours, theirs = cloned(given), cloned(given)
            for at in range(length, length + 9):  # launched, and launched again
                narrow = None if mask is None else given[8][..., : at + 1].contiguous()
                how = {"mask": narrow, "norms": given[9], "epsilon": EPSILON, "scale": 128**-0.5, "settled": settled}
                y = one_token.try_attend_one(*ours[:7], at, **how)
                assert torch.equal(y, launched(settled=settled)(theirs))
                assert same_cache(ours, theirs)
            assert one_token.try_attend_one(*ours[:7], room, **how | {"mask": None}) is None  # full
            two_bytes_on = torch.cat([ours[0].flatten(), ours[0].flatten()[:1]])[1:].view_as(ours[0])
            assert one_token.try_attend_one(two_bytes_on, *ours[1:7], length, **how | {"mask": None}) is None
    with torch.enable_grad():
        assert one_token.try_attend_one(*ours[:7], length, **how | {"mask": None}) is None


@gpu
@pytest.mark.parametrize("plan", [(4, 8, 3), (8, 16), (8, 8), (8, 4), (8, 2), (8, 1)])
def test_each_launch_is_as_exact(plan):
    torch.manual_seed(0)
    for length, room in ((0, 100), (200, 300), (5001, 8192), (32767, 32768)):
        given = operands(1, 8, 4, length, room, 128, BF16, "padded", "cuda", length > 0)
        check(given, launched(one_token.Plan(*plan)))


@gpu
def test_a_hundred_runs_and_a_graph_of_tokens_are_bit_equal():
    torch.manual_seed(0)
    given = list(operands(2, 8, 4, 3000, 3200, 128, BF16, "padded", "cuda"))
    run, first = launched(), None
    weight = torch.randn(given[0].shape[2] * 128, given[0].shape[2] * 128, device="cuda", dtype=BF16) / 64

    def tokens(count, wait):
        """Each one's query is made of the last one's output, by a kernel in between: what `settled` asks for."""
        each, made = cloned(given), []
        for i in range(count):
            made.append(launched(settled=i > 0)(each))
            each[0] = (made[-1].view(2, 1, -1) @ weight).view_as(given[0])
            if wait:
                torch.cuda.synchronize()
        return [*made, each[5][:, :, :3000], each[6][:, :, :3000], each[5][:, :, 3000 : 3000 + count], each[7]]

    expected = tokens(20, True)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(tokens(20, False), expected, strict=True))
    for _ in range(100):
        y = run(cloned(given))
        first = y if first is None else first
        assert torch.equal(y, first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = tokens(20, False)
    for _ in range(20):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(recorded, expected, strict=True))


def moved(run):
    """run on a GPU, of operands on the CPU, which get what it has written: no other kernel runs there."""

    def over(each):
        there = [t.cuda() if isinstance(t, torch.Tensor) else t for t in each]
        there[9] = None if each[9] is None else tuple(t.cuda() for t in each[9])
        y = run(there)
        for i in (5, 6, 7):
            each[i].copy_(there[i])
        return y.cpu()

    return over


@gpu
def test_compute_sanitizer_finds_nothing(sanitized):
    """In this kernel alone: cuBLAS and torch's kernels, of which a check has dozens, would be instrumented, too."""
    sanitized(
        "import sys, torch; sys.path.insert(0, 'tests/kernels'); import test_attention_one_token as t\n"
        "for plan in ((4, 8, 3), (8, 1)):\n"
        "    for length in (0, 130):\n"
        "        given = t.operands(2, 2, 4, length, 160, 128, t.BF16, 'padded', norms=length > 0)\n"
        "        t.check(given, t.moved(t.launched(t.one_token.Plan(*plan))))\n"
    )
