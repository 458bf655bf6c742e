"""Patterns that name modules: what they match, and what to say of one that matches nothing."""

import difflib
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase


def short_name(fqn: str) -> str:
    """A module's name without the layer's prefix: self_attn.q_proj."""
    return re.sub(r"^(?:.*\.)?layers\.\d+\.", "", fqn)


def matches(pattern: str, fqn: str) -> bool:
    """Whether the pattern is of the full name, of the one without the layer's prefix, or of the last component."""
    return any(fnmatchcase(name, pattern) for name in (fqn, short_name(fqn), fqn.rpartition(".")[2]))


def hint(pattern: str, names: Iterable[str]) -> str:
    """What may have been meant: the full name, which begins with `model.`, or a name's last component."""
    names = list(names)
    if any(fnmatchcase(name, f"model.{pattern}") for name in names):
        return f"did you mean 'model.{pattern}'?"
    words = sorted({name.rpartition(".")[2] for name in names})
    close = difflib.get_close_matches(pattern, words, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(words)}"
