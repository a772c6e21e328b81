"""TimedRuns: measured runs whose step was timed, as configurations to price again and again with other constants."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.cost.constants import Constants
from meshwright.cost.layout_table import Floats, Ints, layout_table
from meshwright.cost.stack_factors import StackFactors
from meshwright.cost.step_times import step_pricer
from meshwright.cost.training_setup import Configurations
from meshwright.errors import UnsupportedError
from meshwright.evaluation.dataset.read import MeasuredRun
from meshwright.evaluation.dataset.row import RunRow

MULTIPLIERS = ("compute", "communication", "overhead")
"""The three constants of a stack, as fields of Stack."""


def measured_step_s(row: RunRow) -> float | None:
    """Return the measured seconds of a step, None if the row has none; raises UnsupportedError for what is no time."""
    seconds = row.measured_s
    if seconds is not None and seconds <= 0:
        raise UnsupportedError(f"the measured step time is {seconds:g} s: it must be positive, or empty")
    return seconds


def is_timed(run: MeasuredRun) -> bool:
    """Return whether the run can be priced and compared."""
    try:
        return run.is_supported and measured_step_s(run.row) is not None
    except UnsupportedError:
        return False


def configs_of_runs(runs: Sequence[MeasuredRun]) -> Configurations:
    """Return the runs, all of which must be supported, as configs, each in a setup of its own."""
    setups = tuple(run.setup for run in runs if run.setup is not None)
    layouts = layout_table([run.layout for run in runs if run.layout is not None])
    assert len(setups) == len(runs), "a run that cannot be priced"
    return Configurations(setups, np.arange(len(runs)), layouts)


class TimedRuns:
    """Runs that are all timed, one element a run in every array."""

    def __init__(self, runs: Sequence[MeasuredRun]) -> None:
        self.runs = tuple(runs)
        self.log_measured_s: Floats = np.log([measured_step_s(run.row) or np.nan for run in runs])
        self.source = np.array([run.row.source for run in runs])
        self.stack = np.array([run.row.stack for run in runs])
        self.group = np.array([run.row.text("config_group") or run.row.id for run in runs])
        self._pricer = step_pricer(configs_of_runs(runs))
        own = self._pricer.stacks.fitted
        self._own_multipliers = np.log(np.array([own.compute, own.communication, own.overhead]))

    def __len__(self) -> int:
        return len(self.runs)

    @property
    def stacks(self) -> list[str]:
        """Return the names of all stacks."""
        return sorted(set(self.stack))

    def take(self, rows: Ints) -> TimedRuns:
        """Return the runs at `rows`."""
        return TimedRuns([self.runs[row] for row in rows])

    def log_predicted_s(self, constants: Constants, log_multipliers: Floats | None = None) -> Floats:
        """Return the logarithm of each predicted step; `log_multipliers` [3, runs] replace those of the stacks."""
        multipliers = self._own_multipliers if log_multipliers is None else log_multipliers
        self._pricer.use(StackFactors(*np.exp(multipliers)))
        return np.log(self._pricer.price(constants).total_s)
