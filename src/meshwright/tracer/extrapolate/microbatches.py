"""Which microbatches and pipeline ranks of a step are traced, and what the rest of the step repeats of them.

The first forward of a stage all-gathers parameters, the first backward makes gradients, the last one reduces them; all
other microbatches are alike ("steady"). The first and last microbatches are traced, and two steady ones. All untraced
microbatches repeat the second steady one, which follows one of its own kind; only the first of them repeats the first.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.schedule.action import COMMUNICATION_KINDS, Action, parse_action
from meshwright.spec.layout.schedule.schedule import Schedule
from meshwright.spec.layout.stage_split import blocks_of_stages
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.model.model_spec import ModelSpec, model_spec
from meshwright.spec.model.wide_matmuls import with_wide_matmuls
from meshwright.spec.trace.trace import NONE, Ints, Trace
from meshwright.tracer.extrapolate.chunks import BEFORE, FRAME, INPUT, WAIT, ChunkKey, CutTrace, NotExtrapolable

_NUM_STEADY = 2


@dataclass(frozen=True)
class Chosen:
    """Some of a step's microbatches, ascending; a trace of them numbers them from 0."""

    num_microbatches: int
    """Of the whole step."""
    microbatches: tuple[int, ...]
    steady: tuple[int, int]
    """Positions of the two that represent all microbatches that were not chosen."""


def choose_microbatches(schedule: Schedule) -> Chosen | None:
    """Return the microbatches to trace; None if all have to be traced."""
    count = schedule.num_microbatches
    ends = {order[end].microbatch for order in _orders(schedule) for end in (0, -1)}
    others = [number for number in range(count) if number not in ends]
    if len(others) <= _NUM_STEADY:
        return None
    chosen = sorted(ends.union(others[:_NUM_STEADY]))
    first, second = (chosen.index(number) for number in others[:_NUM_STEADY])
    return Chosen(count, tuple(chosen), (first, second))


def _orders(schedule: Schedule) -> list[list[Action]]:
    """Return the actions of each kind on each stage, in order."""
    orders: dict[tuple[str, int], list[Action]] = {}
    for rank in schedule.actions:
        for action in rank:
            orders.setdefault((action.kind, action.stage), []).append(action)
    return list(orders.values())


_EQUAL = ("kind", "stream", "signature", "scope", "phase", "group", "peer", "num_bytes")


class Instance(NamedTuple):
    """A chunk of the whole step: the traced chunk that it repeats, its microbatch and its action."""

    chunk: int
    microbatch: int | None
    action: str


def require_alike(traced: CutTrace, chosen: Chosen) -> None:
    """Raise NotExtrapolable unless the two steady microbatches are equal."""
    positions = traced.positions()
    first, second = chosen.steady
    for (key, microbatch), at in positions.items():
        if microbatch != first:
            continue
        pair = [traced.chunks[at], traced.chunks[positions[key, second]]]
        rows = [[getattr(traced.trace.records, name)[one.start : one.stop] for name in _EQUAL] for one in pair]
        made = [made.count for made in (traced.storages, traced.works, traced.events)]
        is_same = all(np.array_equal(a, b) for a, b in zip(*rows, strict=True))
        if not is_same or any(count[at] != count[positions[key, second]] for count in made):
            numbers = " and ".join(str(chosen.microbatches[one]) for one in chosen.steady)
            raise NotExtrapolable(f"microbatches {numbers} differ in {key.kind} of stage {key.stage}")


def chunks_of_step(traced: CutTrace, chosen: Chosen, actions: Sequence[Action]) -> Iterator[Instance]:
    """Yield the chunks of the whole step in order."""
    stages = sorted({action.stage for action in actions})
    orders: dict[ChunkKey, list[int]] = {}
    for action in actions:
        orders.setdefault(ChunkKey(action.kind, stages.index(action.stage)), []).append(action.microbatch)
    positions, sources = traced.positions(), _Sources(traced, chosen, orders)
    yield Instance(BEFORE, None, "")
    following = _frames(traced)
    if (ChunkKey(INPUT, 0), 0) in positions:
        yield from (sources.instance(ChunkKey(INPUT, 0), number, "") for number in range(chosen.num_microbatches))
    yield from following.get(BEFORE, [])
    for action in actions:
        one = sources.instance(ChunkKey(action.kind, stages.index(action.stage)), action.microbatch, str(action))
        yield one
        yield from following.get(one.chunk, [])
    for action in actions:
        key = ChunkKey(f"{WAIT} {action.kind}", stages.index(action.stage))
        # At its end the step waits for the newest messages only.
        if (key, sources.source(key, action.microbatch)) in positions:
            yield sources.instance(key, action.microbatch, "")
    yield from following.get(len(traced.chunks), [])


def _frames(traced: CutTrace) -> dict[int, list[Instance]]:
    """Return the frames by the chunk that they follow; those after all waits by the number of chunks."""
    found: dict[int, list[Instance]] = {}
    last = BEFORE
    for index, chunk in enumerate(traced.chunks):
        if chunk.key.kind == FRAME:
            found.setdefault(last, []).append(Instance(index, None, ""))
        elif chunk.key.kind.startswith(WAIT):
            last = len(traced.chunks)
        elif chunk.key.kind != INPUT:
            last = index
    return found


class _Sources:
    """The traced chunk that each microbatch's chunk repeats."""

    def __init__(self, traced: CutTrace, chosen: Chosen, orders: dict[ChunkKey, list[int]]) -> None:
        self._positions = traced.positions()
        self._numbers = {number: index for index, number in enumerate(chosen.microbatches)}
        self._is_first_of_others: dict[ChunkKey, int] = {}
        self._order_in_trace: dict[ChunkKey, list[int]] = {}
        for chunk in traced.chunks:
            if chunk.microbatch in chosen.steady:
                self._order_in_trace.setdefault(chunk.key, []).append(chunk.microbatch)
        for key in self._order_in_trace:
            order = orders.get(ChunkKey(key.kind.removeprefix(f"{WAIT} "), key.stage), range(chosen.num_microbatches))
            self._is_first_of_others[key] = next(one for one in order if self._is_other(one, chosen))
        self._chosen = chosen

    def _is_other(self, microbatch: int, chosen: Chosen) -> bool:
        return self._numbers.get(microbatch, chosen.steady[0]) in chosen.steady

    def source(self, key: ChunkKey, microbatch: int) -> int:
        """Return the position of the traced microbatch that represents `microbatch`, which may have no such chunk."""
        if not self._is_other(microbatch, self._chosen):
            return self._numbers[microbatch]
        first, second = self._order_in_trace.get(key, self._chosen.steady)
        return first if microbatch == self._is_first_of_others.get(key) else second

    def instance(self, key: ChunkKey, microbatch: int, action: str) -> Instance:
        source = self.source(key, microbatch)
        if (key, source) not in self._positions:
            raise NotExtrapolable(f"{action} has no records")
        return Instance(self._positions[key, source], microbatch, action)


Blocks = dict[int, range]
"""The blocks of each stage."""


def blocks_of_job(job: Job, layout: Layout) -> Blocks | None:
    """Return the blocks of each stage of the pipeline; None for a user's model."""
    architecture = resolve_architecture(job.model)
    if architecture is None:
        return None
    return blocks_of_stages(layout, model_spec(architecture), job.train.seq_len)


def alike_pipeline_ranks(job: Job, layout: Layout, schedule: Schedule) -> dict[int, list[int]]:
    """Return by traced pipeline rank those with equal stages, itself included."""
    blocks = blocks_of_job(job, layout)
    architecture = resolve_architecture(job.model)
    if blocks is None or architecture is None or layout.pp == 1:
        return {rank: [rank] for rank in range(layout.pp)}
    kinds = _kinds(with_wide_matmuls(model_spec(architecture), job.precision.float8_skip))
    found: dict[object, list[int]] = {}
    for rank in range(layout.pp):
        contents = tuple(
            (
                tuple((kinds[block], layout.checkpoint_of(block, blocks[stage].start)) for block in blocks[stage]),
                [_where(stage + step, rank, schedule) for step in (-1, 1)],
            )
            for stage in schedule.stages_of_rank(rank)
        )
        found.setdefault(repr(contents), []).append(rank)
    return {ranks[0]: ranks for ranks in found.values()}


def _kinds(spec: ModelSpec) -> list[int]:
    """Return the kind of each block: the position of its group, which all blocks of the same operations share."""
    first, *groups, last = spec.groups
    assert first.count == last.count == 1
    operations = [group.ops for group in groups]
    return [operations.index(group.ops) for group in groups for _ in range(group.count)]


def _where(stage: int, rank: int, schedule: Schedule) -> str:
    """Return whether a neighbouring stage is on this rank, on another, or does not exist."""
    if not 0 <= stage < schedule.num_stages:
        return "nowhere"
    return "here" if schedule.rank_of_stage(stage) == rank else "elsewhere"


_BLOCK = re.compile(r"\bblocks\.(\d+)")


def relocated(trace: Trace, rank: int, schedule: Schedule, blocks: Blocks | None) -> Trace:
    """Return `trace`, whose actions are those of `rank` already, with that rank's groups, peers and blocks.

    Both ranks have the same position in their pipeline ranks, whose ranks are consecutive.
    """
    size = trace.traced.world_size // len(schedule.actions)
    source, target, shift = trace.traced.rank // size, rank // size, rank - trace.traced.rank
    own = range(source * size, (source + 1) * size)
    peers = np.where(trace.records.peer == NONE, NONE, trace.records.peer + shift)
    peer_of_action = np.full(len(trace.actions) + 1, NONE, np.int64)
    for position, text in enumerate(trace.actions):
        action = parse_action(text)
        if action.kind in COMMUNICATION_KINDS:
            other = schedule.rank_of_stage(action.stage + (1 if action.kind in ("SEND_F", "RECV_B") else -1))
            peer_of_action[position] = other * size + rank % size
    # The last element is for records without an action (NONE).
    moved = peer_of_action[trace.records.action]
    peers = np.where((peers != NONE) & (moved != NONE), moved, peers)
    names = {} if blocks is None else _new_blocks(schedule, blocks, source, target)
    return replace(
        trace,
        traced=trace.traced.replace(rank=rank),
        scopes=tuple(_BLOCK.sub(lambda found: _renamed(found, names), scope) for scope in trace.scopes),
        # Groups along the pipeline, or of all ranks, contain both ranks.
        groups=tuple(
            tuple(one + shift for one in ranks) if all(one in own for one in ranks) else ranks for ranks in trace.groups
        ),
        records=replace(trace.records, peer=_ints(peers)),
    )


def _new_blocks(schedule: Schedule, blocks: Blocks, source: int, target: int) -> Mapping[int, int]:
    pairs = zip(schedule.stages_of_rank(source), schedule.stages_of_rank(target), strict=True)
    return {old: new for one, other in pairs for old, new in zip(blocks[one], blocks[other], strict=True)}


def _renamed(found: re.Match[str], names: Mapping[int, int]) -> str:
    number = int(found[1])
    return f"blocks.{names.get(number, number)}"


def _ints(values: object) -> Ints:
    return np.asarray(values, np.int64)
