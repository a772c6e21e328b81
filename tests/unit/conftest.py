"""What several unit tests read, read once."""

import pytest

import published
from meshwright.evaluation.dataset.read import MeasuredRun


@pytest.fixture(scope="session")
def published_runs() -> list[MeasuredRun]:
    return published.runs()
