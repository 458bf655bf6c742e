"""How the operators of this folder are registered, and what torch.compile may take for constant."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def implement(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: this operator on CPU and CUDA; its first argument is a tensor.

    Triton launches on the current device, whatever device the tensors are on: the first argument's is made current.
    Under autocast it is the same operator: what it promises of float32 sums and of the result's dtype holds there, too.
    """
    namespace, _, operator = name.partition("::")

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def on_its_device(first: torch.Tensor, *others: Any) -> Any:
            if first.device.index == torch.cuda.current_device():
                return function(first, *others)
            with torch.cuda.device(first.device):
                return function(first, *others)

        def under_autocast(*args: Any, **kwargs: Any) -> Any:
            with torch._C._DisableAutocast():
                return getattr(getattr(torch.ops, namespace), operator)(*args, **kwargs)

        torch.library.impl(name, "CPU", function)
        torch.library.impl(name, "CUDA", on_its_device)
        torch.library.impl(name, ("AutocastCPU", "AutocastCUDA"), under_autocast)
        return function

    return register


def constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compiler.assume_constant_result, which imports Dynamo: 0.9 s in every process, compiled or not."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
