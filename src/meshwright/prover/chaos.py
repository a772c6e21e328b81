"""chaos(): a run with faults next to the same run without, on local ranks and the real trainer."""

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.errors import MeshwrightError
from meshwright.fault_tolerance.step_ledger import read_ledger
from meshwright.log import progress
from meshwright.prover.quiet_output import output_in
from meshwright.prover.smallest import smallest
from meshwright.spec.fault import NUMBER_FAULTS, Fault
from meshwright.spec.job.job import Job
from meshwright.spec.run.chaos_report import (
    ChaosReport,
    FaultOutcome,
    Injection,
    LedgerEntry,
    lineage,
    sample_problem,
)
from meshwright.spec.run.finding import read_findings
from meshwright.spec.run.goodput import goodput, read_step_times
from meshwright.spec.run.run import Run
from meshwright.trainer.launch.launch import train_locally
from meshwright.trainer.launch.rank import RankConfig
from meshwright.trainer.run.run_folder import read_manifest
from meshwright.units import counted, format_duration

_SPARE_RESTARTS = 2
"""Restarts beyond one for each fault: a fault may fall into the restart after another."""


@dataclass(frozen=True)
class ChaosRequest:
    """A resolved job, and what shall befall it."""

    job: Job
    num_ranks: int
    faults: Sequence[Fault]
    folder: Path
    """Where the runs are written."""
    module_dir: str
    """The job file's folder."""
    shrinks: bool = False
    """Whether, where the run fails, the fewest faults that make it fail are looked for."""


@dataclass
class _Run:
    """A run that has ended."""

    run: Run
    exit_code: int
    attempts_ended_s: list[float] = field(default_factory=list)
    """In seconds since 1970."""
    took_s: float = 0.0

    def ledger(self, rank: int) -> list[LedgerEntry]:
        return read_ledger(self.run.ledger(rank))

    @property
    def parameter_hash(self) -> str | None:
        manifest = read_manifest(self.run)
        return None if manifest is None or self.exit_code else manifest.results.get("parameter_hash")


def chaos(request: ChaosRequest) -> ChaosReport:
    """Return how the run with the faults compares with one without.

    Raises MeshwrightError where already the run without faults fails.
    """
    expected = _train(request, "without-faults", ())
    if expected.exit_code:
        log = request.folder / f"{expected.run.folder.name}.log"
        raise MeshwrightError(f"already the run without faults ended with exit code {expected.exit_code}: see {log}")
    progress.info("without faults: %s", format_duration(expected.took_s))
    found = _train(request, "with-faults", request.faults)
    progress.info("with %s: %s", counted(len(request.faults), "fault"), format_duration(found.took_s))
    report = _judge(request, request.faults, expected, found)
    if report.holds or not request.shrinks or len(request.faults) == 1:
        return report
    return report.replace(smallest=tuple(_shrink(request, expected)))


def _train(request: ChaosRequest, name: str, faults: Sequence[Fault]) -> _Run:
    """Train the job under `faults` in a new run folder; what it prints is written to NAME.log."""
    folder = request.folder / name
    section = request.job.run.replace(
        dir=str(folder), max_restarts=len(faults) + _SPARE_RESTARTS if faults else 0, parameter_hash=True
    )
    config = RankConfig(
        job=request.job.replace(run=section),
        run_dir=str(folder),
        module_dir=request.module_dir,
        faults=tuple(faults),
    )
    ended: list[float] = []
    started_s = time.monotonic()
    with output_in(request.folder / f"{name}.log"):
        code = train_locally(config, request.num_ranks, lambda: ended.append(time.time()))
    return _Run(Run(folder), code, ended, time.monotonic() - started_s)


def _judge(request: ChaosRequest, faults: Sequence[Fault], expected: _Run, found: _Run) -> ChaosReport:
    problems = (
        sample_problem(expected.ledger(rank), lineage(found.ledger(rank)), rank) for rank in range(request.num_ranks)
    )
    return ChaosReport(
        job=request.job,
        num_ranks=request.num_ranks,
        outcomes=tuple(_outcome(found, number, fault) for number, fault in enumerate(faults)),
        num_attempts=len(found.attempts_ended_s),
        exit_code=found.exit_code,
        expected_hash=expected.parameter_hash or "",
        found_hash=found.parameter_hash,
        sample_problem=None if found.exit_code else next(filter(None, problems), None),
        undisturbed_s=expected.took_s,
        disturbed_s=found.took_s,
        goodput=goodput(read_step_times(found.run)),
    )


def _outcome(found: _Run, number: int, fault: Fault) -> FaultOutcome:
    """Return what one fault did, from the ledger of its rank and the ends of attempts."""
    file = found.run.injected_fault(number)
    if not file.exists():
        return FaultOutcome(fault=fault, injection=None)
    injection = Injection.from_json(file.read_text(encoding="utf-8"))
    if fault.kind == "slow-rank":
        return FaultOutcome(fault=fault, injection=injection)
    if fault.kind in NUMBER_FAULTS:
        return _number_outcome(found, fault, injection)
    ended_s = min((end_s for end_s in found.attempts_ended_s if end_s > injection.time_s), default=None)
    ledger = found.ledger(fault.rank)
    before = [entry for entry in ledger if entry.time_s <= (ended_s or injection.time_s)]
    after = [entry for entry in ledger if ended_s is not None and entry.time_s > ended_s]
    return FaultOutcome(
        fault=fault,
        injection=injection,
        detected_after_s=None if ended_s is None else ended_s - injection.time_s,
        recovered_after_s=after[0].time_s - injection.time_s if after else None,
        lost_steps=(before[-1].step if before else 0) - (after[0].step - 1) if after else None,
    )


def _number_outcome(found: _Run, fault: Fault, injection: Injection) -> FaultOutcome:
    """Return what wrong numbers did: when a check found them, and how many steps were recomputed."""
    events = [event for event in read_findings(found.run.findings) if event.kind == "corruption"]
    found_s = [event.time_s for event in events if event.time_s >= injection.time_s]
    if not found_s:
        return FaultOutcome(fault=fault, injection=injection)
    before, after = split_at(found.ledger(fault.rank), found_s[0])
    return FaultOutcome(
        fault=fault,
        injection=injection,
        detected_after_s=found_s[0] - injection.time_s,
        recovered_after_s=after[0].time_s - injection.time_s if after else None,
        lost_steps=max(0, (before[-1].step if before else 0) - (after[0].step - 1)) if after else None,
    )


def split_at(entries: Sequence[LedgerEntry], time_s: float) -> tuple[list[LedgerEntry], list[LedgerEntry]]:
    """Return the entries of a ledger up to a moment, and those after it."""
    return [one for one in entries if one.time_s <= time_s], [one for one in entries if one.time_s > time_s]


def _shrink(request: ChaosRequest, expected: _Run) -> list[Fault]:
    """Return the fewest of the request's faults with which the run still fails, each tried in a run of its own."""
    number = 0

    def fails(faults: Sequence[Fault]) -> bool:
        nonlocal number
        number += 1
        name = f"smaller-{number}"
        report = _judge(request, faults, expected, found := _train(request, name, faults))
        progress.info("%s of the faults: %s", len(faults), "holds" if report.holds else "fails")
        if report.holds:
            shutil.rmtree(found.run.folder)
        return not report.holds

    return smallest(request.faults, fails)
