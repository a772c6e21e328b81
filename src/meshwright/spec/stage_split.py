"""Where a model is cut into the stages of a pipeline: so that the slowest stage is as fast as it can be.

What is balanced is each stage, also where a rank holds several (V and looped schedules) and its time is their sum. With
even stages the ranks are even too, to within one block a stage. Only where one unit, such as a large head, takes longer
than a whole stage should, could the other stages of its rank take some blocks less; layout.stage_boundaries can say so.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence

from meshwright.errors import InfeasibleLayout
from meshwright.spec.layout import Layout
from meshwright.spec.model_spec import BYTES_PER_ELEMENT, BlockGroup, ModelSpec

_ROUNDING = 1 + 1e-9
"""Costs closer than this are equal: they are differences of sums, and may be floats."""


def stage_boundaries(layout: Layout, model_spec: ModelSpec, seq_len: int) -> tuple[int, ...]:
    """Return the first block of every stage but the first: layout.stage_boundaries, or the best split if not set.

    Raises InfeasibleLayout for a model with too few blocks. Whether boundaries that are set fit, spec/validity.py says.
    """
    if layout.stage_boundaries is not None:
        return layout.stage_boundaries
    return split_stages(*block_costs(model_spec, seq_len), layout.num_stages)


def block_costs(model_spec: ModelSpec, seq_len: int) -> tuple[list[int], list[int]]:
    """Return the forward FLOPs for one token, and the bytes of parameters, of each unit that a stage can hold.

    The units are the embedding, each block, and the last norm with the head. A tied head weighs its bytes too: its
    stage is not the embedding's, so it has a copy.
    """
    units = [group for group in model_spec.groups for _ in range(group.count)]
    return [unit.forward_flops_per_token(seq_len) for unit in units], [_held_bytes(unit) for unit in units]


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
    time, size = _cost_of(block_times), _cost_of(block_bytes)
    max_time = _least_bound(time, len(block_times), lambda bound: _fits(num_stages, len(block_times), (time, bound)))
    max_size = _least_bound(
        size, len(block_times), lambda bound: _fits(num_stages, len(block_times), (time, max_time), (size, bound))
    )
    cuts = _most_even(num_stages, len(block_times), (time, max_time), (size, max_size))
    return tuple(cut - 1 for cut in cuts)


_Cost = Callable[[int, int], float]
"""The cost of the units from the first number up to but not including the second."""
_Bound = tuple[_Cost, float]
"""A cost of a stage, and the most that it may be."""


def _cost_of(units: Sequence[float]) -> _Cost:
    sums = list(itertools.accumulate(units, initial=0))
    return lambda start, stop: sums[stop] - sums[start]


def _least_bound(cost: _Cost, num_units: int, fits: Callable[[float], bool]) -> float:
    """Return the least bound, rounding allowed for, that fits: it is the cost of some stage."""
    costs = sorted({cost(start, stop) for start in range(num_units) for stop in range(start + 1, num_units + 1)})
    return costs[bisect_left(costs, True, key=lambda bound: fits(bound * _ROUNDING))] * _ROUNDING


def _furthest(start: int, num_units: int, bounds: Sequence[_Bound]) -> int:
    """Return where a stage that starts at unit `start` ends at the latest to keep within `bounds`."""
    stop = start
    while stop < num_units and all(cost(start, stop + 1) <= most for cost, most in bounds):
        stop += 1
    return stop


def _fits(num_stages: int, num_units: int, *bounds: _Bound) -> bool:
    """Return whether `num_stages` stages can keep within `bounds`: each takes as much as it may, so fewest are used.

    Fewer than `num_stages` will do, since a stage that is cut in two costs no more, and there are enough units.
    """
    start = 0
    for _ in range(num_stages):
        start = _furthest(start, num_units, bounds)
    return start == num_units


def _most_even(num_stages: int, num_units: int, *bounds: _Bound) -> list[int]:
    """Return the cuts with the least sum of squared times among those within `bounds`, the first cut least on ties."""
    time = bounds[0][0]
    furthest = [_furthest(start, num_units, bounds) for start in range(num_units)]
    # From the last stage to the first: the least cost of it and all later ones by the unit it starts at, and its end.
    costs, best_stops = {num_units: 0.0}, []
    for stage in reversed(range(num_stages)):
        later, costs = costs, {}
        best_stop: dict[int, int] = {}
        for start in range(stage, num_units - (num_stages - stage) + 1):
            least = float("inf")
            for stop in range(start + 1, furthest[start] + 1):
                own = time(start, stop) ** 2
                if own > least:
                    break
                total = own + later.get(stop, float("inf"))
                if total * _ROUNDING < least:
                    least, best_stop[start] = total, stop
            costs[start] = least
        best_stops.append(best_stop)
    cuts = list(itertools.accumulate(reversed(best_stops), lambda start, best_stop: best_stop[start], initial=0))
    return cuts[1:-1]


def _held_bytes(unit: BlockGroup) -> int:
    # Only a tied head is multiplied with more weights than it owns, and a sparse layer with fewer.
    return BYTES_PER_ELEMENT["float32"] * sum(max(op.num_parameters, op.num_matmul_parameters) for op in unit.ops)


def _too_few_blocks(num_blocks: int, num_stages: int) -> str:
    return (
        f"the model's {num_blocks} blocks cannot be split into {num_stages} stages (layout.pp x virtual_stages): each "
        f"but the first and the last needs a block, so take {num_blocks + 2} stages or fewer"
    )
