"""A converted model on a CPU against the original in bfloat16: a prompt, and a token after it, not compiled.

    python benchmarks/bench_cpu.py [--model demo] [--prompt 512] [--rounds 9] [--recipes NAME ...]

The two models take turns, since a shared machine's speed drifts, and medians are of as many runs each. A prompt's time
is of the decoder alone, whose head is the same in both. Writes benchmarks/results/bench_cpu-<name>.json.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache
from transformers.utils import logging

from quantrot import convert
from quantrot.load import open_model

RESULTS = Path(__file__).parent / "results"
RECIPES = ["int8-weight-only", "mxfp4-weight-only", "fp8-dynamic", "mxfp4", "hadamard-mxfp4", "quarot-mxfp4"]
BEFORE = 64  # tokens in the cache of the one that is decoded


def prefill(model: Any, ids: torch.Tensor) -> Callable[[], Any]:
    """The whole prompt."""
    return partial(model.get_decoder(), input_ids=ids, use_cache=False)


def decode(model: Any, ids: torch.Tensor) -> Callable[[], Any]:
    """A token after BEFORE others, always in the same place."""
    cache = DynamicCache(config=model.config)
    model(input_ids=ids[:, :BEFORE], past_key_values=cache)

    def step() -> None:
        model(input_ids=ids[:, BEFORE : BEFORE + 1], past_key_values=cache)
        cache.crop(-1)

    return step


def milliseconds(call: Callable[[], Any], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--name", default="smollm2-135m")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--recipes", nargs="*", default=RECIPES)
    options = parser.parse_args()
    logging.disable_progress_bar()
    original, _ = open_model(options.model, "cpu", "bfloat16")
    ids = torch.randint(0, original.config.vocab_size, (1, options.prompt), generator=torch.Generator().manual_seed(0))
    rows = []
    for recipe in options.recipes:
        with tempfile.TemporaryDirectory() as work, torch.inference_mode():
            converted, _ = open_model(convert(options.model, recipe, Path(work) / "out").out, "cpu", "bfloat16")
            for phase, tokens, times in ((prefill, options.prompt, 1), (decode, 1, 8)):
                calls = [phase(model, ids) for model in (converted, original)]
                for call in calls:
                    call()
                runs = [[milliseconds(call, times) for call in calls] for _ in range(options.rounds)]
                ms, wide = (statistics.median(of) for of in zip(*runs, strict=True))
                case = {"recipe": recipe, "phase": phase.__name__, "tokens": tokens}
                rows.append({"op": "model", "case": case, "ms": ms, "peers_ms": {"bf16": wide}})
                print(
                    f"{recipe:20} {phase.__name__:8} {ms:8.1f} ms, bfloat16 {wide:8.1f} ms, {ms / wide:.2f} of it",
                    flush=True,
                )
    result = {
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "command": " ".join(["python", "benchmarks/bench_cpu.py", *sys.argv[1:]]),
        "rows": rows,
    }
    (RESULTS / f"bench_cpu-{options.name}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
