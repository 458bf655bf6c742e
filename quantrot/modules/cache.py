"""KV caches for transformers that hold e4m3 or INT4 instead of the model's dtype.

    KVCache("int4", config=model.config)                       grows; for generate(past_key_values=...) of any model
    KVCache("fp8", config=model.config, max_cache_len=4096)    static: torch.compile and CUDA graphs

A layer keeps a few narrow tensors, its buffers, with room for more tokens. `update` quantizes what is new and returns
all keys and values dequantized; `append` takes and returns quantized ones, for an attention that reads them as they
are. A converted model's attention puts its kind of layer in the place of transformers' own empty ones (`adopt`), so
that `model.generate(...)` and `model(..., use_cache=True)` need no argument.

What is overwritten or dropped by `crop` leaves no trace where each token has its own scale, as all have but a prompt's
under `attention: fp8`: those share a scale per block of tokens, dropped ones among them.
"""

import inspect
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, StaticLayer

from quantrot.kernels.attention import (
    BLOCK,
    Quantized,
    append,
    dequantize_heads,
    int4_token,
    quantize_heads,
    spread,
)
from quantrot.kernels.attention.reference import Turn
from quantrot.kernels.fp8 import E4M3
from quantrot.kernels.int4 import dequantize_int4, group_for, quantize_int4, try_store_int4
from quantrot.kernels.operators import inference_only
from quantrot.kernels.ready import unseen

Kind = Literal["fp8", "int4"]
KINDS: tuple[Kind, ...] = ("fp8", "int4")
INT4_GROUP = 64
GROW = 256  # tokens of room added at least; a quarter of what there is, if that is more

Buffers = dict[str, Tensor]
INT4_BUFFERS = ("key", "key_scale", "key_low", "value", "value_scale", "value_low")
TOKEN_AXIS = {"value_transposed": 3}  # [B, G, D, T], as the e4m3 attention reads it; all others have tokens third


def cache_name(model: Any) -> str:
    """By what name a transformers model takes a cache and gives it back: `cache` since transformers 5.24, before that
    `past_key_values`, whose end is announced."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


# --- Formats ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """How keys and values [B, G, T, D] become buffers, and back in some dtype."""

    encode: Callable[[Tensor, Tensor], Buffers]
    decode: Callable[[Buffers, torch.dtype], tuple[Tensor, Tensor]]


def _encode_fp8(k: Tensor, v: Tensor) -> Buffers:
    (key, key_scale), (value, value_scale) = quantize_heads(k), quantize_heads(v)
    parts = {"key": key.view(torch.uint8), "key_scale": key_scale}
    return parts | {"value_transposed": value.view(torch.uint8).transpose(2, 3), "value_scale": value_scale}


def _decode_fp8(buffers: Buffers, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    key = dequantize_heads(buffers["key"].view(E4M3), buffers["key_scale"], dtype)
    value = buffers["value_transposed"][..., : key.shape[2]].transpose(2, 3).contiguous().view(E4M3)
    return key, dequantize_heads(value, buffers["value_scale"], dtype)


def _encode_int4(k: Tensor, v: Tensor) -> Buffers:
    named: Buffers = {}
    for name, x in (("key", k), ("value", v)):
        codes, scale, low = quantize_int4(x, group_for(x.shape[-1], INT4_GROUP))
        named |= {name: codes, f"{name}_scale": scale, f"{name}_low": low}
    return named


def _empty_int4(k: Tensor) -> Buffers:
    """What _encode_int4 makes of no tokens of keys like these."""
    *heads, _, width = k.shape
    groups = width // group_for(width, INT4_GROUP)
    codes, scale = k.new_empty((*heads, 0, width // 2), dtype=torch.uint8), k.new_empty((*heads, 0, groups))
    return {name: scale.to(torch.bfloat16) if "_" in name else codes for name in INT4_BUFFERS}


def _decode_int4(buffers: Buffers, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    key, value = (
        dequantize_int4(buffers[name], buffers[f"{name}_scale"], buffers[f"{name}_low"], dtype)
        for name in ("key", "value")
    )
    return key, value


FORMATS: dict[Kind, Format] = {
    "fp8": Format(_encode_fp8, _decode_fp8),
    "int4": Format(_encode_int4, _decode_int4),
}


def round_trip(kind: Kind, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as a cache of this kind gives them back, without one."""
    return FORMATS[kind].decode(FORMATS[kind].encode(k, v), k.dtype)


def bits_per_value(kind: Kind, head_dim: int) -> float:
    """Bits that a key's or value's element takes with its share of the scales."""
    return 8 + 8 / head_dim if kind == "fp8" else 4 + 32 / group_for(head_dim, INT4_GROUP)


# --- Layers ----------------------------------------------------------------------------------------------------------


class KVLayer(CacheLayerMixin):
    """One attention layer's keys and values in a narrow format."""

    kind: Kind
    dtype: torch.dtype
    device: torch.device
    buffers: Buffers

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.buffers = {}
        self.empty = True  # no token came yet, or since a reset: what comes is a prompt

    def __repr__(self) -> str:
        return f"{self.__class__.__name__}({self.kind})"

    @property
    def nbytes(self) -> int:
        """What the buffers take."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers.values())

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Transformers' hook: allocate for tensors like these, [B, G, T, D]."""
        self._allocate(FORMATS[self.kind].encode(key_states[:, :, :0], value_states[:, :, :0]), key_states.dtype)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store [B, G, T, D] after what is there; all keys and values, dequantized to the given dtype.

        What is stored has no gradient: a backward pass through keys or values that want one raises.
        """
        if (every := self._store_at_once(key_states, value_states)) is not None:
            return every
        stored = self._store(FORMATS[self.kind].encode(key_states, value_states), key_states.dtype)
        self.empty = False
        key, value = FORMATS[self.kind].decode(stored, key_states.dtype)
        return inference_only(key, key_states), inference_only(value, value_states)

    def append(self, given: Quantized, dtype: torch.dtype) -> tuple[Quantized, Tensor | None]:
        """Store quantized keys and values (a scale a block or token), kind fp8: (the same with all of them, how many
        there are for each sequence, int32 [B], or None for all that the tensors have)."""
        assert self.kind == "fp8"
        tokens = given.k.shape[2]
        parts = {"key": given.k.view(torch.uint8), "value_transposed": given.v[..., :tokens].view(torch.uint8)}
        for name, scale in (("key_scale", given.k_scale), ("value_scale", given.v_scale)):
            parts[name] = spread(scale, tokens)
        stored = self._store(parts, dtype)
        self.empty = False
        return self._every(given.q, given.q_scale, stored), self._lengths(given.k.shape[0])

    @torch.no_grad()
    def append_turned(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        order: int = 0,
        signs: Tensor | None = None,
        *,
        keep: bool,
    ) -> tuple[Quantized, Tensor | None] | None:
        """`append` of rope_hadamard_quantize of one token, in one kernel; None where there is none. What it gives has
        the buffers' padding, which is past the lengths: a kernel for one query reads whole lines.

        keep: a count on the device is added to behind the kernel, not in it.
        """
        if not self.is_initialized or not append.runs_on(q.device):
            return None
        at, limit = self._next()
        cache = (self.buffers[n] for n in ("key", "key_scale", "value_transposed", "value_scale"))
        given: Any = q, k, v, cos, sin, *cache, at
        made = append.try_append(*given, limit=limit, order=order, signs=signs, advance=not keep)
        if made is None:
            return None
        self._count(keep)
        self.empty = False
        return self._every(*made[:2], self.buffers), made[2]

    @torch.no_grad()
    def attend_one(
        self, q: Tensor, k: Tensor, v: Tensor, turn: Turn, mask: Tensor | None, scale: float, *, keep: bool
    ) -> Tensor | None:
        """`update` of one token and attention to all there are, kind int4, [B, 1, H, D], in one operator that reads
        codes; None where there is none. q [B, H, 1, D], k and v [B, G, 1, D], before their turn; mask as transformers'
        sdpa has it.

        keep: a count on the device is added to behind the kernel, not in it.
        """
        if not self.is_initialized or not int4_token.runs_on(q.device):
            return None
        if mask is not None and mask.shape[-1] != self.get_mask_sizes(1)[0]:
            return None
        at, limit = self._next()
        cache = tuple(self.buffers[name] for name in INT4_BUFFERS)
        how: Any = {"limit": limit, "turn": turn, "mask": mask, "scale": scale, "advance": not keep}
        y = int4_token.try_attend_one(q, k, v, cache, at, **how)
        if y is not None:
            self._count(keep)
            self.empty = False
        return y

    def _every(self, q: Tensor, q_scale: Tensor, stored: Buffers) -> Quantized:
        """Queries' codes with all keys and values."""
        key, value = stored["key"].view(E4M3), stored["value_transposed"].view(E4M3)
        return Quantized(q, q_scale, key, stored["key_scale"], value, stored["value_scale"])

    @abstractmethod
    def _allocate(self, parts: Buffers, dtype: torch.dtype) -> None:
        """Make room for the first tokens."""

    @abstractmethod
    def _store(self, parts: Buffers, dtype: torch.dtype) -> Buffers:
        """Write the parts after what is there; views of all tokens."""

    def _store_at_once(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """`update` where one kernel stores new tokens and gives them back."""
        return None

    @abstractmethod
    def _next(self) -> tuple[Tensor | int, int]:
        """The next token's place, which a layer that grows has made room for, and how many tokens there may be."""

    @abstractmethod
    def _count(self, kept: bool) -> None:
        """A token was stored; kept: a count on the device is what it was."""

    @abstractmethod
    def _lengths(self, batch: int) -> Tensor | None:
        """How many tokens each sequence has, int32 [B], None for all that the tensors have."""

    def _check_batch(self, k: Tensor) -> None:
        held = self.buffers["key"].shape[0]
        if k.shape[0] != held:  # one would be stored for all
            raise ValueError(
                f"keys of {k.shape[0]} sequences for a cache that holds {held}; take the same ones, select them "
                "(batch_select_indices), or begin with a new cache"
            )

    def offload(self) -> None:
        self.buffers = {name: buffer.to("cpu", non_blocking=True) for name, buffer in self.buffers.items()}

    def prefetch(self) -> None:
        if self.is_initialized:
            self.buffers = {name: b.to(self.device, non_blocking=True) for name, b in self.buffers.items()}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes what sequence beam_idx[i] was."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence `repeats` times in a row."""
        self.buffers = {name: buffer.repeat_interleave(repeats, 0) for name, buffer in self.buffers.items()}

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these sequences, in this order; or those where `indices`, a mask, is true."""
        self.buffers = {name: buffer[indices.to(buffer.device)] for name, buffer in self.buffers.items()}


def _padded(tokens: int) -> int:
    return -(-tokens // BLOCK) * BLOCK


def _room(parts: Buffers, tokens: int) -> Buffers:
    """Zeros like the parts, with room for `tokens` tokens."""
    made = {}
    for name, part in parts.items():
        shape = list(part.shape)
        shape[TOKEN_AXIS.get(name, 2)] = tokens
        made[name] = torch.zeros(shape, dtype=part.dtype, device=part.device)
    return made


class DynamicKVLayer(KVLayer):
    """Grows by a quarter when it is full, so that a token costs no copy of all the others."""

    is_croppable = True

    def __init__(self, kind: Kind) -> None:
        super().__init__(kind)
        self.length = 0

    def _allocate(self, parts: Buffers, dtype: torch.dtype, tokens: int = 0) -> None:
        self.buffers = _room(parts, tokens)
        self.dtype, self.device = dtype, parts["key"].device
        self.is_initialized = True

    def _store(self, parts: Buffers, dtype: torch.dtype) -> Buffers:
        new = parts["key"].shape[2]
        if not self.is_initialized:
            self._allocate(parts, dtype, _padded(new))
        self._check_batch(parts["key"])
        self._make_room(new)
        for name, part in parts.items():
            self.buffers[name].narrow(TOKEN_AXIS.get(name, 2), self.length, new).copy_(part.detach())
        self.length += new
        return {name: b if name in TOKEN_AXIS else b.narrow(2, 0, self.length) for name, b in self.buffers.items()}

    def _store_at_once(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        new, before = k.shape[2], self.length
        if self.kind != "int4" or not k.is_cuda or not unseen(k, v):
            return None
        if not self.is_initialized:
            self._allocate(_empty_int4(k), k.dtype, _padded(new))
        self._check_batch(k)
        self._make_room(new)
        made = try_store_int4(k, v, tuple(self.buffers[name] for name in INT4_BUFFERS), before)
        if made is None:
            return None
        self.length, self.empty = before + new, False
        if before == 0:
            return made
        return _decode_int4({name: b.narrow(2, 0, self.length) for name, b in self.buffers.items()}, k.dtype)

    def _make_room(self, new: int) -> None:
        """For so many tokens more."""
        tokens, capacity = self.length, self.buffers["key"].shape[2]
        if tokens + new <= capacity:
            return
        larger = _room(self.buffers, _padded(max(tokens + new, capacity + max(GROW, capacity // 4) if capacity else 0)))
        for name, buffer in larger.items():
            axis = TOKEN_AXIS.get(name, 2)
            buffer.narrow(axis, 0, tokens).copy_(self.buffers[name].narrow(axis, 0, tokens))
        self.buffers = larger

    def _next(self) -> tuple[int, int]:
        self._make_room(1)
        return self.length, self.buffers["key"].shape[2]

    def _count(self, kept: bool) -> None:
        self.length += 1

    def _lengths(self, batch: int) -> Tensor | None:
        return None

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.buffers, self.length, self.is_initialized, self.empty = {}, 0, False, True

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last -tokens_to_remove tokens."""
        self.length = max(0, self.length - _removed(tokens_to_remove))
        self.empty = self.length == 0


def _removed(tokens_to_remove: int) -> int:
    """How many tokens a crop drops: transformers counts them below zero."""
    if tokens_to_remove > 0:
        raise ValueError(f"crop: {tokens_to_remove}; give a negative number, of tokens to remove")
    return -tokens_to_remove


class StaticKVLayer(KVLayer):
    """Room for max_cache_len tokens from the start, written in place: torch.compile sees fixed addresses and shapes."""

    is_compileable = True
    is_sliding = False
    is_croppable = True
    cumulative_length: Any  # an int in transformers' other layers

    def __init__(self, kind: Kind, max_cache_len: int) -> None:
        super().__init__(kind)
        self.max_cache_len = max_cache_len
        self.cumulative_length = torch.zeros((), dtype=torch.int64)  # a tensor: counting must not recompile

    def _allocate(self, parts: Buffers, dtype: torch.dtype) -> None:
        self.buffers = _room(parts, _padded(self.max_cache_len))
        self.dtype, self.device = dtype, parts["key"].device
        self.batch_size = parts["key"].shape[0]
        self.cumulative_length = self.cumulative_length.to(self.device)
        if not torch.compiler.is_compiling():
            for tensor in (*self.buffers.values(), self.cumulative_length):
                torch._dynamo.mark_static_address(tensor)
        self.is_initialized = True

    def _store(self, parts: Buffers, dtype: torch.dtype) -> Buffers:
        if not self.is_initialized:
            self._allocate(parts, dtype)
        self._check_batch(parts["key"])
        new = parts["key"].shape[2]
        self._check_room(new)
        at = torch.arange(new, device=self.device) + self.cumulative_length
        room = self.buffers["key"].shape[2]
        if room > self.max_cache_len:  # no token is lost in the padding: past the end is past the buffers' end
            at = at.masked_fill(at >= self.max_cache_len, room)
        self.cumulative_length.add_(new)
        for name, part in parts.items():
            self.buffers[name].index_copy_(TOKEN_AXIS.get(name, 2), at, part.detach())
        return {n: b if n in TOKEN_AXIS else b.narrow(2, 0, self.max_cache_len) for n, b in self.buffers.items()}

    def _next(self) -> tuple[Tensor, int]:
        return self.cumulative_length, self.max_cache_len

    def _count(self, kept: bool) -> None:
        if kept:
            self.cumulative_length.add_(1)

    def _check_room(self, new: int) -> None:
        """Where the count is no part of a graph and at hand; elsewhere index_copy_ finds it, and counts the padding."""
        if self.device.type != "cpu" or torch.compiler.is_compiling():
            return
        tokens = int(self.cumulative_length) + new
        if tokens > self.max_cache_len:
            raise ValueError(
                f"max_cache_len is {self.max_cache_len}, and the cache is to hold {tokens} tokens; give it the length "
                "of prompt and answer together, or leave it out for a cache that grows"
            )

    @torch.inference_mode()
    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last -tokens_to_remove tokens, in place: addresses are a graph's. See `reset` for the zeros."""
        removed = _removed(tokens_to_remove)
        self.cumulative_length.sub_(removed).clamp_(min=0)
        for name, buffer in self.buffers.items():
            axis = TOKEN_AXIS.get(name, 2)
            at = torch.arange(removed, device=buffer.device) + self.cumulative_length
            buffer.index_fill_(axis, at.clamp_(max=buffer.shape[axis] - 1), 0)

    def _lengths(self, batch: int) -> Tensor | None:
        return self.cumulative_length.to(torch.int32).expand(batch).contiguous()

    def get_seq_length(self) -> Any:
        return self.cumulative_length if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_cache_len, 0

    def get_max_length(self) -> int:
        return self.max_cache_len

    @torch.inference_mode()  # in which buffers may have been made, and then be written
    def reset(self) -> None:
        """In place: addresses are a graph's. All of the room is decoded, and a hidden NaN is still one in a sum."""
        for tensor in (*self.buffers.values(), self.cumulative_length):
            tensor.zero_()
        self.empty = True


# --- Caches ----------------------------------------------------------------------------------------------------------


def other_layers(config: Any) -> list[str]:
    """What kinds of layers a model's config names beside attention to all tokens."""
    kinds = {*(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())}
    return sorted(kinds - {"full_attention", "attention"})


class KVCache(Cache):
    """A cache whose every layer is of this kind. kind: "fp8" or "int4". max_cache_len: None to grow, else static.

    config: of the model; the number of layers is read from it. ValueError for a kind that does not exist, or a model
    with a sliding window or layers that are no attention, whose states transformers' own caches know.

    A static cache that is full raises on a CPU. On a GPU, where its count would have to be waited for, a decoding
    kernel stores nothing and gives NaN, and a prompt that is too long fails in torch: make room for all tokens.
    """

    def __init__(self, kind: Kind, config: Any, max_cache_len: int | None = None) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind: {kind!r}; allowed: {', '.join(KINDS)} (for the model's dtype: DynamicCache)")
        config = config.get_text_config(decoder=True)
        if getattr(config, "sliding_window", None) is not None:
            raise ValueError("kind: this model has a sliding window; use transformers' own DynamicCache or StaticCache")
        if other := other_layers(config):
            raise ValueError(f"kind: this model has layers of {', '.join(other)}; use transformers' own DynamicCache")
        if max_cache_len is not None and max_cache_len < 1:
            raise ValueError(f"max_cache_len: {max_cache_len}; allowed: 1 and more, or None for a cache that grows")
        layers: list[Any] = [_layer(kind, max_cache_len) for _ in range(config.num_hidden_layers)]
        super().__init__(layers=layers)


def _layer(kind: Kind, max_cache_len: int | None) -> KVLayer:
    return DynamicKVLayer(kind) if max_cache_len is None else StaticKVLayer(kind, max_cache_len)


def adopt(cache: Any, index: int, kind: Kind) -> KVLayer | None:
    """The cache's layer if it is of this kind, after putting one in the place of an empty one of transformers'.

    None for layers that hold something already, that slide, or that are offloaded: those stay as they are; and for the
    paged cache of continuous batching.
    """
    if not isinstance(cache, Cache):
        return None
    layers: list[Any] = cache.layers
    if cache.layer_class_to_replicate is not None:
        while len(layers) <= index:
            layers.append(cache.layer_class_to_replicate())
    layer = layers[index]
    if isinstance(layer, KVLayer):
        return layer if layer.kind == kind else None
    if cache.offloading or layer.is_initialized or type(layer) not in (DynamicLayer, StaticLayer):
        return None
    layers[index] = _layer(kind, layer.max_cache_len if isinstance(layer, StaticLayer) else None)
    return layers[index]


def update(cache: Any, key: Tensor, value: Tensor, index: int, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Keys and values [B, heads, S, D] through the cache's layer; a paged cache looks into kwargs for their places."""
    beside = {} if isinstance(cache, Cache) else {"kwargs": kwargs}
    return cache.update(key, value, index, **beside)
