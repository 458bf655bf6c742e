"""INT8 weights and the mixed-input product in plain torch: the definitions, and the CPU implementation.

    quantize_int8    w [N, K] float -> qdata int8 [N, K], scale bfloat16 [N, K / group]
    dequantize_int8  qdata, scale   -> [N, K] float
    pack_int8        int8 [N, K]    -> int32 [N, ceil(K / 4)], the layout of compressed-tensors' pack-quantized

Symmetric: w ~= qdata * scale with scale = amax / 127 of the group, rounded to bfloat16 before it divides; qdata is
rounded to nearest, ties to even, within [-127, 127] (a scale rounded down saturates). An all-zero group gets scale 1.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from quantrot.kernels.operators import check_device, eager_inference
from quantrot.kernels.scratch import LARGEST, scratch

INT8_MAX = 127.0
MAX_RELATIVE_ERROR = {  # ||y - exact|| / ||exact|| of every backend but "expand"; right: one rounding alone
    torch.bfloat16: 1.9e-3,  # 1.66e-3
    torch.float16: 3.0e-4,  # 2.07e-4
    torch.float32: 2e-6,  # sums in float32
    torch.float64: 1e-14,
}
# "expand" rounds the weight to the wide type too, and cuBLAS the parts of K that it adds where it splits K, as torch
# allows by default: three roundings of the same size, sqrt(3) times one.
MAX_EXPANDED_ERROR = {
    torch.bfloat16: 3.2e-3,  # 2.35e-3 of two, 2.88e-3 of three
    torch.float16: 4.2e-4,  # 2.93e-4, 3.6e-4
    torch.float32: 2e-6,
    torch.float64: 1e-14,
}


def quantize_int8(w: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """w [N, K] float; group: columns that share a scale, a divisor of K (K itself: per channel). See the file's top."""
    if w.dim() < 1 or not w.is_floating_point():
        raise ValueError(f"w: {w.dtype} {list(w.shape)}; allowed: a float type of shape [N, K]")
    if group < 1 or w.shape[-1] % group:
        raise ValueError(f"group is {group}, which does not divide the {w.shape[-1]} columns of w")
    groups = w.to(torch.float32).unflatten(-1, (-1, group))
    amax = groups.abs().amax(-1)
    scale = torch.where(amax == 0, 1.0, amax / INT8_MAX).clamp_(min=torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16)
    qdata = (groups / scale.to(torch.float32).unsqueeze(-1)).round_().clamp_(-INT8_MAX, INT8_MAX)
    return qdata.flatten(-2).to(torch.int8), scale


def dequantize_int8(qdata: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[N, K] in `dtype`: the float32 product of each code and its group's scale, rounded once."""
    same = qdata.dim() == scale.dim() > 0 and qdata.shape[:-1] == scale.shape[:-1]
    floats = scale.is_floating_point() and dtype.is_floating_point
    if qdata.dtype != torch.int8 or not same or not floats or not scale.shape[-1] or qdata.shape[-1] % scale.shape[-1]:
        raise ValueError(
            f"qdata: {qdata.dtype} {list(qdata.shape)}, scale: {scale.dtype} {list(scale.shape)}, dtype: {dtype}; "
            "allowed: torch.int8 [N, K], floating-point numbers [N, G], G a divisor of K, and a dtype of such"
        )
    check_device(qdata=qdata, scale=scale)
    scale = scale.to(torch.float32)
    if qdata.device.type != "cpu" or qdata.dim() != 2 or not eager_inference(qdata, scale):
        groups = qdata.to(torch.float32).unflatten(-1, (scale.shape[-1], -1))
        return groups.mul_(scale.unsqueeze(-1)).flatten(-2).to(dtype)
    out = torch.empty(qdata.shape, dtype=dtype, device=qdata.device)
    step = max(LARGEST // max(qdata.shape[1], 1), 1)
    for start in range(0, len(qdata), step):  # 4096 x 4096: 15 ms, all at once 58
        codes, by = qdata[start : start + step], scale[start : start + step]
        wide = scratch(1, codes.numel()).view(codes.shape).copy_(codes)
        wide.unflatten(-1, (scale.shape[1], -1)).mul_(by.unsqueeze(-1))
        out[start : start + step] = wide
    return out


def pack_int8(qdata: Tensor) -> Tensor:
    """int8 [N, K] -> int32 [N, ceil(K / 4)]: bytes q + 128, column 4i in the low byte; missing columns are 0 bytes."""
    if qdata.dtype != torch.int8 or qdata.dim() < 1:
        raise ValueError(f"qdata: {qdata.dtype} {list(qdata.shape)}; allowed: torch.int8 [N, K]")
    unsigned = (qdata.contiguous().to(torch.int16) + 128).to(torch.uint8)
    return F.pad(unsigned, (0, -qdata.shape[-1] % 4)).view(torch.int32)


def unpack_int8(packed: Tensor, columns: int) -> Tensor:
    """The inverse of `pack_int8`: int8 [N, columns]."""
    if packed.dtype != torch.int32 or packed.dim() < 1 or not 0 <= columns <= 4 * packed.shape[-1]:
        raise ValueError(
            f"packed: {packed.dtype} {list(packed.shape)}; {columns} columns need torch.int32, four a word"
        )
    return (packed.contiguous().view(torch.uint8)[..., :columns] ^ 128).view(torch.int8)  # that is: less 128


# --- The product -----------------------------------------------------------------------------------------------------


def values(codes: Tensor, zero_point: Tensor | None, columns: int, dtype: torch.dtype) -> Tensor:
    """What the codes of a narrow operand stand for before scaling, exact in every wide type: [R, columns] in `dtype`.

    codes: int8, uint8 or e4m3 [R, columns], or `pack_int8`'s int32. zero_point: [R, G], subtracted.
    """
    if codes.dtype == torch.int32:
        codes = unpack_int8(codes, columns)
    exact = codes.to(dtype)
    if zero_point is None:
        return exact
    groups = exact.unflatten(1, (zero_point.shape[1], -1))
    return (groups - zero_point.to(dtype).unsqueeze(-1)).flatten(1)


def dequantize(codes: Tensor, scale: Tensor, zero_point: Tensor | None, columns: int, dtype: torch.dtype) -> Tensor:
    """(code - zero_point) * scale, a float32 product (float64 for float64) rounded once.

    [R, columns] in `dtype`, contiguous whatever the codes are.
    """
    work = torch.float64 if dtype == torch.float64 else torch.float32
    groups = values(codes.contiguous(), zero_point, columns, work).unflatten(1, (scale.shape[1], -1))
    return (groups * scale.to(work).unsqueeze(-1)).flatten(1).to(dtype)


def mixed_reference(
    x: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor | None, bias: Tensor | None, narrow_weight: bool
) -> Tensor:
    """The definition of mixed_gemm for x [M, K], weight [N, K] (int32 when packed), scale and zero_point [R, G].

    For each group of columns, in order: the products of exact values are summed in float32, the sum is multiplied by
    the group's scale in float32 and added to the result so far. The bias is added last; then one rounding. No checks.
    """
    wide, codes = (x, weight) if narrow_weight else (weight, x)
    work = torch.float64 if wide.dtype == torch.float64 else torch.float32
    columns = wide.shape[1]
    exact = values(codes, zero_point, columns, work)
    left, right = (wide.to(work), exact) if narrow_weight else (exact, wide.to(work))
    factors = scale.to(work)
    y = torch.zeros(left.shape[0], right.shape[0], dtype=work, device=wide.device)
    group = columns // scale.shape[1]
    for g in range(scale.shape[1]):
        part = slice(g * group, (g + 1) * group)
        product = left[:, part] @ right[:, part].T
        y += product * (factors[:, g] if narrow_weight else factors[:, g : g + 1])
    if bias is not None:
        y += bias.to(work)
    return y.to(wide.dtype)
