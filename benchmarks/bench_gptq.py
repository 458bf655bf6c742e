"""GPTQ's inner loop: a block of 128 columns by so many rows in one kernel, and in torch's, column by column.

    python benchmarks/bench_gptq.py      # a table on stdout; needs a CUDA GPU

Weights that differ: a quotient near a tie, which sums in another order round the other way.
"""

import argparse
import statistics
import time

import torch
from timing import time_us

from quantrot.kernels.gptq import Kind, round_columns

COLUMNS, ROWS = 128, (512, 1024, 4096, 14336)
KINDS: tuple[Kind, ...] = ("mxfp4", "int8", "fp8")


def block(rows: int) -> tuple[torch.Tensor, ...]:
    """targets, columns, steps, factor."""
    targets, columns = (torch.randn(COLUMNS, rows, device="cuda") for _ in range(2))
    steps = torch.rand(COLUMNS, rows, device="cuda") + 0.5
    return targets, columns, steps, torch.randn(COLUMNS, COLUMNS, device="cuda") * 0.05


def eager_us(given: tuple[torch.Tensor, ...], kind: Kind) -> float:
    """Wall time: launches are what it spends it on."""
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        started = time.perf_counter()
        round_columns(*given, kind, "reference")
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times[1:])


def main() -> None:
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}\nkind    rows   us  torch, us  ratio  weights that differ")
    for kind in KINDS:
        for rows in ROWS:
            given = block(rows)
            ours, theirs = (round_columns(*given, kind, backend)[0] for backend in ("triton", "reference"))
            differing = (ours != theirs).any(0).float().mean().item()
            us, eager = time_us([lambda g=given, k=kind: round_columns(*g, k)]), eager_us(given, kind)
            print(f"{kind:6s} {rows:5d} {us:4.0f} {eager:10.0f} {eager / us:6.0f}  {differing:.4f}", flush=True)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
