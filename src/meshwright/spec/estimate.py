"""Estimate: what a step is expected to take, with its parts and how sure we are."""

import math

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from meshwright.spec.noun import Noun


class StepTime(Noun):
    """A step's seconds by cause; `total_s` is their sum."""

    compute_s: NonNegativeFloat = 0.0
    """Matmul, attention, norms and losses."""
    recompute_s: NonNegativeFloat = 0.0
    """Forward work done again because of activation_checkpoint."""
    exposed_communication_s: NonNegativeFloat = 0.0
    """Collectives that no computation hides."""
    bubble_s: NonNegativeFloat = 0.0
    """Pipeline ranks waiting for their first or after their last microbatch."""
    optimizer_s: NonNegativeFloat = 0.0
    """Gradient clipping and the optimizer update."""
    host_s: NonNegativeFloat = 0.0
    """The device waiting for the host: data, Python, kernel launches."""

    @property
    def total_s(self) -> float:
        """Return the whole step in seconds."""
        return math.fsum(getattr(self, name) for name in type(self).model_fields)


class Estimate(Noun):
    """Step time and peak memory of one Layout, with an interval."""

    step: StepTime
    """The step by cause, in seconds."""
    peak_memory_bytes: NonNegativeInt
    """Highest allocated bytes on the fullest rank."""
    mfu: float | None = Field(None, ge=0)
    """Model FLOPs (no recompute) over the dense peak of the matmul dtype; None when the peak is unknown."""
    relative_error: NonNegativeFloat
    """Half width of the interval as a share of the step time: 0.1 means plus or minus 10 %."""
