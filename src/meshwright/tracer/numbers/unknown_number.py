"""UnknownNumber: an integer that a program read from the device; fake tensors hold none.

Programs print such numbers and compute with them: tokens in a batch, correct answers. What depends on the value, a size
or a comparison, is refused with the line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor


class UnknownNumber:
    """Prints as ?, and stays what it is in arithmetic; a float, or a tensor that is scaled by it, takes it for 1."""

    def __init__(self, refuse: Callable[[], NoReturn]) -> None:
        self._refuse = refuse

    def _with(self, other: Any) -> Any:
        # By its number a tensor keeps its shape, and may become fractions.
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
