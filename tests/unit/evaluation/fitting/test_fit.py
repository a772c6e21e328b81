"""The fit: folds keep configurations together, truth is found again, intervals hold their share."""

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tomlkit
from hypothesis import given
from hypothesis import strategies as st

import meshwright.cost
from meshwright.cost.constants import all_constants, fitted_constants
from meshwright.evaluation.backtest.left_out import NUM_FOLDS, fold_of_runs, interval_half_width
from meshwright.evaluation.backtest.predict_runs import fit_null_model, null_step_s
from meshwright.evaluation.dataset.read import MeasuredRun
from meshwright.evaluation.dataset.row import RunRow
from meshwright.evaluation.fitting.fit import HIGHEST, LOWEST, Fit, fit, source_weights
from meshwright.evaluation.fitting.given import fit_given
from meshwright.evaluation.fitting.timed_runs import TimedRuns, is_timed
from validation.fit import Change, applied, changes_of_fit

pytestmark = pytest.mark.slow
"""The published runs are read and predicted first."""

STACKS = ("torchtitan-2024", "torchtitan-2025", "megatron-core-2026", "mlperf-v5")


@pytest.fixture(scope="module")
def runs(published_runs: list[MeasuredRun]) -> TimedRuns:
    return TimedRuns([run for run in published_runs if is_timed(run) and run.row.stack in STACKS])


def timed_as(runs: TimedRuns, seconds: np.ndarray) -> TimedRuns:
    """Return the runs as if they had taken `seconds`."""
    rows = [
        RunRow({**run.row.cells, "step_time_s": str(time)}, run.row.architecture)
        for run, time in zip(runs.runs, seconds, strict=True)
    ]
    return TimedRuns([replace(run, row=row) for run, row in zip(runs.runs, rows, strict=True)])


@given(seed=st.integers(0, 100))
def test_folds_keep_a_configuration_together_and_are_alike(runs: TimedRuns, seed: int) -> None:
    fold = fold_of_runs(runs, seed)
    pairs = set(zip(runs.stack.tolist(), runs.group.tolist(), fold.tolist(), strict=True))
    assert len(pairs) == len({pair[:2] for pair in pairs})
    for stack in runs.stacks:
        sizes = Counter(which for name, _, which in pairs if name == stack)
        assert len(sizes) == NUM_FOLDS
        assert max(sizes.values()) - min(sizes.values()) <= 1


def test_sources_of_many_runs_count_more_but_less_than_in_proportion() -> None:
    source = np.array(["small"] * 4 + ["large"] * 64 + ["unused"])
    weights = source_weights(source, source != "unused")
    small, large, unused = (weights[source == name].sum() for name in ("small", "large", "unused"))
    assert unused == 0
    assert 1 < large / small < 16


@pytest.mark.long
def test_the_fit_explains_runs_that_its_own_formulas_made(runs: TimedRuns) -> None:
    multipliers = np.array([[1.1, 1.3, 0.8], [0.95, 0.8, 1.4], [1.05, 1.0, 1.2], [1.0, 1.2, 1.0]])
    of_run = multipliers[np.searchsorted(runs.stacks, runs.stack)].T
    made = timed_as(runs, np.exp(runs.log_predicted_s(fitted_constants(), np.log(of_run))))
    found = fit(made, np.ones(len(made), bool))
    off = np.abs(np.expm1(found.log_predicted_s(made) - made.log_measured_s))
    assert np.median(off) < 0.015
    assert off.max() < 0.08
    assert_within_bounds(found.constants, found.multipliers)


def assert_within_bounds(constants: dict[str, float], multipliers: dict[str, tuple[float, float, float]]) -> None:
    slack = 1e-6
    for name, constant in all_constants().items():
        assert constant.low * (1 - slack) <= constants[name] <= constant.high * (1 + slack), name
    for three in multipliers.values():
        assert all(low - slack <= one <= high + slack for low, one, high in zip(LOWEST, three, HIGHEST, strict=True))


def test_given_runs_that_agree_are_followed_and_those_that_do_not_are_not(runs: TimedRuns) -> None:
    own = runs.take(np.flatnonzero(runs.stack == "megatron-core-2026")[:5])
    usual_s = np.exp(own.log_predicted_s(fitted_constants(), np.zeros((3, 5))))
    consistent = timed_as(own, usual_s * 1.25)
    scattered = timed_as(own, usual_s * np.array([1.25, 0.7, 1.6, 0.9, 2.0]))
    agreed, narrow = fit_given(consistent, fitted_constants(), np.zeros(3))
    doubtful, wide = fit_given(scattered, fitted_constants(), np.zeros(3))
    ratio = np.exp(own.log_predicted_s(fitted_constants(), np.repeat(agreed[:, None], 5, axis=1))) / usual_s
    assert ((ratio > 1.15) & (ratio < 1.27)).all()
    assert np.abs(doubtful).max() < np.abs(agreed).max()
    assert wide > 2 * narrow


@pytest.mark.parametrize("slowness", [0.8, 1.4])
def test_runs_that_are_all_far_off_alike_are_followed(runs: TimedRuns, slowness: float) -> None:
    own = runs.take(np.flatnonzero(runs.stack == "megatron-core-2026")[:5])
    usual_s = np.exp(own.log_predicted_s(fitted_constants(), np.zeros((3, 5))))
    found, _ = fit_given(timed_as(own, usual_s * slowness), fitted_constants(), np.zeros(3))
    ratio = np.exp(own.log_predicted_s(fitted_constants(), np.repeat(found[:, None], 5, axis=1))) / usual_s
    assert np.abs(ratio / slowness - 1).max() < 0.1


@pytest.mark.parametrize("num_own", [0, 5, 50])
def test_an_interval_holds_four_in_five(num_own: int) -> None:
    chance = np.random.default_rng(0)
    everyone = chance.exponential(0.05, 2000)
    widths = np.array([interval_half_width(chance.exponential(0.05, num_own), everyone) for _ in range(100)])
    assert (-np.expm1(-widths / 0.05)).mean() == pytest.approx(0.8, abs=0.03)


def test_the_interval_of_a_stack_with_many_runs_is_its_own() -> None:
    everyone = np.full(500, 0.5)
    assert interval_half_width(np.full(200, 0.1), everyone) == 0.1
    assert interval_half_width(np.full(3, 0.1), everyone) == 0.5


def test_the_null_model_is_the_usual_rate_of_the_nearest_kind(runs: TimedRuns) -> None:
    setup = runs.runs[0].setup
    assert setup is not None
    shares = fit_null_model([setup] * 3, [1.0, 2.0, 8.0])
    assert null_step_s(setup, shares) == pytest.approx(2.0, rel=1e-3)
    assert null_step_s(setup, {"": shares[""] / 2}) == pytest.approx(4.0, rel=1e-3)


def test_changes_are_written_where_formulas_read_them(runs: TimedRuns, tmp_path: Path) -> None:
    cost = tmp_path / "cost"
    shutil.copytree(Path(meshwright.cost.__file__).parent, cost, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    constants = {name: 1.01 * constant.value for name, constant in all_constants().items()}
    found = Fit(constants, dict.fromkeys(runs.stacks, (1.1, 1.2, 1.3)))
    changes = list(changes_of_fit(cost, runs, found))
    for file in {change.file for change in changes}:
        own = [change for change in changes if change.file == file]
        file.write_text(applied(file.read_text(encoding="utf-8"), own)[0], encoding="utf-8")
    written = tomlkit.parse((cost / "constants.toml").read_text(encoding="utf-8")).unwrap()
    assert {name: table["value"] for name, table in written.items()} == pytest.approx(found.constants, rel=1e-3)
    assert written.keys() == all_constants().keys()
    assert {name: table["prior"] for name, table in written.items() if "prior" in table} == {
        name: constant.prior for name, constant in all_constants().items() if constant.spread
    }
    stack = tomlkit.parse((cost / "stacks" / "mlperf-v5.toml").read_text(encoding="utf-8")).unwrap()
    assert (stack["compute"], stack["communication"], stack["overhead"]) == (1.1, 1.2, 1.3)
    assert stack["num_runs"] == (runs.stack == "mlperf-v5").sum()


def test_only_numbers_that_change_are_told() -> None:
    changes = [Change(Path("one.toml"), "a.b", "value", 2.0), Change(Path("one.toml"), None, "new", 3.0)]
    text, lines = applied('# kept\nnew = 3.0\n["a.b"]\nvalue = 1.0\n', changes)
    assert lines == ["a.b value: 1.0 -> 2.0"]
    assert text == '# kept\nnew = 3.0\n["a.b"]\nvalue = 2.0\n'
