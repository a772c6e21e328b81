"""`minimise`: finds what it should, stays within bounds and near priors, and does not follow outliers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.evaluation.fitting.fit import Floats, Regression, Unknowns, minimise

NUM_ROWS = 60


def linear(slopes: Floats, measured: Floats, unknowns: Unknowns, weights: Floats | None = None) -> Regression:
    return Regression(
        predict=lambda x: slopes @ x,
        slopes=lambda x, predicted: slopes,
        measured=measured,
        weights=np.ones(len(measured)) if weights is None else weights,
        unknowns=unknowns,
    )


def wide(num: int, spread: float = 1.0, bound: float = 3.0) -> Unknowns:
    return Unknowns(np.zeros(num), np.full(num, spread), np.full(num, -bound), np.full(num, bound))


@given(seed=st.integers(0, 1000))
def test_what_made_the_measurements_is_found(seed: int) -> None:
    chance = np.random.default_rng(seed)
    slopes, truth = chance.uniform(0, 1, (NUM_ROWS, 3)), chance.uniform(-0.8, 0.8, 3)
    assert minimise(linear(slopes, slopes @ truth, wide(3))) == pytest.approx(truth, abs=0.02)


def test_a_few_wild_measurements_move_little() -> None:
    measured = np.full(NUM_ROWS, 0.2)
    measured[:6] = 5.0
    found = minimise(linear(np.ones((NUM_ROWS, 1)), measured, wide(1)))
    assert found == pytest.approx([0.2], abs=0.02)


@given(target=st.floats(-2, 2), bound=st.floats(0.1, 1))
def test_bounds_hold(target: float, bound: float) -> None:
    found = minimise(linear(np.ones((NUM_ROWS, 1)), np.full(NUM_ROWS, target), wide(1, bound=bound)))
    assert abs(found[0]) <= bound + 1e-12
    assert found[0] == pytest.approx(np.clip(target, -bound, bound), abs=0.02)


def test_without_measurements_the_prior_stays() -> None:
    unknowns = Unknowns(np.array([0.3]), np.array([0.1]), np.array([-1.0]), np.array([1.0]))
    found = minimise(linear(np.ones((NUM_ROWS, 1)), np.zeros(NUM_ROWS), unknowns, np.zeros(NUM_ROWS)))
    assert found == pytest.approx([0.3])


def test_a_narrow_prior_resists_one_measurement() -> None:
    narrow = minimise(linear(np.ones((1, 1)), np.array([0.5]), wide(1, spread=0.05)))
    broad = minimise(linear(np.ones((1, 1)), np.array([0.5]), wide(1, spread=0.5)))
    assert narrow[0] < 0.1
    assert broad[0] > 0.4


def test_models_that_are_not_linear_converge() -> None:
    inputs = np.linspace(0.5, 2, NUM_ROWS)

    def predict(x: Floats) -> Floats:
        return np.asarray(np.log(np.exp(x[0]) * inputs + np.exp(x[1])))

    def slopes(x: Floats, predicted: Floats) -> Floats:
        return np.stack([np.exp(x[0]) * inputs, np.full(NUM_ROWS, np.exp(x[1]))], axis=1) / np.exp(predicted)[:, None]

    truth = np.array([0.7, -0.9])
    regression = Regression(predict, slopes, predict(truth), np.ones(NUM_ROWS), wide(2, spread=2.0))
    assert minimise(regression) == pytest.approx(truth, abs=0.05)
