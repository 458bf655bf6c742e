"""A training linear's quantizers and products found at once, against its operators."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quantrot.kernels.fp8 import fp8_block_gemm, quantize_fp8_block, quantize_fp8_both_ways, steps
from quantrot.kernels.ready import Ready
from quantrot.modules.fp8 import Fp8TrainingLinear

gpu = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def on_a_cpu(monkeypatch):
    """Forwards and backwards go to the steps, by the reference: the ways in which each matrix was quantized."""
    ways = []

    def quantizer(x, block, both_ways):
        quantize = quantize_fp8_both_ways if both_ways else quantize_fp8_block
        return lambda x: (ways.append(both_ways), quantize(x, block, "exact", transposed_scale=block == steps.ROW))[1]

    def product(a, b, b_block, dtype, bias=None):
        how = {"a_block": steps.ROW, "b_block": b_block, "out_dtype": dtype}
        like = [t.shape for t in (*a, *b)], bias is not None

        def run(a, a_scale, b, b_scale, bias, residual):
            assert like == ([t.shape for t in (a, a_scale, b, b_scale)], bias is not None) and residual is None
            return fp8_block_gemm(a, a_scale, b, b_scale, bias=bias, **how)

        return run

    monkeypatch.setattr(steps, "_quantizer", quantizer)
    monkeypatch.setattr(steps, "_product", product)
    monkeypatch.setattr(steps, "FORWARD", Ready())
    monkeypatch.setattr(steps, "BACKWARD", Ready())
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: True))
    return ways


def linear(k, n, dtype, bias, device="cpu"):
    torch.manual_seed(k)
    return Fp8TrainingLinear(k, n, bias=bias, device=device, dtype=dtype)


def gradients(module, x, g):
    """y, and the gradients of what has one."""
    for p in module.parameters():
        p.grad = None
    x = x.detach().requires_grad_(x.requires_grad)
    y = module(x)
    y.backward(g)
    return y.detach(), x.grad, *(p.grad for p in module.parameters())


def equal(found, expected):
    return all(
        b is None if a is None else a.dtype == b.dtype and torch.equal(a, b)
        for a, b in zip(found, expected, strict=True)
    )


CASES = [  # tokens, K, N, dtypes of tokens and weight, bias, what is frozen
    (48, 256, 128, BF16, FP32, False, None),
    (130, 144, 208, BF16, BF16, True, None),
    (7, 128, 384, FP16, FP32, True, "x"),
    (64, 128, 128, FP32, FP32, False, "weight"),
    (1, 16, 16, BF16, FP32, True, None),
]


def operands(tokens, k, n, dtype, weight_dtype, bias, frozen, device="cpu"):
    module, generator = linear(k, n, weight_dtype, bias, device), torch.Generator().manual_seed(tokens)
    x, g = (torch.randn(tokens, columns, generator=generator).to(device, dtype) for columns in (k, n))
    module.weight.requires_grad_(frozen != "weight")
    return module, x.requires_grad_(frozen != "x"), g


@pytest.mark.parametrize("case", CASES)
def test_its_results_are_the_operators(request, case):
    given = operands(*case)
    expected = gradients(*given)
    ways = request.getfixturevalue("on_a_cpu")
    assert equal(gradients(*given), expected) and len(steps.FORWARD) == len(steps.BACKWARD) == 1
    dx, dw = case[-1] != "x", case[-1] != "weight"
    assert ways == [dw, dx, dw, dx, dw, dw]  # x and the weight, once more to choose their product; the gradient so
    ways.clear()
    assert equal(gradients(*given), expected) and ways == [dw, dx, dw]  # found again
    assert len(steps.FORWARD) == len(steps.BACKWARD) == 1


def test_what_is_found_again_is_for_such_operands(request):
    """One after the other: other widths, dtypes, a bias, what is frozen."""
    kinds = itertools.product((128, 144), (BF16, FP16), (BF16, FP32), (False, True), (None, "x"))
    cases = [(48, k, 128, *how) for k, *how in kinds]
    given = [operands(*case) for case in cases]
    expected = [gradients(*each) for each in given]
    request.getfixturevalue("on_a_cpu")
    for _ in range(2):
        assert all(equal(gradients(*each), one) for each, one in zip(given, expected, strict=True))


def test_what_is_asked_of_the_kernels(monkeypatch):
    """Scales are exact; those of rows lie side by side in memory, as products read them."""
    monkeypatch.setattr(steps, "has_kernels", lambda device: True)
    for name in ("read_once", "quantize", "chosen"):
        monkeypatch.setattr(steps, name, lambda *asked: asked)
    x, w = torch.randn(48, 128).to(BF16), torch.randn(128, 128)
    for t, block, turned in ((x, steps.ROW, True), (w, steps.SQUARE, False)):
        assert steps._quantizer(t, block, True) == (t, block, "exact", turned, "auto")
        monkeypatch.setattr(steps, "in_one_kernel", lambda *asked, gated: [*asked, gated])
        assert steps._quantizer(t, block, False) == [t, block, "exact", turned, False]
        monkeypatch.setattr(steps, "in_one_kernel", lambda *asked, gated: None)
        assert steps._quantizer(t, block, False)(t) == (t, *block, "exact", turned, "auto")
    a, b = quantize_fp8_block(x, steps.ROW), quantize_fp8_block(w, steps.SQUARE)
    asked = steps._product(a, b, steps.SQUARE, FP32)
    assert asked == (*a, *b, steps.ROW, steps.SQUARE, FP32, None, "fastest", False)
    assert steps._quantizer(x[:0], steps.ROW, True) is None
    with pytest.raises(ValueError, match="float64"):
        steps._quantizer(x.double(), steps.ROW, True)
    with pytest.raises(ValueError, match="columns"):
        steps._product(a, quantize_fp8_block(torch.randn(128, 256), steps.SQUARE), steps.SQUARE, FP32)


@pytest.mark.parametrize("one", ["forward", "backward"])
def test_operators_and_steps_pass_on_what_they_kept(request, monkeypatch, one):
    given = operands(*CASES[1])
    expected = gradients(*given)
    request.getfixturevalue("on_a_cpu")
    monkeypatch.setattr(steps, one, lambda *given: None)
    assert equal(gradients(*given), expected) and len(steps.FORWARD) + len(steps.BACKWARD) == 1


def test_a_mode_that_sees_operators_sees_them(request):
    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.add(function.name())
            return function(*args, **kwargs or {})

    seen, (module, x, g) = set(), operands(*CASES[0])
    request.getfixturevalue("on_a_cpu")
    with Seeing():
        y = module(x)
    with Seeing():
        y.backward(g)
    assert {"quantrot::quantize_fp8_both_ways", "quantrot::fp8_block_gemm"} <= seen
    assert not steps.FORWARD and not steps.BACKWARD


@gpu
@pytest.mark.parametrize("case", [*CASES, (2048, 2048, 1024, BF16, FP32, False, None)])
def test_bits_are_the_operators_on_the_gpu(monkeypatch, case):
    given = operands(*case, "cuda")
    found = [gradients(*given) for _ in range(3)]
    monkeypatch.setattr(steps, "forward", lambda *given: None)
    monkeypatch.setattr(steps, "backward", lambda *given: None)
    expected = gradients(*given)
    assert all(equal(each, expected) for each in found)
    assert steps.FORWARD and steps.BACKWARD


@gpu
def test_what_does_not_fit_is_said_as_before():
    module = linear(128, 128, FP32, False, "cuda")
    with pytest.raises(ValueError, match="float64"):
        module(torch.zeros(4, 128, dtype=torch.float64, device="cuda"))
    with pytest.raises(ValueError, match="columns"):
        module(torch.zeros(4, 256, dtype=BF16, device="cuda"))
