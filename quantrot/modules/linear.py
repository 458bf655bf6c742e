"""Linears that turn their input, and what all quantized linears share: tensors as on disk, and a forward."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from quantrot import formats
from quantrot.checkpoint import DTYPES
from quantrot.formats import ActivationFormat, LinearFormat
from quantrot.kernels.between import try_gate
from quantrot.kernels.fp8.reference import gate
from quantrot.kernels.fp8.round_trip import round_trip_fp8
from quantrot.kernels.hadamard import hadamard_transform
from quantrot.kernels.halves import FEW, FEW_ALONE, halves_gemm
from quantrot.kernels.mxfp4 import round_trip_mxfp4
from quantrot.kernels.mxfp4.operators import FUSED
from quantrot.kernels.operators import constant, eager_inference
from quantrot.rotation import Rotation, signs

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def watched(module: nn.Module) -> bool:
    """Whether somebody wants to see this module being called, or has it do something else."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    own = module.forward  # asked for in any case: compiled code sees in no dict that another one came later
    return "forward" in module.__dict__ and _replaced(module, own)


def _replaced(module: nn.Module, own: Any) -> bool:
    """Whether the forward that it has is not its class's. accelerate's hook that only moves tensors is none."""
    if isinstance(own, partial) and type(getattr(module, "_hf_hook", None)).__name__ == "AlignDevicesHook":
        return not isinstance(module._old_forward, MethodType)
    # By the code: a hook leaves a bound one there as it goes, and torch.compile finds every other comparison unequal.
    return getattr(own, "__code__", None) is not getattr(type(module).forward, "__code__", None)


def hooked(module: nn.Module) -> bool:
    """Or accelerate moves it, or its input, as it is called."""
    return watched(module) or "_hf_hook" in module.__dict__


def hooked_everywhere() -> bool:
    """Whether somebody sees every module being called (register_module_forward_hook); compiled code does not ask."""
    return not torch.compiler.is_compiling() and _has_any_global_hook()


def child(module: nn.Module, name: str) -> Any:
    """Its module of this name, which nn.Module takes 0.6 us to find."""
    return module._modules[name]


def as_autocast(x: Tensor) -> Tensor:
    """x in autocast's dtype where that is on, as nn.Linear takes it: float64 and integers stay."""
    return x.to(autocast_dtype(x))


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Of as_autocast(x)."""
    kind = x.device.type
    casts = x.dtype in FLOATS and kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if casts else x.dtype


class OnlineHadamard(nn.Module):
    """x -> x R over the last dimension, R one of `quantrot.rotation`'s Hadamard rotations; [..., m * width], any dtype.

    stored: whether the checkpoint carries the matrix (for engines that read it); it is held, the transform is fast.
    """

    signs: Tensor | None

    def __init__(self, rotation: Rotation, stored: bool = False) -> None:
        super().__init__()
        self.rotation, self.block = rotation, rotation.block
        numbers = signs(rotation)
        if numbers is None:  # which accelerate does not take for a buffer
            self.signs = None
        else:
            self.register_buffer("signs", numbers, persistent=False)
        if stored:
            shape = rotation.block, rotation.block
            self.weight = nn.Parameter(torch.empty(shape, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.signs is not None and x.shape[-1] != self.signs.shape[0]:
            x = x.unflatten(-1, (-1, self.signs.shape[0]))
            return hadamard_transform(x, block=self.block, signs=self.signs).flatten(-2)
        return hadamard_transform(x, block=self.block, signs=self.signs)


class RotatedLinear(nn.Module):
    """A linear in its own dtype whose input is turned by `online`, held under the name `online_name`.

    No nn.Linear: what takes one for such (peft's adapters, torchao's filters) would add W x to W (x R).
    """

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
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype)) if bias else None
        self.online_name = online_name
        self.add_module(online_name, online)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.get_submodule(self.online_name)(x), self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class QuantizedLinear(nn.Module):
    """y = Q(x R) W^T + b: x [..., in_features] in float32, float16 or bfloat16, y in the same, whatever the model's
    dtype; autocast's where that is on. W is in `fmt`'s tensors.

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
        self.tensor_names: list[str] = []
        self.tensor_dtypes: list[torch.dtype] = []
        self._decoded: Tensor | None = None
        self._halves: tuple[Tensor, ...] | None = None  # () where there are none; made at the first few tokens
        self._halves_for: torch.dtype | None = None  # where `halve` was asked for: the model's dtype, as casts leave it
        self._kept_from: list[Tensor] = []  # what both are made of
        self._kept_at: list[int] = []
        for suffix, stored, shape in formats.stored_tensors(fmt.weights, out_features, in_features, native_fp8):
            self.register_parameter(suffix, nn.Parameter(torch.empty(shape, dtype=DTYPES[stored]), requires_grad=False))
            self.tensor_names.append(suffix)
            self.tensor_dtypes.append(DTYPES[stored])
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype), requires_grad=False) if bias else None
        self.online_name = online_name if online is not None else ""
        if online is not None:
            self.add_module(online_name, online)
        self._describe()
        self._apart = True  # its tensors are no slices of a merged linear's (see merged.py)
        self.register_state_dict_post_hook(_each_in_its_memory)

    def _describe(self) -> None:
        """Say in one string, `spec`, what the `constant` methods that take it depend on: compiled code then compares
        that at each call, and not some twenty fields."""
        self.spec = repr((self.format, self.tensor_names, self.online_name, self.fused_hadamard()))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if "spec" in self.__dict__ and name in ("format", self.online_name):
            self._describe()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Also what an assignment does: a weight that was decoded from other tensors is so no longer."""
        super().register_parameter(name, param)
        self._apart = True
        if name in self.tensor_names:
            self._decoded = self._halves = None

    def hold(self, name: str, tensor: Tensor) -> None:
        """Make it an attribute that neither state_dict nor parameters() lists. A Parameter all the same: sizes of other
        attributes become variables in code compiled for two models, and kernels are chosen by sizes."""
        self.__dict__[name] = nn.Parameter(tensor, requires_grad=False)

    def runs_packed(self, device: torch.device) -> bool:
        """Whether `multiply` has kernels for this device that read the stored tensors; nothing is decoded then."""
        return False

    def stored(self) -> list[Tensor]:
        """The tensors that are the quantized weight, in the order of formats.stored_tensors."""
        if torch.compiler.is_compiling():
            return [getattr(self, name) for name in self._names(self.spec)]
        listed: Any = self._parameters  # nn.Module takes 0.5 us to look there; a merged linear lists none
        return [listed[name] if name in listed else getattr(self, name) for name in self.tensor_names]

    @constant
    def _names(self, spec: str) -> tuple[str, ...]:
        return tuple(self.tensor_names)

    @constant
    def _dtypes(self, spec: str) -> tuple[torch.dtype, ...]:
        return tuple(self.tensor_dtypes)

    def uncast(self) -> list[Tensor]:
        """stored(), for a product. ValueError for what was cast, but for scales that were only widened, as peft's
        prepare_model_for_kbit_training leaves bfloat16's: their numbers are the same."""
        tensors = self.stored()
        if any(now.dtype != dtype for now, dtype in zip(tensors, self._dtypes(self.spec), strict=True)):
            tensors = [_narrowed(*each) for each in zip(tensors, self.tensor_dtypes, strict=True)]
            found = ", ".join(
                f"{name} is {tensor.dtype}, not {dtype}"
                for name, tensor, dtype in zip(self.tensor_names, tensors, self.tensor_dtypes, strict=True)
                if tensor.dtype != dtype
            )
            if found:
                raise ValueError(
                    f"{type(self).__name__}: its {found}: parameters were cast, as fully_shard's mp_policy does; give "
                    "it ignored_params={p for x in model.modules() if isinstance(x, QuantizedLinear) for p in "
                    "x.parameters() if not p.requires_grad}; or by p.data = p.data.to(dtype); load the model again, "
                    "and cast it by model.to(dtype), which leaves these as they are"
                )
        return tensors

    def transform(self) -> OnlineHadamard | None:
        """What turns x, or None."""
        online = child(self, self.online_name) if self.online_name else None
        assert online is None or isinstance(online, OnlineHadamard)
        return online

    def fused_hadamard(self) -> int:
        """The width of the online transform where the quantizer of the activations does it on its way, else 0."""
        online = self.transform()
        return 0 if online is None else fused_hadamard(online.rotation, self.format.activations)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight [out_features, in_features] in `dtype`."""
        return formats.dequantize(self.format.weights, self.uncast(), self.in_features, dtype)

    def decode(self, dtype: torch.dtype) -> None:
        """Keep the dequantized weight for the forwards to come. load_state_dict does so anew, other tensors end it."""
        weight, kept = self.dequantized(dtype), self._decoded
        if kept is None or (kept.dtype, kept.device) != (weight.dtype, weight.device) or kept.is_inference():
            self.hold("_decoded", weight)
            self._apart = True
        else:
            kept.copy_(weight)  # which may be a slice of a merged linear's
        self.kept_from(self.stored())
        self._halves = None

    def halve(self) -> None:
        """Keep what a few bfloat16 tokens are multiplied by on a CPU (`kernels.halves`), if there is a product for this
        weight; in code that is not compiled. After an assignment, a cast or a copy it is made again when it is needed,
        unless `up_to_date` ends it."""
        made, tensors = None, self.stored()
        if tensors[0].device.type == "cpu" and formats.has_halves(
            self.format.weights, self.out_features, self.in_features
        ):
            made = formats.halve(self.format.weights, self.uncast(), self.in_features)
        if self._decoded is None:
            self.kept_from(tensors)
        self._halves_for, self._halves = torch.bfloat16, made or ()

    def kept_from(self, tensors: list[Tensor]) -> None:
        """Remember what these tensors were when what is kept was made of them."""
        self._kept_from, self._kept_at = tensors, versions(tensors)

    def decoded(self) -> Tensor | None:
        """The weight that was kept, if it was decoded from the tensors that are here now."""
        return self._decoded if self._decoded is not None and self.up_to_date() else None

    def up_to_date(self) -> bool:
        """Whether what is kept was made of the tensors that are here now. Other parameters than those, which accelerate
        and FSDP put here where no assignment is seen, end it; where these were written in place, other than through
        their `data`, it is made anew. Compiled code does not look."""
        if torch.compiler.is_compiling():
            return True
        now = self.stored()
        if replaced(now, self._kept_from):
            if all(isinstance(tensor, nn.Parameter) for tensor in now):  # or they are functional_call's, for a while
                self._decoded = self._halves = self._halves_for = None
            return False
        if versions(now) != self._kept_at:
            self._halves = None
            if self._decoded is not None:
                self.decode(self._decoded.dtype)
        return True

    def turned(self, x: Tensor) -> Tensor:
        """x after the online rotation, or x."""
        return x if (online := self.transform()) is None else online(x)

    def multiply(self, x: Tensor) -> Tensor:
        """The product from the stored tensors. Subclasses that have kernels for it do it with those."""
        return self.multiply_wide(x, self.dequantized(x.dtype))

    def multiply_wide(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product in x's dtype from a weight dequantized to it."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        operand = self.operand(x)
        widened = operand.dtype != x.dtype  # which autocast would undo: infinities in float16
        with torch.autocast(x.device.type, enabled=False) if widened else nullcontext():
            y = F.linear(operand, weight.to(operand.dtype), bias if bias is None else bias.to(operand.dtype))
        return y.to(x.dtype)

    def _takes_halves(self, x: Tensor) -> bool:
        """Whether x is few enough tokens for a product by halves, which has no derivative: in training a checkpoint
        would run another forward than it differentiates. Nor in compiled code, which sees no writes, and may be saved
        for other machines."""
        if self._halves_for != torch.bfloat16 or x.dtype != torch.bfloat16 or self.training:
            return False
        if torch.jit.is_tracing() or x.shape[-1] != self.in_features:
            return False
        few = FEW if self._decoded is not None else FEW_ALONE
        return eager_inference(x) and 0 < x.numel() <= few * self.in_features  # no question of compiled code's sizes

    def halves(self) -> tuple[Tensor, ...]:
        """What `halve` keeps, of the tensors that are here now, or nothing."""
        if self._halves is not None and not self.up_to_date():
            return ()
        if self._halves is None and all(isinstance(tensor, nn.Parameter) for tensor in self.stored()):
            self.halve()
        return self._halves or ()

    def multiply_halves(self, x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
        """The product by `halves`, in bfloat16."""
        y = halves_gemm(self.operand(x), packed, scales)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def operand(self, x: Tensor) -> Tensor:
        """x [..., in_features], turned and quantized, as the product sees it, in x's dtype; MXFP4 of float16 in
        float32, for 60000 rounds to 65536."""
        hadamard = self.fused_hadamard()
        x = x if hadamard else self.turned(x)
        x = x.float() if x.dtype == torch.float16 and self.format.activations.kind == "mxfp4" else x
        passes_fp8 = self.format.weights.kind == "mxfp4"  # as mxfp4_gemm
        return quantize_dequantize(x, self.format.activations, hadamard, passes_fp8=passes_fp8)

    def multiply_gated(self, x: Tensor) -> Tensor:
        """self(silu(gate) * up), x [..., 2 * in_features] gate and up side by side; both are rounded to x's dtype.

        Subclasses may have kernels that do all of it, for the same bits.
        """
        if (middle := try_gate(x)) is None:
            gate, up = x.chunk(2, -1)
            middle = F.silu(gate) * up
        return self(middle)

    def gated(self, x: Tensor) -> Tensor | None:
        """silu(gate) * up, [..., out_features / 2], where self(x) is gate and up, side by side; rounded in between.

        None where it is not one operator.
        """
        return None

    gates_before, gates_behind = False, False  # which of `gated` and `gates` this linear's `_fused` takes

    def fuses(self, device: torch.device, tokens: int) -> bool:
        """Whether this linear has `fused`, and what that does for so many tokens is one kernel there, or two."""
        return False

    def norms(self, x: Tensor) -> bool:
        """Whether this linear has `normed`, which of x, 16 bits a number, is one kernel before the product, as then is
        `fused` of a norm alone."""
        return False

    def normed(self, x: Tensor, norm: Any, added: Tensor) -> tuple[Tensor, Tensor]:
        """(The product of norm(x + added), x + added)."""
        raise AssertionError(f"{type(self).__name__} has no `normed`: see `norms`")

    def fused(
        self,
        x: Tensor,
        *,
        norm: Any = None,
        residual: Tensor | None = None,
        gated: bool = False,
        gates: bool = False,
    ) -> Tensor:
        """The product of x or of norm(x), Llama's, plus residual. gated: of silu(x's first half) * its second; gates:
        the same is made of the product."""
        weight, epsilon = (None, 0.0) if norm is None else (norm.weight, norm.variance_epsilon)
        takes = ("gated", gated, self.gates_before), ("gates", gates, self.gates_behind)
        rest = {name: asked for name, asked, taken in takes if taken}
        x = gate(x) if gated and not self.gates_before else x
        y = self._fused(x, norm=weight, epsilon=epsilon, residual=residual, **rest)
        return gate(y) if gates and not self.gates_behind else y

    def _fused(self, x: Tensor, **rest: Any) -> Tensor:
        raise AssertionError(f"{type(self).__name__} has no `fused`: see `fuses`")

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype not in (*FLOATS, torch.float64):  # the last of which formats with wide activations take
            raise ValueError(f"x: {x.dtype}; allowed: {', '.join(map(str, FLOATS))}; convert it")
        x = as_autocast(x)
        decoded = self.decoded()
        if self._takes_halves(x) and (halves := self.halves()):
            return self.multiply_halves(x, *halves)
        if decoded is None or decoded.dtype not in (x.dtype, torch.float32):  # a narrower one has lost bits
            return self.multiply(x)
        return self.multiply_wide(x, decoded.to(x.dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedLinear":
        """Stored tensors are moved but never cast: what `model.to(torch.float16)` means is the rest of the model.

        As bytes they are none of the floating-point tensors that a cast looks for, and `type`, which casts everything,
        only moves them. A weight that was decoded is decoded anew, where it is now and in the dtype of now.
        """

        def keep(tensor: Tensor) -> Tensor:
            made = fn(tensor)
            return made if tensor.dtype != torch.uint8 or made.dtype == torch.uint8 else tensor.to(made.device)

        wide, self._decoded = None if self._decoded is None else fn(self._decoded[:0]).dtype, None
        if self._halves_for is not None:
            self._halves, self._halves_for = None, fn(torch.empty(0, dtype=self._halves_for)).dtype
        self._apart = True
        stored = {name: getattr(self, name).dtype for name in self.tensor_names}
        for name in stored:
            getattr(self, name).data = getattr(self, name).data.view(torch.uint8)
        try:
            super()._apply(keep, recurse)
        finally:
            for name, dtype in stored.items():
                getattr(self, name).data = getattr(self, name).data.view(dtype)
        if wide is not None and not self.runs_packed(self.stored()[0].device):
            self.decode(wide if wide in (torch.bfloat16, torch.float16) else torch.float32)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Halves are in the order of this machine's kernel: they are made anew. What is decoded is of the tensors as
        they are, for a copy's count writes anew."""
        self.decoded()
        return self.__dict__ | {"_halves": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._kept_at = versions(self._kept_from)

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
        if changed := [name for name in self.tensor_names if _changes(state.get(prefix + name), getattr(self, name))]:
            found = ", ".join(f"{prefix}{name} is {state[prefix + name].dtype}" for name in changed)
            stored = ", ".join(str(getattr(self, name).dtype) for name in changed)
            rest[-1].append(  # load_state_dict's errors
                f"{found}, not {stored}, and a cast changes its numbers; give the state_dict of a converted model as "
                "it is, or convert the weights first"
            )
            return
        decoded = self.decoded()  # which assigning ends
        super()._load_from_state_dict(state, prefix, metadata, *rest)
        loaded = any(prefix + name in state for name in self.tensor_names)  # of a merged linear the parts' are
        self._apart = self._apart or (loaded and bool(metadata.get("assign_to_params_buffers")))
        if decoded is not None and loaded:
            self.decode(decoded.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {formats.label(self.format)}"


def _changes(given: Any, held: Tensor) -> bool:
    """Whether numbers of a state dict would be others in the dtype that is held. Codes that became floating-point may
    have lost bits, which does not show."""
    if not isinstance(given, Tensor) or given.dtype == held.dtype or given.device.type == "meta":
        return False
    if given.is_floating_point() != held.is_floating_point():
        return True
    return not torch.equal(given.to(held.dtype).double(), given.double())


def _narrowed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor that was widened from bfloat16 to float32, as it was; any other one as it is. Nothing is kept: FSDP's
    are its own."""
    if (tensor.dtype, dtype) != (torch.float32, torch.bfloat16):
        return tensor
    narrow = tensor.to(dtype)
    return narrow if torch.equal(narrow.float(), tensor) else tensor


def sharded(weight: Tensor) -> str:
    """What a weight is that is not all of a matrix, as FSDP and tensor parallelism leave one, or nothing."""
    kind = type(weight.data)
    return "" if kind is Tensor and weight.dim() == 2 else f"{kind.__name__} {list(weight.shape)}"


def replaced(now: Sequence[Tensor], before: Sequence[Tensor]) -> bool:
    """Whether these are other tensors, not the same ones with other numbers."""
    return any(a is not b for a, b in zip(now, before, strict=True))


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often each has been written, which tensors of inference mode do not know."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _each_in_its_memory(module: Any, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
    """A linear's tensors in a state dict, slices of a merged one's memory, each in a storage that begins and ends with
    it, over the same memory: who writes safetensors (accelerate's `save_state`, say) takes slices of one storage for
    one tensor, and leaves out all but one. Wherever the linear is: an adapter may hold it."""
    for key in (f"{prefix}{name}" for name in (*module.tensor_names, "bias")):
        tensor = state.get(key)
        if type(tensor) is not Tensor or tensor.device.type == "meta":  # keep_vars', or FSDP's
            continue
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            with torch.cuda.device_of(tensor):  # from_dlpack takes tensors of the current GPU alone
                state[key] = torch.from_dlpack(tensor.view(torch.uint8)).view(tensor.dtype)


def fused_hadamard(rotation: Rotation, activations: ActivationFormat) -> int:
    """The width of this online transform where the quantizer of these activations does it on its way, else 0."""
    fuses = activations.kind == "mxfp4" and rotation.kind == "hadamard" and rotation.block in FUSED
    return rotation.block if fuses else 0


def quantize_dequantize(
    x: Tensor, activations: ActivationFormat, hadamard: int = 0, *, passes_fp8: bool = False
) -> Tensor:
    """x [..., K] as the quantized multiplication sees it, in x's dtype. Blocks run over the flattened tokens.

    hadamard: `fused_hadamard`'s width; what it makes of x is not rounded to x's dtype in between, as in the kernels.
    As in the kernels' products, MXFP4 passes gradients unchanged, and FP8 does where it `passes_fp8`, in front of MXFP4
    weights; else it has none: a backward through it raises.
    """
    if activations.kind == "none":
        return x
    if (activations.kind == "mxfp4" or passes_fp8) and not eager_inference(x):  # a Function takes 28 us to call
        return _RoundTrip.apply(x, activations, hadamard)
    return _round_trip(x, activations, hadamard)


def _round_trip(x: Tensor, activations: ActivationFormat, hadamard: int) -> Tensor:
    if activations.kind == "mxfp4":
        return round_trip_mxfp4(x, activations.scale_rule, hadamard=hadamard)
    flat = x.reshape(-1, x.shape[-1])
    return round_trip_fp8(flat, activations.block, activations.scale_rule).view(x.shape)


class _RoundTrip(torch.autograd.Function):
    """x, turned by blocks of `hadamard` columns (0: as it is), quantized and back; the gradient is the transform's,
    straight through the rounding."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, activations: ActivationFormat, hadamard: int) -> Tensor:  # type: ignore[override]
        return _round_trip(x, activations, hadamard)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # type: ignore[override]
        ctx.hadamard = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return hadamard_transform(grad, block=ctx.hadamard) if ctx.hadamard else grad, None, None
