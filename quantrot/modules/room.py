"""Room for more tokens behind the keys and values of transformers' own growing cache.

Its layers copy all that they hold for each token (torch.cat). Here it lies in front of free places, into which a kernel
puts a token; `layer.keys` and `layer.values` are views of what is there, and all that keeps it: a room is gone with
them. Other tensors in their place, as transformers puts there for several tokens, a crop or another order of the
sequences, are copied once more; so are a copied or loaded layer's, which knows nothing of a room.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

GROW = 256  # tokens of room at least; a quarter of what there is, if that is more
REFUSED = object()  # in place of a room
ROOMS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by layer: in a layer they would be saved and copied with it


class Room:
    """Where the views of a layer lie: in keys and values [B, G, capacity, D]."""

    def __init__(self, layer: Any) -> None:
        batch, groups, tokens, dim = layer.keys.shape
        self.size = batch, groups, tokens + max(GROW, tokens // 4), dim
        keys, values = layer.keys.new_empty(self.size), layer.values.new_empty(self.size)
        keys[:, :, :tokens], values[:, :, :tokens] = layer.keys, layer.values
        self.show(layer, keys, values, tokens)

    def show(self, layer: Any, keys: Tensor, values: Tensor, tokens: int) -> None:
        """Have the layer hold so many."""
        layer.keys, layer.values = keys[:, :, :tokens], values[:, :, :tokens]
        self.views = ref(layer.keys), ref(layer.values)

    def holds(self, layer: Any, tokens: int) -> bool:
        """Whether the layer has what it was shown last, so many, and there is a place for one more."""
        keys, values = self.views
        return keys() is layer.keys and values() is layer.values and tokens < self.size[2]

    def whole(self, layer: Any) -> tuple[Tensor, Tensor]:
        """What is shown in part: keys, values."""
        keys, values = (torch.as_strided(t, self.size, t.stride()) for t in (layer.keys, layer.values))
        return keys, values


def append_one(layer: Any, attend: Callable[..., Tensor | None]) -> Tensor | None:
    """What attend(keys, values, tokens, settled=...) gives, which puts a token behind `tokens` of keys and values
    [B, G, capacity, D]; the layer, a DynamicLayer, then has one more. None, and nothing is tried again, where attend
    gave None. settled: no copy into the room is on its way."""
    known, tokens = ROOMS.get(layer), layer.keys.shape[2]
    if known is REFUSED:
        return None
    room: Room = known if (settled := known is not None and known.holds(layer, tokens)) else Room(layer)
    keys, values = room.whole(layer)
    y = attend(keys, values, tokens, settled=settled)
    if y is None:
        ROOMS[layer] = REFUSED
        return None
    room.show(layer, keys, values, tokens + 1)
    if room is not known:
        ROOMS[layer] = room
    return y
