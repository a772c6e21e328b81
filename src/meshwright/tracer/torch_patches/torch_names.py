"""Replacement of torch's attributes, which have to exist, for good or for a time, and kernels of its operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from meshwright.errors import UnsupportedError
from meshwright.tracer.torch_patches.torch_versions import ONLY_IN, RELEASE, SUPPORTED


def replace(owners: Any, name: str, by: Callable[[Any], Any]) -> None:
    """Replace an attribute of a module or a class, or of each of a tuple of them, by `by(original)`, permanently.

    Raises UnsupportedError if this torch has no such attribute, unless only others have it (ONLY_IN).
    """
    for owner in owners if isinstance(owners, tuple) else (owners,):
        if not hasattr(owner, name):
            if RELEASE not in ONLY_IN.get(name, (RELEASE,)):
                continue
            raise UnsupportedError(
                f"torch {torch.__version__} has no {owner.__name__}.{name}, which the tracer replaces: install "
                f"{SUPPORTED}"
            )
        setattr(owner, name, by(getattr(owner, name)))


def register_kernels(namespace: str, kernels: Mapping[str, Callable[..., Any]], key: str) -> None:
    """Register implementations of operators for a dispatch key, permanently."""
    library = torch.library.Library(namespace, "IMPL")
    for name, kernel in kernels.items():
        library.impl(name, kernel, key)
    _libraries.append(library)


_libraries: list[torch.library.Library] = []
"""A library that is collected takes its kernels with it."""


@contextmanager
def with_values(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of `owner` within the context, or, as a decorator, during each call."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
