"""The fastest layouts, and of those as fast to within the error of ranking the simplest; pipelines are replayed.

The closed form of a bubble is too low for some pipelines and too high for others.

The simplest of the layouts that are as fast as the fastest, to within the error of ranking.
Simple is what takes least to understand, run and debug, compared from left to right:

    1. the most complex axis: FSDP, HSDP, ep, tp, cp, pp with 1F1B, interleaved stages, a split backward
       (ep comes before tp: it is how a mixture's experts are shared, as FSDP is for the rest)
    2. the number of axes, the product of their degrees
    3. the number of choices that differ from their defaults: when gradients are reduced, whether unsharded parameters
       are freed, async_tp, a ring or Ulysses, expert-tensor parallelism, recomputation of every n-th block

What all blocks recompute, the microbatch, and the memory keys (cpu_offload, activation_offload, loss_chunks) make no
layout simpler or more complex. Of equally simple layouts the fastest is taken, or one less than 1 % slower that needs
fewer memory keys, or as many and leaves clearly more memory.

What is as fast as the fastest is measured against the fastest of all layouts, also where a job sets keys: a limit that
moved with the fastest of those that are left would let a simpler, slower layout pass for the pick as soon as one of the
pick's own keys is set. Where all that are left are slower, the limits are that one's step times powers of 1 + the
error of ranking. Such an order of layouts does not depend on which of them are asked about.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from meshwright.cost.constants import fixed_constant
from meshwright.cost.layout_table import CONTEXT_METHODS, Ints, LayoutTable, distinct_rows, layout_table
from meshwright.planner.candidate import candidate_at, layout_at, prepare_replays
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.bubble import num_actions
from meshwright.planner.search.price import Priced
from meshwright.spec.run.layout_plan import Candidate

PIPELINE_KEYS = ("pp", "cp", "tp", "ep", "etp", "microbatch_size", "schedule", "stages_per_rank")
"""Layouts that differ in none of these have the same pipeline, but for what its stages recompute."""
_MOST_SEEN = 400
_AT_ONCE = 16
"""Pipelines whose replays are prepared together."""
_TOO_HARSH = 1.05
"""Where the closed form is harsh on a pipeline, it is by a twentieth at most, of those that are among the fastest."""
SHORT_PIPELINE = 1_500
"""Actions of a pipeline that is replayed for a comparison; a longer one keeps the closed form of its bubble."""


def best_of(priced: Priced, rows: Ints, pick: Candidate, request: PlanRequest, most_actions: int) -> list[Candidate]:
    """Return the fastest of the layouts at `rows`, which come fastest first by the closed form; none if there are none.

    One of each pipeline is replayed, until `most_actions` were, or none of the rest can be faster than the best.
    """
    best: list[Candidate] = []
    num_replayed = 0
    pipelines = distinct(priced, PIPELINE_KEYS, rows[:_MOST_SEEN])
    for place, row in enumerate(pipelines):
        slower = priced.total_s[row] / best[0].step_s if best else 0.0
        if slower >= _TOO_HARSH or num_replayed > most_actions:
            break
        if slower >= 1 and priced.layouts.pp[row] == 1:
            continue
        if place % _AT_ONCE == 0:
            prepare_replays(priced, pipelines[place : place + _AT_ONCE], request)
        candidate = replayed_if_fast(priced, row, pick, request)
        num_replayed += num_actions(candidate.layout, request)
        best = [min((*best, candidate), key=lambda one: one.step_s)]
    return best


def replayed_if_fast(priced: Priced, row: int, pick: Candidate, request: PlanRequest) -> Candidate:
    """Return the layout at `row`; its pipeline is replayed if it is short, or if the replay decides which is faster."""
    candidate = candidate_at(priced, row, request, SHORT_PIPELINE)
    return candidate_at(priced, row, request) if candidate.step_s < pick.step_s else candidate


_NUM_REPLAYED = 24
_NUM_FINALISTS = 20
_MAX_ACTIONS = 40_000
"""Pipeline actions that are replayed for all finalists together: a fraction of a second."""
SPLIT_KEYS = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")


@dataclass(frozen=True)
class Finalist:
    """One of the fastest layouts."""

    row: int
    """Its place in the priced table."""
    candidate: Candidate
    """The layout with its estimate."""


def finalists(priced: Priced, request: PlanRequest) -> list[Finalist]:
    """Return the fastest layouts of different partitions and pipelines, in the order of their replayed steps."""
    found: list[Finalist] = []
    actions: dict[tuple[int, str, int], int] = {}
    rows = distinct(priced, PIPELINE_KEYS, priced.by_time)[:_NUM_REPLAYED]
    prepare_replays(priced, rows, request)
    for row in rows:
        layout = layout_at(priced.layouts, row, request)
        # Replays are cached.
        count = num_actions(layout, request)
        actions[layout.pp, layout.schedule, count] = count
        if sum(actions.values()) > _MAX_ACTIONS and found:
            break
        found.append(Finalist(row, candidate_at(priced, row, request)))
    return sorted(found, key=lambda finalist: finalist.candidate.step_s)[:_NUM_FINALISTS]


def distinct(priced: Priced, keys: tuple[str, ...], rows: Ints) -> list[int]:
    """Return those of `rows` that differ from all before them in one of `keys`."""
    first, _ = distinct_rows(getattr(priced.layouts, key)[rows] for key in keys)
    return list(rows[np.sort(first)].tolist())


def distinct_splits(priced: Priced, count: int) -> list[int]:
    """Return the rows of the `count` fastest layouts of different splits over the ranks."""
    return distinct(priced, SPLIT_KEYS, priced.by_time)[:count]


RANKING_ERROR = fixed_constant("ranking_error")
"""Two layouts whose predicted steps differ by less may be in the other order."""

_ALL_GATHER = CONTEXT_METHODS.index("all-gather")
_MAX_REPLAYED = 12
"""Pipelines that are replayed to see whether they are fast enough."""
_ROUNDING = 1e-9
ALIKE = 0.01
"""Equally simple layouts whose steps differ by less are as fast as each other."""
MEMORY_STEP = 0.04
"""Share of the usable memory from which on one layout leaves clearly more than another."""


def simplest(
    priced: Priced, finalists: list[Finalist], fastest: Candidate, request: PlanRequest, least_s: float | None = None
) -> Candidate:
    """Return the simplest layout that fits and is as fast as `fastest` to within the error of ranking.

    `least_s` is the step of the fastest of all layouts, where `fastest` is only that of what the request leaves open.
    """
    least_s = fastest.step_s if least_s is None else least_s
    limit_s = _next_limit_s(fastest.step_s, least_s, RANKING_ERROR)
    known = [one.candidate for one in finalists if one.candidate.step_s <= limit_s]
    best = min([fastest, *known], key=_complexity_and_time)
    rows = np.flatnonzero(priced.total_s <= limit_s)
    columns = np.stack(complexity(priced.layouts.take(rows)))
    order = np.lexsort((priced.total_s[rows], *columns[::-1]))
    own = complexity_of(best)
    simpler = takewhile(lambda at: tuple(columns[:, at].tolist()) <= own, order)
    first = next(_replayed(priced, [int(rows[at]) for at in simpler], limit_s, request), best)
    best = min(first, best, key=_complexity_and_time)
    alike = rows[np.all(np.equal(columns.T, complexity_of(best)), axis=1)]
    limit_s = min(limit_s, _next_limit_s(best.step_s, least_s, ALIKE))
    alike, best = _with_fewest_keys(priced, alike, best, limit_s, request)
    return _roomiest(priced, alike, best, limit_s, request)


def _next_limit_s(step_s: float, least_s: float, error: float) -> float:
    """Return the first of the limits, `least_s` times powers of 1 + `error`, that `step_s` is below."""
    power = math.floor(math.log(step_s / least_s) / math.log1p(error) + _ROUNDING)
    return float(least_s * (1 + error) ** (max(power, 0) + 1))


def _with_fewest_keys(
    priced: Priced, rows: Ints, best: Candidate, limit_s: float, request: PlanRequest
) -> tuple[Ints, Candidate]:
    """Return those of `rows` within the limit that have fewest memory keys, and the fastest of them."""
    rows = rows[priced.total_s[rows] <= limit_s]
    num_keys, own = _num_memory_keys(priced.layouts.take(rows)), int(_num_memory_keys(layout_table([best.layout]))[0])
    for number in range(own):
        fewer = rows[num_keys == number]
        order = np.argsort(priced.total_s[fewer], kind="stable")
        found = next(_replayed(priced, fewer[order].tolist(), limit_s, request), None)
        if found is not None:
            return fewer, found
    return rows[num_keys == own], best


def _num_memory_keys(layouts: LayoutTable) -> Ints:
    return np.asarray(layouts.cpu_offload.astype(int) + layouts.activation_offload + (layouts.loss_chunks > 1))


def _roomiest(priced: Priced, rows: Ints, best: Candidate, limit_s: float, request: PlanRequest) -> Candidate:
    """Return the layout of `rows` that is as fast as `best` and leaves most memory; `best` if none leaves more."""
    least = best.headroom_bytes + MEMORY_STEP * request.cluster.device.usable_memory_bytes
    rows = rows[(priced.headroom_bytes[rows] >= least) & (priced.total_s[rows] <= limit_s)]
    order = np.lexsort((priced.total_s[rows], -priced.headroom_bytes[rows]))
    return next(_replayed(priced, rows[order].tolist(), limit_s, request), best)


def _replayed(priced: Priced, rows: Sequence[int], limit_s: float, request: PlanRequest) -> Iterator[Candidate]:
    """Yield the layouts at `rows` whose replayed step is at most `limit_s`, until enough pipelines were replayed."""
    num_replayed = 0
    for place, row in enumerate(rows):
        if place % _AT_ONCE == 0:
            prepare_replays(priced, rows[place : place + _AT_ONCE], request)
        candidate = candidate_at(priced, row, request)
        if candidate.step_s <= limit_s:
            yield candidate
        num_replayed += candidate.layout.pp > 1
        if num_replayed == _MAX_REPLAYED:
            return


def complexity(layouts: LayoutTable) -> list[Ints]:
    """Return what makes each layout complex, the most important first: more is more complex."""
    is_piped = layouts.pp > 1
    stages = np.where(is_piped, layouts.stages_per_rank, 1)
    levels = (
        layouts.dp_replicate > 1,
        layouts.ep > 1,
        layouts.tp > 1,
        layouts.cp > 1,
        is_piped,
        stages > 1,
        layouts.splits_backward,
    )
    level = np.max([(number + 1) * has for number, has in enumerate(levels)], axis=0)
    axes = (layouts.dp_replicate, layouts.ep, layouts.tp, layouts.cp, layouts.pp)
    unusual = (
        layouts.reduces_each_microbatch != layouts.reduces_each_by_default,
        layouts.is_resharded != layouts.reshards_by_default,
        layouts.async_tp,
        (layouts.cp > 1) & (layouts.cp_method != _ALL_GATHER),
        layouts.etp > 1,
        layouts.activation_checkpoint_every > 1,
    )
    num_axes = np.sum([degree > 1 for degree in axes], axis=0)
    return [level, num_axes, layouts.ep * layouts.tp * layouts.cp * layouts.pp, np.sum(unusual, axis=0)]


def complexity_of(candidate: Candidate) -> tuple[int, ...]:
    """Return what makes one layout complex."""
    return tuple(int(column[0]) for column in complexity(layout_table([candidate.layout])))


def _complexity_and_time(candidate: Candidate) -> tuple[float, ...]:
    return *complexity_of(candidate), candidate.step_s
