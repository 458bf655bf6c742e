"""MXFP4 linears: packed weights for inference, master weights for training."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quantrot.kernels.mxfp4 import (
    GROUP,
    Mxfp4Gemm,
    drawn_numbers,
    has_fused,
    has_kernels,
    has_normed,
    mxfp4_fused,
    mxfp4_gemm,
    mxfp4_normed,
)
from quantrot.kernels.mxfp4.gemm import DECODE_ROWS
from quantrot.kernels.mxfp4.operators import check_fused
from quantrot.kernels.operators import constant
from quantrot.modules.linear import QuantizedLinear, as_autocast

RANK_STEP = 0x9E3779B97F4A7C15  # odd: no two ranks have the same seed


class Mxfp4Linear(QuantizedLinear):
    """Packed e2m1 weights with an e8m0 scale per 32.

    Where there are kernels, the packed weight is what is multiplied, at any number of tokens, and the quantizer of
    MXFP4 activations turns them on its way; elsewhere the dequantized weight is multiplied.
    """

    gates_before = True
    weight_packed: Tensor
    weight_scale: Tensor

    def runs_packed(self, device: torch.device) -> bool:
        return has_kernels(device) and self._takes_packed(self.spec)

    @constant
    def _takes_packed(self, spec: str) -> bool:
        activations = self.format.activations
        return activations.kind != "fp8" or activations.block == (1, 0)

    def multiply(self, x: Tensor) -> Tensor:
        if not self.runs_packed(x.device):
            return super().multiply(x)
        options = self._options()
        x = x if options["hadamard"] else self.turned(x)
        return mxfp4_gemm(x, self.weight_packed, self.weight_scale, self.bias, **options)

    def multiply_gated(self, x: Tensor) -> Tensor:
        options = self._options()
        apart = self._decoded is not None or self._turns_apart() or options["activations"] != "mxfp4"
        if apart or not self.runs_packed(x.device):
            return super().multiply_gated(x)
        return mxfp4_gemm(x, self.weight_packed, self.weight_scale, self.bias, gated=True, **options)

    def _turns_apart(self) -> bool:
        """Whether its input is turned by a kernel of its own."""
        return self._turn(self.spec)[3]

    def _options(self) -> dict[str, Any]:
        kind, rule, hadamard, _ = self._turn(self.spec)
        # settled: parameters: who writes them on the device waits before a forward
        return {"activations": kind, "scale_rule": rule or None, "hadamard": hadamard, "settled": True}

    @constant
    def _turn(self, spec: str) -> tuple[str, str, int, bool]:
        """What activations become, by which rule, in blocks of how many columns they are turned on the way, and whether
        they are before."""
        activations, hadamard = self.format.activations, self.fused_hadamard()
        return activations.kind, activations.scale_rule, hadamard, bool(self.online_name) and not hadamard

    def fuses(self, device: torch.device, tokens: int) -> bool:
        if self._decoded is not None or self.bias is not None or self._turns_apart():
            return False
        return self.runs_packed(device) and has_fused(tokens, self.out_features, self.in_features, device)

    def norms(self, x: Tensor) -> bool:
        kind, _, _, apart = self._turn(self.spec)
        if self._decoded is not None or apart or kind == "none":
            return False
        has = self.runs_packed(x.device) and has_normed(self.out_features, self.in_features, x.device)
        return has and x.dtype == torch.bfloat16 and self._many(x)  # of compiled code's sizes last

    def _many(self, x: Tensor) -> bool:
        """Whether x is more tokens than the kernels of `fused` take: then a norm is in their quantizer."""
        return x.numel() > DECODE_ROWS * self.in_features

    def normed(self, x: Tensor, norm: Any, added: Tensor) -> tuple[Tensor, Tensor]:
        return self._normed(x, norm.weight, norm.variance_epsilon, added)

    def _normed(self, x: Tensor, norm: Tensor, epsilon: float, added: Tensor | None) -> tuple[Tensor, Tensor]:
        options = self._options()
        return mxfp4_normed(x, norm, epsilon, self.weight_packed, self.weight_scale, self.bias, added=added, **options)

    def _fused(self, x: Tensor, **rest: Any) -> Tensor:
        if rest["norm"] is not None and self._many(x):
            return self._normed(x, rest["norm"], rest["epsilon"], None)[0]
        return mxfp4_fused(x, self.weight_packed, self.weight_scale, **rest, **self._options())


class Mxfp4TrainingLinear(nn.Linear):
    """A linear with master weights whose three products, forward and backward, are MXFP4 (`Mxfp4Gemm`).

    Both dimensions must be multiples of `hadamard`, 32, 64 or 128. stochastic: round gradients at random, with random
    signs; without it, to nearest. The state dict is nn.Linear's. Under autocast x and y are its dtype.

    Each forward in training mode, or of which a gradient is recorded, draws from torch's CPU generator: training goes
    on bit for bit where that is put back, as Trainer does. Under torch.compile and where a CUDA graph is recorded it
    draws from the device's, by the graph itself. Ranks of torch.distributed turn one draw into different numbers.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        hadamard: int = GROUP,
        stochastic: bool = True,
    ) -> None:
        check_fused(hadamard)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.hadamard, self.stochastic = hadamard, stochastic

    def forward(self, x: Tensor) -> Tensor:
        x = as_autocast(x)
        y = Mxfp4Gemm.apply(x, self.weight, self.hadamard, self._draw(x))
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _draw(self, x: Tensor) -> tuple[int, int] | Tensor | None:
        """The random numbers of this forward's gradients, None where they are rounded to nearest or not recorded.

        Not under no_grad alone: the first forward of a reentrant checkpoint is under it, and if that drew nothing, the
        one whose gradient is recorded would begin with the same generator at every step.
        """
        recorded = torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad)
        if not self.stochastic or not (self.training or recorded):
            return None
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        if torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return drawn_numbers(x, self.weight, self.hadamard, rank)  # a graph draws others each time it runs
        seed, offset = torch.randint(1 << 61, (2,), device="cpu").tolist()  # 2^122 pairs: none comes twice
        return (seed + rank * RANK_STEP) % (1 << 63), offset

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, hadamard={self.hadamard}, stochastic={self.stochastic}"
