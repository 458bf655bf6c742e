"""What a converted model is made of: state as it is on disk, and a forward. No policy, no files, no names of models.

A quantized linear holds exactly its tensors of the checkpoint. Its forward turns the input (where a rotation runs
online), quantizes it, and multiplies. Without a kernel for the device the multiplication uses the dequantized weight:
`decode()` keeps that weight, in the dtype of the model, instead of making it in every forward.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward

from quantrot import formats
from quantrot.checkpoint import DTYPES
from quantrot.formats import ActivationFormat, LinearFormat
from quantrot.kernels.fp8 import dequantize_fp8_block, quantize_fp8_block
from quantrot.kernels.hadamard import hadamard_transform
from quantrot.kernels.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from quantrot.rotation import Rotation, signs


class OnlineHadamard(nn.Module):
    """x -> x R over the last dimension, R one of `quantrot.rotation`'s Hadamard rotations; [..., m * width], any dtype.

    stored: whether the checkpoint carries the matrix (for engines that read it); it is held, the transform is fast.
    """

    signs: Tensor | None

    def __init__(self, rotation: Rotation, stored: bool = False) -> None:
        super().__init__()
        self.block = rotation.block
        self.register_buffer("signs", signs(rotation), persistent=False)
        if stored:
            shape = rotation.block, rotation.block
            self.weight = nn.Parameter(torch.empty(shape, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.signs is not None and x.shape[-1] != self.signs.shape[0]:
            x = x.unflatten(-1, (-1, self.signs.shape[0]))
            return hadamard_transform(x, block=self.block, signs=self.signs).flatten(-2)
        return hadamard_transform(x, block=self.block, signs=self.signs)


class RotatedLinear(nn.Linear):
    """A linear in its own dtype whose input is turned by `online`, held under the name `online_name`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: torch.dtype,
        *,
        online: OnlineHadamard,
        online_name: str = "online",
    ) -> None:
        super().__init__(in_features, out_features, bias, dtype=dtype)
        self.online_name = online_name
        self.add_module(online_name, online)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.get_submodule(self.online_name)(x), self.weight, self.bias)


class QuantizedLinear(nn.Module):
    """y = Q(x R) W^T + b: x [..., in_features] in any float dtype, y in the same. W is in `fmt`'s tensors.

    native_fp8: DeepSeek-V3's name for the scale. online: what turns the input, under the name `online_name`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: torch.dtype,
        fmt: LinearFormat,
        *,
        native_fp8: bool = False,
        online: OnlineHadamard | None = None,
        online_name: str = "online",
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.format = fmt
        self.tensor_names = []
        for suffix, stored, shape in formats.stored_tensors(fmt.weights, out_features, in_features, native_fp8):
            self.register_parameter(suffix, nn.Parameter(torch.empty(shape, dtype=DTYPES[stored]), requires_grad=False))
            self.tensor_names.append(suffix)
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype), requires_grad=False) if bias else None
        self.online_name = online_name if online is not None else ""
        if online is not None:
            self.add_module(online_name, online)
        self._decoded: Tensor | None = None

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight [out_features, in_features] in `dtype`."""
        stored = [getattr(self, name) for name in self.tensor_names]
        return formats.dequantize(self.format.weights, stored, self.in_features, dtype)

    def decode(self, dtype: torch.dtype) -> None:
        """Keep the dequantized weight for the forwards to come."""
        self._decoded = self.dequantized(dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.online_name:
            x = self.get_submodule(self.online_name)(x)
        weight = self._decoded if self._decoded is not None else self.dequantized(x.dtype)
        return F.linear(quantize_dequantize(x, self.format.activations), weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {formats.label(self.format)}"


class Fp8Linear(QuantizedLinear):
    """e4m3 weights with float32 scales per 128 x 128 block or per channel."""


class Mxfp4Linear(QuantizedLinear):
    """Packed e2m1 weights with an e8m0 scale per 32."""


class Int8Linear(QuantizedLinear):
    """Packed int8 weights with a bfloat16 scale per group or channel; activations stay wide."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weight_shape = nn.Parameter(torch.empty(2, dtype=torch.int64), requires_grad=False)


LINEARS: dict[str, type[QuantizedLinear]] = {"fp8": Fp8Linear, "mxfp4": Mxfp4Linear, "int8": Int8Linear}


def quantize_dequantize(x: Tensor, activations: ActivationFormat) -> Tensor:
    """x [..., K] as the quantized multiplication sees it, in x's dtype. Blocks run over the flattened tokens."""
    if activations.kind == "none":
        return x
    if activations.kind == "mxfp4":
        return dequantize_mxfp4(*quantize_mxfp4(x, activations.scale_rule), x.dtype)
    flat = x.reshape(-1, x.shape[-1])
    qdata, scale = quantize_fp8_block(flat, activations.block, activations.scale_rule)
    return dequantize_fp8_block(qdata, scale, activations.block, x.dtype).view(x.shape)


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
