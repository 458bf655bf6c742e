"""A new token's codes into an FP8 cache with room: the kernel in the emulator, compiled, and on a GPU; the operator."""

import copy
import ctypes

import pytest
import torch

from quantrot.kernels.attention import append
from quantrot.kernels.attention.append import rope_hadamard_append

gpu = pytest.mark.gpu
NAMES = ("q", "q_scale", "lengths", "key", "key_scale", "value", "value_scale", "length")

# dim, dtype, cosines' dtype or none, rotated
KERNELS = [
    (128, torch.bfloat16, torch.bfloat16, True),
    (128, torch.float16, torch.float32, False),
    (64, torch.bfloat16, None, True),
    (64, torch.float16, torch.float16, True),
]
RUN = """
#include <string>
static std::string message;

extern "C" const char* run(int which, const quantrot::AppendArgs* args, int x, int y, int seed) {
  static void (*const kernels[])(quantrot::AppendArgs) = {NAMES};
  message = emulator::launch({(unsigned)x, (unsigned)y, 1}, 1, 32, 0, seed, [&] { kernels[which](*args); });
  return message.c_str();
}
"""


@pytest.fixture(scope="module")
def emulator(emulated):
    """The kernels on the host: emulator(number, operands, rotation, limit, advance) -> q's codes, scales, lengths."""
    source, names = append.device_functions(), []
    for i, kernel in enumerate(KERNELS):
        names.append(f"append_{i}")
        source += append.entry(*kernel).replace(" append(", f" append_{i}(", 1)
    library = emulated(source.replace('extern "C" __global__', "__global__") + RUN.replace("NAMES", ", ".join(names)))
    library.run.restype = ctypes.c_char_p

    def run(number, given, order, signs, limit, advance):
        q, k, v, cos, sin, *cache = given
        batch, _, heads, dim = q.shape
        out = (
            torch.full((batch, heads, 1, dim), 0xAA, dtype=torch.uint8),
            torch.full((batch, heads, 1), 0xAA, dtype=torch.uint8),
            torch.zeros(batch, dtype=torch.int32),
        )
        args = append.arguments(q, k, v, cos, sin, signs, order, *cache, advance, limit, out)
        message = library.run(number, ctypes.byref(args), *append.grid(batch, heads, k.shape[2]), 0)
        assert message == b"", message.decode()
        return out

    return run


def operands(kernel, batch, heads, groups, length, room=40, device="cpu", host=False):
    """As a fused projection leaves them, what is large, small, zero and no number, and a cache of odd bytes. host: the
    length is a number."""
    dim, dtype, angles, _ = kernel
    x = torch.randn(batch, 1, (heads + 2 * groups) * dim, device=device).to(dtype).unflatten(-1, (-1, dim))
    x[:, :, ::3] *= 0.01
    x[0, 0, 1] = 0
    x[0, 0, heads, 5], x[-1, 0, -1, 2], x[-1, 0, 0, 1] = torch.inf, torch.nan, -torch.inf
    q, k, v = x.split([heads, groups, groups], 2)
    cos = sin = None
    if angles is not None:
        theta = torch.randn(batch if length % 2 else 1, 1, dim, device=device)
        cos, sin = theta.cos().to(angles), theta.sin().to(angles)
    shapes = (batch, groups, room, dim), (batch, groups, room), (batch, groups, dim, 128), (batch, groups, room)
    cache = (torch.randint(256, shape, dtype=torch.uint8, device=device) for shape in shapes)
    return q, k, v, cos, sin, *cache, length if host else torch.tensor(length, device=device)


def rotation_of(kernel, length, device="cpu"):
    """Its order; signs where the length is odd."""
    if not kernel[3]:
        return {"order": 0, "signs": None}
    signs = torch.randint(2, (kernel[0],), device=device) * 2 - 1
    return {"order": kernel[0], "signs": signs.to(torch.int8) if length % 2 else None}


def both(rotation, given, limit, advance, run):
    """What run(operands) and the reference give and leave behind, by name."""
    signs, order = rotation["signs"], rotation["order"]
    mine, its = ([*given[:5], *(t.clone() for t in given[5:9]), copy.deepcopy(given[9])] for _ in range(2))
    expected = append.rope_hadamard_append_reference(*its[:5], signs, order, *its[5:], advance, limit)
    tensors = 5 if isinstance(given[9], torch.Tensor) else 4
    names = NAMES[: 3 + tensors]
    return zip(names, (*run(mine), *mine[5:][:tensors]), (*expected, *its[5:][:tensors]), strict=True)


def agree(compared, rotated):
    for name, a, b in compared:
        if a.dtype != torch.uint8 or not rotated or name.startswith("v"):
            assert torch.equal(a, b), name
        else:  # a sum in another order may meet a code's edge
            assert (a != b).sum() <= 1e-3 * a.numel() + 2 and (a.int() - b.int()).abs().max() <= 1, name


@pytest.mark.parametrize("number", range(len(KERNELS)))
@pytest.mark.parametrize(
    ("batch", "heads", "groups", "length", "limit", "advance"),
    [(1, 9, 3, 0, 40, True), (3, 8, 8, 21, 33, False), (2, 4, 1, 33, 33, True)],
)
@pytest.mark.parametrize("host", [False, True])
def test_the_kernel_in_the_emulator_is_the_reference(
    emulator, number, batch, heads, groups, length, limit, advance, host
):
    torch.manual_seed(0)
    kernel = KERNELS[number]
    given, rotation = operands(kernel, batch, heads, groups, length, host=host), rotation_of(kernel, length)

    def run(g):
        return emulator(number, g, **rotation, limit=limit, advance=advance)

    agree(both(rotation, given, limit, advance, run), kernel[3])


def test_the_kernels_compile_for_sm_90a_without_spills(compiled_cuda):
    entries = (append.entry(*kernel).replace(" append(", f" append_{i}(", 1) for i, kernel in enumerate(KERNELS))
    made = compiled_cuda(append.device_functions() + "".join(entries))
    assert made.spilled == [0] * len(KERNELS), made.log


@pytest.mark.parametrize(("advance", "host"), [(True, False), (False, False), (True, True)])
def test_the_operator_is_the_reference(advance, host):
    torch.manual_seed(0)
    given, rotation = operands(KERNELS[0], 2, 4, 2, 7, host=host), rotation_of(KERNELS[0], 7)
    options = {"limit": 40, **rotation, "advance": advance}

    def run(g):
        codes, *rest = rope_hadamard_append(*g, **options)
        return codes.view(torch.uint8), *rest

    agree(both(rotation, given, 40, advance, run), False)
    place = (None, None, 7) if host else (None, given[9], 0) if advance else (given[9], None, 0)
    torch.library.opcheck(
        torch.ops.quantrot.rope_hadamard_append.default, (*given[:5], rotation["signs"], 128, *given[5:9], *place, 40)
    )


def test_a_number_stores_what_a_length_on_the_device_does():
    torch.manual_seed(0)
    given = operands(KERNELS[0], 2, 4, 2, 7)
    other = [*given[:5], *(t.clone() for t in given[5:9])]
    mine = rope_hadamard_append(*other, 7, limit=40, order=128)
    its = rope_hadamard_append(*given, limit=40, order=128)
    for a, b in zip((*mine, *other[5:]), (*its, *given[5:9]), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert mine[2].tolist() == [8, 8] and given[9].item() == 8


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (0, lambda t: t.float(), "bfloat16 or float16"),
        (1, lambda t: t.repeat(1, 2, 1, 1), "one token"),
        (3, lambda t: t[..., :30], "cos or sin"),
        (5, lambda t: t[..., :64], "key .* are needed"),
        (5, lambda t: t.new_zeros(*t.shape[:2], t[0, 0].numel() + 8)[..., 8:].unflatten(2, t.shape[2:]), "16 bytes"),
        (6, lambda t: t.int(), "uint8"),
        (6, lambda t: t.to("meta"), "several devices"),
        (8, lambda t: t[..., :8], "scales"),
        (9, lambda t: t.int(), "length"),
        (9, lambda t: 40, "length 40; allowed: 0 to 39, the limit is 40"),
        (9, lambda t: -1, "length -1; allowed: 0 to 39"),
    ],
)
def test_what_does_not_fit_is_an_error(at, value, said):
    given = [*operands(KERNELS[0], 1, 4, 2, 7)]
    given[at] = value(given[at])
    with pytest.raises(ValueError, match=said):
        rope_hadamard_append(*given, limit=40, order=128)


@pytest.mark.parametrize("at", range(5))
def test_a_tangent_is_refused(at):
    given = [*operands(KERNELS[0], 1, 4, 2, 7)]
    with torch.autograd.forward_ad.dual_level():
        given[at] = torch.autograd.forward_ad.make_dual(given[at], torch.ones_like(given[at]))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            rope_hadamard_append(*given, limit=40, order=128)


def test_other_orders_and_limits_are_errors():
    given = operands(KERNELS[0], 1, 4, 2, 7)
    with pytest.raises(ValueError, match="order 64; allowed: 0, 128"):
        rope_hadamard_append(*given, limit=40, order=64)
    with pytest.raises(ValueError, match="limit 41; allowed: 1 to 40"):
        rope_hadamard_append(*given, limit=41)
    for order, signs in ((0, torch.ones(128).char()), (128, torch.ones(64).char()), (128, torch.ones(128))):
        with pytest.raises(ValueError, match=f"signs .*, order {order}; int8 .128. and a rotation are needed"):
            rope_hadamard_append(*given, limit=40, order=order, signs=signs)


# --- On a GPU --------------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("advance", "host"), [(True, False), (False, False), (True, True)])
def test_the_kernel_is_the_reference(kernel, advance, host):
    torch.manual_seed(0)
    for batch, heads, groups, length in ((1, 32, 8, 0), (32, 32, 8, 20), (5, 14, 2, 31), (2, 9, 9, 33), (300, 4, 1, 7)):
        if host and length == 33:  # of a full cache the host knows
            continue
        given = operands(kernel, batch, heads, groups, length, device="cuda", host=host)
        rotation = rotation_of(kernel, length, "cuda")
        assert append.runs_on(given[0].device)

        def run(g, rotation=rotation):
            codes, *rest = rope_hadamard_append(*g, limit=33, **rotation, advance=advance)
            return codes.view(torch.uint8), *rest

        agree(both(rotation, given, 33, advance, run), kernel[3])


@gpu
def test_a_graph_of_many_tokens_fills_the_cache():
    torch.manual_seed(0)
    kernel = KERNELS[0]
    given = [*operands(kernel, 3, 8, 2, 0, device="cuda")]
    wanted = [t.clone() for t in given[5:]]
    for _ in range(30):
        append.rope_hadamard_append_reference(*given[:5], None, 128, *wanted, True, 40)
    rope_hadamard_append(*given, limit=40, order=128)  # compiled before it is recorded
    given[9].zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            rope_hadamard_append(*given, limit=40, order=128)
    for _ in range(10):
        graph.replay()
    assert given[9].item() == 30
    for name, a, b in zip(NAMES[3:7], given[5:9], wanted[:4], strict=True):
        agree([(name, a, b)], True)


@gpu
def test_the_sanitizer_finds_nothing(sanitized):
    sanitized(
        "import sys, torch; sys.path.insert(0, 'tests/kernels'); import test_attention_append as t\n"
        "for kernel in t.KERNELS:\n"
        "    for host in (False, True):\n"
        "        given = t.operands(kernel, 3, 9, 3, 5, device='cuda', host=host)\n"
        "        t.rope_hadamard_append(*given, limit=40, **t.rotation_of(kernel, 5, 'cuda'))\n"
        "torch.cuda.synchronize()\n"
    )
