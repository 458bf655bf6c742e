"""GPTQ's rounding: nearest where inputs are independent, the paper's algorithm elsewhere, row by row."""

import pytest
import torch

from quantrot import formats
from quantrot.formats import WeightFormat
from quantrot.gptq import damping_of, feedback, round_rows
from quantrot.kernels.gptq import nearest

MXFP4 = [WeightFormat("mxfp4", (1, 32), rule) for rule in ("mse", "even", "floor", "rceil", "quest")]
INT8 = [WeightFormat("int8", (1, group), "bf16") for group in (0, 64)]
FP8 = [WeightFormat("fp8", *kind) for kind in (((1, 0), "bf16"), ((128, 128), "pow2"), ((256, 256), "exact"))]
FORMATS = [*MXFP4, *INT8, *FP8]
OUT, IN, TOKENS = 256, 512, 2000


@pytest.fixture(scope="module")
def weight():
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(OUT, IN, generator=generator) * torch.randn(OUT, 1, generator=generator).exp()
    w[3], w[:, 5], w[7, :64] = 0, 0, 0
    return w


@pytest.fixture(scope="module")
def inputs():
    """Correlated, of different sizes, and one that is always zero."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, IN, generator=generator) @ torch.randn(IN, IN, generator=generator) * 0.05
    x = (x + 0.3 * torch.randn(x.shape, generator=generator)) * torch.randn(IN, generator=generator).exp()
    x[:, 9] = 0
    return x


def damp(hessian):
    """As `feedback` does."""
    return hessian.double() + damping_of(IN, TOKENS) * hessian.diagonal().mean() * torch.eye(IN)


def values(fmt, stored):
    return formats.dequantize(fmt, stored, IN, torch.float32)


def same(a, b):
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_independent_inputs_round_to_nearest(fmt, weight):
    nearest = formats.quantize_rows(fmt, weight)
    for hessian in (torch.eye(IN), torch.zeros(IN, IN)):
        assert same(round_rows(fmt, weight, feedback(hessian, TOKENS)), nearest)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_on_a_gpu_too(fmt, weight, inputs):
    w, x = weight.cuda(), inputs.cuda()
    assert same(round_rows(fmt, w, feedback(torch.eye(IN, device="cuda"), TOKENS)), formats.quantize_rows(fmt, w))
    found = values(fmt, [t.cpu() for t in round_rows(fmt, w, feedback(x.T @ x, TOKENS))])
    here = values(fmt, round_rows(fmt, weight, feedback(inputs.T @ inputs, TOKENS)))
    errors = [((v - weight) @ inputs.T).square().sum().item() for v in (found, here)]
    assert errors[0] == pytest.approx(errors[1], rel=0.02)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_errors_cancel_on_the_inputs(fmt, weight, inputs):
    found = values(fmt, round_rows(fmt, weight, feedback(inputs.T @ inputs, TOKENS)))
    nearest = values(fmt, formats.quantize_rows(fmt, weight))
    after, before = (((w - weight) @ inputs.T).square().sum() for w in (found, nearest))
    assert after < 0.6 * before


@pytest.mark.parametrize("fmt", [MXFP4[0], INT8[0], FP8[0]], ids=str)
def test_few_tokens_do_no_harm_on_others(fmt, weight, inputs):
    """Seen by a token for two columns, all of which are correlated by chance."""
    seen, others = inputs[: IN // 2], inputs[IN // 2 :]
    hessian, nearest = seen.T @ seen, formats.quantize_rows(fmt, weight)
    stored = nearest, *(round_rows(fmt, weight, feedback(hessian, tokens)) for tokens in (len(seen), 1e6))
    errors = [((values(fmt, each) - weight) @ others.T).square().sum() for each in stored]
    assert errors[1] < 0.96 * errors[0] and errors[1] < 0.75 * errors[2]  # to nearest; damped as if tokens abounded


@pytest.mark.parametrize("fmt", [MXFP4[0], INT8[0], FP8[0]], ids=str)
def test_it_is_the_algorithm_of_the_paper(fmt, weight, inputs):
    """Which updates all weights to come by a row of the inverse Hessian's Cholesky factor."""
    hessian = inputs.T @ inputs
    order = hessian.diagonal().argsort(descending=True, stable=True)
    damped = damp(hessian)[order][:, order]
    upper = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    step = formats.steps(fmt, formats.quantize_rows(fmt, weight)[1], weight.shape)[:, order].double()
    left, found = weight[:, order].double(), torch.empty(OUT, IN)
    for k in range(IN):
        found[:, order[k]] = nearest((left[:, k] / step[:, k]).float(), fmt.kind)
        error = left[:, k] - found[:, order[k]] * step[:, k]
        left[:, k:] -= torch.outer(error / upper[k, k], upper[k, k:])
    wanted = found * formats.steps(fmt, formats.quantize_rows(fmt, weight)[1], weight.shape)
    differing = values(fmt, round_rows(fmt, weight, feedback(hessian, TOKENS), sweeps=0)) != wanted
    assert differing.any(1).float().mean() < 0.05  # a row in which float32 rounds one the other way has others after it


@pytest.mark.parametrize("fmt", [MXFP4[0], INT8[1], FP8[0]], ids=str)
def test_sweeps_lower_the_cost_until_no_weight_can(fmt, weight, inputs):
    found, damped = feedback(inputs.T @ inputs, TOKENS), damp(inputs.T @ inputs)
    rounded = [values(fmt, round_rows(fmt, weight, found, sweeps)).double() for sweeps in (0, 1, 2, 40)]
    assert torch.equal(values(fmt, round_rows(fmt, weight, found)).double(), rounded[2])
    costs = [((w - weight) @ damped * (w - weight)).sum().item() for w in rounded]
    assert costs[3] < costs[2] < costs[1] < 0.99 * costs[0]
    step = formats.steps(fmt, formats.quantize_rows(fmt, weight)[1], weight.shape)
    least = rounded[3] - (rounded[3] - weight) @ damped / damped.diagonal()  # of each weight, all others as they are
    assert (nearest((least / step).float(), fmt.kind) * step != rounded[3].float()).float().mean() < 1e-4  # ties


@pytest.mark.parametrize("fmt", [MXFP4[0], INT8[1], FP8[0]], ids=str)
def test_rows_do_not_know_of_each_other(fmt, weight, inputs):
    found = feedback(inputs.T @ inputs, TOKENS)
    parts = [round_rows(fmt, rows, found) for rows in weight.split(96)]
    assert same([torch.cat(tensors) for tensors in zip(*parts, strict=True)], round_rows(fmt, weight, found))


def test_feedback_is_the_factor(inputs):
    """H = F D F^T; only the upper triangle is read."""
    hessian = (inputs.T @ inputs).double()
    order, factor, pull = feedback(hessian.triu(), TOKENS)
    damped = damp(hessian)[order][:, order]
    assert torch.allclose(pull.double(), damped / damped.diagonal()[:, None], rtol=1e-6)
    f = factor.double().T
    assert torch.equal(f.tril(), torch.eye(IN).double())
    d = torch.linalg.solve(f, torch.linalg.solve(f, damped).T)
    assert (d - d.diagonal().diag()).abs().max() < 1e-3 * d.diagonal().min()


def test_inputs_that_depend_on_each_other():
    """Fewer tokens than columns, and two massive channels that are one."""
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    x[:, 0] *= 1e5
    x[:, 1] = x[:, 0]
    found = feedback(x.T @ x, len(x))
    assert found.order[:2].tolist() == [0, 1] and torch.isfinite(found.factor).all()
    w = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    stored = round_rows(INT8[1], w, found)
    assert torch.isfinite(formats.dequantize(INT8[1], stored, 64, torch.float32)).all()


def test_a_hessian_of_nearly_nothing_has_an_end():
    x = torch.randn(4, 8, generator=torch.manual_seed(0)) * 5e-23
    found = feedback(x.T @ x, 4000.0)
    assert torch.isfinite(found.factor).all() and torch.isfinite(found.pull).all()
