"""Fixtures of tests with nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from two_nodes import connect, two_namespaces


@pytest.fixture
def namespaces() -> Iterator[tuple[str, ...]]:
    """Yield the names of two network namespaces that a cable joins; skip where this user may not make them."""
    with two_namespaces() as names:
        connect(names)
        yield names
