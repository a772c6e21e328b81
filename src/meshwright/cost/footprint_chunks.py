"""Chunks in flight on a rank of an interleaved pipeline whose stages hold unequal numbers of blocks.

A chunk is a stage's share of one microbatch. Microbatches pass a rank's stages in rounds, backwards in the opposite
order of stages (arXiv:2104.04473 and spec/schedule_orders.py, which the tests replay), so that the chunks in flight
belong to other stages from moment to moment. While the last stage computes a loss, one round of each stage before it is
in flight; between two losses it may be one chunk more, as forwards of the next round start before those backwards.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.case import Floats
from meshwright.cost.footprint_stages import Ints, chunks_in_flight
from meshwright.cost.layout_table import LayoutTable


class ChunksHeld(NamedTuple):
    """Chunks in flight on one rank, each weighed by its stage's blocks over those of the rank's average stage."""

    most: Floats
    """At most."""
    at_loss: Floats
    """While the rank computes a loss, if it has the last stage; else at most."""


def chunks_held(layouts: LayoutTable, num_microbatches: Floats, pp_rank: Ints, blocks: Ints) -> ChunksHeld:
    """Return what rank `pp_rank` has in flight; `blocks` are those of each of its stages (most stages, layouts)."""
    most = chunks_in_flight(layouts, num_microbatches, pp_rank)
    at_loss = most.copy()
    rows = np.flatnonzero(_is_uneven(layouts, blocks))
    if not len(rows):
        return ChunksHeld(most, at_loss)
    # Many layouts of a search differ in nothing that counts here.
    stages, pp = layouts.stages_per_rank[rows], layouts.pp[rows]
    number = np.maximum(np.ceil(num_microbatches[rows]), 1).astype(np.int64)
    keys = np.vstack([stages, pp, number, pp_rank[rows], blocks[:, rows]])
    unique, which = np.unique(keys, axis=1, return_inverse=True)
    found = np.array([_weighed(_Rank(*key[:4]), key[4:][: key[0]]) for key in unique.T.tolist()])
    most[rows], at_loss[rows] = found[which.reshape(-1)].T
    return ChunksHeld(most, np.where(pp_rank == layouts.pp - 1, at_loss, most))


def _is_uneven(layouts: LayoutTable, blocks: Ints) -> NDArray[np.bool_]:
    own = np.arange(len(blocks))[:, None] < layouts.stages_per_rank
    differ = np.where(own, blocks, 0).max(axis=0) != np.where(own, blocks, blocks.max(initial=0)).min(axis=0)
    return np.asarray(differ & (layouts.pp > 1) & layouts.has_schedule(("Interleaved1F1B",)))


class _Rank(NamedTuple):
    """One rank of a pipeline."""

    stages: int
    pp: int
    num_microbatches: int
    pp_rank: int


def _weighed(rank: _Rank, blocks: list[int]) -> tuple[float, float]:
    """Return the chunks in flight (at most, at a loss of the last rank) in those of the average stage."""
    stages, pp, number, pp_rank = rank
    size = number // max(1, number // pp)
    total = stages * number
    warmup = min((stages - 1) * size + 2 * (pp - 1 - pp_rank), total)
    # From step to step one stage gains a chunk and one loses one, so that the most is where one of the two changes:
    # where a round of forwards or of backwards ends. A cycle of rounds through all stages is like the next.
    ends = {turn * size for turn in range(stages + 1)}
    steps = ends | {(end - warmup - 1) % (stages * size) for end in ends}
    weight = np.array(blocks) / max(1, sum(blocks)) * stages
    held = [
        float(weight @ _in_flight(min(warmup + step + 1, total), step, stages, size)) for step in steps if step < total
    ]
    return max(held), float(weight @ _in_flight(min(warmup + 1, total), 0, stages, size))


def _in_flight(num_forwards: int, num_backwards: int, stages: int, size: int) -> Ints:
    """Return the chunks of each stage after so many forwards and backwards, in rounds of `size` microbatches."""
    return _passed(num_forwards, stages, size) - _passed(num_backwards, stages, size)[::-1]


def _passed(count: int, stages: int, size: int) -> Ints:
    """Return how many of the first `count` are on each stage, in the order in which they pass them."""
    cycles, rest = divmod(count, stages * size)
    return np.asarray(cycles * size + np.clip(rest - size * np.arange(stages), 0, size))
