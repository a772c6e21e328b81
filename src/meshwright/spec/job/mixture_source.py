"""MixtureSource: one table of [[data.mixture]], a source and its share of the samples."""

import math
from collections.abc import Sequence
from fractions import Fraction

from pydantic import Field, NonNegativeFloat, PositiveInt

from meshwright.spec.frozen import Frozen

MAX_TOTAL_WEIGHT = 2**31
"""Below it, the products of two whole weights, by which positions are computed, are exact in 64 bits."""


class MixtureSource(Frozen):
    """One source of a mixture: which documents or tokens, and their share of the samples."""

    source: str = Field(min_length=1)
    """What data.source may name, but for my_module:MyData."""
    name: str | None = Field(None, min_length=1)
    """Its name in metrics and messages; default: the last part of the source, without its suffixes."""
    weight: NonNegativeFloat = 1.0
    """Its share of the samples, in proportion to the weights of the other tables."""
    weights: tuple[NonNegativeFloat, ...] = Field((), strict=False)
    """Its weight in each stage of data.stage_steps, in place of weight; 0 reads nothing of it in a stage."""
    text_key: str | None = None
    """Its data.text_key, if it differs."""
    messages_key: str | None = None
    """Its data.messages_key, if it differs."""
    chosen_key: str | None = None
    """Its data.chosen_key, if it differs."""
    rejected_key: str | None = None
    """Its data.rejected_key, if it differs."""
    max_bytes: PositiveInt | None = None
    """Its data.max_bytes, if it differs."""

    @property
    def label(self) -> str:
        """Return the name, or the default of it."""
        return self.name or self.source.rstrip("/").rpartition("/")[2].partition(".")[0] or self.source

    def weights_of(self, num_stages: int) -> tuple[float, ...]:
        """Return the weight in each stage."""
        return self.weights or (self.weight,) * num_stages


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest whole numbers in the same proportions, each weight taken as the decimal that is written.

    The weights must not all be 0.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = math.gcd(*whole)
    return tuple(weight // divisor for weight in whole)
