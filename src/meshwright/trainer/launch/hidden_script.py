"""hidden_script(): processes that start meanwhile do not import the script of their caller."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def hidden_script() -> Iterator[None]:
    """Keep a process that starts from importing the caller's script: without a __main__ guard it would run again."""
    script = sys.modules["__main__"]
    kept: dict[str, Any] = {name: vars(script).pop(name) for name in ("__file__", "__spec__") if name in vars(script)}
    script.__spec__ = None
    try:
        yield
    finally:
        vars(script).update(kept)
