"""Run folder: its lock, its identity and its manifest, which is always written whole, by rename."""

import fcntl
import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshwright.config.paths import with_absolute_paths
from meshwright.errors import ConfigError, Retryable
from meshwright.fault_tolerance.evidence import process_state, read_heartbeats
from meshwright.fault_tolerance.orphaned_rank import end_frozen_orphans, end_orphans
from meshwright.log import logger
from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Attempt, Manifest, Run, manifest_fault

# Keys that must not change between attempts of one run.
_IDENTITY = (
    "model",
    "adapter",
    "data",
    "dpo",
    "train.seed",
    "train.seq_len",
    "train.global_batch_size",
    "train.global_batch_tokens",
)
# Keys that say what a checkpoint's optimizer states are, and in which format.
_STATES = ("optimizer.name", "optimizer.state_dtype")
# Keys that name files, which may be moved, or prepared: a checkpoint compares what is in them.
_COMPARED_BY_CONTENT = ("data.source", "data.tokenizer", "data.chat_template")
# Keys that do not affect numerics, whose changes are not logged.
_WITHOUT_EFFECT = ("data.cache_dir", "data.num_workers", "data.prefetch_batches")
_UNREMARKABLE = ("run.", *_WITHOUT_EFFECT, "train.stop_after", "checkpoint.")


def now() -> str:
    """Return the UTC time in ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_manifest(run: Run) -> Manifest | None:
    """Return the run's manifest or None; raises ConfigError if it cannot be read."""
    try:
        return Manifest.from_json(run.manifest.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{run.manifest} cannot be read ({error.strerror}): choose another run.dir") from error
    except (UnicodeDecodeError, ValidationError) as error:
        raise ConfigError(
            f"{run.manifest} {manifest_fault(error)}: restore it from a copy, or choose another run.dir"
        ) from error


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace `path` atomically: a reader or a crash sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):  # it would keep the room of a full disk
            temporary.unlink()
        raise


def hold(run: Run) -> int:
    """Return a descriptor that locks the run folder until it is closed or this process ends.

    Raises Retryable while another process holds the lock.
    """
    descriptor = os.open(run.folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise _taken(run) from None
    except OSError as error:
        logger.warning("%s cannot be locked (%s): let no other process train into it", run.folder, error.strerror)
    return descriptor


def hold_alone(run: Run, grace_s: float) -> int:
    """Return the lock as `hold` does once ranks that an earlier launch left on this host have ended, or were killed.

    Raises Retryable where they train on.
    """
    try:
        descriptor = hold(run)
    except Retryable:
        if not end_frozen_orphans(run):
            raise
        descriptor = hold(run)
    if end_orphans(run, grace_s):
        os.close(descriptor)
        raise _taken(run)
    return descriptor


def _taken(run: Run) -> Retryable:
    return Retryable(
        f"another process is training into {run.folder}{_writers(run)}: wait until it has ended, or choose another "
        "run.dir; ranks whose launcher was killed end by themselves, within seconds unless they write a checkpoint"
    )


def _writers(run: Run) -> str:
    """Return the process ids of the ranks that are alive on this host, in brackets; "" where none is known."""
    found = [beat for one in (run, *run.replicas()) for beat in read_heartbeats(one).values()]
    beats = [beat for beat in found if process_state(beat) in ("running", "stopped")]
    pids = ", ".join(str(beat.pid) for beat in beats)
    return f" (ranks with the process ids {pids})" if pids else ""


def set_aside(run: Run, grace_s: float) -> Path | None:
    """Rename an existing run folder and return its new name; ranks that were left may take `grace_s` to save."""
    if not run.folder.exists():
        return None
    os.close(hold_alone(run, grace_s))
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    aside = run.folder.with_name(f"{run.folder.name}.replaced-{stamp}")
    run.folder.rename(aside)
    return aside


def require_same_run(run: Run, job: Job) -> list[str]:
    """Return how `job` differs from the run's; raises ConfigError for a change of an identity key, and of one that
    decides the format of what its checkpoints hold.
    """
    previous = read_manifest(run)
    if previous is None:
        return []
    old, new = with_absolute_paths(previous.job), with_absolute_paths(job)
    changes = _changes(old.to_dict(), new.to_dict())
    compared = _COMPARED_BY_CONTENT if run.checkpoint_steps() else ()
    allowed = (*_UNREMARKABLE, *compared)
    breaking = [change for change in changes if change.startswith(_IDENTITY) and not change.startswith(allowed)]
    if breaking:
        raise ConfigError(
            f"cannot resume {run.folder}, the job is another one: {'; '.join(breaking)}: change it back, "
            "or start a new run with another run.dir"
        )
    if run.checkpoint_steps() and (other := [change for change in changes if _changes_states(change, old, new)]):
        raise ConfigError(
            f"cannot resume {run.folder}, its checkpoints hold other states: {'; '.join(other)}: change it back, or "
            "start a new run with another run.dir, from exported weights (model.initial_weights) if you like"
        )
    return [change for change in changes if not change.startswith(_UNREMARKABLE)]


def _changes_states(change: str, old: Job, new: Job) -> bool:
    is_wider = "float64" in (old.precision.compute, new.precision.compute)
    return change.startswith((*_STATES, "precision.compute") if is_wider else _STATES)


def _changes(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    changes = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            changes += _changes(before, after, f"{prefix}{key}.")
        elif before != after:
            changes.append(f"{prefix}{key} was {_shown(before)}, is {_shown(after)}")
    return changes


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)


class ManifestFile:
    """manifest.json, written by rank 0; every change is on disk when the call returns.

    Nothing is written once another process has begun a later attempt: this one was frozen, and is given up.
    """

    def __init__(self, run: Run, manifest: Manifest) -> None:
        self._run, self._manifest = run, manifest
        self._write()

    @property
    def attempt(self) -> int:
        """Return the number of this attempt, 1 for the first."""
        return len(self._manifest.attempts)

    def add_results(self, **results: Any) -> None:
        """Update the manifest's results."""
        self._manifest = self._manifest.replace(results={**self._manifest.results, **results})
        self._write()

    def close(self, exit_code: int) -> None:
        """Record the exit code of this attempt."""
        *earlier, last = self._manifest.attempts
        attempts: list[Attempt] = [*earlier, last.replace(exit=exit_code)]
        self._manifest = self._manifest.replace(attempts=attempts, exit=exit_code)
        self._write()

    def _write(self) -> None:
        if _num_attempts(self._run) > self.attempt:
            logger.warning("another process has begun a later attempt of %s: it is left as it is", self._run.folder)
            return
        write_atomically(self._run.manifest, self._manifest.to_json())


def _num_attempts(run: Run) -> int:
    try:
        manifest = read_manifest(run)
    except ConfigError:
        return 0
    return 0 if manifest is None else len(manifest.attempts)
