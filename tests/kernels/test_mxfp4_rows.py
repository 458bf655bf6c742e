"""The CUDA kernels that quantize and dequantize MXFP4 along rows: emulated on the host, compiled, on a GPU."""

import ctypes

import pytest
import torch

from quantrot.kernels.fp8.reference import gate
from quantrot.kernels.mxfp4 import hopper_batch, hopper_rows, triton_rows, tuned
from quantrot.kernels.mxfp4.reference import (
    Random,
    ScaleRule,
    dequantize_reference,
    expand_reference,
    float32,
    masked_hadamard_reference,
    quantize_reference,
)
from tests.kernels.covering import few_or_every, names

gpu = pytest.mark.gpu
pytest.importorskip("triton", reason="triton is not installed")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SEED, OFFSET = 0x1234567890ABCDE, 3
DRAWN = (SEED, OFFSET, torch.tensor([(1 << 63) - 1, (1 << 61) - 2]))
# dtype, rule, Hadamard, signs, mask, random numbers, expanded
CASES = {
    "even": (BF16, "even", 0, False, False, None, False),
    "even_32": (FP16, "even", 32, False, True, None, False),
    "quest_32": (BF16, "quest", 32, False, True, None, False),
    "quest_128": (FP16, "quest", 128, True, True, None, False),
    "mse_64": (BF16, "mse", 64, False, False, None, False),
    "rceil_32": (BF16, "rceil", 32, True, False, None, False),
    "floor": (BF16, "floor", 0, False, True, None, False),
    "random_32": (BF16, "absmax34", 32, True, False, (SEED, OFFSET), False),
    "random_128": (BF16, "absmax34", 128, True, False, (SEED, OFFSET), False),
    "drawn_32": (BF16, "absmax34", 32, True, False, DRAWN, False),
    "drawn_64": (FP16, "absmax34", 64, True, False, DRAWN, False),
    "nearest_64": (FP16, "absmax34", 64, False, False, None, False),
    "wide_quest_32": (FP32, "quest", 32, False, True, None, False),
    "wide_mse_64": (FP32, "mse", 64, True, False, None, False),
    "wide_quest_128": (FP32, "quest", 128, True, True, None, False),
    "wide_random": (FP32, "absmax34", 0, False, False, (SEED, OFFSET), False),
    "wide_quest": (FP32, "quest", 0, False, True, None, False),
    "wide_even": (FP32, "even", 0, False, False, None, False),
    "wide_mse": (FP32, "mse", 0, False, False, None, False),
    "fine_rceil": (FP16, "rceil", 0, False, True, None, False),
    "expanded_even": (BF16, "even", 32, False, False, None, True),
    "expanded_quest": (FP16, "quest", 128, True, False, None, True),
    "expanded_mse": (BF16, "mse", 0, False, False, None, True),
    "expanded_fine": (FP16, "floor", 0, False, False, None, True),
    "expanded_arranged": (BF16, "even", 0, False, False, None, True),
    "gated": (BF16, "quest", 128, True, False, None, True),
    "gated_arranged": (BF16, "even", 32, False, False, None, True),
}
# of few rows: dtype, rule, Hadamard, gated, width, threads and what each has
FEW = {
    "few_even": (BF16, "even", 32, False, 1408, (192, 1)),
    "few_quest": (FP16, "quest", 128, False, 1408, (64, 3)),
    "few_mse": (BF16, "mse", 0, False, 384, (64, 1)),
    "few_gated": (BF16, "rceil", 64, True, 1408, (96, 2)),
    "few_floor": (FP16, "floor", 32, False, 128, (32, 1)),
    "few_fine": (FP16, "even", 0, False, 1408, (192, 1)),
}
ARRANGED, GATED = ("expanded_arranged", "gated_arranged"), ("gated", "gated_arranged")  # of CASES
BACK = {  # of a gradient: dtype, Hadamard, whether to float32
    f"back_{hadamard}_{hopper_rows.IN[dtype]}{'_wide' if wide else ''}": (dtype, hadamard, wide)
    for dtype in (BF16, FP16)
    for hadamard in (32, 64, 128)
    for wide in (False, True)
}
DRIVER = """
static std::string message;
extern "C" const char* run(int which, const quantrot::QuantizeArgs* args, int blocks, int threads, int shared,
                           int seed) {
  static void (*const kernels[])(quantrot::QuantizeArgs) = {NAMES};
  message = emulator::launch({(unsigned)blocks, 1, 1}, 1, threads, shared, seed, [&] { kernels[which](*args); });
  return message.c_str();
}
extern "C" const char* dequantize(int which, const void* packed, const unsigned char* scale, void* y,
                                  long long units, int blocks) {
  static void (*const kernels[])(const void*, const unsigned char*, void*, long long) = {TYPES};
  message = emulator::launch({(unsigned)blocks, 1, 1}, 1, 256, 0, 0, [&] { kernels[which](packed, scale, y, units); });
  return message.c_str();
}
extern "C" const char* expand(const quantrot::ExpandArgs* two, int blocks) {
  message = emulator::launch({(unsigned)blocks, 1, 1}, 1, 256, 0, 0, [&] { expanded(two[0], two[1]); });
  return message.c_str();
}
extern "C" const char* masked(int which, const quantrot::MaskedArgs* args, int blocks, int threads, int shared,
                              int seed) {
  static void (*const kernels[])(quantrot::MaskedArgs) = {MASKED};
  message = emulator::launch({(unsigned)blocks, 1, 1}, 1, threads, shared, seed, [&] { kernels[which](*args); });
  return message.c_str();
}
"""


def source(case: str, **more) -> str:
    dtype, rule, hadamard, signs, mask, random, expanded = CASES[case]
    plan = hopper_rows.plan_of(dtype, hadamard, mask, bool(random))
    most, expanded_stages = tuned.HOPPER_EXPANDED
    threads, resident, stages = (128, most // 128, expanded_stages) if expanded else plan
    more = {"mask": mask, "expanded": expanded, "threads": threads, "resident": resident} | more
    more |= {"dither": bool(random), "drawn": random is DRAWN}
    more |= {"stages": stages, "arranged": case in ARRANGED, "gated": case in GATED}
    return hopper_rows.entry(dtype, ScaleRule(rule), hadamard, signs, **more)


def few(case: str, plan: tuple[int, int], **more) -> str:
    dtype, rule, hadamard, gated, *_ = FEW[case]
    return hopper_rows.few_entry(dtype, ScaleRule(rule), hadamard, gated, plan, **more)


def back_to(dtype: torch.dtype, name: str) -> str:
    return hopper_rows.DEQUANTIZE.format(name=name, dtype=hopper_rows.PACKED_IN[dtype], each=hopper_rows.EACH)


def back(case: str, **more) -> str:
    dtype, hadamard, wide = BACK[case]
    return hopper_rows.masked_entry(tuned.HOPPER_MASKED[hadamard], dtype, hadamard, wide, **more)


@pytest.fixture(scope="module")
def library(emulated):
    entries = "".join(source(name, name=f"rows_{name}") for name in CASES)
    entries += "".join(few(name, case[5], name=name) for name, case in FEW.items())
    entries += "".join(back_to(dtype, name) for dtype, name in hopper_rows.PACKED_IN.items())
    entries += hopper_rows.EXPAND.format(name="expanded", threads=hopper_rows.EXPAND_THREADS)
    entries += "".join(
        hopper_rows.masked_entry(tuned.HOPPER_MASKED[case[1]], *case, name=name) for name, case in BACK.items()
    )
    driver, kernels = DRIVER, [*(f"rows_{name}" for name in CASES), *FEW]
    for word, named in (("NAMES", kernels), ("MASKED", BACK), ("TYPES", hopper_rows.PACKED_IN.values())):
        driver = driver.replace(word, ", ".join(named))
    library = emulated(hopper_rows.device_functions() + entries + driver)
    for function in (library.run, library.dequantize, library.expand, library.masked):
        function.restype = ctypes.c_char_p
    return library


def data(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows of different sizes, outliers, zeros, ties, what is not finite, and groups far, or just, below the others."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    x *= 2.0 ** torch.randint(-4, 5, (rows, 1), generator=generator)
    x[:, 3] *= 20
    x[0] = torch.randint(-24, 25, (width,), generator=generator) / 4  # ties, and what is next to them
    x[0] *= 1 + torch.randint(-1, 2, (width,), generator=generator) * torch.finfo(dtype).eps
    x[1, :32] = 0
    x[2, -32:] *= 2.0**-20
    x[2, min(40, width - 1)] = float("nan")
    if rows > 6:  # 15 exponents less, the first below the window, and 14
        x[5] = x[5, :32].repeat(width // 32)
        x[5, -32:] *= 2.0**-15
        x[6] = x[5]
        x[6, -32:] *= 2
    x[3 % rows, 5] = float("nan")
    x[4 % rows, 7] = -float("inf")
    return x.to(dtype)


def arguments_of(name: str, x: torch.Tensor):
    """(expected by the reference, what the kernel writes, its signs) of a case."""
    dtype, rule, hadamard, signs, mask, numbers, expanded = CASES[name]
    x = gate(x) if name in GATED else x
    generator = torch.Generator().manual_seed(1)
    factors = torch.randint(0, 2, (hadamard,), generator=generator) * 2.0 - 1 if signs else None
    random = Random(*numbers) if numbers else None
    expected = quantize_reference(x, ScaleRule(rule), hadamard=hadamard, signs=factors, random=random, mask=mask)
    return expected, factors, random


def laid(name: str, e4m3: torch.Tensor) -> torch.Tensor:
    """e4m3 as the case has it."""
    return hopper_batch.arrange(e4m3) if name in ARRANGED else e4m3


def same_nan(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("rows", "width"), [(5, 128), (7, 1408)])
def test_bits_are_the_references(library, name, rows, width):
    dtype, _, hadamard, _, mask, _, expanded = CASES[name]
    x = data(rows, width << (name in GATED), dtype)
    (codes, scales, kept), factors, random = arguments_of(name, x)
    groups = width // 32
    packed = torch.full((rows, width // 2), 0xAA, dtype=torch.uint8)
    scale, bits = torch.full((rows, groups), 0xAA, dtype=torch.uint8), torch.zeros(rows, width // 8, dtype=torch.uint8)
    out, row_scale = torch.zeros(rows, width, dtype=torch.float8_e4m3fn), torch.zeros(rows)
    outside = torch.full((rows,), -1, dtype=torch.int32)
    written = (packed, scale, out if expanded else bits, row_scale, outside)
    shape = (rows, groups) if expanded else (1, rows * groups)
    threads, _, stages = hopper_rows.plan_of(dtype, hadamard, mask, random is not None)
    if expanded:
        threads, stages = -(-groups // 32) * 32, tuned.HOPPER_EXPANDED[1]
    a = hopper_rows.arguments(x, factors, written, *shape, hadamard, random)
    shared = hopper_rows.shared_bytes(
        threads, stages, hadamard, expanded=expanded, gated=name in GATED, wide=dtype == FP32
    )
    message = library.run(list(CASES).index(name), ctypes.byref(a), 2, threads, shared, rows)
    assert message == b"", message.decode()
    if expanded:
        values, tops, counts = expand_reference(codes, scales)
        assert torch.equal(out.view(torch.uint8), laid(name, values).view(torch.uint8))
        assert torch.equal(row_scale, tops) and torch.equal(outside, counts)
        assert counts.max() > 0 or hadamard == 128
        needed = counts > 0
        assert torch.equal(packed[needed], codes[needed]) and torch.equal(scale[needed], scales[needed])
    else:
        assert torch.equal(scale, scales) and torch.equal(packed, codes)
        assert not mask or torch.equal(bits, kept)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("rows", [1, 7])
def test_few_rows_have_the_references_bits(library, name, rows):
    dtype, rule, hadamard, gated, width, (threads, _) = FEW[name]
    x = data(rows, width << gated, dtype) if rows > 4 else data(7, width << gated, dtype)[2:3].contiguous()
    codes, scales, _ = quantize_reference(gate(x) if gated else x, ScaleRule(rule), hadamard=hadamard)
    packed, scale = (torch.full_like(t, 0xAA) for t in (codes, scales))
    out, row_scale = torch.zeros(rows, width, dtype=torch.float8_e4m3fn), torch.zeros(rows)
    outside = torch.full((rows,), -1, dtype=torch.int32)
    written = packed, scale, out, row_scale, outside
    a = hopper_rows.arguments(x, None, written, rows, width // 32, hadamard, None)
    which, shared = len(CASES) + list(FEW).index(name), threads // 32 * 12
    message = library.run(which, ctypes.byref(a), rows, threads, shared, rows)
    assert message == b"", message.decode()
    values, tops, counts = expand_reference(codes, scales)
    assert torch.equal(out.view(torch.uint8), hopper_batch.arrange(values).view(torch.uint8))
    assert torch.equal(row_scale, tops) and torch.equal(outside, counts)
    needed = counts > 0
    assert needed.any() or hadamard > 32
    assert torch.equal(packed[needed], codes[needed]) and torch.equal(scale[needed], scales[needed])


@pytest.mark.parametrize(
    ("rows", "width", "few"),
    [(1, 4096, False), (32, 4096, False), (33, 128, True), (8, 4224, True), (132, 14336, True), (133, 14336, False)],
)
def test_which_rows_are_few(rows, width, few):
    assert hopper_rows.few_rows(rows, width) == few


@pytest.mark.parametrize(("width", "plan"), [(128, (32, 1)), (4096, (512, 1)), (14336, (896, 2)), (32768, (1024, 4))])
def test_a_block_has_a_row_of_eight_columns_a_thread_or_a_multiple(width, plan):
    assert hopper_rows.few_plan(width) == plan


@pytest.mark.parametrize(
    ("dtype", "width", "row", "fits"),
    [
        (FP16, 64, True, True),
        (FP32, 64, False, True),
        (FP32, 64, True, False),  # to e4m3
        (torch.float64, 64, False, False),
        (BF16, 0, False, False),
        (BF16, 32768 + 32, True, False),
        (BF16, 32768 + 32, False, True),
    ],
)
def test_what_the_kernels_take(dtype, width, row, fits):
    assert hopper_rows.fits(torch.zeros(2, width, dtype=dtype), row) == fits


@pytest.mark.parametrize(
    ("dtype", "width", "gates"),
    [(BF16, 14336, True), (BF16, 28672, True), (BF16, 32768, False), (BF16, 65536, False), (FP16, 4096, False)],
)
def test_what_is_gated_where_it_is_quantized(dtype, width, gates):
    """Twice a row's tiles in shared memory, in bfloat16."""
    assert hopper_rows.gates(dtype, width, 32) == gates


@pytest.mark.parametrize("numbers", [None, (SEED, OFFSET), DRAWN])
def test_a_launch_has_the_random_numbers_and_where_more_are_drawn(monkeypatch, numbers):
    random, seen = numbers and Random(*numbers), []
    monkeypatch.setattr(hopper_rows, "launched", hopper_rows.launched.__wrapped__)
    monkeypatch.setattr(hopper_rows, "_kernel", lambda source, *rest: seen.append(source))
    monkeypatch.setattr(hopper_rows.nvrtc, "Launch", lambda *how: seen.append)
    hopper_rows.quantize(torch.zeros(4, 64, dtype=BF16), ScaleRule.absmax34, 32, None, random, False)
    text, now = seen
    kind = "false, true" if random else "false, false"  # mask, dither
    assert f"quantrot::ABSMAX34, {kind}, " in text and ("with_drawn()" in text) == (numbers is DRAWN)
    assert now.drawn == (DRAWN[2].data_ptr() if numbers is DRAWN else None)
    assert [now.s0, now.s1, now.o0, now.o1] == hopper_rows.key_of(random)


@pytest.mark.parametrize("dtype", hopper_rows.PACKED_IN)
def test_every_code_and_scale_is_dequantized(library, dtype):
    packed = torch.randint(0, 256, (256, 48), dtype=torch.uint8)
    packed[:, :16] = torch.arange(0, 256, 17).to(torch.uint8)  # the sixteen codes
    scale = torch.arange(256).to(torch.uint8)[:, None].expand(256, 3).contiguous()
    y = torch.zeros(256, 96, dtype=dtype)
    units = y.numel() * y.itemsize // 16
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in (packed, scale, y))
    which = list(hopper_rows.PACKED_IN).index(dtype)
    message = library.dequantize(which, *pointers, ctypes.c_longlong(units), -(-units // (256 * hopper_rows.EACH)))
    assert message == b"", message.decode()
    assert same_nan(y, dequantize_reference(packed, scale, dtype))


def some_packed(rows: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All scale bytes and codes; rows in the window, with groups below it, of zeros, and NaN."""
    generator = torch.Generator().manual_seed(rows)
    packed = torch.randint(0, 256, (rows, groups * 16), dtype=torch.uint8, generator=generator)
    scale = torch.randint(100, 115, (rows, groups), dtype=torch.uint8, generator=generator)
    scale[1::4] = torch.randint(0, 256, scale[1::4].shape, dtype=torch.uint8, generator=generator)
    scale[2::4, ::3], packed[2::4, :16] = 0, 0
    scale[3::4, -1] = 255
    scale[-1] = 255
    return packed, scale


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("shapes", [((9, 1), (0, 0)), ((13, 44), (0, 0)), ((6, 300), (11, 2)), ((8, 3), (8, 3))])
def test_every_code_and_scale_is_expanded(library, shapes, counted):
    """Of one matrix, or of two by one kernel."""
    given, made, blocks = (hopper_rows.ExpandArguments * 2)(), [], 0
    for i, (rows, groups) in enumerate(shape for shape in shapes if shape[0]):
        packed, scale = some_packed(rows, groups)
        out, row_scale = torch.zeros(rows, groups * 32, dtype=torch.float8_e4m3fn), torch.zeros(rows)
        outside = torch.full((rows,), -1, dtype=torch.int32)
        made.append((packed, scale, out, row_scale, outside))
        given[i] = hopper_rows.ExpandArguments(*(t.data_ptr() for t in made[-1]), rows, groups)
        given[i].outside = given[i].outside if counted else None
        blocks += -(-rows // 8)
    message = library.expand(given, blocks)
    assert message == b"", message.decode()
    for packed, scale, out, row_scale, outside in made:
        values, tops, counts = expand_reference(packed, scale)
        assert torch.equal(out.view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(row_scale, tops) and torch.equal(outside, counts if counted else outside * 0 - 1)


def gradient(rows: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Of different sizes, and what is not finite, once where the mask has a zero, and the mask."""
    x, mask = data(rows, width, dtype), torch.randint(0, 256, (rows, width // 8), dtype=torch.uint8)
    mask[1], mask[2] = 0, 255
    mask[3 % rows, 0] |= 1 << 5
    mask[4 % rows, 0] &= ~(1 << 7)
    return x, mask


@pytest.mark.parametrize("name", BACK)
@pytest.mark.parametrize(("rows", "width"), [(5, 128), (7, 1408)])
def test_a_clipped_gradient_is_turned_back(library, name, rows, width):
    dtype, hadamard, wide = BACK[name]
    x, mask = gradient(rows, width, dtype)
    y = torch.full((rows, width), 7.0, dtype=FP32 if wide else dtype)
    threads, _, stages = tuned.HOPPER_MASKED[hadamard]
    a = hopper_rows.MaskedArguments(x.data_ptr(), mask.data_ptr(), y.data_ptr(), rows * width // 32, float32(0.3))
    shared = hopper_rows.shared_bytes(threads, stages, hadamard)
    message = library.masked(list(BACK).index(name), ctypes.byref(a), 2, threads, shared, rows)
    assert message == b"", message.decode()
    assert same_nan(y, masked_hadamard_reference(x, mask, hadamard, float32(0.3), y.dtype))
    assert y.isnan().any() and y.isfinite().any()


@few_or_every
def test_the_kernels_compile_for_sm_90a_without_spills(compiled_cuda, chosen):
    sources = [hopper_rows.EXPAND.format(name="expanded", threads=hopper_rows.EXPAND_THREADS)]
    sources += [back_to(dtype, name) for dtype, name in hopper_rows.PACKED_IN.items()]
    sources += [back(name, name=name) for name in names(chosen, BACK)]
    sources += [few(name, hopper_rows.few_plan(14336), name=name) for name in names(chosen, FEW)]
    sources += [source(name, name=f"rows_{name}") for name in names(chosen, CASES)]
    made = compiled_cuda(hopper_rows.device_functions() + "".join(sources))
    assert made.spilled == [0] * len(sources), made.log


@gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("rows", "width"), [(5, 128), (40, 1408), (9, 14336), (1000, 1408), (300, 14336)])
def test_on_the_gpu(name, rows, width):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    dtype, rule, hadamard, _, mask, _, expanded = CASES[name]
    x = data(rows, width << (name in GATED), dtype)
    (codes, scales, kept), factors, random = arguments_of(name, x)
    signs = None if factors is None else factors.cuda()
    moved = random and Random(*(n.cuda() if isinstance(n, torch.Tensor) else n for n in random))
    for _ in range(3):
        if expanded:
            how = {"arranged": name in ARRANGED, "gated": name in GATED}
            got = hopper_rows.quantize_expanded(x.cuda(), ScaleRule(rule), hadamard, signs, **how)
            out, row_scale, outside, packed, scale = (t.cpu() for t in got)
            values, tops, counts = expand_reference(codes, scales)
            assert torch.equal(out.view(torch.uint8), laid(name, values).view(torch.uint8))
            assert torch.equal(row_scale, tops) and torch.equal(outside, counts)
            needed = counts > 0
            assert torch.equal(packed[needed], codes[needed]) and torch.equal(scale[needed], scales[needed])
        else:
            got = hopper_rows.quantize(x.cuda(), ScaleRule(rule), hadamard, signs, moved, mask)
            packed, scale, bits = (t.cpu() for t in got)
            assert torch.equal(scale, scales) and torch.equal(packed, codes)
            assert not mask or torch.equal(bits, kept)


@gpu
@pytest.mark.parametrize(("rows", "groups"), [(9, 1), (1000, 44), (300, 448)])
def test_expand_on_the_gpu(rows, groups):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    packed, scale = some_packed(rows, groups)
    expected = expand_reference(packed, scale)
    x = data(700, groups * 32, BF16)
    codes, scales, _ = quantize_reference(x, ScaleRule.even, hadamard=32)
    tokens = expand_reference(codes, scales)
    for _ in range(20):
        alone = hopper_rows.expand(packed.cuda(), scale.cuda())
        given, weight = x.cuda(), (packed.cuda(), scale.cuda())
        room = triton_rows.room(rows, groups * 32, given.device)
        quantized = hopper_rows.quantize_expanded(given, ScaleRule.even, 32, None)
        beside = hopper_rows.expand(*weight, room)
        both = hopper_rows.expand_both(packed.cuda(), scale.cuda(), codes.cuda(), scales.cuda())
        found = (alone, expected), (beside, expected), (quantized, tokens), (both[0], expected), (both[1], tokens)
        for got, wanted in found:
            assert torch.equal(got[0].view(torch.uint8).cpu(), wanted[0].view(torch.uint8))
            assert torch.equal(got[1].cpu(), wanted[1]) and torch.equal(got[2].cpu(), wanted[2])


@gpu
@pytest.mark.parametrize("name", BACK)
@pytest.mark.parametrize(("rows", "width"), [(5, 128), (1000, 1408), (300, 14336)])
def test_a_clipped_gradient_is_turned_back_on_the_gpu(name, rows, width):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    dtype, hadamard, wide = BACK[name]
    x, mask = gradient(rows, width, dtype)
    expected = masked_hadamard_reference(x, mask, hadamard, 0.3, FP32 if wide else dtype)
    for _ in range(3):
        got = hopper_rows.masked_hadamard(x.cuda(), mask.cuda(), hadamard, 0.3, expected.dtype)
        assert same_nan(got.cpu(), expected)


@gpu
@pytest.mark.parametrize("dtype", hopper_rows.PACKED_IN)
def test_dequantize_on_the_gpu(dtype):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    packed = torch.randint(0, 256, (1000, 208), dtype=torch.uint8)
    scale = torch.randint(0, 256, (1000, 13), dtype=torch.uint8)
    got = hopper_rows.dequantize(packed.cuda(), scale.cuda(), dtype)
    assert same_nan(got.cpu(), dequantize_reference(packed, scale, dtype))


def test_roots_are_float32_numbers():
    a = hopper_rows.arguments(torch.zeros(1, 32), None, (None,) * 5, 1, 1, 128, None)
    assert a.root == float32(128**-0.5)
