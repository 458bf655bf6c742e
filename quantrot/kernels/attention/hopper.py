"""FP8 attention of many queries for Hopper: CUDA C++ (softmax.cuh, prefill.cuh, on hopper.cuh), compiled at first use.

    attention    Inputs -> [B, S, H, D]
    unsupported  why these operands are not for it, or None

The reference's arithmetic, tile by tile of 128 keys; as in the Triton kernels the running maximum is a whole power of
two. Head dimensions 64 and 128; scales of k and v a block of 128 tokens or coarser; no mask (lengths and causal are).
K's rows are read in groups of 16: its heads start at multiples of 16 rows. Queries in 16 bits are quantized on their
way into registers, one scale a token, as reference.quantize_heads does it.
"""

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.attention.reference import BLOCK, LOG2E, Inputs, group_of, span
from quantrot.kernels.fp8 import E4M3
from quantrot.kernels.nvrtc import encode_map, load_kernel, processors
from quantrot.kernels.ready import Run, address

OUT = {torch.bfloat16: "Bf16", torch.float16: "Fp16"}
CODES = {E4M3: "E4m3", torch.int8: "Int8"}
DIMS = (64, 128)
STARTS, PLACES = 146, 512  # of AttentionArgs
TURNS = 3  # from which a counter beats what the host deals out: with 3.9 54.7 us for 56.3, with 1.9 23.9 for 22.2
COUNTERS = nvrtc.Counters()  # from which thread blocks take blocks of queries
FEW = 64  # queries up to which tiles of 64 rows are mostly padding
EACH = 2.0  # what a block of queries takes besides its tiles of keys, in tiles; with less, some get all the short ones
ENTRY = """extern "C" __global__ void __launch_bounds__({threads}, 1) attention(
    const __grid_constant__ quantrot::TensorMap q, const __grid_constant__ quantrot::TensorMap k,
    const __grid_constant__ quantrot::TensorMap v, const __grid_constant__ quantrot::AttentionArgs args) {{
  quantrot::attention<{call}>(&q, &k, &v, args, counters);
}}
"""


@dataclass(frozen=True)
class Plan:
    """A launch: warpgroups of 64 queries, tiles of K and of V in shared memory, flow from one block to the next."""

    groups: int
    stages: int
    flow: bool

    @property
    def rows(self) -> int:
        return 64 * self.groups

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    def shared_bytes(self, dim: int, wide: bool = False) -> int:
        """wide: queries in 16 bits."""
        small = -(-((2 + 5 * self.stages) * 8 + 4) // 16) * 16 + 16  # barriers, scales, a place, what sums start at
        ones, own = 1024, 16 * 128 * self.groups
        tiles = self.rows * dim * (1 + wide) + 2 * self.stages * BLOCK * dim
        return tiles + -(-small // 128) * 128 + ones + own


class Arguments(ctypes.Structure):
    """AttentionArgs of prefill.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q_scale", "k_scale", "v_scale", "lengths", "query_lengths", "out")),
        *((f"{name}_{i}", ctypes.c_longlong) for name in ("qs", "ks", "vs") for i in ("batch", "head", "row")),
        *((name, ctypes.c_int) for name in ("q_shift", "q_batch", "q_head", "q_column")),
        *((name, ctypes.c_int) for name in ("k_batch", "k_head", "v_batch", "v_head")),
        *((name, ctypes.c_int) for name in ("batch", "heads", "share", "queries", "keys", "blocks")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("counter", "dealt")),
        ("starts", ctypes.c_ushort * STARTS),
        ("places", ctypes.c_ushort * PLACES),
    ]


class _Parameters(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_ubyte * 128) for name in "qkv"), ("args", Arguments)]


def plan_for(dim: int) -> Plan:
    """The launch for this head dimension."""
    return Plan(2, 3, False) if dim == 128 else Plan(3, 4, True)


def unsupported(given: Inputs, dtype: torch.dtype) -> str | None:
    """Why `attention` does not take these operands, or None. Does not look at the device."""
    q, k, v = given.q, given.k, given.v
    dim, keys = q.shape[3], k.shape[2]
    if dim not in DIMS or dtype not in OUT:
        return f"head_dim {dim}, {dtype}; head_dim 64 and 128 and 16-bit results are"
    if given.mask is not None:
        return "a mask"
    if 1 in (group_of(given.k_scale, keys), group_of(given.v_scale, keys)):
        return "a scale of k or v for each token"
    if any(t.stride(3) != 1 or t.data_ptr() % 16 or t.shape[2] * t.shape[3] * t.shape[1] >= 1 << 31 for t in (q, k, v)):
        return "operands whose last dimension is not contiguous, or that do not start at 16 bytes"
    if (reason := unreadable(q)) is not None:
        return reason
    if k.stride(2) != dim or any(s % dim for s in k.stride()[:2]):
        return "rows of k that are not adjacent"
    if any(s % (16 * dim) for s, n in zip(k.stride()[:2], k.shape, strict=False) if n > 1) or _folds(k) is None:
        return "heads of k that do not start at multiples of 16 rows"
    if v.stride(2) % 16 or any(s % v.stride(2) for s in v.stride()[:2]):
        return "rows of v that are not at multiples of 16 bytes"
    return None


def unreadable(q: Tensor) -> str | None:
    """Why the copy engine cannot read these queries [B, H, S, D], codes or 16 bits, wherever they start; or None."""
    if q.dtype not in CODES and q.dtype not in OUT:
        return f"q in {q.dtype}"
    if q.stride(3) != 1 or not _q_row(q) or _q_row(q) * q.itemsize % 16 or _q_places(q) is None:
        return "rows of q that are not at multiples of 16 bytes, or heads between them"
    return None


def supports(given: Inputs, dtype: torch.dtype) -> bool:
    """Whether `attention` takes these operands on their device."""
    device = given.q.device
    return device.type == "cuda" and nvrtc.available(device) and unsupported(given, dtype) is None


def _q_row(q: Tensor) -> int:
    """Elements from a query to the next, or with one alone what makes a matrix of the others."""
    if q.shape[2] > 1:
        return q.stride(2)
    return max(q.shape[3], *(s for s, n in zip(q.stride()[:2], q.shape, strict=False) if n > 1), 0)


def _q_places(q: Tensor) -> tuple[int, int, int] | None:
    """Rows from a batch of q to the next, rows and bytes from a head to the next; None where it is not a matrix."""
    (batch, head), row = (s if n > 1 else 0 for s, n in zip(q.stride()[:2], q.shape, strict=False)), _q_row(q)
    if batch % row:
        return None
    if head % row == 0:
        return batch // row, head // row, 0
    return (batch // row, 0, head * q.itemsize) if q.shape[1] * head <= row and head * q.itemsize % 16 == 0 else None


def _folds(k: Tensor) -> int | None:
    """How many groups of 16 rows cover k's memory, None where the last would leave it."""
    groups = -(-span(k) // (16 * k.shape[3]))
    left = k.untyped_storage().nbytes() // k.itemsize - k.storage_offset()
    return groups if groups * 16 * k.shape[3] <= left else None


def device_functions() -> str:
    """What every kernel is built on."""
    files = ("hopper", "products", "attention/codes", "attention/softmax", "attention/prefill")
    return COUNTERS.declaration + nvrtc.sources(*files)


def entry(plan: Plan, dim: int, causal: bool, queries: torch.dtype, codes: torch.dtype, out: torch.dtype) -> str:
    """The source of one kernel, after device_functions. codes: of keys, and of queries or what they become."""
    types = [f"quantrot::{name}" for name in (OUT.get(queries, "Codes"), CODES[codes], OUT[out])]
    numbers = (str(int(n)) for n in (dim, plan.groups, plan.stages, plan.flow, causal))
    return ENTRY.format(threads=plan.threads, call=", ".join([*numbers, *types]))


@lru_cache(maxsize=256)
def deal(queries: int, keys: int, causal: bool, rows: int, heads: int, blocks: int) -> tuple[Any, Any] | None:
    """Which blocks of `rows` queries each of `blocks` thread blocks takes, so that the last ends soon: starts, places.

    Thread block b takes places[starts[b] : starts[b + 1]], longest first. Place i * heads + h is head h's (of all
    sequences) i-th block of queries from the end. It takes as long as its tiles of keys and EACH more. Every thread
    block is filled up to a bound in its turn, and the bound is raised until that takes all of them. None where a thread
    block has TURNS or more: then it takes what comes next, whenever it is done.
    """
    count = -(-queries // rows)
    if count * heads >= TURNS * blocks or blocks >= STARTS:
        return None
    ends = [max(keys - i * rows, 0) if causal else keys for i in range(count)]
    work = [-(-end // BLOCK) + EACH for end in ends]
    bound = max(work[0], sum(work) * heads / blocks)
    while (dealt := _deal_up_to(bound, work, heads, blocks)) is None:
        bound += 0.25
    starts = (ctypes.c_ushort * STARTS)(0, *accumulate(map(len, dealt)))
    return starts, (ctypes.c_ushort * PLACES)(*(place for each in dealt for place in each))


def _deal_up_to(bound: float, work: list[float], heads: int, blocks: int) -> list[list[int]] | None:
    """Each thread block's places, or None where some are left."""
    dealt: list[list[int]] = [[] for _ in range(blocks)]
    room = [bound] * blocks
    for i, each in enumerate(work):
        place, end = i * heads, (i + 1) * heads
        for b in range(blocks):
            if room[b] >= each:
                n = min(int(room[b] / each), end - place)
                dealt[b] += range(place, place + n)
                room[b] -= n * each
                place += n
                if place == end:
                    break
        if place < end:
            return None
    return dealt


def arguments(given: Inputs, out: Tensor, plan: Plan, dealt: tuple[Any, Any] | None, counter: int | None) -> Arguments:
    """The kernel's last parameter. dealt: see deal. counter: the one to use where nothing is dealt out."""
    (batch, heads, queries, dim), keys = given.q.shape, given.k.shape[2]
    wide, places = given.q.dtype in OUT, _q_places(given.q)
    assert places is not None
    group = 1 if wide else group_of(given.q_scale, queries)
    scales = (given.q_scale, given.k_scale, given.v_scale)
    strides = [(*t.stride()[:2], t.stride(2) if t.shape[2] > 1 else 0) for t in scales]
    return Arguments(
        *(t.data_ptr() for t in scales),
        *(t.data_ptr() if t is not None else None for t in (given.lengths, given.query_lengths)),
        out.data_ptr(),
        *(stride for each in strides for stride in each),
        {0: 31, 1: 0, BLOCK: 7}[group],
        *places,
        *(s // (16 * dim) for s in given.k.stride()[:2]),
        *(s // given.v.stride(2) for s in given.v.stride()[:2]),
        batch,
        heads,
        heads // given.k.shape[1],
        queries,
        keys,
        -(-queries // plan.rows),
        given.scale * LOG2E,
        -1 if counter is None else counter,
        dealt is not None,
        *(dealt or ()),
    )


@lru_cache(maxsize=256)
def _kernel(
    plan: Plan, dim: int, causal: bool, queries: torch.dtype, codes: torch.dtype, out: torch.dtype, device: int
) -> Any:
    """The function, ready to launch on this device."""
    source = device_functions() + entry(plan, dim, causal, queries, codes, out)
    return load_kernel(source, "attention", plan.shared_bytes(dim, queries in OUT), device)


def q_matrix(q: Tensor, plan: Plan) -> tuple[int, int, int, int, int, int, int]:
    """q as a matrix of bytes: address, rows, columns, bytes from a row to the next, a box's rows and columns, no folds.

    It has the columns of its last row: there are no more behind all rows.
    """
    row, size = _q_row(q), q.itemsize
    rows, columns = -(-span(q) // row), (span(q) - 1) % row + 1
    return q.data_ptr(), rows, columns * size, row * size, plan.rows, min(q.shape[3] * size, 128), 0


def maps(given: Inputs, plan: Plan) -> list[tuple[Any, ...]]:
    """What encode_map takes of q, k and v, but their addresses."""
    k, v, dim = given.k, given.v, given.q.shape[3]
    _, q_rows, columns, pitch, *box, _ = q_matrix(given.q, plan)
    v_rows = -(-span(v) // v.stride(2))
    folds = _folds(k) or 0
    of_k = (dim, 2, 4, 2, folds), (dim, 4 * dim, 2 * dim, 16 * dim), (dim, 2, 4, 2, BLOCK // 16)
    return [
        ((columns, q_rows), (pitch,), (box[1], box[0]), torch.uint8, box[1]),
        (*of_k, torch.uint8, dim),
        ((v.shape[3], v_rows), (v.stride(2),), (BLOCK, dim)),
    ]


def attention(given: Inputs, dtype: torch.dtype, plan: Plan | None = None) -> Tensor:
    """[B, S, H, D] in `dtype`, contiguous. plan: instead of the rule's (to measure). ValueError: see unsupported."""
    reason = unsupported(given, dtype)
    if reason:
        raise ValueError(f"{reason}; use another backend")
    batch, heads, queries, dim = given.q.shape
    if not given.q.numel():
        return torch.empty(batch, queries, heads, dim, dtype=dtype, device=given.q.device)
    operands = given.q, given.q_scale, given.k, given.k_scale, given.v, given.v_scale
    made: Tensor = prepare(given, dtype, plan)(*operands, given.lengths, given.query_lengths)
    return made


def prepare(given: Inputs, dtype: torch.dtype, plan: Plan | None = None) -> Run:
    """`attention` of operands like these, with as much memory behind k, as a function of q, q_scale, k, k_scale, v,
    v_scale, lengths and query_lengths."""
    batch, heads, queries, dim = given.q.shape
    made: Any = {"size": (batch, queries, heads, dim), "dtype": dtype, "device": given.q.device}
    plan = plan or plan_for(dim)
    device = given.q.get_device()
    blocks = min(-(-queries // plan.rows) * batch * heads, processors(device))
    dealt = deal(queries, given.k.shape[2], given.causal, plan.rows, batch * heads, blocks)
    values = _Parameters(args=arguments(given, torch.empty(0, device="meta"), plan, dealt, None))
    of_q, of_k, of_v = maps(given, plan)
    function = _kernel(plan, dim, given.causal, given.q.dtype, given.k.dtype, dtype, device)
    shared, counts = plan.shared_bytes(dim, given.q.dtype in OUT), dealt is None
    launch = nvrtc.Launch(function, (blocks,), plan.threads, shared, device, overlap=True)

    def run(
        q: Tensor, q_scale: Tensor, k: Tensor, k_scale: Tensor, v: Tensor, v_scale: Tensor, lengths: Tensor | None,
        query_lengths: Tensor | None,
    ) -> Tensor:  # fmt: skip
        out, now = torch.empty(**made), _Parameters.from_buffer_copy(values)
        args = now.args
        args.q_scale, args.k_scale, args.v_scale = q_scale.data_ptr(), k_scale.data_ptr(), v_scale.data_ptr()
        args.lengths, args.query_lengths, args.out = address(lengths), address(query_lengths), out.data_ptr()
        if counts and (counter := COUNTERS.first(device)) is not None:
            args.counter = counter
        ctypes.memmove(now.q, encode_map(q.data_ptr(), *of_q), 128)
        ctypes.memmove(now.k, encode_map(k.data_ptr(), *of_k), 128)
        ctypes.memmove(now.v, encode_map(v.data_ptr(), *of_v), 128)
        launch(now)
        return out

    return run


def prepared(given: Inputs, dtype: torch.dtype) -> Run | None:
    """The same where it is what "auto" takes and all lies where it is read, else None."""
    counts = (t for t in (given.lengths, given.query_lengths) if t is not None)
    if given.q.shape[2] <= FEW or not given.q.numel() or not all(t.is_contiguous() for t in counts):
        return None
    return prepare(given, dtype) if supports(given, dtype) else None
