"""Where a model is cut into the stages of a pipeline: so that the slowest stage is as fast as it can be.

What is balanced is each stage, also where a rank holds several (V and looped schedules) and its time is their sum. With
even stages the ranks are even too, to within one block a stage. Only where one unit, such as a large head, takes longer
than a whole stage should, could the other stages of its rank take some blocks less; layout.stage_boundaries can say so.
"""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache

from meshwright.errors import InfeasibleLayout
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.model_spec import BYTES_PER_ELEMENT, BlockGroup, ModelSpec

_ROUNDING = 1 + 1e-9
"""Costs closer than this are equal: they are differences of sums, and may be floats."""


def stage_boundaries(layout: Layout, model_spec: ModelSpec, seq_len: int) -> tuple[int, ...]:
    """Return the first block of every stage but the first: layout.stage_boundaries, or the best split if not set.

    Raises InfeasibleLayout for a model with too few blocks. Whether boundaries that are set fit, spec/job/validity.py
    says.
    """
    if layout.stage_boundaries is not None:
        return layout.stage_boundaries
    return best_boundaries(model_spec, seq_len, layout.num_stages)


def blocks_of_stages(layout: Layout, model_spec: ModelSpec, seq_len: int) -> dict[int, range]:
    """Return the numbers of the blocks of each stage; raises InfeasibleLayout for a model with too few."""
    num_blocks = sum(group.count for group in model_spec.groups) - 2  # without the embedding and the head
    edges = [0, *stage_boundaries(layout, model_spec, seq_len), num_blocks]
    return {stage: range(edges[stage], edges[stage + 1]) for stage in range(layout.num_stages)}


@lru_cache(maxsize=1024)
def best_boundaries(model_spec: ModelSpec, seq_len: int, num_stages: int) -> tuple[int, ...]:
    """Return the first block of every stage but the first, as `split_stages` has them by FLOPs and bytes."""
    return split_stages(*block_costs(model_spec, seq_len), num_stages)


def block_costs(model_spec: ModelSpec, seq_len: int) -> tuple[list[int], list[int]]:
    """Return the forward FLOPs for one token, and the bytes of parameters, of each unit that a stage can hold.

    The units are the embedding, each block, and the last norm with the head. A tied head weighs its bytes too: its
    stage is not the embedding's, so it has a copy.
    """
    groups = model_spec.groups
    flops = [[group.forward_flops_per_token(seq_len)] * group.count for group in groups]
    sizes = [[_held_bytes(group)] * group.count for group in groups]
    return list(itertools.chain(*flops)), list(itertools.chain(*sizes))


def split_stages(block_times: Sequence[float], block_bytes: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return the first block of every stage but the first, for units (embedding, block 0, block 1, ..., head).

    The slowest stage is as fast as possible; among such splits the largest stage is as small as possible; among those
    the times are as even as possible (least sum of squares); and then later stages get more, since earlier ones hold
    more microbatches. Exact. The embedding is in the first stage and the head in the last, which may hold no block;
    every other stage holds at least one. Raises InfeasibleLayout if there are too few blocks for that.
    """
    num_blocks = len(block_times) - 2
    if num_blocks < num_stages - 2:
        raise InfeasibleLayout(_too_few_blocks(num_blocks, num_stages))
    if num_stages == 1:
        return ()
    # A cut before unit c is boundary c - 1; cuts 1 .. num_blocks + 1 keep embedding and head at the ends.
    time, size = _sums_of(block_times), _sums_of(block_bytes)
    max_time = _least_bound(time, lambda bound: _fits(num_stages, (time, bound)))
    max_size = _least_bound(size, lambda bound: _fits(num_stages, (time, max_time), (size, bound)))
    cuts = _most_even(num_stages, (time, max_time), (size, max_size))
    return tuple(cut - 1 for cut in cuts)


_Sums = tuple[float, ...]
"""The cost of all units before each one, and last of all units: what a stage costs is the difference of two."""
_Bound = tuple[_Sums, float]
"""A cost of units, and the most that it may be for a stage."""


def _sums_of(units: Sequence[float]) -> _Sums:
    return tuple(itertools.accumulate(units, initial=0))


@lru_cache(maxsize=16)
def _stage_costs(sums: _Sums) -> list[float]:
    """Return what any stage may cost, ascending: a search asks this of one model for many numbers of stages."""
    return sorted({stop - start for start, stop in itertools.combinations(sums, 2)})


def _least_bound(sums: _Sums, fits: Callable[[float], bool]) -> float:
    """Return the least bound, rounding allowed for, that fits: it is the cost of some stage."""
    costs = _stage_costs(sums)
    return costs[bisect_left(costs, True, key=lambda bound: fits(bound * _ROUNDING))] * _ROUNDING


def _furthest(start: int, bounds: Sequence[_Bound]) -> int:
    """Return where a stage that starts at unit `start` ends at the latest to keep within `bounds`."""
    return min(bisect_right(sums, sums[start] + most) for sums, most in bounds) - 1


def _fits(num_stages: int, *bounds: _Bound) -> bool:
    """Return whether `num_stages` stages can keep within `bounds`: each takes as much as it may, so fewest are used.

    Fewer than `num_stages` will do, since a stage that is cut in two costs no more, and there are enough units.
    """
    start, num_units = 0, len(bounds[0][0]) - 1
    for _ in range(num_stages):
        start = _furthest(start, bounds)
    return start == num_units


def _most_even(num_stages: int, *bounds: _Bound) -> list[int]:
    """Return the cuts with the least sum of squared times among those within `bounds`, the first cut least on ties."""
    time = bounds[0][0]
    furthest = [_furthest(start, bounds) for start in range(len(time))]
    firsts, lasts = _starts(num_stages, furthest)
    # From the last stage to the first: the least cost of it and all later ones by the unit it starts at, and its end.
    costs, best_stops = {len(time) - 1: 0.0}, []
    for stage in reversed(range(num_stages)):
        later, costs = costs, {}
        best_stop: dict[int, int] = {}
        for start in range(firsts[stage], lasts[stage] + 1):
            least = float("inf")
            for stop in range(max(start + 1, firsts[stage + 1]), min(furthest[start], lasts[stage + 1]) + 1):
                total = (time[stop] - time[start]) ** 2 + later[stop]
                if total * _ROUNDING < least:
                    least, best_stop[start] = total, stop
            costs[start] = least
        best_stops.append(best_stop)
    cuts = list(itertools.accumulate(reversed(best_stops), lambda start, best_stop: best_stop[start], initial=0))
    return cuts[1:-1]


def _starts(num_stages: int, furthest: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return for each stage, and for the end, the first and the last unit that it can start at in any split.

    The last follows from stages before it that take as much as they may, the first from such stages after it; and no
    stage is empty.
    """
    num_units = len(furthest) - 1
    lasts, firsts = [0], [num_units]
    for stage in range(1, num_stages + 1):
        lasts.append(min(furthest[lasts[-1]], num_units - num_stages + stage))
        firsts.append(max(bisect_left(furthest, firsts[-1]), num_stages - stage))
    return firsts[::-1], lasts


def _held_bytes(unit: BlockGroup) -> int:
    # Only a tied head is multiplied with more weights than it owns, and a sparse layer with fewer.
    return BYTES_PER_ELEMENT["float32"] * sum(max(op.num_parameters, op.num_matmul_parameters) for op in unit.ops)


def _too_few_blocks(num_blocks: int, num_stages: int) -> str:
    return (
        f"the model's {num_blocks} blocks cannot be split into {num_stages} stages (layout.pp x virtual_stages): each "
        f"but the first and the last needs a block, so take {num_blocks + 2} stages or fewer"
    )
