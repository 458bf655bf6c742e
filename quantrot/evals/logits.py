"""Logits of one window a few tokens at a time, so that tokens x vocabulary never exists whole in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

Count = Callable[[int, int], None]  # (done, total)

# 64 MiB of float32 logits: 128 tokens of a 128k vocabulary, enough rows to keep the head's GEMM efficient.
CHUNK_BYTES = 64 * 2**20

# Architectures whose logits are exactly output_embeddings(decoder(ids)): no soft cap, no scale after the head.
PLAIN_HEADS = frozenset({"llama", "mistral", "qwen2", "qwen3"})


@torch.no_grad()
def next_token_logits(model: Any, ids: torch.Tensor, chunk: int | None = None) -> Iterator[torch.Tensor]:
    """The logits that predict ids[1:], in order, as float32 pieces [at most chunk, vocab].

    ids: int64 [seq_len]. `chunk` is in tokens; by default as many as fit 64 MiB. The decoder runs once; its head runs
    piece by piece where the architecture allows, else once, and only the conversion to float32 is in pieces.
    """
    assert ids.dim() == 1 and len(ids) >= 2
    inputs = ids[None].to(input_device(model))
    if model.config.model_type in PLAIN_HEADS:
        head = model.get_output_embeddings()
        states = model.get_decoder()(input_ids=inputs, use_cache=False).last_hidden_state[0, :-1]
    else:
        head = torch.nn.Identity()
        states = model(input_ids=inputs, use_cache=False).logits[0, :-1]
    rows = chunk or default_chunk(model)
    for start in range(0, len(states), rows):
        yield head(states[start : start + rows]).float()


def default_chunk(*models: Any) -> int:
    """How many tokens' float32 logits fit CHUNK_BYTES, for the largest vocabulary among `models`."""
    return max(1, CHUNK_BYTES // (4 * max(text_config(model).vocab_size for model in models)))


def text_config(model: Any) -> Any:
    """Where a model's vocabulary, positions and window are said: the config of its part for text, if it has several."""
    return model.config.get_text_config(decoder=True)


def input_device(model: Any) -> torch.device:
    """Where a model's tokens go."""
    device: torch.device = model.device
    return torch.device("cpu") if device.type == "meta" else device  # offloaded: accelerate's hooks move the inputs
