"""RoPE, Hadamard and e4m3 in CUDA C++ for Hopper: the kernel itself in the emulator, compiled, and on a GPU."""

import ctypes

import pytest
import torch

from quantrot.kernels.attention import prepare, rope_hadamard_quantize

gpu = pytest.mark.gpu
NAMES = ("q", "q_scale", "k", "k_scale", "v", "v_scale")

E4M3, INT8 = torch.float8_e4m3fn, torch.int8

# dim, dtype, cosines' dtype or none, rotated, a scale of k and v a block, what q and k become
KERNELS = [
    (128, torch.bfloat16, torch.bfloat16, True, True, E4M3),
    (128, torch.float16, None, False, True, E4M3),
    (128, torch.bfloat16, torch.float32, False, False, E4M3),
    (64, torch.bfloat16, None, True, False, E4M3),
    (64, torch.float16, torch.float32, True, True, E4M3),
    (64, torch.bfloat16, torch.bfloat16, False, True, E4M3),
    (128, torch.bfloat16, None, False, True, INT8),
    (64, torch.float16, torch.float32, True, False, INT8),
    (128, torch.bfloat16, torch.bfloat16, True, True, INT8),
    (128, torch.bfloat16, torch.float32, True, False, E4M3),
]


def plan(number):
    """For much and, of every other kernel, for little."""
    dim, _, angles, rotate, _, _ = KERNELS[number]
    return prepare.plan_for(dim, angles, rotate, 1 if number % 2 else 1 << 20)


RUN = """
#include <string>
static std::string message;

extern "C" const char* run(int which, const quantrot::PrepareArgs* args, int x, int y, int z, int shared, int seed) {
  static void (*const kernels[])(quantrot::PrepareArgs) = {NAMES};
  message = emulator::launch({(unsigned)x, (unsigned)y, (unsigned)z}, 1, 256, shared, seed,
                             [&] { kernels[which](*args); });
  return message.c_str();
}
"""


@pytest.fixture(scope="module")
def emulator(emulated):
    """The kernels on the host: emulator(number, q, k, v, cos, sin) -> codes and scales."""
    source, names = prepare.device_functions(), []
    for i, (dim, *kernel) in enumerate(KERNELS):
        names.append(f"prepare_{i}")
        entry = prepare.entry(plan(i), dim, *kernel)
        source += entry.replace("prepare(", f"prepare_{i}(", 1)
    library = emulated(source.replace('extern "C" __global__', "__global__") + RUN.replace("NAMES", ", ".join(names)))
    library.run.restype = ctypes.c_char_p

    def run(number, q, k, v, cos, sin):
        dim, _, _, rotate, by_block, codes = KERNELS[number]
        order = dim if rotate else 0
        assert prepare.unsupported(q, k, v, cos, sin, None, order) is None
        out = prepare.outputs(q, k, by_block, codes)
        for t in out:
            t.view(torch.uint8).fill_(0xAA)
        args = prepare.arguments(q, k, v, cos, sin, order, out, by_block, plan(number))
        message = library.run(number, ctypes.byref(args), *prepare.grid(args, k.shape[0]), prepare.shared_bytes(dim), 0)
        assert message == b"", message.decode()
        return out

    return run


def operands(dim, dtype, angles, batch, tokens, heads, groups, device="cpu"):
    """As a fused projection leaves them, with what is large, small, zero and no number."""
    rows = heads + 2 * groups
    x = torch.randn(batch, tokens, rows * dim, device=device).to(dtype).unflatten(-1, (rows, dim))
    x[:, ::7] *= 0.01
    x[0, 3] = 0
    x[0, 5, 0, 1], x[0, 6, heads, dim - 1], x[0, tokens - 1, -1, 2] = torch.inf, torch.nan, torch.inf
    q, k, v = x.split([heads, groups, groups], 2)
    if angles is None:
        return q, k, v, None, None
    theta = torch.randn(1, tokens, dim, device=device)
    return q, k, v, theta.cos().to(angles), theta.sin().to(angles)


def agree(made, expected, rotate):
    for name, a, b in zip(NAMES, made, expected, strict=True):
        if a.dtype == torch.float32:
            assert torch.equal(a.isnan(), b.isnan()), name
            torch.testing.assert_close(a, b, rtol=1e-6 if rotate else 0, atol=0, equal_nan=True)
            continue
        a, b = a.view(torch.uint8), b.view(torch.uint8)
        if not rotate or name.startswith("v"):
            assert torch.equal(a, b), name
        else:  # a sum in another order may meet a scale's edge
            assert a.shape == b.shape and (a != b).sum() <= 1e-3 * a.numel(), name
            assert not name.endswith("scale") or not a.numel() or (a.int() - b.int()).abs().max() <= 1, name


@pytest.mark.parametrize("number", range(len(KERNELS)))
def test_the_kernel_in_the_emulator_meets_the_reference(emulator, number):
    torch.manual_seed(0)
    dim, dtype, angles, rotate, by_block, codes = KERNELS[number]
    given = operands(dim, dtype, angles, 2 if number % 2 else 1, 150, 5, 3)
    options = {"order": dim if rotate else None, "granularity": "block" if by_block else "token"}
    options["scores"] = "int8" if codes == INT8 else "fp8"
    agree(emulator(number, *given), rope_hadamard_quantize(*given, **options, backend="reference"), rotate)


def test_the_kernels_compile_for_sm_90a_without_spills(compiled_cuda):
    sources = [prepare.entry(plan(i), *kind) for i, kind in enumerate(KERNELS)]
    entries = (source.replace("prepare(", f"prepare_{i}(", 1) for i, source in enumerate(sources))
    made = compiled_cuda(prepare.device_functions() + "".join(entries))
    # 80 bytes of one kernel's, stored and loaded: with fewer blocks a multiprocessor, and none, it took 48 us for 46
    *others, int8_turned_at_128 = sorted(made.spilled)
    assert not any(others) and int8_turned_at_128 <= 160, made.log


def test_a_kernel_without_queries(emulator):
    torch.manual_seed(0)
    q, k, v, _, _ = operands(128, torch.float16, None, 1, 130, 2, 1)
    made = emulator(1, q[:, :, :0], k, v, None, None)
    agree(made, rope_hadamard_quantize(q[:, :, :0], k, v, backend="reference"), False)


# --- On a GPU --------------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("angles", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("granularity", ["block", "token"])
@pytest.mark.parametrize("dim", prepare.DIMS)
@pytest.mark.parametrize("scores", ["fp8", "int8"])
def test_the_kernel_is_the_reference(scores, dim, granularity, angles, rotate):
    torch.manual_seed(0)
    dtypes = (torch.bfloat16, torch.float16) if angles != torch.bfloat16 else (torch.bfloat16,)
    for dtype in dtypes:
        for batch, tokens, heads, groups in ((1, 17, 1, 1), (2, 128, 8, 2), (3, 1000, 7, 7), (1, 4096, 0, 3)):
            given = operands(dim, dtype, angles, batch, tokens, max(heads, 1), groups, "cuda")
            given = (given[0][:, :, :heads], *given[1:])
            order = dim if rotate else 0
            assert prepare.supports(*given, None, order)
            options = {"order": order or None, "granularity": granularity, "scores": scores}
            expected = rope_hadamard_quantize(*given, **options, backend="reference")
            codes = INT8 if scores == "int8" else E4M3
            for shares in (None, prepare.Plan(16, 2)):
                agree(prepare.quantize(*given, order, granularity == "block", codes, shares), expected, rotate)


@gpu
def test_a_hundred_runs_are_bit_equal():
    torch.manual_seed(0)
    given = operands(128, torch.bfloat16, torch.bfloat16, 2, 500, 8, 2, "cuda")
    first = prepare.quantize(*given, 128, True)
    for _ in range(100):
        for a, b in zip(prepare.quantize(*given, 128, True), first, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@gpu
def test_the_sanitizer_finds_nothing(sanitized):
    sanitized(
        "import sys, torch; sys.path.insert(0, 'tests/kernels'); import test_attention_prepare as t\n"
        "for dim, dtype, angles, rotate, by_block, codes in t.KERNELS:\n"
        "    given = [x if x is None else x.cuda() for x in t.operands(dim, dtype, angles, 1, 150, 5, 3)]\n"
        "    t.prepare.quantize(*given, dim if rotate else 0, by_block, codes)\n"
        "torch.cuda.synchronize()\n"
    )
