"""FP8 codes and scales: bitwise, against a loop over blocks and a table of special ones."""

import pytest
import torch

from quantrot.kernels.fp8 import (
    E4M3,
    dequantize_fp8_block,
    hadamard_quantize_fp8,
    quantize_fp8_block,
    quantize_fp8_both_ways,
    round_trip,
)
from quantrot.kernels.fp8.round_trip import round_trip_fp8
from quantrot.kernels.hadamard import hadamard_transform
from quantrot.orthogonal import random_signs

INF, NAN = float("inf"), float("nan")
BLOCKS = [(128, 128), (256, 256), (1, 128), (1, 256), (1, 0), (0, 0), (3, 5)]

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


# --- Quantization -----------------------------------------------------------------------------------------------------


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
@pytest.mark.parametrize("shape", [(1, 128), (5, 130), (9, 132), (130, 200), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_both_ways_is_the_quantization_of_x_and_of_its_padded_transpose(device, block, shape, dtype):
    x = randn(*shape, device=device, dtype=dtype)
    turned = torch.nn.functional.pad(x, (0, 0, 0, -shape[0] % 128)).T
    for order in (False, True):
        expected = (*quantize_fp8_block(x, block, "exact", transposed_scale=order),)
        expected += (*quantize_fp8_block(turned, block, "exact", transposed_scale=order),)
        for backend in ("auto", "triton") if device == "cuda" else ("auto",):
            assert same_bits(quantize_fp8_both_ways(x, block, transposed_scale=order, backend=backend), expected)


# --- Hadamard and quantization ----------------------------------------------------------------------------------------


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
    # Rounded to bfloat16 once between two products: test_hadamard_twice.py has the bits.
    if device == "cuda" and n >= 3072:
        torch.testing.assert_close(got[1].cpu(), expected[1], rtol=5e-3, atol=0)
        ours, best = (
            (dequantize_fp8_block(q.cpu(), scale.cpu(), (1, 128), torch.float32) - turned).norm()
            for q, scale in (got, expected)
        )
        assert ours < 1.005 * best
        return
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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rule", ["exact", "bf16", "pow2"])
@pytest.mark.parametrize("block", [*BLOCKS, (32, 64)], ids=str)
def test_a_round_trip_is_the_two_steps(monkeypatch, device, block, rule, dtype):
    monkeypatch.setattr(round_trip, "CHUNK", 1 << 12)
    for shape in ((0, 256), (1, 300), (96, 256), (70, 200)):
        x = randn(*shape, dtype=dtype).to(device) * torch.linspace(-10, 4, 200, device=device).exp2()[: shape[0], None]
        x = torch.cat((x, x), 1).to(dtype)[:, : shape[1]]  # strided
        if shape[0] > 1:
            x[3], x[9, 7], x[50:60, 5] = -0.0, NAN, INF
            if dtype != torch.float16:
                x[20:24] *= 2.0**-118  # by the least scale
        expected = dequantize_fp8_block(*quantize_fp8_block(x, block, rule), block, dtype)
        for few in (1 << 16, 0):
            monkeypatch.setattr(round_trip, "FEW", few)
            got = round_trip_fp8(x, block, rule)
            assert got.dtype == dtype and torch.equal(got.isnan(), expected.isnan())
            assert torch.equal(got.nan_to_num(7), expected.nan_to_num(7)) and got.shape == x.shape


def test_a_round_trip_is_an_operator_for_torch():
    x = randn(5, 256, dtype=torch.bfloat16)
    for given, columns in ((x, 128), (x.T.contiguous().T, 0)):
        torch.library.opcheck(torch.ops.quantrot.fp8_round_trip, (given, 1, columns, "bf16"))


# --- Errors -----------------------------------------------------------------------------------------------------------


def test_codes_have_no_gradient():
    x = torch.randn(4, 128, requires_grad=True)
    with pytest.raises(RuntimeError, match="Fp8TrainingLinear"):
        round_trip_fp8(x, (1, 128), "bf16").sum().backward()
    q, scale = quantize_fp8_block(x)
    with pytest.raises(RuntimeError, match="Fp8TrainingLinear"):
        dequantize_fp8_block(q, scale, (1, 128)).sum().backward()


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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("scale", [1.0, 2.0**-126, 0.75 * 2.0**119])
def test_every_code_is_dequantized(device, scale):
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    got = dequantize_fp8_block(codes[None], torch.full((1, 2), scale, device=device), (1, 128), torch.float32)
    expected = codes.to(torch.float64).mul(scale).float()[None]
    assert torch.equal(got.isnan(), expected.isnan()) and got.isnan().sum() == 2
    assert torch.equal(got.nan_to_num().view(torch.int32), expected.nan_to_num().view(torch.int32))


def test_round_trip_errors_are_the_quantizers():
    for x, block, rule, says in (
        (torch.zeros(2, 3, 4), (1, 128), "bf16", r"round_trip_fp8 takes \[M, K\]: flatten"),
        (torch.zeros(2, 4), (1, -1), "bf16", r"block: \(1, -1\)"),
        (torch.zeros(2, 4), (1, 128), "e8m0", "scale_rule: 'e8m0'; allowed: exact, bf16, pow2"),
    ):
        with pytest.raises(ValueError, match=says):
            round_trip_fp8(x, block, rule)


def test_codes_and_scales_that_do_not_belong_together_are_named():
    q, scale = quantize_fp8_block(torch.ones(4, 256))
    for args in ((q.float(), scale, (1, 128)), (q, scale.T, (1, 128)), (q, scale, (2, 128)), (q[0], scale, (1, 128))):
        with pytest.raises(ValueError, match=r"scale: .*, block: \(., 128\); allowed: .* a scale a block"):
            dequantize_fp8_block(*args)
    for args in ((q, scale, (128,)), (q, scale.int(), (1, 128)), (q, scale, (1, 128), torch.int32)):
        with pytest.raises(ValueError, match=r"a scale a block, of \(rows, columns\), in floats; dtype torch"):
            dequantize_fp8_block(*args)


def test_both_ways_and_transform_errors():
    with pytest.raises(ValueError, match=r"block: \(1, 256\); allowed"):
        quantize_fp8_both_ways(torch.zeros(2, 4), (1, 256))
    with pytest.raises(ValueError, match="no Hadamard matrix of order 6"):
        hadamard_quantize_fp8(torch.zeros(2, 6))


# --- The kernels, without a GPU ---------------------------------------------------------------------------------------

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
    each = torch.tensor(rows, dtype=torch.bfloat16).repeat_interleave(128, 0)
    both(quantize_fp8_block, each, (128, 128), rule)
    both(quantize_fp8_block, each.unflatten(0, (-1, 128))[:, :4].reshape(-1, 32), (8, 16), rule)
for block in ((1, 128), (1, 256), (128, 128), (256, 256), (1, 0), (0, 0)):
    for dtype in (torch.bfloat16, torch.float32):
        m = 40 if block[0] == 1 else 130
        wide = (torch.randn(m, 400) * torch.exp(torch.randn(m, 1) * 4)).to(dtype)
        both(quantize_fp8_block, wide[:, :300], block, "exact")
        both(quantize_fp8_block, wide[:1, 1:258], block, "bf16", transposed_scale=True)
both(quantize_fp8_block, torch.randn(7, 11), (3, 5), "exact")
both(quantize_fp8_block, torch.randn(300, 260), (256, 256), "exact")  # float32: read twice
both(quantize_fp8_block, torch.randn(130, 260), (0, 128), "exact")
both(quantize_fp8_block, torch.randn(2, 17000), (1, 0), "exact")  # a row that registers do not hold
for block in ((1, 128), (128, 128)):
    for dtype in (torch.float16, torch.float32):
        both(quantize_fp8_both_ways, torch.randn(130, 200).to(dtype), block, transposed_scale=True)

def values(q, scale): return dequantize_fp8_block(q, scale, (1, 128), torch.float32)
for n, block in ((128, None), (256, 32), (384, 128), (1024, None), (512, 32), (576, None), (640, 64), (4096, None)):
    for dtype in (torch.float16, torch.float32):
        if dtype == torch.float32 and (block or n) == 128:
            continue  # 8 x 16 is no kernel
        x, signs = torch.randn(5, 2 * n)[:, :n].to(dtype), torch.randint(0, 2, (block or n,)) * 2 - 1
        got = hadamard_quantize_fp8(x, block=block, signs=signs, backend="triton")
        expected = hadamard_quantize_fp8(x, block=block, signs=signs, backend="reference")
        error = (values(*got) - values(*expected)).norm() / values(*expected).norm()
        assert error < 2e-3, (n, block, dtype, error)
print("agrees")
"""


def test_a_gpu_with_little_shared_memory_turns_and_quantizes_long_rows_in_two_kernels():
    """Ada and consumer Blackwell have 99 KB; 14336 columns, padded to 16384, take 128."""
    triton_hadamard = pytest.importorskip("quantrot.kernels.fp8.triton_hadamard", reason="triton is not installed")
    for order, fits in ((4096, True), (8192, True), (14336, False)):
        assert triton_hadamard.supports(order, order, 2) and triton_hadamard.supports(order, order, 2, 99 << 10) == fits


def test_the_triton_kernels_agree_when_interpreted(interpreted):
    assert interpreted(INTERPRETED.replace("SPECIAL", repr(SPECIAL))).strip() == "agrees"


COMPILED = """
from quantrot.kernels.fp8 import E4M3, triton, triton_hadamard
from quantrot.kernels.fp8.reference import scale_shape, whole

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
for order in (128, 1024, 8192):
    x = torch.empty(4096, 16384, dtype=torch.bfloat16)
    triton_hadamard.quantize(x, *outputs(x.shape, (1, 128)), None, order, 1.0, "exact")
"""


def test_every_kernel_compiles_for_hopper_without_spills(compiled_for_hopper):
    kernels = compiled_for_hopper(COMPILED)
    names = {k["name"] for k in kernels}
    assert names == {"_rows_kernel", "_block_kernel", "_word_kernel", "_largest_kernel", "_both_ways_kernel", "_kernel"}
    for kernel in kernels:
        assert kernel["local"] == 0, kernel
        assert kernel["shared"] <= 227 << 10 and kernel["registers"] * kernel["warps"] * 32 <= 65536, kernel
        assert kernel["loads128"] or kernel["name"] == "_kernel", kernel


# --- On a GPU ---------------------------------------------------------------------------------------------------------


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
