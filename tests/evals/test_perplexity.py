import copy
import math

import pytest
import torch

from quantrot.evals.perplexity import perplexity


@pytest.fixture
def windows():
    return torch.randint(0, 256, (5, 33), generator=torch.Generator().manual_seed(0))


def test_a_uniform_model_has_the_vocabulary_as_its_perplexity(model, windows):
    uniform = copy.deepcopy(model)
    uniform.lm_head.weight.data.zero_()
    result = perplexity(uniform, windows)
    assert result.ppl == pytest.approx(model.config.vocab_size, rel=1e-6)
    assert result.nll_stderr == pytest.approx(0, abs=1e-6)


def test_it_is_the_plain_loop_over_windows(model, windows):
    losses = []
    for ids in windows:
        with torch.no_grad():
            losses.append(model(input_ids=ids[None], labels=ids[None]).loss.item())
    mean = sum(losses) / len(losses)
    spread = math.sqrt(sum((x - mean) ** 2 for x in losses) / (len(losses) - 1) / len(losses))
    result = perplexity(model, windows)
    assert result.nll == pytest.approx(mean, rel=1e-6)
    assert result.ppl == pytest.approx(math.exp(mean), rel=1e-5)
    assert result.nll_stderr == pytest.approx(spread, rel=1e-4)
    assert result.ppl_stderr == pytest.approx(math.exp(mean) * spread, rel=1e-4)
    assert (result.tokens, result.windows, result.seq_len) == (5 * 32, 5, 33)


@pytest.mark.parametrize("chunk", [1, 3, 31, 32, 1000])
def test_pieces_do_not_change_it(model, windows, chunk):
    assert perplexity(model, windows, chunk=chunk).nll == pytest.approx(perplexity(model, windows).nll, rel=1e-6)


def test_an_architecture_with_work_after_its_head_goes_through_its_own_forward(model, windows, monkeypatch):
    monkeypatch.setattr(model.config, "model_type", "another")
    whole = perplexity(model, windows, chunk=7)
    monkeypatch.undo()
    assert whole.nll == pytest.approx(perplexity(model, windows).nll, rel=1e-6)


def test_one_window_has_no_standard_error(model, windows):
    result = perplexity(model, windows[:1])
    assert result.nll_stderr is None and result.ppl_stderr is None


def test_a_broken_model_is_reported_not_hidden(model, windows):
    broken = copy.deepcopy(model)
    broken.lm_head.weight.data[3, 3] = math.nan
    assert math.isnan(perplexity(broken, windows).ppl)
    wild = copy.deepcopy(model)
    wild.lm_head.weight.data *= 1e6
    assert perplexity(wild, windows).ppl == math.inf


def test_progress_counts_every_window(model, windows):
    seen = []
    perplexity(model, windows, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i, 5) for i in range(1, 6)]
