"""A training step of Llama-shaped models on a GPU, as Python runs it and under torch.compile: forward, backward and
AdamW, in bfloat16, FP8 and MXFP4.

    python benchmarks/bench_train.py [--shape 1b 8b]

float32 weights under autocast to bfloat16, AdamW in one kernel, random tokens. A step is the median of --steps,
synchronized at both ends. Compiled is torch.compile(mode="reduce-overhead"), which replays forward and backward as CUDA
graphs. `error` is how far a step's gradients of the linears are from bfloat16's, relative: 4-bit and 8-bit products'
rounding, and the same compiled and not.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from timing import copy_gbps, write_results  # noqa: E402

from quantrot.modules import train_in_fp8, train_in_mxfp4  # noqa: E402

SHAPES: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {  # of some layers; sequences and their tokens
    "1b": (
        {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"num_hidden_layers": 4},
        (8, 256),
    ),
    "8b": (
        {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"num_hidden_layers": 2},
        (8, 1024),
    ),
}
ARITHMETIC: dict[str, Callable[[Any], Any]] = {"bf16": lambda model: None, "fp8": train_in_fp8, "mxfp4": train_in_mxfp4}
VOCABULARY = 8192
WARM = 6  # steps: compiles, records, replays

Row = dict[str, Any]


def trained(shape: str, arithmetic: str, compiled: bool, steps: int) -> tuple[float, list[torch.Tensor]]:
    """(microseconds a step, the linears' gradients of the first)."""
    config, tokens = SHAPES[shape]
    torch.compiler.reset()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **config))
        ids = torch.randint(0, VOCABULARY, tokens)
    ARITHMETIC[arithmetic](model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    run = torch.compile(model, mode="reduce-overhead") if compiled else model

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()

    step()
    gradients = [p.grad.clone() for name, p in model.named_parameters() if name.endswith("proj.weight")]
    times = []
    for i in range(WARM + steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step()
        torch.cuda.synchronize()
        times += [time.perf_counter() - start] if i >= WARM else []
    return statistics.median(times) * 1e6, gradients


def relative(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """The mean over the matrices."""
    return statistics.mean(((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True))


def bench(shape: str, steps: int) -> list[Row]:
    (config, (sequences, tokens)), rows = SHAPES[shape], []
    wide: dict[bool, tuple[float, list[torch.Tensor]]] = {}
    for arithmetic in ARITHMETIC:
        for compiled in (False, True):
            found = us, gradients = trained(shape, arithmetic, compiled, steps)
            peer, exact = wide.setdefault(compiled, found)
            case = {"shape": shape, "layers": config["num_hidden_layers"], "tokens": sequences * tokens}
            case |= {"arithmetic": arithmetic, "compiled": compiled}
            error = relative(gradients, exact)
            rows.append({"op": "train", "case": case, "us": us, "peers_us": {"bf16": peer}, "error": error})
            how = "compiled" if compiled else "eager"
            line = f"{shape:6s} {arithmetic:6s} {how:9s} {us / 1e3:9.2f} ms  {us / peer:6.2f} of bf16  {error:.3f}"
            print(line, flush=True)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    gbps = copy_gbps()
    write_results("bench_train", gbps, [row for shape in asked.shape for row in bench(shape, asked.steps)], asked.out)
