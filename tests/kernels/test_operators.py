"""What holds for every operator."""

import math
import subprocess
import sys
from contextlib import nullcontext
from fractions import Fraction

import numpy
import pytest
import torch

from quantrot.kernels import mixed, mxfp4
from quantrot.kernels.attention import fp8_attention, rope_hadamard_quantize
from quantrot.kernels.attention.one_token import rope_attend_one
from quantrot.kernels.fp8 import (
    dequantize_fp8_block,
    fp8_linear,
    hadamard_quantize_fp8,
    quantize_fp8_block,
    quantize_fp8_normed,
)
from quantrot.kernels.hadamard import hadamard_ref, hadamard_transform, hadamard_transform_
from quantrot.kernels.mixed import dequantize_int8, mixed_gemm, mixed_linear, quantize_int8
from quantrot.kernels.mxfp4 import masked_hadamard, mxfp4_fused, mxfp4_gemm, mxfp4_product, quantize_mxfp4
from quantrot.kernels.operators import constant, implement, kept

gpu = pytest.mark.gpu
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])


def _heads(w):
    return w.view(1, 2, 8, -1)


def _values(given):
    return dequantize_fp8_block(*given[:2], (1, 128), torch.float32)


CALLS = {  # of x [4, 344] and w [16, 256], float32
    "hadamard": lambda x, w: hadamard_transform(x, block=172),
    "mxfp4_gemm": lambda x, w: mxfp4_gemm(x[:, :256], *quantize_mxfp4(w), activations="mxfp4"),
    "mixed_gemm": lambda x, w: mixed_gemm(x[:, :256], *quantize_int8(w, 128)),
    "mixed_linear": lambda x, w: mixed_linear(x[:, :256], *quantize_int8(w, 128), gates=True),
    "fp8_linear": lambda x, w: fp8_linear(x[:, :256], *quantize_fp8_block(w, (128, 128))),
    "quantize_fp8_normed": lambda x, w: _values(quantize_fp8_normed(x, w.view(-1)[:344], 1e-5, added=x)),
    "fp8_attention": lambda x, w: fp8_attention(_heads(w), _heads(w), _heads(w), causal=True, backend="reference"),
}


def test_both_devices_are_registered_and_the_function_stays_itself():
    torch.library.define("quantrot_test::twice", "(Tensor x, int times) -> Tensor")

    @implement("quantrot_test::twice")
    def twice(x, times):
        return x * (2 * times)

    x = torch.ones(3)
    assert torch.equal(torch.ops.quantrot_test.twice(x, 3), twice(x, 3)) and twice(x, 3)[0] == 6
    assert torch._C._dispatch_has_kernel_for_dispatch_key("quantrot_test::twice", "CUDA")


@devices
@pytest.mark.parametrize("name", CALLS)
def test_autocast_changes_no_bit_and_no_dtype(name, device):
    torch.manual_seed(0)
    x, w = torch.randn(4, 344, device=device), torch.randn(16, 256, device=device)
    expected = CALLS[name](x, w)
    with torch.autocast(device, torch.bfloat16):
        y = CALLS[name](x, w)
        assert (x @ x.T).dtype == torch.bfloat16
    assert y.dtype == expected.dtype == torch.float32 and torch.equal(y, expected)


@pytest.mark.parametrize("name", CALLS)
def test_a_forward_mode_derivative_is_an_error_and_not_zero(name):
    x, w = torch.randn(4, 344), torch.randn(16, 256)
    operand = (lambda t: CALLS[name](x, t)) if name == "fp8_attention" else lambda t: CALLS[name](t, w)
    given = w if name == "fp8_attention" else x
    for way in (lambda: torch.func.jvp(operand, (given,), (given,)), lambda: torch.func.jacfwd(operand)(given)):
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            way()


@pytest.mark.parametrize("around", ["norm", "residual", "bias"])
def test_so_it_is_of_what_is_around_a_product(around):
    x, w = torch.randn(4, 256), quantize_fp8_block(torch.randn(64, 256), (128, 128))
    given = {"norm": torch.randn(256), "residual": torch.randn(4, 64), "bias": torch.randn(64)}[around]
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda t: fp8_linear(x, *w, **{around: t}), (given,), (given,))


@pytest.mark.parametrize("mapped", [False, True])
def test_an_operator_beside_a_forward_mode_derivative_runs(mapped):
    """Also under vmap, which has no rule for whether a tensor has a tangent."""
    x, w, t = torch.randn(4, 256), quantize_fp8_block(torch.randn(64, 256), (128, 128)), torch.randn(4, 64)

    def product():
        return torch.vmap(lambda row: fp8_linear(row[None], *w)[0])(x) if mapped else fp8_linear(x, *w)

    tangent = torch.func.jvp(lambda t: t * product(), (t,), (torch.ones_like(t),))[1]
    torch.testing.assert_close(tangent, fp8_linear(x, *w))  # a row alone may be summed in another order here


def test_autocast_keeps_the_gradient():
    x = torch.randn(4, 344, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = hadamard_transform(x, block=172)
    y.square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_constant_is_torchs_own_mark():
    def answer():
        return 42

    marked = vars(torch.compiler.assume_constant_result(lambda: 42))
    assert marked and vars(constant(answer)) == marked


@devices
def test_what_is_kept_is_made_once_and_outside_the_callers_memory_pool(device):
    made = []

    @kept
    def zeros(n, device):
        made.append(n)
        return torch.zeros(n, device=device)

    pool = torch.cuda.MemPool() if device == "cuda" else None
    with torch.cuda.use_mem_pool(pool) if pool else nullcontext(), torch.inference_mode():
        first = zeros(3, device)
        assert zeros(3, device) is first and made == [3]
        assert not first.is_inference() and (pool is None or not pool.snapshot())
        torch.zeros(3, device=device)
        assert pool is None or pool.snapshot()


def test_converting_imports_neither_dynamo_nor_transformers_models():
    names = "torch._dynamo transformers.modeling_utils triton"
    code = f"import sys, quantrot; quantrot.convert; assert not {{*{names.split()}}} & {{*sys.modules}}"
    subprocess.run([sys.executable, "-c", code], check=True)


CODES = quantize_mxfp4(torch.randn(16, 64))
FP8 = quantize_fp8_block(torch.randn(16, 64), (128, 128))
HEADS = [torch.randn(1, 2, 8, 32) for _ in range(3)]
TOKENS = [t.transpose(1, 2) for t in HEADS]
COSINES = torch.randn(1, 8, 32)
APART = {  # calls with one operand elsewhere, and which one
    "x": lambda: mxfp4_gemm(torch.randn(2, 64), *(t.to("meta") for t in CODES)),
    "bias": lambda: mxfp4_gemm(torch.randn(2, 64), *CODES, torch.ones(16, device="meta")),
    "b": lambda: mxfp4_product(*CODES, *(t.to("meta") for t in CODES)),
    "outside": lambda: mxfp4_product(*CODES, *CODES, outside=torch.zeros(1, dtype=torch.int64, device="meta")),
    "mask": lambda: masked_hadamard(torch.randn(2, 64), torch.zeros(2, 8, dtype=torch.uint8, device="meta")),
    "v": lambda: fp8_attention(*HEADS[:2], HEADS[2].to("meta"), causal=True),
    "lengths": lambda: fp8_attention(*HEADS, causal=True, lengths=torch.ones(1, dtype=torch.int32, device="meta")),
    "cos": lambda: rope_hadamard_quantize(*TOKENS, COSINES.to("meta"), COSINES),
    "signs": lambda: rope_hadamard_quantize(*TOKENS, order=32, signs=torch.ones(32, device="meta")),
    "scale": lambda: dequantize_int8(torch.ones(4, 8, dtype=torch.int8), torch.ones(4, 1, device="meta")),
    "scale of fp8": lambda: dequantize_fp8_block(
        torch.ones(4, 128).to(torch.float8_e4m3fn), torch.ones(4, 1, device="meta"), (1, 128)
    ),
}


@pytest.mark.parametrize("call", APART.values(), ids=APART)
def test_operands_on_several_devices_are_an_error(call):
    with pytest.raises(ValueError, match="on meta"):
        call()


ONES = torch.ones(64)
TOKEN = [torch.ones(1, 1, heads, 64).bfloat16() for heads in (2, 1, 1)]
CACHE = [torch.zeros(1, 1, 4, 64).bfloat16() for _ in range(2)]
NUMBERS = {  # calls with a number, and what it has to be
    "epsilon of fp8_linear": lambda n: fp8_linear(ONES[None], *FP8, norm=ONES, epsilon=n),
    "epsilon of mixed_linear": lambda n: mixed_linear(ONES[None], *quantize_int8(ONES[None], 64), norm=ONES, epsilon=n),
    "epsilon of mxfp4_fused": lambda n: mxfp4_fused(ONES[None], *CODES, norm=ONES, epsilon=n),
    "epsilon of rope_attend_one": lambda n: _one(norms=(ONES.bfloat16(),) * 2, epsilon=n),
    "scale of rope_attend_one": lambda n: _one(scale=n),
    "scale of fp8_attention": lambda n: fp8_attention(*HEADS, causal=True, scale=n),
    "scale of hadamard_transform": lambda n: hadamard_transform(ONES, scale=n),
    "scale of hadamard_transform_": lambda n: hadamard_transform_(ONES.clone(), scale=n),
    "scale of hadamard_ref": lambda n: hadamard_ref(ONES, scale=n),
    "scale of hadamard_quantize_fp8": lambda n: hadamard_quantize_fp8(ONES[None], scale=n)[1],
    "factor of masked_hadamard": lambda n: masked_hadamard(ONES, torch.ones(8, dtype=torch.uint8), factor=n),
}
SIGNS = {"epsilon": "non-negative, ", "rope_attend_one": "positive, ", "fp8_attention": "positive, "}


def _one(**rest):
    angles = (torch.ones(1, 1, 64).bfloat16(),) * 2
    return rope_attend_one(*TOKEN, *angles, *(t.clone() for t in CACHE), torch.tensor(0), **rest)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_is_none_or_not_finite_is_an_error(name):
    field, call = name.split()[0], NUMBERS[name]
    sign = SIGNS.get(field, SIGNS.get(name.split()[2], ""))
    least = {"": (), "positive, ": (-1.0, 0), "non-negative, ": (-1e-6,)}[sign]
    for wrong in (math.nan, math.inf, -math.inf, "1", 1j, torch.tensor(1.0), [1.0], *least):
        with pytest.raises(ValueError, match=rf"^{field}: .*; a {sign}finite number is needed"):
            call(wrong)
    expected = call(0.5)
    for right in (numpy.float32(0.5), numpy.float64(0.5), Fraction(1, 2)):
        assert torch.equal(call(right), expected)
    call(1), call(numpy.int64(1))
    if not sign:
        call(-0.5), call(0)


def test_a_number_is_checked_in_compiled_code_and_without_data():
    x = torch.ones(2, 64)
    compiled = torch.compile(lambda x, n: hadamard_transform(x, scale=n), backend="eager", fullgraph=True)
    for n in (0.5, 0.25, 2):
        assert torch.equal(compiled(x, n), hadamard_transform(x, scale=n))
    with pytest.raises(Exception, match="scale: nan; a finite number is needed"):
        compiled(x, math.nan)
    with pytest.raises(ValueError, match="scale: nan; a finite number is needed"):
        hadamard_transform(x.to("meta"), scale=math.nan)


@pytest.mark.parametrize("kernels", [mixed, mxfp4])
def test_a_compiled_module_asks_for_kernels_without_a_warning(kernels, recwarn):
    """Dynamo warns of a cache that it traces."""
    compiled = torch.compile(lambda x: x + kernels.has_kernels(torch.device("cuda")), backend="eager", fullgraph=True)
    compiled(torch.zeros(1))
    assert not [warning for warning in recwarn if "cache" in str(warning.message)]
