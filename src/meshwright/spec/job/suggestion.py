"""did_you_mean: the end of a message about a name that is none of those known."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_LEAST_ALIKE = 0.5
"""Of difflib's ratio: a name with less in common is no better a guess than any other."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ": did you mean x?" with the known name that is nearest, or "" if none is near."""
    nearest = get_close_matches(name.lower(), known, n=1, cutoff=_LEAST_ALIKE)
    return f": did you mean {nearest[0]}?" if nearest else ""
