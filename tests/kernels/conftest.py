"""Triton kernels without a GPU: run by its interpreter, or compiled for an H200 by every launch of a script."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

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
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(self.asm["cubin"]); file.flush()
        usage = subprocess.run([knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True)
        sass = subprocess.run([knobs.nvidia.cuobjdump.path, "-sass", file.name], capture_output=True, text=True).stdout
    numbers = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\\d+)", usage.stdout)}
    ptx = self.asm["ptx"]
    found.append({"name": self.metadata.name, "shared": self.metadata.shared, "warps": self.metadata.num_warps,
                  "registers": numbers["REG"], "local": numbers["STACK"] + numbers["LOCAL"],
                  "wgmma": ptx.count("wgmma.mma_async"), "waits": sass.count("WARPGROUP.DEPBAR"),
                  "mma": ptx.count("mma.sync"),
                  "loads128": len(re.findall(r"ld\\.global[.\\w:]*\\.v4", ptx))})

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


def _run(code: str, **env: str) -> str:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | env
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


@pytest.fixture(scope="session")
def interpreted():
    """`interpreted(code) -> stdout` of a script that runs Triton kernels on CPU tensors, in Triton's interpreter."""
    pytest.importorskip("triton", reason="triton is not installed")
    return lambda code: _run(code, TRITON_INTERPRET="1")


@pytest.fixture(scope="session")
def compiled_for_hopper():
    """`compiled_for_hopper(code) -> [{name, registers, local, shared, warps, wgmma, waits, mma, loads128}]`.

    The script launches Triton kernels on CPU tensors, or on fake ones; each is compiled for sm_90 and not run, so its
    outputs are meaningless. `local` is the bytes a thread spills, `waits` the instructions that wait for wgmma.
    """
    pytest.importorskip("triton", reason="triton is not installed")
    return lambda code: json.loads(_run(COMPILE_ONLY + code).splitlines()[-1])
