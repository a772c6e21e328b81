"""replace(): replaces an attribute of torch, which has to exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshwright.errors import UnsupportedError

SUPPORTED = "torch 2.11 to 2.15"


def replace(owner: Any, name: str, by: Callable[[Any], Any]) -> None:
    """Replace an attribute of `owner`, a module or a class, by `by(original)`, permanently.

    Raises UnsupportedError if this torch has no such attribute.
    """
    if not hasattr(owner, name):
        raise UnsupportedError(
            f"torch {torch.__version__} has no {owner.__name__}.{name}, which a dry run replaces: install {SUPPORTED}"
        )
    setattr(owner, name, by(getattr(owner, name)))
