"""What calls launch, recorded on a CPU that says it is a GPU: run as a program, it compares a call's launches in eager
mode, found and found again, with the operator's, and prints where they differ and how many it compared and found again.

In a process of its own: what is remembered of a device would be wrong for other tests.
"""

import ctypes
import hashlib
import itertools

import torch

from quantrot.kernels import attention, mixed, nvrtc
from quantrot.kernels.attention import Quantized, append, attend, decode
from quantrot.kernels.fp8 import blocks as quantizer
from quantrot.kernels.fp8 import fp8_linear, fused, hopper, linear
from quantrot.kernels.mixed import hopper as mixed_hopper
from quantrot.kernels.mixed import mixed_linear
from quantrot.kernels.mxfp4 import fused as mxfp4
from quantrot.kernels.mxfp4 import mxfp4_fused

GPU = torch.device("cuda", 0)
names = {}  # of tensors, by address
launches = []


def digest(*what):
    return hashlib.sha512(repr(what).encode()).digest() * 2


def named(address):
    return names.get(address, "made here") if address else None


def values(structure):
    """A structure's fields, addresses by name."""
    for name, kind in structure._fields_:
        value = getattr(structure, name)
        if isinstance(value, ctypes.Structure):
            yield name, *values(value)
        else:
            yield name, named(value) if kind is ctypes.c_void_p else bytes(value) if "Array" in kind.__name__ else value


def record(self, arguments):
    shape = tuple(self.config.grid), tuple(self.config.block), self.config.shared, self.config.count
    launches.append((self.function, shape, *values(arguments)))


def pretend():
    """Tensors are on a GPU of Hopper's kind, whose driver notes what it is asked for."""
    empty = torch.empty
    torch.empty = lambda *size, device=None, **rest: empty(*size, device="meta" if device == "meta" else None, **rest)
    torch.Tensor.is_cuda, torch.Tensor.device = property(lambda t: True), property(lambda t: GPU)
    torch.Tensor.get_device = lambda t: 0
    torch.cuda.get_device_capability, torch.cuda.current_device = lambda *device: (9, 0), lambda: 0
    torch.cuda.is_current_stream_capturing = lambda: False
    nvrtc.available = nvrtc.available.__wrapped__
    nvrtc.Launch.__call__ = record
    for module in (nvrtc, quantizer, hopper, linear, mixed_hopper):
        module.load_kernel, module.processors = lambda *what: digest(what)[:8], lambda device: 132
    nvrtc.encode_map = lambda data, *rest: digest(named(data), rest)
    nvrtc.counters_in_turn = lambda count: count
    for module in (attention, append, decode):
        module._best, module.tensor_map = lambda device: "triton", nvrtc.tensor_map
        module.load_kernel, module.processors = nvrtc.load_kernel, nvrtc.processors
    for structure in ctypes.Structure.__subclasses__():
        if structure.__module__.startswith("quantrot"):
            structure.__setattr__ = field_alone


def field_alone(structure, name, value):
    """ctypes would take any name for an attribute of its own."""
    if not hasattr(type(structure), name):
        raise AttributeError(f"{type(structure).__name__} has no field {name}")
    ctypes.Structure.__setattr__(structure, name, value)


def fp8(x, b, residual=None, **around):
    rows = None if residual is None else residual.reshape(-1, len(b[0]))
    return fp8_linear(x.reshape(-1, x.shape[-1]), *b, b_settled=True, residual=rows, **around)


def mxfp4_by(activations):
    how = {"activations": activations, "hadamard": 32 if activations == "mxfp4" else 0, "settled": True}
    return lambda x, b, **around: mxfp4_fused(x, *b, **how, **around)


def int8(x, b, **around):
    return mixed_linear(x, *b, weight_ready=True, **around)


def blocks(n, k):
    return torch.zeros(n, k, dtype=torch.float8_e4m3fn), torch.zeros(n // 128, k // 128)


def groups(n, k):
    return torch.zeros(n, k // 2, dtype=torch.uint8), torch.zeros(n, k // 32, dtype=torch.uint8)


def channels(n, k):
    return torch.zeros(n, k, dtype=torch.int8), torch.zeros(n, 1)


OPERATORS = {
    "fp8": (fp8, fused.READY, blocks),
    "mxfp4": (mxfp4_by("mxfp4"), mxfp4.READY, groups),
    "mxfp4 by fp8": (mxfp4_by("fp8"), mxfp4.READY, groups),
    "mxfp4 by bf16": (mxfp4_by("none"), mxfp4.READY, groups),
    "int8": (int8, mixed.READY, channels),
}
LEADING = ((1,), (1, 1), (2,), (3,), (8, 1), (1, 8), (2, 4), (16,), (32, 1), (40,), (0,))
AROUND = ("", "residual", "residual turned", "norm", "norm, residual")


def around_of(kind, leading, n, k):
    given = {}
    if "norm" in kind:
        given |= {"norm": torch.ones(k, dtype=torch.bfloat16), "epsilon": 1e-5}
    if "residual" in kind:
        given["residual"] = torch.zeros(*leading, n, dtype=torch.bfloat16)
    if "turned" in kind and len(leading) == 2:
        given["residual"] = torch.zeros(*leading[::-1], n, dtype=torch.bfloat16).transpose(0, 1)
    return given


def launched(run, b, given, x):
    """What a call launches, and its result's shape."""
    names.clear()
    names.update({t.data_ptr(): name for name, t in given.items() if isinstance(t, torch.Tensor)})
    names.update({x.data_ptr(): "x", b[0].data_ptr(): "codes", b[1].data_ptr(): "scale"})
    launches.clear()
    y = run(x, b, **given)
    return list(launches), tuple(y.shape)


def noted(call, **given):
    """What a call launches, and its results' shapes."""
    names.clear()
    names.update({t.data_ptr(): name for name, t in given.items() if isinstance(t, torch.Tensor)})
    launches.clear()
    made = call(**given)
    return list(launches), [t.shape for t in ([made] if isinstance(made, torch.Tensor) else made)]


def e4m3(*size):
    return torch.zeros(*size, dtype=torch.uint8).view(torch.float8_e4m3fn)


def scales(*size):
    return torch.zeros(*size, dtype=torch.uint8)


def of_attention():
    """One token's place in a cache, and its attention: by the operators, found, found again; and which of the operands
    a launch has the addresses of."""
    heads, groups, room = 8, 2, 256
    for batch, dim, turned in itertools.product((1, 4), (64, 128), (False, True)):
        caches = [
            {
                "key": scales(batch, groups, room, dim),
                "key_scale": scales(batch, groups, room),
                "value": scales(batch, groups, dim, room),
                "value_scale": scales(batch, groups, room),
            }
            for _ in "12"
        ]
        signs, count = torch.ones(dim, dtype=torch.int8) if turned else None, torch.zeros((), dtype=torch.int64)
        for cache, (length, advance) in itertools.product(caches, ((7, True), (count, True), (count, False))):
            how = {"limit": 250, "order": dim * turned, "signs": signs, "advance": advance, "length": length}
            found = []
            for call in (append.rope_hadamard_append, append.try_append, append.try_append):
                wide = torch.zeros(batch, 1, heads + 2 * groups, dim, dtype=torch.bfloat16)
                moving = dict(zip("qkv", wide.split([heads, groups, groups], 2), strict=True))
                moving |= {name: torch.zeros(1, 1, dim, dtype=torch.bfloat16) for name in ("cos", "sin")}
                with torch.no_grad():
                    found.append(noted(call, **moving, **cache, **how))
            place = ("count", "length") if length is count else ("at", 7)
            told = [*((name, name) for name in (*moving, *cache)), place, ("advance", int(length is count and advance))]
            yield ("append", batch, dim, turned, place, advance), found, [*told, *[("signs", "signs")] * turned]
    for batch, dim, masked, counted in itertools.product((1, 4), (64, 128), (False, True), (False, True)):
        cache = {"k": e4m3(batch, groups, room, dim), "k_scale": scales(batch, groups, room)}
        cache |= {"v": e4m3(batch, groups, dim, room), "v_scale": scales(batch, groups, room)}
        found = []
        for call in range(3):
            moving = {"q": e4m3(batch, heads, 1, dim), "q_scale": scales(batch, heads, 1)}
            moving["mask"] = torch.ones(batch, 1, 1, room, dtype=torch.bool) if masked else None
            moving["lengths"] = torch.full((batch,), 9, dtype=torch.int32) if counted else None
            with torch.enable_grad() if call == 0 else torch.no_grad():
                found.append(noted(attended, **moving, **cache))
        told = [(name, name if t is not None else None) for name, t in moving.items()]
        yield ("attend", batch, dim, masked, counted), found, [*told, ("k_scale", "k_scale"), ("v_scale", "v_scale")]


def attended(mask, lengths, **given):
    return attend(Quantized(**given), causal=mask is None, mask=mask, lengths=lengths)


def main():
    pretend()
    compared = again = 0
    for what, found, told in of_attention():
        compared += 1
        if found[1:] != found[:1] * 2 or any(repr(each) not in repr(found[0]) for each in told):
            print("differs:", what)
    again += len(append.READY) + len(attention.READY)
    for name, (run, ready, weight) in OPERATORS.items():
        for (n, k), leading, kind in itertools.product([(512, 1024), (4096, 14336)], LEADING, AROUND):
            b, found = weight(n, k), []
            norm = around_of(kind, leading, n, k).get("norm")
            for call in range(3):
                x, given = torch.zeros(*leading, k, dtype=torch.bfloat16), around_of(kind, leading, n, k)
                given |= {} if norm is None else {"norm": norm}
                with torch.enable_grad() if call == 0 else torch.no_grad():  # by the operator first
                    found.append(launched(run, b, given, x))
            compared += 1
            if found[1:] != found[:1] * 2:
                print("differs:", name, (n, k), leading, kind)
        again += len(ready)
    print(f"compared {compared}, {again} of them found again")


if __name__ == "__main__":
    main()
