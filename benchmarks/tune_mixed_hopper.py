"""Every plan of the Hopper mixed product beside cuBLAS: what kernels/mixed/tuned.py and the rules should choose.

    python benchmarks/tune_mixed_hopper.py [few] [many] [paper] [--top N] [--rows M ...]

A line a plan, fastest first: us, times cuBLAS on the wide type, fraction of the operands' reading time, relative error
to float64, whether five runs gave the same bits.
"""

import argparse
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product

import torch
from bench_mixed import GROUP, PAPER, SHAPES, WIDE, Case, case, copies_of, cublas_us, operands, traffic
from timing import copy_gbps, time_us

from quantrot.kernels import nvrtc
from quantrot.kernels.mixed import KINDS, hopper, mixed_ref
from quantrot.kernels.mixed.hopper import WIDTHS, Kernel, Plan

FEW, MANY = (1, 8, 16, 64), (256, 1024, 4096)


def few_plans(rows: int, columns: int, depth: int, group: int) -> Iterator[Plan]:
    """Plans of one tile a thread block that fill the device; those that are known to spill are left out."""
    width = next(w for w in WIDTHS if w >= columns)
    for groups, resident, split, share in product((1, 2, 4), (1, 2, 3, 4), (1, 2, 4, 8), (1, 2)):
        if share > 1 and (width // share % 8 or columns < 16):
            continue
        plan = Plan(width, few=True, split=split, share=share, groups=groups, resident=resident, sets=2, warm=True)
        units = plan.grid(rows, columns, 0)
        warps = groups * resident
        if warps > (6 if width <= 16 else 4) or (group and warps > (4 if width <= 8 else 2 if width >= 32 else 3)):
            continue
        if not plan.splits(depth) or not 100 * resident <= units <= (528 if resident > 2 else 300):
            continue
        if resident > 1 and units <= 132 * (resident - 1):
            continue
        if plan.depth >= 4 and width * (plan.rows + 4) * 4 <= plan.depth * (plan.rows * 64 + width * 128):
            yield plan


def many_plans(rows: int, columns: int, depth: int, group: int, weight: bool) -> Iterator[Plan]:
    least = 64 if columns <= 256 or group else 128
    widths = [w for w in WIDTHS if w >= least and (not group or w <= hopper.MOST_GROUPED)]
    for width in widths:
        tiles = -(-rows // 128) * -(-columns // width)
        sets = (1, 2) if group and width <= 96 else (1,)
        if width > columns:
            continue
        for share, kept in product((1, 2), sets):
            if tiles >= 100 and (columns >= 1024 or width <= 2 * columns):
                yield Plan(width, share=share, sets=kept)
        for split, share in product((1, 2, 4) if weight else (), (1, 2, 4)):
            plan = Plan(width, few=True, split=split, share=share, sets=2 if width <= 96 else 1)
            fits = plan.depth >= 3 and width * 132 * 4 <= plan.depth * (128 * 64 + width * 128)
            if plan.splits(depth) and fits and split * share <= 4 and 90 <= tiles * split <= 200:
                yield plan


def plans_of(c: Case) -> list[Plan]:
    weight = c["narrow_operand"] == "weight"
    rows, columns = (c["n"], c["m"]) if weight else (c["m"], c["n"])
    few = weight and columns <= hopper.FEW
    group = 0 if not c["group"] else 2 if c["group"] % 128 == 0 else 1
    rule = hopper.plan_for(rows, columns, c["k"], group, weight)
    launches = [replace(rule, overlap=False), replace(rule, warm=not rule.warm)] if columns == 1 else []
    found = few_plans(rows, columns, c["k"], group) if few else many_plans(rows, columns, c["k"], group, weight)
    return list(dict.fromkeys([rule, *launches, *found]))


def kernel_of(c: Case) -> Kernel:
    group = 0 if not c["group"] else 2 if c["group"] % 128 == 0 else 1
    return Kernel(c["narrow"], WIDE[c["wide"]], c["narrow_operand"] == "weight", group, False, torch.bfloat16, None)


def compile_one(work: tuple[Plan, Kernel]) -> None:
    try:
        nvrtc.compile_cubin(hopper.device_functions() + hopper.entry(*work))
    except Exception as error:
        print("refused:", *work, f"{error!s:.300}", flush=True)


def launch(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, c: Case, plan: Plan) -> torch.Tensor:
    x, weight = (t.view(torch.uint8) if t.dtype in KINDS else t for t in (x, weight))
    return hopper.multiply(x, weight, scale, None, None, c["narrow"], c["narrow_operand"] == "weight", plan)


def sweep(c: Case, gbps: float, top: int) -> Plan | None:
    sets = operands(c, copies_of(c))
    wide_x = c["narrow_operand"] == "weight"
    x, weight, scale = sets[0]
    if wide_x:
        exact = mixed_ref(x[-64:].double(), weight, scale)
    else:
        exact = mixed_ref(x[-64:], weight.double(), scale[-64:])
    cublas, floor = cublas_us(c, copies_of(c)), traffic(c) / gbps / 1e3
    lines: list[tuple[float, str, Plan]] = []
    for plan in plans_of(c):
        try:
            y = launch(x, weight, scale, c, plan)
            error = ((y[-64:].double() - exact).norm() / exact.norm()).item()
            same = all(torch.equal(launch(x, weight, scale, c, plan), y) for _ in range(5))
            us = time_us([lambda s=s, p=plan: launch(*s, c, p) for s in sets], 3)
        except Exception as error:
            print("failed:", c, plan, f"{error!s:.200}", flush=True)
            if "CUDA" in str(error):
                raise
            continue
        bits = "same" if same else "RACE"
        text = f"{us:9.2f} us {cublas / us:6.3f} x {floor / us:5.2f} {error:8.1e} {bits} {short(plan)}"
        if error > 1.9e-3 or not same:
            print("WRONG:", c, text, flush=True)
        else:
            lines.append((us, text, plan))
    lines.sort(key=lambda line: line[0])
    print(*c.values(), f"cuBLAS {cublas:.2f}", flush=True)
    for i, (_, text, plan) in enumerate(lines):
        if i < top or plan == plans_of(c)[0]:
            print(text, "rule" if plan == plans_of(c)[0] else "", flush=True)
    return lines[0][2] if lines else None


def short(plan: Plan) -> str:
    kind = "few" if plan.few else "many"
    return (
        f"{kind} {plan.columns} split={plan.split} share={plan.share} groups={plan.groups} sets={plan.sets} "
        f"resident={plan.resident} stages={plan.depth}{' warm' * plan.warm}{' alone' * (not plan.overlap)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["few", "many", "paper"])
    parser.add_argument("--top", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="*")
    asked = parser.parse_args()
    cases: list[Case] = []
    if "paper" in asked.what:
        variants = product(("uint8", "int8"), ("float16", "bfloat16"), ("weight", "x"))
        cases += [case(*PAPER, kind, wide, operand) for kind, wide, operand in variants]
    for what, rows in (("few", FEW), ("many", MANY)):
        if what in asked.what:
            todo = product(SHAPES, asked.rows or rows, (0, GROUP))
            cases += [case(m, n, k, "packed", "bfloat16", "weight", group) for (n, k), m, group in todo]
    work = list(dict.fromkeys((plan, kernel_of(c)) for c in cases for plan in plans_of(c)))
    print(len(work), "kernels", flush=True)
    with ProcessPoolExecutor(14, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, work, chunksize=4))
    gbps = copy_gbps()
    for c in cases:
        sweep(c, gbps, asked.top)


if __name__ == "__main__":
    main()
