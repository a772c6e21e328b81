"""Placeholders for scalars that a program reads from the device, since fake tensors have no values.

UnknownNumber   an integer: it can be printed and used in arithmetic; a size or comparison that depends on it raises
                an error with the line
GuessedNumber   a float, assumed to be 1: it can be printed and used in arithmetic; comparisons are reported as
                guesses, with the line
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor


class UnknownNumber:
    """An unknown integer: prints as ?, stays unknown in arithmetic, and counts as 1 in floats and tensors."""

    def __init__(self, refuse: Callable[[], NoReturn]) -> None:
        self._refuse = refuse

    def _with(self, other: Any) -> Any:
        # A tensor keeps its shape, and may become floating-point.
        return other * 1.0 if isinstance(other, Tensor) else self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _with
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _with

    def __neg__(self) -> UnknownNumber:
        return self

    __pos__ = __abs__ = __neg__

    def __round__(self, _: int | None = None) -> UnknownNumber:
        return self

    def __float__(self) -> float:
        return 1.0

    def __repr__(self) -> str:
        return "?"

    def __format__(self, _: str) -> str:
        return "?"

    def _decides(self, *_: Any) -> NoReturn:
        self._refuse()

    __bool__ = __index__ = __int__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _decides
    __hash__ = None  # type: ignore[assignment]


class GuessedNumber(float):
    """A float that stays a guess in arithmetic with numbers, and reports comparisons."""

    _on_decision: Callable[[GuessedNumber], None]

    @classmethod
    def of(cls, value: float, on_decision: Callable[[GuessedNumber], None]) -> GuessedNumber:
        """Return a guess that calls `on_decision` each time it is compared."""
        number = cls(value)
        number._on_decision = on_decision
        return number

    def __bool__(self) -> bool:
        self._on_decision(self)
        return float(self) != 0

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float(self),)

    __hash__ = float.__hash__


def _computed(name: str) -> Callable[..., Any]:
    compute = getattr(float, name)

    def method(self: GuessedNumber, *others: Any) -> Any:
        found = compute(self, *others)
        return GuessedNumber.of(found, self._on_decision) if type(found) is float else found

    return method


def _compared(name: str) -> Callable[[GuessedNumber, Any], Any]:
    compare = getattr(operator, name)

    def method(self: GuessedNumber, other: Any) -> Any:
        if not isinstance(other, float | int):
            return NotImplemented
        self._on_decision(self)
        return compare(float(self), float(other))

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(GuessedNumber, f"__{_name}__", _computed(f"__{_name}__"))
    setattr(GuessedNumber, f"__r{_name}__", _computed(f"__r{_name}__"))
for _name in ("neg", "pos", "abs", "round"):
    setattr(GuessedNumber, f"__{_name}__", _computed(f"__{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(GuessedNumber, f"__{_name}__", _compared(_name))
