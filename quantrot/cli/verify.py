"""quantrot verify: files, logits and layers of a conversion against its source."""

from pathlib import Path
from typing import Annotated

import typer

from quantrot.cli.common import count_progress, line, table
from quantrot.process import counted

WORST = 10


def command(
    output: Annotated[Path, typer.Argument(help="A directory that convert wrote.", metavar="OUT")],
    against: Annotated[
        str | None, typer.Option(help="The unconverted model; the manifest's source by default.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="UTF-8 text to run; Python's help topics by default.")] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens in a window; 256 by default, or as many as the model takes.")
    ] = None,
    windows: Annotated[int, typer.Option(help="At most N windows; linears are measured in the first.")] = 4,
    max_kl: Annotated[
        float | None, typer.Option(help="Fail above this KL (nats per token); 4, or 0.01 if nothing is quantized.")
    ] = None,
    min_top1: Annotated[float | None, typer.Option(help="Fail below this top-1 agreement (0 to 1).")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.")] = "auto",
) -> None:
    """Check hashes, logits and every layer. Exit status 1: not acceptable; 2: damaged, or cannot be checked."""
    from quantrot.evals.text import evaluation_text
    from quantrot.verify import verify

    content = evaluation_text(text)[0] if text is not None else None
    with count_progress() as progress:
        found = verify(
            output,
            against,
            text=content,
            seq_len=seq_len,
            count=windows,
            max_kl=max_kl,
            min_top1=min_top1,
            device=device,
            progress=progress,
        )
    d = found.divergence
    rows = [
        ["mean KL to the source, nats per token", f"{d.kl:.5f}"],
        ["top-1 agreement", f"{d.top1:.4f}"],
        ["perplexity, source -> converted", f"{d.baseline_ppl:.3f} -> {d.ppl:.3f}"],
        ["largest logit error / largest logit", f"{d.max_logit_error:.2e}"],
    ]
    table(f"{output}, {counted(d.windows, 'window')} of {d.seq_len} tokens, float32", ["", ""], rows)
    worst = sorted(found.layers, key=lambda layer: layer.sqnr_db)[:WORST]
    if worst:
        rows = [
            [w.fqn, w.format, f"{w.sqnr_db:.2f}", "-" if w.unrotated_db is None else f"{w.unrotated_db:.2f}"]
            for w in worst
        ]
        table("Worst linears by output SQNR (dB)", ["linear", "format", "converted", "without rotation"], rows)
    for warning in found.warnings:
        line(f"warning: {warning}")
    for failure in found.failures:
        line(f"FAILED: {failure}")
    if found.failures:
        raise typer.Exit(1)
    line(f"files match their hashes; ok (KL up to {found.max_kl:g} is)")
