"""Calls like one before: what an operator decided once for such operands is launched again, and nothing else is done.

In eager mode a few tokens go through a model at the pace of the host. An operator's checks, the dispatcher, the choice
of a plan and a kernel's parameters take it some 60 us, the kernel 4; to find that all of it is known takes 5.

    unseen   whether a call may pass the dispatcher by
    Ready    by what a call's checks and plans look at (`like`, `same`): the function that only launches
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (Tensor, nn.Parameter)
KEPT = 8192  # of an operator: 128 linears by 64 numbers of tokens


def unseen(*tensors: Tensor | None) -> bool:
    """Whether nobody but the caller sees a call with these tensors, so that it need not go through the dispatcher."""
    return not (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    ) and all(t is None or (type(t) in PLAIN and not t.is_neg()) for t in tensors)


def like(x: Tensor | None) -> Hashable:
    """All that a check or a plan looks at of a tensor that is another in every call."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16)


def same(x: Tensor | None) -> Hashable:
    """Of one that is the same in every call, such as a weight: also its address, which the launch has."""
    return None if x is None else (x.data_ptr(), x.shape, x.stride(), x.dtype, x.device)


def lies_well(x: Tensor | None) -> bool:
    """Whether kernels read it where it is: of a copy a launch would have the address, and not see what becomes of x."""
    return x is None or (x.is_contiguous() and x.data_ptr() % 16 == 0)


class Ready(dict[Hashable, Callable[..., Any] | None]):
    """An operator's launches by what they were decided from; None for calls that have none. It holds no tensors: an
    address that another weight comes to have is one of the same shape and dtype, or another key."""

    def keep(self, key: Hashable, again: Callable[..., Any] | None, *held: Tensor | None) -> None:
        """again: that function, which has the addresses of the tensors `held`."""
        if len(self) >= KEPT:
            self.clear()
        self[key] = again if all(map(lies_well, held)) else None
