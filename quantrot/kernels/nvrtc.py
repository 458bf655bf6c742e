"""CUDA C++ for Hopper, compiled at first use: source -> cubin kept on disk -> a function to launch.

NVRTC compiles through cuda.core, so no CUDA toolkit is needed; the cubin is kept under $QUANTROT_CACHE (default
~/.cache/quantrot), named by the hash of source, target and compiler version.
"""

import ctypes
import hashlib
import io
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

ARCH = "sm_90a"
MAX_SHARED = 227 << 10  # bytes a thread block may ask for on sm_90
SM_SHARED = 228 << 10  # and a multiprocessor has, of which every block takes another 1 KiB
SM_REGISTERS = 65536


@lru_cache(maxsize=64)
def sources(*names: str) -> str:
    """The CUDA C++ of these files of this folder, one after another: "hopper", "fp8/gemm"."""
    return "".join((Path(__file__).parent / f"{name}.cuh").read_text(encoding="utf-8") for name in names)


@lru_cache(maxsize=64)
def available(device: torch.device) -> bool:
    """Whether this device and installation can run the kernels."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        import cuda.bindings.driver  # noqa: F401

        _compiler()[0].nvrtcVersion()
    except (ImportError, RuntimeError):  # RuntimeError: its library is not there
        return False
    return True


_IMPORT = threading.Lock()


def _compiler() -> tuple[Any, Any, Any]:
    """cuda.bindings' nvrtc, and cuda.core's Program and ProgramOptions. Raises ImportError without them.

    One thread at a time: while cuda.core is imported it takes a submodule's attributes, __spec__ among them, by which
    another thread's import then finds it ready before Program is there.
    """
    with _IMPORT:
        from cuda.bindings import nvrtc
        from cuda.core import Program, ProgramOptions
    return nvrtc, Program, ProgramOptions


def build(source: str, **options: Any) -> tuple[bytes, str]:
    """source -> cubin for sm_90a, by NVRTC, and what it says; needs no GPU. Raises ImportError without cuda.core.

    options: more of cuda.core's ProgramOptions.
    """
    _, Program, ProgramOptions = _compiler()
    log = io.StringIO()
    made = Program(source, "c++", ProgramOptions(arch=ARCH, std="c++17", **options)).compile("cubin", logs=log)
    return made.code, log.getvalue()


def compile_cubin(source: str) -> bytes:
    """source -> cubin, through the cache on disk where there can be one. Raises ImportError without cuda.core."""
    version = _compiler()[0].nvrtcVersion()[1:]
    key = hashlib.sha256(f"{ARCH} {version}\n{source}".encode()).hexdigest()
    name = f"{key[:32]}.cubin"
    with suppress(OSError, RuntimeError):
        code, digest = (kept := (_cache() / name).read_bytes())[:-32], kept[-32:]
        if hashlib.sha256(code).digest() == digest:  # else a power cut or a full disk left a part of it
            return code
    code, _ = build(source)
    try:
        _keep(_cache() / name, code + hashlib.sha256(code).digest())
    except (OSError, RuntimeError) as error:  # a home that is read-only or none, a full disk: slower, not wrong
        why = getattr(error, "strerror", None) or error  # without the file's random name: Python then says it once
        warnings.warn(f"compiled kernels are not kept: {why}; QUANTROT_CACHE names another folder", stacklevel=2)
    return code


def _cache() -> Path:
    """Raises RuntimeError without a home."""
    return Path(os.environ.get("QUANTROT_CACHE") or Path.home() / ".cache" / "quantrot")


def _keep(path: Path, code: bytes) -> None:
    """Whole or not at all: another process may compile the same kernel."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = tempfile.NamedTemporaryFile(dir=path.parent, delete=False)
    try:
        with file:
            file.write(code)
        os.replace(file.name, path)
    except OSError:
        os.unlink(file.name)
        raise


def checked(result: tuple) -> Any:
    """The value of a driver call; RuntimeError with the driver's name for what went wrong."""
    from cuda.bindings import driver

    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA driver: {result[0].name}")
    return result[1] if len(result) > 1 else None


@lru_cache(maxsize=1024)
def processors(device: int) -> int:
    """Multiprocessors of a tensor's get_device(); 4 where there is none, -1 (Triton's interpreter)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device >= 0 else 4


def load_kernel(source: str, name: str, shared: int, device: int) -> int:
    """The kernel `extern "C" name` of the source, with `shared` bytes of dynamic shared memory allowed."""
    from cuda.bindings import driver

    library = checked(driver.cuLibraryLoadData(compile_cubin(source), [], [], 0, [], [], 0))
    kernel = checked(driver.cuLibraryGetKernel(library, name.encode()))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    if shared:
        checked(driver.cuKernelSetAttribute(attribute, shared, kernel, driver.CUdevice(device)))
    return int(kernel)


def tensor_map(
    data: int,
    rows: int,
    columns: int,
    pitch: int,
    box: tuple[int, int],
    dtype: torch.dtype,
    swizzle: int = 128,
    promotion: int = 256,
) -> bytes:
    """encode_map of a matrix, pitch in bytes, boxes (rows, columns)."""
    return encode_map(data, (columns, rows), (pitch,), box[::-1], dtype, swizzle, promotion)


def matrix_map(t: torch.Tensor, box: tuple[int, int, int]) -> bytes:
    """tensor_map of a tensor [rows, columns]; box: rows, columns, swizzle."""
    pitch = t.stride(0) * t.element_size()
    return tensor_map(t.data_ptr(), t.shape[0], t.shape[1], pitch, box[:2], t.dtype, box[2])


def map_of(t: torch.Tensor, box: tuple[int, int, int]) -> Callable[[torch.Tensor], bytes]:
    """matrix_map of tensors like this one."""
    rows, columns, swizzle = box
    encode = maps_of(tuple(t.shape[::-1]), (t.stride(0) * t.element_size(),), (columns, rows), t.dtype, swizzle, 256)
    return lambda t: encode(t.data_ptr())


def encode_map(
    data: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    dtype: torch.dtype = torch.uint8,
    swizzle: int = 128,
    promotion: int = 256,
) -> bytes:
    """The driver's description of a tensor for the copy engine, dimensions from the contiguous one on.

    strides in bytes, from the second dimension on; boxes swizzled in 128, 64 or 32 bytes or not (0), zeros past the
    edges; promotion: bytes that L2 fetches at once.
    RuntimeError with the driver's number for what it refuses.
    """
    return maps_of(sizes, strides, box, dtype, swizzle, promotion)(data)


@lru_cache(maxsize=1024)
def maps_of(
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    dtype: torch.dtype,
    swizzle: int,
    promotion: int,
) -> Callable[[int], bytes]:
    """encode_map of such tensors, as a function of where one lies. What was encoded last is found again."""
    rank, kind = len(sizes), {torch.float16: 6, torch.bfloat16: 9}.get(dtype, 0)  # CUtensorMapDataType; or bytes
    of_sizes, of_strides = (ctypes.c_uint64 * rank)(*sizes), (ctypes.c_uint64 * (rank - 1))(*strides)
    of_box, every_element = (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank)
    swizzles, promotions = {0: 0, 32: 1, 64: 2, 128: 3}[swizzle], {0: 0, 64: 1, 128: 2, 256: 3}[promotion]
    no_interleave, fill_zeros = 0, 0

    def encode(data: int) -> bytes:
        room = ctypes.create_string_buffer(128 + 64)
        start = -ctypes.addressof(room) % 64  # the driver wants it aligned, which cuda.bindings' object is not
        error = _driver().cuTensorMapEncodeTiled(
            ctypes.byref(room, start),
            kind,
            rank,
            ctypes.c_void_p(data),
            of_sizes,
            of_strides,
            of_box,
            every_element,
            no_interleave,
            swizzles,
            promotions,
            fill_zeros,
        )
        if error:
            raise RuntimeError(f"CUDA driver: error {error} for a tensor map of {sizes}, strides {strides}")
        return room.raw[start : start + 128]

    return partial(_encoded, encode)


@lru_cache(maxsize=4096)
def _encoded(encode: Callable[[int], bytes], data: int) -> bytes:
    return encode(data)


@lru_cache(maxsize=1)
def _driver() -> Any:
    """CUDA's; to open it again takes 30 us, several times what a tensor map does."""
    return ctypes.CDLL("libcuda.so.1")


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint64 * 8)]


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID
_OVERLAP = _Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, (ctypes.c_uint64 * 8)(1))


_streams: dict[tuple[int, int], int] = {}
COUNTING = threading.Lock()  # numbers are given out under it: threads would else get the same ones


def stream_number(device: int) -> int | None:
    """The number, from 0 on, of the device's current stream; None where a graph is recorded.

    Launches in a stream run one after the other and may share what they count in; what is recorded may run beside any
    other.
    """
    if torch.cuda.current_device() != device:
        with torch.cuda.device(device):
            return stream_number(device)
    if torch.cuda.is_current_stream_capturing():
        return None
    key = device, torch._C._cuda_getCurrentRawStream(device)
    if key not in _streams:
        with COUNTING:
            _streams.setdefault(key, sum(other == device for other, _ in _streams))
    return _streams[key]


class Counters:
    """Which of a kernel's `total` counters, all 0 but while it runs, a launch may use: a stream's launches `each` of
    their own, a recorded launch some that no other ever has."""

    def __init__(self, total: int = 1 << 16, each: int = 1, streams: int = 64) -> None:
        self.total, self.each, self.streams = total, each, streams
        self.recorded = streams * each  # the first that no recorded launch has

    def first(self, device: int, count: int = 1, peek: bool = False) -> int | None:
        """The first of `count`, for a launch in the current stream; None if none are left. peek: they are not used."""
        number = stream_number(device)
        if number is not None:
            return number * self.each if number < self.streams and count <= self.each else None
        return self.for_recorded(count, peek)

    def for_recorded(self, count: int, peek: bool = False) -> int | None:
        """The first of `count` that no other launch ever has; None if none are left."""
        with COUNTING:
            first = self.recorded
            if first + count > self.total:
                return None
            self.recorded += 0 if peek else count
        return first

    @property
    def declaration(self) -> str:
        """Their C++, `counters`. No tensor: torch's pools would give it to a graph."""
        return f"__device__ unsigned counters[{self.total}];\n"


TURNS = 1 << 16  # counters of a kernel at which its launches take turns
IN_TURN = Counters(2 * TURNS, TURNS, streams=1)  # of such kernels: the other half is for recorded launches
_taken = 0


def counters_in_turn(count: int) -> int:
    """The first of the next `count` of a kernel's counters, which a launch counts up and leaves as zeros.

    Launches take turns, so that two at once have their own. One that is recorded runs whenever its graph does, also
    beside one that has the same turn: it has counters that no other has, while there are any.
    """
    global _taken
    recorded = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # the emulator has no CUDA
    if recorded and (own := IN_TURN.for_recorded(count)) is not None:
        return own
    with COUNTING:
        first = _taken if _taken + count <= TURNS else 0
        _taken = first + count
    return first


@lru_cache(maxsize=1)
def _launcher() -> Any:
    function = _driver().cuLaunchKernelEx
    function.argtypes = [ctypes.POINTER(_Launch), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return function


@lru_cache(maxsize=64)
def _fields(structure: type[ctypes.Structure]) -> tuple[Any, list[int]]:
    """The type of pointers to a kernel's parameters, and where these are in the structure."""
    whole = getattr(structure, "whole", False)
    offsets = [0] if whole else [getattr(structure, field[0]).offset for field in structure._fields_]
    return ctypes.c_void_p * len(offsets), offsets


class Launch:
    """A kernel, its grid and its device: all of a launch but the parameters, to be called with them as often as wanted.

    overlap: the kernel may start while the one before it ends; it waits for that one itself (griddepcontrol.wait).
    Calls the driver through ctypes, which takes a third of the time that cuda.bindings' objects take to make.
    """

    def __init__(
        self, function: int, grid: Sequence[int], threads: int, shared: int, device: int, *, overlap: bool = False
    ) -> None:
        self.function, self.device = function, device
        self.config = _Launch((*grid, 1, 1)[:3], (threads, 1, 1), shared, None, ctypes.pointer(_OVERLAP), int(overlap))

    def __call__(self, arguments: ctypes.Structure) -> None:
        """On the device's current stream; the structure's fields are the kernel's parameters, in order; or it is the
        only one, handed over 2 to 4 us sooner than fifteen: its class then says so, `whole = True`."""
        start, (pointers_to, offsets), device = ctypes.addressof(arguments), _fields(type(arguments)), self.device
        pointers = pointers_to(*[start + offset for offset in offsets])
        config = _Launch.from_buffer_copy(self.config)  # threads may launch it at the same time, in streams of theirs
        config.stream = torch._C._cuda_getCurrentRawStream(device)
        if torch.cuda.current_device() == device:
            error = _launcher()(config, self.function, pointers, None)
        else:
            with torch.cuda.device(device):
                error = _launcher()(config, self.function, pointers, None)
        if error:
            from cuda.bindings import driver

            # A thread that has done no CUDA work yet, such as autograd's, has no context.
            if error == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
                checked(driver.cuCtxSetCurrent(checked(driver.cuDevicePrimaryCtxRetain(driver.CUdevice(device)))))
                error = _launcher()(config, self.function, pointers, None)
            if error:
                raise RuntimeError(f"CUDA driver: {driver.CUresult(error).name}")


def launch(
    function: int,
    grid: Sequence[int],
    threads: int,
    shared: int,
    arguments: ctypes.Structure,
    device: int,
    *,
    overlap: bool = False,
) -> None:
    """Launch once; see Launch."""
    Launch(function, grid, threads, shared, device, overlap=overlap)(arguments)
