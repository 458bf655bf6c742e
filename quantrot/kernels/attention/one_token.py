"""Attention of one new token a sequence with a KV cache of 16 bits: norms, RoPE, the next place, attention.

    rope_attend_one   q, k, v as the projections leave them, the cache -> [B, 1, H, D]; the cache has a token more
    try_attend_one    the same in eager mode, where the host knows how many tokens there are; None where torch does it
    runs_on           whether that is one kernel on a device (CUDA C++ for Hopper, one_token.cuh)

Contract, with B sequences, H query heads, G key heads (G divides H), room for L tokens, all in bfloat16 or float16:

    q [B, 1, H, D], k and v [B, 1, G, D], D contiguous; cos, sin [1 or B, 1, D], as transformers' rotary embedding has
        them
    keys, values [B, G, L, D], changed: the new key (turned) and value go to place `length`
    length int64 []: how many tokens are in the cache, the same of every sequence; with `advance` one more afterwards
    norms gains of each head's queries and of its key, two of [D], or None: they are normed before RoPE, as Qwen3's are
        (fp8.reference.rms_norm; the sum of squares in another order)
    mask bool [1 or B, 1, 1, L] or None: False where a cached token is not seen; those behind the new one are not seen
        and not read, whatever it says
    settled: nothing that may still run when the kernel which wrote q, k or v starts writes keys, values or length: they
        may be read before that kernel has ended. True in a model: a layer's projections follow its last attention.

RoPE is transformers': x cos + rotate_half(x) sin, each operation rounded to the dtype. Softmax and sums are float32;
its weights are rounded to the dtype for the product with V. A query that sees nothing gets 0; where the cache is full,
the output is NaN and nothing is stored.
"""

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.attention.reference import LOG2E
from quantrot.kernels.fp8.reference import rms_norm
from quantrot.kernels.nvrtc import checked, load_kernel, processors
from quantrot.kernels.operators import constant, implement, number, refuse_tangents
from quantrot.kernels.ready import Ready, Run, address, like, unseen

DTYPES = {torch.bfloat16: "Bf16", torch.float16: "Fp16"}
DIMS = {64: 16, 96: 16, 128: 16, 256: 8}  # head_dim: how many query heads of a key head, at most
PORTABLE_CLUSTER = 8
READY = Ready()
ENTRY = """extern "C" __global__ void {cluster} __launch_bounds__({threads}, {blocks}) attend_token(
    const __grid_constant__ quantrot::TokenArgs args) {{
  quantrot::attend_token<{call}>(args);
}}
"""

torch.library.define(
    "quantrot::rope_attend_one",
    "(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values, "
    "Tensor? position, Tensor(c!)? length, Tensor? mask, Tensor? q_norm, Tensor? k_norm, float epsilon, float scale, "
    "bool settled) -> Tensor",
    tags=(torch.Tag.flexible_layout,),
)


def rope_attend_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    *,
    mask: Tensor | None = None,
    norms: tuple[Tensor, Tensor] | None = None,
    epsilon: float = 0.0,
    scale: float | None = None,
    advance: bool = True,
    settled: bool = False,
) -> Tensor:
    """[B, 1, H, D] in q's dtype, contiguous; see the top of this file. epsilon: of the norms; scale: of the scores, 1 /
    sqrt(D) if None.

    advance: length becomes one more. Not to be asked for, under torch.compile, of a length from which operands of this
    or a later call are computed: Inductor (torch 2.13) may compute them again after it has changed. No backward.
    ValueError for shapes and dtypes that do not fit.
    """
    if reason := unsupported(q, k, v, cos, sin, keys, values, length, mask, norms):
        raise ValueError(f"rope_attend_one: {reason}")
    refuse_tangents(q, k, v, cos, sin)
    scale = q.shape[3] ** -0.5 if scale is None else number("scale", scale, "positive, finite")
    epsilon = number("epsilon", epsilon, "non-negative, finite")
    counts = (None, length) if advance else (length, None)
    rest = mask, *(norms or (None, None)), epsilon, scale, settled
    return torch.ops.quantrot.rope_attend_one(q, k, v, cos, sin, keys, values, *counts, *rest)


def try_attend_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    length: int,
    *,
    mask: Tensor | None,
    norms: tuple[Tensor, Tensor] | None,
    epsilon: float,
    scale: float,
    settled: bool,
) -> Tensor | None:
    """rope_attend_one with `length` tokens in the cache, and a mask [1 or B, 1, 1, length + 1]. None where this is no
    eager inference on Hopper, or operands that the kernel does not take where they are."""
    gains = norms or (None, None)
    if not q.is_cuda or not unseen(q, k, v, cos, sin, keys, values, mask, *gains):
        return None
    rows = None if mask is None else (mask.shape[:-1], mask.stride(-1), mask.dtype, mask.device)
    known = *map(like, (q, k, v, cos, sin, keys, values, *gains)), rows, epsilon, scale, settled
    fits = 0 <= length < keys.shape[2] and (mask is None or mask.shape[-1] == length + 1)
    if not fits or (again := READY.find(known)) is None:
        if not runs_on(q.device) or unsupported(q, k, v, cos, sin, keys, values, length, mask, norms):
            return None
        if (run := prepare(q, k, v, cos, sin, keys, values, mask, norms, epsilon, scale, settled)) is None:
            return None
        again = READY.keep(known, run, q.get_device())
    made: Tensor = again(q, k, v, cos, sin, keys, values, length, mask, *gains)
    return made


@constant
def runs_on(device: torch.device) -> bool:
    """Whether rope_attend_one is one kernel on this device; elsewhere it is plain torch, of no use but to compare."""
    return device.type == "cuda" and torch.version.hip is None and nvrtc.available(device)


def unsupported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor | int,
    mask: Tensor | None,
    norms: tuple[Tensor, Tensor] | None = None,
) -> str | None:
    """Why these are not operands of rope_attend_one, or of try_attend_one, which has an int for length; or None."""
    for name, t in (("q", q), ("k", k), ("v", v), ("keys", keys), ("values", values)):
        if t.dim() != 4 or q.dtype not in DTYPES:
            return f"{name} {tuple(t.shape)}, {t.dtype}; four dimensions in {', '.join(map(str, DTYPES))} are needed"
    (batch, tokens, heads, dim), (groups, room) = q.shape, keys.shape[1:3]
    if tokens != 1 or dim not in DIMS or k.shape != (batch, 1, groups, dim) or v.shape != k.shape:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, keys {tuple(keys.shape)}"
        return f"{shapes}; one token, as many key heads in each, head_dim in {tuple(DIMS)}"
    if not groups or heads % groups or heads // groups > DIMS[dim]:
        return f"{heads} query heads, {groups} key heads; up to {DIMS[dim]} of the first for each of the second"
    if keys.shape != (batch, groups, room, dim) or values.shape != keys.shape or not room:
        return f"keys {tuple(keys.shape)}, values {tuple(values.shape)}; [B, G, L, D] are needed"
    if room * dim >= 1 << 31 or batch * groups > 65535:
        return f"a cache of {tuple(keys.shape)}, which is too large"
    wide = (q, k, v, cos, sin, keys, values)
    if any(t.dtype != q.dtype or t.device != q.device for t in wide):
        return f"dtypes {', '.join(str(t.dtype) for t in wide)} or devices that differ"
    if any(t.shape not in ((1, 1, dim), (batch, 1, dim)) for t in (cos, sin)):
        return f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)}; [1 or {batch}, 1, {dim}] are needed"
    if not isinstance(length, Tensor):
        if not 0 <= length < room:
            return f"length {length}; 0 to {room - 1}, for the new token"
    elif length.dtype != torch.int64 or length.dim() or length.device != q.device:
        return f"length {length.dtype} {tuple(length.shape)}; an int64 without dimensions, on {q.device}, is needed"
    keys_seen = room if isinstance(length, Tensor) else length + 1
    allowed = (1, 1, 1, keys_seen), (batch, 1, 1, keys_seen)
    if mask is not None and (mask.dtype != torch.bool or mask.shape not in allowed):
        return f"mask {mask.dtype} {tuple(mask.shape)}; bool [1 or {batch}, 1, 1, {keys_seen}] is needed"
    if mask is not None and mask.device != q.device:
        return f"a mask on {mask.device}, q on {q.device}"
    if norms is not None and len(norms) != 2:
        return f"{len(norms)} norms; two are needed, of queries and of keys"
    for gain in norms or ():
        if gain.shape != (dim,) or gain.dtype != q.dtype or gain.device != q.device:
            return f"norms {gain.dtype} {tuple(gain.shape)} on {gain.device}; {q.dtype} [{dim}] on {q.device} is needed"
    return None


# --- Plain torch -----------------------------------------------------------------------------------------------------


def rotate_half(x: Tensor) -> Tensor:
    """(-x2, x1) of x (x1, x2), halves of the last dimension."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)


def rope_attend_one_reference(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, length: Tensor,
    advance: bool, mask: Tensor | None, norms: tuple[Tensor, Tensor] | None, epsilon: float, scale: float,
) -> Tensor:  # fmt: skip
    """The definition. Any device; softmax and sums in float32 throughout."""
    (batch, _, heads, dim), (groups, room) = q.shape, keys.shape[1:3]
    if norms is not None:
        q, k = (rms_norm(t, gain, epsilon) for t, gain in zip((q, k), norms, strict=True))
    query, key = (t * cos[:, :, None] + rotate_half(t) * sin[:, :, None] for t in (q, k))
    at = torch.arange(room, device=q.device)
    here = (at == length).view(room, 1)
    keys.copy_(torch.where(here, key.transpose(1, 2), keys))
    values.copy_(torch.where(here, v.transpose(1, 2), values))
    seen = (at <= length).view(1, 1, 1, room)
    seen = seen if mask is None else seen & mask
    grouped = query.view(batch, groups, heads // groups, dim).float()
    scores = torch.where(seen, grouped @ keys.float().transpose(2, 3) * scale, float("-inf"))
    weights = torch.where(seen.any(dim=-1, keepdim=True), scores.softmax(dim=-1), 0.0)
    y = weights @ torch.where((at <= length).view(room, 1), values.float(), 0.0)
    y = torch.where(length >= room, float("nan"), y)
    if advance:
        length.add_(1)
    return y.to(q.dtype).view(batch, 1, heads, dim)


# --- The kernel ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A launch: warps of a thread block, blocks of a key head (a cluster), blocks a multiprocessor has room for."""

    warps: int
    split: int
    blocks: int = 1

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def shared_bytes(self, dim: int, share: int, norms: bool = False) -> int:
        """As TokenShape of one_token.cuh has it."""
        own = -(-share * dim // 2 // self.split)
        sums = self.warps * share * ((dim + 8) * 4 + 8) + self.split * (own + share) * 8 + 16
        return -(-sums // 16) * 16 + norms * 4 * dim


class Arguments(ctypes.Structure):
    """TokenArgs of one_token.cuh."""

    whole = True
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "cos", "sin", "keys", "values", "count", "mask")),
        *((name, ctypes.c_void_p) for name in ("q_norm", "k_norm", "out")),
        *((f"{name}_{i}", ctypes.c_longlong) for name in "qkv" for i in ("batch", "head")),
        *((name, ctypes.c_longlong) for name in ("cos_batch", "sin_batch", "keys_batch", "keys_head")),
        *((name, ctypes.c_longlong) for name in ("values_batch", "values_head", "mask_batch")),
        *((name, ctypes.c_int) for name in ("heads", "groups", "room", "at", "advance", "settled")),
        ("scale", ctypes.c_float),
        ("epsilon", ctypes.c_float),
    ]


@lru_cache(maxsize=256)
def plan_for(dim: int, share: int, pairs: int, room: int, units: int) -> Plan:
    """The launch for `pairs` key heads of all sequences, with room for `room` tokens each, on `units` processors.

    By a sweep on an H200 (docs/measured/attention.md): for few key heads small blocks, which start soonest behind a
    projection; for their long caches more warps; for many key heads a block of 8 warps a processor.
    """
    if pairs * PORTABLE_CLUSTER <= units and room > 4096:
        return Plan(8, 2 * PORTABLE_CLUSTER if room > 16384 and pairs * 2 * PORTABLE_CLUSTER <= units else 8)
    if pairs * PORTABLE_CLUSTER <= 2 * units:
        return Plan(4, PORTABLE_CLUSTER, 3 if dim <= 128 and share <= 8 else 1)  # else the registers of one
    split = 1
    while split < PORTABLE_CLUSTER and pairs * split * 2 <= units:
        split *= 2
    return Plan(8, split)


def device_functions() -> str:
    """What every kernel is built on."""
    return nvrtc.sources("hopper", "products", "attention/gather", "attention/one_token")


def entry(plan: Plan, dim: int, share: int, dtype: torch.dtype, norms: bool = False) -> str:
    """The source of one kernel, after device_functions."""
    call = f"{dim}, {share}, {plan.warps}, {plan.split}, {str(norms).lower()}, quantrot::{DTYPES[dtype]}"
    cluster = f"__cluster_dims__({plan.split}, 1, 1)" if plan.split > 1 else ""
    return ENTRY.format(cluster=cluster, threads=plan.threads, blocks=plan.blocks, call=call)


@lru_cache(maxsize=256)
def _kernel(plan: Plan, dim: int, share: int, dtype: torch.dtype, norms: bool, device: int) -> int:
    """The function, ready to launch on this device."""
    source = device_functions() + entry(plan, dim, share, dtype, norms)
    kernel = load_kernel(source, "attend_token", plan.shared_bytes(dim, share, norms), device)
    return allow_large_clusters(kernel, plan, device)


def allow_large_clusters(kernel: int, plan: Plan, device: int) -> int:
    """The kernel, which may be launched in this plan's clusters from now on."""
    if plan.split > PORTABLE_CLUSTER:
        from cuda.bindings import driver

        allowed = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        checked(driver.cuKernelSetAttribute(allowed, 1, driver.CUkernel(kernel), driver.CUdevice(device)))
    return kernel


def arguments(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, length: Tensor | int,
    advance: bool, mask: Tensor | None, norms: tuple[Tensor, Tensor] | None, epsilon: float, scale: float,
    settled: bool, out: Tensor,
) -> Arguments:  # fmt: skip
    """The kernel's parameter."""
    count, at = (length, 0) if isinstance(length, Tensor) else (None, length)
    return Arguments(
        *map(address, (q, k, v, cos, sin, keys, values, count, mask, *(norms or (None, None)), out)),
        *(stride for t in (q, k, v) for stride in (t.stride(0), t.stride(2))),
        *(t.stride(0) if t.shape[0] > 1 else 0 for t in (cos, sin)),
        *keys.stride()[:2],
        *values.stride()[:2],
        mask.stride(0) if mask is not None and mask.shape[0] > 1 else 0,
        q.shape[2],
        keys.shape[1],
        keys.shape[2],
        at,
        int(advance),
        int(settled),
        scale * LOG2E,
        epsilon,
    )


def aligned(t: Tensor) -> Tensor:
    """t, or a copy, with its last dimension contiguous and rows that start at multiples of 16 bytes."""
    steps = (s * t.itemsize for s, n in zip(t.stride()[:-1], t.shape, strict=False) if n > 1)
    fits = t.stride(-1) == 1 and not any(n % 16 for n in (*steps, t.data_ptr()))
    return t if fits else t.clone(memory_format=torch.contiguous_format)


def launch(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, length: Tensor,
    advance: bool, mask: Tensor | None, norms: tuple[Tensor, Tensor] | None, epsilon: float, scale: float,
    settled: bool, plan: Plan | None = None,
) -> Tensor:  # fmt: skip
    """rope_attend_one's kernel. plan: instead of the rule's (to measure)."""
    (batch, _, heads, dim), (groups, room), device = q.shape, keys.shape[1:3], q.get_device()
    if any(t.stride()[2:] != (dim, 1) or aligned(t) is not t for t in (keys, values)):
        raise ValueError("rope_attend_one: keys or values whose tokens are not adjacent, or not at 16 bytes")
    q, k, v, cos, sin = (aligned(t) for t in (q, k, v, cos, sin))
    norms = None if norms is None else (aligned(norms[0]), aligned(norms[1]))
    mask = mask if mask is None or mask.stride(3) == 1 else mask.contiguous()
    out = torch.empty(batch, 1, heads, dim, dtype=q.dtype, device=q.device)
    share = heads // groups
    plan = plan or plan_for(dim, share, batch * groups, room, processors(device))
    rest = advance, mask, norms, epsilon, scale, settled, out
    values_ = arguments(q, k, v, cos, sin, keys, values, length, *rest)
    launch_of(plan, q, keys, norms is not None)(values_)
    return out


def launch_of(plan: Plan, q: Tensor, keys: Tensor, normed: bool) -> nvrtc.Launch:
    """The kernel of queries and a cache like these."""
    (batch, _, heads, dim), groups, device = q.shape, keys.shape[1], q.get_device()
    share = heads // groups
    function, shared = _kernel(plan, dim, share, q.dtype, normed, device), plan.shared_bytes(dim, share, normed)
    return nvrtc.Launch(function, (plan.split, batch * groups), plan.threads, shared, device, overlap=True)


def prepare(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None,
    norms: tuple[Tensor, Tensor] | None, epsilon: float, scale: float, settled: bool,
) -> Run | None:  # fmt: skip
    """try_attend_one's kernel as a function of operands like these; None where one would have to be copied."""
    tokens = (q, k, v, cos, sin, keys, values, *(norms or ()))
    adjacent = all(t.stride()[2:] == (q.shape[3], 1) for t in (keys, values))
    if not adjacent or any(aligned(t) is not t for t in tokens) or (mask is not None and mask.stride(3) != 1):
        return None
    (batch, _, heads, dim), (groups, room), device = q.shape, keys.shape[1:3], q.get_device()
    made = torch.empty(q.shape, dtype=q.dtype, device="meta")
    first = arguments(q, k, v, cos, sin, keys, values, 0, False, mask, norms, epsilon, scale, settled, made)
    launch = launch_of(
        plan_for(dim, heads // groups, batch * groups, room, processors(device)), q, keys, norms is not None
    )

    def run(
        q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, length: int,
        mask: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None,
    ) -> Tensor:  # fmt: skip
        out, now = torch.empty(made.shape, dtype=q.dtype, device=q.device), Arguments.from_buffer_copy(first)
        now.q, now.k, now.v, now.cos, now.sin = q.data_ptr(), k.data_ptr(), v.data_ptr(), cos.data_ptr(), sin.data_ptr()
        now.keys, now.values, now.out, now.at = keys.data_ptr(), values.data_ptr(), out.data_ptr(), length
        now.q_norm, now.k_norm = address(q_norm), address(k_norm)
        if mask is not None:  # its rows are longer in every call
            now.mask, now.mask_batch = mask.data_ptr(), mask.stride(0) if mask.shape[0] > 1 else 0
        launch(now)
        return out

    return run


@implement("quantrot::rope_attend_one")
def _rope_attend_one(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, position: Tensor | None,
    length: Tensor | None, mask: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None, epsilon: float,
    scale: float, settled: bool,
) -> Tensor:  # fmt: skip
    advance, length = length is not None, position if length is None else length
    norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
    assert length is not None
    given = q, k, v, cos, sin, keys, values, length, advance, mask, norms, epsilon, scale
    if q.is_cuda and runs_on(q.device) and q.numel():
        return launch(*given, settled)
    return rope_attend_one_reference(*given)


@torch.library.register_fake("quantrot::rope_attend_one")
def _rope_attend_one_fake(q: Tensor, *given: object) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)
