"""What several unit tests read, read once."""

import pytest

from meshwright.evaluation.backtest.predict_runs import load_runs
from meshwright.evaluation.dataset.read import MeasuredRun
from validation.fit import PUBLISHED_RUNS


@pytest.fixture(scope="session")
def published_runs() -> list[MeasuredRun]:
    return load_runs(PUBLISHED_RUNS)
