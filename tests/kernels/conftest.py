"""Triton kernels without a GPU: run by its interpreter, or compiled for an H200 by every launch of a script."""

import ctypes
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from quantrot.kernels import nvrtc
from tests.scripts import ROOT, scripts

COMPILE_ONLY = '''
"""A driver that names an H200, keeps what is compiled for it, and launches nothing."""
import atexit, json, re, subprocess, tempfile
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver

found = []

class Driver:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device=None): return 0
    def get_active_torch_device(self): return torch.device("cpu")

def keep(self):
    if getattr(self, "kept", False):
        return
    self.kept = True
    ptx = self.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(self.asm["cubin"]); file.flush()
        code = ["-sass"] if "wgmma" in ptx else []  # takes half a second
        dump = [knobs.nvidia.cuobjdump.path, "-res-usage", *code, file.name]
        usage = subprocess.run(dump, capture_output=True, text=True)
    numbers = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\\d+)", usage.stdout)}
    found.append({"name": self.metadata.name, "shared": self.metadata.shared, "warps": self.metadata.num_warps,
                  "registers": numbers["REG"], "local": numbers["STACK"] + numbers["LOCAL"],
                  "wgmma": ptx.count("wgmma.mma_async"), "waits": usage.stdout.count("WARPGROUP.DEPBAR"),
                  "mma": ptx.count("mma.sync"),
                  "loads128": len(re.findall(r"ld\\.global[.\\w:]*\\.v4", ptx)),
                  "copies128": len(re.findall(r"cp\\.async\\.c[ag]\\.shared\\.global.*0x10", ptx)),
                  "bulk": ptx.count("cp.async.bulk.tensor"),
                  "stalls": usage.stdout.count("DEPBAR.LE gsb0, 0x0") - ptx.count("wgmma.wait_group.sync.aligned 0")})

class Nothing:
    def __get__(self, kernel, owner):
        keep(kernel)
        return lambda *args, **kwargs: None

driver.set_active(Driver())
CompiledKernel._init_handles = keep
CompiledKernel.run = Nothing()
CompiledKernel.launch_metadata = lambda self, *args: None
atexit.register(lambda: print(json.dumps(found)))
'''

AS_COMPILED = """
import gc
import numpy
import torch
from triton import language
from triton.language import semantic
from triton.runtime import interpreter

gc.set_threshold(20000, 20, 20)  # a tenth less time

def patch_lang(fn, patch=interpreter._patch_lang):
    languages = [value for value in fn.__globals__.values() if value is language or value is language.core]
    if any(language.core.is_builtin(module.load) for module in languages):
        return patch(fn)

interpreter._patch_lang = patch_lang  # not anew in every function that a kernel calls: a third of the time

def fma(self, x, y, z):
    exact = x.data.astype(numpy.longdouble) * y.data + z.data
    return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

if not hasattr(interpreter._interpreter, "fma_fp32"):  # before 3.9 it rounded the product, then the sum
    interpreter.InterpreterBuilder.create_fma = fma

def widened(x, scale, kind):
    if kind == "bf16":
        return (x.astype(numpy.uint32) << 16).view(numpy.float32)
    if kind == "fp16":
        return x.astype(numpy.float32)
    assert kind == "e2m1", kind
    values = numpy.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], numpy.float32)
    x = values[numpy.stack([x & 15, x >> 4], -1).reshape(len(x), -1)]
    powers = numpy.where(scale == 255, numpy.nan, numpy.exp2(scale.astype(numpy.float64) - 127))
    return x * powers.repeat(32, 1).astype(numpy.float32)

def dot_scaled(self, a, a_scale, a_format, b, b_scale, b_format, acc, *others):
    scales = [None if scale is None else scale.handle.data for scale in (a_scale, b_scale)]
    left = widened(a.handle.data, scales[0], a_format)
    right = widened(numpy.ascontiguousarray(b.handle.data.T), scales[1], b_format).T
    return self.tensor(interpreter.TensorHandle(left @ right + acc.handle.data, acc.dtype), acc.type)

if not hasattr(interpreter.InterpreterBuilder, "create_dot_scaled"):  # before 3.8
    semantic.TritonSemantic.dot_scaled = dot_scaled
"""


def _output(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="session")
def interpreted(tmp_path_factory):
    """`interpreted(code) -> stdout` of a script that runs Triton kernels on CPU tensors, in Triton's interpreter."""
    pytest.importorskip("triton", reason="triton is not installed")
    with scripts(AS_COMPILED, tmp_path_factory.mktemp("interpreted"), TRITON_INTERPRET="1") as run:
        yield lambda code: _output(run(code))


@pytest.fixture(scope="session")
def compiled_for_hopper(tmp_path_factory):
    """`compiled_for_hopper(code) -> [{name, registers, local, shared, warps, wgmma, mma, loads128, ...}]`.

    The script launches Triton kernels on CPU tensors, or on fake ones; each is compiled for sm_90 and not run, so its
    outputs are meaningless. `local` is the bytes a thread spills, `copies128` the asynchronous copies of 16 bytes,
    `bulk` those of tiles, `waits` the instructions that wait for wgmma, and `stalls` the waits for all of it that the
    assembler added to those of the program.
    """
    pytest.importorskip("triton", reason="triton is not installed")
    with scripts(COMPILE_ONLY, tmp_path_factory.mktemp("compiled")) as run:
        yield lambda code: json.loads(_output(run(code)).splitlines()[-1])


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """`once(key, make) -> folder`, filled by make(folder) unless a worker of this run has; whole or not at all."""
    base = tmp_path_factory.getbasetemp()
    common = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def kept(key: str, make: Callable[[Path], None]) -> Path:
        folder = common / f"once-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
        if not folder.exists():
            unfinished = tmp_path_factory.mktemp("unfinished")
            make(unfinished)
            with suppress(OSError):  # another worker was faster
                unfinished.rename(folder)
        return folder

    return kept


class Compiled(NamedTuple):
    """What NVRTC made of a source: the file of its code, and what it and its assembler said."""

    file: Path
    log: str

    @property
    def stacks(self) -> list[int]:
        """Bytes of stack of each function's threads."""
        return [int(n) for n in re.findall(r"(\d+) bytes stack frame", self.log)]

    @property
    def spilled(self) -> list[int]:
        """Bytes of registers that each function's threads store and load elsewhere."""
        said = r"(\d+) bytes spill stores, (\d+) bytes spill loads"
        return [int(stores) + int(loads) for stores, loads in re.findall(said, self.log)]


@pytest.fixture(scope="session")
def compiled_cuda(once):
    """`compiled_cuda(source) -> Compiled` of CUDA C++ for sm_90a, by what compiles it at first use; needs no GPU."""
    pytest.importorskip("cuda.core", reason="cuda.core is not installed")

    def compiled(source: str) -> Compiled:
        def make(folder: Path) -> None:
            code, log = nvrtc.build(source, ptxas_options=["-v"])
            (folder / "code").write_bytes(code)
            (folder / "log").write_text(log)

        folder = once(source, make)
        return Compiled(folder / "code", (folder / "log").read_text())

    return compiled


@pytest.fixture(scope="session")
def ptx_of():
    """`ptx_of(source) -> str`, which cuda.core gives only where there is a driver."""
    api = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda.core is not installed")

    def ptx(source: str) -> str:
        options = [b"-arch=compute_90a", b"-std=c++17"]
        error, program = api.nvrtcCreateProgram(source.encode(), b"", 0, [], [])
        assert api.nvrtcCompileProgram(program, len(options), options) == (api.nvrtcResult.NVRTC_SUCCESS,)
        text = bytes(api.nvrtcGetPTXSize(program)[1])
        api.nvrtcGetPTX(program, text)
        return text.decode()

    return ptx


@pytest.fixture(scope="session")
def emulated(once):
    """`emulated(source) -> ctypes library` of CUDA C++ on kernels/hopper.cuh, compiled for the host's emulator."""
    if not shutil.which("g++"):
        pytest.skip("the emulator of Hopper kernels needs g++")
    include = [f"-I{ROOT / 'quantrot/kernels'}", f"-I{ROOT / 'tests/kernels/emulator'}"]
    flags = ["-Og", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", "-w", "-DQUANTROT_EMULATED"]
    flags.append("-U_FORTIFY_SOURCE")  # Ubuntu's default, whose longjmp refuses to enter a fiber's stack
    flags += ["-fuse-ld=gold"] * bool(shutil.which("ld.gold"))  # a tenth of a second less for each

    def compile(folder: Path, *files: str | Path) -> None:
        run = subprocess.run(["g++", *flags, *include, *files], cwd=folder, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[-5000:]

    def precompile(folder: Path) -> None:
        (folder / "first.h").write_text('#include "emulator.h"\n')
        compile(folder, "-x", "c++-header", "first.h")
        compile(folder, "-c", "-include", folder / "first.h", ROOT / "tests/kernels/emulator/launch.cpp")

    common = once("first.h", precompile)  # half of a small kernel's time

    def build(source: str) -> ctypes.CDLL:
        def make(folder: Path) -> None:
            (folder / "kernel.cpp").write_text(source)
            compile(folder, "-include", common / "first.h", "kernel.cpp", common / "launch.o", "-o", "kernel.so")

        return ctypes.CDLL(str(once(source, make) / "kernel.so"))

    return build


@pytest.fixture
def loads_that_wait():
    """`loads_that_wait(source)`: kernels whose loads of 16 bytes the emulator refuses before grid_wait."""
    load = "inline Vec load16(const void* p) {"
    refused = f'{load}\n  if (!self().waited) emulator::fail("a load before grid_wait");'

    def edited(source: str) -> str:
        assert source.count(load) == 1
        return source.replace(load, refused)

    return edited


@pytest.fixture(params=["memcheck", "racecheck"])
def sanitized(request):
    """`sanitized(code)` runs Python under compute-sanitizer, once for each tool, and asserts that it finds nothing.

    Its random numbers are the same each time: of others FP8 attention is off by more than 2% in one case of some
    hundreds, where a score that tensor cores cut off gives the largest probability its neighbour's code.
    """
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        pytest.skip("needs compute-sanitizer")

    def run(code: str) -> None:
        # cuda.bindings looks up symbols that a driver may not have, which memcheck would report as errors of the API
        quiet = ["--report-api-errors", "no"] if request.param == "memcheck" else []
        seeded = f"import torch; torch.manual_seed(0)\n{code}"
        command = [sanitizer, "--tool", request.param, *quiet, "--error-exitcode", "9", sys.executable, "-c", seeded]
        env = os.environ | {"PYTHONPATH": str(ROOT), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]

    return run
