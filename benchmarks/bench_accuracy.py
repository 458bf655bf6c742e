"""What each recipe costs in accuracy: perplexity, KL, top-1, bits and seconds, on the same tokens for all.

    python benchmarks/bench_accuracy.py --model demo --name smollm2-135m [--text FILE] [--device cpu] [--windows 24]
        [--seq-len 1024] [--recipes NAME ...] [--gptq FILE ... [--gptq-windows 32]] [--even] [--attention [--key-bias]]

--gptq adds each recipe with its weights rounded by GPTQ, calibrated on so many windows of these texts; --even adds the
schemes with the `even` rule on both sides, which isolate a rotation from the scale search; --attention those of
attention and the KV cache, on wide weights; --key-bias leaves a bias in the keys that are quantized.
Writes benchmarks/results/bench_accuracy-<name>.json; `python benchmarks/render.py` makes the tables.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from quantrot import Calibration, convert
from quantrot.evals.divergence import divergence
from quantrot.evals.text import evaluation_text
from quantrot.formats import bits_per_weight
from quantrot.load import open_model
from quantrot.recipe import load_recipe, shipped_recipes
from quantrot.tokenizer import windows

RESULTS = Path(__file__).parent / "results"


def _w4a4(blocks: str | int | None, online: bool = False, activations: bool = True) -> dict[str, Any]:
    """MXFP4 with the even rule, rotated in blocks or not at all."""
    rule: dict[str, Any] = {"match": "*", "weights": {"format": "mxfp4", "scale_rule": "even"}}
    if activations:
        rule["activations"] = {"format": "mxfp4", "scale_rule": "even"}
    recipe: dict[str, Any] = {"linear": [rule]}
    if blocks is not None:
        recipe["rotations"] = {
            "R1": {"kind": "random-hadamard", "block": blocks},
            "R2": {"kind": "hadamard", "block": blocks},
        }
        if online:
            recipe["rotations"]["R4"] = {"kind": "hadamard", "block": blocks}
    return recipe


EVEN: dict[str, dict[str, Any]] = {
    "even: none": _w4a4(None),
    "even: norms folded only": _w4a4(1),
    "even: full R1 R2 R4": _w4a4("full", online=True),
    "even: 32 R1 R2 R4": _w4a4("<=32", online=True),
    "even: 32 R1 R2": _w4a4("<=32"),
    "even: weights only": _w4a4(None, activations=False),
    "even: weights only 32 R1 R2 R4": _w4a4("<=32", online=True, activations=False),
    "fp8: 32 R1 R2 R4": {
        "rotations": _w4a4("<=32", online=True)["rotations"],
        "linear": [
            {
                "match": "*",
                "weights": {"format": "fp8", "block": "channel"},
                "activations": {"format": "fp8", "block": "token"},
            }
        ],
    },
}


def _attention(rotate: str = "", **fields: str) -> dict[str, Any]:
    """Attention and KV cache on wide weights, with these rotations of a whole head."""
    return {"rotations": {name: {"kind": "hadamard"} for name in rotate.split()}, **fields}


ATTENTION: dict[str, dict[str, Any]] = {
    "attention: fp8": _attention(attention="fp8", kv_cache="fp8"),
    "attention: fp8, scales per tensor": _attention(attention="fp8", kv_cache="fp8"),
    "attention: fp8, R3": _attention("R3", attention="fp8", kv_cache="fp8"),
    "attention: fp8, R2 R3": _attention("R2 R3", attention="fp8", kv_cache="fp8"),
    "kv_cache: fp8": _attention(kv_cache="fp8"),
    "kv_cache: fp8, R3": _attention("R3", kv_cache="fp8"),
    "kv_cache: int4": _attention(kv_cache="int4"),
    "kv_cache: int4, R3": _attention("R3", kv_cache="int4"),
    "kv_cache: int4, R2 R3": _attention("R2 R3", kv_cache="int4"),
}


def with_gptq(recipe: str) -> dict[str, Any]:
    """The recipe with all its weights rounded by GPTQ."""
    loaded = load_recipe(recipe)
    tree = loaded.resolved()
    for rule in tree["linear"]:
        rule["weights"]["rounding"] = "gptq"
    if loaded.rotations.learned:  # a path starts at the recipe's file, and this has none
        tree["rotations"]["path"] = str(loaded.rotations_file)
    return tree


class Remembered:
    """A model that has been run once: its last hidden states a window, and its head. Half the time and memory."""

    def __init__(self, model: Any, windows: torch.Tensor) -> None:
        self.config, self.device, self.head = model.config, model.device, model.get_output_embeddings()
        decoder = model.get_decoder()
        with torch.no_grad():
            self.outputs = {
                tuple(ids.tolist()): decoder(input_ids=ids[None].to(model.device), use_cache=False) for ids in windows
            }

    def get_output_embeddings(self) -> Any:
        return self.head

    def get_decoder(self) -> Any:
        return lambda input_ids, use_cache: self.outputs[tuple(input_ids[0].tolist())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--name", default="smollm2-135m")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--convert-device", default="cpu")
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument(
        "--recipes", nargs="*", default=[name for name in shipped_recipes() if not load_recipe(name).calibrated]
    )
    parser.add_argument("--gptq", type=Path, nargs="*", default=[])
    parser.add_argument("--gptq-windows", type=int, default=32)
    parser.add_argument("--even", nargs="?", const=",".join(EVEN), default="")
    parser.add_argument("--attention", action="store_true")
    parser.add_argument("--key-bias", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    logging.disable_progress_bar()
    text, origin = evaluation_text(options.text)
    original, tokenizer = open_model(options.model, options.device, "float32")
    ids = windows(tokenizer, text, options.seq_len, options.windows)
    baseline = Remembered(original, ids)
    del original
    recipes: dict[str, Any] = {name: name for name in options.recipes}
    texts = tuple(evaluation_text(path)[0] for path in options.gptq)
    calibration = Calibration(texts, options.gptq_windows) if texts else None
    if calibration is not None:
        recipes |= {f"{name}, gptq": with_gptq(name) for name in options.recipes if load_recipe(name).linear}
    recipes |= {name: EVEN[name] for name in options.even.split(",") if name}
    recipes |= ATTENTION if options.attention else {}
    rows = []
    for name, recipe in recipes.items():
        where = options.device, options.convert_device, options.key_bias
        text = calibration if load_recipe(recipe).calibrated else None
        rows.append(measure(options.model, name, recipe, baseline, ids, *where, text))
        print(json.dumps(rows[-1]), flush=True)
    result = {
        "model": options.name,
        "text": origin.replace(str(options.text), options.text.name) if options.text else origin,
        "windows": len(ids),
        "seq_len": options.seq_len,
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu",
        "torch": torch.__version__,
        "command": "python benchmarks/bench_accuracy.py " + " ".join(sys.argv[1:]),
        "rows": rows,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"bench_accuracy-{options.name}.json").write_text(json.dumps(result, indent=1) + "\n")


def measure(
    model: str,
    name: str,
    recipe: Any,
    baseline: Any,
    ids: torch.Tensor,
    device: str,
    convert_device: str,
    key_bias: bool = False,
    calibration: Calibration | None = None,
) -> dict[str, Any]:
    """Convert, load in float32, compare with the baseline on the same windows."""
    work = Path(tempfile.mkdtemp())
    try:
        started = time.monotonic()
        done = convert(model, recipe, work / "out", device=convert_device, calibration=calibration)
        seconds = time.monotonic() - started
        converted, _ = open_model(work / "out", device, "float32")
        if "per tensor" in name:
            for layer in converted.model.layers:
                layer.self_attn.granularity = "tensor"
        if key_bias:
            for layer in converted.model.layers:
                layer.self_attn.key_center = None
        shapes = [(f.weights, done.manifest["linears"][n]["shape"]) for n, f in done.plan.linears.items() if f]
        weights = sum(n * k for _, (n, k) in shapes)
        bits = sum(bits_per_weight(f, n, k) * n * k for f, (n, k) in shapes) / weights if weights else 16.0
        d = divergence(converted, baseline, ids)
    finally:
        shutil.rmtree(work)
    return {
        "op": "accuracy",
        "case": {"recipe": name},
        "ppl": d.ppl,
        "baseline_ppl": d.baseline_ppl,
        "kl": d.kl,
        "kl_stderr": d.kl_stderr,
        "top1": d.top1,
        "bits": bits,
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
