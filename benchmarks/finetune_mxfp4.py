"""Fine-tune a Llama with MXFP4 linears, forward and backward, against bfloat16 on the same data in the same order.

    python benchmarks/finetune_mxfp4.py --text FILE --save DIR     # writes results/finetune_mxfp4-<name>.json
    python benchmarks/finetune_mxfp4.py --render    # docs/finetune_mxfp4.svg and docs/measured/mxfp4.md

Master weights and AdamW are float32, activations bfloat16 (autocast) in both runs; embeddings and the language model
head stay frozen; in the MXFP4 run every other linear is `Mxfp4TrainingLinear`: QuEST forward, randomised Hadamard and
stochastic rounding backward. The validation loss is that of the arithmetic that trains, on windows held out from the
end of the text. --save keeps both models as transformers directories, which convert and evaluate like any other:

    quantrot convert DIR/mxfp4 -r benchmarks/finetune_mxfp4.yaml -o OUT
    quantrot eval ppl OUT --text FILE --output RESULT
    python benchmarks/finetune_mxfp4.py --add "trained in MXFP4, converted=RESULT"
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from quantrot.evals.text import _read, python_topics, windows  # noqa: E402
from quantrot.modules.mxfp4 import train_in_mxfp4  # noqa: E402
from quantrot.source import open_source  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PLOT = ROOT / "docs" / "finetune_mxfp4.svg"
DOC = ROOT / "docs" / "measured" / "mxfp4.md"
KINDS = ("bfloat16", "mxfp4")


# --- Training --------------------------------------------------------------------------------------------------------


def data(tokenizer: Any, text: str, asked: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """(training windows in the order they are used [steps, batch, seq], validation windows [n, seq])."""
    found = windows(tokenizer, text, asked.seq_len)
    held, pool = found[-asked.validation :], found[: -asked.validation]
    needed = asked.steps * asked.batch
    order = torch.Generator().manual_seed(asked.seed)
    epochs = [torch.randperm(len(pool), generator=order) for _ in range(math.ceil(needed / len(pool)))]
    return pool[torch.cat(epochs)[:needed]].view(asked.steps, asked.batch, -1), held


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.autocast(ids.device.type, torch.bfloat16):
        return model(input_ids=ids, labels=ids, use_cache=False).loss


@torch.no_grad()
def validate(model: Any, held: torch.Tensor) -> float:
    return sum(loss_of(model, part).item() * len(part) for part in held.split(8)) / len(held)


def rate(step: int, asked: argparse.Namespace) -> float:
    """Linear warm-up over a twentieth of the steps, then a cosine to a tenth of the peak."""
    warm = max(1, asked.steps // 20)
    if step < warm:
        return asked.lr * (step + 1) / warm
    done = (step - warm) / max(1, asked.steps - warm)
    return asked.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def train(kind: str, source: Path, batches: torch.Tensor, held: torch.Tensor, asked: argparse.Namespace, keep) -> Any:
    """Train one model; `keep(run)` is called with the run so far after every step."""
    torch.manual_seed(asked.seed)
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).to(asked.device)
    replaced = train_in_mxfp4(model) if kind == "mxfp4" else []
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        module.requires_grad_(False)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=asked.lr, betas=(0.9, 0.95), weight_decay=0.0)
    run: dict[str, Any] = {
        "kind": kind,
        "mxfp4_linears": len(replaced),
        "trained_parameters": sum(p.numel() for p in parameters),
        "loss": [],
        "validation": [],
        "seconds": 0.0,
    }
    batches, held = batches.to(asked.device), held.to(asked.device)
    for step, ids in enumerate(batches):
        if step % asked.eval_every == 0:
            run["validation"].append([step, validate(model, held)])
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = rate(step, asked)
        loss = loss_of(model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run["loss"].append(loss.item())
        run["seconds"] += time.perf_counter() - start
        if step % 10 == 0:
            spent = run["seconds"] / (step + 1)
            print(f"{kind} {step:4d} {run['loss'][-1]:.4f} {run['validation'][-1]} {spent:.2f} s/step", flush=True)
        keep(run)
    run["validation"].append([asked.steps, validate(model, held)])
    keep(run)
    return model


def save(model: Any, tokenizer: Any, path: Path) -> None:
    """A transformers directory in bfloat16. The training linears' state is nn.Linear's."""
    model.to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)


def main(asked: argparse.Namespace) -> None:
    source = open_source(asked.model).path
    tokenizer = AutoTokenizer.from_pretrained(source)
    text = _read(asked.text) if asked.text else python_topics()
    batches, held = data(tokenizer, text, asked)
    options = {k: getattr(asked, k) for k in ("steps", "batch", "seq_len", "lr", "seed", "validation")}
    device = asked.device if asked.device == "cpu" else torch.cuda.get_device_name()
    result: dict[str, Any] = {
        "model": asked.model,
        "text": asked.text.name if asked.text else "pydoc topics",
        "device": device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **options,
        "runs": [],
    }
    done: list[dict[str, Any]] = []
    for kind in asked.kinds:

        def keep(run: dict[str, Any], done: list[dict[str, Any]] = done) -> None:
            asked.out.write_text(json.dumps(result | {"runs": [*done, run]}, indent=1) + "\n")

        model = train(kind, source, batches, held, asked, keep)
        done = json.loads(asked.out.read_text())["runs"]
        if asked.save:
            save(model, tokenizer, asked.save / kind)
    print(f"wrote {asked.out}")


# --- The plot --------------------------------------------------------------------------------------------------------


def smooth(values: list[float], width: int = 10) -> list[tuple[float, float]]:
    """(step, mean of the `width` losses that end there)."""
    return [(i, sum(values[i + 1 - width : i + 1]) / width) for i in range(width - 1, len(values))]


def plot(result: dict[str, Any]) -> str:
    """An SVG of the training losses (thin, means of ten steps) and validation losses (thick, dots)."""
    width, height, left, bottom, top = 760, 400, 60, 50, 30
    curves = [(run["kind"], smooth(run["loss"]), run["validation"]) for run in result["runs"]]
    values = [y for _, thin, thick in curves for _, y in [*thin, *thick]]
    low, high = math.floor(min(values) * 10) / 10, math.ceil(max(values) * 10) / 10
    colour = {"bfloat16": "#4878a8", "mxfp4": "#c8553d"}

    def point(x: float, y: float) -> str:
        across = left + x / result["steps"] * (width - left - 20)
        return f"{across:.1f},{height - bottom - (y - low) / (high - low) * (height - bottom - top):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for i in range(6):
        y = low + (high - low) * i / 5
        start, end = point(0, y), point(result["steps"], y)
        (x1, y1), (x2, y2) = start.split(","), end.split(",")
        parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{float(y1) + 4:.1f}" text-anchor="end">{y:.2f}</text>')
        step = result["steps"] * i // 5
        parts.append(
            f'<text x="{point(step, low).split(",")[0]}" y="{height - bottom + 18}" text-anchor="middle">{step}</text>'
        )
    for i, (kind, thin, thick) in enumerate(curves):
        line = " ".join(point(x, y) for x, y in thin)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour[kind]}" opacity="0.45"/>')
        line = " ".join(point(x, y) for x, y in thick)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour[kind]}" stroke-width="2.5"/>')
        for x, y in thick:
            cx, cy = point(x, y).split(",")
            parts.append(f'<circle cx="{cx}" cy="{cy}" r="3.5" fill="{colour[kind]}"/>')
        label = f"{kind}: validation {thick[0][1]:.3f} at step 0, {thick[-1][1]:.3f} at step {thick[-1][0]}"
        parts.append(
            f'<text x="{width - 30}" y="{top + 16 + 18 * i}" text-anchor="end" fill="{colour[kind]}">{label}</text>'
        )
    parts.append(
        f'<text x="{(width + left) / 2}" y="{height - 10}" text-anchor="middle">step ({result["batch"]} x '
        f"{result['seq_len']} tokens); thick: validation loss, thin: training loss, mean of ten steps</text>"
    )
    return "\n".join([*parts, "</svg>", ""])


def table(result: dict[str, Any]) -> str:
    """The runs as Markdown, and the perplexities that `evaluations` of the json holds."""
    lines = ["| run | validation loss, first | last | mean of the last 20 training losses | seconds a step |"]
    lines.append("|---|---|---|---|---|")
    for run in result["runs"]:
        first, last = run["validation"][0][1], run["validation"][-1]
        tail = sum(run["loss"][-20:]) / len(run["loss"][-20:])
        pace = run["seconds"] / len(run["loss"])
        lines.append(f"| {run['kind']}, {last[0]} steps | {first:.3f} | {last[1]:.3f} | {tail:.3f} | {pace:.1f} |")
    run = result["runs"][-1]
    lines += [
        "",
        f"{Path(result['model']).name}, {result['batch']} x {result['seq_len']} tokens a step of {result['text']}, "
        f"AdamW, learning rate {result['lr']:g}; {run['trained_parameters'] / 1e6:.1f} million parameters of "
        f"{run['mxfp4_linears']} linears and the norms train, embeddings stay. {result['device']}, {result['threads']} "
        f"thread of a shared machine, torch {result['torch']}.",
    ]
    found = result.get("evaluations")
    if found:
        one = next(iter(found.values()))
        lines += ["", "| saved model | perplexity |", "|---|---|"]
        lines += [f"| {name} | {entry['ppl']:.2f} +- {entry['stderr']:.2f} |" for name, entry in found.items()]
        lines += ["", f"`quantrot eval ppl`: {one['windows']} windows of {one['seq_len']} tokens of {one['text']}."]
    return "\n".join(lines)


def add(path: Path, entry: str) -> None:
    """Put a perplexity, `label=file of quantrot eval ppl --output`, into the results."""
    label, _, file = entry.partition("=")
    found, result = json.loads(Path(file).read_text()), json.loads(path.read_text())
    settings, ppl = found["settings"], found["results"]["ppl"]
    result.setdefault("evaluations", {})[label] = {
        "ppl": ppl["ppl"],
        "stderr": ppl["ppl_stderr"],
        "windows": settings["windows"],
        "seq_len": settings["seq_len"],
        "text": Path(settings["text"].split(",")[0]).name,
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def render(result: dict[str, Any]) -> None:
    PLOT.write_text(plot(result))
    mark = "<!-- table: finetune_mxfp4.py --render -->\n"
    head, _, tail = DOC.read_text().partition(mark)
    _, _, tail = tail.partition("<!-- end -->\n")
    DOC.write_text(f"{head}{mark}{table(result)}\n<!-- end -->\n{tail}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", type=Path, help="UTF-8 text to train on; Python's help topics when left out")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--validation", type=int, default=32, help="windows held out")
    parser.add_argument("--eval-every", type=int, default=25)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--name", default="smollm2-135m")
    parser.add_argument("--save", type=Path, help="directory for the trained models")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--add", nargs="+", help="label=file: perplexities of `quantrot eval ppl --output`")
    parser.add_argument("--render", action="store_true")
    asked = parser.parse_args()
    asked.out = asked.out or RESULTS / f"finetune_mxfp4-{asked.name}.json"
    for entry in asked.add or []:
        add(asked.out, entry)
    if asked.render or asked.add:
        render(json.loads(asked.out.read_text()))
    else:
        main(asked)
