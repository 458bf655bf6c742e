"""Operands that recorded calls are given: what numbers are in them does not matter, where they lie does."""

import torch


def operator(function, **always):
    """What a linear's module does with it: tokens of any dimensions, a product's operands by name."""
    return lambda **given: function(**always, **given)


def wide(*size):
    return torch.empty(*size, dtype=torch.bfloat16)


def e4m3(*size):
    return torch.empty(*size, dtype=torch.uint8).view(torch.float8_e4m3fn)


def scales(*size):
    return torch.empty(*size, dtype=torch.uint8)


def moved(t):
    """The same where not all kernels read it."""
    room = torch.empty(t.numel() + 1, dtype=torch.uint8 if t.itemsize == 1 else t.dtype)
    return room[1:].view(t.dtype).view(t.shape)


def apart(t):
    """The same in rows that lie apart."""
    return torch.empty(*t.shape[:-1], t.shape[-1] + 64, dtype=t.dtype)[..., : t.shape[-1]]
