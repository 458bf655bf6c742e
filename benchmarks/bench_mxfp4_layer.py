"""A decoder layer's four MXFP4 products of one token, one after another, with what lies between them.

    python benchmarks/bench_mxfp4_layer.py      # the table, and results/bench_mxfp4_layer-<gpu>.json

Llama-3.1-8B's shape, W4A4, Hadamard 32: queries, keys and values as one product, o_proj, gate and up as one, down_proj;
between them a norm with its residual, silu(gate) * up, and another norm, Triton kernels each. Attention is left out.
LAYERS layers with weights of their own (past L2) run in one CUDA graph; a time is its replays' median over LAYERS.

    two            a kernel quantizes the token, another one multiplies it
    two, settled   the same; the weight is read before the quantizer has ended
    one            the product quantizes its token
    one, settled   the same; the weight is read before the kernel before has ended: what Mxfp4Linear runs
    A16            no quantization at all
    A16, settled
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from timing import copy_gbps, write_results  # noqa: E402

from quantrot.kernels.mxfp4 import ScaleRule, mxfp4_gemm, triton_rows  # noqa: E402

HIDDEN, INNER, LAYERS, HADAMARD = 4096, 14336, 5, 32
SHAPES = [(6144, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER)]  # (N, K)
WARM, REPLAYS = 8, 25
Product = Callable[[Tensor, tuple[Tensor, Tensor]], Tensor]


@triton.jit
def _add_and_norm(x, y, total, normed, N: tl.constexpr):
    i = tl.arange(0, N)
    v = (tl.load(x + i).to(tl.float32) + tl.load(y + i).to(tl.float32)).to(tl.bfloat16).to(tl.float32)
    tl.store(total + i, v.to(tl.bfloat16))
    tl.store(normed + i, (v * tl.rsqrt(tl.sum(v * v) / N + 1e-5)).to(tl.bfloat16))


@triton.jit
def _silu_and_multiply(x, y, N: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + i).to(tl.float32)
    on = (gate / (1 + tl.exp(-gate))).to(tl.bfloat16).to(tl.float32)
    tl.store(y + i, (on * tl.load(x + N + i).to(tl.float32)).to(tl.bfloat16))


def add_and_norm(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    total, normed = torch.empty_like(x), torch.empty_like(x)
    _add_and_norm[(1,)](x, y, total, normed, HIDDEN, num_warps=8)
    return total, normed


def silu_and_multiply(x: Tensor) -> Tensor:
    y = x.new_empty(1, INNER)
    _silu_and_multiply[(INNER // 1024,)](x, y, INNER, 1024)
    return y


def products() -> dict[str, Product]:
    found: dict[str, Product] = {}
    for name, settled in (("", False), (", settled", True)):
        plain = partial(mxfp4_gemm, settled=settled)
        found["two" + name] = lambda x, w, f=plain: f(triton_rows.round_trip(x, ScaleRule.even, HADAMARD), *w)
        one = partial(plain, activations="mxfp4", scale_rule="even", hadamard=HADAMARD)
        found["one" + name] = lambda x, w, f=one: f(x, *w)
        found["A16" + name] = lambda x, w, f=plain: f(x, *w)
    return found


def layers(product: Product, weights: list[list[tuple[Tensor, Tensor]]], x: Tensor) -> Tensor:
    total = x
    for qkv, o, gate_up, down in weights:
        queries = product(x, qkv)[:, :HIDDEN]
        total, x = add_and_norm(total, product(queries, o))
        total, x = add_and_norm(total, product(silu_and_multiply(product(x, gate_up)), down))
    return x


def time_layer(run: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """Microseconds a layer, and what comes out of the last one."""
    run()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        y = run()
    for _ in range(WARM + REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / LAYERS)
    return statistics.median(times[WARM:]), y


def main(asked: argparse.Namespace) -> None:
    def weight(n: int, k: int) -> tuple[Tensor, Tensor]:
        codes = torch.randint(0, 256, (n, k // 2), device="cuda", dtype=torch.uint8)
        return codes, torch.randint(116, 121, (n, k // 32), device="cuda").to(torch.uint8)

    torch.manual_seed(0)
    weights = [[weight(*shape) for shape in SHAPES] for _ in range(LAYERS)]
    x = torch.randn(1, HIDDEN, device="cuda", dtype=torch.bfloat16)
    gbps = copy_gbps()
    floor = sum(n * k for n, k in SHAPES) * (0.5 + 1 / 32) / gbps / 1e3
    print(f"weights at the speed of a copy: {floor:.1f} us\n{'':14s} {'us':>6s}")
    rows, expected = [], None
    for name, product in products().items():
        us, y = time_layer(lambda product=product: layers(product, weights, x))
        if expected is None:
            expected = y.clone()
        same = None if name.startswith("A16") else torch.equal(y, expected)
        print(f"{name:14s} {us:6.1f}" + ("" if same is None else f"  the same bits: {same}"), flush=True)
        rows.append({"op": "layer", "case": {"way": name}, "us": us, "floor_us": floor, "peers_us": {}, "same": same})
    write_results("bench_mxfp4_layer", gbps, rows, asked.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the json")
    main(parser.parse_args())
