"""What is read of a run under faults: when it recovered, what it lost, and whether damage was refused."""

import json
from pathlib import Path

import pytest

from meshwright.prover.chaos_judge import EndedRun, judge
from meshwright.spec.fault import Fault, FaultKind
from meshwright.spec.job.job import Job
from meshwright.spec.run.chaos_report import FaultOutcome, Injection
from meshwright.spec.run.run import Run

UNDISTURBED = [(step, float(step)) for step in range(1, 9)]
RESTARTED = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (3, 13.0), (4, 14.0), (5, 15.0), (6, 16.0), (7, 17.0), (8, 18.0)]
"""Restored after step 2."""


def ended_run(folder: Path, ledger: list[tuple[int, float]], ends_s: tuple[float, ...], exit_code: int = 0) -> EndedRun:
    run = Run(folder)
    write_ledger(run, 0, ledger)
    return EndedRun(run, exit_code, None if exit_code else "bits", ends_s)


def write_ledger(run: Run, rank: int, ledger: list[tuple[int, float]]) -> None:
    run.ledger(rank).parent.mkdir(parents=True, exist_ok=True)
    samples = {0: "one"} if rank == 0 else {}
    lines = [json.dumps({"step": step, "samples": samples, "time_s": time_s}) + "\n" for step, time_s in ledger]
    run.ledger(rank).write_text("".join(lines), encoding="utf-8")


def outcome_of(
    tmp_path: Path, fault: Fault, found: EndedRun, damaged: str | None = None
) -> tuple[FaultOutcome, list[str]]:
    file = found.run.injected_fault(0)
    file.parent.mkdir()
    file.write_text(Injection(time_s=4.5, step=5, mark="data", damaged=damaged).to_json(), encoding="utf-8")
    expected = ended_run(tmp_path / "expected", UNDISTURBED, (9.0,))
    report = judge(Job.from_dict({}), 1, [fault], expected, found)
    return report.outcomes[0], report.problems


def test_a_crash_is_timed_from_the_fault_and_its_lost_steps_counted(tmp_path: Path) -> None:
    found = ended_run(tmp_path / "found", RESTARTED, (5.0, 19.0))
    outcome, problems = outcome_of(tmp_path, Fault(kind="crash", rank=0, step=5), found)
    assert (outcome.detected_after_s, outcome.recovered_after_s, outcome.lost_steps) == (0.5, 8.5, 2)
    assert outcome.refused is None
    assert not problems


def test_a_disk_error_that_training_survives_costs_nothing(tmp_path: Path) -> None:
    found = ended_run(tmp_path / "found", UNDISTURBED, (9.0,))
    outcome, problems = outcome_of(tmp_path, Fault(kind="no-space", rank=0, step=3), found)
    assert (outcome.detected_after_s, outcome.recovered_after_s, outcome.lost_steps) == (None, None, None)
    assert not problems


@pytest.mark.parametrize(
    ("kind", "is_set_aside", "exit_code", "refused"),
    [
        ("flip-bit", True, 0, True),
        ("flip-bit", False, 0, False),
        ("extra-file", False, 0, None),
        ("flip-bit", False, 70, None),
    ],
)
def test_damage_must_have_been_set_aside(
    tmp_path: Path, kind: FaultKind, is_set_aside: bool, exit_code: int, refused: bool | None
) -> None:
    found = ended_run(tmp_path / "found", RESTARTED, (5.0, 19.0), exit_code)
    if is_set_aside:
        (found.run.checkpoints / "step-4.damaged-0").mkdir(parents=True)
    outcome, problems = outcome_of(tmp_path, Fault(kind=kind, rank=0, step=5), found, "step-4")
    assert outcome.refused is refused
    assert any("step-4 was damaged" in problem for problem in problems) == (refused is False)


@pytest.mark.parametrize(
    ("step", "is_independent", "was_away"), [(4, True, True), (3, True, False), (9, True, False), (4, False, False)]
)
def test_a_fault_of_a_step_that_others_did_without_its_replica_is_no_problem(
    tmp_path: Path, step: int, is_independent: bool, was_away: bool
) -> None:
    """Rank 1 is away in steps 4 and 5 of 8."""
    runs = [ended_run(tmp_path / name, UNDISTURBED, (9.0,)) for name in ("expected", "found")]
    for run in runs:
        write_ledger(run.run, 1, [one for one in UNDISTURBED if one[0] not in (4, 5)])
    layout = {"dp_replicate": 2, "dp_shard": 1}
    job = Job.from_dict({"layout": layout, "replicas": {"independent": is_independent}})
    report = judge(job, 2, [Fault(kind="crash", rank=1, step=step)], *runs)
    assert report.outcomes[0].was_away is was_away
    assert report.holds is was_away


@pytest.mark.parametrize("is_set_aside", [False, True])
def test_damage_that_no_replica_had_to_read_is_no_problem(tmp_path: Path, is_set_aside: bool) -> None:
    """A lost one gets the state from another; the checkpoint is read only where all are lost."""
    runs = [ended_run(tmp_path / name, UNDISTURBED, (9.0,)) for name in ("expected", "found")]
    for run in runs:
        write_ledger(run.run, 1, UNDISTURBED)
    file = runs[1].run.injected_fault(0)
    file.parent.mkdir()
    file.write_text(Injection(time_s=4.5, step=5, mark="data", damaged="step-4").to_json(), encoding="utf-8")
    if is_set_aside:
        (runs[1].run.checkpoints / "step-4.damaged-0").mkdir(parents=True)
    job = Job.from_dict({"layout": {"dp_replicate": 2, "dp_shard": 1}, "replicas": {"independent": True}})
    report = judge(job, 2, [Fault(kind="flip-bit", rank=1, step=5)], *runs)
    assert report.outcomes[0].refused is (True if is_set_aside else None)
    assert report.holds
