"""A profiling window says how many steps it holds, and when it holds none."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from meshwright.profiler.window import ProfilerWindow


def run_steps(window: ProfilerWindow, num_steps: int) -> None:
    with window:
        for step in range(1, num_steps + 1):
            window.before_step(step)
            window.after_step(step)


def test_a_window_that_no_step_reaches_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        run_steps(ProfilerWindow(tmp_path, 0, 30, 2), 3)
    assert "no step was profiled: run.profile_start = 30" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_run_that_ends_within_the_window_counts_its_own_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        run_steps(ProfilerWindow(tmp_path, 0, 3, 9), 4)
    assert "profile of 2 steps from step 3" in caplog.text
    assert "no step" not in caplog.text
