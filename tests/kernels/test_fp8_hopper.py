"""The laws of the block-scaled FP8 product for Hopper: emulated on the host, compiled for sm_90a, run on a GPU."""

import ctypes
from dataclasses import replace

import pytest
import torch

from quantrot.kernels.fp8 import dequantize_fp8_block, fp8_block_gemm, hopper, quantize_fp8_block
from quantrot.kernels.fp8.hopper import Across, Decode, Prefill
from tests.kernels.covering import few_or_every

gpu = pytest.mark.gpu
BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn

# plan, parts, a scale of b a row, output, bytes of a bias element, a residual: every branch of the source
CASES = {
    "prefill": (Prefill(stages=3), 1, False, BF16, 0),
    "prefill_alone": (Prefill(stages=4, cluster=1), 1, False, FP16, 2),
    "prefill_channel": (Prefill(stages=3, cluster=1), 1, True, BF16, 4),
    "prefill_parts": (Prefill(stages=2), 2, False, BF16, 4),
    "prefill_sets": (Prefill(sets=2, stages=3), 1, False, BF16, 0),
    "prefill_wide": (Prefill(wide=True, sets=2, cluster=1, stages=3, lag=1), 1, False, BF16, 0),
    "prefill_wide_early": (Prefill(wide=True, sets=2, cluster=1, stages=4, lag=1, early=True), 1, False, BF16, 0),
    "prefill_pair": (Prefill(wide=True, sets=2, cluster=2, stages=3, lag=1), 1, False, BF16, 0),
    "prefill_pair_early": (Prefill(wide=True, sets=2, cluster=2, stages=4, lag=1, early=True), 1, False, FP16, 2),
    "prefill_pair_channel": (Prefill(wide=True, sets=2, cluster=2, stages=3), 1, True, BF16, 4),
    "prefill_early": (Prefill(sets=2, stages=6, early=True), 1, False, BF16, 0),
    "prefill_wide_bias": (Prefill(wide=True, sets=2, cluster=1, stages=3), 1, False, BF16, 4),
    "prefill_wide_channel": (Prefill(wide=True, sets=2, cluster=1, stages=3, lag=2), 1, True, BF16, 2),
    "across": (Across(144, stages=3), 1, False, BF16, 0),
    "across_early": (Across(80, stages=4, early=True), 1, False, BF16, 2),
    "across_channel": (Across(192, stages=2), 1, True, BF16, 4),
    "across_pair": (Across(128, pair=True, stages=3), 1, False, FP16, 0),
    "across_pair_early": (Across(96, pair=True, stages=3, early=True), 1, False, BF16, 0),
    "decode_channel": (Decode(16, stages=6), 1, True, BF16, 0),
    "decode8": (Decode(8, stages=4), 1, False, BF16, 4),
    "decode16_parts": (Decode(16, stages=3), 2, False, FP16, 0),
    "decode32": (Decode(32, stages=3), 1, False, BF16, 2),
    "decode64_parts": (Decode(64, stages=2), 2, False, BF16, 4),
    "decode8_narrow": (Decode(8, columns=16, stages=5), 1, False, BF16, 0),
    "decode64_narrow": (Decode(64, columns=32, stages=3), 1, False, BF16, 0),
    "decode8_early": (Decode(8, columns=32, stages=5, early=5), 1, False, BF16, 0),
    "decode32_early": (Decode(32, stages=3, early=2), 1, True, FP16, 2),
    "decode64_turned": (Decode(64, columns=32, stages=3, turned=True), 1, False, BF16, 0),
    "decode16_turned": (Decode(16, columns=32, stages=3, turned=True), 1, False, BF16, 0),
    "decode32_turned": (Decode(32, stages=3, turned=True), 1, True, BF16, 0),
    "decode64_turned_parts": (Decode(64, stages=2, turned=True), 2, False, BF16, 4),
    "decode64_turned_narrow": (Decode(64, columns=16, stages=4, early=1, turned=True), 2, False, FP16, 2),
    "decode64_turned_two": (Decode(64, columns=128, stages=2, resident=1, turned=True), 1, True, FP16, 0),
    "decode8_pairs": (Decode(8, columns=32, stages=5, early=5, pairs=True, late=True), 1, False, BF16, 0),
    "decode32_pairs": (Decode(32, stages=4, pairs=True), 2, False, BF16, 2),
    "decode64_turned_pairs": (Decode(64, columns=32, stages=4, turned=True, pairs=True), 1, True, FP16, 4),
    "decode64_two": (Decode(64, columns=128, stages=2, resident=1), 1, False, BF16, 0),
    "decode8_added": (Decode(8, columns=32, stages=5, early=5), 1, False, BF16, 2, True),
    "decode32_parts_added": (Decode(32, stages=3), 2, False, BF16, 0, True),
    "decode64_turned_added": (Decode(64, columns=128, stages=2, resident=1, turned=True), 1, True, BF16, 0, True),
    "decode64_narrow_added": (Decode(64, columns=16, stages=4, turned=True), 1, False, FP16, 4, True),
}
PREFILLS = (
    "prefill",
    "prefill_sets",
    "prefill_wide",
    "prefill_early",
    "prefill_wide_early",
    "prefill_pair",
    "across",
    "across_pair_early",
)  # of one part
DRIVER = """
static std::string message;

// Matrices as {data, rows, columns, pitch in bytes, rows of a box, columns of a box, bytes of an element}.
static quantrot::TensorMap map(const unsigned long long* m) {
  return {(unsigned char*)m[0], m[2], m[1], m[3], (unsigned)m[5], (unsigned)m[4], (unsigned)m[6], 1};
}

extern "C" const char* run(int which, const unsigned long long (*m)[7], const quantrot::GemmArgs* args, int blocks,
                           int cluster, int threads, int shared, int seed) {
  using Kernel = void(quantrot::TensorMap, quantrot::TensorMap, quantrot::TensorMap, quantrot::GemmArgs);
  static Kernel* const kernels[] = {NAMES};
  const auto a = map(m[0]), b = map(m[1]), c = map(m[2]);
  message = emulator::launch({(unsigned)blocks, 1, 1}, cluster, threads, shared, seed,
                             [&] { kernels[which](a, b, c, *args); });
  return message.c_str();
}
"""


@pytest.fixture(scope="module")
def emulator(emulated):
    """Every case's kernel on the host: emulator(case, a, a_scale, b, b_scale, blocks..., bias, seed) -> c."""
    entries = "".join(hopper.entry(*case, name=f"gemm_{name}") for name, case in CASES.items())
    names = ", ".join(f"gemm_{name}" for name in CASES)
    library = emulated(hopper.device_functions() + entries + DRIVER.replace("NAMES", names))
    library.run.restype = ctypes.c_char_p

    def run(
        name,
        a,
        a_scale,
        b,
        b_scale,
        a_block=(1, 128),
        b_block=(128, 128),
        bias=None,
        seed=0,
        processors=4,
        residual=None,
    ):
        plan, parts, channel, out, _, *add = CASES[name]
        assert add == [True] * (residual is not None)
        (m, k), n = a.shape, b.shape[0]
        b_block = (1, 0) if channel else b_block
        if len(a) <= 64:
            assert hopper.unsupported(a, a_scale, b, b_scale, a_block, b_block, out, bias, residual) is None
        c = torch.full((m, n), float("nan"), dtype=out)
        args = hopper.arguments(a, a_scale, b, b_scale, c, a_block, b_block, bias, plan, parts, residual)
        maps = (ctypes.c_ulonglong * 21)()
        for i, (x, box) in enumerate(zip((a, b, c), plan.boxes(len(a)), strict=False)):
            maps[7 * i : 7 * i + 7] = (x.data_ptr(), *x.shape, x.stride(0) * x.itemsize, *box, x.itemsize)
        few = isinstance(plan, Decode)
        blocks, cluster = plan.grid(m, n, parts if few else processors), parts if few else plan.cluster
        shared = plan.shared_bytes(hopper.segment_of(k, parts))
        message = library.run(
            list(CASES).index(name), maps, ctypes.byref(args), blocks, cluster, plan.threads, shared, seed
        )
        assert message == b"", message.decode()
        return c

    return run


def integers(m: int, n: int, k: int, a_block=(1, 128), b_block=(128, 128)):
    """Operands whose result is exact in float32: small integers, scales that are powers of two."""

    def one(rows, block):
        codes = torch.randint(-4, 5, (rows, k)).float().to(E4M3)
        scale = torch.randint(-2, 2, hopper._grid_of(codes.shape, block)).float().exp2()
        return codes, scale

    return *one(m, a_block), *one(n, b_block)


def exact(a, a_scale, b, b_scale, a_block=(1, 128), b_block=(128, 128), bias=None) -> torch.Tensor:
    """The product in float64."""
    left = dequantize_fp8_block(a, a_scale, a_block, torch.float64)
    right = dequantize_fp8_block(b, b_scale, b_block, torch.float64)
    return left @ right.T + (0 if bias is None else bias.double())


def bias_of(name: str, n: int) -> torch.Tensor | None:
    _, _, _, out, size, *_ = CASES[name]
    return torch.randint(-8, 9, (n,)).to(torch.float32 if size == 4 else out) if size else None


def reals(m: int, n: int, k: int):
    """Operands of every magnitude, scales that are no powers of two."""
    torch.manual_seed(m)
    a, b = ((torch.randn(rows, k) * 2.0 ** torch.randint(-6, 6, (rows, k))).to(E4M3) for rows in (m, n))
    return a, torch.rand(m, -(-k // 128)) + 0.5, b, torch.rand(-(-n // 128), -(-k // 128)) + 0.5


# --- In the emulator -------------------------------------------------------------------------------------------------


# Each case by one of the others, too, by turns.
LARGEST, *OTHERS = (257, 384, 640), (1, 128, 512), (63, 264, 272)
SHAPES = [(name, *shape) for i, name in enumerate(CASES) for shape in (LARGEST, OTHERS[i % 2])]


@pytest.mark.parametrize(("name", "m", "n", "k"), SHAPES)
def test_every_kernel_is_exact_on_integers(emulator, name, m, n, k):
    m = 65 if name.startswith("decode") and m == 257 else m
    torch.manual_seed(m)
    b_block = (1, 0) if CASES[name][2] else (128, 128)
    operands, bias = integers(m, n, k, b_block=b_block), bias_of(name, n)
    dtype = CASES[name][3]
    residual = torch.randn(m, n + 8).to(dtype)[:, :n] if name.endswith("added") else None
    expected = exact(*operands, b_block=b_block, bias=bias).to(dtype)
    expected = expected if residual is None else expected + residual
    assert torch.equal(emulator(name, *operands, bias=bias, seed=m, residual=residual), expected)


@pytest.mark.parametrize("name", [*PREFILLS, "decode16_parts", "decode64_parts"])
def test_bits_do_not_depend_on_what_runs_first(emulator, name):
    operands, bias = reals(40, 264, 768), bias_of(name, 264)
    first, *others = (emulator(name, *operands, bias=bias, seed=seed, processors=2 + seed % 3) for seed in range(4))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(
    "names",
    [
        # one part of K
        (*PREFILLS, "decode64_two", "decode8_narrow", "decode8_pairs", "decode64_narrow", "decode64_turned"),
        ("prefill_parts", "decode64_parts", "decode64_turned_parts"),  # two
    ],
)
def test_a_row_has_the_same_bits_alone_and_in_any_batch_and_kernel(emulator, names):
    a, a_scale, b, b_scale = reals(200, 136, 896)
    bias = bias_of(names[0], 136)
    whole = emulator(names[0], a, a_scale, b, b_scale, bias=bias)
    error = (whole.double() - exact(a, a_scale, b, b_scale, bias=bias)).norm() / whole.double().norm()
    assert error < 2e-3
    for name in names[1:]:
        for rows in (slice(0, 1), slice(130, 190)):
            part = emulator(name, a[rows].clone(), a_scale[rows].clone(), b, b_scale, bias=bias)
            assert torch.equal(part, whole[rows])


@pytest.mark.parametrize("name", ["prefill", "prefill_wide", "decode8"])
@pytest.mark.parametrize(
    ("a_block", "b_block"),
    [
        ((1, 128), (128, 128)),
        ((128, 128), (128, 128)),
        ((256, 256), (256, 256)),
        ((1, 256), (128, 256)),
        ((1, 0), (256, 0)),
        ((0, 0), (0, 0)),
        ((32, 528), (512, 1024)),
    ],
)
def test_scales_of_any_block_and_stride(emulator, name, a_block, b_block):
    torch.manual_seed(0)
    a, a_scale, b, b_scale = integers(20, 272, 528, a_block, b_block)
    bias = bias_of(name, 272)
    expected = exact(a, a_scale, b, b_scale, a_block, b_block, bias).to(BF16)
    adjacent = a_scale.T.contiguous().T  # rows adjacent, as the quantizer writes them for this kernel
    for scale in (a_scale, adjacent):
        assert torch.equal(emulator(name, a, scale, b, b_scale, a_block, b_block, bias), expected)


def test_rows_with_a_pitch_and_halves_of_a_tensor(emulator):
    torch.manual_seed(0)
    a, a_scale, b, b_scale = integers(70, 256, 512)
    wide = torch.cat([a.view(torch.uint8), torch.full((70, 512), 0x7F, dtype=torch.uint8)], 1).view(E4M3)
    expected = exact(a, a_scale, b, b_scale).to(BF16)
    assert torch.equal(emulator("prefill", wide[:, :512], a_scale, b, b_scale), expected)


@pytest.mark.parametrize("name", ["prefill", "decode32"])
def test_nan_and_infinite_scales_reach_their_own_rows_only(emulator, name):
    torch.manual_seed(0)
    a, a_scale, b, b_scale = integers(20, 256, 512)
    a_scale[3, 1], a_scale[5, 0], a_scale[19, 3] = float("nan"), float("inf"), float("nan")
    c = emulator(name, a, a_scale, b, b_scale, bias=None if name == "prefill" else torch.zeros(256, dtype=BF16))
    finite = torch.isfinite(c).all(1)
    assert finite.logical_not().nonzero().flatten().tolist() == [3, 5, 19]
    assert torch.equal(c[finite], exact(a, a_scale, b, b_scale)[finite].to(BF16))


# --- Plans and what is supported -------------------------------------------------------------------------------------

SIZES = [(4096, 4096), (8192, 8192), (28672, 4096), (4096, 14336), (14336, 4096), (1024, 4096), (576, 1536), (128, 16)]


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_every_plan_fits(n, k):
    parts = hopper.parts_of(n, k)
    for m in (1, 7, 16, 33, 64, 65, 96, 129, 160, 192, 200, 257, 1024, 4096):
        plan = hopper.plan_for(m, n, k, parts)
        shared = plan.shared_bytes(hopper.segment_of(k, parts))
        assert (shared + 1024) * plan.resident <= hopper.SM_SHARED
        few = isinstance(plan, Decode)
        cluster = parts if few else plan.cluster
        assert cluster <= 8 and plan.grid(m, n, parts if few else 132) % cluster == 0


def test_a_prompt_takes_wide_tiles_unless_square_ones_leave_less_to_the_busiest():
    assert hopper.plan_for(4096, 8192, 8192, 1) == hopper.PAIRED
    assert hopper.plan_for(4096, 8192, 8192, 1, settled=True) == replace(hopper.PAIRED, early=True)
    assert hopper.plan_for(4096, 28672, 4096, 1) == hopper.PAIRED  # 28 of 256 columns, or 55 of 128
    assert hopper.plan_for(512, 4096, 4096, 1) == hopper.SQUARE  # one of 128 columns, or one of 256
    assert hopper.plan_for(4096, 576, 1536, 2) == hopper.IN_PARTS


@pytest.mark.parametrize(
    ("m", "n", "k", "plan"),
    [
        (128, 28672, 4096, hopper.WIDE),  # one turn
        (129, 28672, 4096, Across(144, stages=5)),  # where it would be two
        (256, 28672, 4096, hopper.PAIRED),
        (129, 4096, 14336, Across(80, pair=True, stages=8)),  # tiles of 128 x 128 occupy half of the multiprocessors
        (256, 4096, 14336, hopper.decode_plan(256, 4096, 14336, 1, 128)),
        (128, 4096, 14336, hopper.decode_plan(128, 4096, 14336, 1)),
        (96, 6144, 4096, hopper.decode_plan(96, 6144, 4096, 1, 128)),
    ],
)
def test_some_tokens_take_the_tiles_of_least_time(m, n, k, plan):
    assert hopper.plan_for(m, n, k, 1) == plan
    early = hopper.plan_for(m, n, k, 1, settled=True)
    assert early.early and replace(early, early=0) == replace(plan, early=0)


@pytest.mark.parametrize(
    ("m", "n", "k", "columns", "early"),
    [
        (1, 4096, 4096, 64, 10),  # half as many thread blocks, and a third of K
        (8, 4096, 4096, 32, 8),  # a quarter of K
        (1, 4096, 8192, 32, 16),
        (8, 6144, 4096, 64, 12),  # more where a quarter of the multiprocessors is free
        (16, 4096, 4096, 64, 10),
        (1, 4096, 14336, 32, 16),
        (64, 8192, 8192, 64, 8),
        (8, 28672, 4096, 64, 4),  # two thread blocks a multiprocessor
        (1, 1024, 256, 16, 0),
    ],
)
def test_a_settled_weight_is_read_early_but_not_all_of_it(m, n, k, columns, early):
    plan = hopper.plan_for(m, n, k, 1, settled=True)
    assert (plan.columns, plan.early) == (columns, early)
    assert replace(plan, early=0) == hopper.plan_for(m, n, k, 1)


@pytest.mark.parametrize(
    ("m", "n", "k", "pairs", "late"),
    [
        (16, 4096, 4096, True, True),
        (32, 4096, 14336, False, False),  # K is long
        (64, 4096, 4096, True, True),
        (64, 8192, 8192, False, True),  # 32 sums a lane
        (16, 28672, 4096, False, False),  # two thread blocks a multiprocessor
    ],
)
def test_what_few_tokens_take_beside_their_tile(m, n, k, pairs, late):
    plan = hopper.plan_for(m, n, k, 1)
    assert (plan.pairs, plan.late) == (pairs, late)


@pytest.mark.parametrize("columns", [slice(1, 65), slice(0, 64, 2), slice(64, 128)])
def test_a_bias_is_copied_where_pairs_of_its_elements_cannot_be(columns):
    whole = torch.arange(128, dtype=torch.bfloat16)
    bias = hopper.aligned_bias(whole[columns])
    assert torch.equal(bias, whole[columns]) and bias.stride(0) == 1 and bias.data_ptr() % 4 == 0
    assert (bias.data_ptr() == whole[columns].data_ptr()) == (columns == slice(64, 128))


def test_what_it_does_not_take_is_named():
    a, a_scale, b, b_scale = integers(4, 128, 256)

    def why(
        a=a,
        a_scale=a_scale,
        b=b,
        b_scale=b_scale,
        a_block=(1, 128),
        b_block=(128, 128),
        out=BF16,
        bias=None,
        added=None,
    ):
        return hopper.unsupported(a, a_scale, b, b_scale, a_block, b_block, out, bias, added)

    assert why() is None
    assert "N of 8" in why(b=b[:100])
    assert "K must" in why(a=a[:, :200], b=b[:, :200])
    assert "a_block is (1, 32)" in why(a_block=(1, 32))
    assert "b_block is (64, 128)" in why(b_block=(64, 128))
    assert why(b_scale=torch.ones(128, 1), b_block=(1, 256)) is None  # covers K: a scale a row
    assert "must be float32 [4, 2]" in why(a_scale=a_scale[:, :1])
    assert "torch.float32" in why(out=torch.float32)
    assert "bias is" in why(bias=torch.zeros(4))
    assert "both must be" in why(a=a.to(BF16))
    added = torch.zeros(4, 136, dtype=BF16)
    assert why(added=added[:, :128]) is None
    for wrong in (added[:, 4:132], added[:, :128].half(), added.new_zeros(4, 129)[:, :128]):
        assert "up to 64 rows of it, of torch.bfloat16, aligned" in why(added=wrong)
    assert hopper._adds(64, 128, 32768) and not hopper._adds(64, 4096, 1 << 17) and not hopper._adds(0, 128, 256)
    many, many_scale, *_ = integers(65, 128, 256)
    assert "up to 64 rows" in why(a=many, a_scale=many_scale, added=added.new_zeros(65, 128))
    with pytest.raises(ValueError, match="use another backend"):
        hopper.gemm(a, a_scale, b[:100], b_scale, (1, 128), (128, 128), BF16)


# --- Compiled for sm_90a ---------------------------------------------------------------------------------------------


@few_or_every
def test_no_kernel_spills_or_serializes_its_products(compiled_cuda, chosen):
    kernels = dict.fromkeys(CASES.values())
    for n, k in ((8192, 8192), (1024, 4096)):
        parts = hopper.parts_of(n, k)
        for m in (64, 129, 257, 4096):
            kernels[hopper.plan_for(m, n, k, parts), parts, False, BF16, 0, m <= 64] = None
    ours = chosen(kernels, ("stages", "lag"))
    entries = "".join(hopper.entry(*kernel, name=f"gemm{i}") for i, kernel in enumerate(ours))
    made = compiled_cuda(hopper.device_functions() + entries)
    assert "warning" not in made.log and "C75" not in made.log, made.log  # C7510: products one after another
    assert made.stacks == made.spilled == [0] * len(ours), made.log


# --- On a GPU --------------------------------------------------------------------------------------------------------


def on_gpu(*operands):
    return [x.cuda() for x in operands]


@gpu
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1024, 4096), (264, 272), (8192, 1024)])
@pytest.mark.parametrize("m", [1, 3, 16, 63, 64, 65, 129, 192, 257, 1024])
def test_gpu_is_exact_on_integers_within_the_hardware_sum(m, n, k):
    a, a_scale, b, b_scale = on_gpu(*integers(m, n, k))
    c = hopper.gemm(a, a_scale, b, b_scale, (1, 128), (128, 128), FP16)
    assert torch.equal(c, exact(a, a_scale, b, b_scale).to(FP16))


@gpu
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1024, 4096), (384, 16384)])
def test_gpu_error_to_float64_with_outliers(n, k):
    a, a_scale, b, b_scale = on_gpu(*reals(256, n, k))
    c = hopper.gemm(a, a_scale, b, b_scale, (1, 128), (128, 128), BF16).double()
    expected = exact(a, a_scale, b, b_scale)
    assert ((c - expected).norm() / expected.norm()).item() <= 2e-3


@gpu
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1024, 4096), (28672, 1024)])
def test_gpu_rows_have_the_same_bits_in_any_batch(n, k):
    a, a_scale, b, b_scale = on_gpu(*reals(1024, n, k))
    whole = hopper.gemm(a, a_scale, b, b_scale, (1, 128), (128, 128), BF16)
    for m in (1, 3, 8, 16, 32, 64, 65, 128, 257, 512):
        assert torch.equal(hopper.gemm(a[:m], a_scale[:m], b, b_scale, (1, 128), (128, 128), BF16), whole[:m]), m


@gpu
@pytest.mark.parametrize("name", CASES)
def test_gpu_kernels_agree_with_the_exact_product(name):
    plan, parts, channel, out, _, *add = CASES[name]
    blocks = (1, 128), (1, 0) if channel else (128, 128)
    for m in (1, 63, 65, 300):
        operands, bias = integers(m, 520, 1040, *blocks), bias_of(name, 520)
        expected = exact(*operands, *blocks, bias).to(out)
        bias = bias if bias is None else bias.cuda()
        residual = torch.randn(m, 520).to(out).cuda() if add and m <= hopper.DECODE_ROWS else None
        c = hopper.gemm(*on_gpu(*operands), *blocks, out, bias, residual, plan=plan, parts=parts)
        assert torch.equal(c.cpu(), expected if residual is None else expected + residual.cpu())


@gpu
@pytest.mark.parametrize("m", [1, 33, 257, 1000])
def test_gpu_a_hundred_runs_give_the_same_bits(m):
    operands = on_gpu(*reals(m, 1024, 4096))
    first = hopper.gemm(*operands, (1, 128), (128, 128), BF16)
    for _ in range(100):
        assert torch.equal(hopper.gemm(*operands, (1, 128), (128, 128), BF16), first)


@gpu
@pytest.mark.parametrize(("settled", "overlap"), [(False, True), (False, False), (True, True)])
@pytest.mark.parametrize("m", [1, 64, 512, 1024])
def test_gpu_in_a_graph_and_overlapped_with_what_makes_its_operands(m, settled, overlap):
    a, a_scale, b, b_scale = on_gpu(*reals(m, 4096, 4096))
    expected = hopper.gemm(a, a_scale, b, b_scale, (1, 128), (128, 128), BF16)
    parts = hopper.parts_of(4096, 4096)
    plan = replace(hopper.plan_for(m, 4096, 4096, parts, settled), overlap=overlap)
    staged, graph = torch.empty_like(a), torch.cuda.CUDAGraph()

    def chain():
        staged.view(torch.uint8).copy_(a.view(torch.uint8))
        return [hopper.gemm(staged, a_scale, b, b_scale, (1, 128), (128, 128), BF16, plan=plan) for _ in range(3)]

    chain()
    with torch.cuda.graph(graph):
        results = chain()
    for _ in range(20):
        staged.view(torch.uint8).zero_()
        graph.replay()
        assert all(torch.equal(c, expected) for c in results)


@gpu
@pytest.mark.parametrize("m", [1, 16, 33, 64])
def test_gpu_each_of_a_chain_that_starts_early_reads_what_those_before_wrote(m):
    weights = [(on_gpu(*reals(m, 4096, 4096)[2:])) for _ in range(4)]
    x = torch.randn(m, 4096, device="cuda", dtype=BF16)

    def chain(between=lambda: None):
        y = x
        for b, b_scale in weights:
            codes = quantize_fp8_block(y, (1, 128), transposed_scale=True)
            between()
            y = fp8_block_gemm(*codes, b, b_scale, backend="hopper", b_settled=True)
            between()
        return y

    expected, graph = chain(torch.cuda.synchronize), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    for _ in range(20):
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected)
