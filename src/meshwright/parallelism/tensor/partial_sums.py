"""Marks the matmuls of row-parallel layers, whose outputs are terms of a sum over ranks.

A term is as wide as the whole sequence is long, on every rank; once reduced, each rank has its shard. Selective
recomputation keeps the shard and not the term. It sees operators only, so that layers have to say which are which.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_makes_term = ContextVar("makes_term", default=False)


@contextmanager
def term_of_a_sum() -> Iterator[None]:
    """Mark what is multiplied within as a term of a sum over ranks; for eager code."""
    token = _makes_term.set(True)
    try:
        yield
    finally:
        _makes_term.reset(token)


def makes_term() -> bool:
    """Return whether a row-parallel layer is at work."""
    return _makes_term.get()
