"""What an attempt writes of the one before, whose ranks could not."""

from pathlib import Path

import pytest

from meshwright.fault_tolerance.evidence import HeartbeatFile, read_heartbeats
from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Run
from meshwright.spec.run.run_events import read_events
from meshwright.trainer.run.open_run import claim


def attempt_of(run: Run, phases: list[str]) -> dict[int, float]:
    """Leave the heartbeats of an attempt and return when each rank wrote its last."""
    for rank, phase in enumerate(phases):
        heartbeat = HeartbeatFile(run, rank, len(phases))
        heartbeat.mark(phase, step=3)
        heartbeat.close()
    return {rank: beat.time_s for rank, beat in read_heartbeats(run).items()}


def events_of(run: Run) -> dict[str, float]:
    """Return when each event was that a next attempt writes as it begins, by kind."""
    claim(run, Job(), resume=True, overwrite=False)
    return {event.kind: event.time_s for event in read_events(run)}


def test_a_first_attempt_has_none_before_it(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    assert list(events_of(run)) == ["started"]


@pytest.mark.parametrize(
    ("phases", "last"),
    [
        # Rank 1 died in its step; rank 2 learnt it and said so later.
        (["data", "optimizer", "failed"], 1),
        # All failed by themselves.
        (["failed", "failed"], 1),
    ],
)
def test_an_attempt_was_last_seen_when_a_rank_of_it_last_made_progress(
    tmp_path: Path, phases: list[str], last: int
) -> None:
    run = Run(tmp_path / "run")
    seen_s = attempt_of(run, phases)
    found = events_of(run)
    assert set(found) == {"last seen", "started"}
    assert found["last seen"] == seen_s[last]
    assert read_heartbeats(run) == {}


def test_independent_replicas_were_last_seen_when_one_of_them_was(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    (tmp_path / "run" / "replicas" / "2").mkdir(parents=True)
    # Replica 0 was lost for good before.
    seen_s = [attempt_of(run.of_replica(replica), [phase])[0] for replica, phase in enumerate(("data", "failed"))]
    assert events_of(run)["last seen"] == max(seen_s)


def test_an_attempt_that_ended_by_itself_is_not_missed(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    attempt_of(run, ["ended", "ended"])
    assert list(events_of(run)) == ["started"]
