"""The search: every valid layout that can win is judged by memory and time; the rest is bounded from below.

1. All splits of the model and the batch over the ranks, each with every way to spend memory for time, as one table.
2. What cannot fit is dropped, and the rest gets bounds that no layout with other choices is faster than (bounds.py).
3. In the order of the bounds, all pipelines and methods of context parallelism are priced, until the bounds pass the
   fastest layout that fits by a margin; and on to a certain number, so that the list of alternatives is not short.
   What neither a pipeline nor async_tp makes fit is dropped there: most ways to spend memory are never reached.
4. The best of these are varied by the choices that change time a little. A few are at once, to end the search sooner.

That ends where nothing that is left can be the fastest. The best with another value of a key, or of another split, may
be slower than that by far: of each kind `complete` prices the rest too, in the order of the bounds, as long as these
are below the best that is known.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.cost.layout_table import Bools, Floats, Ints, LayoutTable, concatenate, layout_table
from meshwright.planner.explain.contrasts import may_have_another
from meshwright.planner.explain.explain import KEYS
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.bounds import Bounds, bounds_of, has_room, may_fit
from meshwright.planner.search.finalists import RANKING_ERROR, SPLIT_KEYS
from meshwright.planner.search.menu import Menu
from meshwright.planner.search.price import Priced, join, price, price_leaner
from meshwright.planner.search.space import splits, with_choices, with_fine_choices, with_other_fine_choices
from meshwright.spec.run.layout_plan import Candidate

_LEAST_WANTED, _MOST_WANTED, _WANTED_PER_DEVICE = 10_000, 110_000, 20
_FIRST_PIECE, _LARGEST_PIECE = 4_000, 24_000
"""Layouts that are priced at once: few at first, since a fast one that fits spares the rest."""
_MARGIN = 1 + RANKING_ERROR
"""A layout as fast as the fastest to within the error of ranking may be picked for being simpler."""
_NUM_WEIGHED = 4_000
"""Ways to spend memory that are weighed at once."""
_NUM_REFINED = 2_000
_NUM_REFINED_AT_ONCE = 32
"""Layouts of a piece that are varied at once, so that the time that ends the search is the fastest's."""
_FREED_BYTES = 16 * 2**20
ROUNDS = (64, 512, 4096)
"""Layouts of each kind that `complete` prices at once: few at first, since a fast one that fits spares the rest."""
_NUM_OF_KIND = 16
"""Layouts of each kind that `complete` varies by fine choices at once."""


@dataclass(frozen=True)
class Found:
    """What a search saw."""

    menu: Menu
    priced: Priced
    """The layouts that fit."""
    is_coarse: Bools
    """Which of them may become faster by other fine choices, which were not tried."""
    rest: Bounds
    """The bounds of what may fit and was not priced."""
    bounds: Bounds
    """The bounds of all ways to spend memory of splits that may fit."""
    tight: LayoutTable
    """The splits that cannot."""
    num_scored: int
    """Layouts whose memory was compared with the device's, those that fit or not."""


def search(request: PlanRequest, menu: Menu, min_scored: int | None = None) -> Found:
    """Return the layouts of `menu` that fit and were priced, the fastest of all among them; none if nothing fits.

    At least `min_scored` are scored, where there are so many: by default more for a larger cluster.
    """
    _keep_freed_memory()
    min_scored = default_min_scored(request) if min_scored is None else min_scored
    every = splits(request, menu)
    fits = has_room(every, request, menu)
    bounds, tight = bounds_of(every.take(fits), request, menu), every.take(~fits)
    parts, waiting = [price(bounds.layouts.take(np.arange(0)), request)], []
    first_priced = first_price(menu)
    num_scored, best_s, is_left = 0, np.inf, np.ones(len(bounds.layouts), np.bool_)
    for rows in _pieces(bounds, is_left, request, menu):
        if num_scored >= min_scored and bounds.least_s[rows[0]] > best_s * _MARGIN:
            break
        is_left[rows] = False
        waiting.append(with_choices(bounds.layouts.take(rows), request, menu))
        num_scored += len(waiting[-1])
        # Before enough are scored no time ends the search, so that several pieces can be priced at once.
        if num_scored >= min_scored or sum(map(len, waiting)) >= _LARGEST_PIECE:
            parts.append(first_priced(concatenate(waiting), request))
            best_s, waiting = min(best_s, _fastest_s(parts[-1], best_s, request, menu)), []
    priced = join(parts + [first_priced(table, request) for table in waiting])
    order = np.argsort(promised_s(priced, menu), kind="stable")
    refined = with_fine_choices(priced.layouts.take(order[:_NUM_REFINED]), request, menu)
    num_scored += len(refined) - len(order[:_NUM_REFINED])
    parts = [price(refined, request), priced.take(order[_NUM_REFINED:])]
    is_coarse = np.repeat([False, True], [len(part) for part in parts])
    return Found(menu, join(parts), is_coarse, bounds.take(is_left), bounds, tight, num_scored)


def first_price(menu: Menu) -> Callable[[LayoutTable, PlanRequest], Priced]:
    """Return what prices layouts whose fine choices are the first of the menu."""
    return price_leaner if len(menu.async_tp) > 1 else price


def default_min_scored(request: PlanRequest) -> int:
    """Return how many layouts are scored although the bounds exclude a better one."""
    return min(_MOST_WANTED, max(_LEAST_WANTED, _WANTED_PER_DEVICE * request.num_devices))


def _keep_freed_memory() -> None:
    """Let glibc keep the memory of arrays for the next ones: a twentieth of an answer's time would go into new pages.

    It gives back what is free beyond twice the largest block that was ever freed, so one large block is, untouched.
    """
    np.empty(_FREED_BYTES, np.uint8)


def _fastest_s(priced: Priced, best_s: float, request: PlanRequest, menu: Menu) -> float:
    """Return the seconds of the fastest layout, with other fine choices where these may be faster than `best_s`."""
    coarse_s = float(priced.total_s.min(initial=np.inf))
    least_s = promised_s(priced, menu)
    rows = np.argsort(least_s, kind="stable")[:_NUM_REFINED_AT_ONCE]
    rows = rows[least_s[rows] < min(best_s, coarse_s)]
    if not len(rows):
        return coarse_s
    refined = price(with_fine_choices(priced.layouts.take(rows), request, menu), request)
    return min(coarse_s, float(refined.total_s.min(initial=np.inf)))


def promised_s(priced: Priced, menu: Menu) -> Floats:
    """Return the seconds that no fine choice makes a layout faster than."""
    step, layouts = priced.step, priced.layouts
    again = step.recomputation_s * (1 - 1 / max(menu.activation_checkpoint_every))
    hidden = step.tp_communication_s * ((layouts.tp > 1) & layouts.compile & any(menu.async_tp) & ~layouts.async_tp)
    return np.asarray(priced.total_s - again - hidden)


def _pieces(bounds: Bounds, is_left: Bools, request: PlanRequest, menu: Menu) -> Iterator[Ints]:
    """Yield positions of what may fit in the order of the bounds, in growing pieces; what may not is left no more."""
    order = np.argsort(bounds.least_s, kind="stable")
    choices = max(1, len(menu.pipelines)) * len(menu.cp_method)
    size = _FIRST_PIECE
    for first in range(0, len(order), _NUM_WEIGHED):
        rows = order[first : first + _NUM_WEIGHED]
        fits = may_fit(bounds.layouts.take(rows), request, menu)
        is_left[rows[~fits]] = False
        rows = rows[fits]
        while len(rows):
            count = max(1, size // choices)
            yield rows[:count]
            rows, size = rows[count:], min(2 * size, _LARGEST_PIECE)


@dataclass(frozen=True)
class Known:
    """The layouts that a plan compares, so far."""

    pick: Candidate
    best: dict[str, Candidate]
    """By column of a table, the best layout with another value than the pick's."""
    runners_up: Sequence[Candidate]
    """The best layouts of other splits, fastest first."""
    num_wanted: int
    """How many of them there shall be."""


def complete(found: Found, known: Known, count: int, request: PlanRequest) -> Found:
    """Return `found` with up to `count` more of each kind priced; as it is where no better one of any kind is left."""
    menu, rest, priced = found.menu, found.rest, found.priced
    rows = wanted(rest.least_s, limits_of_kinds(rest.layouts, known, request), count)
    promised = promised_s(priced, menu)
    coarse = np.flatnonzero(found.is_coarse & (promised < priced.total_s))
    again = coarse[wanted(promised[coarse], limits_of_kinds(priced.layouts.take(coarse), known, request), _NUM_OF_KIND)]
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
    joined = join([priced, more, finer])
    return replace(found, priced=joined, is_coarse=is_coarse, rest=rest.take(is_left), num_scored=num_scored)


def wanted(least_s: Floats, limits: Iterable[Floats], count: int) -> Ints:
    """Return the positions of the first `count` of each kind whose bounds are below the kind's limit."""
    found = [np.zeros(0, np.int64)]
    for limit in limits:
        rows = np.flatnonzero(least_s < limit)
        found.append(rows[np.argsort(least_s[rows], kind="stable")[:count]])
    return np.unique(np.concatenate(found))


def limits_of_kinds(layouts: LayoutTable, known: Known, request: PlanRequest) -> Iterator[Floats]:
    """Yield for each kind the seconds below which a layout would be news; zero for those of no such kind."""
    own = layout_table([known.pick.layout])
    for key in KEYS:
        if key not in request.fixed:
            is_kind = may_have_another(layouts, own, key, request)
            yield np.where(is_kind, known.best[key].step_s if key in known.best else np.inf, 0.0)
    yield _split_limit_s(layouts, known)


def _split_limit_s(layouts: LayoutTable, known: Known) -> Floats:
    """Return the seconds below which a layout is the best of its split, or its split is among the best."""
    is_full = len(known.runners_up) >= known.num_wanted
    last_s = known.runners_up[-1].step_s if is_full and known.runners_up else np.inf
    limit_s = np.full(len(layouts), last_s if known.num_wanted else 0.0)
    for candidate, seconds in [(known.pick, 0.0), *((one, one.step_s) for one in known.runners_up)]:
        limit_s[np.all([getattr(layouts, key) == getattr(candidate.layout, key) for key in SPLIT_KEYS], axis=0)] = (
            seconds
        )
    return limit_s
