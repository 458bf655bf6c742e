"""FP8 products to one rounding, the operators, and what quantization and product do together."""

from types import SimpleNamespace

import pytest
import torch

from quantrot.kernels.fp8 import (
    E4M3,
    cublas,
    dequantize_fp8_block,
    fp8_block_gemm,
    hadamard_quantize_fp8,
    quantize_fp8_block,
)
from quantrot.kernels.fp8.reference import MAX_RELATIVE_ERROR, scale_shape
from quantrot.orthogonal import random_signs

PAIRS = [
    ((1, 128), (128, 128)),
    ((128, 128), (128, 128)),
    ((256, 256), (256, 256)),
    ((1, 0), (1, 0)),
    ((1, 128), (1, 128)),
    ((1, 0), (128, 128)),
]


gpu = pytest.mark.gpu

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])


def randn(*shape, seed=0, device="cpu", dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def relative(y, exact) -> float:
    return ((y.double() - exact).norm() / exact.norm()).item()


def operands(m, n, k, a_block, b_block, device="cpu", outliers=False):
    """(a, a_scale, b, b_scale), and the float64 product of what they dequantize to."""
    a, b = randn(m, k, seed=m), randn(n, k, seed=n)
    if outliers:
        a[:, ::97] *= 50
    data = *quantize_fp8_block(a.to(device), a_block), *quantize_fp8_block(b.to(device), b_block)
    left = dequantize_fp8_block(*data[:2], a_block, torch.float32).double()
    return data, left @ dequantize_fp8_block(*data[2:], b_block, torch.float32).double().T


# --- Products ---------------------------------------------------------------------------------------------------------


@devices
@pytest.mark.parametrize(("a_block", "b_block"), PAIRS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 128, 512), (3, 96, 256), (63, 136, 577), (257, 384, 1024)])
def test_gemm_is_the_float64_product_of_dequantized_operands(device, a_block, b_block, m, n, k):
    data, exact = operands(m, n, k, a_block, b_block, device)
    bias = randn(n, seed=5, device=device)
    backends = ("auto", "reference") + (("triton", "triton_splitk") if device == "cuda" else ())
    for backend in backends:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            y = fp8_block_gemm(
                *data, a_block=a_block, b_block=b_block, out_dtype=dtype, bias=bias.to(dtype), backend=backend
            )
            assert y.dtype == dtype and y.shape == (m, n)
            assert relative(y, exact + bias.to(dtype).double()) <= MAX_RELATIVE_ERROR[dtype], (backend, dtype)


@devices
def test_empty_products(device):
    block = {"a_block": (1, 0), "b_block": (1, 0)}
    for m, n, k in ((0, 16, 32), (4, 16, 0), (4, 0, 32)):
        data, _ = operands(m, n, k, (1, 0), (1, 0), device)
        y = fp8_block_gemm(*data, **block, bias=torch.ones(n, device=device))
        assert y.shape == (m, n) and (y == 1).all() if k == 0 else y.shape == (m, n)


@devices
def test_a_nan_reaches_its_own_row_and_no_other(device):
    a, b = randn(5, 256), randn(128, 256, seed=1)
    a[2, 200] = torch.nan
    data = *quantize_fp8_block(a.to(device)), *quantize_fp8_block(b.to(device), (128, 128))
    y = fp8_block_gemm(*data)
    assert y[2].isnan().all() and y[[0, 1, 3, 4]].isfinite().all()


# --- Operators --------------------------------------------------------------------------------------------------------


@devices
def test_the_operators_are_functional_and_registered(device):
    x, signs = randn(130, 256, device=device, dtype=torch.bfloat16), random_signs(64, seed=0).to(device)
    ops = torch.ops.quantrot
    for turned in (False, True):
        torch.library.opcheck(ops.quantize_fp8_block, (x, 1, 128, "bf16", turned, "auto"))
        torch.library.opcheck(ops.hadamard_quantize_fp8, (x, signs, 64, 0.125, 1, 128, "bf16", turned, "auto"))
        torch.library.opcheck(ops.quantize_fp8_both_ways, (x, 1, 128, "bf16", turned, "auto"))
    data, _ = operands(5, 64, 256, (1, 128), (128, 128), device)
    checks = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static"  # test_schema multiplies e4m3
    arguments = *data, [1, 128], [128, 128], torch.bfloat16, None, "auto"
    torch.library.opcheck(ops.fp8_block_gemm, arguments, test_utils=checks)


@devices
def test_compiled_bits_are_eager_bits(device):
    w, w_scale = quantize_fp8_block(randn(96, 256, device=device), (128, 128))

    def step(x):
        a = fp8_block_gemm(*quantize_fp8_block(x * 2, transposed_scale=True), w, w_scale)
        return a + fp8_block_gemm(*hadamard_quantize_fp8(x, block=32), w, w_scale)

    x = randn(5, 256, device=device, dtype=torch.bfloat16)
    backend = "inductor" if device == "cuda" else "aot_eager"  # inductor on the CPU needs a C++ compiler
    assert torch.equal(torch.compile(step, fullgraph=True, backend=backend)(x), step(x))


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"a": torch.zeros(5, 256)}, "a: torch.float32"),
        ({"b": torch.zeros(64, 128).to(E4M3)}, "has not a's 256 columns"),
        ({"a_scale": torch.zeros(5, 1)}, r"a_scale: .* takes torch.float32 \(5, 2\)"),
        ({"b_scale": torch.zeros(1, 2, dtype=torch.bfloat16)}, "b_scale: torch.bfloat16"),
        ({"out_dtype": torch.float64}, "out_dtype: torch.float64"),
        ({"bias": torch.zeros(5)}, r"bias: torch.float32 \[5\]; allowed: \[64\]"),
        ({"a_block": (1,)}, r"a_block: \(1,\); give \(rows, columns\)"),
        ({"backend": "cutlass"}, "backend: 'cutlass'; allowed: auto, cublas, triton"),
        ({"backend": "cublas"}, "backend: 'cublas' needs a CUDA device"),
    ],
)
def test_product_errors_name_the_field_and_the_remedy(change, says):
    data, _ = operands(5, 64, 256, (1, 128), (128, 128))
    arguments = dict(zip(("a", "a_scale", "b", "b_scale"), data, strict=True)) | change
    with pytest.raises(ValueError, match=says):
        fp8_block_gemm(**arguments)


@pytest.mark.parametrize(
    ("a_block", "b_block", "m", "n", "k", "dtype", "bias", "takes"),
    [
        ((1, 128), (1, 128), 4, 16, 1920, torch.float32, None, True),
        ((1, 128), (1, 128), 4, 16, 1920, torch.bfloat16, torch.bfloat16, True),
        ((1, 128), (1, 128), 4, 16, 1920, torch.bfloat16, torch.float32, False),
        ((1, 128), (1, 128), 4, 16, 1920, torch.float32, torch.float32, False),  # torch: no bias with float32
        ((1, 128), (1, 128), 4, 16, 1904, torch.bfloat16, None, False),
        ((1, 128), (1, 128), 6, 16, 1920, torch.bfloat16, None, False),
        ((1, 128), (1, 128), 4, 24, 1920, torch.bfloat16, None, False),
        ((1, 128), (128, 128), 4, 16, 2048, torch.float32, None, True),
        ((1, 128), (128, 128), 4, 16, 1920, torch.bfloat16, None, False),  # it would read other scales
        ((128, 128), (1, 128), 4, 16, 1920, torch.bfloat16, None, False),
        ((128, 128), (128, 128), 4, 16, 2048, torch.bfloat16, None, False),
        ((1, 0), (1, 0), 3, 16, 1904, torch.bfloat16, None, True),
        ((1, 0), (1, 0), 4, 16, 2048, torch.float32, None, False),
    ],
)
def test_cublas_is_given_what_it_multiplies_rightly(monkeypatch, a_block, b_block, m, n, k, dtype, bias, takes):
    monkeypatch.setattr(cublas, "_available", lambda device: True)
    a, b = (torch.zeros(rows, k, dtype=torch.uint8).view(E4M3) for rows in (m, n))
    scales = (torch.ones(scale_shape(x.shape, block)) for x, block in ((a, a_block), (b, b_block)))
    operands = (part for pair in zip((a, b), scales, strict=True) for part in pair)
    assert cublas.supports(*operands, a_block, b_block, dtype, bias and torch.zeros(n, dtype=bias)) == takes


def test_auto_takes_no_backend_whose_bits_depend_on_the_batch(monkeypatch):
    from quantrot.kernels.fp8 import gemm as fp8

    def module(path):  # all but "hopper" take the product
        return SimpleNamespace(path=path, supports=lambda *operands: path != fp8.GEMMS["hopper"])

    data, _ = operands(16, 64, 512, (1, 128), (1, 128))
    monkeypatch.setattr(fp8, "has_kernels", lambda device: True)
    monkeypatch.setattr(fp8, "importlib", SimpleNamespace(import_module=module))
    for asked, taken in (("auto", "triton"), ("fastest", "cublas")):
        assert fp8._multiplier(asked, *data, (1, 128), (1, 128), torch.bfloat16, None).path == fp8.GEMMS[taken]


# --- The kernels, without a GPU ---------------------------------------------------------------------------------------

INTERPRETED = """
import torch
from quantrot.kernels.fp8 import *
torch.manual_seed(0)

for m, n, k in ((1, 48, 256), (70, 96, 577), (130, 130, 128), (3, 48, 1100)):  # the last one splits K
    for a_block, b_block in PAIRS if k < 1024 else PAIRS[:1]:
        a, b = quantize_fp8_block(torch.randn(m, k), a_block), quantize_fp8_block(torch.randn(n, k), b_block)
        blocks = dict(a_block=a_block, b_block=b_block, out_dtype=torch.float32, bias=torch.randn(n))
        expected = fp8_block_gemm(*a, *b, **blocks, backend="reference")
        for backend in ("triton", "triton_splitk"):
            y = fp8_block_gemm(*a, *b, **blocks, backend=backend)
            assert (y - expected).norm() / expected.norm() < 1e-6, (m, n, k, a_block, b_block, backend)

# the same sum in the same order: a row alone, with the operands swapped, is the row in a batch
a, b = quantize_fp8_block(torch.randn(130, 384)), quantize_fp8_block(torch.randn(64, 384), (128, 128))
whole = fp8_block_gemm(*a, *b, out_dtype=torch.float32, backend="triton")
alone = fp8_block_gemm(a[0][7:8], a[1][7:8], *b, out_dtype=torch.float32, backend="triton")
assert (whole[7:8] - alone).abs().max() <= 1e-5 * whole.abs().max()
print("agrees")
"""


def test_the_triton_products_agree_when_interpreted(interpreted):
    assert interpreted(INTERPRETED.replace("PAIRS", repr(PAIRS))).strip() == "agrees"


COMPILED = """
from quantrot.kernels.fp8 import E4M3, triton_gemm
from quantrot.kernels.fp8.reference import scale_shape

def outputs(shape, block):
    return torch.empty(shape, dtype=E4M3), torch.empty(scale_shape(torch.Size(shape), block))

def gemm(m, n, k, a_block, b_block):
    a, b = outputs((m, k), a_block), outputs((n, k), b_block)
    triton_gemm.gemm(*a, *b, a_block, b_block, torch.bfloat16, None)

for m in (16, 256, 4096):
    gemm(m, 4096, 4096, (1, 128), (128, 128))
for pair in (((256, 256), (256, 256)), ((1, 0), (1, 0)), ((1, 128), (1, 128))):
    gemm(4096, 4096, 4096, *pair)
"""


def test_every_product_compiles_for_hopper_without_spills(compiled_for_hopper):
    kernels = compiled_for_hopper(COMPILED)
    assert {k["name"] for k in kernels} == {"_gemm_kernel"}
    for kernel in kernels:
        assert kernel["local"] == 0 and kernel["wgmma"] and not kernel["mma"], kernel
        assert kernel["shared"] <= 227 << 10 and kernel["registers"] * kernel["warps"] * 32 <= 65536, kernel


# --- On a GPU ---------------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("backend", ["auto", "triton", "triton_splitk"])
@pytest.mark.parametrize(("a_block", "b_block"), PAIRS)
def test_gpu_error_at_long_k_with_outliers(backend, a_block, b_block):
    for m in (1, 64, 300):
        data, exact = operands(m, 512, 16384, a_block, b_block, "cuda", outliers=True)
        y = fp8_block_gemm(*data, a_block=a_block, b_block=b_block, backend=backend)
        assert relative(y, exact) <= MAX_RELATIVE_ERROR[torch.bfloat16]


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("a_block", "b_block"), cublas.PAIRS)
def test_gpu_cublas_multiplies_what_it_supports_in_both_dtypes(a_block, b_block, dtype):
    k = 2048 if (128, 128) in (a_block, b_block) else 1920
    data, exact = operands(512, 384, k, a_block, b_block, "cuda", outliers=True)
    how = {"a_block": a_block, "b_block": b_block, "out_dtype": dtype}
    if not cublas.supports(*data, *how.values(), None):
        pytest.skip("needs Hopper and CUDA 12.9")
    y = fp8_block_gemm(*data, **how, backend="cublas")
    assert y.dtype == dtype and relative(y, exact) <= MAX_RELATIVE_ERROR[dtype]


@gpu
@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1024, 14336), (576, 1536)])
@pytest.mark.parametrize(("a_block", "b_block"), [PAIRS[0], PAIRS[3], PAIRS[4]])
def test_a_row_alone_has_the_bits_that_it_has_in_a_batch(backend, n, k, a_block, b_block):
    x = randn(257, k, device="cuda", dtype=torch.bfloat16)
    w = quantize_fp8_block(randn(n, k, seed=1, device="cuda"), b_block)

    def product(part):
        return fp8_block_gemm(*quantize_fp8_block(part, a_block), *w, a_block=a_block, b_block=b_block, backend=backend)

    whole = product(x)
    for m in (1, 16, 17, 33, 64, 65, 128, 200):
        assert torch.equal(product(x[:m].clone()), whole[:m]), m
    assert torch.equal(product(x[200:201].clone()), whole[200:201])


@gpu
def test_gpu_bits_do_not_depend_on_the_product_plan():
    from quantrot.kernels.fp8 import triton_gemm
    from quantrot.kernels.fp8.tuned import GemmPlan

    (a, a_scale, b, b_scale), _ = operands(300, 640, 2048, (1, 128), (128, 128), "cuda")
    arguments = a, a_scale, b, b_scale, (1, 128), (128, 128), torch.float32, None
    first = triton_gemm.run(*arguments, GemmPlan(128, 128, 8, 3))
    for plan in (
        GemmPlan(128, 128, 8, 3, tma=False),
        GemmPlan(128, 128, 8, 3, persistent=1),
        GemmPlan(64, 128, 4, 4),
        GemmPlan(64, 256, 8, 3),
        GemmPlan(16, 64, 4, 6, swap=True, group=1),
        GemmPlan(64, 128, 4, 4, swap=True, group=4),
    ):
        assert torch.equal(triton_gemm.run(*arguments, plan), first), plan


def _layer(device="cuda"):
    w, w_scale = quantize_fp8_block(randn(576, 1536, device=device), (128, 128))

    def layer(x, backend="triton"):
        q = quantize_fp8_block(x, transposed_scale=True)
        turned = hadamard_quantize_fp8(x, block=128)
        square = quantize_fp8_block(x, (256, 256))
        return torch.stack(
            [
                fp8_block_gemm(*q, w, w_scale, backend=backend),
                fp8_block_gemm(*turned, w, w_scale, backend=backend),
                fp8_block_gemm(*square, w, w_scale, a_block=(256, 256), backend=backend),
            ]
        )

    return layer


@gpu
@pytest.mark.parametrize("m", [1, 63, 601])
@pytest.mark.parametrize("backend", ["auto", "triton", "triton_splitk"])
def test_a_hundred_runs_are_bit_equal(m, backend):
    layer, x = _layer(), randn(m, 1536, device="cuda", dtype=torch.bfloat16)
    first = layer(x, backend)
    for _ in range(100):
        assert torch.equal(layer(x, backend), first)


@gpu
@pytest.mark.parametrize("m", [1, 601])
def test_graph_bits_are_eager_bits(m):
    layer, x = _layer(), randn(m, 1536, device="cuda", dtype=torch.bfloat16)
    eager = layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(x)
    captured.fill_(torch.nan)
    graph.replay()
    assert torch.equal(captured, eager)


SANITIZED = """
import torch
from quantrot.kernels.fp8 import *
for m in (1, 63, 257):
    x = torch.randn(m, 1408, device="cuda", dtype=torch.bfloat16)
    for block in ((1, 128), (128, 128), (256, 256), (1, 0), (0, 0)):
        quantize_fp8_block(x, block, backend="triton")
    for order in (32, 128, 704):
        hadamard_quantize_fp8(x, block=order)
    quantize_fp8_both_ways(x)
    for added in (None, x):
        quantize_fp8_normed(x, x[0], 1e-5, added=added)
    for pair in (((1, 128), (128, 128)), ((1, 0), (1, 0)), ((1, 128), (1, 128))):
        a = quantize_fp8_block(x, pair[0])
        b = quantize_fp8_block(torch.randn(130, 1408, device="cuda"), pair[1])
        for backend in ("triton", "triton_splitk"):
            fp8_block_gemm(*a, *b, a_block=pair[0], b_block=pair[1], backend=backend)
torch.cuda.synchronize()
"""


@gpu
def test_the_sanitizer_finds_nothing_on_odd_rows(sanitized):
    sanitized(SANITIZED)
