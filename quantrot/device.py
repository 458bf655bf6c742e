"""Devices as users name them."""

import re
from typing import Any

import torch

NAMES = re.compile(r"cpu|cuda(:\d+)?")


def known_device(name: str | torch.device) -> str:
    """The device of this name, for "auto" a GPU where there is one. ValueError where PyTorch has none such."""
    name = str(name)
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not NAMES.fullmatch(name):
        raise ValueError(f"device is {name!r}; allowed: auto, cpu, cuda, cuda:N")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name != "cpu" and int(name.partition(":")[2] or 0) >= gpus:
        found = f"only CUDA GPUs 0 to {gpus - 1}" if gpus > 1 else "only CUDA GPU 0" if gpus else "no CUDA GPU"
        raise ValueError(f"device is {name!r}, and there is {found} that this PyTorch can use; use another, or cpu")
    return name


def devices_of(model: Any) -> str:
    """Where a model is, in words: its device, or all of those that accelerate has dealt it out to."""
    places = getattr(model, "hf_device_map", {}).values()
    names = dict.fromkeys(f"cuda:{place}" if isinstance(place, int) else str(place) for place in places)
    return ", ".join(names) or str(model.device)


def device_type(name: str | torch.device) -> str:
    """cpu or cuda, of a name that a conversion may run on, whether or not this machine has it; else ValueError."""
    name = str(name)
    if not NAMES.fullmatch(name):
        raise ValueError(f"device is {name!r}; allowed: cpu, cuda, cuda:N")
    return name.partition(":")[0]
