"""Which of the ranks that share matrices computes on each, where an optimizer needs whole ones (Muon): read by the
runtime, which distributes them so, and by the cost model, which prices the busiest rank.

Greedy: the costliest matrix first, each for the rank with the least work so far.
"""

from collections.abc import Sequence
from heapq import heapify, heapreplace


def orthogonalization_cost(rows: int, columns: int) -> int:
    """Return what grows as the FLOPs of orthogonalizing a matrix: s^2 (2 l + s), s its shorter side, l its longer."""
    short, long = sorted((rows, columns))
    return short * short * (2 * long + short)


def owners_of(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Return the positions in `costs` of the matrices that each rank owns, the costliest first."""
    owned: list[list[int]] = [[] for _ in range(num_ranks)]
    work = [(0, rank) for rank in range(num_ranks)]
    heapify(work)
    for position in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        done, rank = work[0]
        owned[rank].append(position)
        heapreplace(work, (done + costs[position], rank))
    return owned
