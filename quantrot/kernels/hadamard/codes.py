"""Rows that one kernel turns and quantizes on Hopper: which plan does it, and its launch."""

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from quantrot.kernels.hadamard.hopper import GROUP, Plan, plan_for, prepare, read_rows
from quantrot.kernels.nvrtc import MAX_SHARED
from quantrot.kernels.ready import Run
from quantrot.orthogonal import hadamard_factors


@lru_cache(maxsize=1024)
def plan_for_codes(order: int, columns: int, dtype: torch.dtype) -> Plan | None:
    """The plan that quantizes what it has turned, None where there is none: groups of 128 must lie in a warp."""
    from quantrot.kernels.hadamard.tuned import CODE_PLANS

    if dtype.itemsize != 2 or columns % GROUP or (order % GROUP and order not in (32, 64)):
        return None
    if plan := CODE_PLANS.get(("bfloat16", order)):  # the same instructions in float16
        return plan
    if plans := twice_plans(order):
        return plans[0]
    plan = plan_for(order, dtype)
    if plan is None or not plan.by_map or plan.tiles < 16:
        plan = _flow_plan(order)
    return plan and replace(plan, cluster=1, paced=False, shift=False, overlap=False)


def twice_plans(order: int) -> list[Plan]:
    """The plans of two asynchronous products, first those that multiply the fewest empty rows by the fewest warps."""
    *bases, _ = hadamard_factors(order)
    found = []
    for tiles, rows, resident in ((8, 2, 4), (16, 1, 4), (32, 1, 2)):
        tall, rest = divmod(order, 8 * tiles)
        groups = -(-tall // 64)
        if order < 1024 or rest or len(bases) > 1 or tall % (bases or [4])[0] or groups > (2 if tiles == 32 else 3):
            continue
        plan = Plan("twice", 4 * groups, max(resident // groups, 1), vectors=rows, tiles=tiles, overlap=True)
        found += [(groups * 64 / tall, groups, -stages, replace(plan, stages=stages)) for stages in (1, 2)]
    return [plan for *_, plan in sorted(found, key=lambda way: way[:3])]


def _flow_plan(order: int) -> Plan | None:
    """Tiles of 256 columns where a row of registers holds them, else of 128."""
    *bases, _ = hadamard_factors(order)
    for columns in (256, 128):
        tall = order // columns
        if (
            order % columns == 0
            and len(bases) < 2
            and tall % (bases or [2])[0] == 0
            and 2 <= tall <= 16384 // columns * 2
        ):
            tiles = -(-tall // 64)
            plan = Plan("flow", 4 * (3 if tiles == 3 else 2) + 4, 1, tiles=columns // 8, stages=2)
            return plan if plan.shared_bytes(order) <= MAX_SHARED else None
    return None


def prepare_codes(
    x: Tensor, q: Tensor, scales: Tensor, signs: Tensor | None, order: int, factor: float, rule: str
) -> Run:
    """x [M, K], not empty, -> e4m3 codes q [M, K], contiguous, and scales [M, K / 128], as a function of x, q, scales
    and signs like these; `plan_for_codes` must have a plan."""
    plan = plan_for_codes(order, x.shape[1], x.dtype)
    assert plan is not None, order

    transform = prepare(read_rows(x, order, plan), q.view(-1, order), signs, factor, plan, scales=scales, rule=rule)

    def run(x: Tensor, q: Tensor, scales: Tensor, signs: Tensor | None) -> None:
        transform(read_rows(x, order, plan), q.view(-1, order), None if signs is None else signs.contiguous(), scales)

    return run
