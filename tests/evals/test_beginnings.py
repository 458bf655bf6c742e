from types import SimpleNamespace

import pytest
import torch
from lm_eval.models.huggingface import HFLM

from quantrot.evals import harness
from quantrot.evals.beginnings import alike, share_beginnings
from quantrot.modules import QuantizedAttention
from tests.evals.conftest import make_model

EXAMPLES = "Which is a bird?\nA. cod\nB. wren\nAnswer: B\n\n" * 2
QUESTIONS = ["Which is a fish?\nA. cod\nAnswer:", "A tree?\nA. cod\nB. oak\nAnswer:", "Which is salt?\nAnswer:"]
PROMPTS = [EXAMPLES + question for question in QUESTIONS]


def scores(model, tokenizer, prompts, share, batch_size=2):
    """(log probability, greedy) of four choices a prompt; how many tokens the model was given; what the hook saw."""
    requests = [SimpleNamespace(args=(prompt, f" {letter}")) for prompt in prompts for letter in "ABCD"]
    lm = HFLM(pretrained=model, tokenizer=harness.private_tokenizer(tokenizer), batch_size=batch_size)
    if share:
        share_beginnings(lm)
    seen, given = [], []
    lm.set_cache_hook(SimpleNamespace(add_partial=lambda *args: seen.append(args)))
    handle = model.model.embed_tokens.register_forward_hook(lambda module, args, out: given.append(args[0].numel()))
    try:
        with harness.quiet():
            found = lm.loglikelihood(requests)
    finally:
        handle.remove()
    assert sorted(seen) == sorted(
        ("loglikelihood", request.args, answer) for request, answer in zip(requests, found, strict=True)
    )
    return found, sum(given)


def assert_same(found, expected, **tolerance):
    torch.testing.assert_close(torch.tensor([p for p, _ in found]), torch.tensor([p for p, _ in expected]), **tolerance)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_scores_are_those_of_whole_prompts_for_less(model, tokenizer, batch_size):
    expected, whole = scores(model, tokenizer, PROMPTS, False, batch_size)
    found, tokens = scores(model, tokenizer, PROMPTS, True, batch_size)
    assert_same(found, expected)
    assert len({p for p, _ in found}) == 12 and tokens < 0.75 * whole


def test_prompts_that_share_little_or_do_not_fit_are_lm_evals(model, tokenizer):
    alone = ["Something else altogether. Answer:", EXAMPLES * 6 + QUESTIONS[0]]
    expected, _ = scores(model, tokenizer, [*PROMPTS, *alone], False)
    found, tokens = scores(model, tokenizer, [*PROMPTS, *alone], True)
    assert_same(found, expected)
    assert scores(model, tokenizer, alone, True)[1] == scores(model, tokenizer, alone, False)[1]


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_a_narrow_cache_is_continued_as_it_is_filled(tokenizer, kind):
    model = make_model(2)
    for layer in model.model.layers:
        layer.self_attn = QuantizedAttention(layer.self_attn, kv_cache=kind)
    expected, _ = scores(model, tokenizer, PROMPTS, False)
    assert_same(scores(model, tokenizer, PROMPTS, True)[0], expected)
    wide, _ = scores(make_model(2), tokenizer, PROMPTS, True)
    assert max(abs(p - q) for (p, _), (q, _) in zip(wide, expected, strict=True)) > 1e-3


def test_fp8_attention_continues_a_beginning(tokenizer):
    def logprobs(model, share):
        return torch.tensor([p for p, _ in scores(model, tokenizer, PROMPTS, share)[0]])

    model = make_model(2, heads=2)
    wide = logprobs(model, False)
    for layer in model.model.layers:
        layer.self_attn = QuantizedAttention(layer.self_attn, arithmetic="fp8", kv_cache="fp8")
    whole, shared = logprobs(model, False), logprobs(model, True)
    assert 0 < (shared - wide).norm() < 1.5 * (whole - wide).norm()


@pytest.mark.parametrize(
    ("field", "left"),
    [
        ({"sliding_window": 64}, True),
        ({"layer_types": ["conv", "full_attention"]}, True),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 100}}, True),
        ({"rope_parameters": {"rope_type": "yarn"}}, False),
        ({"rope_parameters": None}, False),
        ({}, False),
    ],
)
def test_a_model_whose_cache_cannot_be_continued_is_left_alone(field, left):
    model = make_model(0)
    for name, value in field.items():
        setattr(model.config, name, value)
    lm = SimpleNamespace(model=model, _loglikelihood_tokens=print)
    share_beginnings(lm)
    assert (lm._loglikelihood_tokens is print) == left


def test_a_window_of_a_models_text_part_counts(composite):
    lm = SimpleNamespace(model=composite, _loglikelihood_tokens=print)
    share_beginnings(lm)
    assert lm._loglikelihood_tokens is print and composite.config.get_text_config().sliding_window


def test_alike_groups_what_shares_half_and_leaves_a_token_each():
    a, b = (1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 7)
    assert alike([b, a]) == [(4, [a, b])]
    assert alike([a, a[:5]]) == [(4, [a[:5], a])]  # one begins with all of the other
    assert alike([a, (1, 2, 8, 9, 10, 11)]) == [] and alike([a]) == [] and alike([]) == []
    assert alike([a, b, (9, 9, 9), (9, 9, 8)]) == [(4, [a, b]), (2, [(9, 9, 8), (9, 9, 9)])]
