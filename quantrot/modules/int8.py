"""INT8 weight-only linears."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quantrot.kernels.mixed import has_fused, has_kernels, mixed_gemm, mixed_linear
from quantrot.modules.linear import QuantizedLinear, as_autocast


class Int8Linear(QuantizedLinear):
    """Packed int8 weights with a bfloat16 scale per group or channel; activations stay wide.

    On a GPU the product reads the packed weight as it is on disk; its gradient reaches the input.
    """

    gates_behind = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weight_shape = nn.Parameter(torch.empty(2, dtype=torch.int64), requires_grad=False)

    def runs_packed(self, device: torch.device) -> bool:
        return has_kernels(device)

    def multiply(self, x: Tensor) -> Tensor:
        return self._run(mixed_gemm, x) if self.runs_packed(x.device) else super().multiply(x)

    def gated(self, x: Tensor) -> Tensor | None:
        return self.fused(as_autocast(x), gates=True) if self._decoded is None and self.runs_packed(x.device) else None

    def fuses(self, device: torch.device, tokens: int) -> bool:
        if self._decoded is not None or self.online_name or not self.runs_packed(device):
            return False
        scale = self.stored()[1]
        return has_fused(tokens, self.out_features, self.in_features, scale.shape[1], device)

    def _fused(self, x: Tensor, **rest: Any) -> Tensor:
        return self._run(mixed_linear, x, **rest)

    def _run(self, product: Callable[..., Tensor], x: Tensor, **rest: Any) -> Tensor:
        packed, scale = self.uncast()
        ready = True  # parameters: no kernel that still runs writes them
        return product(self.turned(x), packed, scale, bias=self.bias, weight_ready=ready, **rest)
