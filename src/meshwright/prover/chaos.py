"""chaos(): a run with faults next to the same run without, on local ranks and the real trainer."""

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import ConfigError, ExitCode, MeshwrightError, Retryable
from meshwright.log import progress
from meshwright.prover.chaos_judge import EndedRun, judge
from meshwright.prover.quiet_output import output_in
from meshwright.prover.smallest import smallest
from meshwright.spec.fault import Fault
from meshwright.spec.job.job import Job
from meshwright.spec.run.chaos_report import ChaosReport
from meshwright.spec.run.run import Run
from meshwright.spec.storage_fault import DISK_FAULTS
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


def chaos(request: ChaosRequest) -> ChaosReport:
    """Return how the run with the faults compares with one without.

    Raises MeshwrightError, of that exit code, where already the run without faults fails.
    """
    expected = _train(request, "without-faults", ())
    if expected.exit_code:
        raise _failed_without(expected.exit_code, request.folder / f"{expected.run.folder.name}.log")
    progress.info("without faults: %s", format_duration(expected.took_s))
    found = _train(request, "with-faults", request.faults)
    progress.info("with %s: %s", counted(len(request.faults), "fault"), format_duration(found.took_s))
    report = judge(request.job, request.num_ranks, request.faults, expected, found)
    if report.holds or not request.shrinks or len(request.faults) == 1:
        return report
    return report.replace(smallest=tuple(_shrink(request, expected)))


def _train(request: ChaosRequest, name: str, faults: Sequence[Fault]) -> EndedRun:
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
        num_errors, num_repairs = 0, 0
        while code is ExitCode.DO_NOT_RETRY and (now := _num_disk_errors(config.run, faults)) > num_errors:
            # Exit code 70 leaves it to a person to repair the disk and resume.
            num_errors, num_repairs = now, num_repairs + 1
            resumed = config.replace(resume=True)
            code = train_locally(resumed, request.num_ranks, lambda: ended.append(time.time()))
    manifest = read_manifest(config.run)
    digest = None if manifest is None or code else manifest.results.get("parameter_hash")
    return EndedRun(config.run, code, digest, ended, time.monotonic() - started_s, num_repairs)


def _num_disk_errors(run: Run, faults: Sequence[Fault]) -> int:
    """Return how many errors of the disk have happened."""
    return sum(one.kind in DISK_FAULTS and run.injected_fault(number).exists() for number, one in enumerate(faults))


def _shrink(request: ChaosRequest, expected: EndedRun) -> list[Fault]:
    """Return the fewest of the request's faults with which the run still fails, each tried in a run of its own."""
    number = 0

    def fails(faults: Sequence[Fault]) -> bool:
        nonlocal number
        number += 1
        name = f"smaller-{number}"
        found = _train(request, name, faults)
        report = judge(request.job, request.num_ranks, faults, expected, found)
        progress.info("%s of the faults: %s", len(faults), "holds" if report.holds else "fails")
        if report.holds:
            shutil.rmtree(found.run.folder)
        return not report.holds

    return smallest(request.faults, fails)


def _failed_without(exit_code: int, log: Path) -> MeshwrightError:
    """Return the error of a job that fails without any fault, of its exit code, with the last one in its log."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    reason = f": {said[-1]}" if said else ""
    kinds: dict[int, type[MeshwrightError]] = {ExitCode.BAD_INPUT: ConfigError, ExitCode.RETRY: Retryable}
    return kinds.get(exit_code, MeshwrightError)(
        f"already the run without faults ended with exit code {exit_code} (see {log}){reason}"
    )
