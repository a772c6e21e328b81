"""Problem: why a step of many ranks cannot end, and which rank is to blame."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt

from meshwright.spec.noun import Noun

ProblemKind = Literal["collective", "message", "deadlock", "stopped"]
"""A collective or message that ranks do not agree on; ranks that wait in a circle; a rank that stopped."""


class Place(Noun):
    """A record in one rank's step, in words."""

    rank: NonNegativeInt
    """Global rank; it may stand for others that do the same."""
    record: int
    """Position in the rank's trace; -1 for what is missing at its end."""
    op: str
    """As torch calls it, or what the record does."""
    scope: str = ""
    """Module in whose code it is, or the line of the program."""
    phase: str = ""
    action: str = ""
    """Of the pipeline's schedule."""
    axis: str = ""
    """Mesh axis of its group."""
    num_bytes: NonNegativeInt = 0
    dtype: str = ""

    def __str__(self) -> str:
        if self.record < 0:
            return f"rank {self.rank}: nothing more"
        where = ", ".join(part for part in (self.action, self.phase, self.scope) if part)
        size = f" of {self.num_bytes:,} bytes {self.dtype}".rstrip() if self.num_bytes else ""
        axis = f" along {self.axis}" if self.axis else ""
        return f"rank {self.rank}, record {self.record} ({where}): {self.op}{size}{axis}"


class Problem(Noun):
    """One reason why a step does not end, or computes nonsense."""

    kind: ProblemKind
    culprit: Place
    """Where the rank is that does otherwise than the others, or what it is at while they wait."""
    rule: str
    """What is broken, one sentence."""
    others: tuple[Place, ...] = ()
    """What other ranks do there, or wait for."""
    group: tuple[NonNegativeInt, ...] = ()
    """Global ranks of the collective's group, or sender and receiver."""

    def __str__(self) -> str:
        lines = [f"{self.rule}", f"  culprit: {self.culprit}"]
        return "\n".join(lines + [f"  against: {other}" for other in self.others])
