"""When a pipeline rank reduces its stages' gradients over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.spec.layout.schedule.action import Action


@dataclass(frozen=True)
class Reductions:
    """Positions in a rank's list of actions at which gradients are reduced."""

    last_inside: set[int]
    """Indices of backward passes whose hooks reduce, each the last of its stage."""
    after: dict[int, bool]
    """Indices of actions that a reduction follows, and whether it is the last of its stage."""
    awaited: set[int]
    """Stages whose reductions are waited for at the end of the step, not in backward."""


def reductions_of(actions: Sequence[Action], is_each: bool) -> Reductions:
    """Return when gradients are reduced: after each microbatch (`is_each`), or after the last one only.

    A backward that waits for its reductions blocks the rank. A stage that sends gradients to the previous stage does
    not wait, and reduces unsharded gradients only after its last send, so that reductions do not delay the pipeline.

    A split backward reduces after its second part: FSDP2's hooks fire in the first part, before parameters have
    gradients, except on the first stage, whose inputs need no gradient.
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
