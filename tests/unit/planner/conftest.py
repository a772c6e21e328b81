"""What several tests of the planner read, read once."""

import pytest

from meshwright.planner.backtest.replay import load_runs
from meshwright.planner.measured.read import MeasuredRun
from validation.fit import PUBLISHED_RUNS


@pytest.fixture(scope="session")
def published_runs() -> list[MeasuredRun]:
    return load_runs(PUBLISHED_RUNS)
