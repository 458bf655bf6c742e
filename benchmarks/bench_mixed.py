"""The mixed-input product against cuBLAS on equal types, and against PyTorch's own 8- and 4-bit weights.

    python benchmarks/bench_mixed.py            # the table, and results/bench_mixed-<gpu>.json
    python benchmarks/bench_mixed.py --list     # no GPU: the cases

Times as `timing.py` says: medians of CUDA graphs over operands that together pass L2, called as a module with constant
weights calls (weight_ready); ours and cuBLAS in turn, so that both meet the same clocks. "x cublas": the median of the
rounds' ratios. `floor` is the time to read the operands once and write the result at copy speed, or to multiply at
cuBLAS's speed on equal types, whichever is longer. `same_type_cublas` is F.linear with both operands wide.
"backends_us" holds the ways that "auto" chooses from. `error` is the relative error to the float64 product of the
dequantized operands. tune_mixed_hopper.py times every plan of the Hopper kernels.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from timing import ROTATE_BYTES, Calls, copy_gbps, in_processes, race, ratio, time_us, write_results  # noqa: E402

from quantrot.kernels.mixed import mixed_gemm, mixed_ref, pack_int8  # noqa: E402

PAPER = (3456, 4096, 2048)  # m, n, k
SHAPES = [(4096, 4096), (6144, 4096), (8192, 8192), (28672, 4096), (4096, 14336)]  # n, k
ROWS = [1, 8, 16, 64, 256, 1024, 4096]
GROUP = 128
WIDE = {"bfloat16": torch.bfloat16, "float16": torch.float16}

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


def cublas(c: Case, copies: int) -> Calls:
    dtype = WIDE[c["wide"]]
    pairs = [[torch.randn(rows, c["k"], device="cuda").to(dtype) for rows in (c["m"], c["n"])] for _ in range(copies)]
    return [lambda x=x, w=w: F.linear(x, w) for x, w in pairs]


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
    """Of the product's last 64 rows: enough for the norm, and float64 is slow."""
    y = mixed_gemm(x, weight, scale)[-64:].double()
    if x.dtype in WIDE.values():
        exact = mixed_ref(x[-64:].double(), weight, scale)
    else:
        exact = mixed_ref(x[-64:], weight.double(), scale[-64:])
    return ((y - exact).norm() / exact.norm()).item()


def run_case(c: Case, gbps: float) -> dict[str, Any]:
    copies = copies_of(c)
    sets = operands(c, copies)
    calls: dict[str, Calls] = {
        backend: [lambda s=s, b=backend: mixed_gemm(*s, backend=b, weight_ready=True) for s in sets]
        for backend in ("auto", "hopper", "triton", "expand")
    }
    rounds = race(calls | {"cublas": cublas(c, copies)})
    us = {name: statistics.median(times) for name, times in rounds.items()}
    error = error_of(*sets[0])
    del sets, calls
    floor = max(traffic(c) / gbps / 1e3, us["cublas"] if c["m"] > 64 else 0)
    peers = {
        "same_type_cublas": us["cublas"],
        "torch_int8pack": int8pack_us(c, copies),
        "tinygemm": tinygemm_us(c, copies),
    }
    return {
        "op": "mixed",
        "case": c,
        "us": us["auto"],
        "floor_us": floor,
        "peers_us": {name: value for name, value in peers.items() if value is not None},
        "of_cublas": ratio(rounds["cublas"], rounds["auto"]),
        "backends_us": {backend: us[backend] for backend in ("hopper", "triton", "expand")},
        "error": error,
    }


HEADER = (
    "     m      n      k narrow operand wide     group        us     floor    cublas  x cublas"
    "    hopper    triton    expand  int8pack  tinygemm     error\n" + "-" * 155
)


def line(row: dict[str, Any]) -> str:
    c, peers, ours = row["case"], row["peers_us"], row["backends_us"]
    others = "".join(f" {ours[backend]:9.2f}" for backend in ("hopper", "triton", "expand"))
    others += "".join(f"{peers[p]:10.1f}" if p in peers else " " * 10 for p in ("torch_int8pack", "tinygemm"))
    return (
        f"{c['m']:6d} {c['n']:6d} {c['k']:6d} {c['narrow']:6s} {c['narrow_operand']:7s} {c['wide']:8s} {c['group']:5d} "
        f"{row['us']:9.2f} {row['floor_us']:9.2f} {peers['same_type_cublas']:9.2f} "
        f"{row['of_cublas']:9.3f}{others} "
        f"{row['error']:9.2e}"
    )


def compile_one(c: Case) -> None:
    x, weight, scale = operands(c, 1)[0]
    for backend in ("hopper", "triton", "expand"):
        mixed_gemm(x, weight, scale, backend=backend)


def main(out: Path | None) -> None:
    in_processes(compile_one, cases())
    gbps, rows = copy_gbps(), []
    print(HEADER)
    for c in cases():
        row = run_case(c, gbps)
        print(line(row), flush=True)
        rows.append(row)
    write_results("bench_mixed", gbps, rows, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.list:
        print(*cases(), sep="\n")
    else:
        main(asked.out)
