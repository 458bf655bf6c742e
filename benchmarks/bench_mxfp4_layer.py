"""A decoder layer's four MXFP4 products of one token, one after another, with what lies between them (chain.py).

    python benchmarks/bench_mxfp4_layer.py      # the table, and results/bench_mxfp4_layer-<gpu>.json

W4A4, Hadamard 32; a norm with its residual before each two products, silu(gate) * up before down_proj.

    two            a kernel quantizes the token, another one multiplies it
    two, settled   the same; the weight is read before the quantizer has ended
    one            the product quantizes its token
    one, settled   the same; the weight is read before the kernel before has ended: what Mxfp4Linear runs
    A16            no quantization at all
    A16, settled
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from chain import DEVICE, GPU, HIDDEN, SHAPES, chain, gate, layer_us, norm, normal, weights
from timing import copy_gbps, write_results
from torch import Tensor

from quantrot.kernels.mxfp4 import ScaleRule, mxfp4_gemm, triton_rows

HADAMARD = 32
Weight = tuple[Tensor, Tensor]
Product = Callable[[Tensor, Weight], Tensor]


def products() -> dict[str, Product]:
    found: dict[str, Product] = {}
    for name, settled in (("", False), (", settled", True)):
        plain = partial(mxfp4_gemm, settled=settled)
        found["two" + name] = lambda x, w, f=plain: f(triton_rows.round_trip(x, ScaleRule.even, HADAMARD), *w)
        one = partial(plain, activations="mxfp4", scale_rule="even", hadamard=HADAMARD)
        found["one" + name] = lambda x, w, f=one: f(x, *w)
        found["A16" + name] = lambda x, w, f=plain: f(x, *w)
    return found


def weight(n: int, k: int) -> Weight:
    codes = torch.randint(0, 256, (n, k // 2), device=DEVICE, dtype=torch.uint8)
    return codes, torch.randint(116, 121, (n, k // 32), device=DEVICE).to(torch.uint8)


def main(asked: argparse.Namespace) -> None:
    torch.manual_seed(0)
    layers, x, ones = weights(weight), normal(1, HIDDEN), normal(HIDDEN).fill_(1)
    gbps = copy_gbps() if GPU else 1.0
    floor = sum(n * k for n, k in SHAPES) * (0.5 + 1 / 32) / gbps / 1e3
    print(f"weights at the speed of a copy: {floor:.1f} us\n{'':14s} {'us':>6s}")
    rows, expected = [], None
    for name, product in products().items():
        run = partial(
            chain, layers, x,
            lambda y, w, f=product: f(norm(y, x, ones), w),
            lambda y, w, f=product: gate(f(norm(y, x, ones), w)),
            lambda y, w, _, f=product: f(y, w),
        )  # fmt: skip
        us, y = layer_us(run), run()
        expected = y if expected is None else expected
        same = None if name.startswith("A16") else torch.equal(y, expected)
        print(f"{name:14s} {us:6.1f}" + ("" if same is None else f"  the same bits: {same}"), flush=True)
        rows.append({"op": "layer", "case": {"way": name}, "us": us, "floor_us": floor, "peers_us": {}, "same": same})
    if GPU:
        write_results("bench_mxfp4_layer", gbps, rows, asked.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the json")
    main(parser.parse_args())
