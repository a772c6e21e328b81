"""Fault: something that goes wrong on one rank, as data: what simulates it and what makes it happen read the same."""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt

from meshwright.spec.frozen import Frozen

FaultKind = Literal["slow-rank", "slow-link", "crash", "hang", "drop-message"]
"""slow-rank computes, and slow-link communicates, so many times slower; crash ends the process and hang stops it before
a record; drop-message never sends what others then wait for."""


class Fault(Frozen):
    """One fault."""

    kind: FaultKind
    rank: NonNegativeInt
    """Global rank that it befalls."""
    step: NonNegativeInt | None = None
    """Step in which it happens; None is every one. A simulated step is the one that it happens in."""
    phase: str | None = None
    """Phase as in Trace.phases (forward, backward, optimizer); None is the whole step."""
    argument: NonNegativeFloat = 0.0
    """How many times slower; else the record (crash, hang) or the message sent (drop-message), from 0 in its phase."""
