"""Measured collectives: timings of a machine's own collectives, which replace the formulas.

    seconds = latency + bytes x seconds per byte, both read at the number of ranks

between the fewest and the most ranks that were measured, interpolated in the logarithm of their number; nan beyond,
where the formulas hold. Source: the points in a cluster's catalogue entry, as `meshwright calibrate` writes them.
Ignored: what other groups of the machine did at the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from meshwright.spec.machine.measured import CollectiveKind, CollectivePoint

Floats = NDArray[np.float64]
_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
_MOST_RANKS = 72
"""The largest domain there is: only links inside a domain are looked up."""


@dataclass(frozen=True)
class MeasuredCollectives:
    """The measurements of one or more clusters; nan where there are none."""

    latency_s: Floats
    """[cluster, kind, ranks]: seconds of the smallest message."""
    s_per_byte: Floats
    """[cluster, kind, ranks]: seconds of each further byte."""

    @property
    def is_empty(self) -> bool:
        """Return whether nothing was measured."""
        return bool(np.isnan(self.latency_s).all())

    def read(self, kind: CollectiveKind, num_ranks: Floats, cluster: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Return latency and seconds per byte of `kind` for each of `num_ranks`, on the clusters at these positions."""
        ranks = np.where(num_ranks <= _MOST_RANKS, num_ranks, 0).astype(np.int64)
        at = (cluster, _KINDS.index(kind), ranks)
        return self.latency_s[at], self.s_per_byte[at]


def measured_collectives(points: Sequence[CollectivePoint]) -> MeasuredCollectives:
    """Return the measurements of one cluster by number of ranks."""
    latency_s = np.full((1, len(_KINDS), _MOST_RANKS + 1), np.nan)
    s_per_byte = latency_s.copy()
    for row, kind in enumerate(_KINDS):
        of_kind = sorted((point for point in points if point.kind == kind), key=lambda point: point.num_ranks)
        if of_kind:
            ranks = [point.num_ranks for point in of_kind]
            latency_s[0, row, 2:] = _over_ranks(ranks, [point.latency_s.value for point in of_kind])
            s_per_byte[0, row, 2:] = _over_ranks(ranks, [1 / point.bytes_per_s.value for point in of_kind])
    return MeasuredCollectives(latency_s, s_per_byte)


def join_measured(parts: Sequence[MeasuredCollectives]) -> MeasuredCollectives:
    """Return the measurements of all clusters, in order."""
    return MeasuredCollectives(
        np.concatenate([part.latency_s for part in parts]), np.concatenate([part.s_per_byte for part in parts])
    )


def _over_ranks(ranks: list[int], values: list[float]) -> Floats:
    wanted = np.log2(np.arange(2, _MOST_RANKS + 1))
    return np.asarray(np.interp(wanted, np.log2(ranks), values, left=np.nan, right=np.nan), np.float64)
