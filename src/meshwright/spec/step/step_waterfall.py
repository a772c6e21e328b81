"""Waterfall: one step from the floor that the device's peak sets to its measured time, predicted next to measured."""

import math
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from meshwright.spec.frozen import Frozen
from meshwright.spec.step.estimate import COMPONENT_NAMES, COMPONENTS, StepDecomposition

PREDICTED, SIMULATED, MEASURED = "predicted", "simulated", "measured"
"""The columns of a waterfall."""
_WITHIN = {"tile_and_wave_quantization_s": "gemm_inefficiency_s", "repeated_backward_s": "gemm_inefficiency_s"}
"""Causes that only formulas distinguish, and the one that they are measured as."""
_NAMES = COMPONENT_NAMES | {
    "compute_s": "not distinguished",
    "data_loading_s": "data wait",
}
"""What of the names of other tables does not fit: a loop's timers distinguish no kernels, and time a wait."""
_WITHOUT_FLOOR = {"gemm_inefficiency_s": "matmuls", "attention_inefficiency_s": "attention"}
"""Names where no floor is known, so that kernels are not split in a floor and what is above it."""
LEAST_SHARE = 0.0005
"""Of the step: causes that take less in all columns are left out of tables."""


class BestChange(Frozen):
    """The change of one job key that is predicted to save most."""

    change: str = Field(min_length=1)
    """The key and its value as a job takes them, such as layout.microbatch_size=4."""
    step_s: PositiveFloat
    """The predicted step with it, seconds."""
    saved_s: float
    """What the predicted step is shorter with it, seconds."""
    error_s: NonNegativeFloat
    """The error of the prediction, seconds: half the width of the 80 % interval of the predicted step or, where that is
    more, how far the step is from a measured one."""
    changes_numerics: bool = False
    """Whether training computes other numbers with it."""

    @property
    def is_significant(self) -> bool:
        """Return whether it saves more than the error of the prediction."""
        return self.saved_s > self.error_s


class WaterfallRow(NamedTuple):
    """One cause; None where a source does not distinguish it."""

    name: str
    words: str
    by_column_s: Mapping[str, float | None]
    """Seconds by column, in the order PREDICTED, SIMULATED, MEASURED; only columns that exist."""


class Waterfall(Frozen):
    """A step by cause."""

    measured: StepDecomposition
    """By cause, of one profiled step of one rank; with source "timers" the median wait for data and the rest."""
    source: Literal["profile", "timers"]
    """What `measured` comes from: torch.profiler, or the timers of the training loop."""
    measured_s: PositiveFloat
    """Median seconds of steps that no profiler slows down."""
    timed: str
    """Which steps these are, such as "steps 4 to 18"."""
    predicted: StepDecomposition | None = None
    """By cause, by the formulas; None for a model that they do not know."""
    simulated: StepDecomposition | None = None
    """By component; None where the step was not simulated."""
    step: NonNegativeInt | None = None
    """The profiled step."""
    num_steps: NonNegativeInt = 0
    """Profiled steps, of which it is the one of median duration."""
    rank: NonNegativeInt | None = None
    """The rank whose step it is: the critical one."""
    num_ranks: PositiveInt = 1
    pipeline_rank: NonNegativeInt | None = None
    """The position of `rank` in its pipeline; None without a pipeline."""
    relative_error: NonNegativeFloat | None = None
    """Half width of the 80 % interval of the predicted step, as a share of it."""
    rates_of: str | None = None
    """The example machine whose rates the prediction takes; None where the machine that ran is calibrated."""
    is_floor_lowered: bool = False
    """Whether kernels were faster than the peak that the floor takes, and the floor is what they took."""
    changes: Annotated[tuple[BestChange, ...], Field(strict=False)] = ()
    """The best change of one key, and one that changes numerics where that saves more."""
    unpriced: str = ""
    """Why there is no prediction; "" where there is one."""
    notes: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """What to know of the prediction, such as a precision that this machine emulates and that it is priced without."""

    @property
    def rows(self) -> tuple[WaterfallRow, ...]:
        """Return the causes that take LEAST_SHARE of any column or more, the floor first."""
        columns = self.columns
        has_floor = any(one.model_flops_at_peak_s for one in columns.values())
        words = _NAMES if has_floor else _NAMES | _WITHOUT_FLOOR
        least_s = {who: LEAST_SHARE * one.total_s for who, one in columns.items()}
        merged = {who: _merged(one) for who, one in columns.items()}
        found = [
            WaterfallRow(name, words[name], {who: seconds.get(name) for who, seconds in merged.items()})
            for name in COMPONENT_NAMES
        ]
        return tuple(
            row for row in found if any((seconds or 0.0) >= least_s[who] for who, seconds in row.by_column_s.items())
        )

    @property
    def columns(self) -> dict[str, StepDecomposition]:
        """Return the steps by what says so, measured last."""
        columns = {PREDICTED: self.predicted, SIMULATED: self.simulated, MEASURED: self.measured}
        return {who: step for who, step in columns.items() if step is not None}

    @property
    def difference_s(self) -> float:
        """Return by how much prediction and measurement differ; 0 where there is no prediction."""
        return 0.0 if self.predicted is None else abs(self.predicted.total_s - self.measured_s)

    def compared(self, change: BestChange) -> BestChange:
        """Return `change` with the error of the prediction that this measurement shows, where that is more."""
        return change.replace(error_s=max(change.error_s, self.difference_s))

    def is_advised(self, change: BestChange) -> bool:
        """Return whether `change` saves more than the prediction may be, and is, wrong by, and less than the step."""
        return self.compared(change).is_significant and change.saved_s < self.measured_s

    @property
    def profiling_s(self) -> float:
        """Return what the profiled step took longer than the median step; negative where it was shorter."""
        return self.measured.total_s - self.measured_s


def timed_parts(measured_s: float, data_wait_s: float) -> StepDecomposition:
    """Return a step as the timers of the training loop have it: the wait for data (nan: unknown), and the rest."""
    if math.isnan(data_wait_s):
        return StepDecomposition(compute_s=measured_s)
    wait_s = min(max(data_wait_s, 0.0), measured_s)
    return StepDecomposition(compute_s=measured_s - wait_s, data_loading_s=wait_s)


def _merged(step: StepDecomposition) -> dict[str, float]:
    """Return the seconds by cause that all columns can distinguish."""
    found: dict[str, float] = {}
    for name in step.distinguished:
        into = _WITHIN.get(name, name)
        found[into] = found.get(into, 0.0) + getattr(step, name)
    return found


assert set(_WITHIN) | set(_WITHOUT_FLOOR) | set(COMPONENTS) <= set(COMPONENT_NAMES)
