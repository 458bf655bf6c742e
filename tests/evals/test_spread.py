"""MMLU by several processes: one's answers, whoever scores what; and what is said where one fails."""

import multiprocessing
import signal
from types import SimpleNamespace

import pytest

from quantrot.evals import spread
from quantrot.evals.mmlu import mmlu
from tests.evals.in_place import ends, tells_whether_ctrl_c_is_blocked


def test_two_processes_answer_as_one_model(model, model_dir, tokenizer, mmlu_dir, monkeypatch):
    """Copies of this one, which has the imports; the next are started as they are elsewhere."""
    monkeypatch.setattr(spread.multiprocessing, "get_context", lambda kind: multiprocessing.context.ForkContext())
    seen = []
    found, entry = spread.mmlu_on(
        str(model_dir),
        ["cpu", "cpu"],
        fewshot=2,
        limit=2,
        data=mmlu_dir,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert found == mmlu(model, tokenizer, fewshot=2, limit=2, data=mmlu_dir)
    assert seen == [(i + 1, 114) for i in range(114)]
    assert entry["device"] == "cpu, cpu" and entry["name"] == str(model_dir)


def test_ctrl_c_is_not_for_the_processes(model_dir, mmlu_dir, monkeypatch):
    """They would say so, each in a traceback, while they are still being imported into."""
    monkeypatch.setattr(spread, "_work", tells_whether_ctrl_c_is_blocked)
    with pytest.raises(ValueError, match=r"exit code 7"):
        spread.mmlu_on(str(model_dir), ["cpu", "cpu"], fewshot=0, limit=1, data=mmlu_dir)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_what_a_process_says_is_wrong_is_said(mmlu_dir, tmp_path):
    with pytest.raises(ValueError, match=r"config\.json: missing"):
        spread.mmlu_on(str(tmp_path), ["cpu"], fewshot=0, limit=1, data=mmlu_dir)


def test_a_process_that_is_ended_is_named(model_dir, mmlu_dir, monkeypatch):
    monkeypatch.setattr(spread, "_work", ends)
    with pytest.raises(ValueError, match=r"^device cpu \([01]\): its process was ended \(exit code 9\)"):
        spread.mmlu_on(str(model_dir), ["cpu", "cpu"], fewshot=0, limit=1, data=mmlu_dir)


def test_pieces_are_of_one_subject_and_the_longest_come_first(monkeypatch):
    monkeypatch.setattr(spread, "PIECE", 4)
    subjects = ["law"] * 6 + ["art"] * 4
    requests = [SimpleNamespace(task_name=name, args=("x" * i, "A")) for i, name in enumerate(subjects)]
    pieces = spread._pieces(requests)
    assert [(first, len(pairs)) for first, pairs in pieces] == [(6, 4), (4, 2), (0, 4)]
    assert all(pairs == [r.args for r in requests[first : first + len(pairs)]] for first, pairs in pieces)
