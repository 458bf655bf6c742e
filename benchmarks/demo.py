"""The tour: convert SmolLM2-135M with three recipes, verify them, measure them, print one table.

    python benchmarks/demo.py [--work .demo] [--data MMLU_DIRECTORY]

Text comes from Python's own help topics, so nothing but the model's package is needed; MMLU runs where its data can be
reached (the hub, or --data).
"""

import argparse
import logging
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch  # noqa: E402
from transformers.utils import logging as transformers_logging  # noqa: E402

from quantrot import convert, verify  # noqa: E402
from quantrot.cli.common import byte_progress, console, count_progress, size, table  # noqa: E402
from quantrot.evals import hub  # noqa: E402
from quantrot.evals.divergence import divergence  # noqa: E402
from quantrot.evals.text import python_topics  # noqa: E402
from quantrot.load import open_model  # noqa: E402
from quantrot.tokenizer import windows  # noqa: E402

RECIPES = ["fp8-dynamic", "mxfp4-weight-only", "quarot-mxfp4-online"]
WINDOWS, SEQ_LEN = 3, 512
MMLU_LIMIT = 1  # questions a subject: enough to see it work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(".demo"))
    parser.add_argument("--data", type=Path)
    options = parser.parse_args()
    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    out = console()
    started = time.monotonic()
    baseline, tokenizer = open_model("demo", "cpu", "float32")
    ids = windows(tokenizer, python_topics(), SEQ_LEN, WINDOWS)
    rows = [["the original", "16", size(_bytes(baseline)), "-", "-", "-", "-", "-"]]
    for recipe in RECIPES:
        rows.append(_row(recipe, options.work / recipe, baseline, ids))
    columns = ["recipe", "bits", "size", "seconds", "KL", "top-1", "ppl ratio", "worst layer (dB)"]
    title = f"SmolLM2-135M-Instruct, {WINDOWS} windows of {SEQ_LEN} tokens of Python's help topics"
    table(title, columns, rows)
    if options.data or hub.reachable():
        _mmlu(tokenizer, baseline, options.data)
    else:
        out.print("MMLU: its data cannot be reached from here; `quantrot eval mmlu DIR --data FILES` runs it offline")
    out.print(f"outputs are in {options.work}/; the whole tour took {time.monotonic() - started:.0f} s")


def _row(recipe: str, target: Path, baseline: Any, ids: torch.Tensor) -> list[str]:
    """Convert, verify, compare: one line of the table."""
    from quantrot.formats import bits_per_weight

    with byte_progress() as progress:
        done = convert("demo", recipe, target, overwrite=True, progress=progress)
    shapes = [(f.weights, done.manifest["linears"][n]["shape"]) for n, f in done.plan.linears.items() if f is not None]
    weights = sum(n * k for _, (n, k) in shapes)
    bits = sum(bits_per_weight(f, n, k) * n * k for f, (n, k) in shapes) / weights
    with count_progress() as progress:
        found = verify(target, count=1, device="cpu", progress=progress)
    assert not found.failures, found.failures
    model, _ = open_model(target, "cpu", "float32")
    d = divergence(model, baseline, ids)
    worst = min(layer.sqnr_db for layer in found.layers)
    cells = [f"{bits:.2f}", size(done.plan.output_bytes), f"{done.seconds:.1f}", f"{d.kl:.4f}", f"{d.top1:.3f}"]
    return [recipe, *cells, f"{d.ppl_ratio:.3f}", f"{worst:.1f}"]


def _mmlu(tokenizer: Any, model: Any, data: Path | None) -> None:
    """A glimpse of MMLU on the original."""
    from quantrot.evals.mmlu import mmlu

    with count_progress() as progress:
        result = mmlu(
            model, tokenizer, limit=MMLU_LIMIT, data=data, progress=lambda done, total: progress("MMLU", done, total)
        )
    o = result.overall
    console().print(f"MMLU, 5-shot, {MMLU_LIMIT} question(s) a subject: {o.acc:.3f} +- {o.stderr:.3f} over {o.n}")


def _bytes(model: Any) -> int:
    """What the original takes on disk: 16 bits a parameter."""
    return sum(p.numel() for p in model.parameters()) * 2


if __name__ == "__main__":
    main()
