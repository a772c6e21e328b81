"""Columns of a timeline made short enough to draw, without losing what one looks for in them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from meshwright.spec.trace.timeline import Ints, MemoryCurve


def thinned(curve: MemoryCurve, most: int) -> Ints:
    """Return the positions of at most `most` moments of a curve: of each stretch its highest and its lowest."""
    if len(curve.at_s) <= most:
        return np.arange(len(curve.at_s))
    values = curve.allocated_bytes
    stops = np.linspace(0, len(values), most // 2 + 1).astype(np.int64)
    kept = [
        (start + int(values[start:stop].argmax()), start + int(values[start:stop].argmin()))
        for start, stop in pairwise(stops.tolist())
    ]
    return np.unique(kept)
