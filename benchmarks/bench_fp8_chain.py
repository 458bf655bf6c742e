"""Llama 3.1 8B's four products of a decoder layer, one behind the other as a model runs them, in one CUDA graph.

    python benchmarks/bench_fp8_chain.py        # microseconds a layer, and what the numbers differ by

Eight layers, whose weights (1.7 GB) no cache holds; the attention between the first two products is left out. The norms
and the gate of "two" and "one" are Triton kernels that do as little as can be done: the norm also adds the residual.

two     quantize_fp8_block and fp8_block_gemm
one     fp8_linear; behind the gate, in the quantizer, the two operators
inside  fp8_linear with the norm, the gate and the residual: four kernels
"""

import sys
from pathlib import Path

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parent.parent))

from timing import time_us  # noqa: E402

from quantrot.kernels.fp8 import fp8_block_gemm, fp8_linear, quantize_fp8_block  # noqa: E402
from quantrot.kernels.fp8.reference import gate, rms_norm  # noqa: E402

HIDDEN, LAYERS, EPSILON = 4096, 8, 1e-5
SHAPES = ((6144, HIDDEN), (HIDDEN, HIDDEN), (28672, HIDDEN), (HIDDEN, 14336))


@triton.jit
def _norm(x, residual, weight, y, K: tl.constexpr, EPS: tl.constexpr):
    columns = tl.arange(0, K)
    at = tl.program_id(0) * K + columns
    v = tl.load(x + at).to(tl.float32) + tl.load(residual + at).to(tl.float32)
    v = v * tl.rsqrt(tl.sum(v * v) / K + EPS) * tl.load(weight + columns).to(tl.float32)
    tl.store(y + at, v.to(tl.bfloat16))


class Chain:
    def __init__(self) -> None:
        weights = ((torch.randn(n, k, device="cuda") * k**-0.5).bfloat16() for _ in range(LAYERS) for n, k in SHAPES)
        quantized = [quantize_fp8_block(w, (128, 128)) for w in weights]
        self.layers = [quantized[i : i + 4] for i in range(0, len(quantized), 4)]
        self.weight = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)

    def norm(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        _norm[(len(x),)](x, residual, self.weight, y, K=HIDDEN, EPS=EPSILON, num_warps=8)
        return y

    def apart(self, x: torch.Tensor, one: bool) -> torch.Tensor:
        """The norms apart; a product in one kernel, or in two."""

        def multiply(x: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, gated: bool = False) -> torch.Tensor:
            if one and not gated:
                return fp8_linear(x, b, scale, b_settled=True)
            q = quantize_fp8_block(x, (1, 128), transposed_scale=True, gated=gated)
            return fp8_block_gemm(*q, b, scale, b_settled=True)

        y = x
        for qkv, o, up, down in self.layers:
            y = multiply(multiply(self.norm(y, x), *qkv)[:, :HIDDEN], *o)
            y = multiply(multiply(self.norm(y, x), *up), *down, gated=True)
        return y

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        y, norm = x, {"norm": self.weight, "epsilon": EPSILON, "b_settled": True}
        for qkv, o, up, down in self.layers:
            y = fp8_linear(fp8_linear(y, *qkv, **norm)[:, :HIDDEN], *o, residual=y, b_settled=True)
            y = fp8_linear(fp8_linear(y, *up, gates=True, **norm), *down, residual=y, b_settled=True)
        return y

    def by_torch(self, x: torch.Tensor) -> torch.Tensor:
        """`inside`, of the two operators and torch."""

        def multiply(x: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return fp8_block_gemm(*quantize_fp8_block(x, (1, 128), transposed_scale=True), b, scale)

        y = x
        for qkv, o, up, down in self.layers:
            y = y + multiply(multiply(rms_norm(y, self.weight, EPSILON), *qkv)[:, :HIDDEN], *o)
            y = y + multiply(gate(multiply(rms_norm(y, self.weight, EPSILON), *up)), *down)
        return y


def main() -> None:
    chain = Chain()
    for tokens in (1, 2, 4):
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16() * 0.1
        calls = {"two": lambda x=x: chain.apart(x, False), "one": lambda x=x: chain.apart(x, True)}
        calls |= {"inside": lambda x=x: chain.inside(x)} if tokens <= 2 else {}
        assert torch.equal(calls["one"](), calls["two"]())
        times = ", ".join(f"{name} {time_us([call]) / LAYERS:.1f}" for name, call in calls.items())
        want = chain.by_torch(x).float()
        error = (chain.inside(x).float() - want).norm() / want.norm()
        print(f"{tokens} tokens: us a layer: {times}; inside is off by {error:.1e}", flush=True)


if __name__ == "__main__":
    main()
