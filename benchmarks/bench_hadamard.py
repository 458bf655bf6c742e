"""The Hadamard transform against a copy of the same tensor, the fast-hadamard-transform package and a dense rotation.

    python benchmarks/bench_hadamard.py            # the table, and results/bench_hadamard-<gpu>.json
    python benchmarks/bench_hadamard.py --tune     # first times every candidate plan and writes tuned.py
    python benchmarks/bench_hadamard.py --note     # no GPU: the results in the comments of tuned.py

Every time is the median of replays of one CUDA graph that holds calls on different random tensors, together past the
60 MB of L2 (the smallest tensors: 512 of them), outputs included; the copy is timed the same way in the same run. `of
copy` is the copy's time over ours. `error` is the relative error to the float64 reference. Cases with "inplace" work
on one tensor that stays in L2, and their copy is out of place. A missing package leaves its column empty.
"""

import argparse
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from timing import copy_gbps, copy_us, random_tensors, time_us, write_results  # noqa: E402

from quantrot.kernels.fp8.reference import quantize_reference  # noqa: E402
from quantrot.kernels.hadamard import hadamard_transform, hadamard_transform_  # noqa: E402
from quantrot.kernels.hadamard.reference import MAX_RELATIVE_ERROR, hadamard_reference  # noqa: E402
from quantrot.orthogonal import hadamard_base, hadamard_factors  # noqa: E402

SMALL = [8, 16, 32, 64]
POWERS = [128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768]
BASES = [576, 1536, 3072, 4864, 5120, 11008, 12288, 13824, 14336, 17408, 18944, 25600, 28672, 29568, 53248]
ELEMENTS = [1 << 13, 1 << 17, 1 << 20, 1 << 23, 1 << 25, 1 << 27]
TUNED = ROOT / "quantrot" / "kernels" / "hadamard" / "tuned.py"


# --- Cases ------------------------------------------------------------------------------------------------------------


def tensors(n: int, elements: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Random tensors of about this many elements, in rows of n."""
    rows = max(1, elements // n)
    rows -= rows % 16 if rows > 64 else 0  # a copy of a size that is no multiple of 512 bytes is not the fastest copy
    return random_tensors((rows, n), dtype)


def error_of(n: int, dtype: torch.dtype, backend: str = "auto") -> float:
    x = torch.randn(max(3, (1 << 20) // n), n, device="cuda").to(dtype)
    exact = hadamard_reference(x.double(), None, n, n**-0.5)
    return ((hadamard_transform(x, backend=backend).double() - exact).norm() / exact.norm()).item()


def dense_matrix(n: int, dtype: torch.dtype) -> torch.Tensor:
    h = torch.ones(1, 1, device="cuda", dtype=dtype)
    for factor in hadamard_factors(n):
        h = torch.kron(h, hadamard_base(factor).to(device="cuda", dtype=dtype))
    return h.mul_(n**-0.5)


def package():
    """hadamard_transform of the fast-hadamard-transform package, or None."""
    try:
        from fast_hadamard_transform import hadamard_transform as theirs
    except ImportError:
        return None
    return theirs


# --- The table -------------------------------------------------------------------------------------------------------


def cases() -> list[tuple[int, int, torch.dtype, bool]]:
    found = []
    for dtype in (torch.bfloat16, torch.float16):
        found += [(n, e, dtype, False) for n in SMALL for e in ELEMENTS[-2:]]
        found += [(n, e, dtype, False) for n in POWERS for e in ELEMENTS if e >= n]
        found += [(n, 1 << 25, dtype, False) for n in BASES]
    found += [(n, 1 << 25, torch.float32, False) for n in SMALL + POWERS]
    return found + [(n, 1 << 24, torch.bfloat16, True) for n in (32, 128, 1024, 4096, 16384)]


def run_case(n: int, elements: int, dtype: torch.dtype, inplace: bool, copies: dict) -> dict:
    peers: dict[str, float | None] = {}
    if inplace:
        x = torch.randn(elements // n, n, device="cuda").to(dtype)
        y = torch.empty_like(x)
        us = time_us([lambda: hadamard_transform_(x)] * 20)
        peers["copy"] = time_us([lambda: y.copy_(x)] * 20)
    else:
        xs = tensors(n, elements, dtype)
        us = time_us([lambda x=x: hadamard_transform(x) for x in xs])
        size = xs[0].numel() * dtype.itemsize
        if size not in copies:
            copies[size] = copy_us(xs)
        peers["copy"] = copies[size]
        theirs = package()
        if theirs and n & (n - 1) == 0 and n >= 8:
            peers["fast_hadamard_transform"] = time_us([lambda x=x: theirs(x, n**-0.5) for x in xs])
    size = max(1, elements // n) * n * dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    return {
        "op": "hadamard",
        "case": {"n": n, "elements": elements, "dtype": name, "inplace": inplace},
        "factors": hadamard_factors(n),
        "us": us,
        "floor_us": 2 * size,  # bytes; main() divides by the copy's speed
        "peers_us": peers,
        "error": error_of(n, dtype),
    }


def dense_us(n: int, elements: int, dtype: torch.dtype) -> float:
    """The rotation as a product with the n x n matrix."""
    h = dense_matrix(n, dtype)
    return time_us([lambda x=x: x @ h for x in tensors(n, elements, dtype)[:2]], replays=3)


def line(row: dict) -> str:
    case, peers = row["case"], row["peers_us"]
    copy = peers["copy"] / row["us"]
    theirs = peers.get("fast_hadamard_transform")
    others = f"{theirs:10.1f}" if theirs else " " * 10
    place = "in place" if case["inplace"] else ""
    return (
        f"{case['n']:6d} {case['elements']:10d} {case['dtype']:9s} {place:8s} {row['us']:9.2f} {row['floor_us']:9.2f} "
        f"{peers['copy']:9.2f} {copy:7.3f}{others} {row['error']:9.2e}"
    )


HEADER = "     n   elements dtype     place           us     floor      copy  of copy   package     error\n" + "-" * 96


def main(out: Path) -> None:
    compile_plans()
    copies: dict[int, float] = {}
    gbps = copy_gbps()
    rows = []
    print(HEADER)
    for case in cases():
        row = run_case(*case, copies)
        row["floor_us"] /= gbps * 1e3
        print(line(row), flush=True)
        rows.append(row)
    # Products come last: behind one the power limit has the clock at 1350 to 1450 MHz instead of 1750, and a transform
    # near its issue limit took a fifth longer (17408: 53 us for 43), while the copy beside it was timed at full clock.
    for row in rows:
        n, elements, name, inplace = row["case"].values()
        if n & (n - 1) and not inplace:
            row["peers_us"]["dense_gemm"] = dense_us(n, elements, getattr(torch, name))
            print(f"{n:6d} {elements:10d} {name:9s} dense product {row['peers_us']['dense_gemm']:10.1f} us", flush=True)
    write_results("bench_hadamard", gbps, rows, out)


def compile_plans() -> None:
    """All kernels of the table at once; compiled one by one at first use they would take longer than the table."""
    from concurrent.futures import ThreadPoolExecutor

    from quantrot.kernels.hadamard.hopper import plan_for
    from quantrot.kernels.nvrtc import compile_cubin

    def one(case: tuple) -> None:
        n, dtype, stream, small = case
        if plan := plan_for(n, dtype, small):
            compile_cubin((plan if stream else replace(plan, stream=False)).source(n, dtype, False))

    sizes = [(True, False), (False, False), (False, True)]  # stays in L2, small
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, sorted({(n, d, *size) for n, _, d, _ in cases() for size in sizes}, key=str)))


# --- Tuning ----------------------------------------------------------------------------------------------------------


def candidates(n: int, dtype: torch.dtype) -> list:
    """Plans worth timing for this order; the compiler or the multiprocessor may still refuse some."""
    from quantrot.kernels.hadamard.hopper import Plan, dense_shape
    from quantrot.kernels.nvrtc import MAX_SHARED, SM_SHARED

    found = []
    base, small, power = (1, (), n) if n & (n - 1) == 0 else dense_shape(n)
    # Cutting costs float16 4.5e-4; of a short row, results near zero are off by more than their own rounding.
    fewer_bits = {torch.bfloat16: ("CUT",), torch.float16: ("PAIR",)}.get(dtype, ())
    precisions = ("SPLIT", *fewer_bits) if n >= 2048 else ("SPLIT",)
    if n == power and dtype == torch.float32:
        for vectors in (2, 4, 8, 16):
            for warps in (2, 4, 8, 16):
                share = n // (128 * vectors)
                if share <= 1 and vectors <= 8:
                    found += [Plan("lanes", warps, r // warps, vectors) for r in (16, 24) if warps <= 4]
                elif share == warps and 4 * vectors // warps in (4, 8):
                    found += [Plan("lanes", warps, r, vectors, share=share) for r in (1, 2, 3, 4, 6)]
    elif n == power:
        if n <= 16:
            found += [Plan("lanes", w, 28 // w, v) for w in (4, 8) for v in (1, 2)]
        elif n <= 128:
            found += [Plan("turn", w, 28 // w, v) for w in (2, 4, 8) for v in (1, 2)]
        elif n <= 2048:
            for w, v, r in ((4, 2, 28), (2, 2, 28), (2, 4, 20), (1, 4, 20), (4, 4, 20), (1, 8, 20), (2, 8, 20)):
                found += [Plan("warp", w, r // w, v, precision=p) for p in precisions if v * 256 >= n]
        if n >= 2048:
            for v, w in ((2, 4), (2, 8), (4, 4), (4, 8), (4, 16), (8, 8), (8, 16)):
                if 256 * v * w == n:
                    shapes = [(0, r) for r in (1, 2, 3, 4, 6, 7)] + ([(1, 1), (1, 2)] if n >= 16384 else [])
                    found += [Plan("share", w, r, v, stages=s, precision=p) for s, r in shapes for p in precisions]
    elif dtype != torch.float32:
        if base <= 32 and not small:
            for tiles in (4, 8, 16):
                warps = power // 8 // tiles
                for part in (2, 4, 8):
                    if 1 <= warps <= 16 and (part < 8 or warps <= 8):
                        rs, stages = (1, 2, 3, 4, 5, 6, 7, 8), (1, 2)
                        found += [Plan("block", warps, r, tiles=tiles, part=part, stages=s) for r in rs for s in stages]
        elif power <= 256:
            steps, groups = -(-base // 16), n // base // 8
            for tall in range(1, 6):
                for wide in (2, 4, 6, 8):
                    sums = tall * wide * 4
                    if groups % wide or steps % tall or sums > 96:
                        continue
                    tasks = groups // wide * (steps // tall)
                    for warps in {tasks, -(-tasks // 2)} - set(range(33, 999)):
                        registers = sums * -(-tasks // warps) + 48
                        r = min(8, 65536 // (warps * 32 * min(registers, 255)))
                        found += [Plan("dense", warps, r, tiles=tall, part=wide)] if registers < 255 else []
                    warps = min(16, tasks)
                    r = min(4, 65536 // (warps * 32 * (sums + 48)))
                    found.append(Plan("dense", warps, r, tiles=tall, part=wide, stages=1))
    if dtype != torch.float32 and not small:
        found += [replace(p, precision=c) for p in held_candidates(n, base) for c in precisions]
    if dtype != torch.float32 and n >= 1024 and not small:
        for columns in (64, 128, 256):
            if n % columns == 0 and n // columns % base == 0 and n // columns % 2 == 0 and 8 <= n // columns <= 256:
                found += flow_candidates(n, columns)
    fits = []
    for plan in found:
        shared = plan.shared_bytes(n)
        if plan.kind == "dense":
            plan = replace(plan, resident=min(plan.resident, SM_SHARED // (shared + 1024)))
        threads = plan.resident * plan.warps * 32
        if plan.kind in ("share", "block") and not (384 <= threads <= 1024 or plan.resident == 1):
            continue  # more leave too few registers, fewer too few bytes in flight
        if plan.resident and threads <= 2048 and shared <= MAX_SHARED and plan.resident * (shared + 1024) <= SM_SHARED:
            fits.append(plan)
    return fits


def flow_candidates(n: int, columns: int) -> list:
    from quantrot.kernels.hadamard.hopper import Plan
    from quantrot.kernels.nvrtc import MAX_SHARED

    found, tiles = [], -(-n // columns // 64)
    for groups in (2, 3):
        for cluster in (1, 2):
            share, rest = divmod(min(tiles, groups * cluster), cluster)
            if rest or groups % share or (cluster > 1 and (tiles % (share * cluster) or columns // 64 % cluster)):
                continue
            plan = Plan("flow", 4 * groups + 4, 1, tiles=columns // 8, cluster=cluster)
            room = MAX_SHARED - plan.shared_bytes(n)
            most = room // (replace(plan, stages=1).shared_bytes(n) - plan.shared_bytes(n))
            for stages in (2, 3, 4, 6, 9, 12):
                if stages % (groups // share) == 0 and stages <= most:
                    ways = [replace(plan, stages=stages)]
                    if tiles % share == 0:
                        ways.append(replace(plan, stages=stages, paced=True))
                    if share * cluster == tiles and -(-n // columns // 16) % 4:  # warps without rows
                        ways += [replace(way, shift=True) for way in ways]
                    found += ways
    return found


def held_candidates(n: int, base: int) -> list:
    from quantrot.kernels.hadamard.hopper import Plan

    found = []
    for columns in (16, 64, 128, 256, 512, 1024):
        tall, rest = divmod(n, columns)
        if rest or tall % base or tall % 4 or not 16 < tall <= 112:
            continue
        for warps in (1, 2) if columns <= 64 else (columns // 64,):
            most = 65536 // (32 * warps * (-(-tall // 16) * 16 + 64))  # the row, and what else a thread holds
            found += [Plan("held", warps, r, tiles=columns // 8) for r in range(max(1, most * 2 // 3), most + 1)]
    return found


def small_candidates(n: int, dtype: torch.dtype) -> list:
    """Plans worth timing where the tensor is small: more and smaller blocks."""
    from quantrot.kernels.hadamard.hopper import Plan

    if n > 2048 or n & (n - 1) or dtype == torch.float32:
        return candidates(n, dtype)
    if n <= 128:
        return candidates(n, dtype) + [Plan("turn", w, 28 // w) for w in (1, 2, 4)] * (n >= 32)
    return candidates(n, dtype) + [Plan("warp", w, 20 // w, v) for w in (1, 2, 4) for v in (1, 2, 4) if v * 256 >= n]


def code_candidates(n: int, dtype: torch.dtype) -> list:
    """Plans that can quantize what they turn: groups of 128 columns in a warp."""
    from quantrot.kernels.hadamard.codes import twice_plans
    from quantrot.kernels.hadamard.hopper import Plan

    found = twice_plans(n) or [p for p in candidates(n, dtype) if p.by_map and p.tiles >= 16]  # flow never wins
    if n <= 4096 and n & (n - 1) == 0:
        resident = {2: (8,), 4: (5, 6), 8: (3, 4), 16: (2,)}  # thread blocks, by the registers of so many vectors
        found += [
            Plan("stream", 4, blocks, vectors=vectors, stages=stages, overlap=True)
            for vectors, several in resident.items()
            for blocks in several
            if max(n // 256, 2) <= vectors <= max(n // 128, 4)
            for stages in (2, 3)
        ]
    return found


PROPOSE = {"PLANS": candidates, "SMALL_PLANS": small_candidates, "CODE_PLANS": code_candidates}


def tune(orders: list[int], table: str) -> None:
    """Time the candidates of each order at 2^25 elements (small: 2^13), the best five also at 2^27 (2^17), and rewrite
    tuned.py. A small tensor's plan gives a row the bits that it has in a large one: tune those first.
    """
    from concurrent.futures import ThreadPoolExecutor

    from quantrot.kernels.hadamard import tuned
    from quantrot.kernels.hadamard.codes import plan_for_codes
    from quantrot.kernels.hadamard.hopper import plan_for

    tables = {name: dict(getattr(tuned, name)) for name in PROPOSE}
    chosen, rule = tables[table], "exact" if table == "CODE_PLANS" else None
    few, many = (1 << 13, 1 << 17) if table == "SMALL_PLANS" else (1 << 25, 1 << 27)
    notes = read_notes()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        for n in orders:
            if rule and ((n % 128 and n not in (32, 64)) or dtype != torch.bfloat16):  # float16 takes its plans
                continue
            proposed = PROPOSE[table](n, dtype)
            copied = chosen.get(("bfloat16", n)) if dtype == torch.float16 else None
            if copied and copied.precision == "SPLIT" and (n <= 1024 or n & (n - 1)):
                proposed = [copied]  # the same instructions, with the other type's name
            if table == "SMALL_PLANS" and (large := tables["PLANS"].get((name, n))):
                proposed = [p for p in proposed if p.arithmetic == large.arithmetic]
            with ThreadPoolExecutor(16) as pool:
                plans = [p for p in pool.map(lambda p, n=n, d=dtype: compiled(p, n, d, rule), proposed) if p]
            plans = accurate(plans, n, dtype, rule)
            if not plans:
                continue
            first = fractions(plans, n, few, dtype, rule)
            best = sorted(plans, key=first.__getitem__, reverse=True)[:5]
            late = [replace(p, overlap=True) for p in best if rule is None or p.by_map]
            asking = [p for p in late if p.kind == "held" or (p.kind == "share" and not p.stages) or p.share > 1]
            late += [replace(p, ahead=a) for p in asking for a in sorted({1, 2, 4, p.resident})]
            late += [replace(p, later=1) for p in asking if p.kind == "lanes" and p.vectors >= 8]
            first |= fractions(late, n, few, dtype, rule)
            best += late
            second = fractions(best, n, many, dtype, rule)
            plan = max(best, key=lambda p: first[p] * second[p])
            chosen[name, n] = plan
            notes[table, name, n] = f"{first[plan]:.2f}, {second[plan]:.2f}"
            print(name, n, len(plans), plan, notes[table, name, n], flush=True)
            small = tables["SMALL_PLANS"].get((name, n))
            if table == "PLANS" and small and small.arithmetic != plan.arithmetic:
                del tables["SMALL_PLANS"][name, n], tuned.SMALL_PLANS[name, n]
            write_tuned(tables, notes)
            getattr(tuned, table).update(chosen)  # what is timed after this, or tuned next, in the same process
    plan_for.cache_clear()
    plan_for_codes.cache_clear()


def compiled(plan, n: int, dtype: torch.dtype, rule: str | None):
    from quantrot.kernels.nvrtc import compile_cubin

    try:
        compile_cubin(plan.source(n, dtype, False, rule=rule))
    except Exception:  # a shape that the kernel's own assertions refuse
        return None
    return plan


def accurate(plans: list, n: int, dtype: torch.dtype, rule: str | None) -> list:
    """Those whose error is within the bar, on an odd number of rows and outputs that start as NaN."""
    from quantrot.kernels.hadamard.hopper import launch

    width = row_of(n, rule)
    x = torch.randn(max(257, (1 << 22) // width) | 1, width, device="cuda").to(dtype)
    exact = hadamard_reference(x.double(), None, n, n**-0.5)
    codes, scales = quantize_reference(exact.float(), (1, 128), "exact")
    found = []
    for plan in plans:
        y = torch.full_like(x, float("nan")) if rule is None else torch.full_like(codes, float("nan"))
        got = torch.full_like(scales, float("nan"))
        rows, out = x.view(-1, n), y.view(-1, n)
        launch(rows, out, None, n**-0.5, plan, scales=None if rule is None else got, rule=rule)
        if rule is None:
            right = ((y.double() - exact).norm() / exact.norm()).item() <= MAX_RELATIVE_ERROR[dtype]
        else:
            differ = (y.view(torch.uint8) != codes.view(torch.uint8)).float().mean().item()
            most, off = (0.08, 5e-3) if plan.kind == "twice" else (1e-3, 1e-5)  # which rounds to bfloat16 between
            right = differ < most and torch.allclose(got, scales, rtol=off, atol=0)
        if right:
            found.append(plan)
        else:
            print("refused for its error:", n, dtype, plan)
    return found


def row_of(n: int, rule: str | None) -> int:
    """Columns of the tensors on which order n is tuned: whole groups of codes."""
    return max(n, 128) if rule else n


def fractions(plans: list, n: int, elements: int, dtype: torch.dtype, rule: str | None) -> dict:
    """Of the speed of a copy, or of 3 bytes an element at that speed."""
    from quantrot.kernels.hadamard.hopper import launch

    width = row_of(n, rule)
    xs = tensors(width, elements, dtype)
    ys = [torch.empty_like(x, dtype=torch.float8_e4m3fn if rule else None) for x in xs]
    scales = [torch.empty(width // 128, x.shape[0], device="cuda").T if rule else None for x in xs]
    copy = copy_us(xs) * (0.75 if rule else 1)

    def us(plan):
        calls = [
            lambda x=x, y=y, s=s: launch(x.view(-1, n), y.view(-1, n), None, n**-0.5, plan, scales=s, rule=rule)
            for x, y, s in zip(xs, ys, scales, strict=True)
        ]
        return time_us(calls, 3)

    return {plan: copy / us(plan) for plan in plans}


def read_notes() -> dict:
    """(table, dtype, order) -> the comment in tuned.py."""
    notes, table = {}, ""
    for line in TUNED.read_text().splitlines():
        if head := re.match(r"(\w*PLANS)", line):
            table = head[1]
        elif plan := re.search(r'\("(\w+)", (\d+)\): .*?  # (.*)', line):
            notes[table, plan[1], int(plan[2])] = plan[3]
    return notes


def write_tuned(tables: dict[str, dict], notes: dict) -> None:
    text = TUNED.read_text().partition("PLANS: ")[0]
    for table, chosen in tables.items():
        lines = ""
        for (name, n), plan in sorted(chosen.items()):
            plain = type(plan)(plan.kind, plan.warps, plan.resident)
            extra = "".join(
                f", {field}={value!r}".replace("'", '"')
                for field, value in vars(plan).items()
                if value != getattr(plain, field)
            )
            note = notes.get((table, name, n), "")
            lines += f'    ("{name}", {n}): Plan("{plan.kind}", {plan.warps}, {plan.resident}{extra}),'
            lines += f"  # {note}\n" if note else "\n"
        text += f"{table}: dict[tuple[str, int], Plan] = " + (f"{{\n{lines}}}\n\n" if lines else "{}\n\n")
    TUNED.write_text(text.rstrip("\n") + "\n")


def note(path: Path) -> None:
    """The fractions of a results file into tuned.py's comments."""
    from quantrot.kernels.hadamard import tuned

    rows = {tuple(r["case"].values()): r for r in json.loads(path.read_text())["rows"]}
    notes = read_notes()
    for table, sizes in (("PLANS", (25, 27)), ("SMALL_PLANS", (13, 17))):
        for name, n in getattr(tuned, table):
            found = [rows[case] for bits in sizes if (case := (n, 1 << bits, name, False)) in rows]
            if found:  # else as --tune left it
                notes[table, name, n] = ", ".join(f"{r['peers_us']['copy'] / r['us']:.2f}" for r in found)
    write_tuned({table: dict(getattr(tuned, table)) for table in PROPOSE}, notes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", nargs="*", type=int, help="orders to tune (none: all)")
    parser.add_argument("--table", choices=PROPOSE, default="PLANS", help="of tuned.py, for --tune")
    parser.add_argument("--note", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.note:
        note(asked.out or ROOT / "benchmarks" / "results" / "bench_hadamard-h200.json")
    else:
        if asked.tune is not None:
            tune(asked.tune or [*SMALL, *POWERS, *([] if asked.table == "SMALL_PLANS" else BASES)], asked.table)
        main(asked.out)
