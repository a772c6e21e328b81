"""chaos: a run under faults, which must end as the same run without them, on local ranks."""

import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import RenderableType
from rich.text import Text

from meshwright.app.arguments import JobSource, Positive, checked
from meshwright.app.job.jobs import job_here
from meshwright.app.results.result import Result, viewed
from meshwright.app.train import settled
from meshwright.config.fault_file import faults_text, read_faults
from meshwright.config.load import ResolvedJob, raise_problems
from meshwright.errors import ConfigError, Preempted
from meshwright.fault_tolerance.injection.phase_problems import phase_problems
from meshwright.fault_tolerance.injection.random_faults import random_faults
from meshwright.fault_tolerance.storage.storage_problems import storage_problems
from meshwright.garbage import kept_garbage
from meshwright.log import progress
from meshwright.pages.tables.goodput_table import goodput_page
from meshwright.prover.chaos_table import chaos_notes, chaos_table
from meshwright.spec.fault import Fault, injection_problems
from meshwright.spec.job.job import Job
from meshwright.spec.job.sections import RunSection
from meshwright.spec.problem import Problem
from meshwright.spec.run.chaos_report import ChaosReport

_LIMITS = {"timeout_s": 10.0, "hang_limit_s": 5.0}
"""Keys of [run] where a job leaves the defaults, which are for networks: ranks of one machine answer sooner."""


class ChaosResult(Result, ChaosReport):
    """A chaos run with its views. Data frame: a row for each fault."""

    def _summary(self) -> str:
        how = "survived" if self.holds else "; ".join(self.problems)
        return f"Chaos {self.job.model.source}: {len(self.outcomes)} faults on {self.num_ranks} ranks: {how}"

    def _page(self) -> Iterator[RenderableType]:
        yield chaos_table(self)
        yield ""
        if self.goodput is not None:
            yield from goodput_page(self.goodput)
            yield ""
        for line in chaos_notes(self):
            yield Text(line, style="dim" if self.holds else "bold red")

    def _rows(self) -> list[dict[str, Any]]:
        return [{**one.fault.to_dict(), **one.to_dict()} for one in self.outcomes]

    def _piped_width(self) -> int:
        return chaos_table(self).natural_width


@checked
def chaos(
    job: JobSource,
    *overrides: str,
    faults: Path | str | Sequence[Fault] | None = None,
    random: Positive | None = None,
    seed: int = 0,
    ranks: Positive | None = None,
    shrink: bool = False,
    keep: Path | None = None,
) -> ChaosResult:
    """Return how `job` survives faults: a TOML file of them, a list, or `random` ones, which `seed` determines.

    The job is trained twice on local ranks, without and with the faults, and must end with the same parameters, made of
    the same samples. `shrink` looks for the fewest faults that make a run fail. The runs are kept in the folder `keep`,
    which must not exist; without it, those of a run that failed stay in a temporary folder, which is named. Raises
    ConfigError for a job, or faults, that cannot work.
    """
    if (faults is None) == (random is None):
        raise ConfigError("give either faults (--faults, a file or a list) or a number of random ones (--random)")
    if faults is not None and not faults:
        raise ConfigError("faults = []: give one or more, or a number of random ones (--random)")
    if keep is not None and keep.exists():
        raise ConfigError(f"--keep {keep} exists already: name a new folder")
    source = faults if isinstance(faults, Path | str) else "the list of faults"
    if isinstance(faults, Path | str):
        # Before the job, of which settling takes seconds.
        faults = read_faults(Path(faults))
    folder = Path(tempfile.mkdtemp(prefix="meshwright-chaos-"))
    try:
        with removed_if_stopped(folder):
            resolved, num_ranks = _settled(job_here(job, (*overrides, f"run.dir={folder / 'run'}"), ranks), ranks)
            raise_problems(resolved.path, _bit_problems(resolved.job))
            if faults is None:
                assert random is not None
                faults = random_faults(random, seed, job=resolved.job, num_ranks=num_ranks)
            raise_problems(source, _fault_problems(faults, resolved.job, num_ranks))
            with kept_garbage():
                from meshwright.prover.chaos import ChaosRequest
                from meshwright.prover.chaos import chaos as _chaos
            (folder / "faults.toml").write_text(faults_text(faults), encoding="utf-8")
            request = ChaosRequest(resolved.job, num_ranks, tuple(faults), folder, str(resolved.folder), shrink)
            found = viewed(ChaosResult, _chaos(request))
    except ConfigError:
        shutil.rmtree(folder)
        raise
    if keep is not None:
        shutil.move(folder, keep)
    elif found.holds:
        shutil.rmtree(folder)
    else:
        progress.info("the runs and what they printed are in %s", folder)
    return found


@contextmanager
def removed_if_stopped(folder: Path) -> Iterator[None]:
    """Remove `folder` when a signal ends the block: raises Preempted for SIGTERM, KeyboardInterrupt for Ctrl-C."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise Preempted(signal.Signals(number).name)

    # Python sets handlers in the main thread only.
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, stop) if is_main else None
    try:
        yield
    except (Preempted, KeyboardInterrupt) as error:
        # A process that is being killed may still write into it.
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, KeyboardInterrupt):
            progress.warning("stopped before its end, and its runs are removed: start the command again")
            raise
        name = str(error).partition(":")[0]
        raise Preempted(f"{name}: stopped before its end, and its runs are removed: start the command again") from None
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)


def _bit_problems(job: Job) -> list[Problem]:
    """Return why a run under faults cannot end with the bits of one without; empty where it can."""
    every = job.replicas.sync_every
    if not job.replicas.trains_locally:
        return []
    what = f"replicas.sync_every = {every}: what a lost replica has trained since its last sum is not used"
    return [Problem(what, [{"replicas.sync_every": 1}])]


def _fault_problems(faults: Sequence[Fault], job: Job, num_ranks: int) -> list[str]:
    """Return why faults cannot be injected into this job's run, one message each."""
    return [
        *injection_problems(faults, num_ranks, job.train.steps),
        *phase_problems(faults, job),
        *storage_problems(faults, job, num_ranks),
    ]


def _settled(resolved: ResolvedJob, ranks: int | None) -> tuple[ResolvedJob, int]:
    """Return the job with nothing left open, and its ranks."""
    # A module that the job names may lie next to the job file.
    sys.path.insert(0, str(resolved.folder))
    resolved, num_ranks, _ = settled(resolved, ranks, resume=False, overwrite=False)
    section, default = resolved.job.run, RunSection()
    left = {key: limit_s for key, limit_s in _LIMITS.items() if getattr(section, key) == getattr(default, key)}
    for key, limit_s in left.items():
        progress.info("run.%s = %g here, not %s: set it to change that", key, limit_s, getattr(section, key))
    return replace(resolved, job=resolved.job.replace(run=section.replace(**left))), num_ranks
