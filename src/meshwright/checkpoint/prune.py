"""prune and garbage_of: removal of the checkpoints of a run that can go, after a save or on request; needs no torch."""

from collections.abc import Collection

from meshwright.checkpoint.examine.describe_run import describe_run, validation_losses
from meshwright.checkpoint.format.durable import remove
from meshwright.spec.run.checkpoint_findings import Removal
from meshwright.spec.run.checkpoint_record import CheckpointRecord
from meshwright.spec.run.retention import RetentionRule, kept_because
from meshwright.spec.run.run import Run


def prune(run: Run, rule: RetentionRule, in_use: Collection[int] = ()) -> list[int]:
    """Remove the checkpoints of `run` that `rule` does not keep, with their exports, and return their steps.

    Call it in one process, after a save. The newest is always kept, and so are the steps `in_use`, such as one that is
    being uploaded.
    """
    steps = unkept(run, rule)
    removed = [step for step in steps if step not in in_use]
    for step in removed:
        remove(run.checkpoint(step))
    prune_exports(run)
    return removed


def prune_exports(run: Run) -> None:
    """Remove the exports whose checkpoints are gone."""
    for step in sorted({*run.export_steps()} - {*run.checkpoint_steps()}):
        remove(run.export(step))


def unkept(run: Run, rule: RetentionRule) -> list[int]:
    """Return the steps of committed checkpoints that `rule` does not keep, oldest first."""
    # Indexes are read only for a rule that depends on them.
    losses = validation_losses(run) if rule.keep_best else dict.fromkeys(run.checkpoint_steps())
    kept = kept_because(losses, rule)
    return [step for step in sorted(losses) if step not in kept]


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
        return "set aside by a resume or a rollback"
    return "retention keeps it no longer" if one.state == "complete" and not one.kept_because else None
