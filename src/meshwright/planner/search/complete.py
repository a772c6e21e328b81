"""complete: prices what a page compares the pick with, until the best of each kind is known.

A search ends where nothing that is left can be the fastest. The best with another value of a key, or of another split,
may be slower than that by far: of each kind the rest is priced too, in the order of the bounds, as long as these are
below the best that is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.cost.arrays import Floats, Ints
from meshwright.cost.layout_table import LayoutTable, layout_table
from meshwright.planner.explain.contrasts import may_have_another
from meshwright.planner.explain.explain import KEYS
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.bounds import may_fit
from meshwright.planner.search.finalists import SPLIT_KEYS
from meshwright.planner.search.price import join, price
from meshwright.planner.search.search import Found, first_price, promised_s
from meshwright.planner.search.space import with_choices, with_other_fine_choices
from meshwright.spec.run.plan import Candidate

ROUNDS = (64, 512, 4096)
"""Layouts of each kind that are priced at once: few at first, since a fast one that fits spares the rest."""
_NUM_REFINED = 16
"""Layouts of each kind that are varied by fine choices at once."""


@dataclass(frozen=True)
class Known:
    """The layouts that a plan compares, so far."""

    pick: Candidate
    best_s: dict[str, float]
    """By column of a table, the seconds of the best layout with another value than the pick's."""
    runners_up: Sequence[Candidate]
    """The best layouts of other splits, fastest first."""
    num_wanted: int
    """How many of them there shall be."""


def complete(found: Found, known: Known, count: int, request: PlanRequest) -> Found:
    """Return `found` with up to `count` more of each kind priced; as it is where no better one of any kind is left."""
    menu, rest, priced = found.menu, found.rest, found.priced
    rows = _wanted(rest.least_s, _limits(rest.layouts, known, request), count)
    promised = promised_s(priced, menu)
    coarse = np.flatnonzero(found.is_coarse & (promised < priced.total_s))
    again = coarse[_wanted(promised[coarse], _limits(priced.layouts.take(coarse), known, request), _NUM_REFINED)]
    if not len(rows) and not len(again):
        return found
    fits = may_fit(rest.layouts.take(rows), request, menu)
    tables = (
        with_choices(rest.layouts.take(rows[fits]), request, menu),
        with_other_fine_choices(priced.layouts.take(again), request, menu),
    )
    more, finer = (first_price(menu)(tables[0], request), price(tables[1], request))
    is_coarse, is_left = found.is_coarse.copy(), np.ones(len(rest.layouts), np.bool_)
    is_coarse[again], is_left[rows] = False, False
    is_coarse = np.concatenate([is_coarse, np.ones(len(more), np.bool_), np.zeros(len(finer), np.bool_)])
    num_scored = found.num_scored + sum(map(len, tables))
    return Found(menu, join([priced, more, finer]), is_coarse, rest.take(is_left), num_scored)


def _wanted(least_s: Floats, limits: Iterable[Floats], count: int) -> Ints:
    """Return the positions of the first `count` of each kind whose bounds are below the kind's limit."""
    found = [np.zeros(0, np.int64)]
    for limit in limits:
        rows = np.flatnonzero(least_s < limit)
        found.append(rows[np.argsort(least_s[rows], kind="stable")[:count]])
    return np.unique(np.concatenate(found))


def _limits(layouts: LayoutTable, known: Known, request: PlanRequest) -> Iterator[Floats]:
    """Yield for each kind the seconds below which a layout would be news; zero for those of no such kind."""
    own = layout_table([known.pick.layout])
    for key in KEYS:
        if key not in request.fixed:
            is_kind = may_have_another(layouts, own, key, request)
            yield np.where(is_kind, known.best_s.get(key, np.inf), 0.0)
    yield _split_limit_s(layouts, known)


def _split_limit_s(layouts: LayoutTable, known: Known) -> Floats:
    """Return the seconds below which a layout is the best of its split, or its split is among the best."""
    is_full = len(known.runners_up) >= known.num_wanted
    last_s = known.runners_up[-1].estimate.step.total_s if is_full and known.runners_up else np.inf
    limit_s = np.full(len(layouts), last_s if known.num_wanted else 0.0)
    for candidate, seconds in [(known.pick, 0.0), *((one, one.estimate.step.total_s) for one in known.runners_up)]:
        limit_s[np.all([getattr(layouts, key) == getattr(candidate.layout, key) for key in SPLIT_KEYS], axis=0)] = (
            seconds
        )
    return limit_s
