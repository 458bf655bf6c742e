"""How the operators of this folder are registered, whether Triton runs them, and what is constant to torch.compile."""

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, wraps
from numbers import Real
from typing import Any, Literal

import torch

HOPPER_SHARED = 227 << 10  # bytes of shared memory that a program may have on Hopper
NUMBERS = (float, int, torch.SymFloat, torch.SymInt, Real)  # numpy's are Real, by the slow way


def implement(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: this operator on CPU and CUDA; its first argument is a tensor.

    Triton launches on the current device, whatever device the tensors are on: the first argument's is made current.
    Under autocast it is the same operator: what it promises of float32 sums and of the result's dtype holds there, too.
    """
    namespace, _, operator = name.partition("::")

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def on_its_device(first: torch.Tensor, *others: Any) -> Any:
            if first.device.index == torch.cuda.current_device():
                return function(first, *others)
            with torch.cuda.device(first.device):
                return function(first, *others)

        def under_autocast(*args: Any, **kwargs: Any) -> Any:
            with torch._C._DisableAutocast():
                return getattr(getattr(torch.ops, namespace), operator)(*args, **kwargs)

        torch.library.impl(name, "CPU", function)
        torch.library.impl(name, "CUDA", on_its_device)
        torch.library.impl(name, ("AutocastCPU", "AutocastCUDA"), under_autocast)
        return function

    return register


torch.library.define("quantrot::no_gradient", "(Tensor grad, SymInt[] shape, str why) -> Tensor")


@implement("quantrot::no_gradient")
def _no_gradient(grad: torch.Tensor, shape: list[int], why: str) -> torch.Tensor:
    raise NotImplementedError(why)


@torch.library.register_fake("quantrot::no_gradient")
def _no_gradient_fake(grad: torch.Tensor, shape: list[int], why: str) -> torch.Tensor:
    return grad.new_empty(shape)


def no_gradients(ctx: Any, grads: tuple[torch.Tensor | None, ...], why: str) -> Any:
    """What a backward returns that has none for its inputs, of ctx.shapes: an error once it runs. torch.compile traces
    the backward of every forward outside of no_grad, which must not fail already."""
    grad = next(grad for grad in grads if grad is not None)
    wanted = zip(ctx.shapes, ctx.needs_input_grad, strict=True)
    return tuple(torch.ops.quantrot.no_gradient(grad, shape, why) if needed else None for shape, needed in wanted)


NO_BACKWARD = (
    "quantized attention and KV caches are for inference and have no backward; train with attention: bf16 and "
    "kv_cache: bf16"
)


class _InferenceOnly(torch.autograd.Function):
    """y, as if the inputs had a gradient, and an error where it is asked for."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.shapes = [x.shape for x in (y, *inputs)]
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return no_gradients(ctx, grads, NO_BACKWARD)


def inference_only(y: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    """y, computed from the inputs without a gradient: a backward through it raises instead of missing a term."""
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    return _InferenceOnly.apply(y, *inputs) if wanted else y


def register_no_gradient(name: str, why: str) -> None:
    """Have a backward through this operator raise. Its forward keeps nothing: a model in eval mode builds a graph that
    nobody runs backward."""

    def keep_shapes(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.shapes = [x.shape if isinstance(x, torch.Tensor) else None for x in inputs]

    def refuse(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return no_gradients(ctx, grads, why)

    torch.library.register_autograd(name, refuse, setup_context=keep_shapes)


def refuse_create_graph() -> None:
    """For a backward from what its forward made of the inputs: an error where its gradients are to be differentiated
    again, which would miss the inputs' terms. Compiled code refuses that by itself (torch 2.11: has no graph)."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NotImplementedError(
            "create_graph: this product's gradients have no gradient themselves; put nn.Linear in its layer's place "
            "where they are differentiated again"
        )


def exporting() -> bool:
    """Whether torch.export traces this, whose graph is for any number of tokens. Not torch.compile, in which torch 2.11
    says is_exporting, too."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def refuse_tangents(*tensors: torch.Tensor | None) -> None:
    """NotImplementedError for a forward-mode derivative (jvp, jacfwd), which torch drops without a word where an
    operator has a backward alone."""
    if any(t is not None and _has_tangent(t) for t in tensors):
        raise NotImplementedError(
            "quantrot's operators have no forward-mode derivative; use a backward: .backward() or torch.autograd.grad"
        )


def eager_inference(*tensors: torch.Tensor) -> bool:
    """Whether an operator without derivatives may stand for plain torch on these: nobody traces or differentiates it,
    and no subclass or transform (vmap) of torch's has rules of its own for it."""
    if torch.compiler.is_compiling():
        return False
    graph = torch.is_grad_enabled()
    for t in tensors:
        ordinary = type(t) is torch.Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(t)
        if not ordinary or (graph and t.requires_grad) or _has_tangent(t):
            return False
    return True


def check_signs(signs: torch.Tensor) -> None:
    """ValueError for signs of a dtype that has no +-1, or that are to have a gradient."""
    if signs.dtype == torch.bool or signs.is_complex() or signs.requires_grad:
        found = f"{signs.dtype}{', with a gradient' if signs.requires_grad else ''}"
        raise ValueError(f"signs: {found}; allowed: +-1 in a dtype of integers or floats, without a gradient")


def number(
    name: str, value: float, kind: Literal["finite", "non-negative, finite", "positive, finite"] = "finite"
) -> float:
    """value as a float, or ValueError for what is no number of this kind. A tensor is none: a GPU's would be waited
    for, and its gradient be lost."""
    if isinstance(value, NUMBERS) and -math.inf < (found := float(value)) < math.inf:
        # literals: torch.compile(dynamic=True) makes symbols of a module's floats, and fails on them in a backward
        if kind == "finite" or found > 0 or (found == 0 and kind == "non-negative, finite"):
            return found
    raise ValueError(f"{name}: {value!r:.80}; a {kind} number is needed")


def check_backend(backend: str, allowed: tuple[str, ...]) -> None:
    """ValueError for a backend that none is called."""
    if backend not in allowed:
        raise ValueError(f"backend: {backend!r}; allowed: {', '.join(allowed)}")


def check_bias(bias: torch.Tensor | None, rows: int) -> None:
    """ValueError for a bias that is not one floating-point number a row of the weight."""
    if bias is not None and (bias.shape != (rows,) or not bias.is_floating_point()):
        raise ValueError(f"bias: {bias.dtype} {list(bias.shape)}; allowed: [{rows}], of a floating-point dtype")


def _has_tangent(x: torch.Tensor) -> bool:
    if torch.autograd.forward_ad._current_level < 0:
        return False
    while torch._C._functorch.is_batchedtensor(x):  # vmap has no rule for the question
        x = torch._C._functorch.get_unwrapped(x)
    return torch.autograd.forward_ad.unpack_dual(x).tangent is not None


def check_device(**tensors: torch.Tensor | None) -> None:
    """ValueError for tensors, by name, that are not on the first one's device: kernels are given bare addresses."""
    (first, leader), *others = ((name, t) for name, t in tensors.items() if t is not None)
    for name, t in others:
        if t.device != leader.device:
            raise ValueError(f"{name}: on {t.device}, {first} is on {leader.device}; move them to one device")


def check_around(
    x: torch.Tensor,
    features: int,
    norm: torch.Tensor | None,
    residual: torch.Tensor | None,
    dtype: torch.dtype | None = None,
    residual_name: str = "residual",
) -> None:
    """ValueError for a norm [K] or a residual [..., features] of another shape, dtype or device than x [..., K] asks
    for; dtype: of the residual, x's if None; residual_name: what the caller's argument is called."""
    refuse_tangents(norm, residual)
    behind = residual_name, residual, (*x.shape[:-1], features), dtype or x.dtype
    asked = (("norm", norm, x.shape[-1:], x.dtype), behind)
    for name, given, shape, kind in asked:
        if given is not None and (given.shape != shape or given.dtype != kind or given.device != x.device):
            found = f"{given.dtype} {list(given.shape)} on {given.device}"
            raise ValueError(f"{name}: {found}; allowed: {kind} {list(shape)} on {x.device}")


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program on this device may have; Hopper's, the most there is, where there is no GPU."""
    if device.type != "cuda":
        return HOPPER_SHARED
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


@cache
def has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def uses_triton(x: torch.Tensor, backend: str) -> bool:
    """Whether this call runs in Triton; ValueError where it was asked for and cannot."""
    able = has_triton() and (x.device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
    if backend == "triton" and not able:
        raise ValueError(
            f"backend: 'triton' needs a CUDA device and Triton, the data is on {x.device}; allowed: auto, reference"
        )
    return backend == "triton" or (backend == "auto" and able and x.device.type == "cuda")


def constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compiler.assume_constant_result, which imports Dynamo: 0.9 s in every process, compiled or not."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def kept(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A decorator: a constant tensor of its arguments, made once.

    By a thread of its own: where torch.compile records CUDA graphs it has the calling thread allocate from the graph's
    pool, in which it allows no tensor that it does not know.
    """

    @cache  # a recorded graph reads it as long as it is replayed
    @wraps(make)
    def made_once(*args: Any) -> torch.Tensor:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(make, *args).result()

    return made_once
