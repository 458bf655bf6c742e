"""MMLU on several devices: a process for each, with a model of its own, among which the questions are dealt out.

lm-eval makes the prompts and counts the answers in this process. What it asks its model goes in pieces of a subject to
whichever process is free. Scores are one device's but for rounding: batches hold other prompts.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import queue
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from quantrot.evals import harness
from quantrot.evals.logits import Count
from quantrot.evals.mmlu import Mmlu, asked, batch_of, check_options, check_scores, evaluate, questions, result_of
from quantrot.evals.report import model_entry
from quantrot.process import cpus

PIECE = 1024  # requests, four a question: the largest of 57 subjects is a ninth of all
WAIT, LONG = 1.0, 10.0  # seconds until it is looked whether all processes are there; that they may take to end

Scores = list[tuple[float, bool]]


def mmlu_on(
    name: str,
    devices: list[str],
    *,
    dtype: str = "auto",
    fewshot: int = 5,
    limit: int | None = None,
    batch_size: int | str = "auto",
    data: Path | None = None,
    progress: Count | None = None,
) -> tuple[Mmlu, dict[str, Any]]:
    """`mmlu` of the model of this name, as `open_model` takes it, on all of these devices, and its entry in a report.

    Raises ValueError for what `mmlu` and `open_model` do, and where a process is ended from outside.
    """
    check_options(fewshot, limit, batch_size)
    with contextlib.ExitStack() as stack:
        stack.enter_context(harness.random_state_restored())
        group, manager = stack.enter_context(harness.mmlu_task(data, fewshot))
        stack.enter_context(harness.quiet())
        stack.enter_context(harness.templates_kept())
        workers = stack.enter_context(_started(name, devices, dtype, batch_size))
        done, total = itertools.count(1), questions(group, limit)
        report = progress or (lambda done, total: None)
        workers.scored = lambda: report(next(done), total)
        results = evaluate(_asker(workers.score), group, manager, fewshot, limit)
        check_scores(results["samples"], name)
        found = result_of(results, fewshot, limit, workers.batch_size, workers.truncated)
    return found, workers.entry | {"device": ", ".join(devices)}


class _Workers:
    """The processes: what they are asked, what they answer, and what is known of them."""

    def __init__(self, devices: list[str]) -> None:
        context = multiprocessing.get_context("spawn")
        self.asked, self.answered = context.Queue(), context.Queue()
        self.processes: dict[str, Any] = dict.fromkeys(devices)
        self.entry: dict[str, Any] = {}
        self.batch_size = self.truncated = 0
        self.scored: Callable[[], None] = lambda: None

    def score(self, requests: list[Any]) -> Scores:
        """(log-likelihood, whether it is the likeliest) of each request."""
        pieces = _pieces(requests)
        scores: list[Any] = [None] * len(requests)
        for first, pairs in pieces:
            self.asked.put((first, pairs))
        for _ in pieces:
            first, answers, truncated, batch_size = self._next()
            scores[first : first + len(answers)] = answers
            self.truncated += truncated
            self.batch_size = max(self.batch_size, batch_size)
            for _ in range(0, len(answers), harness.CHOICES):
                self.scored()
        return scores

    def _next(self) -> Any:
        while True:
            try:
                kind, said = self.answered.get(timeout=WAIT)
            except queue.Empty:
                for device, process in self.processes.items():
                    if process.exitcode is not None:
                        raise ValueError(
                            f"device {device}: its process was ended (exit code {process.exitcode}), by want of memory "
                            "perhaps; name fewer devices"
                        ) from None
                continue
            if kind == "failed":
                raise ValueError(said)
            if kind == "scores":
                return said
            self.entry = said


def _pieces(requests: list[Any]) -> list[tuple[int, list[tuple[str, str]]]]:
    """(number of the first request, requests' texts) of one subject each, those with the most text first."""
    found, first = [], 0
    for _, of_subject in itertools.groupby(requests, key=lambda request: request.task_name):
        pairs = [request.args for request in of_subject]
        found += [(first + start, pairs[start : start + PIECE]) for start in range(0, len(pairs), PIECE)]
        first += len(pairs)
    return sorted(found, key=lambda piece: -sum(len(context) for context, _ in piece[1]))


@contextlib.contextmanager
def _started(name: str, devices: list[str], dtype: str, batch_size: int | str) -> Iterator[_Workers]:
    """A process a device, ended with the block."""
    workers = _Workers([f"{device} ({i})" if devices.count(device) > 1 else device for i, device in enumerate(devices)])
    context = multiprocessing.get_context("spawn")
    share = max(1, cpus() // len(devices))
    for label, device in zip(workers.processes, devices, strict=True):
        how = name, device, dtype, batch_size, share, workers.asked, workers.answered
        workers.processes[label] = context.Process(target=_work, args=how, daemon=True)
    try:
        with _interrupts_later():  # which the processes keep from the start: who started them ends them
            for process in workers.processes.values():
                process.start()
        yield workers
        for _ in devices:
            workers.asked.put(None)
        for process in workers.processes.values():
            process.join(LONG)
    finally:
        workers.asked.cancel_join_thread()  # what nobody takes any more
        started = [process for process in workers.processes.values() if process.pid]
        for process in started:
            process.terminate()
        for process in started:
            process.join(LONG)
            process.kill()


@contextlib.contextmanager
def _interrupts_later() -> Iterator[None]:
    """Ctrl-C comes behind the block, and never to processes that are started in it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(name: str, device: str, dtype: str, batch_size: int | str, share: int, asked_of: Any, answered: Any) -> None:
    """A process: scores what it is asked until that is nothing."""
    from lm_eval.api.instance import Instance

    from quantrot.load import open_model

    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that it takes with it what it made
    torch.set_num_threads(share)
    try:
        model, tokenizer = open_model(name, device, dtype)
        answered.put(("entry", model_entry(name, model)))
        with harness.quiet() as truncated, asked(model, tokenizer, batch_size) as lm:
            before = 0
            while piece := asked_of.get():
                first, pairs = piece
                scores = lm.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)])
                answered.put(("scores", (first, scores, truncated() - before, batch_of(lm))))
                before = truncated()
    except Exception as error:
        answered.put(("failed", f"{error}" if isinstance(error, ValueError) else f"device {device}: {error!r:.300}"))


def _asker(score: Callable[[list[Any]], Scores]) -> Any:
    """A model to lm-eval whose log-likelihoods `score` has."""
    from lm_eval.api.model import LM

    class Asker(LM):
        def loglikelihood(self, requests: list[Any], **options: Any) -> Scores:
            return score(requests)

        def loglikelihood_rolling(self, requests: list[Any], **options: Any) -> Any:
            raise NotImplementedError

        def generate_until(self, requests: list[Any], **options: Any) -> Any:
            raise NotImplementedError

    return Asker()
