"""MXFP4 linears: packed weights for inference, master weights for training."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quantrot import patterns
from quantrot.kernels.mxfp4 import GROUP, Mxfp4Gemm, has_fused, has_kernels, mxfp4_fused, mxfp4_gemm
from quantrot.kernels.mxfp4.operators import check_fused
from quantrot.modules.linear import QuantizedLinear, as_autocast, hooked, sharded

SKIP = ("lm_head", "lora_*")  # and peft's adapters: small, and what is to be learned exactly
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
        activations = self.format.activations
        return has_kernels(device) and (activations.kind != "fp8" or activations.block == (1, 0))

    def multiply(self, x: Tensor) -> Tensor:
        if not self.runs_packed(x.device):
            return super().multiply(x)
        x = x if self.fused_hadamard() else self.turned(x)
        return mxfp4_gemm(x, self.weight_packed, self.weight_scale, self.bias, **self._options())

    def _options(self) -> dict[str, Any]:
        activations = self.format.activations
        return {
            "activations": activations.kind,
            "scale_rule": activations.scale_rule or None,
            "hadamard": self.fused_hadamard(),
            "settled": True,  # parameters: who writes them on the device waits before a forward
        }

    def fuses(self, device: torch.device, tokens: int) -> bool:
        turns = bool(self.online_name) and not self.fused_hadamard()
        if self._decoded is not None or self.bias is not None or turns:
            return False
        return self.runs_packed(device) and has_fused(tokens, self.out_features, self.in_features, device)

    def _fused(self, x: Tensor, **rest: Any) -> Tensor:
        return mxfp4_fused(x, self.weight_packed, self.weight_scale, **rest, **self._options())


class Mxfp4TrainingLinear(nn.Linear):
    """A linear with master weights whose three products, forward and backward, are MXFP4 (`Mxfp4Gemm`).

    Both dimensions must be multiples of `hadamard`, 32, 64 or 128. stochastic: round gradients at random, with random
    signs; without it, to nearest. The state dict is nn.Linear's. Under autocast x and y are its dtype.

    Each forward in training mode, or of which a gradient is recorded, draws from torch's CPU generator: training goes
    on bit for bit where that is put back, as Trainer does. Ranks of torch.distributed turn one draw into different
    numbers.
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

    @torch.compiler.disable  # numbers that the host draws are no part of a graph
    def forward(self, x: Tensor) -> Tensor:
        x = as_autocast(x)
        y = Mxfp4Gemm.apply(x, self.weight, self.hadamard, self._draw(x))
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _draw(self, x: Tensor) -> tuple[int, int] | None:
        """(seed, offset) of this forward's gradients, None where they are rounded to nearest or not recorded.

        Not under no_grad alone: the first forward of a reentrant checkpoint is under it, and if that drew nothing, the
        one whose gradient is recorded would begin with the same generator at every step.
        """
        recorded = torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad)
        if not self.stochastic or not (self.training or recorded):
            return None
        seed, offset = torch.randint(1 << 61, (2,), device="cpu").tolist()  # 2^122 pairs: none comes twice
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        return (seed + rank * RANK_STEP) % (1 << 63), offset

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, hadamard={self.hadamard}, stochastic={self.stochastic}"


def train_in_mxfp4(model: nn.Module, *, skip: str | tuple[str, ...] = SKIP, hadamard: int = GROUP) -> list[str]:
    """Replace the model's linears by Mxfp4TrainingLinear on the same parameters; the names of those that it replaced.

    skip: patterns as a recipe's, or of any component of a name ("mlp", "*.layers.0.*"), of what stays; given ones take
    the place of "lm_head" and "lora_*", peft's adapters. Linears whose dimensions are no multiples of `hadamard` stay,
    too. A linear in two places stays one in both. ValueError for a model that is a linear or has none to replace, a
    linear with hooks or a weight that is sharded already, a pattern that matches no module, or another `hadamard`; no
    linear is replaced then.
    """
    check_fused(hadamard)
    if type(model) is nn.Linear:
        raise ValueError("model: a linear itself; give a module that holds it, whose linear can be replaced")
    skip = (skip,) if isinstance(skip, str) else tuple(skip)
    modules = dict(model.named_modules(remove_duplicate=False))
    _check_skip(skip, modules)
    chosen = {
        name: old
        for name, old in modules.items()
        if type(old) is nn.Linear
        and old.in_features % hadamard == 0
        and old.out_features % hadamard == 0
        and not any(_names(pattern, name) for pattern in skip)
    }
    if not chosen:
        raise ValueError(
            f"model: {_linears(modules, skip, hadamard)}, so nothing is replaced; allowed: nn.Linear with dimensions "
            f"of multiples of {hadamard}; what is quantized is trained from the original checkpoint"
        )
    if name := next((name for name, old in chosen.items() if hooked(old)), ""):
        raise ValueError(
            f"model: {name} has hooks or a forward of its own, which would be lost; remove them, and give them to the "
            "new one"
        )
    if name := next((name for name, old in chosen.items() if sharded(old.weight)), ""):
        raise ValueError(
            f"model: {name}'s weight is a {sharded(chosen[name].weight)}; call this before FSDP or fully_shard, and "
            "without tensor parallelism"
        )
    made: dict[nn.Module, Mxfp4TrainingLinear] = {}
    for name, old in chosen.items():
        if old not in made:
            with torch.device("meta"):
                new = Mxfp4TrainingLinear(old.in_features, old.out_features, old.bias is not None, hadamard=hadamard)
            new.weight, new.bias = old.weight, old.bias
            made[old] = new.train(old.training)
        model.set_submodule(name, made[old])
    return list(chosen)


def _names(pattern: str, name: str) -> bool:
    return patterns.matches(pattern, name) or any(patterns.matches(pattern, part) for part in name.split("."))


def _check_skip(skip: tuple[str, ...], modules: dict[str, nn.Module]) -> None:
    """Every pattern names a module; the ones that are always there need not."""
    for pattern in skip:
        if pattern not in SKIP and not any(_names(pattern, name) for name in modules if name):
            parts = {part for name, module in modules.items() if type(module) is nn.Linear for part in name.split(".")}
            raise ValueError(f"skip: {pattern!r} matches no module of this model ({patterns.hint(pattern, parts)})")


def _linears(modules: dict[str, nn.Module], skip: tuple[str, ...], hadamard: int) -> str:
    """How many linears there are and why each is none that can be replaced."""
    found: Counter[str] = Counter()
    for name, module in modules.items():
        kind = type(module)
        if kind is nn.Linear and any(_names(pattern, name) for pattern in skip):
            found["nn.Linear that skip names"] += 1
        elif kind is nn.Linear:
            found[f"nn.Linear of no multiples of {hadamard}"] += 1
        elif "Linear" in kind.__name__:
            found[kind.__name__] += 1
    return ", ".join(f"{count} {what}" for what, count in found.items()) or "no linear in it"
