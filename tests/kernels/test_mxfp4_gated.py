"""Products of silu(gate) * up, of gate and up side by side: in the bits of a gate in front, with its gradients."""

import pytest
import torch

from quantrot.kernels.fp8.reference import gate
from quantrot.kernels.mxfp4 import mxfp4_gemm, quantize_mxfp4

gpu = pytest.mark.gpu


def normal(*shape, device="cpu", seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("activations", ["none", "fp8", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("device", "tokens", "shape"),
    [
        ("cpu", 3, (96, 256)),
        pytest.param("cuda", 3, (96, 256), marks=gpu),
        pytest.param("cuda", 100, (1024, 1408), marks=gpu),
        pytest.param("cuda", 5000, (2048, 2048), marks=gpu),
    ],
)
def test_gate_and_up_side_by_side_are_what_their_product_is(device, activations, dtype, tokens, shape):
    """In the same bits, by whatever kernels, with a bias and without."""
    n, k = shape
    x, packed = normal(tokens, 2 * k, device=device).to(dtype), quantize_mxfp4(normal(n, k, device=device, seed=1))
    bias = normal(n, device=device, seed=2).to(dtype)
    options = {"activations": activations, "hadamard": 32 if activations == "mxfp4" else 0}
    for rest in ((), (bias,)):
        got = mxfp4_gemm(x.view(1, tokens, 2 * k), *packed, *rest, gated=True, **options)
        assert torch.equal(got, mxfp4_gemm(gate(x), *packed, *rest, **options)[None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gate_and_up_have_gradients(dtype):
    x, packed = normal(3, 128).to(dtype).requires_grad_(), quantize_mxfp4(normal(48, 64, seed=1))
    g, bias = normal(3, 48, seed=2).to(dtype), normal(48, seed=3).to(dtype).requires_grad_()
    made = [
        torch.autograd.grad(y, (x, bias), g)
        for y in (mxfp4_gemm(x, *packed, bias, gated=True), mxfp4_gemm(gate(x), *packed, bias))
    ]
    assert all(map(torch.equal, *made)) and made[0][0].abs().min() > 0
    (alone,) = torch.autograd.grad(mxfp4_gemm(x.detach(), *packed, bias, gated=True), bias, g)
    assert torch.equal(alone, made[0][1])
    each = torch.func.vmap(lambda row: mxfp4_gemm(row, *packed, gated=True))(x)
    assert torch.equal(torch.autograd.grad(each, x, g)[0], made[0][0])
