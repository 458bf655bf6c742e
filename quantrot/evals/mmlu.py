"""MMLU: lm-eval's own task (57 subjects in 4 groups, few-shot examples from dev), run on a loaded model."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from quantrot.evals import harness
from quantrot.evals.beginnings import share_beginnings
from quantrot.evals.logits import Count, input_device, text_config
from quantrot.evals.mmlu_data import read_data
from quantrot.evals.statistics import Paired, paired
from quantrot.process import counted

SEED = 1234  # lm-eval's own default; MMLU draws nothing at random, so it changes no number


@dataclass(frozen=True)
class Score:
    """Accuracy over n questions; stderr is lm-eval's, or of so many independent questions where it has none
    (None for one question)."""

    n: int
    acc: float
    stderr: float | None


@dataclass(frozen=True)
class Mmlu:
    """`overall` is the one number, `groups` the four (subjects weighted by their questions), `subjects` the 57.

    `members` maps a group to its subjects. `answers` holds one character a question, in order, for each subject: 1
    where the model was right. `task_hashes` are lm-eval's (over documents, prompts and targets): where they are equal,
    so were the questions. `truncated` counts prompts cut from the left because the model's context is shorter.
    """

    overall: Score
    groups: dict[str, Score]
    subjects: dict[str, Score]
    members: dict[str, list[str]]
    answers: dict[str, str]
    task_hashes: dict[str, str]
    task_version: Any
    lm_eval: str
    fewshot: int
    limit: int | None
    batch_size: int
    seed: int
    truncated: int

    @property
    def cut(self) -> str:
        """What `truncated` says, in words. A question is one prompt or several."""
        some = f"{counted(self.truncated, 'prompt')} {'was' if self.truncated == 1 else 'were'} cut from the left"
        return f"{some}: the model's context is shorter"


def mmlu(
    model: Any,
    tokenizer: Any,
    *,
    fewshot: int = 5,
    limit: int | None = None,
    batch_size: int | str = "auto",
    data: Path | None = None,
    progress: Count | None = None,
    tokens: harness.Tokens | None = None,
) -> Mmlu:
    """Run MMLU on a transformers causal model, with lm-eval's prompts, scores and aggregation.

    `limit` takes the first questions of each subject. `batch_size` "auto" lets lm-eval find the largest that fits a
    GPU, and is 1 on a CPU; memory holds two batch x length x vocabulary arrays. `data` is a directory of local files
    (see mmlu_data.read_data), used without any network; without it the data comes from the hub or its cache.
    `progress(done, total)` counts questions. `tokens`, a dict that is empty at first, keeps prompts' tokens for the
    next run of a model with the same tokenizer. Process-wide state (random generators, offline flags, loggers) is
    restored. Raises ValueError for a bad option, incomplete data, an unreachable hub, a tokenizer that ends all
    answers alike, or a model that computes NaN.
    """
    check_options(fewshot, limit, batch_size)
    with contextlib.ExitStack() as stack:
        stack.enter_context(harness.random_state_restored())
        group, manager = stack.enter_context(harness.mmlu_task(data, fewshot))
        truncated = stack.enter_context(harness.quiet())
        stack.enter_context(harness.templates_kept())
        lm = stack.enter_context(asked(model, tokenizer, batch_size, tokens))
        if progress:
            harness.report_progress(lm, questions(group, limit), progress)
        results = evaluate(lm, group, manager, fewshot, limit)
        check_scores(results["samples"], lm.model.config._name_or_path)
        return result_of(results, fewshot, limit, batch_of(lm), truncated())


@contextlib.contextmanager
def asked(model: Any, tokenizer: Any, batch_size: int | str, tokens: harness.Tokens | None = None) -> Iterator[Any]:
    """The model as lm-eval asks one: prompts are tokenized together, and those that begin alike share that."""
    from lm_eval.models.huggingface import HFLM

    with harness.without_quantization_config(model):
        size = _batch_size(batch_size, model)
        lm = HFLM(pretrained=model, tokenizer=harness.private_tokenizer(tokenizer), batch_size=size)
        lm._device = input_device(model)
        _check_answers(lm)
        harness.tokenize_together(lm, tokens, getattr(text_config(model), "vocab_size", None))
        share_beginnings(lm)
        yield lm


def batch_of(lm: Any) -> int:
    """The size of its batches: the last one was measured, where lm-eval had to find it."""
    return int([lm.batch_size_per_gpu, *lm.batch_sizes.values()][-1])


def questions(group: Any, limit: int | None) -> int:
    """How many lm-eval will ask."""
    return sum(min(limit or len(task.eval_docs), len(task.eval_docs)) for task in group.get_all_tasks())


def check_options(fewshot: int, limit: int | None, batch_size: int | str) -> None:
    """Raise ValueError where an option of `mmlu` is out of range."""
    if not 0 <= fewshot <= 5:
        raise ValueError(f"fewshot is {fewshot}; allowed: 0 to 5, the examples of MMLU's dev split")
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; give at least 1 question per subject, or leave it out for all")
    if batch_size != "auto" and not (str(batch_size).isdecimal() and int(batch_size) > 0):
        raise ValueError(f"batch_size is {batch_size!r}; allowed: a positive number, or auto")


def _check_answers(lm: Any) -> None:
    """Raise ValueError where no choice can be told from another: lm-eval scores what a prompt with its answer has
    behind as many tokens as the prompt alone, which is EOS, whatever the answer, where that is appended to both."""
    ends = {answer: tuple(lm._encode_pair("Answer:", f" {answer}")[1][-1:]) for answer in "ABCD"}
    if len(set(ends.values())) < len(ends) or () in ends.values():
        shown = ", ".join(f"{answer} {list(end)}" for answer, end in ends.items())
        raise ValueError(
            f"tokenizer {lm.tokenizer.name_or_path}: prompts with MMLU's answers end in its tokens {shown}, which must "
            "differ, or all choices score alike; take what it appends to every text, such as EOS, out of "
            "post_processor in tokenizer.json, or set add_eos_token to false in tokenizer_config.json"
        )


def check_scores(samples: dict[str, list[dict[str, Any]]], name: str) -> None:
    """Raise ValueError where a choice's score is NaN: the first choice would count as the answer, a share of right ones
    as good as chance's."""
    rows = [row for subject in samples.values() for row in subject]
    broken = sum(any(math.isnan(score) for score, *_ in row["filtered_resps"]) for row in rows)
    if broken:
        raise ValueError(
            f"model {name}: {broken} of {len(rows)} questions have no score, for it computes NaN "
            "or infinity; give dtype bfloat16 or float32, or repair the checkpoint"
        )


def check_data(data: Path | None, fewshot: int) -> None:
    """Raise ValueError where `data` is not a complete MMLU, or there is none and the hub's, which is fetched, cannot be
    had: to be asked before what takes long."""
    if data is not None:
        read_data(data, harness.subject_names(), fewshot)
        return
    with harness.mmlu_task(None, fewshot):
        pass


def compare(model: Mmlu, baseline: Mmlu) -> Paired:
    """The difference in accuracy over the same questions.

    Raises ValueError where the two runs did not see the same questions and prompts.
    """
    if model.task_hashes != baseline.task_hashes:
        differing = [name for name, value in model.task_hashes.items() if baseline.task_hashes.get(name) != value]
        raise ValueError(
            f"baseline: not the same questions in {', '.join(differing)}; use equal data, fewshot and limit"
        )
    return paired(_correct(model), _correct(baseline))


def _correct(result: Mmlu) -> list[bool]:
    return [mark == "1" for subject in sorted(result.answers) for mark in result.answers[subject]]


def _batch_size(batch_size: int | str, model: Any) -> int | str:
    if batch_size != "auto":
        return int(batch_size)
    # lm-eval's search grows a batch until the device refuses; a CPU does not refuse, the kernel kills the process.
    return "auto" if model.device.type == "cuda" else 1


def evaluate(lm: Any, group: Any, manager: Any, fewshot: int, limit: int | None) -> Any:
    """What lm-eval finds of a group of tasks."""
    import lm_eval

    with contextlib.redirect_stdout(sys.stderr):  # the batch-size search prints
        return lm_eval.simple_evaluate(
            model=lm,
            tasks=[group],
            task_manager=manager,
            num_fewshot=fewshot,
            limit=limit,
            log_samples=True,
            random_seed=SEED,
            numpy_random_seed=SEED,
            torch_random_seed=SEED,
            fewshot_random_seed=SEED,
        )


def result_of(results: Any, fewshot: int, limit: int | None, batch_size: int, truncated: int) -> Mmlu:
    """What lm-eval found, in our words."""
    scores = {name: _score(values) for name, values in results["results"].items()}
    samples = {_subject(name): rows for name, rows in results["samples"].items()}
    members = {g: results["group_subtasks"][g] for g in results["group_subtasks"]["mmlu"]}
    return Mmlu(
        overall=scores["mmlu"],
        groups={_subject(name): scores[name] for name in members},
        subjects={_subject(name): scores[name] for name in results["samples"]},
        members={_subject(name): [_subject(task) for task in tasks] for name, tasks in members.items()},
        answers={subject: "".join(str(int(row["acc"])) for row in rows) for subject, rows in samples.items()},
        task_hashes={subject: _task_hash(rows) for subject, rows in samples.items()},
        task_version=results["versions"]["mmlu"],
        lm_eval=metadata.version("lm_eval"),
        fewshot=fewshot,
        limit=limit,
        batch_size=batch_size,
        seed=SEED,
        truncated=truncated,
    )


def _subject(task: str) -> str:
    return task.removeprefix("mmlu_")


def _score(values: dict[str, Any]) -> Score:
    """lm-eval has no error of a group where one of its subjects has a single question."""
    stderr, count, share = values["acc_stderr,none"], values["sample_len"], float(values["acc,none"])
    if stderr == "N/A" and count > 1:
        stderr = math.sqrt(share * (1 - share) / (count - 1))
    return Score(count, share, None if stderr == "N/A" else float(stderr))


def _task_hash(rows: list[dict[str, Any]]) -> str:
    """What lm-eval writes as `task_hashes` beside its results."""
    from lm_eval.utils import hash_string

    return hash_string("".join(row["doc_hash"] + row["prompt_hash"] + row["target_hash"] for row in rows))
