"""MXFP4 products and training: exact operands, the notebook's accuracy, gradients."""

import itertools
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from quantrot.kernels.fp8 import Fp8ScaleRule, quantize_fp8_block
from quantrot.kernels.hadamard import hadamard_ref
from quantrot.kernels.mxfp4 import (
    HadamardGemm,
    Mxfp4Gemm,
    dequantize_mxfp4,
    drawn_numbers,
    expand_mxfp4,
    hadamard_quantize_mxfp4,
    masked_hadamard,
    mxfp4_fused,
    mxfp4_gemm,
    mxfp4_product,
    quantize_mxfp4,
    requantize_mxfp4,
    stored_share,
    unpack_bits,
)
from quantrot.kernels.mxfp4.fused import batch_is_faster
from quantrot.kernels.mxfp4.gemm import batch_beats_cublas, few_is_faster
from quantrot.kernels.mxfp4.reference import ScaleRule

gpu = pytest.mark.gpu


def on_hopper():
    """The module of the CUDA kernels."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    from quantrot.kernels.mxfp4 import hopper

    return hopper


devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
MAX_RELATIVE_ERROR = {torch.bfloat16: 2e-3, torch.float16: 5e-4, torch.float32: 5e-4}  # to float64 of the operands


def relative(y, exact):
    return ((y.double() - exact).norm() / exact.norm().clamp_min(1e-300)).item()


def squared(y, exact):
    return relative(y, exact.double()) ** 2


def normal(*shape, device="cpu", dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def wide(quantized):
    return dequantize_mxfp4(quantized[0].cpu(), quantized[1].cpu(), torch.float32).double()


# --- Products --------------------------------------------------------------------------------------------------------


@devices
@pytest.mark.parametrize("dtype", MAX_RELATIVE_ERROR, ids=str)
@pytest.mark.parametrize("shape", [(1, 64, 96), (3, 48, 64), (63, 80, 256), (257, 128, 1024)])
def test_a_product_is_exact_in_its_operands(device, dtype, shape):
    m, n, k = shape
    a, b = quantize_mxfp4(normal(m, k, device=device)), quantize_mxfp4(normal(n, k, device=device, seed=1))
    y = mxfp4_product(*a, *b, dtype=dtype)
    assert y.dtype == dtype and relative(y.cpu(), wide(a) @ wide(b).T) <= MAX_RELATIVE_ERROR[dtype]


@devices
@pytest.mark.parametrize("activations", ["none", "fp8", "mxfp4"])
@pytest.mark.parametrize("tokens", [1, 3, 32, 33, 257])
@pytest.mark.parametrize("hadamard", [0, 64])
def test_a_linear_is_the_product_of_its_dequantized_operands(device, activations, tokens, hadamard):
    x, w = normal(tokens, 512, device=device, dtype=torch.bfloat16), normal(208, 512, device=device, seed=1) * 0.05
    packed, scale = quantize_mxfp4(w, "mse")
    bias = normal(208, device=device, dtype=torch.bfloat16, seed=2)
    y = mxfp4_gemm(x, packed, scale, bias, activations=activations, hadamard=hadamard)
    operand = x.cpu()
    if activations == "mxfp4":
        operand = wide(hadamard_quantize_mxfp4(operand, hadamard=hadamard)[:2] if hadamard else quantize_mxfp4(operand))
    elif hadamard:
        operand = hadamard_ref(operand, block=hadamard)
    if activations == "fp8":
        token = (operand.float().abs().amax(1, keepdim=True) / 448).to(torch.bfloat16).float()
        operand = (operand.float() / token).to(torch.float8_e4m3fn).double() * token
    exact = operand.double() @ wide((packed, scale)).T + bias.cpu()
    assert y.dtype == x.dtype and y.shape == (tokens, 208)
    assert relative(y.cpu(), exact) <= (4e-3 if activations == "fp8" else 2.5e-3)  # the bias is added once more


@devices
def test_rows_outside_the_window_are_multiplied_exactly(device):
    x, w = normal(70, 256).to(torch.bfloat16).float(), normal(48, 256, seed=1)
    x[3, :32] *= 2.0**20
    x[60, 64:96] *= 2.0**-18
    w[17, 32:64] *= 2.0**17
    a, b = quantize_mxfp4(x.to(device)), quantize_mxfp4(w.to(device))
    exact = wide(a) @ wide(b).T
    for dtype in MAX_RELATIVE_ERROR:
        if dtype == torch.float16:
            continue  # 2^20 does not fit
        y = mxfp4_product(*a, *b, dtype=dtype).cpu().double()
        error = (y - exact).norm(dim=1) / exact.norm(dim=1)
        assert error.max() <= 1.5 * MAX_RELATIVE_ERROR[dtype]
    y = mxfp4_gemm(x.to(device, torch.bfloat16), *b, activations="mxfp4").cpu()
    assert relative(y, exact) <= 3e-3


def test_a_nan_reaches_its_own_row_and_no_other():
    x, w = normal(5, 64), normal(32, 64, seed=1)
    x[2, 40] = float("nan")
    y = mxfp4_gemm(x, *quantize_mxfp4(w), activations="mxfp4")
    assert y[2].isnan().all() and not y[[0, 1, 3, 4]].isnan().any()


def test_leading_dimensions_and_empty_inputs():
    packed, scale = quantize_mxfp4(normal(48, 64))
    x = normal(2, 3, 64)
    y = mxfp4_gemm(x, packed, scale)
    assert y.shape == (2, 3, 48) and torch.equal(y.view(6, 48), mxfp4_gemm(x.view(6, 64), packed, scale))
    for activations in ("none", "fp8", "mxfp4"):
        assert mxfp4_gemm(x[:0], packed, scale, activations=activations).shape == (0, 3, 48)
        y = mxfp4_gemm(x[..., :0], packed[:, :0], scale[:, :0], torch.ones(48).to(x), activations=activations)
        assert torch.equal(y, torch.ones(*x.shape[:-1], 48).to(x))
    assert [t.shape[0] for t in expand_mxfp4(packed[:, :0], scale[:, :0])] == [48] * 3


SHAPES = [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192)]


def test_few_tokens_take_their_own_kernel_where_the_models_say_that_it_is_faster():
    for activations in ("fp8", "mxfp4"):
        assert all(few_is_faster(1, *shape, activations) for shape in SHAPES)
        assert few_is_faster(8, 10240, 8192, activations) and not few_is_faster(32, 10240, 8192, activations)
        assert few_is_faster(32, 4096, 4096, activations) and not few_is_faster(24, 28672, 4096, activations)
        assert not few_is_faster(33, 1536, 1536, activations)
        assert not few_is_faster(32, 4096, 14336, activations)
    assert few_is_faster(16, 4096, 14336, "mxfp4") and not few_is_faster(16, 4096, 14336, "fp8")


def test_cublas_multiplies_many_tokens_where_the_models_say_that_it_is_faster():
    """Cases where one was a tenth faster and more (H200)."""
    assert all(batch_beats_cublas(1024, *shape) for shape in ((4096, 4096), (8192, 8192), (57344, 8192), (2048, 8192)))
    assert batch_beats_cublas(1280, 6144, 4096) and batch_beats_cublas(1536, 2048, 8192)
    assert not any(batch_beats_cublas(2048, *shape) for shape in ((3072, 2048), (16384, 2048), (8192, 28672)))
    assert not any(batch_beats_cublas(4096, *shape) for shape in SHAPES)
    assert all(batch_beats_cublas(tokens, *shape) for tokens in (33, 64, 256, 512) for shape in SHAPES)


def test_what_is_around_a_product_in_a_layer_must_be_made_up_for_by_the_batchs():
    for activations in ("fp8", "mxfp4"):
        assert batch_is_faster(24, 28672, 4096, activations, True, False)
        assert batch_is_faster(24, 8192, 28672, activations, True, True)
        assert not batch_is_faster(16, 10240, 8192, activations, True, False)
        assert not batch_is_faster(32, 4096, 14336, activations, True, True)
    assert not batch_is_faster(32, 57344, 8192, "none", True, False)
    assert batch_is_faster(32, 4096, 14336, "fp8", False, False)


WHOLE_RULES = [rule for rule in ScaleRule if rule is not ScaleRule.absmax34]
ALL_TURNS = [(rule, hadamard) for rule in WHOLE_RULES for hadamard in (0, 32, 64, 128)]


@gpu
@pytest.mark.parametrize(
    ("rule", "hadamard", "shape"),
    [(*turn, (1000, 384)) for turn in ALL_TURNS]
    + [(*turn, shape) for shape in SHAPES for turn in (("even", 32), ("quest", 128), ("mse", 64), ("even", 0))],
)
def test_quantized_in_the_product_or_before_it_tokens_give_the_same_bits(rule, hadamard, shape):
    """Also groups of zeros, of tiny and of huge numbers, and NaN; in a graph, too."""
    hopper = on_hopper()
    from quantrot.kernels.mxfp4 import triton_rows

    packed, scale = quantize_mxfp4(normal(*shape, device="cuda", seed=1))
    for tokens in (n for n in (1, 2, 8, 13, 16, 32) if few_is_faster(n, *shape, "mxfp4")):  # a batch has its own bits
        x = normal(tokens, shape[1], device="cuda", dtype=torch.bfloat16)
        x[:, 128:256] *= torch.tensor([0.0, 2.0**-120, 2.0**-30, 2.0**40], device="cuda").repeat_interleave(32)
        x[-1, 33] = float("nan") if tokens > 1 else 1.0
        before = triton_rows.round_trip(x, ScaleRule(rule), hadamard)
        expected = hopper.decode(before, None, packed, scale, torch.bfloat16, hopper.plan_for(tokens, *shape))
        options = {"activations": "mxfp4", "scale_rule": rule, "hadamard": hadamard}
        for settled in (False, True):
            y = mxfp4_gemm(x, packed, scale, settled=settled, **options)
            assert torch.equal(y.view(torch.int16), expected.view(torch.int16))


@gpu
def test_a_product_that_reads_early_waits_for_its_tokens_and_whom_it_writes_over():
    """A chain: each product's tokens are made by the kernel before it, its memory was read by the one before that."""
    on_hopper()
    ways = [quantize_mxfp4(normal(4096, 4096, device="cuda", seed=i) / 64) for i in range(6)]  # keep a token's size
    x = normal(1, 4096, device="cuda", dtype=torch.bfloat16)

    def chain(settled, pause):
        y = x
        for i in range(24):
            last = y
            for way in (i, i + 1):
                y = mxfp4_gemm(y, *ways[way % 6], activations="mxfp4", hadamard=32, settled=settled)
                pause()
            y = y + last.sin()
            pause()
        return y

    expected = chain(False, torch.cuda.synchronize)
    assert expected.isfinite().all() and expected.norm() > 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(True, lambda: None)
    for _ in range(100):
        graph.replay()
        assert torch.equal(y, expected)
    assert torch.equal(chain(True, lambda: None), expected)


@pytest.mark.parametrize("hadamard", [0, 32])
def test_gradients_of_the_linear_are_those_of_the_dequantized_weight(hadamard):
    x, packed = normal(3, 64).requires_grad_(), quantize_mxfp4(normal(48, 64, seed=1))
    bias = normal(48, seed=2).requires_grad_()
    g = normal(3, 48, seed=3)
    dx, db = torch.autograd.grad(mxfp4_gemm(x, *packed, bias, hadamard=hadamard), (x, bias), g)
    weight = dequantize_mxfp4(*packed, torch.float32)
    expected = g @ weight
    torch.testing.assert_close(dx, hadamard_ref(expected, block=32) if hadamard else expected)
    torch.testing.assert_close(db, g.sum(0))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda p, s: mxfp4_gemm(torch.zeros(2, 64), p, s, gated=True), r"gated: x \[2, 64\] .*; .* x \[..., 128\]"),
        (lambda p, s: mxfp4_gemm(torch.zeros(2, 32), p, s), r"needs \[..., K\] by \[N, K/2\]"),
        (lambda p, s: mxfp4_gemm(torch.zeros(2, 64), p, s, torch.zeros(3)), r"bias: \S+ \[3\]; allowed: \[48\]"),
        (lambda p, s: mxfp4_gemm(torch.zeros(2, 64), p, s, torch.zeros(48).int()), r"bias: torch.int32 \[48\]"),
        (
            lambda p, s: mxfp4_gemm(torch.zeros(2, 64), p, s, activations="mxfp4", scale_rule="absmax34"),
            "scale_rule: absmax34 stores 3/4 of each value, .*; allowed: floor, even, rceil, quest, mse$",
        ),
        (lambda p, s: mxfp4_gemm(torch.zeros(2, 64), p, s, activations="int8"), "allowed: none, fp8, mxfp4"),
        (lambda p, s: mxfp4_gemm(torch.zeros(2, 64), p, s, hadamard=48), "allowed: 0, 32, 64 or 128"),
        (
            lambda p, s: mxfp4_gemm(torch.zeros(2, 64), p, s, backend="x"),
            "allowed: auto, hopper, triton, cublas, reference",
        ),
        (lambda p, s: mxfp4_gemm(torch.zeros(2, 64), p, s, backend="triton"), "1 to 32 tokens of bfloat16"),
        (lambda p, s: mxfp4_gemm(torch.zeros(2, 64), p, s, backend="hopper"), "capability 9.0, with cuda.core"),
        (lambda p, s: mxfp4_gemm(torch.zeros(2, 64).double(), p, s), "x: dtype torch.float64; allowed"),
        (lambda p, s: mxfp4_product(p, s, p, s, backend="cublas"), "'cublas' needs a CUDA device"),
        (lambda p, s: mxfp4_product(p, s, p[:, :16], s[:, :1]), r"allowed: \[M, K/2\] and \[N, K/2\]"),
        (lambda p, s: mxfp4_product(p, s, p, s, dtype=torch.int8), "dtype: dtype torch.int8; allowed"),
        (lambda p, s: mxfp4_product(p, s, p, s, outside=torch.zeros(3).int()), r"outside: torch.int32 \(3,\); allowed"),
        (lambda p, s: mxfp4_product(p, s, p, s, outside=torch.zeros(())), "allowed: an integer tensor of one element"),
        (lambda p, s: mxfp4_product(p, s, p, s, outside=torch.tensor(True)), "outside: torch.bool"),
    ],
)
def test_errors_name_the_field_and_the_remedy(call, says):
    with pytest.raises(ValueError, match=says):
        call(*quantize_mxfp4(torch.zeros(48, 64)))


def test_what_is_around_a_product_is_exported_for_any_number_of_tokens():
    class Fused(torch.nn.Module):
        def forward(self, x):
            return mxfp4_fused(x, *packed, norm=torch.ones(64), epsilon=1e-5)

    packed, tokens = quantize_mxfp4(torch.randn(48, 64)), torch.export.Dim("tokens", min=2, max=1000)
    exported = torch.export.export(Fused(), (torch.randn(8, 64),), dynamic_shapes=({0: tokens},)).module()
    x = torch.randn(33, 64)
    assert torch.equal(exported(x), Fused()(x))


@pytest.mark.parametrize(
    ("k", "options", "says"),
    [
        (32, {}, r"needs \[..., K\] by \[N, K/2\]"),
        (64, {"hadamard": 48}, "allowed: 0, 32, 64 or 128"),
        (64, {"activations": "mxfp4", "scale_rule": "best"}, "scale_rule: 'best'; allowed"),
        (
            128,
            {"gated": True},
            r"gated: x \[1, 128\] by packed \[48, 32\], with a norm; .* x \[..., 128\], and no norm",
        ),
        (64, {"gated": True, "norm": None}, r"gated: x \[1, 64\] by packed \[48, 32\]; allowed: x \[..., 128\]"),
        (64, {"residual": torch.zeros(2, 48).bfloat16()}, r"residual: .*\[2, 48\] on cpu; allowed: .*\[1, 48\]"),
    ],
)
def test_what_a_fused_product_does_not_take_is_named_before_a_kernel_reads_it(monkeypatch, k, options, says):
    from quantrot.kernels.mxfp4 import fused

    for name in ("mxfp4_gemm", "_fused"):
        monkeypatch.setattr(fused, name, lambda *_, **__: pytest.fail("was multiplied"))
    monkeypatch.setattr(fused, "has_fused", lambda *_: True)
    packed, scale = quantize_mxfp4(torch.zeros(48, 64))
    given = {"norm": torch.ones(k).bfloat16()} | options
    with pytest.raises(ValueError, match=says):
        fused.mxfp4_fused(torch.zeros(1, k).bfloat16(), packed, scale, **given)


# --- Training --------------------------------------------------------------------------------------------------------


def gradients(y, x, w, g):
    return y, *torch.autograd.grad(y, (x, w), g)


@devices
def test_the_notebooks_accuracy(device):
    """Squared relative errors: transform alone < 1e-4; MXFP4 product 2e-2 ... 6e-2; its gradients 6e-2 ... 15e-2."""
    x = normal(8, 96, 512, device=device).requires_grad_()
    w = (normal(384, 512, device=device, seed=1) * 0.05).requires_grad_()
    g = normal(8, 96, 384, device=device, seed=2)
    exact = gradients(F.linear(x, w), x, w, g)
    for y, expected in zip(gradients(HadamardGemm.apply(x, w, 32), x, w, g), exact, strict=True):
        assert squared(y, expected) < 1e-4
    for hadamard, drawn in itertools.product((32, 64, 128), (False, True)):
        random = drawn_numbers(x, w, hadamard) if drawn else (3, 5)
        y, dx, dw = gradients(Mxfp4Gemm.apply(x, w, hadamard, random), x, w, g)
        assert 2e-2 < squared(y, exact[0]) < 6e-2
        assert 6e-2 < squared(dx, exact[1]) < 15e-2 and 6e-2 < squared(dw, exact[2]) < 15e-2


def test_the_backward_pass_is_the_products_of_its_quantized_operands():
    """Against the same in float64 from the operands that the quantizers give, nearest rounding."""
    x, w, g = normal(64, 128), normal(96, 128, seed=1) * 0.1, normal(64, 96, seed=2)
    x[0, 0] = 40.0  # clipped
    _, dx, dw = gradients(Mxfp4Gemm.apply(x.requires_grad_(), w.requires_grad_(), 32), x, w, g)
    with torch.no_grad():
        xq, wq = (hadamard_quantize_mxfp4(t, "quest", clip_mask=True) for t in (x, w))
        turn = lambda t: wide(hadamard_quantize_mxfp4(t, "absmax34")[:2])  # noqa: E731
        inner = turn(g) @ turn(wide(wq[:2]).float().T).T / stored_share(32) ** 2
        expected = hadamard_ref(inner * unpack_bits(xq[2]), block=32)
        inner = turn(g.T) @ turn(wide(xq[:2]).float().T).T / stored_share(32) ** 2
        assert relative(dx, expected) < 1e-5
        assert relative(dw, hadamard_ref(inner * unpack_bits(wq[2]), block=32)) < 1e-5
    assert not unpack_bits(xq[2]).all()


def test_a_backward_pass_rounds_and_turns_by_the_drawn_numbers():
    """Both operands of a product with the same signs and numbers of their own; ranks have others."""
    x, w, g = normal(64, 128), normal(96, 128, seed=1) * 0.1, normal(64, 96, seed=2)
    torch.manual_seed(5)
    numbers = drawn_numbers(x, w, 32)
    torch.manual_seed(5)
    assert not (numbers == drawn_numbers(x, w, 32, rank=1)).any() and numbers.shape == (34,)
    seed, offset = numbers[:2].tolist()
    signs = 1.0 - 2 * (numbers[2:] >> 32 & 1)
    assert 4 < (signs > 0).sum() < 28
    _, dx, dw = gradients(Mxfp4Gemm.apply(x.requires_grad_(), w.requires_grad_(), 32, numbers), x, w, g)
    turn, again = (
        partial(hadamard_quantize_mxfp4, scale_rule="absmax34", signs=signs),
        partial(requantize_mxfp4, signs=signs),
    )
    with torch.no_grad():
        xq, wq = (hadamard_quantize_mxfp4(t, "quest", clip_mask=True) for t in (x, w))
        back, turned = turn(g, random=(seed, offset)), again(*wq[:2], random=(seed, offset + 1))
        inner = wide(back[:2]) @ wide(turned).T / stored_share(32) ** 2
        assert relative(dx, hadamard_ref(inner * unpack_bits(xq[2]), block=32)) < 1e-5
        back, turned = turn(g.T, random=(seed, offset + 2)), again(*xq[:2], random=(seed, offset + 3))
        inner = wide(back[:2]) @ wide(turned).T / stored_share(32) ** 2
        assert relative(dw, hadamard_ref(inner * unpack_bits(wq[2]), block=32)) < 1e-5


@gpu
def test_a_recorded_step_draws_anew_at_each_replay():
    """Their mean nears what they round as 1 / replays; no two linears of one draw are the same."""
    x, w = (normal(*size, device="cuda").requires_grad_() for size in ((64, 128), (96, 128)))
    g = normal(64, 96, device="cuda", seed=2)

    def step():
        return gradients(Mxfp4Gemm.apply(x, w, 32, drawn_numbers(x, w, 32)), x, w, g)[1:]

    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, second = step(), step()
    runs = []
    for _ in range(64):
        graph.replay()
        runs += [[t.clone() for t in first], [t.clone() for t in second]]
    assert not any(torch.equal(a[1], b[1]) for a, b in itertools.combinations(runs, 2))
    with torch.no_grad():
        xq, wq = (hadamard_quantize_mxfp4(t.detach().cpu(), "quest", clip_mask=True) for t in (x, w))
        dx = hadamard_ref(g.cpu().double() @ wide(wq[:2]) * unpack_bits(xq[2]), block=32)
    one = sum(squared(run[0].cpu(), dx) for run in runs) / len(runs)
    mean = squared(sum(run[0].cpu().double() for run in runs) / len(runs), dx)
    assert one / len(runs) / 1.5 < mean < one / len(runs) * 1.5


def test_random_gradients_are_unbiased():
    """The mean over draws of dx and dw nears the product of the forward's operands as 1 / draws."""
    x, w, g = normal(32, 64).requires_grad_(), (normal(32, 64, seed=1) * 0.1).requires_grad_(), normal(32, 32, seed=2)
    with torch.no_grad():
        xq, wq = (hadamard_quantize_mxfp4(t, "quest", clip_mask=True) for t in (x, w))
        dx = hadamard_ref(g.double() @ wide(wq[:2]) * unpack_bits(xq[2]), block=32)
        dw = hadamard_ref(g.T.double() @ wide(xq[:2]) * unpack_bits(wq[2]), block=32)
    runs = [gradients(Mxfp4Gemm.apply(x, w, 32, (1, i)), x, w, g)[1:] for i in range(64)]
    for i, exact in enumerate((dx, dw)):
        one = sum(squared(run[i], exact) for run in runs) / 64
        mean = squared(sum(run[i].double() for run in runs) / 64, exact)
        assert one / 64 / 1.5 < mean < one / 64 * 1.5


@pytest.mark.parametrize("tokens", [1, 3, 33])
def test_tokens_need_not_be_a_multiple_of_the_transform(tokens):
    x, w = normal(tokens, 64).requires_grad_(), normal(32, 64, seed=1).requires_grad_()
    g = normal(tokens, 32, seed=2)
    exact = gradients(F.linear(x, w), x, w, g)
    got = gradients(Mxfp4Gemm.apply(x, w, 32, None), x, w, g)
    assert all(squared(a, b) < 0.3 for a, b in zip(got, exact, strict=True))


@devices
@pytest.mark.parametrize("shape", [(64,), (0, 64), (2, 0, 64)])
def test_one_token_without_dimensions_and_no_token_have_gradients(device, shape):
    x, w = normal(*shape, device=device).requires_grad_(), normal(32, 64, device=device, seed=1).requires_grad_()
    bias = normal(32, device=device, seed=2).requires_grad_()
    g = normal(*shape[:-1], 32, device=device, seed=3)
    exact = torch.autograd.grad(F.linear(x, w, bias), (x, w, bias), g)
    for product, bound in ((HadamardGemm, 1e-4), (Mxfp4Gemm, 0.3)):
        got = torch.autograd.grad(product.apply(x, w, 32), (x, w), g)
        assert all(squared(a, b) < bound if b.any() else not a.any() for a, b in zip(got, exact[:2], strict=True))
    weight = quantize_mxfp4(w.detach())
    got = torch.autograd.grad(mxfp4_gemm(x, *weight, bias), (x, bias), g)
    assert got[0].shape == x.shape and torch.equal(got[1], exact[2])


@pytest.mark.parametrize("product", [HadamardGemm, Mxfp4Gemm])
def test_gradients_of_gradients_are_refused(product):
    x, w = normal(3, 64).requires_grad_(), normal(32, 64, seed=1).requires_grad_()
    with pytest.raises(NotImplementedError, match="create_graph: .* put nn.Linear in its layer's place"):
        torch.autograd.grad(product.apply(x, w, 32).sum(), x, create_graph=True)


def test_a_clipped_gradient_has_none_itself():
    x, mask = normal(3, 64).requires_grad_(), torch.full((3, 8), 255, dtype=torch.uint8)
    with pytest.raises(ValueError, match="x: requires a gradient, which masked_hadamard has not; detach it"):
        masked_hadamard(x, mask)
    assert masked_hadamard(x.detach(), mask).shape == x.shape


def test_a_frozen_side_costs_no_gradient():
    x, w = normal(32, 64), normal(32, 64, seed=1).requires_grad_()
    Mxfp4Gemm.apply(x, w, 32, None).sum().backward()
    assert w.grad is not None and x.grad is None


def test_dimensions_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="both dimensions must be multiples of hadamard = 64"):
        Mxfp4Gemm.apply(torch.zeros(2, 64), torch.zeros(96, 64), 64)
    for gemm in (HadamardGemm, Mxfp4Gemm):
        for x, weight, says in (
            (torch.zeros(4, 64), torch.zeros(64, 32), r"shapes \(4, 64\) and \(64, 32\); allowed: .* \[N, K\]"),
            (torch.zeros(4, 64), torch.zeros(64, 64, device="meta"), "weight: on meta, x is on cpu"),
            (torch.zeros(4, 64), torch.zeros(64, 64).int(), "weight: torch.int32; allowed here: .*torch.float32"),
        ):
            with pytest.raises(ValueError, match=says):
                gemm.apply(x, weight, 32)
    with pytest.raises(ValueError, match="outside: on meta"):
        Mxfp4Gemm.apply(torch.zeros(4, 64), torch.zeros(64, 64), 32, None, torch.zeros(1, device="meta").int())
    with pytest.raises(ValueError, match="hadamard: 16; allowed: 32, 64, 128"):
        Mxfp4Gemm.apply(torch.zeros(2, 64), torch.zeros(96, 64), 16)


@devices
def test_the_operators_are_functional_and_registered(device):
    x, w = normal(4, 64, device=device), quantize_mxfp4(normal(48, 64, device=device, seed=1))
    ops, tests = torch.ops.quantrot, ("test_schema", "test_faketensor", "test_autograd_registration")
    for activations in ("none", "fp8", "mxfp4"):
        rule = "bf16" if activations == "fp8" else "even"
        arguments = *w, None, activations, rule, 32, True, "auto"
        torch.library.opcheck(ops.mxfp4_linear, (x.requires_grad_(), *arguments, False), test_utils=tests)
        torch.library.opcheck(ops.mxfp4_linear, (torch.cat((x, x), -1), *arguments, True), test_utils=tests)
    torch.library.opcheck(ops.mxfp4_product, (*w, *w, x, torch.bfloat16, True, "auto"), test_utils=tests)
    torch.library.opcheck(ops.mxfp4_draw, (x, x, 34, 1), test_utils=tests[:1] + tests[2:])


@devices
def test_compiled_bits_are_eager_bits(device):
    packed, scale = quantize_mxfp4(normal(48, 64, device=device))

    def step(x):
        return mxfp4_gemm(x * 2, packed, scale, activations="mxfp4", hadamard=32) + 1

    x = normal(5, 64, device=device, dtype=torch.bfloat16)
    backend = "inductor" if device == "cuda" else "aot_eager"
    assert torch.equal(torch.compile(step, fullgraph=True, backend=backend)(x), step(x))


@pytest.mark.parametrize("order", [12, 20, 32, 44])
def test_gradients_of_a_hadamard_gemm_are_exact_for_every_order(order):
    torch.manual_seed(0)
    x, w = torch.randn(3, 2 * order, dtype=torch.float64), torch.randn(5, 2 * order, dtype=torch.float64)
    made = [t.clone().requires_grad_() for t in (x, w)]
    exact = [t.clone().requires_grad_() for t in (x, w)]
    grad = torch.randn(3, 5, dtype=torch.float64)
    HadamardGemm.apply(*made, order).backward(grad)
    F.linear(*exact).backward(grad)
    for ours, theirs in zip(made, exact, strict=True):
        assert relative(ours.grad, theirs.grad) < 1e-14


def test_a_hadamard_gemm_under_autocast_keeps_its_dtype():
    x, w = torch.randn(3, 32, requires_grad=True), torch.randn(5, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = HadamardGemm.apply(x, w, 32)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == torch.float32


@pytest.mark.parametrize(("token", "weight"), [(6e4, 1e-8), (1e-4, 1e5)])
def test_float16_tokens_by_weights_that_float16_does_not_hold(token, weight):
    packed, scale = quantize_mxfp4(torch.full((32, 32), weight))
    x = torch.full((1, 32), token, dtype=torch.float16)
    exact = F.linear(x.double(), dequantize_mxfp4(packed, scale, torch.float32).double())
    assert relative(mxfp4_gemm(x, packed, scale, backend="reference"), exact) < MAX_RELATIVE_ERROR[torch.float16]


def test_random_numbers_out_of_range_are_refused_before_the_forward():
    x, w = torch.randn(32, 32, requires_grad=True), torch.randn(32, 32)
    for random in ((1, 1 << 61), (-1, 0), (1,), torch.zeros(34), torch.zeros(2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="random: .*; allowed:"):
            Mxfp4Gemm.apply(x, w, 32, random)


def test_more_columns_than_a_batchs_kernel_has_a_plan_for():
    from quantrot.kernels.mxfp4 import hopper_batch

    for depth in (hopper_batch.MOST_DEPTH, 2 * hopper_batch.MOST_DEPTH):
        x = torch.empty(16, depth, dtype=torch.bfloat16, device="meta")
        assert hopper_batch.fits(x, 4096) == (depth == hopper_batch.MOST_DEPTH)
        assert few_is_faster(16, 4096, depth, "fp8") or hopper_batch.fits(x, 4096)
        if hopper_batch.fits(x, 4096):
            assert all(hopper_batch.plan_for(n, rows, depth).stages >= 2 for n in (1, 16, 512) for rows in (8, 4096))


@pytest.mark.parametrize("rule", Fp8ScaleRule)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_e4m3_tokens_are_multiplied_exactly_by_the_definition_too(dtype, rule):
    x, (packed, scale) = normal(64, 512).to(dtype), quantize_mxfp4(normal(48, 512))
    codes, token = quantize_fp8_block(x, (1, 0), rule)
    exact = (codes.double() * token.double()) @ dequantize_mxfp4(packed, scale, torch.float32).double().T
    y = mxfp4_gemm(x, packed, scale, activations="fp8", scale_rule=rule, backend="reference")
    assert relative(y, exact) < 1.01 * relative(exact.to(dtype), exact)


def test_activations_have_scale_rules_of_their_own():
    x, (packed, scale) = normal(3, 64), quantize_mxfp4(normal(48, 64))
    for activations, rule in (("fp8", "bf16"), ("mxfp4", "even")):
        given, default = (mxfp4_gemm(x, packed, scale, activations=activations, scale_rule=r) for r in (rule, None))
        assert torch.equal(given, default)
    with pytest.raises(ValueError, match="scale_rule: 'even'; allowed for activations 'fp8': exact, bf16, pow2"):
        mxfp4_gemm(x, packed, scale, activations="fp8", scale_rule="even")
    with pytest.raises(ValueError, match="scale_rule: 'exact'; allowed: floor"):
        mxfp4_gemm(x, packed, scale, activations="mxfp4", scale_rule="exact")
    for call in (mxfp4_gemm, mxfp4_fused):
        with pytest.raises(ValueError, match="scale_rule: 'even' with activations 'none', which have no scales"):
            call(x, packed, scale, scale_rule="even")
    around = torch.ones(64), 0.1, None, False, False
    y = torch.ops.quantrot.mxfp4_fused(x, packed, scale, "none", "even", 0, *around)  # as mxfp4_fused calls it
    assert torch.equal(y, mxfp4_fused(x, packed, scale, norm=around[0], epsilon=0.1))
