"""prune: removal of the checkpoints of a run that retention no longer keeps; needs no torch."""

from collections.abc import Collection

from meshwright.checkpoint.examine.describe_run import validation_losses
from meshwright.checkpoint.format.durable import remove
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
