"""Days and money: Daly's formulas, and what must hold of any plan of checkpoints."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.expected_goodput import (
    FailureModel,
    best_interval_s,
    expected_time,
    mean_time_between_failures_s,
)
from meshwright.planner.candidate import judge
from meshwright.planner.run_cost import BudgetRequest, budget, frontier
from meshwright.spec.layout.layout import Layout
from meshwright.spec.run.layout_plan import Reliability
from questions import ask

QUESTION = ask("llama3-8b", 16, batch=64)
LAYOUT = judge(Layout(dp_shard=16, activation_checkpoint="full"), QUESTION)
RUN = BudgetRequest(num_tokens=10**12, num_parameters=8 * 10**9, workload=QUESTION.workload, price_per_device_hour=2.0)


def goodput(checkpoint_s: float, mtbf_s: float, interval_s: float, restart_s: float) -> float:
    return expected_time(FailureModel(mtbf_s, interval_s, checkpoint_s, restart_s)).share


def test_llama_3s_rate_of_failures_is_the_default() -> None:
    between_s = mean_time_between_failures_s(16_384, Reliability().failures_per_device_day)
    assert between_s == pytest.approx(54 * 86_400 / 419)


def test_llama_3s_share_of_effective_time_comes_out() -> None:
    # 405B on 16,384 devices: "higher than 90 % effective training time".
    checkpoint_s, between_s = 405e9 * 12 / 2e12, 54 * 86_400 / 419
    share = goodput(checkpoint_s, between_s, best_interval_s(checkpoint_s, between_s), Reliability().restart_s)
    assert 0.88 < share < 0.93


@given(st.floats(0.1, 1e4), st.floats(100.0, 1e7), st.floats(0.1, 3600.0), st.floats(0.3, 3.0))
def test_no_other_interval_does_better(checkpoint_s: float, between_s: float, restart_s: float, factor: float) -> None:
    best_s = best_interval_s(checkpoint_s, between_s)
    best, other = (goodput(checkpoint_s, between_s, s, restart_s) for s in (best_s, best_s * factor))
    assert 0 < other <= best * 1.02 or checkpoint_s > between_s / 2


def test_young_is_the_limit_of_rare_failures() -> None:
    assert best_interval_s(10.0, 1e9) == pytest.approx((2 * 10 * 1e9) ** 0.5, rel=1e-3)


def test_days_and_cost_follow_from_the_step() -> None:
    never = Reliability(failures_per_device_day=0.0)
    found = budget(RUN, QUESTION.cluster, LAYOUT, never)
    steps = -(-(10**12) // (64 * 4096))
    assert found.num_steps == steps
    assert found.days == pytest.approx(steps * LAYOUT.estimate.step.total_s / 86_400)
    assert found.device_hours == pytest.approx(found.days * 24 * 16)
    assert found.cost == pytest.approx(2 * found.device_hours)
    assert (found.goodput, found.mtbf_s, found.checkpoint_interval_s) == (1.0, None, None)


def test_failures_cost_days() -> None:
    often, never = Reliability(failures_per_device_day=0.1), Reliability(failures_per_device_day=0.0)
    found = [budget(RUN, QUESTION.cluster, LAYOUT, reliability) for reliability in (often, Reliability(), never)]
    days = [one.days for one in found]
    assert days == sorted(days, reverse=True)
    assert found[0].goodput < found[1].goodput < 1


def test_a_cluster_that_never_comes_far_between_failures_has_hardly_any_goodput() -> None:
    assert 0 < goodput(600.0, 60.0, best_interval_s(600.0, 60.0), 900.0) < 1e-6


def test_a_deadline_is_met_or_not() -> None:
    for deadline_s, is_met in ((86_400.0, False), (86_400.0 * 10_000, True)):
        run = BudgetRequest(10**12, 8 * 10**9, QUESTION.workload, deadline_s=deadline_s)
        found = budget(run, QUESTION.cluster, LAYOUT, Reliability())
        assert (found.is_deadline_satisfied, found.cost) == (is_met, None)


@pytest.mark.long
@pytest.mark.slow
def test_the_frontier_has_sizes_of_each_cluster_slowest_first() -> None:
    other = ask("llama3-8b", 8, cluster="dgx-a100-hdr").cluster
    points = frontier(QUESTION, [(QUESTION.cluster, 2.0), (other, 1.0)], RUN, Reliability())
    days = [point.days for point in points]
    assert days == sorted(days, reverse=True)
    assert {point.cluster for point in points} == {"h100-ib400", "dgx-a100-hdr"}
    sizes = [point.num_devices for point in points if point.cluster == "h100-ib400"]
    assert sizes == sorted(sizes)
    assert len(sizes) == 5
    for point in points:
        price = 2.0 if point.cluster == "h100-ib400" else 1.0
        assert point.cost == pytest.approx(price * point.device_hours)
        assert point.layout.num_ranks == point.num_devices
