"""One token's attention between its projections: one kernel against transformers' own, compiled by Inductor.

    python benchmarks/bench_one_token.py [--out FILE]    # the table, and results/bench_one_token-<gpu>.json
    python benchmarks/bench_one_token.py --sweep         # every launch configuration, best first

A CUDA graph holds the merged projection (int8 weights, 4096 -> queries, keys and values), the attention and the output
projection of several layers, one after another, each with a weight and a cache of its own. A time is what the attention
adds to the same chain without it, a layer: its start and the gap before it are in it, and so is what it hides behind
the projection. The peer is RoPE (behind norms of queries and keys, as Qwen3 has them, where `norms` is 1), two copies
into the static cache, keys and values repeated, and SDPA with a mask.
`alone` is the kernel after itself. The floor reads K and V at the speed of a copy in the same run. `error` is the
relative difference of a layer's attention from the peer's.
"""

import argparse
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from chain import DEVICE, EPSILON, GPU, HIDDEN, LAYERS, int8_weight, layer_us, normal
from timing import copy_gbps, write_results
from torch import Tensor
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from quantrot.kernels.attention import one_token
from quantrot.kernels.attention.one_token import Plan
from quantrot.kernels.fp8.reference import rms_norm
from quantrot.kernels.mixed import mixed_gemm

CASES = [  # sequences, tokens, room in the cache, head_dim, query heads, key heads, whether these have norms
    (1, 200, 256, 128, 32, 8, 0),
    (1, 2048, 2104, 128, 32, 8, 0),
    (1, 8192, 8248, 128, 32, 8, 0),
    (1, 32768, 32824, 128, 32, 8, 0),
    (1, 200, 32768, 128, 32, 8, 0),
    (4, 2048, 2104, 128, 32, 8, 0),
    (8, 1000, 1056, 128, 32, 8, 0),
    (16, 2048, 2104, 128, 32, 8, 0),
    (32, 200, 256, 128, 32, 8, 0),
    (32, 2048, 2104, 128, 32, 8, 0),
    (1, 2048, 2104, 64, 32, 8, 0),
    (1, 2048, 2104, 128, 64, 8, 0),
    (1, 2048, 2104, 128, 32, 32, 0),
    (1, 2048, 2104, 256, 16, 8, 0),
    (1, 200, 256, 128, 32, 8, 1),
    (1, 2048, 2104, 128, 32, 8, 1),
    (32, 2048, 2104, 128, 32, 8, 1),
]
CASES = CASES if GPU else [(2, 20, 32, 128, 2, 1, 0), (2, 20, 32, 128, 2, 1, 1)]
SWEPT = [
    Plan(warps, split, blocks)
    for warps, split, blocks in product((2, 4, 8, 16), (1, 2, 4, 8, 16), (1, 2, 3, 4))
    if blocks == 1 or warps * blocks in (8, 12, 16)
]
NAMES = "batch", "tokens", "room", "head_dim", "heads", "key_heads", "norms"
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Case:
    """Weights and caches of the layers, and what runs on them."""

    def __init__(self, batch: int, tokens: int, room: int, dim: int, heads: int, groups: int, norms: int) -> None:
        self.batch, self.tokens, self.dim, self.heads, self.groups = batch, tokens, dim, heads, groups
        self.sizes = [heads * dim, groups * dim, groups * dim]
        self.layers = LAYERS if batch * room < 1 << 18 else 2
        self.inward = [int8_weight(sum(self.sizes), HIDDEN) for _ in range(self.layers)]
        self.outward = [int8_weight(HIDDEN, heads * dim) for _ in range(self.layers)]
        shape = batch, groups, room, dim
        self.caches = [(normal(*shape), normal(*shape)) for _ in range(self.layers)]
        self.cos, self.sin, self.x = normal(1, 1, dim), normal(1, 1, dim), normal(batch, 1, HIDDEN)
        self.attended = normal(batch, 1, heads * dim)
        self.norms = (normal(dim), normal(dim)) if norms else None
        self.count = torch.tensor(tokens - 1, device=DEVICE)
        seen = torch.arange(shape[2], device=DEVICE) < tokens
        self.mask = seen.view(1, 1, 1, -1).expand(batch, 1, 1, -1)

    def chain(self, attend: Attend) -> Tensor:
        x = self.x
        for inward, outward, cache in zip(self.inward, self.outward, self.caches, strict=True):
            x = mixed_gemm(attend(mixed_gemm(x, *inward, weight_ready=True), *cache), *outward, weight_ready=True)
        return x

    def split(self, y: Tensor) -> list[Tensor]:
        return [t.view(self.batch, 1, -1, self.dim) for t in y.split(self.sizes, dim=-1)]

    def nothing(self, y: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return self.attended

    def ours(self, plan: Plan | None) -> Attend:
        def attend(y: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            q, k, v = self.split(y)
            places = keys, values, self.count, False
            options = (self.mask, self.norms, EPSILON, self.dim**-0.5, True, plan)[: 6 if GPU else 4]
            run = one_token.launch if GPU else one_token.rope_attend_one_reference
            return run(q, k, v, self.cos, self.sin, *places, *options).reshape(self.batch, 1, -1)

        return attend

    def transformers(self) -> Attend:
        def attend(y: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            q, k, v = (t.transpose(1, 2) for t in self.split(y))
            if self.norms is not None:
                q, k = (rms_norm(t, gain, EPSILON) for t, gain in zip((q, k), self.norms, strict=True))
            q, k = apply_rotary_pos_emb(q, k, self.cos, self.sin)
            at = torch.arange(1, device=y.device) + self.count
            keys.index_copy_(2, at, k)
            values.index_copy_(2, at, v)
            keys, values = (repeat_kv(t, self.heads // self.groups) for t in (keys, values))
            o = F.scaled_dot_product_attention(q, keys, values, attn_mask=self.mask, scale=self.dim**-0.5)
            return o.transpose(1, 2).reshape(self.batch, 1, -1)

        torch._dynamo.reset()
        return torch.compile(attend, fullgraph=True, dynamic=False) if GPU else attend

    def us(self, attend: Attend) -> float:
        """A layer of the chain."""
        return layer_us(lambda: self.chain(attend), self.layers)

    def alone_us(self) -> float:
        ys = normal(self.layers, self.batch, 1, sum(self.sizes))
        run = self.ours(None)
        return layer_us(lambda: [run(y, *cache) for y, cache in zip(ys, self.caches, strict=True)], self.layers)


def measure(sizes: tuple[int, ...], gbps: float) -> dict[str, Any]:
    case = Case(*sizes)
    without = case.us(case.nothing)
    peer = case.transformers()
    y = mixed_gemm(case.x, *case.inward[0], weight_ready=True)
    a, b = (attend(y, *case.caches[0]).float() for attend in (case.ours(None), peer))
    return {
        "op": "rope_attend_one",
        "case": dict(zip(NAMES, sizes, strict=True)),
        "us": case.us(case.ours(None)) - without,
        "alone_us": case.alone_us(),
        "floor_us": 4 * case.batch * case.groups * case.tokens * case.dim / gbps / 1e3,
        "peers_us": {"transformers": case.us(peer) - without},
        "error": ((a - b).norm() / b.norm()).item(),
    }


def line(row: dict[str, Any]) -> str:
    sizes, peer = " ".join(f"{n:6d}" for n in row["case"].values()), row["peers_us"]["transformers"]
    return (
        f"{sizes} {row['us']:9.2f} {row['alone_us']:9.2f} {row['floor_us']:9.2f} {peer:12.2f} {peer / row['us']:6.2f} "
        f"{row['error']:9.1e}"
    )


def sweep() -> None:
    for sizes in CASES:
        case = Case(*sizes)
        without, found = case.us(case.nothing), {}
        for plan in SWEPT:
            if plan.split * case.batch * case.groups <= 4 * 132:
                found[plan] = case.us(case.ours(plan)) - without
        best = sorted(found, key=found.__getitem__)
        print(sizes, ", ".join(f"{p.warps}x{p.split}/{p.blocks} {found[p]:.2f}" for p in best[:8]), flush=True)


def main(out: Path | None) -> None:
    gbps, rows = copy_gbps() if GPU else 1.0, []
    print(
        " batch tokens   room    dim  heads   keys  norms        us     alone     floor transformers      x     error"
    )
    for sizes in CASES:
        rows.append(measure(sizes, gbps))
        print(line(rows[-1]), flush=True)
    if GPU:
        write_results("bench_one_token", gbps, rows, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sweep", action="store_true")
    asked = parser.parse_args()
    sweep() if asked.sweep else main(asked.out)
