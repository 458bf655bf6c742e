"""What a Llama checkpoint is: its tensors, and which rotation turns which side of each. The only file that knows names.

The residual stream h is turned to h R1 by the embedding, by every o_proj and down_proj (output side), and turned back
by every linear that reads it (input side). A norm's gain must first be folded into the linears that read the norm,
because RMSNorm commutes with a rotation only without it. R2 turns each value head, and o_proj turns it back. R4 turns
down_proj's input and needs an online half; R3 touches no weight at all. QuaRot, arXiv:2404.00456.

Mistral and Qwen2 differ in which linears have a bias, Qwen3 in a norm of each query and key head, which no rotation
passes: R1 ends in front of it, R3 begins behind it.
"""

from dataclasses import dataclass
from typing import Any

import torch

from quantrot.checkpoint import DTYPES, FLOATS, Checkpoint, same_bytes

SUPPORTED = {
    "llama": "LlamaForCausalLM (Llama 1 to 3.3, SmolLM2, TinyLlama, and what shares their tensors)",
    "mistral": "MistralForCausalLM (Mistral 7B and its kind)",
    "qwen2": "Qwen2ForCausalLM (Qwen2 and Qwen2.5, dense)",
    "qwen3": "Qwen3ForCausalLM (Qwen3, dense)",
}
DEFAULTS = {  # of what a config.json may leave out, where transformers' are not Llama's
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}
MAX_LAYERS, MAX_SIZE = 10_000, 1 << 24  # past every model's
QUANTIZED = (".qweight", ".qzeros", ".weight_packed", ".weight_scale")  # what GPTQ, AWQ and others make of weights
EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens", "lm_head", "model.norm"


@dataclass(frozen=True)
class Llama:
    """The sizes that name every tensor of a checkpoint."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    slides: bool  # whether attention has a window
    max_positions: int


@dataclass(frozen=True)
class Linear:
    """One matrix [out_features, in_features] and its place among norms and rotations.

    norm: the norm whose gain folds into its columns. input_side / output_side: the rotation ("R1", "R2", "R4") that
    turns the side, or "". bias: whether `fqn.bias` exists. group: linears that an engine fuses share one.
    """

    fqn: str
    out_features: int
    in_features: int
    norm: str
    input_side: str
    output_side: str
    bias: bool
    group: str


def from_config(config: dict[str, Any]) -> Llama:
    """Read a Hugging Face config.json. ValueError names what is missing, malformed or not supported."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in SUPPORTED:
        known = "; ".join(f"{k}: {v}" for k, v in SUPPORTED.items())
        raise ValueError(f"config.json: model_type {kind!r} is not supported. Supported: {known}")
    if config.get("quantization_config") or config.get("compression_config"):
        raise ValueError("config.json: the checkpoint is already quantized (quantization_config); convert its original")
    _check_dtype(config)
    _check_epsilon(config)
    _check_rope(config)
    if kind.startswith("qwen"):
        _check_windows(config)
        if config.get("head_dim", 1) is None:
            raise ValueError("config.json: head_dim is null, which transformers cannot read; drop it, or give a number")
    if kind == "mistral":
        _check_layers(config)
    config = DEFAULTS.get(kind, {}) | config
    heads, hidden = _count(config, "num_attention_heads"), _count(config, "hidden_size")
    if not config.get("head_dim") and hidden % heads:
        raise ValueError(
            f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}; set head_dim"
        )
    head_dim = _count(config, "head_dim") if config.get("head_dim") else hidden // heads
    kv_heads = _count(config, "num_key_value_heads") if config.get("num_key_value_heads") else heads
    if heads % kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    bias = kind in ("llama", "qwen3") and _flag(config, "attention_bias")  # the others ignore it
    return Llama(
        model_type=kind,
        hidden_size=hidden,
        intermediate_size=_count(config, "intermediate_size"),
        layers=_count(config, "num_hidden_layers", MAX_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_count(config, "vocab_size"),
        tied=_flag(config, "tie_word_embeddings"),
        qkv_bias=bias or kind == "qwen2",
        o_bias=bias,
        mlp_bias=kind == "llama" and _flag(config, "mlp_bias"),
        qk_norm=kind == "qwen3",
        slides=kind == "mistral" and config.get("sliding_window", 4096) is not None,
        max_positions=_count(config, "max_position_embeddings") if "max_position_embeddings" in config else 2048,
    )


def _check_dtype(config: dict[str, Any]) -> None:
    """Any of torch's names for a dtype that weights may have, or "auto"."""
    known = [DTYPES[name] for name in FLOATS]
    for key in ("dtype", "torch_dtype"):
        value = config.get(key)
        if value in (None, "auto") or (isinstance(value, str) and getattr(torch, value, None) in known):
            continue
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in known)
        raise ValueError(f"config.json: {key} is {value!r:.80}; allowed: auto, {names}; give the weights' own")


def _check_epsilon(config: dict[str, Any]) -> None:
    value = config.get("rms_norm_eps", 1e-6)
    if not isinstance(value, float) or not 0 < value < float("inf"):  # transformers takes no integer
        raise ValueError(f"config.json: rms_norm_eps is {value!r:.80}; a small positive number is needed, as 1e-05")


def _check_rope(config: dict[str, Any]) -> None:
    """The kind of RoPE is one that transformers computes; of both keys it reads the older one."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(key) or {}
    if not isinstance(rope, dict):
        raise ValueError(f"config.json: {key} is {rope!r:.80}; an object or null is needed")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # half a second

    if not isinstance(kind, str) or kind not in ROPE_INIT_FUNCTIONS:
        known = ", ".join(["default", *ROPE_INIT_FUNCTIONS])
        raise ValueError(f"config.json: rope_type of {key} is {kind!r:.80}; allowed: {known}; give the model's own")
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    beside = "max_position_embeddings", "hidden_size", "num_attention_heads", "head_dim"  # where they are numbers
    given = {name: config[name] for name in beside if isinstance(config.get(name), int)}
    given |= {name: config[name] for name in (key, "model_type", "rope_theta") if name in config}
    try:
        AutoConfig.for_model(**given)
    except (ArithmeticError, LookupError, TypeError, ValueError, StrictDataclassError) as error:
        raise ValueError(f"config.json: {key}: {error.args[0]!s:.300}; give the model's own") from None


def _check_windows(config: dict[str, Any]) -> None:
    """Every layer of a Qwen attends to all tokens, by transformers' defaults for what is not said."""
    types = config.get("layer_types")
    if types is None:
        layers, first = _count(config, "num_hidden_layers", MAX_LAYERS), config.get("max_window_layers", 28)
        all_full = config.get("sliding_window", 4096) is None or (isinstance(first, int) and first >= layers)
        slides = _flag(config, "use_sliding_window") and not all_full
    else:
        slides = not isinstance(types, list) or any(kind != "full_attention" for kind in types)
    if slides:
        raise ValueError(
            "config.json: use_sliding_window and layer_types say that some layers attend to a window, which is not "
            "supported; for texts within the window, set use_sliding_window to false and drop layer_types"
        )


def _check_layers(config: dict[str, Any]) -> None:
    """Every layer of a Mistral attends alike: of one that says otherwise transformers makes a Ministral."""
    types, window = config.get("layer_types"), config.get("sliding_window", 4096)
    alike = "full_attention" if window is None else "sliding_attention"
    if types is not None and (not isinstance(types, list) or any(kind != alike for kind in types)):
        raise ValueError(
            f"config.json: sliding_window is {window!r:.40} and layer_types are not all {alike!r} (Ministral), which "
            "is not supported; where all layers attend to all tokens, set sliding_window to null; for texts within the "
            "window, drop layer_types"
        )


def _flag(config: dict[str, Any], key: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {key} is {value!r:.80}; true or false is needed")
    return value


def _count(config: dict[str, Any], key: str, most: int = MAX_SIZE) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {key} is {value!r:.80}; a positive integer is needed")
    if value > most:
        raise ValueError(f"config.json: {key} is {value}; at most {most} is supported")
    return value


def linears(model: Llama) -> list[Linear]:
    """Every linear in the order of the network, lm_head last (present whether or not it is tied)."""
    h, inner, b, m = model.hidden_size, model.intermediate_size, model.qkv_bias, model.mlp_bias
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    found = []
    for i in range(model.layers):
        layer = f"model.layers.{i}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        norm1, norm2 = f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"
        found += [
            Linear(f"{attention}.q_proj", q, h, norm1, "R1", "", b, f"{attention}.qkv"),
            Linear(f"{attention}.k_proj", kv, h, norm1, "R1", "", b, f"{attention}.qkv"),
            Linear(f"{attention}.v_proj", kv, h, norm1, "R1", "R2", b, f"{attention}.qkv"),
            Linear(f"{attention}.o_proj", h, q, "", "R2", "R1", model.o_bias, f"{attention}.o_proj"),
            Linear(f"{mlp}.gate_proj", inner, h, norm2, "R1", "", m, f"{mlp}.gate_up"),
            Linear(f"{mlp}.up_proj", inner, h, norm2, "R1", "", m, f"{mlp}.gate_up"),
            Linear(f"{mlp}.down_proj", h, inner, "", "R4", "R1", m, f"{mlp}.down_proj"),
        ]
    found.append(Linear(HEAD, model.vocab_size, h, FINAL_NORM, "R1", "", False, HEAD))
    return found


def norms(model: Llama) -> list[str]:
    """The name of every RMSNorm of the residual stream, in the order of the network."""
    kinds = "input_layernorm", "post_attention_layernorm"
    return [f"model.layers.{i}.{kind}" for i in range(model.layers) for kind in kinds] + [FINAL_NORM]


def head_norms(model: Llama) -> list[str]:
    """The names of the norms of query and key heads, whose gains stay as they are."""
    if not model.qk_norm:
        return []
    return [f"model.layers.{i}.self_attn.{kind}" for i in range(model.layers) for kind in ("q_norm", "k_norm")]


def tensors(model: Llama) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that the checkpoint must hold. A tied head is absent."""
    shapes: dict[str, tuple[int, ...]] = {f"{EMBEDDING}.weight": (model.vocab_size, model.hidden_size)}
    for linear in linears(model):
        if linear.fqn == HEAD and model.tied:
            continue
        shapes[f"{linear.fqn}.weight"] = (linear.out_features, linear.in_features)
        if linear.bias:
            shapes[f"{linear.fqn}.bias"] = (linear.out_features,)
    shapes |= {f"{norm}.weight": (model.head_dim,) for norm in head_norms(model)}
    return shapes | {f"{norm}.weight": (model.hidden_size,) for norm in norms(model)}


def may_be_dropped(name: str) -> bool:
    """Whether a tensor may be dropped without loss: what old checkpoints store of the rotary embedding."""
    return name.endswith("rotary_emb.inv_freq")


def width(model: Llama, rotation: str) -> int:
    """The width that a rotation turns: R1 the residual stream, R2 and R3 a head, R4 the MLP's inside."""
    return {"R1": model.hidden_size, "R2": model.head_dim, "R3": model.head_dim, "R4": model.intermediate_size}[
        rotation
    ]


def mistakes(checkpoint: Checkpoint, model: Llama) -> list[str]:
    """Where a checkpoint holds other than the model's tensors, of the shapes that config.json implies and in floats."""
    wanted, found, errors = tensors(model), checkpoint.tensors, []
    missing = [name for name in wanted if name not in found]
    if missing:
        errors.append(f"{checkpoint.root}: {_several(missing)} missing: {_shown(missing)}")
        if missing == [f"{HEAD}.weight"]:
            errors[-1] += "; set tie_word_embeddings to true in config.json if the embedding is meant"
        prefix = next((name.removesuffix(missing[0]) for name in found if name.endswith(missing[0])), "")
        if missing == list(wanted) and all(prefix + name in found for name in missing):
            errors[-1] += (
                f"; they are there with {prefix!r} before each, a wrapper's: save the model inside it, such as "
                "wrapper.module or, of torch.compile, wrapper._orig_mod, with save_pretrained"
            )
            return errors  # else each name would be an error of its own
    foreign = []
    for name, info in found.items():
        if name == f"{HEAD}.weight" and model.tied:  # one that was trained apart must not be lost
            if not same_bytes(info, found.get(f"{EMBEDDING}.weight", info)):
                errors.append(
                    f"{info.file.name}: {name} is not the embedding, though config.json says tie_word_embeddings; "
                    "set that to false, or drop the tensor if the embedding is meant"
                )
        elif name not in wanted:
            if not may_be_dropped(name):
                foreign.append(name)
        elif info.shape != wanted[name]:
            errors.append(f"{info.file.name}: {name} has shape {info.shape}; config.json implies {wanted[name]}")
        elif info.dtype not in FLOATS:
            errors.append(f"{info.file.name}: {name} has dtype {info.dtype}; allowed: {', '.join(FLOATS)}")
    if foreign:
        files = _shown(sorted({found[name].file.name for name in foreign}))
        errors.append(f"{files}: {_several(foreign)} not part of a {model.model_type} model: {_shown(foreign)}")
        if any(name.endswith(QUANTIZED) for name in foreign):
            errors[-1] += "; the model is quantized already: convert the one that it was made from"
    return errors


def _several(names: list[str]) -> str:
    return "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"


def _shown(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
