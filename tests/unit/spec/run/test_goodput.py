"""Where a run's time went, from its rows and its events."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec.run.done_steps import StepTime, read_step_times
from meshwright.spec.run.goodput import Goodput, goodput, read_goodput
from meshwright.spec.run.run import Run
from meshwright.spec.run.run_events import EventSpans, RunEvent, append_event, read_events


def step(number: int, attempt: int, end_s: float, step_s: float = 1.0, data_wait_s: float = 0.0) -> StepTime:
    return StepTime(number, attempt, end_s, step_s, data_wait_s)


def test_without_events_each_second_is_of_a_step_or_of_a_gap() -> None:
    steps = [
        step(1, 1, 1.0, data_wait_s=0.25),
        step(2, 1, 2.0),
        # Half a second between steps.
        step(3, 1, 3.5),
        # A restart of four seconds, from the checkpoint after step 2.
        step(3, 2, 8.5, data_wait_s=0.5),
        # A rollback within the attempt.
        step(3, 2, 9.5),
    ]
    found = goodput(steps)
    assert found == Goodput(productive_s=2.75, repeated_s=2.0, data_wait_s=0.25, restart_s=4.0, other_s=0.5)
    assert found.total_s == 9.5
    assert found.share == 2.75 / 9.5


def test_skipped_steps_are_no_goodput() -> None:
    skipped = StepTime(2, 1, 2.0, 1.0, 0.25, is_skipped=True)
    found = goodput([step(1, 1, 1.0), skipped, step(3, 1, 3.0)])
    assert found == Goodput(productive_s=2.0, skipped_s=1.0)
    # The run ended when it had returned to step 1.
    assert goodput([step(1, 1, 1.0), replace(skipped, is_rolled_back=True)]) == Goodput(
        productive_s=1.0, repeated_s=1.0
    )
    # Steps of a rollback are done again, which they are counted as.
    again = [step(2, 1, 4.0), step(3, 1, 5.0)]
    assert goodput([step(1, 1, 1.0), skipped, step(3, 1, 3.0), *again]) == Goodput(productive_s=3.0, repeated_s=2.0)


def test_events_name_what_lay_between_steps() -> None:
    events = [
        RunEvent(kind="launched", time_s=-3.0),
        RunEvent(kind="started", time_s=-1.0),
        RunEvent(kind="validation", time_s=2.3, duration_s=0.25, step=2),
        RunEvent(kind="checkpoint", time_s=2.7, duration_s=0.25, step=2),
        # In the background: staging that step 3 waits for.
        RunEvent(kind="checkpoint", time_s=3.9, duration_s=0.5),
        RunEvent(kind="checkpoint", time_s=6.5, duration_s=0.5, step=4),
        RunEvent(kind="ended", time_s=7.0),
    ]
    steps = [step(1, 1, 1.0), step(2, 1, 2.0), step(3, 1, 4.0), step(4, 1, 5.0)]
    found = goodput(steps, events)
    assert found is not None
    assert found.start_up_s == 3.0
    assert found.validation_s == 0.25
    assert found.checkpoint_s == 1.25
    assert found.productive_s == 3.5
    assert found.other_s == pytest.approx(2.0)
    assert found.total_s == pytest.approx(10.0)


def test_a_hang_ends_when_the_run_is_ended_for_it_and_a_restart_with_the_next_first_step() -> None:
    events = [
        RunEvent(kind="started", time_s=0.0),
        # Step 3 stops after 0.4 s; the launcher ends the run 5 s later.
        RunEvent(kind="last seen", time_s=2.4),
        RunEvent(kind="hang", time_s=7.4, duration_s=5.0),
        RunEvent(kind="started", time_s=9.0),
        # An attempt that dies before its first step.
        RunEvent(kind="last seen", time_s=9.5),
        RunEvent(kind="started", time_s=11.0),
    ]
    steps = [step(1, 1, 1.0), step(2, 1, 2.0), step(3, 3, 13.0)]
    found = goodput(steps, events)
    assert found is not None
    assert found.repeated_s == pytest.approx(0.4)
    assert found.hang_s == pytest.approx(5.0)
    assert found.restart_s == pytest.approx(4.6)
    assert found.productive_s == pytest.approx(3.0)


def test_nothing_trains_between_the_end_of_a_launcher_and_the_next_launch() -> None:
    events = [
        RunEvent(kind="launched", time_s=-1.0),
        RunEvent(kind="checkpoint", time_s=1.5, duration_s=0.5, step=1),
        RunEvent(kind="ended", time_s=2.0),
        RunEvent(kind="launched", time_s=102.0),
        RunEvent(kind="started", time_s=104.0),
    ]
    found = goodput([step(1, 1, 1.0), step(2, 2, 106.0)], events)
    assert found == Goodput(productive_s=2.0, checkpoint_s=0.5, start_up_s=1.0, restart_s=3.5, stopped_s=100.0)


def test_a_launcher_that_was_killed_ended_with_the_last_sign_of_its_ranks() -> None:
    events = [
        RunEvent(kind="launched", time_s=-1.0),
        RunEvent(kind="last seen", time_s=1.5),
        RunEvent(kind="launched", time_s=101.5),
        RunEvent(kind="started", time_s=103.0),
        # One that was killed before its first step.
        RunEvent(kind="last seen", time_s=103.5),
        RunEvent(kind="launched", time_s=113.5),
    ]
    found = goodput([step(1, 1, 1.0), step(2, 2, 116.5)], events)
    assert found is not None
    # Which of the launches in a row was killed is not known: all of it counts as one stop.
    assert found == Goodput(productive_s=2.0, repeated_s=0.5, start_up_s=1.0, restart_s=2.0, stopped_s=112.0)
    assert goodput([], events[:3]) == Goodput(start_up_s=2.5, stopped_s=100.0)


@pytest.mark.parametrize("event", [None, RunEvent(kind="hang", time_s=30.0, duration_s=24.0)])
def test_a_step_that_stood_still_and_went_on_is_a_hang_beyond_a_usual_step(event: RunEvent | None) -> None:
    steps = [*(step(number, 1, float(number)) for number in range(1, 6)), step(6, 1, 35.5, step_s=30.5)]
    found = goodput([*steps, step(7, 1, 36.5)], [] if event is None else [event])
    assert found == Goodput(productive_s=7.0, hang_s=29.5)


def test_a_slow_step_is_no_hang_but_for_what_was_recorded_of_it() -> None:
    steps = [*(step(number, 1, float(number)) for number in range(1, 6)), step(6, 1, 20.0, step_s=15.0)]
    assert goodput(steps) == Goodput(productive_s=20.0)
    hang = RunEvent(kind="hang", time_s=19.0, duration_s=13.0)
    assert goodput(steps, [hang]) == Goodput(productive_s=7.0, hang_s=13.0)
    # The first steps of an attempt compile, however long they take.
    first = [step(1, 1, 60.0, step_s=60.0), *(step(number, 1, 59.0 + number) for number in range(2, 9))]
    started = goodput(first)
    assert started is not None
    assert started.hang_s == 0
    assert started.start_up_s == pytest.approx(59.0)


def test_what_first_steps_take_beyond_later_ones_is_of_the_start() -> None:
    first = [step(1, 1, 4.0, step_s=4.0), *(step(number, 1, 3.0 + number) for number in range(2, 9))]
    second = [step(9, 2, 15.0, step_s=3.0), *(step(number, 2, 6.0 + number) for number in range(10, 13))]
    found = goodput([*first, *second])
    assert found is not None
    assert found.start_up_s == pytest.approx(3.0)
    assert found.restart_s == pytest.approx(1.0 + 2.0)
    assert found.productive_s == pytest.approx(12.0)


def test_a_run_without_steps_and_events_has_none() -> None:
    assert goodput([]) is None
    assert goodput([], [RunEvent(kind="launched", time_s=1.0)]) is None


def test_a_run_without_steps_has_starts_restarts_and_hangs() -> None:
    events = [
        RunEvent(kind="launched", time_s=10.0),
        RunEvent(kind="started", time_s=12.0),
        RunEvent(kind="last seen", time_s=15.0),
        RunEvent(kind="started", time_s=18.0),
        RunEvent(kind="hang", time_s=30.0, duration_s=8.0),
        RunEvent(kind="ended", time_s=31.0),
        RunEvent(kind="launched", time_s=40.0),
        RunEvent(kind="ended", time_s=42.0),
    ]
    found = goodput([], events)
    assert found == Goodput(start_up_s=5.0, restart_s=7.0 + 1.0 + 2.0, hang_s=8.0, stopped_s=9.0)
    assert found.total_s == 32.0
    assert found.share == 0.0


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.booleans(), st.floats(0.01, 5), st.floats(0, 1), st.floats(0, 9)), min_size=1
    ),
    st.lists(
        st.tuples(
            st.sampled_from(["launched", "checkpoint", "validation", "restore", "hang", "last seen", "ended"]),
            st.floats(0, 1),
            st.floats(0, 9),
        ),
        max_size=12,
    ),
)
def test_the_parts_add_up_to_the_time_from_the_launch_to_the_end(
    drawn: list[tuple[int, bool, float, float, float]], others: list[tuple[str, float, float]]
) -> None:
    now_s, attempt, steps = 0.0, 1, []
    for number, restarts, step_s, wait_share, gap_s in drawn:
        attempt += restarts
        now_s += step_s + (gap_s if steps else 0.0)
        steps.append(step(number, attempt, now_s, step_s, step_s * wait_share))
    events = [
        RunEvent(kind=kind, time_s=place * now_s, duration_s=seconds if kind not in ("launched", "ended") else 0.0)
        for kind, place, seconds in others
    ]
    found = goodput(steps, sorted(events, key=lambda event: event.time_s))
    assert found is not None
    assert found.total_s == pytest.approx(now_s)
    assert all(getattr(found, name) >= 0 for name in Goodput.model_fields)
    assert 0 <= found.share <= 1


def test_rows_without_a_time_and_other_rows_are_left_out(tmp_path: Path) -> None:
    run = Run(tmp_path)
    row = {"step": 1, "attempt": 1, "time_s": 5.0, "step_ms": 500.0, "data_wait_ms": 100.0}
    old = {name: value for name, value in row.items() if name != "time_s"}
    lines = [json.dumps(row), json.dumps(old), json.dumps({"step": 1, "validation_loss": 2.0, "attempt": 1}), '{"st']
    run.metrics.write_text("\n".join(lines), encoding="utf-8")
    assert read_step_times(run) == [StepTime(1, 1, 5.0, 0.5, 0.1)]
    assert read_step_times(Run(tmp_path / "none")) == []
    append_event(run, "launched", time_s=2.0)
    with run.events.open("a", encoding="utf-8") as file:
        file.write('{"kind": "chec')
    assert read_events(run) == [RunEvent(kind="launched", time_s=2.0)]
    found = read_goodput(run)
    assert found is not None
    assert found.start_up_s == pytest.approx(2.5)


def test_what_several_ranks_report_counts_once() -> None:
    hangs = [RunEvent(kind="hang", time_s=end_s, duration_s=4.0) for end_s in (5.0, 5.5, 20.0)]
    spans = EventSpans([*hangs, RunEvent(kind="checkpoint", time_s=9.0, duration_s=1.0)], "hang")
    assert spans.within(0.0, 30.0) == [(1.0, 5.5), (16.0, 20.0)]
    assert spans.covered_s(2.0, 17.0) == 4.5


def test_a_clock_that_was_set_back_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path)
    rows = [(1, 1, 101.0), (2, 1, 101.5), (3, 1, 52.5), (3, 2, 20.0)]
    lines = [
        {"step": step, "attempt": attempt, "time_s": time_s, "step_ms": 1000.0, "data_wait_ms": 0.0}
        for step, attempt, time_s in rows
    ]
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    assert read_goodput(run) is not None
    [said] = caplog.messages
    assert "the system clock went back by 50 s between steps 2 and 3" in said
