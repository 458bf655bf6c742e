"""MXFP4: quantizers against their byte floors, products against bfloat16, cuBLAS FP8 and PyTorch's int4, training.

    python benchmarks/bench_mxfp4.py            # the table, and results/bench_mxfp4-<gpu>.json
    python benchmarks/bench_mxfp4.py --tune     # first times every candidate tile and plan and writes tuned.py

Times are those of timing.py, products and their peers in turn. `floor` is bytes read and written, over the speed of a
copy in the same run; of a product, the time to read the packed weight. cublas_fp8 multiplies ready e4m3 operands,
tensorwise; tinygemm is torch.ops.aten._weight_int4pack_mm with groups of 128. `error` is relative, to float64 of the
dequantized operands, or the share of a quantizer's bytes that differ from the reference's on a part of the tensor (0).
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tables import mxfp4_means  # noqa: E402
from timing import (  # noqa: E402
    ROTATE_BYTES,
    Calls,
    copy_gbps,
    give_back,
    in_processes,
    race_us,
    random_tensors,
    time_us,
    write_results,
)

from quantrot.kernels import nvrtc  # noqa: E402
from quantrot.kernels.between import try_norm  # noqa: E402
from quantrot.kernels.fp8 import quantize_fp8_block  # noqa: E402
from quantrot.kernels.fp8.reference import gate  # noqa: E402
from quantrot.kernels.mxfp4 import (  # noqa: E402
    HadamardGemm,
    Mxfp4Gemm,
    ScaleRule,
    dequantize_mxfp4,
    expand_mxfp4,
    hadamard_quantize_mxfp4,
    hopper,
    hopper_batch,
    hopper_normed,
    hopper_rows,
    masked_hadamard,
    mxfp4_gemm,
    quantize_mxfp4,
    requantize_mxfp4,
)
from quantrot.kernels.mxfp4.quantized import quantizer, scaled_product  # noqa: E402

TUNED = ROOT / "quantrot" / "kernels" / "mxfp4" / "tuned.py"
ROWS, COLUMNS = 32768, 4096
SHAPES = [(4096, 4096), (8192, 8192), (28672, 4096), (4096, 14336)]  # (N, K)
HADAMARD = (32, 64, 128)
DECODE, PREFILL = [1, 8, 16, 32], [1024, 4096, 8192]
TOKENS = [*DECODE, 64, 96, 128, 256, 512, *PREFILL]
NORMED = [(64, 4096), (256, 4096), (1024, 4096), (2048, 4096), (8192, 4096), (2048, 2048), (2048, 8192), (2048, 16384)]
BEHIND_NORMS = [("mxfp4", "even", 32), ("fp8", "bf16", 0)]  # activations, rule, Hadamard
PACKED = 0.5 + 1 / 32  # bytes an element

Row = dict[str, Any]


def measured(op: str, case: dict[str, Any], us: float, floor_bytes: float, peers: dict, error: float | None) -> Row:
    return {"op": op, "case": case, "us": us, "floor_bytes": floor_bytes, "peers_us": peers, "error": error}


# --- Quantizers ------------------------------------------------------------------------------------------------------


def quantizers() -> list[tuple[str, dict[str, Any], float, Callable]]:
    """(op, case beside rows and columns, bytes an element, function of (x, packed, scale)). binades: the deviation of
    codes' rows from each other."""
    drawn = torch.randint(0, 2, (128,)).float() * 2 - 1
    signs = {"cpu": drawn, "cuda": drawn.cuda()}

    def backward(x: Tensor, h: int, random: bool) -> dict[str, Any]:
        return {"hadamard": h, "signs": signs[x.device.type][:h], "random": (1, 2) if random else None}

    found: list[tuple[str, dict[str, Any], float, Callable]] = []
    for h in HADAMARD:
        quest = partial(hadamard_quantize_mxfp4, scale_rule="quest", hadamard=h, clip_mask=True)
        case = {"hadamard": h, "rule": "quest", "mask": True}
        found.append(("quantize_forward", case, 2 + PACKED + 0.125, lambda x, p, s, call=quest: call(x)))
        wide = case | {"of": "float32", "cols": COLUMNS // 2}
        found.append(("quantize_forward", wide, 2 + (PACKED + 0.125) / 2, lambda x, p, s, call=quest: call(floats(x))))
    for rule in ("even", "quest", "mse"):
        plain = partial(hadamard_quantize_mxfp4, scale_rule=rule)
        case = {"hadamard": 32, "rule": rule, "mask": False}
        found.append(("quantize_forward", case, 2 + PACKED, lambda x, p, s, call=plain: call(x)))
    found.append(("quantize_forward", {"hadamard": 0, "rule": "even"}, 2 + PACKED, lambda x, p, s: quantize_mxfp4(x)))
    expanded = {"hadamard": 32, "rule": "even", "to": "e4m3"}
    found.append(("quantize_forward", expanded, 3, lambda x, p, s: ready_tokens(x, "mxfp4")))
    found.append(("gate_quantize", expanded | {"cols": COLUMNS // 2}, 2 + 0.5, lambda x, p, s: gated_tokens(x)))
    for random, h in itertools.product((False, True), HADAMARD):
        case = {"rounding": "stochastic" if random else "nearest", "hadamard": h}

        def turned(x: Tensor, p: Tensor, s: Tensor, transpose: bool, h: int = h, random: bool = random) -> Any:
            return hadamard_quantize_mxfp4(x, "absmax34", transpose=transpose, **backward(x, h, random))

        def again(x: Tensor, p: Tensor, s: Tensor, h: int = h, random: bool = random) -> Any:
            return requantize_mxfp4(p, s, **backward(x, h, random))

        found.append(("quantize_backward", case, 2 + PACKED, partial(turned, transpose=False)))
        found.append(("quantize_transpose", case, 2 + PACKED, partial(turned, transpose=True)))
        wide = case | {"of": "float32", "cols": COLUMNS // 2}
        found.append(
            ("quantize_transpose", wide, 2 + PACKED / 2, lambda x, p, s, call=turned: call(floats(x), p, s, True))
        )
        found.append(("requantize_transpose", case, 2 * PACKED, again))
        found.append(("requantize_transpose", case | {"binades": 1}, 2 * PACKED, again))
    for dtype, h in itertools.product((torch.bfloat16, torch.float32), HADAMARD):
        back = partial(masked_hadamard, hadamard=h, dtype=dtype)
        case = {"hadamard": h, "to": str(dtype).removeprefix("torch.")}
        found.append(("masked_hadamard", case, 2.125 + dtype.itemsize, lambda x, p, s, q=back: q(x, mask_of(x, p))))
    found.append(("expand", {}, PACKED + 1, lambda x, p, s: expand_mxfp4(p, s)))
    found.append(("dequantize", {}, PACKED + 2, lambda x, p, s: dequantize_mxfp4(p, s)))
    return found


def gated_tokens(x: Tensor) -> Any:
    """silu(gate) * up of x, gate and up side by side, as e4m3, on a GPU by one kernel."""
    if not x.is_cuda:
        return ready_tokens(gate(x), "mxfp4")
    return hopper_rows.quantize_expanded(x, ScaleRule.even, 32, None, gated=True)


def floats(x: Tensor) -> Tensor:
    """Random float32 numbers, each the bits of two in bfloat16."""
    return x.view(torch.float32)


def mask_of(x: Tensor, packed: Tensor) -> Tensor:
    """Some random bytes as a clip mask of x."""
    return packed.view(-1)[: x.numel() // 8].view(len(x), -1)


def differing(call: Callable, part: tuple) -> float:
    """The share of bytes on which the GPU and the CPU disagree."""
    got, expected = call(*(t.cuda() for t in part)), call(*part)
    got, expected = (t[0] if isinstance(t, tuple) else t for t in (got, expected))
    as_bytes = [t.cpu().view(torch.uint8) for t in (got, expected)]
    return (as_bytes[0] != as_bytes[1]).float().mean().item()


def bench_quantizers() -> Iterator[Row]:
    alike = [(x, *quantize_mxfp4(x)) for x in random_tensors((ROWS, COLUMNS), torch.bfloat16)]
    powers = torch.randn(ROWS, 1, device="cuda").round().to(torch.int8).view(torch.uint8)  # modulo 256
    apart = [(x, packed, scale + powers) for x, packed, scale in alike]
    for op, case, size, call in quantizers():
        ready = apart if "binades" in case else alike
        us = time_us([partial(call, *each) for each in ready])
        error = differing(call, tuple(t[:256].cpu() for t in ready[0]))
        yield measured(op, {"rows": ROWS, "cols": COLUMNS, **case}, us, size * ROWS * COLUMNS, {}, error)


def bench_normed(m: int, k: int) -> Iterator[Row]:
    """Tokens behind RMSNorm, and behind an addition, to e4m3; the peer is a norm's kernel and the quantizer's, `error`
    the share of e4m3 that differs from theirs, by the order of the norm's sum."""
    xs, others = (random_tensors((m, k), torch.bfloat16) for _ in "12")
    norm, arranged = torch.rand(k, device="cuda", dtype=torch.bfloat16), m <= 1024  # as the products of so many take it
    for (activations, rule, hadamard), adds in itertools.product(BEHIND_NORMS, (False, True)):
        turn = hopper.turn_of(activations, rule, hadamard)
        assert turn is not None
        one = hopper_normed.prepare(xs[0], 1e-5, turn, adds, arranged=arranged, settled=True)
        quantize = quantizer(xs[0], activations, rule, hadamard, arranged=arranged)

        def two(x: Tensor, added: Tensor | None, quantize: Callable = quantize) -> Any:
            made = try_norm(x, norm, 1e-5, added)
            assert made is not None
            return *quantize(made[0]), made[1]

        beside = others if adds else [None] * len(xs)
        with torch.no_grad():
            calls: dict[Any, Calls] = {"two": [partial(two, x, a) for x, a in zip(xs, beside, strict=True)]}
            calls["one"] = [partial(one, x, norm, a) for x, a in zip(xs, beside, strict=True)]
            us, codes = race_us(calls), [each[0]()[0].view(torch.uint8) for each in calls.values()]
        case = {"tokens": m, "k": k, "activations": activations, "added": adds}
        error = (codes[0] != codes[1]).float().mean().item()
        yield measured("normed", case, us["one"], (7 if adds else 3) * m * k, {"two": us["two"]}, error)


# --- Products --------------------------------------------------------------------------------------------------------


def relative(y: Tensor, exact: Tensor) -> float:
    return ((y.double() - exact).norm() / exact.norm()).item()


def int4_weight(n: int, k: int) -> tuple[Tensor, Tensor]:
    """A random weight as tinygemm takes it, groups of 128."""
    raw = torch.randint(0, 256, (n, k // 2), device="cuda", dtype=torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack(raw, 8)
    return packed, torch.randn(k // 128, n, 2, device="cuda", dtype=torch.bfloat16)


def peers_of(x: Tensor, weights: list[Tensor]) -> dict[str, Calls]:
    a, one, e4m3 = x.to(torch.float8_e4m3fn), torch.ones((), device="cuda"), torch.float8_e4m3fn
    tensorwise = partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
    calls: dict[str, Calls] = {
        "bf16": [partial(F.linear, x, w) for w in weights],
        "cublas_fp8": [partial(tensorwise, a, w.to(e4m3).t()) for w in weights],
    }
    if len(x) <= 64:
        ready = [int4_weight(*w.shape) for w in weights]
        calls["tinygemm"] = [partial(torch.ops.aten._weight_int4pack_mm, x, w, 128, scale) for w, scale in ready]
    return calls


def ready_tokens(x: Tensor, activations: str) -> tuple[Tensor, Tensor]:
    """Tokens in e4m3 with a scale each, as the product takes them."""
    if activations == "mxfp4":
        return torch.ops.quantrot.mxfp4_quantize_expanded(x, None, "even", 32, "auto")[:2]
    qdata, scale = quantize_fp8_block(x, (1, 0), "bf16")
    return qdata, scale.view(-1)


def ready_product(tokens: tuple[Tensor, Tensor], packed: Tensor, scale: Tensor) -> Tensor:
    """W4A4 or W4A8 of a prompt that is quantized already: the weight's expansion, and the product."""
    weight, weight_scale, _ = expand_mxfp4(packed, scale)
    return scaled_product(tokens[0], tokens[1][:, None], weight, weight_scale[None], torch.bfloat16)


def product(x: Tensor, activations: str) -> Callable[[Tensor, Tensor], Tensor]:
    """As `Mxfp4Linear` runs it."""
    hadamard = 32 if activations == "mxfp4" else 0
    return partial(mxfp4_gemm, x, activations=activations, hadamard=hadamard, settled=True)


def in_two(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """W4A8 by the batch's quantizer and product, which few tokens may take, too."""
    tokens, token_scale = hopper_batch.quantize(x, "bf16")
    return hopper_batch.multiply(tokens, token_scale, packed, scale, x.dtype, settled=True)


def rotated(packed: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Copies of packed weights in turn, as many as it takes to pass L2 (timing.py), and at least eight."""
    size = sum(t.numel() for t in packed[0])
    count = max(8, -(-ROTATE_BYTES // size))
    return [(w.clone(), s.clone()) for w, s in (packed[i % len(packed)] for i in range(count))]


def bench_gemm(m: int, n: int, k: int) -> Iterator[Row]:
    """All of a cell in turn."""
    weights = [w * 0.02 for w in random_tensors((n, k), torch.bfloat16)]
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    packed = rotated([quantize_mxfp4(w, "mse") for w in weights])
    calls: dict[Any, Calls] = dict(peers_of(x, weights))
    for activations in ("mxfp4", "fp8", "none"):
        calls[activations, False] = [partial(product(x, activations), *w) for w in packed]
        if m in PREFILL and activations != "none":
            tokens = ready_tokens(x, activations)
            calls[activations, True] = [partial(ready_product, tokens, *w) for w in packed]
    if m in DECODE:
        calls["w4a8_in_two"] = [partial(in_two, x, *w) for w in packed]
    us = race_us(calls)
    peers = {name: us[name] for name in us if isinstance(name, str)}
    weight = dequantize_mxfp4(*packed[0], torch.float32).double()
    codes, token_scale = ready_tokens(x, "fp8")
    operands = {
        "none": x,
        "fp8": codes.double() * token_scale.unsqueeze(1),
        "mxfp4": dequantize_mxfp4(*hadamard_quantize_mxfp4(x)[:2], torch.float32),
    }
    for activations, ready in (name for name in us if isinstance(name, tuple)):
        error = relative(calls[activations, ready][0](), operands[activations].double() @ weight.T)
        case = {"m": m, "n": n, "k": k, "activations": activations, "activations_ready": ready}
        yield measured("gemm", case, us[activations, ready], PACKED * n * k, peers, error)


# --- Training --------------------------------------------------------------------------------------------------------


def bench_training(m: int, n: int, k: int) -> Iterator[Row]:
    """The products of one layer: forward, and forward with backward, on tensors that change from call to call."""
    xs = [x.view(64, m // 64, k).requires_grad_() for x in random_tensors((m, k), torch.bfloat16)]
    w = (torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02).requires_grad_()
    g = torch.randn(64, m // 64, n, device="cuda", dtype=torch.bfloat16)
    packed, scale, _ = hadamard_quantize_mxfp4(w.detach(), "quest")
    settled = partial(mxfp4_gemm, activations="mxfp4", scale_rule="quest", hadamard=32)

    with torch.no_grad():
        us = race_us(
            {"us": [partial(settled, x, packed, scale) for x in xs], "bf16": [partial(F.linear, x, w) for x in xs]}
        )
    case = {"m": m, "n": n, "k": k}
    yield measured("training_forward", {**case, "weights": "ready"}, us["us"], 0, {"bf16": us["bf16"]}, None)

    def step(forward: Callable[[Tensor], Tensor]) -> Calls:
        return [lambda x=x: torch.autograd.grad(forward(x), (x, w), g) for x in xs]

    calls: dict[Any, Calls] = {"bf16": step(lambda x: F.linear(x, w))}
    calls["hadamard"] = step(lambda x: HadamardGemm.apply(x, w, 32))
    calls |= {h: step(lambda x, h=h: Mxfp4Gemm.apply(x, w, h, (1, 2))) for h in (32, 128)}
    us = race_us(calls)
    for h in (32, 128):
        peers = {name: us[name] for name in ("bf16", "hadamard")}
        yield measured("training_step", {**case, "hadamard": h}, us[h], 0, peers, None)


# --- Tuning ----------------------------------------------------------------------------------------------------------


def tune() -> None:
    """Time the candidates of every table of the CUDA kernels in tuned.py, keep the fastest, and write the file."""
    from quantrot.kernels.mxfp4 import hopper_columns, tuned

    ready = [(x, *quantize_mxfp4(x)) for x in random_tensors((ROWS // 4, COLUMNS), torch.bfloat16)]
    signed: Any = {"signs": torch.ones(32, device="cuda")}
    rows = [(128, 4, 4), (128, 5, 3), (256, 2, 3), (256, 2, 4), (256, 2, 5), (256, 3, 2), (512, 1, 4)]
    rows += [(t, 1, s) for t in (192, 256, 320, 352, 384, 512, 768) for s in (2, 3)]
    resident = (2, 3), (3, 2), (3, 4), (4, 2), (4, 3), (5, 2), (6, 2)  # and stages
    columns = [(*each, down) for each in resident for down in (False, True)]
    # table, block (None: one entry for all), candidates, call
    trials: list[tuple[str, int | None, list[tuple], Callable]] = []
    for h in (32, 64, 128):
        quest = partial(hadamard_quantize_mxfp4, scale_rule="quest", hadamard=h)
        random = partial(hadamard_quantize_mxfp4, scale_rule="absmax34", hadamard=h, random=(1, 2))
        here = [c for c in rows if c[1] * hopper_rows.shared_bytes(c[0], c[2], h) <= 226 << 10]
        trials.append(("HOPPER_ROWS", h, here, lambda x, p, s, q=quest: q(x)))
        trials.append(("HOPPER_MASK_ROWS", h, here, lambda x, p, s, q=quest: q(x, clip_mask=True)))
        trials.append(("HOPPER_RANDOM_ROWS", h, here, lambda x, p, s, q=random: q(x)))
        wide = [c for c in rows if c[1] * hopper_rows.shared_bytes(c[0], c[2], h, wide=True) <= 226 << 10]
        trials.append(("HOPPER_WIDE_ROWS", h, wide, lambda x, p, s, q=quest: q(floats(x), clip_mask=True)))
        back = partial(masked_hadamard, hadamard=h, dtype=torch.float32)
        trials.append(("HOPPER_MASKED", h, here, lambda x, p, s, q=back: q(x, mask_of(x, p))))
    trials += [
        (
            "HOPPER_EXPANDED",
            None,
            [(640, 3), (768, 3), (896, 2), (896, 3), (1024, 2)],
            lambda x, p, s: torch.ops.quantrot.mxfp4_quantize_expanded(x, None, "even", 32, "auto"),
        ),
        (
            "HOPPER_COLUMNS",
            None,
            columns,
            lambda x, p, s: hadamard_quantize_mxfp4(x, "absmax34", transpose=True, **signed),
        ),
        (
            "HOPPER_WIDE_COLUMNS",
            None,
            [c for c in columns if c[0] * hopper_columns.shared_bytes(torch.float32, c[1]) <= 226 << 10],
            lambda x, p, s: hadamard_quantize_mxfp4(floats(x), "absmax34", transpose=True, **signed),
        ),
    ]
    codes = list(itertools.product((256, 384, 512), (2, 3)))
    for name, numbers in (("HOPPER_PACKED_COLUMNS", None), ("HOPPER_RANDOM_PACKED_COLUMNS", (1, 2))):
        room = partial(hopper_columns.shared_bytes, torch.uint8, dither=numbers is not None)
        fit = [(t, s) for t, s in codes if room(stages=s, threads=t) <= nvrtc.MAX_SHARED]
        for h in (32, 64, 128):
            again = partial(requantize_mxfp4, hadamard=h, random=numbers)
            trials.append((name, h, fit, lambda x, p, s, q=again: q(p, s)))
    for name, block, candidates, call in trials:
        found: dict[tuple, float] = {}
        before = getattr(tuned, name)
        for candidate in candidates:
            setattr(tuned, name, candidate if block is None else before | {block: candidate})
            found[candidate] = time_us([partial(call, *r) for r in ready], 3)
        best = min(found, key=found.__getitem__)
        setattr(tuned, name, best if block is None else before | {block: best})
        print(name, block or "", {k: round(v, 1) for k, v in found.items()}, flush=True)
        write_tuned()
    for n, k in SHAPES:
        packed = rotated([quantize_mxfp4(w) for w in random_tensors((n, k), torch.bfloat16)])
        for m in DECODE:
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            tuned.HOPPER_DECODE[m, n, k] = fastest(decode_plans(m, n, k), hopper, x, packed)
            print(m, n, k, tuned.HOPPER_DECODE[m, n, k], flush=True)
            write_tuned()


def decode_plans(m: int, n: int, k: int) -> list[tuple]:
    """Fields of hopper.Plan after its first that are worth a try: blocks that fill the device, rings that fit."""
    found = []
    for fields in itertools.product(
        (1, 2, 3, 4), (1, 2, 4, 7, 8), (1, 2, 4, 7, 8), (1, 2, 3, 4, 5), (1, 2), (False, True), (1, 2), (False, True)
    ):
        tall, row_warps, teams, deep, split, once, resident, grouped = fields
        stages, slots = teams * deep, hopper.PROCESSORS * resident
        rest = tall, row_warps, teams, stages, split, once, resident, grouped
        plan = hopper.Plan(hopper.tiles_of(m), *rest)
        blocks = -(-n // plan.rows) * split
        sums = teams * plan.tokens * (plan.rows + 4) * 4
        if (
            8 <= row_warps * teams <= 16
            and plan.rows <= 256
            and blocks >= 0.82 * (-(-blocks // slots) * slots)
            and once == (blocks <= slots)
            and (split == 1 or (once and m > 1))
            and (not grouped or (m >= 16 and row_warps % 4 == 0))
            and plan.shared_bytes(k) <= (226 if resident == 1 else 112) << 10
            and (not once or sums <= plan.shared_bytes(k) - 16 * stages)
            and (not once or stages < -(-k // 256 // split) + teams)
        ):
            found.append(rest)
    return found


def fastest(candidates: list[tuple], module: Any, x: torch.Tensor, packed: list) -> tuple:
    """The fields, after the first, of the plan that decodes fastest."""
    tiles = module.tiles_of(len(x))
    found: dict[tuple, float] = {}
    for plan in candidates:
        made = module.Plan(tiles, *plan)
        calls = [partial(module.decode, x, None, *w, torch.bfloat16, made, settled=True) for w in packed]
        try:
            found[plan] = time_us(calls, 3)
        except Exception as error:
            print("refused:", plan, str(error).splitlines()[:1])
    best = min(found, key=found.__getitem__)
    print(module.__name__.rpartition(".")[2], x.shape[0], best, f"{found[best]:.1f} us of {len(found)} plans")
    return best


def write_tuned() -> None:
    from quantrot.kernels.mxfp4 import tuned

    text = TUNED.read_text().split("HOPPER_ROWS = ")[0]
    tables = "ROWS MASK_ROWS RANDOM_ROWS WIDE_ROWS MASKED EXPANDED COLUMNS PACKED_COLUMNS RANDOM_PACKED_COLUMNS"
    for name in (f"HOPPER_{table}" for table in tables.split()):
        text += f"{name} = {getattr(tuned, name)}\n"
    lines = "".join(f"\n    {key}: {plan}," for key, plan in sorted(tuned.HOPPER_DECODE.items()))
    fields = "int, int, int, int, int, bool, int, bool"
    text += f"HOPPER_DECODE: dict[tuple[int, int, int], tuple[{fields}]] = {{{lines}\n}}\n"
    TUNED.write_text(text)


# --- The table -------------------------------------------------------------------------------------------------------

HEADER = f"{'op':22s} {'case':62s} {'us':>9s} {'of floor':>8s}  peers over ours; error\n" + "-" * 140


def line(row: Row) -> str:
    case = " ".join(f"{k}={v}" for k, v in row["case"].items())
    peers = ", ".join(f"{name} {us / row['us']:.2f}" for name, us in row["peers_us"].items())
    error = "" if row["error"] is None else f"; {row['error']:.2e}"
    return f"{row['op']:22s} {case:62s} {row['us']:9.1f} {row['floor_us'] / row['us']:8.2f}  {peers}{error}"


def warm(job: tuple) -> None:
    """Compiles what one row runs."""
    if len(job) == 1:
        x = torch.randn(ROWS, COLUMNS, device="cuda", dtype=torch.bfloat16)
        quantizers()[job[0]][3](x, *quantize_mxfp4(x))
    else:
        m, n, k = job
        x, w = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
        for activations in ("mxfp4", "fp8", "none"):
            product(x, activations)(*quantize_mxfp4(w, "mse"))


def main(out: Path | None) -> None:
    shapes = [(m, n, k) for n, k in SHAPES for m in TOKENS]
    in_processes(warm, [(i,) for i in range(len(quantizers()))] + shapes)
    gbps = copy_gbps()
    print(HEADER)
    rows = []
    parts = [
        bench_quantizers,
        *(partial(bench_normed, *shape) for shape in NORMED),
        *(partial(bench_gemm, *shape) for shape in shapes),
        partial(bench_training, ROWS, 4096, 4096),
    ]
    for part in parts:
        for row in part():
            row["floor_us"] = row.pop("floor_bytes") / gbps / 1e3
            print(line(row), flush=True)
            rows.append(row)
        give_back()
    write_results("bench_mxfp4", gbps, rows, out)
    print("\n".join(mxfp4_means(rows)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.tune:
        tune()
    main(asked.out)
