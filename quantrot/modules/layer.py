"""Decoder layers of few tokens: their norms, gate and residuals belong to the linears' kernels.

Each would be a kernel of its own that takes 3 us to start, read 8 KB a token, and end; four linears and the attention
are left.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from quantrot.kernels.operators import exporting
from quantrot.modules.attention import QuantizedAttention
from quantrot.modules.linear import QuantizedLinear, autocast_dtype, child, hooked
from quantrot.modules.merged import QuantizedMLP, is_rms_norm, is_silu

PARTS = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")


class FewTokens:
    """In front of a decoder layer's class: what that does, in fewer kernels for few tokens, where each linear's run
    what is before and behind it. Numbers change as the order of a norm's sum does."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or not self.fuses(hidden_states):
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        attention, mlp, before, between = (child(self, name) for name in PARTS)  # type: ignore[arg-type]
        hidden_states, _ = attention(hidden_states, norm=before, residual=hidden_states, **kwargs)
        return mlp(hidden_states, norm=between, residual=hidden_states)

    def fuses(self, x: Tensor) -> bool:
        """Whether the layer as it is now can be run so, for x's dtype and device."""
        if exporting():
            return False
        attention, mlp, *norms = (child(self, name) for name in PARTS)  # type: ignore[arg-type]
        tokens = math.prod(x.shape[:-1])
        if not (isinstance(attention, QuantizedAttention) and isinstance(mlp, QuantizedMLP)):
            return False

        def fuse(*linears: Any) -> bool:
            return all(
                isinstance(each, QuantizedLinear) and not hooked(each) and each.fuses(x.device, tokens)
                for each in linears
            )

        if not fuse(child(attention, "o_proj"), child(mlp, "down_proj")):  # the cheapest to ask, and prompts end here
            return False
        if autocast_dtype(x) != x.dtype:  # each linear would cast
            return False
        if hooked(attention) or hooked(mlp):  # who would see them without norm and residual
            return False
        if not all(is_rms_norm(norm, x.dtype) for norm in norms):
            return False
        if not is_silu(mlp.act_fn) or x.dtype not in (torch.bfloat16, torch.float16) or torch.is_grad_enabled():
            return False
        return fuse(attention.current(), mlp.current())


class FewTokensLlama(FewTokens, LlamaDecoderLayer):  # type: ignore[misc]
    pass


class FewTokensMistral(FewTokens, MistralDecoderLayer):  # type: ignore[misc]
    pass


class FewTokensQwen2(FewTokens, Qwen2DecoderLayer):  # type: ignore[misc]
    pass


class FewTokensQwen3(FewTokens, Qwen3DecoderLayer):  # type: ignore[misc]
    pass


LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    LlamaDecoderLayer: FewTokensLlama,
    MistralDecoderLayer: FewTokensMistral,
    Qwen2DecoderLayer: FewTokensQwen2,
    Qwen3DecoderLayer: FewTokensQwen3,
}


def few_tokens(layer: nn.Module) -> None:
    """Make this decoder layer, its modules and tensors, a FewTokens one, if it is of a class that is known here."""
    layer.__class__ = LAYERS.get(type(layer), type(layer))
