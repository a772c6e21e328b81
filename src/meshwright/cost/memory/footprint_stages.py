"""Which blocks a pipeline rank holds, and how many microbatches' activations of them at most.

Even stages: where only blocks + 2 divide by the stages, embedding and head count as a block each, as they do in the
usual recipes; else earlier stages take one more. Balanced stages: as spec/layout/stage_split.py cuts them.

In flight at most, as chunks (a stage's share of one microbatch), n microbatches, v stages of each of pp ranks, rank r
(arXiv:2104.04473 and the orders in spec/layout/schedule/schedule_orders.py, which the tests replay):

    GPipe, LoopedBFS        v n
    1F1B                    min(n, pp - r)
    Interleaved1F1B         min(v n, (v - 1) round + 2 (pp - 1 - r) + 1), round = n // max(1, n // pp)
    InterleavedZeroBubble   min(v n, (v - 1) round + (pp - 1 - r) + 1 + r): r weight passes wait
    ZBVZeroBubble           min(2 n, 2 pp, n + 1 + r)
    DualPipeV               min(2 n, 2 pp + 1)

The last stage computes the loss in its forward. GPipe and LoopedBFS run all forwards first, so that the losses of all n
microbatches are in flight; the others run the last stage's backward right after its forward: one loss.

Of the ranks of a pipeline only those are weighed that may be the fullest: one that holds no more of any kind of block
than another, no other end of the model and no more chunks in flight or pending is left out. Chunks grow with the rank
in ZBVZeroBubble and InterleavedZeroBubble; in DualPipeV those in flight fall and those pending grow; in the others they
fall.
"""

from __future__ import annotations

import itertools
from copy import copy
from functools import lru_cache
from typing import TypeGuard

import numpy as np

from meshwright.cost.layout_table import Bools, Floats, Ints, LayoutTable
from meshwright.cost.training_setup import TrainingSetup
from meshwright.spec.layout.layout import SCHEDULES, V_SCHEDULES
from meshwright.spec.layout.stage_split import best_boundaries
from meshwright.spec.model.op import Head, Op


class StageCuts:
    """The first block of every stage of one setup's model, one element a layout."""

    def __init__(self, setup: TrainingSetup, layouts: LayoutTable) -> None:
        numbers, self._row = np.unique(layouts.num_stages, return_inverse=True)
        cuts = [_cuts(setup, int(number)) for number in numbers]
        num_blocks = cuts[0][-1]
        if layouts.first_blocks is not None:
            is_set = has_own_cuts(layouts)
            self._row[is_set] = len(cuts) + np.arange(int(is_set.sum()))
            cuts += [(0, *firsts[firsts >= 0].tolist(), num_blocks) for firsts in layouts.first_blocks[is_set]]
        # The end of the last stage stands where later ones would begin.
        width = max(len(row) for row in cuts)
        self._cuts = np.array([(*row, *row[-1:] * (width - len(row))) for row in cuts], np.int64)

    def take(self, rows: Ints) -> StageCuts:
        """Return the cuts of the layouts at `rows`."""
        taken = copy(self)
        taken._row = self._row[rows]
        return taken

    def first_block(self, stage: Ints) -> Ints:
        """Return the first block of `stage`, 0 for none (-1); for num_stages the number of blocks."""
        return np.asarray(self._cuts[self._row, np.maximum(stage, 0)])

    def ranks_to_weigh(self, layouts: LayoutTable, group_ends: tuple[int, ...]) -> Ints:
        """Return the pipeline ranks that may be the fullest, (most of a layout, layouts); the last ones repeat.

        `group_ends` holds the number of the block after the last one of each group.
        """
        is_v = layouts.has_schedule(V_SCHEDULES)
        grows = layouts.has_schedule(("ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV"))
        falls = ~layouts.has_schedule(("ZBVZeroBubble", "InterleavedZeroBubble"))
        keys = (((self._row << 16) + layouts.stages_per_rank) << 3) + (is_v << 2) + (grows << 1) + falls
        _, first, which = np.unique(keys, return_index=True, return_inverse=True)
        ranks = [
            _ranks_to_weigh(
                tuple(self._cuts[self._row[row], : layouts.num_stages[row] + 1].tolist()),
                int(layouts.stages_per_rank[row]),
                group_ends,
                is_v=bool(is_v[row]),
                orders=(1,) * bool(falls[row]) + (-1,) * bool(grows[row]),
            )
            for row in first
        ]
        width = max(map(len, ranks), default=1)
        padded = np.array([(*found, *found[-1:] * (width - len(found))) for found in ranks], np.int64)
        return np.asarray(padded[which].T)


def fullest_parameters(setup: TrainingSetup, layouts: LayoutTable) -> Floats:
    """Return the parameters of which a rank of the fullest pipeline rank keeps a part of the state [layouts].

    Those that are trained.
    """
    first, *groups, last = setup.trained_model.groups
    blocks = [group.num_trained_parameters for group in groups for _ in range(group.count)]
    before = np.concatenate([[0], np.cumsum(blocks)])
    tied = sum(op.dim * op.vocab_size for op in last.ops if _is_tied(op) and not op.is_frozen)
    head = last.num_trained_parameters + (layouts.pp > 1) * tied
    cuts, is_v = StageCuts(setup, layouts), layouts.has_schedule(V_SCHEDULES)
    held = np.zeros((len(layouts), int(layouts.pp.max())))
    rows = np.arange(len(layouts))
    for stage in range(int(layouts.num_stages.max())):
        number = np.full(len(layouts), stage)
        of_stage = before[cuts.first_block(number + 1)] - before[cuts.first_block(number)]
        of_stage = of_stage + (stage == 0) * first.num_trained_parameters + (number == layouts.num_stages - 1) * head
        turned = is_v & (number >= layouts.pp)
        rank = np.where(turned, layouts.num_stages - 1 - number, np.mod(number, layouts.pp))
        held[rows, np.clip(rank, 0, layouts.pp - 1)] += np.where(number < layouts.num_stages, of_stage, 0)
    return np.asarray(held.max(axis=1) * layouts.dp_replicate * layouts.pp / layouts.num_ranks)


def _is_tied(op: Op) -> TypeGuard[Head]:
    return isinstance(op, Head) and op.tied


def has_own_cuts(layouts: LayoutTable) -> Bools:
    """Return which layouts say where their stages begin, for as many stages as they have."""
    assert layouts.first_blocks is not None
    return np.asarray((layouts.first_blocks >= 0).sum(axis=1) == layouts.num_stages - 1) & (layouts.num_stages > 1)


@lru_cache(maxsize=4096)
def _ranks_to_weigh(
    cuts: tuple[int, ...], stages_per_rank: int, group_ends: tuple[int, ...], *, is_v: bool, orders: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the ranks of one pipeline that may be the fullest, whatever its microbatches are.

    `orders` holds 1 where chunks may fall with the rank, and -1 where they may grow.
    """
    num_stages = len(cuts) - 1
    pp = num_stages // stages_per_rank
    stages = np.array(cuts)
    of_stage = np.zeros((num_stages, len(group_ends) + 2), np.int64)
    inside = np.clip(np.array((0, *group_ends)), stages[:-1, None], stages[1:, None])
    of_stage[:, :-2] = np.diff(inside, axis=1)
    of_stage[0, -2] = of_stage[-1, -1] = 1
    of_turn = of_stage.reshape(stages_per_rank, pp, -1)
    if is_v:
        of_turn[1:] = of_turn[1:, ::-1].copy()
    # Unequal stages of a rank count apart, since most chunks in flight are of one of them.
    held = np.moveaxis(of_turn, 0, 1).reshape(pp, -1)
    fullest = (_fullest_in_order(held, np.arange(pp)[::step]) for step in orders)
    return tuple(dict.fromkeys(itertools.chain.from_iterable(fullest)))


def _fullest_in_order(held: Ints, order: Ints) -> list[int]:
    """Return the ranks that may be the fullest where no rank has more chunks than those before it in `order`."""
    _, first = np.unique(held[order], axis=0, return_index=True)
    found: list[int] = []
    for rank in order[np.sort(first)].tolist():
        if not found or not (held[found] >= held[rank]).all(axis=1).any():
            found.append(rank)
    return found


def _cuts(setup: TrainingSetup, num_stages: int) -> tuple[int, ...]:
    """Return the first block of each stage, and last the number of blocks."""
    num_blocks = sum(group.count for group in setup.model.groups[1:-1])
    # A model of too few blocks for balance is none that anyone runs, and has an answer all the same.
    if setup.stack.stages == "balanced" and num_stages <= num_blocks + 2:
        return (0, *best_boundaries(setup.model, setup.workload.seq_len, num_stages), num_blocks)
    counts_ends = num_blocks % num_stages != 0 and (num_blocks + 2) % num_stages == 0
    small, extra = divmod(num_blocks + 2 * counts_ends, num_stages)
    firsts = [stage * small + min(stage, extra) - counts_ends for stage in range(num_stages + 1)]
    return tuple(min(max(first, 0), num_blocks) for first in firsts)


def stages_of_rank(layouts: LayoutTable, pp_rank: Ints) -> Ints:
    """Return the stages of each layout's rank `pp_rank`, (most stages of a rank, layouts); -1 where it has fewer."""
    turn = np.arange(int(layouts.stages_per_rank.max()))[:, None]
    is_v = layouts.has_schedule(V_SCHEDULES) & (layouts.pp > 1)
    back = 2 * layouts.pp - 1 - pp_rank
    looped = pp_rank + turn * layouts.pp
    return np.where(turn < layouts.stages_per_rank, np.where(is_v & (turn == 1), back, looped), -1)


def fullest_moments(layouts: LayoutTable, num_microbatches: Floats, pp_rank: Ints) -> list[tuple[Floats, Floats]]:
    """Return (chunks whose activations are held, chunks whose backward to the weights is pending) at each moment of a
    step when rank `pp_rank` may be the fullest: with the most in flight, and with more pending and fewer in flight.

    Ignored: what is pending at most in ZBVZeroBubble with fewer than 2 pp microbatches.
    """
    most, pp = chunks_in_flight(layouts, num_microbatches, pp_rank), layouts.pp
    is_piped, is_zbv, is_dual = pp > 1, layouts.has_schedule(("ZBVZeroBubble",)), layouts.has_schedule(("DualPipeV",))
    after_most = is_dual & (pp_rank < pp - 1)
    few = after_most & (num_microbatches <= pp)
    waiting = np.minimum(pp_rank + 1, most)
    pending = np.where(layouts.has_schedule(("InterleavedZeroBubble",)), waiting, (is_zbv | few) * 1.0)
    drains = is_piped & is_zbv & (num_microbatches >= 2 * pp)
    drained = np.where(drains, pp + pp_rank, 0.0), np.where(drains, 2.0 * pp_rank + 1, 0.0)
    is_dual &= is_piped
    last = np.where(is_dual, pp, drained[0]), np.where(is_dual, pp_rank + 1.0, drained[1])
    first_pending = np.where(is_dual & after_most, 2.0 * pp, 0.0), np.where(is_dual & after_most, 1.0, 0.0)
    return [(most, np.where(is_piped, pending, 0.0)), first_pending, last]


def chunks_in_flight(layouts: LayoutTable, num_microbatches: Floats, pp_rank: Ints) -> Floats:
    """Return the most chunks whose activations rank `pp_rank` holds at once."""
    pp, stages, rank = layouts.pp, layouts.stages_per_rank, pp_rank
    number = np.maximum(np.ceil(num_microbatches), 1)
    round_size = number // np.maximum(1, number // pp)
    most = stages * number
    after = pp - 1 - rank
    by_schedule = {
        "GPipe": most,
        "LoopedBFS": most,
        "1F1B": stages * (after + 1),
        "Interleaved1F1B": (stages - 1) * round_size + 2 * after + 1,
        "InterleavedZeroBubble": (stages - 1) * round_size + after + 1 + rank,
        "ZBVZeroBubble": np.minimum(2 * pp, number + 1 + rank),
        "DualPipeV": 2 * pp + 1,
    }
    table = np.stack([np.broadcast_to(by_schedule[name], most.shape) for name in SCHEDULES])
    chunks = table[layouts.schedule, np.arange(len(layouts))]
    return np.where(pp == 1, stages, np.minimum(most, chunks)).astype(np.float64)


def losses_in_flight(layouts: LayoutTable, num_microbatches: Floats) -> Floats:
    """Return the most microbatches of which the last stage has computed the loss and no gradients yet."""
    return np.where(runs_forwards_first(layouts), np.maximum(np.ceil(num_microbatches), 1), 1.0)


def losses_pending(layouts: LayoutTable, num_microbatches: Floats, pp_rank: Ints) -> Floats:
    """Return the most microbatches of the last stage, if `pp_rank` has it, whose backward to the weights waits until
    another round's forwards have begun: in a V those of a last stage follow at once.
    """
    has_rounds = (layouts.pp > 1) & (num_microbatches >= 2 * layouts.pp)
    waits = has_rounds & layouts.has_schedule(("InterleavedZeroBubble",))
    return np.where(waits, pp_rank, 0).astype(np.float64)


def runs_forwards_first(layouts: LayoutTable) -> Bools:
    """Return which layouts run all forwards of a step before its first backward."""
    return np.asarray((layouts.pp > 1) & layouts.has_schedule(("GPipe", "LoopedBFS")))


def backward_rounds(layouts: LayoutTable, num_microbatches: Floats, pp_rank: Ints) -> list[tuple[Floats, Floats]]:
    """Return (the share of an interleaved rank's stages that have run a backward, the chunks that have left by then) at
    each moment of a step when its gradients and chunks may be most: while most chunks are in flight for the last time,
    and when the next stage, or the first, begins.

    Microbatches go backward in rounds, on the last stage first. With one round all forwards may come first.
    """
    stages = layouts.stages_per_rank
    number = np.maximum(np.ceil(num_microbatches), 1)
    size = number // np.maximum(1, number // layouts.pp)
    num_first = np.minimum((stages - 1) * size + 2 * (layouts.pp - 1 - pp_rank), stages * number)
    num_backwards = np.maximum(stages * number - num_first - 1, 0)
    begun = np.minimum(num_backwards // size + 1, stages)
    moments = (begun, np.minimum(begun + 1, stages), stages)
    return [(now / stages, np.where(now > begun, now * size - size - num_backwards, 0)) for now in moments]
