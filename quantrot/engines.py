"""What other engines read: the `quantization_config` of a conversion, and what each engine can do with the result.

An online rotation that an engine would skip gives wrong results without any sign of it. So where a file has one, the
config carries a guard that makes every loader which does not know the rotation stop with an error.
"""

import shlex
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

from quantrot import formats
from quantrot.formats import LinearFormat
from quantrot.llama import HEAD
from quantrot.rotation import Rotation

GUARD = "+online-hadamard"  # no such compressed-tensors format exists: transformers raises on it
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}  # linears that engines make one of
FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
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
            fmt, _everything(names) if len(by_format) == 1 else _patterns(names, list(linears)), guard
        )
        for i, (fmt, names) in enumerate(by_format.items())
    }
    containers = {formats.container(fmt) for fmt in by_format}
    layout = containers.pop() if len(containers) == 1 else "mixed-precision"
    if not quantized:  # only an online rotation: a group without weights, which no loader knows what to do with
        groups = {"group_0": {"targets": ["Linear"], "format": GUARD, "weights": None, "input_activations": None}}
        layout = GUARD
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": [*kept, *_fused_names(kept, list(linears))],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": _transforms(online, attention, list(linears)),
        "config_groups": groups,
    }


def _everything(names: list[str]) -> list[str]:
    """The target of a config whose linears are of one format or ignored; engines do not count the head among them."""
    return ["Linear", f"re:.*{HEAD}$"] if HEAD in names else ["Linear"]


def _fused(fqn: str) -> str:
    """The name of the linear that an engine makes of this one and its neighbours."""
    parent, _, kind = fqn.rpartition(".")
    return f"{parent}.{FUSED[kind]}" if kind in FUSED else fqn


def _fused_names(kept: list[str], all_names: list[str]) -> list[str]:
    """What engines call linears of which no part is quantized: SGLang looks these names up, not their parts'."""
    parts: dict[str, list[str]] = defaultdict(list)
    for name in all_names:
        if _fused(name) != name:
            parts[_fused(name)].append(name)
    return [name for name, members in parts.items() if set(members) <= set(kept)]


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
    biased: Collection[str] = (),
    narrow_attention: bool = False,
) -> list[Support]:
    """What each engine makes of the files, at which effective precision.

    biased: linears with a bias; narrow_attention: whether the recipe quantizes attention or the KV cache, which is not
    written into weights and which others therefore do in their own way. Source: the schemes that vLLM 0.33's and SGLang
    0.5.23's own code chooses for such configs.
    """
    quantized = {fqn: fmt for fqn, fmt in linears.items() if fmt is not None}
    without = [name for name, found in NO_KERNELS.items() if any(map(found, quantized.values()))]
    where = "on a CPU" + f", and {' and '.join(without)} on a GPU," * bool(without)
    rows = [Support("quantrot", "yes", f"every format and rotation; {where} with dequantized weights")]
    if attention is not None or not all(is_stored(r) for r in online.values()):
        why = "the online rotation is quantrot's own: the file is refused, on purpose"
        return rows + [Support(name, "no", why) for name in ("vLLM", "transformers", "SGLang")]
    own = "; attention and KV cache in its own precision" if narrow_attention else ""
    precision = "; ".join(sorted({_precision(fmt) for fmt in quantized.values()})) or "as the original"
    kinds = {fmt.weights.kind for fmt in quantized.values()}
    again = ""
    if any(map(_rounded_again, quantized.values())):
        again = "; Hopper and Blackwell round weights again (scales to powers of two) without VLLM_USE_DEEP_GEMM_E8M0=0"
    refusals = {
        "vLLM": _not_in_vllm(linears, online, biased),
        "transformers": "would skip the online Hadamard: the file is refused, on purpose" if online else "",
        "SGLang": _not_in_sglang(linears, online),
    }
    notes = {
        "vLLM": f"--tensor-parallel-size 1 only; needs its hadacore kernel{own}" if online else precision + again + own,
        "transformers": _in_transformers(linears, bool(online)) + _package(linears) + own,
        "SGLang": precision + ("; INT8 in shapes that are multiples of 64 x 128" if "int8" in kinds else "") + own,
    }
    return rows + [Support(name, "no" if why else "yes", why or notes[name]) for name, why in refusals.items()]


def _in_transformers(linears: dict[str, LinearFormat | None], has_online: bool) -> str:
    if is_native(linears, has_online):  # FineGrainedFP8HfQuantizer
        return "FP8 kernels on GPUs of capability 8.9 and later; elsewhere dequantized weights, wide activations"
    return "emulated, dequantized weights" if any(linears.values()) else "as the original"


def _precision(fmt: LinearFormat) -> str:
    """What vLLM and SGLang multiply in."""
    kind, block = fmt.activations.kind, fmt.activations.block
    if fmt.weights.kind == "int8":
        return "W8A16"
    if fmt.weights.kind == "mxfp4" and kind == "mxfp4":
        return "W4A4 on Blackwell, W4A16 elsewhere"
    if fmt.weights.kind == "mxfp4" and kind != "fp8":
        return "W4A16, on Blackwell with --linear-backend marlin (W4A4 without it)"
    if kind == "none":
        return "W8A16"
    by_token = (block if fmt.weights.kind == "mxfp4" else fmt.weights.block) == (1, 0)
    theirs = (1, 0) if by_token else (1, formats.STORED_BLOCK)
    other = ", activations " + ("a token" if by_token else "in 1x128 blocks") + ", not the recipe's blocks"
    precision = "W4A8" if fmt.weights.kind == "mxfp4" else "W8A8 on FP8 tensor cores (Ada, Hopper, Blackwell)"
    return precision + ("" if block == theirs else other)


# What quantrot multiplies dequantized on every device: of e4m3 its MXFP4 kernels take tokens.
NO_KERNELS: dict[str, Callable[[LinearFormat], bool]] = {
    "MXFP4 by FP8 activations in blocks": lambda fmt: (
        fmt.weights.kind == "mxfp4" and fmt.activations.kind == "fp8" and fmt.activations.block != (1, 0)
    ),
    "FP8 by wide activations": lambda fmt: fmt.weights.kind == "fp8" and fmt.activations.kind == "none",
}


def _rounded_again(fmt: LinearFormat) -> bool:
    """Whether vLLM's DeepGEMM wants other scales for this weight, and rounds it anew (3 dB of SQNR)."""
    blocks = fmt.weights.kind == "fp8" and fmt.weights.block != (1, 0) and fmt.activations.kind == "fp8"
    return blocks and fmt.weights.scale_rule != "pow2"


def _not_in_vllm(linears: dict[str, LinearFormat | None], online: dict[str, Rotation], biased: Collection[str]) -> str:
    """Why vLLM does not run it, or nothing."""
    kinds = {fmt.weights.kind for fmt in linears.values() if fmt is not None}
    if online and kinds != {"mxfp4"}:
        return "runs an online Hadamard in front of MXFP4 alone: the file is refused, on purpose"
    if online and not set(online).isdisjoint(biased):
        return "its online Hadamard takes no linear with a bias"
    if is_native(linears, bool(online)) and linears.get(HEAD) is not None:
        return f"knows no FP8 blocks in {HEAD}"
    return _mixed(linears)


def _not_in_sglang(linears: dict[str, LinearFormat | None], online: dict[str, Rotation]) -> str:
    """Why SGLang does not run it, or nothing."""
    quantized = {fqn: fmt for fqn, fmt in linears.items() if fmt is not None}
    if online:
        return "does not know the online Hadamard: the file is refused, on purpose"
    if any(fmt.weights.kind == "mxfp4" for fmt in quantized.values()):
        return "does not know MXFP4 in this layout"
    blocks = {fqn: fmt for fqn, fmt in quantized.items() if fmt.weights.kind == "fp8" and fmt.weights.block != (1, 0)}
    if any(fmt.activations.kind == "none" for fmt in blocks.values()):
        return "takes FP8 blocks with FP8 activations alone"
    if HEAD in blocks:
        return f"knows no FP8 blocks in {HEAD}"
    config = quantization_config(linears, online, None) or {}
    targets = [name for group in config.get("config_groups", {}).values() for name in group["targets"]]
    if any(name in linears for name in targets):
        return "takes no formats that differ from layer to layer"
    return _mixed(linears)


def _mixed(linears: dict[str, LinearFormat | None]) -> str:
    """Why engines that make one linear of several do not run it, or nothing."""
    groups: dict[str, set[LinearFormat | None]] = defaultdict(set)
    for fqn, fmt in linears.items():
        groups[_fused(fqn)].add(fmt and formats.on_disk(fmt))
    several = next((name for name, found in groups.items() if len(found) > 1), None)
    return f"makes one linear of {several}, whose parts have several formats" if several else ""


def _package(linears: dict[str, LinearFormat | None]) -> str:
    """What transformers needs for it."""
    kinds = {fmt.weights.kind for fmt in linears.values() if fmt is not None}
    if not kinds or is_native(linears, False):
        return ""
    package = " (with compressed-tensors)"
    if "mxfp4" in kinds:  # which it decompresses to bfloat16 whatever the model's dtype
        package += ", of a model that is not bfloat16 with from_pretrained(..., dtype=torch.bfloat16)"
    return package


def serve_command(
    support: list[Support], linears: dict[str, LinearFormat | None], online: dict[str, Rotation], directory: str = "."
) -> str:
    """The exact command that serves the directory, or how quantrot loads it."""
    if any(row.engine == "vLLM" and row.runs == "yes" for row in support):
        again = any(fmt is not None and _rounded_again(fmt) for fmt in linears.values())
        serve = f"vllm serve {shlex.quote(directory)}"
        return ("VLLM_USE_DEEP_GEMM_E8M0=0 " * again) + serve + (" --tensor-parallel-size 1" * bool(online))
    return f"python -c {shlex.quote(f'import quantrot; model = quantrot.load({directory!r})')}"
