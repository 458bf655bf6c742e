"""The Triton kernels of MXFP4: the reference's bits in the interpreter and on the GPU, and compiled for Hopper."""

import pytest
import torch

from quantrot.kernels.mxfp4 import (
    ScaleRule,
    dequantize_mxfp4,
    expand_mxfp4,
    hadamard_quantize_mxfp4,
    masked_hadamard,
    mxfp4_gemm,
    mxfp4_product,
    quantize_mxfp4,
    requantize_mxfp4,
)

gpu = pytest.mark.gpu

CASES = '''
import torch

def hard(rows, width, dtype):
    """Every magnitude, specials, ties; float16 and bfloat16 take what they hold of it."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width, generator=g) * torch.logspace(-5, 4, rows)[:, None]
    x[0], x[1, 5], x[2, 7], x[3, -3] = 0, float("inf"), float("nan"), -float("inf")
    x[4], x[5, :32], x[6] = -0.0, 3.0, torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, -5]).repeat(width // 8)
    x[7], x[8], x[9] = 1e20, 2.0**-127, x[9] * 2.0**-120
    return x.to(dtype)

def signs_of(hadamard):
    return torch.randint(0, 2, (hadamard,), generator=torch.Generator().manual_seed(hadamard)) * 2 - 1

# rule, hadamard, signs, random, mask, transpose
CASES = [
    ("even", 0, False, None, False, False), ("rceil", 32, True, None, False, False),
    ("mse", 0, False, None, True, False), ("quest", 32, False, None, True, False),
    ("absmax34", 64, True, (1 << 40, 3 << 33), False, False), ("quest", 128, True, None, True, False),
    ("floor", 32, False, None, True, True), ("absmax34", 32, True, (5, 6), False, True),
]
'''

INTERPRETED = (
    CASES
    + """
from quantrot.kernels.mxfp4 import *
from quantrot.kernels.mxfp4 import triton_gemm, triton_rows
from quantrot.kernels.mxfp4.reference import float32, quantize_reference

def same(got, expected):
    return all(a is b is None or torch.equal(a, b) for a, b in zip(got, expected, strict=True))

for i, (rule, hadamard, signs, random, mask, transpose) in enumerate(CASES):
    x = hard(20, 128, (torch.float32, torch.float16)[i % 2])
    x = torch.cat([x, x[:12]]).T.contiguous() if transpose else x
    if hadamard:
        options = dict(hadamard=hadamard, signs=signs_of(hadamard) if signs else None, random=random, clip_mask=mask)
        run = lambda b: hadamard_quantize_mxfp4(x, rule, transpose=transpose, backend=b, **options)
    else:
        run = lambda b: quantize_mxfp4(x, rule, backend=b)
    assert same(run("triton"), run("reference")), (rule, hadamard, transpose)

packed = torch.randint(0, 256, (64, 48), dtype=torch.uint8)
scale = torch.randint(100, 108, (64, 3)).to(torch.uint8)
scale[1, 1], scale[2], scale[3] = 255, 0, 254
for dtype in (torch.float32, torch.float16):
    a, b = (dequantize_mxfp4(packed, scale, dtype, backend=b) for b in ("triton", "reference"))
    assert torch.equal(a.nan_to_num(nan=9), b.nan_to_num(nan=9))
run = lambda b: requantize_mxfp4(packed, scale, hadamard=64, signs=signs_of(64), random=(1, 2), backend=b)
assert same(run("triton"), run("reference"))
x, drawn = hard(64, 128, torch.float32), (1 << 40, 7, torch.tensor([(1 << 63) - 1, (1 << 61) - 2]))
for transpose in (False, True):
    options = dict(hadamard=64, signs=signs_of(64), random=drawn, transpose=transpose)
    run = lambda b: hadamard_quantize_mxfp4(x, "absmax34", backend=b, **options)
    assert same(run("triton"), run("reference")), transpose
run = lambda b: requantize_mxfp4(packed, scale, hadamard=32, random=drawn, backend=b)
assert same(run("triton"), run("reference"))

def bits(result):
    return [result[0].view(torch.uint8), *result[1:]]

scale[1, 1] = 100  # the interpreter's e4m3 has no NaN, and does not round to what lies outside the window
run = lambda b: bits(expand_mxfp4(packed[:21], scale[:21], backend=b))
assert same(run("triton"), run("reference"))
scale[5, 0], packed[5, :16] = 40, 0x08  # outside, but zeros
run = lambda b: bits(expand_mxfp4(packed[:21], scale[:21], backend=b))
assert same(run("triton"), run("reference"))
x = torch.randn(3, 160, generator=torch.Generator().manual_seed(1))
x *= torch.tensor([1.0, 64, 0, 1, 2]).repeat_interleave(32)
x[1, :32] = torch.tensor([2.0**-30] + [0.0] * 31)
for hadamard in (0, 32):
    run = lambda b: torch.ops.quantrot.mxfp4_quantize_expanded(x, None, "even", hadamard, b)
    a, b = run("triton"), run("reference")
    inside = b[2] == 0
    assert same([t[inside] for t in bits(a)[:3]], [t[inside] for t in bits(b)[:3]])
    assert same([a[2], *(t[~inside] for t in a[3:])], [b[2], *(t[~inside] for t in b[3:])])
mask = torch.randint(0, 256, (5, 16), dtype=torch.uint8)
for hadamard, dtype in ((32, torch.float32), (128, torch.float16)):
    x = torch.randn(5, 128).to(dtype)
    run = lambda b: masked_hadamard(x, mask, hadamard=hadamard, factor=float32(16 / 9), backend=b)
    assert torch.equal(run("triton"), run("reference"))

scale = torch.randint(120, 126, (64, 3)).to(torch.uint8)
x = torch.randn(3, 96).half()
x[x.abs() < 2.0**-14] = 0  # the interpreter's scaled product (Triton 3.9) makes other numbers of float16's subnormals
exact = x.double() @ dequantize_mxfp4(packed, scale, torch.float32).double().T
for plan in (triton_gemm.plan_for(3, 64, 96), triton_gemm.Plan(32, 64, 2, 2, 2)):
    y = triton_gemm.decode(x, torch.full((3,), 2.0), packed, scale, torch.float32, plan)
    assert (y - 2 * exact).norm() <= 1e-6 * exact.norm()
x = torch.randn(6, 64)
x[2, 3] = float("nan")
for rule, hadamard in (("even", 0), ("quest", 32)):
    a = triton_rows.round_trip(x, ScaleRule(rule), hadamard)
    b = dequantize_mxfp4(*quantize_reference(x, ScaleRule(rule), hadamard=hadamard)[:2])
    assert torch.equal(a.nan_to_num(nan=9), b.nan_to_num(nan=9)), rule
x = torch.randn(3, 96).half()
flagged = torch.tensor([0, 1, 0], dtype=torch.int32)
a, a_scale = quantize_mxfp4(x)
y = torch.full((3, 64), 7.0)
none = torch.zeros(64, dtype=torch.int32)
triton_gemm.repair(y, packed, scale, none, packed=(a, a_scale, flagged))
exact = dequantize_mxfp4(a, a_scale, torch.float32).double() @ dequantize_mxfp4(packed, scale, torch.float32).double().T
assert (y[1] - exact[1]).norm() <= 1e-6 * exact[1].norm() and (y[[0, 2]] == 7).all()
many, many_scale = packed.repeat(10, 1), scale.repeat(10, 1)  # more tiles than programs
y, last = torch.full((3, 640), 7.0), torch.arange(640, dtype=torch.int32) // 639
e4m3, row_scale, _ = expand_mxfp4(a, a_scale, backend="reference")
a[0], a_scale[[0, 2]] = 0xFF, 0xFF  # the packed form of rows that are inside is garbage
triton_gemm.repair(y, many, many_scale, last, packed=(a, a_scale, flagged), wide=(e4m3, row_scale))
assert (y[:, 639] - exact[:, 63]).norm() <= 1e-6 * exact[:, 63].norm()
assert (y[1, :639] - exact[1].repeat(10)[:639]).norm() <= 1e-6 * y[1].norm() and (y[[0, 2], :639] == 7).all()
print("agrees")
"""
)


def test_the_kernels_give_the_references_bits_when_interpreted(interpreted):
    assert interpreted(INTERPRETED).strip() == "agrees"


COMPILED = """
from quantrot.kernels.mxfp4 import triton_columns, triton_gemm, triton_rows
from quantrot.kernels.mxfp4.reference import ScaleRule
x = torch.zeros(256, 4096, dtype=torch.bfloat16)
packed, scale = torch.zeros(256, 2048, dtype=torch.uint8), torch.zeros(256, 128, dtype=torch.uint8)
y, flags = torch.zeros(256, 256, dtype=torch.bfloat16), torch.zeros(256, dtype=torch.int32)
triton_rows.quantize(x, ScaleRule.quest, 32, None, None, True)
triton_rows.quantize_expanded(x, ScaleRule.even, 32, None)
triton_rows.expand(packed, scale)
triton_rows.round_trip(x, ScaleRule.even, 32)
triton_rows.dequantize(packed, scale, torch.bfloat16)
triton_rows.masked_hadamard(x, torch.zeros(256, 512, dtype=torch.uint8), 32, 1.0, x.dtype)
triton_columns.quantize_columns(x, ScaleRule.absmax34, 32, torch.ones(32), None, False)
triton_gemm.decode(x[:8], torch.ones(8), packed, scale, torch.bfloat16)
whole = x.to(torch.float8_e4m3fn), torch.ones(256)
triton_gemm.repair(y, packed, scale, flags, packed=(packed, scale, flags), wide=whole)
"""


def test_the_kernels_compile_for_hopper_without_spills(compiled_for_hopper):
    found = {entry["name"]: entry for entry in compiled_for_hopper(COMPILED)}
    assert not any(entry["local"] for entry in found.values()), found
    rows, wide = found["_quantize_rows_kernel"], found["_quantize_expanded_kernel"]
    assert rows["loads128"] == 4 and rows["shared"] == 0 and rows["registers"] <= 64  # a thread's group, no exchange
    assert wide["loads128"] == 8 and wide["registers"] <= 64  # the second four: rows that are kept packed too
    assert found["_expand_kernel"]["loads128"] >= 1 and found["_dequantize_kernel"]["loads128"] == 1
    assert found["_masked_hadamard_kernel"]["loads128"] == 4
    assert found["_decode_kernel"]["mma"] + found["_decode_kernel"]["wgmma"] > 0


# --- On the GPU ------------------------------------------------------------------------------------------------------

SPACE: dict = {}
exec(CASES, SPACE)
STREAM = (1 << 40, 3 << 33)
GPU_CASES = [  # each is a kernel to compile
    *((rule, hadamard, False, None, hadamard > 0, False) for rule in ScaleRule for hadamard in (0, 32)),
    *((rule, hadamard, True, None, True, False) for rule in ("quest", "even") for hadamard in (64, 128)),
    *(("absmax34", hadamard, True, STREAM, False, turn) for hadamard in (32, 64, 128) for turn in (False, True)),
    *((rule, hadamard, False, None, False, True) for rule in ("quest", "even") for hadamard in (32, 128)),
]


def same(got, expected):
    return all(a is b is None or torch.equal(a.cpu(), b) for a, b in zip(got, expected, strict=True))


@gpu
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.bfloat16) for case in GPU_CASES),
        *((case, dtype) for case in SPACE["CASES"] for dtype in (torch.float16, torch.float32)),
    ],
    ids=str,
)
def test_codes_scales_and_masks_are_the_references_bits(case, dtype):
    rule, hadamard, signs, random, mask, transpose = case
    x = SPACE["hard"](257, 384, dtype)
    x = torch.cat([x, x[:127]])[:, :257].T.contiguous().T if transpose else x
    if not hadamard:
        assert same(quantize_mxfp4(x.cuda(), rule), quantize_mxfp4(x, rule))
        return
    s = SPACE["signs_of"](hadamard) if signs else None
    options = {"hadamard": hadamard, "random": random, "clip_mask": mask, "transpose": transpose}
    got = hadamard_quantize_mxfp4(x.cuda(), rule, signs=s.cuda() if signs else None, **options)
    assert same(got, hadamard_quantize_mxfp4(x, rule, signs=s, **options))


@gpu
@pytest.mark.parametrize("rows", [32, 96, 288])
@pytest.mark.parametrize("random", [None, (7, 8)])
def test_requantized_bits_are_the_references(rows, random):
    packed, scale = quantize_mxfp4(SPACE["hard"](rows, 160, torch.float32))
    for hadamard in (32, 64, 128):
        if rows % hadamard:
            continue
        options = {"hadamard": hadamard, "random": random}
        got = requantize_mxfp4(packed.cuda(), scale.cuda(), signs=SPACE["signs_of"](hadamard).cuda(), **options)
        assert same(got, requantize_mxfp4(packed, scale, signs=SPACE["signs_of"](hadamard), **options))


@gpu
@pytest.mark.parametrize("width", [32, 96, 576, 4096, 14336, 28672, 32800])
def test_expansions_are_the_references_bits(width):
    x = SPACE["hard"](63, width, torch.bfloat16)
    packed, scale = quantize_mxfp4(x)
    scale[11, 0], scale[12] = 90, torch.randint(80, 160, scale[12].shape).to(torch.uint8)

    def bits(result):
        return [t.cpu().view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t.cpu() for t in result]

    assert same(bits(expand_mxfp4(packed.cuda(), scale.cuda())), bits(expand_mxfp4(packed, scale)))
    for tokens in (x, x.half(), x.float()):
        got, expected = (
            torch.ops.quantrot.mxfp4_quantize_expanded(t, None, "even", 32, "auto") for t in (tokens.cuda(), tokens)
        )
        assert same(bits(got[:3]), bits(expected[:3]))
        outside = expected[2] > 0
        assert same([t[outside.cuda()] for t in got[3:]], [t[outside] for t in expected[3:]])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        a, b = dequantize_mxfp4(packed.cuda(), scale.cuda(), dtype).cpu(), dequantize_mxfp4(packed, scale, dtype)
        assert torch.equal(a.nan_to_num(nan=9), b.nan_to_num(nan=9))


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("hadamard", [32, 64, 128])
def test_masked_transforms_are_the_references_bits(dtype, hadamard):
    x = torch.randn(257, 384).to(dtype)
    mask = torch.randint(0, 256, (257, 48), dtype=torch.uint8)
    got = masked_hadamard(x.cuda(), mask.cuda(), hadamard=hadamard, factor=16 / 9)
    assert torch.equal(got.cpu(), masked_hadamard(x, mask, hadamard=hadamard, factor=16 / 9))


@gpu
def test_layout_does_not_change_bits():
    x = torch.randn(129, 520, device="cuda", dtype=torch.bfloat16)
    for part in (x[1:, 3:515], x[::2, 8:264], x[:128, :512].T, x.flatten()[1 : 1 + 128 * 512].view(128, 512)):
        for transpose in (False, True):
            if part.shape[0 if transpose else 1] % 32:
                continue
            got = hadamard_quantize_mxfp4(part, transpose=transpose)[:2]
            assert same(got, [t.cpu() for t in hadamard_quantize_mxfp4(part.contiguous(), transpose=transpose)[:2]])


@gpu
@pytest.mark.parametrize("tokens", [1, 2, 8, 16, 17, 32])
@pytest.mark.parametrize("shape", [(48, 32), (80, 544), (80, 640), (4096, 4096), (4096, 14336)])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_few_tokens_by_a_packed_weight(tokens, shape, backend):
    n, k = shape
    x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)
    packed, scale = quantize_mxfp4(torch.randn(n, k, device="cuda") * 0.05)
    weight = dequantize_mxfp4(packed, scale, torch.float32).double()
    if backend == "hopper" and k % 128:
        with pytest.raises(ValueError, match="K a multiple of 128"):
            mxfp4_gemm(x, packed, scale, backend=backend)
        backend = "auto"
    y = mxfp4_gemm(x, packed, scale, backend=backend)
    # bfloat16's rounding is 1.66e-3 in the mean square; of a few dozen numbers it can be more, of none past 2^-8.
    bound = 2e-3 if y.numel() >= 1000 else 2**-8
    assert ((y - x.double() @ weight.T).norm() / (x.double() @ weight.T).norm()).item() <= bound
    operand = dequantize_mxfp4(*quantize_mxfp4(x), torch.float32).double()
    y = mxfp4_gemm(x, packed, scale, activations="mxfp4", backend=backend)
    assert ((y - operand @ weight.T).norm() / (operand @ weight.T).norm()).item() <= bound


@gpu
@pytest.mark.parametrize("tokens", [1, 32, 300])
@pytest.mark.parametrize("activations", ["none", "fp8", "mxfp4"])
def test_a_hundred_runs_and_a_graph_are_bit_equal(tokens, activations):
    x = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16)
    packed, scale = quantize_mxfp4(torch.randn(1024, 4096, device="cuda"))

    def run():
        return mxfp4_gemm(x, packed, scale, activations=activations, hadamard=32 if activations == "mxfp4" else 0)

    first = run()
    for _ in range(100):
        assert torch.equal(run(), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    captured.fill_(float("nan"))
    graph.replay()
    assert torch.equal(captured, first)


@gpu
def test_a_hundred_quantizations_are_bit_equal():
    x = torch.randn(32 * 1027, 512, device="cuda", dtype=torch.bfloat16)

    def run():
        rows = hadamard_quantize_mxfp4(x, "quest", clip_mask=True)
        columns = hadamard_quantize_mxfp4(x, "absmax34", transpose=True, random=(1, 2))
        return *rows, *columns[:2], *requantize_mxfp4(*rows[:2], random=(3, 4))

    first = [t.cpu() for t in run()]
    for _ in range(100):
        assert same(run(), first)


@gpu
@pytest.mark.parametrize("backend", ["cublas", "reference"])
def test_products_of_every_backend_are_exact_in_their_operands(backend):
    a, b = (quantize_mxfp4(torch.randn(n, 2048, device="cuda")) for n in (1000, 528))
    exact = dequantize_mxfp4(*a, torch.float32).double() @ dequantize_mxfp4(*b, torch.float32).double().T
    for dtype, limit in ((torch.bfloat16, 2e-3), (torch.float32, 5e-4), (torch.float16, 7e-4)):
        y = mxfp4_product(*a, *b, dtype=dtype, backend=backend)
        assert ((y - exact).norm() / exact.norm()).item() <= limit
