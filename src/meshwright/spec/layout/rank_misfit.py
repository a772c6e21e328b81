"""Why a number of ranks, or of devices, cannot run a layout, and the degrees with which it can."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, islice, product
from typing import TYPE_CHECKING

from meshwright.spec.problem import Fix, Problem, nearest_first
from meshwright.units import counted

if TYPE_CHECKING:
    from meshwright.spec.layout.layout import LayoutRequest

_MOST_DEGREES = 8
"""Degrees of each axis that are tried, the nearest to its own first."""
_MOST_FIXES = 16
_MAX_DEGREE = 4096
"""Divisors are looked for up to here: few axes have as many ranks."""


def rank_misfit(
    request: LayoutRequest, count: int, numbers: Callable[[int], Sequence[int]], *, of_devices: bool = False
) -> Problem | None:
    """Return why `count` ranks, or devices, cannot run the layout, with degrees that they can; None if they can.

    `numbers` returns which multiples of a number of ranks to suggest. The degrees are still to be tried.
    """
    needed, rest = request.num_fixed_ranks, request.taking_rest
    if count == needed or (rest is not None and count % needed == 0):
        return None
    unit = "device" if of_devices else "rank"
    given = counted(count, unit)
    if rest is None:
        what = f"{given} cannot run a layout of {request.product}"
        otherwise = f"set one degree in [layout] to -1, which takes the {unit}s that the others leave"
    else:
        equals, verb = "" if request.is_open else " = -1", "does" if count == 1 else "do"
        what = f"{given} {verb} not divide by {request.product}, so layout.{rest}{equals} has no value"
        otherwise = "change a degree in [layout]"
    others = ""
    if either := " or ".join(map(str, numbers(needed))):
        others = f"take {either} of them" if of_devices else f"start {either} rank{'s' * (either != '1')}"
    return Problem(
        what,
        degree_fixes(request, count),
        after=f", or {others}" if others else "",
        otherwise=f"{others}, or {otherwise}" if others else otherwise,
    )


def degree_fixes(request: LayoutRequest, num_ranks: int) -> Iterator[Fix]:
    """Yield changes of the fewest degrees with which `num_ranks` ranks can run `request`, the nearest degrees first."""
    rest, degrees = request.taking_rest, request.given_degrees
    # Of the axes that split nothing only dp_shard is raised: it asks nothing of the model.
    changeable = sorted((axis for axis in degrees if axis == "dp_shard" or degrees[axis] > 1), key="dp_shard".__ne__)
    divisors = [number for number in range(1, min(num_ranks, _MAX_DEGREE) + 1) if num_ranks % number == 0]
    near = {axis: [*islice(nearest_first(degrees[axis], divisors), _MOST_DEGREES)] for axis in changeable}

    def fits(changed: dict[str, int]) -> bool:
        needed = math.prod((degrees | changed).values())
        return num_ranks % needed == 0 if rest else num_ranks == needed

    for count in range(1, len(changeable) + 1):
        tried = (
            dict(zip(axes, values, strict=True))
            for axes in combinations(changeable, count)
            for values in product(*(near[axis] for axis in axes))
        )
        if found := [*islice(filter(fits, tried), _MOST_FIXES)]:
            yield from ({f"layout.{axis}": degree for axis, degree in fix.items()} for fix in found)
            return
