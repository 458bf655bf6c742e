"""What each choice of FP8 blocks costs on a real model: KL, perplexity, top-1, and what a batch changes.

    python benchmarks/bench_fp8_accuracy.py --model DIR --name qwen2.5-coder-1.5b [--text FILE] [--windows 4]
        [--seq-len 512] [--device cpu] [--only NAME ...]

Every row converts the model, loads it in float32 and compares its logits with the original's on the same windows, one
window in a forward. `batch KL` compares the converted model with itself: a prompt of 64 tokens alone, and the same
prompt as the first of four; it is what the neighbours of a prompt change. Writes
benchmarks/results/bench_fp8_accuracy-<name>.json; `python benchmarks/render.py` makes the table.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers.utils import logging

from quantrot import convert
from quantrot.evals.divergence import logit_divergence
from quantrot.evals.logits import next_token_logits
from quantrot.evals.perplexity import safe_exp
from quantrot.evals.statistics import mean_and_stderr
from quantrot.evals.text import evaluation_text
from quantrot.load import open_model
from quantrot.tokenizer import windows

RESULTS = Path(__file__).parent / "results"
PROMPT, PROMPTS = 64, 4  # tokens of a prompt, prompts of a batch

CHOICES: dict[str, tuple[Any, Any, str, str]] = {  # weights, activations, their scale rules
    "128x128 by 1x128": ([128, 128], [1, 128], "bf16", "exact"),
    "channel by token": ("channel", "token", "bf16", "exact"),
    "256x256 by 256x256": ([256, 256], [256, 256], "bf16", "exact"),
    "128x128 by 128x128": ([128, 128], [128, 128], "bf16", "exact"),
    "256x256 by 1x128": ([256, 256], [1, 128], "bf16", "exact"),
    "128x128 by 1x256": ([128, 128], [1, 256], "bf16", "exact"),
    "128x128, pow2, by 1x128": ([128, 128], [1, 128], "pow2", "exact"),
    "128x128 by 1x128, pow2": ([128, 128], [1, 128], "pow2", "pow2"),
    "128x128, weights only": ([128, 128], None, "bf16", ""),
    "256x256, weights only": ([256, 256], None, "bf16", ""),
    "channel, weights only": ("channel", None, "bf16", ""),
}


def recipe(name: str) -> dict[str, Any]:
    """All linears in one choice of blocks."""
    weights, activations, weight_rule, activation_rule = CHOICES[name]
    rule: dict[str, Any] = {"match": "*", "weights": {"format": "fp8", "block": weights, "scale_rule": weight_rule}}
    if activations is not None:
        rule["activations"] = {"format": "fp8", "block": activations, "scale_rule": activation_rule}
    return {"linear": [rule]}


@torch.no_grad()
def batch_kl(model: Any, ids: torch.Tensor) -> float:
    """KL (nats a token) between the logits of a prompt alone and of the same prompt in a batch."""
    prompts = ids.flatten()[: PROMPT * PROMPTS].view(PROMPTS, PROMPT).to(model.device)
    alone, together = (model(input_ids=p, use_cache=False).logits[0].float() for p in (prompts[:1], prompts))
    return logit_divergence(alone, together).kl.mean().item()


def measure(model: Any, expected: list[torch.Tensor], ids: torch.Tensor) -> dict[str, float | None]:
    """The model against the baseline's logits, one float32 [seq_len - 1, vocab] a window."""
    kl, agree, nll, baseline_nll = [], [], [], []
    for window, baseline in zip(ids, expected, strict=True):
        actual = torch.cat(list(next_token_logits(model, window))).cpu()
        pieces = [
            logit_divergence(b, a) for b, a in zip(baseline.split(128), actual.split(128), strict=True)
        ]  # a few tokens at a time: each piece makes float32 copies as wide as the vocabulary
        kl.append(torch.cat([p.kl for p in pieces]).mean().item())
        agree.append(torch.cat([p.agree for p in pieces]).double().mean().item())
        nll.append(F.cross_entropy(actual, window[1:]).item())
        baseline_nll.append(F.cross_entropy(baseline, window[1:]).item())
    mean, stderr = mean_and_stderr(kl)
    return {
        "kl": mean,
        "kl_stderr": stderr,
        "top1": mean_and_stderr(agree)[0],
        "ppl": safe_exp(mean_and_stderr(nll)[0]),
        "baseline_ppl": safe_exp(mean_and_stderr(baseline_nll)[0]),
        "batch_kl": batch_kl(model, ids),
    }


def command(options: argparse.Namespace) -> str:
    """What to run, without this machine's paths."""
    paths = {options.model: "DIR" if Path(options.model).exists() else options.model, str(options.text): "FILE"}
    words = [w for w in sys.argv[1:] if w not in ("--out", str(options.out))]
    return " ".join(["python benchmarks/bench_fp8_accuracy.py", *(paths.get(w, w) for w in words)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--name", default="smollm2-135m")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--only", nargs="*", default=list(CHOICES), choices=list(CHOICES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    logging.disable_progress_bar()
    text, origin = evaluation_text(options.text)
    baseline, tokenizer = open_model(options.model, options.device, "float32")
    ids = windows(tokenizer, text, options.seq_len, options.windows)
    expected = [torch.cat(list(next_token_logits(baseline, window))).cpu() for window in ids]
    del baseline
    rows = []
    for name in options.only:
        work = Path(tempfile.mkdtemp())
        try:
            convert(options.model, recipe(name), work / "out")
            converted, _ = open_model(work / "out", options.device, "float32")
            rows.append({"op": "fp8_accuracy", "case": {"blocks": name}, **measure(converted, expected, ids)})
            del converted
        finally:
            shutil.rmtree(work)
        print(json.dumps(rows[-1]), flush=True)
    result = {
        "model": options.name,
        "text": origin.replace(str(options.text), options.text.name) if options.text else origin,
        "windows": len(ids),
        "seq_len": options.seq_len,
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu",
        "torch": torch.__version__,
        "command": command(options),
        "rows": rows,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"bench_fp8_accuracy-{options.name}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
