"""What a limit on the SMs of communication (layout.communication_sms) would do: a key that a job alone sets.

Its price is derived from what NCCL's maintainers say, not from runs (cost/communication/nccl_ctas.py), and gains are
less than the error of ranking. So the search leaves NCCL its choice, and a plan names the key where it may pay.
"""

from collections.abc import Iterator

from meshwright.cost.layout_table import layout_table
from meshwright.planner.candidate import judge, layout_at
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.price import price
from meshwright.planner.search.space import vary
from meshwright.spec.run.layout_plan import Candidate, WhatIf

_LIMITS = (20, 16, 12, 8, 6, 4)
_LEAST_GAIN = 0.01
"""Share of a step that a limit must save to be named."""


def fewer_sms_what_if(pick: Candidate, request: PlanRequest) -> Iterator[WhatIf]:
    """Yield the pick with the limit that is predicted to shorten its step most, if any does noticeably."""
    if not request.setup.is_own_on_device or pick.layout.communication_sms is not None:
        return
    priced = price(vary(layout_table([pick.layout]), {"communication_sms": _LIMITS}), request)
    if not len(priced):
        return
    best = judge(layout_at(priced.layouts, int(priced.by_time[0]), request), request)
    if best.step_s < (1 - _LEAST_GAIN) * pick.step_s:
        note = "NCCL's kernels leave more SMs to matmuls: no run has measured it"
        yield WhatIf(change=f"layout.communication_sms={best.layout.communication_sms}", best=best, note=note)
