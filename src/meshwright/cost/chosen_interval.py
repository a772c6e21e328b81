"""ChosenInterval: what checkpoint.interval = "auto" comes to, from predicted figures or from a run's own."""

import math
from typing import Self

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat

from meshwright.cost.expected_goodput import best_interval_s, mean_time_between_failures_s
from meshwright.spec.frozen import Frozen
from meshwright.units import counted, format_duration


class ChosenInterval(Frozen):
    """Steps between two checkpoints, and what they follow from."""

    steps: NonNegativeInt
    """0 saves only at the end: nothing fails."""
    step_s: PositiveFloat
    checkpoint_s: NonNegativeFloat
    """What training waits for a checkpoint."""
    commit_s: NonNegativeFloat = 0.0
    """From the start of a save until it counts; no second one is started earlier."""
    mtbf_s: PositiveFloat | None
    """Mean time between failures of the whole job, seconds; None where nothing fails."""
    multiple_of: NonNegativeInt = 0
    """Steps of which the interval is a multiple, for a validation loss at each checkpoint; 0 for none."""

    @classmethod
    def of(
        cls,
        step_s: float,
        checkpoint_s: float,
        *,
        num_devices: int,
        failures_per_device_day: float,
        commit_s: float = 0.0,
        multiple_of: int = 0,
    ) -> Self:
        """Return the interval of Young and Daly, in whole steps."""
        mtbf_s = mean_time_between_failures_s(num_devices, failures_per_device_day)
        fails, unit = math.isfinite(mtbf_s), max(1, multiple_of)
        steps = 0
        if fails:
            seconds = max(best_interval_s(checkpoint_s, mtbf_s), commit_s)
            steps = unit * max(1, round(seconds / step_s / unit))
        return cls(
            steps=steps,
            step_s=step_s,
            checkpoint_s=checkpoint_s,
            commit_s=commit_s,
            mtbf_s=mtbf_s if fails else None,
            multiple_of=multiple_of,
        )

    def __str__(self) -> str:
        """Return the interval and its reason, such as a log line has them."""
        if self.mtbf_s is None:
            return 'checkpoint.interval = "auto": at the end only, since cluster.failures_per_device_day = 0'
        every = f"every {counted(self.steps, 'step')} ({format_duration(self.steps * self.step_s)})"
        written = f", written after {format_duration(self.commit_s)}" if self.commit_s > 2 * self.checkpoint_s else ""
        multiple = f", in multiples of train.validation_interval = {self.multiple_of}" if self.multiple_of else ""
        return (
            f'checkpoint.interval = "auto": {every}, the Young/Daly optimum of a step of '
            f"{format_duration(self.step_s)}, a checkpoint that stops training for "
            f"{format_duration(self.checkpoint_s)}{written}, and a failure in {format_duration(self.mtbf_s)}{multiple}"
        )
