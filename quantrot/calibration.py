"""The texts that weights are calibrated on: how much of them, how they are cut into windows, what a manifest says."""

import hashlib
import os
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
    None for all. names: what errors call the texts, as their files' names; it determines nothing."""

    text: str | tuple[str, ...] = field(repr=False)
    windows: int | None = 32
    seq_len: int = 512
    names: tuple[str, ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.text, str | tuple) or not all(isinstance(text, str) for text in self.texts):
            raise ValueError(
                f"calibration: text is {self.text!r:.80}; a text itself or a tuple of texts is needed, of a file its "
                "read_text()"
            )
        if not self.texts:
            raise ValueError("calibration: there is no text in it; give at least one")
        if self.names and len(self.names) != len(self.texts):
            raise ValueError(f"calibration: names has {len(self.names)} for {len(self.texts)} texts; give one for each")
        for i, text in enumerate(self.texts):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                found = f"character {error.start} is {text[error.start]!r}, half of a surrogate pair"
                raise ValueError(f"{self.called(i)}: {found}; read the file as UTF-8") from None
        for name, least, none in (("windows", 1, ", or None for all"), ("seq_len", 2, "")):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
            if not whole and not (none and value is None):
                raise ValueError(
                    f"calibration: {name} is {value!r:.80}; a whole number from {least} up{none} is needed"
                )
        if self.windows is not None and self.windows < len(self.texts):
            raise ValueError(
                f"calibration: windows is {self.windows} of {len(self.texts)} texts, which take turns; give at least "
                f"{len(self.texts)} windows, or fewer texts"
            )

    def entry(self) -> dict[str, Any]:
        """What determines the windows, given the tokenizer."""
        digests = [hashlib.sha256(text.encode()).hexdigest() for text in self.texts]
        return {"text_sha256": digests, "windows": self.windows, "seq_len": self.seq_len}

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text,) if isinstance(self.text, str) else self.text

    def called(self, i: int) -> str:
        """The beginning of an error of the text i."""
        several = f"text {i + 1} of {len(self.texts)}" if len(self.texts) > 1 else ""
        return ", ".join(filter(None, ("calibration", self.names[i] if self.names else several)))


def tokens(calibration: Calibration, model: Path, arch: Llama) -> Tensor:
    """The windows in the model's tokens, int64 [n, seq_len]: every text's first, every text's second, and so on, of
    those that have one. ValueError where a text has none."""
    tokenizer, found = open_tokenizer(model), []
    for i, text in enumerate(calibration.texts):
        try:
            sizes = calibration.seq_len, calibration.windows, arch.max_positions, arch.vocab_size
            found.append(windows(tokenizer, text, *sizes))
        except ValueError as error:
            hint = f" ({text!r} is a file: give what is in it, its read_text())" if os.path.isfile(text) else ""
            raise ValueError(f"{calibration.called(i)}: {error}{hint}") from None
    turns = [window for window in chain.from_iterable(zip_longest(*found)) if window is not None]
    return torch.stack(turns[: calibration.windows])


def lanes(device: str, threads: int, seq_len: int) -> tuple[int, int]:
    """(threads, windows that each takes through a layer together). A GPU has one thread, for torch.linalg fails where
    two call it first."""
    return (threads, 1) if device_type(device) == "cpu" else (1, max(1, GPU_TOKENS // seq_len))
