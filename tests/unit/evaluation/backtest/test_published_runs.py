"""The published runs, replayed: errors are no more than they have been, and every row has an answer."""

import pytest

from meshwright.evaluation.backtest.left_out import by_folds, by_stack
from meshwright.evaluation.backtest.predict_runs import predict_runs
from meshwright.evaluation.backtest.score import backtest, shipped_sizes
from meshwright.evaluation.dataset.read import MeasuredRun
from meshwright.spec.run.backtest_scores import Backtest, Prediction
from validation.tolerance import allowed, reached

pytestmark = pytest.mark.slow
"""The published runs are read and predicted first."""

Replayed = tuple[list[MeasuredRun], list[Prediction]]


@pytest.fixture(scope="module")
def published(published_runs: list[MeasuredRun]) -> Replayed:
    return published_runs, predict_runs(published_runs)


def test_errors_are_within_the_tolerances_that_only_tighten(published: Replayed) -> None:
    limits, errors = allowed(), reached(backtest("shipped constants", *published, shipped_sizes({})))
    assert {name: error for name, error in errors.items() if error > limits[name]} == {}


def test_every_row_has_a_prediction_or_a_reason(published: Replayed) -> None:
    runs, predictions = published
    assert [one.id for one in predictions] == [run.row.id for run in runs]
    assert all((one.predicted_step_time_s is None) == bool(one.unsupported_reason) for one in predictions)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_left_out_runs_are_predicted_far_better_than_by_the_null_model(published: Replayed) -> None:
    known = by_folds(*published)
    unseen, unknown, met = by_stack(*published, num_draws=1)
    for report, most, coverage in (
        (known, 0.05, (0.74, 0.88)),
        (unseen, 0.09, (0.70, 0.90)),
        (unknown, 0.14, (0.65, 0.92)),
        (met, 0.11, (0.60, 0.95)),
    ):
        score = report.overall
        assert score is not None, report.title
        assert score.median <= most, report.title
        assert score.null_median is not None
        assert score.median < score.null_median / 2, report.title
        assert coverage[0] <= covered(report) <= coverage[1], report.title


def covered(report: Backtest) -> float:
    """Return the share of all runs within their intervals."""
    total = sum(score.num_runs for score in report.sources)
    return sum((score.coverage or 0.0) * score.num_runs for score in report.sources) / total
