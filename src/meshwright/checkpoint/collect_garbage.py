"""garbage_of: folders of a run's checkpoints that can go, and why; needs no torch."""

from meshwright.checkpoint.examine.describe_run import describe_run
from meshwright.checkpoint.format.durable import remove
from meshwright.checkpoint.prune import prune_exports
from meshwright.spec.run.checkpoint_findings import Removal
from meshwright.spec.run.checkpoint_record import CheckpointRecord
from meshwright.spec.run.retention import RetentionRule
from meshwright.spec.run.run import Run


def garbage_of(
    run: Run, rule: RetentionRule, *, is_running: bool, with_damaged: bool
) -> tuple[list[Removal], list[Removal]]:
    """Return what can be removed of the checkpoints of `run`, and what is spared, with the reason of each.

    While the run `is_running`, only set-aside checkpoints can go: its process removes the rest. A damaged checkpoint
    under its own name is never removed, since its files may be repairable and a resume sets it aside.
    """
    removals: list[Removal] = []
    spared: list[Removal] = []
    for one in describe_run(run, rule, is_running=is_running):
        reason = _reason(one)
        if reason is None:
            continue
        problem = None
        if one.state == "set aside":
            problem = None if with_damaged else "remove it with --damaged"
        elif is_running:
            problem = "a process trains into this run"
        entry = Removal(
            name=one.name, reason=reason if problem is None else f"{reason}: {problem}", num_bytes=one.num_bytes
        )
        (removals if problem is None else spared).append(entry)
    return removals, spared


def remove_all(run: Run, removals: list[Removal]) -> tuple[list[Removal], list[Removal]]:
    """Remove these folders, with their exports; return those that are gone and, logged, those that could not be."""
    gone: list[Removal] = []
    left: list[Removal] = []
    for one in removals:
        if remove(run.checkpoints / one.name):
            gone.append(one)
        else:
            left.append(one.replace(reason=f"{one.reason}: could not be removed"))
    prune_exports(run)
    return gone, left


def _reason(one: CheckpointRecord) -> str | None:
    """Return why a folder is garbage, None if it is not."""
    if one.state in ("leftover", "being written"):
        return "of a save or removal that did not finish" if one.state == "leftover" else "of a save that is running"
    if one.state == "set aside":
        return "damaged, set aside by a resume"
    return "retention keeps it no longer" if one.state == "complete" and not one.kept_because else None
