"""The nearest allowed value to one that was refused: the last part of a message about a value."""

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from meshwright.config.keys import Key
from meshwright.units import parse_count

_DIGITS = re.compile(r"\d+")
_TRUE_WORDS = ("true", "yes", "on", "1")
_FALSE_WORDS = ("false", "no", "off", "0")

_MEANT_VALUES: dict[tuple[str, Any], str] = {
    ("run.device", "gpu"): "cuda",
    ("layout.activation_checkpoint", True): "full",
    ("layout.activation_checkpoint", False): "none",
    ("layout.reshard_after_forward", True): "always",
    ("layout.reshard_after_forward", False): "never",
}


def nearest_allowed(key: Key, value: Any) -> Any | None:
    """Return an allowed value that `value` most probably means, or None when nothing is near."""
    return next((repair for repair in _repairs(key, value) if key.accepts(repair)), None)


def _repairs(key: Key, value: Any) -> Iterator[Any]:
    if isinstance(value, str | int | float) and (key.dotted, value) in _MEANT_VALUES:
        yield _MEANT_VALUES[key.dotted, value]
    if key.kind == "string":
        yield from _text_repairs(key, value)
    elif isinstance(value, str):
        yield from _repairs_of_text(value)
    elif isinstance(value, bool):
        return
    elif isinstance(value, int | float):
        if key.kind == "integer" and value > 0 and math.isfinite(value):
            yield math.ceil(value)  # half an interval is no request for 0, which often means never
        yield from _number_repairs(value)
        if key.kind == "integer" and value < 1:
            yield from (0, 1)


def _text_repairs(key: Key, value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value.casefold()
        # float64 is no spelling of float7: numbers in a name are its meaning.
        same = [choice for choice in key.choices if _DIGITS.findall(choice) == _DIGITS.findall(value)]
        yield from get_close_matches(value.casefold(), same, n=1, cutoff=0.5)
    elif isinstance(value, bool):
        return
    elif isinstance(value, int | float):
        yield str(value)


def _repairs_of_text(text: str) -> Iterator[Any]:
    if text.casefold() in _TRUE_WORDS:
        yield True
    if text.casefold() in _FALSE_WORDS:
        yield False
    with suppress(ValueError):
        yield parse_count(text)
    with suppress(ValueError):
        yield float(text)


def _number_repairs(value: int | float) -> Iterator[Any]:
    if value in (0, 1):
        yield bool(value)
    if value == value // 1:
        yield int(value)
    if isinstance(value, float):
        yield abs(value)
    yield value / 100  # a share written in percent
