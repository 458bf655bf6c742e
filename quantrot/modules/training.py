"""A model's linears made to train in few bits, on the master weights that they have."""

from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from quantrot import patterns
from quantrot.kernels.mxfp4 import GROUP
from quantrot.kernels.mxfp4.operators import check_fused
from quantrot.modules.fp8 import Fp8TrainingLinear
from quantrot.modules.linear import hooked, sharded
from quantrot.modules.mxfp4 import Mxfp4TrainingLinear

SKIP = ("lm_head", "score", "lora_*")  # heads (transformers' of classes) and peft's adapters: small, learned exactly
FP8_STEP = 16  # the kernels read rows of e4m3 by 16 bytes


def train_in_fp8(model: nn.Module, *, skip: str | tuple[str, ...] = SKIP) -> list[str]:
    """Replace the model's linears by Fp8TrainingLinear on the same parameters; the names of those that it replaced.

    skip: patterns as a recipe's, or of any component of a name ("mlp", "*.layers.0.*"), of what stays; given ones take
    the place of "lm_head", "score" (a classifier's head) and "lora_*", peft's adapters. Linears whose dimensions are no
    multiples of 16 stay, too. A linear in two places stays one in both. ValueError for a model that is a linear or has
    none to replace, a linear with hooks or a weight that is sharded already, or a pattern that matches no module; no
    linear is replaced then.
    """
    return _replace(model, skip, FP8_STEP, Fp8TrainingLinear.of)


def train_in_mxfp4(model: nn.Module, *, skip: str | tuple[str, ...] = SKIP, hadamard: int = GROUP) -> list[str]:
    """train_in_fp8 with Mxfp4TrainingLinear. Linears whose dimensions are no multiples of `hadamard`, 32, 64 or 128
    (another is a ValueError), stay."""
    check_fused(hadamard)

    def made(old: nn.Linear) -> nn.Module:
        with torch.device("meta"):
            new = Mxfp4TrainingLinear(old.in_features, old.out_features, old.bias is not None, hadamard=hadamard)
        new.weight, new.bias = old.weight, old.bias
        return new.train(old.training)

    return _replace(model, skip, hadamard, made)


def _replace(
    model: nn.Module, skip: str | tuple[str, ...], step: int, make: Callable[[nn.Linear], nn.Module]
) -> list[str]:
    """Put what `make` makes of them in the place of linears with dimensions of multiples of `step`."""
    if type(model) is nn.Linear:
        raise ValueError("model: a linear itself; give a module that holds it, whose linear can be replaced")
    skip = (skip,) if isinstance(skip, str) else tuple(skip)
    modules = dict(model.named_modules(remove_duplicate=False))
    _check_skip(skip, modules)
    chosen = {
        name: old
        for name, old in modules.items()
        if type(old) is nn.Linear
        and old.in_features % step == 0
        and old.out_features % step == 0
        and not any(_names(pattern, name) for pattern in skip)
    }
    if not chosen:
        raise ValueError(
            f"model: {_linears(modules, skip, step)}, so nothing is replaced; allowed: nn.Linear with dimensions "
            f"of multiples of {step}; what is quantized is trained from the original checkpoint"
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
    made: dict[nn.Module, nn.Module] = {}
    for name, old in chosen.items():
        if old not in made:
            made[old] = make(old)
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


def _linears(modules: dict[str, nn.Module], skip: tuple[str, ...], step: int) -> str:
    """How many linears there are and why each is none that can be replaced."""
    found: Counter[str] = Counter()
    for name, module in modules.items():
        kind = type(module)
        if kind is nn.Linear and any(_names(pattern, name) for pattern in skip):
            found["nn.Linear that skip names"] += 1
        elif kind is nn.Linear:
            found[f"nn.Linear of no multiples of {step}"] += 1
        elif "Linear" in kind.__name__:
            found[kind.__name__] += 1
    return ", ".join(f"{count} {what}" for what, count in found.items()) or "no linear in it"
