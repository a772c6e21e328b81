"""Types of the arrays that formulas compute with, and of tables of them."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Passes = tuple[Floats, Floats]
"""Forward and backward."""

_Table = TypeVar("_Table")


def take_rows(table: _Table, rows: NDArray[Any]) -> _Table:
    """Return a dataclass of arrays, or of such tables, with those elements of their last axis (positions or a mask)."""
    assert is_dataclass(table)
    assert not isinstance(table, type)

    def taken(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value[..., rows]
        return take_rows(value, rows) if is_dataclass(value) else value

    return replace(table, **{field.name: taken(getattr(table, field.name)) for field in fields(table)})
