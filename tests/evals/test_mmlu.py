import copy
import csv
import dataclasses
import logging
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from tokenizers import Regex
from tokenizers.normalizers import Replace
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from quantrot.evals import harness, hub
from quantrot.evals.mmlu import Score, check_data, check_options, compare, mmlu
from tests.evals.conftest import make_model


@pytest.fixture(scope="module")
def result(model, tokenizer, mmlu_dir):
    return mmlu(model, tokenizer, fewshot=2, data=mmlu_dir)


@pytest.fixture(scope="module")
def lm_evals_own(model_dir, mmlu_dir, tmp_path_factory):
    """lm-eval run as its users run it: the model by its path, its own task files, a group that renames the data."""
    import lm_eval.tasks
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    include = tmp_path_factory.mktemp("include")
    group = {"group": "mmlu", "dataset_path": str(mmlu_dir)}
    group["dataset_kwargs"] = {"cache_dir": str(tmp_path_factory.mktemp("cache"))}
    metrics = [{"metric": "acc", "weight_by_size": True}]
    local = {"group": "local", "task": [group], "aggregate_metric_list": metrics, "metadata": {"version": 2}}
    (include / "local.yaml").write_text(yaml.safe_dump(local))
    lm = HFLM(pretrained=str(model_dir), device="cpu", batch_size=1)
    task_files = Path(lm_eval.tasks.__file__).parent / "mmlu" / "default"  # all tasks would take seconds to parse
    manager = TaskManager(include_defaults=False, include_path=[task_files, include])
    with hub.offline(), hub.attributes((yaml, "SafeLoader", getattr(yaml, "CSafeLoader", yaml.SafeLoader))):  # seconds
        return lm_eval.simple_evaluate(model=lm, tasks=["local"], num_fewshot=2, task_manager=manager)


def test_every_number_is_lm_evals_own(result, lm_evals_own):
    def own(name):
        values = lm_evals_own["results"][name]
        return Score(values["sample_len"], values["acc,none"], values["acc_stderr,none"])

    assert len(result.subjects) == 57 and len(result.groups) == 4
    assert result.subjects == {name: own(f"mmlu_{name}") for name in result.subjects}
    assert result.groups == {name: own(f"mmlu_{name}") for name in result.groups}
    assert result.overall == own("mmlu")
    assert 0.1 < result.overall.acc < 0.5 and len({score.acc for score in result.subjects.values()}) > 2


def test_prompts_and_answers_are_lm_evals_own(result, lm_evals_own):
    for name, answers in result.answers.items():
        assert answers == "".join(str(int(row["acc"])) for row in lm_evals_own["samples"][f"mmlu_{name}"])
    prompt = lm_evals_own["samples"]["mmlu_anatomy"][0]["arguments"][0][0]
    assert prompt.startswith("The following are multiple choice questions (with answers) about anatomy.")
    assert prompt.count("Answer:") == 3


def test_the_batch_size_changes_nothing_in_float32(result, model, tokenizer, mmlu_dir):
    assert mmlu(model, tokenizer, fewshot=2, data=mmlu_dir, batch_size=8).answers == result.answers


@pytest.mark.parametrize(
    ("kept", "brought"), [("cpu", "disk"), pytest.param(0, "cpu", marks=pytest.mark.gpu)], ids=["disk", "gpu"]
)
def test_a_model_whose_parts_accelerate_brings_answers_alike(
    result, model_dir, tokenizer, mmlu_dir, tmp_path, kept, brought
):
    places = dict.fromkeys(("model.embed_tokens", "model.layers"), brought)
    places |= dict.fromkeys(("model.norm", "model.rotary_emb", "lm_head"), kept)
    model = AutoModelForCausalLM.from_pretrained(model_dir, device_map=places, offload_folder=tmp_path)
    assert model.device.type == "meta"
    found = mmlu(model, tokenizer, fewshot=2, limit=1, data=mmlu_dir)
    assert found.answers == {subject: answers[:1] for subject, answers in result.answers.items()}


def test_a_batch_size_that_lm_eval_had_to_find_is_recorded(result, model, tokenizer, mmlu_dir, monkeypatch, capfd):
    monkeypatch.setattr("quantrot.evals.mmlu._batch_size", lambda asked, model: "auto")  # as on a GPU
    seen = []
    found = mmlu(model, tokenizer, fewshot=2, limit=1, data=mmlu_dir, progress=lambda *counts: seen.append(counts))
    assert found.batch_size == 64  # the largest that lm-eval tries
    assert found.answers == {subject: answers[:1] for subject, answers in result.answers.items()}
    assert seen == [(i, 57) for i in range(1, 58)]
    assert capfd.readouterr().out == ""


def test_csv_gives_what_parquet_gives(model, tokenizer, questions, result, tmp_path):
    for subject, splits in questions.items():
        (tmp_path / subject).mkdir()
        for split, rows in splits.items():
            with (tmp_path / subject / f"{split}.csv").open("w", newline="") as stream:
                csv.writer(stream).writerows([[r["question"], *r["choices"], "ABCD"[r["answer"]]] for r in rows])
    assert mmlu(model, tokenizer, fewshot=2, data=tmp_path) == result


def test_limit_takes_the_first_questions_and_counts_them(model, tokenizer, mmlu_dir, result):
    seen = []
    few = mmlu(
        model, tokenizer, fewshot=2, limit=1, data=mmlu_dir, progress=lambda done, total: seen.append((done, total))
    )
    assert few.answers == {subject: answers[:1] for subject, answers in result.answers.items()}
    assert few.overall.n == 57 and few.subjects["anatomy"].stderr is None
    share = few.overall.acc
    assert few.overall.stderr == pytest.approx((share * (1 - share) / 56) ** 0.5)
    assert seen == [(i, 57) for i in range(1, 58)]


def test_the_process_is_left_as_it_was(model, tokenizer, mmlu_dir):
    import datasets
    import huggingface_hub
    import lm_eval.models.huggingface as huggingface

    def state():
        loggers = [logging.getLogger(name) for name in ("lm_eval", "lm_eval.models.huggingface")]
        return (
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_rng_state().tolist(),
            huggingface_hub.constants.HF_HUB_OFFLINE,
            datasets.config.HF_HUB_OFFLINE,
            datasets.are_progress_bars_disabled(),
            huggingface.tqdm,
            [(logger.level, list(logger.filters)) for logger in loggers],
            tokenizer.pad_token,
            model.config.quantization_config,
        )

    # a format whose package may be missing: lm-eval would try to build it
    model.config.quantization_config = {"quant_method": "no-such-method"}
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(99)  # not lm-eval's own seed, which an earlier run may have left
    try:
        before = state()
        mmlu(model, tokenizer, fewshot=0, limit=1, data=mmlu_dir)
        assert state() == before
    finally:
        del model.config.quantization_config


def test_local_data_needs_no_network(model, tokenizer, mmlu_dir, monkeypatch):
    import socket

    def refuse(*args):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert mmlu(model, tokenizer, fewshot=0, limit=1, data=mmlu_dir).overall.n == 57


def test_prompts_longer_than_the_context_are_counted(model, tokenizer, mmlu_dir, monkeypatch, result):
    assert result.truncated == 0
    monkeypatch.setattr(model.config, "max_position_embeddings", 64)
    assert mmlu(model, tokenizer, fewshot=2, limit=1, data=mmlu_dir).truncated == 57


@pytest.mark.parametrize(
    ("part", "made", "ends"),
    [
        ("post_processor", TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 260), ("</s>", 261)]), 261),
        ("normalizer", Replace(Regex("[A-D]$"), "it"), 83),  # " it" is two tokens
        ("normalizer", Replace(Regex(" [A-D]$"), ""), ""),
    ],
    ids=["EOS-appended", "the-same-answers", "no-answers"],
)
def test_answers_that_end_alike_are_refused(model, tokenizer, mmlu_dir, part, made, ends):
    alike = copy.deepcopy(tokenizer)
    setattr(alike.backend_tokenizer, part, made)
    shown = ", ".join(f"{answer} [{ends}]" for answer in "ABCD")
    with pytest.raises(ValueError, match=re.escape(f"answers end in its tokens {shown}, which must differ")):
        mmlu(model, alike, fewshot=0, limit=1, data=mmlu_dir)


def test_a_model_that_computes_nan_has_no_score(tokenizer, mmlu_dir):
    broken = make_model(seed=0)
    with torch.no_grad():
        broken.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"57 of 57 questions have no score, for it computes NaN or infinity; "):
        mmlu(broken, tokenizer, fewshot=0, limit=1, data=mmlu_dir)


def test_a_token_that_the_model_has_not_is_named(tokenizer, mmlu_dir):
    small = make_model(seed=0)
    most = len(tokenizer) // 2
    small.resize_token_embeddings(most)
    with pytest.raises(ValueError, match=rf"its tokenizer gives token \d+; config.json has {most} of them"):
        mmlu(small, tokenizer, fewshot=0, limit=1, data=mmlu_dir)


def test_a_tokenizer_needs_neither_bos_nor_eos(model, tokenizer, mmlu_dir, result):
    neither = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    size = len(neither)
    assert mmlu(model, neither, fewshot=2, data=mmlu_dir) == result
    assert neither.eos_token is None and len(neither) == size


def test_an_unreachable_hub_is_said_with_the_remedy(model, tokenizer, monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "reachable", lambda: False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="cannot be fetched .the hub cannot be reached.* give local files as data"):
        mmlu(model, tokenizer)
    with pytest.raises(ValueError, match="give local files as data .--data DIR"):
        check_data(None, 5)


def test_compare_pairs_the_same_questions(result):
    flipped = dict(result.answers)
    flipped["anatomy"] = "".join("10"[int(mark)] for mark in flipped["anatomy"])
    right, n = result.answers["anatomy"].count("1"), result.overall.n
    difference = compare(result, dataclasses.replace(result, answers=flipped))
    assert (difference.only_model, difference.only_baseline, difference.n) == (right, 3 - right, n)
    assert difference.difference == pytest.approx((2 * right - 3) / n)


def test_compare_refuses_other_questions(result):
    other = dataclasses.replace(result, task_hashes={**result.task_hashes, "virology": "0"})
    with pytest.raises(ValueError, match="not the same questions in virology"):
        compare(result, other)


@pytest.mark.parametrize(
    "options, message",
    [
        ((6, None, 1), "fewshot is 6; allowed: 0 to 5"),
        ((-1, None, 1), "fewshot is -1"),
        ((5, 0, 1), "limit is 0; give at least 1"),
        ((5, None, 0), "batch_size is 0; allowed: a positive number, or auto"),
        ((5, None, "many"), "batch_size is 'many'; allowed: a positive number, or auto"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        check_options(*options)


def test_templates_are_compiled_once_and_only_while_it_runs():
    from lm_eval.utils import apply_template, env

    before = env.from_string
    with harness.templates_kept():
        assert env.from_string("{{question}}?") is env.from_string("{{question}}?")
        assert apply_template("{{question}}?", {"question": "why"}) == "why?"
    assert env.from_string == before and env.from_string("{{a}}") is not env.from_string("{{a}}")


class Encoder:
    """What of lm-eval's model encodes: every text with and without special tokens, noted in `seen`."""

    def __init__(self, tokenizer):
        self.tokenizer, self.seen, self.batches = harness.private_tokenizer(tokenizer), [], 0
        real = type(self.tokenizer).__call__

        class Counting(type(self.tokenizer)):
            def __call__(tokenizer, texts, **options):
                self.batches += not isinstance(texts, str)
                return real(tokenizer, texts, **options)

        self.tokenizer.__class__ = Counting

    def loglikelihood(self, requests):
        for context, continuation in (request.args for request in requests):
            for text in (context.rstrip(), context + continuation, "not asked for"):
                for options in ({}, {"add_special_tokens": False}):
                    self.seen.append(self.tokenizer.encode(text, **options))
        return len(requests)


class Request:
    def __init__(self, *args):
        self.args = args


REQUESTS = [Request(f"question {i} ", f" {choice}") for i in range(3) for choice in "ABCD"]


def test_prompts_are_tokenized_together_and_as_they_are_alone(tokenizer, monkeypatch):
    alone, together = Encoder(tokenizer), Encoder(tokenizer)
    alone.loglikelihood(REQUESTS)
    monkeypatch.setattr(harness, "TOKENIZED", 4)
    singles = []
    encode = together.tokenizer.encode
    monkeypatch.setattr(together.tokenizer, "encode", lambda text, **o: singles.append(text) or encode(text, **o))
    harness.tokenize_together(together)
    assert together.loglikelihood(REQUESTS) == 12
    assert together.seen == alone.seen and set(singles) == {"not asked for"} and together.batches == 8


def test_tokens_are_kept_for_tokenizers_that_are_alike(tokenizer):
    other = harness.private_tokenizer(tokenizer)
    other.add_tokens(["question"])
    kept, batches = {}, []
    for each in (tokenizer, tokenizer, other):
        alone, together = Encoder(each), Encoder(each)
        alone.loglikelihood(REQUESTS)
        harness.tokenize_together(together, kept)
        together.loglikelihood(REQUESTS)
        assert together.seen == alone.seen
        batches.append(together.batches)
    assert batches == [2, 0, 2] and len(kept) == 60
