"""Fine-tune a Llama with MXFP4 linears, forward and backward, against bfloat16 on the same data in the same order.

    python benchmarks/finetune_mxfp4.py --text FILE --save DIR     # writes results/finetune_mxfp4-<name>.json

Master weights and AdamW are float32, activations bfloat16 (autocast) in both runs; embeddings and the language model
head stay frozen; in the MXFP4 run every other linear is `Mxfp4TrainingLinear`: QuEST forward, randomised Hadamard and
stochastic rounding backward. --compile has torch.compile make CUDA graphs of forward and backward. The validation loss
is that of the arithmetic that trains, on windows held out from the end of the text. --save keeps both models as
transformers directories, which convert and evaluate like any other:

    quantrot convert DIR/mxfp4 -r trained-mxfp4 -o OUT
    quantrot eval ppl OUT --text FILE --output RESULT
    python benchmarks/finetune_mxfp4.py --add "trained in MXFP4, converted=RESULT"
"""

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from quantrot.evals.text import _read, python_topics  # noqa: E402
from quantrot.modules import train_in_mxfp4  # noqa: E402
from quantrot.source import open_source  # noqa: E402
from quantrot.tokenizer import windows  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
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
    step_model = torch.compile(model, mode="reduce-overhead") if asked.compile else model
    optimizer = torch.optim.AdamW(parameters, lr=asked.lr, betas=(0.9, 0.95), weight_decay=0.0)
    run: dict[str, Any] = {
        "kind": kind,
        "mxfp4_linears": len(replaced),
        "trained_parameters": sum(p.numel() for p in parameters),
        "loss": [],
        "validation": [],
        "seconds": 0.0,
        "median_seconds": 0.0,
    }
    times = []
    batches, held = batches.to(asked.device), held.to(asked.device)
    for step, ids in enumerate(batches):
        if step % asked.eval_every == 0:
            run["validation"].append([step, validate(model, held)])
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = rate(step, asked)
        torch.compiler.cudagraph_mark_step_begin()
        loss = loss_of(step_model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run["loss"].append(loss.item())
        times.append(time.perf_counter() - start)
        run["seconds"], run["median_seconds"] = sum(times), statistics.median(times)
        if step % 10 == 0:
            pace = f"{run['median_seconds']:.3f} s/step"
            print(f"{kind} {step:4d} {run['loss'][-1]:.4f} {run['validation'][-1]} {pace}", flush=True)
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
    options = {k: getattr(asked, k) for k in ("steps", "batch", "seq_len", "lr", "seed", "validation", "compile")}
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


# --- Perplexities ----------------------------------------------------------------------------------------------------


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
    parser.add_argument("--compile", action="store_true", help="the training steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--name", default="smollm2-135m")
    parser.add_argument("--save", type=Path, help="directory for the trained models")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--add", nargs="+", help="label=file: perplexities of `quantrot eval ppl --output`")
    asked = parser.parse_args()
    asked.out = asked.out or RESULTS / f"finetune_mxfp4-{asked.name}.json"
    for entry in asked.add or []:
        add(asked.out, entry)
    if not asked.add:
        main(asked)
