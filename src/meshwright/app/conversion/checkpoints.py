"""Checkpoints of a run: ls, verify, inspect, diff, gc and reshard; torch is needed only to read tensors."""

import fcntl
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.app.progress import elapsed
from meshwright.app.results.checkpoint_results import (
    CheckpointDifferenceResult,
    CheckpointListingResult,
    CheckpointSummaryResult,
    GarbageCollectionResult,
    ReshardedCheckpointResult,
    TensorDetailResult,
    VerificationResult,
)
from meshwright.app.results.result import viewed
from meshwright.checkpoint.examine.contents import summarize
from meshwright.checkpoint.examine.describe_run import describe_run
from meshwright.checkpoint.examine.verify import verify_checkpoint
from meshwright.checkpoint.format.find_checkpoint import find_checkpoint
from meshwright.checkpoint.memory.describe_memory import describe_memory, memory_garbage
from meshwright.checkpoint.memory.memory_folder import owner_of
from meshwright.checkpoint.prune import garbage_of, remove_all
from meshwright.errors import ConfigError
from meshwright.fault_tolerance.evidence import is_running
from meshwright.spec.run.retention import RetentionRule
from meshwright.spec.run.run import Run
from meshwright.trainer.run.run_folder import read_manifest
from meshwright.units import format_bytes

_CHECKPOINT_NAME = re.compile(r"step-\d+(\.\w+-[0-9a-f]{32})?")


def ls(run: Path | str) -> CheckpointListingResult:
    """Return what lies in the checkpoints of the run folder `run`; raises ConfigError for a folder that is no run."""
    found = Run(run)
    steps = found.checkpoint_steps()
    rule = None if _is_own(found) else retention_of(found)
    running = is_running(found)
    records = describe_run(found, rule or RetentionRule(keep=max(1, len(steps))), is_running=running)
    if rule is None:
        records = [one.replace(kept_because=[]) for one in records]
    memory_dir = _memory_dir(found)
    in_memory = [] if memory_dir is None else describe_memory(found, memory_dir)
    return CheckpointListingResult(
        folder=str(run), is_running=running, rule=rule, checkpoints=records, in_memory=in_memory
    )


def verify(source: Path | str, *, step: int | None = None, all: bool = False) -> VerificationResult:
    """Return all damage of checkpoints of `source`, every byte of which is read.

    `source` is a run (its newest checkpoint, that of `step`, or `all`) or a checkpoint folder.
    """
    if all and step is not None:
        raise ConfigError(f"--all verifies every checkpoint and --step {step} one of them: give one of the two")
    found = []
    for folder in _every_folder(Path(source)) if all else [folder_of(source, step)]:
        with elapsed(f"verifying {folder}") as show:
            found.append(verify_checkpoint(folder, _byte_counter(folder, show)))
    return VerificationResult(checkpoints=found)


def inspect(
    source: Path | str, tensor: str | None = None, *, step: int | None = None
) -> CheckpointSummaryResult | TensorDetailResult:
    """Return what a checkpoint holds, or shards and statistics of its `tensor`; `source` and `step` as for verify."""
    folder = folder_of(source, step)
    if tensor is None:
        return viewed(CheckpointSummaryResult, summarize(folder))
    from meshwright.checkpoint.examine.tensor_statistics import detail_of

    return viewed(TensorDetailResult, detail_of(folder, tensor))


def diff(left: Path | str, right: Path | str) -> CheckpointDifferenceResult:
    """Return how the checkpoint `right` differs from `left`; a run names its newest checkpoint."""
    folders = folder_of(left), folder_of(right)
    from meshwright.checkpoint.examine.difference import difference

    with elapsed(f"comparing {folders[0]} with {folders[1]}") as show:
        return viewed(CheckpointDifferenceResult, difference(*folders, lambda name: show(f"comparing {name}")))


def gc(
    run: Path | str, *, dry_run: bool = False, damaged: bool = False, memory: bool = False
) -> GarbageCollectionResult:
    """Remove what saves that were killed left in `run`, and what its retention no longer keeps; return what that was.

    What a mw.CheckpointFolder keeps only the program knows that saves into it: nothing of that is removed.

    With `damaged` also checkpoints that a resume set aside, with `memory` also copies in this machine's memory that a
    resume would read; those of runs that are gone are removed in any case. The run folder is locked meanwhile, as
    training locks it: while a process trains into it, nothing else is removed.
    """
    found = Run(run)
    rule = RetentionRule(keep=max(1, len(found.checkpoint_steps()))) if _is_own(found) else retention_of(found)
    with _locked(found.folder) as is_locked:
        # The heartbeats are for file systems whose locks other hosts do not see.
        running = not is_locked or is_running(found)
        removals, spared = garbage_of(found, rule, is_running=running, with_damaged=damaged)
        if not dry_run:
            removals, left = remove_all(found, removals)
            spared += left
        if (memory_dir := _memory_dir(found)) is not None:
            copies, kept = memory_garbage(found, memory_dir, is_running=running, with_usable=memory)
            removals += [removal for folder, removal in copies if dry_run or folder.remove()]
            spared += kept
    return GarbageCollectionResult(folder=str(run), is_dry_run=dry_run, removals=removals, spared=spared)


def reshard(source: Path | str, destination: Path | str, *, ranks: int) -> ReshardedCheckpointResult:
    """Rewrite a checkpoint (a run names its newest) as the new folder `destination`, with the files of `ranks` ranks.

    The copy is verified and bitwise equal. Raises ConfigError for a destination that exists, or that lies in the
    checkpoints of a run into which a process trains.
    """
    folder, target = folder_of(source), Path(destination)
    parent = target.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    run = Run(parent.parent)
    # A save removes what it finds unfinished next to it, so only one at a time may write into a folder.
    place = run.folder if run.manifest.is_file() and parent == run.checkpoints else parent
    from meshwright.checkpoint.reshard import reshard as rewrite

    with _locked(place) as may_write, elapsed(f"writing {target}") as show:
        if not may_write:
            raise ConfigError(
                f"{destination} lies in {place}, into which another process trains or writes a checkpoint (or which "
                "cannot be locked): choose another folder"
            )
        return viewed(ReshardedCheckpointResult, rewrite(folder, target, ranks, _byte_counter(target, show, "writing")))


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder during the block; yield False where another process holds it or it cannot be locked."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_locked = True
    except OSError:
        is_locked = False
    try:
        yield is_locked
    finally:
        os.close(descriptor)


def _is_own(run: Run) -> bool:
    """Return whether a folder is one of a mw.CheckpointFolder, which has checkpoints and no manifest."""
    return run.checkpoints.is_dir() and not run.manifest.exists()


def _memory_dir(run: Run) -> str | None:
    """Return where the run's copies in memory are; None for one without."""
    manifest = read_manifest(run)
    return None if manifest is None or owner_of(run) is None else manifest.job.checkpoint.memory_dir


def retention_of(run: Run) -> RetentionRule:
    """Return what the job of the newest attempt keeps; raises ConfigError for a folder that is no run."""
    manifest = read_manifest(run)
    if manifest is None:
        raise ConfigError(f"{run.folder} is no run folder (no {run.manifest.name}): name one that was trained into")
    return manifest.job.checkpoint.retention


def folder_of(source: Path | str, step: int | None = None) -> Path:
    """Return the checkpoint folder that `source`, a run or a checkpoint, names; a damaged one may lack its index."""
    folder = Path(source)
    if step is None and folder.is_dir() and _CHECKPOINT_NAME.fullmatch(folder.name):
        return folder
    return find_checkpoint(folder, step)[1]


def _every_folder(source: Path) -> list[Path]:
    run, _ = find_checkpoint(source)
    return [run.checkpoint(step) for step in run.checkpoint_steps()]


def _byte_counter(folder: Path, show: Callable[[str], None], verb: str = "verifying") -> Callable[[int], None]:
    """Return a function that adds bytes, from any thread, and shows their sum."""
    lock, total = threading.Lock(), 0

    def add(num_bytes: int) -> None:
        nonlocal total
        with lock:
            total += num_bytes
            show(f"{verb} {folder}: {format_bytes(total)}")

    return add
