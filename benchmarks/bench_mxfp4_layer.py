"""A decoder layer's four MXFP4 products of few tokens, one after another, with what lies between them (chain.py).

    python benchmarks/bench_mxfp4_layer.py      # the table, and results/bench_mxfp4_layer-<gpu>.json

W4A4, Hadamard 32; a norm with its residual before each two products, silu(gate) * up before down_proj.

    two            a kernel quantizes the tokens, another one multiplies them
    two, settled   the same; the weight is read before the quantizer has ended
    one            mxfp4_gemm, whose product quantizes one token itself
    one, settled   the same; the weight is read before the kernel before has ended: what Mxfp4Linear runs
    inside         the same; norms, gate and residuals are in the linears' kernels, too: what decoder layers run
    A8, settled    W4A8
    A8, inside
    A16            no quantization at all
    A16, settled
    A16, inside
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from chain import DEVICE, EPSILON, GPU, HIDDEN, SHAPES, chain, gate, layer_us, norm, normal, weights
from timing import copy_gbps, write_results
from torch import Tensor

from quantrot.kernels.fp8.reference import rms_norm
from quantrot.kernels.mxfp4 import ScaleRule, mxfp4_fused, mxfp4_gemm, triton_rows

A4: dict[str, Any] = {"activations": "mxfp4", "scale_rule": "even", "hadamard": 32}
A8: dict[str, Any] = {"activations": "fp8", "scale_rule": "bf16"}
INSIDE: dict[str, dict[str, Any]] = {"inside": A4, "A8, inside": A8, "A16, inside": {}}
Weight = tuple[Tensor, Tensor]
Run = Callable[[], Tensor]


def apart(layers: list, x: Tensor, ones: Tensor, product: Callable[[Tensor, Weight], Tensor]) -> Tensor:
    """The chain with norms, which add residuals, in kernels of their own."""

    def normed(y: Tensor, w: Weight) -> Tensor:
        return product(norm(y, x, ones), w)

    return chain(layers, x, normed, lambda y, w: gate(normed(y, w)), lambda y, w, _: product(y, w))


def inside(layers: list, x: Tensor, ones: Tensor, **options: Any) -> Tensor:
    """The chain with norms, gate and residuals in the linears' kernels."""

    def normed(y: Tensor, w: Weight) -> Tensor:
        return mxfp4_fused(y, *w, norm=ones, epsilon=EPSILON, **options)

    def added(y: Tensor, w: Weight, residual: Tensor) -> Tensor:
        gated = y.shape[1] == 4 * w[0].shape[1]  # gate and up; a byte of the weight is two columns
        return mxfp4_fused(y, *w, residual=residual, gated=gated, **options)

    return chain(layers, x, normed, normed, added)


def by_torch(layers: list, x: Tensor, ones: Tensor, **options: Any) -> Tensor:
    """What `inside` gives, operation by operation."""

    def normed(y: Tensor, w: Weight) -> Tensor:
        return mxfp4_gemm(rms_norm(y, ones, EPSILON), *w, **options)

    def added(y: Tensor, w: Weight, residual: Tensor) -> Tensor:
        return residual + mxfp4_gemm(y, *w, **options)

    return chain(layers, x, normed, lambda y, w: gate(normed(y, w)), added)


def ways(*operands: Any) -> dict[str, Run]:
    def two(x: Tensor, w: Weight, **options: Any) -> Tensor:
        return mxfp4_gemm(triton_rows.round_trip(x, ScaleRule.even, A4["hadamard"]), *w, **options)

    def one(x: Tensor, w: Weight, **options: Any) -> Tensor:
        return mxfp4_gemm(x, *w, **options)

    ready: dict[str, Any] = {"settled": True}
    products = {
        "two": two,
        "two, settled": partial(two, **ready),
        "one": partial(one, **A4),
        "one, settled": partial(one, **A4, **ready),
        "A8, settled": partial(one, **A8, **ready),
        "A16": one,
        "A16, settled": partial(one, **ready),
    }
    found: dict[str, Run] = {name: partial(apart, *operands, product) for name, product in products.items()}
    return found | {name: partial(inside, *operands, **options, **ready) for name, options in INSIDE.items()}


def weight(n: int, k: int) -> Weight:
    codes = torch.randint(0, 256, (n, k // 2), device=DEVICE, dtype=torch.uint8)
    return codes, torch.randint(116, 121, (n, k // 32), device=DEVICE).to(torch.uint8)


def main(asked: argparse.Namespace) -> None:
    torch.manual_seed(0)
    layers, ones = weights(weight), normal(HIDDEN).fill_(1)
    gbps = copy_gbps() if GPU else 1.0
    floor = sum(n * k for n, k in SHAPES) * (0.5 + 1 / 32) / gbps / 1e3
    print(f"weights at the speed of a copy: {floor:.1f} us")
    rows = []
    for tokens in asked.tokens:
        print(f"\n{f'{tokens} tokens':14s} {'us':>6s}")
        x = normal(tokens, HIDDEN)
        runs = ways(layers, x, ones)
        for name, run in runs.items():
            us, y = layer_us(run), run()
            same = torch.equal(y, runs["two"]()) if name in ("two, settled", "one", "one, settled") else None
            error = None
            if name in INSIDE:
                want = by_torch(layers, x, ones, settled=True, **INSIDE[name]).float()
                error = ((y.float() - want).norm() / want.norm()).item()
            says = f"the same bits as two: {same}" if same is not None else f"off by {error:.1e}" if error else ""
            print(f"{name:14s} {us:6.1f}  {says}".rstrip(), flush=True)
            case = {"way": name, "tokens": tokens}
            rows.append({"op": "layer", "case": case, "us": us, "floor_us": floor, "same": same, "error": error})
    if GPU:
        write_results("bench_mxfp4_layer", gbps, rows, asked.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--out", type=Path, help="the json")
    main(parser.parse_args())
