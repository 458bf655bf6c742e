"""Quantization in CUDA C++: emulated on the host, and run on a GPU, against the reference's bits."""

import ctypes
from dataclasses import replace
from itertools import product

import pytest
import torch

from quantrot.kernels.fp8 import E4M3, blocks, quantize_fp8_block
from quantrot.kernels.fp8.blocks import Arguments, Groups, Normed, Rows, Squares
from quantrot.kernels.fp8.reference import gate, quantize_reference, rms_norm, scale_shape
from quantrot.kernels.mxfp4 import hopper_batch
from tests.kernels.covering import few_or_every

INF, NAN = float("inf"), float("nan")
gpu = pytest.mark.gpu
RUN = """
static std::string message;
extern "C" const char* run(const quantrot::BlockArgs* args, unsigned blocks, unsigned seed) {{
  const emulator::Dim3 grid{{blocks, 1, 1}};
  message = emulator::launch(grid, {cluster}, {threads}, {shared}, seed, [&] {{ quantrot::{call}(*args); }});
  return message.c_str();
}}
"""


def bits(t):
    return t.cpu().view(torch.int32 if t.dtype == torch.float32 else torch.uint8)


def blocks_of_everything(size: int, dtype: torch.dtype) -> torch.Tensor:
    """3 x 3 blocks with ragged edges: ordinary, special, tiny, ties."""
    torch.manual_seed(size)
    x = torch.randn(3 * size - 24, 3 * size - 40)
    x[:size, :size] = 0
    x[5, 7], x[6, 8] = -0.0, 0.0
    x[size + 3, 3], x[size + 4, size + 5], x[size - 1, 2 * size + 1] = INF, NAN, -INF
    x[2 * size :, :size] *= 2.0**-124 if dtype == torch.bfloat16 else 2.0**-20
    x[2 * size :, size : 2 * size] = torch.randint(-448, 449, x[2 * size :, size : 2 * size].shape).float()
    x[2 * size, size] = 448  # the scale is 1: integers between 16 and 448 meet every tie
    return x.to(dtype)


@pytest.mark.parametrize(
    ("block", "dtype", "rule", "plan"),
    [
        ((128, 128), torch.bfloat16, "exact", blocks.PLANS[128, 128]),
        ((128, 128), torch.bfloat16, "exact", Squares(4, 256)),
        ((128, 128), torch.float16, "bf16", Squares(4, 128, cluster=2)),
        ((256, 256), torch.bfloat16, "bf16", blocks.PLANS[256, 256]),
        ((256, 256), torch.bfloat16, "pow2", Squares(4, 256, cluster=4)),
        ((256, 256), torch.float16, "exact", Squares(6, 128, cluster=4)),
        ((1, 128), torch.bfloat16, "exact", blocks.PLANS[1, 128]),
        ((1, 128), torch.float16, "bf16", Groups(4, 128, rows=16)),
        ((1, 128), torch.bfloat16, "pow2", Groups(4, 32, rows=1)),
        ((1, 0), torch.bfloat16, "bf16", blocks.row_plan(344, 1)),
        ((1, 0), torch.bfloat16, "exact", Rows(4, 32, units=4)),
        ((1, 0), torch.float16, "pow2", Rows(4, 64, units=2)),
    ],
)
def test_emulated_bits_are_the_references(emulated, block, dtype, rule, plan):
    source = plan.source(block, dtype, rule)
    shape = {"cluster": plan.cluster, "threads": plan.threads, "shared": plan.shared_bytes()}
    run = RUN.format(call=plan.call(block, dtype), **shape)
    library = emulated(source[: source.index('extern "C" __global__')] + run)
    library.run.restype = ctypes.c_char_p
    x = blocks_of_everything(block[1] or 128, dtype)
    if block[0] == 1:
        x = x[[*range(120, 136), *range(256, 261)]]
    apart = torch.full((x.shape[0], x.shape[1] + 16), NAN, dtype=dtype)
    apart[:, : x.shape[1]] = x
    expected, expected_scale = quantize_reference(x, block, rule)
    for seed in range(2):
        q, scale = torch.full(x.shape, 0.5).to(E4M3), torch.zeros(scale_shape(x.shape, block)[::-1]).T
        args = Arguments(apart.data_ptr(), q.data_ptr(), scale.data_ptr(), apart.stride(0), *scale.stride(), *x.shape)
        assert library.run(ctypes.byref(args), plan.grid(*x.shape, block), seed) == b""
        assert torch.equal(bits(scale.contiguous()), bits(expected_scale)) and torch.equal(bits(q), bits(expected))


@pytest.mark.parametrize("units", [1, 4])
def test_emulated_rows_for_a_batch_are_the_references_arranged(emulated, units):
    block, rows = (1, 0), [*range(120, 136), *range(256, 261)]
    x = torch.cat([blocks_of_everything(128, torch.bfloat16)[rows, start : start + 320] for start in (0, 24)], 1)
    plan = replace(blocks.row_plan(x.shape[1], units), arranged=True)
    source = plan.source(block, x.dtype, "bf16")
    run = RUN.format(call=plan.call(block, x.dtype), cluster=1, threads=plan.threads, shared=plan.shared_bytes())
    library = emulated(source[: source.index('extern "C" __global__')] + run)
    library.run.restype = ctypes.c_char_p
    expected, expected_scale = quantize_reference(x, block, "bf16")
    q, scale = torch.full(x.shape, 0.5).to(E4M3), torch.zeros(len(x), 1)
    args = Arguments(x.data_ptr(), q.data_ptr(), scale.data_ptr(), x.stride(0), *scale.stride(), *x.shape)
    assert library.run(ctypes.byref(args), plan.grid(*x.shape, block), 0) == b""
    assert torch.equal(bits(scale), bits(expected_scale)) and torch.equal(bits(q), bits(hopper_batch.arrange(expected)))


def every_quotient(dtype: torch.dtype, exponent: int) -> torch.Tensor:
    """Rows of 4096, each with another significand as its largest magnitude, near 2^exponent, and beside it what decides
    its codes: each significand of bfloat16 at each magnitude that has a code; those of float16 around every tie."""
    if dtype == torch.bfloat16:
        most = torch.arange(128.0, 256.0, dtype=torch.float64)
        x = most.repeat(len(most), 1)
    else:
        most = torch.arange(1024.0, 2048.0, dtype=torch.float64)
        ties = most[:, None] * (torch.arange(16, 32, dtype=torch.float64) / 448)
        ties = ties * 2.0 ** torch.ceil(torch.log2(1024 / ties))
        x = torch.cat([(ties.round() + i).clamp(1024, 2047) for i in (-1, 0, 1)], 1)
    x = torch.cat([torch.minimum(x * 2.0**-j, most[:, None]) for j in range(22)], 1)
    x = torch.cat([most[:, None], x, -x], 1).repeat(1, 2)[:, :4096]
    return (x * 2.0**exponent / most[0]).to(dtype)


@pytest.mark.parametrize("rule", ["exact", "bf16", "pow2"])
@pytest.mark.parametrize(
    ("dtype", "exponents"), [(torch.bfloat16, (127, 64, 0, -64, -117, -120)), (torch.float16, (15, 0, -14))]
)
def test_emulated_codes_of_every_quotient_are_the_references(emulated, dtype, exponents, rule):
    plan = blocks.row_plan(4096)
    source = plan.source((1, 0), dtype, rule)
    run = RUN.format(call=plan.call((1, 0), dtype), cluster=1, threads=plan.threads, shared=plan.shared_bytes())
    library = emulated(source[: source.index('extern "C" __global__')] + run)
    library.run.restype = ctypes.c_char_p
    for exponent in exponents:
        x = every_quotient(dtype, exponent)
        expected, expected_scale = quantize_reference(x, (1, 0), rule)
        q, scale = torch.full(x.shape, 0.5).to(E4M3), torch.zeros(len(x), 1)
        args = Arguments(x.data_ptr(), q.data_ptr(), scale.data_ptr(), x.stride(0), *scale.stride(), *x.shape)
        assert library.run(ctypes.byref(args), len(x), 0) == b""
        assert torch.equal(bits(scale), bits(expected_scale)) and torch.equal(bits(q), bits(expected))


@pytest.mark.parametrize(("dtype", "plan"), [(torch.bfloat16, blocks.GATED[0]), (torch.float16, blocks.GATED[1])])
def test_emulated_gated_codes_are_those_of_the_gated_tensor(emulated, dtype, plan):
    """The host's exp and torch's may differ in the last bit of float32, which few roundings to 16 bits see."""
    source = plan.source((1, 128), dtype, "bf16", gated=True)
    shape = {"cluster": plan.cluster, "threads": plan.threads, "shared": plan.shared_bytes()}
    run = RUN.format(call=plan.call((1, 128), dtype, gated=True), **shape)
    library = emulated(source[: source.index('extern "C" __global__')] + run)
    library.run.restype = ctypes.c_char_p
    up = blocks_of_everything(128, dtype)[[*range(120, 136), *range(256, 261)]]
    gates = torch.randn(up.shape) * 4
    gates[3, :64] = torch.linspace(-120, 120, 64)  # where exp(-x) is infinite, large, and zero
    gates[4, 200:203] = torch.tensor([INF, -INF, NAN])
    gates[:, 5], gates[:, 6] = -0.0, 0.0
    x = torch.cat([gates.to(dtype), up], 1)
    expected, expected_scale = quantize_reference(gate(x), (1, 128), "bf16")
    q, scale = torch.full(up.shape, 0.5).to(E4M3), torch.zeros(scale_shape(up.shape, (1, 128))[::-1]).T
    args = Arguments(x.data_ptr(), q.data_ptr(), scale.data_ptr(), x.stride(0), *scale.stride(), *up.shape)
    assert library.run(ctypes.byref(args), plan.grid(*up.shape, (1, 128)), 0) == b""
    assert torch.equal(bits(scale.contiguous()), bits(expected_scale))
    assert (bits(q) != bits(expected)).float().mean() < 2e-4
    numbers = ~expected.isnan()
    assert torch.equal((bits(q) & 0x80)[numbers], (bits(expected) & 0x80)[numbers])  # of zeros too


RUN_NORMED = """
static std::string message;
extern "C" const char* run(const quantrot::BlockArgs* a, const quantrot::NormArgs* norm, unsigned rows, int seed) {{
  const emulator::Dim3 grid{{rows, 1, 1}};
  message = emulator::launch(grid, 1, {threads}, {shared}, seed, [&] {{ quantrot::{call}(*a, *norm); }});
  return message.c_str();
}}
"""


@pytest.mark.parametrize(
    ("dtype", "rule", "columns", "plan"),
    [
        (torch.bfloat16, "bf16", 1056, blocks.normed_plan(1056)),
        (torch.float16, "exact", 1056, Normed(1, 96, units=2)),
        (torch.bfloat16, "pow2", 2184, Normed(1, 64, units=8)),
        (torch.bfloat16, "bf16", 1056, blocks.many_plan(5000, 1056, False)),
        (torch.float16, "exact", 2184, Normed(1, 96, units=4, many=True)),
    ],
)
def test_emulated_codes_behind_a_norm(emulated, dtype, rule, columns, plan):
    """Exact for tokens of signs, whose mean square is one; of others the sum has its own order."""
    source = plan.source((1, 128), dtype, rule)
    run = RUN_NORMED.format(call=plan.call((1, 128), dtype), threads=plan.threads, shared=plan.shared_bytes())
    library = emulated(source[: source.index('extern "C" __global__')] + run)
    library.run.restype = ctypes.c_char_p
    norm = blocks_of_everything(128, dtype)[[5, 131, 256, 300]].flatten()[:columns].contiguous()
    norm = torch.cat([norm, torch.randn(columns - len(norm)).to(dtype)])
    signs, others = torch.randint(0, 2, (5, columns + 8)) * 2 - 1, torch.randn(5, columns + 8)
    sums_of = ((signs, signs * 2), (others, torch.randn(5, columns))) if plan.many else ()
    for x, added in ((signs, None), (others, None), *sums_of):
        x = x.to(dtype)[:, :columns]
        if added is not None:
            x, added = x.contiguous(), added[:, :columns].to(dtype).contiguous()
        total, sums = x if added is None else x + added, torch.empty(x.shape, dtype=dtype)
        expected, expected_scale = quantize_reference(rms_norm(total, norm, 1e-9), (1, 128), rule)
        for seed, grid in enumerate((len(x), 2 if plan.many else len(x))):
            q, scale = torch.full(x.shape, 0.5).to(E4M3), torch.zeros(scale_shape(x.shape, (1, 128))[::-1]).T
            args = Arguments(x.data_ptr(), q.data_ptr(), scale.data_ptr(), x.stride(0), *scale.stride(), *x.shape)
            beside = (None, None) if added is None else (added.data_ptr(), sums.data_ptr())
            by = blocks.NormArgs(norm.data_ptr(), *beside, 1e-9, seed)
            assert library.run(ctypes.byref(args), ctypes.byref(by), grid, seed) == b""
            assert added is None or torch.equal(bits(sums), bits(total))
            if total[0, 0].abs() in (1, 3):
                assert torch.equal(bits(scale.contiguous()), bits(expected_scale))
                assert torch.equal(bits(q), bits(expected))
            else:
                assert (bits(q) != bits(expected)).float().mean() < 0.01
                torch.testing.assert_close(scale, expected_scale, rtol=0.01, atol=0, equal_nan=True)


def test_a_norm_is_read_before_the_kernel_in_front_has_ended_only_where_it_is_settled(emulated, loads_that_wait):
    plan, dtype = blocks.normed_plan(512), torch.bfloat16
    source = loads_that_wait(plan.source((1, 128), dtype, "bf16"))
    run = RUN_NORMED.format(call=plan.call((1, 128), dtype), threads=plan.threads, shared=plan.shared_bytes())
    library = emulated(source[: source.index('extern "C" __global__')] + run)
    library.run.restype = ctypes.c_char_p
    x, norm = torch.ones(2, 512).to(dtype), torch.ones(512).to(dtype)
    q, scale = torch.empty(2, 512).to(E4M3), torch.empty(2, 4)
    args = Arguments(x.data_ptr(), q.data_ptr(), scale.data_ptr(), x.stride(0), *scale.stride(), *x.shape)
    for settled, says in ((0, b""), (1, b"before grid_wait")):
        by = blocks.NormArgs(norm.data_ptr(), None, None, 1e-9, settled)
        message = library.run(ctypes.byref(args), ctypes.byref(by), len(x), 0)
        assert says in message and bool(says) == bool(message)


@few_or_every
@pytest.mark.parametrize(("dtype", "rule"), [(torch.bfloat16, "bf16"), (torch.float16, "exact")])
def test_the_kernels_compile_for_sm_90a_without_spills(compiled_cuda, dtype, rule, chosen):
    plans = [(block, plan, False) for block, plan in blocks.PLANS.items()]
    plans += [((1, 128), plan, gated) for gated, plan in ((False, blocks.FEW_ROWS), *((True, g) for g in blocks.GATED))]
    plans += [((1, 0), blocks.row_plan(columns), False) for columns in (1024, 4096, 14336, 32768)]
    plans += [((1, 128), blocks.normed_plan(columns), False) for columns in (64, 4096, 8192, 14336, 32768)]
    plans += [
        ((1, 128), plan, False)
        for columns in (64, 2048, 4096, 5120, 8192, 16384)
        for plan in dict.fromkeys(blocks.many_plan(*how) for how in product((100, 5000), (columns,), (False, True)))
    ]
    plans = chosen(plans)
    start = 'extern "C" __global__'
    sources = [plan.source(block, dtype, rule, gated) for block, plan, gated in plans]
    entries = (
        start + source.split(start)[1].replace(" blocks(", f" blocks_{i}(", 1) for i, source in enumerate(sources)
    )
    made = compiled_cuda(sources[0].split(start)[0] + "".join(entries))
    assert made.spilled == [0] * len(plans), made.log


def test_rows_that_would_not_fill_the_gpu_are_divided_among_more_thread_blocks():
    for rows, columns in ((1, 4096), (64, 14336), (512, 4096)):
        assert blocks.plan_for((1, 128), rows, columns) == blocks.FEW_ROWS
    assert blocks.plan_for((1, 128), 1, 14336, gated=True) == blocks.GATED[1]
    assert blocks.plan_for((1, 128), 2048, 14336, gated=True) == blocks.GATED[0]
    assert blocks.plan_for((1, 128), 2048, 4096) == blocks.PLANS[1, 128]
    assert blocks.plan_for((1, 128), 4096, 8192) == blocks.PLANS[1, 128]


@gpu
@pytest.mark.parametrize("rule", ["exact", "bf16", "pow2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [*sorted(blocks.PLANS), (1, 0)])
def test_gpu_bits_are_the_references(block, dtype, rule):
    x = blocks_of_everything(block[1] or 128, dtype)
    if not blocks.supports(x.cuda(), block):
        pytest.skip("needs sm_90 and cuda.core")
    expected = quantize_reference(x, block, rule)
    for _ in range(20):
        got = quantize_fp8_block(x.cuda(), block, rule)
        assert torch.equal(bits(got[0]), bits(expected[0])) and torch.equal(bits(got[1]), bits(expected[1]))


@gpu
def test_gpu_rows_with_a_pitch_and_rows_that_do_not_start_at_16_bytes():
    x = torch.randn(300, 1040, device="cuda").bfloat16()
    for part in (x[:, :520], x[3:, 8:264], x[:, 4:260], x[:, :257]):
        for block in (*blocks.PLANS, (1, 0)):
            expected = quantize_reference(part.cpu(), block, "exact")
            got = quantize_fp8_block(part, block, "exact")
            assert torch.equal(bits(got[0]), bits(expected[0])) and torch.equal(bits(got[1]), bits(expected[1]))


def large_matrix(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Blocks for many thread blocks, ragged, of which nine are blocks_of_everything's."""
    x = torch.randn(3500, 4104, generator=torch.Generator().manual_seed(0)).to(dtype)
    special = blocks_of_everything(256, dtype)
    x[1024 : 1024 + special.shape[0], 2560 : 2560 + special.shape[1]] = special
    return x


@gpu
@pytest.mark.parametrize("rule", ["exact", "pow2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gpu_clusters_keep_the_references_bits_in_a_hundred_runs(dtype, rule):
    x = large_matrix(dtype)
    apart = torch.full((x.shape[0], x.shape[1] + 24), NAN, dtype=dtype, device="cuda")
    part = apart[:, 8 : 8 + x.shape[1]].copy_(x)
    if not blocks.supports(part, (256, 256)):
        pytest.skip("needs sm_90 and cuda.core")
    expected = [t.cuda() for t in quantize_reference(x, (256, 256), rule)]
    for given in (x.cuda(), part):
        for _ in range(100):
            got = quantize_fp8_block(given, (256, 256), rule)
            for g, e in zip(got, expected, strict=True):
                assert torch.equal(g.view(torch.uint8), e.view(torch.uint8))


@gpu
@pytest.mark.parametrize("block", [(256, 256), (1, 128)])  # by clusters, and with rows asked for early
def test_gpu_waits_for_the_kernel_that_writes_its_input_and_the_one_that_reads_its_codes(block):
    given = [large_matrix().cuda().roll(i, 0) for i in range(8)]
    if not blocks.supports(given[0], block):
        pytest.skip("needs sm_90 and cuda.core")
    expected = [quantize_fp8_block(x, block, "exact") for x in given]
    x, q = torch.empty_like(given[0]), torch.empty_like(expected[0][0])
    scale = torch.empty_like(expected[0][1])
    kept = [(torch.empty_like(q), torch.empty_like(scale)) for _ in given]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for source, (codes, scales) in zip(given, kept, strict=True):
            x.copy_(source)
            blocks.quantize(x, q, scale, block, "exact")
            codes.view(torch.uint8).copy_(q.view(torch.uint8))
            scales.copy_(scale)
            blocks.quantize(source, q, scale, block, "exact")
    for _ in range(10):
        graph.replay()
        for got, want in zip(kept, expected, strict=True):
            for g, e in zip(got, want, strict=True):
                assert torch.equal(g.view(torch.uint8), e.view(torch.uint8))
                g.view(torch.uint8).fill_(1)


@gpu
@pytest.mark.parametrize("block", [(1, 128), (256, 256)])
def test_gpu_a_matrix_of_more_than_2_to_the_31_elements(block):
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GB")
    x = torch.zeros(131072 + 40, 16384 + 8, dtype=torch.bfloat16, device="cuda")
    parts = slice(0, 300), slice(131072 - 256, None)
    for part in parts:
        x[part].normal_()
    if not blocks.supports(x, block):
        pytest.skip("needs sm_90 and cuda.core")
    q, scale = quantize_fp8_block(x, block, "exact")
    for part in parts:
        expected, expected_scale = quantize_reference(x[part].cpu(), block, "exact")
        of = slice(part.start // block[0], part.stop and -(-part.stop // block[0]))
        assert torch.equal(bits(q[part]), bits(expected)) and torch.equal(bits(scale[of]), bits(expected_scale))


@gpu
def test_the_sanitizer_finds_nothing_in_clusters(sanitized):
    """Ragged edges of blocks that two thread blocks share."""
    sanitized(
        "import torch\n"
        "from quantrot.kernels.fp8 import blocks\n"
        "x = torch.zeros(700, 520, dtype=torch.bfloat16, device='cuda')\n"
        "blocks.quantize(x, x.to(torch.float8_e4m3fn), torch.empty(3, 3, device='cuda'), (256, 256), 'exact')\n"
        "torch.cuda.synchronize()\n"
    )
