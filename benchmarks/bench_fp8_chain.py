"""Llama 3.1 8B's four FP8 products of a decoder layer, one behind the other as a model runs them (chain.py).

    python benchmarks/bench_fp8_chain.py        # microseconds a layer, and what the numbers differ by

two     quantize_fp8_block and fp8_block_gemm, the norms apart, the gate in the quantizer
one     fp8_linear; behind the gate, in the quantizer, the two operators
inside  fp8_linear with the norm, the gate and the residual: four kernels of one token, eight of more
"""

import argparse
from functools import partial

import torch
from chain import EPSILON, HIDDEN, chain, layer_us, norm, normal, weights
from torch import Tensor

from quantrot.kernels.fp8 import fp8_block_gemm, fp8_linear, quantize_fp8_block
from quantrot.kernels.fp8.reference import gate, rms_norm

Weight = tuple[Tensor, Tensor]


def two(x: Tensor, w: Weight, gated: bool = False) -> Tensor:
    return fp8_block_gemm(*quantize_fp8_block(x, (1, 128), transposed_scale=True, gated=gated), *w, b_settled=True)


def one(x: Tensor, w: Weight, gated: bool = False) -> Tensor:
    return two(x, w, True) if gated else fp8_linear(x, *w, b_settled=True)


def main() -> None:
    layers = weights(lambda n, k: quantize_fp8_block(normal(n, k) * k**-0.5, (128, 128)))
    ones = normal(HIDDEN).fill_(1)
    inside = partial(fp8_linear, norm=ones, epsilon=EPSILON, b_settled=True)

    def apart(multiply, x: Tensor) -> Tensor:
        def normed(y: Tensor, w: Weight) -> Tensor:
            return multiply(norm(y, x, ones), w)

        return chain(layers, x, normed, normed, lambda y, w, _: multiply(y, w, y.shape[1] != w[0].shape[1]))

    def added(y: Tensor, w: Weight, residual: Tensor) -> Tensor:
        return fp8_linear(y, *w, residual=residual, gated=y.shape[1] != w[0].shape[1], b_settled=True)

    for tokens in (1, 2, 4, 8, 16, 32, 64):
        x = normal(tokens, HIDDEN) * 0.1
        calls = {"two": partial(apart, two, x), "one": partial(apart, one, x)}
        within = partial(
            chain, layers, x,
            lambda y, w: inside(y, *w),
            lambda y, w, gates=tokens == 1: inside(y, *w, gates=gates),
            added,
        )  # fmt: skip
        by_torch = partial(
            chain, layers, x,
            lambda y, w: two(rms_norm(y, ones, EPSILON), w),
            lambda y, w: gate(two(rms_norm(y, ones, EPSILON), w)),
            lambda y, w, residual: residual + two(y, w),
        )  # fmt: skip
        calls["inside"] = within
        assert torch.equal(calls["one"](), calls["two"]())
        times = ", ".join(f"{name} {layer_us(call):.1f}" for name, call in calls.items())
        want = by_torch().float()
        error = (within().float() - want).norm() / want.norm()
        print(f"{tokens} tokens: us a layer: {times}; inside is off by {error:.1e}", flush=True)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
