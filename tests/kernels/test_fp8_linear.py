"""The product that quantizes its tokens has the two operators' bits: emulated, compiled for sm_90a, run on a GPU."""

import ctypes
from functools import partial

import pytest
import torch

from quantrot.kernels import nvrtc
from quantrot.kernels.fp8 import fp8_block_gemm, fp8_linear, fused, hopper, linear, quantize_fp8_block
from quantrot.kernels.fp8.linear import Held, Work
from quantrot.kernels.fp8.reference import gate as gated
from quantrot.kernels.fp8.reference import gemm_reference, quantize_reference, rms_norm
from tests.kernels.covering import few_or_every

gpu = pytest.mark.gpu
BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
INF, NAN = float("inf"), float("nan")
EPSILON = 1e-9  # 1 + EPSILON is 1

# every branch of the source
CASES = {
    "plain": (Held(stages=4, pairs=True), Work(rule="exact")),
    "narrow": (Held(columns=16, stages=5, early=5, together=8), Work(bias=2)),
    "early": (
        Held(columns=32, stages=6, early=2, together=2, pairs=True, late=True),
        Work(dtype=FP16, bias=4, rule="exact"),
    ),
    "wide": (Held(columns=128, stages=3, early=3), Work(channel=True, rule="exact")),
    "parts": (Held(columns=64, stages=2, together=2), Work(parts=2, bias=4, add=True, rule="exact")),
    "added": (Held(columns=32, stages=3, early=3, together=2), Work(rule="pow2", add=True)),
    "gates": (Held(columns=32, stages=3, early=2), Work(gates=True, rule="exact")),
    "gates_half": (Held(columns=64, stages=3, together=2), Work(gates=True, parts=2, bias=2)),
    "gates_wide": (Held(columns=128, stages=3, together=2), Work(gates=True, bias=4, rule="pow2")),
    "gates_normed": (
        Held(columns=128, stages=4, early=4, together=8, resident=1),
        Work(gates=True, norm=True, rule="exact"),
    ),
    "normed": (Held(columns=128, stages=3, early=3, together=8, resident=1), Work(norm=True)),
    "normed_half": (
        Held(columns=128, stages=3, together=8, resident=1),
        Work(norm=True, dtype=FP16, add=True, rule="exact"),
    ),
}
PAIR = (hopper.Decode(8, columns=32, stages=4), 1)  # the product of the two operators
DRIVER = """
static std::string message;

extern "C" const char* product(const unsigned long long* a, const unsigned long long* b, const quantrot::GemmArgs* args,
                               int blocks, int threads, int shared) {
  const quantrot::TensorMap ma{(unsigned char*)a[0], a[2], a[1], a[2], 128, (unsigned)args->box, 1, 1};
  const quantrot::TensorMap mb{(unsigned char*)b[0], b[2], b[1], b[2], 128, 32, 1, 1};
  message = emulator::launch({(unsigned)blocks, 1, 1}, 1, threads, shared, 0, [&] { gemm(ma, mb, ma, *args); });
  return message.c_str();
}

extern "C" const char* run(int which, unsigned char* b, unsigned rows, unsigned columns, unsigned box,
                           const quantrot::GemmArgs* args, const quantrot::Tokens* tokens, int blocks, int cluster,
                           int threads, int shared, int seed) {
  using Kernel = void(quantrot::TensorMap, quantrot::GemmArgs, quantrot::Tokens);
  static Kernel* const kernels[] = {NAMES};
  const quantrot::TensorMap map{b, columns, rows, columns, 128, box, 1, 1};
  message = emulator::launch({(unsigned)blocks, 1, 1}, cluster, threads, shared, seed,
                             [&] { kernels[which](map, *args, *tokens); });
  return message.c_str();
}
"""


@pytest.fixture(scope="module")
def emulator(emulated):
    """Every case's kernel on the host: emulator(case, x, b, b_scale, bias, seed) -> c."""
    return built(emulated, CASES)


def built(emulated, names, edited=str):
    """What `emulator` is, of these cases, of device functions as `edited` leaves them."""
    libraries = {}
    for rule in sorted({CASES[name][1].rule for name in names}):
        cases = {name: CASES[name] for name in names if CASES[name][1].rule == rule}
        entries = "".join(plan.entry(work, f"linear_{name}") for name, (plan, work) in cases.items())
        entries += hopper.entry(*PAIR, channel=False, out=BF16, bias=0)
        driver = DRIVER.replace("NAMES", ", ".join(f"linear_{name}" for name in cases))
        library = emulated(edited(linear.device_functions(rule)) + entries + driver)
        library.run.restype = library.product.restype = ctypes.c_char_p
        libraries |= {name: (library, i, rule) for i, name in enumerate(cases)}

    def run(name, x, b, b_scale, bias=None, seed=0, norm=None, residual=None):
        plan, work = CASES[name]
        library, which, _ = libraries[name]
        (n, k), m, parts = b.shape, x.shape[0], work.parts
        b_block = (1, 0) if work.channel else (128, 128)
        reason = linear.unsupported(x, b, b_scale, b_block, bias, norm, residual)  # but gates: N
        assert reason is None or "takes up to" in reason  # by the rule, whose plans these are not
        assert (residual is not None) == work.add and (norm is not None) == work.norm
        c = torch.full((m, n // (1 + work.gates)), NAN, dtype=work.dtype)
        args, tokens = linear.arguments(x, b, b_scale, c, b_block, bias, parts, norm, EPSILON, residual)
        assert norm is None or plan.holds_all(hopper.segment_of(k, parts), m)
        shared = plan.held_bytes(hopper.segment_of(k, parts), m, work.norm, work.gates)
        assert shared <= hopper.MAX_SHARED
        message = library.run(
            which, ctypes.c_void_p(b.data_ptr()), n, k, plan.columns // (1 + work.gates),
            ctypes.byref(args), ctypes.byref(tokens), plan.grid(m, n, parts), parts, plan.threads, shared, seed,
        )  # fmt: skip
        assert message == b"", message.decode()
        return c

    def product(a, a_scale, b, b_scale):
        """The product of codes, as fp8_block_gemm's kernel for few tokens has it."""
        (m, k), n = a.shape, b.shape[0]
        c = torch.empty(m, n, dtype=BF16)
        args = hopper.arguments(a, a_scale, b, b_scale, c, (1, 128), (128, 128), None, *PAIR)
        maps = [(ctypes.c_ulonglong * 3)(x.data_ptr(), *x.shape) for x in (a, b)]
        plan = PAIR[0]
        shared = plan.shared_bytes(hopper.segment_of(k, 1))
        library = next(iter(libraries.values()))[0]
        assert library.product(*maps, ctypes.byref(args), plan.grid(m, n, 1), plan.threads, shared) == b""
        return c

    run.product = product
    return run


def special_tokens(m: int, k: int, dtype) -> torch.Tensor:
    """Blocks of zeros, of a NaN, of infinities, of numbers so small that their scales are lifted, of ties."""
    x = torch.randn(m, k) * 2.0 ** torch.randint(-6, 6, (m, k))
    x[:, :128] = 0
    x[0, 5] = -0.0
    x[:, 128:256] *= 2.0 ** (-120 if dtype == BF16 else -20)
    x[:, 256:384] = torch.randint(-448, 449, (m, 128)).float()
    x[:, 256] = 448
    if m > 1:
        x[1, 130], x[m - 1, 400] = INF, NAN
    return x.to(dtype)


def weight(n: int, k: int, channel: bool):
    """e4m3 [N, K] of small integers, scales that are powers of two."""
    codes = torch.randint(-4, 5, (n, k)).float().to(E4M3)
    shape = (n, 1) if channel else (-(-n // 128), -(-k // 128))
    return codes, torch.randint(-2, 2, shape).float().exp2()


def whole_tiles(n: int, plan: Held, work: Work) -> int:
    """N of which gates take whole tiles."""
    return -(-n // plan.columns) * plan.columns if work.gates else n


def integers(m: int, k: int, work: Work):
    """x and norm, whose codes are integers and whose scales are powers of two under every rule; the quantized x."""
    x = torch.randint(-7, 8, (m, k)).float() * 64
    x[:, ::128] = 448
    if work.norm:  # of signs, whose mean square is 1
        norm = x[0].to(work.dtype)
        x = (torch.randint(0, 2, (m, k)) * 2 - 1).to(work.dtype)
        return x, norm, x * norm
    x = (x * 2.0 ** torch.randint(-2, 3, (m, 1))).to(work.dtype)
    return x, None, x


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 128, 512), (3, 264, 272), (8, 136, 1168)])
def test_every_kernel_is_exact_on_codes_of_integers(emulator, name, m, n, k):
    plan, work = CASES[name]
    n = whole_tiles(n, plan, work)
    torch.manual_seed(m)
    b, b_scale = weight(n, k, work.channel)
    x, norm, before = integers(m, k, work)
    bias = torch.randint(-8, 9, (n,)).to(torch.float32 if work.bias == 4 else work.dtype) if work.bias else None
    residual = torch.randn(m, n).to(work.dtype) if work.add else None
    q, scale = quantize_reference(before, (1, 128), work.rule)
    b_block = (1, 0) if work.channel else (128, 128)
    expected = gemm_reference(q, scale, b, b_scale, (1, 128), b_block, torch.float64, bias).to(work.dtype)
    expected = gated(expected) if work.gates else expected if residual is None else expected + residual
    for seed in range(3):
        assert torch.equal(emulator(name, x, b, b_scale, bias, seed, norm, residual), expected)


def test_a_norm_is_read_before_the_kernel_in_front_has_ended_only_where_a_weight_is(emulated, loads_that_wait):
    """That is where both are settled."""
    run = built(emulated, ("normed", "normed_half"), loads_that_wait)
    b, b_scale = weight(40, 512, False)
    for name, settled in (("normed", True), ("normed_half", False)):
        work = CASES[name][1]
        x, norm, _ = integers(1, 512, work)
        call = partial(run, name, x, b, b_scale, norm=norm, residual=torch.zeros(1, 40).to(FP16) if work.add else None)
        if settled:
            with pytest.raises(AssertionError, match="before grid_wait"):
                call()
        else:
            assert call().isfinite().all()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, any NaN being as good as another."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


COMPARED = [name for name, (_, w) in CASES.items() if (w.dtype, w.channel, w.parts) == (BF16, False, 1)]


@pytest.mark.parametrize("name", COMPARED)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 136, 656), (5, 64, 1296), (8, 264, 528)])
def test_the_bits_are_those_of_the_two_operators(emulator, name, m, n, k):
    plan, work = CASES[name]
    torch.manual_seed(m)
    n = whole_tiles(n, plan, work)
    b, b_scale = weight(n, k, False)
    b_scale, x, norm = torch.rand(b_scale.shape) + 0.5, special_tokens(m, k, BF16), None
    if work.gates:  # neither all nor nothing
        b_scale /= 4096
    if work.norm:  # a mean square of 4 at most, so that factors are close
        x, norm = x.nan_to_num(1, 1, 1).clamp(-2, 2), torch.randn(k).to(BF16)
    before = x if norm is None else rms_norm(x, norm, EPSILON)
    wide = torch.cat([x, torch.full((m, 16), NAN, dtype=BF16)], 1)[:, : x.shape[1]]
    expected = emulator.product(*quantize_reference(before, (1, 128), work.rule), b, b_scale)
    bias = torch.zeros(n, dtype=BF16 if work.bias == 2 else torch.float32) if work.bias else None
    residual = torch.randn(m, n + 8).to(BF16)[:, :n] if work.add else None
    expected = gated(expected) if work.gates else expected if residual is None else expected + residual
    for seed in range(3):
        got = emulator(name, wide, b, b_scale, bias, seed, norm, residual)
        if work.gates:  # the host's exp and torch's differ in the last bit, which few roundings to 16 bits see
            assert (got != expected).logical_and(~expected.isnan()).float().mean() < 0.01
        if norm is None and not work.gates:
            assert same(got, expected)
        else:  # the sum of squares has another order, so that a few numbers are rounded to their neighbours
            assert same(got.isnan(), expected.isnan())
            y, want = got.nan_to_num(0, 0, 0), expected.nan_to_num(0, 0, 0)
            assert (y - want).norm() <= 4e-3 * want.norm()


def test_a_normed_row_has_the_same_bits_alone_and_in_any_batch(emulator):
    torch.manual_seed(0)
    (b, b_scale), x, norm = weight(64, 1168, False), torch.randn(8, 1168).to(BF16), torch.randn(1168).to(BF16)
    whole = emulator("normed", x, b, b_scale, norm=norm)
    for rows in (slice(0, 1), slice(3, 4), slice(1, 6)):
        assert torch.equal(emulator("normed", x[rows], b, b_scale, norm=norm), whole[rows])


@pytest.mark.parametrize(("norm", "gates"), [(False, False), (True, False), (True, True)])
def test_every_plan_fits_and_is_of_few_tokens(norm, gates):
    for n, k in ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (1024, 4096), (128, 16)):
        parts = hopper.parts_of(n, k)
        for m in range(1, linear.FEW + 1):
            plan, segment = linear.plan_for(m, n, k, parts, norm, gates, True), hopper.segment_of(k, parts)
            if not norm:
                assert (plan is None) == (m * k > linear.MOST)
            if plan is not None:
                shared = plan.held_bytes(segment, m, norm, gates)
                assert (shared + 1024) * plan.resident <= hopper.SM_SHARED and shared <= hopper.MAX_SHARED
                assert plan.stages >= 8 and plan.threads * plan.resident <= 1024
                assert plan.columns >= (32 if gates else 16)
                assert min(1, segment // 4) <= plan.early <= min(plan.stages, segment // 4)  # a quarter of K at most
                assert plan.early * plan.columns * plan.resident <= 512
                assert linear.plan_for(m, n, k, parts, norm, gates).early == 0
                assert not norm or plan.holds_all(segment, m)
        assert linear.plan_for(linear.FEW + 1, n, k, parts, norm, gates) is None
    if norm:
        assert linear.plan_for(1, 6144, 4096, 1, norm, gates) and linear.plan_for(1, 28672, 4096, 1, norm, gates)


def test_what_it_does_not_take_is_named():
    x, (b, b_scale) = torch.zeros(2, 256, dtype=BF16), weight(128, 256, False)

    def why(x=x, b=b, b_scale=b_scale, block=(128, 128), bias=None, **rest):
        return linear.unsupported(x, b, b_scale, block, bias, **rest)

    assert why() is None
    assert "x is torch.float32" in why(x.float())
    assert "N of 8" in why(b=b[:100])
    assert "x is [2, 512]" in why(torch.cat([x, x], 1))
    assert why(gates=True) is None and "N a multiple of 128" in why(b=b[:64], gates=True)
    assert "no residual" in why(residual=x[:, :128], gates=True)
    assert "aligned" in why(torch.zeros(2, 257, dtype=BF16)[:, 1:])
    assert "takes up to 2 tokens" in why(torch.zeros(3, 256, dtype=BF16))
    assert "and 14336 elements" in why(torch.zeros(1, 14464, dtype=BF16), torch.zeros(128, 14464).to(E4M3))
    assert "b_scale is" in why(b_scale=b_scale[:, :1])
    assert "b_block is (64, 128)" in why(block=(64, 128))
    assert "bias is" in why(bias=torch.zeros(4))
    with pytest.raises(ValueError, match="use another backend"):
        linear.linear(x.float(), b, b_scale, (128, 128), "exact")


def test_which_linears_take_what_is_around_them(monkeypatch):
    device = torch.device("cuda")
    monkeypatch.setattr(fused, "has_kernels", lambda device: True)
    monkeypatch.setattr(nvrtc, "available", lambda device: True)
    assert all(fused.has_fused(1, *size, device) for size in ((28672, 4096), (4096, 14336), (8192, 8192)))
    assert not any(fused.has_fused(1, *size, device) for size in ((8192, 28672), (100, 4096), (128, 24)))
    assert all(fused.has_fused(m, *size, device) for m in (2, 64) for size in ((28672, 4096), (8192, 28672), (8, 16)))
    assert not any(fused.has_fused(8, *size, device) for size in ((100, 4096), (128, 24), (4096, 1 << 16)))
    assert not any(fused.has_fused(m, 4096, 4096, device) for m in (0, 65))


# --- The operator ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, BF16, FP16], ids=str)
@pytest.mark.parametrize(
    ("m", "block", "rule"), [(1, (128, 128), "exact"), (9, (1, 0), "bf16"), (0, (128, 128), "pow2")]
)
def test_the_operator_is_the_two(m, block, rule, dtype):
    torch.manual_seed(0)
    b, b_scale = weight(136, 528, block == (1, 0))
    x, bias = torch.randn(m, 528).to(dtype), torch.randn(136).to(dtype)
    q, scale = quantize_fp8_block(x, (1, 128), rule)
    expected = fp8_block_gemm(q, scale, b, b_scale, b_block=block, out_dtype=dtype, bias=bias)
    one = partial(fp8_linear, b=b, b_scale=b_scale, b_block=block, scale_rule=rule, bias=bias)
    y = one(x)
    assert y.dtype == dtype and y.shape == (m, 136) and torch.equal(y, expected)
    assert torch.equal(one(x, gates=True), gated(expected))
    residual, norm = torch.randn(m, 136).to(dtype), torch.randn(528).to(dtype)
    assert torch.equal(one(x, residual=residual), expected + residual)
    before = norm * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 0.1)).to(dtype)
    assert torch.equal(one(x, norm=norm, epsilon=0.1), one(before))


@pytest.mark.parametrize("dtype", [torch.float32, BF16, FP16], ids=str)
@pytest.mark.parametrize(("m", "rule"), [(1, "exact"), (9, "bf16"), (0, "pow2")])
def test_gated_codes_are_those_of_the_gated_tensor(m, rule, dtype):
    x = torch.randn(m, 1056).to(dtype)
    want = quantize_fp8_block(gated(x), (1, 128), rule)
    got = quantize_fp8_block(x, (1, 128), rule, gated=True, transposed_scale=True)
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8)) and torch.equal(got[1], want[1])
    assert got[1].stride() == (1, m) or m < 2
    with pytest.raises(ValueError, match="255 columns"):
        quantize_fp8_block(x[:, :255], (1, 128), gated=True)


@pytest.mark.parametrize("gates", [False, True])
def test_it_is_an_operator_for_torch(gates):
    (b, b_scale), x = weight(136, 528, False), torch.randn(3, 528).to(BF16)
    args = (x, b, b_scale, [128, 128], "bf16", None, "auto", True, None, 0.0, None, gates)
    checks = ("test_faketensor", "test_autograd_registration")  # the schema's check multiplies what it is given
    torch.library.opcheck(torch.ops.quantrot.fp8_linear.default, args, test_utils=checks)
    torch.library.opcheck(torch.ops.quantrot.quantize_fp8_block.default, (x, 1, 128, "bf16", True, "auto", gates))
    compiled = torch.compile(lambda x: fp8_linear(x, b, b_scale, gates=gates), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), fp8_linear(x, b, b_scale, gates=gates))
    wanted = x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="no gradient"):
        fp8_linear(wanted, b, b_scale, gates=gates).sum().backward()


def test_errors_say_what_is_allowed():
    x, (b, b_scale) = torch.zeros(4, 256, dtype=BF16), weight(128, 256, False)
    for message, change in {
        "takes \\[M, K\\]": {"x": x[0]},
        "dtype torch.int32": {"x": x.int()},
        "b: torch.float32": {"b": b.float()},
        "it must be .*N, 128": {"x": x[:, :128]},
        "b_scale: ": {"b_scale": b_scale[:, :1]},
        r"bias: torch.float32 \[4\]; allowed: \[128\]": {"bias": torch.zeros(4)},
        "norm: torch.float32 .256. on cpu; allowed: torch.bfloat16": {"norm": torch.zeros(256)},
        "residual: .*allowed: torch.bfloat16 .4, 128.": {"residual": torch.zeros(3, 128, dtype=BF16)},
        "and no residual": {"gates": True, "residual": torch.zeros(4, 128, dtype=BF16)},
        "backend: 'triton'; allowed: auto, hopper, reference": {"backend": "triton"},
        "'hopper' needs": {"backend": "hopper"},
        "scale_rule": {"scale_rule": "up"},
    }.items():
        with pytest.raises(ValueError, match=message):
            fp8_linear(**({"x": x, "b": b, "b_scale": b_scale} | change))


# --- Compiled for sm_90a ---------------------------------------------------------------------------------------------


@few_or_every
def test_no_kernel_spills_or_serializes_its_products(compiled_cuda, chosen):
    works = {
        (1, 6144, 4096): Work(norm=True),
        (1, 4096, 4096): Work(add=True),
        (1, 28672, 4096): Work(norm=True, gates=True),
        (1, 4096, 14336): Work(add=True),
        (2, 28672, 4096): Work(),
    }
    plans = [(linear.plan_for(*size, 1, work.norm, work.gates, True), work) for size, work in works.items()]
    kernels = chosen(plans + list(CASES.values()), ("stages", "early"))
    entries = "".join(plan.entry(work, f"linear{i}") for i, (plan, work) in enumerate(kernels))
    made = compiled_cuda(linear.device_functions("bf16") + entries)
    assert "warning" not in made.log and "C75" not in made.log, made.log  # C7510: products one after another
    assert made.stacks == made.spilled == [0] * len(kernels), made.log


# --- On a GPU --------------------------------------------------------------------------------------------------------

SIZES = [
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (8192, 8192),
    (1024, 4096),
    (264, 4480),
    (96, 4096 + 384),
]


def two(x, b, b_scale, rule="bf16", gates=False):
    """The two operators, the gate by torch."""
    q, scale = quantize_fp8_block(x, (1, 128), rule, transposed_scale=True)
    y = fp8_block_gemm(q, scale, b, b_scale, out_dtype=x.dtype, backend="hopper")
    return gated(y) if gates else y


def random_weight(n: int, k: int):
    return quantize_fp8_block(torch.randn(n, k, device="cuda").bfloat16(), (128, 128), "bf16")


@gpu
@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_gpu_bits_are_those_of_the_two_operators(n, k, gates):
    b, b_scale = random_weight(n, k)
    for m in (1, 2, 5):
        x = torch.randn(m, k, device="cuda").bfloat16()
        fits = linear.plan_for(m, n, k, hopper.parts_of(n, k), gates=gates) and not (gates and n % 128)
        for settled in (False, True):
            arguments = {"gates": gates, "backend": "hopper" if fits else "auto", "b_settled": settled}
            assert torch.equal(fp8_linear(x, b, b_scale, **arguments), two(x, b, b_scale, gates=gates)), m


@gpu
@pytest.mark.parametrize(("dtype", "rule"), [(BF16, "bf16"), (BF16, "exact"), (FP16, "pow2")], ids=str)
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (264, 4480)])
def test_gpu_special_blocks_have_the_two_operators_bits(n, k, dtype, rule):
    b, b_scale = random_weight(n, k)
    for m in (1, 2):
        for _ in range(3):
            x = special_tokens(m, k, dtype).cuda()
            assert same(fp8_linear(x, b, b_scale, scale_rule=rule, backend="hopper"), two(x, b, b_scale, rule)), m


@gpu
@pytest.mark.parametrize("name", CASES)
def test_gpu_every_kernel(name):
    plan, work = CASES[name]
    block = (1, 0) if work.channel else (128, 128)
    for m, n, k in ((1, 520, 1040), (3, 264, 2048), (8, 128, 1168)):
        n = -(-n // 128) * 128 if work.gates else n
        b, b_scale = (t.cuda() for t in weight(n, k, work.channel))
        x = torch.randn(m, k, device="cuda").to(work.dtype)
        norm = torch.randn(k, device="cuda").to(work.dtype) if work.norm else None
        bias_dtype = torch.float32 if work.bias == 4 else work.dtype
        bias = torch.randn(n, device="cuda").to(bias_dtype) if work.bias else None
        residual = torch.randn(m, n, device="cuda").to(work.dtype) if work.add else None
        before = x if norm is None else rms_norm(x, norm, 1e-5)
        q, scale = quantize_fp8_block(before, (1, 128), work.rule)
        decode = hopper.decode_plan(m, n, k, work.parts)
        expected = hopper.gemm(q, scale, b, b_scale, (1, 128), block, work.dtype, bias, plan=decode, parts=work.parts)
        expected = gated(expected) if work.gates else expected if residual is None else expected + residual
        arguments = (x, b, b_scale, block, work.rule, bias, norm, 1e-5, residual, work.gates)
        y = linear.linear(*arguments, plan=plan, parts=work.parts)
        if norm is None:
            assert torch.equal(y, expected)
        else:
            assert (y.float() - expected.float()).norm() <= 4e-3 * expected.float().norm()


@gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_gpu_gates_every_number_as_torch_does(dtype):
    """All 65536 gates, times one: each alone in a block, whose scale has all bits of the result, and side by side."""
    gates = torch.arange(-32768, 32768, dtype=torch.int16, device="cuda").view(dtype)
    alone = torch.zeros(65536, 128, dtype=dtype, device="cuda")
    alone[:, 0] = gates
    for gate in (alone, gates.view(512, 128)):
        x = torch.cat([gate, torch.ones_like(gate)], 1)
        want = quantize_fp8_block(gated(x), (1, 128), "exact")
        got = quantize_fp8_block(x, (1, 128), "exact", gated=True)
        assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
        assert same(got[1], want[1])


@gpu
@pytest.mark.parametrize(("rows", "columns"), [(1, 4096), (300, 1040), (2048, 14336)])
def test_gpu_gated_codes_are_those_of_the_gated_tensor(rows, columns):
    x = torch.randn(rows, 2 * columns, device="cuda").bfloat16()
    want, got = quantize_fp8_block(gated(x), (1, 128)), quantize_fp8_block(x, (1, 128), gated=True)
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8)) and torch.equal(got[1], want[1])


@gpu
@pytest.mark.parametrize("m", [1, 2])
def test_gpu_a_hundred_runs_give_the_same_bits(m):
    b, b_scale = random_weight(4096, 4096)
    x, norm = torch.randn(m, 4096, device="cuda").bfloat16(), torch.randn(4096, device="cuda").bfloat16()
    for rest in ({"gates": True, "norm": norm if m == 1 else None}, {"residual": x}):
        first = fp8_linear(x, b, b_scale, backend="hopper", b_settled=True, **rest)
        for _ in range(100):
            assert torch.equal(fp8_linear(x, b, b_scale, backend="hopper", b_settled=True, **rest), first)


@gpu
@pytest.mark.parametrize("settled", [False, True])
def test_gpu_a_chain_in_a_graph(settled):
    """Each reads what the kernel before has just written, into memory that the one before that has read."""
    layers = [(random_weight(8192, 4096), random_weight(4096, 4096)) for _ in range(3)]
    x, graph = torch.randn(1, 4096, device="cuda").bfloat16(), torch.cuda.CUDAGraph()

    def chain(multiply):
        y = x
        for up, down in layers:
            y = multiply(multiply(y, *up, gates=True), *down)
        return y

    def one(y, b, b_scale, gates=False):
        return fp8_linear(y, b, b_scale, gates=gates, backend="hopper", b_settled=settled)

    expected = chain(two)
    chain(one)
    with torch.cuda.graph(graph):
        y = chain(one)
    for _ in range(20):
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected)


@gpu
def test_a_norm_that_the_kernel_before_writes_is_waited_for():
    """It fills the multiprocessors and lets the next kernel start at once."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    (wide, wide_scale), (b, b_scale) = ((t.cuda() for t in weight(4096, k, False)) for k in (8192, 4096))
    x = torch.randn(1, 4096, device="cuda").to(BF16)
    for _ in range(50):
        before = torch.randn(1, 8192, device="cuda").to(BF16)
        torch.cuda._sleep(1_000_000)
        norm = fp8_linear(before, wide, wide_scale)[0]
        y = fp8_linear(x, b, b_scale, norm=norm, epsilon=1e-5)
        torch.cuda.synchronize()
        assert torch.equal(y, fp8_linear(x, b, b_scale, norm=norm, epsilon=1e-5))


@gpu
@pytest.mark.parametrize("tokens", [2, 3, 8, 17, 32, 64])
@pytest.mark.parametrize("front", ["norm", "gated", "none"])
@pytest.mark.parametrize("shape", [(48, 128), (1000, 1152), (1024, 4096), (28672, 4096), (4096, 14336), (8192, 8192)])
def test_gpu_several_tokens_with_what_a_layer_has_around_them(tokens, front, shape):
    """The bits of the operations one by one where the squares' sum is exact; again and in a graph the same."""
    n, k = shape
    b = quantize_fp8_block(torch.randn(n, k, device="cuda"), (128, 128))
    x = torch.randn(tokens, k * (1 + (front == "gated")), device="cuda").to(BF16)
    norm = torch.randn(k, device="cuda").to(BF16) if front == "norm" else None
    residual = torch.randn(tokens, n + 8, device="cuda").to(BF16)[:, :n]
    if front == "norm":
        x = x.sign() + (x == 0)
    inner = gated(x) if front == "gated" else x if norm is None else rms_norm(x, norm, EPSILON)
    expected = fp8_block_gemm(*quantize_fp8_block(inner, (1, 128), transposed_scale=True), *b) + residual
    around = {"norm": norm, "epsilon": EPSILON, "gated": front == "gated", "residual": residual}
    for settled in (False, True):
        call = partial(fp8_linear, x, *b, **around, b_settled=settled)
        graph = torch.cuda.CUDAGraph()
        results = [call()]
        with torch.cuda.graph(graph):
            results += [call() for _ in range(4)]
        graph.replay()
        assert all(torch.equal(y, expected) for y in results)


@gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_gpu_a_token_behind_a_norm_has_the_same_bits_alone_and_among_others(dtype):
    b = quantize_fp8_block(torch.randn(1024, 4096, device="cuda"), (128, 128))
    big = quantize_fp8_block(torch.randn(28672, 4096, device="cuda"), (128, 128))
    x, norm = torch.randn(64, 4096, device="cuda").to(dtype), torch.randn(4096, device="cuda").to(dtype)
    for weight in (b, big):
        whole = fp8_linear(x, *weight, norm=norm, epsilon=1e-5)
        for rows in (slice(0, 1), slice(5, 6), slice(7, 9), slice(20, 40)):
            assert torch.equal(fp8_linear(x[rows], *weight, norm=norm, epsilon=1e-5), whole[rows])


AROUND_SANITIZED = """
import torch
from quantrot.kernels.fp8 import fp8_linear, quantize_fp8_block
b = quantize_fp8_block(torch.randn(1000, 1152, device="cuda"), (128, 128))
norm = torch.ones(1152, device="cuda", dtype=torch.bfloat16)
for tokens in (2, 9, 33, 64):
    x = torch.randn(tokens, 2304, device="cuda", dtype=torch.bfloat16)
    residual = torch.randn(tokens, 1000, device="cuda", dtype=torch.bfloat16)
    fp8_linear(x, *b, gated=True, residual=residual)
    fp8_linear(x[:, :1152], *b, norm=norm, epsilon=1e-5, residual=residual)
torch.cuda.synchronize()
"""


@gpu
def test_the_sanitizer_finds_nothing_around_several_tokens(sanitized):
    sanitized(AROUND_SANITIZED)
