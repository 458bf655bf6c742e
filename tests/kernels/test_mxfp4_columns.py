"""The CUDA kernels that quantize a transpose to MXFP4: emulated on the host, compiled, on a GPU."""

import ctypes
import math

import pytest
import torch

from quantrot.kernels import nvrtc
from quantrot.kernels.mxfp4 import hopper_columns, hopper_rows, operators, triton_columns, tuned
from quantrot.kernels.mxfp4.reference import Random, ScaleRule, dequantize_reference, quantize_reference
from quantrot.kernels.ready import address
from tests.kernels.covering import few_or_every, names

gpu = pytest.mark.gpu
pytest.importorskip("triton", reason="triton is not installed")
BF16, FP16, FP32, CODES = torch.bfloat16, torch.float16, torch.float32, torch.uint8
RANDOM = (0x1234567890ABCDE, 3)
DRAWN = (*RANDOM, torch.tensor([(1 << 63) - 1, (1 << 61) - 2]))
# dtype (uint8: packed), rule, Hadamard, signs, mask, random numbers
CASES = {
    "plain": (BF16, "even", 0, False, False, None),
    "quest": (FP16, "quest", 32, False, True, None),
    "nearest": (BF16, "absmax34", 32, True, False, None),
    "random": (BF16, "absmax34", 32, True, False, RANDOM),
    "wide": (BF16, "absmax34", 128, True, False, RANDOM),
    "middle": (FP16, "rceil", 64, True, True, None),
    "drawn": (BF16, "absmax34", 64, True, False, DRAWN),
    "float": (FP32, "absmax34", 32, True, False, DRAWN),
    "float_middle": (FP32, "quest", 64, False, True, None),
    "float_wide": (FP32, "absmax34", 128, True, False, RANDOM),
    "float_plain": (FP32, "absmax34", 0, False, False, None),
    "float_fine": (FP32, "even", 0, False, True, None),
    "half_fine": (FP16, "mse", 0, False, False, None),
    "codes": (CODES, "absmax34", 32, True, False, RANDOM),
    "codes_middle": (CODES, "absmax34", 64, True, False, RANDOM),
    "codes_wide": (CODES, "absmax34", 128, True, False, RANDOM),
    "codes_drawn": (CODES, "absmax34", 64, True, False, DRAWN),
    "codes_drawn_wide": (CODES, "absmax34", 128, True, False, DRAWN),
    "codes_other": (CODES, "mse", 64, False, False, None),
    "codes_nearest": (CODES, "absmax34", 32, True, False, None),
    "codes_nearest_middle": (CODES, "absmax34", 64, False, False, None),
    "codes_nearest_wide": (CODES, "absmax34", 128, True, False, None),
}
CODE_CASES = [name for name, case in CASES.items() if case[0] == CODES]
ELEMENTS = [name for name in CASES if name not in CODE_CASES]
TENSOR_CORES = [name for name in CODE_CASES if CASES[name][1] == "absmax34"]
WARPS = 8  # of a block that turns codes: two teams
DRIVER = """
static std::string message;
extern "C" const char* run(int which, const quantrot::TransposeArgs* args, int blocks, int shared, int seed) {
  static void (*const kernels[])(quantrot::TransposeArgs) = {ELEMENTS};
  message = emulator::launch({(unsigned)blocks, 1, 1}, 1, 64, shared, seed, [&] { kernels[which](*args); });
  return message.c_str();
}
extern "C" const char* run_codes(int which, const quantrot::TransposeArgs* args, int blocks, int shared, int seed) {
  using Kernel = void(quantrot::TensorMap, quantrot::TensorMap, quantrot::TensorMap, quantrot::TransposeArgs);
  static Kernel* const kernels[] = {CODES};
  const unsigned long long columns = args->columns / 2, rows = args->rows, pitch = args->pitch;
  quantrot::TensorMap map{(unsigned char*)args->x, columns, rows, pitch, 128, 128, 1, 1};
  const unsigned long long staged = args->staged ? args->staged : 1, groups = columns / 16 * staged;
  quantrot::TensorMap scales{(unsigned char*)args->in_scale, groups, rows / staged, groups, 16,
                             unsigned(128 / staged), 1, 0};
  map.fresh = scales.fresh = 1;
  const quantrot::TensorMap packed{args->packed, rows / 2, 2 * columns, rows / 2, 64, 32, 1, 64, 0, 0, 1};
  message = emulator::launch({(unsigned)blocks, 1, 1}, 1, WARPS * 32, shared, seed,
                             [&] { kernels[which](map, scales, packed, *args); });
  return message.c_str();
}
// Products since the last call: all, or those in float16 first.
extern "C" unsigned products(int in_float16) {
  unsigned& products = in_float16 ? quantrot::products_in_float16 : quantrot::products_by_warps;
  const unsigned before = products;
  return products = 0, before;
}
// Of numbers up to `most`, that one among them, in units: their codes' magnitudes and the field of the largest.
template <int SPAN>
int nearest(int most, int count, const int* numbers, unsigned char* codes) {
  using Rounding = quantrot::HalfRounding<SPAN, false>;
  const auto half = [](int n) { return quantrot::Fp16::pack(n / 512.f, n / 512.f); };
  const unsigned fields = Rounding::fields(half(most));
  for (int i = 0; i < count; i++) {
    const unsigned x = quantrot::times_half(half(numbers[i]), Rounding::factors(fields)), four[] = {x, x, x, x};
    const unsigned word = quantrot::rounded_word(four, 1), code = word & 7;
    codes[i] = word == code * 0x11111111u ? code : 255;
  }
  return (fields >> 10 & 31) - Rounding::DOWN;
}
template <int SPAN, bool DITHER>
int in_float16(int most) {
  using Rounding = quantrot::HalfRounding<SPAN, DITHER>;
  const unsigned field = Rounding::fields(quantrot::Fp16::pack(most / 512.f, most / 512.f)) >> 10 & 31;
  return field >= quantrot::LEAST_FIELD && field <= Rounding::MOST_FIELD;
}
extern "C" int in_float16(int span, int dither, int most) {
  static int (*const kinds[])(int) = {in_float16<1, false>, in_float16<1, true>, in_float16<2, false>,
                                      in_float16<2, true>,  in_float16<4, false>, in_float16<4, true>};
  return kinds[span / 2 * 2 + dither](most);
}
extern "C" int nearest_of(int span, int most, int count, const int* numbers, unsigned char* codes) {
  return (span == 1 ? nearest<1> : span == 2 ? nearest<2> : nearest<4>)(most, count, numbers, codes);
}
"""


def source(case: str, name: str = "mxfp4_columns") -> str:
    dtype, rule, hadamard, signs, mask, random = CASES[case]
    resident, stages, _ = hopper_columns.plan_of(dtype, bool(random), hadamard)
    more = {"dither": bool(random), "drawn": random is DRAWN, "resident": resident, "stages": stages, "name": name}
    return hopper_columns.entry(dtype, ScaleRule(rule), hadamard, signs, mask=mask, **more)


@pytest.fixture(scope="module")
def library(emulated):
    entries = "".join(source(name, f"columns_{name}") for name in CASES)
    driver = DRIVER.replace("WARPS", str(WARPS))
    for word, kind in (("ELEMENTS", ELEMENTS), ("CODES", CODE_CASES)):
        driver = driver.replace(word, ", ".join(f"columns_{name}" for name in kind))
    # Numbers are drawn by a kernel that may still run: this load fails before grid_wait.
    made, drawn = "TransposeArgs now = *this;\n", "    load_fresh_words(drawn);\n"
    functions = hopper_columns.device_functions()
    assert functions.count(made) == 1
    library = emulated(functions.replace(made, made + drawn) + entries + driver)
    library.run.restype = library.run_codes.restype = ctypes.c_char_p
    return library


def operands(case: str, rows: int, columns: int):
    """(x or codes, their scale or None, signs, random, what the reference makes of the transpose)."""
    dtype, rule, hadamard, signs, mask, numbers = CASES[case]
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator) * 2.0 ** torch.randint(-4, 5, (1, columns), generator=generator)
    if dtype == CODES:  # columns of zeros, as above, and powers of two further apart than tensor cores can add exactly
        powers = 2.0 ** torch.randint(-3, 4, (rows, 1), generator=generator)
        x[:, 32:] = torch.randn(rows, columns - 32, generator=generator) * powers
        x[:, 256:] *= powers**4
    x[3] *= 20
    if dtype == CODES:  # and near enough for float16, of blocks of 128 also only the first
        x[:, 64:192] = torch.randn(rows, len(x[0, 64:192]), generator=generator)
        x[:, 128:192] *= 2.0 ** torch.randint(0, 3, (rows, 1), generator=generator)
    x[:, 1] = 0
    x[5, 2], x[7, 3] = float("nan"), float("inf")
    factors = torch.randint(0, 2, (hadamard,), generator=generator) * 2.0 - 1 if signs else None
    if dtype == CODES and columns > 512:  # as near, but of one sign when turned: sums that float16 has not
        x[:, 512:] = 3 * 2.0 ** torch.randint(0, 3, (rows, 1), generator=generator)
        x[:, 576:] = 3 * 2.0 ** torch.randint(0, 2, (rows, 1), generator=generator)
        x[:, 512:] *= 1 if factors is None else factors.repeat(rows // hadamard)[:, None]
    if dtype != CODES:  # ties, and what is next to them
        x[:, 4] = torch.randint(-24, 25, (rows,), generator=generator) / 4
        x[:, 4] *= 1 + torch.randint(-1, 2, (rows,), generator=generator) * torch.finfo(dtype).eps
    scale = None
    x = x.to(BF16 if dtype == CODES else dtype)
    wide = x
    if dtype == CODES:
        x, scale, _ = quantize_reference(x, ScaleRule.even)
        scale[:, 16:17] = torch.randint(0, 2, scale[:, 16:17].shape, generator=generator)  # the least powers of two
        wide = dequantize_reference(x, scale, FP32)
    random = Random(*numbers) if numbers else None
    expected = quantize_reference(wide.T, ScaleRule(rule), hadamard=hadamard, signs=factors, random=random, mask=mask)
    return x, scale, factors, random, expected


def emulated_run(library, name, operand, down=False, staged=0):
    """(packed, scale, mask) of the kernel of a case, of what `operands` gives."""
    x, in_scale, factors, random, (codes, scales, _) = operand
    hadamard, rows, columns = CASES[name][2], len(x), len(codes)
    packed, scale, bits = (
        torch.full_like(codes, 0xAA),
        torch.full_like(scales, 0xAA),
        codes.new_zeros(columns, rows // 8),
    )
    a = hopper_columns.arguments(rows, columns, x.stride(0) * x.element_size(), hadamard, down)
    a.staged, a.run = staged, 8 if down else 1
    a.x, a.in_scale, a.signs, a.packed, a.scale, a.mask = map(address, (x, in_scale, factors, packed, scale, bits))
    a.s0, a.s1, a.o0, a.o1 = hopper_columns.key_of(random)
    a.drawn = address(random and random.drawn)
    stages = hopper_columns.plan_of(x.dtype, random is not None, hadamard)[1]
    shared = hopper_columns.shared_bytes(x.dtype, stages, WARPS * 32, random is not None)
    run, names = (library.run_codes, CODE_CASES) if name in CODE_CASES else (library.run, ELEMENTS)
    message = run(names.index(name), ctypes.byref(a), 2, shared, rows)
    assert message == b"", message.decode()
    return packed, scale, bits


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("rows", "columns", "down", "staged"),
    [
        (128, 64, True, 0),
        (384, 288, False, 0),
        (160, 544, True, 0),
        (416, 512, False, 1),
        (288, 768, True, 2),
        (160, 256, True, 0),
        (1184, 64, False, 0),
        (1184, 64, True, 0),
    ],
)
def test_bits_are_the_references(library, name, rows, columns, down, staged):
    rows = -(-rows // max(32, CASES[name][2])) * max(32, CASES[name][2])
    operand = operands(name, rows, columns)
    packed, scale, bits = emulated_run(library, name, operand, down, staged)
    codes, scales, kept = operand[-1]
    assert torch.equal(scale, scales) and torch.equal(packed, codes)
    assert kept is None or torch.equal(bits, kept)


@pytest.mark.parametrize("name", TENSOR_CORES)
def test_zeros_lose_their_sign_where_half_of_the_rows_are_and_the_others_cancel(library, name):
    _, rule, hadamard, signs, _, numbers = CASES[name]
    kinds = [4, 10, 2, 12], [5, 11, 3, 13], [6, 12, 4, 14], [4, 10, 2, 12]  # 2, -1, 1, -2, and 1.5 and 2 times that
    odd = torch.tensor([row for kind in kinds for row in kind * 4] * 2, dtype=CODES)
    codes = torch.stack((torch.full_like(odd, 8), odd), 1).flatten()[:, None].expand(256, 32)  # behind a -0 each
    packed, scale = codes | codes << 4, torch.full((256, 2), 127, dtype=CODES)
    random, ones = Random(*numbers) if numbers else None, torch.ones(hadamard) if signs else None
    wide = dequantize_reference(packed, scale, FP32)
    expected = quantize_reference(wide.T, ScaleRule(rule), hadamard=hadamard, signs=ones, random=random)
    found, scales, _ = emulated_run(library, name, (packed, scale, ones, random, expected))
    unlike = [nibbles[found != expected[0]] for byte in (found, expected[0]) for nibbles in (byte & 15, byte >> 4)]
    assert torch.equal(scales, expected[1]) and len(unlike[0])
    for ours, theirs in zip(unlike[:2], unlike[2:], strict=True):
        assert torch.equal(ours, torch.where(theirs == 8, 0, theirs))


def strips(rows: int, scales):
    """Operands of a matrix of strips of 64 columns, one for each list of a strip's scale bytes, which rows repeat."""
    generator = torch.Generator().manual_seed(7)
    packed = torch.randint(0, 256, (rows, 32 * len(scales)), generator=generator).to(CODES)
    kinds = torch.tensor([(kind * rows)[:rows] for kind in scales], dtype=CODES)
    return packed, kinds.T.repeat_interleave(2, 1).contiguous()


def run_strips(library, name, packed, scale):
    """How many products it takes in float16 and in float32; the bits are the reference's, but for zeros' signs."""
    _, rule, hadamard, signs, _, numbers = CASES[name]
    factors = torch.randint(0, 2, (hadamard,), generator=torch.Generator().manual_seed(1)) * 2.0 - 1 if signs else None
    random = Random(*numbers) if numbers else None
    wide = dequantize_reference(packed, scale, FP32)
    expected = quantize_reference(wide.T, ScaleRule(rule), hadamard=hadamard, signs=factors, random=random)
    library.products(0), library.products(1)
    found, scales, _ = emulated_run(library, name, (packed, scale, factors, random, expected))
    in_float16 = library.products(1)
    assert torch.equal(scales, expected[1])
    unlike = [(byte & 15, byte >> 4) for byte in (found, expected[0])]
    for ours, theirs in zip(*unlike, strict=True):
        assert ((ours == theirs) | (ours & 7 == 0) & (theirs & 7 == 0)).all()
    return in_float16, library.products(0) - in_float16


@pytest.mark.parametrize("name", TENSOR_CORES)
def test_sums_are_in_float16_where_they_fit_and_in_float32_where_they_are_exact(library, name):
    tall, random = CASES[name][2] == 128, CASES[name][5] is not None  # sums of four times as many; up to twice as large
    for scales, in_float16, in_float32 in (
        ([120], True, False),
        ([120, 120, 121], True, False),
        ([120] * 15 + [121, 122, 124, 124], random or not tall, None),  # that may not fit
        ([120, 122, 123, 124], random and not tall, None if random else True),
        ([120] * 31 + [126], random, None if random else True),
        ([120] * 63 + [127], False, True),
        ([120, 124, 124], False, True),
        ([120, 125, 125, 125], False, True),
        ([120, 132], False, True),
        ([120, 133], False, False),
        ([20], True, False),
        ([19], False, False),
        ([220], True, False),
        ([221], False, False),
        ([243, 255], False, False),
    ):
        took = run_strips(library, name, *strips(128, [scales]))
        assert (took[0] > 0) == in_float16, scales
        assert in_float32 is None or (took[1] > 0) == in_float32, scales


@pytest.mark.parametrize("name", TENSOR_CORES)
def test_scales_to_the_ends_and_columns_of_zeros(library, name):
    for byte in (0, 1, 19, 20, 219, 220, 221, 240, 245, 250, 254):
        packed, scale = strips(256, [[byte], [byte, 255], [127], [127, 127, 139]])
        packed[:, 70], packed[:128, 80], packed[96:, 110], packed[:, 120] = 0, 0, 0, 0x77
        packed[64:, 32] = 0
        run_strips(library, name, packed, scale)


@pytest.mark.parametrize("dtype", [BF16, FP32, CODES])
def test_a_launch_has_what_the_matrix_is(monkeypatch, dtype):
    seen = []
    monkeypatch.setattr(hopper_columns, "launched", hopper_columns.launched.__wrapped__)
    monkeypatch.setattr(hopper_columns, "_kernel", lambda *how: 0)
    monkeypatch.setattr(nvrtc, "Launch", lambda *how, overlap: seen.append)
    monkeypatch.setattr(nvrtc, "maps_of", lambda *how: lambda data: seen.append((data, *how)) or bytes(128))
    x, scale = torch.zeros(64, 96, dtype=dtype)[:, :64], torch.zeros(64, 4, dtype=CODES)
    how = ScaleRule.absmax34, 32, None, Random(*RANDOM)
    if dtype == CODES:
        made = hopper_columns.requantize(x, scale, *how)
        assert seen.pop(0) == (x.data_ptr(), (64, 64), (96,), (128, 128), CODES, 128, 128)
        assert seen.pop(0) == (made[0].data_ptr(), (32, 32, 4), (128, 32), (64, 8, 4), CODES, 64, 256)
    else:
        made = hopper_columns.quantize_columns(x, *how, False)[:2]
    args = seen[0].args if dtype == CODES else seen[0]
    assert (args.rows, args.columns, args.pitch) == (64, 128, 96) if dtype == CODES else (64, 64, 96 * dtype.itemsize)
    assert (args.x, args.packed, args.scale) == (x.data_ptr(), *map(address, made))
    assert args.in_scale == (scale.data_ptr() if dtype == CODES else None)
    assert [args.s0, args.s1, args.o0, args.o1] == hopper_columns.key_of(Random(*RANDOM))


@pytest.mark.parametrize(("wide", "at", "staged"), [(256, 0, 1), (256, 8, 0), (240, 0, 0), (384, 0, 2)])
def test_scales_come_as_boxes_where_the_copy_engine_takes_them(monkeypatch, wide, at, staged):
    maps, launches, seen = [], [], []
    monkeypatch.setattr(hopper_columns, "_kernel", lambda *how: 0)
    monkeypatch.setattr(nvrtc, "processors", lambda device: 132)
    monkeypatch.setattr(nvrtc, "Launch", lambda *how, overlap: launches.append((*how, overlap)) or seen.append)
    monkeypatch.setattr(nvrtc, "maps_of", lambda *how: lambda data: maps.append((data, *how)) or bytes(128))
    run = hopper_columns.launched.__wrapped__(
        (384, 2, False), 2048, wide, wide, CODES, ScaleRule.absmax34, 32, False, False, True, False, 0
    )
    run(4096, 8192 + at, None, 0, 0, None, None)
    tiles = 16 * -(-wide // 128)
    assert launches == [(0, (tiles,), 384, hopper_columns.shared_bytes(CODES, 2, 384, True), 0, True)]
    assert (seen[0].args.staged, seen[0].args.run) == (staged, 1)
    rows = [(8192, (wide // 16 * n, 2048 // n), (wide // 16 * n,), (16, 128 // n), CODES, 0, 128) for n in (1, 2)]
    assert maps[2:] == rows[staged - 1 : staged] * (staged > 0)


def test_plans_of_codes_are_whole_teams():
    plans = *tuned.HOPPER_PACKED_COLUMNS.values(), *tuned.HOPPER_RANDOM_PACKED_COLUMNS.values()
    assert all(threads % 128 == 0 for threads, _ in plans)


def test_tiles_come_in_eights_where_no_team_has_more_for_it():
    assert hopper_columns.run_of(4096, 528) == 8  # 7.8 each
    assert hopper_columns.run_of(1792, 528) == 4  # 3.4
    assert hopper_columns.run_of(4096, 396) == 1  # 10.3
    assert hopper_columns.run_of(1, 528) == 1


@pytest.mark.parametrize(("block", "limit"), [(32, 724), (64, 1023), (128, 724)])
def test_float16_rounds_as_the_definition(library, block, limit):
    """Every largest number of units, and every number beside the largest that has the same power of two."""
    for dither, most in ((0, limit), (1, 1448 if limit == 724 else 2047)):
        fits = [bool(library.in_float16(block // 32, dither, n)) for n in (0, 1, most, most + 1)]
        assert fits == [False, True, True, False]
    power = [math.floor(math.log2(n * block**-0.5)) for n in range(1, limit + 2)]
    last = [n for n in range(1, limit + 1) if n == limit or power[n - 1] < power[n]]
    groups = [[n] * 32 for n in range(1, limit + 1)]
    groups += [[most, *(min(most, n + i) for i in range(31))] for most in last for n in range(0, most + 1, 31)]
    matrix = torch.ones(1, 1, dtype=torch.float64)  # Sylvester's, which gives these numbers of what is turned here
    for _ in range(block.bit_length() - 1):
        matrix = torch.kron(torch.tensor([[1.0, 1], [1, -1]], dtype=torch.float64), matrix)
    numbers = torch.tensor(groups, dtype=torch.int32)
    turned = (numbers.double() @ matrix[:32] / block).float()
    packed, scale, _ = quantize_reference(turned, ScaleRule.absmax34, hadamard=block)
    expected = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
    found = torch.empty(len(groups), 32, dtype=CODES)
    for group, codes, byte in zip(numbers, found, scale[:, 0].tolist(), strict=True):
        pointers = ctypes.c_void_p(group.data_ptr()), ctypes.c_void_p(codes.data_ptr())
        field = library.nearest_of(block // 32, int(group[0]), 32, *pointers)
        assert field + 128 == byte, group
    assert torch.equal(found, expected[:, :32])


@few_or_every
@pytest.mark.parametrize("kind", [ELEMENTS, CODE_CASES], ids=["elements", "codes"])
def test_the_kernels_compile_for_sm_90a_and_keep_to_their_registers(compiled_cuda, chosen, kind):
    ours = names(chosen, {name: CASES[name] for name in kind})
    sources = [source(name, name=f"columns_{name}") for name in ours]
    made = compiled_cuda(hopper_columns.device_functions() + "".join(sources))
    assert made.spilled == [0] * len(ours), made.log


@pytest.mark.parametrize(("on", "module"), [(False, triton_columns), (True, hopper_columns)])
def test_auto_takes_these_kernels_where_they_can_run(monkeypatch, on, module):
    monkeypatch.setattr(nvrtc, "available", lambda device: on)
    for dtype in (BF16, FP16, torch.float32, torch.uint8):
        assert operators._columns_module(torch.zeros(32, 64, dtype=dtype), "auto") is module
    assert operators._columns_module(torch.zeros(32, 62), "auto") is triton_columns  # no units of 16 bytes


@pytest.mark.parametrize(("dtype", "width", "packs"), [(BF16, 64, False), (FP32, 64, True), (BF16, 32800, True)])
def test_rows_that_no_thread_block_has_are_packed_before_they_are_expanded(monkeypatch, dtype, width, packs):
    monkeypatch.setattr(nvrtc, "available", lambda device: True)
    monkeypatch.setattr(operators, "uses_triton", lambda *call: True)
    monkeypatch.setattr(hopper_rows, "quantize_expanded", lambda *call: ("at once",))
    packed, scale = torch.ones(2), torch.ones(2)
    monkeypatch.setattr(hopper_rows, "quantize", lambda *call: (packed, scale, None))
    monkeypatch.setattr(hopper_rows, "expand", lambda *call: (*call, "outside"))
    made = operators._quantize_expanded(torch.zeros(2, width, dtype=dtype), None, "even", 32, "auto")
    assert made == ((packed, scale, "outside", packed, scale) if packs else ("at once",))


@gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("rows", "columns"), [(128, 64), (640, 544), (4096, 1536)])
def test_on_the_gpu(name, rows, columns):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    _, rule, hadamard, _, mask, _ = CASES[name]
    x, in_scale, factors, random, (codes, scales, kept) = operands(name, rows, columns)
    signs = None if factors is None else factors.cuda()
    moved = random and Random(*(n.cuda() if isinstance(n, torch.Tensor) else n for n in random))
    for _ in range(3):
        if in_scale is not None:
            packed, scale = hopper_columns.requantize(
                x.cuda(), in_scale.cuda(), ScaleRule(rule), hadamard, signs, moved
            )
        else:
            packed, scale, bits = hopper_columns.quantize_columns(
                x.cuda(), ScaleRule(rule), hadamard, signs, moved, mask
            )
            assert kept is None or torch.equal(bits.cpu(), kept)
        assert torch.equal(scale.cpu(), scales) and torch.equal(packed.cpu(), codes)
