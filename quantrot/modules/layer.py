"""Decoder layers in fewer kernels.

Of few tokens, norms, gate and residuals belong to the linears' kernels: each would be a kernel of its own that takes
3 us to start, read 8 KB a token, and end; four linears and the attention are left. Of more, the norms and the addition
between them belong to the quantizers of FP8 and MXFP4; before other linears, in eager mode, a norm and the addition are
one kernel.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from quantrot.kernels.between import try_norm
from quantrot.kernels.operators import constant, exporting
from quantrot.modules.attention import QuantizedAttention
from quantrot.modules.linear import QuantizedLinear, autocast_dtype, child, hooked, hooked_everywhere
from quantrot.modules.merged import QuantizedMLP, is_rms_norm, is_silu

PARTS = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")


class FusedLayer:
    """In front of a decoder layer's class: what that does, in fewer kernels. Numbers change as the order of a norm's
    sum does."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        attention, mlp, before, between = (child(self, name) for name in PARTS)  # type: ignore[arg-type]
        if not args and self.fuses(hidden_states):
            hidden_states, _ = attention(hidden_states, norm=before, residual=hidden_states, **kwargs)
            return mlp(hidden_states, norm=between, residual=hidden_states)
        if not args and self.norms(hidden_states):
            attended, _ = attention(hidden_states, norm=before, **kwargs)
            made, hidden_states = mlp.normed(attended, between, hidden_states)
            return hidden_states + made
        if args or (first := normed(before, hidden_states)) is None:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        attended, _ = attention(hidden_states=first[0], **kwargs)
        if (second := normed(between, hidden_states, attended)) is None:
            hidden_states = hidden_states + attended
            second = between(hidden_states), hidden_states
        return second[1] + mlp(second[0])

    def fuses(self, x: Tensor) -> bool:
        """Whether each linear's kernel runs what is before and behind it, of the layer as it is now, for x's dtype and
        device, and so many tokens."""
        if (parts := self._ours()) is None:
            return False
        attention, mlp, *_ = parts
        tokens = math.prod(x.shape[:-1])

        def fuse(*linears: Any) -> bool:
            return all(quantized(each) and each.fuses(x.device, tokens) for each in linears)

        if not fuse(child(attention, "o_proj"), child(mlp, "down_proj")):  # the cheapest to ask, and prompts end here
            return False
        return self._unseen(x, *parts) and fuse(attention.current(), mlp.current())

    def norms(self, x: Tensor) -> bool:
        """The same of any number of tokens, of the norms and the addition between them alone."""
        if (parts := self._ours()) is None:
            return False
        attention, mlp, *_ = parts

        def norm(*linears: Any) -> bool:
            return all(quantized(each) and each.norms(x) for each in linears)

        others = child(attention, "o_proj"), child(mlp, "down_proj")  # which run nothing but themselves
        if not norm(attention.merged, mlp.merged) or not all(map(quantized, others)):
            return False
        return self._unseen(x, *parts) and norm(attention.current(), mlp.current())

    def _ours(self) -> tuple[Any, ...] | None:
        """PARTS, where attention and MLP are those of this package and nothing is exported."""
        ours = self._has_ours() and not exporting()
        return tuple(child(self, name) for name in PARTS) if ours else None  # type: ignore[arg-type]

    @constant  # compiled code would ask at each call whether the classes are those of another layer's parts
    def _has_ours(self) -> bool:
        parts = self._modules  # type: ignore[attr-defined]
        return type(parts["self_attn"]) is QuantizedAttention and type(parts["mlp"]) is QuantizedMLP

    def _unseen(self, x: Tensor, attention: Any, mlp: Any, *norms: Any) -> bool:
        """Whether nobody sees or changes what lies between a layer's parts: hooks, autocast, gradients."""
        if autocast_dtype(x) != x.dtype:  # each linear would cast
            return False
        if any(map(hooked, (attention, mlp, *norms))) or hooked_everywhere():  # would see no norm and residual
            return False
        if not self._has_rms_norms(x.dtype) or not all(norm.weight.shape == x.shape[-1:] for norm in norms):
            return False
        return is_silu(mlp.act_fn) and x.dtype in (torch.bfloat16, torch.float16) and not torch.is_grad_enabled()

    @constant  # as above
    def _has_rms_norms(self, dtype: torch.dtype) -> bool:
        parts = self._modules  # type: ignore[attr-defined]
        return all(is_rms_norm(parts[name], dtype) for name in PARTS[2:])


def quantized(linear: Any) -> bool:
    """Whether this is a linear of ours that nobody watches."""
    return isinstance(linear, QuantizedLinear) and not hooked(linear)


def normed(norm: nn.Module, x: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
    """(norm(x + added), x + added) in one kernel, where there is one and nobody watches the norm."""
    if autocast_dtype(x) != x.dtype or not is_rms_norm(norm, x.dtype) or hooked_everywhere():
        return None
    return try_norm(x, norm.weight, norm.variance_epsilon, added)  # type: ignore[arg-type]


class FusedLlamaLayer(FusedLayer, LlamaDecoderLayer):  # type: ignore[misc]
    pass


class FusedMistralLayer(FusedLayer, MistralDecoderLayer):  # type: ignore[misc]
    pass


class FusedQwen2Layer(FusedLayer, Qwen2DecoderLayer):  # type: ignore[misc]
    pass


class FusedQwen3Layer(FusedLayer, Qwen3DecoderLayer):  # type: ignore[misc]
    pass


LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    LlamaDecoderLayer: FusedLlamaLayer,
    MistralDecoderLayer: FusedMistralLayer,
    Qwen2DecoderLayer: FusedQwen2Layer,
    Qwen3DecoderLayer: FusedQwen3Layer,
}


def fuse_layer(layer: nn.Module) -> None:
    """Make this decoder layer, its modules and tensors, a FusedLayer, if it is of a class that is known here."""
    layer.__class__ = LAYERS.get(type(layer), type(layer))
