"""starred(): one name for blocks of a model that differ in their number only."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"\d+")
_LINE = re.compile(r"\.py:\d+$")


def starred(scope: str) -> str:
    """Return a scope with * for numbers, such as h.*.mlp; a line of the program, such as train2.py:40, as it is."""
    return scope if _LINE.search(scope) else _NUMBER.sub("*", scope)
