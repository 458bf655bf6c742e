"""Attention of many queries in CUDA C++ for Hopper: the kernel itself in the emulator, and on a GPU."""

import ctypes

import pytest
import torch

from quantrot.kernels.attention import (
    Quantized,
    attend,
    fp8_attention,
    quantize_heads,
    rope_hadamard_quantize,
    triton,
)
from quantrot.kernels.attention import hopper as kernels

gpu = pytest.mark.gpu

E4M3 = torch.float8_e4m3fn

INT8 = torch.int8

# name: plan, head_dim, causal, q's type, what q and k are multiplied in, 16-bit type
KERNELS = {
    "128": (kernels.Plan(2, 2, False), 128, True, E4M3, E4M3, torch.bfloat16),
    "128-wide": (kernels.Plan(2, 2, False), 128, True, torch.bfloat16, E4M3, torch.bfloat16),
    "128-full": (kernels.Plan(2, 3, False), 128, False, E4M3, E4M3, torch.float16),
    "64": (kernels.Plan(3, 2, True), 64, True, E4M3, E4M3, torch.float16),
    "64-wide": (kernels.Plan(3, 2, True), 64, True, torch.float16, E4M3, torch.float16),
    "64-full": (kernels.Plan(3, 3, True), 64, False, E4M3, E4M3, torch.bfloat16),
    "64-two": (kernels.Plan(2, 2, True), 64, True, torch.bfloat16, E4M3, torch.bfloat16),
    "128-int8": (kernels.Plan(2, 2, False), 128, True, torch.float16, INT8, torch.float16),
    "128-int8-codes": (kernels.Plan(2, 3, False), 128, False, INT8, INT8, torch.bfloat16),
    "64-int8": (kernels.Plan(3, 2, True), 64, True, torch.bfloat16, INT8, torch.bfloat16),
    "64-int8-codes": (kernels.Plan(3, 3, True), 64, True, INT8, INT8, torch.float16),
}


RUN = """
#include <string>
static std::string message;

// Matrices as {data, rows, columns, pitch in bytes, rows of a box, columns of a box, folded}.
static quantrot::TensorMap map(const unsigned long long* m) {
  return {(unsigned char*)m[0], m[2], m[1], m[3], (unsigned)m[5], (unsigned)m[4], 1, 1, (unsigned)m[6]};
}

extern "C" const char* run(int which, const unsigned long long (*m)[7], const quantrot::AttentionArgs* args,
                           int blocks, int threads, int shared, int seed) {
  using Kernel = void(quantrot::TensorMap, quantrot::TensorMap, quantrot::TensorMap, quantrot::AttentionArgs);
  static Kernel* const kernels[] = {NAMES};
  const auto q = map(m[0]), k = map(m[1]), v = map(m[2]);
  message = emulator::launch({(unsigned)blocks, 1, 1}, 1, threads, shared, seed,
                             [&] { kernels[which](q, k, v, *args); });
  for (const unsigned counter : counters)
    if (message.empty() && counter) message = "a counter is left at " + std::to_string(counter);
  return message.c_str();
}
"""


@pytest.fixture(scope="module")
def emulator(emulated):
    """The kernels on the host: emulator(name, given, blocks, seed) -> [B, S, H, D]."""
    source, names = kernels.device_functions(), []
    for i, kernel in enumerate(KERNELS.values()):
        names.append(f"attention_{i}")
        source += kernels.entry(*kernel).replace("attention(", f"attention_{i}(", 1)
    library = emulated(source.replace('extern "C" __global__', "__global__") + RUN.replace("NAMES", ", ".join(names)))
    library.run.restype = ctypes.c_char_p

    def run(name, given, blocks, seed, way="counter", lengths=None, query_lengths=None):
        plan, dim, causal, q_type, codes, dtype = KERNELS[name]
        assert given.q.dtype == q_type and given.k.dtype == codes
        inputs = as_inputs(given, causal, lengths, query_lengths)
        assert kernels.unsupported(inputs, dtype) is None
        (batch, heads, queries, _), q, v = given.q.shape, given.q, given.v
        out = torch.full((batch, queries, heads, dim), float("nan"), dtype=dtype)
        dealt = kernels.deal(queries, given.k.shape[2], causal, plan.rows, batch * heads, blocks)
        assert way != "dealt" or dealt is not None
        args = kernels.arguments(inputs, out, plan, dealt if way == "dealt" else None, 7 if way == "counter" else None)
        k_rows = 16 * kernels._folds(given.k)
        rows = [
            kernels.q_matrix(q, plan),
            (given.k.data_ptr(), k_rows, dim, dim, 128, dim, 1),
            (v.data_ptr(), v.shape[0] * v.shape[1] * dim, v.shape[3], v.stride(2), dim, 128, 0),
        ]
        m = (ctypes.c_ulonglong * 21)(*(n for row in rows for n in row))
        message = library.run(
            list(KERNELS).index(name),
            m,
            ctypes.byref(args),
            blocks,
            plan.threads,
            plan.shared_bytes(dim, q_type in kernels.OUT),
            seed,
        )
        assert message == b"", message.decode()
        return out

    return run


def relative(y, exact):
    return ((y.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-300)).item()


def as_inputs(given, causal, lengths=None, query_lengths=None):
    q, q_scale, k, k_scale, v, v_scale = given
    scale = q.shape[3] ** -0.5
    return triton.Inputs(q, k, v, q_scale, k_scale, v_scale, None, lengths, query_lengths, causal, scale)


def quantized(
    queries, keys, dim, heads=2, groups=1, granularity="block", device="cpu", batch=1, wide=None, scores="fp8"
):
    """wide: q stays in this dtype, the view of [B, S, H, D] that projections leave."""
    q = torch.randn(batch, queries, heads, dim, device=device).transpose(1, 2)
    q[:, :, ::3] *= 0.01
    k, v = (torch.randn(batch, groups, keys, dim, device=device) for _ in range(2))
    v = v * 2 ** torch.linspace(-3, 3, keys, device=device).view(-1, 1)  # the scales rise from tile to tile
    k[:, :, ::5] *= 0.1
    turned = [t.transpose(1, 2) for t in (k, k, v)]
    given = rope_hadamard_quantize(*turned, granularity=granularity, scores=scores, backend="reference")
    if wide:
        return Quantized(q.to(wide), given.k_scale.new_empty(batch, heads, 0), *given[2:])
    codes, scale = quantize_heads(q, codes=given.k.dtype)
    return Quantized(codes, scale, *given[2:])


@pytest.mark.parametrize(
    ("name", "queries", "keys", "granularity"),
    [
        ("128", 128, 256, "block"),
        ("128", 20, 397, "head"),
        ("128-wide", 150, 256, "block"),
        ("128-full", 200, 300, "block"),
        ("64", 500, 640, "block"),
        ("64", 200, 272, "head"),
        ("64", 320, 640, "block"),  # a warpgroup without queries, among others' tiles
        ("64-wide", 400, 400, "block"),
        ("64-full", 70, 144, "tensor"),
        ("64-two", 300, 500, "block"),
        ("64-two", 70, 70, "block"),
        ("128-int8", 150, 256, "block"),
        ("128-int8-codes", 200, 300, "head"),
        ("64-int8", 400, 400, "block"),
        ("64-int8-codes", 320, 640, "block"),
    ],
)
def test_the_kernel_in_the_emulator_meets_the_reference(emulator, name, queries, keys, granularity):
    torch.manual_seed(0)
    _, dim, causal, q_type, codes, dtype = KERNELS[name]
    wide, scores = q_type if q_type in kernels.OUT else None, "int8" if codes == INT8 else "fp8"
    given = quantized(queries, keys, dim, granularity=granularity, wide=wide, scores=scores)
    for seed in range(2):
        if seed:  # no score is positive
            given.k.abs_().neg_() if codes == INT8 else given.k.view(torch.uint8).bitwise_or_(0x80)
            given = given._replace(q=given.q.float().abs().to(q_type))
        expected = attend(given, causal=causal, dtype=dtype, backend="reference")
        count = -(-queries // KERNELS[name][0].rows) * 2
        y = emulator(name, given, *((2, 0, "counter"), (min(count, count // 2 + 1), 1, "dealt"))[seed])
        assert relative(y, expected) <= 3e-3, seed


@pytest.mark.parametrize("name", ["64", "64-int8", "128", "128-int8-codes"])
def test_values_whose_blocks_have_scales_far_apart_in_the_emulator(emulator, name):
    torch.manual_seed(0)
    _, dim, causal, q_type, codes, dtype = KERNELS[name]
    wide, scores = q_type if q_type in kernels.OUT else None, "int8" if codes == INT8 else "fp8"
    given = quantized(500, 640, dim, wide=wide, scores=scores)
    # From the last block on the unit rises by 6 and by 4, and codes are 3 and 9 binades below it.
    given.v_scale[0, :] = torch.tensor([131, 118, 124, 127, 121])
    expected = attend(given, causal=causal, dtype=dtype, backend="reference")
    assert relative(emulator(name, given, 1, 0), expected) <= 3e-3


def test_thread_blocks_without_a_counter_in_the_emulator(emulator):
    torch.manual_seed(0)
    given = quantized(700, 700, 64, 2, 1)
    expected = attend(given, causal=True, dtype=torch.float16, backend="reference")
    assert relative(emulator("64", given, 3, 0, way="there and back"), expected) <= 3e-3


def test_lengths_in_the_emulator(emulator):
    torch.manual_seed(0)
    given = quantized(400, 640, 64, 1, 1, batch=2)
    lengths, query_lengths = torch.tensor([640, 640]).int(), torch.tensor([500, 230]).int()  # 400
    options = {"lengths": lengths, "query_lengths": query_lengths}
    y = emulator("64", given, 1, 0, **options)  # a warpgroup has queries in one sequence, and then none beside others
    expected = attend(given, causal=True, dtype=torch.float16, backend="reference", **options)
    assert relative(y, expected) <= 3e-3


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("queries", "rows", "heads", "blocks"),
    [(2048, 192, 32, 132), (1024, 128, 32, 132), (1300, 192, 40, 114), (70, 128, 3, 3)],
)
def test_blocks_are_dealt_out(queries, rows, heads, blocks, causal):
    count = -(-queries // rows) * heads
    starts, places = kernels.deal(queries, queries, causal, rows, heads, blocks)
    starts, places = starts[: blocks + 1], places[:count]
    assert sorted(places) == list(range(count)) and starts[0] == 0 and starts[-1] == count
    cost = [-(-(queries - i // heads * rows if causal else queries) // 128) + kernels.EACH for i in range(count)]
    dealt = [places[a:b] for a, b in zip(starts, starts[1:], strict=False)]
    assert all(each == sorted(each) for each in dealt)  # longest first
    turns = -(-count // blocks)
    back = [[i * blocks + (blocks - 1 - b if i % 2 else b) for i in range(turns)] for b in range(blocks)]
    last, usual = (max(sum(cost[i] for i in each if i < count) for each in way) for way in (dealt, back))
    assert last <= usual
    if causal and queries == 2048:
        assert last <= 1.05 * sum(cost) / blocks


def test_many_blocks_are_not_dealt_out():
    assert kernels.deal(2048, 2048, True, 128, 32, 132) is None and kernels.deal(256, 256, True, 128, 32, 146) is None


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("name", ["64", "64-int8-codes"])
def test_a_nan_block_in_the_emulator(emulator, name, which):
    torch.manual_seed(0)
    given = quantized(400, 400, 64, scores="fp8" if name == "64" else "int8")
    scale = given.k_scale if which == "k" else given.v_scale
    scale[0, 0, 1] = 255 if scale.dtype == torch.uint8 else torch.nan
    given.q_scale[0, 0, 70:90] = 0  # with keys' smallest scale the scores underflow: all keys in sight weigh the same
    given.k_scale[0, 0, 0] = 0
    y = emulator(name, given, 1, 0)
    assert y[:, 128:].isnan().all() and y[:, :128].isfinite().all()
    expected = attend(given, causal=True, dtype=torch.float16, backend="reference")
    assert relative(y[:, :128], expected[:, :128]) <= 3e-3
    lengths = torch.tensor([280], dtype=torch.int32)
    shifted = given._replace(q=given.q[:, :, :200], q_scale=given.q_scale[:, :, :200])
    y = emulator(name, shifted, 1, 0, lengths=lengths)  # query i sees key i + 80: a warp has rows of both kinds
    assert y[:, 48:].isnan().all() and y[:, :48].isfinite().all()


@pytest.mark.parametrize("scores", ["fp8", "int8"])
def test_wide_queries_are_quantized_by_every_backend(scores):
    torch.manual_seed(0)
    given = quantized(20, 30, 64, wide=torch.bfloat16, scores=scores)
    codes, scale = quantize_heads(given.q, codes=given.k.dtype)
    y, expected = attend(given, causal=True), attend(given._replace(q=codes, q_scale=scale), causal=True)
    assert torch.equal(y, expected)
    with pytest.raises(ValueError, match="q_scale"):
        attend(given._replace(q_scale=scale), causal=True)


def test_the_kernels_compile_for_sm_90a_without_spills(compiled_cuda):
    kinds = [KERNELS[name][1:] for name in ("128-wide", "128-full", "64", "64-int8", "128-int8-codes")]
    sources = (kernels.entry(kernels.plan_for(kind[0]), *kind) for kind in kinds)
    entries = (source.replace("attention(", f"attention_{i}(", 1) for i, source in enumerate(sources))
    made = compiled_cuda(kernels.device_functions() + "".join(entries))
    assert made.spilled == [0] * len(kinds), made.log
    assert "C75" not in made.log, made.log  # C7510: products one after another


# --- On a GPU --------------------------------------------------------------------------------------------------------


def compared(given, causal, lengths=None, query_lengths=None, backend="hopper"):
    options = {"causal": causal, "lengths": lengths, "query_lengths": query_lengths}
    y = attend(given, **options, backend=backend)
    return relative(y, attend(given, **options, backend="reference"))


@gpu
@pytest.mark.parametrize("granularity", ["block", "head", "tensor"])
@pytest.mark.parametrize(
    ("queries", "keys"), [(16, 16), (48, 48), (256, 256), (271, 271), (70, 1007), (1, 144), (2048, 2048)]
)
@pytest.mark.parametrize("dim", kernels.DIMS)
@pytest.mark.parametrize("scores", ["fp8", "int8"])
def test_the_kernel_meets_the_reference(scores, dim, queries, keys, granularity):
    torch.manual_seed(0)
    given = quantized(queries, keys, dim, 6, 2, granularity, "cuda", batch=2, scores=scores)
    for causal in (True, False):
        # bfloat16's 1.7e-3, and codes that the short sums of scores change, or for int8 float32's
        assert compared(given, causal) <= (1e-2 if scores == "fp8" else 5e-3)


@gpu
@pytest.mark.parametrize("dim", kernels.DIMS)
def test_lengths_are_the_references(dim):
    torch.manual_seed(0)
    given = quantized(401, 401, dim, 4, 2, "block", "cuda", batch=3)
    lengths = torch.tensor([17, 401, 0], dtype=torch.int32, device="cuda")
    for query_lengths in (None, lengths):
        for causal in (True, False):
            assert compared(given, causal, lengths, query_lengths) <= 1e-2
            y = attend(given, causal=causal, lengths=lengths, query_lengths=query_lengths, backend="hopper")
            assert not y[2].any() and y.isfinite().all()


@gpu
@pytest.mark.parametrize("batch", [4, 7])  # blocks of queries that are dealt out, and more
@pytest.mark.parametrize("dim", kernels.DIMS)
@pytest.mark.parametrize("scores", ["fp8", "int8"])
def test_thread_blocks_take_turns(scores, dim, batch):
    torch.manual_seed(0)
    given = quantized(401, 701, dim, 32, 2, "block", "cuda", batch=batch, wide=torch.bfloat16, scores=scores)
    lengths = torch.tensor([17, 701, 0, 130, 701, 600, 333], dtype=torch.int32, device="cuda")[:batch]
    asked = torch.tensor([17, 401, 0, 130, 230, 10, 300], dtype=torch.int32, device="cuda")[:batch]
    for options in ((), (lengths, None), (lengths, asked)):
        assert compared(given, True, *options) <= 1e-2


@gpu
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("scores", ["fp8", "int8"])
def test_a_nan_block_reaches_those_that_see_it_and_no_other(scores, which):
    given = quantized(400, 400, 128, device="cuda", scores=scores)
    scale = given.k_scale if which == "k" else given.v_scale
    scale[0, 0, 1] = 255 if scale.dtype == torch.uint8 else torch.nan
    y = attend(given, causal=True, backend="hopper")
    assert y[:, 128:].isnan().all() and y[:, :128].isfinite().all()
    shifted = given._replace(q=given.q[:, :, :200], q_scale=given.q_scale[:, :, :200])  # query i sees key i + 200
    lengths = torch.tensor([280], dtype=torch.int32, device="cuda")
    y = attend(shifted, causal=True, lengths=lengths, backend="hopper")  # query i sees key i + 80
    assert y[:, 48:].isnan().all() and y[:, :48].isfinite().all()


@gpu
@pytest.mark.parametrize("dim", kernels.DIMS)
@pytest.mark.parametrize("scores", ["fp8", "int8"])
def test_a_hundred_runs_are_bit_equal(scores, dim):
    given = quantized(2048, 2048, dim, 8, 2, device="cuda", scores=scores)
    first = attend(given, causal=True, backend="hopper")
    for _ in range(100):
        assert torch.equal(attend(given, causal=True, backend="hopper"), first)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", kernels.DIMS)
@pytest.mark.parametrize("scores", ["fp8", "int8"])
def test_wide_queries_give_what_their_codes_give(scores, dim, dtype):
    torch.manual_seed(0)
    for queries, batch in ((300, 2), (1, 1), (64, 1)):
        given = quantized(queries, 400, dim, 6, 2, device="cuda", batch=batch, wide=dtype, scores=scores)
        given.q[0, 1, 0] = 0
        given.q[0, 2, -1, 3] = torch.inf
        codes, scale = quantize_heads(given.q, codes=given.k.dtype)
        for causal in (True, False):
            y = attend(given, causal=causal, dtype=dtype, backend="hopper")
            expected = attend(given._replace(q=codes, q_scale=scale), causal=causal, dtype=dtype, backend="hopper")
            assert torch.equal(y.isnan(), expected.isnan()) and torch.equal(y.nan_to_num(), expected.nan_to_num())
        assert torch.equal(attend(given, dtype=dtype, causal=False, backend="triton").isnan(), y.isnan())


@gpu
def test_the_whole_from_bf16_is_the_references():
    torch.manual_seed(0)
    x = torch.randn(2, 200, 12 * 128, device="cuda", dtype=torch.bfloat16).unflatten(-1, (12, 128)).transpose(1, 2)
    q, k, v = x[:, :8], x[:, 8:10], x[:, 10:]
    y, made, expected = (fp8_attention(q, k, v, causal=True, backend=name) for name in ("auto", "hopper", "reference"))
    assert relative(y, expected) <= 1e-2 and torch.equal(made, y)
    assert torch.equal(torch.compile(fp8_attention, fullgraph=True)(q, k, v, causal=True), y)


@gpu
@pytest.mark.parametrize("backend", ["auto", "hopper"])
@pytest.mark.parametrize("dim", kernels.DIMS)
def test_a_chain_that_overlaps_is_what_its_steps_give(dim, backend):
    torch.manual_seed(0)
    x = torch.randn(1, 4, 700, dim, device="cuda", dtype=torch.bfloat16)

    def chain(x, done):
        for i in range(40):
            x = fp8_attention(x, x[:, i % 2 :: 2], x[:, 1 - i % 2 :: 2], causal=True, backend=backend)
            done()
        return x

    expected = chain(x, torch.cuda.synchronize)
    assert torch.equal(chain(x, lambda: None), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(x, lambda: None)
    for _ in range(10):
        graph.replay()
        assert torch.equal(y, expected)
