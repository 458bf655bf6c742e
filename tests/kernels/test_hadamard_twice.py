"""Long Hadamard rows as codes by two asynchronous products: run by the emulator, against the definition with the one
rounding to bfloat16 that lies between the products."""

import ctypes
from dataclasses import replace

import pytest
import torch

from quantrot.kernels import nvrtc
from quantrot.kernels.fp8.reference import quantize_reference
from quantrot.kernels.hadamard.codes import plan_for_codes, twice_plans
from quantrot.kernels.hadamard.hopper import Plan, launch
from quantrot.kernels.hadamard.reference import hadamard_reference
from quantrot.orthogonal import random_signs

INF, NAN = float("inf"), float("nan")
RUN = """
static std::string message;
extern "C" const char* run(const void* x, void* y, const signed char* signs, long long rows, long long x_stride,
                           long long y_stride, float scale, unsigned blocks, unsigned seed, float* scales,
                           long long scale_row, long long scale_group, unsigned in_row, unsigned* taken) {{
  const unsigned long long tall = (rows - 1) * x_stride / {columns} + {base};
  const quantrot::TensorMap map{{(unsigned char*)x, {columns}, tall, 2 * {columns}, 64, {base}, 2, 1}};
  const unsigned long long all = rows * {columns} * {base} / 128;
  const quantrot::TensorMap codes{{(unsigned char*)y, 128, all, 128, 128, {lines}, 1, 1}};
  message = emulator::launch({{blocks, 1, 1}}, 1, {threads}, {shared}, seed, [&] {{
    quantrot::{call}(map, codes, {{x, y, signs, rows, x_stride, y_stride, 1, scale, scales, scale_row, scale_group,
        in_row, taken}});
  }});
  return message.c_str();
}}
"""


def twice(columns: int, groups: int = 1, stages: int = 2, rows: int = 1, **options: bool) -> Plan:
    return Plan("twice", 4 * groups, 1, tiles=columns // 8, vectors=rows, stages=stages, **options)


def codes_of(x, signs, n, columns, rule):
    """Codes and scales of rows [_, n], of which x's consist: H_(n / columns) exactly, rounded, and H_columns."""
    rows = x.reshape(-1, n).double()
    rows = (rows if signs is None else rows * signs.double()).view(-1, n // columns, columns)
    first = hadamard_reference(rows.mT.contiguous(), None, n // columns, 1.0).mT.bfloat16()
    turned = hadamard_reference(first.double().contiguous(), None, columns, n**-0.5)
    return quantize_reference(turned.view(x.shape).float(), (1, 128), rule)


@pytest.mark.parametrize(
    ("n", "rows", "across", "plan", "dtype", "rule", "signed"),
    [
        (24 * 64, 19, 1, twice(64, rows=2), torch.float16, "bf16", False),
        (48 * 64, 21, 1, twice(64, stages=1, rows=2), torch.bfloat16, "exact", True),  # rows of zeros, an odd number
        (64 * 64, 40, 2, twice(64, rows=2), torch.bfloat16, "exact", False),
        (64 * 128, 19, 1, twice(128, stages=1), torch.float16, "pow2", True),  # two turns of eight, and some
        (40 * 128, 9, 3, twice(128, stages=2), torch.bfloat16, "exact", False),
        (56 * 256, 11, 1, twice(256), torch.bfloat16, "exact", True),
        (112 * 256, 9, 1, twice(256, groups=2), torch.bfloat16, "exact", False),  # one warpgroup after the other
        (108 * 128, 7, 1, twice(128, groups=2, stages=3), torch.bfloat16, "exact", True),  # boxes of four rows
        (
            76 * 64,
            9,
            1,
            twice(64, groups=2, rows=2),
            torch.bfloat16,
            "exact",
            True,
        ),  # the same, two rows of x at a time
        (148 * 128, 6, 1, twice(128, groups=3, stages=1), torch.bfloat16, "exact", False),
        (64 * 64, 41, 1, twice(64, stages=1, rows=2, counted=True), torch.bfloat16, "exact", False),  # turns, pairs
        (64 * 128, 37, 1, twice(128, stages=1, counted=True), torch.float16, "bf16", True),
        (40 * 128, 13, 1, twice(128, stages=2, counted=True), torch.bfloat16, "exact", False),  # pairs alone
        (56 * 256, 7, 1, twice(256, stages=3, counted=True), torch.bfloat16, "exact", True),  # one row each
        (112 * 256, 9, 3, twice(256, groups=2, counted=True), torch.bfloat16, "exact", False),
    ],
)
def test_emulated_codes_are_those_of_two_products(emulated, n, rows, across, plan, dtype, rule, signed):
    torch.manual_seed(n)
    columns, width = 8 * plan.tiles, n * across  # of a row of x, of which the kernel sees rows of n
    source = plan.source(n, dtype, signed, rule=rule)
    shape = {"threads": 32 * plan.warps, "shared": plan.shared_bytes(n), "columns": columns, "base": n // columns}
    shape |= {"lines": plan.code_lines(n)}
    run = RUN.format(call=plan.call(n, dtype, signed, dtype), **shape)
    library = emulated(source[: source.index('extern "C" __global__')] + run)
    library.run.restype = ctypes.c_char_p
    x = torch.randn(rows, n).to(dtype)
    x[1], x[2, 7], x[3, 9], x[4, 3], x[4, 35] = 0, INF, NAN, INF, INF
    x = x[: rows // across * across]
    rows, signs = x.shape[0], random_signs(n, 1)
    expected, expected_scales = codes_of(x.view(-1, width), signs if signed else None, n, columns, rule)
    taken = torch.zeros(1, dtype=torch.int32)
    for seed in range(3):
        q = torch.full((rows // across, width), 0.5).to(torch.float8_e4m3fn)
        scales = torch.zeros(width // 128, rows // across).T
        if across == 3:  # scales in rows
            scales = scales.contiguous()
        sizes = [ctypes.c_longlong(v) for v in (rows, n, n)]
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, q, signs)]
        where = [ctypes.c_void_p(scales.data_ptr()), *map(ctypes.c_longlong, scales.stride()), width // 128]
        blocks, counter = plan.grid(rows, 1, n, dtype, 1 + (seed > 0)), None if seed == 2 else taken.data_ptr()
        given = *pointers, *sizes, ctypes.c_float(n**-0.5), blocks, seed, *where, ctypes.c_void_p(counter)
        assert library.run(*given) == b""
        assert taken.item() == 0  # as it was: the next launch finds it so
        torch.testing.assert_close(scales, expected_scales, rtol=1e-5, atol=0, equal_nan=True)
        wrong = (q.view(torch.uint8) != expected.view(torch.uint8)).view(rows, n)
        assert wrong.float().mean() < 1e-3 and not wrong[1:5].any()


def test_plans_divide_rows_as_the_kernel_asks():
    """The first multiplies the fewest empty rows; two bases, and more than 192 rows of one, have none."""
    for n in (1536, 2560, 3072, 4864, 5632, 9728, 11008, 14336, 18944, 24576, 27648, 28672, 32768):
        plans = twice_plans(n)
        waste = [plan.warps * 16 * 8 * plan.tiles / n for plan in plans]
        assert plans and waste == sorted(waste)
        for plan in plans:
            tall, rest = divmod(n, 8 * plan.tiles)
            assert not rest and tall % 4 == 0 and plan.warps == 4 * -(-tall // 64)
            registers = {8: 122, 16: 122, 32: 218}[plan.tiles] * 32 * plan.warps * plan.resident
            room = (plan.shared_bytes(n) + 1024) * plan.resident
            assert (
                registers <= nvrtc.SM_REGISTERS and room <= nvrtc.SM_SHARED and plan.shared_bytes(n) <= nvrtc.MAX_SHARED
            )
    assert not any(map(twice_plans, (512, 8960, 17920, 29568, 53248)))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1536, 3072, 4096, 4864, 8192, 13824, 14336, 17408, 28672])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gpu_codes_where_a_block_has_more_rows_than_buffers(n, dtype):
    if not (torch.cuda.is_available() and nvrtc.available(torch.device("cuda"))):
        pytest.skip("needs sm_90 and cuda.core")
    plan = plan_for_codes(n, n, dtype)
    assert plan.kind == "twice"
    torch.manual_seed(n)
    x = torch.randn(19 * 132 * plan.resident + 3, n, device="cuda").to(dtype)  # counted: turns, and what is left
    x[1], x[-2, 7], x[-3, 9] = 0, INF, NAN
    signs = random_signs(n, 1).cuda()
    expected, expected_scales = codes_of(x, signs, n, 8 * plan.tiles, "exact")
    for _ in range(5):
        q, scales = torch.full_like(expected, 0.5), torch.zeros_like(expected_scales.T).T
        launch(x, q, signs, n**-0.5, plan, scales=scales, rule="exact")
        torch.testing.assert_close(scales, expected_scales, rtol=2e-3, atol=0, equal_nan=True)
        other = ~torch.isclose(scales, expected_scales, rtol=1e-5, atol=0, equal_nan=True)
        # A sum near the middle of two bfloat16 may have gone to the other; float16's are not exact in the tensor core.
        assert other.float().mean() < (1e-4 if dtype == torch.bfloat16 else 1e-3)
        wrong = q.view(torch.uint8) != expected.view(torch.uint8)
        assert wrong.float().mean() < 1e-3 and not wrong[[1, -2, -3]].any()


@pytest.mark.gpu
@pytest.mark.parametrize("n", [4096, 8192])
def test_gpu_rows_are_taken_once_by_launches_at_once_and_in_graphs(n):
    if not (torch.cuda.is_available() and nvrtc.available(torch.device("cuda"))):
        pytest.skip("needs sm_90 and cuda.core")
    plan = plan_for_codes(n, n, torch.bfloat16)
    assert plan.counted
    torch.manual_seed(n)
    x = torch.randn(19 * 132 * plan.resident + 3, n, device="cuda").bfloat16()

    def run(q, scales, plan=plan):
        launch(x, q, None, n**-0.5, plan, scales=scales, rule="bf16")

    def empty():
        return torch.empty_like(x, dtype=torch.float8_e4m3fn), torch.empty(n // 128, len(x), device="cuda").T

    expected = empty()
    run(*expected, replace(plan, counted=False))
    streams, results = [torch.cuda.Stream() for _ in range(3)], [empty() for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=streams[2]):
        for _ in range(3):
            run(*results[2])
    torch.cuda.synchronize()
    for _ in range(20):
        for q, scales in results:
            q.view(torch.uint8).fill_(1), scales.fill_(-1.0)
        torch.cuda.synchronize()
        for stream, result in zip(streams[:2], results, strict=False):
            with torch.cuda.stream(stream):
                run(*result)
        graph.replay()
        torch.cuda.synchronize()
        for q, scales in results:
            assert torch.equal(q.view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(scales, expected[1])
