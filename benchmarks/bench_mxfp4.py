"""MXFP4: quantizers against their byte floors, products against bfloat16, cuBLAS FP8 and PyTorch's int4, training.

    python benchmarks/bench_mxfp4.py            # the table, and results/bench_mxfp4-<gpu>.json
    python benchmarks/bench_mxfp4.py --tune     # first times every candidate tile and plan and writes tuned.py
    python benchmarks/bench_mxfp4.py --model    # also a whole Llama-3.1-8B shape: decode and prefill
    python benchmarks/bench_mxfp4.py --render   # no GPU: docs/measured/mxfp4.md from the json

Times are those of timing.py. `floor` is bytes read and written, over the speed of a copy in the same run; of a product,
the time to read the packed weight. cublas_fp8 multiplies ready e4m3 operands, tensorwise; tinygemm is
torch.ops.aten._weight_int4pack_mm with groups of 128. `error` is relative, to float64 of the dequantized operands, or
the share of codes that differ from the reference's on a part of the tensor (0).
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from timing import ROTATE_BYTES, copy_gbps, random_tensors, time_us, write_results  # noqa: E402

from quantrot.kernels.fp8 import quantize_fp8_block  # noqa: E402
from quantrot.kernels.mxfp4 import (  # noqa: E402
    HadamardGemm,
    Mxfp4Gemm,
    dequantize_mxfp4,
    expand_mxfp4,
    hadamard_quantize_mxfp4,
    mxfp4_gemm,
    quantize_mxfp4,
    requantize_mxfp4,
)

DOC = ROOT / "docs" / "measured" / "mxfp4.md"
TUNED = ROOT / "quantrot" / "kernels" / "mxfp4" / "tuned.py"
ROWS, COLUMNS = 32768, 4096
SHAPES = [(4096, 4096), (8192, 8192), (28672, 4096), (4096, 14336)]  # (N, K)
PREFILL, BATCH, DECODE = [1024, 4096, 8192], [64, 96, 128, 256, 512], [1, 8, 16, 32]
PACKED = 0.5 + 1 / 32  # bytes an element


def row(op: str, case: dict[str, Any], us: float, floor_bytes: float, peers: dict, error: float | None) -> dict:
    return {"op": op, "case": case, "us": us, "floor_us": floor_bytes, "peers_us": peers, "error": error}


# --- Quantizers ------------------------------------------------------------------------------------------------------


def quantizers() -> list[tuple[str, dict[str, Any], float, Callable]]:
    """(op, case beside rows and columns, bytes an element, function of (x, packed, scale))."""
    signs = torch.randint(0, 2, (128,)) * 2 - 1
    found: list[tuple[str, dict[str, Any], float, Callable]] = []

    def add(op: str, case: dict, read: float, write: float, call: Callable) -> None:
        found.append((op, case, read + write, call))

    def random(hadamard: int, on: bool = True) -> dict:
        return {"hadamard": hadamard, "signs": signs[:hadamard].float().cuda(), "random": (1, 2) if on else None}

    for h in (32, 64, 128):
        add(
            "quantize_forward",
            {"hadamard": h, "rule": "quest", "mask": True},
            2,
            PACKED + 0.125,
            lambda x, p, s, h=h: hadamard_quantize_mxfp4(x, "quest", hadamard=h, clip_mask=True),
        )
    for rule in ("even", "quest", "mse"):
        add(
            "quantize_forward",
            {"hadamard": 32, "rule": rule, "mask": False},
            2,
            PACKED,
            lambda x, p, s, rule=rule: hadamard_quantize_mxfp4(x, rule),
        )
    add("quantize_forward", {"hadamard": 0, "rule": "even"}, 2, PACKED, lambda x, p, s: quantize_mxfp4(x))
    add(
        "quantize_forward",
        {"hadamard": 32, "rule": "even", "to": "e4m3"},
        2,
        1,
        lambda x, p, s: torch.ops.quantrot.mxfp4_quantize_expanded(x, None, "even", 32, "auto"),
    )
    for on in (True, False):
        case = {"rounding": "stochastic" if on else "nearest"}
        for h in (32, 128):
            more = {"hadamard": h, **case}
            add(
                "quantize_backward",
                more,
                2,
                PACKED,
                lambda x, p, s, o=random(h, on): hadamard_quantize_mxfp4(x, "absmax34", **o),
            )
            add(
                "quantize_transpose",
                more,
                2,
                PACKED,
                lambda x, p, s, o=random(h, on): hadamard_quantize_mxfp4(x, "absmax34", transpose=True, **o),
            )
            add(
                "requantize_transpose",
                more,
                PACKED,
                PACKED,
                lambda x, p, s, o=random(h, on): requantize_mxfp4(p, s, **o),
            )
    add("expand", {}, PACKED, 1, lambda x, p, s: expand_mxfp4(p, s))
    add("dequantize", {}, PACKED, 2, lambda x, p, s: dequantize_mxfp4(p, s))
    return found


def differing(call: Callable, part: tuple) -> float:
    """The share of codes on which the GPU and the CPU disagree."""
    got, expected = call(*(t.cuda() for t in part)), call(*part)
    got, expected = (t[0] if isinstance(t, tuple) else t for t in (got, expected))
    as_bytes = [t.cpu().view(torch.uint8) for t in (got, expected)]
    return (as_bytes[0] != as_bytes[1]).float().mean().item()


def bench_quantizers() -> list[dict]:
    xs = random_tensors((ROWS, COLUMNS), torch.bfloat16)
    ready = [(x, *quantize_mxfp4(x)) for x in xs]
    part = tuple(t[:256].cpu() for t in ready[0])
    rows = []
    for op, case, size, call in quantizers():
        us = time_us([lambda r=r, call=call: call(*r) for r in ready])
        case = {"rows": ROWS, "cols": COLUMNS, **case}
        on_cpu = "signs" not in (
            call.__defaults__[0] if call.__defaults__ and isinstance(call.__defaults__[0], dict) else ()
        )
        rows.append(row(op, case, us, size * ROWS * COLUMNS, {}, differing(call, part) if on_cpu else None))
        print(line(rows[-1]), flush=True)
    return rows


# --- Products --------------------------------------------------------------------------------------------------------


def relative(y: torch.Tensor, exact: torch.Tensor) -> float:
    return ((y.double() - exact).norm() / exact.norm()).item()


def int4_weight(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A random weight as tinygemm takes it, groups of 128."""
    raw = torch.randint(0, 256, (n, k // 2), device="cuda", dtype=torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack(raw, 8)
    return packed, torch.randn(k // 128, n, 2, device="cuda", dtype=torch.bfloat16)


def fp8_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    one = torch.ones((), device="cuda")
    return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def peers_of(m: int, n: int, k: int, weights: list[torch.Tensor], x: torch.Tensor) -> dict[str, float]:
    peers = {"bf16": time_us([lambda w=w: F.linear(x, w) for w in weights])}
    e4m3 = [w.to(torch.float8_e4m3fn) for w in weights]
    a = x.to(torch.float8_e4m3fn)
    peers["cublas_fp8"] = time_us([lambda w=w: fp8_product(a, w) for w in e4m3])
    if m <= 64:
        ready = [int4_weight(n, k) for _ in weights]
        peers["tinygemm"] = time_us([lambda w=w: torch.ops.aten._weight_int4pack_mm(x, w[0], 128, w[1]) for w in ready])
    return peers


def ready_tokens(x: torch.Tensor, activations: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens in e4m3 with a scale each, as the product takes them."""
    if activations == "mxfp4":
        return torch.ops.quantrot.mxfp4_quantize_expanded(x, None, "even", 32, "auto")[:2]
    qdata, scale = quantize_fp8_block(x, (1, 0), "bf16")
    return qdata, scale.view(-1)


def ready_product(tokens: tuple, packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """W4A4 or W4A8 at prefill with the activations quantized before: the weight's expansion, and the product."""
    from quantrot.kernels.mxfp4.gemm import scaled_product

    weight, weight_scale, _ = expand_mxfp4(packed, scale)
    return scaled_product(tokens[0], tokens[1], weight, weight_scale, torch.bfloat16)


def rotated(packed: list[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Copies of packed weights in turn, as many as it takes to pass L2 (timing.py), and at least eight."""
    size = sum(t.numel() for t in packed[0])
    count = max(8, -(-ROTATE_BYTES // size))
    return [(w.clone(), s.clone()) for w, s in (packed[i % len(packed)] for i in range(count))]


def bench_gemm(m: int, n: int, k: int) -> list[dict]:
    weights = [w * 0.02 for w in random_tensors((n, k), torch.bfloat16)]
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    peers = peers_of(m, n, k, weights, x)
    packed = rotated([quantize_mxfp4(w, "mse") for w in weights])
    dequantized = dequantize_mxfp4(*packed[0], torch.float32).double()
    rows = []
    for activations in ("mxfp4", "fp8", "none"):
        for ready in (True, False):
            if ready and (activations == "none" or m not in PREFILL):
                continue
            if ready:
                tokens = ready_tokens(x, activations)
                calls = [lambda w=w, t=tokens: ready_product(t, *w) for w in packed]
            else:
                h = 32 if activations == "mxfp4" else 0
                gemm = partial(mxfp4_gemm, x, activations=activations, hadamard=h, settled=True)
                calls = [lambda w=w, gemm=gemm: gemm(*w) for w in packed]
            us = time_us(calls)
            error = None
            if activations != "fp8":
                operand = x.double()
                if activations == "mxfp4":
                    operand = dequantize_mxfp4(*hadamard_quantize_mxfp4(x)[:2], torch.float32).double()
                error = relative(calls[0](), operand @ dequantized.T)
            case = {"m": m, "n": n, "k": k, "activations": activations, "activations_ready": ready}
            rows.append(row("gemm", case, us, PACKED * n * k, peers, error))
            print(line(rows[-1]), flush=True)
    return rows


# --- Training --------------------------------------------------------------------------------------------------------


def bench_training(m: int, n: int, k: int) -> list[dict]:
    """The products of one layer: forward, and forward with backward, on tensors that change from call to call."""
    xs = [x.view(64, m // 64, k).requires_grad_() for x in random_tensors((m, k), torch.bfloat16)]
    w = (torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02).requires_grad_()
    g = torch.randn(64, m // 64, n, device="cuda", dtype=torch.bfloat16)

    def step(product: Callable) -> float:
        def one(x: torch.Tensor) -> tuple:
            return torch.autograd.grad(product(x), (x, w), g)

        return time_us([lambda x=x: one(x) for x in xs], replays=3)

    def forward(product: Callable) -> float:
        with torch.no_grad():
            return time_us([lambda x=x: product(x) for x in xs], replays=3)

    packed, scale, _ = hadamard_quantize_mxfp4(w.detach(), "quest")
    ready = forward(lambda x: mxfp4_gemm(x, packed, scale, activations="mxfp4", scale_rule="quest", hadamard=32))
    plain = forward(lambda x: F.linear(x, w))
    case = {"m": m, "n": n, "k": k}
    rows = [row("training_forward", {**case, "weights": "ready"}, ready, 0, {"bf16": plain}, None)]
    peers = {"bf16": step(lambda x: F.linear(x, w)), "hadamard": step(lambda x: HadamardGemm.apply(x, w, 32))}
    for hadamard in (32, 128):
        ours = step(lambda x, h=hadamard: Mxfp4Gemm.apply(x, w, h, (1, 2)))
        rows.append(row("training_step", {**case, "hadamard": hadamard}, ours, 0, peers, None))
    for entry in rows:
        print(line(entry), flush=True)
    return rows


# --- A whole model ---------------------------------------------------------------------------------------------------


def bench_model(tokens: int = 2048) -> list[dict]:
    """Llama-3.1-8B's shape with random weights: decode at batch 1 and prefill, torch.compile reduce-overhead."""
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    from quantrot.formats import ActivationFormat, LinearFormat, WeightFormat
    from quantrot.modules import Mxfp4Linear, OnlineHadamard
    from quantrot.rotation import Rotation

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
    )
    with torch.device("cuda"):
        model: Any = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    fmt = LinearFormat(WeightFormat("mxfp4", (1, 32), "mse"), ActivationFormat("mxfp4", (1, 32), "even"), 32)

    def swap() -> None:
        for name, old in list(model.named_modules()):
            if type(old) is torch.nn.Linear and name != "lm_head":
                online = OnlineHadamard(Rotation("hadamard", "hadamard", old.in_features, 32))
                new = Mxfp4Linear(old.in_features, old.out_features, False, torch.bfloat16, fmt, online=online)
                packed, scale, _ = hadamard_quantize_mxfp4(old.weight.detach(), "mse")
                new.weight_packed.data, new.weight_scale.data = packed, scale
                model.set_submodule(name, new.cuda())

    def times() -> tuple[float, float]:
        torch._dynamo.reset()
        run = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
        cache = StaticCache(config=config, max_cache_len=tokens + 64)
        ids = torch.randint(0, config.vocab_size, (1, tokens), device="cuda")

        def call(piece: torch.Tensor, start: int) -> float:
            at = torch.arange(start, start + piece.shape[1], device="cuda")
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.compiler.cudagraph_mark_step_begin()
            begin.record()
            run(input_ids=piece, past_key_values=cache, cache_position=at, use_cache=True, logits_to_keep=1)
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) * 1e3

        with torch.no_grad():
            prefill = sorted(call(ids, 0) for _ in range(8))[3]
            decode = sorted(call(ids[:, :1], tokens + i) for i in range(32))[15]
        return decode, prefill

    plain = times()
    swap()
    ours = times()
    rows = []
    for what, us, theirs in (("decode", ours[0], plain[0]), ("prefill", ours[1], plain[1])):
        rows.append(
            row("model", {"shape": "llama-3.1-8b", "phase": what, "tokens": tokens}, us, 0, {"bf16": theirs}, None)
        )
        print(line(rows[-1]), flush=True)
    return rows


# --- Tuning ----------------------------------------------------------------------------------------------------------


def tune() -> None:
    """Time the candidates of every table of the CUDA kernels in tuned.py, keep the fastest, and write the file."""
    from quantrot.kernels.mxfp4 import hopper, hopper_columns, hopper_rows, tuned

    ready = [(x, *quantize_mxfp4(x)) for x in random_tensors((ROWS // 4, COLUMNS), torch.bfloat16)]
    signed: Any = {"signs": torch.ones(32, device="cuda")}
    rows = [(128, 4, 4), (128, 5, 3), (256, 2, 3), (256, 2, 4), (256, 2, 5), (256, 3, 2), (512, 1, 4)]
    columns = [(b, s, down) for b, s in ((3, 4), (4, 2), (4, 3), (5, 2), (6, 2)) for down in (False, True)]
    # table, block (None: one entry for all), candidates, call
    trials: list[tuple[str, int | None, list[tuple], Callable]] = []
    for h in (32, 64, 128):
        quest = partial(hadamard_quantize_mxfp4, scale_rule="quest", hadamard=h)
        random = partial(hadamard_quantize_mxfp4, scale_rule="absmax34", hadamard=h, random=(1, 2))
        here = [c for c in rows if c[1] * hopper_rows.shared_bytes(c[0], c[2], h) <= 226 << 10]
        trials.append(("HOPPER_ROWS", h, here, lambda x, p, s, q=quest: q(x)))
        trials.append(("HOPPER_MASK_ROWS", h, here, lambda x, p, s, q=quest: q(x, clip_mask=True)))
        trials.append(("HOPPER_RANDOM_ROWS", h, here, lambda x, p, s, q=random: q(x)))
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
    ]
    codes = [(t, s, down) for t in (256, 320, 384, 448, 512) for s in (2, 3) for down in (False, True)]
    codes = [c for c in codes if hopper_columns.shared_bytes(torch.uint8, c[1], c[0]) <= 226 << 10]
    for h in (32, 64, 128):
        for name, numbers in (("HOPPER_PACKED_COLUMNS", None), ("HOPPER_RANDOM_PACKED_COLUMNS", (1, 2))):
            again = partial(requantize_mxfp4, hadamard=h, random=numbers)
            trials.append((name, h, codes, lambda x, p, s, q=again: q(p, s)))
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
    from quantrot.kernels.mxfp4 import hopper

    found = []
    for fields in itertools.product(
        (1, 2, 4), (1, 2, 4, 7, 8), (1, 2, 4, 7, 8), (1, 2, 3, 4), (1, 2), (False, True), (1, 2), (False, True)
    ):
        tall, row_warps, teams, deep, split, once, resident, grouped = fields
        stages, slots = teams * deep, hopper.PROCESSORS * resident
        rest = tall, row_warps, teams, stages, split, once, resident, grouped
        plan = hopper.Plan(hopper.tiles_of(m), *rest, held=m == 1)
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
            and stages < -(-k // 256 // split) + teams
        ):
            found.append(rest)
    return found


def fastest(candidates: list[tuple], module: Any, x: torch.Tensor, packed: list) -> tuple:
    """The fields, after the first, of the plan that decodes fastest."""
    tiles, held = module.tiles_of(len(x)), len(x) == 1
    found: dict[tuple, float] = {}
    for plan in candidates:
        plan_of = partial(module.Plan, tiles, *plan, held=held)
        calls = [lambda w=w, p=plan_of(): module.decode(x, None, *w, torch.bfloat16, p, settled=True) for w in packed]
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
    tables = ("ROWS", "MASK_ROWS", "RANDOM_ROWS", "EXPANDED", "COLUMNS", "PACKED_COLUMNS", "RANDOM_PACKED_COLUMNS")
    for name in (f"HOPPER_{table}" for table in tables):
        text += f"{name} = {getattr(tuned, name)}\n"
    lines = "".join(f"\n    {key}: {plan}," for key, plan in sorted(tuned.HOPPER_DECODE.items()))
    fields = "int, int, int, int, int, bool, int, bool"
    text += f"HOPPER_DECODE: dict[tuple[int, int, int], tuple[{fields}]] = {{{lines}\n}}\n"
    TUNED.write_text(text)


# --- The table -------------------------------------------------------------------------------------------------------

HEADER = f"{'op':22s} {'case':62s} {'us':>9s} {'floor':>8s} {'of floor':>8s}  peers over ours; error\n" + "-" * 140


def line(entry: dict) -> str:
    case = " ".join(f"{k}={v}" for k, v in entry["case"].items())
    peers = ", ".join(f"{name} {us / entry['us']:.2f}" for name, us in entry["peers_us"].items())
    error = "" if entry["error"] is None else f"; {entry['error']:.2e}"
    return f"{entry['op']:22s} {case:62s} {entry['us']:9.1f} {'':17s} {peers}{error}"


def main(asked: argparse.Namespace) -> None:
    gbps = copy_gbps()
    print(HEADER)
    rows = bench_quantizers()
    for n, k in SHAPES:
        for m in DECODE + BATCH + PREFILL:
            rows += bench_gemm(m, n, k)
    rows += bench_training(ROWS, 4096, 4096)
    if asked.model:
        rows += bench_model()
    for entry in rows:
        entry["floor_us"] /= gbps * 1e3
    write_results("bench_mxfp4", gbps, rows, asked.out)
    print(summary(rows))


def summary(rows: list[dict]) -> str:
    """The bars: geometric mean and worst of each kind."""
    text = ""
    for name, chosen in groups(rows).items():
        ratios = [r["peers_us"]["bf16"] / r["us"] for r in chosen]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            text += f"{name}: {mean:.2f} x bf16 (geometric mean), {min(ratios):.2f} at worst\n"
    return text


def groups(rows: list[dict]) -> dict[str, list[dict]]:
    """The products by what they multiply."""
    gemm = [r for r in rows if r["op"] == "gemm"]
    found = {}
    for activations, label in (("mxfp4", "W4A4"), ("fp8", "W4A8"), ("none", "W4A16")):
        mine = [r for r in gemm if r["case"]["activations"] == activations]
        found[f"{label}, prefill, activations ready"] = [r for r in mine if r["case"]["activations_ready"]]
        late = [r for r in mine if not r["case"]["activations_ready"]]
        found[f"{label}, prefill"] = [r for r in late if r["case"]["m"] in PREFILL]
        for m in DECODE + BATCH:
            found[f"{label}, {m} token{'s' if m > 1 else ''}"] = [r for r in late if r["case"]["m"] == m]
    return found


# --- The tables of docs/measured/mxfp4.md -----------------------------------------------------------------------------


def render(path: Path) -> None:
    result = json.loads(path.read_text())
    rows = result["rows"]
    text = f"{result['gpu']}, driver {result['driver']}, torch {result['torch']}, triton {result['triton']}: copy "
    text += f"{result['copy_gbps']:.0f} GB/s. `{result['command']}`, commit {result['commit']}.\n\n"
    text += f"Quantizers, {ROWS} x {COLUMNS} bfloat16:\n\n| op | | us | of the byte floor |\n|---|---|---|---|\n"
    for r in rows:
        if r["case"].get("rows"):
            case = ", ".join(f"{k} {v}" for k, v in r["case"].items() if k not in ("rows", "cols"))
            text += f"| {r['op']} | {case} | {r['us']:.1f} | {r['floor_us'] / r['us']:.2f} |\n"
    text += "\nProducts, bfloat16's time over ours:\n\n| M, N, K | " + " | ".join(GEMM_COLUMNS) + " |\n"
    text += "|---" * (len(GEMM_COLUMNS) + 1) + "|\n"
    for n, k in SHAPES:
        for m in DECODE + BATCH + PREFILL:
            here = [
                r for r in rows if r["op"] == "gemm" and (r["case"]["m"], r["case"]["n"], r["case"]["k"]) == (m, n, k)
            ]
            text += f"| {m}, {n}, {k} | " + " | ".join(cell(here, column) for column in GEMM_COLUMNS) + " |\n"
    text += "\n" + summary(rows).replace("\n", "\n\n")
    for r in rows:
        if r["op"] in ("training_forward", "training_step", "model"):
            case = ", ".join(f"{k} {v}" for k, v in r["case"].items())
            text += (
                f"{r['op']} ({case}): {r['us'] / 1e3:.2f} ms, {r['us'] / r['peers_us']['bf16']:.2f} of bfloat16's.\n\n"
            )
    doc = DOC.read_text()
    mark = "<!-- table: bench_mxfp4.py --render -->"
    head, _, tail = doc.partition(mark + "\n")
    _, _, tail = tail.partition("<!-- end -->\n")
    DOC.write_text(f"{head}{mark}\n{text.rstrip()}\n<!-- end -->\n{tail}")


GEMM_COLUMNS = ["W4A4 ready", "W4A4", "W4A8 ready", "W4A8", "W4A16", "tinygemm", "cublas_fp8", "of weight floor"]


def cell(rows: list[dict], column: str) -> str:
    """bfloat16's time over that of one column; `ready`: the activations are quantized before."""
    if not rows:
        return ""
    peers = rows[0]["peers_us"]
    if column in peers:
        return f"{peers['bf16'] / peers[column]:.2f}"
    if column == "of weight floor":
        late = [r for r in rows if not r["case"]["activations_ready"] and r["case"]["activations"] == "none"]
        return f"{late[0]['floor_us'] / late[0]['us']:.2f}" if late and late[0]["case"]["m"] <= 32 else ""
    kind = {"W4A4": "mxfp4", "W4A8": "fp8", "W4A16": "none"}.get(column.split()[0])
    chosen = [
        r
        for r in rows
        if r["case"]["activations"] == kind and r["case"]["activations_ready"] == column.endswith("ready")
    ]
    return f"{peers['bf16'] / chosen[0]['us']:.2f}" if chosen else ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--model", action="store_true")
    parser.add_argument("--render", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.render:
        render(asked.out or ROOT / "benchmarks" / "results" / "bench_mxfp4-h200.json")
    else:
        if asked.tune:
            tune()
        main(asked)
