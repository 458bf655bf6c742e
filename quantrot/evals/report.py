"""What every evaluation reports: one JSON shape, written whole or not at all."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import sys
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from quantrot.checkpoint import read_json, resolved, write_whole
from quantrot.device import devices_of
from quantrot.manifest import MANIFEST
from quantrot.version import __version__

SCHEMA = 1
PACKAGES = ("torch", "transformers", "lm_eval", "safetensors")


def report(
    evaluation: str,
    model: dict[str, Any],
    settings: dict[str, Any],
    results: dict[str, Any],
    baseline: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The report of one run, as plain JSON values.

    `evaluation` is mmlu, ppl or compare; `model` and `baseline` are from model_entry; `settings` is what was asked
    (text, windows, seed, ...); `results` maps names to plain values, to dataclasses, or to dicts of either.
    """
    return {
        "schema": SCHEMA,
        "evaluation": evaluation,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["quantrot", *sys.argv[1:]]),
        "model": model,
        "baseline": baseline,
        "settings": settings,
        "results": {name: _plain(value) for name, value in results.items()},
        "versions": versions(),
    }


def model_entry(name: str, model: Any) -> dict[str, Any]:
    """Who the model is and how it ran. `manifest` is None for a model that quantrot did not convert."""
    return {
        "name": name,
        "revision": getattr(model.config, "_commit_hash", None),
        "device": devices_of(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "manifest": manifest(getattr(model.config, "_name_or_path", "") or name),  # where a hub's model lies
    }


def manifest(name: str) -> dict[str, Any] | None:
    """Recipe, source and file hashes from the manifest of a converted directory, None where there is no manifest.

    Raises ValueError where the manifest is not a JSON object.
    """
    path = Path(name) / MANIFEST
    if not path.is_file():
        return None
    content = read_json(path)
    return {key: content[key] for key in ("recipe", "source", "files") if key in content}


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that a number depends on; None for one that is not installed."""
    ours = {"quantrot": __version__, "python": platform.python_version()}
    return {**ours, **{package: _version(package) for package in PACKAGES}}


def check_output(path: Path | None) -> None:
    """Raise ValueError where a report could not be written to `path`: to be asked before the work, not after it."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"output: {path} is a directory; name a file, such as {path / 'report.json'}")
    if path.exists() and not path.is_file():
        raise ValueError(f"output: {path} is a device or a pipe, which a report cannot take the place of; name a file")
    parent = resolved(path).parent  # of what a link is to
    if not parent.is_dir():
        raise ValueError(f"output: {parent} does not exist; create it first")
    if not os.access(parent, os.W_OK):
        raise ValueError(f"output: no permission to write in {parent}")


def compares_recipes(path: Path) -> bool:
    """Whether this file is the report of several recipes, which has a table and a plot beside it."""
    try:
        settings = read_json(path)["settings"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return isinstance(settings, dict) and "models" in settings


def beside(path: Path, suffix: str) -> Path:
    """Where what goes with a report lies: its name with this suffix in place of .json, or behind any other name."""
    return path.with_name(path.name.removesuffix(".json") + suffix)


def write(content: dict[str, Any], path: Path) -> None:
    """Write a report as JSON, whole or not at all."""
    write_text(json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n", path)


def write_text(text: str, path: Path) -> None:
    """Write a text file, whole or not at all."""
    write_whole(path, text.encode("utf-8", "surrogateescape"))


def number(value: float | None, digits: int = 4) -> str:
    """A figure for people: fixed digits, or significant ones where fixed digits would hide it; "-" for none."""
    if value is None:
        return "-"
    if value and math.isfinite(value) and abs(value) < 10**-digits:
        return f"{value:.1e}"
    return f"{value:.{digits}f}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _finite(value: Any) -> Any:
    """JSON has no nan or inf; a broken model's report says them as text."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
