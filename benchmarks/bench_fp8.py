"""FP8 quantization and products against what else runs on the same GPU, in the same run.

    python benchmarks/bench_fp8.py [--only quantize both_ways gemm ...]   # results/bench_fp8-<gpu>.json
    python benchmarks/bench_fp8.py --tune [--only ...]   # times every candidate plan, prints lines for tuned.py
    python benchmarks/bench_fp8.py --bars FILE           # no GPU: what a results file says about each aim

op "quantize" reads n x n bfloat16 and writes e4m3 and scales; its floor is 3 bytes an element at the copy's speed.
Peers: two_pass, GridQuant's scheme (a 256 x 256 block in 32 x 32 pieces, read for the maximum and again for the codes),
and read_twice, our other plan of that block. op "both_ways" writes the transpose's codes, too: 4 bytes an element.
Peers: Triton's kernel, and two of "quantize", the second of a transpose that lies ready. op "hadamard_quantize" has the
floor of "quantize"; two_ops is the transform and then the quantization. op "gemm" multiplies quantized operands; its
floor is reading the weight. Peers: bf16 (F.linear), cuBLAS with one scale a tensor and fast accumulation, cuBLAS with 1
x 128 by 128 x 128 scales, every backend of ours, of which triton_splitk is the decode scheme of GridQuant's authors. op
"layer" quantizes the activations and multiplies, as Fp8Linear does. Peers: bf16, two kernels, cuBLAS behind the same
quantizer, and the parts alone, all replayed in turn. `error` is relative, to float64 of the dequantized operands
(quantize: 0 if the bits are the reference's, else 1).
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from timing import copy_gbps, give_back, in_processes, race_us, random_tensors, time_us, write_results  # noqa: E402

from quantrot.kernels.fp8 import (  # noqa: E402
    E4M3,
    dequantize_fp8_block,
    fp8_block_gemm,
    fp8_linear,
    hadamard_quantize_fp8,
    quantize_fp8_block,
    quantize_fp8_both_ways,
)
from quantrot.kernels.fp8.gemm import GEMMS  # noqa: E402
from quantrot.kernels.fp8.reference import scale_shape  # noqa: E402
from quantrot.kernels.fp8.tuned import BlockPlan, GemmPlan, RowPlan, TurnPlan, gemm_plan, turn_plan, up  # noqa: E402
from quantrot.kernels.hadamard import hadamard_transform  # noqa: E402

OPS = ("quantize", "both_ways", "hadamard_quantize", "gemm", "layer")
SIZES = (4096, 8192, 16384)
BLOCKS = ((256, 256), (128, 128), (1, 128), (1, 0))
BOTH_WAYS = {  # tokens' and gradients' matrices, and weights'
    (1, 128): ((2048, 2048), (2048, 8192), (8192, 1024), (8192, 4096), (8192, 14336)),
    (128, 128): ((4096, 4096), (14336, 4096)),
}
ORDERS = (128, 256, 512, 1024, 2048, 4096, 8192, 14336, 28672)
# Of models, without an aim.
OTHER_ORDERS = (3072, 4864, 5632, 6144, 9728, 11008, 12288, 13824, 17408, 18944, 25600, 27648)
BLOCK_ORDERS = (32, 64, 128)
WEIGHTS = ((4096, 4096), (8192, 8192), (28672, 4096), (4096, 14336))  # N, K
DECODE, PREFILL = (1, 8, 16, 32, 64), (1024, 4096, 8192)
SCALES = {
    "1x128 by 128x128": ((1, 128), (128, 128)),
    "256x256 by 256x256": ((256, 256), (256, 256)),
    "token by channel": ((1, 0), (1, 0)),
}


def cases(ops: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """(op, case) of every row."""
    found: list[tuple[str, dict[str, Any]]] = []
    if "quantize" in ops:
        found += [("quantize", {"rows": n, "cols": n, "block": list(b)}) for b in BLOCKS for n in SIZES]
    if "both_ways" in ops:
        for block, shapes in BOTH_WAYS.items():
            found += [("both_ways", {"rows": rows, "cols": cols, "block": list(block)}) for rows, cols in shapes]
    if "hadamard_quantize" in ops:
        found += [
            ("hadamard_quantize", {"rows": (1 << size) // n, "cols": n, "n": n, "block": [1, 128]})
            for n in sorted((*ORDERS, *OTHER_ORDERS))
            for size in (25, 27)
        ]
        found += [
            ("hadamard_quantize", {"rows": rows, "cols": 4096, "n": n, "block": [1, 128]})
            for n in BLOCK_ORDERS
            for rows in (8192, 32768)
        ]
    for op in ("gemm", "layer"):
        if op in ops:
            scales = list(SCALES) if op == "gemm" else list(SCALES)[:1]
            found += [
                (op, {"m": m, "n": n, "k": k, "scales": s})
                for s in scales
                for (n, k) in WEIGHTS
                for m in (DECODE + PREFILL if op == "gemm" else (1, 4096))
            ]
    return found


# --- The paper's scheme ----------------------------------------------------------------------------------------------


@triton.jit
def _two_pass_kernel(x_ptr, q_ptr, scale_ptr, columns, BLOCK: tl.constexpr, PIECE: tl.constexpr):
    """GridQuant: a program a block; its pieces are read for the block's maximum, and again to be scaled."""
    across = columns // BLOCK
    i, j = tl.arange(0, PIECE)[:, None], tl.arange(0, PIECE)[None, :]
    start = tl.program_id(0) // across * BLOCK * columns + tl.program_id(0) % across * BLOCK
    largest = 0.0
    for down in range(0, BLOCK, PIECE):
        for right in range(0, BLOCK, PIECE):
            x = tl.load(x_ptr + start + (down + i) * columns + right + j).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(x)))
    scale = largest / 448.0
    tl.store(scale_ptr + tl.program_id(0), scale)
    for down in range(0, BLOCK, PIECE):
        for right in range(0, BLOCK, PIECE):
            at = start + (down + i) * columns + right + j
            x = tl.load(x_ptr + at).to(tl.float32) / scale
            tl.store(q_ptr + at, x.to(tl.float8e4nv))


def two_pass(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] bfloat16, multiples of 256."""
    q = torch.empty(x.shape, dtype=E4M3, device=x.device)
    scale = torch.empty(x.shape[0] // 256, x.shape[1] // 256, device=x.device)
    _two_pass_kernel[(scale.numel(),)](x, q, scale, x.shape[1], 256, 32, num_warps=4)
    return q, scale


# --- Rows ------------------------------------------------------------------------------------------------------------


def run_quantize(case: dict[str, Any]) -> dict[str, Any]:
    block = tuple(case["block"])
    xs = random_tensors((case["rows"], case["cols"]), torch.bfloat16)
    peers: dict[str, float] = {}
    if block == (256, 256):
        peers["two_pass"] = time_us([lambda x=x: two_pass(x) for x in xs])
        again = BlockPlan("again", 32, 256, 16, unroll=4)
        peers["read_twice"] = time_us([lambda x=x: quantize_with(x, block, again) for x in xs])
    small = xs[0][:1024, :1024]
    got, expected = (quantize_fp8_block(small, block, "exact", backend=b) for b in ("auto", "reference"))
    same = all(torch.equal(g.view(torch.uint8), e.view(torch.uint8)) for g, e in zip(got, expected, strict=True))
    us = time_us([lambda x=x: quantize_fp8_block(x, block, "exact", transposed_scale=block == (1, 128)) for x in xs])
    return {"us": us, "floor_bytes": 3 * xs[0].numel(), "peers_us": peers, "error": float(not same)}


def run_both_ways(case: dict[str, Any]) -> dict[str, Any]:
    block, how = tuple(case["block"]), {"transposed_scale": case["block"] == [1, 128]}
    xs = random_tensors((case["rows"], case["cols"]), torch.bfloat16)
    small = xs[0][:1024, :1024]
    got, expected = (quantize_fp8_both_ways(small, block, backend=b) for b in ("auto", "reference"))
    same = all(torch.equal(g.view(torch.uint8), e.view(torch.uint8)) for g, e in zip(got, expected, strict=True))

    def twice(x: torch.Tensor, turned: torch.Tensor) -> None:
        for each in (x, turned):
            quantize_fp8_block(each, block, "exact", **how)

    pairs = [(x, x.T.contiguous()) for x in xs]
    us = race_us(
        {
            "ours": [lambda x=x: quantize_fp8_both_ways(x, block, **how) for x in xs],
            "triton": [lambda x=x: quantize_fp8_both_ways(x, block, backend="triton", **how) for x in xs],
            "two_kernels": [lambda pair=pair: twice(*pair) for pair in pairs],
        }
    )
    return {"us": us.pop("ours"), "floor_bytes": 4 * xs[0].numel(), "peers_us": us, "error": float(not same)}


def run_hadamard_quantize(case: dict[str, Any]) -> dict[str, Any]:
    n = case["n"]
    xs = random_tensors((case["rows"], case["cols"]), torch.bfloat16)
    block = None if n == case["cols"] else n
    turned = {"block": block, "scale_rule": "exact", "transposed_scale": True}
    us = time_us([lambda x=x: hadamard_quantize_fp8(x, **turned) for x in xs])
    two_ops = time_us(
        [
            lambda x=x: quantize_fp8_block(
                hadamard_transform(x, block=block), scale_rule="exact", transposed_scale=True
            )
            for x in xs
        ]
    )
    small = xs[0][:64]
    exact = hadamard_transform(small.double(), block=block)
    back = dequantize_fp8_block(*hadamard_quantize_fp8(small, **turned), (1, 128), torch.float32).double()
    error = ((back - exact).norm() / exact.norm()).item()
    return {"us": us, "floor_bytes": 3 * xs[0].numel(), "peers_us": {"two_ops": two_ops}, "error": error}


def operands(m: int, n: int, k: int, scales: str) -> tuple[list[tuple], dict[str, Any], list[torch.Tensor]]:
    """(quantized operands, as many as pass L2; the keywords of the product; activations in bfloat16)."""
    a_block, b_block = SCALES[scales]
    weights = random_tensors((n, k), torch.bfloat16)
    xs = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _ in weights]
    turned = a_block == (1, 128)
    data = [
        (*quantize_fp8_block(x, a_block, "exact", transposed_scale=turned), *quantize_fp8_block(w, b_block))
        for x, w in zip(xs, weights, strict=True)
    ]
    return data, {"a_block": a_block, "b_block": b_block}, xs


def usable(name: str, data: tuple, blocks: dict[str, Any]) -> bool:
    try:
        fp8_block_gemm(*data, **blocks, backend=name)
    except (ValueError, ImportError):
        return False
    return True


def run_gemm(case: dict[str, Any]) -> dict[str, Any]:
    m, n, k = case["m"], case["n"], case["k"]
    data, blocks, xs = operands(m, n, k, case["scales"])
    one = torch.ones((), device="cuda")
    weights = random_tensors((n, k), torch.bfloat16)  # as many as activations
    calls: dict[str, list] = {
        "us": [lambda d=d: fp8_block_gemm(*d, **blocks, b_settled=True) for d in data],  # as Fp8Linear
        "bf16": [lambda x=x, w=w: F.linear(x, w) for x, w in zip(xs, weights, strict=True)],
        "cublas_tensorwise": [lambda d=d: tensorwise(d, one) for d in data],
    }
    block_data, block_blocks = data, blocks
    if case["scales"] != "1x128 by 128x128":
        block_data, block_blocks, _ = operands(m, n, k, "1x128 by 128x128")
    if usable("cublas", block_data[0], block_blocks):
        calls["cublas_block"] = [lambda d=d: fp8_block_gemm(*d, **block_blocks, backend="cublas") for d in block_data]
    for name in GEMMS:
        if name != "cublas" and usable(name, data[0], blocks):
            calls[name] = [lambda d=d, b=name: fp8_block_gemm(*d, **blocks, backend=b) for d in data]
    peers = race_us(calls) if m in PREFILL else {name: time_us(each) for name, each in calls.items()}
    us = peers.pop("us")
    return {"us": us, "floor_bytes": n * k, "peers_us": peers, "error": product_error(data[0], blocks)}


def run_layer(case: dict[str, Any]) -> dict[str, Any]:
    m, n, k = case["m"], case["n"], case["k"]
    data, blocks, xs = operands(m, n, k, case["scales"])
    weights = random_tensors((n, k), torch.bfloat16)
    triples = [(x, d[2], d[3]) for x, d in zip(xs, data, strict=True)]

    def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_fp8_block(x, (1, 128), "exact", transposed_scale=True)

    calls: dict[str, list] = {
        "us": [lambda t=t: fp8_linear(*t, scale_rule="exact", b_settled=True) for t in triples],  # as Fp8Linear
        "bf16": [lambda x=x, w=w: F.linear(x, w) for x, w in zip(xs, weights, strict=True)],
        "two": [lambda t=t: fp8_block_gemm(*quantized(t[0]), *t[1:], **blocks, b_settled=True) for t in triples],
        "quantizer": [lambda x=x: quantized(x) for x in xs],
        "product": [lambda d=d: fp8_block_gemm(*d, **blocks, b_settled=True) for d in data],
    }
    if usable("cublas", data[0], blocks):
        calls["cublas"] = [lambda t=t: fp8_block_gemm(*quantized(t[0]), *t[1:], backend="cublas") for t in triples]
    peers = race_us(calls)
    us = peers.pop("us")
    return {"us": us, "floor_bytes": n * k, "peers_us": peers, "error": product_error(data[0], blocks)}


def tensorwise(data: tuple, one: torch.Tensor) -> torch.Tensor:
    return torch._scaled_mm(data[0], data[2].T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def product_error(data: tuple, blocks: dict[str, Any]) -> float:
    """Of the first 512 outputs of the first 256 rows."""
    rows, columns = min(256, data[0].shape[0]), min(512, data[2].shape[0])
    left = dequantize_fp8_block(*data[:2], blocks["a_block"], torch.float32)[:rows].double()
    right = dequantize_fp8_block(*data[2:], blocks["b_block"], torch.float32)[:columns].double()
    exact = left @ right.T
    y = fp8_block_gemm(*data, **blocks)[:rows, :columns].double()
    return ((y - exact).norm() / exact.norm()).item()


RUN: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "quantize": run_quantize,
    "both_ways": run_both_ways,
    "hadamard_quantize": run_hadamard_quantize,
    "gemm": run_gemm,
    "layer": run_layer,
}


def line(row: dict[str, Any]) -> str:
    case = " ".join(str(v) for v in row["case"].values())
    peers = "  ".join(f"{name} {us:.1f}" for name, us in row["peers_us"].items())
    rate = ""
    if "m" in row["case"]:
        flops = 2 * row["case"]["m"] * row["case"]["n"] * row["case"]["k"]
        rate = f"{flops / row['us'] / 1e6:6.0f} TFLOP/s"
    floor = row["floor_us"] / row["us"]
    return f"{row['op']:17s} {case:38s} {row['us']:9.2f} us  {floor:5.2f} of floor {rate}  {row['error']:.1e}  {peers}"


def main(ops: list[str], out: Path | None) -> None:
    warm([("case", op, case) for op, case in cases(ops)])
    gbps = copy_gbps()
    rows = []
    for op, case in cases(ops):
        row = {"op": op, "case": case, **RUN[op](case)}
        row["floor_us"] = row.pop("floor_bytes") / gbps / 1e3
        rows.append(row)
        print(line(row), flush=True)
        give_back()
    write_results("bench_fp8", gbps, rows, out)
    print("\n".join(bars(rows)))


# --- Aims ------------------------------------------------------------------------------------------------------------


def ratios(rows: list[dict[str, Any]], peer: str, ours: str | None = None) -> list[float]:
    """Times faster than a peer (as one of our backends, or as `auto`), where both are there."""
    found = []
    for row in rows:
        us = row["us"] if ours is None else row["peers_us"].get(ours)
        if us and peer in row["peers_us"]:
            found.append(row["peers_us"][peer] / us)
    return found


def geometric(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else float("nan")


def bars(rows: list[dict[str, Any]]) -> list[str]:
    """A line an aim: what was reached, least over its cells unless said."""
    by = {op: [r for r in rows if r["op"] == op] for op in OPS}
    lines = []
    for n, aim in zip(SIZES, (0.75, 0.93, 0.96), strict=True):
        found = [r for r in by["quantize"] if r["case"]["rows"] == n and r["case"]["block"] != [1, 0]]
        shares = ", ".join(f"{r['case']['block']} {r['floor_us'] / r['us']:.2f}" for r in found)
        lines += [f"quantize {n}, of floor: {shares}; aim {aim}"] if found else []
    for name, aim in (("two_pass", 2.0),):
        lines += [f"quantize, times {name}: {r:.2f}, aim {aim}" for r in ratios(by["quantize"], name)]
    for row in by["hadamard_quantize"]:
        share, gain = row["floor_us"] / row["us"], row["peers_us"]["two_ops"] / row["us"]
        what = f"{row['case']['rows']} x {row['case']['cols']} in order {row['case']['n']}"
        aims = ("", "") if row["case"]["n"] in OTHER_ORDERS else (", aim 0.90", ", aim 1.8")
        lines.append(f"hadamard_quantize {what}: {share:.2f} of floor{aims[0]}; {gain:.2f} x{aims[1]}")
    backends = [None, *sorted({n for r in rows for n in r["peers_us"] if n in GEMMS})]
    for ours in backends:
        lines += _product_bars(by["gemm"], by["layer"], ours)
    return lines


def _product_bars(gemm: list[dict[str, Any]], layer: list[dict[str, Any]], ours: str | None) -> list[str]:
    name, lines = ours or "auto", []
    block = [r for r in gemm if r["case"]["scales"] == "1x128 by 128x128"]
    prefill, decode = ([r for r in block if r["case"]["m"] in ms] for ms in (PREFILL, DECODE))
    square = [r for r in gemm if r["case"]["scales"] == "256x256 by 256x256" and r["case"]["m"] in PREFILL]
    for what, rows, peer, least, mean in (
        ("prefill", prefill, "cublas_block", 1.0, 1.12),
        ("prefill, 256x256", square, "cublas_tensorwise", None, 0.92),
        ("prefill, 256x256", square, "bf16", None, 1.6),
        ("decode", decode, "cublas_block", None, 1.3),
        ("decode", decode, "bf16", None, 1.6),
        ("layer", layer, "bf16", 1.45, None),
    ):
        found = ratios(rows, peer, ours)
        if found:
            aims = f"least aim {least}, " if least else ""
            aims += f"mean aim {mean}" if mean else ""
            lines.append(f"{name} {what}, times {peer}: least {min(found):.2f}, mean {geometric(found):.2f}; {aims}")
    for n, k in WEIGHTS if ours is None else ():
        shares = {
            r["case"]["m"]: f"{r['floor_us'] / r['us']:.2f}"
            for r in decode
            if (r["case"]["n"], r["case"]["k"]) == (n, k)
        }
        aim = 0.80 if (n, k) in ((8192, 8192), (28672, 4096)) else 0.65
        lines.append(f"{name} decode {n} {k}, of floor by tokens: {shares}, aim {aim}".replace("'", ""))
    return lines


# --- Tuning ----------------------------------------------------------------------------------------------------------


def quantize_with(x: torch.Tensor, block: tuple[int, int], plan: RowPlan | BlockPlan) -> tuple:
    from quantrot.kernels.fp8 import triton as kernels

    q = torch.empty(x.shape, dtype=E4M3, device=x.device)
    scale = torch.empty(scale_shape(x.shape, block), device=x.device)
    if isinstance(plan, BlockPlan):
        kernels.run_blocks(x, q, scale, block, "exact", plan)
    else:
        kernels.run_rows(x, q, scale, block[1] or up(x.shape[1]), "exact", plan)
    return q, scale


def turn_with(x: torch.Tensor, n: int, plan: TurnPlan) -> tuple:
    from quantrot.kernels.fp8 import triton_hadamard

    q = torch.empty(x.shape, dtype=E4M3, device=x.device)
    scale = torch.empty(scale_shape(x.shape, (1, 128))[::-1], device=x.device).T
    triton_hadamard.run(x, q, scale, None, n, n**-0.5, "exact", plan)
    return q, scale


def multiply_with(data: tuple, blocks: dict[str, Any], plan: GemmPlan) -> torch.Tensor:
    from quantrot.kernels.fp8 import triton_gemm

    return triton_gemm.run(*data, blocks["a_block"], blocks["b_block"], torch.bfloat16, None, plan)


def block_candidates(block: tuple[int, int]) -> list[RowPlan | BlockPlan]:
    if block == (256, 256):
        words = [BlockPlan("words", 64, 256, w) for w in (16, 32)]
        pieces = itertools.product((16, 32, 64), (8, 16), (1, 2, 4))
        return [*words, *(BlockPlan("again", r, 256, w, unroll=u) for r, w, u in pieces)]
    if block == (128, 128):
        words = [BlockPlan("words", 32, 128, w) for w in (4, 8, 16)]
        return [*words, *(BlockPlan("again", r, 128, w, unroll=u) for r in (32, 64) for w in (4, 8) for u in (1, 2))]
    if block == (1, 128):
        tiles = itertools.product((1, 2, 4, 8, 16), (4, 8, 16, 32), (1, 2, 4, 8))
        return [RowPlan(r, g, w) for r, g, w in tiles if 16 <= r * g * 4 // w <= 64]
    return [RowPlan(1, 1, w) for w in (4, 8, 16)]


def triton_orders() -> list[int]:
    """Those that no CUDA kernel turns and quantizes, and the Triton kernel does."""
    from quantrot.kernels.fp8 import triton_hadamard
    from quantrot.kernels.hadamard.codes import plan_for_codes

    return [
        n
        for n in (32, 64, *ORDERS, 576, 768, 1536, 11008, 13824)
        for columns in (n if n > 4096 else 4096 // n * n,)
        if plan_for_codes(n, columns, torch.bfloat16) is None and triton_hadamard.supports(n, columns, 2)
    ]


def turn_candidates(n: int) -> list[TurnPlan]:
    if n <= 128:
        return [TurnPlan(t // n, loop, w) for t in (4096, 8192) for loop in (1, 2, 4, 8) for w in (4, 8)]
    rows = [max(1, t // n) for t in (2048, 4096, 8192)]
    return [TurnPlan(r, 1, w) for r in sorted(set(rows)) for w in ((4, 8) if r * n <= 4096 else (8, 16))]


def gemm_candidates(m: int, n: int, k: int) -> list[GemmPlan]:
    """Plans that need no more registers or shared memory than there is; none of them changes a bit."""
    if m <= 64:
        tokens = max(16, up(m))
        shapes = [(64, 4, s) for s in (4, 6, 8, 10)] + ([(128, 4, s) for s in (3, 4, 6)] if tokens < 64 else [])
        shapes += [(128, 8, s) for s in (4, 6)]
        plans = [GemmPlan(tokens, bn, w, s, swap=True, group=1) for bn, w, s in shapes if s * (bn + tokens) <= 1700]
        return [*plans, *(GemmPlan(tokens, 64, 4, 8, swap=True, group=1, tma=False) for _ in (0,) if tokens <= 32)]
    shapes = [(128, 128, 8, 3), (128, 128, 8, 4), (128, 128, 8, 6), (64, 128, 4, 3), (64, 128, 4, 4), (64, 256, 8, 3)]
    shapes += [(64, 256, 8, 4), (128, 64, 4, 4)]
    plans = [GemmPlan(*shape, group=g) for shape in shapes for g in (4, 8, 16)]
    return [*plans, *(GemmPlan(128, 128, 8, s, persistent=1) for s in (3, 4))]


def tune(ops: list[str]) -> None:
    """Print the best plan of each shape as lines of tuned.py, with what it gains over the rule's."""
    jobs: list[tuple] = []
    if "quantize" in ops:
        jobs += [("quantize", block, plan) for block in BLOCKS for plan in block_candidates(block)]
    if "hadamard_quantize" in ops:
        jobs += [("turn", n, plan) for n in triton_orders() for plan in turn_candidates(n)]
    if "gemm" in ops:
        sizes = {(m, plan) for m in DECODE + PREFILL for plan in gemm_candidates(m, *WEIGHTS[0])}
        jobs += [("gemm", m, plan) for m, plan in sorted(sizes, key=str)]
    warm(jobs)
    if "quantize" in ops:
        for block in BLOCKS:
            xs = [random_tensors((n, n), torch.bfloat16) for n in SIZES]
            times = {
                p: [_us(lambda x, p=p, b=block: quantize_with(x, b, p), x) for x in xs] for p in block_candidates(block)
            }
            print(f"{block}: {_best(times)}", flush=True)
            del xs
    if "hadamard_quantize" in ops:
        for n in triton_orders():
            columns = n if n > 4096 else 4096 // n * n
            xs = random_tensors(((1 << 25) // columns, columns), torch.bfloat16)
            times = {p: [_us(lambda x, p=p, n=n: turn_with(x, n, p), xs)] for p in turn_candidates(n)}
            rule = turn_plan(up(n), 1 << 25, 2)
            print(f"    ({up(n)}, 2): {_best(times)}  # rule {rule}", flush=True)
    if "gemm" in ops:
        for (n, k), m in itertools.product(WEIGHTS, DECODE + PREFILL):
            data, blocks, _ = operands(m, n, k, "1x128 by 128x128")
            times = {p: [_us(lambda d, p=p, b=blocks: multiply_with(d, b, p), data)] for p in gemm_candidates(m, n, k)}
            rule = _us(lambda d, p=gemm_plan(m, n, k), b=blocks: multiply_with(d, b, p), data)
            print(f"    ({up(m)}, {n}, {k}): {_best(times)}  # rule {rule:.1f} us", flush=True)
            del data
            give_back()


def _us(call: Callable[[Any], Any], inputs: list) -> float:
    try:
        return time_us([lambda x=x: call(x) for x in inputs], replays=3)
    except (RuntimeError, triton.runtime.errors.OutOfResources) as error:
        print("refused:", str(error)[:100])
        return math.inf


def _best(times: dict[Any, list[float]]) -> str:
    ranked = sorted(times, key=lambda p: geometric(times[p]))
    return f"{ranked[0]},  # {' '.join(f'{t:.1f}' for t in times[ranked[0]])} us; then {ranked[1:3]}"


def warm(jobs: list[tuple]) -> None:
    """Compile all kernels, into the caches on disk."""
    for error in filter(None, in_processes(_warm, jobs)):
        print(error, flush=True)


def _warm(job: tuple) -> str:
    try:
        what, key, value = job
        if what == "case":
            shrunk = {**value, **{name: min(value[name], 512) for name in ("rows",) if name in value}}
            if key == "quantize":
                quantize_fp8_block(
                    torch.randn(4096, value["cols"], device="cuda").bfloat16(), tuple(value["block"]), "exact"
                )
            elif key == "hadamard_quantize":
                x = torch.randn(shrunk["rows"], value["cols"], device="cuda").bfloat16()
                hadamard_quantize_fp8(x, block=None if value["n"] == value["cols"] else value["n"], scale_rule="exact")
            elif key == "layer":
                data, blocks = _small(value["m"], value["n"], value["k"], value["scales"])
                fp8_block_gemm(*data, **blocks, b_settled=True)
                x = torch.zeros(value["m"], value["k"], device="cuda", dtype=torch.bfloat16)
                fp8_linear(x, *data[2:], scale_rule="exact", b_settled=True)
            else:
                data, blocks = _small(value["m"], value["n"], value["k"], value["scales"])
                for backend in ("triton", "triton_splitk"):
                    fp8_block_gemm(*data, **blocks, backend=backend)
        elif what == "quantize":
            quantize_with(torch.randn(4096, 4096, device="cuda").bfloat16(), key, value)
        elif what == "turn":
            columns = key if key > 4096 else 4096 // key * key
            turn_with(torch.randn(64, columns, device="cuda").bfloat16(), key, value)
        else:
            data, blocks = _small(key, *WEIGHTS[0], "1x128 by 128x128")
            multiply_with(data, blocks, value)
    except Exception as error:  # a plan that the GPU refuses is reported, and refused again when it is timed
        return f"{job}: {str(error)[:200]}"
    return ""


def _small(m: int, n: int, k: int, scales: str) -> tuple[tuple, dict[str, Any]]:
    """One product's operands."""
    a_block, b_block = SCALES[scales]
    a, b = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (m, n))
    turned = a_block == (1, 128)
    quantized = *quantize_fp8_block(a, a_block, transposed_scale=turned), *quantize_fp8_block(b, b_block)
    return quantized, {"a_block": a_block, "b_block": b_block}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--bars", type=Path)
    parser.add_argument("--only", nargs="*", default=list(OPS), choices=OPS)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.bars:
        print("\n".join(bars(json.loads(asked.bars.read_text())["rows"])))
    elif asked.tune:
        tune(asked.only)
    else:
        main(asked.only, asked.out)
