"""A decoder layer's four products by every format at every number of tokens a server meets, against bfloat16.

    python benchmarks/bench_tokens.py               # the table, and results/bench_tokens-<gpu>.json
    python benchmarks/bench_tokens.py --render      # docs/tokens.svg from that

Each layer as chain.py has it: queries, keys and values, o_proj, gate and up, silu(gate) * up, down_proj, each with the
quantization of its tokens; no norms, no attention.
"""

import argparse
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from bench_mxfp4_layer import weight as mxfp4_weight
from chain import DEVICE, GPU, HIDDEN, chain, gate, int8_weight, layer_us, normal, weights
from timing import ROOT, copy_gbps, write_results
from torch import Tensor
from torch.nn import functional as F

from quantrot.kernels.fp8 import fp8_linear
from quantrot.kernels.mixed import mixed_gemm
from quantrot.kernels.mxfp4 import mxfp4_gemm

TOKENS = (1, 2, 4, 8, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256, 257, 384, 512) if GPU else (1, 3)
RESULTS = ROOT / "benchmarks" / "results" / "bench_tokens-h200.json"
PLOT = ROOT / "docs" / "tokens.svg"
COLOURS = {"int8": "#7a9a3a", "fp8": "#4878a8", "mxfp4": "#c8553d"}


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


# --- The plot --------------------------------------------------------------------------------------------------------


def plot(rows: list[dict]) -> str:
    """An SVG of how many times faster than bfloat16 each format's layer is, tokens on a scale of powers of two."""
    width, height, left, bottom, top = 760, 380, 50, 50, 20
    most = max(row["case"]["m"] for row in rows)
    high = math.ceil(max(row["peers_us"]["bf16"] / row["us"] for row in rows) * 2) / 2

    def point(m: int, times: float) -> tuple[float, float]:
        across = left + math.log2(m) / math.log2(most) * (width - left - 20)
        return round(across, 1), round(height - bottom - times / high * (height - bottom - top), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for i in range(int(high * 2) + 1):
        (x1, y), (x2, _) = point(1, i / 2), point(most, i / 2)
        parts.append(f'<line x1="{x1}" y1="{y}" x2="{x2}" y2="{y}" stroke="{"#888" if i == 2 else "#ddd"}"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{i / 2:.1f}</text>')
    for i in range(int(math.log2(most)) + 1):
        parts.append(f'<text x="{point(1 << i, 0)[0]}" y="{height - bottom + 18}" text-anchor="middle">{1 << i}</text>')
    for i, (name, colour) in enumerate(COLOURS.items()):
        points = [point(r["case"]["m"], r["peers_us"]["bf16"] / r["us"]) for r in rows if r["case"]["format"] == name]
        line = " ".join(f"{x},{y}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in points]
        parts.append(f'<text x="{width - 30}" y="{top + 16 + 18 * i}" text-anchor="end" fill="{colour}">{name}</text>')
    parts.append(
        f'<text x="{(width + left) / 2}" y="{height - 10}" text-anchor="middle">tokens; a decoder layer\'s products of '
        "Llama 3.1 8B, times faster than bfloat16</text>"
    )
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="the plot, of results that are there")
    parser.add_argument("--out", type=Path, help="the json")
    asked = parser.parse_args()
    if asked.render:
        PLOT.write_text(plot(json.loads(RESULTS.read_text())["rows"]))
        print(f"wrote {PLOT}")
    else:
        measure(asked.out)
