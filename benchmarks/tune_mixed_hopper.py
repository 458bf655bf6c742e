"""Every plan of the Hopper mixed product beside cuBLAS: what kernels/mixed/tuned.py and the rules should choose.

    python benchmarks/tune_mixed_hopper.py [few] [many] [paper] [layer] [--top N] [--rows M ...] [--shapes NxK ...]
        [--rule] [--compile-only]

Every plan is timed by itself; the fastest --top ones and the rule's then in turn with cuBLAS on the wide type, so that
all meet the same clocks. A line a plan of those, fastest first: us, times cuBLAS (the median of the rounds' ratios),
fraction of the operands' reading time, relative error to float64, whether five runs gave the same bits. Then one line a
case: m n k group, the best plan's us, times cuBLAS, fraction of the reading time; the rule's; the second. --rule: no
other plans: the tables of docs/measured/mixed-input.md. layer: the four products of a layer of Llama 3.1 8B and the
gate, by 1, 8 and 16 tokens (or --rows), us a layer; also with norms and residuals, in kernels of their own and inside
the products' operations.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from bench_mixed import GROUP, PAPER, SHAPES, WIDE, Case, case, copies_of, cublas, operands, traffic
from chain import EPSILON, HIDDEN, INNER, chain, gate, int8_weight, layer_us, norm, normal, weights
from timing import Calls, copy_gbps, in_processes, race, ratio, time_us
from torch import Tensor
from torch.nn import functional as F

from quantrot.kernels import nvrtc
from quantrot.kernels.mixed import KINDS, hopper, hopper_plans, mixed_gemm, mixed_linear, mixed_ref
from quantrot.kernels.mixed.hopper_plans import Decode, Kernel, Plan

FEW, MANY = (1, 8, 16, 24, 32, 48, 64), (256, 512, 1024, 4096)
WIDTHS = (64, *range(96, 385, 16))  # columns of a tile


TEAMS = [(1, 1, 8), (1, 1, 16), (2, 1, 4), (2, 1, 8), (3, 1, 4), (3, 1, 8), (1, 2, 8), (4, 1, 4), (2, 2, 4), (7, 1, 2)]
TEAMS += [(7, 2, 2), (14, 1, 1)]
SPLIT_TEAMS = [(4, 1, 2), (4, 1, 4), (2, 2, 4), (8, 1, 2), (4, 2, 2), (8, 1, 1)]
REGISTERS = {0: 60, 1: 70, 2: 84, 3: 100, 4: 116, 5: 127, 6: 138, 7: 149, 8: 160}  # of a thread, about


def few_plans(rows: int, columns: int, depth: int, group: int) -> Iterator[Decode]:
    """Plans that fill the device and fit. Lean ones take half of shared memory, so that the next kernel's thread blocks
    come, and read, while these end."""
    eights = -(-columns // 8)
    for tokens, (row_warps, height, teams) in product((0, 1) if columns == 1 else (eights,), TEAMS):
        for resident, lean, keep in ((1, 0, 0), (1, 1, 0), (2, 1, 0), (1, 0, depth), (1, 1, depth), (2, 1, depth)):
            plan = Decode(tokens, row_warps, teams, height, keep=keep, resident=1 + lean)
            tiles, slots = -(-rows // plan.rows), hopper_plans.PROCESSORS * resident
            waves = -(-tiles // slots)
            registers = REGISTERS[tokens] * (1 + (height - 1) * 0.6) + (20 if group else 0)
            if (keep and waves == 1) or tiles < 0.85 * waves * slots:
                continue
            if plan.threads * registers * (1 + lean) > 65536 or registers > 250:
                continue
            plan = replace(plan.fitted(), resident=resident)
            flight = plan.stages * plan.rows * 128 * resident
            if plan.stages >= 2 * teams and flight >= (24 if tokens > 2 else 48) << 10:
                yield plan
    for row_warps, height, teams in SPLIT_TEAMS if columns > 1 else ():  # with K in two parts
        plan = replace(Decode(eights, row_warps, teams, height).fitted(), split=2)
        if 0.85 * hopper_plans.PROCESSORS <= 2 * -(-rows // plan.rows) <= hopper_plans.PROCESSORS:
            yield plan


def many_plans(rows: int, columns: int, depth: int, group: int, weight: bool) -> Iterator[Plan]:
    for width, groups in product(WIDTHS, (2, 3, 4)):
        down, across = -(-rows // (64 * groups)), -(-columns // width)
        if width > max(columns, 64) or width * groups > (768 if weight and groups == 2 else 512):
            continue
        if down * across < 50 * groups / 2:
            continue
        for share, halves in product((1, 2), (True,) if groups == 4 or width > 256 else (True, False)):
            if groups == 2 and (width < 192 or columns < 256) and columns > 64 and share == 1:
                continue
            yield Plan(width, share=share, groups=groups, odd=down % share > 0, halves=halves)
    if not weight:
        return
    for width, groups, teams, (split, apart) in product(WIDTHS, (1, 2, 3), (1, 2), ((1, 1), (2, 1), (2, 2))):
        plan = Plan(width, teams, split, groups=groups, apart=apart)
        if width > max(columns, 96) or groups * teams not in (2, 3, 4) or width * groups > (640 if teams == 1 else 256):
            continue
        processors = hopper_plans.PROCESSORS
        if width % (16 * split * teams) == 0 and 64 <= plan.grid(rows, columns, processors) <= processors:
            if not plan.splits(depth) or plan.own[0] > 256:
                continue
            yield plan
            if groups * teams < 4 and width <= 256:
                yield replace(plan, halves=False)
            elif width == 128:
                yield replace(plan, stages=3)
                if group != 1:
                    yield replace(plan, blocks=2)


def plans_of(c: Case, only_rule: bool = False) -> list[Plan | Decode]:
    weight = c["narrow_operand"] == "weight"
    rows, columns = (c["n"], c["m"]) if weight else (c["m"], c["n"])
    group = 0 if not c["group"] else 2 if c["group"] % 128 == 0 else 1
    rule = hopper_plans.plan_for(rows, columns, c["k"], group, weight)
    found: list[Plan | Decode] = [rule]
    if only_rule:
        return found
    if weight and columns <= 64:
        found += few_plans(rows, columns, c["k"], group)
    if columns > hopper_plans.FEW:
        many = many_plans(rows, columns, c["k"], group, weight)
        found += [plan for plan in many if plan.columns >= 224 or (c["m"], c["n"], c["k"]) != PAPER]
    return list(dict.fromkeys(found))


def kernel_of(c: Case) -> Kernel:
    group = 0 if not c["group"] else 2 if c["group"] % 128 == 0 else 1
    return Kernel(c["narrow"], WIDE[c["wide"]], c["narrow_operand"] == "weight", group, False, torch.bfloat16, None)


def compile_one(work: tuple[Plan | Decode, Kernel]) -> None:
    try:
        nvrtc.compile_cubin(hopper.device_functions() + hopper.entry(*work))
    except Exception as error:
        print("refused:", *work, f"{error!s:.300}", flush=True)


def launch(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, c: Case, plan: Plan | Decode, ready: bool = True
) -> torch.Tensor:
    x, weight = (t.view(torch.uint8) if t.dtype in KINDS else t for t in (x, weight))
    narrow_weight = c["narrow_operand"] == "weight"
    return hopper.multiply(x, weight, scale, None, None, c["narrow"], narrow_weight, plan, ready=ready)


def sweep(c: Case, gbps: float, top: int, only_rule: bool) -> str:
    """Time every plan of a case; its line of the summary."""
    sets = operands(c, copies_of(c))
    wide_x = c["narrow_operand"] == "weight"
    x, weight, scale = sets[0]
    if wide_x:
        exact = mixed_ref(x[-64:].double(), weight, scale)
    else:
        exact = mixed_ref(x[-64:], weight.double(), scale[-64:])

    def calls(plan: Plan | Decode, ready: bool = True) -> Calls:
        return [lambda s=s: launch(*s, c, plan, ready) for s in sets]

    plans, rule = plans_of(c, only_rule), plans_of(c, True)[0]
    right: dict[Plan | Decode, str] = {}
    alone: dict[Plan | Decode, float] = {}
    for plan in plans:
        try:
            y = launch(x, weight, scale, c, plan)
            error = ((y[-64:].double() - exact).norm() / exact.norm()).item()
            same = all(torch.equal(launch(x, weight, scale, c, plan), y) for _ in range(5))
            if error > 1.9e-3 or not same:
                print("WRONG:", c, f"{error:8.1e}", "same" if same else "RACE", short(plan), flush=True)
                continue
            right[plan] = f"{error:8.1e} same {short(plan)}"
            alone[plan] = 0.0 if len(plans) == 1 else time_us(calls(plan), 3)
        except Exception as error:
            print("failed:", c, plan, f"{error!s:.200}", flush=True)
            if "CUDA" in str(error):
                raise
    name = " ".join(map(str, [c["m"], c["n"], c["k"], c["group"]]))
    if (c["m"], c["n"], c["k"]) == PAPER:
        name += " " + " ".join(c[key][0] for key in ("narrow", "wide", "narrow_operand"))
    if not alone:
        return f"{name} nothing ran"
    fast = sorted(alone, key=alone.__getitem__)[:top]
    fast += [rule] if rule in alone and rule not in fast else []
    peers = {"cublas": cublas(c, copies_of(c)), "waits": calls(fast[0], False)}
    rounds = race({plan: calls(plan) for plan in fast} | peers)
    us = {key: statistics.median(times) for key, times in rounds.items()}
    floor = traffic(c) / gbps / 1e3

    def shares(plan: Plan | Decode) -> str:
        return f"{us[plan]:9.2f} us {ratio(rounds['cublas'], rounds[plan]):6.3f} x {floor / us[plan]:5.2f}"

    fast.sort(key=us.__getitem__)
    print(*c.values(), f"cuBLAS {us['cublas']:.2f}", flush=True)
    for plan in fast:
        print(shares(plan), right[plan], "rule" if plan == rule else "", flush=True)
    line = f"{name} {shares(fast[0])} {short(fast[0])}"
    line += f" | rule {shares(rule)}" if rule in us else ""
    line += f" | {short(fast[1])} {us[fast[1]]:.2f}" if len(fast) > 1 else ""
    return f"{line} | not ready {us['waits']:.2f}"


def short(plan: Plan | Decode) -> str:
    """A plan in a few letters."""
    if isinstance(plan, Decode):
        shape = f"r{plan.row_warps}h{plan.height}t{plan.teams} st{plan.stages} res{plan.resident}"
        return f"decode {plan.tokens} {shape}{' keep' * bool(plan.keep)}{' split' * (plan.split > 1)}"
    kind = (
        f"parts {plan.teams} x {plan.split} x {plan.apart}"
        if plan.teams
        else f"tiles share{plan.share}{' odd' * plan.odd}"
    )
    size = f"{plan.rows} x {plan.columns}, {plan.depth} stages of {64 * plan.blocks}"
    return f"{kind} {size}{' halves' * plan.halves}"


def layer(group: int, tokens: int) -> None:
    """A chain of layers, so that each kernel waits for what the one before it makes."""
    narrow, wide = weights(partial(int8_weight, group=group)), weights(lambda n, k: normal(n, k) * k**-0.5)

    def plain(v: Tensor, w: tuple) -> Tensor:
        return mixed_gemm(v, *w)

    def ready(v: Tensor, w: tuple, **rest: Any) -> Tensor:
        return mixed_linear(v, *w, weight_ready=True, **rest)

    x, ones = normal(tokens, HIDDEN), normal(HIDDEN).fill_(1)
    gated, inside = partial(ready, gates=True), partial(ready, norm=ones, epsilon=EPSILON)
    ways: dict[str, tuple[list, Callable, Callable, Callable]] = {  # weights, and the products as `chain` has them
        "bfloat16": (wide, F.linear, lambda v, w: gate(F.linear(v, w)), lambda v, w, _: F.linear(v, w)),
        "not ready": (narrow, plain, lambda v, w: gate(plain(v, w)), lambda v, w, _: plain(v, w)),
        "ready": (narrow, ready, lambda v, w: gate(ready(v, w)), lambda v, w, _: ready(v, w)),
        "gated": (narrow, ready, gated, lambda v, w, _: ready(v, w)),
        "no gate": (narrow, ready, lambda v, w: ready(v, w)[:, :INNER], lambda v, w, _: ready(v, w)),
        "norms apart": (
            narrow,
            lambda v, w: ready(norm(v, x, ones), w),
            lambda v, w: gated(norm(v, x, ones), w),
            lambda v, w, _: ready(v, w),
        ),
        "inside": (narrow, inside, partial(inside, gates=True), lambda v, w, residual: ready(v, w, residual=residual)),
    }
    times = [f"{name} {layer_us(partial(chain, way[0], x, *way[1:])):.2f}" for name, way in ways.items()]
    print("LAYER", group, tokens, *times, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["few", "many", "paper", "layer"])
    parser.add_argument("--top", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="*")
    parser.add_argument("--shapes", nargs="*", default=["x".join(map(str, shape)) for shape in SHAPES])
    parser.add_argument("--rule", action="store_true", help="no other plans")
    parser.add_argument("--compile-only", action="store_true", help="fill the cache of kernels")
    asked = parser.parse_args()
    cases: list[Case] = []
    if "paper" in asked.what:
        variants = product(("uint8", "int8"), ("float16", "bfloat16"), ("weight", "x"))
        cases += [case(*PAPER, kind, wide, operand) for kind, wide, operand in variants]
    for what, rows in (("few", FEW), ("many", MANY)):
        if what in asked.what:
            shapes = [tuple(map(int, shape.split("x"))) for shape in asked.shapes]
            some = [m for m in asked.rows if (m <= 64) == (what == "few")] if asked.rows else rows
            todo = product(some, shapes, (0, GROUP))
            cases += [case(m, n, k, "packed", "bfloat16", "weight", group) for m, (n, k), group in todo]
    work = list(dict.fromkeys((plan, kernel_of(c)) for c in cases for plan in plans_of(c, asked.rule)))
    print(len(work), "kernels", flush=True)
    in_processes(compile_one, work, 14)
    if asked.compile_only:
        return
    gbps = copy_gbps() if cases else 0.0
    for c in cases:
        print("BEST", sweep(c, gbps, asked.top, asked.rule), flush=True)
    for group, tokens in product((0, GROUP), asked.rows or (1, 8, 16)) if "layer" in asked.what else ():
        layer(group, tokens)


if __name__ == "__main__":
    main()
