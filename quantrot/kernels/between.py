"""What a decoder layer does between its products, in one kernel each, for eager mode on Hopper: CUDA C++
(mixed/norm.cuh, gate.cuh), compiled at first use.

    try_norm     RMSNorm, of a sum too, or None where torch has to do it
    try_gate     silu(gate) * up, or None

torch launches six kernels for a norm and two for a gate, which take the host longer than the GPU, and write what lies
between to memory. torch.compile makes one kernel of each by itself; where a gradient may be recorded, torch does it.
"""

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from quantrot.kernels import nvrtc
from quantrot.kernels.fp8.blocks import CACHE_HINTS, DTYPES
from quantrot.kernels.mixed import norm as rms_norm
from quantrot.kernels.ready import Ready, Run, lies_well, like, unseen

NORMS, GATES = Ready(), Ready()
EACH, THREADS = 2, 256  # vectors of a thread, threads of a block of a gate
ENTRY = """extern "C" __global__ void __launch_bounds__({threads}) gate(
    const __grid_constant__ quantrot::GateArgs args) {{
  quantrot::gate_kernel<quantrot::{dtype}, {each}, {threads}>(args);
}}
"""


def try_norm(x: Tensor, weight: Tensor, epsilon: float, added: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
    """(RMSNorm of x + added, x + added), each rounded to the dtype of x: [..., K] contiguous, of 16 bits, as added;
    weight [K]. A sum is torch's, a norm fp8.reference.rms_norm's but for the order in which its squares are added. None
    where this is no eager inference on Hopper, or operands that the kernel does not take."""
    if not x.is_cuda or not unseen(x, weight, added):
        return None
    key = like(x), like(weight), like(added), epsilon
    if (again := NORMS.find(key)) is None:
        if not nvrtc.available(x.device) or not takes_norm(x, weight, added):
            return None
        again = NORMS.keep(key, rms_norm.prepare(x, weight, epsilon, True), x.get_device())
    return (again(x, weight), x) if added is None else again(x, weight, added)


def takes_norm(x: Tensor, weight: Tensor, added: Tensor | None) -> bool:
    """Whether try_norm's kernel takes these operands. Does not look at the device's kind."""
    if not x.numel() or weight.shape != x.shape[-1:] or weight.device != x.device or not lies_well(x):
        return False
    same = added is None or ((added.shape, added.dtype, added.device) == (x.shape, x.dtype, x.device))
    return same and lies_well(added) and rms_norm.supports(x, weight)


def try_gate(x: Tensor) -> Tensor | None:
    """silu(gate) * up, each rounded, of x [..., 2 K] contiguous, of 16 bits, gate and up side by side: [..., K] in
    torch's bits. None as try_norm."""
    if not x.is_cuda or not unseen(x):
        return None
    key = like(x)
    if (again := GATES.find(key)) is None:
        if not nvrtc.available(x.device) or not takes_gate(x):
            return None
        again = GATES.keep(key, prepare_gate(x), x.get_device())
    made: Tensor = again(x)
    return made


def takes_gate(x: Tensor) -> bool:
    """Whether try_gate's kernel takes these operands. Does not look at the device's kind."""
    fits = x.dtype in DTYPES and x.shape[-1] % 16 == 0 and 0 < x.numel() < 1 << 35
    return fits and lies_well(x)


class GateArgs(ctypes.Structure):
    whole = True
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("vectors", ctypes.c_uint),
        ("across", ctypes.c_uint),
    ]


def gate_source(dtype: torch.dtype) -> str:
    """C++ of the kernel `gate`."""
    functions = CACHE_HINTS + nvrtc.sources("hopper", "hadamard/words", "gate")
    return functions + ENTRY.format(threads=THREADS, dtype=DTYPES[dtype], each=EACH)


@lru_cache(maxsize=8)
def _gate_kernel(dtype: torch.dtype, device: int) -> int:
    """The function, ready to launch on this device."""
    return nvrtc.load_kernel(gate_source(dtype), "gate", 0, device)


def gate_arguments(x: Tensor, y: Tensor) -> GateArgs:
    """The kernel's parameter."""
    return GateArgs(x.data_ptr(), y.data_ptr(), y.numel() // 8, y.shape[-1] // 8)


def gate_grid(y: Tensor) -> int:
    return -(-y.numel() // (8 * EACH * THREADS))


def prepare_gate(x: Tensor) -> Run:
    """try_gate's kernel as a function of operands like these."""
    device, size = x.get_device(), (*x.shape[:-1], x.shape[-1] // 2)
    like_y = torch.empty(size, dtype=x.dtype, device="meta")
    values, function = gate_arguments(x, like_y), _gate_kernel(x.dtype, device)
    launch = nvrtc.Launch(function, (gate_grid(like_y),), THREADS, 0, device, overlap=True)

    def run(x: Tensor) -> Tensor:
        y, now = torch.empty(size, dtype=x.dtype, device=x.device), GateArgs.from_buffer_copy(values)
        now.x, now.y = x.data_ptr(), y.data_ptr()
        launch(now)
        return y

    return run
