"""A converted directory -> a transformers model made of quantrot's modules.

The architecture is built without memory, linears are swapped as the manifest says, and weights stream in through
accelerate, so `device_map`, several GPUs and offloading work as they do in transformers. A directory is refused when a
file's hash, an online rotation's checksum or the set of tensors is not what the manifest says.
"""

import difflib
import gc
import importlib.util
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary, ref

import psutil
import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.utils import get_balanced_memory, load_checkpoint_in_model
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from quantrot import engines, formats
from quantrot.checkpoint import DTYPES, INDEX, SINGLE, open_checkpoint, read_json, resolved
from quantrot.device import known_device
from quantrot.llama import EMBEDDING, HEAD
from quantrot.manifest import MANIFEST, Manifest, check_files, read_manifest, weights_of
from quantrot.meta import parameters_on_meta
from quantrot.modules import (
    LINEARS,
    OnlineHadamard,
    QuantizedAttention,
    QuantizedLinear,
    QuantizedMLP,
    RotatedLinear,
    fuse_layer,
)
from quantrot.modules.sdpa import leave_masks_out
from quantrot.process import counted
from quantrot.source import open_source
from quantrot.tokenizer import open_tokenizer

NOT_DESCRIBED = ("quantization_config", "attn_implementation", "_attn_implementation")  # what this loader decides
_OFFLOADED: WeakValueDictionary[Path, nn.Module] = WeakValueDictionary()  # models by the folder with tensors of them
ADAPTER = "adapter_config.json"  # of peft
KEEP_FRACTION = 0.5  # of the free memory that what is made of weights may take


@torch.inference_mode(False)  # whose tensors could not be cast outside of it
def load(
    path: str | Path,
    *,
    device_map: str | int | torch.device | dict[str, Any] | None = "auto",
    dtype: str | torch.dtype = "auto",
    check_hashes: bool = True,
    offload_folder: str | Path | None = None,
    merge: bool = True,
) -> Any:
    """Load what `quantrot.convert` wrote as a causal language model of transformers, in eval mode.

    path: a directory, or a hub id (owner/name@revision). device_map: "auto", a device such as "cpu", "cuda:1" or 1,
    accelerate's dict, or None for the CPU. dtype: of what is not quantized ("auto": config.json's, else the
    embedding's; float32 for float64 where activations, attention or the cache are narrow). check_hashes=False skips
    reading all files once more. offload_folder: where modules that the map sends to "disk" are kept, in the files'
    dtype. merge: let `merge_projections` make fewer products of a layer's; a projection with hooks runs apart all the
    same.
    ValueError for a directory that is incomplete, altered or newer than this version.
    """
    root = open_source(path).path
    if not (root / MANIFEST).exists():
        raise ValueError(
            f"{root / MANIFEST}: missing, so this is no whole converted model; convert it (again); one that never was "
            "is loaded with transformers"
        )
    manifest = read_manifest(root)
    if check_hashes:
        check_files(root, manifest.data)
    model = skeleton(root, manifest, _dtype(dtype))
    placed = _place(model, device_map)
    if "disk" in placed.values():
        _check_disk(root, model, offload_folder)
    weights = root / weights_of(manifest.data)  # of a directory accelerate would choose itself, a pickle first
    try:
        with _uncollected():
            load_checkpoint_in_model(model, str(weights), device_map=placed, offload_folder=offload_folder, strict=True)
    except (AttributeError, LookupError, SafetensorError, ValueError) as error:
        raise ValueError(f"{weights}: its tensors are not those of {MANIFEST}: {error!s:.300}; convert again") from None
    missing = [name for name, p in model.named_parameters() if p.device.type == "meta" and not _offloaded(name, placed)]
    if missing:
        raise ValueError(f"{root}: its shards lack {counted(len(missing), 'tensor')}, e.g. {missing[0]}; convert again")
    model.tie_weights()
    for layer in model.model.layers:
        if isinstance(layer.self_attn, QuantizedAttention):
            layer.self_attn.center_keys(model.model.rotary_emb)
    if (root / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(root)
    if len(set(map(str, placed.values()))) == 1:
        _keep_what_memory_allows(model)
    if merge:
        merge_projections(model)
    leave_masks_out(model)
    model._ddp_params_and_buffers_to_ignore = _StoredNames(model._modules)
    for each in (model, model.model):
        for name in ("save_pretrained", "push_to_hub"):
            setattr(each, name, _Saving(each, name))
    if offload_folder is not None and "disk" in placed.values():
        _OFFLOADED[resolved(offload_folder)] = model
    return dispatch_model(model, placed, offload_dir=offload_folder) if len(placed) > 1 else model


@contextmanager
def _uncollected() -> Iterator[None]:
    """accelerate collects garbage behind every shard, 0.2 s of looking at what lives anyhow: that is left out."""
    if gc.get_freeze_count():  # whose it is would be gone by unfreeze
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _StoredNames:
    """The names of the quantized weights, which DistributedDataParallel is to leave alone: it would send them all, and
    gloo sends no e4m3.

    Of those that there are when DDP asks: what took the place of one to be trained has a weight of the same name.
    """

    def __init__(self, children: dict[str, nn.Module]) -> None:
        self.children = children  # the model itself would hold what holds it

    def __iter__(self) -> Iterator[str]:
        for prefix, child in self.children.items():
            for name, module in child.named_modules(prefix=prefix):
                if isinstance(module, QuantizedLinear):
                    for around in ("", "base_model.", "base_model.model."):  # peft's, which pass this list on as theirs
                        yield from (f"{around}{name}.{tensor}" for tensor in module.tensor_names)


class _Saving:
    """save_pretrained or push_to_hub of a loaded model: transformers' own as soon as nothing in it is quantrot's.

    Before, that would write a config that says nothing of formats and rotations: what loads it computes nonsense.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self.model, self.name = ref(model), name  # the model itself would hold what holds it

    def __reduce__(self) -> Any:
        return _Saving, (self.model(), self.name)  # of a copy it is the copy's

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self.model()
        converted = (QuantizedLinear, RotatedLinear, QuantizedAttention)
        if found := sorted({type(x).__name__ for x in model.modules() if isinstance(x, converted)}):
            raise ValueError(
                f"save_pretrained, push_to_hub: {', '.join(found)} in this model have no other files than those it was "
                "loaded from; copy its directory (model.config._name_or_path) or upload it (hf upload), or keep "
                "model.state_dict(); of transformers' Trainer give save_strategy='no'; a model loaded with merge=False "
                "is saved once dense linears have taken their places"
            )
        return getattr(type(model), self.name)(model, *args, **kwargs)


def open_model(name: str | Path, device: str = "auto", dtype: str = "auto") -> tuple[Any, Any]:
    """(model, tokenizer) of a converted directory, any transformers directory, a hub id, `demo`, or peft's adapter for
    one of these.

    device: "auto" is a GPU, if there is one; a model that it has no room for accelerate deals out, to all GPUs and then
    to the CPU's memory, from where what is needed is brought.
    """
    source = open_source(name)
    where = known_device(device)
    if device == "auto" and where == "cuda" and not _has_room(_needed(source.path, _dtype(dtype))):
        where = "auto"
    model: Any
    if (source.path / MANIFEST).exists():
        model = load(source.path, device_map=where, dtype=dtype)
    elif (base := _adapted(source.path)) is not None:
        model = load(base, device_map=where, dtype=dtype)
        _add_adapter(model, source.path, base)
    else:
        if not (source.path / ADAPTER).exists():
            read_json(source.path / "config.json")
        _check_index(source.path)
        try:
            with _no_bars():
                opened: Any = AutoModelForCausalLM.from_pretrained(
                    source.path,
                    dtype=_dtype(dtype) or "auto",
                    use_safetensors=True,
                    trust_remote_code=False,
                    device_map="auto" if where == "auto" else None,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # which are refused below, as what is missing is
                )
        except (SafetensorError, ImportError, OSError) as error:
            if isinstance(error, OSError):
                open_checkpoint(source.path)  # which names the weights that there are instead
            raise ValueError(f"model {str(name)!r}: transformers cannot load it: {error}") from None
        model, found = opened
        _check_complete(source.path, found)
        model = (model if where == "auto" else model.to(where)).eval()
    return model, open_tokenizer(source.path)


def _needed(path: Path, dtype: torch.dtype | None) -> int:
    """Bytes of the weights in this directory, those in floats of two bytes and more as this dtype. 0 of what cannot be
    read here, such as an adapter alone or a dtype that only transformers knows: who loads it says what is wrong."""
    floats = ("F64", "F32", "F16", "BF16") if dtype else ()
    try:
        tensors = open_checkpoint(path).tensors.values()
    except ValueError:
        return 0
    return sum(math.prod(t.shape) * dtype.itemsize if dtype and t.dtype in floats else t.nbytes for t in tensors)


def _has_room(needed: int) -> bool:
    """Whether the GPU takes so many bytes and has a fifth of what is free left."""
    if needed > 0.8 * torch.cuda.mem_get_info()[0]:
        gc.collect()  # a model that was there before
        torch.cuda.empty_cache()
    return needed <= 0.8 * torch.cuda.mem_get_info()[0]


def _check_index(path: Path) -> None:
    """ValueError for an index without metadata, which transformers writes to and nothing else looks at."""
    index = path / INDEX
    if (path / SINGLE).exists() or not index.exists():
        return
    if not isinstance(metadata := read_json(index).get("metadata"), dict):
        raise ValueError(
            f"{index}: metadata is {metadata!r:.80}; transformers needs an object there, {{}} is enough: add "
            '"metadata": {} beside weight_map'
        )


def _adapted(path: Path) -> Path | None:
    """The converted model that the adapter in this directory is for, if transformers does not run all of it: its online
    rotations it refuses, quantized attention it leaves out without a word."""
    if not (path / ADAPTER).exists() or (path / "config.json").exists():
        return None
    name = read_json(path / ADAPTER).get("base_model_name_or_path")
    base = open_source(name).path if name else path
    if not (base / MANIFEST).exists():
        return None
    manifest = read_manifest(base)
    attention = manifest.attention is not None or (manifest.arithmetic, manifest.kv_cache) != ("bf16", "bf16")
    if not (manifest.online or attention):
        return None
    if importlib.util.find_spec("peft") is None:
        raise ValueError(f"{path}: an adapter of peft, which is not installed; pip install peft")
    if not (path / "adapter_model.safetensors").exists():  # transformers would take a pickle
        raise ValueError(f"{path / 'adapter_model.safetensors'}: missing; save the adapter as safetensors")
    return base


def _add_adapter(model: Any, path: Path, base: Path) -> None:
    """Have peft put the adapter in `path` on this model, which was loaded from `base`."""
    try:
        with _no_bars():
            found = model.load_adapter(str(path), ignore_mismatched_sizes=True)  # which are refused, as above
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(
            f"{path}: peft cannot put this adapter on {base}: {error!s:.200}; in Python peft.PeftModel.from_pretrained("
            "quantrot.load(base), adapter, config=config) takes a config that knows the linears it was trained on"
        ) from None
    _check_complete(path, {"missing_keys": found.missing_keys, "mismatched_keys": found.mismatched_keys})


def _check_complete(path: Path, found: dict[str, Any]) -> None:
    """ValueError where transformers has drawn numbers of its own for weights that it did not find, or not of the
    config's shape."""
    if missing := sorted(found["missing_keys"]):
        several = f"{len(missing)} tensors are" if len(missing) > 1 else "a tensor is"
        raise ValueError(f"{path}: {several} missing that its config implies: {', '.join(missing[:3])}; download again")
    if other := sorted(found["mismatched_keys"]):
        name, stored, implied = other[0]
        raise ValueError(
            f"{path}: {name} has shape {tuple(stored)}; its config implies {tuple(implied)}; give the config of these "
            "weights"
        )


@contextmanager
def _no_bars() -> Iterator[None]:
    """Without transformers' own progress bars, which would run into ours."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """None for "auto"."""
    known = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if isinstance(dtype, torch.dtype) and dtype in known.values():
        return dtype
    if dtype not in known:
        raise ValueError(f"dtype is {dtype!r}; allowed: {', '.join(known)}")
    return known[dtype]


def _stored_dtype(root: Path) -> torch.dtype:
    """Of what is not quantized: the embedding's."""
    return DTYPES[open_checkpoint(root).tensors[f"{EMBEDDING}.weight"].dtype]


def architecture(root: Path, wanted: torch.dtype | None, *, narrow: bool = False) -> Any:
    """transformers' model of a directory's config.json, on the meta device but for its buffers (RoPE). narrow: float64
    is taken for float32."""
    described = {key: value for key, value in read_json(root / "config.json").items() if key not in NOT_DESCRIBED}
    for key in ("dtype", "torch_dtype"):  # "auto", which transformers' own configs may say, is no dtype
        if described.get(key) == "auto":
            del described[key]
    try:
        config = AutoConfig.for_model(**described)
        config._name_or_path = str(root)
        dtype: Any = wanted or config.dtype or _stored_dtype(root)
        dtype = torch.float32 if narrow and dtype == torch.float64 else dtype
        with parameters_on_meta():
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:  # of many classes, some its own
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{root / 'config.json'}: transformers cannot build the model: {what:.300}") from None
    return model.eval()


def skeleton(root: Path, manifest: Manifest, wanted: torch.dtype | None) -> Any:
    """The same of a converted directory, with the manifest's modules in place."""
    model = architecture(root, wanted, narrow=_narrows(manifest))
    dtype = model.dtype
    with parameters_on_meta():
        native = engines.is_native(manifest.linears, bool(manifest.online) or manifest.attention is not None)
        modules = dict(model.named_modules())
        for fqn, fmt in manifest.linears.items():
            rotation = manifest.online.get(fqn)
            if fmt is None and rotation is None:
                continue
            old = modules.get(fqn)
            if not isinstance(old, nn.Linear):
                raise ValueError(f"{root / MANIFEST}: {fqn!r} is not a linear of this model; convert again")
            shape = old.in_features, old.out_features, old.bias is not None, dtype
            name = f"{rotation.name}_input" if rotation else ""
            online = OnlineHadamard(rotation, engines.is_stored(rotation)) if rotation else None
            if fmt is not None:
                linear = LINEARS[fmt.weights.kind]
                new: nn.Module = linear(*shape, fmt, native_fp8=native, online=online, online_name=name)
            else:
                assert online is not None
                new = RotatedLinear(*shape, online=online, online_name=name)
            model.set_submodule(fqn, new)
        kind: dict[str, Any] = {"arithmetic": manifest.arithmetic, "kv_cache": manifest.kv_cache}
        if manifest.attention is not None or set(kind.values()) != {"bf16"}:
            for layer in model.model.layers:
                layer.self_attn = QuantizedAttention(layer.self_attn, rotation=manifest.attention, **kind)
    model.tie_weights()
    return model.eval()


def _narrows(manifest: Manifest) -> bool:
    """Whether anything but weights is quantized, which is done from 16 or 32 bits."""
    if (manifest.arithmetic, manifest.kv_cache) != ("bf16", "bf16"):
        return True
    return any(fmt is not None and fmt.activations.kind != "none" for fmt in manifest.linears.values())


def _place(model: Any, device_map: str | int | torch.device | dict[str, Any] | None) -> dict[str, Any]:
    """accelerate's map from module names to devices (names, or numbers of GPUs)."""
    if isinstance(device_map, dict):
        placed = {name: str(d) if isinstance(d, torch.device) else d for name, d in device_map.items()}
        for device in {*placed.values()} - {"disk"}:
            known_device(f"cuda:{device}" if isinstance(device, int) else str(device))
        _check_map(model, placed)
        if set(placed.values()) == {"disk"}:
            raise ValueError("device_map sends the whole model to disk; keep a part of it on a device, or give 'cpu'")
        return placed
    if device_map not in ("auto", "balanced", "sequential"):
        name = f"cuda:{device_map}" if isinstance(device_map, int) else str(device_map or "cpu")
        return {"": known_device(name)}
    if torch.cuda.device_count() <= 1 and device_map == "auto":
        needed = sum(p.numel() * p.element_size() for p in model.parameters())
        if not torch.cuda.is_available():
            return {"": "cpu"}
        if _has_room(needed):
            return {"": 0}
    whole = model._no_split_modules
    memory = get_balanced_memory(model, no_split_module_classes=whole) if device_map != "sequential" else None
    return infer_auto_device_map(model, max_memory=memory, no_split_module_classes=whole)


def _check_disk(root: Path, model: Any, folder: str | Path | None) -> None:
    if folder is None:
        raise ValueError("offload_folder: None, but device_map sends modules to disk; give a folder to keep them in")
    if resolved(folder) in _OFFLOADED:  # whose tensors would be overwritten
        raise ValueError(f"offload_folder: {folder} holds tensors of a model that is in use; give each its own folder")
    stored, asked = _stored_dtype(root), model.get_input_embeddings().weight.dtype
    if asked != stored:  # accelerate writes tensors there as the files have them
        raise ValueError(f"dtype: {asked}; modules on disk stay {stored}, as {root} has them; give that, or no disk")


def _check_map(model: Any, placed: dict[str, Any]) -> None:
    """Every parameter has a place, an embedding that is the head, too, one that both can read; no name is unknown."""
    for name, _ in model.named_parameters(remove_duplicate=False):
        places = [device for prefix, device in placed.items() if _holds(prefix, name)]
        if not places:
            raise ValueError(f"device_map has no place for {name}; name its module, or one that holds it ('' is all)")
        if len(set(places)) > 1 and "disk" in places:
            raise ValueError(f"device_map has several places for {name}, one of them disk; name modules apart")
    if model.config.tie_word_embeddings:
        for name, other in ((EMBEDDING, "head"), (HEAD, "embedding")):
            if _offloaded(f"{name}.weight", placed):
                raise ValueError(f"device_map sends {name} to disk, and it is the {other}, too; keep both on a device")
    known = {"", *(name for name, _ in model.named_modules()), *(name for name, _ in model.named_parameters())}
    for name in placed:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"device_map: {name} is no module of this model{hint}")


def _holds(prefix: str, name: str) -> bool:
    return not prefix or f"{name}.".startswith(f"{prefix}.")


def _offloaded(name: str, placed: dict[str, Any]) -> bool:
    return any(device == "disk" and _holds(prefix, name) for prefix, device in placed.items())


def merge_projections(model: Any) -> int:
    """In every layer, one product for queries, keys and values and one for gate and up, where their formats are equal
    and the whole model is on one device or theirs has kernels for the stored tensors. Returns how many there are.
    Rounding apart, no number changes.
    """
    count, alone = 0, len({p.device for p in model.parameters()}) == 1  # else accelerate may move linears as they run
    for layer in model.model.layers:
        for name, module in (("self_attn", QuantizedAttention), ("mlp", QuantizedMLP)):
            old = getattr(layer, name)
            linears = [getattr(old, part) for part in module.parts]
            if all(isinstance(x, QuantizedLinear) and (alone or x.runs_packed(x.stored()[0].device)) for x in linears):
                new = old if isinstance(old, module) else module(old)
                if new.merge():
                    setattr(layer, name, new.train(old.training))
                    count += 1
        if isinstance(layer.self_attn, QuantizedAttention) and isinstance(layer.mlp, QuantizedMLP):
            fuse_layer(layer)
    return count


def _keep_what_memory_allows(model: nn.Module) -> None:
    """Keep dequantized weights if half of the device's free memory holds them all: a forward then only multiplies; and
    have linears halve their weights at the first few bfloat16 tokens on a CPU, within the same half, which comes first
    where there is no room for both. Not those whose kernels read the stored tensors.
    """
    device = next(model.parameters()).device
    quantized = [m for m in model.modules() if isinstance(m, QuantizedLinear) and not m.runs_packed(device)]
    if not quantized:
        return
    wide = (p.dtype for p in model.parameters() if p.dtype in (torch.bfloat16, torch.float16, torch.float32))
    dtype = next(wide, torch.float32)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    room = KEEP_FRACTION * free
    narrow = 0
    if device.type == "cpu" and dtype == torch.bfloat16:
        shapes = [(m.format.weights, m.out_features, m.in_features) for m in quantized]
        narrow = sum(formats.halves_bytes(*shape) for shape in shapes if formats.has_halves(*shape))
    if not 0 < narrow <= room:
        narrow = 0
    if narrow + sum(m.in_features * m.out_features for m in quantized) * dtype.itemsize <= room:
        for module in quantized:
            module.decode(dtype)
    if narrow:
        for module in quantized:
            module._halves_for = dtype
