"""INT8 weights, and the laws of the mixed-input product: on the CPU and, where there is a GPU, on every backend."""

import inspect
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from quantrot import formats
from quantrot.formats import WIDE, LinearFormat, WeightFormat
from quantrot.kernels.mixed import (
    dequantize_int8,
    has_kernels,
    mixed_gemm,
    mixed_linear,
    mixed_ref,
    pack_int8,
    quantize_int8,
    unpack_int8,
)
from quantrot.kernels.mixed.reference import MAX_EXPANDED_ERROR, MAX_RELATIVE_ERROR
from quantrot.modules import Int8Linear

KINDS = ["int8", "uint8", "packed", "e4m3"]
WIDES = [torch.bfloat16, torch.float16, torch.float32]

gpu = pytest.mark.gpu
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])


@pytest.fixture(autouse=True)
def _deterministic():
    torch.manual_seed(0)


# --- The quantizer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [64, 128, 256])
def test_codes_are_the_nearest_multiple_of_the_scale(group):
    w = torch.randn(9, 256, generator=torch.Generator().manual_seed(0))
    q, scale = quantize_int8(w, group)
    assert scale.dtype == torch.bfloat16 and scale.shape == (9, 256 // group)
    step = scale.double().repeat_interleave(group, 1)
    expected = (w.double() / step).round().clamp(-127, 127)
    assert (q - expected).abs().max() <= 1 and (q != expected).float().mean() < 1e-3  # float32 division at a tie
    error = (dequantize_int8(q, scale, torch.float32) - w).abs()
    assert (error <= step * 0.5 + w.abs() * 2**-8).all()


def test_zero_rows_and_extremes():
    w = torch.zeros(2, 64)
    w[1, 0], w[1, 1] = 1.0, -1.0
    q, scale = quantize_int8(w, 64)
    assert scale[0, 0] == 1 and not q[0].any()
    assert q[1, 0] == 127 and q[1, 1] == -127


def test_pack_is_little_endian_offset_binary():
    q = torch.tensor([[-128, -1, 0, 127]], dtype=torch.int8)
    assert pack_int8(q).view(torch.uint8).tolist() == [[0, 127, 128, 255]]


@pytest.mark.parametrize("columns", [1, 3, 4, 130])
def test_pack_round_trips_all_codes_at_any_width(columns):
    q = torch.arange(-128, 128).repeat(columns).view(columns, -1)[:, :].T.contiguous().to(torch.int8)
    assert torch.equal(unpack_int8(pack_int8(q), columns), q)


X, Q, S = torch.zeros(2, 8), torch.zeros(4, 8, dtype=torch.int8), torch.ones(4)


def test_packing_takes_any_strides():
    q = torch.arange(-128, 128).to(torch.int8).view(32, 8)
    assert torch.equal(pack_int8(q.T), pack_int8(q.T.contiguous()))
    packed = pack_int8(q).repeat_interleave(2, 1)[:, ::2]
    assert not packed.is_contiguous() and torch.equal(unpack_int8(packed, 8), q)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: quantize_int8(torch.zeros(2, 64, dtype=torch.int32), 64), "w: torch.int32"),
        (lambda: dequantize_int8(torch.zeros(2, 64), torch.ones(2, 1)), "qdata: torch.float32"),
        (lambda: dequantize_int8(torch.zeros(2, 64, dtype=torch.int8), torch.ones(4, 1)), r" \[4, 1\], .*; allowed"),
        (lambda: dequantize_int8(torch.zeros(2, 64, dtype=torch.int8), torch.ones(2, 0)), r" \[2, 0\], .*; allowed"),
        (
            lambda: dequantize_int8(torch.zeros(2, 64, dtype=torch.int8), torch.ones(2, 1).int()),
            r"scale: torch.int32 \[2, 1\], .*; allowed",
        ),
        (lambda: pack_int8(torch.zeros(2, 64)), "qdata: torch.float32"),
        (lambda: unpack_int8(torch.zeros(2, 16, dtype=torch.int32), 65), "65 columns need torch.int32, four a word"),
        (lambda: mixed_linear(torch.zeros(()), Q, S), r"x: float32 \[\], weight: .*allowed: \[..., K\]"),
    ],
)
def test_errors_of_what_surrounds_the_product(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_group_must_divide():
    with pytest.raises(ValueError, match="group is 96, which does not divide the 256 columns"):
        quantize_int8(torch.zeros(2, 256), 96)


# --- The product -----------------------------------------------------------------------------------------------------


def codes_of(kind: str, rows: int, columns: int, device: str = "cpu") -> torch.Tensor:
    """Random codes of all values; e4m3 ones are small integers, so that sums are exact."""
    if kind == "e4m3":
        return torch.randint(-8, 9, (rows, columns), device=device).float().to(torch.float8_e4m3fn)
    q = torch.randint(-128, 128, (rows, columns), device=device, dtype=torch.int8)
    return q.view(torch.uint8) if kind == "uint8" else pack_int8(q) if kind == "packed" else q


def exact_product(x, weight, scale, zero=None, bias=None) -> torch.Tensor:
    """float64, written without the library's reference."""

    def widened(t: torch.Tensor) -> torch.Tensor:
        if t.dtype == torch.int32:
            t = t.view(torch.uint8).short() - 128
        return t.double()

    def scaled(t: torch.Tensor, columns: int) -> torch.Tensor:
        t = widened(t)[:, :columns].unflatten(1, (scale.shape[1], -1))
        t = t if zero is None else t - zero.double().unsqueeze(-1)
        return (t * scale.double().unsqueeze(-1)).flatten(1)

    if x.dtype in (torch.int8, torch.uint8, torch.float8_e4m3fn):
        y = scaled(x, weight.shape[1]) @ widened(weight).T
    else:
        y = widened(x) @ scaled(weight, x.shape[1]).T
    return y if bias is None else y + bias.double()


def relative(y: torch.Tensor, exact: torch.Tensor) -> float:
    return ((y.double() - exact).norm() / exact.norm().clamp_min(1e-300)).item()


def operands(kind, wide, m, n, k, groups, narrow="weight", exact=False, device="cpu"):
    """(x, weight, scale, zero point); exact: integers and powers of two, so that no float32 sum rounds."""
    rows, others = (n, m) if narrow == "weight" else (m, n)
    if kind == "e4m3" and not exact:
        codes = torch.randn(rows, k, device=device).to(torch.float8_e4m3fn)
    else:
        codes = codes_of(kind, rows, k, device)
    if exact:
        other = torch.randint(-4, 5, (others, k), device=device).to(wide)
        scale = torch.exp2(torch.randint(-8, -3, (rows, groups), device=device).float()).to(torch.bfloat16)
    else:
        other = torch.randn(others, k, device=device).to(wide)
        scale = (torch.rand(rows, groups, device=device) * 0.01 + 0.001).to(torch.bfloat16)
    zero = None
    if kind != "e4m3":
        zero = torch.randint(-128, 128, (rows, groups), device=device, dtype=torch.int8)
        zero = zero.view(torch.uint8) if kind == "uint8" else zero
    return (other, codes, scale, zero) if narrow == "weight" else (codes, other, scale, zero)


VARIANTS = [(k, w, n) for k, w, n in product(KINDS, WIDES, ["weight", "x"]) if (k, n) != ("packed", "x")]
variants = pytest.mark.parametrize(("kind", "wide", "narrow"), VARIANTS, ids=lambda v: str(v).removeprefix("torch."))


@devices
@variants
def test_where_no_sum_rounds_the_result_is_the_exact_one_rounded_once(device, kind, wide, narrow):
    shapes = ((5, 33, 256, 2), (130, 70, 128, 1), (1, 40, 256, 1), (17, 64, 512, 8))
    for m, n, k, groups in shapes[:2] if device == "cuda" else shapes:  # a kernel to compile for each
        x, weight, scale, zero = operands(kind, wide, m, n, k, groups, narrow, True, device)
        bias = torch.randint(-4, 5, (n,), device=device).to(wide)
        for z, b in ((zero, bias), (None, None))[: 1 if device == "cuda" else 2]:
            expected = exact_product(x, weight, scale, z, b).to(wide)
            assert torch.equal(mixed_gemm(x, weight, scale, z, b), expected)


@variants
def test_error_to_float64_is_one_rounding(kind, wide, narrow):
    x, weight, scale, zero = operands(kind, wide, 63, 300, 1024, 8, narrow)
    for z in (None, zero):
        assert relative(mixed_gemm(x, weight, scale, z), exact_product(x, weight, scale, z)) <= MAX_RELATIVE_ERROR[wide]


@devices
@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float16], ids=str)
def test_expanding_rounds_the_weight_too(device, wide):
    x, weight, scale, zero = operands("uint8", wide, 63, 300, 1024, 8, device=device)
    y = mixed_gemm(x, weight, scale, zero, backend="expand")
    error = relative(y, exact_product(x, weight, scale, zero))
    assert 0.9 * MAX_RELATIVE_ERROR[wide] < error <= MAX_EXPANDED_ERROR[wide]
    expanded = torch.ops.quantrot.mixed_expand(weight, scale, zero, 1024, wide)
    per_weight = (weight.double().unflatten(1, (8, -1)) - zero.double()[..., None]) * scale.double()[..., None]
    assert torch.equal(expanded, per_weight.flatten(1).float().to(wide))


@devices
@pytest.mark.parametrize("k", [1, 31, 48, 100, 1000])
@pytest.mark.parametrize("kind", ["packed", "e4m3"])
def test_any_width_and_height(device, kind, k):
    for m, n in ((0, 5), (1, 1), (3, 17), (63, 1), (257, 30)):
        x, weight, scale, zero = operands(kind, torch.float16, m, n, k, 1, device=device)
        y = mixed_gemm(x, weight, scale, zero)
        exact = exact_product(x, weight, scale, zero)
        assert y.shape == (m, n)
        torch.testing.assert_close(y.double(), exact, rtol=1e-3, atol=1e-3 * exact.abs().max().item() if m else 0)


@devices
@pytest.mark.parametrize("narrow", ["weight", "x"])
def test_layout_does_not_change_bits(device, narrow):
    x, weight, scale, zero = operands("int8", torch.bfloat16, 33, 40, 256, 2, narrow, False, device)
    y = mixed_gemm(x, weight, scale, zero)
    padded = [torch.cat((t, t), 1)[:, :256] for t in (x, weight)]
    assert torch.equal(mixed_gemm(*padded, scale, zero), y)
    turned = [t.T.contiguous().T for t in (x, weight)]
    assert torch.equal(mixed_gemm(*turned, scale.T.contiguous().T, zero), y)
    assert torch.equal(mixed_gemm(x.unflatten(0, (3, 11)), weight, scale, zero), y.unflatten(0, (3, 11)))


@devices
def test_the_layout_on_disk_is_the_int8_weight(device):
    x, q, scale, zero = operands("int8", torch.bfloat16, 9, 40, 260, 2, device=device)
    assert torch.equal(mixed_gemm(x, pack_int8(q), scale, zero), mixed_gemm(x, q, scale, zero))
    x, q, scale, _ = operands("int8", torch.float32, 2, 8, 103, 1, exact=True, device=device)
    assert torch.equal(mixed_gemm(x, pack_int8(q), scale), mixed_gemm(x, q, scale))  # a row that ends within a word


@devices
def test_offset_codes_with_a_zero_point_are_signed_codes(device):
    x, q, scale, _ = operands("int8", torch.bfloat16, 9, 40, 256, 2, device=device)
    unsigned = (q.short() + 128).to(torch.uint8)
    zero = torch.full(scale.shape, 128, dtype=torch.uint8, device=device)
    assert torch.equal(mixed_gemm(x, unsigned, scale, zero), mixed_gemm(x, q, scale))


@devices
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_special_values_reach_their_own_row_and_no_other(device, value):
    x, q, scale, _ = operands("int8", torch.bfloat16, 9, 40, 256, 2, device=device)
    clean = mixed_gemm(x, q, scale)
    x[4, 200] = value
    y = mixed_gemm(x, q, scale)
    others = [i for i in range(9) if i != 4]
    assert torch.equal(y[others], clean[others]) and not y[4].isfinite().any()
    scale[7, 1] = value
    assert not mixed_gemm(x, q, scale)[:, 7].isfinite().any()


@devices
def test_a_scale_of_infinity_leaves_columns_that_are_not_there_alone(device):
    x, q, scale, _ = operands("int8", torch.float16, 2, 8, 192, 3, exact=True, device=device)
    scale[:, 2] = float("inf")
    expected = mixed_ref(x.cpu(), q.cpu(), scale.cpu())
    assert torch.equal(mixed_gemm(x, q, scale).cpu().nan_to_num(7), expected.nan_to_num(7))


# --- Gradients, operators, compilation -------------------------------------------------------------------------------


@pytest.mark.parametrize("narrow", ["weight", "x"])
def test_gradients_are_those_of_the_dequantized_product(narrow):
    x, weight, scale, zero = operands("int8", torch.float64, 5, 7, 12, 3, narrow, False)
    bias = torch.randn(7, dtype=torch.float64, requires_grad=True)
    wide = (x if narrow == "weight" else weight).requires_grad_()

    def run(wide, bias):
        return mixed_gemm(*((wide, weight) if narrow == "weight" else (x, wide)), scale, zero, bias)

    assert torch.autograd.gradcheck(run, (wide, bias))


@pytest.mark.parametrize("call", [mixed_gemm, mixed_linear])
@pytest.mark.parametrize("compiles", [False, True])
def test_a_backward_for_scale_or_codes_raises(call, compiles):
    x, weight, scale, _ = operands("e4m3", torch.float32, 5, 7, 12, 3)
    run = torch.compile(lambda *args: call(*args), backend="aot_eager", fullgraph=True) if compiles else call
    for trained in (scale, weight):
        y = run(x, *(t.detach().requires_grad_(t is trained) for t in (weight, scale)))
        with pytest.raises(NotImplementedError, match="scale and codes have no gradient; detach them"):
            y.sum().backward()


@devices
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_rounded_like_the_product(device, kind):
    x, weight, scale, _ = operands(kind, torch.bfloat16, 33, 128, 256, 4, device=device)
    x.requires_grad_()
    grad = torch.randn(33, 128, device=device, dtype=torch.bfloat16)
    mixed_gemm(x, weight, scale).backward(grad)
    eye = torch.eye(256, device=device, dtype=torch.float64)
    dequantized = exact_product(eye, weight, scale).T
    assert relative(x.grad, grad.double() @ dequantized) <= MAX_EXPANDED_ERROR[torch.bfloat16]


@devices
@pytest.mark.parametrize("kind", KINDS)
def test_the_operators_are_functional_and_registered(device, kind):
    x, weight, scale, zero = operands(kind, torch.bfloat16, 3, 16, 128, 2, device=device)
    bias = torch.randn(16, device=device, dtype=torch.bfloat16, requires_grad=True)
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    tests = tests[kind == "e4m3" :]  # torch's check of the schema multiplies its inputs, which e4m3 tensors cannot do
    gemm, expand = torch.ops.quantrot.mixed_gemm, torch.ops.quantrot.mixed_expand
    torch.library.opcheck(gemm, (x.requires_grad_(), weight, scale, zero, bias, "auto"), test_utils=tests)
    torch.library.opcheck(expand, (weight, scale, zero, 128, torch.bfloat16), test_utils=tests)
    assert expand(weight.T.contiguous().T, scale, zero, 128, torch.bfloat16).is_contiguous()  # as compiled code has it


@devices
def test_compiled_bits_are_eager_bits(device, monkeypatch):
    monkeypatch.setattr(Int8Linear, "runs_packed", lambda self, device: True)  # as on a GPU
    linear = int8_linear(64, 128, bias=True).to(device)

    def step(x):
        return linear(x + 1) * 2

    backend = "inductor" if device == "cuda" else "aot_eager"  # inductor on the CPU needs a C++ compiler
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for rows in (5, 1, 40):
        x = torch.randn(2, rows, 128, device=device, dtype=torch.bfloat16)
        assert torch.equal(compiled(x), step(x))


# --- The linear ------------------------------------------------------------------------------------------------------


def int8_linear(n: int, k: int, bias: bool = False, group: int = 64) -> Int8Linear:
    weights = WeightFormat("int8", (1, group), "bf16")
    linear = Int8Linear(k, n, bias, torch.bfloat16, LinearFormat(weights, WIDE))
    with torch.no_grad():
        for name, stored in zip(linear.tensor_names, formats.quantize_rows(weights, torch.randn(n, k)), strict=True):
            getattr(linear, name).copy_(stored)
        if bias:
            linear.bias.copy_(torch.randn(n))
    return linear


def test_a_linear_runs_packed_on_gpus_with_triton_alone():
    pytest.importorskip("triton", reason="triton is not installed")
    linear = int8_linear(8, 64)
    assert not linear.runs_packed(torch.device("cpu")) and linear.runs_packed(torch.device("cuda", 1))
    assert has_kernels(torch.device("cuda")) and not has_kernels(torch.device("cpu"))


@devices
@pytest.mark.parametrize("group", [0, 64])
def test_a_linear_is_the_product_of_its_stored_tensors(device, group):
    linear = int8_linear(40, 256, True, group).to(device)
    x = torch.randn(2, 5, 256, device=device, dtype=torch.bfloat16)
    exact = exact_product(x.flatten(0, 1), linear.weight_packed, linear.weight_scale, None, linear.bias)
    limit = MAX_RELATIVE_ERROR if device == "cuda" else MAX_EXPANDED_ERROR
    assert relative(linear(x).flatten(0, 1), exact) <= limit[torch.bfloat16]


# --- Errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        ((X, X, S), {}, "one of them int8, uint8 or float8_e4m3fn"),
        ((Q, Q, S), {}, "one of them int8, uint8 or float8_e4m3fn"),
        ((Q.int(), X, S), {}, "a weight also packed int32"),
        ((X, Q.long(), S), {}, "convert one"),
        ((X, Q[None], S), {}, r"\[N, K\], K >= 1; reshape"),
        ((X[:, :0], Q[:, :0], S), {}, "K >= 1"),
        ((X, Q[:, :6], S), {}, "check which weight this is"),
        ((X, Q.int(), S), {}, "a quarter of them"),
        ((X, Q, S[:3]), {}, r"scale: shape \[3, 1\]; allowed: \[4\] or \[4, G\]"),
        ((X, Q, torch.ones(4, 3)), {}, "a divisor of the 8 columns"),
        ((X, Q, S.int()), {}, "scale: int32.*a float type"),
        ((X, Q, S, S), {}, "zero_point: float32.*allowed: torch.int8"),
        ((X, Q, S, torch.zeros(4, 2, dtype=torch.int8)), {}, "scale's shape"),
        ((X, Q.to(torch.float8_e4m3fn), S, Q[:, 0]), {}, "e4m3 has none"),
        ((X, Q, S), {"bias": torch.zeros(3)}, r"bias: .* allowed: \[4\]"),
        ((X, Q, S.to("meta")), {}, "scale: on meta, x is on cpu"),
        ((X, Q, S), {"backend": "cuda"}, "allowed: auto, hopper, triton, expand, reference"),
        ((X, Q, S), {"backend": "triton"}, "'triton' has no torch.float32"),
        ((X.half(), Q, torch.ones(4, 2)), {"backend": "triton"}, "groups in multiples of 64"),
        ((X.half(), Q, S), {"backend": "triton"}, "needs a CUDA device"),
    ],
)
def test_errors_name_the_field_and_the_remedy(args, kwargs, says):
    with pytest.raises(ValueError, match=says):
        mixed_gemm(*args, **kwargs)


# --- The kernels, without a GPU --------------------------------------------------------------------------------------

INTERPRETED = """
import torch
from itertools import product
from quantrot.kernels.mixed import mixed_gemm, mixed_ref, pack_int8
from quantrot.kernels.mixed import KINDS, _bytes
from quantrot.kernels.mixed.plans import Prefill
from quantrot.kernels.mixed.triton import multiply
torch.manual_seed(0)

def same(y, expected, *what):
    assert torch.equal(y.nan_to_num(7), expected.nan_to_num(7)), what

shapes = ((1, 40, 512, 1), (5, 33, 640, 5), (33, 70, 128, 2), (3, 5, 100, 1))
for kind, narrow, (m, n, k, g) in product(("int8", "uint8", "packed", "e4m3"), ("weight", "x"), shapes):
    if (kind, narrow) != ("packed", "x"):
        x, w, scale, zero = operands(kind, torch.float16, m, n, k, g, narrow, True)
        bias = torch.randint(-4, 5, (n,)).half()
        for z, b, backend in ((None, bias, "triton"), (zero, None, "triton"), (zero, bias, "expand")):
            expected = mixed_ref(x, w, scale, z, b)
            same(mixed_gemm(x, w, scale, z, b, backend=backend), expected, kind, narrow, m, n, k, backend)

for plan in (Prefill(64, 32, 64, 4, 2, 3), Prefill(64, 16, 64, 4, 2, 4)):  # K in parts, the last one shorter
    for narrow, g in product(("weight", "x"), (1, 5)):
        x, w, scale, zero = operands("int8", torch.float16, 20, 40, 640, g, narrow, True)
        bias = torch.randint(-4, 5, (40,)).half()
        y = multiply(*(_bytes(t) if t.dtype in KINDS else t for t in (x, w)), scale, zero, bias, "int8",
                     narrow == "weight", plan)
        same(y, mixed_ref(x, w, scale, zero, bias), plan, narrow, g)

x, w, scale, _ = operands("int8", torch.float16, 16, 40, 640, 5)  # rounding sums: a row's bits are its own
y = mixed_gemm(x, w, scale, backend="triton")
for m in (1, 3, 8, 9):
    same(mixed_gemm(x[:m], w, scale, backend="triton"), y[:m], m)
same(mixed_gemm(x[5:6], w, scale, backend="triton"), y[5:6])

x, w, scale, _ = operands("int8", torch.float16, 2, 8, 192, 3, exact=True)
scale[:, 2] = float("inf")
same(mixed_gemm(x, w, scale, backend="triton"), mixed_ref(x, w, scale))
print("agrees")
"""


def test_the_triton_kernels_agree_when_interpreted(interpreted):
    helpers = inspect.getsource(codes_of) + inspect.getsource(operands)  # to import them takes three seconds
    assert interpreted("import torch\n" + helpers + INTERPRETED).strip() == "agrees"


COMPILED = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from quantrot.kernels.mixed.plans import Prefill
from quantrot.kernels.mixed.triton import expand, multiply

def launch(m, n, k, groups, kind, dtype, narrow=True, zero=False, plan=None):
    r = n if narrow else m
    wide, codes = torch.empty(m if narrow else n, k, dtype=dtype), torch.empty(r, k, dtype=torch.uint8)
    scale = torch.empty(r, groups, dtype=torch.bfloat16)
    z = torch.empty(r, groups, dtype=torch.int8) if zero else None
    bias = torch.empty(n, dtype=dtype)
    multiply(*((wide, codes) if narrow else (codes, wide)), scale, z, bias, kind, narrow, plan)

with FakeTensorMode():
    for kind in ("packed", "e4m3"):
        launch(4096, 4096, 4096, 1, kind, torch.bfloat16)
        launch(1, 4096, 4096, 1, kind, torch.bfloat16)
    launch(3456, 4096, 2048, 1, "int8", torch.bfloat16, False)
    launch(4096, 4096, 4096, 1, "packed", torch.bfloat16, plan=Prefill(128, 256, bulk=False))
    launch(17, 4096, 4096, 1, "packed", torch.bfloat16)
    launch(64, 4096, 4096, 64, "packed", torch.bfloat16)
    launch(1024, 8192, 8192, 64, "packed", torch.float16)
    launch(16, 8192, 8192, 64, "packed", torch.bfloat16)
    launch(8, 4096, 4096, 32, "uint8", torch.bfloat16, True, True)
    expand(torch.empty(4096, 4096, dtype=torch.uint8), torch.empty(4096, 32), None, "packed",
           torch.empty(4096, 4096, dtype=torch.bfloat16))
"""


def test_every_kernel_compiles_for_an_h200_without_spills(compiled_for_hopper):
    kernels = compiled_for_hopper(COMPILED)
    assert len(kernels) >= 12
    for kernel in kernels:
        assert kernel["local"] == 0, kernel
        assert kernel["shared"] <= 227 << 10 and kernel["registers"] * kernel["warps"] * 32 <= 65536, kernel
        if kernel["name"] == "_decode_kernel":
            assert kernel["mma"] and kernel["copies128"], kernel
        elif kernel["name"] == "_prefill_kernel":
            assert kernel["wgmma"] and kernel["stalls"] <= 0, kernel
        else:
            assert kernel["loads128"], kernel


# --- On a GPU --------------------------------------------------------------------------------------------------------

BACKENDS = pytest.mark.parametrize("backend", ["hopper", "triton", "expand", "reference"])
NARROW_OR_16 = [v for v in VARIANTS if v[1] != torch.float32]


def check_backend(backend, kind, wide, narrow, m, n, k, groups):
    x, weight, scale, zero = operands(kind, wide, m, n, k, groups, narrow, False, "cuda")
    limit = MAX_EXPANDED_ERROR if backend == "expand" else MAX_RELATIVE_ERROR
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs capability 9.0")
    y = mixed_gemm(x, weight, scale, zero, backend=backend)
    assert relative(y, exact_product(x, weight, scale, zero)) <= limit[wide]


@gpu
@BACKENDS
@pytest.mark.parametrize(("kind", "wide", "narrow"), NARROW_OR_16, ids=lambda v: str(v).removeprefix("torch."))
def test_every_backend_meets_float64(backend, kind, wide, narrow):
    check_backend(backend, kind, wide, narrow, 9, 1000, 512, 1)
    check_backend(backend, kind, wide, narrow, 300, 1000, 512, 4)


@gpu
@BACKENDS
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 4096, 4096), (16, 8192, 2048), (17, 4096, 2048), (64, 4096, 4096), (2500, 5120, 512)]
)
def test_every_plan_meets_float64(backend, m, n, k, groups):
    check_backend(backend, "packed", torch.bfloat16, "weight", m, n, k, groups)


@gpu
@pytest.mark.parametrize("groups", [1, 32, 64])
@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float16], ids=str)
def test_a_token_does_not_know_how_many_there_are(wide, groups):
    x, weight, scale, _ = operands("packed", wide, 16, 4096, 4096, groups, device="cuda")
    y = mixed_gemm(x, weight, scale, backend="triton")
    for m in (1, 2, 8, 9, 15):
        assert torch.equal(mixed_gemm(x[:m], weight, scale, backend="triton"), y[:m]), m
    assert torch.equal(mixed_gemm(x[7:8], weight, scale, backend="triton"), y[7:8])


@gpu
@pytest.mark.parametrize("backend", ["hopper", "triton", "expand"])
@pytest.mark.parametrize("groups", [1, 32])
@pytest.mark.parametrize("m", [1, 16, 64, 300])
def test_a_hundred_runs_are_bit_equal(m, groups, backend):
    x, weight, scale, _ = operands("packed", torch.bfloat16, m, 4096, 4096, groups, device="cuda")
    first = mixed_gemm(x, weight, scale, backend=backend)
    for _ in range(100):
        assert torch.equal(mixed_gemm(x, weight, scale, backend=backend), first)


@gpu
@pytest.mark.parametrize("m", [1, 64, 2500])
def test_graph_bits_are_eager_bits(m):
    x, weight, scale, _ = operands("packed", torch.bfloat16, m, 1024, 4096, 32, device="cuda")
    eager = mixed_gemm(x, weight, scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = mixed_gemm(x, weight, scale)
    captured.fill_(float("nan"))
    graph.replay()
    assert torch.equal(captured, eager)


@gpu
def test_more_than_2_31_codes():
    if torch.cuda.get_device_properties(0).total_memory < 12 << 30:
        pytest.skip("needs 12 GiB of GPU memory")
    rows = (1 << 31) // 4096 + 40
    weight = torch.zeros(rows, 4096, device="cuda", dtype=torch.int8)
    weight[-3:] = torch.randint(-128, 128, (3, 4096), device="cuda", dtype=torch.int8)
    scale = torch.full((rows, 1), 0.01, device="cuda")
    for m in (1, 100):
        x = torch.randn(m, 4096, device="cuda", dtype=torch.bfloat16)
        y = mixed_gemm(x, weight, scale, backend="triton")
        exact = exact_product(x, weight[-3:], scale[-3:])
        assert relative(y[:, -3:], exact) <= MAX_RELATIVE_ERROR[torch.bfloat16] * 2 and not y[:, :-3].any()


def test_each_gpu_is_compiled_for_by_its_own_capability(monkeypatch):
    triton = pytest.importorskip("quantrot.kernels.mixed.triton", reason="triton is not installed")
    targets = iter([SimpleNamespace(arch=120, backend="cuda"), SimpleNamespace(arch=89, backend="cuda")])
    active = SimpleNamespace(get_current_target=lambda: next(targets))
    monkeypatch.setattr(triton.triton.runtime, "driver", SimpleNamespace(active=active))
    triton.architecture.cache_clear()
    found = [triton.architecture(torch.device("cuda", i)) for i in (0, 1, 0)]
    triton.architecture.cache_clear()
    assert found == [120, 89, 120]
