"""FP8 linears: as they are on disk, and one that trains."""

from typing import Any

import torch
from torch import Tensor, nn

from quantrot import formats
from quantrot.kernels.fp8 import (
    Fp8ScaleRule,
    fp8_block_gemm,
    fp8_linear,
    hadamard_quantize_fp8,
    has_fused,
    has_kernels,
    has_normed,
    quantize_fp8_block,
    quantize_fp8_both_ways,
    quantize_fp8_normed,
    steps,
)
from quantrot.kernels.operators import constant, refuse_create_graph
from quantrot.modules.linear import QuantizedLinear, as_autocast, hooked, sharded

ROW, SQUARE = (1, 128), (128, 128)


class Fp8Linear(QuantizedLinear):
    """e4m3 weights with float32 scales per 128 x 128 block or per channel.

    Where there are kernels, FP8 activations are quantized (with the online Hadamard in the same kernel) and multiplied
    as they are, so that the weight stays in 8 bits; elsewhere, and with wide activations, the dequantized weight is
    multiplied. Activation blocks run over the flattened tokens.
    """

    gates_before, gates_behind = True, True

    def runs_packed(self, device: torch.device) -> bool:
        return self._takes_packed(self.spec) and has_kernels(device)

    @constant
    def _takes_packed(self, spec: str) -> bool:
        return self.format.activations.kind == "fp8"

    def multiply(self, x: Tensor) -> Tensor:
        if not self.runs_packed(x.device):
            return super().multiply(x)
        if self._quantizes_rows(self.spec):
            return self.fused(x)
        return self._product(x, *self.quantized_input(x.reshape(-1, self.in_features)))

    def multiply_gated(self, x: Tensor) -> Tensor:
        if not self._packed_rows(x.device):
            return super().multiply_gated(x)
        rows, rule = x.reshape(-1, x.shape[-1]), self._rule(self.spec)
        return self._product(x, *quantize_fp8_block(rows, ROW, rule, transposed_scale=True, gated=True))

    def _product(self, x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        """The product of these codes, in x's dtype and leading dimensions."""
        weight, weight_scale = self.uncast()
        y = fp8_block_gemm(
            codes,
            scale,
            weight,
            weight_scale,
            a_block=self.format.activations.block,
            b_block=self._block(self.spec),
            out_dtype=x.dtype,
            bias=self.bias,
            b_settled=True,  # parameters: who writes them on the device waits before a forward
        )
        return y.view(*x.shape[:-1], self.out_features)

    @constant
    def _quantizes_rows(self, spec: str) -> bool:
        return self.format.activations.block == ROW and not self.online_name

    @constant
    def _rule(self, spec: str) -> str:
        return self.format.activations.scale_rule

    @constant
    def _block(self, spec: str) -> tuple[int, int]:
        return formats.stored_block(self.format.weights)

    def _packed_rows(self, device: torch.device) -> bool:
        return self._decoded is None and self._quantizes_rows(self.spec) and self.runs_packed(device)

    def fuses(self, device: torch.device, tokens: int) -> bool:
        return self._packed_rows(device) and has_fused(tokens, self.out_features, self.in_features, device)

    def norms(self, x: Tensor) -> bool:
        return self._packed_rows(x.device) and has_normed(self.in_features, x.device)

    def normed(self, x: Tensor, norm: Any, added: Tensor) -> tuple[Tensor, Tensor]:
        rows, rest = (t.reshape(-1, self.in_features) for t in (x, added))
        rule = self._rule(self.spec)
        codes, scale, total = quantize_fp8_normed(rows, norm.weight, norm.variance_epsilon, added=rest, scale_rule=rule)
        return self._product(x, codes, scale), total.view(x.shape)

    def _fused(self, x: Tensor, *, residual: Tensor | None = None, **rest: Any) -> Tensor:
        weight, scale = self.uncast()
        y = fp8_linear(
            x.reshape(-1, x.shape[-1]),
            weight,
            scale,
            b_block=self._block(self.spec),
            scale_rule=self._rule(self.spec),
            bias=self.bias,
            residual=None if residual is None else residual.reshape(-1, self.out_features),
            b_settled=True,  # as in _product
            **rest,
        )
        return y.view(*x.shape[:-1], y.shape[1])

    def quantized_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [tokens, in_features] after the online rotation, quantized."""
        activations = self.format.activations
        rule, turned = activations.scale_rule, activations.block == ROW
        if (online := self.transform()) is None:
            return quantize_fp8_block(x, activations.block, rule, transposed_scale=turned)
        signs = online.signs
        if signs is not None and signs.numel() != online.block:
            signs = signs.repeat(x.shape[1] // signs.numel())
        return hadamard_quantize_fp8(
            x,
            block=online.block,
            signs=signs,
            block_size=activations.block,
            scale_rule=rule,
            transposed_scale=turned,
        )


class Fp8TrainingLinear(nn.Linear):
    """nn.Linear on master weights whose three products run in FP8: x W^T, dY W and dY^T x.

    x and dY are scaled per 1 x 128 along whichever dimension is summed over, the weight per 128 x 128 (DeepSeek-V3,
    arXiv:2412.19437, section 3.3): each is read once and written in both orders. Each e4m3 operand is off by 2.6% in
    the mean square, so a product of two by about 3.7%, which averages out over steps like the noise of a mini-batch.
    The backward pass keeps one byte an element of x, unless the weight is frozen, and of the weight. x [...,
    in_features] float32, float16 or bfloat16; the result and dx have x's dtype, the other gradients the weight's. Under
    autocast x and y are its dtype.
    """

    @classmethod
    def of(cls, linear: "nn.Linear | Fp8Linear") -> "Fp8TrainingLinear":
        """The same linear, made trainable in FP8: shares an nn.Linear's parameters, dequantizes an Fp8Linear's to
        bfloat16. ValueError for what turns its input (train it with the rotation in front), for hooks, which it would
        lose, for a weight that is sharded already, and any other module."""
        kind = type(linear).__name__
        if name := getattr(linear, "online_name", ""):
            raise ValueError(
                f"linear: {kind}, which turns its input; put its {name} in front of an Fp8TrainingLinear of a linear "
                "without one"
            )
        if type(linear) not in (nn.Linear, cls) and not isinstance(linear, Fp8Linear):
            way = ", or give an nn.Linear of its dequantized weight" if isinstance(linear, QuantizedLinear) else ""
            raise ValueError(f"linear: {kind}; allowed: nn.Linear, Fp8Linear; train from the original checkpoint{way}")
        if hooked(linear):
            raise ValueError(
                f"linear: {kind} with hooks or a forward of its own, which would be lost; remove them, and give them "
                "to the new one"
            )
        if isinstance(linear, nn.Linear) and (found := sharded(linear.weight)):
            raise ValueError(
                f"linear: its weight is a {found}; call this before FSDP or fully_shard, and without tensor parallelism"
            )
        with torch.device("meta"):
            new = cls(linear.in_features, linear.out_features, linear.bias is not None)
        if isinstance(linear, Fp8Linear):
            new.weight = nn.Parameter(linear.dequantized(torch.bfloat16))
            if linear.bias is not None:
                new.bias = nn.Parameter(linear.bias.detach().to(torch.bfloat16, copy=True))
        else:
            new.weight, new.bias = linear.weight, linear.bias
        return new.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        x = as_autocast(x)
        y = _Fp8Product.apply(x.reshape(-1, x.shape[-1]), self.weight, self.bias)
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], self.out_features))  # fully_shard refuses views


class _Fp8Product(torch.autograd.Function):
    """x [M, K] times weight [N, K] transposed, plus bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        wants_dx, wants_dw, _ = ctx.needs_input_grad
        x_t: Any
        w_t: Any
        if (made := steps.forward(x, weight, bias, wants_dx, wants_dw)) is not None:
            y, w_t, x_t = made
        else:
            q, scale, *x_t = _rows(x, both_ways=wants_dw)
            w, w_scale, *w_t = _squares(weight, both_ways=wants_dx)
            y = fp8_block_gemm(q, scale, w, w_scale, out_dtype=x.dtype, bias=bias, backend="fastest")
        ctx.save_for_backward(*(x_t or (None, None)), *(w_t or (None, None)))
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph()
        x_t, x_t_scale, w_t, w_t_scale = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        wants_dx, wants_dw, wants_db = ctx.needs_input_grad
        for_dx, for_dw = (w_t, w_t_scale) if wants_dx else None, (x_t, x_t_scale) if wants_dw else None
        dx = dw = db = None
        if (made := steps.backward(grad, for_dx, for_dw, weight_dtype)) is not None:
            dx, dw = made
        else:
            g, g_scale, *g_t = _rows(grad, both_ways=wants_dw)
            if wants_dx:
                w_t = w_t[:, : grad.shape[1]]
                dx = fp8_block_gemm(g, g_scale, w_t, w_t_scale, out_dtype=x_dtype, backend="fastest")
            if wants_dw:
                operands: Any = *g_t, x_t, x_t_scale
                dw = fp8_block_gemm(*operands, a_block=ROW, b_block=ROW, out_dtype=weight_dtype, backend="fastest")
        if bias_dtype is not None and wants_db:
            db = grad.sum(0, dtype=torch.float32).to(bias_dtype)
        return dx, dw, db


def _rows(x: Tensor, both_ways: bool) -> tuple[Tensor, ...]:
    """Codes and scales of x, and of its transpose, whose product is the gradient of a weight that is not frozen."""
    if both_ways:
        return quantize_fp8_both_ways(x, ROW, transposed_scale=True)
    return quantize_fp8_block(x, ROW, Fp8ScaleRule.exact, transposed_scale=True)


def _squares(weight: Tensor, both_ways: bool) -> tuple[Tensor, ...]:
    """The same of a weight, whose transpose gives x's gradient."""
    quantize: Any = quantize_fp8_both_ways if both_ways else quantize_fp8_block
    return quantize(weight, SQUARE, Fp8ScaleRule.exact)
