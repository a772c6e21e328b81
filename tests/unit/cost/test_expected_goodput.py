"""The formula of expected goodput against replays of random failures, its limits, and the interval it makes best."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.chosen_interval import ChosenInterval
from meshwright.cost.expected_goodput import FailureModel, best_interval_s, expected_time, mean_time_between_failures_s
from validation.failure_replay import Failure, drawn, endless, replay, share_of

MODELS = st.builds(
    FailureModel,
    mtbf_s=st.floats(30, 1e6),
    interval_s=st.floats(1, 300),
    checkpoint_s=st.floats(0, 30),
    restart_s=st.floats(0, 100),
    detection_s=st.floats(0, 10),
    hang_share=st.floats(0, 1),
    hang_s=st.floats(10, 100),
)
USUAL = FailureModel(60.0, 20.0, 0.5, 8.0, detection_s=0.3, hang_share=0.25, hang_s=6.0)
DAY_S = 86_400.0


@pytest.mark.parametrize("mtbf_s", [10.0, 60.0, 1000.0])
def test_replays_of_a_poisson_process_average_to_the_formula(mtbf_s: float) -> None:
    model = replace(USUAL, mtbf_s=mtbf_s)
    num_segments = 4000
    spent = replay(model, 20 * num_segments, 20, endless(mtbf_s, model.hang_share, seed=1))
    expected, work_s = expected_time(model), 20.0 * num_segments
    # Five standard deviations, and more for long restarts: of n failures their sum is off by 1 / sqrt(n).
    few = 8 / math.sqrt(spent["failures"])
    for cause in ("repeated", "restart", "hang", "failures"):
        assert spent[cause] / work_s == pytest.approx(getattr(expected, cause), rel=few), cause
    assert spent["checkpoint"] / work_s == pytest.approx(expected.checkpoint)
    assert share_of(spent) == pytest.approx(expected.share, rel=few)


def test_a_replay_by_hand() -> None:
    # One failure after 3 s of the first segment of 10 + 1 s, one 2 s into the restart of 5 s.
    model = FailureModel(1.0, 10.0, 1.0, 5.0, detection_s=0.5, hang_share=0.0, hang_s=7.0)
    spent = replay(model, 20, 10, iter([Failure(3.0, hangs=True), Failure(2.0, hangs=True)]))
    assert spent == {
        "productive": 20.0,
        "checkpoint": 2.0,
        "repeated": 3.0,
        "hang": 7.0,
        "restart": 2.0 + 0.5 + 5.0,
        "failures": 2,
    }


@given(MODELS)
def test_without_detection_it_is_dalys_equation_20(model: FailureModel) -> None:
    plain = replace(model, detection_s=0.0, hang_share=0.0)
    wall_s = (
        model.mtbf_s
        * math.exp(model.restart_s / model.mtbf_s)
        * math.expm1((model.interval_s + model.checkpoint_s) / model.mtbf_s)
    )
    assert expected_time(plain).total == pytest.approx(wall_s / model.interval_s, rel=1e-6)


@given(MODELS)
def test_rare_failures_cost_their_first_order_and_none_cost_nothing(model: FailureModel) -> None:
    rare = replace(model, mtbf_s=1e7)
    lost_s = (1 - model.hang_share) * model.detection_s + model.hang_share * model.hang_s
    segment_s = model.interval_s + model.checkpoint_s
    first_order = 1 + model.checkpoint_s / model.interval_s
    first_order += segment_s / model.interval_s * (lost_s + model.restart_s + segment_s / 2) / 1e7
    assert expected_time(rare).total == pytest.approx(first_order, rel=1e-6)
    never = expected_time(replace(model, mtbf_s=math.inf))
    assert (never.repeated, never.restart, never.hang, never.failures) == (0, 0, 0, 0)
    assert never.share == pytest.approx(model.interval_s / segment_s)


@given(MODELS, st.floats(1.01, 3.0), st.sampled_from(["checkpoint_s", "restart_s", "detection_s", "hang_s"]))
def test_more_failures_and_slower_restarts_never_help(model: FailureModel, factor: float, name: str) -> None:
    share = expected_time(model).share
    assert expected_time(replace(model, mtbf_s=model.mtbf_s / factor)).share <= share * (1 + 1e-12)
    assert expected_time(replace(model, **{name: getattr(model, name) * factor})).share <= share * (1 + 1e-12)


@pytest.mark.parametrize(("checkpoint_s", "mtbf_s"), [(0.5, 60.0), (5.0, 200.0), (0.05, 1000.0)])
def test_the_best_interval_is_that_of_brute_force(checkpoint_s: float, mtbf_s: float) -> None:
    best_s = best_interval_s(checkpoint_s, mtbf_s)
    model = replace(USUAL, mtbf_s=mtbf_s, checkpoint_s=checkpoint_s)
    shares = {factor: expected_time(replace(model, interval_s=best_s * factor)).share for factor in (0.25, 1, 4)}
    grid = [best_s * 1.02**power for power in range(-70, 71)]
    found_s = max(grid, key=lambda seconds: expected_time(replace(model, interval_s=seconds)).share)
    assert found_s == pytest.approx(best_s, rel=0.05)
    # The same order by replays under the same failures.
    replayed = {}
    for factor in shares:
        steps = 100
        tried = replace(model, interval_s=best_s * factor)
        num_steps = round(steps * 200_000 / (best_s * factor) / 10)
        replayed[factor] = share_of(replay(tried, num_steps, steps, endless(mtbf_s, 0.25, seed=2)))
    assert max(replayed, key=lambda factor: replayed[factor]) == 1


def test_stratified_failures_have_the_mean_of_the_process() -> None:
    failures = drawn(50, 10.0, 0.2, seed=3)
    assert sum(one.gap_s for one in failures) / 50 == pytest.approx(10.0, rel=0.1)
    assert sum(one.hangs for one in failures) == 10
    assert failures == drawn(50, 10.0, 0.2, seed=3) != drawn(50, 10.0, 0.2, seed=4)


def test_auto_is_whole_steps_and_says_why() -> None:
    rate = DAY_S / 4 / mean_time_between_failures_s(8, 1.0) / 100
    chosen = ChosenInterval.of(0.5, 1.0, num_devices=8, failures_per_device_day=rate)
    mtbf_s = mean_time_between_failures_s(8, rate)
    assert chosen.mtbf_s == mtbf_s
    assert chosen.steps == round(best_interval_s(1.0, mtbf_s) / 0.5)
    assert f"every {chosen.steps} steps" in str(chosen)
    assert "a step of 500 ms" in str(chosen)


def test_auto_waits_for_a_save_to_be_written_keeps_multiples_and_saves_at_the_end_where_nothing_fails() -> None:
    often = {"num_devices": 8, "failures_per_device_day": 1e3}
    assert ChosenInterval.of(1.0, 0.0, **often, commit_s=120.0).steps == 120
    assert ChosenInterval.of(1.0, 1.0, **often, multiple_of=50).steps % 50 == 0
    assert ChosenInterval.of(100.0, 0.01, **often).steps == 1
    never = ChosenInterval.of(1.0, 1.0, num_devices=8, failures_per_device_day=0.0)
    assert never.steps == 0
    assert "at the end only" in str(never)


def test_a_model_as_bad_as_can_be_is_a_number() -> None:
    worst = expected_time(FailureModel(1.0, 1e6, 1e6, 1e6, detection_s=1e3))
    assert 0 < worst.share < 1e-100
    assert best_interval_s(10.0, 1.0) == 1.0
