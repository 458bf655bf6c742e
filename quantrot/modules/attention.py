"""Llama's attention with what a conversion adds to it: turned queries and keys, e4m3 arithmetic, a narrow KV cache."""

import copy
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaPreTrainedModel,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralPreTrainedModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3PreTrainedModel

from quantrot.kernels.attention import (
    Granularity,
    Quantized,
    attend,
    dequantize_heads,
    one_token,
    quantize_heads,
    rope_hadamard_quantize,
    transposed_values,
)
from quantrot.kernels.attention.reference import Turn
from quantrot.kernels.attention.turn import try_turn
from quantrot.kernels.operators import exporting, inference_only
from quantrot.kernels.ready import unseen
from quantrot.modules.cache import adopt, round_trip, update
from quantrot.modules.linear import OnlineHadamard
from quantrot.modules.merged import Merging, is_rms_norm
from quantrot.modules.room import append_one
from quantrot.modules.sdpa import IMPLEMENTATION
from quantrot.rotation import Rotation

CENTERED = 1024  # positions of the mean; with Qwen2's RoPE 256 do as well as 4096, with a faster one fewer are better


class QuantizedAttention(Merging):
    """Attention of a model that llama.py knows. rotation: R3, which turns queries and keys after RoPE; scores stay the
    same, (q R)(k R)^T = q k^T, and the cache holds turned keys. arithmetic: "fp8" for products and probabilities in
    e4m3. kv_cache: the format that keys and values pass through, whether or not a cache is there to hold them.

    Under "fp8" keys and values are in e4m3 whatever the cache: one of the model's dtype holds the same values, exactly,
    and they are quantized again at every step. A prompt's keys and values share a scale per 128 tokens and head
    (`granularity`), tokens that are added one by one have their own, as all have in what torch.export makes.

    key_center [G, D], float32: what `center_keys` takes off every key before it is quantized.
    """

    key_center: Tensor | None
    q_norm: Any
    k_norm: Any
    parts = ("q_proj", "k_proj", "v_proj")

    def __init__(
        self,
        attention: Any,
        *,
        rotation: Rotation | None = None,
        arithmetic: Literal["bf16", "fp8"] = "bf16",
        kv_cache: Literal["bf16", "fp8", "int4"] = "bf16",
    ) -> None:
        super().__init__()
        assert arithmetic == "bf16" or kv_cache != "int4"
        self.config, self.layer_idx = attention.config, attention.layer_idx
        self.head_dim, self.num_key_value_groups = attention.head_dim, attention.num_key_value_groups
        self.scaling, self.attention_dropout, self.is_causal = attention.scaling, attention.attention_dropout, True
        self.q_proj, self.k_proj, self.v_proj = attention.q_proj, attention.k_proj, attention.v_proj
        self.o_proj = attention.o_proj
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)  # Qwen3's
        self.R3 = OnlineHadamard(rotation) if rotation is not None else None
        self.arithmetic, self.kv_cache, self.granularity = arithmetic, kv_cache, Granularity.block
        window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
        self.window = {} if window is None else {"sliding_window": window}
        self.key_center = None  # a buffer where there is one: accelerate takes no other

    def center_keys(self, rotary: Any) -> None:
        """Have keys quantized without the mean over positions of their turned bias; rotary: the model's module.

        Scores of a query with all keys then change by the same number, which softmax does not see. It matters where the
        bias is large in channels that RoPE hardly turns, as Qwen2's is (354 against a root mean square of 77 in one
        layer of Qwen2.5-Coder-1.5B): quantized with it, keys keep little of what tells them apart. KL of that model to
        its original with an FP8 cache 0.345, centered 0.0030; after R3 0.879 and 0.0012; with an INT4 cache 8.0 and
        0.022 (docs/attention.md). No data is needed. Behind a norm of keys a bias is not the same in all of them, and
        stays. ValueError where the bias is not in memory.
        """
        bias = self.k_proj.bias
        if bias is None or self.k_norm is not None or (self.arithmetic, self.kv_cache) == ("bf16", "bf16"):
            return
        if bias.device.type == "meta":
            raise ValueError(f"layer {self.layer_idx}: k_proj.bias is offloaded to disk; keep self_attn in memory")
        heads = bias.detach().float().view(-1, self.head_dim)
        rotary = copy.deepcopy(rotary)  # RoPE that is scaled by the longest sequence remembers it
        cos, sin = rotary(heads, torch.arange(CENTERED, device=heads.device)[None])
        low, high = heads.chunk(2, -1)
        center = heads * cos[0].float().mean(0) + torch.cat([-high, low], -1) * sin[0].float().mean(0)
        if self.key_center is None:
            del self.key_center
        self.register_buffer("key_center", center, persistent=False)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Any = None,
        norm: nn.Module | None = None,
        residual: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As in transformers: hidden_states [B, S, hidden] -> (the same, attention weights or None).

        past_key_values: the cache, by the name that transformers 5.17 calls this with; 5.24 has `cache`.
        norm: of hidden_states first; residual: added to the result; both in the linears' kernels (see FusedLayer).
        """
        cache = past_key_values if cache is None else cache
        tokens = hidden_states.shape[:-1]
        q, k, v = (projected.view(*tokens, -1, self.head_dim) for projected in self.outputs(hidden_states, norm))
        if self.arithmetic == "fp8":
            if kwargs.get("output_attentions"):
                raise ValueError("output_attentions: attention: fp8 has no weights to give; use attention: bf16")
            output, weights = self._fp8(q, k, v, position_embeddings, attention_mask, cache, kwargs), None
        else:
            output, weights = self._wide(q, k, v, position_embeddings, attention_mask, cache, kwargs)
        output = output.reshape(*tokens, -1).contiguous()
        return self.o_proj(output) if residual is None else self.o_proj.fused(output, residual=residual), weights

    def extra_repr(self) -> str:
        return f"{self.arithmetic}, kv_cache={self.kv_cache}"

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys [B, S, heads, D] over their heads' root mean squares, in a model that has such norms."""
        if self.q_norm is None or self.k_norm is None:
            return q, k
        return self.q_norm(q), self.k_norm(k)

    def _gains(self) -> tuple[Tensor, Tensor] | None:
        """What those norms multiply by, of queries and of keys."""
        return None if self.q_norm is None or self.k_norm is None else (self.q_norm.weight, self.k_norm.weight)

    # --- In the model's dtype ---

    def _wide(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: Any,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """q, k, v [B, S, heads, D] -> [B, S, heads, D] and the weights, by the model's attention implementation, or in
        one kernel where there is one."""
        if (token := self._one_token(q, k, v, position_embeddings, mask, cache, kwargs)) is not None:
            return token, None
        q, k = self._normed(q, k)
        query, key, value = (t.transpose(1, 2) for t in (q, k, v))
        if self.key_center is None:
            if (token := self._int4_token(query, key, value, position_embeddings, mask, cache, kwargs)) is not None:
                return token, None
        centered = self.key_center is not None
        turned = try_turn(q, k, Turn(*position_embeddings) if centered else self._turn(*position_embeddings))
        if turned is not None:
            query, key = (t.transpose(1, 2) for t in turned)
        else:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if self.key_center is not None:
            key = (key - self.key_center[:, None]).to(key.dtype)
            if (token := self._int4_token(query, key, value, (None, None), mask, cache, kwargs)) is not None:
                return token, None
        if self.R3 is not None and (centered or turned is None):
            # where heads lie beside each other, as RoPE leaves them: a prompt is not copied
            query, key = (self.R3(t.transpose(1, 2)).transpose(1, 2) for t in (query, key))
        wide = key, value
        if self.kv_cache != "bf16" and (cache is None or adopt(cache, self.layer_idx, self.kv_cache) is None):
            key, value = round_trip(self.kv_cache, key, value)
        if cache is not None:
            key, value = update(cache, key, value, self.layer_idx, kwargs)
        if self.kv_cache != "bf16":
            key, value = inference_only(key, wide[0]), inference_only(value, wide[1])
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0
        return attention(self, query, key, value, mask, dropout=dropout, scaling=self.scaling, **self.window, **kwargs)

    def _one_token(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: Any,
        kwargs: dict[str, Any],
    ) -> Tensor | None:
        """Attention of a token to transformers' own cache of the model's dtype, [B, 1, heads, D], where one kernel
        turns, stores and attends: to a static one, and in eager mode to one that grows.

        Not with R3 or a narrow cache, with another implementation than sdpa, whose weights nobody asks for, with hooks
        on a norm, or where gradients are recorded. A static layer's count is transformers': `update` adds to it as the
        kernel does.
        """
        if q.shape[1] != 1 or not self._plain_sdpa(cache, kwargs):
            return None
        if self.R3 is not None or self.kv_cache != "bf16":
            return None
        if not all(is_rms_norm(norm, q.dtype) for norm in (self.q_norm, self.k_norm) if norm is not None):
            return None
        layer: Any = cache.layers[self.layer_idx] if self.layer_idx < len(cache.layers) else None
        kind = type(layer)
        if kind not in (StaticLayer, DynamicLayer) or not layer.is_initialized or not one_token.runs_on(q.device):
            return None
        if not torch.compiler.is_compiling() and not (_updates_are(Cache, cache) and _updates_are(kind, layer)):
            return None
        given, gains = (q, k, v, *position_embeddings), self._gains()
        options: dict[str, Any] = {"mask": mask, "norms": gains, "epsilon": 0.0, "scale": self.scaling}
        if gains is not None:
            options["epsilon"] = self.q_norm.variance_epsilon
        if kind is DynamicLayer:
            if not unseen(*given, mask, layer.keys, layer.values) or layer.keys.dim() != 4:
                return None
            return append_one(layer, partial(one_token.try_attend_one, *given, **options))
        length: Any = getattr(layer, "cumulative_length", None)  # a tensor in every version that quantrot knows
        stored = layer.keys, layer.values, length
        if not isinstance(length, Tensor) or one_token.unsupported(*given, *stored, mask, gains):
            return None
        first = self.layer_idx == 0  # from its count the model has computed the positions and the mask
        y = one_token.rope_attend_one(*given, *stored, **options, advance=not first, settled=True)
        if first:
            length.add_(1)
        return y

    def _plain_sdpa(self, cache: Any, kwargs: dict[str, Any]) -> bool:
        """Whether attention to what is in this cache is no more than sdpa's output."""
        if not isinstance(cache, Cache) or torch.is_grad_enabled() or (self.training and self.attention_dropout):
            return False  # a paged cache is no Cache
        plain = self.config._attn_implementation in ("sdpa", IMPLEMENTATION) and not cache.offloading
        return plain and not self.window and not kwargs.get("output_attentions")

    def _int4_token(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        angles: tuple[Tensor | None, Tensor | None],
        mask: Tensor | None,
        cache: Any,
        kwargs: dict[str, Any],
    ) -> Tensor | None:
        """Attention of one token [B, heads, 1, D], before RoPE and R3, and an INT4 cache that is read in its codes,
        [B, 1, heads, D]; None where there is no such kernel."""
        if self.kv_cache != "int4" or q.shape[2] != 1 or not self._plain_sdpa(cache, kwargs):
            return None
        if (layer := adopt(cache, self.layer_idx, "int4")) is None:
            return None
        keep = self.layer_idx == 0  # see _one_token for the count
        return layer.attend_one(q, k, v, self._turn(*angles), mask, self.scaling, keep=keep)

    def _turn(self, cos: Tensor | None, sin: Tensor | None) -> Turn:
        """RoPE by these angles, and R3."""
        return Turn(cos, sin) if self.R3 is None else Turn(cos, sin, self.R3.block, self.R3.signs)

    # --- In e4m3 ---

    def _fp8(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: Any,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """q, k, v [B, S, heads, D] -> [B, S, heads, D]."""
        q, k = self._normed(q, k)
        mask = None if mask is None else _boolean(mask)
        layer = adopt(cache, self.layer_idx, "fp8") if cache is not None and self.kv_cache == "fp8" else None
        prompt = cache is None or (layer is not None and layer.empty)
        rotation: dict[str, Any] = {}
        if self.R3 is not None:
            rotation = {"order": self.R3.block, "signs": self.R3.signs}
        by_block = prompt and q.shape[1] > 1 and not exporting()  # whose number of blocks would be the example's
        granularity = self.granularity if by_block else Granularity.token
        angles: tuple[Tensor | None, Tensor | None] = position_embeddings
        if self.key_center is not None:
            q, k = apply_rotary_pos_emb(q, k, *position_embeddings, unsqueeze_dim=2)
            k, angles = (k - self.key_center).to(k.dtype), (None, None)
        appended: tuple[Quantized, Tensor | None] | None = None
        if layer is not None and not prompt and q.shape[1] == 1:
            keep = self.layer_idx == 0  # from its count the model has computed the positions and the mask
            appended = layer.append_turned(q, k, v, *angles, **rotation, keep=keep)
            if appended is not None and mask is not None and mask.shape[-1] == (keys := layer.get_mask_sizes(0)[0]):
                mask = F.pad(mask, (0, appended[0].k.shape[2] - keys))
        if appended is not None:
            given, lengths = appended
        else:
            given = rope_hadamard_quantize(q, k, v, *angles, granularity=granularity, **rotation)
            stored, lengths = (given, None) if layer is None else layer.append(given, q.dtype)
            if prompt:  # the same keys as in the cache, which has spread their blocks' scales
                lengths, mask = None, None if mask is None else mask[..., : q.shape[1]]
            else:
                given = stored if layer is not None else self._through(cache, given, mask, q.dtype, kwargs)
        asked = kwargs.get("is_causal")  # as transformers' sdpa takes it
        causal = mask is None and (self.is_causal if asked is None else asked)
        y = attend(given, causal=causal, scale=self.scaling, mask=mask, lengths=lengths, dtype=q.dtype)
        return inference_only(y, q, k, v)

    def _through(
        self, cache: Any, given: Quantized, mask: Tensor | None, dtype: torch.dtype, kwargs: dict[str, Any]
    ) -> Quantized:
        """Keys and values through a cache of the model's dtype: what it returns, quantized again, is what it was."""
        implementation = self.config._attn_implementation
        if mask is None and implementation not in ("sdpa", IMPLEMENTATION, "eager"):  # it may have no masks at all
            raise ValueError(
                f"attention: fp8 with kv_cache: bf16 needs the masks of sdpa, the model's attention implementation is "
                f"{implementation!r}; set it to sdpa"
            )
        tokens = given.k.shape[2]
        key = dequantize_heads(given.k, given.k_scale, dtype)
        value = dequantize_heads(given.v[..., :tokens].transpose(2, 3), given.v_scale, dtype)
        key, value = update(cache, key, value, self.layer_idx, kwargs)
        if mask is None and tokens > 1:
            key, value = key[:, :, :tokens], value[:, :, :tokens]  # a static cache that was empty: the rest is unused
        (k, k_scale), (v, v_scale) = quantize_heads(key), quantize_heads(value)
        return Quantized(given.q, given.q_scale, k, k_scale, transposed_values(v), v_scale)


def _updates_are(kind: type, one: Any) -> bool:
    """Whether what `one` is given goes into it as into this kind of cache or layer: users override `update`."""
    return getattr(one.update, "__func__", None) is kind.update  # type: ignore[attr-defined]


def _boolean(mask: Any) -> Tensor:
    """True where a query sees a key, of such a mask or of one of numbers that says no more: 0, or the dtype's least."""
    given = type(mask).__name__
    if isinstance(mask, Tensor):
        if mask.dim() == 4 and mask.dtype == torch.bool:
            return mask
        given = f"mask of {mask.dtype} and {mask.dim()} dimensions"
        if mask.dim() == 4 and mask.is_floating_point() and not torch.compiler.is_compiling():  # values are read
            seen = mask == 0
            if (seen | (mask <= torch.finfo(mask.dtype).min)).all():
                return seen
            given = f"mask of {mask.dtype} with other numbers than 0 and the least"
    raise ValueError(
        f"attention: fp8 takes no {given}; set the model's attention implementation to sdpa, whose masks are boolean"
    )


# Models record the attention weights that `output_attentions=True` asks for by the class of the module.
for models, attention in (
    (LlamaPreTrainedModel, LlamaAttention),
    (MistralPreTrainedModel, MistralAttention),
    (Qwen2PreTrainedModel, Qwen2Attention),
    (Qwen3PreTrainedModel, Qwen3Attention),
):
    models._can_record_outputs["attentions"] = [attention, QuantizedAttention]
