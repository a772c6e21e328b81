"""What the parts of a step are called in tables and pictures."""

from __future__ import annotations

from meshwright.pages.tables.waterfall import TERMS
from meshwright.spec.step.step_parts import StepParts

PART_WORDS = {
    "compute_s": "compute",
    "recompute_s": TERMS["recompute_s"],
    "tp_s": TERMS["tp_s"],
    "cp_s": TERMS["cp_s"],
    "ep_s": TERMS["ep_s"],
    "dp_s": TERMS["dp_s"],
    "pp_s": TERMS["pp_s"],
    "other_s": "other communication",
    "bubble_s": TERMS["bubble_s"],
    "optimizer_s": TERMS["optimizer_s"],
    "data_s": "reading data",
    "host_s": TERMS["host_s"],
}
"""By field of StepParts; communication is what no computation hides."""
assert list(PART_WORDS) == list(StepParts.model_fields)

NO_AXIS = "unnamed group"
"""What a group without a name is called, such as that of all ranks."""
