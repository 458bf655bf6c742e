"""Products with MXFP4 operands.

On FP8 tensor cores an MXFP4 product is an FP8 product: `expand_mxfp4` writes each operand as e4m3 with one power of two
a row, cuBLAS multiplies them with row scales, and where a row does not fit e4m3's window its outputs are computed once
more from the packed operands. A few tokens by a packed weight run in one kernel that reads the packed bytes once; so
do, on Hopper, bfloat16 tokens in any number and e4m3 ones up to 4096.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from quantrot.kernels import nvrtc
from quantrot.kernels.fp8 import Fp8ScaleRule
from quantrot.kernels.fp8.operators import SCALE_RULES
from quantrot.kernels.fp8.reference import gate
from quantrot.kernels.mxfp4.operators import FLOATS, check_packed, expand_both, whole_rule
from quantrot.kernels.mxfp4.quantized import alone, by_batch, by_cublas, fp8_tokens, quantizer, scaled_product
from quantrot.kernels.mxfp4.reference import ScaleRule, dequantize_reference, quantize_reference
from quantrot.kernels.operators import check_backend, check_bias, check_device, has_triton, implement, refuse_tangents
from quantrot.kernels.ready import Ready, Run, like, unseen

ACTIVATIONS = ("none", "fp8", "mxfp4")
READY, PRODUCTS = Ready(), Ready()
BACKENDS = ("auto", "hopper", "triton", "cublas", "reference")
DECODE_ROWS = 32  # tokens up to which the packed weight is read by one kernel

torch.library.define(
    "quantrot::mxfp4_product",
    "(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? after, ScalarType dtype, bool exact, str backend)"
    " -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "quantrot::mxfp4_linear",
    "(Tensor x, Tensor packed, Tensor scale, Tensor? bias, str activations, str rule, int hadamard, bool settled,"
    " str backend, bool gated=False) -> Tensor",
)


def mxfp4_product(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    exact: bool = True,
    outside: Tensor | None = None,
    after: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """a b^T of two MXFP4 matrices, [M, K] by [N, K]: [M, N] in `dtype`, products exact, float32 sums.

    a, b: packed uint8 [M, K/2], [N, K/2]; their scales uint8 [., K/32]. exact: rows outside e4m3's window (see
    `expand_mxfp4`) are multiplied once more from the packed operands; without it they are rounded to the window's
    floor. outside: an integer tensor of one element, to which the number of groups outside is added. after: what
    torch.compile has to make before the product, which does not read it. backend: "cublas" (CUDA, capability 8.9, N a
    multiple of 16), "reference", which has no window: always exact, none outside. ValueError for shapes, `outside` or a
    backend that do not fit.
    """
    key, operands = None, (a, a_scale, b, b_scale)
    if a.is_cuda and backend == "auto" and unseen(*operands, outside):
        key = *map(like, operands), like(outside), dtype, exact
        if (again := PRODUCTS.find(key)) is not None:
            return _counted(again(*operands), outside)
    check_packed("a", a, a_scale)
    check_packed("b", b, b_scale)
    check_device(a=a, a_scale=a_scale, b=b, b_scale=b_scale, outside=outside)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"a and b: shapes {tuple(a.shape)} and {tuple(b.shape)}; allowed: [M, K/2] and [N, K/2]")
    check_backend(backend, BACKENDS)
    if backend in ("hopper", "triton"):
        raise ValueError(f"backend: {backend!r} multiplies few tokens (mxfp4_gemm); allowed: auto, cublas, reference")
    _check_dtype("dtype", dtype)
    counts = outside is None or not (outside.is_floating_point() or outside.is_complex() or outside.dtype == torch.bool)
    if outside is not None and (outside.numel() != 1 or not counts):
        raise ValueError(f"outside: {outside.dtype} {tuple(outside.shape)}; allowed: an integer tensor of one element")
    if key and a.numel() and b.numel() and _uses_cublas(a, len(b), backend):
        run = partial(_by_cublas, dtype=dtype, exact=exact)
        return _counted(PRODUCTS.keep(key, run, a.get_device())(*operands), outside)
    return _counted(torch.ops.quantrot.mxfp4_product(*operands, after, dtype, exact, backend), outside)


def _counted(product: tuple[Tensor, Tensor, Tensor], outside: Tensor | None) -> Tensor:
    """The first, the sum of the others added to `outside`."""
    y, left, right = product
    if outside is not None:
        outside += left.sum() + right.sum()
    return y


def mxfp4_gemm(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    activations: str = "none",
    scale_rule: ScaleRule | Fp8ScaleRule | str | None = None,
    hadamard: int = 0,
    settled: bool = False,
    gated: bool = False,
    backend: str = "auto",
) -> Tensor:
    """x [..., K] times the transpose of an MXFP4 weight [N, K]: [..., N] in x's dtype, float32 sums, rounded once,
    then plus the bias [N].

    activations: "none" multiplies x as it is (W4A16), "fp8" its e4m3 with one float32 scale a token (W4A8), "mxfp4" its
    MXFP4 (W4A4). scale_rule: what the activations' scales are rounded to, by default `bf16` for "fp8" (Fp8ScaleRule),
    `even` for "mxfp4" (ScaleRule); "none" takes none. hadamard: 32, 64 or 128: x is turned in blocks of this width
    first. Operands are multiplied exactly whatever the backend, but for a single token of W4A16 and W4A8 on Hopper, a
    number of which loses at most 1/32640 of the largest of its group of 32; sums of W4A8 on FP8 tensor cores keep some
    14 bits. Differentiable in x and bias; quantization passes gradients unchanged.

    gated: x is gate and up side by side, [..., 2 K], and what is multiplied is silu(gate) * up, each rounded to x's
    dtype. On Hopper many tokens of W4A4 in bfloat16 are gated, turned and quantized in one kernel.

    settled: no kernel that may still run when this is called writes packed or scale (weights that were loaded, not such
    as the kernel before makes), so that a few tokens' product may read them before the kernel before it has ended.

    backend: "hopper" and "triton" read the packed weight once, for at most 32 tokens of bfloat16 ("hopper", which
    "auto" takes where it can: capability 9.0, cuda.core, K a multiple of 128; group scales of the weight from 2^-62
    to 2^65, numbers of a single token up to 2^118; W4A16 of any number of tokens, K a multiple of 64, N of 8; W4A4 and
    W4A8 of up to 4096, also of float16 and with any scales, N a multiple of 8); "cublas" (CUDA, capability 8.9, N a
    multiple of 16); "reference". ValueError for sizes, names or a backend that do not fit.
    """
    key, operands = None, (x, packed, scale, bias)
    if x.is_cuda and backend == "auto" and unseen(*operands):
        key = *map(like, operands), activations, scale_rule, hadamard, settled, gated
        if (again := READY.find(key)) is not None:
            return again(*operands)
    check_operands(inner_of(x, packed, gated), packed, scale, activations, hadamard)
    check_bias(bias, packed.shape[0])
    check_device(x=x, bias=bias)
    refuse_tangents(bias)
    check_backend(backend, BACKENDS)
    if backend == "cublas" and activations == "none":
        raise ValueError("backend: 'cublas' multiplies e4m3, x stays wide; allowed: auto, hopper, triton, reference")
    rule = activation_rule(activations, scale_rule)
    rest = activations, rule, hadamard, settled
    if key and (run := _any_dimensions(x, packed, scale, *rest, gated)):
        return READY.keep(key, run, x.get_device())(*operands)
    return torch.ops.quantrot.mxfp4_linear(x, packed, scale, bias, *rest, backend, gated)


# --- Checks and choices ----------------------------------------------------------------------------------------------


def inner_of(x: Tensor, packed: Tensor, gated: bool, norm: Tensor | None = None) -> Tensor:
    """What has the shape of an x that is multiplied: gated, half of it. ValueError for another width, or a norm."""
    if not gated:
        return x
    k = packed.shape[-1] * 2
    if norm is not None or x.shape[-1:] != (2 * k,):
        found = f"x {list(x.shape)} by packed {list(packed.shape)}" + ("" if norm is None else ", with a norm")
        raise ValueError(f"gated: {found}; allowed: x [..., {2 * k}], and no norm")
    return x[..., :k]


def check_operands(x: Tensor, packed: Tensor, scale: Tensor, activations: str, hadamard: int) -> None:
    """ValueError for what mxfp4_gemm does not multiply, whatever the backend."""
    check_packed("packed", packed, scale)
    check_device(x=x, packed=packed, scale=scale)
    refuse_tangents(x)
    if x.dim() < 1 or packed.dim() != 2 or x.shape[-1] != 2 * packed.shape[1]:
        raise ValueError(
            f"x: shape {tuple(x.shape)}; a weight of {tuple(packed.shape)} bytes needs [..., K] by [N, K/2]"
        )
    _check_dtype("x", x.dtype)
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations: {activations!r}; allowed: {', '.join(ACTIVATIONS)}")
    if hadamard and (hadamard not in (32, 64, 128) or x.shape[-1] % hadamard):
        raise ValueError(f"hadamard: {hadamard}; allowed: 0, 32, 64 or 128, dividing the {x.shape[-1]} columns of x")


def activation_rule(activations: str, scale_rule: ScaleRule | Fp8ScaleRule | str | None) -> str:
    """The name of the rule by which activations of this kind are scaled. ValueError for one of the other kind's, or
    where there is nothing to scale."""
    if activations == "none" and scale_rule is not None:
        raise ValueError(f"scale_rule: {scale_rule!r} with activations 'none', which have no scales; leave it out")
    if activations != "fp8":
        return whole_rule(ScaleRule.even if scale_rule is None else scale_rule)
    rule = Fp8ScaleRule.bf16 if scale_rule is None else scale_rule
    if rule not in SCALE_RULES:
        raise ValueError(f"scale_rule: {rule!r}; allowed for activations 'fp8': {', '.join(SCALE_RULES)}")
    return str(rule)


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in FLOATS:
        raise ValueError(f"{name}: dtype {dtype}; allowed: {', '.join(map(str, FLOATS))}")


def _has_fp8(x: Tensor) -> bool:
    return x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) >= (8, 9)


def _uses_cublas(x: Tensor, columns: int, backend: str) -> bool:
    """Whether FP8 tensor cores multiply; ValueError where they were asked for and cannot."""
    able = _has_fp8(x) and columns % 16 == 0
    if backend == "cublas" and not able:
        raise ValueError(
            f"backend: 'cublas' needs a CUDA device of capability 8.9 and N a multiple of 16; the data is on "
            f"{x.device}, N is {columns}; allowed here: auto, reference"
        )
    return able and backend in ("auto", "cublas")


def _widens(rows: Tensor, packed: Tensor, activations: str, backend: str) -> bool:
    """Whether one kernel multiplies many tokens, as they are, by the packed weight."""
    many = activations == "none" and rows.shape[0] > DECODE_ROWS and backend in ("auto", "hopper")
    if not many or rows.device.type != "cuda" or not has_triton() or not nvrtc.available(rows.device):
        return False
    from quantrot.kernels.mxfp4 import hopper_prefill

    return hopper_prefill.fits(rows, packed.shape[0])


# Microseconds, and more a column of the tokens, that a batch's quantizer takes longer than what few tokens need before
# their product, with what both models are wrong by (H200, 16 to 32 tokens by 23 weights: the choice then takes 0.1 and
# 0.2% longer than the faster one in the mean, at most 5 and 6%; benchmarks/tune_mxfp4_batch.py --choice).
QUANTIZING = {"fp8": (3.9, -12e-5), "mxfp4": (4.6, 0.0)}


def few_is_faster(tokens: int, rows: int, columns: int, activations: str, around: float = 0.0) -> bool:
    """Whether the kernel for few tokens is faster than the one for a batch, by the models of both. around: microseconds
    of what the batch needs kernels of its own for, and few tokens do not."""
    from quantrot.kernels.mxfp4 import hopper, hopper_batch

    if tokens > DECODE_ROWS or not hopper.fits(columns):
        return False
    if columns > hopper_batch.MOST_DEPTH:  # which has no plan for them
        return True
    few, batch = (module.rule(tokens, rows, columns)[0] for module in (hopper, hopper_batch))
    at_least, a_column = QUANTIZING[activations]
    return few <= batch + at_least + a_column * columns + around


# Microseconds of cuBLAS behind the kernel that expands the weight, less what both need for the tokens: at least, a
# number of the weight, one of the result, and a column where each multiprocessor has a tile of 128 x 128 (H200, 384 to
# 4096 tokens by 23 weights: the choice then takes 0.5% longer than the faster one in the mean, at most 22%; a batch up
# to 1024 tokens 2.2%; benchmarks/tune_mxfp4_batch.py --cublas).
EXPANDING, A_NUMBER, A_RESULT, A_COLUMN = 3.2, 0.43e-6, 0.49e-6, 2.33e-3
AS_FAST = 1.03  # a batch as fast is taken: two launches for four (56 us of the host for 168), and no wide weight


def batch_beats_cublas(tokens: int, rows: int, columns: int) -> bool:
    """Whether many tokens take a batch's product, by the models of both."""
    from quantrot.kernels.mixed.hopper_plans import PROCESSORS
    from quantrot.kernels.mxfp4 import hopper_batch

    turns = -(-(-(-tokens // 128) * -(-rows // 128)) // PROCESSORS)
    cublas = EXPANDING + A_NUMBER * rows * columns + A_RESULT * tokens * rows + A_COLUMN * turns * columns
    return hopper_batch.rule(tokens, rows, columns)[0] <= AS_FAST * cublas


def takes_batch(rows: Tensor, packed: Tensor, activations: str, backend: str) -> bool:
    """Whether one kernel multiplies a batch of tokens in e4m3 by the packed weight."""
    asked = activations != "none" and rows.numel() > 0 and backend in ("auto", "hopper")
    if not asked or not rows.is_cuda or not has_triton() or not nvrtc.available(rows.device):
        return False
    shape = rows.shape[0], packed.shape[0], rows.shape[1]
    if rows.dtype == torch.bfloat16 and few_is_faster(*shape, activations):
        return False
    from quantrot.kernels.mxfp4 import hopper_batch, hopper_rows

    quantized = activations == "fp8" or hopper_rows.fits(rows, row=True)
    if not quantized or not hopper_batch.fits(rows, packed.shape[0]):
        return False
    if backend == "hopper" or rows.dtype != torch.bfloat16 or not _uses_cublas(rows, packed.shape[0], backend):
        return True  # in another dtype cuBLAS' float32 sums take three kernels more
    return batch_beats_cublas(*shape)


def quantizes_gated(x: Tensor, packed: Tensor, activations: str, hadamard: int, backend: str) -> bool:
    """Whether the quantizer of tokens like x, [M, K], whose product this is takes gate and up as they are."""
    if activations != "mxfp4" or not x.numel() or not x.is_cuda or not has_triton() or not nvrtc.available(x.device):
        return False
    from quantrot.kernels.mxfp4 import hopper_rows

    if not hopper_rows.gates(x.dtype, x.shape[1], hadamard):
        return False
    if takes_batch(x, packed, activations, backend):
        return True
    return _decoder(x, activations, backend) is None and _uses_cublas(x, packed.shape[0], backend)


def _decoder(rows: Tensor, activations: str, backend: str) -> str | None:
    """Which kernel for few tokens multiplies, or None; ValueError where one was asked for and cannot."""
    from quantrot.kernels.mxfp4 import hopper

    runs = rows.dtype == torch.bfloat16 and rows.device.type == "cuda" and has_triton()
    runs = runs and (activations != "fp8" or _has_fp8(rows))
    able = runs and 0 < rows.shape[0] <= DECODE_ROWS
    streams = able and hopper.fits(rows.shape[1]) and nvrtc.available(rows.device)
    if backend == "auto" and able:
        return "hopper" if streams else "triton"
    if backend not in ("hopper", "triton"):
        return None
    if not (streams if backend == "hopper" else able):
        more = ", more where N is a multiple of 8 (quantized ones up to 4096)" if backend == "hopper" else ""
        needs = "of capability 9.0, with cuda.core, K a multiple of 128" if backend == "hopper" else "with Triton"
        raise ValueError(
            f"backend: {backend!r} multiplies 1 to {DECODE_ROWS} tokens of bfloat16{more} on a CUDA device {needs}; "
            f"x is {list(rows.shape)} of {rows.dtype} on {rows.device}; allowed here: auto, reference"
        )
    return backend


# --- FP8 tensor cores ------------------------------------------------------------------------------------------------


def _by_cublas(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, exact: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The product, and how many groups of each row of a and b are outside the window."""
    (left, left_scale, left_outside), (right, right_scale, right_outside) = expand_both(a, a_scale, b, b_scale)
    y = scaled_product(left, left_scale[:, None], right, right_scale[None], dtype)
    if exact:
        from quantrot.kernels.mxfp4 import triton_gemm

        triton_gemm.repair(y, b, b_scale, right_outside, packed=(a, a_scale, left_outside))
    return y, left_outside, right_outside


@implement("quantrot::mxfp4_product")
def _product(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    after: Tensor | None,
    dtype: torch.dtype,
    exact: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if _uses_cublas(a, b.shape[0], backend):
        return _by_cublas(a, a_scale, b, b_scale, dtype, exact)
    # bfloat16 holds e2m1 times a power of two exactly, and its products sum in float32
    wide = torch.float32 if dtype != torch.bfloat16 else torch.bfloat16
    y = F.linear(dequantize_reference(a, a_scale, wide), dequantize_reference(b, b_scale, wide))
    none, nothing = (a.new_zeros(n.shape[0], dtype=torch.int32) for n in (a, b))
    return y.to(dtype), none, nothing


@torch.library.register_fake("quantrot::mxfp4_product")
def _product_fake(a, a_scale, b, b_scale, after, dtype, exact, backend):
    y = a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)
    return y, *(a.new_empty(n.shape[0], dtype=torch.int32) for n in (a, b))


# --- The linear ------------------------------------------------------------------------------------------------------


def _turned(x: Tensor, hadamard: int) -> Tensor:
    if not hadamard:
        return x
    from quantrot.kernels.hadamard import hadamard_transform

    return hadamard_transform(x, block=hadamard)


def _linear_wide(rows: Tensor, packed: Tensor, scale: Tensor, activations: str, rule: str, hadamard: int) -> Tensor:
    """The definition: dequantized operands in x's dtype, or float32 where that does not hold them. hadamard: of tokens
    that become MXFP4."""
    dtype = rows.dtype
    work = torch.float32 if dtype == torch.float16 or activations == "fp8" else dtype
    if activations == "mxfp4":
        codes, scales, _ = quantize_reference(rows, ScaleRule(rule), hadamard=hadamard)
        rows = dequantize_reference(codes, scales, work)
    elif activations == "fp8":
        qdata, token = fp8_tokens(rows, rule)
        rows = (qdata.to(torch.float32) * token.unsqueeze(1)).to(work)
    else:
        rows = rows.to(work)
    return F.linear(rows, torch.ops.quantrot.mxfp4_dequantize(packed, scale, work, "auto")).to(dtype)


@implement("quantrot::mxfp4_linear")
def _linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    activations: str,
    rule: str,
    hadamard: int,
    settled: bool,
    backend: str,
    gated: bool = False,
) -> Tensor:
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    if gated and not quantizes_gated(inner_of(rows, packed, True), packed, activations, hadamard, backend):
        from quantrot.kernels.between import try_gate

        with torch.no_grad():  # an operator's is not recorded
            made = try_gate(rows)
        rows, gated = gate(rows) if made is None else made, False
    if not rows.numel():  # what expands the weight relies on the quantizer's launch in front of it
        y = x.new_zeros((*x.shape[:-1], packed.shape[0]))
        return y if bias is None else y.add_(bias)
    if activations != "mxfp4":
        rows, hadamard = _turned(rows, hadamard), 0
    if run := prepare(rows, packed, scale, activations, rule, hadamard, settled, backend, gated):
        y = run(rows, packed, scale)
    elif _decoder(rows, activations, backend):
        y = _linear_triton(rows, packed, scale, activations, rule, hadamard)
    elif activations != "none" and _uses_cublas(x, packed.shape[0], backend):
        quantize = quantizer(rows, activations, rule, hadamard, gated=gated)
        y = alone(by_cublas(quantize, rows.dtype))(rows, packed, scale)
    else:
        y = _linear_wide(rows, packed, scale, activations, rule, hadamard)
    if bias is not None:
        y = y.add_(bias)
    return y.view(*x.shape[:-1], packed.shape[0])


def prepare(
    rows: Tensor,
    packed: Tensor,
    scale: Tensor,
    activations: str,
    rule: str,
    hadamard: int,
    settled: bool,
    backend: str = "auto",
    gated: bool = False,
) -> Run | None:
    """The product of tokens [M, K] in the kernels for Hopper, as a function of tokens, packed and scale like these;
    None where it is not for these kernels. hadamard: of tokens that become MXFP4. gated: see `quantizes_gated`."""
    if not rows.numel() or backend not in ("auto", "hopper"):
        return None
    if _widens(rows, packed, activations, backend):
        from quantrot.kernels.mxfp4 import hopper_prefill

        return hopper_prefill.prepare(rows, packed, scale, settled=settled)
    if takes_batch(inner_of(rows, packed, gated), packed, activations, backend):
        quantize = quantizer(rows, activations, rule, hadamard, gated=gated, arranged=True)
        return alone(by_batch(quantize, len(rows), packed, scale, rows.dtype, settled))
    if _decoder(rows, activations, backend) != "hopper":
        return None
    from quantrot.kernels.mxfp4 import hopper

    turn = hopper.turn_of(activations, rule, hadamard)
    product = hopper.prepare(rows, packed, scale, rows.dtype, None, turn, settled)
    return lambda rows, packed, scale: product(rows, None, packed, scale, None, None)


def _any_dimensions(
    x: Tensor, packed: Tensor, scale: Tensor, activations: str, rule: str, hadamard: int, settled: bool, gated: bool
) -> Run | None:
    """The same of an x [..., K], as a function of x, packed, scale and bias; not of one that a kernel before turns or
    gates."""
    if not x.numel() or (hadamard and activations != "mxfp4"):
        return None
    lead, (n, k), rows = x.shape[:-1], (packed.shape[0], x.shape[-1]), x.reshape(-1, x.shape[-1])
    inner = inner_of(rows, packed, gated)
    if gated and not quantizes_gated(inner, packed, activations, hadamard, "auto"):
        return None
    product = prepare(rows, packed, scale, activations, rule, hadamard, settled, gated=gated)
    if product is None and activations != "none" and _uses_cublas(x, n, "auto"):
        product = alone(by_cublas(quantizer(rows, activations, rule, hadamard, gated=gated), rows.dtype))
    if product is None:
        return None

    def run(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = product(x.reshape(-1, k), packed, scale)
        return (y if bias is None else y.add_(bias)).view(*lead, n)

    return run


def _linear_triton(rows: Tensor, packed: Tensor, scale: Tensor, activations: str, rule: str, hadamard: int) -> Tensor:
    """bfloat16 holds every kind of tokens exactly, but for e4m3's scale, which multiplies the result."""
    from quantrot.kernels.mxfp4 import triton_gemm, triton_rows

    tokens, token_scale = rows, None
    if activations == "fp8":
        qdata, token_scale = fp8_tokens(rows, rule)
        tokens = qdata.to(torch.bfloat16)
    elif activations == "mxfp4":
        tokens = triton_rows.round_trip(rows, ScaleRule(rule), hadamard)
    return triton_gemm.decode(tokens, token_scale, packed, scale, rows.dtype)


@torch.library.register_fake("quantrot::mxfp4_linear")
def _linear_fake(x, packed, scale, bias, activations, rule, hadamard, settled, backend, gated=False):
    return x.new_empty((*x.shape[:-1], packed.shape[0]))


def _save_for_backward(ctx, inputs, output) -> None:
    x, packed, scale, bias, _, _, ctx.hadamard, *_, gated = inputs
    ctx.save_for_backward(packed, scale, x if gated else None)
    ctx.has_bias = bias is not None


def _backward(ctx, grad: Tensor):
    packed, scale, x = ctx.saved_tensors
    weight = torch.ops.quantrot.mxfp4_dequantize(packed, scale, grad.dtype, "auto")
    dx = _turned(grad @ weight, ctx.hadamard)  # Sylvester's matrix is symmetric
    if x is not None:
        left, up = x.chunk(2, -1)
        dx = torch.cat((torch.ops.aten.silu_backward(dx * up, left), dx * F.silu(left)), -1)
    bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.has_bias else None
    return dx, None, None, bias, *(None,) * 6


torch.library.register_autograd("quantrot::mxfp4_linear", _backward, setup_context=_save_for_backward)
