"""The text that weights are calibrated on: how much of it, how it is cut into windows, what a manifest says of it."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantrot.llama import Llama
from quantrot.source import open_tokenizer


@dataclass(frozen=True)
class Calibration:
    """A text, of which the first `windows` windows of `seq_len` tokens are used; None for all."""

    text: str = field(repr=False)
    windows: int | None = 32
    seq_len: int = 512

    def entry(self) -> dict[str, Any]:
        """What determines the windows, given the tokenizer."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()
        return {"text_sha256": digest, "windows": self.windows, "seq_len": self.seq_len}


def tokens(calibration: Calibration, model: Path, arch: Llama) -> Tensor:
    """The windows in the model's tokens, int64 [n, seq_len]. ValueError where there are none."""
    ids = windows(open_tokenizer(model), calibration.text, calibration.seq_len, calibration.windows, arch.max_positions)
    if ids.max() >= arch.vocab_size:
        raise ValueError(f"{model}: its tokenizer gives token {ids.max()}; config.json has {arch.vocab_size} of them")
    return ids


def windows(
    tokenizer: Any, text: str, seq_len: int, limit: int | None = None, max_positions: int | None = None
) -> Tensor:
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
        raise ValueError(f"text: {len(ids)} tokens, one window needs {seq_len}; give a longer text or less seq_len")
    return ids[: count * seq_len].view(count, seq_len)[:limit]
