"""Hadamard matrices of every order that the model families need, by construction."""

import pytest
import torch

from quantrot.orthogonal import (
    hadamard,
    hadamard_base,
    hadamard_factors,
    largest_block,
    random_orthogonal,
    random_signs,
    sylvester,
)

MODEL_SIZES = [576, 1536, 2048, 3072, 4096, 5120, 8192, 11008, 13824, 14336, 16384, 22016, 28672, 53248]  # Llama
MODEL_SIZES += [4864, 18944, 12288, 17408, 25600, 29568, 8960, 288, 768, 48]  # Qwen, small Llamas


@pytest.mark.parametrize("n", MODEL_SIZES)
def test_factors_multiply_to_the_order_and_each_is_hadamard(n):
    product = 1
    for factor in hadamard_factors(n):
        product *= factor
        if factor <= 1024:
            h = hadamard_base(factor).double()
            assert torch.equal(h.abs(), torch.ones_like(h))
            assert torch.equal(h @ h.T, factor * torch.eye(factor, dtype=torch.float64))
    assert product == n


@pytest.mark.parametrize("n", [1, 2, 12, 20, 28, 36, 48, 52, 76, 100, 148, 240, 344, 400, 576, 1536])
def test_hadamard_rows_are_orthogonal(n):
    h = hadamard(n).double()
    assert torch.equal(h @ h.T, n * torch.eye(n, dtype=torch.float64))


def test_paley_uses_true_fields_of_prime_powers():
    # 28 = 3^3 + 1 and 344 = 7^3 + 1 exist by Paley only over GF(27) and GF(343), 52 and 100 over GF(25) and GF(49)
    assert [hadamard_base(n).shape[0] for n in (28, 344, 52, 100)] == [28, 344, 52, 100]


def test_one_base_is_preferred_to_two():
    sizes = (14336, 11008, 13824, 25600, 29568)
    assert [hadamard_factors(n) for n in sizes] == [(28, 512), (172, 64), (108, 128), (100, 256), (44, 28, 12, 2)]


def test_172_comes_from_four_circulant_matrices():
    h = hadamard_base(172)
    blocks = h.view(4, 43, 4, 43)
    assert torch.equal(blocks[0, :, 0], blocks[2, :, 2])
    assert torch.equal(blocks[0, :, 0].roll((1, 1), (0, 1)), blocks[0, :, 0])


def test_sylvester_is_parity_of_common_bits():
    assert sylvester(8)[5, 7] == 1 and sylvester(8)[3, 1] == -1
    with pytest.raises(ValueError, match="power of two, got 12"):
        sylvester(12)


def test_unknown_order_offers_the_largest_block():
    with pytest.raises(ValueError, match=r"order 188 .* largest that divides 188 is 4"):
        hadamard_factors(188)
    assert largest_block(188) == 4
    assert largest_block(7) == 1


def test_signs_are_the_same_on_every_machine():
    # a golden value: changing the generator would break every converted checkpoint with an online random rotation
    assert random_signs(16, 0).tolist() == [-1, 1, 1, 1, 1, -1, 1, -1, 1, 1, 1, -1, 1, -1, 1, 1]
    assert not torch.equal(random_signs(64, 0), random_signs(64, 1))


def test_random_orthogonal_is_orthogonal_and_seeded():
    q = random_orthogonal(96, 3)
    assert (q @ q.T - torch.eye(96, dtype=torch.float64)).abs().max() < 1e-13
    assert torch.equal(q, random_orthogonal(96, 3))
    assert not torch.equal(q, random_orthogonal(96, 4))
    assert abs(q.mean()) < 0.01 and abs(q.std() - 96**-0.5) < 0.01
