"""A matrix and its transpose quantized by one CUDA kernel: emulated on the host, and run on a GPU, against the
reference's bits."""

import ctypes

import pytest
import torch

from quantrot.kernels.fp8 import E4M3, blocks, both_ways, operators, quantize_fp8_both_ways, triton
from quantrot.kernels.fp8.both_ways import Arguments
from quantrot.kernels.fp8.reference import both_ways_reference, quantize_reference, scale_shape
from tests.kernels.test_fp8_blocks import bits, blocks_of_everything, every_quotient, large_matrix

ROW, SQUARE = (1, 128), (128, 128)
gpu = pytest.mark.gpu
RUN = """
static std::string message;
extern "C" const char* run(const quantrot::BothWaysArgs* args, unsigned tiles, unsigned seed) {{
  const emulator::Dim3 grid{{tiles, 1, 1}};
  message = emulator::launch(grid, 1, {threads}, {shared}, seed, [&] {{ quantrot::{call}(*args); }});
  return message.c_str();
}}
"""


def library_of(emulated, block, dtype, rule, edit=str):
    source = edit(both_ways.source(block, dtype, rule))
    run = RUN.format(call=both_ways.call(block, dtype), threads=both_ways.THREADS, shared=both_ways.SHARED)
    library = emulated(source[: source.index('extern "C" __global__')] + run)
    library.run.restype = ctypes.c_char_p
    return library


def emulate(library, x, block, seed=0, turned_scales=True):
    """(what the emulator says, the outputs), which held something else before; x's rows may lie apart."""
    padded = torch.Size((x.shape[1], -(-x.shape[0] // 128) * 128))
    q, turned = (torch.full(shape, 0.5).to(E4M3) for shape in (x.shape, padded))
    scale, turned_scale = (torch.full(scale_shape(t.shape, block), 7.0) for t in (q, turned))
    if turned_scales:
        scale, turned_scale = (t.T.contiguous().T for t in (scale, turned_scale))
    strides = *scale.stride(), *turned_scale.stride()
    places = (t.data_ptr() for t in (x, q, turned, scale, turned_scale))
    args = Arguments(*places, x.stride(0), *strides, *x.shape, padded[1])
    says = library.run(ctypes.byref(args), blocks.squares(*x.shape, (128, 128)), seed)
    return says, (q, scale, turned, turned_scale)


def same(got, expected):
    return all(torch.equal(bits(a.contiguous()), bits(b.contiguous())) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("block", "dtype", "rule"),
    [
        (ROW, torch.bfloat16, "exact"),
        (ROW, torch.float16, "bf16"),
        (ROW, torch.bfloat16, "pow2"),
        (SQUARE, torch.bfloat16, "exact"),
        (SQUARE, torch.float16, "exact"),
        (SQUARE, torch.float32, "exact"),
        (SQUARE, torch.float32, "pow2"),
    ],
)
def test_emulated_bits_are_the_references(emulated, block, dtype, rule):
    library, x = library_of(emulated, block, dtype, rule), blocks_of_everything(128, dtype)
    apart = torch.full((x.shape[0], x.shape[1] + 16), float("nan"), dtype=dtype)
    apart[:, : x.shape[1]] = x
    for part, seed in ((apart[:, : x.shape[1]], 0), (apart[120:263, :136], 1), (x[3:4], 2)):
        says, got = emulate(library, part, block, seed, turned_scales=seed != 1)
        assert says == b"" and same(got, both_ways_reference(part, block, rule))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_emulated_codes_of_every_quotient_down_the_columns_are_the_references(emulated, dtype):
    """128 largest numbers of columns, and below each, in blocks of their own, all that decides codes."""
    found = every_quotient(dtype, 0)[:128]
    below = found[:, : found.shape[1] // 127 * 127].T.reshape(-1, 127, 128)
    x = torch.cat([torch.cat([found[:, :1].T, block]) for block in below])
    says, got = emulate(library_of(emulated, ROW, dtype, "exact"), x, ROW)
    assert says == b"" and same(got, both_ways_reference(x, ROW, "exact"))


def around_every_tie() -> torch.Tensor:
    """float32 blocks of 128 x 128, of normal and of the least numbers: beside a largest, what its scale makes of every
    middle of two codes, and the numbers next to that."""
    codes = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    middles = (codes[:-1] + codes[1:]) / 2
    tiles = []
    for i, exponent in enumerate((0, 100, -100, -117, -126)):
        largest = (1 + torch.rand(1, generator=torch.Generator().manual_seed(i))) * 2.0**exponent
        scale = quantize_reference(largest[:, None], (1, 1), "exact")[1][0]
        at = middles * scale
        near = torch.cat([at, at.nextafter(torch.tensor(torch.inf)), at.nextafter(torch.tensor(0.0)), -at])
        tile = near.clamp(-largest, largest).repeat(33)[: 128 * 128]
        tiles.append(torch.cat([largest, tile[1:]]).view(128, 128))
    return torch.cat(tiles)


def test_emulated_float32_codes_around_every_tie_are_the_references(emulated):
    x = around_every_tie()
    says, got = emulate(library_of(emulated, SQUARE, x.dtype, "exact"), x, SQUARE)
    assert says == b"" and same(got, both_ways_reference(x, SQUARE, "exact"))


@gpu
def test_gpu_float32_codes_around_every_tie_are_the_references():
    x = around_every_tie()
    if not both_ways.supports(x.cuda(), SQUARE):
        pytest.skip("needs sm_90 and cuda.core")
    assert same(quantize_fp8_both_ways(x.cuda(), SQUARE), both_ways_reference(x, SQUARE, "exact"))


@pytest.mark.parametrize(("block", "reads"), [(ROW, "Vec x[8][1]"), (SQUARE, "Vec v[8][W]")])
def test_nothing_is_read_before_the_kernel_in_front_has_ended(emulated, loads_that_wait, block, reads):
    x, waits = torch.ones(128, 128).bfloat16(), f"grid_wait();\n  {reads}"
    assert both_ways.source(block, x.dtype, "exact").count(waits) == 1
    early = library_of(emulated, block, x.dtype, "exact", lambda s: loads_that_wait(s.replace(waits, reads)))
    assert emulate(library_of(emulated, block, x.dtype, "exact", loads_that_wait), x, block)[0] == b""
    assert b"before grid_wait" in emulate(early, x, block)[0]


def test_float32_is_taken_in_squares_of_whole_units(monkeypatch):
    seen = []
    monkeypatch.setattr(blocks, "supports", lambda x, block: bool(seen.append(x.shape[1]) or True))
    x = torch.zeros(16, 136)
    assert both_ways.supports(x, SQUARE) and seen == [272]  # asked as of 16 bits, whose rows lie alike
    others = (x, ROW), (x[:, :132], SQUARE), (torch.zeros(136, 16).T, SQUARE), (x[:0], SQUARE), (x[:0].half(), ROW)
    assert not any(both_ways.supports(*other) for other in others)
    assert both_ways.supports(x.half(), ROW) and seen[-1] == 136


def test_auto_takes_cuda_and_kernels_are_given_rows(monkeypatch):
    taken = []

    def quantizer(*what):
        return lambda x, *codes, **how: taken.append((*what, x.stride()))

    monkeypatch.setattr(both_ways, "supports", lambda x, block: True)
    monkeypatch.setattr(both_ways, "prepare", lambda x, *rest: quantizer("cuda", x.stride()))
    monkeypatch.setattr(triton, "quantize_both_ways", quantizer("triton"))
    x = torch.zeros(16, 8).bfloat16().T
    for given, backend in ((x, "auto"), (x[:0], "auto"), (x, "triton"), (x[:0], "triton")):
        operators.read_once(given, ROW, "exact", True, backend)(given)
    assert taken == [("cuda", (16, 1), (16, 1)), ("triton", (16, 1))]


@pytest.mark.parametrize(("dtype", "rule"), [(torch.bfloat16, "exact"), (torch.float16, "bf16")])
def test_every_kernel_compiles_for_sm_90a_without_spills(compiled_cuda, dtype, rule):
    for block, of in ((ROW, dtype), (SQUARE, dtype), (SQUARE, torch.float32)):
        made = compiled_cuda(both_ways.source(block, of, rule))
        assert made.spilled == [0], made.log


def on_gpu(t):
    return t.contiguous().view(torch.uint8)


@gpu
@pytest.mark.parametrize("rule", ["exact", "bf16", "pow2"])
@pytest.mark.parametrize(
    ("block", "dtype"), [(b, d) for b in (ROW, SQUARE) for d in both_ways.DTYPES if b == SQUARE or d != torch.float32]
)
def test_gpu_bits_are_the_references(block, dtype, rule):
    x = large_matrix(dtype)
    apart = torch.full((x.shape[0], x.shape[1] + 24), float("nan"), dtype=dtype, device="cuda")
    part = apart[:, 8 : 8 + x.shape[1]].copy_(x)
    if not both_ways.supports(part, block):
        pytest.skip("needs sm_90 and cuda.core")
    expected = both_ways_reference(x, block, rule)
    for given in (x.cuda(), part):
        for turned in (False, True):
            first = quantize_fp8_both_ways(given, block, rule, transposed_scale=turned)
            assert same(first, expected)
            for _ in range(20):
                again = quantize_fp8_both_ways(given, block, rule, transposed_scale=turned)
                assert all(torch.equal(on_gpu(a), on_gpu(b)) for a, b in zip(again, first, strict=True))


@gpu
def test_gpu_waits_for_the_kernel_that_writes_its_input_and_the_one_that_reads_its_codes():
    given = [large_matrix().cuda().roll(i, 0) for i in range(8)]
    if not both_ways.supports(given[0], ROW):
        pytest.skip("needs sm_90 and cuda.core")
    expected = [quantize_fp8_both_ways(x) for x in given]
    x, codes = torch.empty_like(given[0]), [torch.empty_like(t) for t in expected[0]]
    kept, run = [[torch.empty_like(t) for t in codes] for _ in given], both_ways.prepare(x, *codes, ROW, "exact")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for source, copies in zip(given, kept, strict=True):
            x.copy_(source)
            run(x, *codes)
            for copy, made in zip(copies, codes, strict=True):
                copy.view(torch.uint8).copy_(made.view(torch.uint8))
            run(source, *codes)
    for _ in range(10):
        graph.replay()
        for got, want in zip(kept, expected, strict=True):
            for g, e in zip(got, want, strict=True):
                assert torch.equal(on_gpu(g), on_gpu(e))
                g.view(torch.uint8).fill_(1)


@gpu
def test_the_sanitizer_finds_nothing(sanitized):
    """Ragged tiles: their maxima, reciprocals and turned codes are other threads'."""
    sanitized(
        "import torch\n"
        "from quantrot.kernels.fp8 import quantize_fp8_both_ways\n"
        "x = torch.ones(300, 200, device='cuda')\n"
        "for dtype, block in ((torch.bfloat16, (1, 128)), (torch.bfloat16, (128, 128)), (torch.float32, (128, 128))):\n"
        "    quantize_fp8_both_ways(x.to(dtype), block)\n"
        "torch.cuda.synchronize()\n"
    )
