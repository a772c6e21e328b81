"""Layouts of as many ranks that a batch divides by: fewer data-parallel ranks, or smaller microbatches."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.spec.job.rules.size_rules import divisors
from meshwright.spec.layout.layout import Layout, LayoutRequest
from meshwright.spec.problem import Fix, nearest_first

_TAKES_RANKS = ("tp", "pp")
"""Axes that take ranks from dp_shard, the usual ones first."""


def even_layouts(request: LayoutRequest, layout: Layout, batch: int) -> Iterator[Fix]:
    """Yield changes of `layout`, which is `request` on some ranks, with which each of its ranks gets whole microbatches
    of a batch of `batch` sequences; none of them tried.
    """
    size = layout.microbatch_size
    if batch % size:
        return  # on any number of ranks
    if batch % layout.dp == 0:
        yield from ({"layout.microbatch_size": number} for number in nearest_first(size, divisors(batch // layout.dp)))
    for factor in divisors(layout.dp_shard)[1:]:
        if batch % (layout.dp // factor * size):
            continue
        for axis in _TAKES_RANKS:
            # A dp_shard that is the rest of the ranks follows by itself.
            rest = {} if request.taking_rest == "dp_shard" else {"layout.dp_shard": layout.dp_shard // factor}
            yield {f"layout.{axis}": getattr(layout, axis) * factor, **rest}
        return
