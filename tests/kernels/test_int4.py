"""INT4 in asymmetric groups: a code is the nearest of sixteen, and depends on its group alone."""

import pytest
import torch

from quantrot.kernels.int4 import dequantize_int4, quantize_int4


@pytest.fixture(autouse=True)
def _deterministic():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "group"), [(64, 64), (128, 64), (128, 128), (96, 96), (16, 16)])
def test_the_error_is_half_a_step(dtype, width, group):
    x = (torch.randn(3, 5, width) * 10 ** torch.randn(3, 5, 1) + torch.randn(3, 5, 1)).to(dtype)
    codes, scale, low = quantize_int4(x, group)
    assert codes.shape == (3, 5, width // 2) and scale.shape == low.shape == (3, 5, width // group)
    steps = scale.float().repeat_interleave(group, -1)
    error = (dequantize_int4(codes, scale, low, torch.float32) - x.float()).abs()
    # the rounding of low and scale to bfloat16 may leave the largest value a little outside
    edge = 2**-7 * x.float().abs().unflatten(-1, (-1, group)).amax(-1).repeat_interleave(group, -1)
    assert (error <= 0.5001 * steps + edge).all() and (error.mean(-1) <= 0.35 * steps.mean(-1) + 1e-6).all()


def test_the_even_column_is_the_low_nibble():
    codes, scale, low = quantize_int4(torch.arange(16.0).view(1, 16), 16)
    assert scale.item() == 1 and low.item() == 0
    assert codes.flatten().tolist() == [2 * j | (2 * j + 1) << 4 for j in range(8)]
    assert torch.equal(dequantize_int4(codes, scale, low, torch.float32).flatten(), torch.arange(16.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_it_has_the_same_bits(dtype):
    """Inductor leaves out roundings to bfloat16 between float32 numbers; scale and low are rounded all the same."""
    x = torch.randn(64, 128).to(dtype)
    x[0, 3], x[1, 4], x[2] = torch.inf, torch.nan, 0.1
    torch._dynamo.reset()
    for a, b in zip(torch.compile(quantize_int4, fullgraph=True)(x), quantize_int4(x), strict=True):
        assert torch.equal(a.nan_to_num(99), b.nan_to_num(99))


def test_ties_go_to_even_codes():
    x = torch.tensor([[0.0, 15.0, 0.5, 1.5, 2.5, 14.5, 3.25, 3.75]])
    assert dequantize_int4(*quantize_int4(x, 8), torch.float32).tolist() == [[0, 15, 0, 2, 2, 14, 3, 4]]


@pytest.mark.parametrize("value", [0.0, -3.0, 1e30])
def test_a_constant_group_is_its_value(value):
    x = torch.full((1, 32), value)
    assert torch.equal(dequantize_int4(*quantize_int4(x, 32), torch.bfloat16), x.to(torch.bfloat16))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_nan_or_an_infinity_makes_its_group_nan_and_no_other(value):
    x = torch.randn(2, 64)
    clean = dequantize_int4(*quantize_int4(x, 32), torch.float32)
    x[0, 40] = value
    y = dequantize_int4(*quantize_int4(x, 32), torch.float32)
    assert y[0, 32:].isnan().all() and torch.equal(y[0, :32], clean[0, :32]) and torch.equal(y[1], clean[1])


def test_layout_does_not_change_bits():
    x = torch.randn(2, 7, 5, 64)
    for a, b in zip(
        quantize_int4(x.transpose(1, 2), 64), quantize_int4(x.transpose(1, 2).contiguous(), 64), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("width", "group"), [(63, 63), (64, 48), (64, 0)])
def test_a_group_that_does_not_fit_is_named(width, group):
    with pytest.raises(ValueError, match=f"x has {width} columns and groups of {group}; an even width"):
        quantize_int4(torch.zeros(1, width), group)


@pytest.mark.parametrize("which", ["codes", "scale", "low"])
def test_what_does_not_belong_together_is_an_error(which):
    """Broadcast, it would be silently taken."""
    given = dict(zip(("codes", "scale", "low"), quantize_int4(torch.randn(4, 128), 32), strict=True))
    t = given[which]
    wrong = [t[:1], t[0], t[None], t.to("meta")] + ([t.int()] if which == "codes" else [t[:, :1], t[:, :3], t[:, :0]])
    for each in wrong:
        with pytest.raises(
            ValueError, match=r"codes: .*, scale: .*, low: .*; allowed: torch.uint8 \[..., D/2\]|on meta"
        ):
            dequantize_int4(**given | {which: each})
    with pytest.raises(ValueError, match="scale: torch.int32"):
        dequantize_int4(**given | {"scale": given["scale"].int()})
