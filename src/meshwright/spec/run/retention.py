"""RetentionRule: which checkpoints of a run are kept, and why."""

import math
from collections.abc import Mapping

from pydantic import NonNegativeInt, PositiveInt

from meshwright.spec.frozen import Frozen


class RetentionRule(Frozen):
    """Which checkpoints of a run are kept; one that any of the rules names stays."""

    keep: PositiveInt = 2
    """Number of newest checkpoints."""
    keep_every: NonNegativeInt = 0
    """Steps whose multiples are never removed; 0 for none."""
    keep_best: NonNegativeInt = 0
    """Number of checkpoints with the lowest validation loss."""


def kept_because(losses: Mapping[int, float | None], rule: RetentionRule) -> dict[int, list[str]]:
    """Return why each checkpoint that `rule` keeps is kept, by step; those that are left out are to be removed.

    `losses` are the validation losses of all complete checkpoints by step, None where none was measured. The newest is
    always kept. Of equal losses the newer one is the better.
    """
    newest = sorted(losses)[-rule.keep :]
    measured = [(loss, -step) for step, loss in losses.items() if loss is not None and math.isfinite(loss)]
    best = {-step for _, step in sorted(measured)[: rule.keep_best]}
    reasons: dict[int, list[str]] = {}
    for step in sorted(losses):
        rules = {
            "keep": step in newest,
            "keep_every": rule.keep_every > 0 and step % rule.keep_every == 0,
            "keep_best": step in best,
        }
        if any(rules.values()):
            reasons[step] = [name for name, applies in rules.items() if applies]
    return reasons
