"""quantrot plan: everything that convert would do, before any weight is read."""

from typing import TYPE_CHECKING

from quantrot.cli.common import (
    Device,
    Model,
    Recipe,
    SeqLen,
    ShardSize,
    Texts,
    Threads,
    Windows,
    calibration,
    console,
    line,
    parse_size,
    size,
    table,
)
from quantrot.process import counted, cpus

if TYPE_CHECKING:
    from quantrot.plan import Plan


def command(
    model: Model,
    recipe: Recipe,
    device: Device = "cpu",
    max_shard_size: ShardSize = "5GB",
    texts: Texts = None,
    windows: Windows = None,
    seq_len: SeqLen = None,
    threads: Threads = None,
) -> None:
    """Show what convert would do, and every error at once, before any weight is read."""
    from quantrot.plan import plan
    from quantrot.recipe import load_recipe

    wanted = load_recipe(recipe)  # its errors come before the text's
    planned = plan(model, wanted, device, parse_size(max_shard_size), calibration(texts, windows, seq_len))
    show(planned, threads or cpus())


def show(planned: "Plan", threads: int) -> None:
    """Print a plan: formats by kind of linear, rotations, sizes, memory, notes."""
    out = console()
    title = f"{planned.source.name} by {planned.recipe.name}"
    table(title, ["linears", "count", "shape", "becomes"], _kinds(planned))
    for name, r in planned.rotations.items():
        where = "fused into the weights" if name in ("R1", "R2") else "online"
        made = f"from {planned.learned.path}" if r.kind == "learned" and planned.learned else f"seed {r.seed}"
        out.print(f"{name}: {r.kind}, width {r.width}, {r.extent}, {made}, {where}", markup=False)
    if (planned.recipe.attention, planned.recipe.kv_cache) != ("bf16", "bf16"):
        out.print(f"attention: {planned.recipe.attention}; KV cache: {planned.recipe.kv_cache}; both at run time")
    sizes = f"{size(planned.source_bytes)} -> {size(planned.output_bytes)}"
    out.print(f"{counted(len(planned.steps), 'step')}, {counted(len(planned.shards), 'shard')}: {sizes}")
    held = f", {size(planned.calibration_bytes(threads))} of it for calibration" if planned.calibration else ""
    out.print(f"predicted peak memory {size(planned.peak_bytes(threads))} with {counted(threads, 'thread')}{held}")
    for note in planned.notes:
        line(f"note: {note}")


def _kinds(planned: "Plan") -> list[list[str]]:
    from collections import Counter

    from quantrot import formats, llama

    shapes = {linear.fqn: f"{linear.out_features} x {linear.in_features}" for linear in llama.linears(planned.llama)}
    kinds: Counter[tuple[str, str, str]] = Counter()
    for fqn, fmt in planned.linears.items():
        kinds[fqn.rpartition(".")[2], shapes[fqn], formats.label(fmt) if fmt else "its own dtype"] += 1
    return [[name, str(count), shape, label] for (name, shape, label), count in kinds.items()]
