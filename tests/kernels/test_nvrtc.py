"""What is handed to the compiler and to the CUDA driver."""

import ctypes
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from quantrot.kernels import nvrtc


def test_launch_structures_lie_as_in_cuda_h():
    """sizeof and offsetof of CUlaunchConfig and CUlaunchAttribute in CUDA 13's cuda.h (the same since CUDA 12)."""
    launch, attribute = nvrtc._Launch, nvrtc._Attribute
    offsets = [field.offset for field in (launch.shared, launch.stream, launch.attributes, launch.count)]
    assert offsets == [24, 32, 40, 48] and ctypes.sizeof(launch) == 56
    assert attribute.value.offset == 8 and ctypes.sizeof(attribute) == 72


def test_a_tensor_map_is_encoded_once_for_an_address(monkeypatch):
    class Driver:
        def cuTensorMapEncodeTiled(self, room, kind, rank, data, *arrays):
            at = ctypes.cast(room, ctypes.c_void_p).value
            given.append((at % 64, kind, rank, data.value, *(list(a) for a in arrays[:4]), *arrays[4:]))
            ctypes.memset(at, data.value % 251, 128)
            return 7 if data.value == 13 else 0

    given = []
    monkeypatch.setattr(nvrtc, "_driver", Driver)
    sizes, strides, box = (48, 100), (96,), (16, 8)
    find = nvrtc.maps_of.__wrapped__(sizes, strides, box, torch.bfloat16, 64, 128)
    assert [find(data) for data in (4096, 8192, 4096)] == [bytes([data % 251]) * 128 for data in (4096, 8192, 4096)]
    rest = [48, 100], [96], [16, 8], [1, 1], 0, 2, 2, 0
    assert given == [(0, 9, 2, 4096, *rest), (0, 9, 2, 8192, *rest)]
    with pytest.raises(RuntimeError, match=r"error 7 for a tensor map of \(48, 100\), strides \(96,\)"):
        find(13)


def test_launches_take_turns_at_counters(monkeypatch):
    last, recording = nvrtc.TURNS, False
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording)
    monkeypatch.setattr(nvrtc, "_taken", last - 10)
    monkeypatch.setattr(nvrtc, "IN_TURN", nvrtc.Counters(last + 10, last, streams=1))
    assert [nvrtc.counters_in_turn(count) for count in (4, 6, 8, 2)] == [last - 10, last - 6, 0, 8]
    recording = True  # has its own, then takes turns with the others
    assert [nvrtc.counters_in_turn(count) for count in (6, 4, 2)] == [last, last + 6, 10]
    recording = False
    assert nvrtc.counters_in_turn(1) == 12


def test_kernels_have_as_many_counters_as_are_given_out():
    source = (Path(nvrtc.__file__).parent / "mixed/parts.cuh").read_text()
    assert 1 << int(re.search(r"u32 counters\[1 << (\d+)\]", source)[1]) == nvrtc.IN_TURN.total


def test_launches_that_may_run_at_once_have_counters_of_their_own(monkeypatch):
    device, stream, recording = 0, 7, False
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: stream, raising=False)
    monkeypatch.setattr(nvrtc, "_streams", {})
    counters = nvrtc.Counters(total=8 * 10 + 25, each=10, streams=8)
    assert [counters.first(0, 10) for _ in range(3)] == [0, 0, 0] and counters.first(0, 11) is None
    stream = 8
    assert counters.first(0) == 10
    recording = True
    assert [counters.first(0, 10, peek) for peek in (True, False, False, False)] == [80, 80, 90, None]
    recording, device = False, 1
    assert counters.first(1) == 0  # each device has its own
    monkeypatch.setattr(nvrtc, "_streams", {(1, 100 + other): other for other in range(8)})
    assert counters.first(1) is None


CUDA_CORE = """
import importlib, time
globals().update(importlib.import_module(".cu13", __package__).__dict__)  # __spec__ of a module that is ready
time.sleep(0.3)
class ProgramOptions:
    def __init__(self, **options): pass
class Program:
    def __init__(self, source, language, options): self.code = source.encode()
    def compile(self, target, logs): return self
"""
NVRTC = "def nvrtcVersion(): return 0, 13, 0"


def test_threads_that_compile_at_once_wait_until_cuda_core_is_imported(tmp_path, monkeypatch):
    """Of a cuda.core that is ready for the import system before it has Program, as NVIDIA's is."""
    empty = dict.fromkeys(("__init__", "bindings/__init__", "core/cu13/__init__"), "")
    for name, text in {**empty, "bindings/nvrtc": NVRTC, "core/__init__": CUDA_CORE}.items():
        path = tmp_path / f"cuda/{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("QUANTROT_CACHE", str(tmp_path / "cache"))

    def compile_a_little_later(i: int) -> bytes:
        time.sleep(0.03 * i)
        return nvrtc.compile_cubin(f"kernel {i}")

    with patch.dict(sys.modules), ThreadPoolExecutor(8) as pool:
        for name in [name for name in sys.modules if name.split(".")[0] == "cuda"]:
            del sys.modules[name]
        assert list(pool.map(compile_a_little_later, range(8))) == [f"kernel {i}".encode() for i in range(8)]


NOTHING = 'extern "C" __global__ void nothing() {}'


@pytest.fixture
def cuda_core():
    return pytest.importorskip("cuda.core", reason="cuda.core is not installed")


def test_what_is_compiled_is_kept(cuda_core, tmp_path, monkeypatch):
    monkeypatch.setenv("QUANTROT_CACHE", str(tmp_path / "a folder/cache"))
    code = nvrtc.compile_cubin(NOTHING)
    assert code.startswith(b"\x7fELF")
    (file,) = (tmp_path / "a folder/cache").iterdir()
    with patch.object(nvrtc, "build", side_effect=AssertionError("compiled twice")):
        assert nvrtc.compile_cubin(NOTHING) == code
    whole = file.read_bytes()
    for damaged in (b"", whole[:32], whole[:-1], whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]):
        file.write_bytes(damaged)
        assert nvrtc.compile_cubin(NOTHING) == code and file.read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_a_warning(cuda_core, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUANTROT_CACHE", str(tmp_path / "file/cache"))
    with pytest.warns(UserWarning, match="not kept: Not a directory; QUANTROT_CACHE names another"):
        assert nvrtc.compile_cubin(NOTHING).startswith(b"\x7fELF")


def test_no_home_is_a_warning(cuda_core, monkeypatch):
    monkeypatch.delenv("QUANTROT_CACHE", raising=False)
    with (
        patch.object(nvrtc.Path, "home", side_effect=RuntimeError("Could not determine home directory.")),
        pytest.warns(UserWarning, match="not kept: Could not determine home directory"),
    ):
        assert nvrtc.compile_cubin(NOTHING).startswith(b"\x7fELF")


def test_what_does_not_compile_says_where(cuda_core, tmp_path, monkeypatch):
    monkeypatch.setenv("QUANTROT_CACHE", str(tmp_path))
    with pytest.raises(Exception, match=r'default_program\(1\): error: identifier "undefined" is undefined'):
        nvrtc.compile_cubin("__global__ void kernel() { undefined(); }")
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_a_launch_that_the_driver_refuses_says_why():
    function = nvrtc.load_kernel(NOTHING, "nothing", 0, 0)

    class Nothing(ctypes.Structure):
        _fields_ = [("unused", ctypes.c_int)]

    nvrtc.launch(function, (1,), 32, 0, Nothing(), 0)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        nvrtc.launch(function, (1,), 4096, 0, Nothing(), 0)


def test_streams_are_numbered_by_device_and_each_once(monkeypatch):
    at = {"device": 0, "stream": 0}
    monkeypatch.setattr(nvrtc, "_streams", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: at["device"])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: at["stream"], raising=False)
    found = []
    for device, stream in ((0, 7), (0, 8), (1, 7), (0, 7), (1, 9)):
        at |= {"device": device, "stream": stream}
        found.append(nvrtc.stream_number(device))
    assert found == [0, 1, 0, 0, 1]


def test_a_thread_without_a_context_gets_the_devices(monkeypatch):
    """autograd's thread of a device has none before its first CUDA work, which may be this launch."""
    driver = pytest.importorskip("cuda.bindings.driver")
    made, answers = [], [int(driver.CUresult.CUDA_ERROR_INVALID_CONTEXT), 0]
    ok = driver.CUresult.CUDA_SUCCESS
    monkeypatch.setattr(nvrtc, "_launcher", lambda: lambda *args: answers.pop(0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(driver, "cuDevicePrimaryCtxRetain", lambda device: (ok, f"of {int(device)}"))
    monkeypatch.setattr(driver, "cuCtxSetCurrent", lambda context: made.append(context) or (ok,))

    class Nothing(ctypes.Structure):
        _fields_ = [("n", ctypes.c_int)]

    nvrtc.launch(0, (1,), 32, 0, Nothing(), 3)
    assert made == ["of 3"] and not answers


def test_a_structure_is_handed_over_by_its_fields_or_as_a_whole(monkeypatch):
    class Fields(ctypes.Structure):
        _fields_ = [("a", ctypes.c_longlong), ("b", ctypes.c_int), ("c", ctypes.c_int)]

    class Whole(ctypes.Structure):
        whole = True
        _fields_ = Fields._fields_

    def driver(config, function, parameters, extra):
        given.append([parameters[i] - ctypes.addressof(now) for i in range(len(parameters))])

    given = []
    monkeypatch.setattr(nvrtc, "_launcher", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    for now in (Fields(), Whole()):
        nvrtc.launch(11, (1,), 32, 0, now, 3)
    assert given == [[0, 8, 12], [0]]
