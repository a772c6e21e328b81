"""Pipeline ranks whose stages hold equal blocks: one of them is traced, and its trace relocated to the others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.schedule.action import COMMUNICATION_KINDS, parse_action
from meshwright.spec.layout.schedule.schedule import Schedule
from meshwright.spec.layout.stage_split import stage_boundaries
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.model.model_spec import ModelSpec, model_spec
from meshwright.spec.trace.trace import NONE, Ints, Trace

Blocks = dict[int, range]
"""The blocks of each stage."""


def blocks_of_stages(job: Job, layout: Layout) -> Blocks | None:
    """Return the blocks of each stage of the pipeline; None for a user's model."""
    architecture = resolve_architecture(job.model)
    if architecture is None:
        return None
    spec = model_spec(architecture)
    num_blocks = len(_kinds(spec))
    edges = [0, *stage_boundaries(layout, spec, job.train.seq_len), num_blocks]
    return {stage: range(edges[stage], edges[stage + 1]) for stage in range(layout.num_stages)}


def alike_pipeline_ranks(job: Job, layout: Layout, schedule: Schedule) -> dict[int, list[int]]:
    """Return by traced pipeline rank those with equal stages, itself included."""
    blocks = blocks_of_stages(job, layout)
    architecture = resolve_architecture(job.model)
    if blocks is None or architecture is None or layout.pp == 1:
        return {rank: [rank] for rank in range(layout.pp)}
    kinds = _kinds(model_spec(architecture))
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
