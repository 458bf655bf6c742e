"""Many tokens through RMSNorm and quantized in one kernel."""

import pytest
import torch

from quantrot.kernels.fp8 import fp8_linear, fused, quantize_fp8_block, quantize_fp8_normed
from quantrot.kernels.fp8.reference import rms_norm

gpu = pytest.mark.gpu
ROW = (1, 128)


def tokens(m, k, dtype, device="cpu"):
    torch.manual_seed(m + k)
    x, added, norm = torch.randn(m, k), torch.randn(m, k), torch.rand(k) + 0.5
    return tuple(t.to(dtype).to(device) for t in (x, added, norm))


def same(found, expected):
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_without_a_kernel_it_is_the_operators_one_after_the_other(dtype):
    x, added, norm = tokens(5, 200, dtype)
    for beside in (None, added):
        total = x if beside is None else x + beside
        codes, scale, kept = quantize_fp8_normed(x, norm, 1e-5, added=beside, scale_rule="exact")
        expected = quantize_fp8_block(rms_norm(total, norm, 1e-5), ROW, "exact")
        assert same((codes, scale.contiguous()), expected) and torch.equal(kept, total)
        assert scale.stride(0) == 1  # in columns, as products read it


def test_no_tokens_are_no_codes():
    x, added, norm = tokens(0, 256, torch.bfloat16)
    codes, scale, total = quantize_fp8_normed(x, norm, 1e-5, added=added)
    assert codes.shape == total.shape == (0, 256) and scale.shape == (0, 2)


@pytest.mark.parametrize("with_added", [False, True])
def test_operator_registration(with_added):
    x, added, norm = tokens(3, 256, torch.bfloat16)
    for lie in (lambda t: t, lambda t: t.T.contiguous().T):
        given = (lie(x), norm, 1e-5, lie(added) if with_added else None, "bf16")
        torch.library.opcheck(torch.ops.quantrot.quantize_fp8_normed, given)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"norm": torch.ones(255)}, "norm"),
        ({"norm": None}, "norm: None; allowed"),
        ({"added": torch.ones(3, 128)}, "added"),
        ({"added": 1.0}, "added: 1.0; allowed"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"scale_rule": "half"}, "scale_rule"),
    ],
)
def test_what_does_not_fit_is_named(change, says):
    given = {"norm": torch.ones(256), "epsilon": 1e-5} | change
    with pytest.raises(ValueError, match=says):
        quantize_fp8_normed(torch.ones(3, 256), given.pop("norm"), given.pop("epsilon"), **given)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("k", [200, 2048, 4096, 5120, 8192, 16384])
def test_gpu_a_row_has_the_bits_that_it_has_among_few(k, dtype):
    """Those of one token's product, whose norms sum in the same order; the reference's but for that order."""
    for m in (1, 65, 3001):
        x, added, norm = tokens(m, k, dtype, "cuda")
        x[m // 2, 7], added[-1, 9] = float("inf"), float("nan")
        for beside in (None, added):
            total = x if beside is None else x + beside
            for _ in range(3):
                codes, scale, kept = quantize_fp8_normed(x, norm, 1e-5, added=beside)
                assert torch.equal(kept.view(torch.int16), total.view(torch.int16))
                few = quantize_fp8_normed(total[m // 3 : m // 3 + 1].clone(), norm, 1e-5)
                assert same((codes[m // 3 : m // 3 + 1], scale[m // 3 : m // 3 + 1].contiguous()), few[:2])
            expected, wanted = quantize_fp8_block(rms_norm(total, norm, 1e-5), ROW, "bf16")
            torch.testing.assert_close(scale, wanted, rtol=0.01, atol=0, equal_nan=True)
            assert (codes.view(torch.uint8) != expected.view(torch.uint8)).float().mean() < 0.01


@gpu
def test_gpu_a_product_of_many_tokens_is_that_of_what_is_quantized():
    for m, n, k in ((300, 512, 1024), (4096, 4096, 4096)):  # the second without a norm is one kernel
        x, _, norm = tokens(m, k, torch.bfloat16, "cuda")
        b = quantize_fp8_block(torch.randn(n, k, device="cuda").bfloat16(), (128, 128))
        around = norm, 1e-5, None, False, False
        assert fused._one_or_two_kernels(x, *b, (128, 128), "bf16", None, False, *around)
        whole = fp8_linear(x, *b, norm=norm, epsilon=1e-5)
        assert torch.equal(whole[17:18], fp8_linear(x[17:18], *b, norm=norm, epsilon=1e-5))
        expected = fp8_linear(rms_norm(x, norm, 1e-5), *b)
        assert (whole.float() - expected.float()).norm() < 4e-3 * expected.float().norm()
