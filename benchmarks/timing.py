"""How every GPU benchmark here times, and what its results file says.

A time is the median of replays of one CUDA graph that holds calls on different random tensors, together past the 60 MB
of L2 (the smallest tensors: 512 of them), outputs included. The copy is timed the same way in the same run.
"""

import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
ROTATE_BYTES = 256 << 20
WARM_US = 10_000  # before a timing: one kernel read 0.58 of copy after an idle gap, 0.75 in a run of timings
CLEARED_A_SECOND = 250e9  # bytes, at least: 640e9 were measured
Calls = Sequence[Callable[[], Any]]


def give_back() -> None:
    """torch's unused memory to the driver, and the time that the driver takes to clear it: while it did, reads at
    memory speed took 282 us for 249 and copies 950 for 777, for 28 ms after 16 GB and 100 ms after 64."""
    gc.collect()
    before = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    freed = before - torch.cuda.memory_reserved()
    time.sleep(freed / CLEARED_A_SECOND)


def captured(calls: Calls, least: int) -> tuple[Callable[[], float], int]:
    """A function that replays one graph of at least so many calls and gives its microseconds, and how many calls there
    are. Their results are kept, so that each has its own memory."""
    calls = list(calls) * -(-least // len(calls))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    give_back()  # or capturing would, unseen
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            kept.append(call())

    def replay_us() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    return replay_us, len(kept)


def time_us(calls: Calls, replays: int = 5) -> float:
    """Median microseconds a call: at least eight calls in one graph."""
    replay_us, count = captured(calls, 8)
    warm = 0.0
    while warm < WARM_US:
        warm += replay_us()
    return statistics.median(replay_us() for _ in range(replays)) / count


def race(calls: dict[Any, Calls], rounds: int = 7) -> dict[Any, list[float]]:
    """Microseconds a call of each, by round: graphs of all in turn, in another order every round, so that all meet the
    same clocks. (At the power limit a product after a pause ran up to a fifth faster than the same one later.)"""
    graphs = {name: captured(each, 4) for name, each in calls.items()}
    names, times = list(calls), {name: [] for name in calls}
    for i in range(rounds + 2):  # two to reach the power that all of it takes
        order = names[i % len(names) :] + names[: i % len(names)]
        for name in order[:: -1 if i % 2 else 1]:
            replay_us, count = graphs[name]
            us = replay_us() / count
            if i >= 2:
                times[name].append(us)
    return times


def race_us(calls: dict[Any, Calls], rounds: int = 7) -> dict[Any, float]:
    """The medians of `race`."""
    return {name: statistics.median(times) for name, times in race(calls, rounds).items()}


def ratio(peer: Sequence[float], ours: Sequence[float]) -> float:
    """Peer's time over ours: the median of the rounds of a race."""
    return statistics.median(a / b for a, b in zip(peer, ours, strict=True))


def random_tensors(shape: tuple[int, ...], dtype: torch.dtype, fill: bool = True) -> list[torch.Tensor]:
    """Normal (or uninitialised) tensors of this shape, as many as it takes to pass L2; each 256-byte aligned."""
    numel = torch.Size(shape).numel()
    count = max(2, min(512, -(-ROTATE_BYTES // (numel * dtype.itemsize))))
    pool = torch.empty(count, -(-numel // 128) * 128, device="cuda", dtype=dtype)
    return [x[:numel].view(shape) for x in (pool.normal_() if fill else pool)]


def copy_us(xs: list[torch.Tensor]) -> float:
    """The faster of torch's copy and its elementwise kernel: the copy alone varies by 8% with where its tensors lie."""
    ys = random_tensors(tuple(xs[0].shape), xs[0].dtype, fill=False)
    pairs = list(zip(xs, ys, strict=True))
    copied = time_us([lambda x=x, y=y: y.copy_(x) for x, y in pairs])
    return min(copied, time_us([lambda x=x, y=y: torch.neg(x, out=y) for x, y in pairs]))


def copy_gbps() -> float:
    """Bytes read plus bytes written per nanosecond by the copy of 2^27 bfloat16 elements: the byte floors' speed."""
    xs = random_tensors((1 << 15, 1 << 12), torch.bfloat16)
    return 4 * xs[0].numel() / copy_us(xs) / 1e3


def in_processes(call: Callable[[Any], Any], jobs: Iterable[Any], workers: int = 12) -> list[Any]:
    """`call` (a function of a module) of every job, side by side: kernels compiled one by one, at first use, would take
    longer than the table."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(call, jobs))


def write_results(script: str, gbps: float, rows: list[dict[str, Any]], out: Path | None = None) -> Path:
    """benchmarks/results/<script>-<gpu>.json with what was run where; rows: op, case, us, floor_us, peers_us, error."""
    import triton

    smi = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    result = {
        "gpu": torch.cuda.get_device_name(),
        "driver": subprocess.run(smi, capture_output=True, text=True).stdout.split()[0],
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": head.stdout.strip() or "unknown",
        "command": " ".join(["python", f"benchmarks/{script}.py", *sys.argv[1:]]),
        "copy_gbps": gbps,
        "rows": rows,
    }
    name = torch.cuda.get_device_name().split()[1].lower()  # of NVIDIA H100 80GB HBM3
    out = out or ROOT / "benchmarks" / "results" / f"{script}-{name}.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"copy {gbps:.0f} GB/s; wrote {out}")
    return out
