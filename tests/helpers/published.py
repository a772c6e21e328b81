"""The published runs, which are read once a process: seconds for nearly seven hundred rows, each priced."""

from functools import cache

from meshwright.evaluation.backtest.predict_runs import load_runs
from meshwright.evaluation.dataset.read import MeasuredRun
from validation.fit import PUBLISHED_RUNS


@cache
def runs() -> list[MeasuredRun]:
    """Return every row of validation/published_runs.csv."""
    return load_runs(PUBLISHED_RUNS)
