"""Constants: the numbers in the cost formulas that no datasheet states, with the range that physics leaves them.

A constant with a prior is moved by the fit (validation/fit.py); one without was measured or is published, as its source
says, and stays where it is.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files


@dataclass(frozen=True)
class CostConstant:
    """One number of constants.toml."""

    meaning: str
    value: float
    """What the fit found, or the source says."""
    prior: float
    """Start of the fit: a datasheet, a paper, a vendor's source; the value itself where nothing is fitted."""
    spread: float = 0.0
    """Standard deviation of the prior's logarithm; 0 where nothing is fitted."""
    low: float = 0.0
    """Least value that makes sense."""
    high: float = float("inf")
    """Greatest value that makes sense."""
    source: str = ""
    """Where the value of a constant that is not fitted comes from, with a date."""


Constants = Mapping[str, float]
"""Values by name."""


@lru_cache
def all_constants() -> dict[str, CostConstant]:
    """Return every constant of constants.toml by name."""
    text = (files("meshwright.cost") / "constants.toml").read_text(encoding="utf-8")
    return {name: CostConstant(**{"prior": fields["value"], **fields}) for name, fields in tomllib.loads(text).items()}


@lru_cache
def fitted_constants() -> Constants:
    """Return the values by name, of constants that are not fitted as well."""
    return {name: constant.value for name, constant in all_constants().items()}


def fixed_constant(name: str) -> float:
    """Return the value of a constant that no fit moves; raises ValueError for one that is fitted."""
    constant = all_constants()[name]
    if constant.spread:
        raise ValueError(f"{name} is fitted: read it from the constants that a formula is given")
    return constant.value
