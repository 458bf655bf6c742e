"""FP8 attention: prefill, decode over an e4m3 cache, and the kernel that prepares the operands, against their peers; a
token and an INT4 cache.

    python benchmarks/bench_attention.py [--out FILE]      # the table, and results/bench_attention-<gpu>.json
    python benchmarks/bench_attention.py --scores fp8 [--out FILE]  # prefill alone, queries and keys in e4m3
    python benchmarks/bench_attention.py --int4 [--out FILE]        # a token and an INT4 cache alone
    python benchmarks/bench_attention.py --sweep           # every launch configuration of every kernel, best first

32 query and 8 key and value heads. `prefill` is bfloat16 q, k, v to a bfloat16 result, the quantization counted,
replayed in turn with its peers, so that all have the same clocks; `attend_us` is the attention without the
quantization of k and v. Its peers are torch's SDPA by cuDNN and by FlashAttention-2 in bfloat16, and cuDNN's own FP8
attention on operands that are e4m3 already (nvidia-cudnn-frontend; left out where it is not installed). The `decode`
peer bf16_cache is the fastest of SDPA's implementations on a bfloat16 cache, with grouped heads packed as queries.
`decode_int4` has that peer, too, and `dequantized`: the token quantized and copied, all of the cache dequantized, and
SDPA. It is checked against that before it is timed.
Floors: prefill, 2 x 2 S^2 D operations a head (half if causal) at PEAK; the others, the bytes that must move, at the
speed of a copy in the same run. `error` is relative to float64, on normal data.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from timing import copy_gbps, give_back, race_us, random_tensors, time_us, write_results  # noqa: E402

from quantrot.kernels.attention import (  # noqa: E402
    Quantized,
    append,
    attend,
    fp8_attention,
    int4_token,
    quantize_heads,
    rope_hadamard_quantize,
    transposed_values,
)
from quantrot.kernels.int4 import dequantize_int4, quantize_int4  # noqa: E402

HEADS, GROUPS = 32, 8
PEAK = 1979e12  # e4m3 operations a second on an H200, dense, from its data sheet
PREFILL = [(d, s, c) for d, s, c in product((128, 64), (2048, 8192, 32768), (True, False)) if c or s == 8192]
ROWS = [(rows, d) for rows, d in product((1, 32, 2048, 8192, 32768), (128, 64))]
STORED = [(b, d) for b, d in product((1, 8, 32, 128), (128, 64))]
DECODE = [(b, t, d) for b, t, d in product((1, 32), (8192, 32768), (128, 64))]
DECODE_INT4 = [(b, t, d) for b, t, d in product((1, 32), (1024, 8192, 32768), (128, 64))]
Calls = list[Callable[[], Any]]


# --- Inputs and peers ------------------------------------------------------------------------------------------------


def normal(*shape: int) -> list[torch.Tensor]:
    return random_tensors(shape, torch.bfloat16)


def qkv(seq: int, dim: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """[1, heads, S, D] views of the projections' outputs, on as many tensors as it takes to pass L2."""
    sets = [normal(1, seq, heads, dim) for heads in (HEADS, GROUPS, GROUPS)]
    return [tuple(t.transpose(1, 2) for t in one) for one in zip(*sets, strict=False)]  # type: ignore[misc]


def prepared(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: str) -> Quantized:
    """k and v in codes and q as it is, which attention quantizes on its way."""
    left = k.transpose(1, 2)
    made = rope_hadamard_quantize(left[:, :, :0], left, v.transpose(1, 2), scores=scores)
    return made._replace(q=q, q_scale=made.q_scale.new_empty(*q.shape[:2], 0))


def sdpa(backend: SDPBackend, causal: bool, sets: list[Any]) -> Calls:
    """torch's SDPA by this backend, of each set; no calls where it refuses."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    try:
        call(*sets[0])
        return [lambda s=s: call(*s) for s in sets]
    except RuntimeError as error:
        print(f"  {backend}: {str(error).splitlines()[0]}")
        return []


def cudnn_fp8(seq: int, dim: int, causal: bool) -> float | None:
    """Microseconds of cuDNN's FP8 attention, scales per tensor, e4m3 in and out; None where it cannot be had."""
    try:
        import cudnn

        handle = cudnn.create_handle()
        graph = cudnn.pygraph(
            io_data_type=cudnn.data_type.FP8_E4M3,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=handle,
        )

        def codes(heads: int) -> torch.Tensor:
            return torch.randn(1, seq, heads, dim, device="cuda").to(torch.float8_e4m3fn).transpose(1, 2)

        def declared(t: torch.Tensor, kind: Any) -> Any:
            return graph.tensor(dim=list(t.shape), stride=list(t.stride()), data_type=kind)

        operands, one = [codes(HEADS), codes(GROUPS), codes(GROUPS)], torch.ones(1, 1, 1, 1, device="cuda")
        names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
        inputs = [declared(t, cudnn.data_type.FP8_E4M3) for t in operands]
        scales = {name: declared(one, cudnn.data_type.FLOAT) for name in names}
        out, _, amax_s, amax_o = graph.sdpa_fp8(
            **dict(zip("qkv", inputs, strict=True)),
            **scales,
            attn_scale=dim**-0.5,
            use_causal_mask=causal,
            generate_stats=False,
        )
        result = torch.empty_like(operands[0])
        out.set_output(True).set_dim(list(result.shape)).set_stride(list(result.stride()))
        for amax in (amax_s, amax_o):
            amax.set_output(True).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1])
            amax.set_data_type(cudnn.data_type.FLOAT)
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        space = torch.empty(graph.get_workspace_size(), device="cuda", dtype=torch.uint8)
        values = dict(zip(inputs, operands, strict=True)) | {t: one for t in scales.values()}
        values |= {out: result, amax_s: torch.empty_like(one), amax_o: torch.empty_like(one)}

        def call() -> None:
            cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
            graph.execute(values, space, handle=handle)

        return time_us([call] * 8)
    except Exception as error:  # a peer that is missing or differs must not cost the run
        print(f"  cudnn_fp8: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return None


def error_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, y: torch.Tensor) -> float:
    """Relative error of the last 64 queries of two heads to float64."""
    rows, heads = slice(max(0, q.shape[2] - 64), None), [0, q.shape[1] - 1]
    left = q[:1, heads, rows].double()
    right, values = (t[:1].repeat_interleave(q.shape[1] // k.shape[1], 1)[:, heads].double() for t in (k, v))
    seen = torch.ones(left.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    exact = F.scaled_dot_product_attention(
        left, right, values, attn_mask=seen.tril(k.shape[2] - left.shape[2]) if causal else seen
    )
    return ((y[:1, heads, rows].double() - exact).norm() / exact.norm()).item()


# --- Rows ------------------------------------------------------------------------------------------------------------


def prefill(dim: int, seq: int, causal: bool, gbps: float, scores: str) -> dict[str, Any]:
    sets = qkv(seq, dim)
    given = [prepared(*s, scores) for s in sets]
    calls = {
        "us": [lambda s=s: fp8_attention(*s, causal=causal, scores=scores) for s in sets],
        "attend": [lambda g=g: attend(g, causal=causal) for g in given],
        "cudnn_bf16": sdpa(SDPBackend.CUDNN_ATTENTION, causal, sets),
        "flash2": sdpa(SDPBackend.FLASH_ATTENTION, causal, sets),
    }
    peers = race_us({name: each for name, each in calls.items() if each})
    us, attention = peers.pop("us"), peers.pop("attend")
    if fp8 := cudnn_fp8(seq, dim, causal):
        peers["cudnn_fp8"] = fp8
    operations = 4 * seq * seq * dim * HEADS / (2 if causal else 1)
    return {
        "op": "prefill",
        "case": {"head_dim": dim, "seq": seq, "causal": causal, "scores": scores},
        "us": us,
        "attend_us": attention,
        "tflops": operations / us / 1e6,
        "floor_us": operations / PEAK * 1e6,
        "peers_us": peers,
        "error": error_of(*sets[0], causal, fp8_attention(*sets[0], causal=causal, scores=scores)),
    }


def prepare(rows: int, dim: int, gbps: float) -> dict[str, Any]:
    """`rows` tokens: a prompt of one sequence, or up to 32 sequences' single tokens."""
    batch, seq = (rows, 1) if rows <= 32 else (1, rows)
    sets = list(zip(*(normal(batch, seq, heads, dim) for heads in (HEADS, GROUPS, GROUPS)), strict=False))
    theta = torch.randn(1, seq, dim, device="cuda")
    cos, sin = theta.cos().bfloat16(), theta.sin().bfloat16()
    granularity = "token" if seq == 1 else "block"
    moved = rows * (HEADS + 2 * GROUPS) * dim * 3 + cos.numel() * 2

    def call(s: Any, backend: str = "auto") -> Quantized:
        return rope_hadamard_quantize(*s, cos, sin, order=dim, granularity=granularity, backend=backend)

    ours, theirs = call(sets[0]), call(sets[0], "reference")
    differ = (ours.k.view(torch.uint8) != theirs.k.view(torch.uint8)).float().mean().item()
    return {
        "op": "rope_hadamard_quantize",
        "case": {"rows": rows, "head_dim": dim},
        "us": time_us([lambda s=s: call(s) for s in sets]),
        "floor_us": moved / gbps / 1e3,
        "peers_us": {"torch": time_us([lambda s=s: call(s, "reference") for s in sets[:2]], replays=3)},
        "error": differ,
    }


def store(batch: int, dim: int, gbps: float) -> dict[str, Any]:
    """A token a sequence into a static cache of 4096, in one kernel, and by quantizing and copying."""
    sets = list(zip(*(normal(batch, 1, heads, dim) for heads in (HEADS, GROUPS, GROUPS)), strict=False))
    theta = torch.randn(1, 1, dim, device="cuda")
    cos, sin = theta.cos().bfloat16(), theta.sin().bfloat16()
    shapes = (batch, GROUPS, 4096, dim), (batch, GROUPS, 4096), (batch, GROUPS, dim, 4096), (batch, GROUPS, 4096)
    buffers = [torch.zeros(shape, dtype=torch.uint8, device="cuda") for shape in shapes]
    copied, length = [b.clone() for b in buffers], torch.tensor(1000, device="cuda")

    def one(s: Any) -> Any:
        return append.rope_hadamard_append(*s, cos, sin, *buffers, length, limit=4096, order=dim, advance=False)

    def two(s: Any) -> Any:
        made = rope_hadamard_quantize(*s, cos, sin, order=dim, granularity="token")
        parts = made.k.view(torch.uint8), made.k_scale, made.v[..., :1].view(torch.uint8), made.v_scale
        for buffer, part, axis in zip(copied, parts, (2, 2, 3, 2), strict=True):
            buffer.index_copy_(axis, length.view(1), part)
        return made

    one(sets[0]), two(sets[0])
    differ = sum((a != b).sum().item() for a, b in zip(buffers, copied, strict=True))
    sets = sets[:16]
    return {
        "op": "rope_hadamard_append",
        "case": {"batch": batch, "head_dim": dim},
        "us": time_us([lambda s=s: one(s) for s in sets]),
        "floor_us": batch * (HEADS + 2 * GROUPS) * dim * 3 / gbps / 1e3,
        "peers_us": {"copies": time_us([lambda s=s: two(s) for s in sets])},
        "error": differ / (batch * 2 * GROUPS * (dim + 1)),
    }


def cache(batch: int, tokens: int, dim: int) -> tuple[Quantized, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """One query and an e4m3 cache with a scale a token, and the same in bfloat16."""
    q = torch.randn(batch, HEADS, 1, dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch, GROUPS, tokens, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    (codes, scale), (key, key_scale), (value, value_scale) = (quantize_heads(t) for t in (q, k, v))
    return Quantized(codes, scale, key, key_scale, transposed_values(value), value_scale), (q, k, v)


def bf16_cache(caches: list[Any]) -> float | None:
    """The fastest of SDPA's implementations, with the query heads of a key head as its queries."""
    packed = [(q.unflatten(1, (GROUPS, -1)).squeeze(3), k, v) for q, k, v in caches]
    backends = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
    found = [sdpa(backend, False, sets) for backend in backends for sets in (packed, caches)]
    return min((time_us(calls) for calls in found if calls), default=None)


def decode(batch: int, tokens: int, dim: int, gbps: float) -> dict[str, Any]:
    moved = 2 * batch * GROUPS * tokens * (dim + 1)
    both = [cache(batch, tokens, dim) for _ in range(max(2, min(8, (256 << 20) // moved)))]
    narrow, wide = [b[0] for b in both], [b[1] for b in both]
    y = attend(narrow[0], causal=True).transpose(1, 2)
    return {
        "op": "decode",
        "case": {"batch": batch, "seq": tokens, "head_dim": dim},
        "us": time_us([lambda g=g: attend(g, causal=True) for g in narrow]),
        "floor_us": moved / gbps / 1e3,
        "peers_us": {"bf16_cache": bf16_cache(wide)},
        "error": error_of(*wide[0], False, y),
    }


def decode_int4(batch: int, tokens: int, dim: int, gbps: float) -> dict[str, Any]:
    """The last of `tokens` tokens is the new one."""
    moved = 2 * batch * GROUPS * tokens * (dim // 2 + 4 * (dim // 64))
    sets = []
    for _ in range(max(2, min(8, (256 << 20) // moved))):
        q = torch.randn(batch, HEADS, 1, dim, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(batch, GROUPS, tokens, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        narrow = *quantize_int4(k), *quantize_int4(v)
        sets.append((q, k[:, :, -1:].clone(), v[:, :, -1:].clone(), narrow, (q, k, v)))

    def one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, narrow: Any, _: Any) -> torch.Tensor:
        return int4_token.int4_attend_one(q, k, v, narrow, tokens - 1, limit=tokens)

    def before(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, narrow: Any, _: Any) -> torch.Tensor:
        for buffer, part in zip(narrow, (*quantize_int4(k), *quantize_int4(v)), strict=True):
            buffer.narrow(2, tokens - 1, 1).copy_(part)
        key, value = dequantize_int4(*narrow[:3], q.dtype), dequantize_int4(*narrow[3:], q.dtype)
        return F.scaled_dot_product_attention(q, key, value, enable_gqa=True).transpose(1, 2).contiguous()

    with torch.no_grad():
        theirs, ours = before(*sets[0]).double(), one(*sets[0])
        assert (ours - theirs).norm() <= 2**-7 * theirs.norm()
        held = tuple(dequantize_int4(*sets[0][3][i : i + 3], torch.float32) for i in (0, 3))
        return {
            "op": "decode_int4",
            "case": {"batch": batch, "seq": tokens, "head_dim": dim},
            "us": time_us([lambda s=s: one(*s) for s in sets]),
            "floor_us": moved / gbps / 1e3,
            "peers_us": {
                "bf16_cache": bf16_cache([s[4] for s in sets]),
                "dequantized": time_us([lambda s=s: before(*s) for s in sets[:2]], replays=3),
            },
            "error": error_of(sets[0][0], *held, False, ours.transpose(1, 2)),
        }


def line(row: dict[str, Any]) -> str:
    case = ", ".join(f"{k} {v}" for k, v in row["case"].items())
    peers = ", ".join(f"{name} {us / row['us']:.2f}x" for name, us in row["peers_us"].items() if us)
    extra = f"{row['tflops']:6.0f} TFLOP/s, attend {row['attend_us']:.1f} us" if "tflops" in row else ""
    of_floor = row["floor_us"] / row["us"]
    return (
        f"{row['op']:24s} {case:34s} {row['us']:9.1f} us  {of_floor:5.2f} of floor  {peers}  {extra} {row['error']:.1e}"
    )


def main(out: Path | None, scores: str, int4: bool) -> None:
    gbps = copy_gbps()
    rows = []
    jobs: list[tuple[Callable[..., dict[str, Any]], list[Any]]] = [(partial(prefill, scores=scores), PREFILL)]
    if scores == "int8":
        jobs += [(prepare, ROWS), (store, STORED), (decode, DECODE), (decode_int4, DECODE_INT4)]
    if int4:
        jobs = jobs[-1:]
    for function, cases in jobs:
        for case in cases:
            rows.append(function(*case, gbps))
            print(line(rows[-1]), flush=True)
            give_back()
    if (scores == "int8" and not int4) or out:
        write_results("bench_attention", gbps, rows, out)


# --- Sweep -----------------------------------------------------------------------------------------------------------


def sweep() -> None:
    """Times of every configuration that launches; the best go into the *_config and plan_for functions by hand."""
    from quantrot.kernels.attention import hopper, rope
    from quantrot.kernels.attention import triton as kernels

    def best(what: str, configs: list[Any], calls: Callable[[Any], Calls]) -> None:
        found = []
        for config in configs:
            try:
                found.append((time_us(calls(config), replays=3), config))
            except Exception as error:  # too much shared memory, or too few registers
                print(f"  {what} {config}: {type(error).__name__}")
        for us, config in sorted(found, key=lambda item: item[0])[:6]:
            print(f"{what:44s} {us:9.1f} us  {config}", flush=True)

    def inputs(given: Quantized, causal: bool) -> Any:
        q, q_scale, k, k_scale, v, v_scale = given
        return kernels.Inputs(q, k, v, q_scale, k_scale, v_scale, None, None, None, causal, q.shape[-1] ** -0.5)

    tiles = [
        kernels.Config(m, n, w, s) for m, n, w, s in product((64, 128), (64, 128), (4, 8), (2, 3, 4)) if m * 2 >= w * 16
    ]
    for dim, granularity in product((128, 64), ("block", "token", "tensor")):
        sets = [tuple(t.transpose(1, 2) for t in s) for s in qkv(8192, dim)]
        given = [inputs(rope_hadamard_quantize(*s, granularity=granularity), True) for s in sets]
        best(
            f"prefill {dim}, 8192, {granularity}",
            tiles,
            lambda c, given=given: [lambda g=g: kernels.attention(g, torch.bfloat16, c) for g in given],
        )
    for dim, seq in product((128, 64), (2048, 8192)):
        given = [inputs(prepared(*s, "int8"), True) for s in qkv(seq, dim)]
        best(
            f"prefill {dim}, {seq}, CUDA C++",
            [hopper.Plan(*plan) for plan in product((2, 3), (2, 3, 4), (False, True))],
            lambda c, given=given: [lambda g=g: hopper.attention(g, torch.bfloat16, c) for g in given],
        )
    steps = [kernels.Config(16, n, w, s) for n, w, s in product((64, 128), (4, 8), (2, 3, 4, 5))]
    for batch, dim in product((1, 32), (128, 64)):
        given = [inputs(cache(batch, 32768, dim)[0], True) for _ in range(4 if batch == 1 else 2)]
        best(
            f"decode {dim}, batch {batch}, 32768",
            steps,
            lambda c, given=given: [lambda g=g: kernels.attention(g, torch.bfloat16, c) for g in given],
        )
    shapes = [rope.Config(128, 128, share, w, s) for share, w, s in product((1, 2, 4, 8), (8, 16), (1, 2, 3))]
    for dim in (128, 64):
        sets = [tuple(t.transpose(1, 2) for t in s) for s in qkv(8192, dim)]
        cos = torch.ones(1, 8192, dim, device="cuda", dtype=torch.bfloat16)
        best(
            f"rope_hadamard_quantize {dim}, 8192",
            shapes,
            lambda c, s=sets, cos=cos, d=dim: [
                lambda x=x: rope.quantize(*x, cos, cos, None, d, True, config=c) for x in s
            ],
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--scores", choices=("int8", "fp8"), default="int8")
    parser.add_argument("--int4", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.sweep:
        sweep()
    else:
        main(asked.out, asked.scores, asked.int4)
