"""judge(): how a run under faults compares with the one without, from what both have left on disk."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from meshwright.fault_tolerance.step_ledger import read_ledger
from meshwright.spec.fault import NUMBER_FAULTS, Fault
from meshwright.spec.job.job import Job
from meshwright.spec.run.chaos_report import (
    ChaosReport,
    FaultOutcome,
    Injection,
    Ledger,
    LedgerEntry,
    sample_problem,
)
from meshwright.spec.run.finding import read_findings
from meshwright.spec.run.goodput import read_goodput
from meshwright.spec.run.run import Run
from meshwright.spec.storage_fault import DAMAGES, HARMLESS_DAMAGES


@dataclass(frozen=True)
class EndedRun:
    """A run that has ended."""

    run: Run
    exit_code: int
    parameter_hash: str | None
    """Of the final parameters; None where it did not come to its end."""
    attempts_ended_s: Sequence[float] = field(default_factory=list)
    """In seconds since 1970."""
    took_s: float = 0.0
    num_repairs: int = 0
    """How often it was resumed after an error of the disk."""

    def ledger(self, rank: int) -> list[LedgerEntry]:
        """Return what a rank says that it has done, oldest first."""
        return read_ledger(self.run.ledger(rank))

    def finished(self, rank: int) -> list[LedgerEntry]:
        """Return the steps that a rank has finished, oldest first."""
        return [entry for entry in self.ledger(rank) if entry.is_finished]


def judge(job: Job, num_ranks: int, faults: Sequence[Fault], expected: EndedRun, found: EndedRun) -> ChaosReport:
    """Return how `found`, a run of `job` under `faults`, compares with `expected`, the same without."""
    expected_samples, found_samples = ([run.ledger(rank) for rank in range(num_ranks)] for run in (expected, found))
    others = partial(ranks_of_others, job, num_ranks)
    return ChaosReport(
        job=job,
        num_ranks=num_ranks,
        outcomes=tuple(_outcome(found, number, fault, others(fault.rank)) for number, fault in enumerate(faults)),
        num_attempts=len(found.attempts_ended_s),
        exit_code=found.exit_code,
        expected_hash=expected.parameter_hash or "",
        found_hash=found.parameter_hash,
        sample_problem=None if found.exit_code else sample_problem(expected_samples, found_samples),
        undisturbed_s=expected.took_s,
        disturbed_s=found.took_s,
        goodput=read_goodput(found.run),
        num_repairs=found.num_repairs,
    )


def ranks_of_others(job: Job, num_ranks: int, rank: int) -> list[int]:
    """Return the ranks of the independent replicas that `rank` is no part of; none where they are not independent."""
    if not job.replicas.independent:
        return []
    size = num_ranks // job.layout.resolve(num_ranks).dp_replicate
    return [other for other in range(num_ranks) if other // size != rank // size]


def _outcome(found: EndedRun, number: int, fault: Fault, others: Sequence[int]) -> FaultOutcome:
    """Return what one fault did, from the ledgers of its rank and of other replicas', and the ends of attempts."""
    file = found.run.injected_fault(number)
    if not file.exists():
        return FaultOutcome(fault=fault, injection=None, was_away=_was_away(found, fault, others))
    injection = Injection.from_json(file.read_text(encoding="utf-8"))
    if fault.kind in NUMBER_FAULTS:
        return _number_outcome(found, fault, injection)
    ended_s = min((end_s for end_s in found.attempts_ended_s if end_s > injection.time_s), default=None)
    own = found.finished(fault.rank)
    if fault.kind == "slow-rank" or (fault.is_of_disk and _went_on(own, injection.time_s, ended_s)):
        return FaultOutcome(fault=fault, injection=injection)
    of_others = [found.finished(rank) for rank in others]
    after = [entry for entry in own if ended_s is not None and entry.time_s > ended_s]
    others_s = [entry.time_s for ledger in of_others for entry in ledger if entry.time_s > injection.time_s]
    lost = [_lost_steps(ledger, ended_s or injection.time_s) for ledger in of_others or [own]]
    return FaultOutcome(
        fault=fault,
        injection=injection,
        detected_after_s=None if ended_s is None else ended_s - injection.time_s,
        recovered_after_s=after[0].time_s - injection.time_s if after else None,
        others_after_s=min(others_s) - injection.time_s if others_s else None,
        lost_steps=max(lost) if after else None,
        refused=_is_refused(found, fault, injection, has_others=bool(others)),
    )


def _was_away(found: EndedRun, fault: Fault, others: Sequence[int]) -> bool:
    """Return whether a rank has not come to the end of the step of its fault, which other replicas have finished."""
    if fault.step is None or fault.phase == "restore":
        return False
    was_done = any(entry.step == fault.step for rank in others for entry in found.finished(rank))
    return was_done and all(entry.step != fault.step for entry in found.finished(fault.rank))


def _number_outcome(found: EndedRun, fault: Fault, injection: Injection) -> FaultOutcome:
    """Return what wrong numbers did: when a check found them, and how many steps were recomputed."""
    findings = [one for one in read_findings(found.run.findings) if one.kind == "corruption"]
    found_s = min((one.time_s for one in findings if one.time_s >= injection.time_s), default=None)
    if found_s is None:
        return FaultOutcome(fault=fault, injection=injection)
    own = found.finished(fault.rank)
    after = [entry for entry in own if entry.time_s > found_s]
    return FaultOutcome(
        fault=fault,
        injection=injection,
        detected_after_s=found_s - injection.time_s,
        recovered_after_s=after[0].time_s - injection.time_s if after else None,
        lost_steps=_lost_steps(own, found_s) if after else None,
    )


def _lost_steps(ledger: Ledger, ended_s: float) -> int:
    """Return the steps of a rank that were finished when an attempt ended, and again later."""
    before = max((entry.step for entry in ledger if entry.time_s <= ended_s), default=0)
    after = next((entry.step for entry in ledger if entry.time_s > ended_s), before + 1)
    return max(0, before - after + 1)


def _went_on(ledger: Sequence[LedgerEntry], from_s: float, to_s: float | None) -> bool:
    """Return whether a rank finished steps between a fault and the end of the attempt."""
    return any(from_s < entry.time_s <= (to_s or from_s) for entry in ledger)


def _is_refused(found: EndedRun, fault: Fault, injection: Injection, *, has_others: bool) -> bool | None:
    """Return whether the checkpoint that a fault damaged was set aside; None for no damage, or harmless.

    None also where it may never have been read: the run did not come to its end, or a lost replica got the state from
    another one.
    """
    if fault.kind not in DAMAGES or fault.kind in HARMLESS_DAMAGES or found.exit_code:
        return None
    is_refused = any(found.run.checkpoints.glob(f"{injection.damaged}.damaged-*"))
    return None if has_others and not is_refused else is_refused
