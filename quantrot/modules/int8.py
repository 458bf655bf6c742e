"""INT8 weight-only linears."""

from typing import Any

import torch
from torch import nn

from quantrot.modules.linear import QuantizedLinear


class Int8Linear(QuantizedLinear):
    """Packed int8 weights with a bfloat16 scale per group or channel; activations stay wide."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weight_shape = nn.Parameter(torch.empty(2, dtype=torch.int64), requires_grad=False)
