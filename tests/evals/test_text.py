import re
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quantrot.evals import hub, text
from quantrot.tokenizer import windows


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_named_file_is_read_as_it_stands(tmp_path, encoding):
    file = tmp_path / "a.txt"
    file.write_text("ein Text, ü\n", encoding=encoding)
    content, origin = text.evaluation_text(file)
    assert content == "ein Text, ü\n"
    assert str(file) in origin and "sha256" in origin


@pytest.mark.parametrize("content, message", [(None, "cannot be read"), (b"\xff\xfe", "not UTF-8")])
def test_an_unusable_file_is_named(tmp_path, content, message):
    file = tmp_path / "a.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        text.evaluation_text(file)


def test_without_a_hub_the_text_is_pythons_own_and_says_so(monkeypatch):
    monkeypatch.setattr(text, "_wikitext_file", lambda split: None)
    content, origin = text.evaluation_text()
    assert content == text.python_topics() and len(content) > 100_000
    assert "pydoc" in origin and "unreachable" in origin


def test_an_unreachable_hub_is_asked_once(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "reachable", lambda: False)
    with hub.offline():
        assert text._wikitext_file("test") is None


def test_a_directory_is_no_text(tmp_path):
    for path, told in ((tmp_path, f"text {tmp_path}: a directory;"), (Path(""), "text .: a directory (as an empty")):
        with pytest.raises(ValueError, match=re.escape(told)):
            text.evaluation_text(path)


def test_python_topics_are_in_alphabetical_order(monkeypatch):
    module = type(sys)("topics")
    module.topics = {"b": "second", "a": "first"}
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", module)
    assert text.python_topics() == "first\n\nsecond"


def test_wikitext_rows_are_joined_by_blank_lines(tmp_path):
    pq.write_table(pa.table({"text": ["", " = Title = \n", "words"]}), tmp_path / "t.parquet")
    assert text.wikitext(tmp_path / "t.parquet") == "\n\n = Title = \n\n\nwords"


def test_windows_are_the_text_in_order_without_its_tail(tokenizer):
    content = "".join(chr(97 + i % 26) for i in range(47))
    ids = windows(tokenizer, content, 10)
    assert ids.shape == (4, 10)
    assert tokenizer.decode(ids.flatten()) == content[:40]
    assert windows(tokenizer, content[:40], 10).equal(ids)
    assert windows(tokenizer, content, 10, limit=2).equal(ids[:2])
    assert windows(tokenizer, content, 10, limit=99).equal(ids)


@pytest.mark.parametrize(
    "seq_len, limit, message",
    [
        (1, None, "at least 2 tokens"),
        (1000, None, "the model takes at most 512, give that or less"),
        (500, None, "text: 300 tokens, one window needs 500; give a longer text or less seq_len"),
        (10, 0, "windows is 0; give at least 1"),
    ],
)
def test_impossible_windows_are_refused(tokenizer, seq_len, limit, message):
    with pytest.raises(ValueError, match=message):
        windows(tokenizer, "x" * 300, seq_len, limit, max_positions=512)


def test_offline_leaves_nothing_changed():
    import datasets
    import huggingface_hub

    before = huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    with pytest.raises(RuntimeError), hub.offline():
        assert huggingface_hub.constants.HF_HUB_OFFLINE and datasets.config.HF_HUB_OFFLINE
        assert not hub.reachable()
        raise RuntimeError
    assert (huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE) == before
