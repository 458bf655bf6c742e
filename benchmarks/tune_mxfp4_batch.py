"""Every tile of the MXFP4 batch's product: what kernels/mxfp4/hopper_batch.py should choose, and gemm.py with --choice.

    python benchmarks/tune_mxfp4_batch.py [--tokens M ...] [--shapes NxK ...]
        [--compile-only | --choice [PLACE] | --cublas]

Tokens in e4m3 by a packed weight, without the kernel that quantizes them. A line a case: tokens, N x K, the rule's us,
its time over the fastest tile's, the model's time over the measured one, and the tiles, fastest first, all replayed in
turn: columns, teams, groups, blocks of a stage, and after the stroke the thread blocks that share K. `wide` is what the
rule for more than 32 tokens takes. Each result is compared with the rule's (relative, at most 5e-3: K is summed in
other parts), and with itself in 20 runs (its bits). The last line: geometric means over the cases.

--choice: W4A8 and W4A4 (Hadamard 32) by the kernel for few tokens and by the batch's behind its quantizer, in turn; as
in a decoder layer, where PLACE is what is around the product there: norm, add (a residual), gate (and a residual), the
weight settled. A line a case: tokens, N x K, and for each of both: us of few, of the batch, by how much the models find
few slower, and the time of what gemm.py (fused.py) chooses over the faster one's. The last line: their geometric means,
and the largest.

--cublas: W4A8 and W4A4 by the batch's product and by cuBLAS behind an expanded weight, each with its quantizer, in
turn; more than 32 tokens, by default from 384 to 4096. A line a case: tokens, N x K, and for both: us of the batch, of
cuBLAS, and of the choice over the faster one's; results are compared (relative, at most 6e-3). The last line as above.
"""

import argparse
import itertools
import os
from functools import partial
from statistics import geometric_mean
from typing import Any

import torch
from timing import in_processes, race_us

from quantrot.kernels import nvrtc
from quantrot.kernels.mixed.hopper_plans import PROCESSORS
from quantrot.kernels.mxfp4 import fused, gemm, hopper, hopper_batch
from quantrot.kernels.mxfp4.hopper_batch import Plan

LLAMA = "4096x4096 6144x4096 14336x4096 28672x4096 4096x14336 8192x8192 10240x8192 57344x8192 8192x28672"
QWEN = "3584x3584 4608x3584 37888x3584 3584x18944 7168x5120 5120x5120 55296x5120 5120x27648"
SMALL = "2048x2048 3072x2048 16384x2048 2048x8192 17920x1536 1536x8960"
MANY = [384, 640, 1024, 1152, 1280, 1536, 1792, 2048, 2560, 3072, 4096]
TURNS = 4  # of a multiprocessor at most: tiles that take more are left out


def name(plan: Plan) -> str:
    return f"{plan.columns}t{plan.teams}g{plan.groups}b{plan.blocks}/{plan.split}"


def plans(tokens: int, rows: int, depth: int) -> dict[str, Plan]:
    few = tokens <= hopper_batch.FEW
    found = {"rule": hopper_batch.plan_for(tokens, rows, depth)}
    if few:
        found["wide"] = hopper_batch.plan_for(hopper_batch.FEW + 1, rows, depth)
    for tile, *_ in hopper_batch.FEW_TILES if few else hopper_batch.TILES:
        for plan in hopper_batch.fitted(tile, depth, few):
            turns = -(-plan.grid(rows, tokens, 0) // PROCESSORS)
            if plan.stages >= 2 and plan.own[0] % (8 if few else 16) == 0 and turns <= TURNS:
                found[name(plan)] = plan
    return found


def measured(tokens: int, rows: int, depth: int) -> dict[str, float]:
    """us by plan."""
    ws = weights(rows, depth)
    q, scale = hopper_batch.quantize(torch.randn(tokens, depth, device="cuda", dtype=torch.bfloat16), "bf16")

    def call(weight: list[torch.Tensor], plan: Plan) -> torch.Tensor:
        return hopper_batch.multiply(q, scale, *weight, torch.bfloat16, settled=True, plan=plan)

    found = plans(tokens, rows, depth)
    expected = call(ws[0], found["rule"]).float()
    for plan in found.values():
        y = call(ws[0], plan)
        assert (y.float() - expected).norm() <= 5e-3 * expected.norm(), plan
        assert all(torch.equal(call(ws[0], plan), y) for _ in range(20)), plan
    return race_us({key: [lambda w=w, p=plan: call(w, p) for w in ws] for key, plan in found.items()})


def weights(rows: int, depth: int) -> list[list[torch.Tensor]]:
    """[packed, scale] as often as it takes to pass L2."""
    stored = [((rows, depth // 2), 0, 256), ((rows, depth // 32), 118, 126)]
    return [
        [torch.randint(low, high, size, dtype=torch.uint8, device="cuda") for size, low, high in stored]
        for _ in range(max(2, -(-(200 << 20) // (rows * depth // 2))))
    ]


def product(weight: list[torch.Tensor], activations: str, few: bool, around: dict[str, Any]) -> torch.Tensor:
    """mxfp4_fused, or mxfp4_gemm where nothing is around it, by the kernel that is asked for."""
    gemm.few_is_faster, fused.batch_is_faster = lambda *_: few, lambda *_: not few
    call = fused.mxfp4_fused if len(around) > 1 else gemm.mxfp4_gemm
    return call(
        packed=weight[0], scale=weight[1], activations=activations, hadamard=32 * (activations == "mxfp4"), **around
    )


def around(place: str, tokens: int, rows: int, depth: int) -> dict[str, Any]:
    """x, and what it meets in a decoder layer."""

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    x = new(tokens, depth * (2 if place == "gate" else 1))
    residual = {"settled": True, "residual": new(tokens, rows)}
    found = {
        "alone": {},
        "norm": {"settled": True, "norm": new(depth), "epsilon": 1e-5},
        "add": residual,
        "gate": residual | {"gated": True},
    }
    return {"x": x} | found[place]


def choose(cases: list[tuple[int, int, int]], place: str) -> None:
    """The table of --choice."""
    few_is_chosen, batch_is_chosen = gemm.few_is_faster, fused.batch_is_faster
    over_best: dict[str, list[float]] = {activations: [] for activations in gemm.QUANTIZING}
    for case in cases:
        beside, ws, ways = around(place, *case), weights(*case[1:]), list(itertools.product(over_best, (True, False)))
        us = race_us({way: [partial(product, weight, *way, beside) for weight in ws] for way in ways}, 5)
        slower = hopper.rule(*case)[0] - hopper_batch.rule(*case)[0]
        line = f"{case[0]:5} {f'{case[1]} x {case[2]}':14}"
        for activations, found in over_best.items():
            few, batch = us[activations, True], us[activations, False]
            if place == "alone":
                chosen = few_is_chosen(*case, activations)
            else:
                chosen = not batch_is_chosen(*case, activations, place in ("norm", "gate"), place in ("add", "gate"))
            found.append((few if chosen else batch) / min(few, batch))
            line += f"   {activations} {few:7.2f} {batch:7.2f} {slower:7.2f} {found[-1]:6.3f}"
        print(line, flush=True)
    print("  ".join(f"{key}: {geometric_mean(found):.4f}, {max(found):.3f}" for key, found in over_best.items()))


def against_cublas(cases: list[tuple[int, int, int]]) -> None:
    """The table of --cublas."""
    over_best: dict[str, list[float]] = {activations: [] for activations in gemm.QUANTIZING}
    for case in cases:
        x, ws = around("alone", *case)["x"], weights(*case[1:])
        ways = list(itertools.product(over_best, ("hopper", "cublas")))

        def call(way: tuple[str, str], weight: list[torch.Tensor], x: torch.Tensor = x) -> torch.Tensor:
            options: dict[str, Any] = {"activations": way[0], "hadamard": 32 * (way[0] == "mxfp4"), "settled": True}
            return gemm.mxfp4_gemm(x, *weight, backend=way[1], **options)

        line = f"{case[0]:5} {f'{case[1]} x {case[2]}':14}"
        us = race_us({way: [partial(call, way, weight) for weight in ws] for way in ways}, 5)
        for activations, found in over_best.items():
            y, expected = (call((activations, backend), ws[0]).float() for backend in ("hopper", "cublas"))
            assert (y - expected).norm() <= 6e-3 * expected.norm(), (case, activations)
            batch, cublas = us[activations, "hopper"], us[activations, "cublas"]
            found.append((batch if gemm.batch_beats_cublas(*case) else cublas) / min(batch, cublas))
            line += f"   {activations} {batch:8.2f} {cublas:8.2f} {found[-1]:6.3f}"
        print(line, flush=True)
    print("  ".join(f"{key}: {geometric_mean(found):.4f}, {max(found):.3f}" for key, found in over_best.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--shapes", nargs="+", default=f"{LLAMA} {QWEN} {SMALL}".split())
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--choice", nargs="?", const="alone", choices=["alone", "norm", "add", "gate"])
    parser.add_argument("--cublas", action="store_true")
    args = parser.parse_args()
    tokens = args.tokens or (MANY if args.cublas else [16, 32])
    cases = [(m, *map(int, shape.split("x"))) for shape in args.shapes for m in tokens]
    if args.choice:
        return choose(cases, args.choice)
    if args.cublas:
        return against_cublas(cases)
    kernels = sorted({plan.entry(torch.bfloat16) for case in cases for plan in plans(*case).values()})
    sources = [hopper_batch.device_functions() + kernel for kernel in kernels]
    in_processes(nvrtc.compile_cubin, sources, os.cpu_count() or 1)
    print(f"{len(kernels)} kernels")
    if args.compile_only:
        return
    over_best, over_wide = [], []
    for case in cases:
        us = measured(*case)
        ours, best = us["rule"], min(us.values())
        over_best.append(ours / best)
        over_wide.append(ours / us.get("wide", ours))
        tiles = "  ".join(f"{key} {t:.2f}" for key, t in sorted(us.items(), key=lambda item: item[1]) if key != "rule")
        model = hopper_batch.rule(*case)[0] / ours
        shape = f"{case[1]} x {case[2]}"
        print(f"{case[0]:5} {shape:14} {ours:7.2f} us {ours / best:6.3f} {model:6.2f}   {tiles}", flush=True)
    print(f"of the fastest {geometric_mean(over_best):.3f}, of wide {geometric_mean(over_wide):.3f}")


if __name__ == "__main__":
    main()
