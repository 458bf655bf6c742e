"""INT8 weights: rounding, packing, and the mixed product."""

import pytest
import torch

from quantrot.kernels.mixed import dequantize_int8, mixed_gemm, pack_int8, quantize_int8, unpack_int8


@pytest.mark.parametrize("group", [64, 128, 256])
def test_codes_are_the_nearest_multiple_of_the_scale(group):
    w = torch.randn(9, 256, generator=torch.Generator().manual_seed(0))
    q, scale = quantize_int8(w, group)
    assert scale.dtype == torch.bfloat16 and scale.shape == (9, 256 // group)
    step = scale.double().repeat_interleave(group, 1)
    expected = (w.double() / step).round().clamp(-127, 127)
    assert (q - expected).abs().max() <= 1 and (q != expected).float().mean() < 1e-3  # float32 division at a tie
    error = (dequantize_int8(q, scale, torch.float32) - w).abs()
    assert (error <= step * 0.5 + w.abs() * 2**-8).all()


def test_zero_rows_and_extremes():
    w = torch.zeros(2, 64)
    w[1, 0], w[1, 1] = 1.0, -1.0
    q, scale = quantize_int8(w, 64)
    assert scale[0, 0] == 1 and not q[0].any()
    assert q[1, 0] == 127 and q[1, 1] == -127


def test_pack_is_little_endian_offset_binary():
    q = torch.tensor([[-128, -1, 0, 127]], dtype=torch.int8)
    assert pack_int8(q).view(torch.uint8).tolist() == [[0, 127, 128, 255]]


@pytest.mark.parametrize("columns", [1, 3, 4, 130])
def test_pack_round_trips_all_codes_at_any_width(columns):
    q = torch.arange(-128, 128).repeat(columns).view(columns, -1)[:, :].T.contiguous().to(torch.int8)
    assert torch.equal(unpack_int8(pack_int8(q), columns), q)


def test_group_must_divide():
    with pytest.raises(ValueError, match="group is 96, which does not divide the 256 columns"):
        quantize_int8(torch.zeros(2, 256), 96)


def test_gemm_is_the_dequantized_product():
    w, x, bias = torch.randn(32, 128), torch.randn(2, 3, 128), torch.randn(32)
    q, scale = quantize_int8(w, 64)
    expected = x.double() @ dequantize_int8(q, scale, torch.float32).double().T + bias
    assert (mixed_gemm(x, q, scale, bias) - expected).abs().max() < 1e-4
