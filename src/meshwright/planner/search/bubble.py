"""Pipeline bubbles, with stages cut where the runtime cuts them: in closed form for all layouts, replayed for a few.

    waiting = steady x (largest rank's share of the model x pp - 1) + one microbatch x the schedule's share

The schedule's share is that of cost/pipeline/stage.py, and more where microbatches are fewer than ranks. There, stages
are of equally many blocks, as other software has them; ours differ by a block where that makes the slowest one faster
(spec/layout/stage_split.py). Of the finalists every action is replayed (cost/pipeline/replay.py), with stages that
take as long as what they hold (cost/step_times.py).

stage_times: what each action of a pipeline takes on each stage, from what the whole step takes:

    forward          a third of ends (embedding, head), and of what blocks do once, backward two
    copies           of activation_offload as they are priced, of backward in each of its parts
    second pass      blocks that recompute do so in each part of a split backward, and what is compiled of them is
                     computed whole in each; ends are not recomputed, nor compiled
    first stage      nothing asks for the gradient of its inputs: its first part is nothing, its second the whole

In shares of a rank's computation. Ignored: that attention's backward is all in the first part, and that a loss in
chunks is all forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from meshwright.cost.communication.pipeline_p2p import hops_of
from meshwright.cost.compute.recompute import repeated_share
from meshwright.cost.constants import fitted_constants
from meshwright.cost.layout_table import Floats, Ints, LayoutTable, layout_table
from meshwright.cost.memory.activation_copies import StageCopies
from meshwright.cost.memory.host_memory import host_update
from meshwright.cost.pipeline.replay import Hops, PipelineOps, Replayed, StageTimes, pipeline_ops, replay
from meshwright.cost.pipeline.stage import bubble_share, split_share
from meshwright.cost.step import StepTerms
from meshwright.cost.step_times import stage_copies, unit_shares, update_shares
from meshwright.cost.training_setup import Configurations
from meshwright.planner.request import PlanRequest
from meshwright.planner.search.rules import cuts_model, runs_schedule
from meshwright.spec.layout.layout import SCHEDULES, SPLIT_BACKWARD_SCHEDULES, V_SCHEDULES, Layout
from meshwright.spec.layout.schedule.schedule import build_schedule, lower
from meshwright.spec.layout.stage_split import best_boundaries, block_costs
from meshwright.spec.model.model_spec import ModelSpec
from meshwright.spec.step.estimate import StepDecomposition

_OUTSIDE_PIPELINE = ("pipeline_bubble_s", "pipeline_p2p_s", "other_communication_s", "optimizer_s", "stragglers_s")
_RECOMPUTED_STEPS = 20
"""Shares of recomputation are rounded to a twentieth: they hardly change the bubble."""
_LONG_PIPELINE = 16
_ROUNDS, _ROUNDS_OF_LONG_PIPELINE = (4, 6), (2, 3)
"""Rounds of as many microbatches as ranks that more are extrapolated from: from 4 on, to within two thousandths."""

Pipeline = tuple[int, int, str, int]
"""Pipeline ranks, stages on each, schedule, microbatches."""


def with_bubbles(step: StepTerms, configs: Configurations, request: PlanRequest) -> StepTerms:
    """Return the steps with the bubbles of stages that are cut by FLOPs."""
    layouts = configs.layouts
    number = configs.num_microbatches
    waiting = _imbalance(layouts, request) + _waiting_share(layouts, number, repeated_share(configs)) / number
    # The host updates offloaded parameters once, when a pipeline is done.
    update = host_update(configs)
    bubble_s = (steady_s(step) - update.host_s) * waiting + update.waited_s
    return replace(step, pipeline_bubble_s=np.where(layouts.pp > 1, bubble_s, step.pipeline_bubble_s))


def steady_s(step: StepTerms) -> Floats:
    """Return the seconds of what ranks of a pipeline do one microbatch after the other, and of the host's update."""
    return np.asarray(step.total_s - sum(getattr(step, name) for name in _OUTSIDE_PIPELINE))


def least_waiting(layouts: LayoutTable, pipelines: Sequence[tuple[str, int]], request: PlanRequest) -> Floats:
    """Return the least that any of `pipelines` that can run makes a rank wait, as a multiple of `steady_s`.

    A pipeline is a schedule and the stages that it gives each rank. Infinite where none runs, zero without a pipeline.
    """
    number = request.workload.global_batch_size // (layouts.dp * layouts.microbatch_size)
    _, first, which = np.unique((layouts.pp << 32) + number, return_index=True, return_inverse=True)
    distinct, number = layouts.take(first), number[first]
    least = np.full(len(first), np.inf)
    for schedule, stages in pipelines:
        codes = np.full(len(first), SCHEDULES.index(schedule)), np.full(len(first), stages)
        table = replace(distinct, schedule=codes[0], stages_per_rank=codes[1])
        runs = np.flatnonzero((table.pp > 1) & runs_schedule(table, request) & cuts_model(table, request))
        table, microbatches = table.take(runs), number[runs]
        waiting = _imbalance(table, request) + _waiting_share(table, microbatches, 0.0) / microbatches
        least[runs] = np.minimum(least[runs], waiting)
    return np.asarray(np.where(distinct.pp > 1, least, 0.0)[which])


class ReplayInputs(NamedTuple):
    """What a replay of a pipeline needs of the cost model, which prices many layouts in the time of one."""

    units: tuple[float, ...]
    """Of a microbatch's time, what each unit takes that a stage can hold: by FLOPs a head would count for more than it
    takes where blocks communicate or wait for memory, and a dense block for more than a mixture of experts."""
    copies: StageCopies
    update: tuple[float, float]
    """Seconds of the host's update of offloaded parameters, once a step (HostUpdate)."""
    update_share: float
    """What the fullest rank updates of what the step's optimizer was priced for."""
    hops: Hops
    """Not only what is exposed: the replay itself finds what hides a transfer."""


def replay_inputs(layouts: Sequence[Layout], request: PlanRequest) -> list[ReplayInputs]:
    """Return what replayed_step needs for each of the layouts."""
    configs = request.configs(layout_table(layouts))
    units = [tuple(map(_rounded, shares)) for shares in unit_shares(configs)]
    hops = hops_of(configs, fitted_constants())
    updates = zip(*(column.tolist() for column in host_update(configs)), strict=True)
    return list(map(ReplayInputs, units, stage_copies(configs), updates, update_shares(configs), hops))


def replayed_step(
    step: StepDecomposition, layout: Layout, request: PlanRequest, inputs: ReplayInputs
) -> StepDecomposition:
    """Return the step with the bubble of its schedule as a replay of every action finds it."""
    if layout.pp == 1:
        return step
    units, copies, (update_s, waited_s), update_share, hops = inputs
    steady_s = step.total_s - sum(getattr(step, name) for name in _OUTSIDE_PIPELINE) - update_s
    if layout.may_split_backward and not layout.reduces_each_microbatch:
        # Gradients are reduced when all of a stage's backwards are done: for others there is nothing to wait for.
        steady_s -= step.dp_communication_s
    number = num_microbatches_of(layout, request)
    computed_s = steady_s - step.activation_copies_s
    boundaries = layout.stage_boundaries
    if boundaries is None:
        boundaries = best_boundaries(request.setup.model, request.workload.seq_len, layout.num_stages)
    edges = (0, *boundaries, len(units) - 2)
    replayed = replayed_share(
        (layout.pp, layout.stages_per_rank, layout.schedule, number),
        _with_copies(_shares(boundaries, units), edges, [_rounded(seconds / computed_s) for seconds in copies]),
        BackwardShares(
            recomputed=round(_RECOMPUTED_STEPS * step.recomputation_s / computed_s) / _RECOMPUTED_STEPS,
            repeated=_rounded(step.repeated_backward_s / computed_s),
            split=_rounded(_split(layout, number)),
        ),
        hops._replace(
            hop_s=tuple(_rounded(seconds / computed_s) for seconds in hops.hop_s),
            tied_s=_rounded(hops.tied_s / computed_s),
        ),
    )
    waiting_s = replayed.total_s * computed_s - steady_s
    # Others' software does what a replay of our own runtime does not show (pp_sync_s).
    pp_s = max(0.0, replayed.exposed_s * computed_s) if request.setup.is_own else step.pipeline_p2p_s
    bubble_s = max(0.0, waiting_s - pp_s) + waited_s
    if not request.cluster.device.computes_while_sending:
        pp_s = max(pp_s, _busy_sending_s(layout, number, hops))
    optimizer_s = step.optimizer_s * update_share
    return step.replace(pipeline_bubble_s=bubble_s, pipeline_p2p_s=pp_s, optimizer_s=optimizer_s)


def _busy_sending_s(layout: Layout, number: int, hops: Hops) -> float:
    """Return the mean seconds for which a rank moves messages itself, where the cores that compute do: sends and
    receives of a microbatch's forward and backward over every border of stages.
    """
    return 4.0 * number * (layout.num_stages - 1) / layout.pp * hops.hop_s[0]


def num_actions(layout: Layout, request: PlanRequest) -> int:
    """Return the forwards and backwards of all ranks that a replay of the layout's pipeline runs, which is its cost."""
    if layout.pp == 1:
        return 0
    return 2 * layout.num_stages * sum(_numbers_replayed(layout.pp, num_microbatches_of(layout, request)))


def num_microbatches_of(layout: Layout, request: PlanRequest) -> int:
    """Return the microbatches that a data-parallel rank runs in a step."""
    return request.workload.global_batch_size // (layout.dp * layout.microbatch_size)


def _split(layout: Layout, number: int) -> float:
    """Return the share of the backwards of all stages but the first that run in two parts."""
    of_all = float(split_share(layout_table([layout]), np.array([number], np.float64))[0])
    return of_all / (1 - 1 / layout.num_stages)


@lru_cache(maxsize=4096)
def replayed_share(pipeline: Pipeline, stages: tuple[StageShare, ...], shares: BackwardShares, hops: Hops) -> Replayed:
    """Return how long the pipeline takes, as multiples of what a rank computes in the mean, as are `hops`.

    `stages` are what the stages compute for a microbatch. Once a long pipeline is filled, each round of microbatches
    takes as long as the one before: it is extrapolated from two shorter ones.
    """
    pp, stages_per_rank, schedule, number = pipeline
    times = stage_times(stages, shares, pp / number)
    numbers = _numbers_replayed(pp, number)
    replayed = [replay(_ops((pp, stages_per_rank, schedule, count)), times, hops) for count in numbers]
    if len(numbers) == 1:
        return replayed[0]
    (few, more), (of_few, of_more) = numbers, replayed
    rounds = (number - more) / (more - few)
    return Replayed(*(long + rounds * (long - short) for short, long in zip(of_few, of_more, strict=True)))


def _numbers_replayed(pp: int, number: int) -> tuple[int, ...]:
    """Return how many microbatches are replayed: all, or two smaller numbers that many whole rounds follow from."""
    few, more = _ROUNDS if pp <= _LONG_PIPELINE else _ROUNDS_OF_LONG_PIPELINE
    return (few * pp, more * pp) if number % pp == 0 and number > (few + more) * pp else (number,)


@lru_cache(maxsize=16)
def _ops(pipeline: Pipeline) -> PipelineOps:
    pp, stages_per_rank, schedule, number = pipeline
    layout = Layout(pp=pp, virtual_stages=stages_per_rank, schedule=schedule)
    return pipeline_ops(lower(build_schedule(layout, number)))


def _waiting_share(layouts: LayoutTable, number: Floats | Ints, repeated: Floats | float) -> Floats:
    """Return what a rank waits because of the schedule, as a multiple of its computation for one microbatch.

    `number` microbatches are run in a step; `repeated` is the share of backwards that is computed in both parts.

    Fewer microbatches than ranks leave gaps in each round of a looped schedule; and no schedule of whole backwards is
    done before one microbatch has been through all stages and back.
    """
    missing = np.maximum(layouts.pp - number, 0)
    splits_backward = layouts.has_schedule(SPLIT_BACKWARD_SCHEDULES)
    there_and_back = np.where(splits_backward, 0.0, layouts.pp - number)
    in_rounds = (layouts.pp - 1 + (layouts.stages_per_rank - 1) * missing) / layouts.stages_per_rank
    is_looped = layouts.has_schedule(("Interleaved1F1B", "LoopedBFS"))
    known = np.maximum(
        bubble_share(layouts, np.asarray(number, np.float64), repeated), np.where(is_looped, in_rounds, 0.0)
    )
    return np.asarray(np.maximum(known, there_and_back))


def _imbalance(layouts: LayoutTable, request: PlanRequest) -> Floats:
    """Return by how much the largest rank's share of the model exceeds the mean, as a multiple of it."""
    is_v = layouts.has_schedule(V_SCHEDULES) & (layouts.pp > 1)
    keys, which = np.unique((layouts.pp << 32) + (layouts.stages_per_rank << 1) + is_v, return_inverse=True)
    boundaries = request.fixed.get("stage_boundaries")
    model, seq_len = request.setup.model, request.workload.seq_len
    excess = [
        _excess(key >> 32, (key & 0xFFFF_FFFF) >> 1, bool(key & 1), boundaries, model, seq_len) for key in keys.tolist()
    ]
    return np.asarray(np.array(excess, np.float64)[which])


@lru_cache(maxsize=1024)
def _excess(
    pp: int, stages_per_rank: int, is_v: bool, boundaries: tuple[int, ...] | None, model: ModelSpec, seq_len: int
) -> float:
    if boundaries is None:
        boundaries = best_boundaries(model, seq_len, pp * stages_per_rank)
    shares = (
        np.array(_shares(boundaries, tuple(block_costs(model, seq_len)[0]))).sum(axis=1).reshape(stages_per_rank, pp)
    )
    if is_v:
        shares[1] = shares[1, ::-1]
    return float(shares.sum(axis=0).max() * pp - 1)


def _shares(boundaries: Sequence[int], units: Sequence[float]) -> tuple[StageShare, ...]:
    """Return each stage's share of the model, given what the embedding, each block, and the head cost."""
    total, blocks = sum(units), units[1:-1]
    edges = [0, *boundaries, len(blocks)]
    shares = [sum(blocks[start:stop]) / total for start, stop in pairwise(edges)]
    of_ends = [units[0] / total, *[0.0] * (len(shares) - 1)]
    of_ends[-1] += units[-1] / total
    return tuple(StageShare(one, end) for one, end in zip(shares, of_ends, strict=True))


def _with_copies(
    stages: tuple[StageShare, ...], edges: Sequence[int], copies: Sequence[float]
) -> tuple[StageShare, ...]:
    """Return the stages, cut at `edges`, with what copies of activations expose; `copies` are StageCopies' fields."""
    if not any(copies):
        return stages
    forward, between, first = copies
    with_copies = []
    for place, (stage, (start, stop)) in enumerate(zip(stages, pairwise(edges), strict=True)):
        neighbours, is_fetched = max(stop - start - 1, 0), start < stop and place < len(stages) - 1
        back = neighbours * between + is_fetched * first
        after = forward * (start < stop)
        with_copies.append(stage._replace(copied_forward=neighbours * forward, copied_back=back, copied_after=after))
    return tuple(with_copies)


def _rounded(share: float) -> float:
    """Return `share` with so few digits that layouts of one pipeline are replayed once, to a thousandth."""
    return float(f"{share:.2g}")


class BackwardShares(NamedTuple):
    """What of the backwards of a step is more than one pass, as shares of what a rank computes, mean over ranks."""

    recomputed: float
    repeated: float
    """Backwards of compiled blocks that run twice."""
    split: float
    """Share of the backwards of all stages but the first that run in two parts."""


class StageShare(NamedTuple):
    """One stage's share of what all compute for a microbatch, with what blocks do again."""

    blocks: float
    ends: float
    copied_forward: float = 0.0
    """Exposed copies of activations, where all ranks compute 1 in a step."""
    copied_back: float = 0.0
    """The same in each part of backward."""
    copied_after: float = 0.0
    """The same in a forward that follows another of its rank, besides."""


def stage_times(stages: tuple[StageShare, ...], shares: BackwardShares, microbatch: float) -> StageTimes:
    """Return the seconds of each stage's actions, where all ranks compute `microbatch` seconds for one of them."""
    of_blocks = max(sum(stage.blocks for stage in stages), 1e-12)
    once = max(1 - (shares.recomputed + shares.repeated) / of_blocks, 0.0)
    thirds = [(stage.blocks * once + stage.ends) * microbatch / 3 for stage in stages]
    inner = [0.0, *(stage.blocks for stage in stages[1:])]
    recompute_s = _each(shares.recomputed * microbatch, stages, shares.split)
    again_s = [one + stage.copied_back for one, stage in zip(recompute_s, stages, strict=True)]
    forward_s = [third + stage.copied_forward for third, stage in zip(thirds, stages, strict=True)]
    splits = max(sum(inner) * shares.split, 1e-12)
    second_s = [shares.repeated * microbatch * blocks / splits for blocks in inner]
    whole = [2 * third + again for third, again in zip(thirds, again_s, strict=True)]
    after_s = [stage.copied_after for stage in stages] if any(stage.copied_after for stage in stages) else None
    if not shares.split:
        return StageTimes(forward_s, whole, thirds, after_forward_s=after_s)
    inputs, weights = [0.0], [whole[0]]
    for place in range(1, len(stages)):
        half, again = thirds[place], again_s[place]
        # What is computed whole in both parts is half of either without it, and as much again.
        inputs.append(half + second_s[place] / 2 + again)
        weights.append(half + second_s[place] / 2 + again)
    return StageTimes(forward_s, whole, weights, input_s=inputs, after_forward_s=after_s)


def _each(recomputed_s: float, stages: tuple[StageShare, ...], split: float) -> list[float]:
    """Return what recomputing takes each stage once, if all that do it take `recomputed_s`."""
    passes = [1.0, *(1.0 + split for _ in stages[1:])]
    total = max(sum(stage.blocks * times for stage, times in zip(stages, passes, strict=True)), 1e-12)
    return [recomputed_s * stage.blocks / total for stage in stages]
