"""A decoder layer's four products by every format at every number of tokens a server meets, against bfloat16.

    python benchmarks/bench_tokens.py      # the table, and results/bench_tokens-<gpu>.json

Each layer as chain.py has it: queries, keys and values, o_proj, gate and up, silu(gate) * up, down_proj, each with the
quantization of its tokens; no norms, no attention.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from bench_mxfp4_layer import weight as mxfp4_weight
from chain import DEVICE, GPU, HIDDEN, chain, gate, int8_weight, layer_us, normal, weights
from timing import copy_gbps, write_results
from torch import Tensor
from torch.nn import functional as F

from quantrot.kernels.fp8 import fp8_linear
from quantrot.kernels.mixed import mixed_gemm
from quantrot.kernels.mxfp4 import mxfp4_gemm

TOKENS = (1, 2, 4, 8, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256, 257, 384, 512) if GPU else (1, 3)


def fp8_weight(n: int, k: int) -> tuple[Tensor, Tensor]:
    """Codes, and a scale for 128 x 128 of them."""
    return normal(n, k).to(torch.float8_e4m3fn), torch.full((-(-n // 128), -(-k // 128)), k**-0.5, device=DEVICE)


FORMATS: dict[str, tuple[Callable, Callable]] = {  # how a weight is made, and the product
    "bfloat16": (lambda n, k: (normal(n, k) * k**-0.5,), F.linear),
    "int8": (int8_weight, partial(mixed_gemm, weight_ready=True)),
    "fp8": (fp8_weight, partial(fp8_linear, b_settled=True)),
    "mxfp4": (mxfp4_weight, partial(mxfp4_gemm, activations="mxfp4", scale_rule="even", hadamard=32, settled=True)),
}


def measure(out: Path | None) -> None:
    torch.manual_seed(0)
    times: dict[str, list[float]] = {}
    for name, (make, product) in FORMATS.items():
        layers = weights(make)
        first, up = (lambda x, w, f=product: f(x, *w)), (lambda x, w, f=product: gate(f(x, *w)))
        times[name] = []
        for m in TOKENS:
            times[name].append(
                layer_us(partial(chain, layers, normal(m, HIDDEN), first, up, lambda x, w, _, f=first: f(x, w)))
            )
            print(f"{name:8s} {m:4d} {times[name][-1]:7.1f} us", flush=True)
        del layers
    if GPU:
        rows = [
            {"op": "layer", "case": {"format": name, "m": m}, "us": us, "peers_us": {"bf16": wide}}
            for name, each in times.items()
            for m, us, wide in zip(TOKENS, each, times["bfloat16"], strict=True)
        ]
        write_results("bench_tokens", copy_gbps(), rows, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the json")
    measure(parser.parse_args().out)
