"""Calls like one before: what an operator decided once for such operands is launched again, and nothing else is done.

In eager mode tokens, up to a thousand or two, go through a model at the pace of the host, which an operator's checks,
the dispatcher, the choice of a plan and a kernel's parameters take longer than the kernel runs:
`benchmarks/bench_model.py --eager`.

    unseen   whether a call may pass the dispatcher by
    Again    a launch, but for the operands that are others in every call
    Ready    such launches by what checks and plans look at (`like`, `same`)

A linear's launch is for all weights of its shape: the first layer that sees so many tokens decides for the others.
What the dispatcher does beside that is left out: versions of tensors that are written do not count up.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

Run = Callable[..., Any]
PLAIN = (Tensor, nn.Parameter)
KEPT = 1024  # of an operator, some KB each: four linears by 256 numbers of tokens


def unseen(*tensors: Tensor | None) -> bool:
    """Whether nobody but the caller sees a call with these tensors, so that it need not go through the dispatcher."""
    if (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or torch._C._len_torch_dispatch_stack()
        or (torch._C._len_torch_function_stack() and _functions_are_seen())
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    ):
        return False
    for t in tensors:  # whose numbers are what lies at their address, in their strides
        if t is not None and (
            type(t) not in PLAIN or t.layout is not torch.strided or t.is_neg() or t._is_zerotensor()
        ):
            return False
    return True


def _functions_are_seen() -> bool:
    """By a mode other than torch.device's and torch.set_default_device's: launches say where they make tensors."""
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


def like(x: Tensor | None) -> Hashable:
    """All that a check or a plan looks at of a tensor that is another in every call."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16)


def same(x: Tensor | None) -> Hashable:
    """Of one that is the same in every call, such as a cache: also its address, which the launch has."""
    return None if x is None else (x.data_ptr(), x.shape, x.stride(), x.dtype, x.device)


def lies_well(x: Tensor | None) -> bool:
    """Whether any kernel reads it where it is."""
    return x is None or (x.is_contiguous() and x.data_ptr() % 16 == 0)


def address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


class Again:
    """`run` of operands like those that it was made from, which are given to it; on its device, which it makes current.
    It holds no tensors."""

    def __init__(self, run: Run, device: int) -> None:
        self.run, self.device = run, device

    def __call__(self, *operands: Any) -> Any:
        if self.device < 0 or torch.cuda.current_device() == self.device:
            return self.run(*operands)
        with torch.cuda.device(self.device):
            return self.run(*operands)


class Ready(dict[Hashable, Again]):
    """An operator's launches by what they were decided from. Where they have an address (`same`), a tensor that comes
    to be there is one of the same shape and dtype, or another key."""

    def find(self, key: Hashable) -> Again | None:
        try:
            return self.get(key)
        except TypeError:  # not hashable: no argument that an operator takes, which says so
            return None

    def keep(self, key: Hashable, run: Run, device: int) -> Again:
        if len(self) >= KEPT:
            self.clear()
        self[key] = again = Again(run, device)
        return again
