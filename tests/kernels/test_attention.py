"""The laws of FP8 attention and of the kernel that prepares its operands, on the CPU and where there is a GPU."""

import math

import pytest
import torch
from torch.nn import functional as F

from quantrot.kernels.attention import (
    BLOCK,
    Granularity,
    Quantized,
    attend,
    dequantize_heads,
    fp8_attention,
    quantize_heads,
    rope_hadamard_quantize,
    spread,
    transposed_values,
)
from quantrot.kernels.attention.reference import power, scale_byte
from quantrot.kernels.hadamard import hadamard_transform
from quantrot.orthogonal import random_signs

gpu = pytest.mark.gpu
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
R = torch.randn
DIMS = [64, 96, 128, 256, 80]
# Of e4m3 on normal data, 2.6 % a rounding: q's and k's move a score by 2.6 % sqrt(2) of its spread of one, p's and v's
# add to that, sqrt(4) x 2.6 % together. Draws of two heads scatter by 0.0027; these, the same everywhere, give at most
# 0.0496 causal and 0.0556 not. In int8 a query is rounded by 0.7 %, its scale being its own, and keys by 0.9 %.
NORMAL_ERROR = {"fp8": 0.056, "int8": 0.042}  # by scores
TILING_ERROR = 1e-3  # between backends: float32 sums in another order, and a code now and then


@pytest.fixture(autouse=True)
def _deterministic():
    torch.manual_seed(0)


def relative(y: torch.Tensor, exact: torch.Tensor) -> float:
    return ((y.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-300)).item()


def qkv(batch=1, heads=4, groups=2, queries=70, keys=70, dim=64, device="cpu", dtype=torch.float32):
    shapes = (batch, heads, queries, dim), (batch, groups, keys, dim), (batch, groups, keys, dim)
    return [torch.randn(shape).to(device, dtype) for shape in shapes]  # the same draws on every device


def exact(q, k, v, causal=True, mask=None):
    """Attention in float64; causal as the contract has it, the last query sees the last key."""
    q, k, v = (t.double() for t in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    if causal:
        seen = seen.tril(k.shape[2] - q.shape[2])
    if mask is not None:
        seen = seen & mask
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def outliers(*shape):
    """FlashAttention-3's test data: N(0, 1) + N(0, 100) Bernoulli(0.001)."""
    return torch.randn(shape) + 10 * torch.randn(shape) * (torch.rand(shape) < 0.001)


# --- Codes and scales ------------------------------------------------------------------------------------------------

WHOLE = [  # values of a group, int8's scale over the largest magnitude's 1 / 127, its codes
    ("zeros", [0.0, -0.0], 2.0**-100, [0, 0]),
    ("the largest codes", [-127.0, 127.0], 127, [-127, 127]),
    ("ties, to even", [127.0, 0.5, 1.5, -2.5], 127, [127, 0, 2, -2]),
    ("smaller than it is told apart", [1e-40, -1e-40], 2.0**-100, [0, 0]),
    ("float32's largest", [torch.finfo(torch.float32).max, 1.0], torch.finfo(torch.float32).max, [127, 0]),
    ("infinity", [float("inf"), 1.0], float("nan"), [0, 0]),
    ("nan", [1.0, float("nan")], float("nan"), [0, 0]),
]
SPECIAL = [  # values of a group, its byte, its codes
    ("zeros", [0.0, 0.0], 127, [0x00, 0x00]),
    ("minus zero", [-0.0, 1.0], 119, [0x80, 0x78]),
    ("the largest code", [448.0, -448.0], 127, [0x7E, 0xFE]),
    ("just above it", [448.00003, 1.0], 128, [0x76, 0x30]),
    ("a tie, to even", [448.0, 17.0], 127, [0x7E, 0x58]),
    ("underflow", [448.0, 2.0**-10], 127, [0x7E, 0x00]),
    ("subnormal code", [448.0, 2.0**-9], 127, [0x7E, 0x01]),
    ("a float32 subnormal", [1e-40, 0.0], 1, [0x04, 0x00]),
    ("float32's largest", [torch.finfo(torch.float32).max, 0.0], 247, [0x78, 0x00]),
    ("infinity", [float("inf"), 1.0], 255, [0x00, 0x00]),
    ("nan", [float("nan"), float("inf")], 255, [0x00, 0x00]),
]


@pytest.mark.parametrize(("values", "byte", "codes"), [pytest.param(*case[1:], id=case[0]) for case in SPECIAL])
def test_named_groups_have_these_codes(values, byte, codes):
    x = torch.tensor(values).view(1, 1, 1, 2)
    qdata, scale = quantize_heads(x)
    assert scale.item() == byte and qdata.view(torch.uint8).flatten().tolist() == codes
    back = dequantize_heads(qdata, scale, torch.float32)
    assert torch.equal(back.isnan(), torch.full_like(x, byte == 255, dtype=torch.bool))


@pytest.mark.parametrize(("values", "largest", "codes"), [pytest.param(*case[1:], id=case[0]) for case in WHOLE])
def test_named_groups_have_these_int8_codes(values, largest, codes):
    qdata, scale = quantize_heads(torch.tensor(values).view(1, 1, 1, -1), codes=torch.int8)
    assert qdata.dtype == torch.int8 and qdata.flatten().tolist() == codes
    torch.testing.assert_close(scale.view(1), torch.tensor([largest]) * (1 / 127), rtol=0, atol=0, equal_nan=True)


def test_the_byte_is_the_least_power_of_two_that_saturates_nothing():
    amax = torch.cat(
        [torch.randn(1000).abs() * 10.0 ** torch.randint(-30, 30, (1000,)), 448 * 2.0 ** torch.arange(-9, 9)]
    )
    scale = power(scale_byte(amax.view(torch.int32)))
    assert (amax <= 448 * scale).all() and (amax > 224 * scale).all()


@pytest.mark.parametrize("granularity", list(Granularity))
def test_a_group_has_the_byte_of_its_largest_magnitude(granularity):
    x = torch.randn(2, 3, 300, 16) * torch.rand(2, 3, 300, 1) ** 8
    x[0, 1, 128:256] = 0
    qdata, scale = quantize_heads(x, granularity)
    groups = {
        "tensor": x.abs().amax().expand(2, 3, 1),
        "head": x.abs().amax((2, 3)).unsqueeze(2),
        "block": F.pad(x.abs().amax(3), (0, 84)).unflatten(2, (3, BLOCK)).amax(3),
        "token": x.abs().amax(3),
    }
    assert torch.equal(scale, scale_byte(groups[granularity].contiguous().view(torch.int32)))
    steps = (x * 2.0 ** (127 - spread(scale, 300).float()).unsqueeze(3)).to(torch.float8_e4m3fn)
    assert torch.equal(qdata.view(torch.uint8), steps.view(torch.uint8))


@pytest.mark.parametrize("granularity", list(Granularity))
def test_int8_is_within_half_a_step_of_its_groups_largest_magnitude(granularity):
    x = torch.randn(2, 3, 300, 16) * torch.rand(2, 3, 300, 1) ** 8
    qdata, scale = quantize_heads(x, granularity, torch.int8)
    _, coarse = quantize_heads(x, granularity)
    assert scale.dtype == torch.float32 and scale.shape == coarse.shape
    steps = spread(scale, 300).unsqueeze(3)
    assert ((x - qdata * steps).abs() <= 0.5001 * steps).all() and qdata.abs().amax() == 127
    assert torch.equal(dequantize_heads(qdata, scale, torch.float32), qdata * steps)


@pytest.mark.parametrize("granularity", list(Granularity))
def test_what_bfloat16_holds_of_a_dequantized_value_is_all_of_it(granularity):
    qdata, scale = quantize_heads(torch.randn(1, 2, 200, 32), granularity)
    wide = dequantize_heads(qdata, scale, torch.bfloat16)
    assert torch.equal(wide.float(), dequantize_heads(qdata, scale, torch.float32))
    again = dequantize_heads(*quantize_heads(wide), torch.float32)
    assert torch.equal(again, wide.float())


def test_values_lie_transposed_with_zeros_behind_them():
    codes, _ = quantize_heads(torch.randn(2, 3, 130, 32))
    v = transposed_values(codes)
    assert v.shape == (2, 3, 32, 256) and not v.view(torch.uint8)[..., 130:].any()
    assert torch.equal(v.view(torch.uint8)[..., :130], codes.view(torch.uint8).transpose(2, 3))


# --- RoPE, rotation, quantization ------------------------------------------------------------------------------------


def angles(tokens, dim, device="cpu", dtype=torch.float32, batch=1):
    theta = torch.randn(batch, tokens, dim // 2, device=device)
    return [torch.cat([f(theta)] * 2, -1).to(dtype) for f in (torch.cos, torch.sin)]


@pytest.mark.parametrize("scores", ["fp8", "int8"])
@pytest.mark.parametrize(
    ("dim", "order", "signed"), [(64, 64, False), (128, 128, True), (96, 96, False), (80, 20, True), (80, 40, False)]
)
def test_the_definition_is_rope_then_hadamard_then_codes(dim, order, signed, scores):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    x = [t.transpose(1, 2) for t in qkv(batch=2, dim=dim)]
    cos, sin = angles(70, dim)
    signs = random_signs(dim, 1) if signed else None
    got = rope_hadamard_quantize(*x, cos, sin, order=order, signs=signs, granularity="token", scores=scores)
    turned = apply_rotary_pos_emb(x[0].transpose(1, 2), x[1].transpose(1, 2), cos, sin)
    for name, t in zip(("q", "k"), turned, strict=True):
        codes, scale = quantize_heads(hadamard_transform(t, block=order, signs=signs), codes=got.k.dtype)
        torch.testing.assert_close(getattr(got, f"{name}_scale"), scale, rtol=1e-6, atol=0)  # bytes exactly
        assert (getattr(got, name).view(torch.uint8) == codes.view(torch.uint8)).float().mean() > 0.9999
    codes, scale = quantize_heads(x[2].transpose(1, 2))
    assert torch.equal(got.v.view(torch.uint8), transposed_values(codes).view(torch.uint8))
    assert torch.equal(got.v_scale, scale)


def test_a_rotation_of_both_leaves_the_scores():
    q, k, v = (t.transpose(1, 2) for t in qkv(queries=100, keys=100))
    plain = attend(rope_hadamard_quantize(q, k, v), causal=True, dtype=torch.float32)
    turned = attend(
        rope_hadamard_quantize(q, k, v, order=64, signs=random_signs(64, 0)), causal=True, dtype=torch.float32
    )
    assert relative(turned, plain) <= 2**0.5 * NORMAL_ERROR["fp8"]


def test_a_tokens_codes_are_its_own():
    q, k, v = (t.transpose(1, 2) for t in qkv(batch=2))
    cos, sin = angles(70, 64)
    whole = rope_hadamard_quantize(q, k, v, cos, sin, order=64, granularity="token")
    one = rope_hadamard_quantize(
        q[1:, 33:34], k[1:, 33:34], v[1:, 33:34], cos[:, 33:34], sin[:, 33:34], order=64, granularity="token"
    )
    assert torch.equal(one.k.view(torch.uint8), whole.k.view(torch.uint8)[1:, :, 33:34])
    assert torch.equal(one.v.view(torch.uint8)[..., :1], whole.v.view(torch.uint8)[1:, ..., 33:34])
    assert torch.equal(one.k_scale, whole.k_scale[1:, :, 33:34])


# --- Attention -------------------------------------------------------------------------------------------------------


@devices
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scores", ["fp8", "int8"])
def test_error_to_float64_is_that_of_four_roundings(device, dim, causal, scores):
    q, k, v = qkv(batch=4, heads=2, groups=1, queries=256, keys=256, dim=dim, device=device)
    y = fp8_attention(q, k, v, causal=causal, scores=scores)
    assert relative(y, exact(q, k, v, causal)) <= NORMAL_ERROR[scores]


def test_rotation_lowers_the_error_of_outliers():
    """A query and a key with an outlier in one channel: its product carries the error of two codes; turned, of 128."""
    q, k, v = (outliers(1, 1, 2048, 128) for _ in range(3))
    wide, turned = exact(q, k, v, causal=False), [hadamard_transform(t) for t in (q, k)]
    plain = relative(fp8_attention(q, k, v, causal=False, granularity="tensor", scores="fp8"), wide)
    for scores, times in (("fp8", 1.5), ("int8", 2.0)):
        rotated = relative(fp8_attention(*turned, v, causal=False, scores=scores), wide)
        assert plain >= times * rotated and rotated <= 1.1 * NORMAL_ERROR[scores]  # as on normal data
    scores = [
        relative(exact(*(dequantize_heads(*quantize_heads(t), torch.float32) for t in pair), v, causal=False), wide)
        for pair in ((q, k), turned)
    ]
    assert scores[0] >= 2 * scores[1]  # of queries and keys alone


@devices
@pytest.mark.parametrize("scores", ["fp8", "int8"])
def test_only_probabilities_are_rounded_between_the_codes_and_the_result(device, scores):
    q, k, v = qkv(device=device)
    given = rope_hadamard_quantize(*(t.transpose(1, 2) for t in (q, k, v)), granularity="token", scores=scores)
    k, q = (
        dequantize_heads(given.k, given.k_scale, torch.float32),
        dequantize_heads(given.q, given.q_scale, torch.float32),
    )
    v = dequantize_heads(given.v[..., :70].transpose(2, 3), given.v_scale, torch.float32)
    y = attend(given, causal=True, dtype=torch.float32).transpose(1, 2)
    assert 0 < relative(y, exact(q, k, v)) <= 0.03


@devices
@pytest.mark.parametrize("queries", [1, 5, 70])
def test_causal_is_the_mask_that_says_so(device, queries):
    q, k, v = qkv(batch=2, queries=queries, device=device)
    mask = torch.ones(queries, 70, dtype=torch.bool, device=device).tril(70 - queries)[None, None]
    assert relative(fp8_attention(q, k, v, causal=True), fp8_attention(q, k, v, causal=False, mask=mask)) <= 1e-6


@devices
@pytest.mark.parametrize("queries", [1, 40])
def test_lengths_are_shorter_sequences(device, queries):
    q, k, v = qkv(batch=3, queries=queries, keys=200, device=device)
    lengths = torch.tensor([40, 129, 200], dtype=torch.int32, device=device)
    y = fp8_attention(q, k, v, causal=True, granularity="token", lengths=lengths)
    for i, n in enumerate(lengths.tolist()):
        one = fp8_attention(q[i : i + 1], k[i : i + 1, :, :n], v[i : i + 1, :, :n], causal=True, granularity="token")
        assert relative(y[i : i + 1], one) <= TILING_ERROR


@devices
def test_a_right_padded_batch_is_its_sequences(device):
    q, k, v = qkv(batch=2, queries=90, keys=90, device=device)
    lengths = torch.tensor([17, 95], dtype=torch.int32, device=device)  # 95 count as the 90 that there are
    y = fp8_attention(q, k, v, causal=True, granularity="token", lengths=lengths, query_lengths=lengths)
    for i, n in enumerate((17, 90)):
        one = fp8_attention(*(t[i : i + 1, :, :n] for t in (q, k, v)), causal=True, granularity="token")
        assert relative(y[i : i + 1, :, :n], one) <= TILING_ERROR and not y[i, :, n:].any()
    y = fp8_attention(q, k[:, :, :60], v[:, :, :60], causal=True, query_lengths=lengths[1:].repeat(2))
    assert relative(y, fp8_attention(q, k[:, :, :60], v[:, :, :60], causal=True)) <= TILING_ERROR


@devices
@pytest.mark.parametrize("queries", [1, 33])
def test_a_query_that_sees_nothing_gets_zero(device, queries):
    q, k, v = qkv(queries=queries, device=device)
    mask = torch.ones(1, 1, queries, 70, dtype=torch.bool, device=device)
    mask[:, :, 0] = False
    y = fp8_attention(q, k, v, causal=False, mask=mask)
    assert not y[:, :, 0].any() and y.isfinite().all()
    none = torch.zeros(1, dtype=torch.int32, device=device)
    assert not fp8_attention(q, k, v, causal=False, lengths=none).any()


@devices
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_nan_reaches_those_that_see_it_and_no_other(device, which, value):
    q, k, v = qkv(heads=2, groups=2, device=device)
    (k if which == "k" else v)[0, 1, 50, 3] = value
    y = fp8_attention(q, k, v, causal=True, granularity="token")
    assert y[0, 1, 50:].isnan().any(-1).all() and y[0, 1, :50].isfinite().all() and y[0, 0].isfinite().all()


@devices
@pytest.mark.parametrize("queries", [1, 70])
def test_grouped_heads_are_repeated_heads(device, queries):
    q, k, v = qkv(queries=queries, heads=6, groups=2, device=device)
    apart = fp8_attention(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), causal=True)
    assert relative(fp8_attention(q, k, v, causal=True), apart) <= TILING_ERROR


@devices
def test_powers_of_two_scale_exactly(device):
    q, k, v = qkv(device=device)
    y = fp8_attention(q, k, v, causal=True)
    assert torch.equal(fp8_attention(q * 4, k / 4, v * 8, causal=True), y * 8)


@devices
def test_layout_does_not_change_bits(device):
    q, k, v = qkv(device=device)
    y = fp8_attention(q, k, v, causal=True)
    tokens_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    wide = [torch.cat([t, t], -1)[..., :64] for t in (q, k, v)]
    assert torch.equal(fp8_attention(*tokens_first, causal=True), y)
    assert torch.equal(fp8_attention(*wide, causal=True), y)


# --- The operators ---------------------------------------------------------------------------------------------------


@devices
def test_the_operators_are_functional_and_registered(device):
    q, k, v = (t.transpose(1, 2).contiguous() for t in qkv(queries=20, keys=20, device=device))
    cos, sin = angles(20, 64, device)
    options = (None, None, None, True, 0.125, torch.bfloat16, "auto")
    for scores in ("fp8", "int8"):
        made = (q, k, v, cos, sin, random_signs(64, 0).to(device), 64, "block", scores, "auto")
        torch.library.opcheck(torch.ops.quantrot.rope_hadamard_quantize, made)
        given = Quantized(*torch.ops.quantrot.rope_hadamard_quantize(*made))
        operands = (given.q, given.k, given.v, given.q_scale, given.k_scale, given.v_scale)
        torch.library.opcheck(torch.ops.quantrot.fp8_attention, (*operands, *options))
        wide = (q.transpose(1, 2), *operands[1:3], operands[3][..., :0], *operands[4:])
        torch.library.opcheck(torch.ops.quantrot.fp8_attention, (*wide, *options))


@devices
def test_compiled_bits_are_eager_bits(device):
    def step(q, k, v, cos, sin):
        given = rope_hadamard_quantize(q, k, v, cos, sin, order=64)
        return attend(given, causal=True, dtype=torch.float32) * 2

    inputs = [*(t.transpose(1, 2) for t in qkv(device=device)), *angles(70, 64, device)]
    backend = "inductor" if device == "cuda" else "aot_eager"
    assert torch.equal(torch.compile(step, fullgraph=True, backend=backend)(*inputs), step(*inputs))


def test_training_through_it_is_an_error_and_not_a_wrong_gradient():
    q, k, v = qkv()
    with pytest.raises(NotImplementedError, match="no backward; train with attention: bf16"):
        fp8_attention(q.requires_grad_(), k, v, causal=True).sum().backward()
    turned = [t.transpose(1, 2) for t in (q, k.requires_grad_(), v)]
    given = rope_hadamard_quantize(*turned, order=64)  # a model in eval mode outside torch.no_grad()
    expected = rope_hadamard_quantize(*(t.detach() for t in turned), order=64)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(given, expected, strict=True))
    with pytest.raises(NotImplementedError, match="no backward; train with attention: bf16"):
        attend(given._replace(q=q, q_scale=given.q_scale[..., :0]), causal=True).sum().backward()


ERRORS = [
    ({"q": torch.zeros(1, 4, 70, 80)}, r"shapes: q \(1, 4, 70, 80\), k \(1, 2, 70, 64\), v \(1, 2, 70, 64\); allowed"),
    ({"q": torch.zeros(1, 3, 5, 64)}, r"shapes: q \(1, 3, 5, 64\), .*G a divisor of H"),
    ({"dim": 72}, "head_dim: 72; allowed: multiples of 16 up to 256"),
    ({"dim": 272}, "head_dim: 272"),
    ({"heads": 3}, "G a divisor of H"),
    ({"scale": 0.0}, "scale: 0.0; a positive, finite number"),
    ({"causal": None}, "causal: None; allowed: True, False"),
    ({"scale": math.inf}, "scale: inf; a positive, finite number"),
    ({"granularity": "row"}, "granularity: 'row'; allowed: tensor, head, block, token"),
    ({"q": torch.zeros(70, 64)}, r"q: torch.float32 with 2 dimensions; allowed: \[B, heads, tokens, D\]"),
    ({"backend": "cudnn"}, "backend: 'cudnn'; allowed: auto, hopper, triton, reference"),
    ({"backend": "triton"}, "needs a CUDA device"),
    ({"backend": "hopper"}, "needs an sm_90 GPU"),
    ({"dtype": torch.int32}, "q: torch.int32"),
    ({"scores": "int4"}, "scores: 'int4'; allowed: int8, fp8"),
    ({"mask": torch.zeros(1, 1, 70, 70)}, "mask: torch.float32"),
    ({"mask": torch.zeros(1, 4, 70, 70, dtype=torch.bool)}, r"allowed: bool \[1 or 1, 1, 1 or 70, 70\]"),
    ({"lengths": torch.zeros(1)}, r"lengths: torch.float32 \(1,\); allowed: int32 \[1\]"),
]


@pytest.mark.parametrize(("change", "says"), ERRORS)
def test_errors_name_the_field_and_the_remedy(change, says):
    shape = {key: change.pop(key) for key in ("dim", "heads") if key in change}
    q, k, v = qkv(**{"heads": 4, **shape})
    q = change.pop("q", q).to(change.pop("dtype", torch.float32))
    with pytest.raises(ValueError, match=says):
        fp8_attention(q, k, v, **{"causal": True, **change})


def test_operands_that_are_not_quantized_are_named():
    q, k, v = qkv()
    given = rope_hadamard_quantize(*(t.transpose(1, 2) for t in (q, k, v)))
    for change, says in (
        ({"k": k}, "k: torch.float32"),
        ({"v": given.v[..., :100]}, "v: 100 tokens of storage for 70; pad it with zeros to a multiple of 128"),
        ({"k_scale": given.k_scale[..., :0]}, r"k_scale: torch.uint8 \(1, 2, 0\); allowed: uint8 \[1, 2, n\]"),
    ):
        with pytest.raises(ValueError, match=says):
            attend(given._replace(**change), causal=True)
    whole = rope_hadamard_quantize(*(t.transpose(1, 2) for t in (q, k, v)), scores="int8")
    with pytest.raises(ValueError, match="q: torch.float8_e4m3fn with 4 dimensions; quantize it first"):
        attend(whole._replace(q=given.q), causal=True)
    with pytest.raises(ValueError, match="k_scale: torch.uint8 .*; allowed: float32"):
        attend(whole._replace(k_scale=given.k_scale), causal=True)
    with pytest.raises(ValueError, match="order: 48 does not divide head_dim 64"):
        rope_hadamard_quantize(*(t.transpose(1, 2) for t in (q, k, v)), order=48)
    with pytest.raises(ValueError, match="cos, sin: one is given without the other"):
        rope_hadamard_quantize(*(t.transpose(1, 2) for t in (q, k, v)), torch.zeros(1, 70, 64))


def test_a_backward_through_prepared_operands_raises():
    q, k, v = (torch.randn(1, 8, heads, 32, requires_grad=True) for heads in (2, 1, 1))
    for scores in ("fp8", "int8"):
        y = attend(rope_hadamard_quantize(q, k, v, scores=scores), causal=True, dtype=torch.float32)
        with pytest.raises(NotImplementedError, match="for inference"):
            (y.sum() + q.sum()).backward()


def test_queries_that_are_one_and_keys_that_are_none():
    q = torch.randn(1, 2, 1, 64).bfloat16()
    k, v = (torch.randn(1, 2, 80, 64).bfloat16() for _ in range(2))
    y = fp8_attention(q.expand(1, 2, 80, 64), k, v, causal=False)
    assert torch.equal(y, fp8_attention(q.repeat(1, 1, 80, 1), k, v, causal=False))
    for granularity in Granularity:
        y = fp8_attention(q, k[:, :, :0], v[:, :, :0], causal=False, granularity=granularity)
        assert y.shape == q.shape and (y == 0).all()
    with pytest.raises(ValueError, match="G a divisor of H"):
        fp8_attention(q, k[:, :0], v[:, :0], causal=True)


@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.int8])
def test_scales_that_are_not_the_codes_are_named(codes):
    """Broadcast or repeated, they would be silently taken."""
    qdata, scale = quantize_heads(torch.randn(2, 3, 300, 16), "block", codes)
    token, kind = quantize_heads(torch.randn(2, 3, 300, 16), "token", codes)[1], scale.dtype
    for wrong in (scale[:1], scale[:, :1], scale[..., :2], token[..., :130], scale[..., :0], scale[0], scale.int(),
                  scale.to(torch.float32 if kind == torch.uint8 else torch.uint8), scale.to("meta")):  # fmt: skip
        with pytest.raises(ValueError, match=r"scale: .*(allowed: .*\[B, H, groups\]|on meta)"):
            dequantize_heads(qdata, wrong)
    for change in ({"qdata": qdata[0]}, {"qdata": qdata.view(torch.uint8)}, {"dtype": torch.int32}):
        with pytest.raises(ValueError, match="as quantize_heads makes them, and a dtype of floats"):
            dequantize_heads(**{"qdata": qdata, "scale": scale} | change)
    with pytest.raises(ValueError, match=r"scale: \(2, 3, 3\) of 700 tokens; .*groups in \[1, 6, 700\]"):
        spread(scale, 700)
    for granularity in Granularity:
        for tokens in (0, 1, 128, 300):
            made = quantize_heads(torch.randn(2, 3, tokens, 16), granularity, codes)
            assert dequantize_heads(*made).shape == (2, 3, tokens, 16)


def test_dequantizing_is_exported_for_any_number_of_tokens():
    class RoundTrip(torch.nn.Module):
        def forward(self, x):
            return dequantize_heads(*quantize_heads(x), x.dtype)

    x, tokens = torch.randn(1, 2, 8, 16), torch.export.Dim("tokens", min=2, max=1000)
    exported = torch.export.export(RoundTrip(), (x,), dynamic_shapes=({2: tokens},)).module()
    x = torch.randn(1, 2, 200, 16)
    assert torch.equal(exported(x), RoundTrip()(x))


def test_what_is_no_heads_is_named():
    for x, codes in ((R(2, 3, 4), torch.int8), (R(1, 2, 3, 4), torch.uint8), (R(1, 2, 3, 0), torch.int8)):
        with pytest.raises(ValueError, match=r"x: .*codes: .*; allowed: floats \[B, H, T, D\]"):
            quantize_heads(x, "token", codes)
    with pytest.raises(ValueError, match="granularity: 'row'; allowed: tensor, head, block, token"):
        quantize_heads(R(1, 2, 3, 4), "row")
    for qdata in (quantize_heads(R(1, 2, 3, 4), codes=torch.int8)[0], quantize_heads(R(1, 2, 3, 4))[0][0]):
        with pytest.raises(ValueError, match=r"qdata: .*; allowed: torch.float8_e4m3fn \[B, H, T, D\]"):
            transposed_values(qdata)
