"""The texts that weights are calibrated on: how much of them, how they are cut into windows, what a manifest says."""

import hashlib
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantrot.device import device_type
from quantrot.llama import Llama
from quantrot.tokenizer import open_tokenizer, windows

GPU_TOKENS = 4096  # that go through a layer together


@dataclass(frozen=True)
class Calibration:
    """A text, or several whose windows take turns, of which the first `windows` windows of `seq_len` tokens are used;
    None for all."""

    text: str | tuple[str, ...] = field(repr=False)
    windows: int | None = 32
    seq_len: int = 512

    def entry(self) -> dict[str, Any]:
        """What determines the windows, given the tokenizer."""
        digests = [hashlib.sha256(text.encode()).hexdigest() for text in self.texts]
        return {"text_sha256": digests, "windows": self.windows, "seq_len": self.seq_len}

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text,) if isinstance(self.text, str) else self.text


def tokens(calibration: Calibration, model: Path, arch: Llama) -> Tensor:
    """The windows in the model's tokens, int64 [n, seq_len]: every text's first, every text's second, and so on, of
    those that have one. ValueError where a text has none or gets no turn."""
    if not calibration.texts:
        raise ValueError("calibration: there is no text in it; give at least one")
    if calibration.windows is not None and calibration.windows < len(calibration.texts) > 1:
        raise ValueError(
            f"calibration: windows is {calibration.windows} of {len(calibration.texts)} texts, which take turns; give "
            f"at least {len(calibration.texts)} windows, or fewer texts"
        )
    tokenizer, found = open_tokenizer(model), []
    for i, text in enumerate(calibration.texts, 1):
        try:
            sizes = calibration.seq_len, calibration.windows, arch.max_positions, arch.vocab_size
            found.append(windows(tokenizer, text, *sizes))
        except ValueError as error:
            several = f"calibration, text {i} of {len(calibration.texts)}: " if len(calibration.texts) > 1 else ""
            raise ValueError(f"{several}{error}") from None
    turns = [window for window in chain.from_iterable(zip_longest(*found)) if window is not None]
    return torch.stack(turns[: calibration.windows])


def lanes(device: str, threads: int, seq_len: int) -> tuple[int, int]:
    """(threads, windows that each takes through a layer together). A GPU has one thread, for torch.linalg fails where
    two call it first."""
    return (threads, 1) if device_type(device) == "cpu" else (1, max(1, GPU_TOKENS // seq_len))
