"""Noise: by how much the operations of each rank, and each collective, take longer or shorter than their cost.

    factor = exp(jitter x z - jitter^2 / 2) x slowness of the rank,  slowness = exp(spread x |z|)

with z from a standard normal distribution, so that the mean stays the cost. Every rank and stream, and every group and
direction of messages, draws from a generator of its own, seeded by what it is: what one rank draws depends neither on
which ranks were traced nor on how they are grouped in classes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from meshwright.simulator.engine.conditions import Conditions
from meshwright.spec.trace.timeline import Floats
from meshwright.spec.trace.trace import Ints

_CHUNK = 256
"""Draws of each rank that are made at a time: few enough to hold for 1,024 ranks."""


class OfRanks:
    """The factors of one stream's operations on some ranks, drawn in order."""

    def __init__(self, conditions: Conditions, slowness: Floats, ranks: Ints, stream: int) -> None:
        self._jitter, self._slowness = conditions.jitter, slowness
        self._generators = [np.random.default_rng((conditions.seed, rank, stream)) for rank in ranks.tolist()]
        self._drawn = np.zeros((0, len(ranks)))
        self._next = 0

    def next(self) -> Floats:
        """Return the factors of the next operation [ranks]."""
        if self._jitter == 0:
            return self._slowness
        if self._next == len(self._drawn):
            drawn = np.stack([one.standard_normal(_CHUNK) for one in self._generators], axis=1)
            self._drawn, self._next = _factors(drawn, self._jitter) * self._slowness, 0
        self._next += 1
        return np.asarray(self._drawn[self._next - 1])


def slowness_of_ranks(conditions: Conditions, ranks: Sequence[int]) -> Floats:
    """Return how many times slower each rank is in the whole step [ranks]."""
    if conditions.rank_spread == 0:
        return np.ones(len(ranks))
    drawn = [np.random.default_rng((conditions.seed, rank)).standard_normal() for rank in ranks]
    return np.exp(conditions.rank_spread * np.abs(drawn))


def of_group(conditions: Conditions, axis: str, ranks: Sequence[int], count: int) -> Floats:
    """Return the factors of a group's collectives, or of the messages from one rank to another, in order [count]."""
    key = (conditions.seed, zlib.crc32(axis.encode()), len(ranks), ranks[0], ranks[-1])
    return _factors(np.random.default_rng(key).standard_normal(count), conditions.jitter)


def _factors(drawn: Floats, jitter: float) -> Floats:
    return np.asarray(np.exp(jitter * drawn - jitter**2 / 2))
