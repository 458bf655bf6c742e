"""Linears that read the same input as one product: queries, keys and values; gate and up.

A small weight takes as long to start on as to read, and each product's input is turned and quantized on its own:
merged, a decoder layer has two products and two quantizations where it had five. The linears keep their names and their
tensors, which become slices of the whole's memory.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quantrot import formats
from quantrot.modules.linear import OnlineHadamard, QuantizedLinear, child, hooked, replaced, versions, watched

# transformers' names; all are kernels.fp8.reference.rms_norm
RMS_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")


class Merging(nn.Module):
    """A module whose linears named in `parts` read the same input, and may be one product.

    Merged, the linears' own forwards are not called; one that is replaced ends the merger, and while one has hooks, or
    tensors that it was given alone, they run apart.
    """

    parts: tuple[str, ...]

    def __init__(self) -> None:
        super().__init__()
        self.merged: QuantizedLinear | None = None
        self._merged_of: list[nn.Module] = []
        self._merged_tensors: list[Tensor] = []  # theirs
        self._merged_at: list[int] = []  # how often they were written before the whole was halved
        self._given = False  # whether a part was assigned since
        self.register_load_state_dict_post_hook(_merge_again)

    def linears(self) -> list[nn.Module]:
        return [child(self, name) for name in self.parts]

    def merge(self) -> bool:
        """Make one product of them if they differ in out_features only; whether they are one now."""
        self.merged, self._merged_of, self._given = joined(self.linears()), self.linears(), False
        self._merged_tensors = _tensors(self._merged_of) if self.merged else []
        for device in {tensor.device for tensor in self.merged.stored() if tensor.is_cuda} if self.merged else ():
            torch.cuda.synchronize(device)  # a product may read its weight before the kernel before it has ended
        return self.merged is not None

    def outputs(self, x: Tensor, norm: nn.Module | None = None) -> Sequence[Tensor]:
        """What each linear makes of x [..., in_features], in their order; merged, slices of one tensor. norm: of x
        first, in the same kernel: FusedLayer has found them merged."""
        merged: Any = self.current() if norm is None else self.merged
        if merged is None:
            return [linear(x) for linear in self.linears()]
        y = merged(x) if norm is None else merged.fused(x, norm=norm)
        return y.split([part.out_features for part in self.linears()], dim=-1)

    def current(self) -> QuantizedLinear | None:
        """The one linear, while its parts are those that it was made of, with slices of its tensors, and nobody watches
        them or trains their biases. Other parameters in their place end it, as QuantizedLinear.decoded."""
        if self.merged is None:
            return None
        eager = not torch.compiler.is_compiling()
        parts: list[Any] = self._merged_of if eager else self._known_parts()
        if eager and self.merged._decoded is not None:
            # Where they were written, anew into their slices, all before one runs: apart, autograd keeps slices, and
            # counts a write into one as one into each.
            for part in parts:
                part.decoded()
        for now, before in zip(self.linears(), parts, strict=True):
            if now is not before or now._apart or watched(now):
                self.merged._halves = None  # they make their own
                return None
        if eager:
            if replaced(tensors := _tensors(parts), self._merged_tensors):
                if all(isinstance(tensor, nn.Parameter) for tensor in tensors):
                    self.merged = None
                return None
            if self.merged._halves_for is not None:
                self._keep_halves_of(versions(tensors))
        bias = self.merged.bias
        return None if bias is not None and any(_alone(part.bias, bias) for part in parts) else self.merged

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.parts:
            self._given = True

    def _known_parts(self) -> list[Any]:
        """What was merged, for compiled code: the linears of now, where none was assigned. Of a part that it finds in
        two places it would ask at each call whether both are the same."""
        return self._merged_of if self._given else self.linears()

    def _keep_halves_of(self, at: list[int]) -> None:
        """The whole's alone, of parts that were written so often: its own tensors do not count that."""
        merged: Any = self.merged
        parts: list[Any] = self._merged_of
        if at != self._merged_at:
            merged._halves, self._merged_at = None, at
        if merged._halves is None:
            for part in parts:
                part._halves = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Merging":
        """Moved or cast, each tensor gets memory of its own: they are merged again."""
        again, self.merged = self.merged is not None, None
        super()._apply(fn, recurse)
        if again:
            self.merge()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """With what is decoded of the whole anew where a part was written, as of a linear."""
        self.current()
        return self.__dict__

    def __setstate__(self, state: Any) -> None:
        """Copied or unpickled, tensors may have memory of their own: then they are merged again."""
        super().__setstate__(state)
        _merge_again(self)


def _tensors(linears: Sequence[Any]) -> list[Tensor]:
    return [tensor for linear in linears for tensor in linear.stored()]


def _alone(bias: Any, whole: Tensor) -> bool:
    """Whether a part's bias is to get a gradient, which the whole's would not give it, or was put into other memory
    (which compiled code does not look at), as torch.func.functional_call does, under vmap without an address."""
    if (bias.requires_grad and torch.is_grad_enabled()) or not isinstance(bias, nn.Parameter):
        return True
    return not torch.compiler.is_compiling() and not _share_memory(bias, whole)


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _merge_again(module: Merging, keys: Any = None) -> None:
    """Where tensors are no slices of the whole's memory, as after load_state_dict(assign=True)."""
    if module.merged is None:
        return
    whole = module.merged
    kept = ["_decoded"] if whole._decoded is not None else []
    for name in [*whole.tensor_names, *(["bias"] if whole.bias is not None else []), *kept]:
        pieces = [getattr(part, name) for part in module._merged_of]
        if any(piece is None or not _share_memory(piece, getattr(whole, name)) for piece in pieces):
            module.merge()
            return


class QuantizedMLP(Merging):
    """Llama's MLP, down(act(gate(x)) * up(x)), on the same linears. SiLU of a merged product is left to `down_proj`."""

    parts = ("gate_proj", "up_proj")

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.act_fn = mlp.act_fn

    def normed(self, x: Tensor, norm: nn.Module, added: Tensor) -> tuple[Tensor, Tensor]:
        """(What this makes of norm(x + added), x + added): FusedLayer has found that the merged linear `norms`."""
        merged: Any = self.merged
        y, total = merged.normed(x, norm, added)
        return child(self, "down_proj").multiply_gated(y), total

    def forward(self, x: Tensor, norm: nn.Module | None = None, residual: Tensor | None = None) -> Tensor:
        """norm: of x first; residual: added to the result; both in the linears' kernels (see FusedLayer)."""
        merged: Any = self.current() if norm is None else self.merged  # as in `outputs`
        down = child(self, "down_proj")
        if norm is not None:
            one = math.prod(x.shape[:-1]) == 1  # behind a product it is in one kernel of one token alone
            gated = down.gates_before and not (one and merged.gates_behind)
            return down.fused(merged.fused(x, norm=norm, gates=not gated), gated=gated, residual=residual)
        if merged is not None and is_silu(self.act_fn):
            middle = merged.gated(x)
            if middle is not None:
                return down(middle)
            if isinstance(down, QuantizedLinear) and not hooked(down):
                return down.multiply_gated(merged(x))
        gate, up = self.outputs(x)
        return down(self.act_fn(gate) * up)


def is_silu(act: Any) -> bool:
    known = isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation"  # transformers' own, which is F.silu
    return known and not watched(act)


def is_rms_norm(norm: nn.Module, dtype: torch.dtype) -> bool:
    """Whether kernels may take this norm's gain, beside numbers of this dtype, and leave out its forward."""
    kind, epsilon = type(norm), getattr(norm, "variance_epsilon", None)
    known = kind.__name__ in RMS_NORMS and kind.__module__.startswith("transformers.") and isinstance(epsilon, float)
    return known and norm.weight.dtype == dtype and not hooked(norm)


def joined(linears: Sequence[nn.Module]) -> QuantizedLinear | None:
    """One linear whose outputs are those of all side by side; None if they differ in more than out_features.

    Its tensors are listed nowhere (DDP would send buffers at every forward); the linears' become slices of them, and of
    its decoded weight where they have one.
    """
    first = linears[0]
    if not isinstance(first, QuantizedLinear) or any(_kind(linear) != _kind(first) for linear in linears):
        return None
    wide = first.bias is not None
    online = first.transform()
    alike: list[Any] = list(linears)
    with torch.device("meta"):
        whole = type(first)(
            first.in_features, sum(part.out_features for part in alike), wide, torch.float32, first.format
        )
    for name in [name for name, _ in whole.named_parameters()]:
        delattr(whole, name)
    for name in [*first.tensor_names, *(["bias"] if wide else [])]:
        tensors = [getattr(part, name) for part in alike]
        memory, pieces = _side_by_side([tensor.data for tensor in tensors])
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.data = piece
        whole.hold(name, memory)
    if first.decoded() is not None:
        memory, pieces = _side_by_side([part._decoded for part in alike])
        whole.hold("_decoded", memory)
        for part, piece in zip(alike, pieces, strict=True):
            part._decoded = piece
        whole.kept_from([getattr(whole, name) for name in first.tensor_names])
    whole._halves_for = first._halves_for
    for part in alike:
        part._apart, part._halves = False, None  # which the whole has from now on
    whole.tensor_names, whole.spec = first.tensor_names, first.spec
    whole.train(first.training)
    if online is not None:
        whole.online_name = first.online_name
        whole.add_module(first.online_name, OnlineHadamard(online.rotation).to(memory.device))
    return whole


def _side_by_side(tensors: list[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """(all rows in one memory, which is shared if theirs is, and each tensor's slice of it)."""
    memory = torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(tensors[0].dtype)  # for autocast
    if tensors[0].is_shared():
        memory.share_memory_()
    return memory, memory.split([len(tensor) for tensor in tensors])


def _kind(linear: nn.Module) -> Any:
    """What is equal in linears that can be one; the linear itself, unlike any other, where it can be part of none."""
    if not isinstance(linear, QuantizedLinear) or hasattr(linear, "_hf_hook"):
        return linear
    online, tensors = linear.transform(), linear.stored()
    weights = linear.format.weights
    ragged = weights.kind == "fp8" and linear.out_features % formats.stored_block(weights)[0]  # the last scale's rows
    sharded = any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors)
    if ragged or sharded or any(tensor.device.type == "meta" for tensor in tensors):
        return linear
    rotation = None if online is None else online.rotation
    bias, decoded = (None if t is None else (t.dtype, t.device) for t in (linear.bias, linear.decoded()))
    rows = [(tensor.device, linear.out_features / len(tensor)) for tensor in tensors]  # that share one of its rows
    return type(linear), linear.in_features, linear.format, linear.tensor_names, rotation, bias, decoded, rows
