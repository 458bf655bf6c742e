"""What is handed to the CUDA driver."""

import ctypes

import pytest
import torch

from quantrot.kernels import nvrtc


def test_launch_structures_lie_as_in_cuda_h():
    """sizeof and offsetof of CUlaunchConfig and CUlaunchAttribute in CUDA 13's cuda.h (the same since CUDA 12)."""
    launch, attribute = nvrtc._Launch, nvrtc._Attribute
    offsets = [field.offset for field in (launch.shared, launch.stream, launch.attributes, launch.count)]
    assert offsets == [24, 32, 40, 48] and ctypes.sizeof(launch) == 56
    assert attribute.value.offset == 8 and ctypes.sizeof(attribute) == 72


@pytest.mark.gpu
def test_a_launch_that_the_driver_refuses_says_why():
    source = 'extern "C" __global__ void nothing() {}'
    function = nvrtc.load_kernel(source, "nothing", 0, 0)

    class Nothing(ctypes.Structure):
        _fields_ = [("unused", ctypes.c_int)]

    nvrtc.launch(function, (1,), 32, 0, Nothing(), 0)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        nvrtc.launch(function, (1,), 4096, 0, Nothing(), 0)
