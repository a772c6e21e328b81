"""Alternatives that need memory keys: other values of a key and other splits that a plan shows, as a plan finds them
that keeps the key or the split.

The search for the pick tries memory keys where these let in what may be picked (memory_keys.py). An alternative is
slower than that by far, so that most of what could take its place was never tried with them. To try all splits takes as
long as the search for the pick; here only the splits of the alternatives are:

1. Of the ways to spend memory of these splits, those are taken that do not fit without memory keys and whose bounds
   without are below the best of their kind, and of each kind the first few.
2. Each is priced with every combination of memory keys and with all fine choices: they are few.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.cost.layout_table import Bools, Floats, LayoutTable, layout_table
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.finalists import SPLIT_KEYS
from meshwright.planner.search.memory_keys import fits_hungrily
from meshwright.planner.search.menu import Menu, memory_options
from meshwright.planner.search.price import join, price
from meshwright.planner.search.search import Found, Known, limits_of_kinds, wanted
from meshwright.planner.search.space import with_choices, with_fine_choices, with_memory_options

_NUM_OF_KIND = 8
"""Ways to spend memory of each kind that are tried."""


def with_keyed_alternatives(found: Found, known: Known, request: PlanRequest) -> Found:
    """Return `found` with what needs memory keys and is better than the best known of its kind; as it is if none is."""
    menu = found.menu
    options = memory_options(menu)[1:]
    ways = _ways(found, known, request, menu)
    if not options or not len(ways):
        return found
    table = with_fine_choices(with_choices(with_memory_options(ways, options), request, menu), request, menu)
    keyed = price(table, request)
    keyed = keyed.take(keyed.total_s < _limits_s(keyed.layouts, known, request))
    if not len(keyed):
        return found
    return replace(
        found,
        priced=join([found.priced, keyed]),
        is_coarse=np.pad(found.is_coarse, (0, len(keyed))),
        num_scored=found.num_scored + len(table),
    )


def _ways(found: Found, known: Known, request: PlanRequest, menu: Menu) -> LayoutTable:
    """Return the ways to spend memory that may be better with memory keys than the best known of their kind."""
    bounds = found.bounds.take(_has_shown_split(found.bounds.layouts, known))
    bounds = bounds.take(bounds.least_s < _limits_s(bounds.layouts, known, request))
    bounds = bounds.take(~fits_hungrily(bounds.layouts, request, menu))
    return bounds.layouts.take(wanted(bounds.least_s, limits_of_kinds(bounds.layouts, known, request), _NUM_OF_KIND))


def _has_shown_split(layouts: LayoutTable, known: Known) -> Bools:
    shown = layout_table([one.layout for one in (known.pick, *known.best.values(), *known.runners_up)])
    own, of_shown = (np.stack([getattr(table, key) for key in SPLIT_KEYS], axis=1) for table in (layouts, shown))
    return np.asarray((own[:, None] == of_shown[None]).all(axis=2).any(axis=1))


def _limits_s(layouts: LayoutTable, known: Known, request: PlanRequest) -> Floats:
    """Return the seconds below which a layout is better than the best known of one of its kinds."""
    return np.asarray(np.max(list(limits_of_kinds(layouts, known, request)), axis=0, initial=0.0))
