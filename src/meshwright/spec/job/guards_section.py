"""[guards]: what a run does about a step whose loss or gradient norm is out of order."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from meshwright.spec.frozen import Frozen
from meshwright.spec.job.sections import CheckpointSection, OptimizerSection
from meshwright.spec.problem import Problem


class GuardsSection(Frozen):
    """What happens to a step that would spoil the model."""

    not_finite: Literal["stop", "skip"] = "stop"
    """What a loss or gradient norm that is NaN or infinite does: it stops the run, or the step's update is skipped."""
    spike_deviations: PositiveFloat | None = Field(None, examples=[6.0])
    """Standard deviations over the mean from which a loss or gradient norm is a spike, and skipped; none: no spikes."""
    window: PositiveInt = Field(128, ge=8)
    """Recent updates by which a spike is judged; until there are half as many, none is."""
    max_skips: PositiveInt = 3
    """Skipped steps in a row after which the run returns to its newest checkpoint and leaves out the data since."""
    max_rollbacks: NonNegativeInt = 2
    """Times that a run returns to a checkpoint; after these it stops instead."""

    @property
    def skips_any(self) -> bool:
        """Return whether an update may be skipped."""
        return self.not_finite == "skip" or self.spike_deviations is not None


def guards_problems(
    guards: GuardsSection, optimizer: OptimizerSection, checkpoint: CheckpointSection
) -> Iterator[Problem]:
    """Yield what rules out to skip an update, or to return to a checkpoint."""
    if not guards.skips_any:
        return
    off = {"guards.not_finite": "stop", "guards.spike_deviations": None}
    if optimizer.in_backward:
        yield Problem(
            "optimizer.in_backward = true updates parameters before the loss and the gradient norm are known, by which "
            "[guards] skips an update",
            [{"optimizer.in_backward": False}, off],
        )
    if checkpoint.interval == "auto":
        yield Problem(
            'checkpoint.interval = "auto" saves after steps that follow from measured times, and [guards] returns to '
            "one of them and leaves out other data, so that no run would end as another",
            [{"checkpoint.interval": 50}, off],
        )
    if not checkpoint.interval:
        yield Problem(
            "checkpoint.interval = 0 saves only at the end, and [guards] returns to a checkpoint after guards."
            f"max_skips = {guards.max_skips} skipped steps",
            [{"checkpoint.interval": 50}, off],
        )
