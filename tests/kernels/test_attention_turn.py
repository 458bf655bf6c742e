"""RoPE and R3 of many queries and keys in one kernel: emulated on the host, compiled, on a GPU."""

import ctypes

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from quantrot.kernels.attention import turn as kernel
from quantrot.kernels.attention.reference import Turn
from quantrot.kernels.hadamard import hadamard_transform
from quantrot.orthogonal import random_signs

KERNELS = [(dim, dtype) for dim in kernel.DIMS for dtype in (torch.bfloat16, torch.float16)]
RUN = """
#include <string>
static std::string message;
extern "C" const char* run(int number, const quantrot::TurnArgs* args, int x, int y, int threads, int seed) {
  static void (*const kernels[])(quantrot::TurnArgs) = {NAMES};
  message = emulator::launch({(unsigned)x, (unsigned)y, 1}, 1, threads, 0, seed, [&] { kernels[number](*args); });
  return message.c_str();
}
"""
# batch, tokens, query heads, key heads, whether: RoPE, a matrix, signs, angles of one sequence for all
CASES = {
    "rope": (2, 5, 6, 2, True, False, False, True),
    "both": (1, 7, 9, 3, True, True, False, True),
    "signs": (3, 2, 4, 1, True, True, True, False),
    "rotation": (2, 3, 2, 2, False, True, False, False),
    "one token": (2, 1, 32, 8, True, True, False, False),
}


def operands(case: str, dim: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0):
    """Heads of a merged projection, and how they are turned."""
    batch, tokens, heads, groups, rope, rotation, signs, shared = CASES[case]
    generator = torch.Generator().manual_seed(seed)
    merged = torch.randn(batch, tokens, heads + 2 * groups, dim, generator=generator).to(dtype)
    merged[0, 0, 0, :3] = torch.tensor([300.0, -0.0, 1e-7], dtype=dtype)
    angles = torch.randn(2, 1 if shared else batch, tokens, dim, generator=generator).sin().to(dtype).to(device)
    cos, sin = angles if rope else (None, None)
    factors = random_signs(dim, seed=1).to(device) if signs else None
    q, k, _ = merged.to(device).split([heads, groups, groups], 2)
    return q, k, Turn(cos, sin, dim if rotation else 0, factors)


def expected(q, k, turn):
    """As transformers and the definition of the transform have it."""
    if turn.cos is not None:
        q, k = apply_rotary_pos_emb(q, k, turn.cos, turn.sin, unsqueeze_dim=2)
    if turn.order:
        q, k = (hadamard_transform(t, order=turn.order, signs=turn.signs, backend="reference") for t in (q, k))
    return q, k


@pytest.fixture(scope="module")
def emulator(emulated):
    begin = "namespace quantrot {\n\nstruct TokenArgs"
    source = kernel.device_functions()
    assert begin in source
    source = source.replace(begin, f'#include "one_token.h"\n{begin}', 1)
    for number, (dim, dtype) in enumerate(KERNELS):
        ours = kernel.entry(dim, dtype).replace('extern "C" __global__', "__global__")
        source += ours.replace(" turn_heads(", f" turn_heads_{number}(")
    names = ", ".join(f"turn_heads_{number}" for number in range(len(KERNELS)))
    library = emulated(source + RUN.replace("NAMES", names))
    library.run.restype = ctypes.c_char_p
    return library


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("number", range(len(KERNELS)))
def test_bits_are_those_of_torch(emulator, number, case):
    q, k, turn = operands(case, *KERNELS[number])
    assert kernel.unsupported(q, k, turn) is None
    q_out, k_out = (torch.full(t.shape, float("nan"), dtype=t.dtype) for t in (q, k))
    args = kernel.arguments(q, k, turn, q_out, k_out)
    message = emulator.run(number, ctypes.byref(args), *kernel.grid(q, k), 32 * kernel.WARPS, number)
    assert message == b"", message.decode()
    for got, wanted in zip((q_out, k_out), expected(q, k, turn), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(("dim", "dtype"), KERNELS)
def test_every_kernel_compiles_for_sm_90a_without_spills(dim, dtype, compiled_cuda):
    made = compiled_cuda(kernel.device_functions() + kernel.entry(dim, dtype))
    assert made.spilled == [0], made.log


def test_what_is_left_to_torch():
    q, k, turn = operands("signs", 64, torch.bfloat16)
    assert kernel.try_turn(q, k, turn) is None  # on a CPU
    float_signs = turn._replace(signs=turn.signs.float())
    for given in (
        (q.float(), k.float(), turn),
        (q, k[:, :1], turn),
        (q[..., :32], k[..., :32], turn),
        (q[:0], k[:0], turn),
        (q, k, turn._replace(sin=None)),
        (q, k, turn._replace(cos=turn.cos[:2], sin=turn.sin[:2])),
        (q, k, turn._replace(cos=turn.cos.float())),
        (q, k, turn._replace(order=32)),
        (q, k, float_signs),
        (q, k, Turn()),
        (torch.empty(3 * 2 * 4 * 64 + 1, dtype=q.dtype)[1:].view(q.shape), k, turn),
        (q, k, turn._replace(signs=turn.signs.to("meta"))),
    ):
        assert kernel.unsupported(*given) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dim", "dtype"), KERNELS)
def test_on_the_gpu(dim, dtype, case):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    for seed in range(3):
        q, k, turn = operands(case, dim, dtype, "cuda", seed)
        with torch.no_grad():
            got = kernel.try_turn(q, k, turn)
        host = Turn(*(t.cpu() if isinstance(t, torch.Tensor) else t for t in turn))
        for ours, wanted in zip(got, expected(q.cpu(), k.cpu(), host), strict=True):
            assert torch.equal(ours.cpu(), wanted)
        assert kernel.try_turn(q, k, turn) is None  # a gradient may be recorded


@pytest.mark.gpu
def test_a_long_prompt_on_the_gpu():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    torch.manual_seed(0)
    q, k, _ = torch.randn(2, 3001, 48, 128, device="cuda").bfloat16().split([32, 8, 8], 2)
    cos, sin = torch.randn(2, 1, 3001, 128, device="cuda").sin().bfloat16()
    with torch.no_grad():
        got = kernel.try_turn(q, k, Turn(cos, sin))
    for ours, wanted in zip(got, apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2), strict=True):
        assert torch.equal(ours, wanted)
