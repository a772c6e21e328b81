"""plain_layout: FSDP over all devices, which every other layout is compared with, whether it fits or not."""

from __future__ import annotations

from dataclasses import replace

from meshwright.cost.layout_table import layout_table
from meshwright.planner.candidate import candidate_at
from meshwright.planner.explain.refused import invalid_reason
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.menu import menu_of
from meshwright.planner.search.price import price
from meshwright.planner.search.rules import is_valid
from meshwright.planner.search.space import reduces_needlessly, vary, with_ways
from meshwright.spec.layout.layout import Layout
from meshwright.spec.run.plan import Candidate


def plain_layout(request: PlanRequest) -> tuple[Candidate | None, str]:
    """Return (the fastest plain layout that fits, or the leanest if none does; why there is none).

    Whatever keys the request fixes are left free.
    """
    free = replace(request, fixed={})
    menu = menu_of(free)
    plain = Layout(dp_shard=request.num_devices, compile=menu.compile[0])
    table = with_ways(vary(layout_table([plain]), {"microbatch_size": menu.microbatch_size}), menu)
    table = vary(table, {"activation_checkpoint_every": menu.activation_checkpoint_every})
    table = table.take(is_valid(table, free) & ~reduces_needlessly(table, free, menu))
    if not len(table):
        return None, invalid_reason(plain, free)
    priced = price(table, free, only_fitting=False)
    fitting = [row for row in priced.by_time.tolist() if priced.free_bytes[row] >= request.margin_bytes]
    return candidate_at(priced, fitting[0] if fitting else int(priced.free_bytes.argmax()), free), ""
