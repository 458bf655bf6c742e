"""The mixed-input product against cuBLAS on equal types, and against PyTorch's own 8- and 4-bit weights.

    python benchmarks/bench_mixed.py            # the table, and results/bench_mixed-<gpu>.json
    python benchmarks/bench_mixed.py --tune     # first times every candidate plan and writes kernels/mixed/tuned.py
    python benchmarks/bench_mixed.py --list     # no GPU: the cases

Times as `timing.py` says: medians of CUDA graphs over operands that together pass L2. `floor` is the time to read the
operands once and write the result at copy speed, or to multiply at cuBLAS's speed on equal types, whichever is longer.
`same_type_cublas` is F.linear with both operands wide. "backends_us" holds the two ways that "auto" chooses from.
`error` is the relative error to the float64 product of the dequantized operands.
"""

import argparse
import math
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from timing import ROTATE_BYTES, copy_gbps, time_us, write_results  # noqa: E402

from quantrot.kernels.mixed import mixed_gemm, mixed_ref, pack_int8  # noqa: E402
from quantrot.kernels.mixed.plans import (  # noqa: E402
    DECODE_COLUMNS,
    Decode,
    Prefill,
    bucket,
    decode_plan,
    prefill_plan,
)

PAPER = (3456, 4096, 2048)  # m, n, k
SHAPES = [(4096, 4096), (8192, 8192), (28672, 4096), (4096, 14336)]  # n, k
ROWS = [1, 8, 16, 64, 256, 1024, 4096]
GROUP = 128
TILES = [(64, 32, 4), (64, 64, 4), (64, 128, 4), (64, 256, 4), (128, 32, 8), (128, 64, 4), (128, 64, 8), (128, 128, 4)]
TILES += [(128, 128, 8), (128, 256, 8), (256, 64, 8), (256, 128, 8)]  # rows, columns, warps
WIDE = {"bfloat16": torch.bfloat16, "float16": torch.float16}
TUNED = ROOT / "quantrot" / "kernels" / "mixed" / "tuned.py"

Case = dict[str, Any]


# --- Cases -----------------------------------------------------------------------------------------------------------


def case(m: int, n: int, k: int, narrow: str, wide: str, operand: str = "weight", group: int = 0) -> Case:
    """group 0: one scale a channel (a token, where the activations are narrow)."""
    return {"m": m, "n": n, "k": k, "narrow": narrow, "wide": wide, "narrow_operand": operand, "group": group}


def cases() -> list[Case]:
    found = [case(*PAPER, u, w, o) for u, w, o in product(("uint8", "int8"), ("float16", "bfloat16"), ("weight", "x"))]
    found += [case(*PAPER, "e4m3", "bfloat16", operand) for operand in ("weight", "x")]
    for (n, k), m, group in product(SHAPES, ROWS, (0, GROUP)):
        found.append(case(m, n, k, "packed", "bfloat16", "weight", group))
    return found + [case(m, 8192, 8192, "e4m3", "bfloat16") for m in (1, 16, 4096)]


def codes(kind: str, rows: int, columns: int) -> torch.Tensor:
    if kind == "e4m3":
        return torch.randn(rows, columns, device="cuda").to(torch.float8_e4m3fn)
    q = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, device="cuda")
    return q.view(torch.uint8) if kind == "uint8" else pack_int8(q) if kind == "packed" else q


def operands(c: Case, copies: int) -> list[tuple[torch.Tensor, ...]]:
    """(x, weight, scale), so many times over."""
    m, n, k = c["m"], c["n"], c["k"]
    narrow_weight = c["narrow_operand"] == "weight"
    rows, others = (n, m) if narrow_weight else (m, n)
    found = []
    for _ in range(copies):
        narrow, wide = codes(c["narrow"], rows, k), torch.randn(others, k, device="cuda").to(WIDE[c["wide"]])
        scale = torch.rand(rows, k // (c["group"] or k), device="cuda").to(torch.bfloat16) / 64
        found.append((wide, narrow, scale) if narrow_weight else (narrow, wide, scale))
    return found


def traffic(c: Case) -> int:
    """Bytes read and written if everything moves once."""
    m, n, k = c["m"], c["n"], c["k"]
    rows, others = (n, m) if c["narrow_operand"] == "weight" else (m, n)
    return rows * k + 2 * others * k + 2 * rows * (k // (c["group"] or k)) + 2 * m * n


def copies_of(c: Case) -> int:
    return max(2, min(16, -(-ROTATE_BYTES // traffic(c))))


# --- Peers -----------------------------------------------------------------------------------------------------------


def cublas_us(c: Case, copies: int) -> float:
    dtype = WIDE[c["wide"]]
    pairs = [[torch.randn(rows, c["k"], device="cuda").to(dtype) for rows in (c["m"], c["n"])] for _ in range(copies)]
    return time_us([lambda x=x, w=w: F.linear(x, w) for x, w in pairs])


def int8pack_us(c: Case, copies: int) -> float | None:
    """torch._weight_int8pack_mm: bfloat16 by int8, one scale a channel."""
    if c["group"] or c["narrow"] != "packed" or c["wide"] != "bfloat16" or c["m"] > 64:
        return None
    sets = [(x, codes("int8", c["n"], c["k"]), scale.flatten()) for x, _, scale in operands(c, min(copies, 2))]
    return attempt(lambda: time_us([lambda s=s: torch._weight_int8pack_mm(*s) for s in sets], 3))


def tinygemm_us(c: Case, copies: int) -> float | None:
    """torch._weight_int4pack_mm: bfloat16 by int4 in groups of 128, half our bytes."""
    if c["group"] != GROUP or c["wide"] != "bfloat16" or c["m"] > 64:
        return None

    def run() -> float:
        sets = []
        for x, _, _ in operands(c, copies):
            nibbles = torch.randint(0, 256, (c["n"], c["k"] // 2), dtype=torch.uint8, device="cuda")
            packed = torch._convert_weight_to_int4pack(nibbles, 8)
            sets.append((x, packed, GROUP, torch.rand(c["k"] // GROUP, c["n"], 2, device="cuda").to(x.dtype)))
        return time_us([lambda s=s: torch._weight_int4pack_mm(*s) for s in sets], 3)

    return attempt(run)


def attempt(run: Callable[[], float]) -> float | None:
    """None where this build of PyTorch has no such operator for the GPU."""
    try:
        return run()
    except (RuntimeError, NotImplementedError) as error:
        print(f"  left out: {str(error).splitlines()[0]:.100}")
        return None


# --- The table -------------------------------------------------------------------------------------------------------


def error_of(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> float:
    """Of 64 rows of x at most: enough for the norm, and float64 is slow."""
    x, narrow_weight = (x[:64], True) if x.dtype in WIDE.values() else (x, False)
    if narrow_weight:
        exact = mixed_ref(x.double(), weight, scale)
    else:
        exact = mixed_ref(x, weight.double(), scale)
    return ((mixed_gemm(x, weight, scale).double() - exact).norm() / exact.norm()).item()


def run_case(c: Case, gbps: float, equal: dict[tuple, float]) -> dict[str, Any]:
    copies = copies_of(c)
    sets = operands(c, copies)
    timed = {
        backend: time_us([lambda s=s, b=backend: mixed_gemm(*s, backend=b) for s in sets])
        for backend in ("auto", "triton", "expand")
    }
    us = timed.pop("auto")
    error = error_of(*sets[0])
    del sets
    key = c["m"], c["n"], c["k"], c["wide"]
    if key not in equal:
        equal[key] = cublas_us(c, copies)
    floor = traffic(c) / gbps / 1e3
    peers = {
        "same_type_cublas": equal[key],
        "torch_int8pack": int8pack_us(c, copies),
        "tinygemm": tinygemm_us(c, copies),
    }
    peers = {name: value for name, value in peers.items() if value is not None}
    if c["m"] > 64:
        floor = max(floor, peers["same_type_cublas"])
    return {
        "op": "mixed",
        "case": c,
        "us": us,
        "floor_us": floor,
        "peers_us": peers,
        "backends_us": timed,
        "error": error,
    }


HEADER = (
    "     m      n      k narrow operand wide     group        us     floor    cublas  x cublas    triton    expand"
    "  int8pack  tinygemm     error\n" + "-" * 145
)


def line(row: dict[str, Any]) -> str:
    c, peers, ours = row["case"], row["peers_us"], row["backends_us"]
    others = "".join(f"{peers[p]:10.1f}" if p in peers else " " * 10 for p in ("torch_int8pack", "tinygemm"))
    return (
        f"{c['m']:6d} {c['n']:6d} {c['k']:6d} {c['narrow']:6s} {c['narrow_operand']:7s} {c['wide']:8s} {c['group']:5d} "
        f"{row['us']:9.2f} {row['floor_us']:9.2f} {peers['same_type_cublas']:9.2f} "
        f"{peers['same_type_cublas'] / row['us']:9.3f} {ours['triton']:9.2f} {ours['expand']:9.2f}{others} "
        f"{row['error']:9.2e}"
    )


def main(out: Path | None) -> None:
    warm_cache([(c, None) for c in cases()])
    gbps, rows = copy_gbps(), []
    equal: dict[tuple, float] = {}
    print(HEADER)
    for c in cases():
        row = run_case(c, gbps, equal)
        print(line(row), flush=True)
        rows.append(row)
    write_results("bench_mixed", gbps, rows, out)


# --- Tuning ----------------------------------------------------------------------------------------------------------


def candidates(m: int, n: int, k: int, group: int, first: Decode | None) -> list[Decode | Prefill]:
    """Plans worth timing. `first`: the plan of one token, whose order of summation the other decode plans keep."""
    found: list[Decode | Prefill] = []
    if m <= DECODE_COLUMNS:
        steps = (64,) if group % 128 else (64, 128)
        for rows, slices, depth, stages in product((16, 32, 64), (4, 8), steps, (2, 3, 4, 6)):
            tokens = 8 if m <= 8 else 16
            shared = stages * slices * depth * (rows + 2 * tokens)
            kept = first is None or (first.slices, first.depth) == (slices, depth)
            spills = group and rows * tokens == 1024
            if kept and shared <= 200 << 10 and rows * slices <= 256 and not spills:
                found.append(Decode(rows, slices, depth, stages))
        return found
    for (rows, columns, warps), depth, stages, bulk in product(TILES, (64, 128), (3, 4), (True, False)):
        sums = rows * columns // (warps * 32) * (2 if group else 1)  # registers a thread
        if sums > 128 or not m / 4 <= columns <= 2 * m and not (m > 256 and columns >= 128):
            continue
        if depth == 128 and (group % 128 or not bulk):  # copies by the threads then run out of registers
            continue
        if not bulk and (columns < 128 or m < 1024):
            continue
        if stages * depth * (rows + 2 * columns) <= 225 << 10:
            tiles = -(-n // rows) * -(-m // columns)
            splits = [s for s in (1, 2, 4, 8) if s == 1 or (tiles * s <= 300 and k // s >= 512)]
            found += [Prefill(rows, columns, depth, warps, stages, s, bulk) for s in splits]
    return found


def warm_cache(work: list[tuple[Case, Decode | Prefill | None]]) -> None:
    """Compile in processes: one by one, at first use, it would take longer than the table."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    distinct = {repr(kernel_key(c, plan)): (c, plan) for c, plan in work}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(12, len(distinct)), mp_context=context) as pool:
        list(pool.map(compile_one, distinct.values(), chunksize=4))


def kernel_key(c: Case, plan: Decode | Prefill | None) -> tuple:
    """What a compiled kernel depends on: shapes only by rule, or by the plan's own split."""
    shape = (c["m"], c["n"], c["k"]) if plan is None else (c["m"] <= 8, c["m"] == 1)
    return c["narrow"], c["wide"], c["narrow_operand"], c["group"], shape, plan


def compile_one(work: tuple[Case, Decode | Prefill | None]) -> None:
    c, plan = work
    x, weight, scale = operands(c, 1)[0]
    try:
        if plan is None:
            for backend in ("triton", "expand"):
                mixed_gemm(x, weight, scale, backend=backend)
        else:
            launch(x, weight, scale, plan)
    except Exception as error:  # a plan that the compiler or the multiprocessor refuses is not a candidate
        print("refused:", plan, f"{error!s:.100}", flush=True)


def launch(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, plan: Decode | Prefill) -> torch.Tensor:
    from quantrot.kernels.mixed.triton import multiply

    return multiply(x, weight.view(torch.uint8), scale, None, None, "packed", True, plan)


def best_plan(c: Case, plans: list[Decode | Prefill]) -> tuple[Decode | Prefill, dict[Decode | Prefill, float]]:
    sets = operands(c, min(4, copies_of(c)))
    exact = mixed_ref(sets[0][0].double(), sets[0][1], sets[0][2])
    found: dict[Decode | Prefill, float] = {}
    for plan in plans:
        try:
            y = launch(*sets[0], plan)
            if ((y.double() - exact).norm() / exact.norm()).item() > 2e-3:
                print("refused for its error:", c, plan)
                continue
            found[plan] = time_us([lambda s=s, p=plan: launch(*s, p) for s in sets], 3)
        except Exception as error:
            print("refused:", plan, f"{error!s:.100}")
    return min(found, key=found.__getitem__), found


def tune(shapes: list[tuple[int, int]], rows: list[int]) -> None:
    """The best plan of each shape and number of tokens, and from how many of them expanding is faster."""
    from quantrot.kernels.mixed.tuned import EXPAND_FROM, PLANS  # changed in place, so that the table uses them

    ratios: dict[tuple[str, int], list[float]] = {}
    work: list[tuple[Case, Decode | Prefill | None]] = []
    todo = list(product(shapes, (0, GROUP), rows))
    for (n, k), group, m in todo:
        c = case(m, n, k, "packed", "bfloat16", "weight", group)
        work += [(c, plan) for plan in candidates(m, n, k, group, None)]
    warm_cache(work)
    first: dict[tuple[int, int, int], Decode] = {}
    for (n, k), group, m in todo:
        c = case(m, n, k, "packed", "bfloat16", "weight", group)
        plan, times = best_plan(c, candidates(m, n, k, group, first.get((n, k, group))))
        if isinstance(plan, Decode):
            first.setdefault((n, k, group), plan)
        PLANS[n, k, group, bucket(m)] = plan
        sets = operands(c, copies_of(c))
        expanded = time_us([lambda s=s: mixed_gemm(*s, backend="expand") for s in sets], 3)
        ratios.setdefault(("group" if group else "channel", m), []).append(expanded / times[plan])
        rule = decode_plan(n, m, group) if m <= DECODE_COLUMNS else prefill_plan(n, m, k, group, 132)
        print(
            f"{m:5d} {n:6d} {k:6d} {group:4d} {times[plan]:8.2f} us, expanded {expanded:8.2f}, rule "
            f"{times.get(rule, math.nan):8.2f}  {plan}",
            flush=True,
        )
        TUNED.write_text(tuned_text(PLANS, EXPAND_FROM))
    for kind in EXPAND_FROM:
        never = 1 << 30
        slower = [m for m in rows if math.prod(ratios.get((kind, m), [1.0])) >= 1]
        faster = [m for m in rows if m > max(slower, default=0)]
        EXPAND_FROM[kind] = min(faster, default=never)
    TUNED.write_text(tuned_text(PLANS, EXPAND_FROM))


def tuned_text(plans: dict, expand_from: dict[str, int]) -> str:
    doc = TUNED.read_text().split('"""')[1].partition("Until a run")[0].rstrip()
    text = f'"""{doc}\n"""\n\nfrom quantrot.kernels.mixed.plans import Decode, Prefill\n\n'
    text += f"EXPAND_FROM = {expand_from}\n\n".replace("'", '"')
    text += "PLANS: dict[tuple[int, int, int, int], Decode | Prefill] = {\n"
    for key, plan in sorted(plans.items()):
        text += f"    {key}: {type(plan).__name__}({', '.join(map(str, vars(plan).values()))}),\n"
    return text + "}\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS, help="numbers of tokens to tune")
    parser.add_argument("--shapes", nargs="*", default=[f"{n}x{k}" for n, k in SHAPES], help="NxK, to tune")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.list:
        print(*cases(), sep="\n")
    else:
        if asked.tune:
            tune([tuple(map(int, s.split("x"))) for s in asked.shapes], asked.rows)
        main(asked.out)
