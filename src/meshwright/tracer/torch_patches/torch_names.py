"""replace: puts something in the place of one of torch's names, which has to be there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshwright.errors import UnsupportedError

SUPPORTED = "torch 2.11 to 2.15"


def replace(owner: Any, name: str, by: Callable[[Any], Any]) -> None:
    """Put `by(what is there)` in the place of a name of `owner`, a module or a class, for good.

    Raises UnsupportedError where this torch has no such name: it would go on as if nothing had been replaced.
    """
    if not hasattr(owner, name):
        raise UnsupportedError(
            f"torch {torch.__version__} has no {owner.__name__}.{name}, which a dry run replaces: install {SUPPORTED}"
        )
    setattr(owner, name, by(getattr(owner, name)))
