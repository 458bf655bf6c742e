"""A training linear's kernels launched one behind the other: on a CPU by the reference on the same addresses."""

import ctypes
import itertools
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from quantrot.kernels.mxfp4 import Mxfp4Gemm, drawn_numbers, steps
from quantrot.kernels.mxfp4.reference import (
    Random,
    dequantize_reference,
    expand_reference,
    masked_hadamard_reference,
    quantize_reference,
)
from quantrot.kernels.ready import Ready

gpu = pytest.mark.gpu
pytest.importorskip("triton", reason="triton is not installed")
from quantrot.kernels.mxfp4 import hopper_columns, hopper_rows  # noqa: E402

BF16, FP16, FP32, BYTES = torch.bfloat16, torch.float16, torch.float32, torch.uint8
PAIR = (0x1234567890ABCDE, 3)


def at(address: int | None, dtype: torch.dtype, *shape: int) -> torch.Tensor | None:
    """The tensor that lies there."""
    if address is None:
        return None
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=dtype).view(shape)


def write(made, packed, scale, mask):
    for of, to in zip(made, (packed, scale, mask), strict=True):
        if to is not None:
            at(to, BYTES, *of.shape).copy_(of)


def along_rows(plan, groups, dtype, rule, hadamard, signs, mask, dither, drawn, device):
    def run(x, factors, packed, scale, bits, random):
        assert (factors is not None, bits is not None, random is not None, drawn) == (signs, mask, dither, False)
        given = at(x, dtype, 1, groups * 32)
        how = {"signs": at(factors, FP32, hadamard), "random": random, "mask": mask}
        write(quantize_reference(given, rule, hadamard=hadamard, **how), packed, scale, bits)

    return run


def along_columns(plan, rows, wide, pitch, dtype, rule, hadamard, signs, mask, dither, drawn, device):
    def run(x, in_scale, factors, packed, scale, bits, random):
        assert (factors is not None, random is not None, mask, drawn) == (signs, dither, False, False)
        assert pitch == wide and bits is None
        given = at(x, dtype, rows, wide)
        if dtype == BYTES:
            given = dequantize_reference(given, at(in_scale, BYTES, rows, wide // 16), FP32)
        how = {"signs": at(factors, FP32, hadamard), "random": random}
        write(quantize_reference(given.T, rule, hadamard=hadamard, **how), packed, scale, None)

    return run


def expand_launch(first, second, device):
    def run(both):
        for rows, of in ((first, both.first), (second, both.second)):
            assert of.rows == rows and of.outside is None
            packed, scale = at(of.packed, BYTES, rows, of.groups * 16), at(of.scale, BYTES, rows, of.groups)
            e4m3, row_scale, _ = expand_reference(packed, scale)
            at(of.e4m3, BYTES, rows, of.groups * 32).copy_(e4m3.view(BYTES))
            at(of.row_scale, FP32, rows).copy_(row_scale)

    return run


def masked(plan, groups, dtype, hadamard, wide, device):
    def run(x, mask, y, factor):
        to = FP32 if wide else dtype
        given = at(x, dtype, 1, groups * 32), at(mask, BYTES, 1, groups * 4)
        at(y, to, 1, groups * 32).copy_(masked_hadamard_reference(*given, hadamard, factor, to))

    return run


def scaled_product(a, a_scale, b, b_scale, dtype):
    """In bfloat16, which holds these operands exactly, and sums as the reference does."""
    wide = BF16 if dtype == BF16 else FP32
    a, b = ((t.float() * scale).to(wide) for t, scale in ((a, a_scale), (b, b_scale.T)))
    return F.linear(a, b).to(dtype)


@pytest.fixture
def on_a_cpu(monkeypatch):
    """Forwards and backwards go to the steps, whose kernels are the reference."""
    monkeypatch.setattr(hopper_rows, "launched", along_rows)
    monkeypatch.setattr(hopper_columns, "launched", along_columns)
    monkeypatch.setattr(hopper_rows, "expand_launch", expand_launch)
    monkeypatch.setattr(hopper_rows, "masked", masked)
    monkeypatch.setattr(steps, "scaled_product", scaled_product)
    monkeypatch.setattr(steps.nvrtc, "available", lambda device: True)
    monkeypatch.setattr(steps, "FORWARD", Ready())
    monkeypatch.setattr(steps, "BACKWARD", Ready())
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: True))


def went():
    """How many kinds of forwards and of backwards went there."""
    return len(steps.FORWARD), len(steps.BACKWARD)


def operands(m, n, k, dtype, weight_dtype, device="cpu"):
    generator = torch.Generator().manual_seed(m)
    x, w, g = (torch.randn(shape, generator=generator) for shape in ((m, k), (n, k), (m, n)))
    x[:, 3] *= 20
    x, w, g = x.to(device, dtype), w.to(device, weight_dtype), g.to(device, dtype)
    return x.requires_grad_(), w.requires_grad_(), g


def step(x, w, g, *rest):
    y = Mxfp4Gemm.apply(x, w, *rest)
    wanted = [t for t in (x, w) if t.requires_grad]
    return y.detach(), *torch.autograd.grad(y, wanted, g)


def equal(a, b):
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("m", [96, 128])
@pytest.mark.parametrize(
    ("hadamard", "dtype", "weight_dtype", "random"),
    [(32, BF16, FP32, PAIR), (64, BF16, BF16, PAIR), (128, FP16, FP32, PAIR), (32, FP16, FP16, None)],
)
def test_its_results_are_the_operators(request, m, hadamard, dtype, weight_dtype, random):
    given = operands(m, 128, 256, dtype, weight_dtype)
    expected = step(*given, hadamard, random)
    request.getfixturevalue("on_a_cpu")
    for _ in range(2):  # then found again
        assert equal(step(*given, hadamard, random), expected) and went() == (1, 1)


def test_what_is_found_again_is_for_such_operands(request):
    """One after the other, of one shape: other blocks, dtypes, numbers, and what is frozen."""
    kinds = itertools.product((32, 64), (BF16, FP32), (None, PAIR), (None, "x", "weight"), (64, 192))
    cases = []
    for hadamard, weight_dtype, random, frozen, k in kinds:
        x, w, g = operands(64, 128, k, BF16, weight_dtype)
        cases.append((x.requires_grad_(frozen != "x"), w.requires_grad_(frozen != "weight"), g, hadamard, random))
    expected = [step(*case) for case in cases]
    request.getfixturevalue("on_a_cpu")
    for _ in range(2):
        assert all(equal(step(*case), one) for case, one in zip(cases, expected, strict=True))
    assert went() == (8, 48)


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_a_gradient_that_is_not_wanted_keeps_nothing(on_a_cpu, frozen):
    x, w, _ = operands(64, 96, 128, BF16, FP32)
    (x if frozen == "x" else w).requires_grad_(False)
    y = Mxfp4Gemm.apply(x, w, 32, PAIR)  # of a result that is gone torch 2.11 has freed them
    kept = [t.numel() for t in y.grad_fn.saved_tensors if t is not None]
    assert kept == ([64 * 4 * 17 + 96 * 16] if frozen == "x" else [96 * 4 * 17 + 64 * 16])


def test_gradients_of_any_strides_and_leading_dimensions(request):
    x, w, _ = operands(64, 96, 128, BF16, FP32)
    x, g = x.detach().view(4, 16, 128).requires_grad_(), torch.randn(96, 4, 16).to(BF16).permute(1, 2, 0)
    expected = step(x, w, g, 32, PAIR), step(x, w, torch.ones(()).to(BF16).expand(4, 16, 96), 32, None)
    request.getfixturevalue("on_a_cpu")
    found = step(x, w, g, 32, PAIR), step(x, w, torch.ones(()).to(BF16).expand(4, 16, 96), 32, None)
    assert all(map(equal, found, expected)) and went() == (1, 2)


@pytest.mark.parametrize("m", [96, 100])
def test_operators_take_what_it_kept(request, monkeypatch, m):
    given = operands(m, 128, 192, BF16, FP32)
    expected = step(*given, 64, PAIR)
    request.getfixturevalue("on_a_cpu")
    monkeypatch.setattr(steps, "backward", lambda *given: None)
    assert equal(step(*given, 64, PAIR), expected) and went() == (1, 0)


def unaligned(t):
    room = torch.empty(len(t) + 1, dtype=t.dtype)
    return room[1:].copy_(t)


class Mine(torch.Tensor):
    pass


@pytest.mark.parametrize("how", [lambda t: t.repeat_interleave(2)[::2], unaligned, lambda t: t.as_subclass(Mine)])
@pytest.mark.parametrize("put", [[True, False], [False, True]])
def test_what_hooks_put_in_the_place_of_saved_tensors(request, how, put):
    """Strided, elsewhere than at 16 bytes, or with rules of its own: operators read it."""
    given = operands(96, 128, 192, BF16, FP32)
    expected = step(*given, 64, PAIR)
    request.getfixturevalue("on_a_cpu")
    turns = iter(put)  # of what dx and what dw reads
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: how(t) if next(turns) else t):
        assert equal(step(*given, 64, PAIR), expected) and went() == (1, 0)


def test_groups_outside_and_drawn_numbers_are_operators(on_a_cpu):
    x, w, g = operands(64, 96, 128, BF16, FP32)
    step(x, w, g, 32, PAIR, torch.zeros(1, dtype=torch.int32))
    step(x, w, g, 32, drawn_numbers(x, w, 32))
    assert went() == (0, 0)


@pytest.mark.parametrize("all_of_it", [True, False])
def test_a_mode_that_sees_operators_sees_them(request, all_of_it):
    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.add(function.name())
            return function(*args, **kwargs or {})

    seen, (x, w, g) = set(), operands(64, 96, 128, BF16, FP32)
    _, *expected = step(x, w, g, 32, PAIR)
    request.getfixturevalue("on_a_cpu")
    with Seeing() if all_of_it else nullcontext():
        y = Mxfp4Gemm.apply(x, w, 32, PAIR)
    with Seeing():
        assert equal(torch.autograd.grad(y, (x, w), g), expected)
    assert {"quantrot::mxfp4_quantize", "quantrot::mxfp4_requantize", "quantrot::mxfp4_product"} <= seen
    assert went() == (0 if all_of_it else 1, 0)


@pytest.mark.parametrize(
    ("x", "weight", "fits"),
    [
        (torch.empty(4, 64, dtype=BF16), torch.empty(32, 64), True),
        (torch.empty(4, 64, dtype=FP16), torch.empty(32, 64, dtype=FP16), True),
        (torch.empty(4, 64, dtype=FP16), torch.empty(32, 64, dtype=BF16), False),
        (torch.empty(4, 64), torch.empty(32, 64), False),
        (torch.empty(0, 64, dtype=BF16), torch.empty(32, 64), False),
        (torch.empty(4, 128, dtype=BF16)[:, :64], torch.empty(32, 64), False),
        (torch.empty(4, 64, dtype=BF16), torch.empty(64, 32).T, False),
        (torch.empty(4, 64, dtype=BF16), torch.empty(32 * 64 + 1)[1:].view(32, 64), False),
    ],
)
def test_operands_that_its_kernels_read_where_they_lie(on_a_cpu, x, weight, fits):
    assert steps._fits(x, weight) == fits


def test_a_random_number_is_used_once(on_a_cpu, monkeypatch):
    seen = []

    def quantize(launched, numbers):
        def launch(*how):
            run = launched(*how)
            return lambda *given: (seen.append(given[numbers]), run(*given))

        return launch

    monkeypatch.setattr(hopper_rows, "launched", quantize(along_rows, -1))
    monkeypatch.setattr(hopper_columns, "launched", quantize(along_columns, -1))
    step(*operands(64, 96, 128, BF16, FP32), 32, PAIR)
    assert seen == [None, None, *(Random(PAIR[0], 4 * PAIR[1] + i) for i in range(4))]


@gpu
@pytest.mark.parametrize(("m", "n", "k"), [(128, 256, 384), (100, 128, 256), (2048, 1024, 2048), (1, 128, 128)])
@pytest.mark.parametrize("hadamard", [32, 64, 128])
@pytest.mark.parametrize(("dtype", "weight_dtype"), [(BF16, FP32), (BF16, BF16), (FP16, FP32)])
def test_bits_are_the_operators_on_the_gpu(m, n, k, hadamard, dtype, weight_dtype):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    given = operands(m, n, k, dtype, weight_dtype, "cuda")
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    before = len(steps.FORWARD), len(steps.BACKWARD)
    for random in (None, PAIR):
        expected = step(*given, hadamard, random, counter)  # groups outside are counted by operators
        for _ in range(3):
            assert equal(step(*given, hadamard, random), expected)
    assert len(steps.FORWARD) > before[0] and len(steps.BACKWARD) > before[1]
