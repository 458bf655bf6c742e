"""INT8 weight-only linears."""

from typing import Any

import torch
from torch import Tensor, nn

from quantrot.kernels.mixed import has_kernels, mixed_gemm
from quantrot.modules.linear import QuantizedLinear


class Int8Linear(QuantizedLinear):
    """Packed int8 weights with a bfloat16 scale per group or channel; activations stay wide.

    On a GPU the product reads the packed weight as it is on disk; its gradient reaches the input.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weight_shape = nn.Parameter(torch.empty(2, dtype=torch.int64), requires_grad=False)

    def runs_packed(self, device: torch.device) -> bool:
        return has_kernels(device)

    def multiply(self, x: Tensor) -> Tensor:
        if not self.runs_packed(x.device):
            return super().multiply(x)
        packed, scale = (getattr(self, name) for name in self.tensor_names)
        ready = True  # parameters: no kernel that still runs writes them
        return mixed_gemm(self.turned(x), packed, scale, bias=self.bias, weight_ready=ready)
