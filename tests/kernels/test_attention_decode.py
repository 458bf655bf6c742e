"""Attention of one query in CUDA C++ for Hopper: the kernel itself in the emulator, and on a GPU."""

import ctypes
import math

import pytest
import torch

from quantrot.kernels.attention import Quantized, attend, decode, quantize_heads, transposed_values, triton

gpu = pytest.mark.gpu

# plan, head_dim, query heads a key head, 16-bit type
KERNELS = [
    (decode.Plan(2, 1), 64, 4, torch.bfloat16),
    (decode.Plan(4, 1), 128, 3, torch.float16),
    (decode.Plan(2, 1), 64, 16, torch.bfloat16),
]
RUN = """
#include <string>
static std::string message;

extern "C" const char* run(int which, const quantrot::DecodeArgs* args, int splits, int rows, int threads, int shared,
                           int seed) {
  static void (*const kernels[])(quantrot::DecodeArgs) = {NAMES};
  message = emulator::launch({(unsigned)splits, (unsigned)rows, 1}, 1, threads, shared, seed,
                             [&] { kernels[which](*args); });
  return message.c_str();
}
"""


@pytest.fixture(scope="module")
def emulator(emulated):
    """The kernels on the host: emulator(number, given, lengths, splits, seed) -> [B, 1, H, D]."""
    source, names = decode.device_functions(), []
    for i, (plan, dim, share, out) in enumerate(KERNELS):
        names.append(f"decode_{i}")
        source += decode.entry(plan, dim, share, out).replace("decode(", f"decode_{i}(", 1)
    library = emulated(source.replace('extern "C" __global__', "__global__") + RUN.replace("NAMES", ", ".join(names)))
    library.run.restype = ctypes.c_char_p

    def run(number, given, lengths, splits, seed):
        plan, dim, share, dtype = KERNELS[number]
        inputs = as_inputs(given, lengths)
        assert decode.unsupported(inputs, dtype) is None
        batch, heads = given.q.shape[:2]
        out = torch.full((batch, 1, heads, dim), float("nan"), dtype=dtype)
        part, stats = (torch.full((batch * heads * splits * n,), float("nan")) for n in (dim, 2))
        arrived = torch.zeros(batch * heads // share, dtype=torch.int32)
        args = decode.arguments(inputs, out, part, stats, arrived.data_ptr(), splits)
        shared = plan.shared_bytes(dim, share)
        message = library.run(number, ctypes.byref(args), splits, batch * heads // share, plan.threads, shared, seed)
        assert message == b"", message.decode()
        assert not arrived.any()
        return out

    return run


def relative(y, exact):
    return ((y.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-300)).item()


def as_inputs(given, lengths=None):
    q, q_scale, k, k_scale, v, v_scale = given
    return triton.Inputs(q, k, v, q_scale, k_scale, v_scale, None, lengths, None, True, q.shape[3] ** -0.5)


def cache(batch, groups, share, keys, dim, room=0, device="cpu"):
    """A query and a cache with `room` more tokens of storage."""
    q = torch.randn(batch, groups * share, 1, dim, device=device)
    k, v = (torch.randn(batch, groups, keys, dim, device=device) for _ in range(2))
    v = v * 2 ** torch.linspace(-3, 3, keys, device=device).view(-1, 1)
    k[:, :, ::5] *= 0.1
    (codes, scale), (key, key_scale), (value, value_scale) = (quantize_heads(t) for t in (q, k, v))
    whole = -(-keys // 128) * 128 + room

    def roomy(t, dim):
        shape = list(t.shape)
        shape[dim] = whole
        new = torch.zeros(shape, dtype=torch.uint8, device=device)
        new.narrow(dim, 0, t.shape[dim]).copy_(t.view(torch.uint8))
        return new.view(t.dtype)

    key, key_scale, value_scale = roomy(key, 2)[:, :, :keys], roomy(key_scale, 2), roomy(value_scale, 2)
    value = roomy(transposed_values(value), 3)
    return Quantized(codes, scale, key, key_scale[..., :keys], value, value_scale[..., :keys])


@pytest.mark.parametrize(
    ("number", "keys", "splits", "lengths"),
    [(0, 300, 3, None), (0, 700, 1, [700, 130]), (1, 513, 2, None), (2, 200, 2, [1, 0]), (1, 40, 1, None)],
)
def test_the_kernel_in_the_emulator_meets_the_reference(emulator, number, keys, splits, lengths):
    torch.manual_seed(0)
    _, dim, share, dtype = KERNELS[number]
    given = cache(2 if lengths else 1, 2, share, keys, dim, 128)
    lengths = torch.tensor(lengths, dtype=torch.int32) if lengths else None
    expected = attend(given, causal=True, lengths=lengths, dtype=dtype, backend="reference")
    for seed in range(2):
        y = emulator(number, given, lengths, splits, seed)
        assert relative(y, expected) <= 3e-3, seed


def test_what_is_no_number_reaches_its_own_head(emulator):
    torch.manual_seed(0)
    for field in ("k_scale", "v_scale", "q_scale"):
        given = cache(1, 2, 4, 200, 64)
        getattr(given, field)[0, 1, getattr(given, field).shape[2] // 2] = 255
        y, expected = emulator(0, given, None, 2, 0), attend(given, causal=True, backend="reference")
        assert torch.equal(y.isnan(), expected.isnan()) and y.isnan().any()
        assert relative(y.nan_to_num(), expected.nan_to_num()) <= 3e-3


def test_splits_are_of_whole_steps():
    for heads in (1, 8, 256):
        for keys in (1, 64, 1000, 32768):
            splits = decode.splits_for(heads, keys, 264)
            steps = math.ceil(keys / 64)
            each = math.ceil(steps / splits)
            assert splits >= 1 and each * splits >= steps > each * (splits - 1)


# --- On a GPU --------------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("dim", decode.DIMS)
@pytest.mark.parametrize("share", [1, 4, 8, 12])
def test_the_kernel_meets_the_reference(dim, share):
    torch.manual_seed(0)
    for batch, groups, keys in ((1, 2, 5000), (3, 1, 77), (2, 3, 1024), (40, 8, 300)):
        given = cache(batch, groups, share, keys, dim, 128, "cuda")
        lengths = torch.randint(0, keys + 1, (batch,), dtype=torch.int32, device="cuda")
        for used in (None, lengths):
            expected = attend(given, causal=True, lengths=used, backend="reference")
            for plan in (decode.plan_for(dim), decode.Plan(4, 2)):
                for splits in (0, 1, 3):
                    y = decode.attention(as_inputs(given, used), torch.bfloat16, plan, splits)
                    assert relative(y, expected) <= 3e-3


@gpu
def test_a_hundred_runs_and_graphs_are_bit_equal():
    torch.manual_seed(0)
    given = as_inputs(cache(2, 8, 4, 3000, 64, 0, "cuda"))
    first = decode.attention(given, torch.bfloat16)
    for _ in range(100):
        assert torch.equal(decode.attention(given, torch.bfloat16), first)
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    streams, made = [torch.cuda.Stream() for _ in range(2)], []
    for graph, stream in zip(graphs, streams, strict=True):
        with torch.cuda.graph(graph, stream=stream):
            made.append([decode.attention(given, torch.bfloat16) for _ in range(20)])
    for _ in range(20):  # at once
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(y, first) for each in made for y in each)
