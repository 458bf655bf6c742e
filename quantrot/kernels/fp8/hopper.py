"""The block-scaled FP8 product for Hopper: CUDA C++ (gemm, prefill, across, decode.cuh), compiled at first use.

    gemm         a [M, K], b [N, K], e4m3 with block scales -> a b^T [M, N], + bias; of few rows, + residual
    unsupported  why these operands are not for it, or None; `supports` is the same as a bool

Order of operations, the same for every tile shape: 128 products are added by the tensor cores, that sum times
(a_scale * b_scale) is added to a float32 sum in the order of K, the bias is added, the result is rounded once. With a
b_scale a row, block (1, 0), that sum times a_scale is added, and the whole is multiplied by b_scale before the bias. K
is one chain, or as many parts as `parts_of(N, K)` says, each a chain, added in order; never a matter of M, so a row has
the same bits alone and in any batch. A residual is added to the rounded result, and the sum rounded.

Layouts: K contiguous, rows (and the data) aligned to 16 bytes: K a multiple of 16, N of 8. Scales in any strides; an
a_scale [M, K / 128] is read fastest with its rows adjacent (stride (1, M): a [K / 128, M] tensor, transposed).
"""

import ctypes
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.nvrtc import MAX_SHARED, SM_SHARED, load_kernel, processors
from quantrot.kernels.ready import Run, address

OUT = {torch.bfloat16: "Bf16", torch.float16: "Fp16"}
E4M3 = torch.float8_e4m3fn
PROCESSORS = 132  # of the device that the rules are for
DECODE_ROWS = 64  # up to which plans are Decodes, but for a K whose scales fill shared memory
BUSY = 112  # thread blocks that keep the memory busy
WHOLE = 31  # the shift of a block that is the whole dimension
ENTRY = """extern "C" __global__ void {cluster}__launch_bounds__({threads}, {resident}) {name}(
    const __grid_constant__ quantrot::TensorMap a, const __grid_constant__ quantrot::TensorMap b,
    const __grid_constant__ quantrot::TensorMap c, const __grid_constant__ quantrot::GemmArgs args) {{
  quantrot::{call};
}}
"""


def _ceil(size: int, block: int) -> int:
    return -(-size // block)


@dataclass(frozen=True)
class Prefill:
    """Many tokens: persistent thread blocks with tiles of 128 tokens by 128 columns, or (wide) by 256."""

    wide: bool = False  # with two sets
    sets: int = 1  # of tensor core sums: with 2 a block of K (wide: 64 columns) is promoted as the next is multiplied
    stages: int = 4  # blocks of K in shared memory
    cluster: int = 2  # thread blocks that share the tokens of a tile (wide: the columns, b)
    lag: int = 0  # wide: blocks of K, less three quarters, by which the second warpgroup starts behind the first
    tile_group: int = 8  # rows of tiles that run together
    overlap: bool = True  # launched while the kernel before it ends
    early: bool = False  # reads its first stages' part of b before that end: only where that kernel does not write b

    rows = 128
    resident = 1
    threads = 384  # two warpgroups multiply, a third copies

    @property
    def columns(self) -> int:
        return 256 if self.wide else 128

    def shared_bytes(self, segment: int) -> int:
        return self.stages * ((self.rows + self.columns) * 128 + self.rows * 4 + 32) + (24 << 10) + 16 * self.columns

    def call(self, parts: int, channel: bool, out: torch.dtype, bias: int) -> str:
        wide, early, in_parts, by_row = (str(flag).lower() for flag in (self.wide, self.early, parts > 1, channel))
        shape = f"{self.sets}, {self.stages}, {self.cluster}, {wide}, {self.lag}, {early}"
        return f"prefill<{shape}, {in_parts}, {by_row}, quantrot::{OUT[out]}, {bias}>(&a, &b, &c, args)"

    @property
    def down(self) -> int:
        """Tiles of a cluster below each other."""
        return self.cluster if self.wide else 1

    @property
    def right(self) -> int:
        """And beside each other."""
        return self.cluster // self.down

    def tiles(self, m: int, n: int) -> int:
        """Of all thread blocks of a cluster."""
        return _ceil(m, self.rows * self.down) * _ceil(n, self.columns * self.right)

    def grid(self, m: int, n: int, processors: int) -> int:
        return min(self.tiles(m, n), processors // self.cluster) * self.cluster

    def box(self, m: int) -> int:
        """Rows of a that one copy brings: no more than there are (start_of in hopper.cuh). Shares are whole groups of
        eight."""
        return min(self.rows // self.right, m if self.right == 1 else _ceil(_ceil(m, self.right), 8) * 8)

    def boxes(self, m: int) -> tuple[tuple[int, int], ...]:
        """Rows and columns of what the copy engine moves of a, b and c."""
        return (self.box(m), 128), (self.columns // self.down, 128), (8, 64)


@dataclass(frozen=True)
class Decode:
    """Few tokens: tiles of `columns` of c (rows of b) by `tokens`; a cluster shares K."""

    tokens: int  # of a tile: 8, 16, 32, 64
    columns: int = 64  # 16, 32, 64, or 128 by two warpgroups
    stages: int = 8  # blocks of K in shared memory
    resident: int = 2  # thread blocks a multiprocessor
    overlap: bool = True  # launched while the kernel before it ends
    early: int = 0  # blocks of K of b that it reads before that end: only where no kernel that may still run writes b
    turned: bool = False  # the tokens are the tensor core's rows, and the columns its columns
    pairs: bool = False  # two blocks of K are multiplied at once
    late: bool = False  # the kernel after it may start once all of b is asked for, not as soon as this one runs alone

    @property
    def threads(self) -> int:
        return 128 * _ceil(self.columns, 64) + 32

    def stage_bytes(self) -> int:
        return (self.tokens + self.columns) * 128 + 16

    def shared_bytes(self, segment: int) -> int:
        pad = (64 - self.tokens if self.turned else -self.columns % 64) * 128  # the operand of 64 rows reads on
        return self.stages * self.stage_bytes() + pad + segment * (self.tokens + 1) * 4

    def call(self, parts: int, channel: bool, out: torch.dtype, bias: int, add: bool = False) -> str:
        shape = f"{self.tokens}, {self.columns}, {self.stages}, {parts}, {self.early}"
        shape += "".join(f", {flag}".lower() for flag in (self.turned, self.pairs, self.late, channel))
        return f"decode<{shape}, quantrot::{OUT[out]}, {bias}, {str(add).lower()}>(&a, &b, args)"

    def grid(self, m: int, n: int, parts: int) -> int:
        return _ceil(m, self.tokens) * _ceil(n, self.columns) * parts

    def box(self, m: int) -> int:
        """Tokens that one copy brings."""
        return min(self.tokens, m)

    def boxes(self, m: int) -> tuple[tuple[int, int], ...]:
        return (self.box(m), 128), (self.columns, 128)


@dataclass(frozen=True)
class Across:
    """Some tokens: persistent thread blocks with tiles of 128 columns by `tokens`, which are the tensor core's columns;
    or (pair) the two of a cluster, with 64 columns each."""

    tokens: int  # of a tile, a multiple of 16, at most 192 (pair: 144)
    pair: bool = False
    stages: int = 4  # blocks of K in shared memory
    tile_group: int = 8  # rows of tiles that run together
    overlap: bool = True  # launched while the kernel before it ends
    early: bool = False  # reads its first stages' part of b before that end: only where that kernel does not write b

    resident = 1

    @property
    def cluster(self) -> int:
        return 1 + self.pair

    @property
    def columns(self) -> int:
        return 64 if self.pair else 128

    @property
    def threads(self) -> int:
        return 192 if self.pair else 384  # two warps copy; with two warpgroups they give the registers of four away

    def shared_bytes(self, segment: int) -> int:
        stage = (self.tokens + self.columns) * 128 + self.tokens * 4 + 32
        return self.stages * stage + self.tokens * self.columns * 2

    def call(self, parts: int, channel: bool, out: torch.dtype, bias: int) -> str:
        assert parts == 1
        pair, early, by_row = (str(flag).lower() for flag in (self.pair, self.early, channel))
        shape = f"{self.tokens}, {self.stages}, {pair}, {early}"
        return f"across<{shape}, {by_row}, quantrot::{OUT[out]}, {bias}>(&a, &b, &c, args)"

    def tiles(self, m: int, n: int) -> int:
        return _ceil(m, self.tokens) * _ceil(n, 128)

    def grid(self, m: int, n: int, processors: int) -> int:
        return min(self.tiles(m, n), processors // self.cluster) * self.cluster

    def box(self, m: int) -> int:
        """Rows of a that one copy brings."""
        return min(self.tokens // self.cluster, _ceil(_ceil(m, self.cluster), 8) * 8 if self.pair else m)

    def boxes(self, m: int) -> tuple[tuple[int, int], ...]:
        """Rows and columns of what the copy engine moves of a, b and c."""
        return (self.box(m), 128), (self.columns, 128), (self.tokens, 64)


Plan = Prefill | Across | Decode


@lru_cache(maxsize=1)
def device_functions() -> str:
    """The C++ that every kernel starts with."""
    return nvrtc.sources("hopper", "products", "fp8/gemm", "fp8/prefill", "fp8/across", "fp8/decode")


def cluster_of(blocks: int) -> str:
    """The attribute of a kernel whose thread blocks form clusters of so many."""
    return f"__cluster_dims__({blocks}, 1, 1) " if blocks > 1 else ""


def entry(
    plan: Plan, parts: int, channel: bool, out: torch.dtype, bias: int, add: bool = False, name: str = "gemm"
) -> str:
    """C++ of the kernel `name`. channel: b has a scale a row; bias: the bytes of an element of it, 0 for none; add: a
    residual."""
    cluster = parts if isinstance(plan, Decode) else plan.cluster
    more = (add,) if isinstance(plan, Decode) else ()
    return ENTRY.format(
        cluster=cluster_of(cluster),
        threads=plan.threads,
        resident=plan.resident,
        name=name,
        call=plan.call(parts, channel, out, bias, *more),
    )


# --- Plans -----------------------------------------------------------------------------------------------------------


def parts_of(n: int, k: int) -> int:
    """Into how many parts K is split, for every number of tokens."""
    parts, tiles, blocks = 1, _ceil(n, 16), _ceil(k, 128)
    while parts < 8 and 2 * parts * tiles < BUSY and blocks >= 8 * parts:
        parts *= 2
    return parts


def segment_of(k: int, parts: int) -> int:
    """Blocks of 128 of K in one part."""
    return _ceil(_ceil(k, 128), parts)


SHORT = 64  # blocks of K of a product whose start and end count. With 112 `late` is 8% slower or (32 tokens) 6% faster
EARLY_BYTES = 64 << 10  # of b, a multiprocessor: enough to keep the memory busy
HALVED = 5120  # of K, up to which one token that lies ready has tiles of 64 columns: 4096 x 4096 5.5 us for 5.9


def decode_plan(m: int, n: int, k: int, parts: int, columns: int = 0) -> Decode:
    """columns: of a tile, 0: by rule."""
    tokens = next(t for t in (8, 16, 32, 64) if t >= min(m, 64))
    tiles = _ceil(m, tokens) * parts
    # With 16 or 32 tokens, half as many blocks that each read the tokens are better than all multiprocessors busy.
    enough = {8: {64: 96, 32: BUSY}, 64: {64: 96, 32: BUSY // 2}}.get(tokens, {64: BUSY // 2, 32: BUSY // 2})
    chosen = next((c for c in enough if tiles * _ceil(n, c) >= enough[c]), 16)
    if tokens == 64 and tiles * _ceil(n, 64) > 2 * PROCESSORS:
        chosen = 128
    columns = columns or chosen
    plan = Decode(tokens, columns=columns, turned=tokens == 64)
    one = plan.grid(m, n, parts) <= PROCESSORS or (tokens, columns) == (64, 128)  # whose registers fit once
    plan = replace(plan, resident=1 if one else 2)
    segment = segment_of(k, parts)
    budget = min(MAX_SHARED, SM_SHARED // plan.resident - 1024) - replace(plan, stages=0).shared_bytes(segment)
    in_flight = (192 << 10) // plan.resident // (columns * 128)  # of b, enough for the memory's latency
    plan = replace(plan, stages=min(budget // plan.stage_bytes(), in_flight, max(segment, 8)))
    short = plan.resident == 1 and segment <= SHORT
    pairs = tokens <= 32 or columns <= 32  # at most 16 sums a lane, of each block
    return replace(plan, pairs=short and pairs and plan.stages >= 4, late=short)


def early_blocks(plan: Decode, segment: int, blocks: int = PROCESSORS) -> int:
    """Of a product of so many thread blocks. At most a quarter of K: the tokens come behind them, and no product can
    begin without those. More where multiprocessors are free for the next product, whose thread blocks then start before
    this one ends: 32 tokens by 4096 x 4096 take 6.0 us for 6.1, 16 tokens by 6144 x 4096 7.8 us for 8.4.
    """
    if plan.late and blocks <= PROCESSORS // 2:
        return min(plan.stages, segment // 3)
    if plan.late and blocks <= PROCESSORS * 3 // 4:
        return min(plan.stages, segment * 3 // 8)
    return min(plan.stages, EARLY_BYTES // (plan.resident * plan.columns * 128), segment // 4)


WIDE = Prefill(wide=True, sets=2, cluster=1, lag=1)
PAIRED = replace(WIDE, cluster=2)  # reads a third less of L2, whose speed else bounds it
SQUARE = Prefill(sets=2, stages=6)
IN_PARTS = Prefill(stages=6)  # the sum of the parts so far takes the second set's place
ACROSS = (
    Across(144, stages=5),
    Across(160, stages=5),
    Across(192, stages=4),
    Across(80, pair=True, stages=8),
    Across(96, pair=True, stages=8),
    Across(144, pair=True, stages=7),
)
# Microseconds of a block of K of one tile (Decode: by columns, and by thread blocks a multiprocessor), and of all else.
# Fitted to 29 shapes of Llama's and Qwen's linears by 65 to 384 tokens on an H200, where the model's choice takes 0.7 %
# longer than the fastest plan, in the mean. PAIRED's is from a race with WIDE on an H100.
BLOCK: dict[Prefill | Across, float] = {WIDE: 0.84, PAIRED: 0.80, SQUARE: 0.422}
BLOCK |= dict(zip(ACROSS, (0.583, 0.610, 0.760, 0.241, 0.264, 0.340), strict=True))
SOME, MORE = 256, 1.1  # tokens, past which tiles of Across take up to so many times longer than in the model
DECODE_BLOCK = {(16, 1): 0.15, (32, 1): 0.17, (32, 2): 0.245, (64, 1): 0.20, (64, 2): 0.368, (128, 1): 0.325}
REST = {Prefill: 2.5, Across: 3.5, Decode: 1.0}


def microseconds(plan: Plan, m: int, n: int, k: int) -> float:
    """The model's time of a product whose K is in one part, of more than 64 tokens."""
    if isinstance(plan, Decode):
        turns = _ceil(plan.grid(m, n, 1), PROCESSORS * plan.resident)
        block = DECODE_BLOCK[plan.columns, plan.resident]
    else:
        turns, block = _ceil(plan.tiles(m, n), PROCESSORS // plan.cluster), BLOCK[plan]
    us = REST[type(plan)] + turns * _ceil(k, 128) * block
    return us * MORE if isinstance(plan, Across) and m > SOME else us


def _waves(m: int, n: int, plan: Prefill) -> int:
    """Columns that the busiest multiprocessor computes, if each does one tile after another."""
    return _ceil(plan.tiles(m, n), PROCESSORS // plan.cluster) * plan.columns


def _prefill_plan(m: int, n: int) -> Prefill:
    """At equal work, wide is 3% faster, and in pairs a few percent more."""
    wide = PAIRED if _waves(m, n, PAIRED) <= _waves(m, n, WIDE) else WIDE
    return wide if _waves(m, n, wide) <= 1.03 * _waves(m, n, SQUARE) else SQUARE


@lru_cache(maxsize=4096)
def plan_for(m: int, n: int, k: int, parts: int, settled: bool = False) -> Plan:
    """The plan of these sizes, by rule. settled: b may be read before the kernel before this one has ended."""
    plan: Plan = decode_plan(m, n, k, parts, columns=64 if m == 1 and k <= HALVED and n >= 32 * BUSY else 0)
    if m > DECODE_ROWS and parts == 1:
        few = (decode_plan(m, n, k, parts, columns) for columns in (64, 128))
        plan = min((_prefill_plan(m, n), plan, *few, *ACROSS), key=lambda plan: microseconds(plan, m, n, k))
    elif m > DECODE_ROWS and _ceil(m, 128) * _ceil(n, 128) >= 48:  # below, tiles of 64 tokens by 64 columns occupy more
        plan = IN_PARTS
    if isinstance(plan, Decode):
        early = early_blocks(plan, segment_of(k, parts), plan.grid(m, n, parts)) if settled else 0
        return replace(plan, early=early) if plan.stages >= 2 else IN_PARTS if parts > 1 else SQUARE
    return plan if plan in (SQUARE, IN_PARTS) else replace(plan, early=settled)


# --- What can be run -------------------------------------------------------------------------------------------------

NEEDS = (
    "an NVIDIA GPU of capability 9.0 and cuda.core; powers of two from (1, 128) on for a, from (128, 128) on for b, 0 "
    "for a whole dimension, or (1, 0) for b; K a multiple of 16, N of 8; a bfloat16 or float16 result"
)


def _whole(block: tuple[int, int], shape: torch.Size) -> tuple[int, int]:
    """The block with 0 for a dimension that it covers."""
    rows, columns = (0 if b >= size else b for b, size in zip(block, shape, strict=True))
    return rows, columns


def _allowed(block: int, least: int) -> bool:
    """A power of two from `least` on, or 0: the whole dimension."""
    return block == 0 or (block >= least and block & (block - 1) == 0)


def _grid_of(shape: torch.Size, block: tuple[int, int]) -> tuple[int, int]:
    rows, columns = (_ceil(size, b) if b else 1 for size, b in zip(shape, block, strict=True))
    return rows, columns


def unsupported(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    a_block: tuple[int, int],
    b_block: tuple[int, int],
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> str | None:
    """Why `gemm` does not take these operands (whatever the device), or None."""
    (m, k), n = a.shape, b.shape[0]
    if a.dtype != E4M3 or b.dtype != E4M3:
        return f"a is {a.dtype}, b is {b.dtype}; both must be {E4M3}"
    if out_dtype not in OUT:
        return f"out_dtype is {out_dtype}; allowed: {', '.join(map(str, OUT))}"
    if b.shape[1] != k or k == 0 or n == 0 or k % 16 or n % 8:
        return f"a is [{m}, {k}], b is {list(b.shape)}; K must be a multiple of 16, N of 8"
    if max(m, n, k) >= 1 << 30:
        return f"a size of {max(m, n, k)}; allowed: below 2^30"
    if residual is not None and not (readable(residual) and residual.dtype == out_dtype and _adds(m, n, k)):
        return f"residual: it takes up to {DECODE_ROWS} rows of it, of {out_dtype}, aligned to 16 bytes, of no huge K"
    reasons = (unsupported_scale("a", a, a_scale, a_block), unsupported_scale("b", b, b_scale, b_block))
    return next((reason for reason in reasons if reason), unsupported_bias(n, out_dtype, bias))


def _adds(m: int, n: int, k: int) -> bool:
    """Whether the plan of these sizes adds a residual."""
    return 0 < m <= DECODE_ROWS and isinstance(plan_for(m, n, k, parts_of(n, k)), Decode)


def unsupported_scale(name: str, x: Tensor, scale: Tensor, block: tuple[int, int]) -> str | None:
    """Of `unsupported`, what concerns an operand's scales."""
    rows, columns = _whole(block, x.shape)
    by_row = name == "a" or (rows, columns) == (1, 0)
    if not _allowed(rows, 1 if by_row else 128) or not _allowed(columns, 128):
        return f"{name}_block is {block}; allowed: {NEEDS.split('; ')[1]}"
    grid = _grid_of(x.shape, block)
    if scale.dtype != torch.float32 or tuple(scale.shape) != grid:
        return f"{name}_scale is {scale.dtype} {list(scale.shape)}; it must be float32 {list(grid)}"
    if sum((size - 1) * stride for size, stride in zip(scale.shape, scale.stride(), strict=True)) >= 1 << 32:
        return f"{name}_scale spans 2^32 elements or more"
    return None


def unsupported_bias(n: int, out_dtype: torch.dtype, bias: Tensor | None) -> str | None:
    """Of `unsupported`, what concerns the bias."""
    if bias is not None and (bias.shape != (n,) or bias.dtype not in (torch.float32, out_dtype)):
        return f"bias is {bias.dtype} {list(bias.shape)}; it must be [{n}], float32 or {out_dtype}"
    return None


def supports(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    a_block: tuple[int, int],
    b_block: tuple[int, int],
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> bool:
    """Whether `gemm` takes this product: operands, device and installation."""
    on_device = a.device.type == "cuda" and nvrtc.available(a.device)
    return on_device and unsupported(a, a_scale, b, b_scale, a_block, b_block, out_dtype, bias, residual) is None


# --- Launch ----------------------------------------------------------------------------------------------------------


class Scales(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("row_shift", ctypes.c_int),
        ("k_shift", ctypes.c_int),
        ("row_stride", ctypes.c_uint),
        ("k_stride", ctypes.c_uint),
    ]


class GemmArgs(ctypes.Structure):
    _fields_ = [
        ("a", Scales),
        ("b", Scales),
        ("bias", ctypes.c_void_p),
        ("c", ctypes.c_void_p),
        ("m", ctypes.c_int),
        ("n", ctypes.c_int),
        ("k", ctypes.c_int),
        ("segment", ctypes.c_int),
        ("tile_group", ctypes.c_int),
        ("box", ctypes.c_int),
        ("residual", ctypes.c_void_p),
        ("residual_stride", ctypes.c_longlong),
    ]


class _Arguments(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ubyte * 128) for name in "abc"] + [("args", GemmArgs)]


def scales_of(x: Tensor, scale: Tensor, block: tuple[int, int]) -> Scales:
    rows, columns = (WHOLE if size == 0 else size.bit_length() - 1 for size in _whole(block, x.shape))
    return Scales(scale.data_ptr(), rows, columns if columns == WHOLE else columns - 7, *scale.stride())


def arguments(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    c: Tensor | None,
    a_block: tuple[int, int],
    b_block: tuple[int, int],
    bias: Tensor | None,
    plan: Plan,
    parts: int,
    residual: Tensor | None = None,
) -> GemmArgs:
    """The kernel's last parameter."""
    (m, k), n = a.shape, b.shape[0]
    scales = scales_of(a, a_scale, a_block), scales_of(b, b_scale, b_block)
    group = 0 if isinstance(plan, Decode) else plan.tile_group
    pointers = (t.data_ptr() if t is not None else None for t in (bias, c))
    return GemmArgs(*scales, *pointers, m, n, k, segment_of(k, parts), group, plan.box(m), *residual_of(residual))


def residual_of(residual: Tensor | None) -> tuple[int | None, int]:
    """Its address and the stride of its rows."""
    return (None, 0) if residual is None else (residual.data_ptr(), residual.stride(0))


def is_channel(b: Tensor, block: tuple[int, int]) -> bool:
    """Whether b has a scale for each row, constant along K."""
    return block[0] == 1 and _whole(block, b.shape) == (1, 0)


@lru_cache(maxsize=1024)
def _kernel(
    plan: Plan, parts: int, channel: bool, out: torch.dtype, bias: int, add: bool, segment: int, device: int
) -> Any:
    """The function, ready to launch on this device."""
    source = device_functions() + entry(plan, parts, channel, out, bias, add)
    return load_kernel(source, "gemm", plan.shared_bytes(segment), device)


def aligned(x: Tensor) -> Tensor:
    """x with contiguous columns and rows that start at multiples of 16 bytes."""
    plain = x.stride(1) == 1 and x.stride(0) % 16 == 0 and x.stride(0) >= x.shape[1] and x.data_ptr() % 16 == 0
    return x if plain else x.clone(memory_format=torch.contiguous_format)


def readable(x: Tensor) -> bool:
    """By 16 bytes, of 16-bit elements."""
    return x.stride(1) == 1 and (x.shape[0] == 1 or x.stride(0) % 8 == 0) and x.data_ptr() % 16 == 0


def aligned_bias(bias: Tensor | None) -> Tensor | None:
    """bias, contiguous, at a multiple of 4 bytes, as the copies that bring two 16-bit elements need it."""
    return bias if bias is None or (bias.stride(0) == 1 and bias.data_ptr() % 4 == 0) else bias.clone()


def gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    a_block: tuple[int, int],
    b_block: tuple[int, int],
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    b_settled: bool = False,
    plan: Plan | None = None,
    parts: int | None = None,
) -> Tensor:
    """a [M, K] times the transpose of b [N, K], both e4m3 with block scales, + bias: [M, N] in out_dtype, contiguous.

    residual [M, N], of out_dtype and up to 64 rows: is added to the rounded result.
    b_settled: no kernel that may still run writes b, which may be read before the kernel before this one has ended.
    plan and parts: instead of the rules' (to measure). Raises ValueError for what `unsupported` names.
    """
    reason = unsupported(a, a_scale, b, b_scale, a_block, b_block, out_dtype, bias, residual)
    if reason:
        raise ValueError(f"{reason}; use another backend")
    if len(a) == 0:
        return torch.empty((0, b.shape[0]), dtype=out_dtype, device=a.device)
    given: Any = a, a_scale, b, b_scale, a_block, b_block, out_dtype, bias, residual
    return prepare(*given, b_settled=b_settled, plan=plan, parts=parts)(a, a_scale, b, b_scale, bias, residual)


def prepare(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    a_block: tuple[int, int],
    b_block: tuple[int, int],
    out_dtype: torch.dtype,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    b_settled: bool,
    plan: Plan | None = None,
    parts: int | None = None,
) -> Run:
    """`gemm` of operands that it takes, as a function of a, b, with their scales, bias and residual like these."""
    (m, k), n = a.shape, b.shape[0]
    parts = parts or parts_of(n, k)
    plan = plan or plan_for(m, n, k, parts, b_settled and aligned(b) is b)
    device, segment, channel, add = a.get_device(), segment_of(k, parts), is_channel(b, b_block), residual is not None
    if add and not isinstance(plan, Decode):
        raise ValueError(f"plan: a {type(plan).__name__} adds no residual; give a Decode")
    made: Any = {"size": (m, n), "dtype": out_dtype, "device": a.device}
    values = _Arguments(args=arguments(a, a_scale, b, b_scale, None, a_block, b_block, bias, plan, parts, residual))
    matrices = aligned(a), aligned(b), torch.empty(made["size"], dtype=out_dtype, device="meta")
    map_a, map_b, *map_c = (nvrtc.map_of(t, (*box, 128)) for t, box in zip(matrices, plan.boxes(m), strict=False))
    bias_bytes, shared = bias.itemsize if bias is not None else 0, plan.shared_bytes(segment)
    function = _kernel(plan, parts, channel, out_dtype, bias_bytes, add, segment, device)
    grid = (plan.grid(m, n, parts if isinstance(plan, Decode) else processors(device)),)
    launch = nvrtc.Launch(function, grid, plan.threads, shared, device, overlap=plan.overlap)

    def run(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Any, residual: Tensor | None) -> Tensor:
        c, a, b, bias = torch.empty(**made), aligned(a), aligned(b), aligned_bias(bias)
        now = _Arguments.from_buffer_copy(values)
        args = now.args
        ctypes.memmove(now.a, map_a(a), 128)
        ctypes.memmove(now.b, map_b(b), 128)
        if map_c:
            ctypes.memmove(now.c, map_c[0](c), 128)
        args.a.data, args.b.data, args.c = a_scale.data_ptr(), b_scale.data_ptr(), c.data_ptr()
        args.bias, args.residual = address(bias), address(residual)
        launch(now)
        return c

    return run
