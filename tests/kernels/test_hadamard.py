"""The laws of the Hadamard transform, on the CPU and, where there is a GPU, on every backend."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantrot.kernels.hadamard import hadamard_ref, hadamard_transform, hadamard_transform_
from quantrot.kernels.hadamard.reference import MAX_RELATIVE_ERROR
from quantrot.orthogonal import hadamard, hadamard_factors, random_signs

SMALL = [1, 2, 4, 8, 12, 16, 20, 32, 64, 96, 128, 192, 256, 512, 576, 768, 1024, 1152]
LARGE = [2048, 3072, 4096, 4864, 5120, 8192, 11008, 12288, 13824, 14336, 16384, 18944, 28672, 32768]
RARE = [1536, 17408, 24576, 25600, 29568, 40960, 53248, 65536]
ROWS = [0, 1, 3, 63, 257]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]

gpu = pytest.mark.gpu
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])


@pytest.fixture(autouse=True)
def _deterministic():
    torch.manual_seed(0)


def relative(y: torch.Tensor, exact: torch.Tensor) -> float:
    return ((y.double() - exact).norm() / exact.norm().clamp_min(1e-300)).item()


def exact(x: torch.Tensor, **kwargs) -> torch.Tensor:
    return hadamard_ref(x.double(), **kwargs)


def signs_of(n: int, device: str = "cpu") -> torch.Tensor:
    return random_signs(n, seed=n).to(device)


# --- The definition --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 8, 12, 20, 64, 96, 576, 1536, 4864])
def test_the_definition_is_a_product_with_the_matrix_of_orthogonal(n):
    x, h, s = torch.randn(3, n, dtype=torch.float64), hadamard(n).double(), signs_of(n)
    torch.testing.assert_close(hadamard_ref(x, signs=s, scale=0.5), (x * s) @ h * 0.5)
    y = torch.ops.quantrot.hadamard(x, s, n, 0.5, True, "auto")
    torch.testing.assert_close(y, (x @ h.T) * s * 0.5)


@pytest.mark.parametrize(("n", "block"), [(96, 12), (256, 32), (1152, 576), (64, 64)])
def test_a_block_transform_is_the_transform_of_each_block(n, block):
    x, s = torch.randn(5, n), signs_of(n)
    y = hadamard_transform(x, block=block, signs=s)
    parts = [hadamard_ref(x[:, i : i + block], signs=s[i : i + block]) for i in range(0, n, block)]
    assert torch.equal(y, torch.cat(parts, 1))
    assert torch.equal(
        hadamard_transform(x, block=block, signs=s[:block]), hadamard_ref(x, block=block, signs=s[:block])
    )


# --- Laws, on every device
# ---------------------------------------------------------------------------------------------


@devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", SMALL + LARGE)
def test_error_to_float64_is_one_rounding(device, dtype, n):
    x = torch.randn(max(2, (1 << 16) // n), n, device=device).to(dtype)
    assert relative(hadamard_transform(x), exact(x)) <= MAX_RELATIVE_ERROR[dtype]


@gpu
@pytest.mark.parametrize("n", RARE)
def test_orders_that_run_in_passes_are_as_exact(n):
    for dtype in DTYPES:
        x = torch.randn(5, n, device="cuda").to(dtype)
        assert relative(hadamard_transform(x), exact(x)) <= MAX_RELATIVE_ERROR[dtype]


@devices
@pytest.mark.parametrize("n", SMALL + LARGE[:3])
def test_the_adjoint_undoes_the_transform(device, n):
    x, s = torch.randn(3, n, device=device), signs_of(n, device)
    y = hadamard_transform(x, signs=s)
    back = torch.ops.quantrot.hadamard(y, s, n, n**-0.5, True, "auto")
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-5)


@devices
@pytest.mark.parametrize("n", [2, 16, 128, 1024, 4096])
def test_a_power_of_two_is_its_own_inverse(device, n):
    x = torch.randn(3, n, device=device)
    torch.testing.assert_close(hadamard_transform(hadamard_transform(x)), x, rtol=1e-5, atol=1e-5)


@devices
@pytest.mark.parametrize("n", SMALL)
def test_parseval_the_norm_is_kept(device, n):
    x = torch.randn(7, n, device=device)
    torch.testing.assert_close(hadamard_transform(x).norm(dim=1), x.norm(dim=1), rtol=1e-5, atol=0)


@devices
@pytest.mark.parametrize("n", SMALL)
def test_linearity(device, n):
    x, y = torch.randn(2, 5, n, device=device)
    left = hadamard_transform(2 * x - 3 * y)
    torch.testing.assert_close(left, 2 * hadamard_transform(x) - 3 * hadamard_transform(y), rtol=1e-4, atol=1e-4)


@devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [8, 64, 256, 576, 3072, 4096])
def test_equivariance_a_row_does_not_know_its_neighbours(device, dtype, n):
    x = torch.randn(63, n, device=device).to(dtype)
    order = torch.randperm(63, device=device)
    y = hadamard_transform(x)
    assert torch.equal(hadamard_transform(x[order]), y[order])
    assert torch.equal(hadamard_transform(x[17:18]), y[17:18])


@devices
@pytest.mark.parametrize("n", [4, 32, 512, 3072])
def test_powers_of_two_scale_exactly(device, n):
    x = torch.randn(3, n, device=device)
    assert torch.equal(hadamard_transform(x * 4), hadamard_transform(x) * 4)
    assert torch.equal(hadamard_transform(x, scale=0.25), hadamard_transform(x * 0.5, scale=0.5))


@devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [8, 32, 64, 128, 256, 1024, 3072, 4096, 8192, 13824, 14336, 16384, 32768, 53248])
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_special_values_reach_their_own_row_and_no_other(device, dtype, n, value):
    x = torch.randn(9, n, device=device).to(dtype)
    clean = hadamard_transform(x)
    x[4, n // 3] = value
    y, sums = hadamard_transform(x), hadamard_ref(x)
    others = [i for i in range(9) if i != 4]
    assert torch.equal(y[others], clean[others])
    assert torch.equal(y[4].isnan(), sums[4].isnan()) and torch.equal(y[4].isinf(), sums[4].isinf())
    if value == value:
        assert torch.equal(y[4].sign(), sums[4].sign())


@devices
def test_two_infinities_are_nan_where_their_signs_differ(device):
    x = torch.zeros(1, 64, device=device)
    x[0, 0] = x[0, 1] = float("inf")
    y = hadamard_transform(x)
    assert y[0, ::2].isinf().all() and y[0, 1::2].isnan().all()


@devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_stay_zero_and_large_sums_become_inf(device, dtype):
    zeros = torch.zeros(3, 256, device=device, dtype=dtype)
    assert (hadamard_transform(zeros) == 0).all() and (hadamard_transform(-zeros) == 0).all()
    top = torch.full((1, 256), torch.finfo(dtype).max, device=device, dtype=dtype)
    y = hadamard_transform(top, scale=1.0)
    assert y[0, 0].isinf() and not y.isnan()[0, 0]


@devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [2, 12, 64, 256, 576, 1024])
@pytest.mark.parametrize("rows", ROWS)
def test_odd_row_counts(device, dtype, n, rows):
    x = torch.randn(rows, n, device=device).to(dtype)
    y = hadamard_transform(x)
    assert y.shape == x.shape and y.dtype == dtype
    if rows * n > 2048:
        assert relative(y, exact(x)) <= MAX_RELATIVE_ERROR[dtype]
    torch.testing.assert_close(y, hadamard_ref(x))


@devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", SMALL + LARGE)
def test_the_bits_of_a_row_do_not_depend_on_how_many_rows_there_are(device, dtype, n):
    many = ((1 << 18) if device == "cpu" else 21 << 20) // n + 5  # more than a small tensor's, and than stay in L2
    x, s = torch.randn(many, n, device=device).to(dtype), signs_of(n, device)
    y = hadamard_transform(x, signs=s)
    for rows in (1, 3, many // 96, many // 4):
        assert torch.equal(hadamard_transform(x[:rows], signs=s), y[:rows])


@devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [2, 16, 64, 256, 576, 3072, 4096])
def test_layout_does_not_change_bits(device, dtype, n):
    flat = torch.randn(7 * n + 3, device=device).to(dtype)
    unaligned = flat[3:].view(7, n)
    assert torch.equal(hadamard_transform(unaligned), hadamard_transform(unaligned.clone()))
    wide = torch.randn(7, 2 * n + 16, device=device).to(dtype)
    for rows in (wide[:, 16 : 16 + n], wide[::2, :n], wide[:, 1 : n + 1], wide[:, : 2 * n : 2]):
        assert torch.equal(hadamard_transform(rows), hadamard_transform(rows.contiguous()))
    cube = torch.randn(2, n, 3, device=device).to(dtype).transpose(1, 2)
    assert torch.equal(hadamard_transform(cube), hadamard_transform(cube.contiguous()))


@devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [2, 16, 64, 256, 576, 3072, 4096, 16384])
def test_in_place_is_out_of_place(device, dtype, n):
    x, s = torch.randn(7, 2 * n + 16, device=device).to(dtype), signs_of(n, device)
    for rows in (x[:, :n].contiguous(), x[:, 16 : 16 + n], x[:, 3 : 3 + n]):
        y = hadamard_transform(rows.contiguous(), signs=s)
        assert hadamard_transform_(rows, signs=s) is rows
        assert torch.equal(rows, y)


@devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_backward_does_not_take_what_was_transformed_in_place_for_what_it_saved(device, dtype):
    w, x = (
        torch.randn(256, device=device, dtype=dtype, requires_grad=True),
        torch.randn(8, 256, device=device).to(dtype),
    )
    y = (w * x).sum()
    hadamard_transform_(x.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@gpu
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("n", [4096, 8192, 16384])
def test_in_place_is_out_of_place_where_all_of_it_stays_in_l2(dtype, n):
    x = torch.randn((10 << 20) // n + 1, n, device="cuda").to(dtype)
    y = hadamard_transform(x)
    for _ in range(20):
        again = x.clone()
        assert torch.equal(hadamard_transform_(again), y)


@settings(max_examples=40, deadline=None)
@given(
    n=st.sampled_from([1, 2, 4, 12, 20, 24, 32, 36, 64, 76, 96, 128, 256, 576]),
    rows=st.integers(1, 9),
    seed=st.integers(0, 9),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_any_order_matches_the_dense_product(n, rows, seed, dtype):
    x = torch.randn(rows, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    dense = (x.double() * signs_of(n)) @ hadamard(n).double() * n**-0.5
    error = (hadamard_transform(x, signs=signs_of(n)).double() - dense).norm() / dense.norm()
    assert error <= (torch.finfo(dtype).eps if dtype.itemsize < 4 else 4 * MAX_RELATIVE_ERROR[dtype])


# --- Autograd, compile, graphs
# -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "block"), [(8, None), (12, None), (36, 12), (20, 20)])
def test_gradients_are_the_adjoint(n, block):
    x = torch.randn(2, n, dtype=torch.float64, requires_grad=True)
    s = signs_of(n)
    assert torch.autograd.gradcheck(lambda x: hadamard_transform(x, block=block, signs=s), x)
    assert torch.autograd.gradgradcheck(lambda x: hadamard_transform(x, block=block, signs=s), x)


@gpu
@pytest.mark.parametrize("n", [12 * 256, 28 * 512, 148 * 128])
def test_gradients_on_the_gpu_use_the_transposed_base(n):
    s = signs_of(n, "cuda")
    x = torch.randn(3, n, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn_like(x)
    hadamard_transform(x, signs=s).backward(g)
    expected = torch.ops.quantrot.hadamard(g.double(), s, n, n**-0.5, True, "reference")
    assert relative(x.grad, expected) <= MAX_RELATIVE_ERROR[torch.bfloat16]


@devices
def test_the_operators_are_functional_and_registered(device):
    x, s = torch.randn(3, 64, device=device, requires_grad=True), signs_of(64, device)
    torch.library.opcheck(torch.ops.quantrot.hadamard, (x, s, 64, 0.125, False, "auto"))
    torch.library.opcheck(torch.ops.quantrot.hadamard_, (x.detach().clone(), s, 64, 0.125, False, "auto"))


def test_compiled_code_takes_another_width_and_another_block():
    run = torch.compile(lambda x, block: hadamard_transform(x, block=block) * 1, fullgraph=True, backend="eager")
    for width, block in ((256, None), (512, None), (768, 32), (768, 64)):
        x = torch.randn(4, width)
        assert torch.equal(run(x, block), hadamard_transform(x, block=block))


@devices
def test_compiled_bits_are_eager_bits(device):
    s = signs_of(64, device)

    def step(x):
        return hadamard_transform(hadamard_transform(x + 1, signs=s), block=16) * 2

    x = torch.randn(5, 64, device=device)
    backend = "inductor" if device == "cuda" else "aot_eager"  # inductor on the CPU needs a C++ compiler
    assert torch.equal(torch.compile(step, fullgraph=True, backend=backend)(x), step(x))


@gpu
@pytest.mark.parametrize("n", [64, 4096, 14336])
def test_graph_bits_are_eager_bits(n):
    x = torch.randn(63, n, device="cuda", dtype=torch.bfloat16)
    eager = hadamard_transform(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = hadamard_transform(x)
    captured.fill_(float("nan"))
    graph.replay()
    assert torch.equal(captured, eager)


@gpu
@pytest.mark.parametrize("n", [32, 64, 128, 256, 576, 1024, 1536, 3072, 4096, 4864, 14336, 16384, 18944, 32768])
def test_a_hundred_runs_are_bit_equal(n):
    x = torch.randn(2 * 132 * 17 + 1 if n < 8192 else 601, n, device="cuda", dtype=torch.bfloat16)
    first = hadamard_transform(x)
    for _ in range(100):
        assert torch.equal(hadamard_transform(x), first)


SANITIZED = """
import torch
from quantrot.kernels.hadamard import hadamard_transform, hadamard_transform_
many = {11008: 601, 14336: 601, 16384: 601, 32768: 601}  # persistent blocks have a second row, and a third; two waves
powers = [8, 32, 64, 128, 256, 1024, 2048, 4096, 8192, 16384, 32768]
for n in powers + [576, 1536, 3072, 4864, 5120, 11008, 12288, 13824, 14336, 17408, 18944, 28672, 53248]:
    for rows in (1, 3, many.get(n, 5)):
        x = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
        torch.ops.quantrot.hadamard(x, None, n, 1.0, False, "hopper")
        hadamard_transform_(x, backend="hopper")
for n in (2048, 4096, 16384):
    hadamard_transform_(torch.empty(5, n, device="cuda"), backend="hopper")
torch.cuda.synchronize()
"""


@gpu
def test_the_sanitizer_finds_nothing_on_odd_rows(sanitized):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    sanitized(SANITIZED)


@gpu
@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [2, 12, 64, 256, 576, 3072, 4096, 14336, 16384])
def test_every_backend_meets_the_reference(backend, dtype, n):
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    if backend == "triton" and n > 8192:
        with pytest.raises(ValueError, match="'triton' has no order"):
            hadamard_transform(torch.randn(1, n, device="cuda"), backend=backend)
        return
    x, s = torch.randn(257, n, device="cuda").to(dtype), signs_of(n, "cuda")
    y = hadamard_transform(x, signs=s, backend=backend)
    limit = 2 * MAX_RELATIVE_ERROR[dtype] if n < 64 else MAX_RELATIVE_ERROR[dtype]
    assert relative(y, exact(x, signs=s)) <= limit


@gpu
def test_more_than_2_31_elements():
    if torch.cuda.get_device_properties(0).total_memory < 12 << 30:
        pytest.skip("needs 12 GiB of GPU memory")
    x = torch.zeros((1 << 31) // 256 + 5, 256, device="cuda", dtype=torch.bfloat16)
    x[-3:] = torch.randn(3, 256, device="cuda")
    tail = hadamard_transform(x[-3:].clone())
    hadamard_transform_(x)
    assert torch.equal(x[-3:], tail) and not x[:-3].any()


# --- Errors
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "kwargs", "says"),
    [
        (torch.zeros(2, 6), {}, "no Hadamard matrix of order 6"),
        (torch.zeros(2, 8), {"block": 3}, "block: 3 does not divide"),
        (torch.zeros(2, 8), {"order": 4}, "block=4"),
        (torch.zeros(2, 8, dtype=torch.int32), {}, "dtype torch.int32"),
        (torch.tensor(1.0), {}, "no last dimension"),
        (torch.zeros(2, 8), {"signs": torch.ones(3)}, "signs: shape"),
        (torch.zeros(2, 8), {"signs": torch.ones(8).bool()}, "signs: torch.bool; allowed"),
        (torch.zeros(2, 8), {"signs": torch.ones(8, requires_grad=True)}, "signs: torch.float32, with a gradient"),
        (torch.zeros(2, 8), {"backend": "cuda"}, "allowed: auto, hopper"),
        (torch.zeros(2, 8), {"backend": "hopper"}, "needs a CUDA device of capability 9.0"),
        (torch.zeros(2, 8, dtype=torch.float64), {"backend": "triton"}, "no float64"),
    ],
)
def test_errors_name_the_field_and_the_remedy(x, kwargs, says):
    with pytest.raises(ValueError, match=says):
        hadamard_transform(x, **kwargs)


# --- The kernels, without a GPU ---------------------------------------------------------------------------------------

INTERPRETED = """
import torch
from quantrot.kernels.hadamard import hadamard_ref, hadamard_transform
from quantrot.kernels.hadamard.reference import MAX_RELATIVE_ERROR
torch.manual_seed(0)
for n in (2, 8, 12, 32, 64, 128, 256, 576, 1024, 3072, 4096, 5120):
    signs = torch.randint(0, 2, (n,)) * 2 - 1
    for dtype in (torch.float32, torch.float16):
        for rows in (1, 3, max(17, 16384 // n)):
            x = torch.randn(rows, n).to(dtype)
            exact = hadamard_ref(x.double(), signs=signs)
            y = hadamard_transform(x, signs=signs, backend="triton")
            error = ((y.double() - exact).norm() / exact.norm()).item()
            assert error <= MAX_RELATIVE_ERROR[dtype] * (1 if rows * n > 8192 else 3), (n, rows, dtype, error)
print("agrees")
"""


def test_the_triton_kernel_agrees_when_interpreted(interpreted):
    assert interpreted(INTERPRETED).strip() == "agrees"


COMPILED = """
from quantrot.kernels.hadamard import triton
for dtype in (torch.bfloat16, torch.float32):
    for n in (32, 128, 576, 3072, 4096, 8192):
        x = torch.empty(64, n, dtype=dtype)
        triton.transform(x, torch.empty_like(x), None, n, 1.0, False)
"""


def test_no_triton_program_spills_registers_on_hopper(compiled_for_hopper):
    kernels = compiled_for_hopper(COMPILED)
    assert len(kernels) >= 10
    import triton

    spilling = 1 if triton.__version__.startswith("3.8.") else 0  # order 4096 in 16 bits, 176 bytes a thread
    assert len([k for k in kernels if k["local"]]) <= spilling


def _programs() -> list:
    """Names and sources; of plans that hold the same in registers all but the first are for machines with a GPU."""
    from dataclasses import replace

    from quantrot.kernels.hadamard.codes import plan_for_codes
    from quantrot.kernels.hadamard.hopper import IN_PLACE, Plan, plan_for

    found = []
    powers = [2, 8, 32, 64, 128, 256, 1024, 2048, 4096, 8192, 16384, 32768]
    for n in [*powers, 576, 1536, 3072, 4864, 5120, 11008, 12288, 13824, 14336, 17408, 18944, 28672, 53248]:
        plan = plan_for(n, torch.bfloat16)
        found.append((plan, f"{plan.kind}-{n}", plan.source(n, torch.bfloat16, True, True)))
    for n in (256, 1024, 4096):
        plan = plan_for(n, torch.bfloat16, small=True)
        found.append((plan, f"small-{n}", plan.source(n, torch.bfloat16, True)))
    for n in (128, 4096, 32768):
        plan = replace(plan_for(n, torch.float32), stream=False)
        found.append((plan, f"float32-{plan.kind}-{n}", plan.source(n, torch.float32, False)))
    for (dtype, n), plan in IN_PLACE.items():
        found.append((plan, f"in-place-{n}-{dtype}", replace(plan, stream=False).source(n, dtype, True)))
    for n, columns, groups in ((3072, 64, 3), (11008, 64, 3), (14336, 256, 2), (18944, 128, 3), (53248, 256, 2)):
        plan = Plan("flow", 4 * groups + 4, 1, tiles=columns // 8, stages=3 if groups == 3 else 2)
        found.append((plan, f"flow-{n}", plan.source(n, torch.float16, True, True)))
    for n in (32, 128, 1024, 4096, 8192, 14336, 28672):
        plan = plan_for_codes(n, 14336, torch.bfloat16)
        found.append((plan, f"codes-{n}", plan.source(n, torch.bfloat16, True, rule="bf16")))
    plan = Plan("axis", 8, 1)
    found.append((plan, "axis-20", plan.source(20, torch.float32, False, False, torch.float16)))
    first = {(p.kind, p.vectors, p.tiles, p.precision): source for p, _, source in reversed(found)}.values()
    return [pytest.param(name, source, marks=() if source in first else gpu) for _, name, source in found]


@pytest.mark.parametrize(("name", "source"), _programs(), ids=lambda v: v if len(v) < 40 else "")
def test_every_cuda_source_compiles_for_sm_90a(name, source, compiled_cuda):
    made = compiled_cuda(source)
    assert made.spilled == [0], made.log


def test_the_plans_of_an_order_give_a_row_the_same_bits():
    from quantrot.kernels.hadamard.hopper import IN_PLACE, SMALL_ELEMENTS, STREAM_BYTES, plan_for
    from quantrot.kernels.hadamard.tuned import SMALL_PLANS

    assert SMALL_ELEMENTS == 1 << 18 and STREAM_BYTES < 4 * (21 << 20)  # the test of bits on a GPU has more rows
    for (name, n), plan in SMALL_PLANS.items():
        assert plan.arithmetic == plan_for(n, getattr(torch, name)).arithmetic, (name, n)
    for (dtype, n), plan in IN_PLACE.items():
        assert plan.arithmetic == plan_for(n, dtype).arithmetic, (dtype, n)


def test_codes_have_a_plan_in_both_16_bit_types_or_in_neither():
    """Where one had none, hadamard_quantize_fp8 would run as two operators in that type only."""
    from quantrot.kernels.hadamard.codes import plan_for_codes
    from quantrot.kernels.hadamard.tuned import CODE_PLANS, PLANS

    orders = {n for _, n in (*PLANS, *CODE_PLANS)}
    has = {n: [plan_for_codes(n, 128 * n, d) is not None for d in (torch.bfloat16, torch.float16)] for n in orders}
    assert not [n for n, (brain, half) in has.items() if brain != half]
    assert all(has[n][0] for _, n in CODE_PLANS) and has[53248][0]


def test_blocks_of_2_kilobytes_do_not_overlap_in_large_tensors():
    """Those that tell the next kernel to start leave the hardware at 0.84 a nanosecond: 0.82 of a copy."""
    from quantrot.kernels.hadamard.hopper import _plan_of
    from quantrot.kernels.hadamard.tuned import PLANS

    for name, n in PLANS:
        for stays in (False, True):
            plan = _plan_of(n, getattr(torch, name), False, stays)
            bytes_of_a_block = plan.warps * plan.vectors * 512
            assert not plan.overlap or plan.kind not in ("lanes", "turn", "warp") or bytes_of_a_block >= 4096, (name, n)


def test_rows_are_asked_for_by_kernels_that_have_a_row_or_whole_rows_a_block_and_wait_themselves():
    from quantrot.kernels.hadamard.tuned import CODE_PLANS, PLANS, SMALL_PLANS

    for (name, n), plan in (*PLANS.items(), *SMALL_PLANS.items(), *CODE_PLANS.items()):
        a_row = plan.kind == "held" or (plan.kind == "share" and not plan.stages) or plan.share > 1
        assert not (plan.ahead or plan.later) or (a_row and plan.overlap), (name, n)
        assert not plan.later or (plan.kind == "lanes" and plan.vectors >= 8 and not plan.ahead), (name, n)


def test_only_bfloat16_is_turned_by_cut_products():
    from quantrot.kernels.hadamard.tuned import CODE_PLANS, PLANS, SMALL_PLANS

    for (name, n), plan in (*PLANS.items(), *SMALL_PLANS.items()):
        assert plan.precision != "CUT" or name == "bfloat16", (name, n)  # 4.6e-4: more than float16's one rounding
        assert plan.precision == "SPLIT" or n >= 2048, (name, n)  # else results near zero are off by several roundings
    assert all(plan.precision == "SPLIT" for plan in CODE_PLANS.values())


def test_tuning_proposes_products_of_fewer_bits_only_for_long_rows_and_cut_ones_only_for_bfloat16(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import bench_hadamard

    for propose in (bench_hadamard.candidates, bench_hadamard.small_candidates, bench_hadamard.code_candidates):
        codes = propose is bench_hadamard.code_candidates
        for dtype, n, allowed in (
            (torch.bfloat16, 256, {"SPLIT"}),
            (torch.bfloat16, 1024, {"SPLIT"}),
            (torch.bfloat16, 4096, {"SPLIT"} if codes else {"SPLIT", "CUT"}),
            (torch.float16, 1024, {"SPLIT"}),
            (torch.float16, 4096, {"SPLIT"} if codes else {"SPLIT", "PAIR"}),
        ):
            assert {plan.precision for plan in propose(n, dtype)} == allowed, (propose, dtype, n)


def test_notes_of_plans_that_were_not_timed_are_kept(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import bench_hadamard

    from quantrot.kernels.hadamard import tuned

    copy = tmp_path / bench_hadamard.TUNED.name
    copy.write_text(bench_hadamard.TUNED.read_text())
    monkeypatch.setattr(bench_hadamard, "TUNED", copy)
    before = bench_hadamard.read_notes()
    bench_hadamard.note(bench_hadamard.ROOT / "benchmarks" / "results" / "bench_hadamard-h200.json")
    after = bench_hadamard.read_notes()
    assert after.keys() == before.keys() and after["PLANS", "bfloat16", 128].startswith("1.0")
    assert all(after[key] == note for key, note in before.items() if key[0] == "CODE_PLANS")
    assert after["SMALL_PLANS", "float32", 32] == before["SMALL_PLANS", "float32", 32]  # the table has 2^25 only
    assert len(tuned.PLANS) == bench_hadamard.TUNED.read_text().partition("SMALL_PLANS")[0].count(": Plan(")


def test_plans_fit_the_multiprocessor():
    from quantrot.kernels.hadamard.tuned import PLANS, SMALL_PLANS
    from quantrot.kernels.nvrtc import MAX_SHARED, SM_SHARED

    for (_, n), plan in (*PLANS.items(), *SMALL_PLANS.items()):
        assert hadamard_factors(n)
        assert plan.shared_bytes(n) <= MAX_SHARED and plan.resident * plan.warps <= 64
        assert plan.resident * (plan.shared_bytes(n) + 1024) <= SM_SHARED


def test_the_definition_has_gradients_and_compiles_too():
    x, g = torch.randn(3, 24, dtype=torch.float64, requires_grad=True), torch.randn(3, 24, dtype=torch.float64)
    run = torch.compile(lambda t: hadamard_ref(t, block=8), fullgraph=True, backend="aot_eager")
    made = [torch.autograd.grad(f(x), x, g)[0] for f in (run, lambda t: hadamard_transform(t, block=8))]
    assert torch.equal(*made)
