"""The Hugging Face hub as the evaluations see it: whether it is there, and how to stay away from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def reachable() -> bool:
    """Whether the hub answers within five seconds.

    Asked first because huggingface_hub retries for 23 seconds, with a line for each attempt, before it gives up.
    """
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=5.0)
    except Exception:  # each transport (httpx, its proxies, offline mode) has its own family of errors
        return False
    return True


@contextmanager
def offline() -> Iterator[None]:
    """No request to the hub, no download counter and no telemetry while the block runs.

    The environment variables are read once, on import, so what was read is what is changed and put back.
    """
    import datasets
    import huggingface_hub

    with attributes(
        (huggingface_hub.constants, "HF_HUB_OFFLINE", True),
        (huggingface_hub.constants, "HF_HUB_DISABLE_TELEMETRY", True),
        (datasets.config, "HF_HUB_OFFLINE", True),
        (datasets.config, "HF_DATASETS_OFFLINE", True),
        (datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", False),
    ):
        yield


@contextmanager
def attributes(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Give (object, name, value) attributes their values while the block runs, then put the old ones back."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)
