"""MXFP4's stochastic rounding: its numbers, and what it makes of tensors, by the package's functions."""

import functools
import itertools
import operator

import pytest
import torch

from quantrot.kernels.hadamard import hadamard_ref
from quantrot.kernels.mxfp4 import (
    dequantize_mxfp4,
    hadamard_quantize_mxfp4,
    quantize_mxfp4,
    reference,
    requantize_mxfp4,
    stored_share,
)
from tests.kernels.test_mxfp4 import codes, devices


def test_philox_meets_its_published_answers():
    """The kat_vectors of Random123, philox4x32 with seven rounds."""
    full = (1 << 64) - 1
    for counter, offset, seed, expected in [
        (0, 0, 0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (-1, full, full, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            0x85A308D3243F6A88,
            0x0370734413198A2E,
            0x299F31D0A4093822,
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ]:
        counter -= (1 << 64) if counter >= 1 << 63 else 0
        words = reference.philox(torch.tensor([counter]), offset, seed)
        assert tuple(int(w) & 0xFFFFFFFF for w in words) == expected


def test_random_rounding_is_unbiased():
    """Each value's mean over n draws lies within z = 5 standard errors of it (p = 6e-7 a value, 64 values)."""
    x = torch.linspace(-0.97, 1, 64).view(2, 32)
    x[:, 0] = 1
    draws = 4096
    packed, scale, _ = hadamard_quantize_mxfp4(x.repeat(draws, 1), "absmax34", hadamard=32, random=(11, 0))
    turned = hadamard_ref(x.double(), block=32)
    got = dequantize_mxfp4(packed, scale, torch.float32).double().view(draws, 2, 32) / stored_share(32)
    error = got.mean(0) - turned
    spread = got.std(0).clamp_min(2.0**-24)
    assert (error.abs() <= 5 * spread / draws**0.5 + 1e-6).all()
    assert (error / (spread / draws**0.5)).square().mean() < 2  # and together they are no more than chance


def test_random_rounding_picks_a_neighbour_and_is_reproducible():
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    run = [hadamard_quantize_mxfp4(x, "absmax34", random=pair)[0] for pair in ((1, 2), (1, 2), (2, 2), (1, 3), None)]
    assert torch.equal(run[0], run[1])
    assert (run[0] != run[2]).float().mean() > 0.2 and (run[0] != run[3]).float().mean() > 0.2
    low, nearest_codes = codes(run[0]).int(), codes(run[4]).int()
    assert torch.equal(low >> 3, nearest_codes >> 3) and ((low & 7) - (nearest_codes & 7)).abs().max() <= 1


@devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_drawn_numbers_are_added_to_the_seed_and_the_offset(device, dtype):
    """Of 64 bits, with what they carry; the definition of all is a CPU's of the sums."""
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = quantize_mxfp4(x)
    seed, offset, high = 0xFEDCBA987, 5, torch.tensor([(1 << 61) - 1, (1 << 32) - 3])
    sums = seed + (1 << 61) - 1, offset + (1 << 32) - 3
    for hadamard in (32, 64, 128) if dtype != torch.float32 or device == "cpu" else (32,):  # minutes in Triton
        for call, operands in (
            (functools.partial(hadamard_quantize_mxfp4, scale_rule="absmax34"), (x,)),
            (functools.partial(hadamard_quantize_mxfp4, scale_rule="absmax34", transpose=True), (x,)),
            (requantize_mxfp4, packed),
        ):
            expected = call(*operands, hadamard=hadamard, random=sums)
            for _ in range(2):
                got = call(*(t.to(device) for t in operands), hadamard=hadamard, random=(seed, offset, high.to(device)))
                assert all(torch.equal(a.cpu(), b) for a, b in zip(got[:2], expected[:2], strict=True))


def test_random_rounding_does_not_depend_on_how_the_work_is_cut(monkeypatch):
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(0))
    whole = hadamard_quantize_mxfp4(x, "absmax34", hadamard=64, random=(7, 9))
    monkeypatch.setattr(reference, "CHUNK", 1 << 11)
    assert torch.equal(hadamard_quantize_mxfp4(x, "absmax34", hadamard=64, random=(7, 9))[0], whole[0])


def test_each_fraction_of_a_step_is_rounded_up_by_as_many_random_numbers():
    """All 512 numbers by all fractions of all steps: the mean is the value, exactly, and a value on the grid stays."""
    bits = torch.arange(7 << 9, dtype=torch.int16)  # of a float16: a code and 512ths of the step after it
    y = bits.view(torch.float16).float()[:, None] * 2.0**14
    dither = (torch.arange(512) - 255.5) / 512
    shifted, magic = reference._round_e2m1(
        y.expand(-1, 512).clone(), torch.empty(len(bits), 512), dither.repeat(len(bits), 1)
    )
    up = reference._code(shifted, magic).view(7, 512, 512) - torch.arange(7)[:, None, None]
    assert ((up == 0) | (up == 1)).all()
    assert torch.equal(up.sum(-1), torch.arange(512).expand(7, -1))


def test_dither_is_uniform():
    """Each of four groups' 128 on the 512 numbers, by chi squared (z = 5); two that share bits, one's highest and the
    other's lowest, are correlated by 160 of 21845, and others are not."""
    n = 1 << 15
    u = reference.dither_of(128 * 12345, 128 * n, 5, 6).double().mul(512).add(255.5).view(n, 128)
    assert torch.equal(u, u.round()) and u.min() == 0 and u.max() == 511
    for numbers in u.T:
        counts = torch.bincount(numbers.long(), minlength=512)
        assert ((counts - n / 512).square() / (n / 512)).sum() < 511 + 5 * (2 * 511) ** 0.5
    expected = torch.eye(128, dtype=torch.float64)
    for first in range(0, 128, 2):
        expected[first, first + 1] = expected[first + 1, first] = 160 / ((512**2 - 1) / 12)
    assert (torch.corrcoef(u.T) - expected).abs().max() < 5 / n**0.5
    assert (torch.corrcoef(torch.stack((u[:-1, 127], u[1:, 0])))[0, 1]).abs() < 5 / n**0.5


def test_any_three_random_halves_of_words_of_four_groups_are_independent():
    """Bits of both halves of 32 words by 64 counters: no half, nor the sum of two or three, is the same in all of
    them."""
    u = reference.dither_of(0, 128 * 64, 7, 8).double().mul(512).add(255.5).long().view(64, 32, 4)
    halves = torch.cat((u[..., 0] | (u[..., 1] << 7), u[..., 2] | (u[..., 3] << 7)), 1).T
    for count in (1, 2, 3):
        chosen = torch.tensor(list(itertools.combinations(range(64), count))).T
        totals = functools.reduce(operator.xor, (halves[each] for each in chosen))
        assert (totals != totals[:, :1]).sum(-1).min() > 48


def test_a_dither_starts_at_any_group():
    whole = reference.dither_of(0, 32 * 7, 7, 8)
    for first in range(6):
        assert torch.equal(reference.dither_of(32 * first, 64, 7, 8), whole[32 * first : 32 * first + 64])
