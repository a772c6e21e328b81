"""Marks the matmuls of row-parallel layers, whose outputs are partial sums, for selective recomputation.

A partial sum spans the whole sequence on every rank; its reduce-scattered result is one shard. Selective recomputation
saves the shard and not the partial sum, but sees operators only, so layers mark theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_partial_sum = ContextVar("is_partial_sum", default=False)


@contextmanager
def partial_sum_matmuls() -> Iterator[None]:
    """Mark the matmuls within the context as partial sums; eager code only."""
    token = _is_partial_sum.set(True)
    try:
        yield
    finally:
        _is_partial_sum.reset(token)


def is_partial_sum() -> bool:
    """Return whether a matmul here is one of a row-parallel layer."""
    return _is_partial_sum.get()
