"""What 8 bits cost attention: relative error to float64, with and without a rotation of queries and keys.

    python benchmarks/bench_attention_error.py [--device cpu] [--seeds 4]

Data: normal, and FlashAttention-3's test distribution N(0, 1) + N(0, 100) Bernoulli(0.001), for q, k and v alike.
Queries and keys are in e4m3, or in int8 where it says so; `scores` rounds them alone, to e4m3. Writes
benchmarks/results/bench_attention_error-<device>.json; render.py makes the table.
"""

import argparse
import json
import statistics
import sys
from itertools import product
from pathlib import Path

import torch
from torch.nn import functional as F

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from quantrot.kernels.attention import dequantize_heads, fp8_attention, quantize_heads  # noqa: E402
from quantrot.kernels.hadamard import hadamard_transform  # noqa: E402

CASES = list(product(("normal", "outliers"), (64, 128), (512, 2048, 8192), (True, False)))


def draw(kind: str, *shape: int) -> torch.Tensor:
    x = torch.randn(shape)
    return x + 10 * torch.randn(shape) * (torch.rand(shape) < 0.001) if kind == "outliers" else x


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)


def measure(kind: str, dim: int, seq: int, causal: bool, device: str, seed: int) -> dict[str, float]:
    torch.manual_seed(seed)
    q, k, v = (draw(kind, 1, 1, seq, dim).to(device) for _ in range(3))
    wide, turned = exact(q, k, v, causal), [hadamard_transform(t) for t in (q, k)]

    def error(y: torch.Tensor) -> float:
        return ((y.double() - wide).norm() / wide.norm()).item()

    def scores(a: torch.Tensor, b: torch.Tensor) -> float:
        return error(exact(*(dequantize_heads(*quantize_heads(t), torch.float32) for t in (a, b)), v, causal))

    return {
        "per tensor": error(fp8_attention(q, k, v, causal=causal, granularity="tensor", scores="fp8")),
        "per block": error(fp8_attention(q, k, v, causal=causal, scores="fp8")),
        "rotated": error(fp8_attention(*turned, v, causal=causal, scores="fp8")),
        "int8": error(fp8_attention(q, k, v, causal=causal)),
        "int8, rotated": error(fp8_attention(*turned, v, causal=causal)),
        "scores": scores(q, k),
        "scores, rotated": scores(*turned),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=4)
    options = parser.parse_args()
    rows = []
    for case in CASES:
        runs = [measure(*case, options.device, seed) for seed in range(options.seeds)]
        mean = {name: statistics.mean(run[name] for run in runs) for name in runs[0]}
        rows.append({"case": dict(zip(("data", "head_dim", "seq", "causal"), case, strict=True)), "error": mean})
        print(json.dumps(rows[-1]), flush=True)
    command = " ".join(["python benchmarks/bench_attention_error.py", *sys.argv[1:]])
    result = {"seeds": options.seeds, "torch": torch.__version__, "command": command, "rows": rows}
    name = ROOT / "benchmarks" / "results" / f"bench_attention_error-{options.device}.json"
    name.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
