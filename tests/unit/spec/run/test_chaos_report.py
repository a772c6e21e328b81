"""The oracles of a chaos run: which steps count, and what is wrong with them."""

import pytest

from meshwright.prover.chaos_table import detection_column
from meshwright.spec.fault import Fault
from meshwright.spec.job.job import Job
from meshwright.spec.run.chaos_report import (
    ChaosReport,
    FaultOutcome,
    Injection,
    LedgerEntry,
    lineage,
    sample_problem,
)

FAULT = Fault(kind="crash", rank=0, step=2)


def ledger(*steps: int, wrong: int | None = None) -> list[LedgerEntry]:
    """Return the entries of these steps, one of them of other samples."""
    samples = {step: f"other-{step}" if step == wrong else f"samples-{step}" for step in steps}
    return [LedgerEntry(step=step, samples={0: samples[step]}, time_s=float(place)) for place, step in enumerate(steps)]


def report(**changes: object) -> ChaosReport:
    """Return a run that survived, but for `changes`."""
    injection = Injection(time_s=1.0, step=2, mark="data")
    survived = ChaosReport(
        job=Job(),
        num_ranks=1,
        outcomes=(FaultOutcome(fault=FAULT, injection=injection),),
        num_attempts=2,
        exit_code=0,
        expected_hash="a",
        found_hash="a",
        sample_problem=None,
        undisturbed_s=1.0,
        disturbed_s=2.0,
    )
    return survived.replace(**changes)


def test_steps_before_a_restart_count_as_far_as_they_were_restored() -> None:
    entries = ledger(1, 2, 3, 4, 3, 4, 5)
    assert [(entry.step, entry.time_s) for entry in lineage(entries)] == [
        (1, 0.0),
        (2, 1.0),
        (3, 4.0),
        (4, 5.0),
        (5, 6.0),
    ]


@pytest.mark.parametrize(
    ("found", "what"),
    [
        (ledger(1, 2, 3), None),
        (ledger(1, 2, 3, 2, 3), None),
        (ledger(1, 3), "step 2 is missing"),
        (ledger(1, 2), "step 3 is missing"),
        (ledger(1, 2, 3, wrong=2), "step 2 read other samples, or the same ones with other values, at slot 0"),
        (ledger(1, 2, 3, 4), "step 4 was done, and there is none"),
    ],
)
def test_a_lost_or_another_sample_is_found(found: list[LedgerEntry], what: str | None) -> None:
    problem = sample_problem([ledger(1, 2, 3)], [found])
    assert (problem is None) == (what is None)
    assert what is None or (problem is not None and what in problem)


def test_ranks_may_share_the_samples_in_another_way_and_use_each_once() -> None:
    def entry(step: int, *slots: int, epoch: int = 0) -> LedgerEntry:
        samples = {slot: f"{step}-{slot}" for slot in slots}
        return LedgerEntry(step=step, samples=samples, time_s=0.0, epoch=epoch)

    expected = [[entry(1, 0, 2)], [entry(1, 1, 3)]]
    assert sample_problem(expected, [[entry(1, 0, 1, 2, 3)], []]) is None
    assert sample_problem(expected, [[entry(1, 0, 2)], [entry(1, 1)]]) == (
        "step 1 was made without the samples of slot 3"
    )
    twice = sample_problem(expected, [[entry(1, 0, 2)], [entry(1, 1, 2, 3)]])
    assert twice is not None
    assert "twice, at slot 2" in twice
    # One replica was lost in the step, which the other did again with a newer quorum.
    assert (
        sample_problem(expected, [[entry(1, 0, 2, epoch=1), entry(1, 0, 1, 2, 3, epoch=2)], [entry(1, 1, 3, epoch=1)]])
        is None
    )


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"found_hash": "b"}, "the final parameters are not those"),
        ({"exit_code": 75, "found_hash": None}, "ended with exit code 75"),
        ({"sample_problem": "rank 0: step 2 is missing"}, "rank 0: step 2 is missing"),
        ({"outcomes": (FaultOutcome(fault=FAULT, injection=None),)}, "never came to: crash of rank 0 of step 2"),
    ],
)
def test_each_oracle_can_fail(changes: dict[str, object], what: str) -> None:
    assert report().holds
    failed = report(**changes)
    assert not failed.holds
    assert what in "; ".join(failed.problems)


@pytest.mark.parametrize(
    ("kinds", "column"),
    [
        (["crash"], "all ended#"),
        (["nan-gradient"], "found after#"),
        (["crash", "flip-parameter"], "all ended or found#"),
    ],
)
def test_no_rank_is_said_to_end_for_a_wrong_number(kinds: list[str], column: str) -> None:
    outcomes = [FaultOutcome(fault=FAULT.replace(kind=kind), injection=None, detected_after_s=1.0) for kind in kinds]
    assert detection_column(report(outcomes=tuple(outcomes))) == column
