"""The constant matrices of the CUDA kernels as C++: their signs, in the order in which the registers want them."""

import torch
from torch import Tensor

from quantrot.orthogonal import hadamard_base, hadamard_factors


def _negative(base: int, transpose: bool) -> Tensor:
    """bool [in, out]: where the matrix that multiplies a row from the right is -1."""
    h = hadamard_base(base)
    return (h.T if transpose else h) < 0


def _words(bits: Tensor) -> str:
    """bool [n, 32] -> n words, bit 0 first."""
    return ", ".join(f"{int(w)}u" for w in (bits.to(torch.int64) << torch.arange(32)).sum(-1).flatten())


def _padded(bits: Tensor, rows: int, columns: int) -> Tensor:
    full = torch.zeros(rows, columns, dtype=torch.bool)
    full[: bits.shape[0], : bits.shape[1]] = bits
    return full


def block_base(base: int, transpose: bool) -> str:
    """Row m of the operand: bit k."""
    words = _words(_padded(_negative(base, transpose).T, 32, 32))
    return (
        f"__device__ const u32 BASE_{base}[] = {{{words}}};\ntemplate <>\nstruct Base<{base}> {{\n"
        f"  __device__ __forceinline__ static u32 row(u32 m) {{ return BASE_{base}[m]; }}\n}};\n"
    )


def dense_base(base: int, transpose: bool) -> str:
    """The signs of the m16n8k16 operand in the order of its registers; see DenseBase."""
    steps = -(-base // 16)
    words = -(-steps // 4)
    bits = _padded(_negative(base, transpose).T, steps * 16, words * 64)
    # [i, half row, g, word, step, half column, q, pair] -> [i, word, g, q, pair, step, half column, half row]
    bits = bits.view(steps, 2, 8, words, 4, 2, 4, 2).permute(0, 3, 2, 6, 7, 4, 5, 1).reshape(-1, 2, 16)
    return (
        f"__device__ const u32 DENSE_{base}[] = {{{_words(bits.reshape(-1, 32))}}};\ntemplate <>\n"
        f"struct DenseBase<{base}> {{\n  __device__ __forceinline__ static u32 signs(int i, int j, u32 lane) {{\n"
        f"    return __ldg(DENSE_{base} + (i * {words} + j) * 32 + lane);\n  }}\n}};\n"
    )


def small_bases(base: int, small: tuple[int, ...], columns: int, power: int, transpose: bool) -> str:
    text, order_of_axes = "", hadamard_factors(base * columns)[:-1]
    for b in sorted(set(small)):
        sums = "".join(
            f"    o[{j}] = " + "".join(f"{'-' if n else '+'} v[{i}] " for i, n in enumerate(column)) + ";\n"
            for j, column in enumerate(_negative(b, transpose).T.tolist())
        )
        text += (
            f"template <>\nstruct SmallBase<{b}> {{\n"
            f"  __device__ __forceinline__ static void run(float (&o)[{b}], const float (&v)[{b}]) {{\n"
            f"{sums}  }}\n}};\n"
        )
    left = list(order_of_axes)
    left.remove(base)  # equal bases commute
    calls, stride = "", columns
    for b in left:
        stride //= b
        calls += f"  small_base<{b}, {stride}, K, COLUMNS, WARPS>(data);\n"
    return text + (
        "template <int K, int COLUMNS, int WARPS>\n__device__ __forceinline__ void inner_bases(u32 data) {\n"
        f"{calls}}}\n"
    )


def flow_base(order: int, base: int, transpose: bool) -> str:
    """The signs of the adjoint of H_base, H_base (x) S_c = H_order, in the order of wgmma's registers; see Signs."""
    blocks, words = -(-base // 64) * 4, -(-base // 64)
    bits = _adjoint(order, base, transpose, blocks)
    # [block, half row, g, word, step, half column, q, pair] -> [block, word, g, q, pair, step, half column, half row]
    bits = bits.view(blocks, 2, 8, words, 4, 2, 4, 2).permute(0, 3, 2, 6, 7, 4, 5, 1).reshape(-1, 32)
    return (
        f"__device__ const u32 SIGNS_{base}[] = {{{_words(bits)}}};\ntemplate <>\nstruct Signs<{base}> {{\n"
        f"  __device__ __forceinline__ static u32 word(u32 block, u32 w) {{\n"
        f"    return SIGNS_{base}[(block * {words} + w) * 32 + lane_number()];\n  }}\n}};\n"
    )


def held_base(order: int, base: int, transpose: bool) -> str:
    """As flow_base, in the order of m16n8k16's registers where a lane's pieces are four apart; see HeldSigns."""
    tiles, words = -(-base // 16), -(-base // 64)
    bits = _adjoint(order, base, transpose, tiles)
    # [tile, half row, g, word, step, half column, pair, q] -> [tile, word, g, q, pair, step, half column, half row]
    bits = bits.view(tiles, 2, 8, words, 4, 2, 2, 4).permute(0, 3, 2, 7, 6, 4, 5, 1).reshape(-1, 32)
    return (
        f"__device__ const u32 HELD_{base}[] = {{{_words(bits)}}};\ntemplate <>\nstruct HeldSigns<{base}> {{\n"
        f"  __device__ __forceinline__ static u32 word(u32 tile, u32 w) {{\n"
        f"    return __ldg(HELD_{base} + (tile * {words} + w) * 32 + (threadIdx.x & 31));\n  }}\n}};\n"
    )


def _adjoint(order: int, base: int, transpose: bool, tiles: int) -> Tensor:
    """bool [16 * tiles, a multiple of 64]: where the adjoint of H_base is -1; base is K * 2^m, of the order's own K."""
    factor = hadamard_factors(order)[0]
    known = factor if factor & (factor - 1) else 1
    h = torch.kron(hadamard_base(known), hadamard_base(base // known))
    return _padded((h if transpose else h.T) < 0, 16 * tiles, -(-base // 64) * 64)


def axis_base(base: int, transpose: bool) -> str:
    """Column k: bit m of word m / 32."""
    words = -(-base // 32)
    bits = _words(_padded(_negative(base, transpose), base, words * 32).view(-1, 32))
    return (
        f"__device__ const u32 AXIS_{base}[] = {{{bits}}};\ntemplate <>\nstruct Axis<{base}> {{\n"
        f"  __device__ __forceinline__ static u32 signs(int k, int w) {{ return AXIS_{base}[k * {words} + w]; }}\n}};\n"
    )
