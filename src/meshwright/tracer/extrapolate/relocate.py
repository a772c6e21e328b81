"""relocated(): the trace of a pipeline rank as another one would have it that does the same on other blocks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from meshwright.spec.layout.schedule.action import COMMUNICATION_KINDS, parse_action
from meshwright.spec.layout.schedule.schedule import Schedule
from meshwright.spec.trace.trace import NONE, Ints, Trace
from meshwright.tracer.extrapolate.stage_contents import Blocks

_BLOCK = re.compile(r"\bblocks\.(\d+)")


def relocated(trace: Trace, rank: int, schedule: Schedule, blocks: Blocks | None) -> Trace:
    """Return `trace`, whose actions are those of `rank` already, with that rank's groups, peers and blocks.

    Both ranks stand at the same place in their pipeline ranks, whose ranks follow one another.
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
    # The last element is for records of no action, whose position is NONE.
    moved = peer_of_action[trace.records.action]
    peers = np.where((peers != NONE) & (moved != NONE), moved, peers)
    names = {} if blocks is None else _new_blocks(schedule, blocks, source, target)
    return replace(
        trace,
        traced=trace.traced.replace(rank=rank),
        scopes=tuple(_BLOCK.sub(lambda found: _renamed(found, names), scope) for scope in trace.scopes),
        # Groups along the pipeline, or of all ranks, have both ranks.
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
