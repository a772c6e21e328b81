"""finalists and best_of: the fastest layouts, and the fastest of a kind, their pipelines replayed action by action.

The closed form of a bubble is too low for some pipelines and too high for others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.cost.arrays import Ints
from meshwright.planner.candidate import candidate_at, layout_at
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.bubble import num_actions
from meshwright.planner.search.price import Priced
from meshwright.spec.run.layout_plan import Candidate

PIPELINE_KEYS = ("pp", "cp", "tp", "ep", "etp", "microbatch_size", "schedule", "stages_per_rank")
"""Layouts that differ in none of these have the same pipeline, but for what its stages recompute."""
_MOST_SEEN = 400
_TOO_HARSH = 1.05
"""Where the closed form is harsh on a pipeline, it is by a twentieth at most, of those that are among the fastest."""
SHORT_PIPELINE = 1_500
"""Actions of a pipeline that is replayed for a comparison; a longer one keeps the closed form of its bubble."""


def best_of(priced: Priced, rows: Ints, pick: Candidate, request: PlanRequest, most_actions: int) -> list[Candidate]:
    """Return the fastest of the layouts at `rows`, which come fastest first by the closed form; none if there are none.

    One of each pipeline is replayed, until `most_actions` were, or none of the rest can be faster than the best.
    """
    best: list[Candidate] = []
    seen, num_replayed = set(), 0
    for row in rows[:_MOST_SEEN].tolist():
        slower = priced.total_s[row] / best[0].step_s if best else 0.0
        if slower >= _TOO_HARSH or num_replayed > most_actions:
            break
        pipeline = tuple(getattr(priced.layouts, key)[row].item() for key in PIPELINE_KEYS)
        if pipeline in seen or (slower >= 1 and pipeline[0] == 1):
            continue
        seen.add(pipeline)
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
    for row in distinct(priced, PIPELINE_KEYS, _NUM_REPLAYED):
        layout = layout_at(priced.layouts, row, request)
        # Replays are cached.
        count = num_actions(layout, request)
        actions[layout.pp, layout.schedule, count] = count
        if sum(actions.values()) > _MAX_ACTIONS and found:
            break
        found.append(Finalist(row, candidate_at(priced, row, request)))
    return sorted(found, key=lambda finalist: finalist.candidate.step_s)[:_NUM_FINALISTS]


def distinct(priced: Priced, keys: tuple[str, ...], count: int) -> Iterator[int]:
    """Yield the rows of the `count` fastest layouts that differ in one of `keys`, fastest first."""
    seen = set()
    for row in priced.by_time.tolist():
        values = tuple(getattr(priced.layouts, key)[row].item() for key in keys)
        if values in seen:
            continue
        seen.add(values)
        yield row
        if len(seen) == count:
            return


def distinct_splits(priced: Priced, count: int) -> Iterator[int]:
    """Yield the rows of the `count` fastest layouts of different splits over the ranks."""
    return distinct(priced, SPLIT_KEYS, count)
