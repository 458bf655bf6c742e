"""FP8: codes and scales bitwise, against a loop over blocks and a table of special ones; products to one rounding."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quantrot.kernels.fp8 import (
    E4M3,
    dequantize_fp8_block,
    fp8_block_gemm,
    hadamard_quantize_fp8,
    quantize_fp8_block,
    quantize_fp8_both_ways,
)
from quantrot.kernels.fp8.reference import MAX_RELATIVE_ERROR
from quantrot.kernels.hadamard import hadamard_transform
from quantrot.orthogonal import random_signs

INF, NAN = float("inf"), float("nan")
BLOCKS = [(128, 128), (256, 256), (1, 128), (1, 256), (1, 0), (0, 0), (3, 5)]
PAIRS = [
    ((1, 128), (128, 128)),
    ((128, 128), (128, 128)),
    ((256, 256), (256, 256)),
    ((1, 0), (1, 0)),
    ((1, 128), (1, 128)),
    ((1, 0), (128, 128)),
]
# Blocks of 1 x 128 that every backend must meet: scale rule, first values (the rest is 0), scale, first codes.
SPECIAL: dict[str, tuple[str, list[float], float, list[int]]] = {
    "all zero": ("exact", [0.0], 1.0, [0x00]),
    "minus zero": ("exact", [-0.0, -0.0], 1.0, [0x80, 0x80]),
    "minus zero beside a value": ("exact", [448.0, -0.0, 0.0], 1.0, [0x7E, 0x80, 0x00]),
    "amax on the boundary": ("exact", [448.0, -448.0, 447.0], 1.0, [0x7E, 0xFE, 0x7E]),
    "ties": ("exact", [448.0, 17.0, 19.0, -17.0, 432.0], 1.0, [0x7E, 0x58, 0x5A, 0xD8, 0x7E]),
    "ties of subnormals": ("exact", [448.0, 2.0**-10, 3 * 2.0**-10, -(2.0**-10)], 1.0, [0x7E, 0x00, 0x02, 0x80]),
    "just past a tie": ("exact", [448.0, 17.125, 2.0**-10 * 1.0078125], 1.0, [0x7E, 0x59, 0x01]),
    "scale below normal numbers": ("exact", [2.0**-133, -(2.0**-135), 2.0**-137], 2.0**-126, [0x04, 0x81, 0x00]),
    "scale lifted": ("exact", [448 * 2.0**-100, 17 * 2.0**-100], 2.0**-100, [0x7E, 0x58]),
    "a tie that underflow would miss": (
        "exact",
        [float.fromhex("0x1.12732cp-117"), float.fromhex("0x1.1c406ep-126")],
        float.fromhex("0x1.39a832p-126"),
        [0x7E, 0x37],
    ),
    "largest": ("pow2", [3.3895313892515355e38, 1.0], 2.0**120, [0x78, 0x00]),
    "bf16 scale rounded down saturates": ("bf16", [449.75, -449.75, 1.0], 1.0, [0x7E, 0xFE, 0x38]),
    "bf16 scale rounded up": ("bf16", [452.0, 1.0078125], 1.0078125, [0x7E, 0x38]),
    "power of two up": ("pow2", [450.0, -34.0], 2.0, [0x76, 0xD8]),
    "power of two kept": ("pow2", [448.0, 1.0], 1.0, [0x7E, 0x38]),
    "infinity": ("exact", [1.0, INF, -0.0], INF, [0x7F, 0x7F, 0x7F, 0x7F]),
    "minus infinity, pow2": ("pow2", [1.0, -INF], INF, [0x7F, 0x7F, 0x7F]),
    "nan": ("bf16", [1.0, NAN, -2.0], NAN, [0x7F, 0x7F, 0x7F, 0x7F]),
    "nan and infinity": ("exact", [-NAN, INF], NAN, [0x7F, 0x7F, 0x7F]),
}

gpu = pytest.mark.gpu
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])


def by_loop(x, block, rule):
    """The definition, one block at a time."""
    rows, columns = block[0] or x.shape[0], block[1] or x.shape[1]
    q = torch.empty(x.shape, dtype=E4M3)
    scales = torch.empty(-(-x.shape[0] // rows), -(-x.shape[1] // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = x[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns].float()
            scale = part.abs().max() / 448 if part.any() else torch.tensor(1.0)
            if rule == "bf16":
                scale = scale.bfloat16().float()
            elif rule == "pow2":
                scale = torch.exp2(torch.ceil(torch.log2(scale.double()))).float()
            scales[i, j] = scale
            q[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns] = (part / scale).clamp(-448, 448).to(E4M3)
    return q, scales


def randn(*shape, seed=0, device="cpu", dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def same_bits(left, right) -> bool:
    """Codes and scales, memory order included."""
    return all(
        a.shape == b.shape and a.stride() == b.stride() and torch.equal(_bits(a), _bits(b))
        for a, b in zip(left, right, strict=True)
    )


def _bits(t):
    return t.cpu().view(torch.int32 if t.dtype == torch.float32 else torch.uint8)


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


# --- Quantization ----------------------------------------------------------------------------------------------------


@devices
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", [(1, 128), (3, 130), (257, 384)])
@pytest.mark.parametrize("rule", ["exact", "bf16", "pow2"])
def test_equals_the_loop_over_blocks(device, block, shape, rule):
    x = randn(*shape) * 10
    assert same_bits(quantize_fp8_block(x.to(device), block, rule), by_loop(x, block, rule))


@devices
@pytest.mark.parametrize("name", SPECIAL)
def test_special_blocks(device, name):
    rule, values, scale, codes = SPECIAL[name]
    x = torch.zeros(1, 128, device=device)
    x[0, : len(values)] = torch.tensor(values)
    got = quantize_fp8_block(x, (1, 128), rule)
    assert got[0].view(torch.uint8)[0, : len(codes)].tolist() == codes
    assert torch.equal(_bits(got[1]), _bits(torch.tensor([[scale]])))
    if scale != scale or scale == INF:
        assert (got[0].view(torch.uint8) == 0x7F).all() and dequantize_fp8_block(*got, (1, 128)).isnan().all()


@devices
@pytest.mark.parametrize("block", [(128, 128), (1, 0), (0, 0), (3, 5)])
def test_a_special_value_stays_in_its_block(device, block):
    x = randn(200, 300, device=device)
    clean = quantize_fp8_block(x, block)
    x[130, 140] = NAN
    got = quantize_fp8_block(x, block)
    rows, columns = block[0] or 200, block[1] or 300
    touched = torch.zeros(200, 300, dtype=torch.bool, device=device)
    i, j = 130 // rows * rows, 140 // columns * columns
    touched[i : i + rows, j : j + columns] = True
    codes = got[0].view(torch.uint8)
    assert (codes[touched] == 0x7F).all() and torch.equal(codes[~touched], clean[0].view(torch.uint8)[~touched])
    assert got[1].isnan().sum() == 1


@devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [(1, 128), (128, 128), (256, 256), (1, 0), (0, 0)])
def test_narrow_inputs_and_strides(device, dtype, block):
    x = randn(300, 1200, seed=1, dtype=dtype)
    for part in (x[:, ::2], x[:, 1:700], x[::2, :512], x.T, x[:0], x[:1], x[:, :1]):
        expected = quantize_fp8_block(part.float().contiguous(), block, backend="reference")
        moved = part.to(device)  # keeps strides; an offset only where it is a view there
        assert same_bits(quantize_fp8_block(moved, block), expected)
    offset = x.to(device)[:, 1:700]
    assert same_bits(quantize_fp8_block(offset, block), quantize_fp8_block(x[:, 1:700].float(), block))


@devices
def test_transposed_scales_are_the_scales_in_another_memory_order(device):
    x = randn(70, 300, device=device)
    plain, turned = quantize_fp8_block(x), quantize_fp8_block(x, transposed_scale=True)
    assert torch.equal(plain[1], turned[1]) and same_bits(plain[:1], turned[:1])
    assert plain[1].is_contiguous() and turned[1].T.is_contiguous()


def test_bf16_scales_survive_a_cast_to_bfloat16():
    _, scale = quantize_fp8_block(torch.randn(256, 256), (128, 128), "bf16")
    assert torch.equal(scale.bfloat16().float(), scale)


def test_roundtrip_error_is_e4m3s():
    x = randn(512, 512, seed=2)
    back = dequantize_fp8_block(*quantize_fp8_block(x, (128, 128)), (128, 128), torch.float32)
    relative = (back - x).norm() / x.norm()
    assert 0.02 < relative < 0.03  # uniform rounding of 3 mantissa bits: 2^-4 / sqrt(3) / about 1.5


@devices
def test_a_row_does_not_know_its_neighbours(device):
    x = randn(257, 640, device=device, dtype=torch.bfloat16)
    for block in ((1, 128), (1, 0)):
        q, scale = quantize_fp8_block(x, block)
        alone = quantize_fp8_block(x[17:18].clone(), block)
        assert same_bits((q[17:18], scale[17:18].contiguous()), alone)


@devices
@pytest.mark.parametrize("block", [(1, 128), (128, 128)])
@pytest.mark.parametrize("shape", [(1, 128), (5, 130), (130, 200), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_both_ways_is_the_quantization_of_x_and_of_its_padded_transpose(device, block, shape, dtype):
    x = randn(*shape, device=device, dtype=dtype)
    turned = torch.nn.functional.pad(x, (0, 0, 0, -shape[0] % 128)).T
    for order in (False, True):
        expected = (*quantize_fp8_block(x, block, "exact", transposed_scale=order),)
        expected += (*quantize_fp8_block(turned, block, "exact", transposed_scale=order),)
        assert same_bits(quantize_fp8_both_ways(x, block, transposed_scale=order), expected)


# --- Hadamard and quantization ---------------------------------------------------------------------------------------


@devices
@pytest.mark.parametrize(
    ("n", "block"),
    [(128, None), (256, 32), (384, 64), (512, 128), (1024, None), (576, None), (96, 32), (2048, 512)]
    + [(n, None) for n in (256, 4096, 8192, 14336, 16384, 28672)],
)
def test_turned_codes_are_those_of_the_float32_transform(device, n, block):
    x = randn(37, n, device=device, dtype=torch.bfloat16)
    signs = random_signs(block or n, seed=1).to(device)
    got = hadamard_quantize_fp8(x, block=block, signs=signs, scale_rule="exact")
    turned = hadamard_transform(x.float().cpu(), block=block, signs=signs.cpu())
    expected = quantize_fp8_block(turned, (1, 128), "exact", backend="reference")
    if device == "cpu":
        assert same_bits(got, expected)
    fused = n % 128 == 0 or n == 576  # else a bfloat16 tensor lies between two operators
    torch.testing.assert_close(got[1].cpu(), expected[1], rtol=1e-5 if fused else 5e-3, atol=0)
    steps = (_order(got[0]) - _order(expected[0])).abs()  # sums in another order: a tie may fall to its other side
    assert steps.max() <= 1 and (steps > 0).float().mean() < (1e-3 if fused else 0.05)


def _order(q):
    """Codes as integers in the order of their values, neighbours one apart."""
    bits = q.cpu().view(torch.uint8).int()
    return torch.where(bits >= 128, 128 - bits, bits)


@devices
def test_other_blocks_and_orders_go_through_two_operators(device):
    x = randn(9, 96, device=device, dtype=torch.bfloat16)
    q, scale = hadamard_quantize_fp8(x, block_size=(1, 0), block=12)
    expected = quantize_fp8_block(hadamard_transform(x.float(), block=12), (1, 0))
    assert (_order(q) - _order(expected[0])).abs().max() <= 1
    torch.testing.assert_close(scale, expected[1], rtol=1e-2, atol=0)


# --- Products --------------------------------------------------------------------------------------------------------


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
    a[2, 200] = NAN
    data = *quantize_fp8_block(a.to(device)), *quantize_fp8_block(b.to(device), (128, 128))
    y = fp8_block_gemm(*data)
    assert y[2].isnan().all() and y[[0, 1, 3, 4]].isfinite().all()


# --- Operators -------------------------------------------------------------------------------------------------------


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


def test_codes_have_no_gradient():
    x = torch.randn(4, 128, requires_grad=True)
    q, scale = quantize_fp8_block(x)
    with pytest.raises(RuntimeError, match="Fp8TrainingLinear"):
        dequantize_fp8_block(q, scale, (1, 128)).sum().backward()


# --- Errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "kwargs", "says"),
    [
        (torch.zeros(2, 3, 4), {}, r"takes \[M, K\]: flatten"),
        (torch.zeros(2, 4, dtype=torch.int32), {}, "dtype torch.int32; allowed: torch.bfloat16"),
        (torch.zeros(2, 4), {"block": (1, -1)}, r"block: \(1, -1\)"),
        (torch.zeros(2, 4), {"scale_rule": "e8m0"}, "scale_rule: 'e8m0'; allowed: exact, bf16, pow2"),
        (torch.zeros(2, 4), {"backend": "cuda"}, "backend: 'cuda'; allowed: auto, triton, reference"),
        (torch.zeros(2, 4), {"backend": "triton"}, "needs a CUDA device of capability 8.9"),
    ],
)
def test_quantization_errors_name_the_field_and_the_remedy(x, kwargs, says):
    with pytest.raises(ValueError, match=says):
        quantize_fp8_block(x, **kwargs)


def test_both_ways_and_transform_errors():
    with pytest.raises(ValueError, match=r"block: \(1, 256\); allowed"):
        quantize_fp8_both_ways(torch.zeros(2, 4), (1, 256))
    with pytest.raises(ValueError, match="no Hadamard matrix of order 6"):
        hadamard_quantize_fp8(torch.zeros(2, 6))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"a": torch.zeros(5, 256)}, "a: torch.float32"),
        ({"b": torch.zeros(64, 128).to(E4M3)}, "has not a's 256 columns"),
        ({"a_scale": torch.zeros(5, 1)}, r"a_scale: .* takes torch.float32 \(5, 2\)"),
        ({"b_scale": torch.zeros(1, 2, dtype=torch.bfloat16)}, "b_scale: torch.bfloat16"),
        ({"out_dtype": torch.float64}, "out_dtype: torch.float64"),
        ({"bias": torch.zeros(5)}, r"bias: shape \(5,\); allowed: \(64,\)"),
        ({"backend": "cutlass"}, "backend: 'cutlass'; allowed: auto, cublas, triton"),
        ({"backend": "cublas"}, "backend: 'cublas' needs a CUDA device"),
    ],
)
def test_product_errors_name_the_field_and_the_remedy(change, says):
    data, _ = operands(5, 64, 256, (1, 128), (128, 128))
    arguments = dict(zip(("a", "a_scale", "b", "b_scale"), data, strict=True)) | change
    with pytest.raises(ValueError, match=says):
        fp8_block_gemm(**arguments)


# --- The kernels, without a GPU --------------------------------------------------------------------------------------

INTERPRETED = """
import torch
from quantrot.kernels.fp8 import *
inf, nan = float("inf"), float("nan")
torch.manual_seed(0)

def bits(t): return t.view(torch.int32 if t.dtype == torch.float32 else torch.uint8)
def both(op, *args, **kwargs):
    reference, kernel = (op(*args, **kwargs, backend=b) for b in ("reference", "triton"))
    for r, k in zip(reference, kernel):
        assert r.stride() == k.stride() and torch.equal(bits(r), bits(k)), (op.__name__, args[1:], kwargs)

special = SPECIAL
for rule in ("exact", "bf16", "pow2"):
    rows = [values + [0.0] * (128 - len(values)) for r, values, *_ in special.values()]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        both(quantize_fp8_block, torch.tensor(rows).to(dtype), (1, 128), rule)
    for row in rows:
        both(quantize_fp8_block, torch.tensor([row] * 4, dtype=torch.bfloat16).view(16, 32), (8, 16), rule)
        both(quantize_fp8_block, torch.tensor([row] * 128, dtype=torch.bfloat16), (128, 128), rule)
for block in ((1, 128), (1, 256), (128, 128), (256, 256), (1, 0), (0, 0)):
    for dtype in (torch.bfloat16, torch.float32):
        wide = (torch.randn(130, 400) * torch.exp(torch.randn(130, 1) * 4)).to(dtype)
        both(quantize_fp8_block, wide[:, :300], block, "exact")
        both(quantize_fp8_block, wide[:1, 1:258], block, "bf16", transposed_scale=True)
both(quantize_fp8_block, torch.randn(7, 11), (3, 5), "exact")
both(quantize_fp8_block, torch.randn(300, 260), (256, 256), "exact")  # float32: read twice
both(quantize_fp8_block, torch.randn(130, 260), (0, 128), "exact")
both(quantize_fp8_block, torch.randn(2, 17000), (1, 0), "exact")  # a row that registers do not hold
for block in ((1, 128), (128, 128)):
    both(quantize_fp8_both_ways, torch.randn(130, 200), block, transposed_scale=True)

def values(q, scale): return dequantize_fp8_block(q, scale, (1, 128), torch.float32)
for n, block in ((128, None), (256, 32), (384, 128), (1024, None), (512, 256), (576, None), (640, 64), (4096, None)):
    for dtype in (torch.float16, torch.float32):
        x, signs = torch.randn(5, 2 * n)[:, :n].to(dtype), torch.randint(0, 2, (block or n,)) * 2 - 1
        got = hadamard_quantize_fp8(x, block=block, signs=signs, backend="triton")
        expected = hadamard_quantize_fp8(x, block=block, signs=signs, backend="reference")
        error = (values(*got) - values(*expected)).norm() / values(*expected).norm()
        assert error < 2e-3, (n, block, dtype, error)

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


def test_the_triton_kernels_agree_when_interpreted(interpreted):
    code = INTERPRETED.replace("SPECIAL", repr(SPECIAL)).replace("PAIRS", repr(PAIRS))
    assert interpreted(code).strip() == "agrees"


COMPILED = """
from quantrot.kernels.fp8 import E4M3, triton, triton_gemm, triton_hadamard
from quantrot.kernels.fp8.reference import scale_shape, whole
from quantrot.kernels.fp8.tuned import GemmPlan, gemm_plan

def outputs(shape, block):
    return torch.empty(shape, dtype=E4M3), torch.empty(scale_shape(torch.Size(shape), block))

def quantize(shape, block, dtype=torch.bfloat16, rule="exact"):
    x = torch.empty(shape, dtype=dtype)
    triton.quantize(x, *outputs(shape, block), whole(block, x.shape), rule)

for block in ((1, 128), (128, 128), (256, 256), (0, 0)):
    quantize((4096, 4096), block)
quantize((4096, 28672), (1, 0))
quantize((4097, 4096), (256, 256), torch.float16)
for block in ((1, 128), (128, 128)):
    turned = outputs((4096, 4096), block)
    triton.quantize_both_ways(turned[0].bfloat16(), *turned, *turned, block[0] == 128, "exact")
for order in (128, 1024, 16384):
    x = torch.empty(4096, 16384, dtype=torch.bfloat16)
    triton_hadamard.quantize(x, *outputs(x.shape, (1, 128)), None, order, 1.0, "exact")

def gemm(m, n, k, a_block, b_block):
    a, b = outputs((m, k), a_block), outputs((n, k), b_block)
    triton_gemm.gemm(*a, *b, a_block, b_block, torch.bfloat16, None)

for m in (16, 256, 4096):
    gemm(m, 4096, 4096, (1, 128), (128, 128))
for pair in (((256, 256), (256, 256)), ((1, 0), (1, 0)), ((1, 128), (1, 128))):
    gemm(4096, 4096, 4096, *pair)
"""


def test_every_kernel_compiles_for_hopper_without_spills(compiled_for_hopper):
    kernels = compiled_for_hopper(COMPILED)
    names = {k["name"] for k in kernels}
    assert names == {
        "_rows_kernel", "_block_kernel", "_word_kernel", "_largest_kernel", "_both_ways_kernel", "_kernel",
        "_gemm_kernel",
    }  # fmt: skip
    for kernel in kernels:
        assert kernel["local"] == 0, kernel
        assert kernel["shared"] <= 227 << 10 and kernel["registers"] * kernel["warps"] * 32 <= 65536, kernel
        if kernel["name"] == "_gemm_kernel":
            assert kernel["wgmma"] and not kernel["mma"], kernel
        elif kernel["name"] != "_kernel":
            assert kernel["loads128"], kernel


# --- On a GPU --------------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("block", [*BLOCKS[:6], (0, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 4096), (63, 576), (257, 1536), (300, 770), (130, 28672), (2048, 2048)])
def test_gpu_bits_are_the_references(block, dtype, shape):
    x = (randn(*shape) * torch.exp(randn(shape[0], 1, seed=1) * 6)).to(dtype)
    for rule in ("exact", "bf16", "pow2"):
        got = quantize_fp8_block(x.cuda(), block, rule, backend="triton")
        assert same_bits(got, quantize_fp8_block(x, block, rule))


@gpu
@pytest.mark.parametrize("kind", ["words", "again"])
def test_gpu_bits_do_not_depend_on_the_plan(kind):
    from quantrot.kernels.fp8 import triton
    from quantrot.kernels.fp8.tuned import BlockPlan

    x = randn(1000, 1100, device="cuda", dtype=torch.bfloat16)
    expected = quantize_fp8_block(x, (256, 256), backend="reference")
    plans = [BlockPlan(kind, 64, 256, w) for w in (8, 16, 32)] if kind == "words" else []
    plans += [BlockPlan(kind, 32, 256, w, unroll=u) for w in (8, 16) for u in (1, 4)] if kind == "again" else []
    for plan in plans:
        got = torch.empty_like(expected[0]), torch.empty_like(expected[1])
        triton.run_blocks(x, *got, (256, 256), "bf16", plan)
        assert same_bits(got, expected), plan


@gpu
@pytest.mark.parametrize("backend", ["auto", "triton", "triton_splitk"])
@pytest.mark.parametrize(("a_block", "b_block"), PAIRS)
def test_gpu_error_at_long_k_with_outliers(backend, a_block, b_block):
    for m in (1, 64, 300):
        data, exact = operands(m, 512, 16384, a_block, b_block, "cuda", outliers=True)
        y = fp8_block_gemm(*data, a_block=a_block, b_block=b_block, backend=backend)
        assert relative(y, exact) <= MAX_RELATIVE_ERROR[torch.bfloat16]


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
    captured.fill_(NAN)
    graph.replay()
    assert torch.equal(captured, eager)


@gpu
def test_more_than_2_31_elements():
    if torch.cuda.get_device_properties(0).total_memory < 16 << 30:
        pytest.skip("needs 16 GiB of GPU memory")
    x = torch.zeros((1 << 31) // 4096 + 259, 4096, device="cuda", dtype=torch.bfloat16)
    x[-259:] = randn(259, 4096, device="cuda")
    for block in ((1, 128), (128, 128), (256, 256), (1, 0)):
        rows = 259 if block[0] == 1 else (x.shape[0] % block[0]) or block[0]
        q, scale = quantize_fp8_block(x, block)
        tail = quantize_fp8_block(x[-rows:].clone(), block, backend="reference")
        assert torch.equal(_bits(q[-rows:]), _bits(tail[0])) and torch.equal(scale[-tail[1].shape[0] :], tail[1])
        assert (scale[: -259 // block[0] - 2] == 1).all()


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
    for pair in (((1, 128), (128, 128)), ((1, 0), (1, 0)), ((1, 128), (1, 128))):
        a = quantize_fp8_block(x, pair[0])
        b = quantize_fp8_block(torch.randn(130, 1408, device="cuda"), pair[1])
        for backend in ("triton", "triton_splitk"):
            fp8_block_gemm(*a, *b, a_block=pair[0], b_block=pair[1], backend=backend)
torch.cuda.synchronize()
"""


@gpu
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_finds_nothing_on_odd_rows(tool):
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        pytest.skip("needs compute-sanitizer")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", SANITIZED]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
