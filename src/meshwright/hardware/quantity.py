"""What people write about hardware ("989 TFLOP/s", "400 Gb/s") in SI base units."""

import re
from collections.abc import Mapping

_NUMBER = re.compile(r"^\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z/%]+)\s*$")
_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}

FLOPS_PER_S = {f"{prefix}FLOP/s": factor for prefix, factor in _DECIMAL.items()}
BYTES = {f"{prefix}B": factor for prefix, factor in (_DECIMAL | _BINARY).items()}
BYTES_PER_S = {f"{unit}/s": factor for unit, factor in BYTES.items()} | {
    f"{prefix}b/s": factor / 8 for prefix, factor in _DECIMAL.items()
}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
WATTS = {"W": 1.0, "kW": 1e3}
SHARE = {"%": 0.01}
FACTOR = {"x": 1.0}
COUNT: Mapping[str, float] = {}
"""No unit at all: a bare whole number."""


def parse_quantity(text: object, units: Mapping[str, float]) -> float:
    """Return `text` in the base unit of `units` (one of the tables above); raises ValueError naming valid units."""
    if not units:
        if isinstance(text, int) and not isinstance(text, bool) and text > 0:
            return float(text)
        raise ValueError(f"{text!r} is no count: write a whole number without a unit, such as 132")
    match = _NUMBER.match(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{text!r} is no number with a unit: write a string such as {_example(units)!r}")
    number, unit = match.groups()
    if unit not in units:
        raise ValueError(f"{text!r} has the unit {unit!r}, which is none of {', '.join(units)}")
    return float(number.replace("_", "")) * units[unit]


def _example(units: Mapping[str, float]) -> str:
    return f"1.5 {list(units)[len(units) // 2]}"
