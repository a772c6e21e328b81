"""Constants: the numbers in the cost formulas that no datasheet states, with the range that physics leaves them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files


@dataclass(frozen=True)
class Constant:
    """One fitted number."""

    meaning: str
    value: float
    """What the fit gave."""
    prior: float
    """What it started from: a datasheet, a paper, a vendor's source."""
    spread: float
    """Standard deviation of the prior's logarithm."""
    low: float = 0.0
    """Least value that makes sense."""
    high: float = float("inf")
    """Greatest value that makes sense."""


Constants = Mapping[str, float]
"""Values by name."""


@lru_cache
def all_constants() -> dict[str, Constant]:
    """Return every constant of constants.toml by name."""
    text = (files("meshwright.cost") / "constants.toml").read_text(encoding="utf-8")
    return {name: Constant(**fields) for name, fields in tomllib.loads(text).items()}


@lru_cache
def fitted_constants() -> Constants:
    """Return the fitted values by name."""
    return {name: constant.value for name, constant in all_constants().items()}
