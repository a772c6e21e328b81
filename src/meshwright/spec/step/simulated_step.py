"""SimulatedStep: what the traced program of a layout does on a cluster, in the figures that a plan compares."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from meshwright.spec.frozen import Frozen


class SimulatedStep(Frozen):
    """One step of a layout, traced on every kind of rank and simulated."""

    step_s: PositiveFloat | None = None
    """The step in seconds; None where it cannot be traced, or would not end."""
    reserved_bytes: Annotated[tuple[PositiveInt, ...], Field(strict=False)] = ()
    """What the allocator reserves on the fullest rank of each pipeline rank."""
    problem: str | None = None
    """Why there is no step: what cannot be traced, or why it would not end."""

    @property
    def fullest_bytes(self) -> int | None:
        """Return the reserved bytes of the fullest rank; None where there is no step."""
        return max(self.reserved_bytes, default=None)
