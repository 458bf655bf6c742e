"""mixed_linear, a product with a norm, a gate or a residual: its operations one by one, an operator, one kernel."""

from itertools import product

import pytest
import torch

from quantrot.kernels import mixed, nvrtc
from quantrot.kernels.fp8.reference import gate, rms_norm
from quantrot.kernels.mixed import has_fused, hopper, hopper_plans, mixed_gemm, mixed_linear
from quantrot.kernels.mixed.reference import dequantize_int8, unpack_int8
from tests.kernels.test_mixed import operands as random_operands

gpu = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("shape", [(3, 128), (2, 9, 128)])
def test_gated_is_silu_of_one_half_times_the_other(shape):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=BF16)
    _, weight, scale, _ = random_operands("packed", BF16, 3, 64, 128, 1)
    expected = gate(mixed_gemm(x, weight, scale))
    assert torch.equal(mixed_linear(x, weight, scale, gates=True), expected) and expected.shape[-1] == 32
    x.requires_grad_()
    y = mixed_linear(x, weight, scale, gates=True)
    assert torch.equal(y, expected) and torch.autograd.grad(y.sum(), x)[0].abs().sum() > 0
    with pytest.raises(ValueError, match="even number"):
        mixed_linear(x, weight[1:], scale[1:], gates=True)


def layer_operands(m: int, n: int, k: int, dtype: torch.dtype, groups: int = 1, device: str = "cpu"):
    """x, weight, scale, norm [k] and residual [m, n]; sums of squares are exact where k is a power of two."""
    x, weight, scale, _ = random_operands("packed", dtype, m, n, k, groups, exact=True, device=device)
    norm, residual = torch.rand(k, device=device) + 0.5, torch.randn(m, n, device=device)
    return x, weight, scale, norm.to(dtype), residual.to(dtype)


@pytest.mark.parametrize("m", [0, 1, 3, 17])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_a_linear_is_its_operations_one_by_one(m, dtype):
    torch.manual_seed(0)
    x, weight, scale, norm, residual = layer_operands(m, 64, 256, dtype, 2)
    bias = torch.randn(64).to(dtype)
    product = mixed_gemm(rms_norm(x, norm, 0.1), weight, scale, bias=bias)
    normed = {"bias": bias, "norm": norm, "epsilon": 0.1}
    assert torch.equal(mixed_linear(x, weight, scale, **normed), product)
    assert torch.equal(mixed_linear(x, weight, scale, residual=residual, **normed), product + residual)
    assert torch.equal(mixed_linear(x, weight, scale, gates=True, **normed), gate(product))
    assert torch.equal(
        mixed_linear(x[None], weight, scale, residual=residual[None], **normed), product[None] + residual
    )
    norm.requires_grad_()
    y = mixed_linear(x, weight, scale, residual=residual, **normed)
    assert torch.equal(y, product + residual)
    wanted = torch.autograd.grad((rms_norm(x, norm, 0.1) @ dequantized(weight, scale, dtype).T).sum(), norm)[0]
    got = torch.autograd.grad(y.sum(), norm)[0]
    torch.testing.assert_close(got.float(), wanted.float(), rtol=0.02, atol=0.02 * (1 + wanted.abs().max().item()))


def dequantized(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return dequantize_int8(unpack_int8(packed, 4 * packed.shape[1]), scale, dtype)


@pytest.mark.parametrize("rest", [{}, {"gates": True}, {"add": True}], ids=str)
def test_a_linear_is_an_operator_for_torch(rest):
    x, weight, scale, norm, residual = layer_operands(3, 64, 256, BF16)
    args = norm, 0.1, residual if "add" in rest else None, "gates" in rest, True
    operator = torch.ops.quantrot.mixed_linear.default
    torch.library.opcheck(operator, (x, weight, scale, None, None, *args), test_utils=("test_faketensor",))
    more = {"norm": norm, "epsilon": 0.1, "residual": args[2], "gates": args[3]}
    compiled = torch.compile(lambda x: mixed_linear(x, weight, scale, **more), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), mixed_linear(x, weight, scale, **more))


def test_a_linears_errors_say_what_is_allowed():
    x, weight, scale, norm, residual = layer_operands(3, 64, 256, BF16)
    for message, more in {
        "even number": {"gates": True, "residual": residual},
        "norm: torch.bfloat16 .255. on cpu; allowed: torch.bfloat16 .256.": {"norm": norm[1:]},
        "norm: torch.float32": {"norm": norm.float()},
        "residual: .*allowed: torch.bfloat16 .3, 64.": {"residual": residual[:1]},
    }.items():
        with pytest.raises(ValueError, match=message):
            mixed_linear(x, weight, scale, **more)


def test_few_tokens_are_fused_where_sizes_allow(monkeypatch):
    device = torch.device("cuda")
    monkeypatch.setattr(mixed, "has_kernels", lambda device: True)
    monkeypatch.setattr(nvrtc, "available", lambda device: True)
    sizes = (28672, 4096, 1), (4096, 14336, 1), (6144, 4096, 32), (8192, 8192, 128), (3072, 2048, 16)
    assert all(has_fused(m, *size, device) for size in sizes for m in (1, 2, 16))
    assert not any(has_fused(m, *sizes[0], device) for m in (0, 17))
    assert not any(has_fused(1, *size, device) for size in ((4096, 4096, 128), (100, 4096, 1), (128, 24, 1)))
    for (n, k, groups), gated in product(sizes, (False, True)):
        plan = hopper_plans.token_plan(n, k, 0 if groups == 1 else k // groups // 64, True, gated, False)
        assert plan.gated == gated and plan.keep == k and plan.splits(k) and plan.shared_bytes() <= 226 << 10
        assert bool(plan.ahead) == (groups == 1) and plan.ahead <= plan.stages
    assert hopper_plans.token_plan(4096, 1 << 17, 0, True, False, False) is None  # one token is more than fits


# --- On a GPU --------------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("m", [1, 3, 8, 16, 20])
@pytest.mark.parametrize("groups", [1, 32])
def test_gpu_gated_is_what_three_operations_make(m, groups):
    torch.manual_seed(0)
    x, weight, scale, _ = random_operands("packed", BF16, m, 2 * 14336, 4096, groups, device="cuda")
    scale /= 64
    y, wanted = mixed_linear(x, weight, scale, gates=True, weight_ready=True), gate(mixed_gemm(x, weight, scale))
    assert torch.isclose(y.double(), wanted.double(), rtol=2.0**-6, atol=1e-30).all()
    assert (y != wanted).double().mean() <= 1e-3
    assert all(torch.equal(mixed_linear(x, weight, scale, gates=True), y) for _ in range(50))


@gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("groups", [1, 32])
@pytest.mark.parametrize("m", [1, 2, 8, 13, 16])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (28672, 4096), (4096, 4096), (1024, 2048), (4096, 8192)])
def test_gpu_a_linear_of_few_tokens_is_its_operations_one_by_one(n, k, m, groups, dtype):
    torch.manual_seed(0)
    x, weight, scale, norm, residual = layer_operands(m, n, k, dtype, groups, "cuda")
    norm /= 64
    h, more = rms_norm(x, norm, 0.1), {"norm": norm, "epsilon": 0.1, "weight_ready": True}
    assert hopper.takes(x, n, groups, norm, residual) and has_fused(m, n, k, groups, x.device)
    product = mixed_gemm(h, weight, scale)
    for _ in range(3):
        assert torch.equal(mixed_linear(x, weight, scale, **more), product)
        assert torch.equal(mixed_linear(x, weight, scale, residual=residual, **more), product + residual)
        assert torch.equal(
            mixed_linear(x, weight, scale, gates=True, **more), mixed_linear(h, weight, scale, gates=True)
        )


@gpu
@pytest.mark.parametrize("m", [1, 5, 16])
@pytest.mark.parametrize("groups", [1, 32])
@pytest.mark.parametrize("ready", [False, True])
def test_gpu_a_chain_of_layers_in_a_graph(m, groups, ready):
    """Each reads what the kernel before has just written, and what the one before that was given."""
    torch.manual_seed(0)
    _, up, up_scale, norm, _ = layer_operands(m, 8192, 4096, BF16, groups, "cuda")
    _, down, down_scale, _, _ = layer_operands(m, 4096, 4096, BF16, groups, "cuda")
    x, graph = torch.randn(m, 4096, device="cuda").bfloat16(), torch.cuda.CUDAGraph()
    norm /= 64

    def chain(wait):
        y = x
        for _ in range(4):
            h = mixed_linear(y, up, up_scale, norm=norm, epsilon=1e-5, gates=True, weight_ready=ready)
            wait()
            y = mixed_linear(h, down, down_scale, residual=y, weight_ready=ready)
            wait()
        return y

    expected = chain(torch.cuda.synchronize)
    with torch.cuda.graph(graph):
        y = chain(lambda: None)
    for _ in range(20):
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected)


@gpu
@pytest.mark.parametrize("m", [1, 16, 64, 256, 512])
@pytest.mark.parametrize("groups", [1, 32])
@pytest.mark.parametrize("ready", [False, True])
def test_gpu_in_a_graph_overlapped_with_what_makes_its_operands(m, groups, ready):
    """A chain of products, each of the one before: what is read early must not be what that one writes."""
    torch.manual_seed(0)
    x, weight, scale, _ = random_operands("packed", BF16, m, 4096, 4096, groups, device="cuda")
    scale /= 64
    staged, codes, graph = torch.empty_like(x), weight.clone(), torch.cuda.CUDAGraph()

    def chain():
        staged.copy_(x)
        if not ready:
            codes.copy_(weight)
        results = [staged]
        for _ in range(4):
            results.append(mixed_gemm(results[-1], codes, scale, backend="hopper", weight_ready=ready))
        return results[1:]

    expected, y = [], x
    for _ in range(4):
        y = mixed_gemm(y, weight, scale, backend="hopper")
        torch.cuda.synchronize()
        expected.append(y)
    chain()
    with torch.cuda.graph(graph):
        results = chain()
    for _ in range(20):
        for t in (staged, *results, *([] if ready else [codes])):
            t.zero_()
        graph.replay()
        assert all(torch.equal(y, other) for y, other in zip(results, expected, strict=True))


def test_a_norm_of_float64_is_in_float64():
    torch.manual_seed(0)
    x, norm = torch.randn(3, 128, dtype=torch.float64), torch.rand(128, dtype=torch.float64)
    exact = norm * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert (rms_norm(x, norm, 1e-5) - exact).norm() < 1e-14 * exact.norm()


def test_narrow_activations_take_a_residual_of_the_result_and_no_norm():
    codes, weight = torch.randint(-127, 128, (3, 64), dtype=torch.int8), torch.randn(32, 64).bfloat16()
    scale, residual = torch.rand(3, 1), torch.randn(3, 32).bfloat16()
    y = mixed_linear(codes, weight, scale, residual=residual)
    assert y.dtype == torch.bfloat16 and torch.equal(y, mixed_linear(codes, weight, scale) + residual)
    with pytest.raises(ValueError, match="residual: torch.int8"):
        mixed_linear(codes, weight, scale, residual=torch.zeros(3, 32, dtype=torch.int8))
    with pytest.raises(ValueError, match="norm: x is torch.int8; it takes x of torch.bfloat16"):
        mixed_linear(codes, weight, scale, norm=torch.ones(64))
