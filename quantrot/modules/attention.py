"""Llama's attention with what a conversion adds to it."""

from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward

from quantrot.modules.linear import OnlineHadamard
from quantrot.rotation import Rotation


class RotatedAttention(nn.Module):
    """Llama's or Mistral's attention with queries and keys turned after RoPE (R3); the cache holds turned keys.

    Scores are what they were, (q R)(k R)^T = q k^T; what changes is how well q and k quantize.
    """

    def __init__(self, attention: Any, rotation: Rotation) -> None:
        super().__init__()
        self.config, self.layer_idx = attention.config, attention.layer_idx
        self.head_dim, self.num_key_value_groups = attention.head_dim, attention.num_key_value_groups
        self.scaling, self.attention_dropout, self.is_causal = attention.scaling, attention.attention_dropout, True
        self.q_proj, self.k_proj, self.v_proj = attention.q_proj, attention.k_proj, attention.v_proj
        self.o_proj = attention.o_proj
        self.R3 = OnlineHadamard(rotation)
        window = getattr(attention.config, "sliding_window", None)
        self.window = {} if window is None else {"sliding_window": window}

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As in transformers: hidden_states [B, S, hidden] -> (the same, attention weights or None)."""
        tokens = hidden_states.shape[:-1]
        query, key, value = (
            projection(hidden_states).view(*tokens, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = (self.R3(t) for t in apply_rotary_pos_emb(query, key, *position_embeddings))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0
        output, weights = attend(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **self.window, **kwargs
        )
        return self.o_proj(output.reshape(*tokens, -1).contiguous()), weights
