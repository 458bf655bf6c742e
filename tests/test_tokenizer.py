"""Texts cut into windows."""

import json
import shutil

import pytest
import torch

from quantrot import tokenizer
from quantrot.tokenizer import open_tokenizer, windows


def test_some_windows_are_the_first_of_the_whole_text(single):
    tokenizer = open_tokenizer(single)
    text = "".join(chr(97 + i * i % 23) for i in range(20000))
    whole = windows(tokenizer, text, 40)
    seen = []

    def counted(text, **how):
        seen.append(len(text))
        return tokenizer(text, **how)

    for limit in (1, 3, 20, len(whole), 10 * len(whole)):
        assert torch.equal(windows(counted, text, 40, limit), whole[:limit])
    assert seen[:3] == [8 * (40 * n + 64) for n in (1, 3, 20)] and seen[-1] == len(text)


def test_what_reads_a_sentencepiece_model_is_named_where_it_is_missing(single, tmp_path, monkeypatch):
    root = shutil.copytree(single, tmp_path / "model")
    (root / "tokenizer.json").unlink()
    (root / "tokenizer.model").write_bytes(b"no sentencepiece model")
    monkeypatch.setattr(tokenizer, "_installed", lambda name: name != "google.protobuf")
    with pytest.raises(ValueError, match=r"model is read with google\.protobuf, not installed here: pip install"):
        open_tokenizer(root)


def test_a_config_that_cannot_be_read_is_not_the_tokenizers_error(single, tmp_path):
    root = shutil.copytree(single, tmp_path / "model")
    config = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(json.dumps(config | {"attention_dropout": "much"}))
    with pytest.raises(ValueError, match=r"model/config\.json: transformers cannot read it: .*'attention_dropout'"):
        open_tokenizer(root)
    (root / "config.json").write_text(json.dumps(config))
    (root / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="model: transformers cannot load its tokenizer: "):
        open_tokenizer(root)


def test_a_token_that_the_model_does_not_know_is_an_error_and_no_index(single):
    tokenizer = open_tokenizer(single)
    text = "".join(chr(97 + i % 23) for i in range(200))
    largest = windows(tokenizer, text, 40).max().item()
    assert windows(tokenizer, text, 40, vocab_size=largest + 1).max() == largest
    with pytest.raises(ValueError, match=f"its tokenizer gives token {largest}; config.json has {largest} of them"):
        windows(tokenizer, text, 40, vocab_size=largest)
