"""What other engines read: the `quantization_config` of a conversion, and what each engine can do with the result.

An online rotation that an engine would skip gives wrong results without any sign of it. So where a file has one, the
config carries a guard that makes every loader which does not know the rotation stop with an error.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

from quantrot import formats
from quantrot.formats import LinearFormat
from quantrot.rotation import Rotation

GUARD = "+online-hadamard"  # no such compressed-tensors format exists: transformers raises on it
LARGEST_STORED = 512  # a stored matrix is [B, B] bf16 in every layer: 512 KB at 512, 2 GB over 16 layers at 8192


@dataclass(frozen=True)
class Support:
    """One engine's verdict on a conversion: note says at which precision, or why."""

    engine: str
    runs: Literal["yes", "no"]
    note: str


def is_stored(rotation: Rotation) -> bool:
    """Whether an online rotation is one that compressed-tensors' transforms express: plain, a power of two, small."""
    power_of_two = rotation.block & (rotation.block - 1) == 0
    return rotation.kind == "hadamard" and power_of_two and rotation.block <= LARGEST_STORED


def matrix_name(fqn: str, rotation: Rotation) -> str:
    """The name of the tensor that holds an online rotation's matrix, as compressed-tensors derives it."""
    return f"{fqn}.{rotation.name}_input.weight"


def quantization_config(
    linears: dict[str, LinearFormat | None], online: dict[str, Rotation], attention: Rotation | None
) -> dict[str, Any] | None:
    """The config fragment, or None where nothing is quantized and nothing runs online.

    linears: every linear's format, None for wide; online: rotations of linears' inputs; attention: R3.
    """
    kept = [fqn for fqn, fmt in linears.items() if fmt is None]
    quantized = {fqn: fmt for fqn, fmt in linears.items() if fmt is not None}
    has_online = bool(online) or attention is not None
    if not quantized and not has_online:
        return None
    if is_native(linears, has_online):
        return formats.native_fp8_config(kept)
    guard = GUARD if has_online else ""
    by_format: dict[LinearFormat, list[str]] = defaultdict(list)
    for fqn, fmt in quantized.items():
        by_format[fmt].append(fqn)
    groups = {
        f"group_{i}": formats.compressed_tensors_group(
            fmt, ["Linear"] if len(by_format) == 1 else _patterns(names, list(linears)), guard
        )
        for i, (fmt, names) in enumerate(by_format.items())
    }
    containers = {formats.container(fmt) for fmt in by_format}
    layout = containers.pop() if len(containers) == 1 else "mixed-precision"
    if not quantized:  # only an online rotation: a group without a target, for the guard's sake
        groups = {"group_0": {"targets": [], "format": GUARD, "weights": None, "input_activations": None}}
        layout = GUARD
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": kept,
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": _transforms(online, attention, list(linears)),
        "config_groups": groups,
    }


def is_native(linears: dict[str, LinearFormat | None], has_online: bool) -> bool:
    """Whether the whole checkpoint is DeepSeek-V3's fp8 layout."""
    quantized = [fmt for fmt in linears.values() if fmt is not None]
    return bool(quantized) and not has_online and all(formats.is_native_fp8(fmt) for fmt in quantized)


def _transforms(online: dict[str, Rotation], attention: Rotation | None, all_names: list[str]) -> dict[str, Any]:
    if attention is not None or not all(is_stored(r) for r in online.values()):
        # Not expressible: an unknown key, which the schema of every compressed-tensors reader rejects.
        return {"needs_quantrot": "an online rotation of quantrot.json that only quantrot.load executes"}
    by_rotation: dict[tuple[str, int], list[str]] = defaultdict(list)
    for fqn, rotation in online.items():
        by_rotation[rotation.name, rotation.block].append(fqn)
    return (
        {
            "config_groups": {
                name: formats.transform_group(name, block, _patterns(names, all_names))
                for (name, block), names in by_rotation.items()
            }
        }
        if by_rotation
        else {}
    )


def _patterns(names: list[str], all_names: list[str]) -> list[str]:
    """Short targets for exactly these linears: `re:.*q_proj$` where a kind is meant in every layer, else full names."""
    chosen, targets = set(names), []
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in all_names:
        kinds[name.rpartition(".")[2]].append(name)
    for kind, members in kinds.items():
        inside = [m for m in members if m in chosen]
        targets += [f"re:.*{kind}$"] if len(inside) == len(members) else inside
    return targets


def support(
    linears: dict[str, LinearFormat | None],
    online: dict[str, Rotation],
    attention: Rotation | None,
    narrow_attention: bool = False,
) -> list[Support]:
    """What each engine makes of the files, at which effective precision. narrow_attention: whether the recipe quantizes
    attention or the KV cache, which is not written into weights and which others therefore do in their own way."""
    quantized = [fmt for fmt in linears.values() if fmt is not None]
    kinds = {fmt.weights.kind for fmt in quantized}
    rows = [Support("quantrot", "yes", "every format and rotation; on a CPU with dequantized weights")]
    if attention is not None or not all(is_stored(r) for r in online.values()):
        why = "the online rotation is quantrot's own: the file is refused, on purpose"
        return rows + [Support(name, "no", why) for name in ("vLLM", "transformers", "SGLang")]
    own = "; attention and KV cache in its own precision" if narrow_attention else ""
    if online:
        return rows + [
            Support("vLLM", "yes", f"--tensor-parallel-size 1 only; needs its hadacore kernel{own}"),
            Support("transformers", "no", "would skip the online Hadamard: the file is refused, on purpose"),
            Support("SGLang", "no", "does not know the online Hadamard"),
        ]
    notes = {
        "fp8": "W8A8 on FP8 tensor cores (Ada, Hopper, Blackwell)",
        "mxfp4": "W4A4 on Blackwell, W4A8 on Hopper, W4A16 on Ampere and Ada",
        "int8": "W8A16",
    }
    if any(fmt.weights.kind == "mxfp4" and fmt.activations.kind == "none" for fmt in quantized):
        notes["mxfp4"] = "W4A16; Hopper runs it as W4A8"
    if any(f.activations.kind == "fp8" and f.activations.block not in formats.STORED_ACTIVATIONS for f in quantized):
        own = "; activations in 1x128 blocks, not the recipe's" + own
    precision = "; ".join(notes[k] for k in sorted(kinds)) or "as the original"
    native = is_native(linears, False)
    package = "" if native or not quantized else " (with compressed-tensors)"
    if "mxfp4" in kinds:  # compressed-tensors decompresses it to bfloat16 whatever the model's dtype
        package += ", of a model that is not bfloat16 with from_pretrained(..., dtype=torch.bfloat16)"
    sglang: Literal["yes", "no"] = "yes" if kinds <= {"fp8"} else "no"
    return rows + [
        Support("vLLM", "yes", precision + own),
        Support(
            "transformers",
            "yes",
            f"{'emulated, dequantized weights' if quantized else 'as the original'}{package}{own}",
        ),
        Support(
            "SGLang",
            sglang,
            precision + own if sglang == "yes" else f"{', '.join(sorted(kinds))} in this layout: not known",
        ),
    ]


def serve_command(
    linears: dict[str, LinearFormat | None], online: dict[str, Rotation], attention: Rotation | None
) -> str:
    """The exact command that serves the directory, or how quantrot loads it."""
    if any(row.engine == "vLLM" and row.runs == "yes" for row in support(linears, online, attention)):
        return "vllm serve ." + (" --tensor-parallel-size 1" if online else "")
    return "python -c \"import quantrot; model = quantrot.load('.')\""
