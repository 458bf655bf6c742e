"""Attention of one query in CUDA C++ for Hopper: the kernel itself in the emulator, and on a GPU."""

import ctypes
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quantrot.kernels.attention import Quantized, attend, decode, quantize_heads, transposed_values, triton
from quantrot.kernels.nvrtc import SM_SHARED

gpu = pytest.mark.gpu

# plan, head_dim, query heads a key head, with a mask, 16-bit type
KERNELS = [
    (decode.Plan(3, 2), 64, 4, False, torch.bfloat16),
    (decode.Plan(3, 4), 128, 3, False, torch.float16),
    (decode.Plan(3, 1), 64, 16, False, torch.bfloat16),
    (decode.Plan(2, 1), 128, 1, False, torch.bfloat16),
    (decode.Plan(2, 3), 64, 4, True, torch.bfloat16),
]
RUN = """
#include <string>
static std::string message;

// Matrices as {data, rows, columns, pitch in bytes, rows of a box, columns of a box}.
static quantrot::TensorMap map(const unsigned long long* m) {
  return {(unsigned char*)m[0], m[2], m[1], m[3], (unsigned)m[5], (unsigned)m[4], 1, 1};
}

extern "C" const char* run(int which, const unsigned long long (*m)[6], const quantrot::DecodeArgs* args, int splits,
                           int rows, int threads, int shared, int seed) {
  using Kernel = void(quantrot::TensorMap, quantrot::TensorMap, quantrot::DecodeArgs);
  static Kernel* const kernels[] = {NAMES};
  const auto k = map(m[0]), v = map(m[1]);
  message = emulator::launch({(unsigned)splits, (unsigned)rows, 1}, 1, threads, shared, seed,
                             [&] { kernels[which](k, v, *args); });
  for (const unsigned counter : counters)
    if (counter) message = "a counter that is not zero again";
  return message.c_str();
}
"""


@pytest.fixture(scope="module")
def emulator(emulated):
    """The kernels on the host: emulator(number, given, lengths, seed) -> [B, 1, H, D]."""
    source, names = decode.device_functions(), []
    source = source.replace(
        "namespace quantrot {\n\nstruct DecodeArgs", '#include "decode.h"\nnamespace quantrot {\n\nstruct DecodeArgs', 1
    )
    for i, kernel in enumerate(KERNELS):
        names.append(f"decode_{i}")
        source += decode.entry(*kernel).replace("decode(", f"decode_{i}(", 1)
    library = emulated(source.replace('extern "C" __global__', "__global__") + RUN.replace("NAMES", ", ".join(names)))
    library.run.restype = ctypes.c_char_p

    def run(number, given, lengths, seed, mask=None):
        plan, dim, share, _, dtype = KERNELS[number]
        inputs = as_inputs(given, lengths, mask)
        assert decode.unsupported(inputs, dtype) is None
        batch, heads = given.q.shape[:2]
        out = torch.full((batch, 1, heads, dim), float("nan"), dtype=dtype)
        parts = decode.scratch(inputs, plan)
        args, shared = decode.arguments(inputs, out, parts, number), plan.shared_bytes(dim, share)
        m = (ctypes.c_ulonglong * 12)(*(n for *row, box, _ in decode.matrices(inputs) for n in (*row, *box)))
        message = library.run(
            number, m, ctypes.byref(args), plan.splits, batch * heads // share, decode.THREADS, shared, seed
        )
        assert message == b"", message.decode()
        return out

    return run


def relative(y, exact):
    return ((y.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-300)).item()


def as_inputs(given, lengths=None, mask=None):
    q, q_scale, k, k_scale, v, v_scale = given
    return triton.Inputs(q, k, v, q_scale, k_scale, v_scale, mask, lengths, None, True, q.shape[3] ** -0.5)


def cache(batch, groups, share, keys, dim, room=0, device="cpu"):
    """A query and a cache with `room` more tokens of storage, where keys and scales are no numbers."""
    q = torch.randn(batch, groups * share, 1, dim, device=device)
    k, v = (torch.randn(batch, groups, keys, dim, device=device) for _ in range(2))
    v = v * 2 ** torch.linspace(-3, 3, keys, device=device).view(-1, 1)
    k[:, :, ::5] *= 0.1
    (codes, scale), (key, key_scale), (value, value_scale) = (quantize_heads(t) for t in (q, k, v))
    whole = -(-keys // 128) * 128 + room

    def roomy(t, axis, fill):
        shape = list(t.shape)
        shape[axis] = whole
        new = torch.full(shape, fill, dtype=torch.uint8, device=device)
        new.narrow(axis, 0, t.shape[axis]).copy_(t.view(torch.uint8))
        return new.view(t.dtype)

    key, value = roomy(key, 2, 0x7F)[:, :, :keys], roomy(transposed_values(value), 3, 0)
    key_scale, value_scale = (roomy(t, 2, 0xFF)[..., :keys] for t in (key_scale, value_scale))
    return Quantized(codes, scale, key, key_scale, value, value_scale)


@pytest.mark.parametrize(
    ("number", "keys", "lengths"),
    [
        (0, 300, None), (0, 1700, [1700, 130]), (1, 513, None), (1, 1700, [1601, 0]), (2, 200, [1, 0]),
        (2, 1030, None), (3, 40, None), (3, 700, [1, 700]),
    ],
)  # fmt: skip
def test_the_kernel_in_the_emulator_meets_the_reference(emulator, number, keys, lengths):
    torch.manual_seed(0)
    _, dim, share, _, dtype = KERNELS[number]
    given = cache(2 if lengths else 1, 2, share, keys, dim, 128)
    lengths = torch.tensor(lengths, dtype=torch.int32) if lengths else None
    expected = attend(given, causal=True, lengths=lengths, dtype=dtype, backend="reference")
    for seed in range(3):
        y = emulator(number, given, lengths, seed)
        assert relative(y, expected) <= 3e-3, seed


def test_masks_in_the_emulator(emulator):
    torch.manual_seed(0)
    given, lengths = cache(2, 2, 4, 608, 64), torch.tensor([608, 555], dtype=torch.int32)
    for mask in (torch.rand(2, 1, 1, 608) > 0.3, torch.arange(608).view(1, 1, 1, 608) >= 290):
        given.v_scale[:, 1, 100], given.k_scale[:, 0, 200] = 255, 255
        mask[..., 100:201:100] = False  # what is no number is not seen
        expected = attend(given, causal=False, lengths=lengths, mask=mask, backend="reference")
        assert relative(emulator(4, given, lengths, 0, mask), expected) <= 3e-3
    mask[..., :] = False
    assert not emulator(4, given, None, 1, mask).any()


def test_what_is_no_number_reaches_its_own_head(emulator):
    torch.manual_seed(0)
    for field in ("k_scale", "v_scale", "q_scale"):
        given = cache(1, 2, 4, 600, 64)
        getattr(given, field)[0, 1, getattr(given, field).shape[2] // 2] = 255
        y, expected = emulator(0, given, None, 0), attend(given, causal=True, backend="reference")
        assert torch.equal(y.isnan(), expected.isnan()) and y.isnan().any() and not y.isnan().all()
        assert relative(y.nan_to_num(), expected.nan_to_num()) <= 3e-3


def test_sums_that_are_zero_are_not_waited_for(emulator):
    torch.manual_seed(0)
    given = cache(1, 2, 4, 600, 64)
    given.v.view(torch.uint8)[:, 1] = 0
    y = emulator(0, given, None, 0)
    assert not y[:, :, 4:].any() and y[:, :, :4].all()


def test_plans_give_every_processor_one_block_or_two():
    for pairs, splits, alone in (
        (1, 132, True), (8, 16, True), (33, 4, True), (48, 2, False), (64, 2, True), (72, 3, False), (96, 1, False),
        (112, 1, True), (132, 1, True), (133, 1, False), (256, 1, False),
    ):  # fmt: skip
        plan = decode.plan_for(pairs, 132)
        assert (plan.splits, plan.alone) == (splits, alone)
        for dim in decode.DIMS:
            assert SM_SHARED // (plan.shared_bytes(dim, 8) + 1024) == (1 if alone else 2)


def test_keys_that_are_not_whole_rows_of_the_copy_engine_are_for_another_kernel():
    for dim, rows, taken in ((64, 77, False), (64, 78, True), (128, 77, True)):
        given = cache(1, 1, 4, 77, dim)._replace(k=torch.zeros(1, 1, rows, dim).to(decode.E4M3)[:, :, :77])
        assert (decode.unsupported(as_inputs(given), torch.bfloat16) is None) == taken


def test_the_kernels_compile_for_sm_90a_without_spills(compiled_cuda):
    entries = (decode.entry(*kernel).replace("decode(", f"decode_{i}(", 1) for i, kernel in enumerate(KERNELS))
    made = compiled_cuda(decode.device_functions() + "".join(entries))
    assert made.spilled == [0] * len(KERNELS), made.log


# --- On a GPU --------------------------------------------------------------------------------------------------------


def compared(given, lengths=None, mask=None, plan=None):
    """It is as near to the reference as Triton's kernel: what the tensor cores cut off flips codes in both."""
    inputs = as_inputs(given, lengths, mask)
    expected = attend(given, causal=True, lengths=lengths, mask=mask, dtype=torch.float16, backend="reference")
    y, theirs = decode.attention(inputs, torch.float16, plan), triton.attention(inputs, torch.float16)
    assert relative(y, expected) <= 1.5 * relative(theirs, expected) + 1e-3


@gpu
@pytest.mark.parametrize("dim", decode.DIMS)
@pytest.mark.parametrize("share", [1, 4, 7, 12])
def test_the_kernel_meets_the_reference(dim, share):
    torch.manual_seed(0)
    for batch, groups, keys in ((1, 2, 5000), (1, 8, 4097), (3, 1, 77), (2, 3, 1024), (40, 8, 300), (4, 8, 1000)):
        given = cache(batch, groups, share, keys, dim, 128, "cuda")
        lengths = torch.randint(0, keys + 1, (batch,), dtype=torch.int32, device="cuda")
        mask = (torch.rand(batch, 1, 1, -(-keys // 16) * 16, device="cuda") > 0.3)[..., :keys]
        for used, seen in ((None, None), (lengths, None), (None, mask), (lengths, mask[:1])):
            compared(given, used, seen)


@gpu
@pytest.mark.parametrize("splits", [1, 2, 5, 16, 33])
def test_each_split_meets_the_reference(splits):
    torch.manual_seed(0)
    compared(cache(1, 8, 4, 9000, 64, 0, "cuda"), plan=replace(decode.plan_for(8, 132), splits=splits))


@gpu
def test_it_is_taken_for_any_number_of_sequences_and_what_it_does_not_take_is_tritons():
    torch.manual_seed(0)
    for batch, keys in ((1, 3000), (2, 200), (40, 200)):
        given = cache(batch, 8, 4, keys, 64, 0, "cuda")
        assert torch.equal(attend(given, causal=True), decode.attention(as_inputs(given), torch.bfloat16))
    odd = given._replace(k_scale=given.k_scale.contiguous())  # rows of 200 bytes
    assert decode.unsupported(as_inputs(odd), torch.bfloat16) and attend(odd, causal=True).isfinite().all()


@gpu
@pytest.mark.parametrize("dim", decode.DIMS)
def test_a_hundred_runs_and_graphs_are_bit_equal(dim):
    torch.manual_seed(0)
    given = as_inputs(cache(2, 8, 4, 3000, dim, 0, "cuda"))
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


@gpu
def test_a_compiled_graph_may_be_the_first_to_call_it():
    code = """
import sys, torch
sys.path.insert(0, "tests/kernels")
import test_attention_decode as t
given = t.cache(1, 8, 4, 384, 64, 0, "cuda")  # all of its storage: a graph's copies of it have no more
step = torch.compile(lambda *given: t.attend(t.Quantized(*given), causal=True) + 1, mode="reduce-overhead")
other = torch.compile(lambda y: y * 2, mode="reduce-overhead")
for _ in range(3):
    torch.compiler.cudagraph_mark_step_begin()
    y = other(step(*given)).clone()
assert torch.equal(y, 2 * (t.attend(given, causal=True) + 1))
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@gpu
def test_what_the_kernel_before_writes_is_read_and_not_what_was_there():
    """Operands that kernels in front make: each launch starts before those have ended."""
    torch.manual_seed(0)
    sets = [as_inputs(cache(1, 8, 4, 4096, 64, 0, "cuda")) for _ in range(8)]
    sets = [
        replace(s, lengths=torch.tensor([4096 - 100 * i], dtype=torch.int32, device="cuda")) for i, s in enumerate(sets)
    ]
    expected = [decode.attention(s, torch.bfloat16) for s in sets]
    fields = ("q", "k", "v", "q_scale", "k_scale", "v_scale", "lengths")
    held = replace(sets[0], **{name: getattr(sets[0], name).clone() for name in fields})
    graph, made = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for s in sets:
            for name in fields:
                getattr(held, name).view(torch.uint8).copy_(getattr(s, name).view(torch.uint8))
            made.append(decode.attention(held, torch.bfloat16))
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))


@gpu
def test_the_sanitizer_finds_nothing(sanitized):
    sanitized(
        "import sys, torch; sys.path.insert(0, 'tests/kernels'); import test_attention_decode as t\n"
        "for dim, share in ((64, 4), (128, 3)):\n"
        "    given = t.cache(1, 2, share, 704, dim, 0)\n"
        "    there = t.Quantized(*(x.view(torch.uint8).cuda().view(x.dtype) for x in given))\n"
        "    y = t.decode.attention(t.as_inputs(there), torch.bfloat16).cpu()\n"
        "    assert t.relative(y, t.attend(given, causal=True, backend='reference')) <= 2e-2\n"
    )
