"""How the operators of this folder are registered."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def implement(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: this operator on CPU and CUDA; its first argument is a tensor.

    Triton launches on the current device, whatever device the tensors are on: the first argument's is made current.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def on_its_device(first: torch.Tensor, *others: Any) -> Any:
            with torch.cuda.device(first.device):
                return function(first, *others)

        torch.library.impl(name, "CPU", function)
        torch.library.impl(name, "CUDA", on_its_device)
        return function

    return register
