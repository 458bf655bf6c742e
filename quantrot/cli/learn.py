"""quantrot learn: fused rotations by gradient descent."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantrot.cli.common import Model, Recipe, count_progress, line, note, table
from quantrot.process import counted

if TYPE_CHECKING:
    from quantrot.learn import Learning


def command(
    model: Model,
    recipe: Recipe,
    output: Annotated[Path, typer.Option("--output", "-o", help="The safetensors file to write.")],
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text to learn on; without it WikiText-2's, or Python's own topics.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Windows to learn from, one a step.")] = 100,
    seq_len: Annotated[int, typer.Option("--seq-len", help="Tokens in a window.")] = 256,
    windows: Annotated[int | None, typer.Option(help="Windows of the text to use; all by default.")] = None,
    held_out: Annotated[int, typer.Option("--held-out", help="The last of them, which only choose the best.")] = 8,
    rate: Annotated[float, typer.Option(help="Radians that an entry may turn by in the first step.")] = 0.003,
    seed: Annotated[int, typer.Option(help="Of the windows' order.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.")] = "auto",
) -> None:
    """Learn a recipe's R1 and R2 for a model, which is held in memory."""
    from quantrot.evals.text import evaluation_text
    from quantrot.learn import learn
    from quantrot.recipe import load_recipe

    start = load_recipe(recipe)
    content, origin = evaluation_text(text, "train")
    note(f"text: {origin}")
    if start.kv_cache != "bf16" or start.attention != "bf16":
        note("attention and the KV cache are in float32 while it learns: the converted model's KL is larger")
    try:
        with count_progress() as progress:
            found = learn(
                model,
                start,
                output,
                text=content,
                steps=steps,
                seq_len=seq_len,
                windows=windows,
                held_out=held_out,
                rate=rate,
                seed=seed,
                device=device,
                progress=progress,
            )
    except KeyboardInterrupt as interrupt:
        for what in interrupt.args:  # none before the first step
            note(what)
        raise
    except Exception as error:
        for what in getattr(error, "__notes__", ()):  # what was kept
            note(what)
        raise
    if found.windows < (windows or 0):
        note(f"the text has {counted(found.windows, 'window')}, {windows} were asked for")
    rows = [
        ["text", origin],
        ["KL of the start, nats per token", f"{found.kl_before:.4f}"],
        ["KL of what was learned", f"{found.kl_after:.4f}"],
        ["best step", f"{found.best_step} of {steps}"],
    ]
    title = (
        f"{', '.join(found.names)} -> {output}, {counted(found.held_out, 'held-out window')} of {found.seq_len} tokens"
    )
    table(title, ["", ""], rows)
    line("in the recipe:\n" + _fragment(found, start))


def _fragment(found: "Learning", recipe: Any) -> str:
    """The rotations of a recipe that uses what was learned, and the others as they were; the file is beside the
    recipe's."""
    from quantrot.recipe import ROTATIONS

    lines = ["rotations:", f"  path: {json.dumps(found.out.name, ensure_ascii=False)}"]
    for name in ROTATIONS:
        spec = getattr(recipe.rotations, name)
        if spec.kind == "none":
            continue
        kind, seed = ("learned", 0) if name in found.names else (spec.kind, spec.seed)
        block = spec.block if spec.block == "full" or isinstance(spec.block, int) else f'"{spec.block}"'
        channels = f", channels: {spec.channels}" if spec.channels != "natural" else ""
        lines.append(f"  {name}: {{kind: {kind}, block: {block}{f', seed: {seed}' if seed else ''}{channels}}}")
    return "\n".join(lines)
