"""MXFP4 codes and scales, bitwise: one table of named blocks that every implementation must meet."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantrot.kernels.hadamard import hadamard_ref
from quantrot.kernels.mxfp4 import (
    E2M1,
    TOP,
    WINDOW,
    ScaleRule,
    dequantize_mxfp4,
    expand_mxfp4,
    hadamard_quantize_mxfp4,
    masked_hadamard,
    operators,
    power_of_two,
    quantize_mxfp4,
    reference,
    requantize_mxfp4,
    round_trip,
    round_trip_mxfp4,
    stored_share,
    unpack_bits,
)

INF, NAN = float("inf"), float("nan")
RULES = [rule for rule in ScaleRule if rule is not ScaleRule.absmax34]
gpu = pytest.mark.gpu
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])

# name: (first values of a block of 32, the rest zero; rule; scale byte; first codes)
SPECIAL_BLOCKS = {
    "all zero": ([0.0], "even", 0, [0]),
    "minus zero keeps its sign": ([-0.0, 6.0], "even", 127, [8, 7]),
    "every magnitude": ([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], "even", 127, [0, 1, 2, 3, 4, 5, 6, 7]),
    "every negative": ([-0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], "even", 127, [9, 10, 11, 12, 13, 14, 15]),
    "ties go to even": ([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], "even", 127, [7, 0, 2, 2, 4, 4, 6, 6]),
    "floor saturates": ([7.99], "floor", 127, [7]),
    "even rounds amax up at 7": ([7.0], "even", 128, [6]),
    "even stays below 7": ([6.99], "even", 127, [7]),
    "rceil never saturates": ([6.01], "rceil", 128, [5]),
    "rceil keeps 6": ([6.0], "rceil", 127, [7]),
    "rceil of the least scale": ([6 * 2.0**-127], "rceil", 0, [7]),
    "rceil past the least scale": ([7.5 * 2.0**-127], "rceil", 1, [6]),
    "mse prefers clipping one": ([7.0, 1.0, 1.0, 1.0, 1.0, 1.0], "mse", 127, [7, 2, 2]),
    "float32's largest": ([3.4e38], "floor", 252, [7]),
    "subnormal input": ([1e-40], "even", 0, [0]),
    "smallest scale": ([2.0**-126], "even", 0, [4]),
    "infinity": ([INF, 1.0], "even", 255, None),
    "nan": ([NAN, 1.0], "floor", 255, None),
    "nan under quest": ([NAN, 1.0], "quest", 255, None),
    "squares past float32": ([1e20, 1.0], "quest", 255, None),
    "all zero under quest": ([0.0], "quest", 0, [0]),
    "all zero under mse": ([0.0], "mse", 1, [0]),
    "no spread but zeros": ([8.0], "quest", 126, [7, 0]),
    "three quarters": ([4.0, -2.0, 1.0], "absmax34", 127, [5, 11, 2]),
}


def block(values):
    x = torch.zeros(1, 32)
    x[0, : len(values)] = torch.tensor(values)
    return x


def codes(packed):
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


@devices
@pytest.mark.parametrize("name", SPECIAL_BLOCKS)
def test_special_block(device, name):
    values, rule, scale_byte, expected = SPECIAL_BLOCKS[name]
    packed, scale = quantize_mxfp4(block(values).to(device), rule)
    assert scale.item() == scale_byte
    if expected is None:
        assert dequantize_mxfp4(packed, scale).isnan().all() and not packed.any()
    else:
        assert codes(packed)[0, : len(expected)].tolist() == expected


def nearest(y):
    """e2m1 of float64 magnitudes by search: nearest, ties to the even code, saturating."""
    table = torch.tensor(E2M1, dtype=torch.float64)
    distance = (y.double().clamp(max=6)[..., None] - table).abs()
    odd = torch.arange(8) % 2
    return (distance + odd * 1e-300 + torch.where(distance == distance.min(-1, keepdim=True).values, odd, 9)).argmin(-1)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_the_nearest_for_the_chosen_scale(rule, dtype):
    x = (torch.randn(63, 257 * 32, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)[:, :96]
    packed, scale = quantize_mxfp4(x, rule)
    scaled = x.double().unflatten(-1, (-1, 32)) * 2.0 ** (127 - scale.double()).unsqueeze(-1)
    assert torch.equal(codes(packed).long() & 7, nearest(scaled.abs()).flatten(-2))
    assert torch.equal(codes(packed) >> 3 == 1, torch.signbit(x))


@pytest.mark.parametrize(
    "rule, exponent",
    [
        ("floor", lambda a: torch.floor(torch.log2(a)) - 2),
        ("rceil", lambda a: torch.ceil(torch.log2(a / 6))),
        ("even", lambda a: torch.floor(torch.log2(a * 8 / 7)) - 2),
    ],
)
def test_rule_follows_its_formula(rule, exponent):
    amax = torch.linspace(0.01, 100, 4001, dtype=torch.float64).float()
    x = torch.zeros(len(amax), 32)
    x[:, 5] = -amax
    assert torch.equal(quantize_mxfp4(x, rule)[1][:, 0].double() - 127, exponent(amax.double()))


def test_quest_follows_the_standard_deviation():
    x = torch.randn(500, 32, generator=torch.Generator().manual_seed(1)) * torch.logspace(-4, 4, 500)[:, None]
    std = x.double().var(-1, correction=0).sqrt()
    expected = torch.floor(torch.log2(std * 2.92247856 / 6)) + 127
    assert torch.equal(quantize_mxfp4(x, "quest")[1][:, 0].double(), expected)


def test_absmax34_stores_three_quarters_and_never_saturates():
    x = torch.rand(200, 32, generator=torch.Generator().manual_seed(2)) + 1
    packed, scale = quantize_mxfp4(x, "absmax34")
    values = dequantize_mxfp4(packed, scale, torch.float32)
    # Half a step, and where the step is rounded first half of its 512th
    assert (values - 0.75 * x).abs().max() <= (1 + 2.0**-9) * scale.max().double().sub(127).exp2()
    assert (x.amax(-1) * 0.75 <= 6 * power_of_two(scale[:, 0].int() - 127)).all()


@pytest.mark.parametrize("hadamard", [0, 32, 64, 96, 128, 256])
def test_the_stored_share_is_what_is_stored_in_eleven_bits(hadamard):
    root = (hadamard or 1) ** -0.5 if hadamard <= 128 and hadamard != 96 else 1  # others are turned before
    factor = stored_share(hadamard) * root
    assert torch.tensor(factor, dtype=torch.float64).half().double().item() == pytest.approx(factor, rel=1e-15)
    assert stored_share(hadamard) == pytest.approx(0.75, rel=1.1e-4)
    x = torch.randn(64, 768, generator=torch.Generator().manual_seed(4)) + 0.25
    if hadamard:  # without, there is only rounding to nearest, which is not unbiased
        packed, scale, _ = hadamard_quantize_mxfp4(x, "absmax34", hadamard=hadamard, random=(1, 2))
        stored, turned = dequantize_mxfp4(packed, scale, torch.float32), hadamard_ref(x.double(), block=hadamard)
        assert (stored * turned).sum() / turned.square().sum() == pytest.approx(stored_share(hadamard), rel=2e-3)


def test_mse_is_never_worse_than_the_rules_it_searches():
    x = torch.randn(512, 32, generator=torch.Generator().manual_seed(3))
    error = {r: (dequantize_mxfp4(*quantize_mxfp4(x, r), torch.float32) - x).square().sum(-1) for r in RULES}
    for rule in ("floor", "even", "rceil"):
        assert (error["mse"] <= error[rule] * (1 + 1e-6)).all()


def test_dequantize_is_exact_over_all_codes_and_scales():
    packed = torch.arange(256, dtype=torch.uint8).repeat_interleave(16).view(256, 16)
    for byte in (0, 1, 100, 127, 200, 250):
        scale = torch.full((256, 1), byte, dtype=torch.uint8)
        low = torch.tensor([(-1 if c & 8 else 1) * E2M1[c & 7] for c in range(16)], dtype=torch.float64)
        got = dequantize_mxfp4(packed, scale, torch.float32).double()
        assert torch.equal(got[:, 0], low[torch.arange(256) & 15] * 2.0 ** (byte - 127))
        assert torch.equal(got[:, 1], low[torch.arange(256) >> 4] * 2.0 ** (byte - 127))
        assert torch.equal(dequantize_mxfp4(packed, scale, torch.bfloat16).double(), got) or byte < 2


@pytest.mark.parametrize("shape", [(0, 64), (1, 32), (3, 96), (2, 5, 64)])
def test_odd_shapes_and_strides(shape):
    x = torch.randn(*shape[:-1], shape[-1] * 2, generator=torch.Generator().manual_seed(4))[..., ::2]
    packed, scale = quantize_mxfp4(x)
    again = quantize_mxfp4(x.contiguous())
    assert torch.equal(packed, again[0]) and torch.equal(scale, again[1])
    assert packed.shape == (*shape[:-1], shape[-1] // 2) and scale.shape == (*shape[:-1], shape[-1] // 32)
    assert dequantize_mxfp4(packed, scale).shape == shape


@pytest.mark.parametrize("hadamard", [0, 32, 64, 128])
@pytest.mark.parametrize("rule", ScaleRule)
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        *(("cpu", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        pytest.param("cuda", torch.bfloat16, marks=gpu),
    ],
    ids=str,
)
def test_a_round_trip_is_the_two_steps(device, dtype, rule, hadamard, monkeypatch):
    """Signs of zeros, NaN, both ends of float32 and the cut into pieces included."""
    for module in (reference, round_trip):
        monkeypatch.setattr(module, "CHUNK", 1 << 11)
    x = torch.randn(3, 7, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0, 0, :40], x[0, 1, 3], x[0, 2, 200], x[1, 0] = -0.0, NAN, INF, x[1, 0] * 2.0**-16
    if dtype != torch.float16:
        x[1, 1:3], x[2, :2] = x[1, 1:3] * 2.0**-125, x[2, :2] * 2.0**120
    x = x.to(device)
    packed, scale = quantize_mxfp4(x, rule) if not hadamard else hadamard_quantize_mxfp4(x, rule, hadamard=hadamard)[:2]
    expected, got = dequantize_mxfp4(packed, scale, dtype), round_trip_mxfp4(x, rule, hadamard=hadamard)
    assert got.dtype == dtype and torch.equal(got.isnan(), expected.isnan()) and got.isnan().any()
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    number = ~expected.isnan()
    assert torch.equal(got[number].view(bits), expected[number].view(bits))
    monkeypatch.setattr(operators, "MOST_TURNED", 0)  # turned by the reference, not by rows
    again = round_trip_mxfp4(x, rule, hadamard=hadamard)
    assert torch.equal(again[number].view(bits), got[number].view(bits))
    strided = torch.cat((x, x), -1)[..., : x.shape[-1]].requires_grad_()
    assert not round_trip_mxfp4(strided, rule, hadamard=hadamard).requires_grad
    assert torch.equal(round_trip_mxfp4(strided, rule, hadamard=hadamard).nan_to_num(), got.nan_to_num())


@pytest.mark.parametrize("hadamard", [0, 32])
def test_a_round_trip_of_zeros_is_zeros_where_subnormal_numbers_are(hadamard):
    if not torch.set_flush_denormal(True):
        pytest.skip("the processor has no such mode")
    try:
        got = round_trip_mxfp4(torch.zeros(1, 64), hadamard=hadamard)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(got, torch.zeros(1, 64))


# --- Transformed, masked, transposed ---------------------------------------------------------------------------------


def signs_of(hadamard, device="cpu"):
    generator = torch.Generator().manual_seed(hadamard)
    return (torch.randint(0, 2, (hadamard,), generator=generator) * 2 - 1).to(torch.int8).to(device)


def to_512ths(y):
    """float64 magnitudes below 8 to a 512th of e2m1's step, which is 0.5 below 2, 1 below 4: nearest, ties to even."""
    step = y.log2().floor().clamp(0, 2).exp2() / 1024
    return (y / step).round() * step


@pytest.mark.parametrize("hadamard", [32, 64, 128])
@pytest.mark.parametrize("rule", [rule for rule in ScaleRule if rule is not ScaleRule.quest])
def test_turned_numbers_are_rounded_to_512ths_of_a_step_and_then_to_nearest(hadamard, rule):
    """Against float64. Sums of these integers are exact in any order, so that nothing but two roundings is left."""
    generator = torch.Generator().manual_seed(hadamard)
    x = (torch.randn(513, 256, generator=generator) * 300).round().clamp(-1023, 1023)
    packed, scale, _ = hadamard_quantize_mxfp4(x, rule, hadamard=hadamard, signs=signs_of(hadamard))
    turned = hadamard_ref(x.double(), block=hadamard, signs=signs_of(hadamard)).mul(hadamard**0.5).round()
    root = torch.tensor(hadamard**-0.5)  # float32; times a power of two, it is the factor of the definition
    amax = (turned.unflatten(-1, (-1, 32)).abs().amax(-1).float() * root).double()
    tie = 1 - 2.0**-11 / 1.75 if rule is ScaleRule.even else 1  # what float16 rounds to 7 scales is 7
    expected = {
        "even": lambda: torch.floor(torch.log2(amax / tie * 8 / 7)) - 2,
        "rceil": lambda: torch.ceil(torch.log2(amax / 6)),
    }.get(str(rule), lambda: torch.floor(torch.log2(amax)) - 2)()
    exponent = scale.double() - 127
    if rule is ScaleRule.mse:
        assert ((exponent - expected) * (exponent - expected - 1) == 0).all()
    else:
        assert torch.equal(exponent, expected)
    factor = (root * 0.75).half().float() if rule is ScaleRule.absmax34 else root
    y = (turned.unflatten(-1, (-1, 32)) * factor.double()).float().double() * 2.0 ** -exponent.unsqueeze(-1)
    assert torch.equal(codes(packed).long() & 7, nearest(to_512ths(y.abs())).flatten(-2))
    assert torch.equal((codes(packed) >> 3 == 1) & (turned != 0), turned < 0)


def test_a_512th_of_a_step_moves_one_code_in_a_thousand():
    """Those of turned numbers within half of it from the middle of two: a 512th of all, and half of these move."""
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for rule in ("floor", "even", "rceil", "mse"):
        packed, scale, _ = hadamard_quantize_mxfp4(x, rule, hadamard=64)
        direct = quantize_mxfp4(hadamard_ref(x.float(), block=64), rule)
        assert (scale != direct[1]).float().mean() < 1e-3
        same = (scale == direct[1]).repeat_interleave(32, -1)
        moved = (codes(packed) != codes(direct[0]))[same].double().mean()
        assert 0.8 < moved * 1024 < 1.2


def test_a_full_row_of_any_order_is_the_transform_and_then_the_quantizer():
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    packed, scale, _ = hadamard_quantize_mxfp4(x, hadamard=96)
    again = quantize_mxfp4(hadamard_ref(x))
    assert torch.equal(packed, again[0]) and torch.equal(scale, again[1])


@pytest.mark.parametrize("rule", ["quest", "floor", "even"])
def test_the_mask_says_what_was_not_clipped(rule):
    x = torch.randn(17, 128, generator=torch.Generator().manual_seed(0))
    x[0, 0], x[1, 1] = NAN, 3e38
    packed, scale, mask = hadamard_quantize_mxfp4(x, rule, clip_mask=True)
    turned = hadamard_ref(x, block=32).unflatten(-1, (-1, 32))
    kept = (turned.abs() <= 6 * 2.0 ** (scale.double() - 127).unsqueeze(-1)) & (scale != 255).unsqueeze(-1)
    assert torch.equal(unpack_bits(mask), kept.flatten(-2)) and not kept.all()
    assert not unpack_bits(mask)[0, :32].any()


@pytest.mark.parametrize("hadamard", [32, 64])
@pytest.mark.parametrize("random", [None, (3, 4)])
def test_a_transpose_is_the_quantizer_of_the_transposed_tensor(hadamard, random):
    x = torch.randn(128, 96, generator=torch.Generator().manual_seed(0))
    options = {"hadamard": hadamard, "signs": signs_of(hadamard), "random": random}
    got = hadamard_quantize_mxfp4(x, "absmax34", transpose=True, **options)
    expected = hadamard_quantize_mxfp4(x.T.contiguous(), "absmax34", **options)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    packed, scale = quantize_mxfp4(x)
    wide = dequantize_mxfp4(packed, scale, torch.float32)
    got, expected = (
        requantize_mxfp4(packed, scale, **options),
        hadamard_quantize_mxfp4(wide.T, "absmax34", **options),
    )
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.mark.parametrize("hadamard", [32, 64, 128])
def test_a_masked_transform_is_the_dense_product(hadamard):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 256, generator=generator)
    mask = torch.randint(0, 256, (3, 32), generator=generator, dtype=torch.uint8)
    expected = hadamard_ref(x.double() * unpack_bits(mask), block=hadamard) * 1.5
    got = masked_hadamard(x, mask, hadamard=hadamard, factor=1.5)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 5),
    groups=st.integers(1, 6),
    shift=st.integers(-40, 40),
    rule=st.sampled_from([*ScaleRule]),
    seed=st.integers(0, 99),
    random=st.booleans(),
)
def test_a_power_of_two_moves_the_scale_and_no_code(rows, groups, shift, rule, seed, random):
    x = torch.randn(rows, 32 * groups, generator=torch.Generator().manual_seed(seed))
    stream = (seed, 1) if random and rule is ScaleRule.absmax34 else None
    packed, scale, mask = hadamard_quantize_mxfp4(x, rule, clip_mask=True, random=stream)
    again = hadamard_quantize_mxfp4(x * 2.0**shift, rule, clip_mask=True, random=stream)
    assert torch.equal(packed, again[0]) and torch.equal(mask, again[2])
    assert torch.equal(scale.int() + shift, again[1].int())


@settings(max_examples=30, deadline=None)
@given(groups=st.integers(1, 8), rule=st.sampled_from([*ScaleRule]), seed=st.integers(0, 99))
def test_a_group_does_not_know_its_neighbours(groups, rule, seed):
    x = torch.randn(3, 32 * groups, generator=torch.Generator().manual_seed(seed))
    order = torch.randperm(groups, generator=torch.Generator().manual_seed(seed))
    packed, scale = quantize_mxfp4(x, rule)
    moved = x.unflatten(1, (-1, 32))[:, order].flatten(1)
    again = quantize_mxfp4(moved, rule)
    assert torch.equal(scale[:, order], again[1])
    assert torch.equal(packed.unflatten(1, (-1, 16))[:, order].flatten(1), again[0])


@settings(max_examples=20, deadline=None)
@given(rule=st.sampled_from(["floor", "even", "rceil", "mse"]), seed=st.integers(0, 99))
def test_what_is_mxfp4_already_stays(rule, seed):
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (9, 64), generator=generator, dtype=torch.uint8)
    packed[:, ::16] |= 7  # each group holds its largest magnitude, and no rule then prefers another scale
    scale = torch.randint(20, 230, (9, 4), generator=generator).to(torch.uint8)
    again = quantize_mxfp4(dequantize_mxfp4(packed, scale, torch.float32), rule)
    assert torch.equal(again[0], packed) and torch.equal(again[1], scale)


# --- The window ------------------------------------------------------------------------------------------------------


def test_the_window_is_exactly_fifteen_exponents():
    """All sixteen codes times 2^d, for every d: exact in e4m3 for TOP - 14 ... TOP, and for none outside."""
    value = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float64)
    exact = []
    for d in range(-126, 121):
        scaled = (value * 2.0**d).float()
        exact.append(torch.equal(scaled.to(torch.float8_e4m3fn).double(), scaled.double()))
    inside = [d for d, ok in zip(range(-126, 121), exact, strict=True) if ok]
    assert inside == list(range(TOP - WINDOW + 1, TOP + 1))


@devices
def test_expansion_is_exact_in_the_window_and_counts_what_is_not(device):
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (300, 64), generator=generator, dtype=torch.uint8)
    scale = torch.randint(0, 15, (300, 4), generator=generator).to(torch.uint8) + torch.arange(0, 240).repeat(2)[
        :300, None
    ].to(torch.uint8)
    scale[7, 1], packed[8, :16] = 255, 0x88  # a NaN group, and one of minus zeros
    scale[8] = torch.tensor([10, 100, 101, 102])
    scale[9] = torch.tensor([100, 114, 99, 98])  # one group a binade below the window, one two
    qdata, row_scale, outside = (t.cpu() for t in expand_mxfp4(packed.to(device), scale.to(device)))
    expected = dequantize_mxfp4(packed, scale, torch.float32).double()
    got = qdata.double() * row_scale.double().unsqueeze(1)
    rows = [i for i in range(300) if i != 9]
    assert torch.equal(got[rows].nan_to_num(nan=1e300), expected[rows].nan_to_num(nan=1e300))
    assert outside.sum() == 2 and outside[9] == 2 and qdata[7].isnan().sum() == 32
    assert torch.equal(qdata.view(torch.uint8)[8, :32], torch.full((32,), 0x80, dtype=torch.uint8))
    floor = row_scale[9].double() * 2.0**-9
    assert ((got[9] - expected[9]).abs() <= floor / 2).all() and not torch.equal(got[9], expected[9])
    assert torch.equal(torch.frexp(row_scale).mantissa, torch.full((300,), 0.5))


def test_the_operand_straight_from_the_quantizer_is_the_expanded_one():
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 256)
    got = torch.ops.quantrot.mxfp4_quantize_expanded(x, None, "even", 32, "auto")
    packed, scale, _ = hadamard_quantize_mxfp4(x, "even")
    expected = expand_mxfp4(packed, scale)
    assert torch.equal(got[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(got[1], expected[1]) and torch.equal(got[2], expected[2]) and got[2].any()


# --- Errors ----------------------------------------------------------------------------------------------------------

Z = torch.zeros


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: quantize_mxfp4(Z(2, 100)), "100 columns; MXFP4 needs a multiple of 32"),
        (lambda: quantize_mxfp4(Z(2, 32, dtype=torch.int32)), "dtype torch.int32; allowed: torch.bfloat16"),
        (lambda: quantize_mxfp4(Z(2, 32).double()), "x: dtype torch.float64; allowed: torch.bfloat16"),
        (lambda: hadamard_quantize_mxfp4(Z(2, 32).to(torch.float8_e5m2)), "x: dtype torch.float8_e5m2; allowed"),
        (lambda: quantize_mxfp4(Z(2, 32), "evn"), "scale_rule: 'evn'; allowed: floor, even"),
        (lambda: quantize_mxfp4(Z(2, 32), backend="cuda"), "backend: 'cuda'; allowed: auto, triton, reference"),
        (lambda: quantize_mxfp4(Z(2, 32), backend="triton"), "'triton' needs a CUDA device"),
        (lambda: hadamard_quantize_mxfp4(Z(2, 96), hadamard=64), "64 does not divide x's 96 columns"),
        (lambda: hadamard_quantize_mxfp4(Z(2, 96), hadamard=48), "a multiple of 32"),
        (lambda: hadamard_quantize_mxfp4(Z(2, 2, 32), transpose=True), r"transpose takes \[M, K\]"),
        (lambda: hadamard_quantize_mxfp4(Z(33, 32), transpose=True), "33 columns"),
        (lambda: hadamard_quantize_mxfp4(Z(2, 64), signs=torch.ones(64)), r"allowed: \[32\]"),
        (lambda: hadamard_quantize_mxfp4(Z(2, 64), random=(0, 0)), "even saturates.*allowed: absmax34"),
        (lambda: hadamard_quantize_mxfp4(Z(2, 64), "absmax34", random=(-1, 0)), "from 0 to 2"),
        (lambda: hadamard_quantize_mxfp4(Z(2, 64), "absmax34", random=(1, 2, Z(2))), r"float32 \(2,\); allowed: int64"),
        (lambda: hadamard_quantize_mxfp4(Z(2, 64), "absmax34", random=(1, 2, Z(3).long())), r"\(3,\); allowed: int64"),
        (
            lambda: hadamard_quantize_mxfp4(Z(2, 64), "absmax34", random=(1, 2, Z(2, device="meta").long())),
            "random: on meta, x is on cpu",
        ),
        (lambda: round_trip_mxfp4(Z(2, 48)), "48 columns; MXFP4 needs a multiple of 32"),
        (lambda: round_trip_mxfp4(Z(2, 256), hadamard=256), "hadamard: 256; allowed: 32, 64, 128"),
        (lambda: round_trip_mxfp4(Z(2, 96), "evn", hadamard=32), "scale_rule: 'evn'; allowed: floor, even"),
        (lambda: requantize_mxfp4(*quantize_mxfp4(Z(48, 64))), "does not divide packed's 48 rows"),
        (lambda: requantize_mxfp4(*quantize_mxfp4(Z(64, 64)), hadamard=16), "allowed: 32, 64, 128"),
        (lambda: dequantize_mxfp4(Z(2, 16, dtype=torch.uint8), Z(2, 2, dtype=torch.uint8)), r"allowed: \[..., K/2\]"),
        (lambda: dequantize_mxfp4(Z(2, 16), Z(2, 1)), "allowed: torch.uint8"),
        (lambda: dequantize_mxfp4(*quantize_mxfp4(Z(2, 32)), torch.int8), "dtype: torch.int8; allowed"),
        (lambda: power_of_two(torch.arange(3)), "exponent: torch.int64; allowed: torch.int32"),
        (lambda: masked_hadamard(Z(2, 32), Z(2, 2, dtype=torch.uint8)), "needs uint8 with K/8 columns"),
    ],
)
def test_errors_name_the_field_and_the_remedy(call, says):
    with pytest.raises(ValueError, match=says):
        call()


# --- Operators -------------------------------------------------------------------------------------------------------


@devices
def test_the_operators_are_functional_and_registered(device):
    ops, x, signs = torch.ops.quantrot, torch.randn(32, 64, device=device), signs_of(32, device)
    packed, scale, mask = hadamard_quantize_mxfp4(x, "quest", clip_mask=True)
    calls = [
        (ops.mxfp4_quantize, (x, signs, "absmax34", 32, True, True, 1, 2, None, False, "auto")),
        (ops.mxfp4_quantize, (x, None, "quest", 32, False, False, 0, 0, None, True, "auto")),
        (
            ops.mxfp4_requantize,
            (packed, scale, signs, "absmax34", 32, True, 1, 2, torch.arange(2, device=device), "auto"),
        ),
        (ops.mxfp4_dequantize, (packed, scale, torch.bfloat16, "auto")),
        (ops.mxfp4_round_trip, (x, "even", 32, "auto")),
        (ops.mxfp4_round_trip, (x[:, :32].T.contiguous().T, "even", 0, "auto")),
        (ops.mxfp4_expand, (packed, scale, "auto")),
        (ops.mxfp4_quantize_expanded, (x, None, "even", 32, "auto")),
        (ops.masked_hadamard, (x, mask, 32, 0.5, torch.float32, "auto")),
    ]
    for op, arguments in calls:
        torch.library.opcheck(
            op, arguments, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
        )


@devices
def test_compiled_bits_are_eager_bits(device):
    def step(x):
        packed, scale, mask = hadamard_quantize_mxfp4(x * 2, "quest", clip_mask=True)
        again = requantize_mxfp4(packed, scale, random=(3, 4))
        wide = dequantize_mxfp4(packed, scale, torch.float32), round_trip_mxfp4(x, hadamard=32)
        return *wide, mask, *again, *expand_mxfp4(packed, scale)[1:]

    x = torch.randn(64, 96, device=device)
    compiled = torch.compile(step, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")(x)
    assert all(torch.equal(a, b) for a, b in zip(compiled, step(x), strict=True))


def test_backends_and_orders_that_there_are_not():
    packed, scale = quantize_mxfp4(torch.randn(4, 64))
    for call in (dequantize_mxfp4, expand_mxfp4):
        with pytest.raises(ValueError, match="backend: 'nonsense'; allowed"):
            call(packed, scale, backend="nonsense")
    with pytest.raises(ValueError, match="hadamard: 0; allowed"):
        hadamard_quantize_mxfp4(torch.randn(4, 64), hadamard=0)
