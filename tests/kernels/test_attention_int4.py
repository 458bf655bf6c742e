"""One token and an INT4 cache: codes are quantize_int4's, and attention is to what dequantize_int4 makes of them."""

import pytest
import torch

from quantrot.kernels.attention import int4_hopper, int4_token
from quantrot.kernels.attention.int4_token import NO_TURN
from quantrot.kernels.attention.reference import Turn

gpu = pytest.mark.gpu

CASES = '''
import torch

from quantrot.kernels.attention.one_token import rotate_half
from quantrot.kernels.attention.reference import Turn
from quantrot.kernels.hadamard import hadamard_ref
from quantrot.kernels.int4 import dequantize_int4, group_for, quantize_int4

BF16, FP16 = torch.bfloat16, torch.float16
TOLERANCE = {BF16: 1.5 * 2**-8, FP16: 1.5 * 2**-11}  # plain torch has up to 0.0043 and 0.00024
CASES = [  # batch, query heads a key head, key heads, head_dim, tokens before the new one, room, dtype
    (1, 4, 2, 64, 100, 128, BF16),
    (2, 4, 2, 128, 300, 384, FP16),
    (2, 3, 2, 80, 129, 384, BF16),
    (1, 1, 3, 96, 0, 128, BF16),
    (1, 17, 1, 256, 255, 256, FP16),
    (3, 2, 1, 128, 64, 128, BF16),
    (1, 7, 1, 256, 130, 200, BF16),
    (2, 1, 2, 16, 63, 96, BF16),
]

def operands(batch, share, groups, dim, tokens, room, dtype, device="cpu", seed=0, group=64):
    """(q, k, v, the cache, as a model has them: heads behind tokens, one-sided keys, nothing behind the tokens.)"""
    g = torch.Generator().manual_seed(seed)
    cache = []
    for _ in range(2):
        x = torch.randn(batch, groups, room, dim, generator=g) + torch.randn(1, groups, 1, dim, generator=g)
        x[:, :, ::7] *= 4
        parts = quantize_int4(x.to(dtype), group_for(dim, group))
        for part in parts:
            part[:, :, tokens:] = 0
        cache += parts
    new = [torch.randn(batch, 1, n, dim, generator=g).to(dtype) for n in (share * groups, groups, groups)]
    new[1][:, :, 0, :3] = 0
    q, k, v = (t.to(device).transpose(1, 2) for t in new)
    return q, k, v, tuple(t.to(device).contiguous() for t in cache)

def turn_of(q, kind, device="cpu", seed=0):
    """Of q [B, H, 1, D]: "" none, "rope", "rotated" with signs, "both" without, angles of one sequence."""
    (batch, _, _, dim), g = q.shape, torch.Generator().manual_seed(seed)
    angles = torch.rand(1 if kind == "both" else batch, 1, dim // 2, generator=g).repeat(1, 1, 2) * 6.3
    cos, sin = (t.to(q.dtype).to(device) for t in (angles.cos(), angles.sin()))
    signs = (torch.randint(2, (dim,), generator=g, dtype=torch.int8) * 2 - 1).to(device)
    if kind == "rotated":
        return Turn(None, None, dim, signs)
    return Turn(cos, sin, dim if kind == "both" else 0) if kind else Turn()

def behind(x, turn):
    """x [B, heads, 1, D] behind its turn, by the definition."""
    if turn.cos is not None:
        x = x * turn.cos[:, None] + rotate_half(x) * turn.sin[:, None]
    return hadamard_ref(x, order=turn.order, signs=turn.signs) if turn.order else x

def stored(k, v, cache, tokens):
    """The cache with the new token."""
    made = [t.clone() for t in cache]
    group = k.shape[3] // cache[1].shape[3]
    for buffer, part in zip(made, (*quantize_int4(k, group), *quantize_int4(v, group))):
        buffer[:, :, tokens] = part[:, :, 0]
    return made

def exact(q, cache, tokens, mask=None):
    """[B, 1, H, D] in float64; 0 where nothing is seen, NaN with one that is."""
    key, value = (dequantize_int4(*cache[i : i + 3], torch.float64)[:, :, : tokens + 1] for i in (0, 3))
    seen = torch.ones(1, 1, 1, tokens + 1, dtype=torch.bool, device=q.device)
    seen = seen if mask is None else mask[..., : tokens + 1]
    share = q.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    scores = (q.double() @ key.transpose(2, 3) * q.shape[3] ** -0.5).masked_fill(~seen, -torch.inf)
    weights = torch.where(seen.any(-1, keepdim=True), scores.softmax(-1), 0.0)
    return (weights @ value).transpose(1, 2)

def check(attend, case, masked=False, counted=True, device="cpu", seed=0, group=64, turned=""):
    """attend(q, k, v, cache, count or None, place, mask, turn) -> y, on operands of this case."""
    q, k, v, cache = operands(*case, device=device, seed=seed, group=group)
    turn = turn_of(q, turned, device, seed)
    tokens, room, dtype = case[4:]
    mask = None
    if masked:
        mask = torch.rand(case[0], 1, 1, room, generator=torch.Generator().manual_seed(seed)) < 0.6
        mask[0, ..., : tokens // 2] = False
        mask[-1, ..., tokens] = True
        mask = mask.to(device)
        if not counted:
            mask = mask[..., : tokens + 1]
    count = torch.tensor(tokens, device=device) if counted else None
    wanted = stored(behind(k, turn), v, cache, tokens)
    y = attend(q, k, v, cache, count, tokens, mask, turn)
    for name, mine, its in zip(("key", "scale", "low") * 2, cache, wanted):
        assert torch.equal(mine, its), (case, name)
    expected = exact(behind(q, turn), wanted, tokens, mask)
    error = ((y.double() - expected).norm() / expected.norm()).item()
    assert y.shape == (case[0], 1, case[1] * case[2], case[3]) and y.dtype == dtype and y.is_contiguous()
    assert error <= TOLERANCE[dtype], (case, masked, counted, error)
    return y
'''

INTERPRETED = (
    CASES
    + """
from quantrot.kernels.attention import int4_triton

def kernel(config=None, splits=None, advance=True):
    def attend(q, k, v, cache, count, at, mask, turn=Turn()):
        counted, limit, scale = count is not None, cache[0].shape[2], q.shape[3] ** -0.5
        again = int4_triton.prepare(q, cache, counted, advance and counted, limit, mask, scale, config, splits)
        y = again(q, k, v, turn, cache, count, at, mask)
        assert not counted or int(count) == at + advance
        return y
    return attend

Config = int4_triton.Config
for i, case in enumerate(CASES):
    turned = ("rope", "rotated", "both")[i % 3] if i % 2 else ""
    check(kernel(), case, masked=i % 4 < 2, counted=i % 3 > 0, turned=turned)
for config, splits in ((Config(128, 4, 2, 2), 1), (Config(32, 1, 2, 2), 3), (Config(16, 4, 2, 2), 20)):
    check(kernel(config, splits, advance=False), CASES[0], masked=True)
    check(kernel(config, splits), (2, 4, 1, 128, 150, 192, FP16))

small = (2, 4, 2, 128, 70, 96, FP16)
batch, share, groups, dim, tokens, room, dtype = small
q, k, v, cache = operands(*small)
for part in cache[1], cache[4]:  # hidden, a NaN is no one's
    part[0, :, 5] = float("nan")
mask = torch.ones(batch, 1, 1, room, dtype=torch.bool)
mask[0, ..., 5], mask[1] = False, False
wanted = [t.nan_to_num(0) for t in stored(k, v, cache, tokens)]
y = kernel()(q, k, v, cache, torch.tensor(tokens), tokens, mask)
expected = exact(q, wanted, tokens, mask)
assert not y[1].any() and (y - expected).norm() <= TOLERANCE[dtype] * expected.norm()
y = kernel()(q, k, v, cache, torch.tensor(tokens), tokens, None)
assert y[0].isnan().all() and y[1].isfinite().all()

q, k, v, cache = operands(*small)
k[0, 0, 0, 70], v[1, 1, 0, 3] = float("inf"), float("nan")
wanted = stored(k, v, cache, tokens)
y = kernel()(q, k, v, cache, torch.tensor(tokens), tokens, None)
nan = exact(q, wanted, tokens).isnan()
assert torch.equal(y.isnan(), nan) and 0 < nan.sum() < nan.numel()
for mine, its in zip(cache, wanted):
    assert torch.equal(mine.nan_to_num(99), its.nan_to_num(99))

before = [t.clone() for t in cache]  # full
y = kernel()(q, k, v, cache, torch.tensor(room), room, None)
assert y.isnan().all() and all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in zip(cache, before))
print("agrees")
"""
)


def test_the_kernels_agree_when_interpreted(interpreted):
    assert interpreted(INTERPRETED).strip() == "agrees"


COMPILED = """
import torch
from quantrot.kernels.attention import int4_triton
from quantrot.kernels.attention.reference import Turn

def launch(dim, share, mask=False, counted=True, batch=1, dtype=torch.bfloat16, room=4096):
    groups = dim // 64 if dim % 64 == 0 else 1
    q, k = (torch.zeros(batch, 1, n, dim, dtype=dtype).transpose(1, 2) for n in (2 * share, 2))
    codes = torch.zeros(batch, 2, room, dim // 2, dtype=torch.uint8)
    steps = torch.zeros(batch, 2, room, groups, dtype=torch.bfloat16)
    mask = torch.ones(batch, 1, 1, room, dtype=torch.bool) if mask else None
    cache, count = (codes, steps, steps) * 2, torch.tensor(100) if counted else None
    int4_triton.prepare(q, cache, counted, counted, room, mask, 0.1)(q, k, k, Turn(), cache, count, 100, mask)

for dim in (64, 96, 128, 256):
    launch(dim, 4)
launch(128, 4, mask=True)
launch(128, 8, counted=False)
launch(64, 4, dtype=torch.float16)
"""


@pytest.fixture(scope="module")
def compiled(compiled_for_hopper):
    """name -> what was compiled under it."""
    found = compiled_for_hopper(COMPILED)
    return {name: [k for k in found if k["name"] == f"_{name}_kernel"] for name in ("decode", "merge")}


def test_no_kernel_spills_on_hopper(compiled):
    assert len(compiled["decode"]) == 7 and compiled["merge"]
    for kernel in sum(compiled.values(), []):
        assert not kernel["local"], kernel


def test_codes_are_copied_16_bytes_at_a_time_and_as_many_programs_as_planned_fit_a_multiprocessor(compiled):
    for kernel in compiled["decode"]:
        assert kernel["copies128"] or kernel["shared"] == 0, kernel
        programs = {2: 4, 4: 3}[kernel["warps"]]  # of config_for
        assert kernel["registers"] * kernel["warps"] * 32 * programs <= 65536, kernel
        assert kernel["shared"] * programs <= 227 << 10, kernel


# --- The operator ----------------------------------------------------------------------------------------------------

SPACE: dict = {}
exec(CASES, SPACE)
operands, exact, check = SPACE["operands"], SPACE["exact"], SPACE["check"]
BF16, FP16 = torch.bfloat16, torch.float16


def by_operator(advance=True):
    def attend(q, k, v, cache, count, at, mask, turn=NO_TURN):
        length = at if count is None else count
        how = {"limit": cache[0].shape[2], "turn": turn, "mask": mask, "advance": advance}
        y = int4_token.int4_attend_one(q, k, v, cache, length, **how)
        assert count is None or int(count) == at + advance
        return y

    return attend


def by_the_short_way(q, k, v, cache, count, at, mask, turn=NO_TURN):
    length = at if count is None else count
    options = {"limit": cache[0].shape[2], "turn": turn, "mask": mask, "scale": q.shape[3] ** -0.5, "advance": True}
    with torch.no_grad():
        return int4_token.try_attend_one(q, k, v, cache, length, **options)


@pytest.mark.parametrize("case", SPACE["CASES"], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("turned", ["", "rope", "rotated", "both"])
def test_plain_torch_is_the_definition(case, masked, turned):
    check(by_operator(advance=masked), case, masked, masked, turned=turned)


def test_the_operator_is_sound():
    """What it changes, its schema says; a count that is one more, too."""
    q, k, v, cache = operands(2, 2, 2, 64, 9, 16, BF16)
    mask, name = torch.ones(1, 1, 1, 16, dtype=torch.bool), torch.ops.quantrot.int4_attend_one.default
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for place in ((None, torch.tensor(9), 0), (torch.tensor(9), None, 0), (None, None, 9)):
        for kind in ("", "both"):
            turn = SPACE["turn_of"](q, kind)
            torch.library.opcheck(name, (q, k, v, *turn, *cache, *place, 16, mask, 0.125), test_utils=checks)


def test_what_it_does_not_take_is_an_error():
    q, k, v, cache = operands(2, 2, 2, 64, 9, 16, BF16)
    given = {"q": q, "k": k, "v": v, "cache": cache, "length": torch.tensor(9), "limit": 16}
    codes, *others = cache
    mask = torch.ones(1, 1, 1, 15, dtype=torch.bool)
    for changed, found in (
        ({"q": q.float()}, "torch.float32"),
        ({"q": q[..., :48]}, "k torch.bfloat16"),
        ({"q": q.expand(2, 4, 3, 64)}, "one token"),
        ({"q": q[:, :3]}, "3 query heads, 2 key heads"),
        ({"k": k[:, :1]}, "k torch.bfloat16"),
        ({"cache": (codes[:, :, :8], *others)}, "no bfloat16"),
        ({"cache": (codes.transpose(1, 2).contiguous().transpose(1, 2), *others)}, "not contiguous"),
        ({"cache": (codes, *(t.float() for t in others[:2]), *others[2:])}, "no bfloat16"),
        ({"length": 16}, "length 16, limit 16"),
        ({"turn": Turn(q[:, 0], None)}, "cos and sin torch.bfloat16 .*, None"),
        ({"turn": Turn(*[torch.ones(1, 1, 64)] * 2)}, "torch.float32 .1, 1, 64.*1 or 2, 1, 64"),
        ({"turn": Turn(*[q[:1, 0, :, :32]] * 2)}, "1 or 2, 1, 64"),
        ({"turn": Turn(order=32)}, "order 32; allowed: 0, 64"),
        ({"turn": Turn(signs=torch.ones(64, dtype=torch.int8))}, "signs torch.int8 .*, order 0"),
        ({"turn": Turn(order=64, signs=torch.ones(32, dtype=torch.int8))}, "int8 .64."),
        ({"limit": 17}, "limit 17, room 16"),
        ({"length": torch.tensor([9])}, "an int64 without dimensions"),
        ({"mask": mask}, "all tokens"),
        ({"mask": mask.float()}, "torch.float32"),
        ({"q": q.to("meta")}, "several devices"),
    ):
        with pytest.raises(ValueError, match=f"int4_attend_one: .*{found}"):
            int4_token.int4_attend_one(**given | changed)
    with pytest.raises(ValueError, match="scale"):
        int4_token.int4_attend_one(**given, scale=0)


def test_a_tangent_is_refused():
    q, k, v, cache = operands(2, 2, 2, 64, 9, 16, BF16)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        for i in range(3):
            given = [q, k, v]
            given[i] = torch.autograd.forward_ad.make_dual(given[i], torch.ones_like(given[i]))
            with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
                by_the_short_way(*given, cache, torch.tensor(9), 9, None)


def test_processors_are_filled_and_no_program_is_without_a_tile():
    pytest.importorskip("triton", reason="triton is not installed")
    from quantrot.kernels.attention import int4_triton

    config = int4_triton.Config(64, 4, 3, 3)
    for pairs, tokens in ((1, 32768), (8, 32768), (64, 8192), (256, 8192), (1024, 100), (8, 1), (8, 65)):
        splits = int4_triton.splits_for(pairs, tokens, config, 132)
        assert 1 <= splits <= min(-(-tokens // 64), int4_triton.LARGEST_SPLIT)
        assert splits == 1 or pairs * splits <= 3 * 132
    assert int4_triton.splits_for(8, 32768, config, 132) == 49


# --- On the GPU ------------------------------------------------------------------------------------------------------

CUDA_CASES = [
    *SPACE["CASES"],
    (1, 4, 8, 128, 32767, 32768, BF16),
    (1, 4, 8, 64, 20001, 32768, FP16),
    (32, 4, 8, 128, 1023, 2048, BF16),
    (5, 8, 4, 128, 777, 1024, BF16),
    (1, 64, 1, 128, 3000, 4096, BF16),
    (2, 4, 2, 96, 5000, 5120, FP16),
    (2, 4, 2, 80, 5000, 5120, BF16),
    (130, 1, 4, 64, 300, 384, BF16),
]


@gpu
@pytest.mark.parametrize("case", CUDA_CASES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_the_kernel_meets_float64(case, masked, counted):
    turned = ("rope", "both")[masked] if int4_hopper.GROUPS.get(case[3]) and case[1] <= 8 else ""  # to the last bit
    for kind in ("", turned):
        y = check(by_operator(), case, masked, counted, "cuda", turned=kind)
        for _ in range(2):  # not seen before, and again
            assert torch.equal(check(by_the_short_way, case, masked, counted, "cuda", turned=kind), y)


@gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(
    "config", [(64, 4, 3, 3), (128, 4, 2, 2), (32, 1, 3, 8), (64, 2, 2, 4), (128, 8, 2, 1)], ids=str
)
def test_every_launch_meets_float64(config, dtype):
    from quantrot.kernels.attention import int4_triton

    for splits in (1, 7, 128):

        def attend(q, k, v, cache, count, at, mask, turn, splits=splits):
            how = mask, q.shape[3] ** -0.5, int4_triton.Config(*config), splits
            run = int4_triton.prepare(q, cache, True, True, cache[0].shape[2], *how)
            return run(q, k, v, turn, cache, count, at, mask)

        for masked in (False, True):
            check(attend, (2, 4, 2, 128, 4001, 4096, dtype), masked, device="cuda")


@gpu
def test_a_sequence_alone_is_what_it_is_among_others():
    from quantrot.kernels.attention import int4_triton

    q, k, v, cache = operands(5, 4, 2, 128, 2000, 2048, BF16, device="cuda")

    def attend(rows):
        own = tuple(t[rows].clone() for t in cache)
        again = int4_triton.prepare(q[rows], own, False, False, 2048, None, 0.1, splits=6)
        return again(q[rows], k[rows], v[rows], NO_TURN, own, None, 2000, None)

    every = attend(slice(None))
    for i in range(5):
        assert torch.equal(attend(slice(i, i + 1)), every[i : i + 1])


@gpu
def test_a_recorded_graph_goes_on_with_the_count():
    case = (2, 4, 2, 128, 250, 512, BF16)
    q, k, v, cache = operands(*case, device="cuda")
    count, mask = torch.tensor(250, device="cuda"), torch.ones(2, 1, 1, 512, dtype=torch.bool, device="cuda")
    mask[1, ..., :40] = False
    how = {"limit": 512, "mask": mask}
    with torch.no_grad():
        int4_token.int4_attend_one(q, k, v, tuple(t.clone() for t in cache), count.clone(), **how)  # compiled
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = int4_token.int4_attend_one(q, k, v, cache, count, **how)
    wanted = [t.clone() for t in cache]
    for step in range(250, 262):
        for t in (q, k, v):
            t.copy_(torch.randn_like(t))
        graph.replay()
        wanted = SPACE["stored"](k, v, wanted, step)
        assert int(count) == step + 1 and all(map(torch.equal, cache, wanted))
        expected = exact(q, wanted, step, mask)
        assert (y - expected).norm() <= SPACE["TOLERANCE"][BF16] * expected.norm()


@gpu
def test_no_wide_key_is_made():
    """Memory that a call takes beside the cache: sums, and nothing of the cache's size."""
    q, k, v, cache = operands(1, 4, 8, 128, 32000, 32768, BF16, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    int4_token.int4_attend_one(q, k, v, cache, 32000, limit=32768)
    assert torch.cuda.max_memory_allocated() - before < 4 << 20 < cache[0].numel()


@gpu
def test_no_access_is_out_of_bounds(sanitized):
    sanitized(
        "import sys, torch; sys.path.insert(0, 'tests/kernels'); import test_attention_int4 as t\n"
        "for case in t.SPACE['CASES']:\n"
        "    t.check(t.by_operator(), case, masked=True, device='cuda')\n"
    )
