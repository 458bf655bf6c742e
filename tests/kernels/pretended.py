"""A GPU of Hopper's kind that a CPU says it is: kernels are noted instead of launched, with the names of the tensors
whose addresses they are given. For a process of its own: what is remembered of the device would be wrong for others."""

import ctypes
import hashlib

import torch
from triton.runtime.jit import JITFunction

from quantrot.kernels import attention, mixed, nvrtc
from quantrot.kernels.attention import append, decode, int4_hopper, int4_triton, one_token, prepare, turn
from quantrot.kernels.attention import hopper as attention_hopper
from quantrot.kernels.fp8 import blocks as quantizer
from quantrot.kernels.fp8 import fused as fp8_fused
from quantrot.kernels.fp8 import hopper, linear, prompt
from quantrot.kernels.fp8 import normed as fp8_normed
from quantrot.kernels.hadamard import hopper as hadamard
from quantrot.kernels.mixed import hopper as mixed_hopper
from quantrot.kernels.mxfp4 import fused, normed, triton_gemm

GPU = torch.device("cuda", 0)
names = {}  # of tensors, by address
encoded = {}  # what tensor maps are of
launches = []


def digest(*what):
    return hashlib.sha512(repr(what).encode()).digest() * 2


def named(address):
    return names.get(address, "made here") if address else None


def values(structure):
    """A structure's fields, addresses by name."""
    fields = (field for of in reversed(type(structure).__mro__) for field in vars(of).get("_fields_", ()))
    for name, kind in fields:
        value = getattr(structure, name)
        if isinstance(value, ctypes.Structure):
            yield name, *values(value)
        else:
            yield name, named(value) if kind is ctypes.c_void_p else read(value) if "Array" in kind.__name__ else value


def read(array):
    return encoded.get(bytes(array), bytes(array))


def encode(data, *rest):
    encoded[(made := digest(named(data), rest))] = named(data), rest
    return made


def record(self, arguments):
    shape = tuple(self.config.grid), tuple(self.config.block), self.config.shared, self.config.count
    launches.append((self.function, shape, *values(arguments)))


def record_triton(kernel, grid):
    def launch(*operands, **options):
        told = (named(x.data_ptr()) if isinstance(x, torch.Tensor) else str(x) for x in operands)
        launches.append((kernel.__name__, grid, *told, str(sorted(options.items()))))

    return launch


def scaled_mm(a, b, *scales, out_dtype, use_fast_accum, bias=None):
    told = (named(t.data_ptr()) for t in (a, b, bias) if t is not None)
    assert a.shape[1] == b.shape[0], (a.shape, b.shape)
    launches.append((*told, tuple(a.shape), tuple(b.shape), out_dtype, use_fast_accum))
    return torch.empty(a.shape[0], b.shape[1], dtype=out_dtype)


def pretend():
    """Tensors are on a GPU of Hopper's kind, whose driver notes what it is asked for."""
    empty = torch.empty
    torch.empty = lambda *size, device=None, **rest: empty(*size, device="meta" if device == "meta" else None, **rest)
    torch.Tensor.is_cuda, torch.Tensor.device = property(lambda t: True), property(lambda t: GPU)
    torch.Tensor.get_device = lambda t: 0
    torch.cuda.get_device_capability, torch.cuda.current_device = lambda *device: (9, 0), lambda: 0
    torch.cuda.is_current_stream_capturing, torch.version.cuda = lambda: False, "13.0"
    nvrtc.available = nvrtc.available.__wrapped__
    nvrtc.Launch.__call__ = record
    for module in (nvrtc, quantizer, hopper, linear, prompt, hadamard, mixed_hopper, int4_hopper, one_token, turn):
        module.load_kernel, module.processors = lambda *what: digest(what)[:8], lambda device: 132
    nvrtc.maps_of = lambda *how: lambda data: encode(data, *how)
    nvrtc.counters_in_turn, nvrtc.stream_number = lambda count: count, lambda device: 0
    hadamard.tensor_map = nvrtc.tensor_map
    JITFunction.__getitem__, torch._scaled_mm = record_triton, scaled_mm
    triton_gemm.processors = int4_triton.processors = nvrtc.processors
    for module in (mixed, fp8_normed, fp8_fused, normed, fused):
        module.rms_norm = lambda x, *rest: torch.empty_like(x)  # in torch's operations, half of the time of all calls
    for module in (attention, append, attention_hopper, decode, prepare):
        module._best, module.tensor_map = lambda device: "triton", nvrtc.tensor_map
        module.encode_map, module.load_kernel, module.processors = nvrtc.encode_map, nvrtc.load_kernel, nvrtc.processors
    for structure in ctypes.Structure.__subclasses__():
        if structure.__module__.startswith("quantrot"):
            structure.__setattr__ = field_alone


def field_alone(structure, name, value):
    """ctypes would take any name for an attribute of its own."""
    if not hasattr(type(structure), name):
        raise AttributeError(f"{type(structure).__name__} has no field {name}")
    ctypes.Structure.__setattr__(structure, name, value)


def its(name):
    """Of an operand; no field has it."""
    return f"the {name}"


def noted(call, **given):
    """What a call launches, and its results' shapes."""
    names.clear()
    names.update({t.data_ptr(): its(name) for name, t in given.items() if isinstance(t, torch.Tensor)})
    launches.clear()
    made = call(**given)
    made = [made] if isinstance(made, torch.Tensor) else made
    return list(launches), [None if t is None else t.shape for t in made]
