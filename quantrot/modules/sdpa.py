"""transformers' sdpa attention, without a mask for a plain causal prompt under torch.compile too, and without plans
that cost more than they gain.

PyTorch's fused attention needs no mask where all tokens of a prompt attend to those before them, and is 2.8 times as
fast without one (Llama-3.1-8B's shape, 2048 tokens on an H200: 84 us, and 236 a layer with it; keys and values need not
be repeated for each query head either, 58 us). transformers leaves the mask out of a plain call, but not of a compiled
one before PyTorch 2.14, where it cannot tell compiling from exporting. A model that is exported must have another
implementation.

On Hopper PyTorch prefers cuDNN, which makes a plan for each new shape: 42 to 60 ms of the host, where a token of
Llama-3.1-8B takes 20 in all. A growing cache has another length at every token, and prompts have lengths of their own.
PyTorch's other kernels need none, and take 1.2 to 2.6 times as long as cuDNN's.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import cuda
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

IMPLEMENTATION = "quantrot_sdpa"
PLAN = 0.05  # seconds
SLOWER = {False: 1.5e-15, True: 5.4e-15}  # what others than cuDNN's take more, seconds an operation; with a mask: True


def prompt_mask(**asked: Any) -> Tensor | None:
    """As `transformers.masking_utils.sdpa_mask`: bool [batch, 1, queries, keys], or None for a causal one."""
    queries, keys, window = asked["q_length"], asked["kv_length"], asked.get("local_size")
    offset = asked.get("q_offset", 0)  # a tensor where the cache is static
    begins = not isinstance(offset, Tensor) and offset == asked.get("kv_offset", 0) == 0
    plain = asked.get("allow_is_causal_skip", True) and asked.get("attention_mask") is None
    if plain and begins and queries == keys and (window is None or keys < window):
        return None
    return sdpa_mask(**asked)


def leave_masks_out(model: Any) -> None:
    """Let this model's prompts go without masks where they need none, if its attention implementation is sdpa."""
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(IMPLEMENTATION)
        model.init_continuous_batching = partial(init_continuous_batching, model)  # copied with it


def init_continuous_batching(model: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers' (`generate_batch`, `transformers serve`), which knows its own implementations' names alone: from
    here on the model has sdpa."""
    if model.config._attn_implementation == IMPLEMENTATION:
        model.set_attn_implementation("sdpa")
    return type(model).init_continuous_batching(model, *args, **kwargs)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """As transformers' `sdpa_attention_forward`; in eager inference without cuDNN where its plan is not worth it."""
    eager = query.is_cuda and not torch.compiler.is_compiling() and not torch.is_grad_enabled()
    if not eager or not leaves_cudnn_out(module, query, key, attention_mask):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    # Flags are the process's. Another thread's attention may go without cuDNN meanwhile; one that enters torch's
    # sdpa_kernel meanwhile and leaves it later restores what it found, and cuDNN stays off: slower, not wrong.
    cuda.enable_cudnn_sdp(False)
    try:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    finally:
        cuda.enable_cudnn_sdp(True)


def leaves_cudnn_out(module: Any, query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Whether a plan for these shapes takes longer than all layers gain by it, as for one token it always does; not
    where somebody has turned off what would be left."""
    left = cuda.flash_sdp_enabled() if mask is None else cuda.mem_efficient_sdp_enabled()
    if not left or not cuda.cudnn_sdp_enabled():
        return False
    batch, heads, queries, dim = query.shape
    operations = 4 * batch * heads * queries * key.shape[2] * dim / (2 if mask is None else 1)
    return module.config.num_hidden_layers * operations * SLOWER[mask is not None] < PLAN


AttentionInterface.register(IMPLEMENTATION, attend)
AttentionMaskInterface.register(IMPLEMENTATION, prompt_mask)
