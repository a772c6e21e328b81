"""Where in a pipeline rank's list of actions the gradients of its stages are reduced over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.spec.layout.schedule.action import Action


@dataclass(frozen=True)
class Reductions:
    """Where in a rank's list of actions its stages' gradients are reduced over ranks."""

    last_inside: set[int]
    """Backward passes whose hooks reduce, each the last of its stage."""
    after: dict[int, bool]
    """Actions that a reduction follows, and whether it is the last of its stage."""
    awaited: set[int]
    """Stages whose backward passes do not wait for their reductions: the end of the step does."""


def reductions_of(actions: Sequence[Action], is_each: bool) -> Reductions:
    """Return where gradients are reduced: for each microbatch, or only after the last one.

    FSDP2 lets nothing pass a backward that waits for its reductions. A stage that sends a gradient to the one before
    does not wait, so that a pipeline is not held up by the reductions of all its stages in turn; and it reduces whole
    gradients, of which there are many, only after it sent the last. A backward in two parts reduces after the second:
    FSDP2's hooks fire in the first, when there are no gradients of parameters yet; but on a first stage, which has no
    inputs that want a gradient, in the second.
    """
    last = {action.stage: index for index, action in enumerate(actions) if action.kind in ("B", "W")}
    sending = {action.stage for action in actions if action.kind == "SEND_B"}
    inside, after = set[int](), dict[int, bool]()
    for index, action in enumerate(actions):
        is_last = last.get(action.stage) == index
        if action.kind == "W" and (is_each or is_last):
            after[index] = is_last
        if is_last and (is_each or (action.kind == "B" and action.stage not in sending)):
            inside.add(index)
        elif is_last and action.kind == "B":
            after[actions.index(Action("SEND_B", action.stage, action.microbatch))] = True
    return Reductions(inside, after, sending | {actions[index].stage for index in after})
