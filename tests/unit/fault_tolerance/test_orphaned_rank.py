"""How long a rank may outlive its launcher."""

import time
from pathlib import Path

import pytest

from meshwright.fault_tolerance.evidence import HeartbeatFile, read_heartbeats
from meshwright.fault_tolerance.orphaned_rank import Patience, outlive_launcher
from meshwright.spec.run.rank_records import Heartbeat
from meshwright.spec.run.run import Run
from meshwright.spec.run.run_events import read_events


def beat(phase: str, time_s: float) -> Heartbeat:
    return Heartbeat(
        rank=0,
        num_ranks=1,
        pid=1,
        host="h",
        started_ticks=None,
        step=5,
        phase=phase,
        waits_for_rank=None,
        time_s=time_s,
    )


@pytest.mark.parametrize(
    ("phase", "moved_s", "waited_s", "usual_s", "is_over"),
    [
        ("gradients", 0.0, 1.0, 0.1, False),
        ("gradients", 0.0, 6.0, 0.1, True),  # it does not move
        ("gradients", -60.0, 0.0, 0.1, True),  # it hung before
        ("gradients", 0.0, 6.0, 4.0, False),  # a slow step
        ("gradients", 5.0, 14.0, 4.0, False),
        ("gradients", 16.0, 16.0, 4.0, True),  # it moves, and does not stop
        ("restore", -60.0, 14.0, 0.1, False),
        ("restore", -60.0, 16.0, 0.1, True),
        ("checkpoint", 0.0, 119.0, 0.1, False),
        ("checkpoint", 0.0, 121.0, 0.1, True),
    ],
)
def test_a_rank_gets_time_to_save_and_none_to_hang(
    phase: str, moved_s: float, waited_s: float, usual_s: float, is_over: bool
) -> None:
    patience = Patience(died_s=1000.0, grace_s=120.0, usual_step_s=usual_s)
    assert patience.is_over(beat(phase, 1000.0 + moved_s), 1000.0 + waited_s) == is_over


def test_a_rank_before_its_first_heartbeat_gets_the_longest_time() -> None:
    patience = Patience(died_s=0.0, grace_s=120.0, usual_step_s=0.0)
    assert [patience.is_over(None, second) for second in (14.0, 16.0)] == [False, True]


@pytest.mark.parametrize("is_replica", [False, True])
def test_a_hang_that_ends_with_the_launcher_is_recorded(tmp_path: Path, is_replica: bool) -> None:
    run = Run(tmp_path)
    own = run.of_replica(1) if is_replica else run
    HeartbeatFile(own, rank=0, num_ranks=1).mark("gradients", step=9)
    late = read_heartbeats(own)[0].replace(time_s=time.time() - 60.0)
    own.heartbeat(0).write_text(late.to_json(), encoding="utf-8")

    def never(seconds: float) -> None:
        raise AssertionError("it waited")

    outlive_launcher(run, own, 120.0, never)
    (event,) = read_events(run)
    assert event.kind == "hang"
    assert event.duration_s >= 60.0
