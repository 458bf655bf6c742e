"""A training linear's quantizers and products found at once, against its operators."""

import pytest
import torch

from quantrot.kernels.fp8 import fp8_block_gemm, quantize_fp8_block, quantize_fp8_both_ways, steps
from quantrot.modules.fp8 import Fp8TrainingLinear

gpu = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def on_a_cpu(monkeypatch):
    """Forwards and backwards go to the steps, by the reference; how many did."""
    went = []

    def quantizer(x, block, both_ways):
        quantize = quantize_fp8_both_ways if both_ways else quantize_fp8_block
        return lambda x: quantize(x, block, "exact", transposed_scale=block == steps.ROW)

    def product(a, b, b_block, dtype, bias=None):
        how = {"a_block": steps.ROW, "b_block": b_block, "out_dtype": dtype}
        return lambda a, a_scale, b, b_scale, bias, residual: fp8_block_gemm(a, a_scale, b, b_scale, bias=bias, **how)

    def step(prepare, numbers):
        def run(*given):
            went.append(prepare.__name__)
            return prepare(*given)(*given[:numbers])

        return run

    monkeypatch.setattr(steps, "_quantizer", quantizer)
    monkeypatch.setattr(steps, "_product", product)
    monkeypatch.setattr(steps, "forward", step(steps._forward, 3))
    monkeypatch.setattr(steps, "backward", step(steps._backward, 3))
    return went


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
    went = request.getfixturevalue("on_a_cpu")
    assert equal(gradients(*given), expected) and went == ["_forward", "_backward"]


@pytest.mark.parametrize("one", ["forward", "backward"])
def test_operators_and_steps_pass_on_what_they_kept(request, monkeypatch, one):
    """Where somebody wants to see every operator of one of the two: a mode of torch's, say."""
    given = operands(*CASES[1])
    expected = gradients(*given)
    went = request.getfixturevalue("on_a_cpu")
    monkeypatch.setattr(steps, one, lambda *given: None)
    assert equal(gradients(*given), expected) and len(went) == 1


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
