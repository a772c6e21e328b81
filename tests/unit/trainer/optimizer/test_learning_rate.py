import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec.job.sections import OptimizerSection
from meshwright.trainer.optimizer.optimizer import learning_rate

SCHEDULES = ("cosine", "linear", "wsd", "constant")


def section(schedule: str, **changes: float) -> OptimizerSection:
    return OptimizerSection.from_dict({"schedule": schedule, "learning_rate": 1.0, **changes})


def test_warmup_is_linear_and_ends_at_the_top() -> None:
    rates = [learning_rate(step, 100, section("cosine", warmup_steps=4)) for step in range(1, 5)]
    assert rates == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_the_last_step_has_the_lowest_rate(schedule: str) -> None:
    assert learning_rate(100, 100, section(schedule, min_lr_ratio=0.25)) == pytest.approx(0.25)


def test_cosine_is_halfway_in_the_middle() -> None:
    rate = learning_rate(55, 100, section("cosine", warmup_steps=10, min_lr_ratio=0.0))
    assert rate == pytest.approx((1 + math.cos(math.pi / 2)) / 2)


def test_wsd_stays_at_the_top_until_its_decay() -> None:
    rates = [learning_rate(step, 100, section("wsd", decay_fraction=0.2, min_lr_ratio=0.0)) for step in (11, 80, 90)]
    assert rates == [1.0, 1.0, pytest.approx(0.5)]


@given(
    schedule=st.sampled_from(SCHEDULES),
    num_steps=st.integers(1, 500),
    warmup_steps=st.integers(0, 50),
    min_lr_ratio=st.floats(0, 1),
)
def test_rates_stay_in_range_and_never_rise_after_warmup(
    schedule: str, num_steps: int, warmup_steps: int, min_lr_ratio: float
) -> None:
    warmup_steps = min(warmup_steps, num_steps)
    optimizer = section(schedule, warmup_steps=warmup_steps, min_lr_ratio=min_lr_ratio)
    rates = [learning_rate(step, num_steps, optimizer) for step in range(1, num_steps + 1)]
    assert all(0 < rate <= 1.0 + 1e-12 for rate in rates[:warmup_steps])
    after = rates[warmup_steps:]
    assert all(min_lr_ratio - 1e-12 <= rate <= 1.0 + 1e-12 for rate in after)
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(after))
