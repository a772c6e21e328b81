"""What people write about hardware ("989 TFLOP/s", "400 Gb/s") in SI base units."""

import math
import re
from collections.abc import Mapping

_NUMBER = re.compile(r"^\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z/%]+)\s*$")
_MOST_DECIMALS = 12
_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}

FLOPS_PER_S = {f"{prefix}FLOP/s": factor for prefix, factor in _DECIMAL.items()}
ELEMENTS_PER_S = {f"{prefix}element/s": factor for prefix, factor in _DECIMAL.items()}
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
        raise ValueError(f"{text!r} has the unit {unit!r}, which must be one of {', '.join(units)}")
    return float(number.replace("_", "")) * units[unit]


def format_quantity(value: float, units: Mapping[str, float]) -> str | int:
    """Return `value`, in the base unit of `units`, as people write it: with the fewest digits that mean it exactly."""
    if not units:
        return int(value)
    texts = [text for unit in units if (text := _exactly(value, unit, units)) is not None]
    if not texts:
        raise ValueError(f"{value!r} has no short decimal form in any of {', '.join(units)}")
    return min(texts, key=_awkwardness)


def round_quantity(value: float, units: Mapping[str, float]) -> float:
    """Return `value` to four digits, as a text in one of `units` can mean it: what is measured is known no better."""
    unit = next((unit for unit, factor in units.items() if 1 <= value / factor < 1000), None)
    if unit is None:
        raise ValueError(f"{value!r} is outside what {', '.join(units)} are for")
    return parse_quantity(f"{float(f'{value / units[unit]:.4g}')} {unit}", units)


def _exactly(value: float, unit: str, units: Mapping[str, float]) -> str | None:
    """Return `value` in `unit` with as many decimals as mean it exactly; None where a dozen do not."""
    for digits in range(_MOST_DECIMALS):
        text = f"{value / units[unit]:.{digits}f} {unit}"
        if parse_quantity(text, units) == value:
            return text
    return None


def _awkwardness(text: str) -> tuple[bool, float, int]:
    """Return what orders texts of equal meaning: bytes before bits, 1 to 999 before others, short before long."""
    number, unit = text.split()
    is_handy = 1 <= float(number) < 1000
    return unit.endswith("b/s"), 0.0 if is_handy else abs(math.log10(float(number)) - 1.5), len(number)


def _example(units: Mapping[str, float]) -> str:
    return f"1.5 {list(units)[len(units) // 2]}"
