"""Plans of the Hopper FP8 product beside cuBLAS: what the rules of kernels/fp8/hopper.py should choose.

    python benchmarks/tune_fp8_hopper.py [prefill] [decode] [--quick] [--out FILE]

FILE gets a line a plan and size: us, times cuBLAS with the same block scales, fraction of the weight's reading time,
relative error to float64, and whether the bits are those of the first plan with as many parts of K. Printed is a table
of the prefill plans (times cuBLAS, a column a size, then the geometric mean), and the best plans of every decode size.
Prefill goes twice over the sizes: first every plan, then changes of the best one in the mean.
"""

import argparse
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields, replace
from multiprocessing import get_context
from pathlib import Path
from typing import IO

import torch
from bench_fp8 import DECODE, PREFILL, WEIGHTS, operands, tensorwise
from timing import copy_gbps, time_us

from quantrot.kernels.fp8 import dequantize_fp8_block, fp8_block_gemm, hopper
from quantrot.kernels.fp8.hopper import Decode, Plan, Prefill
from quantrot.kernels.nvrtc import MAX_SHARED, SM_SHARED, compile_cubin

SCALES = "1x128 by 128x128"
Choice = tuple[Plan, int]  # and the parts of K
Size = tuple[int, int, int]  # M, N, K


def prefill_plans(quick: bool) -> list[Plan]:
    held = Prefill(wide=True, held=True)
    plans: list[Plan] = [
        replace(held, sets=2),
        held,
        replace(held, turns=2),
        replace(held, turns=3),
        Prefill(wide=True),
        Prefill(),
        Prefill(turns=0),
        Prefill(turns=3),
        Prefill(slabs=1, sets=2, stages=6),
        Prefill(groups=3, slabs=1),
    ]
    if not quick:
        plans += [Prefill(turns=2), Prefill(groups=3, slabs=1, turns=0), Prefill(groups=3, slabs=1, turns=3)]
        plans += [Prefill(slabs=1, stages=6), Prefill(groups=1, slabs=2, sets=2, wide=True, held=True)]
    return plans


def changed(best: Plan) -> list[Plan]:
    """Plans near the best one."""
    assert isinstance(best, Prefill)
    return [
        replace(best, overlap=True),
        replace(best, tile_group=4),
        replace(best, tile_group=16),
        replace(best, stages=best.stages - 1),
        replace(best, cluster=1),
    ]


def decode_plans(size: Size, quick: bool) -> Iterator[Choice]:
    """The rule's plan, launched in three ways, then every division of b's rows that fits."""
    m, n, k = size
    tokens = next(t for t in (8, 16, 32, 64) if t >= m)
    rule = hopper.plan_for(m, n, k, 1)
    assert isinstance(rule, Decode)
    yield from ((rule, 1), (replace(rule, overlap=True), 1), (replace(rule, overlap=True, early=True), 1))
    few = ((32, 64, 128), (1, 2, 4), (1, 2), (1, 2))
    for columns, share, resident, parts in itertools.product(
        *few if quick else ((16, *few[0]), few[1], (1, 2, 3), few[3])
    ):
        plan = Decode(tokens, columns=columns, share=share, resident=resident)
        blocks = plan.grid(m, n, parts)
        if share > 1 and (tokens < 32 or share > tokens // 8 or share * parts > 8):
            continue
        if not 60 <= blocks <= 1000 or (resident > 1 and blocks <= hopper.PROCESSORS):
            continue
        if columns == 128 and tokens == 64 and resident > 1:  # spills
            continue
        fixed = replace(plan, stages=0).shared_bytes(hopper.segment_of(k, parts))
        room = min(MAX_SHARED, SM_SHARED // resident - 1024) - fixed
        stages = min(room // plan.stage_bytes(), (192 << 10) // resident // (columns * 128))
        if stages >= 3 and tokens * (columns + 4) * 4 <= stages * (tokens + columns) * 128:
            yield replace(plan, stages=stages), parts


def source(choice: Choice) -> str:
    return hopper.device_functions() + hopper.entry(*choice, channel=False, out=torch.bfloat16, bias=0)


def compile_all(choices: Sequence[Choice]) -> None:
    """Into the cache on disk, side by side: by processes that never use the GPU."""
    sources = {source(choice) for choice in choices}
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_cubin, sources))


def name_of(choice: Choice) -> str:
    """Class and fields that differ from the defaults."""
    plan, parts = choice
    changes = [
        f"{f.name}={getattr(plan, f.name)}"
        for f in fields(plan)
        if f.name == "tokens" or getattr(plan, f.name) != f.default
    ]
    return f"{type(plan).__name__}({', '.join(changes)})" + (f" x{parts}" if parts > 1 else "")


def peer_us(call: Sequence) -> float:
    try:
        return time_us(call, replays=3)
    except (RuntimeError, ValueError):  # cuBLAS does not take every M
        return math.nan


@dataclass
class Bench:
    """A size's operands, and what was measured on them."""

    size: Size
    gbps: float
    us: dict[Choice, float] = field(default_factory=dict)
    refused: int = 0

    def __post_init__(self) -> None:
        m, n, k = self.size
        self.data, blocks, _ = operands(m, n, k, SCALES)
        one = torch.ones((), device="cuda")
        self.floor = n * k / self.gbps / 1e3
        self.cublas = peer_us([lambda d=d: fp8_block_gemm(*d, **blocks, backend="cublas") for d in self.data])
        self.wide = peer_us([lambda d=d: tensorwise(d, one) for d in self.data])
        left, right = (
            dequantize_fp8_block(*pair, block, torch.float32)[:256].double()
            for pair, block in ((self.data[0][:2], (1, 128)), (self.data[0][2:], (128, 128)))
        )
        self.exact = left @ right.T
        self.first: dict[int, torch.Tensor] = {}

    def measure(self, choices: Sequence[Choice], log: IO[str]) -> None:
        m, n, k = self.size
        print(f"\n{m} x {n} x {k}: cuBLAS block {self.cublas:.1f} us, tensorwise {self.wide:.1f} us", file=log)
        lines = []
        for choice in choices:
            plan, parts = choice

            def run(d: tuple, plan: Plan = plan, parts: int = parts) -> torch.Tensor:
                return hopper.gemm(*d, (1, 128), (128, 128), torch.bfloat16, plan=plan, parts=parts)

            try:
                y = run(self.data[0])
                us = time_us([lambda d=d, run=run: run(d) for d in self.data], replays=3)
            except RuntimeError as error:
                lines.append((math.inf, f"refused: {name_of(choice)}: {str(error)[:100]}"))
                self.refused += 1
                continue
            self.us[choice] = us
            same = torch.equal(self.first.setdefault(parts, y), y)
            error = ((y[:256, :256].double() - self.exact).norm() / self.exact.norm()).item()
            text = f"{us:8.2f} us  {self.cublas / us:5.2f} x  {self.wide / us:5.2f} x  {self.floor / us:5.2f}"
            lines.append((us, f"{text}  {error:.1e}  {same}  {name_of(choice)}"))
            if not same or not error < 2e-3:
                print(f"WRONG at {self.size}: error {error:.1e}, same bits {same}: {name_of(choice)}", flush=True)
        print("\n".join(text for _, text in sorted(lines)), file=log, flush=True)


def mean(values: Sequence[float]) -> float:
    values = [v for v in values if not math.isnan(v)]
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def prefill(quick: bool, gbps: float, log: IO[str]) -> None:
    sizes = [(m, n, k) for n, k in WEIGHTS for m in PREFILL]
    plans: list[Choice] = [(plan, 1) for plan in prefill_plans(quick)]
    benches: list[Bench] = []

    def over_sizes(choices: Sequence[Choice]) -> None:
        for i, size in enumerate(sizes):
            if i == len(benches):
                benches.append(Bench(size, gbps))
            else:
                benches[i].data = operands(*size, SCALES)[0]  # not kept: they fill the memory together
            benches[i].first.clear()
            benches[i].measure(choices, log)
            benches[i].data = []
            torch.cuda.empty_cache()

    def score(choice: Choice) -> float:
        return mean([b.cublas / b.us[choice] if choice in b.us else 0.1 for b in benches])

    over_sizes(plans)
    best = max(plans, key=score)
    second: list[Choice] = [(plan, 1) for plan in changed(best[0])]
    over_sizes([best, *second])  # timed again, beside its neighbours
    print("times cuBLAS block; columns: " + "  ".join(f"{m}x{n}x{k}" for m, n, k in sizes))
    for choice in plans + second:
        row = [f"{b.cublas / b.us[choice]:5.2f}" if choice in b.us else "   - " for b in benches]
        print(" ".join(row), f" {score(choice):5.3f}  {name_of(choice)}")
    print(" ".join(f"{b.cublas / b.wide:5.2f}" for b in benches), "       cuBLAS tensorwise")
    print(" ".join(f"{2 * math.prod(b.size) / b.cublas / 1e6:5.0f}" for b in benches), "       cuBLAS block, TFLOP/s")


def decode(quick: bool, gbps: float, log: IO[str]) -> None:
    print("decode: M x N x K: us, times cuBLAS block, of the weight's reading time; the rule's plan, then the best")
    for (n, k), m in itertools.product(WEIGHTS, DECODE):
        size = (m, n, k)
        bench = Bench(size, gbps)
        choices = list(dict.fromkeys(decode_plans(size, quick)))
        bench.measure(choices, log)
        plain = [c for c in bench.us if not c[0].overlap]
        shown = [*choices[:3], *sorted(plain, key=bench.us.__getitem__)[:2]]
        found = [
            f"{bench.us[c]:.1f} {bench.cublas / bench.us[c]:.2f} {bench.floor / bench.us[c]:.2f}"
            for c in shown
            if c in bench.us
        ]
        names = [name_of(c) for c in (choices[0], *shown[3:])]
        print(f"{m}x{n}x{k}: " + " | ".join(found) + " | " + "; ".join(names), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["prefill", "decode"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(os.devnull))
    asked = parser.parse_args()
    needed: list[Choice] = []
    if "prefill" in asked.what:
        for tile in prefill_plans(asked.quick):
            needed += [(tile, 1), *((plan, 1) for plan in changed(tile))]
    if "decode" in asked.what:
        for (n, k), m in itertools.product(WEIGHTS, DECODE):
            needed += decode_plans((m, n, k), asked.quick)
    compile_all(needed)
    speed = copy_gbps()
    with asked.out.open("a") as lines:
        if "prefill" in asked.what:
            prefill(asked.quick, speed, lines)
        if "decode" in asked.what:
            decode(asked.quick, speed, lines)
