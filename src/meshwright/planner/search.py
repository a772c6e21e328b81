"""The search: every valid layout is judged by memory and those that can win by time; the rest is bounded from above.

1. All splits of the model and the batch over the ranks, as one table.
2. Those are dropped that do not fit with the choices that need least memory: no other choice would save them.
3. Each gets a bound: its step without recomputation, bubble, or any communication that a choice could hide. No layout
   of the split is faster.
4. Splits are taken in the order of their bounds, each with every schedule and every way to spend memory for time, until
   the bounds pass the fastest layout that fits by a margin; and on to a certain number of layouts, so that the list of
   alternatives is not short.
5. The best of these are varied by the choices that change time a little.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.cost.case import Floats
from meshwright.cost.layout_table import ACTIVATION_CHECKPOINTS, Bools, Ints, LayoutTable
from meshwright.planner.menu import Menu
from meshwright.planner.price import Priced, join, order_by_time, price, usable_memory_bytes, weigh
from meshwright.planner.question import Question
from meshwright.planner.space import splits, with_choices, with_fine_choices
from meshwright.spec.layout import SCHEDULES

MIN_SCORED = 100_000
"""Layouts that are scored, where there are so many, even when the bounds already tell that no better one follows."""
_FIRST_CHUNK, _LARGEST_CHUNK = 4_000, 64_000
"""Layouts that are priced at once: few at first, since a fast one that fits spares the rest."""
_MARGIN = 1.1
_SLACK = 0.05
_NUM_REFINED = 1_500


@dataclass(frozen=True)
class Found:
    """What a search saw."""

    menu: Menu
    priced: Priced
    """The layouts that fit."""
    num_scored: int
    """Layouts whose memory was compared with the device's, those that fit or not."""


def search(question: Question, menu: Menu, min_scored: int = MIN_SCORED) -> Found:
    """Return the layouts of `menu` that fit and were priced, the fastest of all among them; none if nothing fits."""
    candidates = splits(question, menu)
    candidates = candidates.take(may_fit(candidates, question, menu))
    parts, num_scored, best_s = [], 0, np.inf
    for chunk in _by_bound(candidates, question, menu):
        if chunk.bound_s > best_s * _MARGIN and num_scored >= min_scored:
            break
        table = with_choices(chunk.splits, question, menu)
        num_scored += len(table)
        parts.append(price(table, question))
        best_s = min(best_s, parts[-1].total_s.min(initial=np.inf))
    if not parts:
        parts = [price(candidates.take(np.arange(0)), question)]
    priced = join(parts)
    order = order_by_time(priced)
    refined = with_fine_choices(priced.layouts.take(order[:_NUM_REFINED]), question, menu)
    num_scored += len(refined) - len(order[:_NUM_REFINED])
    return Found(menu, join([price(refined, question), priced.take(order[_NUM_REFINED:])]), num_scored)


def may_fit(candidates: LayoutTable, question: Question, menu: Menu) -> Bools:
    """Return which splits fit with the choices that need least memory."""
    _, headroom = weigh(leanest(candidates, question, menu), question)
    return np.asarray(headroom >= -_SLACK * usable_memory_bytes(question.cluster))


def leanest(candidates: LayoutTable, question: Question, menu: Menu) -> LayoutTable:
    """Return each split with the choices that need least memory."""
    num_microbatches = question.workload.global_batch_size // (candidates.dp * candidates.microbatch_size)
    # A rank of 1F1B holds fewest microbatches; with fewer of them than stages, all schedules hold all.
    fills = (candidates.pp == 1) | (num_microbatches >= candidates.pp)
    return replace(
        candidates,
        schedule=np.where(fills, SCHEDULES.index("1F1B"), SCHEDULES.index("GPipe")),
        stages_per_rank=np.ones_like(candidates.pp),
        activation_checkpoint=_code_of(candidates, max(map(ACTIVATION_CHECKPOINTS.index, menu.activation_checkpoint))),
        is_resharded=np.full(len(candidates), any(menu.is_resharded)),
        cpu_offload=np.full(len(candidates), any(menu.cpu_offload)),
        compile=np.full(len(candidates), any(menu.compile)),
    )


def lower_bounds_s(candidates: LayoutTable, question: Question, menu: Menu) -> Floats:
    """Return seconds that no layout of a split stays below."""
    fastest = replace(
        candidates,
        schedule=_code_of(candidates, SCHEDULES.index("GPipe")),
        stages_per_rank=np.ones_like(candidates.pp),
        activation_checkpoint=_code_of(candidates, min(map(ACTIVATION_CHECKPOINTS.index, menu.activation_checkpoint))),
        is_resharded=np.full(len(candidates), all(menu.is_resharded)),
        async_tp=(candidates.tp > 1) & any(menu.async_tp),
        cpu_offload=np.full(len(candidates), all(menu.cpu_offload)),
        compile=np.full(len(candidates), any(menu.compile)),
    )
    step = price(fastest, question, only_fitting=False).step
    return np.asarray(step.total_s - step.bubble_s - step.pp_s - step.cp_s - step.recompute_s)


@dataclass(frozen=True)
class _Chunk:
    splits: LayoutTable
    bound_s: float
    """The least bound of this chunk and of all later ones."""


def _by_bound(candidates: LayoutTable, question: Question, menu: Menu) -> list[_Chunk]:
    """Return the splits in the order of their bounds, in growing pieces."""
    if not len(candidates):
        return []
    bounds_s = lower_bounds_s(candidates, question, menu)
    order = np.argsort(bounds_s, kind="stable")
    choices = len(menu.pipelines) * len(menu.is_resharded) * len(menu.activation_checkpoint)
    pieces, start, size = [], 0, _FIRST_CHUNK
    while start < len(order):
        stop = start + max(1, size // choices)
        pieces.append(order[start:stop])
        start, size = stop, min(2 * size, _LARGEST_CHUNK)
    return [_Chunk(candidates.take(piece), float(bounds_s[piece[0]])) for piece in pieces]


def _code_of(candidates: LayoutTable, code: int) -> Ints:
    return np.full(len(candidates), code)
