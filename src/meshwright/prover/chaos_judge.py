"""judge(): how a run under faults compares with the one without, from what both have left on disk."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from meshwright.fault_tolerance.step_ledger import read_ledger
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
from meshwright.spec.run.goodput import goodput, read_step_times
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


def judge(job: Job, num_ranks: int, faults: Sequence[Fault], expected: EndedRun, found: EndedRun) -> ChaosReport:
    """Return how `found`, a run of `job` under `faults`, compares with `expected`, the same without."""
    problems = (sample_problem(expected.ledger(rank), lineage(found.ledger(rank)), rank) for rank in range(num_ranks))
    return ChaosReport(
        job=job,
        num_ranks=num_ranks,
        outcomes=tuple(_outcome(found, number, fault) for number, fault in enumerate(faults)),
        num_attempts=len(found.attempts_ended_s),
        exit_code=found.exit_code,
        expected_hash=expected.parameter_hash or "",
        found_hash=found.parameter_hash,
        sample_problem=None if found.exit_code else next(filter(None, problems), None),
        undisturbed_s=expected.took_s,
        disturbed_s=found.took_s,
        goodput=goodput(read_step_times(found.run)),
        num_repairs=found.num_repairs,
    )


def _outcome(found: EndedRun, number: int, fault: Fault) -> FaultOutcome:
    """Return what one fault did, from the ledger of its rank and the ends of attempts."""
    file = found.run.injected_fault(number)
    if not file.exists():
        return FaultOutcome(fault=fault, injection=None)
    injection = Injection.from_json(file.read_text(encoding="utf-8"))
    ended_s = min((end_s for end_s in found.attempts_ended_s if end_s > injection.time_s), default=None)
    ledger = found.ledger(fault.rank)
    if fault.kind == "slow-rank" or (fault.is_of_disk and _went_on(ledger, injection.time_s, ended_s)):
        return FaultOutcome(fault=fault, injection=injection)
    before = [entry for entry in ledger if entry.time_s <= (ended_s or injection.time_s)]
    after = [entry for entry in ledger if ended_s is not None and entry.time_s > ended_s]
    return FaultOutcome(
        fault=fault,
        injection=injection,
        detected_after_s=None if ended_s is None else ended_s - injection.time_s,
        recovered_after_s=after[0].time_s - injection.time_s if after else None,
        lost_steps=(before[-1].step if before else 0) - (after[0].step - 1) if after else None,
        refused=_is_refused(found, fault, injection),
    )


def _went_on(ledger: Sequence[LedgerEntry], from_s: float, to_s: float | None) -> bool:
    """Return whether a rank finished steps between a fault and the end of the attempt."""
    return any(from_s < entry.time_s <= (to_s or from_s) for entry in ledger)


def _is_refused(found: EndedRun, fault: Fault, injection: Injection) -> bool | None:
    """Return whether the checkpoint that a fault damaged was set aside; None for no damage, or harmless.

    None also where the run did not come to its end, and so perhaps not to the checkpoint.
    """
    if fault.kind not in DAMAGES or fault.kind in HARMLESS_DAMAGES or found.exit_code:
        return None
    return any(found.run.checkpoints.glob(f"{injection.damaged}.damaged-*"))
