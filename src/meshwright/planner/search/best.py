"""best_of: the fastest layout of a kind, its pipelines replayed: the closed form is too low for some, too high for
others.
"""

from __future__ import annotations

from meshwright.cost.arrays import Ints
from meshwright.planner.candidate import candidate_at
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.bubble import num_actions
from meshwright.planner.search.price import Priced
from meshwright.spec.run.plan import Candidate

PIPELINE_KEYS = ("pp", "cp", "tp", "ep", "etp", "microbatch_size", "schedule", "stages_per_rank")
"""Layouts that differ in none of these have the same pipeline, but for what its stages recompute."""
_MOST_SEEN = 400
_TOO_HARSH = 1.05
"""Where the closed form is harsh on a pipeline, it is by a twentieth at most, of those that are among the fastest."""
_SHORT_PIPELINE = 1_500
"""Actions of a pipeline that is replayed for a comparison; a longer one keeps the closed form of its bubble."""


def best_of(priced: Priced, rows: Ints, pick: Candidate, request: PlanRequest, most_actions: int) -> list[Candidate]:
    """Return the fastest of the layouts at `rows`, which come fastest first by the closed form; none if there are none.

    One of each pipeline is replayed, until `most_actions` were, or none of the rest can be faster than the best.
    """
    best: list[Candidate] = []
    seen, num_replayed = set(), 0
    for row in rows[:_MOST_SEEN].tolist():
        slower = priced.total_s[row] / _total_s(best[0]) if best else 0.0
        if slower >= _TOO_HARSH or num_replayed > most_actions:
            break
        pipeline = tuple(getattr(priced.layouts, key)[row].item() for key in PIPELINE_KEYS)
        if pipeline in seen or (slower >= 1 and pipeline[0] == 1):
            continue
        seen.add(pipeline)
        candidate = replayed_if_fast(priced, row, pick, request)
        num_replayed += num_actions(candidate.layout, request)
        best = [min((*best, candidate), key=_total_s)]
    return best


def replayed_if_fast(priced: Priced, row: int, pick: Candidate, request: PlanRequest) -> Candidate:
    """Return the layout at `row`; its pipeline is replayed if it is short, or if the replay decides which is faster."""
    candidate = candidate_at(priced, row, request, _SHORT_PIPELINE)
    return candidate_at(priced, row, request) if _total_s(candidate) < _total_s(pick) else candidate


def _total_s(candidate: Candidate) -> float:
    return candidate.estimate.step.total_s
