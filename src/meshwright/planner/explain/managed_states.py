"""What optimizer states in managed memory (memory.optimizer_state = "uvm") would do: a key that a job alone sets."""

from collections.abc import Iterator

from meshwright.cost.layout_table import layout_table
from meshwright.planner.candidate import candidate_at
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.menu import memory_options, menu_of
from meshwright.planner.search.price import price
from meshwright.planner.search.rules import is_valid
from meshwright.planner.search.space import is_needless, vary, with_memory_options, with_ways
from meshwright.spec.run.layout_plan import Candidate, WhatIf

MANAGED_STATES = "memory.optimizer_state=uvm"


def with_managed_states(request: PlanRequest) -> PlanRequest | None:
    """Return the request with its optimizer states in managed memory; None where they are, or cannot be."""
    setup, workload = request.setup, request.workload
    has_managed_memory = setup.is_own and setup.cluster.device.vendor == "nvidia"
    is_built = workload.optimizer_state_dtype != "int8" and not workload.updates_in_backward
    if not has_managed_memory or not is_built or setup.memory.optimizer_state == "uvm":
        return None
    return request.with_setup(memory=setup.memory.replace(optimizer_state="uvm"))


def unset_managed_states(request: PlanRequest) -> tuple[str, ...]:
    """Return the key of optimizer states, where it could put them into managed memory and does not."""
    possible = with_managed_states(request) is not None and not request.fixed.get("cpu_offload")
    return (MANAGED_STATES.partition("=")[0],) if possible else ()


def managed_states_what_if(pick: Candidate, request: PlanRequest) -> Iterator[WhatIf]:
    """Yield the best layout of the pick's split with states in managed memory, where its step is shorter."""
    managed = with_managed_states(request)
    if managed is None or request.fixed.get("cpu_offload"):
        return
    menu = menu_of(managed)
    table = with_memory_options(layout_table([pick.layout]), memory_options(menu))
    for key in ("microbatch_size", "activation_checkpoint_every"):
        table = vary(table, {key: getattr(menu, key)})
    table = with_ways(table, menu)
    priced = price(table.take(is_valid(table, managed) & ~is_needless(table, managed, menu)), managed)
    if len(priced):
        best = candidate_at(priced, int(priced.by_time[0]), managed)
        if best.step_s < pick.step_s:
            note = "moments stay in the host's memory and are updated over the link"
            yield WhatIf(change=MANAGED_STATES, best=best, note=note)
