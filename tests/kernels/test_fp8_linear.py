"""The product that quantizes its tokens has the two operators' bits: emulated, compiled for sm_90a, run on a GPU."""

import ctypes
import shutil
import subprocess

import pytest
import torch

from quantrot.kernels.fp8 import fp8_block_gemm, fp8_linear, hopper, linear, quantize_fp8_block
from quantrot.kernels.fp8.linear import Held
from quantrot.kernels.fp8.reference import gate as gated
from quantrot.kernels.fp8.reference import gemm_reference, quantize_reference

gpu = pytest.mark.gpu
BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
INF, NAN = float("inf"), float("nan")

# plan, parts, gated, dtype, a scale of b a row, bytes of a bias element: every branch of the source
CASES = {
    "plain": (Held(stages=4), 1, False, BF16, False, 0),
    "narrow": (Held(columns=16, stages=5, early=5, together=8), 1, False, BF16, False, 2),
    "early": (Held(columns=32, stages=6, early=2, together=2), 1, False, FP16, False, 4),
    "wide": (Held(columns=128, stages=3, early=3), 1, False, BF16, True, 0),
    "parts": (Held(columns=64, stages=2, together=2), 2, False, BF16, False, 4),
    "helped": (Held(columns=32, stages=3, helpers=1, early=3, together=2), 1, False, BF16, False, 0),
    "one": (Held(one=True, columns=32, stages=4, early=4, together=2), 1, False, BF16, False, 0),
    "gated_one": (
        Held(one=True, columns=32, stages=3, helpers=1, early=3, together=8, resident=1),
        1,
        True,
        BF16,
        False,
        0,
    ),
    "gated": (Held(columns=32, stages=3, helpers=1, resident=1), 1, True, BF16, False, 0),
    "gated_half": (Held(columns=64, stages=3, early=2), 2, True, FP16, False, 0),
}
RULES = {"plain": "exact", "narrow": "bf16", "helped": "pow2"}
PAIR = (hopper.Decode(8, columns=32, stages=4), 1)  # the product of the two operators
DRIVER = """
static std::string message;

extern "C" const char* product(const unsigned long long* a, const unsigned long long* b, const quantrot::GemmArgs* args,
                               int blocks, int threads, int shared) {
  const quantrot::TensorMap ma{(unsigned char*)a[0], a[2], a[1], a[2], 128, 8, 1, 1};
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
    libraries = {}
    for rule in ("exact", "bf16", "pow2"):
        cases = {name: case for name, case in CASES.items() if RULES.get(name, "exact") == rule}
        entries = "".join(plan.entry(*others, name=f"linear_{name}") for name, (plan, *others) in cases.items())
        names = ", ".join(f"linear_{name}" for name in cases)
        entries += hopper.entry(*PAIR, channel=False, out=BF16, bias=0)
        library = emulated(linear.device_functions(rule) + entries + DRIVER.replace("NAMES", names))
        library.run.restype = library.product.restype = ctypes.c_char_p
        libraries |= {name: (library, i, rule) for i, name in enumerate(cases)}

    def run(name, x, b, b_scale, bias=None, seed=0):
        plan, parts, gated, dtype, channel, _ = CASES[name]
        library, which, _ = libraries[name]
        (n, k), m = b.shape, x.shape[0]
        b_block = (1, 0) if channel else (128, 128)
        assert linear.unsupported(x, b, b_scale, b_block, gated, bias) is None
        c = torch.full((m, n), NAN, dtype=dtype)
        args, tokens = linear.arguments(x, b, b_scale, c, b_block, bias, parts)
        shared = plan.held_bytes(hopper.segment_of(k, parts), m)
        assert shared <= hopper.MAX_SHARED
        message = library.run(
            which, ctypes.c_void_p(b.data_ptr()), n, k, plan.columns, ctypes.byref(args), ctypes.byref(tokens),
            plan.grid(m, n, parts), parts, plan.threads, shared, seed,
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


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case[2]])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 128, 512), (3, 264, 272), (8, 136, 1168)])
def test_every_kernel_is_exact_on_codes_of_integers(emulator, name, m, n, k):
    """amax = 448 * 2^i: the scale is a power of two under every rule."""
    _, parts, _, dtype, channel, size = CASES[name]
    torch.manual_seed(m)
    b, b_scale = weight(n, k, channel)
    x = torch.randint(-7, 8, (m, k)).float() * 64
    x[:, ::128] = 448
    x = (x * 2.0 ** torch.randint(-2, 3, (m, 1))).to(dtype)
    bias = torch.randint(-8, 9, (n,)).to(torch.float32 if size == 4 else dtype) if size else None
    q, scale = quantize_reference(x, (1, 128), RULES.get(name, "exact"))
    expected = gemm_reference(
        q, scale, b, b_scale, (1, 128), (1, 0) if channel else (128, 128), torch.float64, bias
    ).to(dtype)
    if CASES[name][0].one:
        x, expected = x[-1:], expected[-1:]
    for seed in range(3):
        assert torch.equal(emulator(name, x, b, b_scale, bias, seed), expected)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, any NaN being as good as another."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case[3] == BF16 and not case[4] and case[1] == 1]
)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 136, 656), (5, 64, 1296), (8, 264, 528)])
def test_the_bits_are_those_of_the_two_operators(emulator, name, m, n, k):
    plan, _, is_gated, dtype, _, bias = CASES[name]
    torch.manual_seed(m)
    b, b_scale = weight(n, k, False)
    b_scale = torch.rand(b_scale.shape) + 0.5
    x, m = special_tokens(m, k, dtype), 1 if plan.one else m
    x = x[:m]
    if is_gated:
        gate = torch.randn(m, k).to(dtype)
        x = torch.cat([gate, x], 1)
    wide = torch.cat([x, torch.full((m, 16), NAN, dtype=dtype)], 1)[:, : x.shape[1]]
    q, scale = quantize_reference(gated(x) if is_gated else x, (1, 128), RULES.get(name, "exact"))
    expected = emulator.product(q, scale, b, b_scale)
    offset = torch.zeros(n, dtype=dtype if bias == 2 else torch.float32) if bias else None
    for seed in range(3):
        assert same(emulator(name, wide, b, b_scale, offset, seed), expected)


def test_every_plan_fits_and_is_of_few_tokens():
    for n, k in ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (1024, 4096), (128, 16)):
        parts = hopper.parts_of(n, k)
        for m in range(1, 9):
            plan = linear.plan_for(m, n, k, parts, settled=True)
            assert (plan is None) == (m * k > linear.MOST)
            if plan is not None:
                shared = plan.held_bytes(hopper.segment_of(k, parts), m)
                assert (shared + 1024) * plan.resident <= hopper.SM_SHARED and shared <= hopper.MAX_SHARED
                assert plan.stages >= 8 and plan.early <= plan.stages
                assert plan.one == (m == 1) and plan.threads * plan.resident <= 1024
        assert linear.plan_for(9, n, k, parts) is None


def test_what_it_does_not_take_is_named():
    x, (b, b_scale) = torch.zeros(4, 256, dtype=BF16), weight(128, 256, False)

    def why(x=x, b=b, b_scale=b_scale, block=(128, 128), gated=False, bias=None):
        return linear.unsupported(x, b, b_scale, block, gated, bias)

    assert why() is None
    assert "x is torch.float32" in why(x.float())
    assert "N of 8" in why(b=b[:100])
    assert "x is [4, 256]" in why(gated=True)
    assert why(torch.cat([x, x], 1), gated=True) is None
    assert "aligned" in why(torch.zeros(4, 257, dtype=BF16)[:, 1:])
    assert "takes up to 8 tokens" in why(torch.zeros(9, 256, dtype=BF16))
    assert "b_scale is" in why(b_scale=b_scale[:, :1])
    assert "b_block is (64, 128)" in why(block=(64, 128))
    assert "bias is" in why(bias=torch.zeros(4))
    with pytest.raises(ValueError, match="use another backend"):
        linear.linear(x.float(), b, b_scale, (128, 128), "exact")


# --- The operator ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, BF16, FP16], ids=str)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(
    ("m", "block", "rule"), [(1, (128, 128), "exact"), (9, (1, 0), "bf16"), (0, (128, 128), "pow2")]
)
def test_the_operator_is_the_two(m, block, rule, is_gated, dtype):
    torch.manual_seed(0)
    b, b_scale = weight(136, 528, block == (1, 0))
    x, bias = torch.randn(m, 528 * (1 + is_gated)).to(dtype), torch.randn(136).to(dtype)
    q, scale = quantize_fp8_block(gated(x) if is_gated else x, (1, 128), rule)
    expected = fp8_block_gemm(q, scale, b, b_scale, b_block=block, out_dtype=dtype, bias=bias)
    y = fp8_linear(x, b, b_scale, b_block=block, scale_rule=rule, gated=is_gated, bias=bias)
    assert y.dtype == dtype and y.shape == (m, 136) and torch.equal(y, expected)
    both = quantize_fp8_block(x, (1, 128), rule, gated=is_gated, transposed_scale=True)
    assert torch.equal(both[0].view(torch.uint8), q.view(torch.uint8)) and torch.equal(both[1], scale)
    assert both[1].stride() == (1, m) or m < 2


@pytest.mark.parametrize("is_gated", [False, True])
def test_it_is_an_operator_for_torch(is_gated):
    b, b_scale = weight(136, 528, False)
    x = torch.randn(3, 528 * (1 + is_gated)).to(BF16)
    args = (x, b, b_scale, [128, 128], "bf16", is_gated, None, "auto", True)
    checks = ("test_faketensor", "test_autograd_registration")  # the schema's check multiplies what it is given
    torch.library.opcheck(torch.ops.quantrot.fp8_linear.default, args, test_utils=checks)
    torch.library.opcheck(torch.ops.quantrot.quantize_fp8_block.default, (x, 1, 128, "bf16", True, "auto", is_gated))
    compiled = torch.compile(lambda x: fp8_linear(x, b, b_scale, gated=is_gated), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), fp8_linear(x, b, b_scale, gated=is_gated))
    wanted = x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="no gradient"):
        fp8_linear(wanted, b, b_scale, gated=is_gated).sum().backward()


def test_errors_say_what_is_allowed():
    x, (b, b_scale) = torch.zeros(4, 256, dtype=BF16), weight(128, 256, False)
    for message, change in {
        "takes \\[M, K\\]": {"x": x[0]},
        "dtype torch.int32": {"x": x.int()},
        "b: torch.float32": {"b": b.float()},
        "it must be .*N, 128": {"gated": True},
        "255 columns": {"gated": True, "x": x[:, :255]},
        "b_scale: ": {"b_scale": b_scale[:, :1]},
        "bias: shape": {"bias": torch.zeros(4)},
        "backend: 'triton'; allowed: auto, hopper, reference": {"backend": "triton"},
        "'hopper' needs": {"backend": "hopper"},
        "scale_rule": {"scale_rule": "up"},
    }.items():
        with pytest.raises(ValueError, match=message):
            fp8_linear(**({"x": x, "b": b, "b_scale": b_scale} | change))


# --- Compiled for sm_90a ---------------------------------------------------------------------------------------------


def test_no_kernel_spills_or_serializes_its_products(tmp_path):
    if not shutil.which("nvcc"):
        pytest.skip("compiling for sm_90a needs nvcc")
    sizes = [(1, 4096, 14336, True), (2, 4096, 14336, True), (1, 28672, 4096, False), (8, 4096, 4096, False)]
    plans = [(linear.plan_for(m, n, k, 1, gated, True), gated) for m, n, k, gated in sizes]
    kernels = [(plan, 1, is_gated, BF16, False, 0) for plan, is_gated in plans] + list(CASES.values())
    entries = "".join(plan.entry(*others, name=f"linear{i}") for i, (plan, *others) in enumerate(kernels))
    (tmp_path / "linear.cu").write_text(linear.device_functions("bf16") + entries)
    target = ["-gencode", "arch=compute_90a,code=sm_90a", "-std=c++17", "-Xptxas", "-v"]
    run = subprocess.run(["nvcc", *target, "-cubin", "linear.cu"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    log = run.stdout + run.stderr
    assert "warning" not in log and "C75" not in log, log  # C7510: products one after another
    assert log.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") >= len(kernels)


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


def two(x, b, b_scale, rule="bf16", is_gated=False, bias=None, b_block=(128, 128)):
    """The two operators, the gate by torch."""
    q, scale = quantize_fp8_block(gated(x) if is_gated else x, (1, 128), rule, transposed_scale=True)
    return fp8_block_gemm(q, scale, b, b_scale, b_block=b_block, out_dtype=x.dtype, bias=bias, backend="hopper")


def random_weight(n: int, k: int):
    return quantize_fp8_block(torch.randn(n, k, device="cuda").bfloat16(), (128, 128), "bf16")


@gpu
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_gpu_bits_are_those_of_the_two_operators(n, k, is_gated):
    b, b_scale = random_weight(n, k)
    for m in (1, 2, 5, 8):
        x = torch.randn(m, k * (1 + is_gated), device="cuda").bfloat16()
        backend = "hopper" if linear.plan_for(m, n, k, hopper.parts_of(n, k), is_gated) else "auto"
        got = fp8_linear(x, b, b_scale, gated=is_gated, backend=backend)
        assert torch.equal(got, two(x, b, b_scale, is_gated=is_gated)), m


@gpu
@pytest.mark.parametrize(("dtype", "rule"), [(BF16, "bf16"), (BF16, "exact"), (FP16, "pow2")], ids=str)
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (264, 4480)])
def test_gpu_special_blocks_have_the_two_operators_bits(n, k, dtype, rule):
    b, b_scale = random_weight(n, k)
    for m in (1, 3, 8):
        for _ in range(3):
            x = special_tokens(m, k, dtype).cuda()
            assert same(fp8_linear(x, b, b_scale, scale_rule=rule), two(x, b, b_scale, rule)), m
            x = torch.cat([torch.randn(m, k, device="cuda").to(dtype) * 3, x], 1)
            assert same(fp8_linear(x, b, b_scale, scale_rule=rule, gated=True), two(x, b, b_scale, rule, True)), m


@gpu
@pytest.mark.parametrize("name", CASES)
def test_gpu_every_kernel(name):
    plan, parts, is_gated, dtype, channel, size = CASES[name]
    block = (1, 0) if channel else (128, 128)
    for m, n, k in ((1, 520, 1040), (3, 264, 4096), (8, 128, 1168)):
        m = 1 if plan.one else m
        b, b_scale = (t.cuda() for t in weight(n, k, channel))
        x = torch.randn(m, k * (1 + is_gated), device="cuda").to(dtype)
        bias = torch.randn(n, device="cuda").to(torch.float32 if size == 4 else dtype) if size else None
        q, scale = quantize_fp8_block(gated(x) if is_gated else x, (1, 128), RULES.get(name, "exact"))
        decode = hopper.decode_plan(m, n, k, parts)
        expected = hopper.gemm(q, scale, b, b_scale, (1, 128), block, dtype, bias, plan=decode, parts=parts)
        arguments = (x, b, b_scale, block, RULES.get(name, "exact"), is_gated, bias)
        assert torch.equal(linear.linear(*arguments, plan=plan, parts=parts), expected)


@gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_gpu_gates_every_number_as_torch_does(dtype):
    """All 65536 gates, times one."""
    gate = torch.arange(-32768, 32768, dtype=torch.int16, device="cuda").view(dtype).view(512, 128)
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
@pytest.mark.parametrize("m", [1, 4])
def test_gpu_a_hundred_runs_give_the_same_bits(m):
    b, b_scale = random_weight(4096, 4096)
    x = torch.randn(m, 8192, device="cuda").bfloat16()
    first = fp8_linear(x, b, b_scale, gated=True, backend="hopper", b_settled=True)
    for _ in range(100):
        assert torch.equal(fp8_linear(x, b, b_scale, gated=True, backend="hopper", b_settled=True), first)


@gpu
@pytest.mark.parametrize("settled", [False, True])
def test_gpu_a_chain_in_a_graph(settled):
    """Each reads what the kernel before has just written, into memory that the one before that has read."""
    layers = [(random_weight(8192, 4096), random_weight(4096, 4096)) for _ in range(3)]
    x, graph = torch.randn(1, 4096, device="cuda").bfloat16(), torch.cuda.CUDAGraph()

    def chain(multiply):
        y = x
        for up, down in layers:
            y = multiply(multiply(y, *up), *down, is_gated=True)
        return y

    def one(y, b, b_scale, is_gated=False):
        return fp8_linear(y, b, b_scale, gated=is_gated, backend="hopper", b_settled=settled)

    expected = chain(two)
    chain(one)
    with torch.cuda.graph(graph):
        y = chain(one)
    for _ in range(20):
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected)
