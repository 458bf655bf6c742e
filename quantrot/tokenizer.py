"""A text in a model's tokens, cut into windows."""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantrot.process import counted

LETTERS = 8  # of a text for each token that is asked for, at first; English has four
SPARE = 64  # tokens beside a cut that may not be the whole text's
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


def open_tokenizer(path: Path) -> Any:
    """The tokenizer of a model's directory; ValueError where transformers cannot load it."""
    from transformers import AutoConfig, AutoTokenizer  # a second, which plans without a text need not wait for

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # that class itself is what a malformed tokenizer.json raises
        if path.is_dir() and not any((path / name).exists() for name in TOKENIZERS):
            raise ValueError(f"{path}: no tokenizer, none of {', '.join(TOKENIZERS)}; put its files there") from None
        missing = [name for name in ("sentencepiece", "google.protobuf") if not _installed(name)]
        if missing and (path / "tokenizer.model").exists() and not (path / "tokenizer.json").exists():
            raise ValueError(
                f"{path}: tokenizer.model is read with {' and '.join(missing)}, not installed here: pip install "
                "sentencepiece protobuf, or put a tokenizer.json there"
            ) from None
        if (path / "config.json").exists():  # which is read on the way
            try:
                AutoConfig.from_pretrained(path, trust_remote_code=False)
            except Exception as unread:  # of many classes, some its own
                what = f"{type(unread).__name__}: {unread}"
                raise ValueError(f"{path / 'config.json'}: transformers cannot read it: {what:.300}") from None
        raise ValueError(f"{path}: transformers cannot load its tokenizer: {error}") from None


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def windows(
    tokenizer: Any,
    text: str,
    seq_len: int,
    limit: int | None = None,
    max_positions: int | None = None,
    vocab_size: int | None = None,
    *,
    remedy: str = "a longer text or less seq_len",
) -> Tensor:
    """The tokens of `text` as non-overlapping windows, int64 [n, seq_len]; the incomplete last one is dropped.

    Tokens are the whole text's, with the tokenizer's own special tokens (GPTQ's protocol: at most one BOS, in the first
    window). `limit` keeps at most that many windows; `max_positions` is the longest sequence the model takes and
    `vocab_size` how many tokens it knows. Raises ValueError where the text has fewer than `seq_len` tokens, for which
    `remedy` is what to give, or a number is out of range.
    """
    if seq_len < 2:
        raise ValueError(f"seq_len is {seq_len}; a window needs at least 2 tokens, one to read and one to predict")
    if max_positions is not None and seq_len > max_positions:
        raise ValueError(f"seq_len is {seq_len}; the model takes at most {max_positions}, give that or less")
    if limit is not None and limit < 1:
        raise ValueError(f"windows is {limit}; give at least 1")
    ids = torch.tensor(_ids(tokenizer, text, None if limit is None else limit * seq_len), dtype=torch.int64)
    count = len(ids) // seq_len
    if count == 0:
        raise ValueError(f"text: {counted(len(ids), 'token')}, one window needs {seq_len}; give {remedy}")
    found = ids[: count * seq_len].view(count, seq_len)[:limit]
    if vocab_size is not None and found.max() >= vocab_size:
        raise ValueError(
            f"{tokenizer.name_or_path}: its tokenizer gives token {found.max()}; config.json has {vocab_size} of them"
        )
    return found


def _ids(tokenizer: Any, text: str, wanted: int | None) -> list[int]:
    """Token ids of the text, or of so much of its beginning that the first `wanted` are those of the whole: a fast
    tokenizer takes 145 bytes for each of a text, which may be a corpus. A cut changes the tokens beside it."""
    enough = len(text) if wanted is None else wanted + SPARE
    size = LETTERS * enough
    while size < len(text):
        ids = tokenizer(text[:size], verbose=False)["input_ids"]
        if len(ids) >= enough:
            return ids
        size *= 2
    return tokenizer(text, verbose=False)["input_ids"]
