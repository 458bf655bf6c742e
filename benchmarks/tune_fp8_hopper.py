"""Plans of the Hopper FP8 product beside cuBLAS: what the rules of kernels/fp8/hopper.py should choose.

    python benchmarks/tune_fp8_hopper.py [prefill] [decode] [--quick] [--out FILE]

FILE gets a line a plan and size: us, times cuBLAS with the same block scales and with one a tensor, fraction of the
weight's reading time. Every plan's result is compared with float64 and with the bits of the first. Printed is a table
of the prefill plans (times cuBLAS, a column a size, then the geometric mean), and of the decode sizes. Prefill goes
twice over the sizes: first every plan, then changes of the best one in the mean.
"""

import argparse
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import IO, Any

import torch
from bench_fp8 import DECODE, PREFILL, WEIGHTS, operands, tensorwise
from timing import copy_gbps, give_back, in_processes, race_us, time_us

from quantrot.kernels.fp8 import dequantize_fp8_block, fp8_block_gemm, hopper
from quantrot.kernels.fp8.hopper import Decode, Plan, Prefill
from quantrot.kernels.nvrtc import MAX_SHARED, SM_SHARED, compile_cubin

SCALES = "1x128 by 128x128"
Choice = tuple[Plan, int]  # and the parts of K
Size = tuple[int, int, int]  # M, N, K


def prefill_plans(quick: bool) -> list[Plan]:
    wide, square = hopper.WIDE, hopper.SQUARE
    plans: list[Plan] = [wide, square, replace(wide, lag=0), replace(wide, lag=3)]
    if not quick:
        plans += [replace(wide, lag=2), replace(square, sets=1), replace(square, cluster=1)]
    return plans


def changed(best: Plan) -> list[Plan]:
    """Plans near the best one."""
    assert isinstance(best, Prefill)
    return [
        replace(best, overlap=False),
        replace(best, tile_group=4),
        replace(best, tile_group=16),
        replace(best, stages=best.stages - 1),
    ]


def decode_plans(size: Size, quick: bool) -> Iterator[Choice]:
    """The rule's plan, not overlapped, and of a settled b, without pairs, not late; then divisions of b's rows that fit
    (not quick: all)."""
    m, n, k = size
    tokens = next(t for t in (8, 16, 32, 64) if t >= m)
    rule = hopper.plan_for(m, n, k, 1)
    assert isinstance(rule, Decode)
    settled = hopper.plan_for(m, n, k, 1, settled=True)
    assert isinstance(settled, Decode)
    yield from ((rule, 1), (replace(rule, overlap=False), 1), (settled, 1))
    yield from ((replace(settled, pairs=False), 1), (replace(settled, late=False), 1))
    sides = (False, True) if tokens >= 32 else (False,)
    for columns, resident, parts, turned in itertools.product((16, 32, 64, 128), (1, 2, 3), (1, 2), sides):
        if quick and (columns == 16 or resident > 2 or parts > 1):
            continue
        plan = Decode(tokens, columns=columns, resident=resident, turned=turned)
        blocks = plan.grid(m, n, parts)
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
    in_processes(compile_cubin, sources, os.cpu_count() or 1)


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
    us: dict[Any, float] = field(default_factory=dict)  # a call, by plan

    def __post_init__(self) -> None:
        m, n, k = self.size
        self.data, _, _ = operands(m, n, k, SCALES)
        self.floor = n * k / self.gbps / 1e3
        left, right = (
            dequantize_fp8_block(*pair, block, torch.float32)[:256].double()
            for pair, block in ((self.data[0][:2], (1, 128)), (self.data[0][2:], (128, 128)))
        )
        self.exact = left @ right.T
        self.first: dict[int, torch.Tensor] = {}

    def calls(self, choice: Choice) -> list[Callable[[], torch.Tensor]]:
        plan, parts = choice
        keywords = {"plan": plan, "parts": parts}
        return [lambda d=d: hopper.gemm(*d, (1, 128), (128, 128), torch.bfloat16, **keywords) for d in self.data]

    def right(self, choice: Choice) -> bool:
        """Whether the plan runs; says so where its result is wrong."""
        try:
            y = self.calls(choice)[0]()
        except RuntimeError as error:
            print(f"refused at {self.size}: {name_of(choice)}: {str(error)[:100]}")
            return False
        same = torch.equal(self.first.setdefault(choice[1], y), y)
        error = ((y[:256, :256].double() - self.exact).norm() / self.exact.norm()).item()
        if not same or not error < 2e-3:
            print(f"WRONG at {self.size}: error {error:.1e}, same bits {same}: {name_of(choice)}", flush=True)
        return True

    def race(self, choices: Sequence[Choice]) -> None:
        """Beside cuBLAS, all at the same clocks."""
        one = torch.ones((), device="cuda")
        blocks = {"a_block": (1, 128), "b_block": (128, 128)}
        calls: dict[Any, list] = {choice: self.calls(choice) for choice in choices if self.right(choice)}
        calls["cublas"] = [lambda d=d: fp8_block_gemm(*d, **blocks, backend="cublas") for d in self.data]
        calls["tensorwise"] = [lambda d=d: tensorwise(d, one) for d in self.data]
        us = race_us(calls)
        self.cublas, self.wide = us.pop("cublas"), us.pop("tensorwise")
        self.us = us

    def measure(self, choices: Sequence[Choice]) -> None:
        """Each by itself, and cuBLAS."""
        one = torch.ones((), device="cuda")
        blocks = {"a_block": (1, 128), "b_block": (128, 128)}
        self.cublas = peer_us([lambda d=d: fp8_block_gemm(*d, **blocks, backend="cublas") for d in self.data])
        self.wide = peer_us([lambda d=d: tensorwise(d, one) for d in self.data])
        self.us = {c: time_us(self.calls(c), replays=3) for c in choices if self.right(c)}

    def write(self, log: IO[str]) -> None:
        print(
            "\n{} x {} x {}: cuBLAS block {:.1f} us, tensorwise {:.1f}".format(*self.size, self.cublas, self.wide),
            file=log,
        )
        for choice, us in sorted(self.us.items(), key=lambda item: item[1]):
            shares = f"{self.cublas / us:5.2f} x  {self.wide / us:5.2f} x  {self.floor / us:5.2f}"
            print(f"{us:8.2f} us  {shares}  {name_of(choice)}", file=log, flush=True)


def mean(values: Sequence[float]) -> float:
    values = [v for v in values if not math.isnan(v)]
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def table(benches: list[Bench], choices: Sequence[Choice]) -> Choice:
    """Prints times cuBLAS of every plan and size, and the best of each size; the best plan in the mean is returned."""
    print("times cuBLAS block; columns: " + "  ".join("{}x{}x{}".format(*b.size) for b in benches))

    def score(choice: Choice) -> float:
        return mean([b.cublas / b.us[choice] if choice in b.us else 0.1 for b in benches])

    for choice in choices:
        row = [f"{b.cublas / b.us[choice]:5.3f}" if choice in b.us else "  -  " for b in benches]
        print(" ".join(row), f" {score(choice):5.3f}  {name_of(choice)}")
    tops = [b.cublas / min(b.us.values()) for b in benches]
    print(" ".join(f"{t:5.3f}" for t in tops), f" {mean(tops):5.3f}  the best of each")
    print(" ".join(f"{b.cublas / b.wide:5.3f}" for b in benches), "        cuBLAS tensorwise")
    print(" ".join(f"{2 * math.prod(b.size) / b.cublas / 1e6:5.0f}" for b in benches), "        cuBLAS block, TFLOP/s")
    return max(choices, key=score)


def prefill(quick: bool, gbps: float, log: IO[str]) -> None:
    choices: list[Choice] = [(plan, 1) for plan in prefill_plans(quick)]
    for _ in range(2):  # then changes of the best one
        benches = []
        for (n, k), m in itertools.product(WEIGHTS, PREFILL):
            bench = Bench((m, n, k), gbps)
            bench.race(choices)
            bench.write(log)
            bench.data, bench.first = [], {}  # not kept: they fill the memory together
            benches.append(bench)
            give_back()
        best = table(benches, choices)
        choices = [best, *((plan, 1) for plan in changed(best[0]))]


def decode(quick: bool, gbps: float, log: IO[str]) -> None:
    print("decode: us, times cuBLAS block, of the weight's reading time: rule | not overlapped | settled | best")
    gains, floors = [], []
    for (n, k), m in itertools.product(WEIGHTS, DECODE):
        bench = Bench((m, n, k), gbps)
        choices = list(dict.fromkeys(decode_plans(bench.size, quick)))
        bench.measure(choices)
        bench.write(log)
        best = min(bench.us, key=bench.us.__getitem__)
        found = [
            f"{bench.us[c]:.1f} {bench.cublas / bench.us[c]:.2f} {bench.floor / bench.us[c]:.2f}"
            for c in (*choices[:3], best)
        ]
        print(f"{m}x{n}x{k}: " + " | ".join(found) + f" {name_of(best)}", flush=True)
        gains.append(bench.cublas / bench.us[choices[0]])
        aim = 0.80 if (n, k) in ((8192, 8192), (28672, 4096)) else 0.65
        if bench.floor / bench.us[choices[0]] < aim:
            floors.append(f"{m}x{n}x{k}")
    print(
        f"times cuBLAS block in the mean {mean(gains):.2f} (aim 1.3); below the share of the floor: {' '.join(floors)}"
    )


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
