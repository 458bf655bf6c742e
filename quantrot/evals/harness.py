"""lm-eval as a guest in this process: its MMLU task over any data, its noise silenced, its global changes undone."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from quantrot.evals import hub
from quantrot.evals.logits import Count
from quantrot.evals.mmlu_data import as_dataset, read_data

Tokens = dict[bytes, Any]  # int32 arrays of texts, by a hash of tokenizer and text
CHOICES = 4  # of a question, each a request
TOKENIZED = 1024  # prompts at a time: the tokenizer's own record of one is a hundred times its tokens


@contextlib.contextmanager
def mmlu_task(data: Path | None, fewshot: int) -> Iterator[tuple[Any, Any]]:
    """lm-eval's group `mmlu` with its documents loaded, and the manager that made it."""
    import datasets

    manager = task_manager()
    with contextlib.ExitStack() as stack:
        if data is not None:
            documents = read_data(data, subject_names(), fewshot)
            stack.enter_context(hub.offline())
            # All else stays lm-eval's own. Written to files for it they take 2.9 s more: for each subject `datasets`
            # parses and hashes the description of all 57.
            read = (datasets, "load_dataset", lambda path, name, **options: as_dataset(documents[name]))
            with hub.attributes(read):
                loaded = _load(manager)
        else:
            why = ""
            if not hub.reachable():
                why = "the hub cannot be reached, and datasets' cache has it not"
                stack.enter_context(hub.offline())
            try:
                loaded = _load(manager)
            except OSError as error:
                raise ValueError(
                    f"data: MMLU cannot be fetched ({why or error}); give local files as data (--data DIR)"
                ) from error
        yield loaded["groups"]["mmlu"], manager


def _load(manager: Any) -> Any:
    import datasets

    bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    # For each of the 57 subjects `datasets` parses a card that lists all of them: 1.4 s less by libyaml.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        with hub.attributes((yaml, "SafeLoader", loader)):
            return manager.load(["mmlu"])
    finally:
        if not bars:
            datasets.enable_progress_bars()


def task_manager() -> Any:
    """A TaskManager over lm-eval's MMLU alone: its whole index takes seconds to parse."""
    import lm_eval.tasks

    own = Path(lm_eval.tasks.__file__).parent / "mmlu" / "default"
    return lm_eval.tasks.TaskManager(include_defaults=False, include_path=[own])


def subject_names() -> list[str]:
    """The 57 subjects of lm-eval's task, sorted."""
    entries = task_manager().task_index.values()
    return sorted(entry.cfg["dataset_name"] for entry in entries if entry.cfg and "dataset_name" in entry.cfg)


def private_tokenizer(tokenizer: Any) -> Any:
    """A copy for lm-eval, which sets a pad token; without the remark about long prompts, which are counted instead.

    lm-eval looks whether a prompt has its first token in front already, BOS or else EOS. A tokenizer with neither gets
    what lm-eval would add to it for padding: no prompt begins with that, and no token of a prompt changes.
    """
    tokenizer = copy.deepcopy(tokenizer)
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        tokenizer.add_special_tokens({"eos_token": "<|pad|>"})
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def report_progress(lm: Any, questions: int, progress: Count) -> None:
    """Call progress(done, questions) as `lm` scores a question's last choice.

    It listens where a cache of answers would: forward passes are no measure, the search for a batch size makes some.
    """
    lm.set_cache_hook(_Listener(questions, progress))


class _Listener:
    """lm-eval's CacheHook: add_partial is called once for each choice of each question."""

    def __init__(self, questions: int, progress: Count) -> None:
        self.questions, self.progress, self.scored = questions, progress, 0

    def add_partial(self, attribute: str, request: Any, answer: Any) -> None:
        self.scored += 1
        if self.scored % CHOICES == 0:
            self.progress(self.scored // CHOICES, self.questions)


@contextlib.contextmanager
def quiet() -> Iterator[Callable[[], int]]:
    """Silence lm-eval's bars and remarks; yields a function that tells how many prompts it has truncated."""
    import lm_eval.api.model
    import lm_eval.api.task
    import lm_eval.evaluator
    import lm_eval.models.huggingface as huggingface

    truncated = 0

    def keep(record: logging.LogRecord) -> bool:
        nonlocal truncated
        truncated += "Truncating" in record.getMessage()
        return record.levelno >= logging.ERROR

    def bar(*args: Any, **kwargs: Any) -> Any:
        return tqdm(*args, **{**kwargs, "disable": True})

    tqdm = huggingface.tqdm
    everything, models = logging.getLogger("lm_eval"), huggingface.eval_logger
    levels = everything.level, models.level
    everything.setLevel(logging.ERROR)
    models.setLevel(logging.WARNING)
    models.addFilter(keep)
    try:
        with hub.attributes(
            (lm_eval.api.model, "tqdm", bar),
            (lm_eval.api.task, "tqdm", bar),
            (huggingface, "tqdm", bar),
            # Both start subprocesses (git, pip) that may print, for facts that the report takes from elsewhere.
            (lm_eval.evaluator, "get_git_commit_hash", lambda: None),
            (lm_eval.evaluator, "add_env_info", lambda storage: None),
        ):
            yield lambda: truncated
    finally:
        models.removeFilter(keep)
        everything.setLevel(levels[0])
        models.setLevel(levels[1])


@contextlib.contextmanager
def templates_kept() -> Iterator[None]:
    """Compile each template once: lm-eval does it anew for each of MMLU's 14,042 questions and for each of their five
    examples, which takes one to four minutes of a full run."""
    import lm_eval.utils

    environment = lm_eval.utils.env
    with hub.attributes((environment, "from_string", functools.lru_cache(maxsize=256)(environment.from_string))):
        yield


def tokenize_together(lm: Any, kept: Tokens | None = None, vocab_size: int | None = None) -> None:
    """Have `lm` tokenize all prompts of a run in batches, on every core: it encodes two texts a choice, one by one, a
    question's prompt eight times (3732 choices, 5 shots: 3.2 s; 2.1 on two cores so).

    vocab_size: of the model; ValueError for a prompt with a token that it has not. kept: what earlier runs left, for
    tokenizers that are alike: 0.2 GB of a whole MMLU. (Of the 84 s that it took 1.5 billion weights on an H100 44 had
    passed at its first tenth, mostly with tokenizing.)
    """
    prompts: dict[str, None] = {}
    tokenizer, loglikelihood = lm.tokenizer, lm.loglikelihood
    encode, backend = tokenizer.encode, getattr(tokenizer, "backend_tokenizer", None)
    known = kept if kept is not None and backend is not None else {}
    whose = hashlib.sha256(backend.to_str().encode()).digest() if backend is not None else b""

    def place(text: str, options: str) -> bytes:
        written = f"{options} {text}".encode(errors="surrogatepass")
        return hashlib.blake2b(written, key=whose, digest_size=16).digest()

    def encoded(text: str, **options: Any) -> Any:
        if text not in prompts:
            return encode(text, **options)
        asked = str(options)
        if place(text, asked) not in known:
            texts = [each for each in prompts if place(each, asked) not in known]
            for start in range(0, len(texts), TOKENIZED):
                batch = texts[start : start + TOKENIZED]
                for one, ids in zip(batch, tokenizer(batch, **options)["input_ids"], strict=True):
                    if vocab_size is not None and max(ids, default=0) >= vocab_size:
                        raise ValueError(
                            f"{tokenizer.name_or_path}: its tokenizer gives token {max(ids)}; config.json has "
                            f"{vocab_size} of them"
                        )
                    known[place(one, asked)] = np.array(ids, dtype=np.int32)
        return known[place(text, asked)].tolist()

    def scored(requests: list[Any], **options: Any) -> Any:
        for context, continuation in (request.args for request in requests):
            prompts.update({context.rstrip(): None, context + continuation: None})  # the two that lm-eval encodes
        try:
            return loglikelihood(requests, **options)
        finally:
            prompts.clear()
            if known is not kept:
                known.clear()

    tokenizer.encode, lm.loglikelihood = encoded, scored


@contextlib.contextmanager
def random_state_restored() -> Iterator[None]:
    """lm-eval seeds Python, numpy and torch for the whole process; put back what was there."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@contextlib.contextmanager
def without_quantization_config(model: Any) -> Iterator[None]:
    """HFLM parses a dict `quantization_config` even of a loaded model, and fails where its package is missing."""
    config = model.config
    if not isinstance(getattr(config, "quantization_config", None), dict):
        yield
        return
    hidden = config.quantization_config
    del config.quantization_config
    try:
        yield
    finally:
        config.quantization_config = hidden
