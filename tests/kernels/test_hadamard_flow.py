"""The Hadamard transform through a ring of buffers: run by the emulator, against the definition in float64."""

import ctypes

import pytest
import torch

from quantrot.kernels.fp8.reference import hadamard_quantize_reference
from quantrot.kernels.hadamard.codes import prepare_codes
from quantrot.kernels.hadamard.hopper import Plan, launch, plan_for
from quantrot.kernels.hadamard.reference import MAX_RELATIVE_ERROR
from quantrot.orthogonal import random_signs

RUN = """
static std::string message;
extern "C" const char* run(const void* x, void* y, const signed char* signs, long long rows, long long x_stride,
                           long long y_stride, float scale, unsigned blocks, unsigned seed, float* scales,
                           unsigned* taken) {{
  const unsigned long long tall = (rows - 1) * x_stride / {columns} + {base};
  const quantrot::TensorMap map{{(unsigned char*)x, {columns}, tall, 2 * {columns}, 64, {base}, 2, 1}};
  message = emulator::launch({{blocks, 1, 1}}, {cluster}, {threads}, {shared}, seed, [&] {{
    quantrot::{call}(map, {{x, y, signs, rows, x_stride, y_stride, 1, scale, scales, {order} / 128, 1, {order} / 128,
        taken}});
  }});
  return message.c_str();
}}
"""


def flow(columns: int, groups: int, stages: int = 2, **options: int) -> Plan:
    return Plan("flow", 4 * groups + 4, 1, tiles=columns // 8, stages=stages, **options)


PLANS = [
    (24 * 64, flow(64, 2), torch.bfloat16, True, False),  # 12 x 2 x 64: rows of zeros, two rows in work
    (108 * 64, flow(64, 2), torch.float16, False, True),  # the second tile part empty; an asymmetric base
    (8 * 128, flow(128, 3, 3), torch.bfloat16, False, False),  # three rows in work
    (56 * 256, flow(256, 2, paced=True), torch.bfloat16, True, True),
    (136 * 64, flow(64, 3, 3, paced=True), torch.bfloat16, False, False),  # three warpgroups at a row
    (172 * 64, flow(64, 2), torch.float16, True, False),  # more tiles than warpgroups
    (208 * 128, flow(128, 2, cluster=2), torch.bfloat16, True, False),  # a row in four warpgroups of two blocks
    (108 * 128, flow(128, 2, 4, cluster=2, paced=True), torch.float16, False, True),  # two rows in work in both blocks
    (172 * 64, flow(64, 3, 3, paced=True, shift=True), torch.float16, True, False),  # tiles that change hands
    (208 * 128, flow(128, 2, cluster=2, shift=True), torch.bfloat16, False, True),  # between blocks, too
]


@pytest.mark.parametrize(("n", "plan", "dtype", "signed", "transposed"), PLANS)
def test_the_emulated_kernel_is_the_definition(emulated, n, plan, dtype, signed, transposed):
    torch.manual_seed(0)
    columns = 8 * plan.tiles
    source = plan.source(n, dtype, signed, transposed)
    numbers = {"order": n, "columns": columns, "base": n // columns, "threads": 32 * plan.warps}
    numbers["cluster"] = plan.cluster
    run = RUN.format(shared=plan.shared_bytes(n), call=plan.call(n, dtype, signed, dtype), **numbers)
    library = emulated(source[: source.index('extern "C" __global__')] + run)
    library.run.restype = ctypes.c_char_p
    rows, apart, signs = 11 if n < 20000 else 6, 2 * columns, random_signs(n, 1)
    x, y = torch.randn(rows, n + apart).to(dtype), torch.full((rows, n), float("nan"), dtype=dtype)
    numbers = [ctypes.c_longlong(v) for v in (rows, n + apart, n)]
    taken = torch.zeros(1, dtype=torch.int32)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, y, signs, taken)]
    for seed, (clusters, counter) in enumerate([(2, pointers[3]), (1, pointers[3]), (2, None)]):
        y.fill_(float("nan"))
        blocks = clusters * plan.cluster
        assert library.run(*pointers[:3], *numbers, ctypes.c_float(n**-0.5), blocks, seed, None, counter) == b""
        assert taken.item() == 0  # as it was: the next launch finds it so
        x64 = x[:, :n].double() * (signs if signed else 1)
        exact = torch.ops.quantrot.hadamard(x64, None, n, n**-0.5, transposed, "auto")
        assert ((y.double() - exact).norm() / exact.norm()).item() <= MAX_RELATIVE_ERROR[dtype]


@pytest.mark.parametrize("rule", ["exact", "bf16", "pow2"])
def test_emulated_codes_are_those_of_the_float32_transform(emulated, rule):
    torch.manual_seed(0)
    n, plan = 24 * 256, flow(256, 2)
    source = plan.source(n, torch.bfloat16, False, rule=rule)
    numbers = {"order": n, "columns": 256, "base": 24, "threads": 32 * plan.warps, "cluster": 1}
    run = RUN.format(shared=plan.shared_bytes(n), call=plan.call(n, torch.bfloat16, False, torch.bfloat16), **numbers)
    library = emulated(source[: source.index('extern "C" __global__')] + run)
    library.run.restype = ctypes.c_char_p
    x = torch.randn(5, n).bfloat16()
    x[1], x[2, 7], x[3, 9] = 0, float("inf"), float("nan")
    q, scales = torch.full((5, n), 0.5).to(torch.float8_e4m3fn), torch.zeros(5, n // 128)
    sizes = [ctypes.c_longlong(v) for v in (5, n, n)]
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, q, x)]
    where = ctypes.c_void_p(scales.data_ptr())
    assert library.run(*pointers, *sizes, ctypes.c_float(n**-0.5), 2, 0, where, None) == b""
    expected, expected_scales = hadamard_quantize_reference(x, None, n, n**-0.5, (1, 128), rule)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-5, atol=0, equal_nan=True)
    wrong = q.view(torch.uint8) != expected.view(torch.uint8)
    assert wrong.float().mean() < 1e-3 and not wrong[1:4].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("n", "plan"),
    [
        (1024, flow(128, 3, 3)),
        (3072, flow(64, 3, 6)),
        (5120, flow(128, 2, 4)),
        (11008, flow(64, 3, 4)),
        (14336, flow(128, 2, 4)),
        (16384, flow(128, 2, 4)),
        (18944, flow(128, 3, 3)),
        (28672, flow(128, 2, 3)),
        (28672, flow(256, 2, 3)),
        (53248, flow(256, 2, 2)),
        (53248, flow(256, 2, 2, cluster=2, paced=True)),
        (53248, flow(256, 2, 2, cluster=2, shift=True)),
        (11008, flow(64, 3, 3, paced=True, shift=True)),
        (12288, flow(256, 2, 4)),
        (14336, flow(128, 2, 4, cluster=2, paced=True)),
        (28672, flow(256, 2, 2, cluster=2)),
        (28672, flow(256, 2, 2, paced=True)),
        (18944, flow(128, 3, 3, paced=True)),
    ],
)
def test_on_a_gpu_every_run_gives_the_same_right_bits(n, plan, dtype):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    torch.manual_seed(0)
    for rows in (1, 3, 63, 257):
        x = torch.randn(rows, n + 8 * plan.tiles, device="cuda").to(dtype)[:, :n]
        signs = random_signs(n, 1).to("cuda")
        y = torch.full((rows, n), float("nan"), dtype=dtype, device="cuda")
        launch(x, y, signs, n**-0.5, plan)
        exact = torch.ops.quantrot.hadamard(x.double(), signs, n, n**-0.5, False, "reference")
        assert ((y.double() - exact).norm() / exact.norm()).item() <= MAX_RELATIVE_ERROR[dtype]
        again = x.clone()
        for _ in range(100 if rows == 257 else 1):
            launch(again.copy_(x), again, signs, n**-0.5, plan)
            assert torch.equal(again, y)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [13824, 18944, 32768])
def test_on_a_gpu_rows_are_taken_once_by_launches_at_once_and_in_graphs(n):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    torch.manual_seed(0)
    plan = plan_for(n, torch.bfloat16)
    assert plan is not None and plan.kind == "flow"
    x = torch.randn(1500, n, device="cuda").bfloat16()
    expected = torch.empty_like(x)
    for first in range(0, 1500, 100):  # fixed shares
        launch(x[first : first + 100], expected[first : first + 100], None, n**-0.5, plan)
    streams, results = [torch.cuda.Stream() for _ in range(3)], [torch.empty_like(x) for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=streams[2]):
        for _ in range(3):
            launch(x, results[2], None, n**-0.5, plan)
    torch.cuda.synchronize()
    for _ in range(20):
        for y in results:
            y.fill_(float("nan"))
        torch.cuda.synchronize()
        for stream, y in zip(streams[:2], results, strict=False):
            with torch.cuda.stream(stream):
                launch(x, y, None, n**-0.5, plan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(y, expected) for y in results)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [5120, 8192, 14336, 28672])
def test_on_a_gpu_codes_wait_for_the_rows_that_the_kernel_before_them_writes(n):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    plan = plan_for(n, torch.bfloat16)
    assert plan is not None and plan.overlap
    x = torch.randn((8 << 20) // n, n, device="cuda").bfloat16()
    y, codes = torch.empty_like(x), torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = torch.empty(n // 128, x.shape[0], device="cuda").T

    def run(wait: bool) -> tuple[torch.Tensor, torch.Tensor]:
        y.zero_()
        launch(x, y, None, n**-0.5, plan)
        if wait:
            torch.cuda.synchronize()
        prepare_codes(y, codes, scales, None, n, n**-0.5, "exact")(y, codes, scales, None)
        y.zero_()  # not before they are read
        return codes.view(torch.uint8).clone(), scales.clone()

    expected_codes, expected_scales = run(True)
    for _ in range(20):
        got_codes, got_scales = run(False)
        assert torch.equal(got_codes, expected_codes) and torch.equal(got_scales, expected_scales)
