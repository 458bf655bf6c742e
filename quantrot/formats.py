"""Number formats as data: what a linear's weight is on disk, what its input is at run time, how a config says so.

A `LinearFormat` is plain values; the functions below read it. On-disk layouts are those of the engines (transformers,
vLLM, SGLang): DeepSeek-V3's `fp8` for 128 x 128 blocks, compressed-tensors for the rest. A 256 x 256 block is written
as four 128 x 128 blocks that repeat its scale: the same values, and every engine's fast kernels take it.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from quantrot.checkpoint import DTYPES
from quantrot.kernels import halves
from quantrot.kernels.fp8 import dequantize_fp8_block, quantize_fp8_block
from quantrot.kernels.fp8.reference import E4M3
from quantrot.kernels.mixed import dequantize_int8, pack_int8, quantize_int8, unpack_int8
from quantrot.kernels.mxfp4 import GROUP, dequantize_mxfp4, quantize_mxfp4
from quantrot.kernels.mxfp4.reference import pack_e2m1, scale_value
from quantrot.recipe import Fp8Activations, Fp8Weights, Int8Weights, Mxfp4Activations, Rule

STORED_BLOCK = 128  # engines' kernels know fp8 weight blocks of 128 x 128 only


@dataclass(frozen=True)
class WeightFormat:
    """kind, the scaled block [out_features, in_features] (0: the whole dimension), the scale rule's name, and how the
    weights are rounded to it."""

    kind: Literal["fp8", "mxfp4", "int8"]
    block: tuple[int, int]
    scale_rule: str
    rounding: str = "nearest"


@dataclass(frozen=True)
class ActivationFormat:
    """kind, the scaled block [tokens, in_features] (0: the whole dimension), and the scale rule's name."""

    kind: Literal["none", "fp8", "mxfp4"]
    block: tuple[int, int]
    scale_rule: str


@dataclass(frozen=True)
class LinearFormat:
    """A linear's weight and input formats, and the width of the block Hadamard on its input (0: none)."""

    weights: WeightFormat
    activations: ActivationFormat
    hadamard: int = 0


WIDE = ActivationFormat("none", (0, 0), "")


def from_rule(rule: Rule) -> LinearFormat:
    """The format that a recipe's rule asks for, whatever the shape."""
    weights, activations = rule.weights, rule.activations
    if isinstance(weights, Fp8Weights):
        block = (1, 0) if weights.block == "channel" else weights.block
        weight_format = WeightFormat("fp8", block, weights.scale_rule.value, weights.rounding)
    elif isinstance(weights, Int8Weights):
        block = (1, 0 if weights.group == "channel" else weights.group)
        weight_format = WeightFormat("int8", block, "bf16", weights.rounding)
    else:
        weight_format = WeightFormat("mxfp4", (1, GROUP), weights.scale_rule.value, weights.rounding)
    activation_format = WIDE
    if isinstance(activations, Fp8Activations):
        block = (1, 0) if activations.block == "token" else activations.block
        activation_format = ActivationFormat("fp8", block, activations.scale_rule.value)
    elif isinstance(activations, Mxfp4Activations):
        activation_format = ActivationFormat("mxfp4", (1, GROUP), activations.scale_rule.value)
    return LinearFormat(weight_format, activation_format, 0 if rule.hadamard == "none" else rule.hadamard)


def on_disk(fmt: LinearFormat) -> LinearFormat:
    """What files say of it: all but how numbers are rounded and scaled to it."""
    weights = replace(fmt.weights, scale_rule="", rounding="nearest")
    return LinearFormat(weights, replace(fmt.activations, scale_rule=""), fmt.hadamard)


def fits(weights: WeightFormat, out_features: int, in_features: int) -> bool:
    """Whether the block divides the shape. (Engines mis-handle ragged blocks, some of them silently.)"""
    rows, columns = weights.block
    return out_features % (rows or out_features) == 0 and in_features % (columns or in_features) == 0


def fallback(wanted: LinearFormat, rule: Rule, in_features: int) -> LinearFormat | None:
    """What a linear gets when its shape does not fit: one scale a channel (and a token), or None, its own dtype. MXFP4
    weights in whole groups are what they are, and only their inputs get one scale a token."""
    weights, activations = wanted.weights, wanted.activations
    kept = in_features % GROUP != 0 if weights.kind == "mxfp4" else rule.weights.fallback == "keep"
    if kept or in_features % max(wanted.hadamard, 1):
        return None
    if weights.kind != "mxfp4":
        weights = replace(weights, block=(1, 0))
    if activations.kind == "fp8":
        activations = ActivationFormat("fp8", (1, 0), activations.scale_rule)
    return LinearFormat(weights, activations, wanted.hadamard)


# --- Tensors ---------------------------------------------------------------------------------------------------------


def stored_tensors(
    weights: WeightFormat, out_features: int, in_features: int, native_fp8: bool
) -> list[tuple[str, str, tuple[int, ...]]]:
    """(suffix, safetensors dtype, shape) of what a weight becomes, in the order that `quantize_rows` returns them."""
    n, k = out_features, in_features
    if weights.kind == "mxfp4":
        return [("weight_packed", "U8", (n, k // 2)), ("weight_scale", "U8", (n, k // GROUP))]
    if weights.kind == "int8":
        groups = k // _group(weights, k)
        return [("weight_packed", "I32", (n, -(-k // 4))), ("weight_scale", "BF16", (n, groups))]
    scale = (n, 1) if weights.block == (1, 0) else (n // STORED_BLOCK, k // STORED_BLOCK)
    return [("weight", "F8_E4M3", (n, k)), ("weight_scale_inv" if native_fp8 else "weight_scale", "F32", scale)]


def quantize_rows(weights: WeightFormat, w: Tensor) -> list[Tensor]:
    """Quantize rows of a weight, float32 [m, K] with m a multiple of the block's rows, to the tensors on disk."""
    if weights.kind == "mxfp4":
        return list(quantize_mxfp4(w, weights.scale_rule))
    if weights.kind == "int8":
        qdata, scale = quantize_int8(w, weights.block[1] or w.shape[1])
        return [pack_int8(qdata), scale]
    qdata, scale = quantize_fp8_block(w, weights.block, weights.scale_rule)
    if weights.block != (1, 0):
        for dim, size in enumerate(weights.block):
            scale = scale.repeat_interleave(size // STORED_BLOCK, dim)
    return [qdata, scale]


def steps(weights: WeightFormat, scale: Tensor, shape: torch.Size) -> Tensor:
    """What 1 of a code is worth in every element of a weight of this shape, float32 [N, K], of its stored scale."""
    if weights.kind == "mxfp4":
        scale = scale_value(scale)
    rows, columns = (shape[i] // scale.shape[i] for i in (0, 1))
    return scale.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def store(weights: WeightFormat, values: Tensor, scale: Tensor) -> list[Tensor]:
    """The tensors on disk of rounded weights in steps, [m, K], and of the stored scale."""
    if weights.kind == "mxfp4":
        return [pack_e2m1(values), scale]
    return [pack_int8(values.to(torch.int8)) if weights.kind == "int8" else values.to(E4M3), scale]


def dequantize(weights: WeightFormat, stored: list[Tensor], in_features: int, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] in `dtype` from its tensors on disk."""
    # Detached, for pieces are of ordinary tensors alone (eager_inference): parameters would be dequantized at once.
    data, scale = (tensor if tensor.requires_grad else tensor.detach() for tensor in stored)
    if weights.kind == "mxfp4":
        return dequantize_mxfp4(data, scale, dtype)
    if weights.kind == "int8":
        return dequantize_int8(unpack_int8(data, in_features), scale, dtype)
    return dequantize_fp8_block(data, scale, stored_block(weights), dtype)


def has_halves(weights: WeightFormat, out_features: int, in_features: int) -> bool:
    """Whether `halves` of such a weight multiply few tokens fast on this machine's CPU."""
    return weights.kind != "fp8" and halves.has_halves(out_features, in_features, _group(weights, in_features))


def halves_bytes(weights: WeightFormat, out_features: int, in_features: int) -> int:
    """What they take."""
    return halves.halves_bytes(out_features, in_features, _group(weights, in_features))


def halve(weights: WeightFormat, stored: list[Tensor], in_features: int) -> tuple[Tensor, Tensor] | None:
    """What `kernels.halves` multiplies by, of a weight's tensors on disk, or None."""
    data, scale = stored
    if weights.kind == "mxfp4":  # whose values are multiples of a half
        doubled = dequantize_mxfp4(data, torch.full_like(scale, 128), torch.bfloat16)
        return halves.halve(doubled.to(torch.int8), scale_value(scale) / 2)
    return halves.halve(unpack_int8(data, in_features), scale.float())


def _group(weights: WeightFormat, in_features: int) -> int:
    """How many columns share a scale, of weights that are no fp8."""
    return GROUP if weights.kind == "mxfp4" else weights.block[1] or in_features


def stored_block(weights: WeightFormat) -> tuple[int, int]:
    """The fp8 block that a stored scale belongs to."""
    return weights.block if weights.block == (1, 0) else (STORED_BLOCK, STORED_BLOCK)


def bits_per_weight(weights: WeightFormat, out_features: int, in_features: int) -> float:
    """Bits that a weight and its share of the scales take on disk."""
    tensors = stored_tensors(weights, out_features, in_features, native_fp8=False)
    stored = sum(math.prod(shape) * DTYPES[dtype].itemsize for _, dtype, shape in tensors)
    return 8 * stored / (out_features * in_features)


def label(fmt: LinearFormat) -> str:
    """A short name for tables: `MXFP4 x MXFP4 h32`, `FP8 128x128 x FP8 1x128`, `INT8 g128`."""
    weights, activations = fmt.weights, fmt.activations
    if weights.kind == "fp8":
        name = "FP8 " + ("channel" if weights.block == (1, 0) else "x".join(map(str, weights.block)))
    elif weights.kind == "int8":
        name = "INT8 " + (f"g{weights.block[1]}" if weights.block[1] else "channel")
    else:
        name = "MXFP4"
    name += " gptq" if weights.rounding == "gptq" else ""
    if activations.kind == "mxfp4":
        name += " x MXFP4"
    elif activations.kind == "fp8":
        name += " x FP8 " + ("token" if activations.block == (1, 0) else "x".join(map(str, activations.block)))
    return name + (f" h{fmt.hadamard}" if fmt.hadamard else "")


# --- Config fragments ------------------------------------------------------------------------------------------------


def is_native_fp8(fmt: LinearFormat) -> bool:
    """Whether DeepSeek-V3's `quant_method: fp8` describes it: square blocks, block-scaled activations, no transform."""
    square = fmt.weights.kind == "fp8" and fmt.weights.block != (1, 0)
    return square and fmt.activations.kind == "fp8" and fmt.activations.block != (1, 0) and not fmt.hadamard


def native_fp8_config(kept: list[str]) -> dict[str, Any]:
    """quantization_config of an all-native-fp8 checkpoint; `kept` are the linears that stay wide."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [STORED_BLOCK, STORED_BLOCK],
        "modules_to_not_convert": kept,
    }


def container(fmt: LinearFormat) -> str:
    """compressed-tensors' name for the layout."""
    return {"fp8": "float-quantized", "mxfp4": "mxfp4-pack-quantized", "int8": "pack-quantized"}[fmt.weights.kind]


def compressed_tensors_group(fmt: LinearFormat, targets: list[str], guard: str) -> dict[str, Any]:
    """One entry of config_groups. `guard` is appended to the group's format so that loaders without the online
    transform stop instead of dropping it."""
    return {
        "targets": targets,
        "format": container(fmt) + guard,
        "weights": _weight_args(fmt.weights),
        "input_activations": _activation_args(fmt.activations),
        "output_activations": None,
    }


def _weight_args(weights: WeightFormat) -> dict[str, Any]:
    if weights.kind == "mxfp4":
        return _mxfp4_args(dynamic=False)
    args: dict[str, Any] = {"num_bits": 8, "type": "int" if weights.kind == "int8" else "float"}
    if weights.block == (1, 0):
        args |= {"strategy": "channel"}
    elif weights.kind == "int8":
        args |= {"strategy": "group", "group_size": weights.block[1]}
    else:
        args |= {"strategy": "block", "block_structure": [STORED_BLOCK, STORED_BLOCK]}
    return args | {"symmetric": True, "dynamic": False}


def _activation_args(activations: ActivationFormat) -> dict[str, Any] | None:
    if activations.kind == "none":
        return None
    if activations.kind == "mxfp4":
        return _mxfp4_args(dynamic=True)
    scaled = {"strategy": "token"} if activations.block == (1, 0) else {"strategy": "group", "group_size": STORED_BLOCK}
    return {"num_bits": 8, "type": "float", **scaled, "symmetric": True, "dynamic": True}


def _mxfp4_args(dynamic: bool) -> dict[str, Any]:
    return {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": GROUP,
        "symmetric": True,
        "dynamic": dynamic,
        "scale_dtype": "torch.uint8",
    }


def transform_group(name: str, block: int, targets: list[str]) -> dict[str, Any]:
    """A compressed-tensors transform: an online Hadamard of width `block` on the input of the targets."""
    apply = [
        {"targets": targets, "location": "input", "inverse": False, "ignore": []},
        {"targets": targets, "location": "weight_input", "inverse": True, "ignore": []},
    ]
    return {
        "type": "hadamard",
        "head_dim": block,
        "randomize": False,
        "requires_grad": False,
        "precision": "torch.bfloat16",
        "apply": apply,
    }
