"""The Hadamard transform for Hopper: CUDA C++ (hadamard.cuh) compiled at first use and kept on disk.

One kernel a (Plan, width, dtype, signs): the source is hadamard.cuh and one line that names the instance. NVRTC compiles it
through cuda.core, so no CUDA toolkit is needed; the cubin is kept under $QUANTROT_CACHE (default ~/.cache/quantrot),
named by the hash of source, options and compiler version.
"""

import ctypes
import hashlib
import os
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from quantrot.orthogonal import hadamard_base, hadamard_factors

ARCH = "sm_90a"
DTYPES = {torch.bfloat16: "BF16", torch.float16: "FP16", torch.float32: "FP32"}
MAX_SHARED = 227 * 1024  # bytes a block may ask for on sm_90


@dataclass(frozen=True)
class Plan:
    """How one width is run. kind: lanes | quad | warp (a row in a warp), block (a row in a thread block, persistent)."""

    kind: Literal["lanes", "quad", "warp", "block"]
    warps: int  # a thread block
    resident: int  # thread blocks the compiler must leave room for on a multiprocessor
    vectors: int = 1  # 16-byte vectors a lane (lanes, quad, warp)
    tiles: int = 1  # T of K * T * 256 (block)
    stages: int = 1  # input buffers (block)

    def source(self, width: int, dtype: torch.dtype, signs: bool) -> str:
        """The text to compile: the device functions and one entry point, `hadamard`."""
        head = (Path(__file__).parent / "hadamard.cuh").read_text()
        d, flag = "quantrot::" + DTYPES[dtype], str(signs).lower()
        if self.kind == "block":
            base = width // (self.tiles * 256)
            head += _base_source(base)
            call = f"block_kernel<{d}, {base}, {self.tiles}, {self.warps}, {self.stages}, {flag}>"
        else:
            call = f"{self.kind}_kernel<{d}, {width}, {self.vectors}, {self.warps}, {flag}>"
        return head + (
            f'extern "C" __global__ void __launch_bounds__({self.warps * 32}, {self.resident}) hadamard(const void* x, void* y,\n'
            "    const signed char* signs, long long rows, long long x_stride, long long y_stride, int sign_rows,\n"
            "    float scale) {\n"
            f"  quantrot::{call}({{x, y, signs, rows, x_stride, y_stride, sign_rows, scale}});\n}}\n"
        )

    def shared_bytes(self, width: int) -> int:
        if self.kind != "block":
            return 0
        base = width // (self.tiles * 256)
        rows_in = (base * (self.tiles * 512 + 16) + 127) // 128 * 128
        return 128 + self.stages * rows_in + base * (self.tiles * 1024 + 32)

    def grid(self, rows: int, width: int, dtype: torch.dtype, processors: int) -> int:
        if self.kind == "block":
            return min(rows, processors * self.resident)
        a_warp = 32 * self.vectors * (16 // dtype.itemsize)
        return -(-rows * width // (a_warp * self.warps))


def _base_source(base: int) -> str:
    """The sign bits of a Paley base, transposed: row m holds bit k where H[k, m] is -1."""
    if base & (base - 1) == 0:
        return ""
    words = -(-base // 32)
    padded = torch.zeros(-(-base // 16) * 16, words * 32, dtype=torch.int64)
    padded[:base, :base] = hadamard_base(base).T < 0
    bits = (padded.view(-1, words, 32) << torch.arange(32)).sum(-1)
    table = ", ".join(f"{int(b)}u" for b in bits[:, 0])
    return (
        f"namespace quantrot {{\n__device__ const u32 BASE_{base}[] = {{{table}}};\ntemplate <>\nstruct Base<{base}> {{\n"
        f"  __device__ __forceinline__ static u32 row(u32 m) {{ return BASE_{base}[m]; }}\n}};\n}}\n"
    )


def compile_cubin(source: str) -> bytes:
    """source -> cubin for sm_90a, by NVRTC, through the cache on disk. Raises ImportError without cuda.core."""
    from cuda.bindings import nvrtc
    from cuda.core import Program, ProgramOptions

    version = nvrtc.nvrtcVersion()[1:]
    key = hashlib.sha256(f"{ARCH} {version}\n{source}".encode()).hexdigest()
    folder = Path(os.environ.get("QUANTROT_CACHE", Path.home() / ".cache" / "quantrot"))
    path = folder / f"hadamard-{key[:32]}.cubin"
    if path.exists():
        return path.read_bytes()
    code = Program(source, "c++", ProgramOptions(arch=ARCH, std="c++17")).compile("cubin").code
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        file.write(code)
    os.replace(file.name, path)  # whole or not at all: another process may compile the same kernel
    return code


class _Arguments(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("signs", ctypes.c_void_p),
        ("rows", ctypes.c_longlong),
        ("x_stride", ctypes.c_longlong),
        ("y_stride", ctypes.c_longlong),
        ("sign_rows", ctypes.c_int),
        ("scale", ctypes.c_float),
    ]


def _checked(result: tuple):
    from cuda.bindings import driver

    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA driver: {result[0].name}")
    return result[1] if len(result) > 1 else None


@lru_cache(maxsize=512)
def _kernel(plan: Plan, width: int, dtype: torch.dtype, signs: bool, device: int):
    """(function, shared bytes, multiprocessors), ready to launch on this device."""
    from cuda.bindings import driver

    cubin = compile_cubin(plan.source(width, dtype, signs))
    library = _checked(driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
    kernel = _checked(driver.cuLibraryGetKernel(library, b"hadamard"))
    shared = plan.shared_bytes(width)
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    if shared:
        _checked(driver.cuKernelSetAttribute(attribute, shared, kernel, driver.CUdevice(device)))
    return driver.CUfunction(int(kernel)), shared, torch.cuda.get_device_properties(device).multi_processor_count


def launch(x: Tensor, y: Tensor, signs: Tensor | None, scale: float, plan: Plan) -> None:
    """Transform the rows of x [rows, width] into y (which may be x). 16-byte aligned rows; contiguous columns."""
    from cuda.bindings import driver

    rows, width = x.shape
    if rows == 0:
        return
    device = x.get_device()
    function, shared, processors = _kernel(plan, width, x.dtype, signs is not None, device)
    arguments = _Arguments(
        x.data_ptr(),
        y.data_ptr(),
        signs.data_ptr() if signs is not None else None,
        rows,
        x.stride(0),
        y.stride(0),
        signs.numel() // width if signs is not None else 1,
        scale,
    )
    start = ctypes.addressof(arguments)
    pointers = (ctypes.c_void_p * 8)(*(start + getattr(_Arguments, name).offset for name, _ in _Arguments._fields_))
    with torch.cuda.device(device):
        _checked(
            driver.cuLaunchKernel(
                function, plan.grid(rows, width, x.dtype, processors), 1, 1, plan.warps * 32, 1, 1, shared,
                torch.cuda.current_stream().cuda_stream, ctypes.addressof(pointers), 0,
            )
        )  # fmt: skip
