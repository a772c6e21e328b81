"""RankPass: seconds of one microbatch through one rank's share of the model, forward and backward, cause by cause."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from meshwright.cost.arrays import Floats


@dataclass(frozen=True)
class RankPass:
    """One microbatch through one rank's share of the whole model, one element a configuration."""

    ideal_matmul: Floats
    ideal_attention: Floats
    reached: Floats
    matmul: Floats
    attention: Floats
    memory: Floats
    host: Floats
    recompute: Floats
    repeat: Floats
    tp: Floats
    cp: Floats
    ep: Floats
    dp: Floats
    first_dp: Floats
    """What a block adds to dp if no block stands before it; not in the total."""

    @property
    def total(self) -> Floats:
        """Return what all causes come to."""
        names = ("matmul", "attention", "memory", "host", "recompute", "repeat", "tp", "cp", "ep", "dp")
        return np.asarray(sum(getattr(self, name) for name in names))

    def __add__(self, other: RankPass) -> RankPass:
        return RankPass(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, factor: Floats) -> RankPass:
        return RankPass(*(getattr(self, f.name) * factor for f in fields(self)))
