"""make_plan: from a request to a Plan. No torch, no files written."""

import math
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from meshwright.cost.layout_table import layout_table
from meshwright.cost.training_setup import TrainingSetup
from meshwright.errors import InfeasibleLayout
from meshwright.planner.candidate import candidate_at, judge
from meshwright.planner.explain.contrasts import contrasts, sensitivities, what_ifs
from meshwright.planner.explain.explain import change_of, misfits
from meshwright.planner.explain.faster_attention import attention_words, faster_backends
from meshwright.planner.explain.fewer_sms import fewer_sms_what_if
from meshwright.planner.explain.infeasible import invalid_neighbours, no_layout
from meshwright.planner.explain.layout_rules import invalid_reason
from meshwright.planner.explain.managed_states import managed_states_what_if, unset_managed_states
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.finalists import (
    MEMORY_STEP,
    SPLIT_KEYS,
    Finalist,
    best_of,
    complexity_of,
    distinct_splits,
    finalists,
    replayed_if_fast,
    simplest,
)
from meshwright.planner.search.keyed_alternatives import with_keyed_alternatives
from meshwright.planner.search.memory_keys import with_memory_keys
from meshwright.planner.search.menu import SEARCHED_KEYS, menu_of, unsearched_keys, without_memory_keys
from meshwright.planner.search.price import Priced, memory_of_ranks, price
from meshwright.planner.search.rules import is_valid
from meshwright.planner.search.search import ROUNDS, Found, Known, complete, search
from meshwright.planner.search.space import reduces_needlessly, vary, with_ways
from meshwright.spec.layout.layout import Layout
from meshwright.spec.run.layout_plan import Candidate, Contrast, Plan

_PARETO_LENGTH = 12
_NUM_COMPARED = 9
"""Layouts of other splits that are asked what hardware and choices beyond the planner's would change."""
_MOST_SPLITS_REPLAYED = 64
_STEP_S = attrgetter("step_s")


def make_plan(
    request: PlanRequest, num_runners_up: int = 9, min_scored: int | None = None, chosen: Layout | None = None
) -> Plan:
    """Return the simplest of the fastest layouts that fit, or the plan around one `chosen`, such as by simulation.

    Raises InfeasibleLayout where nothing fits.
    """
    found, least_s = find(request, min_scored), _least_of_all_s(request)
    # How many are shown changes no figure.
    num_compared = max(num_runners_up, _NUM_COMPARED)
    page = _page(found, request, num_compared, chosen, least_s)
    for count in ROUNDS:
        more = complete(found, _known(page, num_compared), count, request)
        if more is found:
            break
        found, page = more, _page(more, request, num_compared, chosen, least_s)
    keyed = with_keyed_alternatives(found, _known(page, num_compared), request)
    if keyed is not found:
        found, page = keyed, _page(keyed, request, num_compared, chosen, least_s)
    pick, fastest, runners = page.pick, page.fastest, page.runners_up[:num_runners_up]
    table = layout_table([pick.layout, *(runner.layout for runner in page.runners_up[:_NUM_COMPARED])])
    refusal = "" if request.given is None else invalid_reason(request.given, request)
    given = None if request.given is None or refusal else judge(request.given, request)
    fsdp_alone, fsdp_alone_refusal = _plain_layout(request)
    rejections = [*misfits(pick, given, request, found.menu), *invalid_neighbours(pick.layout, request)]
    return Plan(
        model=request.model_name,
        num_parameters=request.setup.model.num_parameters,
        num_trained_parameters=trained_parameters(request.setup),
        cluster=request.cluster.name,
        device=request.cluster.device.name,
        num_devices=request.num_devices,
        usable_memory_bytes=int(request.cluster.device.usable_memory_bytes),
        workload=request.workload,
        stack=request.setup.stack.name,
        kept=(
            *(change_of(pick.layout, key) for key in request.fixed),
            *(f"memory.{key}={value}" for key, value in request.setup.memory.changed.items()),
        ),
        layouts_scored=found.num_scored,
        layouts_that_fit=len(found.priced),
        not_searched=(*unsearched_keys(found.menu, request), *unset_managed_states(request)),
        precision_note=request.precision_note,
        memory_margin=request.memory_margin,
        pick=pick,
        fastest=fastest,
        is_simpler=complexity_of(pick) < complexity_of(fastest),
        memory_by_pipeline_rank=memory_of_ranks(pick.layout, request),
        runners_up=tuple(runners),
        pareto_front=tuple(_pareto(found.priced, page, request)),
        fsdp_alone=fsdp_alone,
        fsdp_alone_refusal=fsdp_alone_refusal,
        given=given,
        given_refusal=refusal,
        given_misfit="" if request.recompute_misfit is None else str(request.recompute_misfit),
        alternatives=tuple(page.contrasts.values()),
        rejections=tuple(rejections),
        sensitivities=tuple(sensitivities(table, request)),
        what_ifs=(
            *what_ifs(table, request),
            *faster_backends(table, request),
            *managed_states_what_if(pick, request),
            *fewer_sms_what_if(pick, request),
        ),
        attention=attention_words(pick.layout, request),
    )


def trained_parameters(setup: TrainingSetup) -> int | None:
    """Return the parameters that are trained; None where they are the model's own, all of them."""
    return setup.trained_model.num_trained_parameters if setup.workload.adapter.freezes_base else None


@dataclass(frozen=True)
class _Page:
    """What a plan compares."""

    pick: Candidate
    fastest: Candidate
    contrasts: dict[str, Contrast]
    runners_up: list[Candidate]


def _page(
    found: Found, request: PlanRequest, num_runners_up: int, chosen: Layout | None, least_s: float | None
) -> _Page:
    """Return the pick among what was priced, or the layout that is `chosen`, and the best of other kinds."""
    best = finalists(found.priced, request)
    fastest, reasons = _fastest(found.priced, best, request)
    pick = simplest(found.priced, best, fastest, request, least_s)
    if chosen is not None and chosen != pick.layout:
        pick = judge(chosen, request)
    replayed = [fastest, *(finalist.candidate for finalist in best)]
    if pick != fastest:
        reasons = contrasts(found.priced, replayed, pick, request)
    return _Page(pick, fastest, reasons, _runners_up(found.priced, replayed, pick, request, num_runners_up))


def _known(page: _Page, num_runners_up: int) -> Known:
    best = {key: contrast.other for key, contrast in page.contrasts.items()}
    return Known(page.pick, best, page.runners_up, num_runners_up)


def _least_of_all_s(request: PlanRequest) -> float | None:
    """Return the step of the fastest layout if no key was set that is searched; None where none is set or nothing fits.

    It says which layouts are as fast as each other (search/finalists.py).
    """
    fixed = {key: value for key, value in request.fixed.items() if key not in SEARCHED_KEYS}
    if len(fixed) == len(request.fixed):
        return None
    free = replace(request, fixed=fixed)
    try:
        priced = find(free, min_scored=0).priced
    except InfeasibleLayout:
        return None
    return _fastest(priced, finalists(priced, free), free)[0].step_s


def find(request: PlanRequest, min_scored: int | None = None) -> Found:
    """Return what fits, with memory keys where these let in what may be picked. Raises InfeasibleLayout."""
    menu = menu_of(request)
    found = with_memory_keys(search(request, without_memory_keys(menu), min_scored), request, menu)
    if not len(found.priced):
        raise no_layout(request, menu)
    return found


def _fastest(priced: Priced, best: list[Finalist], request: PlanRequest) -> tuple[Candidate, dict[str, Contrast]]:
    """Return the fastest layout and its contrasts: the closed form may hide a faster one behind another value."""
    replayed = [finalist.candidate for finalist in best]
    fastest = replayed[0]
    while True:
        others = contrasts(priced, replayed, fastest, request)
        closest = next(iter(others.values()), None)
        if closest is None or closest.other.step_s >= fastest.step_s:
            return fastest, others
        fastest = closest.other


def _runners_up(
    priced: Priced, replayed: list[Candidate], pick: Candidate, request: PlanRequest, count: int
) -> list[Candidate]:
    """Return the fastest layouts of other splits than the pick's, in the order of their steps."""
    if not count:
        return []
    best: dict[tuple[int, ...], Candidate] = {}
    for candidate in sorted(replayed, key=_STEP_S):
        best.setdefault(_split(candidate.layout), candidate)
    best.pop(_split(pick.layout), None)
    for row in distinct_splits(priced, _MOST_SPLITS_REPLAYED):
        if len(best) >= count and priced.total_s[row] >= sorted(one.step_s for one in best.values())[count - 1]:
            break
        layouts = priced.layouts
        same = np.all([getattr(layouts, key) == getattr(layouts, key)[row] for key in SPLIT_KEYS], axis=0)
        for candidate in best_of(priced, priced.fastest(same), pick, request, most_actions=0):
            split = _split(candidate.layout)
            if split != _split(pick.layout):
                best[split] = min(best.get(split, candidate), candidate, key=_STEP_S)
    return sorted(best.values(), key=_STEP_S)[:count]


def _split(layout: Layout) -> tuple[int, ...]:
    return tuple(getattr(layout, key) for key in SPLIT_KEYS)


def _pareto(priced: Priced, page: _Page, request: PlanRequest) -> list[Candidate]:
    """Return, fastest first, the layouts that leave more memory than all faster ones of the page, and the pick."""
    by_layout = {one.layout: one for one in (page.fastest, page.pick, *page.runners_up)}
    order, more_bytes = priced.by_time, MEMORY_STEP * request.cluster.device.usable_memory_bytes
    free_bytes = request.cluster.device.usable_memory_bytes - priced.memory.reserved_bytes
    best_so_far = np.maximum.accumulate(free_bytes[order])
    least = page.fastest.free_bytes + more_bytes
    for _ in range(_PARETO_LENGTH):
        position = int(np.searchsorted(best_so_far, least))
        if position == len(order):
            break
        candidate = replayed_if_fast(priced, int(order[position]), page.pick, request)
        least = candidate.free_bytes + more_bytes
        by_layout[candidate.layout] = candidate
    # Closed forms found them; replayed steps may be in another order.
    front: list[Candidate] = []
    least = -math.inf
    for candidate in sorted(by_layout.values(), key=_STEP_S):
        if candidate.free_bytes >= least:
            front.append(candidate)
            least = candidate.free_bytes + more_bytes
    shown = front[:_PARETO_LENGTH]
    return shown if page.pick in shown else sorted([*shown, page.pick], key=_STEP_S)


def _plain_layout(request: PlanRequest) -> tuple[Candidate | None, str]:
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
    fitting = [row for row in priced.by_time.tolist() if priced.headroom_bytes[row] >= request.margin_bytes]
    return candidate_at(priced, fitting[0] if fitting else int(priced.headroom_bytes.argmax()), free), ""
