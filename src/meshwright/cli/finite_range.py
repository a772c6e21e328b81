"""FiniteRange: the type of a command-line number that enters a calculation."""

import math
from typing import Any

import click


class FiniteRange(click.FloatRange):
    """A range of finite numbers: click's own accepts nan, which is neither below nor above a bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number that was given; fails as every parameter type does, with what is wrong with it."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return float(number)
