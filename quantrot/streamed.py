"""Run a model over windows of tokens with one of its layers in memory at a time.

A layer's weights are read when its turn comes, every window goes through it, and it is gone: memory follows the widest
layer and the vocabulary, not the depth. No window runs together with others, whose tokens some formats' blocks would
mix with its own.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantrot.checkpoint import TensorInfo, look_up, read_rows
from quantrot.llama import EMBEDDING, FINAL_NORM, HEAD
from quantrot.modules import QuantizedAttention, QuantizedLinear
from quantrot.modules.linear import watched

ROWS = 8192  # of a head that are in memory together


@torch.no_grad()
def streamed_logits(
    model: Any,
    tensors: Mapping[str, TensorInfo],
    windows: Tensor,
    device: str,
    progress: Callable[[int, int], None],
) -> Iterator[Tensor]:
    """The logits that predict all but the first token of each of the windows int64 [n, S]: n times float32
    [S - 1, vocabulary].

    model: of transformers, with quantrot's modules or without, in float32 on the meta device; it is used up. tensors:
    where its weights lie. progress(done, total) is called after each layer.
    """
    states = _final_states(model, tensors, windows, device, progress)
    head = model.lm_head
    plain = type(head) is nn.Linear
    name = EMBEDDING if plain and f"{HEAD}.weight" not in tensors else HEAD
    if plain and not watched(head):
        multiply = _by_rows(tensors[f"{name}.weight"], device)
        yield from (multiply(x[:-1]) for x in states)
    else:
        _fill(head, name, tensors, device)
        yield from (head(x[:-1]) for x in states)


def _final_states(
    model: Any, tensors: Mapping[str, TensorInfo], windows: Tensor, device: str, progress: Callable[[int, int], None]
) -> list[Tensor]:
    """What the head reads of each window, float32 [S, hidden]."""
    decoder = model.model
    layers, norm = list(decoder.layers), decoder.norm
    decoder.embed_tokens, decoder.norm = nn.Identity(), nn.Identity()
    decoder.rotary_emb.to(device)
    hidden = list(look_up(tensors[f"{EMBEDDING}.weight"], windows).to(device, torch.float32))
    for i in range(len(layers)):
        decoder.layers = nn.ModuleList([layers.pop(0)])  # and the one before is gone
        layer: Any = decoder.layers[0]
        _fill(layer, f"model.layers.{i}", tensors, device)
        if isinstance(layer.self_attn, QuantizedAttention):
            layer.self_attn.center_keys(decoder.rotary_emb)
        hidden = [decoder(inputs_embeds=h[None], use_cache=False).last_hidden_state[0] for h in hidden]
        progress(i + 1, i + 1 + len(layers))
    decoder.layers = nn.ModuleList()
    _fill(norm, FINAL_NORM, tensors, device)
    return [norm(h) for h in hidden]


def _by_rows(info: TensorInfo, device: str) -> Callable[[Tensor], Tensor]:
    """The product of x [n, K] and a matrix of this file [N, K], ROWS of it at a time in float32. A GPU keeps what was
    read; of a file that a CPU reads again there is a copy in memory already."""
    places = [(start, min(start + ROWS, info.shape[0])) for start in range(0, info.shape[0], ROWS)]
    kept = None if device == "cpu" else [read_rows(info, *place).to(device) for place in places]

    def multiply(x: Tensor) -> Tensor:
        y = torch.empty(len(x), info.shape[0], device=x.device)
        for i, (start, stop) in enumerate(places):
            part = read_rows(info, start, stop) if kept is None else kept[i]
            y[:, start:stop] = F.linear(x, part.float())
        return y

    return multiply


def _fill(module: nn.Module, prefix: str, tensors: Mapping[str, TensorInfo], device: str) -> None:
    """Give a module on the meta device its weights."""
    for name, parameter in list(module.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        value = read_rows(tensors[f"{prefix}.{name}"]).view(parameter.shape).to(device, parameter.dtype)
        setattr(module.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
    module.to(device)  # its buffers
    for linear in module.modules():
        if isinstance(linear, QuantizedLinear) and not linear.runs_packed(torch.device(device)):
            linear.decode(torch.float32)  # once for all windows
