"""The Triton kernels of FP8 attention: interpreted and compiled for Hopper without a GPU; all kernels on one."""

import pytest
import torch

from quantrot.kernels.attention import (
    Granularity,
    attend,
    fp8_attention,
    quantize_heads,
    rope_hadamard_quantize,
)
from tests.kernels.test_attention import DIMS, angles, qkv, relative
from tests.kernels.test_attention import _deterministic as _deterministic  # seeds every test here, too

gpu = pytest.mark.gpu

# --- The kernels, without a GPU --------------------------------------------------------------------------------------

INTERPRETED = """
import torch
from quantrot.kernels.attention import fp8_attention, rope_hadamard_quantize
from quantrot.orthogonal import random_signs
torch.manual_seed(0)

def prepared(dim, tokens, order, granularity, dtype, signs=None, scores="fp8", batch=1):
    q, k, v = (torch.randn(batch, tokens, n, dim).to(dtype) for n in (5, 2, 2))
    k[0, 0], v[1:] = 0, v[1:] * 1e-3
    v[0, -1, 0, 0] = float("nan")
    theta = torch.randn(1, tokens, dim // 2)
    args = q, k, v, theta.cos().to(dtype), theta.sin().to(dtype)
    kwargs = dict(order=order, signs=signs, granularity=granularity, scores=scores)
    ours = rope_hadamard_quantize(*args, **kwargs, backend="triton")
    for name, a, b in zip(ours._fields, ours, rope_hadamard_quantize(*args, **kwargs, backend="reference")):
        assert a.shape == b.shape and a.dtype == b.dtype
        if a.dtype == torch.float32:
            torch.testing.assert_close(a, b, rtol=0 if order is None else 1e-6, atol=0)
            continue
        turned = order is not None and name in ("q", "k")  # float32 sums in another order; a zero's sign is not said
        differ = a.view(torch.uint8) != b.view(torch.uint8) if not turned else a.float() != b.float()
        wrong = differ.float().mean().item()
        assert wrong <= (2e-4 if turned else 0), (dim, order, granularity, name, wrong)

F16, F32 = torch.float16, torch.float32
for case in ((64, 131, 64, "block", F16), (128, 20, 128, "token", F16), (128, 1, 128, "token", F32),
             (80, 17, 20, "block", F32), (96, 5, 96, "block", F16), (256, 3, None, "token", F16)):
    prepared(*case)
prepared(64, 3, 64, "block", F16, batch=2)
prepared(64, 20, 16, "token", F16, random_signs(64, 3))

def attended(dim, queries, keys, heads, groups, causal, granularity, **kwargs):
    batch = 2 if kwargs.keys() & {"lengths", "query_lengths", "mask"} else 1
    q, k, v = (torch.randn(batch, *shape, dim) for shape in ((heads, queries), (groups, keys), (groups, keys)))
    v[:, :, ::7] *= 10
    v *= 2 ** torch.linspace(-6, 6, keys).view(-1, 1)  # the scales rise from tile to tile
    k[:, :, ::5] *= 0.1
    kwargs = dict(scores="fp8") | kwargs | dict(causal=causal, granularity=granularity)
    y, expected = (fp8_attention(q, k, v, backend=b, **kwargs) for b in ("triton", "reference"))
    error = ((y - expected).norm() / expected.norm().clamp_min(1e-30)).item()
    assert error <= 5e-4, (dim, queries, keys, granularity, kwargs, error)

lengths = torch.tensor([17, 90], dtype=torch.int32)
attended(64, 140, 140, 2, 1, True, "block")
attended(64, 90, 90, 1, 1, True, "token", lengths=lengths, query_lengths=lengths)
attended(64, 20, 30, 1, 1, True, "token", query_lengths=lengths)
attended(64, 1, 90, 4, 2, True, "token", lengths=lengths)
attended(128, 1, 640, 3, 1, True, "block")
attended(64, 1, 640, 1, 1, True, "token")
attended(128, 30, 200, 1, 1, True, "tensor")
attended(96, 33, 33, 3, 1, False, "head")
attended(128, 20, 200, 1, 1, False, "token")
attended(80, 65, 65, 1, 1, True, "block")
attended(256, 20, 40, 1, 1, True, "token")
mask = torch.rand(2, 1, 50, 60) > 0.3
mask[0, 0, 3] = False
attended(64, 50, 60, 2, 1, False, "block", mask=mask)
attended(64, 1, 60, 2, 1, False, "token", mask=mask[:, :, :1], lengths=lengths)
attended(64, 1, 60, 2, 1, True, "token", lengths=lengths * 0)
apart = torch.stack([lengths, lengths * 0], 1)[:, 0]  # two apart, and one for both
one = torch.tensor(23, dtype=torch.int32).expand(2)
wide = torch.stack([mask, ~mask], -1)[..., 0]
for queries in (1, 50):
    attended(64, queries, 60, 2, 1, False, "token", lengths=apart)
    attended(64, queries, 60, 2, 1, False, "token", lengths=one)
    attended(64, queries, 60, 2, 1, False, "block", mask=wide[:, :, :queries])
    attended(64, queries, 60, 2, 1, False, "block", mask=mask[:, :, :1, :1].expand(2, 1, queries, 60))
for dim in (64, 128, 80):
    attended(dim, 70, 140, 2, 1, True, "block", scores="int8")
    attended(dim, 1, 90, 4, 2, False, "token", scores="int8", lengths=lengths)
attended(256, 20, 40, 1, 1, True, "token", scores="int8")
attended(64, 1, 300, 2, 1, True, "tensor", scores="int8")
for case in ((64, 131, None, "block", F16), (128, 20, 128, "token", F16), (80, 17, None, "token", F32)):
    prepared(*case, scores="int8")
print("agrees")
"""


def test_the_triton_kernels_agree_when_interpreted(interpreted):
    assert interpreted(INTERPRETED).strip() == "agrees"


COMPILED = """
from quantrot.kernels.attention import rope, triton as kernels

E = torch.float8_e4m3fn
def byte(*shape): return torch.zeros(shape, dtype=torch.uint8)

def attended(dim, queries, scales, mask=None, lengths=None, keys=4096, codes=E):
    operands = byte(1, 8, queries, dim).view(codes), byte(1, 2, keys, dim).view(codes), byte(1, 2, dim, keys).view(E)
    scale = byte(1, 8, queries), byte(1, 2, scales), byte(1, 2, scales)
    if codes == torch.int8:
        scale = scale[0].float(), scale[1].float(), scale[2]
    kernels.attention(kernels.Inputs(*operands, *scale, mask, lengths, None, True, 0.1), torch.bfloat16)

def prepared(dim, tokens, by_block, order):
    x, y = torch.zeros(1, tokens, 8, dim, dtype=torch.bfloat16), torch.zeros(1, tokens, 2, dim, dtype=torch.bfloat16)
    cos = torch.zeros(1, tokens, dim, dtype=torch.bfloat16)
    rope.quantize(x, y, y, cos, cos, None, order, by_block)

attended(64, 4096, 32)
attended(128, 4096, 32)
attended(128, 4096, 4096)
attended(128, 4096, 32, codes=torch.int8)
attended(128, 1, 4096, codes=torch.int8)
attended(128, 1, 4096, torch.ones(1, 1, 1, 4096, dtype=torch.bool), torch.ones(1, dtype=torch.int32))
prepared(128, 4096, True, 128)
prepared(128, 1, False, 128)
"""


@pytest.fixture(scope="module")
def compiled(compiled_for_hopper):
    """name -> what was compiled under it."""
    found = compiled_for_hopper(COMPILED)
    return {name: [k for k in found if k["name"] == f"_{name}_kernel"] for name in ("prefill", "decode", "quantize")}


def test_no_kernel_spills_on_hopper(compiled):
    assert [len(found) for found in compiled.values()] == [4, 2, 2]
    for kernel in sum(compiled.values(), []):
        assert not kernel["local"] and kernel["shared"] <= 227 << 10, kernel


def test_prefill_on_hopper_is_wgmma_and_two_programs_a_multiprocessor(compiled):
    for kernel in compiled["prefill"]:
        assert kernel["wgmma"] >= 12 and not kernel["mma"], kernel
        assert kernel["waits"] <= 4, kernel  # one a product and loop: ptxas did not serialize them
        assert kernel["registers"] * kernel["warps"] * 32 <= 65536 // (2 if kernel["warps"] == 4 else 1), kernel


def test_decode_on_hopper_is_wgmma_and_two_programs_a_multiprocessor(compiled):
    for kernel in compiled["decode"]:
        assert kernel["wgmma"] >= 8 and not kernel["mma"] and kernel["waits"] <= 2, kernel
        assert kernel["registers"] <= 128 and 2 * kernel["shared"] <= 227 << 10, kernel


def test_preparing_on_hopper_loads_sixteen_bytes_and_turns_by_tensor_cores(compiled):
    prompt, step = compiled["quantize"]
    assert prompt["loads128"] >= 10 and prompt["wgmma"] and step["loads128"] >= 10 and step["mma"]


# --- On a GPU --------------------------------------------------------------------------------------------------------


def both(function, *args, **kwargs):
    return [function(*args, backend=backend, **kwargs) for backend in ("triton", "reference")]


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("granularity", ["block", "token"])
@pytest.mark.parametrize("tokens", [1, 3, 63, 257])
@pytest.mark.parametrize("dim", [64, 80, 96, 128])
@pytest.mark.parametrize("scores", ["fp8", "int8"])
def test_the_kernel_writes_the_references_codes(scores, dtype, granularity, tokens, dim):
    x = [t.transpose(1, 2) for t in qkv(batch=2, queries=tokens, keys=tokens, dim=dim, device="cuda", dtype=dtype)]
    x[1][0, -1, 0] = 0
    x[2][1, 0, 1, 3] = float("nan")
    cos, sin = angles(tokens, dim, "cuda", dtype)
    for order in (None, 20 if dim == 80 else dim):
        options = {"order": order, "granularity": granularity, "scores": scores}
        ours, theirs = both(rope_hadamard_quantize, *x, cos, sin, **options)
        for name, a, b in zip(ours._fields, ours, theirs, strict=True):
            if a.dtype == torch.float32:
                torch.testing.assert_close(a, b, rtol=1e-6 if order else 0, atol=0)
                continue
            wrong = (a.view(torch.uint8) != b.view(torch.uint8)).sum().item()
            # Turned in another order of additions: about an element in 10^5 has its float32 across a code's edge.
            assert wrong <= (max(1, 1e-4 * a.numel()) if order and name in ("q", "k") else 0), (name, order, wrong)


def flip_error(dim: int, heavy: int) -> float:
    """What the tensor cores' short sums of scores may cost, relative: a probability near the middle between two codes
    gets the other one. heavy: probabilities that matter.

    A product of e4m3 keeps 13 bits below the largest of the 32 terms and of the sum so far; what that cuts off moves a
    probability by 2^-20 dim of itself on normal data (a model of those sums: 6.5e-5, 1.3e-4, 2.5e-4 for dim 64, 128,
    256). Steps of e4m3 are 1/8 to 1/16 of a value, 0.09 on the whole: moved by e, a code changes with chance e / 0.09,
    and then by 0.09, so the mean square is 0.09 e. By the weights' squares the changes are as many as among heavy / e^4
    equal ones (scores have a spread of one); their number is Poisson's, and the limit four sigma and one more.
    """
    moved = 2**-20 * dim
    flips = heavy / 55 * moved / 0.09
    return (0.09 * moved * (1 + 4 / flips**0.5 + 1 / flips)) ** 0.5


@gpu
@pytest.mark.parametrize("granularity", list(Granularity))
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 63), (1, 4097), (3, 3), (63, 63), (257, 257), (65, 1000)])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("scores", ["fp8", "int8"])
def test_the_kernels_meet_the_reference(scores, dim, queries, keys, granularity):
    q, k, v = qkv(batch=2, heads=6, groups=2, queries=queries, keys=keys, dim=dim, device="cuda", dtype=torch.bfloat16)
    v[:, :, ::7] *= 100
    given = rope_hadamard_quantize(
        *(t.transpose(1, 2) for t in (k, k, v)), granularity=granularity, scores=scores, backend="reference"
    )
    codes, scale = quantize_heads(q, codes=given.k.dtype)
    given = given._replace(q=codes, q_scale=scale)
    for causal in (True, False):
        ours, theirs = both(attend, given, causal=causal, dtype=torch.float32)
        assert relative(ours, theirs) <= flip_error(dim, 12 * queries * -(-keys // 7)), relative(ours, theirs)


@gpu
@pytest.mark.parametrize("queries", [1, 2049])
def test_a_hundred_runs_are_bit_equal(queries):
    q, k, v = qkv(batch=2, heads=8, groups=2, queries=queries, keys=4099, dim=128, device="cuda", dtype=torch.bfloat16)
    first = fp8_attention(q, k, v, causal=True, granularity="token")
    for _ in range(100):
        assert torch.equal(fp8_attention(q, k, v, causal=True, granularity="token"), first)


@gpu
@pytest.mark.parametrize("queries", [1, 300])
def test_graph_bits_are_eager_bits(queries):
    q, k, v = qkv(queries=queries, keys=300, dim=128, device="cuda", dtype=torch.bfloat16)
    eager = fp8_attention(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fp8_attention(q, k, v, causal=True)
    captured.fill_(float("nan"))
    graph.replay()
    assert torch.equal(captured, eager)


SANITIZED = """
import torch
from quantrot.kernels.attention import attend, rope_hadamard_quantize
for dim in (64, 80, 128):
    for tokens in (1, 3, 129):
        q, k, v = (torch.randn(2, tokens, n, dim, device="cuda", dtype=torch.bfloat16) for n in (6, 2, 2))
        cos = torch.ones(1, tokens, dim, device="cuda", dtype=torch.bfloat16)
        for granularity in ("block", "token"):
            given = rope_hadamard_quantize(
                q, k, v, cos, cos, order=20 if dim == 80 else dim, granularity=granularity, backend="triton"
            )
            attend(given, causal=True, backend="triton")
torch.cuda.synchronize()
"""


@gpu
def test_the_sanitizer_finds_nothing_on_odd_shapes(sanitized):
    sanitized(SANITIZED)
