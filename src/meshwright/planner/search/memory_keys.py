"""Memory keys: layouts that fit only with a loss in chunks, or with activations or state in the host's memory.

cpu_offload and activation_offload add copies and work of the host to a step and take nothing from it, so that no
layout that fits is made faster by them: they are tried where they let a layout in, each alone and then together.

1. Of all ways to share the model and to spend memory, those that do not fit are kept whose bound without any of these
   keys is below what they have to beat: the fastest layout that fits without, or for simpler layouts the slowest that
   may be picked for being simple (finalists.py).
2. Each gets a bound with each key alone, and with several the largest of theirs. Most are dropped here: on devices
   that hold the model without, what the keys let in is rarely faster than what they cost.
3. The rest is priced in the order of the bounds, without combinations of more keys than are needed.

A loss in chunks may also shorten a step by a little, as chunks stay in caches: the fastest layouts that fit are varied
by it. For software that is not Meshwright's trainer, whose offload nothing measures, all this is done only where
nothing fits without.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from meshwright.cost.layout_table import Bools, Floats, Ints, LayoutTable, concatenate
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.bounds import (
    Bounds,
    fits_simply,
    has_room,
    joined,
    least_of_splits_s,
    least_of_ways_s,
)
from meshwright.planner.search.finalists import ALIKE, RANKING_ERROR, complexity
from meshwright.planner.search.menu import MEMORY_KEYS, Menu, memory_options
from meshwright.planner.search.price import Priced, join, price, weigh
from meshwright.planner.search.rules import is_valid
from meshwright.planner.search.search import Found, first_price, promised_s
from meshwright.planner.search.space import (
    reduces_needlessly,
    with_choices,
    with_memory_options,
    with_other_fine_choices,
    with_ways,
)
from meshwright.spec.layout.layout import SCHEDULES

_MOST_TRIED = 2_000
"""Ways to spend memory that are tried where others fit without: those first whose bound is farthest below the limit."""
_FIRST_PIECE = 32
"""Of them, how many are priced at once: few at first, since a fast one that fits spares the rest."""
_NUM_CHUNKED = 256
"""Of the fastest layouts, how many are tried with a loss in chunks."""
_NONE = np.zeros(0, np.int64)
_BITS = 20
"""Of each part of a complexity: degrees are the largest, up to the number of devices."""


def with_memory_keys(found: Found, request: PlanRequest, menu: Menu) -> Found:
    """Return `found`, the layouts without memory keys, and those of `menu` that need one and may be picked."""
    options = memory_options(menu)
    if len(options) == 1 or (len(found.priced) and not request.setup.is_own):
        return found
    chunked = _chunked(found.priced, request, menu)
    to_beat = _ToBeat.of(join([found.priced, chunked]))
    bounds = _bounds(_candidates(found, to_beat, request, menu), to_beat, request, menu)
    is_left, parts, num_scored = np.ones(len(bounds), np.bool_), [found.priced.take(_NONE)], found.num_scored
    for rows in _pieces(bounds):
        if bounds.least_s[rows[0]] >= to_beat.most_s:
            break
        kept = rows[bounds.least_s[rows] < to_beat.limits_s(bounds.layouts.take(rows))]
        is_left[kept] = False
        table = with_choices(bounds.layouts.take(kept), request, menu)
        num_scored += len(table)
        parts.append(first_price(menu)(table, request))
        to_beat = to_beat.joined_by(parts[-1])
    needing, num_finer = _with_fine_choices(join(parts), to_beat, request, menu)
    priced = join([found.priced, chunked, needing])
    is_coarse = np.pad(found.is_coarse, (0, len(priced) - len(found.priced)))
    num_scored += num_finer + len(chunked)
    # The best of each other kind (`complete`) may need a key only where all do: that search is not made longer.
    rest = found.rest if len(found.priced) else joined([found.rest, bounds.take(is_left)])
    return replace(found, menu=menu, priced=priced, is_coarse=is_coarse, rest=rest, num_scored=num_scored)


def _with_fine_choices(priced: Priced, to_beat: _ToBeat, request: PlanRequest, menu: Menu) -> tuple[Priced, int]:
    """Return the layouts, those that may be picked with all their fine choices, and how many layouts that adds."""
    promised = promised_s(priced, menu)
    may_win = np.asarray(promised < to_beat.limits_s(priced.layouts))
    finer = with_other_fine_choices(priced.layouts.take(may_win), request, menu)
    return join([priced, price(finer, request)]), len(finer)


@dataclass(frozen=True)
class _ToBeat:
    """The layouts that may be picked, of those that are known."""

    near: Priced
    """Those that are as fast as the fastest to within the error of ranking."""

    @classmethod
    def of(cls, priced: Priced) -> _ToBeat:
        least_s = priced.total_s.min(initial=np.inf)
        return cls(priced.take(priced.total_s <= least_s * (1 + RANKING_ERROR)))

    def joined_by(self, priced: Priced) -> _ToBeat:
        return _ToBeat.of(join([self.near, priced])) if len(priced) else self

    @property
    def most_s(self) -> float:
        """The seconds from which on nothing is picked."""
        return float(self.near.total_s.min(initial=np.inf)) * (1 + RANKING_ERROR)

    def limits_s(self, layouts: LayoutTable) -> Floats:
        """Return the seconds that layouts with memory keys have to stay below to be picked, or to move what may be.

        More complex ones have to be clearly faster than all; equally simple ones, which may need fewer keys, as fast as
        the simplest.
        """
        if not len(self.near):
            return np.full(len(layouts), np.inf)
        near, own = _complexity(self.near.layouts), _complexity(layouts)
        least, fastest_s = near.min(), self.near.total_s.min()
        simplest_s = self.near.total_s[near == least].min()
        return np.asarray(
            np.select([own < least, own == least], [self.most_s, simplest_s * (1 + ALIKE)], fastest_s / (1 + ALIKE))
        )


def _complexity(layouts: LayoutTable) -> Ints:
    """Return one number that grows with the complexity of layouts, the least of what choices that are not made add."""
    number = np.zeros(len(layouts), np.int64)
    for column in complexity(layouts):
        number = (number << _BITS) + column
    return number


def _chunked(priced: Priced, request: PlanRequest, menu: Menu) -> Priced:
    """Return the fastest layouts with a loss in chunks, those that fit."""
    table = priced.layouts.take(priced.by_time[:_NUM_CHUNKED])
    options = [{**memory_options(menu)[0], "loss_chunks": number} for number in menu.loss_chunks[1:]]
    if not options:
        return priced.take(_NONE)
    table = with_memory_options(table, options)
    return price(table.take(is_valid(table, request)), request)


def _candidates(found: Found, to_beat: _ToBeat, request: PlanRequest, menu: Menu) -> Bounds:
    """Return the ways to share the model and spend memory that do not fit without memory keys, and would be picked."""
    tight = found.tight
    if len(to_beat.near):
        limits_s = to_beat.limits_s(_with_usual_ways(tight))
        tight = tight.take(np.asarray(least_of_splits_s(tight, request, menu) < limits_s))
    options = memory_options(menu)[1:]
    room = has_room(with_memory_options(tight, options), request, menu).reshape(len(tight), len(options))
    tight = tight.take(np.flatnonzero(room.any(axis=1)))
    layouts = with_ways(tight, menu)
    layouts = layouts.take(~reduces_needlessly(layouts, request, menu))
    rows = joined([found.bounds, Bounds(layouts, least_of_ways_s(layouts, request, menu))])
    rows = rows.take(rows.least_s < to_beat.limits_s(rows.layouts))
    rows = rows.take(~fits_hungrily(rows.layouts, request, menu))
    if not len(to_beat.near):
        return rows
    shares = rows.least_s / to_beat.limits_s(rows.layouts)
    return rows.take(np.argsort(shares, kind="stable")[:_MOST_TRIED])


def _with_usual_ways(candidates: LayoutTable) -> LayoutTable:
    """Return the splits with the least complex ways to spend memory."""
    return replace(
        candidates,
        is_resharded=candidates.reshards_by_default,
        reduces_each_microbatch=candidates.reduces_each_by_default,
    )


def _bounds(base: Bounds, to_beat: _ToBeat, request: PlanRequest, menu: Menu) -> Bounds:
    """Return the bounds of the layouts of `base` with each combination of memory keys that they need and may pay."""
    first, *options = memory_options(menu)
    by_keys = {frozenset(key for key in MEMORY_KEYS if option[key] != first[key]): option for option in options}
    limits_s, parts = to_beat.limits_s(base.layouts), [base.take(_NONE)]
    seen: dict[frozenset[str], tuple[Floats, Bools]] = {frozenset(): (base.least_s, np.zeros(len(base), np.bool_))}
    # A table of many layouts takes hardly longer than one of few.
    for count in sorted({len(keys) for keys in by_keys}):
        group = [keys for keys in by_keys if len(keys) == count]
        of_fewer = [[seen[one] for one in seen if one < keys] for keys in group]
        least_s = np.array([np.max([one for one, _ in fewer], axis=0) for fewer in of_fewer])
        fits = np.array([np.any([one for _, one in fewer], axis=0) for fewer in of_fewer])
        which, rows = np.nonzero((least_s < limits_s) & ~fits)
        stops = np.searchsorted(which, np.arange(1, len(group)))
        tables = [
            with_memory_options(base.layouts.take(own), [by_keys[keys]])
            for keys, own in zip(group, np.split(rows, stops), strict=True)
        ]
        table = concatenate(tables)
        kept = np.flatnonzero(fits_simply(table, request, menu))
        which, rows, table = which[kept], rows[kept], table.take(kept)
        least_s[which, rows] = least_of_ways_s(table, request, menu)
        kept = np.flatnonzero(least_s[which, rows] < limits_s[rows])
        which, rows, table = which[kept], rows[kept], table.take(kept)
        fits[which, rows] = fits_hungrily(table, request, menu)
        parts.append(Bounds(table, least_s[which, rows]))
        seen |= {keys: (least_s[at], fits[at]) for at, keys in enumerate(group)}
    return joined(parts)


def _pieces(bounds: Bounds) -> Iterator[Ints]:
    """Yield positions in the order of the bounds, in growing pieces."""
    order, size = np.argsort(bounds.least_s, kind="stable"), _FIRST_PIECE
    while len(order):
        yield order[:size]
        order, size = order[size:], 2 * size


def fits_hungrily(layouts: LayoutTable, request: PlanRequest, menu: Menu) -> Bools:
    """Return which layouts fit even with the choices that hold most of what a search usually takes."""
    is_looped = (layouts.pp > 1) & (2 * layouts.pp <= request.architecture.num_layers + 2)
    is_looped &= ("Interleaved1F1B", 2) in menu.pipelines
    hungry = replace(
        layouts,
        compile=np.full(len(layouts), menu.compile[0]),
        schedule=np.where(is_looped, SCHEDULES.index("Interleaved1F1B"), layouts.schedule),
        stages_per_rank=np.where(is_looped, 2, layouts.stages_per_rank),
        activation_checkpoint_every=np.where(
            layouts.activation_checkpoint > 0, max(menu.activation_checkpoint_every), 1
        ),
    )
    return np.asarray(weigh(hungry, request)[1] >= request.margin_bytes)
