"""Chunks in flight on a rank of a pipeline, weighed where its stages hold unequal numbers of blocks.

A chunk is a stage's share of one microbatch. Interleaved: microbatches pass a rank's stages in rounds, backwards in the
opposite order of stages (arXiv:2104.04473 and spec/layout/schedule/schedule_orders.py, which the tests replay), so
that the chunks in
flight belong to other stages from moment to moment: those of one stage are let go while another's come. Zero bubble
lets go of each with its backward to the weights, as many microbatches after its backward to the inputs as the rank's
number. V: counted in the order of a step that just fills the pipeline, most chunks being those of a rank's first stage.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.layout_table import Bools, Floats, Ints, LayoutTable, distinct_rows
from meshwright.cost.memory.footprint_stages import fullest_moments
from meshwright.spec.layout.layout import SCHEDULES, SPLIT_BACKWARD_SCHEDULES, V_SCHEDULES, Layout
from meshwright.spec.layout.schedule.schedule_orders import order_of_rank

_UNEVEN = ("Interleaved1F1B", "InterleavedZeroBubble", *V_SCHEDULES)


class ChunkBytes(NamedTuple):
    """What one chunk of a rank's average stage takes, one element a layout."""

    kept: Floats
    """From its forward to the end of its backward."""
    pending: Floats
    """Gradients that wait for its backward to the weights."""
    pending_ends: Floats
    """The same of what stands behind the blocks, where it is one of the last stage."""


class HeldBytes(NamedTuple):
    """What a rank's chunks take, one element a layout."""

    most: Floats
    """At most."""
    at_loss: Floats
    """While the rank computes a loss, if it has the last stage; else at most."""


def held_bytes(
    layouts: LayoutTable, num_microbatches: Floats, pp_rank: Ints, blocks: Ints, chunk: ChunkBytes
) -> HeldBytes:
    """Return what chunks of rank `pp_rank` take; `blocks` are those of each of its stages (most stages, layouts)."""
    # The chunk at work still has its logits, and on a rank of several stages the last stage's come first.
    at_moments = [
        chunk.kept * held + chunk.pending * waiting + chunk.pending_ends * (waiting - 1).clip(0)
        for held, waiting in fullest_moments(layouts, num_microbatches, pp_rank)
    ]
    most = np.max(at_moments, axis=0)
    at_loss = most.copy()
    number = np.maximum(np.ceil(num_microbatches), 1).astype(np.int64)
    rows = np.flatnonzero(_is_uneven(layouts, blocks))
    columns = [
        column[rows] for column in (layouts.schedule, layouts.stages_per_rank, layouts.pp, number, pp_rank, *blocks)
    ]
    first, which = distinct_rows(columns)
    for place, row in enumerate(rows[first].tolist()):
        stages, schedule = int(layouts.stages_per_rank[row]), SCHEDULES[layouts.schedule[row]]
        rank = _Rank(schedule, stages, int(layouts.pp[row]), int(number[row]), int(pp_rank[row]))
        moments, same = _moments(rank, tuple(blocks[:stages, row].tolist())), rows[which == place]
        sizes = np.array([size[same] for size in chunk])
        most[same] = (moments.every @ sizes).max(axis=0)
        at_loss[same] = (moments.at_loss @ sizes).max(axis=0) if rank.has_last_stage else most[same]
    return HeldBytes(most, at_loss)


def _is_uneven(layouts: LayoutTable, blocks: Ints) -> Bools:
    own = np.arange(len(blocks))[:, None] < layouts.stages_per_rank
    differ = np.where(own, blocks, 0).max(axis=0) != np.where(own, blocks, blocks.max(initial=0)).min(axis=0)
    return np.asarray(differ & (layouts.pp > 1) & layouts.has_schedule(_UNEVEN))


class _Rank(NamedTuple):
    """One rank of a pipeline."""

    schedule: str
    stages: int
    pp: int
    num_microbatches: int
    pp_rank: int

    @property
    def has_last_stage(self) -> bool:
        """Return whether it has the last stage: a V ends where it began."""
        return self.pp_rank == (0 if self.schedule in V_SCHEDULES else self.pp - 1)


class _Moments(NamedTuple):
    """The moments of a step when a forward and a backward have just run: [moments, fields of ChunkBytes] in chunks."""

    every: Floats
    at_loss: Floats
    """Those on a rank's last stage."""


@lru_cache(maxsize=4096)
def _moments(rank: _Rank, blocks: tuple[int, ...]) -> _Moments:
    """Return what is held, chunks weighed by their stage's `blocks` over those of the rank's average stage."""
    counts = _counted(rank) if rank.schedule in V_SCHEDULES else _in_rounds(rank)
    weight = np.array(blocks) / max(1, sum(blocks)) * rank.stages
    others_pending = (counts.pending[:, -1] - counts.is_of_last).clip(0) * rank.has_last_stage
    every = np.stack([counts.held @ weight, counts.pending @ weight, others_pending], axis=1)
    return _Moments(np.unique(every, axis=0), np.unique(every[counts.is_of_last], axis=0))


class _Counts(NamedTuple):
    """Chunks of each stage at each moment."""

    held: Ints
    """[moments, stages], as pending."""
    pending: Ints
    is_of_last: Bools
    """Whether the last stage of the rank is at work."""


def _in_rounds(rank: _Rank) -> _Counts:
    """Return the chunks of a rank that computes in rounds."""
    size = rank.num_microbatches // max(1, rank.num_microbatches // rank.pp)
    cycle, total = rank.stages * size, rank.stages * rank.num_microbatches
    splits = rank.schedule in SPLIT_BACKWARD_SCHEDULES
    hops, lag = (rank.pp - 1 - rank.pp_rank) * (1 if splits else 2), rank.pp_rank * splits
    # From the second cycle of rounds through all stages on, each is like the one before.
    steps = np.arange(min(total, 2 * cycle))
    forwards = _passed(np.minimum(cycle - size + hops + steps + 1, total), rank.stages, size)
    done, started = (_passed(count, rank.stages, size)[:, ::-1] for count in ((steps - lag).clip(0), steps + 1))
    return _Counts(forwards - done, (started - done) * splits, steps % cycle < size)


def _counted(rank: _Rank) -> _Counts:
    """Return the chunks of a rank of a V."""
    layout = Layout(pp=rank.pp, schedule=rank.schedule, virtual_stages=rank.stages)
    order = order_of_rank(rank.pp_rank, layout, min(rank.num_microbatches, 2 * rank.pp + 2))
    is_of = np.array([[action.stage == rank.pp_rank, action.stage != rank.pp_rank] for action in order])
    kinds = np.array([action.kind for action in order])[:, None]
    has_most = kinds[:, 0] != "W"

    def number(*chosen: str) -> Ints:
        return np.cumsum(is_of & np.isin(kinds, chosen), axis=0)

    # What an action frees is allocated while it runs.
    held = number("F") - number("B", "W") + (is_of & (kinds == "B"))
    return _Counts(held[has_most], (number("I") - number("W"))[has_most], is_of[has_most, 1])


def _passed(count: Ints, stages: int, size: int) -> NDArray[Any]:
    """Return how many of the first `count` (moments) chunks are on each stage [moments, stages], in the order in which
    they pass them, in rounds of `size` microbatches.
    """
    cycles, rest = np.divmod(count[:, None], stages * size)
    return np.asarray(cycles * size + np.clip(rest - size * np.arange(stages), 0, size))
