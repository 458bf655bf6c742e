"""Room for more tokens behind the keys and values of transformers' own growing cache.

Its layers copy all that they hold for each token (torch.cat). Here it lies in front of free places, into which a kernel
puts a token; `layer.keys` and `layer.values` are views of what is there. Other tensors in their place, as transformers
puts there for several tokens, a crop or another order of the sequences, are copied once more.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

NONE = "none"  # in place of a layer's room
GROW = 256  # tokens of room at least; a quarter of what there is, if that is more


class Room:
    """Keys and values [B, G, capacity, D], of which a layer has views."""

    def __init__(self, layer: Any) -> None:
        batch, groups, tokens, dim = layer.keys.shape
        size = batch, groups, tokens + max(GROW, tokens // 4), dim
        self.keys, self.values = layer.keys.new_empty(size), layer.values.new_empty(size)
        self.keys[:, :, :tokens], self.values[:, :, :tokens] = layer.keys, layer.values
        self.show(layer, tokens)

    def show(self, layer: Any, tokens: int) -> None:
        """Have the layer hold so many."""
        layer.keys, layer.values = self.views = self.keys[:, :, :tokens], self.values[:, :, :tokens]


def append_one(layer: Any, attend: Callable[..., Tensor | None]) -> Tensor | None:
    """What attend(keys, values, tokens, settled=...) gives, which puts a token behind `tokens` of keys and values
    [B, G, capacity, D]; the layer, a DynamicLayer, then has one more. None, and nothing is tried again, where attend
    gave None. settled: no copy into the room is on its way."""
    room, tokens = layer.__dict__.get("room"), layer.keys.shape[2]
    if room == NONE:
        return None
    settled = room is not None and room.views[0] is layer.keys and room.views[1] is layer.values
    if not settled or tokens == room.keys.shape[2]:
        room, settled = Room(layer), False
    y = attend(room.keys, room.values, tokens, settled=settled)
    layer.room = NONE if y is None else room
    if y is not None:
        room.show(layer, tokens + 1)
    return y
