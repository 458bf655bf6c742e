"""quantrot convert: rewrite a checkpoint by a recipe."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantrot.cli.common import (
    Device,
    Model,
    Recipe,
    SeqLen,
    ShardSize,
    Texts,
    Threads,
    Windows,
    byte_progress,
    calibration,
    line,
    parse_size,
    size,
    table,
)

if TYPE_CHECKING:
    from quantrot.convert import Conversion

WORST = 5


def command(
    model: Model,
    recipe: Recipe,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The directory to write.")] = None,
    device: Device = "cpu",
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a killed conversion stopped.")] = False,
    max_shard_size: ShardSize = "5GB",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the output when the new one is done.")
    ] = False,
    texts: Texts = None,
    windows: Windows = None,
    seq_len: SeqLen = None,
    threads: Threads = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan.")] = False,
) -> None:
    """Rotate, quantize and write a checkpoint, streaming: memory does not grow with the model."""
    if dry_run:
        from quantrot.cli import plan

        return plan.command(model, recipe, device, max_shard_size, texts, windows, seq_len, threads)
    if output is None:
        raise ValueError("--output is missing; give the directory to write, or --dry-run")
    from quantrot.convert import begun, convert
    from quantrot.recipe import load_recipe

    try:
        with byte_progress() as progress:
            done = convert(
                model,
                load_recipe(recipe),  # whose errors come before the text's
                output,
                device=device,
                resume=resume,
                overwrite=overwrite,
                max_shard_size=parse_size(max_shard_size),
                calibration=calibration(texts, windows, seq_len),
                threads=threads,
                progress=progress,
            )
    except KeyboardInterrupt:
        if begun(output):
            print("interrupted; the same command with --resume goes on from here", file=sys.stderr)
        raise
    except OSError as error:
        remedy = "\nonce that is mended, the same command with --resume goes on from here" if begun(output) else ""
        raise ValueError(f"{error}{remedy}") from None
    show(done)


def show(done: "Conversion") -> None:
    """Print what a conversion made: sizes, bits, worst layers, time, memory, notes."""
    from quantrot import formats

    plan = done.plan
    shapes = [(fmt, done.manifest["linears"][fqn]["shape"]) for fqn, fmt in plan.linears.items() if fmt is not None]
    weights = sum(n * k for _, (n, k) in shapes)
    bits = sum(formats.bits_per_weight(fmt.weights, n, k) * n * k for fmt, (n, k) in shapes) / max(weights, 1)
    rows = [["size", f"{size(plan.source_bytes)} -> {size(plan.output_bytes)}"]]
    if shapes:
        rows.append(["quantized weights", f"{weights / 1e6:.0f} M at {bits:.2f} bits"])
    worst = sorted((v["sqnr_db"], k) for k, v in done.manifest["linears"].items() if v["sqnr_db"] is not None)
    rows += [[f"worst weights {i}", f"{name}, SQNR {db:.2f} dB"] for i, (db, name) in enumerate(worst[:WORST], 1)]
    rows += [["time", f"{done.seconds:.1f} s"], ["peak memory", size(done.peak_bytes)]]
    table(f"{plan.source.name} by {plan.recipe.name} -> {done.out}", ["", ""], rows)
    for note in plan.notes:
        line(f"note: {note}")
