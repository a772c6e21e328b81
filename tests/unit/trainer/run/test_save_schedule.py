"""After which steps a run saves, on each of its ranks alike."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from meshwright.cost.chosen_interval import ChosenInterval
from meshwright.spec.job.job import Job
from meshwright.trainer.run import save_schedule
from meshwright.trainer.run.save_schedule import FIRST_SAVE, SaveCost, SaveSchedule

OFTEN = 86_400.0 / 2 / 50
"""Failures of each of two devices in a day: one of both in 50 s."""


def auto(**keys: Any) -> Job:
    values: dict[str, Any] = {
        "checkpoint": {"interval": "auto"},
        "cluster": {"failures_per_device_day": OFTEN},
        "train": {"steps": 1000},
    }
    for section, more in keys.items():
        values[section] = values.get(section, {}) | more
    return Job.from_dict(values)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now_s = [0.0]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    monkeypatch.setattr(save_schedule.time, "perf_counter", lambda: now_s[0])
    return sleep


def trained(
    schedule: SaveSchedule, clock: Callable[[float], None], steps: range, stall_s: float = 0.25
) -> Iterator[tuple[int, ChosenInterval | None]]:
    """Yield the steps that are saved, each with what was chosen since the last."""
    stalled_s, chosen = 0.0, None
    for step in steps:
        clock(0.5)
        chosen = schedule.review(step, SaveCost(stalled_s, stall_s if stalled_s else None)) or chosen
        if schedule.is_due(step):
            clock(stall_s)
            stalled_s += stall_s
            schedule.saved(step)
            yield step, chosen
            chosen = None


def test_a_number_saves_at_its_multiples_and_0_never(clock: Callable[[float], None]) -> None:
    job = Job.from_dict({"checkpoint": {"interval": 7}})
    schedule = SaveSchedule(job, 2, 3, lambda value: pytest.fail("nothing is to be agreed on"))
    assert list(trained(schedule, clock, range(4, 30))) == [(7, None), (14, None), (21, None), (28, None)]
    assert schedule.is_any_due(7)
    assert not schedule.is_any_due(6)
    never = SaveSchedule(Job.from_dict({"checkpoint": {"interval": 0}}), 2, 0, lambda value: [value])
    assert not any(never.is_due(step) for step in range(1, 99))
    assert not never.is_any_due(1000)


def test_auto_saves_once_to_know_what_a_save_takes_and_then_as_often_as_is_best(
    clock: Callable[[float], None],
) -> None:
    schedule = SaveSchedule(auto(), 2, 0, lambda value: [value, value])
    saves = list(trained(schedule, clock, range(1, 60)))
    best = ChosenInterval.of(0.5, 0.25, num_devices=2, failures_per_device_day=OFTEN, commit_s=0.25)
    # The square root of 2 x 0.25 s x 50 s, and a little.
    assert best.steps == 10
    assert [step for step, _ in saves] == [FIRST_SAVE, *range(FIRST_SAVE + 10, 60, 10)]
    assert saves[1][1] == best


def test_the_slowest_rank_counts_for_all(clock: Callable[[float], None]) -> None:
    schedule = SaveSchedule(auto(), 2, 0, lambda value: [value, (2.0, 4.0, 8.0)])
    assert [step for step, _ in trained(schedule, clock, range(1, 40))] == [10, 19, 28, 37]
    assert round(ChosenInterval.of(2.0, 4.0, num_devices=2, failures_per_device_day=OFTEN).steps) == 9


def test_a_save_in_the_background_is_looked_at_again_until_it_is_written(clock: Callable[[float], None]) -> None:
    asked: list[int] = []
    schedule = SaveSchedule(auto(), 2, 0, lambda value: [value])
    schedule.review(10, SaveCost(0.0, None))
    schedule.saved(10)
    for step in range(11, 40):
        clock(0.5)
        written_s = None if step < 15 else 3.0
        if schedule.review(step, SaveCost(0.001, written_s)) is not None:
            asked.append(step)
    # After 1, 2, 4 and 8 steps.
    assert asked == [18]
    # No second save before the first is written: 6 steps of half a second.
    assert schedule.is_due(16)
    assert not schedule.is_due(15)


def test_a_resumed_run_goes_by_what_was_recorded_until_it_has_saved(clock: Callable[[float], None]) -> None:
    recorded = ChosenInterval.of(0.5, 0.25, num_devices=2, failures_per_device_day=OFTEN).replace(steps=25)
    schedule = SaveSchedule(auto(), 2, 40, lambda value: [value], recorded)
    assert [step for step, _ in trained(schedule, clock, range(41, 90))] == [65, 75, 85]


def test_where_nothing_fails_auto_saves_at_the_end_only(clock: Callable[[float], None]) -> None:
    job = auto(cluster={"failures_per_device_day": 0.0})
    schedule = SaveSchedule(job, 2, 0, lambda value: [value])
    assert list(trained(schedule, clock, range(1, 99))) == []
    assert not schedule.is_any_due(99)


def test_the_best_are_kept_of_steps_that_have_a_validation_loss(clock: Callable[[float], None]) -> None:
    job = auto(train={"steps": 1000, "validation_interval": 4}, checkpoint={"interval": "auto", "keep_best": 1})
    schedule = SaveSchedule(job, 2, 0, lambda value: [value])
    assert [step for step, _ in trained(schedule, clock, range(1, 40))] == [12, 20, 28, 36]
