"""The text that weights are calibrated on: how much of it, how it is cut into windows, what a manifest says of it."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from quantrot.device import device_type
from quantrot.llama import Llama
from quantrot.tokenizer import open_tokenizer, windows

GPU_TOKENS = 4096  # that go through a layer together


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


def lanes(device: str, threads: int, seq_len: int) -> tuple[int, int]:
    """(threads, windows that each takes through a layer together). A GPU has one thread, for torch.linalg fails where
    two call it first."""
    return (threads, 1) if device_type(device) == "cpu" else (1, max(1, GPU_TOKENS // seq_len))
