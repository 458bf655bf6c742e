"""A decoder layer's four MXFP4 products of one token, one after another, with what lies between them (chain.py).

    python benchmarks/bench_mxfp4_layer.py      # the table, and results/bench_mxfp4_layer-<gpu>.json

W4A4, Hadamard 32; a norm with its residual before each two products, silu(gate) * up before down_proj.

    two            a kernel quantizes the token, another one multiplies it
    two, settled   the same; the weight is read before the quantizer has ended
    one            the product quantizes its token
    one, settled   the same; the weight is read before the kernel before has ended: what Mxfp4Linear runs
    inside         the same; norms and residuals are in the products' kernels, too: what decoder layers run
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
Weight = tuple[Tensor, Tensor]
Run = Callable[[], Tensor]


def apart(layers: list, x: Tensor, ones: Tensor, product: Callable[[Tensor, Weight], Tensor]) -> Tensor:
    """The chain with norms, which add residuals, in kernels of their own."""

    def normed(y: Tensor, w: Weight) -> Tensor:
        return product(norm(y, x, ones), w)

    return chain(layers, x, normed, lambda y, w: gate(normed(y, w)), lambda y, w, _: product(y, w))


def inside(layers: list, x: Tensor, ones: Tensor, **options: Any) -> Tensor:
    """The chain with norms and residuals in the products."""

    def normed(y: Tensor, w: Weight) -> Tensor:
        return mxfp4_fused(y, *w, norm=ones, epsilon=EPSILON, **options)

    def added(y: Tensor, w: Weight, residual: Tensor) -> Tensor:
        return mxfp4_fused(y, *w, residual=residual, **options)

    return chain(layers, x, normed, lambda y, w: gate(normed(y, w)), added)


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
        "A16": one,
        "A16, settled": partial(one, **ready),
    }
    found: dict[str, Run] = {name: partial(apart, *operands, product) for name, product in products.items()}
    return found | {
        "inside": partial(inside, *operands, **A4, **ready),
        "A16, inside": partial(inside, *operands, **ready),
    }


def weight(n: int, k: int) -> Weight:
    codes = torch.randint(0, 256, (n, k // 2), device=DEVICE, dtype=torch.uint8)
    return codes, torch.randint(116, 121, (n, k // 32), device=DEVICE).to(torch.uint8)


def main(asked: argparse.Namespace) -> None:
    torch.manual_seed(0)
    layers, x, ones = weights(weight), normal(1, HIDDEN), normal(HIDDEN).fill_(1)
    gbps = copy_gbps() if GPU else 1.0
    floor = sum(n * k for n, k in SHAPES) * (0.5 + 1 / 32) / gbps / 1e3
    print(f"weights at the speed of a copy: {floor:.1f} us\n{'':14s} {'us':>6s}")
    rows, runs = [], ways(layers, x, ones)
    for name, run in runs.items():
        us, y = layer_us(run), run()
        exact = None if "A16" in name or name == "inside" else torch.equal(y, runs["two"]())
        print(f"{name:14s} {us:6.1f}" + ("" if exact is None else f"  the same bits as two: {exact}"), flush=True)
        rows.append({"op": "layer", "case": {"way": name}, "us": us, "floor_us": floor, "peers_us": {}, "same": exact})
    for name, options in (("inside", A4), ("A16, inside", {})):
        want = by_torch(layers, x, ones, settled=True, **options).float()
        print(f"{name} is off by {((runs[name]().float() - want).norm() / want.norm()).item():.1e}")
    if GPU:
        write_results("bench_mxfp4_layer", gbps, rows, asked.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the json")
    main(parser.parse_args())
