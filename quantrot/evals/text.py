"""The text that perplexity and divergence are measured on, and how it is cut into windows of tokens."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import Any

import torch

from quantrot.evals import hub

WIKITEXT_REPO = "Salesforce/wikitext"
WIKITEXT_FILE = "wikitext-2-raw-v1/{split}-00000-of-00001.parquet"


def evaluation_text(path: Path | None = None, split: str = "test") -> tuple[str, str]:
    """The text to evaluate on, and one line that says where it comes from and its sha256.

    `path` names a UTF-8 file. Without it: a split of raw WikiText-2 from the hub (or its cache), rows joined by blank
    lines as GPTQ and QuaRot do; where that cannot be had: the help topics that every Python carries.
    Raises ValueError for a file that is missing or is not UTF-8 text.
    """
    if path is not None:
        text, origin = _read(path), str(path)
    elif (parquet := _wikitext_file(split)) is not None:
        text, origin = wikitext(parquet), f"{WIKITEXT_REPO} wikitext-2-raw-v1 {split}"
    else:
        text = python_topics()
        origin = f"pydoc topics of Python {platform.python_version()} (the hub is unreachable: no WikiText-2)"
    return text, f"{origin}, sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def wikitext(parquet: Path) -> str:
    """The rows of a WikiText parquet file (column `text`) joined by blank lines."""
    import pyarrow.parquet as pq

    return "\n\n".join(pq.read_table(parquet, columns=["text"])["text"].to_pylist())


def python_topics() -> str:
    """Python's own help topics (about 0.5 MB of technical English), in alphabetical order of their names."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def windows(
    tokenizer: Any, text: str, seq_len: int, limit: int | None = None, max_positions: int | None = None
) -> torch.Tensor:
    """The tokens of `text` as non-overlapping windows, int64 [n, seq_len]; the incomplete last one is dropped.

    The text is tokenised whole, with the tokenizer's own special tokens (GPTQ's protocol: at most one BOS, in the
    first window). `limit` keeps at most that many windows; `max_positions` is the longest sequence the model takes.
    Raises ValueError where the text has fewer than `seq_len` tokens, or a number is out of range.
    """
    if seq_len < 2:
        raise ValueError(f"seq_len: {seq_len}; a window needs at least 2 tokens, one to read and one to predict")
    if max_positions is not None and seq_len > max_positions:
        raise ValueError(f"seq_len: {seq_len}; the model takes at most {max_positions}: pass --seq-len {max_positions}")
    if limit is not None and limit < 1:
        raise ValueError(f"windows: {limit}; at least 1, or leave it out for all")
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)
    count = len(ids) // seq_len
    if count == 0:
        raise ValueError(f"text: {len(ids)} tokens, one window needs {seq_len}; a longer --text or a smaller --seq-len")
    return ids[: count * seq_len].view(count, seq_len)[:limit]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"text: {path} is not UTF-8 (byte {error.start}); convert it to UTF-8") from error
    except OSError as error:
        raise ValueError(f"text: cannot read {path}: {error.strerror}; name an existing UTF-8 file") from error


def _wikitext_file(split: str) -> Path | None:
    """The hub's parquet file: from the cache if it is there, downloaded if the hub answers, else None."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    file = WIKITEXT_FILE.format(split=split)

    try:
        return Path(hf_hub_download(WIKITEXT_REPO, file, repo_type="dataset", local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    if not hub.reachable():
        return None
    try:
        return Path(hf_hub_download(WIKITEXT_REPO, file, repo_type="dataset"))
    except OSError:
        return None
