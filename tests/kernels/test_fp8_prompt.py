"""The laws of many tokens' FP8 linear in one kernel: emulated on the host, compiled for sm_90a, run on a GPU."""

import ctypes
from dataclasses import replace

import pytest
import torch

from quantrot.kernels.fp8 import fp8_block_gemm, fp8_linear, hopper, prompt, quantize_fp8_block
from quantrot.kernels.fp8.reference import gemm_reference, quantize_reference

gpu = pytest.mark.gpu
BF16, E4M3, INF, NAN = torch.bfloat16, torch.float8_e4m3fn, float("inf"), float("nan")
EARLY = replace(prompt.PLAN, early=True)

# plan, a scale of b a row, bytes of a bias element, scale rule: every branch of the source
CASES = {
    "late": (prompt.PLAN, False, 0, "bf16"),
    "alone": (hopper.WIDE, False, 0, "bf16"),
    "early": (EARLY, False, 4, "exact"),
    "channel": (replace(prompt.PLAN, stages=3), True, 2, "pow2"),
}
DRIVER = """
static std::string message;

// A matrix as {data, rows, columns, pitch in bytes, rows of a box, columns of a box, bytes of an element}.
static quantrot::TensorMap map(const unsigned long long* m, int fresh) {
  const auto u = [m](int i) { return (unsigned)m[i]; };
  return {(unsigned char*)m[0], m[2], m[1], m[3], u(5), u(4), u(6), 1, 0, (unsigned)fresh};
}

extern "C" const char* run(const unsigned long long (*m)[7], const quantrot::GemmArgs* args,
                           const quantrot::BlockArgs* tokens, int blocks, int cluster, int threads, int shared,
                           int seed) {
  const auto a = map(m[0], 1), b = map(m[1], 0), c = map(m[2], 0);
  message = emulator::launch({(unsigned)blocks, 1, 1}, cluster, threads, shared, seed,
                             [&] { prompt(a, b, c, *args, *tokens, seed); });
  for (const unsigned counter : counters)
    if (counter) message = "a counter that is not zero again";
  return message.c_str();
}
"""


@pytest.fixture(scope="module")
def emulator(emulated):
    """Every case's kernel on the host: emulator(case, x, b, b_scale, bias, seed) -> c, codes, scale."""

    def run(name, x, b, b_scale, bias=None, seed=0, processors=4):
        plan, channel, _, rule = CASES[name]
        source = prompt.device_functions(rule) + prompt.entry(plan, channel, bias.itemsize if bias is not None else 0)
        library = emulated(source + DRIVER)
        library.run.restype = ctypes.c_char_p
        (m, k), n, b_block = x.shape, b.shape[0], (1, 0) if channel else (128, 128)
        reason = prompt.unsupported(x, b, b_scale, b_block, bias)
        assert reason is None or "in parts" in reason  # of so small a weight, by the rule
        c, q = torch.full((m, n), NAN, dtype=BF16), torch.full((m, k), NAN).to(E4M3)
        scale = torch.full((k // 128, m), NAN).T
        args = hopper.arguments(q, scale, b, b_scale, c, (1, 128), b_block, bias, plan, 1)
        maps = (ctypes.c_ulonglong * 21)()
        for i, (each, box) in enumerate(zip((q, b, c), plan.boxes(m), strict=True)):
            size = each.itemsize
            maps[7 * i : 7 * i + 7] = (each.data_ptr(), *each.shape, each.stride(0) * size, *box, size)
        shared, blocks = prompt.shared_bytes(plan), plan.grid(m, n, processors)
        assert shared <= hopper.MAX_SHARED
        message = library.run(
            maps, ctypes.byref(args), ctypes.byref(prompt.token_arguments(x, q, scale)),
            blocks, plan.cluster, plan.threads, shared, seed,
        )  # fmt: skip
        assert message == b"", message.decode()
        return c, q, scale

    return run


def weight(n: int, k: int, channel: bool = False):
    """e4m3 [N, K] of small integers, scales that are powers of two."""
    shape = (n, 1) if channel else (-(-n // 128), k // 128)
    return torch.randint(-4, 5, (n, k)).float().to(E4M3), torch.randint(-2, 2, shape).float().exp2()


def integers(m: int, k: int) -> torch.Tensor:
    """Tokens whose codes are integers and whose scales are powers of two under every rule."""
    x = torch.randint(-7, 8, (m, k)).float() * 64
    x[:, ::128] = 448
    return (x * 2.0 ** torch.randint(-2, 3, (m, 1))).bfloat16()


def special(m: int, k: int) -> torch.Tensor:
    """Tokens of every magnitude: blocks of zeros, of a NaN, of infinities, of extreme scales, of ties."""
    x = torch.randn(m, k) * 2.0 ** torch.randint(-6, 6, (m, k))
    x[: m // 8, :128] = 0
    x[0, 5] = -0.0
    x[m // 8 : m // 4, :128] *= 2.0**-124
    x[m // 4 : m // 2, 128:256] *= 2.0**117
    x[m // 2 :, :128] = torch.randint(-448, 449, (m - m // 2, 128)).float()
    x[m // 2 :, 0] = 448
    x[1, 130], x[m - 1, 200], x[2, 3] = INF, NAN, -INF
    return x.bfloat16()


def every_quotient(exponent: int) -> torch.Tensor:
    """Blocks with each significand as their largest magnitude, near 2^exponent, and each at most as large beside it."""
    significands = torch.arange(128.0, 256.0)
    x = torch.cat([significands * 2.0**-j for j in range(22)])
    x = torch.cat([x, x[: -len(x) % 127]]).view(1, -1, 127).expand(128, -1, -1)
    most = significands.view(-1, 1, 1).expand(-1, x.shape[1], 1)
    blocks = torch.cat([most, torch.minimum(x, most)], 2) * (torch.randint(0, 2, (*x.shape[:2], 128)) * 2 - 1)
    return (blocks.double() * 2.0 ** (exponent - 7)).bfloat16().view(-1, 1024)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, any NaN being as good as another."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


# --- In the emulator -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "m", "n", "k"), [("late", 200, 264, 256), ("early", 300, 520, 1152), ("channel", 128, 256, 1280)]
)
def test_every_kernel_is_exact_on_codes_of_integers(emulator, name, m, n, k):
    _, channel, bias_bytes, rule = CASES[name]
    torch.manual_seed(m)
    (b, b_scale), x = weight(n, k, channel), integers(m, k)
    bias = torch.randint(-8, 9, (n,)).to(torch.float32 if bias_bytes == 4 else BF16) if bias_bytes else None
    q, scale = quantize_reference(x, (1, 128), rule)
    expected = gemm_reference(q, scale, b, b_scale, (1, 128), (1, 0) if channel else (128, 128), torch.float64, bias)
    for seed in range(3):
        c, *_ = emulator(name, x, b, b_scale, bias, seed, processors=2 + seed)
        assert torch.equal(c, expected.to(BF16))


@pytest.mark.parametrize(("name", "m"), [("late", 129), ("early", 257), ("channel", 200)])
def test_codes_and_scales_are_the_references(emulator, name, m):
    _, channel, _, rule = CASES[name]
    torch.manual_seed(m)
    x = special(m, 1408)
    _, q, scale = emulator(name, x, *weight(136, 1408, channel), seed=m)
    expected, expected_scale = quantize_reference(x, (1, 128), rule)
    assert torch.equal(q.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scale.view(torch.int32), expected_scale.view(torch.int32))


# --- What it takes ---------------------------------------------------------------------------------------------------


def test_what_it_does_not_take_is_named():
    x, (b, b_scale) = torch.zeros(128, 2048, dtype=BF16), weight(2048, 2048)
    ok = {"x": x, "b": b, "b_scale": b_scale, "b_block": (128, 128), "bias": None}
    assert prompt.unsupported(**ok) is None
    wrong = {
        "must be bfloat16": {"x": x.half()},
        "multiple of 128": {"x": x[:, :500], "b": b[:, :500]},
        "128 tokens": {"x": x[:100]},
        "no K in parts": {"b": b[:128], "b_scale": b_scale[:1]},
        "aligned to 16": {"x": torch.zeros(128 * 2048 + 1, dtype=BF16)[1:].view(128, 2048)},
        "b_scale": {"b_scale": b_scale[:3]},
        "bias": {"bias": torch.zeros(5)},
    }
    for reason, change in wrong.items():
        assert reason in prompt.unsupported(**ok | change)
        with pytest.raises(ValueError, match="another backend"):
            prompt.linear(**ok | change, rule="bf16")


def test_one_kernel_is_for_many_tokens_and_weights_neither_wide_nor_narrow():
    assert prompt.pays(4096, 4096, 4096) and prompt.pays(2048, 4096, 14336) and prompt.pays(8192, 6144, 4096)
    assert not prompt.pays(2048, 4096, 4096) and not prompt.pays(1024, 4096, 16384)
    assert not prompt.pays(4096, 8192, 8192) and not prompt.pays(8192, 2560, 2560)


# --- Compiled for sm_90a ---------------------------------------------------------------------------------------------


def test_no_kernel_spills_or_serializes_its_products(compiled_cuda):
    cases = {name: case for name, case in CASES.items() if name != "channel"} | {"channel": (EARLY, True, 4, "")}
    entries = "".join(prompt.entry(*case[:3], name=f"prompt_{name}") for name, case in cases.items())
    made = compiled_cuda(prompt.device_functions("bf16") + entries)
    assert "C75" not in made.log, made.log  # C7508: setmaxnreg ignored; C7510: products one after another
    assert made.stacks == made.spilled == [0] * len(cases), made.log


# --- On a GPU --------------------------------------------------------------------------------------------------------


def random_operands(m: int, n: int, k: int):
    x, w = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (m, n))
    return x, *quantize_fp8_block(w, (128, 128))


def two(x, b, b_scale, b_block=(128, 128), rule="bf16", bias=None):
    """The two operators."""
    q, scale = quantize_fp8_block(x, (1, 128), rule, transposed_scale=True)
    return fp8_block_gemm(q, scale, b, b_scale, b_block=b_block, bias=bias, backend="hopper")


@gpu
@pytest.mark.parametrize(
    ("m", "n", "k"), [(4096, 4096, 4096), (4001, 2560, 1152), (5000, 4096, 14336), (128, 2048, 256)]
)
def test_gpu_bits_are_those_of_the_two_operators(m, n, k):
    operands = random_operands(m, n, k)
    bias = torch.randn(n, device="cuda").bfloat16()
    for settled in (False, True):
        for rest in (None, bias):
            y = prompt.linear(*operands, (128, 128), "bf16", rest, b_settled=settled)
            assert torch.equal(y, two(*operands, bias=rest))
    by_row = quantize_fp8_block(torch.randn(n, k, device="cuda").bfloat16(), (1, 0))
    assert torch.equal(prompt.linear(operands[0], *by_row, (1, 0), "exact"), two(operands[0], *by_row, (1, 0), "exact"))


@gpu
@pytest.mark.parametrize("rule", ["exact", "bf16", "pow2"])
def test_gpu_special_values_and_every_quotient_have_the_two_operators_bits(rule):
    """By a weight that is the identity."""
    b, b_scale = quantize_fp8_block(torch.eye(2048, 1024, device="cuda").bfloat16(), (128, 128), "exact")
    for x in (special(3000, 1024), *map(every_quotient, (127, 120, 64, 0, -64, -110, -117, -120))):
        assert same(prompt.linear(x.cuda(), b, b_scale, (128, 128), rule), two(x.cuda(), b, b_scale, rule=rule))


@gpu
def test_gpu_a_hundred_runs_give_the_same_bits():
    operands = random_operands(4096, 4096, 4096)
    first = two(*operands)
    for _ in range(100):
        assert torch.equal(prompt.linear(*operands, (128, 128), "bf16", b_settled=True), first)


@gpu
def test_gpu_two_streams_at_once():
    """Neither waits for thread blocks that the other keeps from running."""
    operands, streams = [random_operands(4096, 4096, 4096) for _ in range(2)], [torch.cuda.Stream() for _ in range(2)]
    expected, found = [two(*each) for each in operands], [[], []]
    torch.cuda.synchronize()
    for _ in range(20):
        for i in range(2):
            with torch.cuda.stream(streams[i]):
                found[i].append(prompt.linear(*operands[i], (128, 128), "bf16"))
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected[i]) for i in range(2) for y in found[i])


@gpu
def test_gpu_the_operator_takes_it_in_a_graph():
    """Each reads what the one before has just written; two graphs, one after the other and at once."""
    weights = [random_operands(1, 4096, 4096)[1:] for _ in range(3)]
    x = torch.randn(4096, 4096, device="cuda").bfloat16()
    assert prompt.supports(x, *weights[0], (128, 128), None)

    def chain(multiply):
        y = x
        for b, b_scale in weights:
            y = multiply(y, b, b_scale) / 64
        return y

    def one(x, b, b_scale):
        return fp8_linear(x, b, b_scale, b_settled=True)

    expected, graphs = chain(two), [torch.cuda.CUDAGraph() for _ in range(2)]
    found = [chain(one)]
    for graph in graphs:
        with torch.cuda.graph(graph):
            found.append(chain(one))
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(5):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected) for y in found)
