"""Calls like one before: what an operator decided once for such operands is launched again, and nothing else is done.

In eager mode a few tokens go through a model at the pace of the host, which an operator's checks, the dispatcher, the
choice of a plan and a kernel's parameters take longer than the kernel runs: `benchmarks/bench_model.py --eager`.

    unseen   whether a call may pass the dispatcher by
    Again    a launch, but for the operands that are others in every call
    Ready    such launches by what checks and plans look at (`like`, `same`)

What the dispatcher does beside that is left out: versions of tensors that are written do not count up.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (Tensor, nn.Parameter)
KEPT = 8192  # of an operator: 128 linears by 64 numbers of tokens


def unseen(*tensors: Tensor | None) -> bool:
    """Whether nobody but the caller sees a call with these tensors, so that it need not go through the dispatcher."""
    if (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
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


def like(x: Tensor | None) -> Hashable:
    """All that a check or a plan looks at of a tensor that is another in every call."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16)


def same(x: Tensor | None) -> Hashable:
    """Of one that is the same in every call, such as a weight: also its address, which the launch has."""
    return None if x is None else (x.data_ptr(), x.shape, x.stride(), x.dtype, x.device)


def lies_well(x: Tensor | None) -> bool:
    """Whether any kernel reads it where it is."""
    return x is None or (x.is_contiguous() and x.data_ptr() % 16 == 0)


def copied(*operands: tuple[Tensor | None, Tensor | None]) -> list[Tensor]:
    """The copies among operands, each as it was given and as a kernel reads it."""
    return [b for a, b in operands if a is not None and b is not None and a.data_ptr() != b.data_ptr()]


class Again:
    """`run` of operands like those that it was made from, which are given to it; on its device, which it makes current.

    copies: of operands whose addresses it has, made for it to read. A copy does not see what becomes of the operand, so
    that such a launch is for one call.
    """

    def __init__(self, run: Callable[..., Any], device: int, copies: list[Tensor]) -> None:
        self.run, self.device, self.copies = run, device, copies

    def __call__(self, *operands: Any) -> Any:
        if self.device < 0 or torch.cuda.current_device() == self.device:
            return self.run(*operands)
        with torch.cuda.device(self.device):
            return self.run(*operands)


class Ready(dict[Hashable, Again]):
    """An operator's launches by what they were decided from. It holds no tensors: an address that another weight comes
    to have is one of the same shape and dtype, or another key."""

    def find(self, key: Hashable) -> Again | None:
        try:
            return self.get(key)
        except TypeError:  # not hashable: no argument that an operator takes, which says so
            return None

    def keep(self, key: Hashable, again: Again) -> None:
        if again.copies:
            return
        if len(self) >= KEPT:
            self.clear()
        self[key] = again
