"""FP8 block quantization, bitwise against a loop over blocks in float64."""

import pytest
import torch

from quantrot.kernels.fp8 import E4M3, dequantize_fp8_block, fp8_block_gemm, quantize_fp8_block

INF, NAN = float("inf"), float("nan")


def by_loop(x, block, rule):
    """The definition, one block at a time."""
    rows, columns = block[0] or x.shape[0], block[1] or x.shape[1]
    q = torch.empty(x.shape, dtype=E4M3)
    scales = torch.empty(-(-x.shape[0] // rows), -(-x.shape[1] // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = x[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns].float()
            scale = part.abs().max() / 448 if part.any() else torch.tensor(1.0)
            if rule == "bf16":
                scale = scale.bfloat16().float()
            elif rule == "pow2":
                scale = torch.exp2(torch.ceil(torch.log2(scale.double()))).float()
            scales[i, j] = scale
            q[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns] = (part / scale).clamp(-448, 448).to(E4M3)
    return q, scales


@pytest.mark.parametrize("block", [(128, 128), (256, 256), (1, 128), (1, 256), (1, 0), (0, 0), (3, 5)])
@pytest.mark.parametrize("shape", [(1, 128), (3, 130), (257, 384)])
@pytest.mark.parametrize("rule", ["exact", "bf16", "pow2"])
def test_equals_the_loop_over_blocks(block, shape, rule):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 10
    q, scale = quantize_fp8_block(x, block, rule)
    expected = by_loop(x, block, rule)
    assert torch.equal(scale, expected[1])
    assert torch.equal(q.view(torch.uint8), expected[0].view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_and_strides(dtype):
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(1)).to(dtype)[:, ::2]
    q, scale = quantize_fp8_block(x, (1, 128))
    expected = quantize_fp8_block(x.float().contiguous(), (1, 128))
    assert torch.equal(q.view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(scale, expected[1])


def test_special_blocks():
    x = torch.zeros(5, 4)
    x[1], x[2, 0], x[3, 0] = -0.0, INF, NAN
    x[4] = torch.tensor([448.0, -448.0, 17.0, 2.0**-10])  # 17 is a tie of 16 and 18; 2^-10 of 0 and the least subnormal
    q, scale = quantize_fp8_block(x, (1, 0), "exact")
    assert scale[:2, 0].tolist() == [1.0, 1.0]
    assert torch.signbit(q[1].float()).all() and (q[1].float() == 0).all()
    assert dequantize_fp8_block(q, scale, (1, 0))[2:4].isnan().any(-1).all()
    assert q[4].float().tolist() == [448.0, -448.0, 16.0, 0.0]


def test_bf16_scales_survive_a_cast_to_bfloat16():
    _, scale = quantize_fp8_block(torch.randn(256, 256), (128, 128), "bf16")
    assert torch.equal(scale.bfloat16().float(), scale)


def test_roundtrip_error_is_e4m3s():
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(2))
    back = dequantize_fp8_block(*quantize_fp8_block(x, (128, 128)), (128, 128), torch.float32)
    relative = (back - x).norm() / x.norm()
    assert 0.02 < relative < 0.03  # uniform rounding of 3 mantissa bits: 2^-4 / sqrt(3) / about 1.5


def test_gemm_is_the_float64_product_of_dequantized_operands():
    a, b = torch.randn(5, 256), torch.randn(384, 256)
    qa, qb = quantize_fp8_block(a, (1, 128)), quantize_fp8_block(b, (128, 128))
    left = dequantize_fp8_block(*qa, (1, 128), torch.float32).double()
    right = dequantize_fp8_block(*qb, (128, 128), torch.float32).double()
    bias = torch.randn(384)
    got = fp8_block_gemm(*qa, *qb, out_dtype=torch.float32, bias=bias)
    assert (got - (left @ right.T + bias)).abs().max() < 1e-4


def test_needs_a_matrix():
    with pytest.raises(ValueError, match=r"takes \[M, K\]"):
        quantize_fp8_block(torch.zeros(2, 3, 4))
