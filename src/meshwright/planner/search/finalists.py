"""The fastest layouts, with their schedules replayed action by action instead of the closed-form bubble."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.planner.candidate import candidate_at, layout_at
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.best import PIPELINE_KEYS
from meshwright.planner.search.bubble import num_actions
from meshwright.planner.search.price import Priced
from meshwright.spec.run.layout_plan import Candidate

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
    return sorted(found, key=lambda finalist: finalist.candidate.estimate.step.total_s)[:_NUM_FINALISTS]


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
