"""What of communication computation hides, and what a step's tables come to: sums that must agree."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hand_timelines import span, timeline_of
from hand_traces import Script, all_of
from meshwright.simulator.analysis.exposure import collective_uses, exposed_places
from meshwright.simulator.analysis.step_tables import rank_times
from meshwright.spec.layout.layout import Layout
from meshwright.spec.step.timeline_decomposition import compute_seconds, decompose
from meshwright.spec.trace.timeline import SpanKind
from simulated_steps import GATHER_S, MATMUL_S, MULTIPLY_S, simulated_step


def test_compute_by_kind_adds_up_to_the_part() -> None:
    timeline = simulated_step()
    seconds = compute_seconds(timeline)
    assert sum(seconds.values()) == pytest.approx(decompose(timeline).compute_s)
    # 8 microbatches, forward and backward, 2 and 4 pairs of operations.
    assert seconds == pytest.approx({"matmul": 48 * MATMUL_S, "attention": 0.0, "other": 48 * MULTIPLY_S})


def test_ranks_take_the_whole_step() -> None:
    timeline = simulated_step()
    ranks = rank_times(timeline, Layout(pp=4, dp_shard=2))
    assert [one.pipeline_rank for one in ranks] == [0, 1, 2, 3]
    assert [one.parts.total_s for one in ranks] == pytest.approx([timeline.step_s] * 4)


def test_the_pipeline_ranks_of_a_program_are_places_in_its_pp_group() -> None:
    timeline = simulated_step(num_ranks=2, multiplicity=1)
    first, last = (Script(rank, world_size=2) for rank in timeline.ranks)
    # In the order of the mesh, where the pipeline begins at the later rank.
    first.send(1, (1, 0))
    last.receive(0, (1, 0))
    ranks = rank_times(timeline, None, all_of(first, last))
    assert [one.pipeline_rank for one in ranks] == [1, 0]


def test_a_gather_that_the_stream_waits_for_is_exposed_and_one_beside_computation_is_hidden() -> None:
    timeline = simulated_step(num_ranks=1, num_microbatches=4)
    places = exposed_places(timeline)
    gathers = [one for one in places if one.axis == "fsdp"]
    assert sum(one.exposed_s for one in gathers) == pytest.approx(8 * GATHER_S)
    assert sum(one.hidden_s for one in gathers) == pytest.approx(0.0, abs=1e-9)
    # Messages go out while the next gather is waited for; numbers of blocks are one place.
    assert {one.scope for one in places} <= {"layers.*", "layers.0", "layers.1", "norm"}
    assert [one.exposed_s for one in places] == sorted((one.exposed_s for one in places), reverse=True)


@pytest.mark.parametrize("late_s", [0.0, 1e-3, 1e-2])
def test_what_is_hidden_is_what_is_computed_meanwhile(late_s: float) -> None:
    timeline = simulated_step(num_ranks=2, num_microbatches=3)
    spans = timeline.spans
    is_gather = spans.num_bytes * (spans.axis == 0) * (spans.kind == 1) > 0
    spans.start_s[is_gather] += late_s
    spans.end_s[is_gather] += late_s
    for one in exposed_places(timeline):
        if one.axis == "fsdp":
            assert one.exposed_s + one.hidden_s == pytest.approx(one.count * GATHER_S)
            hidden = min(late_s, GATHER_S)
            # A gather that is later by so much reaches into the operations that follow.
            assert one.hidden_s == pytest.approx(one.count * hidden, rel=0.35, abs=1e-9)
    assert np.all(spans.end_s > spans.start_s)


def test_a_copy_to_the_device_takes_one_rank_and_a_message_two() -> None:
    scripts = [Script(rank, world_size=4) for rank in range(4)]
    for script in scripts:
        script.op()
        script.collective((0, 1, 2, 3))
        script.send(script.traced.rank ^ 1, (0, 1, 2, 3))
    names = ("copy", "sum", "send")
    rows = [span(SpanKind.COMMUNICATION, at, at + 1.0, name=at, record=at, num_bytes=8) for at in range(len(names))]
    uses = collective_uses(replace(timeline_of(rows, step_s=3.0, multiplicity=(4,)), names=names), all_of(*scripts))
    assert {one.op: one.num_ranks for one in uses} == {"copy": 1, "sum": 4, "send": 2}
