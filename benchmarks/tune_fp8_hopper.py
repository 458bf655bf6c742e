"""Every plan of the Hopper FP8 product beside cuBLAS: what the rules of kernels/fp8/hopper.py should choose.

    python benchmarks/tune_fp8_hopper.py [prefill] [decode] [--quick]

A line a plan, fastest first: us, times cuBLAS with the same block scales, fraction of the weight's reading time,
relative error to float64, and whether the bits are those of the first plan with as many parts of K.
"""

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from bench_fp8 import DECODE, PREFILL, WEIGHTS, operands, tensorwise
from timing import copy_gbps, time_us

from quantrot.kernels.fp8 import dequantize_fp8_block, fp8_block_gemm, hopper
from quantrot.kernels.fp8.hopper import Decode, Plan, Prefill
from quantrot.kernels.nvrtc import MAX_SHARED, SM_SHARED

SCALES = "1x128 by 128x128"


def prefill_plans(quick: bool) -> list[tuple[Plan, int]]:
    """(plan, parts of K)."""
    plans = [
        Prefill(),
        Prefill(ordered=False),
        Prefill(groups=3, slabs=1),
        Prefill(groups=3, slabs=1, ordered=False),
        Prefill(slabs=1, sets=2, stages=6, ordered=False),
        Prefill(slabs=1, stages=6),
        Prefill(cluster=1),
    ]
    if not quick:
        plans += [Prefill(stages=3), Prefill(tile_group=4), Prefill(tile_group=16)]
        plans += [Prefill(groups=3, slabs=1, cluster=1), Prefill(slabs=1, stages=6, ordered=False)]
        plans += [Prefill(slabs=1, sets=2, stages=5), Prefill(groups=1, slabs=2, stages=6)]
        plans += [Prefill(groups=1, slabs=1, sets=2, stages=6, ordered=False)]
    return [(plan, 1) for plan in plans]


def decode_plans(m: int, n: int, k: int, quick: bool) -> Iterator[tuple[Plan, int]]:
    """The rule's plan, launched in three ways, then every division of b's rows that fits."""
    tokens = next(t for t in (8, 16, 32, 64) if t >= m)
    rule = hopper.plan_for(m, n, k, 1)
    assert isinstance(rule, Decode)
    yield from ((rule, 1), (replace(rule, overlap=True), 1), (replace(rule, overlap=True, early=True), 1))
    few = ((32, 64, 128), (1, 2, 4), (1, 2), (1,))
    for columns, share, resident, parts in itertools.product(
        *few if quick else ((16, *few[0]), few[1], (1, 2, 3), (1, 2))
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


def sweep(m: int, n: int, k: int, plans: list[tuple[Plan, int]], gbps: float) -> None:
    data, blocks, _ = operands(m, n, k, SCALES)
    one, floor = torch.ones((), device="cuda"), n * k / gbps / 1e3
    cublas = time_us([lambda d=d: fp8_block_gemm(*d, **blocks, backend="cublas") for d in data])
    wide = time_us([lambda d=d: tensorwise(d, one) for d in data])
    print(f"\n{m} x {n} x {k}: cuBLAS block {cublas:.1f} us, tensorwise {wide:.1f} us, floor {floor:.1f} us")
    left, right = (
        dequantize_fp8_block(*pair, block, torch.float32)[:256].double()
        for pair, block in ((data[0][:2], (1, 128)), (data[0][2:], (128, 128)))
    )
    exact = left @ right.T
    first: dict[int, torch.Tensor] = {}
    lines = []
    for plan, parts in plans:

        def run(d: tuple, plan: Plan = plan, parts: int = parts) -> torch.Tensor:
            return hopper.gemm(*d, (1, 128), (128, 128), torch.bfloat16, plan=plan, parts=parts)

        try:
            y = run(data[0])
            us = time_us([lambda d=d, run=run: run(d) for d in data], replays=3)
        except RuntimeError as error:
            lines.append((float("inf"), f"refused: {plan}: {str(error)[:100]}"))
            continue
        same = torch.equal(first.setdefault(parts, y), y)
        error = ((y[:256, :256].double() - exact).norm() / exact.norm()).item()
        lines.append(
            (us, f"{us:8.2f} us  {cublas / us:5.2f} x  {floor / us:5.2f}  {error:.1e}  {same}  parts {parts}  {plan}")
        )
    print("\n".join(text for _, text in sorted(lines)), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["prefill", "decode"])
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    speed = copy_gbps()
    for what, tokens in (("prefill", PREFILL), ("decode", DECODE)):
        for (n, k), m in itertools.product(WEIGHTS if what in asked.what else (), tokens):
            plans = prefill_plans(asked.quick) if what == "prefill" else list(decode_plans(m, n, k, asked.quick))
            sweep(m, n, k, plans, speed)
