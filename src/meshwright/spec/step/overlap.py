"""Overlap: which communication of a rank's step nothing hides, what could hide it, and which key of a job has a say."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from meshwright.spec.frozen import Frozen


class Exposed(Frozen):
    """Collectives or messages of one kind, in one place of the model, that a rank waits for."""

    axis: str
    """The mesh axis; "" for groups without a name."""
    op: str
    phase: str
    scope: str
    """The module in whose code they are, with * for numbers; "" outside of modules."""
    count: PositiveInt
    exposed_s: NonNegativeFloat
    """While the rank computes nothing."""
    earlier_s: NonNegativeFloat
    """Of it, what computation before could hide if they started as soon as their inputs are complete."""
    later_s: NonNegativeFloat
    """Of it, what later computation could hide if their wait came just before the first use of their outputs."""
    gain_s: NonNegativeFloat
    """What both would save, if nothing else waited instead."""
    is_async: bool = False
    """Whether the program already does something else before it waits for them."""
    keys: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Keys of a job that change when they begin, or how long they take."""


class Overlap(Frozen):
    """What one rank's communication waits for."""

    rank: NonNegativeInt
    communication_s: NonNegativeFloat
    exposed_s: NonNegativeFloat
    exposed: Annotated[tuple[Exposed, ...], Field(strict=False)] = ()
    """The most gain first."""
