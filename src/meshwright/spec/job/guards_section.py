"""[guards]: what a run does about steps out of order, and about ranks that compute or keep wrong numbers."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from meshwright.spec.frozen import Frozen
from meshwright.spec.job.sections import CheckpointSection, OptimizerSection
from meshwright.spec.layout.layout import Layout
from meshwright.spec.problem import Problem


class GuardsSection(Frozen):
    """What happens to a step that would spoil the model."""

    not_finite: Literal["stop", "skip"] = "stop"
    """What a loss or gradient norm that is NaN or infinite does: it stops the run, or the step's update is skipped."""
    spike_deviations: PositiveFloat | None = Field(None, examples=[6.0])
    """Standard deviations over the mean from which a loss or gradient norm is a spike, and skipped; none: no spikes."""
    window: int = Field(128, ge=8)
    """Recent updates by which a spike is judged; until there are half as many, none is."""
    max_skips: PositiveInt = 3
    """Skipped steps in a row after which the run returns to its newest checkpoint and leaves out the data since."""
    max_rollbacks: NonNegativeInt = 2
    """Times that a run returns to a checkpoint; after these it stops instead."""
    replica_check_interval: NonNegativeInt = 0
    """Steps from one comparison of what several ranks hold copies of to the next; 0: none is compared."""
    recompute_interval: NonNegativeInt = 0
    """Steps from one step that is computed twice, to find wrong gradients, to the next; 0: none is."""

    @property
    def skips_any(self) -> bool:
        """Return whether an update may be skipped."""
        return self.not_finite == "skip" or self.spike_deviations is not None

    @property
    def checks_numbers(self) -> bool:
        """Return whether replicas are compared, or steps computed twice."""
        return self.replica_check_interval > 0 or self.recompute_interval > 0


def guards_problems(
    guards: GuardsSection, optimizer: OptimizerSection, checkpoint: CheckpointSection
) -> Iterator[Problem]:
    """Yield what rules out to skip an update, to compare gradients before it, or to return to a checkpoint."""
    if guards.checks_numbers:
        yield from _number_problems(guards, optimizer, checkpoint)
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


def _number_problems(
    guards: GuardsSection, optimizer: OptimizerSection, checkpoint: CheckpointSection
) -> Iterator[Problem]:
    off = {"guards.replica_check_interval": 0, "guards.recompute_interval": 0}
    if optimizer.in_backward:
        yield Problem(
            "optimizer.in_backward = true updates parameters before all gradients are known, and "
            "guards.replica_check_interval and guards.recompute_interval check them before the update",
            [{"optimizer.in_backward": False}, off],
        )
    if guards.replica_check_interval and checkpoint.interval == "auto":
        yield Problem(
            'checkpoint.interval = "auto" saves after steps that are known while the run trains only, and '
            "guards.replica_check_interval compares replicas before each of them",
            [{"checkpoint.interval": 50}, {"guards.replica_check_interval": 0}],
        )
    if guards.replica_check_interval and checkpoint.memory_interval:
        yield Problem(
            f"checkpoint.memory_interval = {checkpoint.memory_interval} copies states that replicas have not compared, "
            "and guards.replica_check_interval keeps those that differ from being restored",
            [{"checkpoint.memory_interval": 0}, {"guards.replica_check_interval": 0}],
        )
    if guards.replica_check_interval and not checkpoint.interval:
        yield Problem(
            "checkpoint.interval = 0 saves only at the end, and guards.replica_check_interval = "
            f"{guards.replica_check_interval} returns to a checkpoint where parameters of replicas differ",
            [{"checkpoint.interval": 50}, {"guards.replica_check_interval": 0}],
        )


def replica_problems(guards: GuardsSection, layout: Layout) -> Iterator[Problem]:
    """Yield why there is nothing to compare, where guards.replica_check_interval asks for it."""
    if guards.replica_check_interval and layout.dp_replicate == 1 and layout.tp == 1:
        yield Problem(
            f"guards.replica_check_interval = {guards.replica_check_interval} compares copies on different ranks, and "
            "with layout.dp_replicate = 1 and layout.tp = 1 no rank holds a copy of what another holds: add replicas, "
            "or use guards.recompute_interval, which needs none",
            [{"guards.replica_check_interval": 0}],
        )
