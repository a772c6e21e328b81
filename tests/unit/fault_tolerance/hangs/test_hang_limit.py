"""How long a step may stand still."""

import json
import math
from pathlib import Path

import pytest

from meshwright.fault_tolerance.hangs.hang_limit import HangLimit, are_in_step
from meshwright.spec.job.sections import RunSection
from meshwright.spec.run.rank_records import Heartbeat
from meshwright.spec.run.run import Run


def run_of_steps(folder: Path, *steps_s: float) -> Run:
    run = Run(folder)
    rows = [json.dumps({"step": step, "step_ms": 1e3 * seconds}) for step, seconds in enumerate(steps_s, start=1)]
    run.metrics.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return run


def beat(step: int, phase: str) -> Heartbeat:
    return Heartbeat(
        rank=0,
        num_ranks=1,
        pid=1,
        host="here",
        started_ticks=None,
        step=step,
        phase=phase,
        waits_for_rank=None,
        time_s=0.0,
    )


@pytest.mark.parametrize(
    ("keys", "seconds"),
    [
        ({}, 180.0),
        ({"hang_after_s": 10.0}, 100.0),
        ({"hang_after_s": 50.0}, 110.0),
        ({"hang_limit_s": 7.0}, 7.0),
        ({"hang_limit_s": 0.0}, math.inf),
    ],
)
def test_a_limit_follows_the_usual_step_unless_it_is_given(
    tmp_path: Path, keys: dict[str, float], seconds: float
) -> None:
    run = run_of_steps(tmp_path, 30.0, 5.0, 5.0)
    assert HangLimit.of(run, RunSection.from_dict(keys)).seconds == seconds


@pytest.mark.parametrize(
    ("steps", "phases", "counts"),
    [
        ((14, 14), ("action 0F0", "gradients"), True),
        ((13, 14), ("action 0F0", "gradients"), False),
        ((20, 20), ("action 0F0", "checkpoint"), False),
        ((20, 20), ("validation", "validation"), False),
        ((20, 20), ("data", "agree"), True),
        ((20, 20), ("ended", "ended"), False),
    ],
)
def test_it_counts_in_steps_that_are_warm(steps: tuple[int, int], phases: tuple[str, str], counts: bool) -> None:
    beats = [beat(step, phase) for step, phase in zip(steps, phases, strict=True)]
    assert are_in_step(beats, start_step=10) == counts


def test_no_rank_is_in_no_step() -> None:
    assert not are_in_step([], 0)
