"""expected_parts: the planner's terms of a step as the components that simulated and measured steps are told in."""

from __future__ import annotations

import math

from meshwright.spec.step.estimate import StepTime
from meshwright.spec.step.step_parts import StepParts

TERMS_OF_PART = {
    "compute_s": ("floor_s", "matmul_s", "tile_s", "attention_s", "memory_s", "repeat_s"),
    "recompute_s": ("recompute_s",),
    "tp_s": ("tp_s",),
    "cp_s": ("cp_s",),
    "ep_s": ("ep_s",),
    "dp_s": ("dp_s",),
    "pp_s": ("pp_s",),
    # Ranks that wait for the slowest one wait in collectives, whichever comes next.
    "other_s": ("jitter_s",),
    "bubble_s": ("bubble_s",),
    "optimizer_s": ("optimizer_s",),
    "host_s": ("host_s",),
}
"""By field of StepParts the terms of StepTime that it sums up; the planner expects data to be there in time."""
assert sorted(term for terms in TERMS_OF_PART.values() for term in terms) == sorted(StepTime.model_fields)


def expected_parts(step: StepTime) -> StepParts:
    """Return the step by component; their sum is the same."""
    return StepParts(
        **{part: math.fsum(getattr(step, term) for term in terms) for part, terms in TERMS_OF_PART.items()}
    )
