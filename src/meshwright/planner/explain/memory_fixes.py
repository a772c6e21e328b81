"""What would make a step fit that is known not to: changes of one key of the layout, the cheapest first.

A dry run says how much is missing, the formulas how much less each change takes than the layout as it is, and what the
step would then be; so that an error that the formulas make with both does not count.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.cost.layout_table import concatenate, layout_table
from meshwright.planner.candidate import candidate_at, layout_at
from meshwright.planner.explain.explain import changes, listed, neighbours
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.menu import menu_of
from meshwright.planner.search.price import price
from meshwright.spec.layout.layout import Layout
from meshwright.spec.run.plan import Fix

_NUM_FIXES = 5


def memory_fixes(layout: Layout, request: PlanRequest, missing_bytes: float) -> tuple[Fix, ...]:
    """Return the changes of one key that free `missing_bytes` or more of the fullest rank's memory."""
    free = replace(request, fixed={})
    nearby = neighbours(layout, free, menu_of(free))
    priced = price(concatenate([layout_table([layout]), nearby]), free, only_fitting=False)
    freed = priced.free_bytes - priced.free_bytes[0]
    fixes: dict[str, Fix] = {}
    for row in priced.by_time.tolist():
        if row and freed[row] >= missing_bytes and len(fixes) < _NUM_FIXES:
            other = layout_at(priced.layouts, row, free)
            # Another degree takes its ranks from dp_shard, which a job has to say, too.
            ranks = {} if other.dp_shard == layout.dp_shard else {"dp_shard": other.dp_shard}
            change = listed(changes(layout, other) | ranks)
            step = candidate_at(priced, row, free, max_actions=0).estimate.step
            fixes.setdefault(change, Fix(change=change, step_s=step.total_s))
    return tuple(fixes.values())
