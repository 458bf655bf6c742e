"""The text that perplexity and divergence are measured on."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

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


def _read(path: Path) -> str:
    if path.is_dir():
        raise ValueError(f"text {path}: a directory{' (as an empty name is)' * (path == Path())}; name a UTF-8 file")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"text {path}: not UTF-8 (byte {error.start}); convert it to UTF-8") from error
    except OSError as error:
        raise ValueError(f"text {path}: cannot be read: {error.strerror}; name an existing UTF-8 file") from error


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
