"""Where a run's time went, from its rows."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec.run.goodput import Goodput, StepTime, goodput, read_step_times
from meshwright.spec.run.run import Run


def test_each_second_has_one_cause() -> None:
    steps = [
        StepTime(1, 1, end_s=1.0, step_s=1.0, data_wait_s=0.25),
        StepTime(2, 1, end_s=2.0, step_s=1.0, data_wait_s=0.0),
        # A checkpoint of half a second.
        StepTime(3, 1, end_s=3.5, step_s=1.0, data_wait_s=0.0),
        # A restart of four seconds, from the checkpoint after step 2.
        StepTime(3, 2, end_s=8.5, step_s=1.0, data_wait_s=0.5),
        # A rollback within the attempt.
        StepTime(3, 2, end_s=9.5, step_s=1.0, data_wait_s=0.0),
    ]
    found = goodput(steps)
    assert found == Goodput(
        productive_s=2.75, repeated_s=2.0, data_wait_s=0.25, between_steps_s=0.5, between_attempts_s=4.0
    )
    assert found.total_s == 9.5
    assert found.share == 2.75 / 9.5


def test_a_run_without_steps_has_none() -> None:
    assert goodput([]) is None


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.booleans(), st.floats(0.01, 5), st.floats(0, 1), st.floats(0, 9)), min_size=1
    )
)
def test_the_parts_add_up_to_the_time_from_the_first_step_to_the_last(
    drawn: list[tuple[int, bool, float, float, float]],
) -> None:
    now_s, attempt, steps = 0.0, 1, []
    for step, restarts, step_s, wait_share, gap_s in drawn:
        attempt += restarts
        now_s += step_s + (gap_s if steps else 0.0)
        steps.append(StepTime(step, attempt, now_s, step_s, step_s * wait_share))
    found = goodput(steps)
    assert found is not None
    assert found.total_s == pytest.approx(now_s)
    assert 0 <= found.share <= 1


def test_rows_without_a_time_and_other_rows_are_left_out(tmp_path: Path) -> None:
    run = Run(tmp_path)
    row = {"step": 1, "attempt": 1, "time_s": 5.0, "step_ms": 500.0, "data_wait_ms": 100.0}
    old = {name: value for name, value in row.items() if name != "time_s"}
    lines = [json.dumps(row), json.dumps(old), json.dumps({"step": 1, "validation_loss": 2.0, "attempt": 1}), '{"st']
    run.metrics.write_text("\n".join(lines), encoding="utf-8")
    assert read_step_times(run) == [StepTime(1, 1, 5.0, 0.5, 0.1)]
    assert read_step_times(Run(tmp_path / "none")) == []
