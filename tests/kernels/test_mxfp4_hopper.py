"""The CUDA kernel that multiplies a few tokens by a packed MXFP4 weight: emulated on the host, compiled, on a GPU."""

import ctypes
import itertools
import math
import re
import shutil
import subprocess
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quantrot.kernels.fp8 import Fp8ScaleRule, quantize_fp8_block
from quantrot.kernels.fp8.reference import gate, rms_norm
from quantrot.kernels.mxfp4 import dequantize_mxfp4, has_fused, hopper, mxfp4_fused, mxfp4_gemm, quantize_mxfp4
from quantrot.kernels.mxfp4.fused import batch_is_faster
from quantrot.kernels.mxfp4.hopper import Arranging, Plan, Turn
from quantrot.kernels.mxfp4.reference import ScaleRule, dequantize_reference, quantize_reference
from tests.kernels.covering import few_or_every

gpu = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# plan, output
CASES = {
    "eight": (Plan(1, 1, 2, 2, 4), BF16),
    "sixteen": (Plan(2, 2, 1, 2, 2), FP32),
    "sixteen_of_one_row": (Plan(2, 1, 1, 2, 2), FP32),
    "thirty_two": (Plan(4, 1, 3, 1, 3, once=True), FP16),
    "thirty_two_split": (Plan(4, 2, 1, 2, 4, split=2, once=True), FP32),
    "thirty_two_split4": (Plan(4, 1, 2, 1, 3, split=4, once=True), BF16),
    "thirty_two_tall": (Plan(4, 4, 1, 2, 4), BF16),
    "sixteen_tall": (Plan(2, 4, 1, 2, 4, once=True), FP16),
    "one_tall": (Plan(0, 4, 1, 2, 4, once=True), BF16),
    "one": (Plan(0, 1, 2, 2, 4), FP32),
    "one_once": (Plan(0, 2, 1, 2, 4, once=True), BF16),
    "one_deep": (Plan(0, 1, 1, 4, 36), FP32),
    "one_split": (Plan(0, 1, 2, 2, 4, split=2, once=True), FP16),
    "eight_grouped": (Plan(1, 1, 4, 2, 4, grouped=True), BF16),
    "sixteen_grouped": (Plan(2, 2, 4, 1, 2, split=2, once=True, grouped=True), FP32),
    "thirty_two_grouped": (Plan(4, 1, 4, 2, 4, once=True, grouped=True), FP32),
}
# plan, what its tokens become
TURNS = {
    "even_32": (CASES["one"][0], Turn(ScaleRule.even, 32)),
    "even": (CASES["one_split"][0], Turn(ScaleRule.even, 0)),
    "quest_128": (CASES["one"][0], Turn(ScaleRule.quest, 128)),
    "mse_64": (CASES["one_split"][0], Turn(ScaleRule.mse, 64)),
    "floor": (CASES["one_once"][0], Turn(ScaleRule.floor, 0)),
    "rceil_128": (CASES["one_once"][0], Turn(ScaleRule.rceil, 128)),
    "absmax34_32": (CASES["one_split"][0], Turn(ScaleRule.absmax34, 32)),
    "sixteen_even_128": (CASES["sixteen"][0], Turn(ScaleRule.even, 128)),
    "thirty_two_mse_64": (CASES["thirty_two_split4"][0], Turn(ScaleRule.mse, 64)),
    "eight_quest": (CASES["eight"][0], Turn(ScaleRule.quest, 0)),
    "grouped_even_32": (CASES["thirty_two_grouped"][0], Turn(ScaleRule.even, 32)),
    "fp8": (CASES["one"][0], Turn(Fp8ScaleRule.bf16, 0)),
    "fp8_exact": (CASES["one_once"][0], Turn(Fp8ScaleRule.exact, 0)),
    "fp8_pow2": (CASES["one"][0], Turn(Fp8ScaleRule.pow2, 0)),
    "fp8_one_split": (CASES["one_split"][0], Turn(Fp8ScaleRule.bf16, 0)),
    "fp8_eight": (CASES["eight"][0], Turn(Fp8ScaleRule.bf16, 0)),
    "fp8_sixteen": (CASES["sixteen_tall"][0], Turn(Fp8ScaleRule.exact, 0)),
    "fp8_thirty_two_grouped": (CASES["thirty_two_grouped"][0], Turn(Fp8ScaleRule.pow2, 0)),
}
# plan, what the tokens become, what is before that, whether a residual is added; of one token that the product norms:
# for how many parts a thread
BESIDE = {
    "normed": (CASES["one"][0], None, "NORMED", False, 3),
    "normed_twice": (CASES["one_once"][0], TURNS["even_32"][1], "NORMED", False, 5),
    "added": (CASES["one_once"][0], TURNS["rceil_128"][1], "NO_FRONT", True),
    "normed_and_added": (CASES["one"][0], TURNS["quest_128"][1], "NORMED", True, 3),
    "normed_in_fp8": (CASES["one_once"][0], TURNS["fp8"][1], "NORMED", True, 5),
    "added_in_fp8": (CASES["one"][0], TURNS["fp8"][1], "NO_FRONT", True),
    "one_gated": (CASES["one"][0], TURNS["even_32"][1], "GATED", True),
    "one_once_gated": (CASES["one_once"][0], TURNS["mse_64"][1], "GATED", True),
    "one_gated_in_fp8": (CASES["one_once"][0], TURNS["fp8"][1], "GATED", True),
    "eight_normed": (CASES["eight"][0], TURNS["even_32"][1], "NORMED", True),
    "eight_gated": (CASES["eight"][0], None, "GATED", False),
    "sixteen_gated_in_fp8": (CASES["sixteen"][0], TURNS["fp8_exact"][1], "GATED", True),
    "sixteen_normed_in_fp8": (CASES["sixteen"][0], TURNS["fp8"][1], "NORMED", True),
    "thirty_two_added": (CASES["thirty_two_split4"][0], None, "NO_FRONT", True),
    "thirty_two_normed": (CASES["thirty_two_split4"][0], TURNS["mse_64"][1], "NORMED", True),
    "grouped_normed": (CASES["thirty_two_grouped"][0], None, "NORMED", True),
    "grouped_gated": (CASES["thirty_two_grouped"][0], TURNS["quest_128"][1], "GATED", True),
}
WIDTHS = (128, 1152, 1536, 2560, 2816)  # columns of tokens
DRIVER = """
static std::string message;
extern "C" const char* arranged(int which, const quantrot::ArrangeArgs* a, int blocks, int threads, int shared) {
  using Kernel = void(quantrot::ArrangeArgs);
  static Kernel* const kernels[] = {ARRANGE};
  message = emulator::launch({(unsigned)blocks, 1, 1}, 1, threads, shared, 0, [&] { kernels[which](*a); });
  return message.c_str();
}

// Matrices as {data, rows, columns, pitch in bytes, rows of a box, columns of a box, bytes of an element, swizzle}.
static quantrot::TensorMap map(const unsigned long long* m) {
  return {(unsigned char*)m[0], m[2], m[1], m[3], (unsigned)m[5], (unsigned)m[4], (unsigned)m[6], (unsigned)m[7]};
}

extern "C" const char* run(int which, const unsigned long long (*m)[8], const quantrot::DecodeArgs* args, int blocks,
                           int cluster, int threads, int shared, int seed) {
  using Kernel = void(quantrot::TensorMap, quantrot::TensorMap, quantrot::TensorMap, quantrot::DecodeArgs);
  static Kernel* const kernels[] = {NAMES};
  auto codes = map(m[0]), wide = map(m[1]), scale = map(m[2]);
  codes.fresh = scale.fresh = !args->settled, wide.fresh = 1;
  message = emulator::launch({(unsigned)blocks, 1, 1}, cluster, threads, shared, seed,
                             [&] { kernels[which](codes, wide, scale, *args); });
  return message.c_str();
}
"""


class Arranger:
    """Kernels that arrange tokens, of given kinds and widths, in the emulator."""

    def __init__(self, kinds: Iterable[Arranging], widths: Iterable[int]) -> None:
        made = {(kind, kind.shape(columns)): columns for kind in kinds for columns in widths}
        self.keys = list(made)
        entries = enumerate(made.items())
        self.source = "".join(hopper.arrange_entry(columns, key[0], f"arrange_{i}") for i, (key, columns) in entries)
        self.names = ", ".join(f"arrange_{i}" for i in range(len(self.keys)))

    def run(self, library, x, columns: int, kind: Arranging, norm=None, epsilon: float = 0.0, settled: bool = False):
        width, dtype = kind.result(columns)
        room = torch.full((len(x) * width * dtype.itemsize + 512,), 255, dtype=torch.uint8)  # NaN, and behind it more
        y, scales = room[:-512].view(dtype).view(len(x), width), torch.full((len(x),), float("nan"))
        arguments = hopper.arrange_arguments(x, columns, y, scales, kind.turn, norm, epsilon, settled)
        shape = kind.shape(columns)
        sizes = len(x) * kind.shares, shape[0], hopper.REDUCED
        library.arranged.restype = ctypes.c_char_p
        message = library.arranged(self.keys.index((kind, shape)), ctypes.byref(arguments), *sizes)
        assert message == b"", message.decode()
        return y, scales if kind.turn and kind.turn.codes else None


@pytest.fixture(scope="module")
def emulator(emulated):
    """emulator(case, tokens, token_scale, packed, scale, seed) -> y."""
    return built(emulated, hopper.device_functions())


def built(emulated, functions: str, names: Iterable[str] = (), widths: Iterable[int] = WIDTHS):
    """What `emulator` is, of these functions, and of these cases or all."""
    turned_on_the_way = {name: (plan, FP32, turn) for name, (plan, turn) in TURNS.items()}
    cases = {name: (*case, None) for name, case in CASES.items()} | turned_on_the_way
    cases |= {name: (plan, BF16, turn, *groups, adds) if groups else (plan, BF16, turn, 0, adds)
              for name, (plan, turn, _, adds, *groups) in BESIDE.items()}  # fmt: skip
    cases = {name: case for name, case in cases.items() if not names or name in names}
    fronts = {name: (front == "NORMED", front == "GATED") for name, (_, _, front, *_) in BESIDE.items()}
    before = {name: hopper.before(plan, turn, *fronts.get(name, ())) for name, (plan, _, turn, *_) in cases.items()}
    arranger = Arranger([kind for kind in before.values() if kind], widths)
    held = {name for name, kind in before.items() if kind and kind.laid == "HELD"}
    made = (hopper.entry(*case, held=name in held, name=f"decode_{name}") for name, case in cases.items())
    entries = "".join(made) + arranger.source
    driver = DRIVER.replace("NAMES", ", ".join(f"decode_{name}" for name in cases))
    library = emulated(functions + entries + driver.replace("ARRANGE", arranger.names))
    library.run.restype = ctypes.c_char_p

    def run(name, tokens, token_scale, packed, scale, seed=0, processors=2, norm=None, epsilon=0.0, residual=None):
        plan, out, turn = cases[name][:3]
        y = torch.full((len(tokens), len(packed)), float("nan"), dtype=out)
        read, columns, settled = tokens, packed.shape[1] * 2, seed % 2 == 1
        if before[name]:
            read, scales = arranger.run(library, tokens, columns, before[name], norm, epsilon, settled)
            token_scale, norm = token_scale if scales is None else scales, None
        maps = (ctypes.c_ulonglong * 24)()  # what the copy engine does not read stays empty
        for i, (t, box) in enumerate(zip(hopper.matrices(plan, packed, read, scale), plan.boxes, strict=True)):
            if t is not None:
                pitch = t.stride(0) * t.itemsize
                maps[8 * i : 8 * i + 8] = (t.data_ptr(), *t.shape, pitch, *box[:2], t.itemsize, box[2])
        args = hopper.arguments(plan, read, token_scale, scale, y, turn, settled, norm, epsilon, residual)
        message = library.run(
            list(cases).index(name), maps, ctypes.byref(args), plan.grid(len(packed), processors), plan.split,
            plan.threads, plan.shared_bytes(columns), seed,
        )  # fmt: skip
        assert message == b"", message.decode()
        return y

    return run


def operands(tokens: int, rows: int, columns: int, seed: int = 0):
    """Small integers and powers of two: their sums are exact in float32 in any order."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-8, 9, (tokens, columns), generator=generator).to(BF16)
    packed = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(124, 130, (rows, columns // 32), generator=generator).to(torch.uint8)
    return x, packed, scale


def turned(x: torch.Tensor, turn: Turn | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What operators before the product make of tokens, in bfloat16, and the scales that it then multiplies by."""
    if turn is None:
        return x, None
    if isinstance(turn.rule, Fp8ScaleRule):
        codes, scale = quantize_fp8_block(x, (1, 0), turn.rule)
        return codes.to(BF16), scale.flatten()
    return dequantize_reference(*quantize_reference(x, turn.rule, hadamard=turn.hadamard)[:2], BF16), None


def counts(plan: Plan) -> list[int]:
    """Of tokens: one, nearly all, all that the plan takes."""
    return sorted({1, max(1, plan.tokens - 3), plan.tokens})


def exact(x, packed, scale) -> torch.Tensor:
    return x.double() @ dequantize_mxfp4(packed, scale, FP32, backend="reference").double().T


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("rows", "columns"), [(16, 128), (40, 1152), (130, 2816), (72, 1536)])
def test_every_plan_is_exact_on_integers(emulator, name, rows, columns):
    plan, out = CASES[name]
    for tokens in counts(plan):
        x, packed, scale = operands(tokens, rows, columns, tokens)
        factors = torch.randint(-2, 3, (tokens,)).float()
        y = emulator(name, x, factors, packed, scale, seed=tokens)
        expected = (exact(x, packed, scale) * factors[:, None]).to(out)
        assert torch.equal(y.double(), expected.double())


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize(("rows", "columns"), [(40, 1152), (130, 2560)])
def test_tokens_turned_by_the_product_are_those_turned_before_it(emulator, name, rows, columns):
    """The bits of the two operators, special groups among them; with seed 1 the weight is settled."""
    plan, turn = TURNS[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(1, counts(plan)[-1] - 1), columns, generator=generator).to(BF16)
    x[:, 128:256] *= torch.tensor([0.0, 2.0**-120, 2.0**-30, 2.0**40]).repeat_interleave(32).to(BF16)
    x[:, 257::4] *= 1 / 4
    packed, scale = quantize_mxfp4(torch.randn(rows, columns, generator=generator))
    before = turned(x, turn)
    plain = next(n for n, (p, *_) in CASES.items() if p == plan)
    for seed in range(2):
        y = emulator(name, x, None, packed, scale, seed)
        assert torch.equal(y.to(CASES[plain][1]), emulator(plain, *before, packed, scale, seed))


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize(("rows", "columns"), [(40, 1152), (132, 2560)])
def test_what_a_layer_has_around_a_product_has_the_bits_of_the_operations(emulator, name, rows, columns):
    """Norms or gates before it, residuals behind it; the squares' sum is exact in any order."""
    plan, turn, front, adds, *parts = BESIDE[name]
    assert not parts or hopper.norm_parts(plan, columns) <= parts[0]
    generator = torch.Generator().manual_seed(0)
    tokens = counts(plan)[-1] - (plan.tokens > 1)
    x = torch.randint(-8, 9, (tokens, columns * (2 if front == "GATED" else 1)), generator=generator).to(BF16)
    norm = torch.rand(columns, generator=generator).to(BF16) if front == "NORMED" else None
    residual = torch.randn(tokens, rows, generator=generator).to(BF16) if adds else None
    packed, scale = quantize_mxfp4(torch.randn(rows, columns, generator=generator))
    inner = gate(x) if front == "GATED" else x if norm is None else rms_norm(x, norm, 1e-5)
    plain = next(n for n, (p, *_) in CASES.items() if p == plan)
    expected = emulator(plain, *turned(inner, turn), packed, scale).to(BF16)
    for seed in range(2):
        y = emulator(name, x, None, packed, scale, seed, norm=norm, epsilon=1e-5, residual=residual)
        assert torch.equal(y, expected if residual is None else expected + residual)


def test_a_norm_is_read_before_the_kernel_in_front_has_ended_only_where_it_is_settled(emulated):
    """Its loads are made ones that the emulator refuses before the wait."""
    functions = hopper.device_functions()
    for load, at in (
        ("((const Words*)norm)[", "part(i)"),
        ("((const Words*)args.norm)[", "column(first + i) / 8"),
    ):
        assert functions.count(f"{load}{at}]") == 1
        functions = functions.replace(f"{load}{at}]", f"load_fresh_words({load[1:-2]} + {at})")
    run = built(emulated, functions, ("normed", "eight_normed"))
    packed, scale = quantize_mxfp4(torch.ones(40, 1152))
    for name, tokens in (("normed", 1), ("eight_normed", 8)):
        x, norm, residual = (
            torch.ones(tokens, 1152).to(BF16),
            torch.ones(1152).to(BF16),
            torch.zeros(tokens, 40).to(BF16),
        )
        call = partial(run, name, x, None, packed, scale, norm=norm, epsilon=1e-5, residual=residual)
        assert torch.equal(call(seed=0), call(seed=2))
        with pytest.raises(AssertionError, match="before grid_wait"):  # odd seeds: settled
            call(seed=1)


FRONTS = ["NO_FRONT", "NORMED", "GATED"]
WIDE_TURNS = [None, Turn(ScaleRule.quest, 64), Turn(Fp8ScaleRule.bf16, 0)]


@pytest.fixture(scope="module")
def wide(emulated):
    """What arranges 33024 columns, a library."""
    arranger = Arranger([Arranging(turn, "PLAIN", front) for turn in WIDE_TURNS for front in FRONTS], [33024])
    source = DRIVER[: DRIVER.index("// Matrices")].replace("ARRANGE", arranger.names)
    return arranger, emulated(hopper.device_functions() + arranger.source + source)


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("turn", WIDE_TURNS)
def test_wide_tokens_are_arranged_by_blocks_of_several_turns(wide, front, turn):
    """33024 columns: a thread has two words of its share."""
    columns, kind, (arranger, library) = 33024, Arranging(turn, "PLAIN", front), wide
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-8, 9, (2, columns * (2 if front == "GATED" else 1)), generator=generator).to(BF16)
    norm = torch.rand(columns, generator=generator).to(BF16) if front == "NORMED" else None
    inner = gate(x) if front == "GATED" else x if norm is None else rms_norm(x, norm, 1e-5)
    expected, scale = turned(inner, turn)
    y, scales = arranger.run(library, x, columns, kind, norm, 1e-5)
    assert torch.equal(y, expected) and (scales is None or torch.equal(scales, scale))


@pytest.mark.parametrize("name", ["sixteen", "one"])
def test_every_scale_of_a_sane_weight_is_exact_and_others_are_loud(emulator, name):
    """Each exponent from -62 to 65, one a row; past that nothing finite. Zeros stay zeros."""
    rows = 130
    x = torch.zeros(1, 128, dtype=BF16)
    x[0, :16] = torch.arange(16).to(BF16)
    packed = torch.full((rows, 64), 0x21, dtype=torch.uint8)  # 0.5, 1
    scale = torch.arange(65, 65 + rows).to(torch.uint8).unsqueeze(1).repeat(1, 4)
    scale[128:] = torch.tensor([[254], [255]])
    packed[7], scale[7] = 0, 0
    y = emulator(name, x, None, packed, scale)[0].double()
    assert torch.equal(y[:128], exact(x, packed, scale)[0, :128])
    assert not torch.isfinite(y[128:]).any()


@pytest.mark.parametrize("name", ["eight", "thirty_two_split"])
def test_nan_and_infinite_tokens_reach_their_own_rows_only(emulator, name):
    x, packed, scale = operands(8, 48, 256)
    x[2, 7], x[5, 100] = float("nan"), float("inf")
    y = emulator(name, x, None, packed | 0x11, scale)
    assert torch.isfinite(y).all(1).logical_not().nonzero().flatten().tolist() == [2, 5]


@pytest.mark.parametrize("name", ["sixteen", "thirty_two_split"])
def test_bits_do_not_depend_on_what_runs_first_nor_on_other_tokens(emulator, name):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(13, 1152, generator=generator).to(BF16)
    packed, scale = quantize_mxfp4(torch.randn(72, 1152, generator=generator))
    first, *others = (emulator(name, x, None, packed, scale, seed, 1 + seed) for seed in range(4))
    assert all(torch.equal(first, other) for other in others)
    assert torch.equal(emulator(name, x[4:5].clone(), None, packed, scale), first[4:5])
    assert ((first - exact(x, packed, scale)).norm() / first.double().norm()).item() < 1e-6


@pytest.mark.parametrize("name", ["fp8", "fp8_exact", "fp8_pow2", "fp8_eight", "fp8_thirty_two_grouped"])
@pytest.mark.parametrize("special", [0.0, 2.0**-133, 2.0**-120, 2.0**118, float("inf"), float("nan")])
def test_codes_of_a_special_token_are_the_quantizers(emulator, name, special):
    """Zeros (also negative ones), subnormals, the largest numbers; what is not finite makes all of the result NaN."""
    x = (torch.randn(1, 256, generator=torch.Generator().manual_seed(0)).clamp(-1, 1) * special).to(BF16)
    x = torch.full_like(x, special) if special == float("nan") else x
    packed, scale = quantize_mxfp4(torch.randn(24, 256, generator=torch.Generator().manual_seed(1)))
    plan, turn = TURNS[name]
    plain = next(n for n, (p, *_) in CASES.items() if p == plan)
    x = x.repeat(plan.tokens, 1)
    x[1:, ::3] = 0  # a token's codes are its own
    expected = emulator(plain, *turned(x, turn), packed, scale)
    assert torch.isfinite(expected).all() == math.isfinite(special)
    y = emulator(name, x, None, packed, scale).to(expected.dtype)
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


def compiled_cases(compiled_cuda, chosen):
    """The names of CASES that are chosen, and these for sm_90a in one file."""
    cases = chosen(CASES.values())
    names = [name for name, case in CASES.items() if case in cases]
    entries = "".join(hopper.entry(*CASES[name], name=f"decode_{name}") for name in names)
    return names, compiled_cuda(hopper.device_functions() + entries)


@few_or_every
def test_every_plan_compiles_for_sm_90a_without_spills(compiled_cuda, chosen):
    names, made = compiled_cases(compiled_cuda, chosen)
    assert made.spilled == [0] * len(names), made.log


@few_or_every
def test_every_kernel_compiles_for_sm_90a_without_spills(compiled_cuda, chosen):
    cases = [(TURNS[name][0], BF16, TURNS[name][1]) for name in ("even_32", "mse_64", "fp8")]
    for plan, turn, front, adds, *groups in BESIDE.values():
        first = hopper.before(plan, turn, front == "NORMED", front == "GATED")
        cases.append((plan, BF16, turn, *(groups or [0]), adds, first is not None and first.laid == "HELD"))
    cases = chosen(cases)
    entries = "".join(hopper.entry(*case, name=f"decode_{i}") for i, case in enumerate(cases))
    made = compiled_cuda(hopper.device_functions() + entries)
    assert made.spilled == [0] * len(cases), made.log


@few_or_every
def test_what_arranges_tokens_compiles_for_sm_90a_without_spills(compiled_cuda, chosen):
    turns = (None, Turn(ScaleRule.quest, 32), Turn(ScaleRule.mse, 64), *(Turn(rule, 0) for rule in Fp8ScaleRule))
    fronts = (
        ("NO_FRONT", 53248),
        ("NORMED", 16384),
        ("GATED", 53248),
    )  # hidden and intermediate size of Llama 3.1 405B
    cases = chosen(
        (Arranging(turn, laid, front), columns)
        for turn, laid, (front, most) in itertools.product(turns, ("PLAIN", "GROUPED", "HELD"), fronts)
        for columns in (128, most)
        if (columns > 128 or laid != "GROUPED") and (laid != "HELD" or (front == "GATED" and turn and not turn.codes))
    )
    entries = [hopper.arrange_entry(columns, kind, f"arrange_{i}") for i, (kind, columns) in enumerate(cases)]
    made = compiled_cuda(hopper.device_functions() + "".join(entries))
    assert made.spilled == [0] * len(entries), made.log


@few_or_every
def test_an_arrival_waits_for_the_reads_before_it(compiled_cuda, chosen):
    """Nothing read from shared memory is on its way when a warp hands its stage back, where copies land next.

    Seen in the machine code, by the scoreboards that a load sets and an instruction waits for.
    """
    triton = pytest.importorskip("triton")
    tool = shutil.which("cuobjdump") or Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not Path(tool).exists():
        pytest.skip("needs cuobjdump, which comes with Triton")
    names, made = compiled_cases(compiled_cuda, chosen)
    command = [str(tool), "-sass", str(made.file)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    functions = re.split(r"Function : decode_(\w+)", text)[1:]
    assert {*functions[::2]} == {*names}
    pattern = r"/\*[0-9a-f]{4,}\*/ +([^;]+);.*\n +/\* 0x([0-9a-f]{16}) \*/"
    for name, code in zip(functions[::2], functions[1::2], strict=True):
        on_their_way: set[int] = set()
        arrivals = 0
        for text, word in re.findall(pattern, code):
            control = int(word, 16) >> 41
            on_their_way -= {i for i in range(6) if control >> 11 + i & 1}
            if "SYNCS.ARRIVE.TRANS64.A1T0" in text:
                arrivals += 1
                assert not on_their_way, (name, text)
            if re.match(r"(@!?U?P\w+ )?LDS", text) and (control >> 5 & 7) < 6:
                on_their_way.add(control >> 5 & 7)
        assert arrivals, name
        assert "BRA.U.ANY" not in code, name  # a loop over lanes, as barriers become that 32 of them make


def on_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")


@gpu
@pytest.mark.parametrize("tokens", [1, 3, 8, 13, 16, 32])
@pytest.mark.parametrize("shape", [(48, 128), (1000, 384), (4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336)])
def test_on_the_gpu(tokens, shape):
    on_hopper()
    x, packed, scale = (t.cuda() for t in operands(tokens, *shape))
    scales = torch.full((tokens,), 2.0, device="cuda")
    expected = exact(x, packed, scale) * 2
    for dtype in (FP32, BF16, FP16):
        y = hopper.decode(x, scales, packed, scale, dtype)
        assert torch.equal(y.double(), expected.to(dtype).double())


@gpu
@pytest.mark.parametrize("tokens", [1, 2, 8, 13, 32])
@pytest.mark.parametrize("front", ["norm", "gated", "none"])
@pytest.mark.parametrize("shape", [(48, 128), (1000, 1152), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192)])
def test_few_tokens_with_what_a_layer_has_around_them_on_the_gpu(tokens, front, shape):
    """The bits of the operations one by one where the squares' sum is exact; again and in a graph the same."""
    on_hopper()
    x, packed, scale = (t.cuda() for t in operands(tokens, *shape))
    around: dict[str, Any] = {"residual": torch.randn(tokens, shape[0], device="cuda").to(BF16)}
    if front == "gated":
        x, around["gated"] = torch.cat([x / 2, torch.randn_like(x)], 1), True
    if front == "norm":
        around |= {"norm": torch.rand(shape[1], device="cuda").to(BF16) + 0.5, "epsilon": 1e-5}
    inner = gate(x) if front == "gated" else rms_norm(x, around["norm"], 1e-5) if front == "norm" else x
    for activations in ("none", "mxfp4", "fp8"):
        options = {"activations": activations, "hadamard": 32 if activations == "mxfp4" else 0}
        turn = {"none": None, "mxfp4": Turn(ScaleRule.even, 32), "fp8": Turn(Fp8ScaleRule.bf16, 0)}[activations]
        if batch_is_faster(tokens, *shape, activations, front != "none", True):
            expected = mxfp4_gemm(inner, packed, scale, **options) + around["residual"]
        else:
            expected = hopper.decode(inner, None, packed, scale, BF16, turn=turn) + around["residual"]
        assert has_fused(tokens, *shape, x.device)
        for settled in (False, True):
            call = partial(mxfp4_fused, x, packed, scale, **options, **around, settled=settled)
            graph = torch.cuda.CUDAGraph()
            results = [call()]
            with torch.cuda.graph(graph):
                results += [call() for _ in range(4)]
            graph.replay()
            assert all(torch.equal(y, expected) for y in results)


SANITIZED = """
import sys, torch
sys.path.insert(0, "tests/kernels")
from test_mxfp4_hopper import *
for tokens, front in itertools.product((1, 3, 32), ("NO_FRONT", "NORMED", "GATED")):
    x, packed, scale = (t.cuda() for t in operands(tokens, 1000, 1152))
    norm = torch.ones(1152, device="cuda", dtype=BF16) if front == "NORMED" else None
    around = {"norm": norm, "gated": front == "GATED", "residual": torch.randn(tokens, 1000, device="cuda").to(BF16)}
    x = torch.cat([x, x], 1) if front == "GATED" else x
    for turn in (None, Turn(ScaleRule.even, 32), Turn(Fp8ScaleRule.bf16, 0)):
        hopper.decode(x, None, packed, scale, BF16, turn=turn, **around)
torch.cuda.synchronize()
"""


@gpu
def test_the_sanitizer_finds_nothing_around_the_product(sanitized):
    sanitized(SANITIZED)


@gpu
def test_every_gate_is_torchs_on_the_gpu():
    """silu of each bfloat16 times one."""
    on_hopper()
    every = torch.arange(1 << 16, device="cuda", dtype=torch.int32).to(torch.int16).view(BF16).view(32, -1)
    x = torch.cat([every, torch.ones_like(every)], 1)
    y, _ = hopper.arrange(x, every.shape[1], Arranging(None, "PLAIN", "GATED"))
    torch.testing.assert_close(y, torch.nn.functional.silu(every), rtol=0, atol=0, equal_nan=True)


@gpu
def test_a_norm_that_the_kernel_before_writes_is_waited_for():
    """It fills nearly all multiprocessors and lets the next kernel start at once; one token and several."""
    on_hopper()
    wide, narrow = (quantize_mxfp4(torch.randn(4096, columns, device="cuda")) for columns in (16384, 4096))
    for tokens in (1, 8):
        x = torch.randn(tokens, 4096, device="cuda").to(BF16)
        for _ in range(50):
            before = torch.randn(1, 16384, device="cuda").to(BF16)
            torch.cuda._sleep(1_000_000)
            norm = mxfp4_gemm(before, *wide)[0]
            y = mxfp4_fused(x, *narrow, norm=norm, epsilon=1e-5)
            torch.cuda.synchronize()
            assert torch.equal(y, mxfp4_fused(x, *narrow, norm=norm, epsilon=1e-5))


@gpu
@pytest.mark.parametrize("shape", [(48, 128), (1000, 1152), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192)])
def test_tokens_codes_on_the_gpu(shape):
    """The bits of the quantizer and the product: one token's are made in the product, more in a kernel before."""
    on_hopper()
    packed, scale = quantize_mxfp4(torch.randn(*shape, device="cuda"))
    for tokens, special in itertools.product((1, 2, 8, 13, 32), (1.0, 0.0, 2.0**-120, float("inf"))):
        x = torch.randn(tokens, shape[1], device="cuda").to(BF16)
        x[-1] *= special
        for rule in Fp8ScaleRule:
            call = partial(hopper.decode, x, None, packed, scale, BF16, turn=Turn(rule, 0), settled=tokens % 2 == 1)
            expected = hopper.decode(*turned(x, Turn(rule, 0)), packed, scale, BF16)
            graph = torch.cuda.CUDAGraph()
            results = [call()]
            with torch.cuda.graph(graph):
                results += [call() for _ in range(4)]
            graph.replay()
            for y in results:
                torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


@gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(16, 128), (1000, 1152), (4096, 4096), (4096, 14336)])
def test_every_plan_on_the_gpu(name, shape):
    """Sums that are exact, so that any order gives them, with a scale a token; again and in a graph the same bits."""
    on_hopper()
    plan, out = CASES[name]
    for tokens in counts(plan):
        x, packed, scale = (t.cuda() for t in operands(tokens, *shape))
        factors = torch.randint(1, 4, (tokens,), device="cuda").float()
        expected = (exact(x, packed, scale) * factors[:, None]).to(out)
        call = partial(hopper.decode, x, factors, packed, scale, out, plan, settled=tokens % 2 == 1)
        assert torch.equal(call(), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [call() for _ in range(4)]
        for _ in range(3):
            for y in results:
                y.fill_(float("nan"))
            graph.replay()
            assert all(torch.equal(y, expected) for y in results)


@gpu
@pytest.mark.parametrize(
    "plan",
    [
        Plan(0, 1, 4, 4, 4, resident=2),
        Plan(1, 1, 2, 8, 8, resident=2),
        Plan(2, 1, 4, 2, 2, resident=2),
        Plan(4, 2, 4, 2, 2, resident=2),
        Plan(4, 1, 4, 2, 2, resident=2, grouped=True),
    ],
    ids=["one", "eight", "sixteen", "thirty_two", "thirty_two_grouped"],
)
def test_a_stage_that_is_filled_at_once_has_been_read(plan):
    """One stage a team, two blocks a multiprocessor: where reads that an arrival overtook came out wrong."""
    on_hopper()
    x, packed, scale = (t.cuda() for t in operands(plan.tokens, 28672, 4096))
    expected = exact(x, packed, scale).float()
    for _ in range(100):
        assert torch.equal(hopper.decode(x, None, packed, scale, FP32, plan), expected)
