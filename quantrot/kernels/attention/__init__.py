"""FP8 attention: values and probabilities in e4m3, queries and keys in int8 or e4m3, softmax and its sums in float32.
Inference only.

    rope_hadamard_quantize   q, k, v as the projections leave them -> Quantized, in one kernel
    attend                   Quantized                             -> [B, S, H, D]
    fp8_attention            q, k, v [B, H, S, D], already turned  -> [B, H, S, D]: both of the above

Contract of every backend, with B sequences, H query heads, G key and value heads (G divides H), S queries, T keys:

    q [B, H, S, D] and k [B, G, T, D], both e4m3 or both int8; v e4m3 [B, G, D, T'], T' >= T and a multiple of 128,
        finite behind T
    or q bfloat16, float16 or float32 of any strides, which becomes codes as k's on the way with a scale a token;
        q_scale is then [B, H, 0]
    q_scale, k_scale, v_scale [B, H or G, groups], groups 1, ceil(tokens / 128) or tokens: values are qdata * scale. Of
        e4m3 bytes, uint8: e means 2^(e - 127), 255 NaN. Of int8 float32
    mask bool [1 or B, 1, 1 or S, T], True where a query sees a key; lengths int32 [B]: keys from there on are not seen;
        query_lengths int32 [B]: queries from there on are padding, their output is 0
    causal: query i sees keys up to i + lengths - query_lengths: the last query sees the last key
    a query that sees nothing gets 0; a NaN reaches the queries that see a token of its scale and no other

The softmax weights are rounded to e4m3 (times 2^8, relative to their row's maximum rounded up to a power of two), and
their sum is of the rounded ones. attention_reference has the formula. Backends: "hopper" (CUDA C++ for sm_90; what it
takes is said there, operands that its preparing kernel does not take are prepared by Triton's), "triton" (CUDA with
e4m3, capability 8.9 and up), "reference" (plain torch); "auto" takes the first that can run, and "hopper" for many
queries and for one, where it is the faster. FlashAttention-3, arXiv:2407.08608; HadaCore, arXiv:2412.08832.
"""

import os
import warnings
from collections.abc import Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.attention.reference import (
    BLOCK,
    LARGEST_BLOCK_HEAD,
    Granularity,
    Inputs,
    attention_reference,
    dequantize_heads,
    granularity_of,
    group_of,
    key_rows,
    quantize_heads,
    rope_hadamard_quantize_reference,
    spread,
    transposed_values,
    visible_keys,
)
from quantrot.kernels.fp8 import E4M3
from quantrot.kernels.hadamard import check_known
from quantrot.kernels.operators import (
    check_backend,
    check_device,
    check_signs,
    constant,
    exporting,
    implement,
    inference_only,
    number,
    refuse_tangents,
)
from quantrot.kernels.ready import Ready, Run, lies_well, like, same, unseen

__all__ = [
    "BLOCK",
    "Granularity",
    "Quantized",
    "attend",
    "dequantize_heads",
    "fp8_attention",
    "group_of",
    "quantize_heads",
    "rope_hadamard_quantize",
    "spread",
    "transposed_values",
]

BACKENDS = ("auto", "hopper", "triton", "reference")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_HEAD = 256
SCORES = {"int8": torch.int8, "fp8": E4M3}  # what queries and keys are in
WIDE = (torch.bfloat16, torch.float16)  # what q may be in, to be quantized on its way
READY = Ready()  # of one query, by the addresses of the cache's tensors
PROMPTS, QUANTIZERS = Ready(), Ready()

# Operators pass codes as bytes: torch has no arithmetic on e4m3 for opcheck to compare with.
torch.library.define(
    "quantrot::fp8_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor q_scale, Tensor k_scale, Tensor v_scale, Tensor? mask, Tensor? lengths, "
    "Tensor? query_lengths, bool causal, float scale, ScalarType dtype, str backend) -> Tensor",
)
torch.library.define(
    "quantrot::rope_hadamard_quantize",
    "(Tensor q, Tensor k, Tensor v, Tensor? cos, Tensor? sin, Tensor? signs, int order, str granularity, str scores, "
    "str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


class Quantized(NamedTuple):
    """Queries, keys and values in codes with their scales, laid out as the contract above says."""

    q: Tensor
    q_scale: Tensor
    k: Tensor
    k_scale: Tensor
    v: Tensor
    v_scale: Tensor


def fp8_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    granularity: Granularity | str = Granularity.block,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    query_lengths: Tensor | None = None,
    scores: str = "int8",
    backend: str = "auto",
) -> Tensor:
    """Attention in 8 bits of q [B, H, S, D], k and v [B, G, T, D] (bfloat16, float16, float32): [B, H, S, D], as q.

    scale multiplies the scores, 1 / sqrt(D) when left out. granularity: which keys and values share a scale; queries
    have one a token, or in e4m3 a coarser one under `head` and `tensor`. scores: what queries and keys are in, int8 or
    fp8 (e4m3); on normal data int8 leaves 3.9 % of error, e4m3 5.5. mask, lengths, query_lengths, causal: see the top
    of the file. The result is a view of [B, S, H, D]. ValueError for shapes, dtypes or backends that do not fit.
    """
    granularity = granularity_of(granularity)
    _check_scores(scores)
    for name, t in (("q", q), ("k", k), ("v", v)):
        _check_heads(name, t)
    heads = q.shape[1] % k.shape[1] if k.shape[1] else 1
    if heads or k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"shapes: {shapes}; allowed: q [B, H, S, D], k and v [B, G, T, D], G a divisor of H")
    prepare = backend if _has_kernel(granularity, q.shape[-1]) or backend not in BACKENDS else "auto"
    turned = [t.transpose(1, 2) for t in (q, k, v)]
    how: Any = {"granularity": granularity, "scores": scores, "backend": prepare}
    by_kernel = mask is None and granularity is Granularity.block and backend in ("auto", "hopper") and _reads_wide(q)
    if scores == "int8" or by_kernel:
        none = turned[1][:, :, :0]
        keys = rope_hadamard_quantize(none, *turned[1:], **how)
        given = Quantized(q, keys.q_scale.new_empty(*q.shape[:2], 0), *keys[2:])
    elif q.shape[2:3] == k.shape[2:3]:
        given = rope_hadamard_quantize(*turned, **how)
    else:  # other numbers of queries and of keys
        queries = rope_hadamard_quantize(*turned[:1] * 3, **how)
        keys = rope_hadamard_quantize(turned[1], *turned[1:], **how)
        given = Quantized(queries.q, queries.q_scale, *keys[2:])
    y = attend(
        given,
        causal=causal,
        scale=scale,
        mask=mask,
        lengths=lengths,
        query_lengths=query_lengths,
        dtype=q.dtype,
        backend=backend,
    )
    return inference_only(y.transpose(1, 2), q, k, v)


def attend(
    given: Quantized,
    *,
    causal: bool,
    scale: float | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    query_lengths: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> Tensor:
    """Attention of quantized queries, keys and values: [B, S, H, D] in `dtype`, contiguous. See fp8_attention.

    With one query (S = 1) and no query_lengths the keys are split over programs, and their parts summed in a fixed
    order.
    """
    known, one = None, given.q.shape[2:3] == (1,) and query_lengths is None
    moving = (given.q, given.q_scale, mask, lengths) if one else (*given, lengths, query_lengths)
    ready = READY if one else PROMPTS
    if given.q.is_cuda and backend == "auto" and (one or mask is None):
        if unseen(*given, mask, lengths, query_lengths):
            known = _key(given, mask, one), like(lengths), like(query_lengths), causal, scale, dtype
            if (again := ready.find(known)) is not None:
                return again(*moving)
    _check_attend(given, mask, lengths, query_lengths, dtype, backend)
    if causal is None:  # which the operator would take for False
        raise ValueError("causal: None; allowed: True, False")
    q, q_scale, k, k_scale, v, v_scale = given
    scale = q.shape[-1] ** -0.5 if scale is None else number("scale", scale, "positive, finite")
    if known:
        inputs = Inputs(q, k, v, q_scale, k_scale, v_scale, mask, lengths, query_lengths, causal, scale)
        if run := (_one_query if one else _many_queries)(inputs, dtype):
            return ready.keep(known, run, q.get_device())(*moving)
    codes = (t.view(torch.uint8) if t.dtype == E4M3 else t for t in (q, k, v))
    y = torch.ops.quantrot.fp8_attention(
        *codes, q_scale, k_scale, v_scale, mask, lengths, query_lengths, causal, scale, dtype, backend
    )
    return inference_only(y, *given)


def _key(given: Quantized, mask: Tensor | None, one: bool) -> Hashable:
    """What the kernel of one query, or that of many without a mask, is chosen and launched by."""
    from quantrot.kernels.attention import decode

    if not one:
        return *map(like, given), decode.left(given.k)
    q, q_scale, *cache = given
    ends = tuple(decode.left(t) for t in cache), 0 if mask is None else decode.left(mask)
    return like(q), like(q_scale), *map(same, cache), like(mask), ends


def _one_query(given: Inputs, dtype: torch.dtype) -> Run | None:
    """That kernel, ready, where it takes these and all is where it can be read."""
    from quantrot.kernels.attention import decode

    as_they_lie = given.q.numel() > 0 and given.q.dtype == given.k.dtype and lies_well(given.lengths)
    if not as_they_lie or _best(given.q.device) == "reference" or not decode.supports(given, dtype):
        return None
    return decode.prepare(given, dtype)


def _many_queries(given: Inputs, dtype: torch.dtype) -> Run | None:
    """The same of a prompt."""
    from quantrot.kernels.attention import hopper

    return None if _best(given.q.device) == "reference" else hopper.prepared(given, dtype)


def rope_hadamard_quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    order: int | None = None,
    signs: Tensor | None = None,
    granularity: Granularity | str = Granularity.block,
    scores: str = "fp8",
    backend: str = "auto",
) -> Quantized:
    """RoPE and a Hadamard rotation of q [B, S, H, D] and k [B, S, G, D], then codes; v [B, S, G, D]'s transposed.

    The inputs are views of the projections' outputs [B, S, heads * D], any strides. cos, sin: [1 or B, S, D] or
    [1 or B, S, D / 2], of which the first D / 2 columns are read (transformers repeats them); None: no RoPE. order: of
    the Hadamard matrix, which is repeated along D and divided by sqrt(order); None: no rotation. signs: +-1 int8
    [order] or [D], multiplies what the matrix multiplies. granularity: of k and v; scores: of q and k; see
    fp8_attention.

    RoPE's products and sum are rounded to float32 each and the result to q's dtype; the rotation sums in float32, and
    its result is quantized unrounded. ValueError for shapes, orders, dtypes or backends that do not fit.
    """
    known, moving = None, (q, k, v, cos, sin)
    if q.is_cuda and backend == "auto" and signs is None and unseen(*moving):
        known = *map(like, moving), order, granularity, scores
        if (again := QUANTIZERS.find(known)) is not None:
            return Quantized(*again(*moving))
    granularity = granularity_of(granularity)
    _check_scores(scores)
    order, signs = _check_quantize(q, k, v, cos, sin, order, signs, granularity, backend)
    if known and (run := _in_one_kernel(*moving, None, order, granularity.value, scores)):
        return Quantized(*QUANTIZERS.keep(known, run, q.get_device())(*moving))
    options = (order, granularity.value, scores, backend)
    with torch.no_grad():
        made = torch.ops.quantrot.rope_hadamard_quantize(q, k, v, cos, sin, signs, *options)
    typed = (t if i % 2 or t.dtype == torch.int8 else t.view(E4M3) for i, t in enumerate(made))
    return Quantized(*(inference_only(t, q, k, v) if t.is_floating_point() else t for t in typed))


# --- Checks ----------------------------------------------------------------------------------------------------------


def _check_attend(
    given: Quantized,
    mask: Tensor | None,
    lengths: Tensor | None,
    query_lengths: Tensor | None,
    dtype: torch.dtype,
    backend: str,
) -> None:
    q, q_scale, k, k_scale, v, v_scale = given
    for name, t in (("k", k), ("q", q), ("v", v)):
        fits = t.dtype in {"q": (k.dtype, *DTYPES), "k": tuple(SCORES.values()), "v": (E4M3,)}[name]
        if not fits or t.dim() != 4:
            raise ValueError(
                f"{name}: {t.dtype} with {t.dim()} dimensions; quantize it first, to e4m3 [B, H, S, D], or q and k to "
                "int8"
            )
    (batch, heads, queries, dim), (_, groups, tokens, _) = q.shape, k.shape
    if k.shape != (batch, groups, tokens, dim) or not groups or heads % groups or v.shape[:3] != (batch, groups, dim):
        raise ValueError(
            f"shapes: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; q [B, H, S, D], k [B, G, T, D] and v "
            "[B, G, D, T'] are needed, G a divisor of H"
        )
    if v.shape[3] % BLOCK or v.shape[3] // BLOCK < (tokens + BLOCK - 1) // BLOCK:  # torch.export knows both
        raise ValueError(f"v: {v.shape[3]} tokens of storage for {tokens}; pad it with zeros to a multiple of {BLOCK}")
    _check_head_dim(dim)
    scales = (
        ("q_scale", q_scale, heads, queries),
        ("k_scale", k_scale, groups, tokens),
        ("v_scale", v_scale, groups, tokens),
    )
    for name, t, rows, count in scales:
        allowed = (0,) if name == "q_scale" and q.dtype in DTYPES else (count, 1, -(-count // BLOCK))
        kind = torch.float32 if k.dtype == torch.int8 and name != "v_scale" else torch.uint8
        if t.dtype != kind or t.shape[:-1] != (batch, rows) or t.shape[-1] not in allowed:
            raise ValueError(
                f"{name}: {t.dtype} {tuple(t.shape)}; allowed: {str(kind)[6:]} [{batch}, {rows}, n], "
                f"n in {sorted(set(allowed))}"
            )
    if mask is not None:
        fits = mask.dim() == 4 and all(
            a in (1, b) for a, b in zip(mask.shape, (batch, 1, queries, tokens), strict=True)
        )
        if mask.dtype != torch.bool or not fits or mask.shape[3] != tokens:
            raise ValueError(
                f"mask: {mask.dtype} {tuple(mask.shape)}; allowed: bool [1 or {batch}, 1, 1 or {queries}, {tokens}]"
            )
    for name, counts in (("lengths", lengths), ("query_lengths", query_lengths)):
        if counts is not None and (counts.dtype != torch.int32 or counts.shape != (batch,)):
            raise ValueError(f"{name}: {counts.dtype} {tuple(counts.shape)}; allowed: int32 [{batch}]")
    if dtype not in DTYPES:
        raise ValueError(f"dtype: {dtype}; allowed: {', '.join(map(str, DTYPES))}")
    check_backend(backend, BACKENDS)
    check_device(**given._asdict(), mask=mask, lengths=lengths, query_lengths=query_lengths)


def _check_scores(scores: str) -> None:
    if scores not in SCORES:
        raise ValueError(f"scores: {scores!r}; allowed: {', '.join(SCORES)}")


def _check_heads(name: str, t: Tensor, shape: str = "[B, heads, tokens, D]") -> None:
    if t.dtype not in DTYPES or t.dim() != 4:
        raise ValueError(
            f"{name}: {t.dtype} with {t.dim()} dimensions; allowed: {shape}, {', '.join(map(str, DTYPES))}"
        )
    refuse_tangents(t)


def _check_head_dim(dim: int) -> None:
    if dim % 16 or not 16 <= dim <= LARGEST_HEAD:
        raise ValueError(f"head_dim: {dim}; allowed: multiples of 16 up to {LARGEST_HEAD}")


def _check_quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    order: int | None,
    signs: Tensor | None,
    granularity: Granularity,
    backend: str,
) -> tuple[int, Tensor | None]:
    """(order, 0 for no rotation; signs as int8 [D])."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        _check_heads(name, t, "[B, S, heads, D]")
    batch, tokens, _, dim = q.shape
    if k.shape != v.shape or k.shape[:2] != (batch, tokens) or k.shape[3] != dim:
        raise ValueError(
            f"shapes: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; q [B, S, H, D], k and v [B, S, G, D]"
        )
    _check_head_dim(dim)
    check_backend(backend, BACKENDS)
    check_device(q=q, k=k, v=v, cos=cos, sin=sin, signs=signs)
    if (cos is None) != (sin is None):
        raise ValueError("cos, sin: one is given without the other; give both, or neither")
    for name, angles in (("cos", cos), ("sin", sin)):
        if angles is not None and not (_fits(angles.shape, (batch, tokens, dim)) and angles.is_floating_point()):
            raise ValueError(
                f"{name}: {angles.dtype} {tuple(angles.shape)}; allowed: floating-point numbers "
                f"[1 or {batch}, {tokens}, {dim} or {dim // 2}]"
            )
    if order is None:
        if signs is not None:
            raise ValueError("signs: given without a rotation; give its order too")
        return 0, None
    if order < 1 or dim % order:
        raise ValueError(f"order: {order} does not divide head_dim {dim}; give a divisor of it")
    check_known(order)
    if signs is None:
        return order, None
    if signs.dim() != 1 or signs.numel() not in (order, dim):
        raise ValueError(f"signs: {tuple(signs.shape)}; allowed: [{order}] or [{dim}], one +-1 a column")
    check_signs(signs)
    return order, signs.to(torch.int8).repeat(dim // signs.numel())


def _fits(shape: torch.Size, whole: tuple[int, int, int]) -> bool:
    """Whether cosines of this shape go with [B, S, D]."""
    batch, tokens, dim = whole
    return len(shape) == 3 and shape[0] in (1, batch) and shape[1] == tokens and shape[2] in (dim, dim // 2)


# --- Backends --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def _best(device: torch.device) -> str:
    """What "auto" means on this CUDA device; says so once where it is not the fastest."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 9):
        warnings.warn("fp8_attention: this GPU has no e4m3, so it runs as plain torch", stacklevel=2)
        return "reference"
    try:
        import quantrot.kernels.attention.triton  # noqa: F401
    except ImportError:
        warnings.warn("fp8_attention: no Triton, so it runs as plain torch; `pip install triton`", stacklevel=2)
        return "reference"
    return "triton"


def _backend(device: torch.device, asked: str) -> str:
    """The backend that runs, or ValueError where the one that was asked for cannot."""
    if asked == "auto":
        return _best(device) if device.type == "cuda" else "reference"
    if asked == "hopper":
        if device.type != "cuda" or not nvrtc.available(device):
            raise ValueError("backend: 'hopper' needs an sm_90 GPU and cuda.core; allowed here: auto, reference")
    if asked == "triton":
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if device.type != "cuda" and not interpreted:
            raise ValueError(f"backend: 'triton' needs a CUDA device, q is on {device}; allowed here: auto, reference")
        if device.type == "cuda" and (torch.version.hip or torch.cuda.get_device_capability(device) < (8, 9)):
            raise ValueError("backend: 'triton' needs e4m3, capability 8.9 and up; allowed here: auto, reference")
    return asked


@implement("quantrot::fp8_attention")
def _fp8_attention(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor, mask: Tensor | None,
    lengths: Tensor | None, query_lengths: Tensor | None, causal: bool, scale: float, dtype: torch.dtype,
    backend: str,
) -> Tensor:  # fmt: skip
    q, k, v = (t.view(E4M3) if t.dtype == torch.uint8 else t for t in (q, k, v))
    batch, _, queries, _ = q.shape
    if q.dtype != k.dtype and not _takes_wide(q, k, v, q_scale, k_scale, v_scale, mask, causal, dtype, backend):
        q, q_scale = quantize_heads(q, codes=k.dtype)
    if (runs := _backend(q.device, backend)) != "reference":
        from quantrot.kernels.attention import decode, hopper

        many = queries > hopper.FEW or query_lengths is not None
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        mask = mask if mask is None or mask.stride(-1) == 1 else mask.contiguous()
        lengths, query_lengths = (t if t is None else t.contiguous() for t in (lengths, query_lengths))
        given = Inputs(q, k, v, q_scale, k_scale, v_scale, mask, lengths, query_lengths, causal, scale)
        if backend != "triton" and decode.supports(given, dtype):
            return decode.attention(given, dtype)
        if runs == "hopper" or (backend == "auto" and many and hopper.supports(given, dtype)):
            return hopper.attention(given, dtype)
        from quantrot.kernels.attention import triton

        return triton.attention(given, dtype)
    seen = visible_keys(batch, queries, k.shape[2], mask, lengths, query_lengths, causal, q.device)
    return attention_reference(q, k, v, q_scale, k_scale, v_scale, seen, scale, dtype)


@constant
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and nvrtc.available(device)


def _reads_wide(q: Tensor) -> bool:
    """Whether attention quantizes these queries [B, H, S, D] by itself."""
    from quantrot.kernels.attention import hopper

    many = q.dtype in WIDE and q.shape[3] in hopper.DIMS and q.shape[2] > hopper.FEW
    return many and hopper.unreadable(q) is None and _is_hopper(q.device)


def _takes_wide(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor, mask: Tensor | None,
    causal: bool, dtype: torch.dtype, backend: str,
) -> bool:  # fmt: skip
    """Whether the kernel that will run reads queries in 16 bits."""
    from quantrot.kernels.attention import hopper

    many = backend == "hopper" or (backend == "auto" and q.shape[2] > hopper.FEW)
    if q.device.type != "cuda" or not many:
        return False
    given = Inputs(q, k, v, q_scale, k_scale, v_scale, mask, None, None, causal, 1.0)
    return hopper.supports(given, dtype)


@torch.library.register_fake("quantrot::fp8_attention")
def _fp8_attention_fake(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor, mask: Tensor | None,
    lengths: Tensor | None, query_lengths: Tensor | None, causal: bool, scale: float, dtype: torch.dtype,
    backend: str,
) -> Tensor:  # fmt: skip
    batch, heads, queries, dim = q.shape
    return torch.empty(batch, queries, heads, dim, dtype=dtype, device=q.device)


@implement("quantrot::rope_hadamard_quantize")
def _rope_hadamard_quantize(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, signs: Tensor | None, order: int,
    granularity: str, scores: str, backend: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    codes = SCORES[scores]
    if backend in ("auto", "hopper") and (run := _in_one_kernel(q, k, v, cos, sin, signs, order, granularity, scores)):
        return _as_bytes(run(q, k, v, cos, sin))
    if _backend(q.device, "auto" if backend == "hopper" else backend) == "triton":
        from quantrot.kernels.attention import rope

        if _has_kernel(granularity, q.shape[3]):
            by_block = granularity == Granularity.block
            if backend == "triton" or rope.supports(q.shape[3], order, q.dtype, q.device):
                return _as_bytes(rope.quantize(q, k, v, cos, sin, signs, order, by_block, codes))
        elif backend == "triton":
            raise ValueError(
                f"backend: 'triton' has no granularity {granularity} with head_dim {q.shape[3]}; allowed here: token "
                f"(any head_dim), block (up to {LARGEST_BLOCK_HEAD}), or backend auto or reference"
            )
    made = rope_hadamard_quantize_reference(q, k, v, cos, sin, signs, order, Granularity(granularity), codes)
    return _as_bytes(made)


def _in_one_kernel(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, signs: Tensor | None, order: int,
    granularity: str, scores: str,
) -> Run | None:  # fmt: skip
    """The quantizer for Hopper, as a function of q, k, v, cos and sin like these; None where it does not take them."""
    if _backend(q.device, "auto") != "triton" or not _has_kernel(granularity, q.shape[3]):
        return None
    from quantrot.kernels.attention import prepare

    if not prepare.supports(q, k, v, cos, sin, signs, order):
        return None
    return prepare.prepare(q, k, v, cos, sin, order, granularity == Granularity.block, SCORES[scores])


def _has_kernel(granularity: str, dim: int) -> bool:
    """Whether quantizing so is one kernel: coarser scales need all values before the first is written."""
    return granularity == Granularity.token or (granularity == Granularity.block and dim <= LARGEST_BLOCK_HEAD)


def _as_bytes(made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.view(torch.uint8) if t.dtype == E4M3 else t for t in made)


@torch.library.register_fake("quantrot::rope_hadamard_quantize")
def _rope_hadamard_quantize_fake(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, signs: Tensor | None, order: int,
    granularity: str, scores: str, backend: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    batch, tokens, heads, dim = q.shape
    groups = k.shape[2]
    padded = (tokens + BLOCK - 1) // BLOCK * BLOCK
    fine = {"tensor": 1, "head": 1, "block": padded // BLOCK, "token": tokens}[granularity]
    queries = tokens if granularity in ("block", "token") else 1

    # An exported program is for all lengths, whose strides' guards would leave out some; it runs on any strides.
    rows = tokens if exporting() else key_rows(tokens)

    def new(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    codes, scale = (torch.int8, torch.float32) if scores == "int8" else (torch.uint8, torch.uint8)
    return (
        new(batch, heads, tokens, dim, dtype=codes),
        new(batch, heads, queries, dtype=scale),
        new(batch, groups, rows, dim, dtype=codes)[:, :, :tokens],
        new(batch, groups, fine, dtype=scale),
        new(batch, groups, dim, padded),
        new(batch, groups, fine),
    )
