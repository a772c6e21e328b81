"""Arrows lead from each message to the one that received it, of ranks that stand for others, too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.hardware.choice import choose_cluster
from meshwright.pages.figures.intervals import messages_of
from meshwright.simulator.simulate_step import simulate
from meshwright.spec.trace.timeline import Timeline
from meshwright.spec.trace.trace import RecordKind, Trace
from meshwright.spec.trace.traces import Traces
from written_steps import WrittenStep


def step(rank: int, kind: RecordKind, peer: int, world_size: int, count: int) -> Trace:
    """Return a step of `count` messages to or from `peer`, each waited for."""
    written = WrittenStep()
    tensor = written.there(2**20)
    for number in range(count):
        written.make(2**20, reads=(tensor,), op="aten.neg.default")
        written.op(reads=(tensor,), op=f"c10d.{kind.name}", kind=kind, peer=peer, num_bytes=2**20, work=number, group=0)
        written.op(op="c10d.wait", kind=RecordKind.WAIT, work=number)
    trace = written.trace()
    traced = trace.traced.replace(rank=rank, world_size=world_size)
    return replace(trace, traced=traced, groups=((0, world_size // 2),), group_names=("pp",))


def played(traces: Traces) -> Timeline:
    return simulate(traces, choose_cluster(f"h100-ib400:{traces.world_size}"))


def names(timeline: Timeline, rows: list[int]) -> list[tuple[int, str]]:
    spans = timeline.spans
    return [(int(spans.rank[row]), timeline.names[spans.name[row]]) for row in rows]


def test_the_kth_message_sent_is_the_kth_received() -> None:
    traces = Traces.all_of({0: step(0, RecordKind.SEND, 1, 2, 3), 1: step(1, RecordKind.RECEIVE, 0, 2, 3)})
    timeline = played(traces)
    messages = messages_of(timeline, traces)
    assert names(timeline, [one.sent for one in messages]) == [(0, "c10d.SEND")] * 3
    assert names(timeline, [one.received for one in messages]) == [(1, "c10d.RECEIVE")] * 3
    for column in ("sent", "received"):
        starts = [timeline.spans.start_s[getattr(one, column)] for one in messages]
        assert starts == sorted(starts)


def test_a_message_to_a_rank_that_another_stands_for_leads_to_that_one() -> None:
    traces = Traces(
        4,
        {0: step(0, RecordKind.SEND, 2, 4, 2), 2: step(2, RecordKind.RECEIVE, 0, 4, 2)},
        np.array([0, 0, 2, 2]),
    )
    timeline = played(traces)
    messages = messages_of(timeline, traces)
    assert [timeline.spans.rank[one.received] for one in messages] == [2, 2]
