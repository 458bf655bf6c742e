import copy
import math

import pytest
import torch

from quantrot.evals.divergence import divergence, logit_divergence
from quantrot.evals.perplexity import perplexity


@pytest.fixture
def windows():
    return torch.randint(0, 256, (4, 25), generator=torch.Generator().manual_seed(0))


def test_a_model_does_not_diverge_from_itself(model, windows):
    result = divergence(model, model, windows)
    assert result.kl == 0 and result.top1 == 1 and result.ppl_ratio == 1 and result.max_logit_error == 0
    assert result.kl_stderr == 0 and result.top1_stderr == 0 and result.ppl_ratio_stderr == 0


def test_kl_is_expected_log_ratio_under_the_baseline():
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(7, 50, generator=generator, dtype=torch.float64) * 3 for _ in range(2))
    ratio = p.softmax(-1).log() - q.softmax(-1).log()
    direct = (p.softmax(-1) * ratio).sum(-1)
    result = logit_divergence(p.float(), q.float())
    assert torch.allclose(result.kl.double(), direct, rtol=1e-5)
    assert result.agree.equal(p.argmax(-1) == q.argmax(-1))
    assert result.max_error == pytest.approx((p - q).abs().max().item(), rel=1e-6)
    assert result.max_baseline == pytest.approx(p.abs().max().item(), rel=1e-6)


def test_it_equals_a_direct_computation_over_whole_windows(model, other_model, windows):
    with torch.no_grad():
        p, q = (m(input_ids=windows).logits[:, :-1].double() for m in (other_model, model))
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean(-1)  # per window
    agree = (p.argmax(-1) == q.argmax(-1)).double().mean(-1)
    result = divergence(model, other_model, windows)
    assert result.kl == pytest.approx(kl.mean().item(), rel=1e-5)
    assert result.kl_stderr == pytest.approx(kl.std().item() / 2, rel=1e-4)
    assert result.top1 == pytest.approx(agree.mean().item())
    assert result.top1_stderr == pytest.approx(agree.std().item() / 2, abs=1e-9)
    assert result.max_logit_error == pytest.approx(((q - p).abs().max() / p.abs().max()).item(), rel=1e-5)
    assert result.tokens == 4 * 24


def test_perplexities_are_those_of_each_model_alone(model, other_model, windows):
    result = divergence(model, other_model, windows)
    assert result.ppl == pytest.approx(perplexity(model, windows).ppl, rel=1e-6)
    assert result.baseline_ppl == pytest.approx(perplexity(other_model, windows).ppl, rel=1e-6)
    assert result.ppl_ratio == pytest.approx(result.ppl / result.baseline_ppl, rel=1e-9)


@pytest.mark.parametrize("chunk", [1, 5, 24, 100])
def test_pieces_do_not_change_it(model, other_model, windows, chunk):
    whole, pieces = divergence(model, other_model, windows), divergence(model, other_model, windows, chunk=chunk)
    assert pieces.kl == pytest.approx(whole.kl, rel=1e-5)
    assert pieces.top1 == whole.top1
    assert pieces.max_logit_error == pytest.approx(whole.max_logit_error, rel=1e-5)


def test_a_model_whose_config_has_parts_is_measured_by_its_text_part(model, composite, windows):
    with torch.no_grad():
        logits = composite(input_ids=windows).logits[:, :-1]
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    assert perplexity(composite, windows).nll == pytest.approx(nll.item(), rel=1e-5)
    assert divergence(composite, model, windows).ppl == pytest.approx(nll.exp().item(), rel=1e-4)


@pytest.mark.parametrize("size", [100, 300])
def test_another_vocabulary_is_refused(model, windows, size):
    other = copy.deepcopy(model)
    other.resize_token_embeddings(size)
    with pytest.raises(ValueError, match=f"has {size} .*compare a model with the checkpoint that it was made from"):
        divergence(model, other, windows)


def test_nan_is_not_hidden_by_a_maximum(model, windows):
    windows[windows == 7] = 8
    windows[3, 20] = 7
    broken = copy.deepcopy(model)
    broken.model.embed_tokens.weight.data[7] = math.nan  # read only near the end of the last window
    result = divergence(broken, model, windows, chunk=5)
    assert math.isnan(result.kl) and math.isnan(result.max_logit_error)
