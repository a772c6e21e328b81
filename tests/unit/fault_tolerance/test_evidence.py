"""What a rank wrote before its last mark says where it was, not where it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshwright.fault_tolerance.evidence import look
from meshwright.spec.run.rank_records import EndedBySignal, FlightRecord, Frame, Heartbeat
from meshwright.spec.run.run import Manifest, Run
from written_runs import STEPS, write_run

MARK_S = 1000.0
STACK = 'Current thread 0x1 (most recent call first):\n  File "mine.py", line 7 in wait\n'


def run_with_record(folder: Path, record_s: float, error: str | None = None) -> Run:
    """Return a run of one rank whose loop made its last mark at MARK_S and whose record was written at `record_s`."""
    run = Run(folder)
    beat = Heartbeat(
        rank=0,
        num_ranks=1,
        pid=1,
        host="elsewhere",
        started_ticks=1,
        step=3,
        phase="data",
        waits_for_rank=None,
        time_s=MARK_S,
    )
    stack = [Frame(file="old.py", line=5, function="read")]
    record = FlightRecord(
        rank=0, pid=1, reason="asked", time_s=record_s, groups=[], collectives=[], stack=stack, error=error
    )
    for path, text in ((run.heartbeat(0), beat.to_json()), (run.flight_record(0), record.to_json())):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    run.stack(0).write_text(STACK, encoding="utf-8")
    os.utime(run.stack(0), (record_s, record_s))
    return run


@pytest.mark.parametrize(
    ("record_s", "error", "is_current"),
    [(MARK_S + 5, None, True), (MARK_S - 5, None, False), (MARK_S - 5, "RuntimeError: bad", True)],
)
def test_a_record_older_than_the_last_mark_is_left_out(
    tmp_path: Path, record_s: float, error: str | None, is_current: bool
) -> None:
    evidence = look(run_with_record(tmp_path, record_s, error))
    assert (list(evidence.records) == [0]) == is_current
    assert evidence.stale == (() if is_current else (0,))
    assert [frame.file for frame in evidence.stacks[0]] == (["old.py"] if is_current else [])


def test_a_stack_that_is_newer_than_the_last_mark_is_read_where_the_record_is_not(tmp_path: Path) -> None:
    run = run_with_record(tmp_path, MARK_S - 5)
    os.utime(run.stack(0), (MARK_S + 1, MARK_S + 1))
    assert [frame.file for frame in look(run).stacks[0]] == ["mine.py"]


def test_how_the_run_ended_is_in_its_manifest(tmp_path: Path) -> None:
    run = Run(write_run(tmp_path / "run", STEPS))
    assert look(run).exit_code is None
    ended = Manifest.from_json(run.manifest.read_text(encoding="utf-8")).replace(exit=75)
    run.manifest.write_text(ended.to_json(), encoding="utf-8")
    assert look(run).exit_code == 75
    run.manifest.write_text("{", encoding="utf-8")
    assert look(run).exit_code is None


def test_a_signal_is_of_the_process_that_wrote_the_heartbeat(tmp_path: Path) -> None:
    run = run_with_record(tmp_path, MARK_S)
    assert look(run).signals == {}
    run.ended_by_signal.write_text(EndedBySignal(by_pid={1: "SIGABRT", 2: "SIGKILL"}).to_json(), encoding="utf-8")
    assert look(run).signals == {0: "SIGABRT"}
    run.ended_by_signal.write_text("{", encoding="utf-8")
    assert look(run).signals == {}
