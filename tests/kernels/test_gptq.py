"""GPTQ's inner loop: codes' own numbers, the recurrence as float64 has it, and the same from every backend."""

import json

import pytest
import torch

from quantrot.kernels.gptq import nearest, round_columns

KINDS = ["mxfp4", "int8", "fp8"]
MOST = {"mxfp4": 6.0, "int8": 127.0, "fp8": 448.0}

INTERPRETED = """
import json, torch
from quantrot.kernels.gptq import nearest, round_columns, triton

found = {}
for kind, most in {"mxfp4": 6.0, "int8": 127.0, "fp8": 448.0}.items():
    binades = (torch.linspace(1, 2, 65)[:, None] * 2.0 ** torch.arange(-16, 10)).flatten()
    x = torch.cat([torch.linspace(0, 1.2, 20001) * most, binades, torch.tensor([0.0, float("nan"), float("inf")])])
    x = torch.cat([x, -x])[None]
    rounded, errors = triton.round_columns(x, x, torch.ones_like(x), torch.zeros(1, 1), kind, 1 << 16, 1)
    wanted = nearest(x, kind)
    same = ((rounded == wanted) | (rounded.isnan() & wanted.isnan())) & ((errors == x - wanted) | errors.isnan())
    g = torch.Generator().manual_seed(0)
    targets, columns = (torch.randn(48, 37, generator=g) for _ in range(2))
    steps = (torch.rand(48, 37, generator=g) + 0.5) / most
    factor = torch.randn(48, 60, generator=g)[:, 3:51] * 0.1  # rows of a wider matrix; above the diagonal not read
    block = targets, columns, steps, factor, kind
    results = [triton.round_columns(*block, 16), round_columns(*block, "reference")]  # three programs
    for x, y in zip(round_columns(*(t[:9, :7] for t in block[:3]), factor[:9, :9], kind, "triton"), results[0]):
        assert torch.equal(x, y[:9, :7])
    differing = (results[0][0] != results[1][0]).any(0).float().mean().item()
    error = [((r * steps + e - columns).abs().max() / columns.abs().max()).item() for r, e in results]
    found[kind] = {"nearest": same.all().item(), "differing": differing, "error": max(error)}
print(json.dumps(found))
"""


@pytest.fixture
def block():
    """targets, columns, steps, factor: nothing above the diagonal that may be read."""
    g = torch.Generator().manual_seed(0)
    targets, columns = (torch.randn(48, 300, generator=g) for _ in range(2))
    factor = torch.randn(48, 48, generator=g) * 0.1
    factor[torch.ones(48, 48).triu() > 0] = float("nan")
    return targets, columns, torch.rand(48, 300, generator=g) + 0.5, factor


def recurrence(targets, columns, steps, factor, kind):
    """In float64."""
    rounded, errors = torch.zeros(targets.shape).double(), torch.zeros(targets.shape).double()
    for k in range(len(targets)):
        made_up = (factor[k, :k, None].double() * errors[:k]).sum(0)
        rounded[k] = nearest(((targets[k] + made_up) / steps[k]).float(), kind)
        errors[k] = columns[k] - rounded[k] * steps[k].double()
    return rounded.float(), errors.float()


def check(block, kind, backend):
    """All weights but those of which one quotient lies at a tie, up to float32's rounding."""
    targets, columns, steps, factor = block
    steps = steps / MOST[kind]
    rounded, errors = round_columns(targets, columns, steps, factor, kind, backend)
    wanted, wanted_errors = (
        t.to(rounded.device) for t in recurrence(*(t.cpu() for t in (targets, columns, steps, factor)), kind)
    )
    same = (rounded == wanted).all(0)
    assert same.float().mean() > 0.97
    torch.testing.assert_close(errors[:, same], wanted_errors[:, same], rtol=0, atol=1e-5)
    torch.testing.assert_close(rounded * steps + errors, columns, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_recurrence(block, kind):
    check(block, kind, "reference")


def test_the_operator_is_registered_and_its_results_are_contiguous(block):
    """As its fake says, in which torch.compile believes."""
    turned = (*(t.T.contiguous().T for t in block), "int8", "auto")
    torch.library.opcheck(torch.ops.quantrot.round_columns, turned)
    results = torch.ops.quantrot.round_columns(*turned)
    assert all(t.is_contiguous() for t in results)
    for x, y in zip(results, round_columns(*block, "int8"), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [1, 3, 300])
def test_triton_on_a_gpu(block, kind, m):
    targets, columns, steps, factor = (t.cuda() for t in block)
    given = (targets[:, :m], columns[:, :m], steps[:, :m], factor)
    check(given, kind, "triton")
    once, again = (round_columns(*given, kind) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_weights_do_not_know_of_each_other_on_a_gpu(block, kind):
    targets, columns, steps, factor = (t.cuda() for t in block)
    whole = round_columns(targets, columns, steps, factor, kind)
    for here in (slice(0, 131), slice(131, 300)):
        part = round_columns(targets[:, here], columns[:, here], steps[:, here], factor, kind)
        assert all(torch.equal(a, b[:, here]) for a, b in zip(part, whole, strict=True))


def test_triton_in_its_interpreter(interpreted):
    for kind, found in json.loads(interpreted(INTERPRETED)).items():
        assert found["nearest"], kind
        assert found["differing"] < 0.1 and found["error"] < 1e-5, (kind, found)


def test_every_number_of_a_code_is_its_own_nearest():
    e4m3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = {"mxfp4": torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]), "int8": torch.arange(-127.0, 128), "fp8": e4m3}
    for kind, each in numbers.items():
        each = each[~each.isnan()]
        assert torch.equal(nearest(each, kind), each)
        between = (each.sort().values[1:] + each.sort().values[:-1]) / 2
        assert torch.isin(nearest(between, kind), each).all()
        assert nearest(torch.tensor([1e9, -1e9]), kind).tolist() == [MOST[kind], -MOST[kind]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"columns": torch.zeros(48, 299)}, r"columns: torch.float32 \[48, 299\]; allowed: float32 \[48, 300\]"),
        ({"factor": torch.zeros(48, 47)}, r"factor: torch.float32 \[48, 47\]; allowed: float32 \[48, 48\]"),
        ({"steps": torch.zeros(48, 300).half()}, "steps: torch.float16"),
        ({"kind": "int4"}, "kind 'int4'"),
        ({"backend": "cuda"}, "backend 'cuda'"),
        ({"targets": torch.zeros(48)}, r"targets: torch.float32 \[48\]; allowed: float32 \[B, m\]"),
    ],
)
def test_errors_name_what_is_wrong(block, change, message):
    given = dict(zip(("targets", "columns", "steps", "factor"), block, strict=True), kind="int8") | change
    with pytest.raises(ValueError, match=message):
        round_columns(**given)


def test_without_a_gpu_triton_is_refused(block):
    with pytest.raises(ValueError, match="backend: 'triton' needs a CUDA device and Triton, the data is on cpu"):
        round_columns(*block, "int8", "triton")


def test_it_compiles_for_hopper(compiled_for_hopper):
    found = compiled_for_hopper(
        "from quantrot.kernels.gptq import triton\n"
        "for kind in triton.NUMBERS:\n"
        "    triton.round_columns(*(torch.empty(128, 4096) for _ in range(3)), torch.empty(128, 4096)[:, :128], kind)\n"
    )
    assert len(found) == 3 and all(kernel["local"] == 0 for kernel in found)
