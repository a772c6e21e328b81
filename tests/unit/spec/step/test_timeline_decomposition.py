"""The parts of a step: who takes which moment, and that they always add up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hand_timelines import PHASES, of_axis, span, timeline_of
from meshwright.spec.step.estimate import COMPONENTS
from meshwright.spec.step.timeline_decomposition import decompose, seconds_by_rank
from meshwright.spec.trace.timeline import SpanKind

COMPUTE, COMMUNICATION, WAIT, HOST, DATA = SpanKind


def test_each_moment_goes_to_the_first_that_claims_it() -> None:
    parts = decompose(
        timeline_of(
            [
                span(DATA, 0, 1, stream=-1),
                span(COMPUTE, 1, 3),
                span(COMMUNICATION, 2, 5, stream=1, **of_axis("fsdp")),
                span(COMPUTE, 5, 6, phase=1),
                span(WAIT, 6, 7, stream=-1, **of_axis("tp")),
                span(COMPUTE, 6.5, 8, phase=2),
            ],
            step_s=10.0,
        )
    )
    assert parts.to_dict() | {"total": parts.total_s} == {
        **dict.fromkeys(COMPONENTS, 0.0),
        "data_loading_s": 1.0,
        "compute_s": 2.0,
        "dp_communication_s": 2.0,
        "recomputation_s": 1.0,
        "tp_communication_s": 0.5,
        "optimizer_s": 1.5,
        "cpu_bound_s": 2.0,
        "total": 10.0,
    }
    assert parts.exposed_s == 2.5


@pytest.mark.parametrize("phase", range(len(PHASES)))
def test_what_fsdp_computes_is_compute_in_every_phase(phase: int) -> None:
    rows = [span(COMPUTE, 0, 1, phase=phase, scope=0), span(COMPUTE, 1, 3, scope=1), span(COMPUTE, 3, 4)]
    timeline = replace(timeline_of(rows, 4.0), scopes=("FSDP::all_gather_copy_out (blocks.0)", "blocks.0"))
    parts = decompose(timeline)
    assert (parts.dp_communication_s, parts.compute_s, parts.total_s) == (0.0, 4.0, 4.0)


@pytest.mark.parametrize("mark", ["FSDP::post_backward_reduce (blocks.0)", "DDP::all_reduce"])
def test_what_fsdp_and_ddp_send_along_a_dim_of_any_name_is_data_parallel(mark: str) -> None:
    own, program = (span(COMMUNICATION, 0, 2, stream=1, scope=place, **of_axis("world")) for place in (0, 1))
    scopes, axes = (mark, "blocks.0"), ("tp", "fsdp", "cp", "replicas")
    parts = [decompose(replace(timeline_of([row], 2.0), scopes=scopes, axes=axes)) for row in (own, program)]
    assert [(one.dp_communication_s, one.other_communication_s) for one in parts] == [(2.0, 0.0), (0.0, 2.0)]


def test_a_wait_for_a_neighbour_is_a_bubble_until_the_message_is_under_way() -> None:
    pp = of_axis("pp")
    parts = decompose(timeline_of([span(WAIT, 0, 5, **pp), span(COMMUNICATION, 3, 5, stream=2, **pp)], step_s=5.0))
    assert (parts.pipeline_bubble_s, parts.pipeline_p2p_s) == (3.0, 2.0)


def test_waiting_for_all_ranks_of_a_pipeline_is_a_bubble_until_they_are_there() -> None:
    world = of_axis("world")
    rows = [span(WAIT, 0, 3, **world), span(COMMUNICATION, 2, 3, stream=1, **world)]
    assert decompose(timeline_of(rows, 3.0)).pipeline_bubble_s == 2.0
    without_pipeline = replace(timeline_of(rows, 3.0), axes=("tp", "fsdp", "cp", "world"))
    assert decompose(without_pipeline).other_communication_s == 3.0


def test_waiting_in_a_pipeline_written_by_hand_is_a_bubble_too() -> None:
    rows = [span(WAIT, 0, 3, **of_axis("world")), span(COMMUNICATION, 2, 3, stream=1, **of_axis("world"))]
    unnamed = replace(timeline_of(rows, 3.0), axes=("tp", "fsdp", "cp", "world"))
    names = ("c10d.recv_.default", *unnamed.names[1:])
    assert decompose(unnamed).pipeline_bubble_s == 0.0
    assert decompose(replace(unnamed, names=names)).pipeline_bubble_s == 2.0


def test_work_of_the_host_on_the_default_stream_is_not_hidden_by_communication() -> None:
    parts = decompose(timeline_of([span(COMMUNICATION, 0, 2, stream=1, **of_axis("tp")), span(HOST, 0, 1)], 2.0))
    assert (parts.cpu_bound_s, parts.tp_communication_s) == (1.0, 1.0)


def test_a_rank_counts_as_often_as_it_stands_for() -> None:
    timeline = timeline_of([span(COMPUTE, 0, 4), span(COMPUTE, 0, 1, rank=1)], step_s=4.0, multiplicity=(1, 2))
    assert decompose(timeline).compute_s == pytest.approx(2.0)
    assert decompose(timeline, rank=1).compute_s == pytest.approx(1.0)


SPAN = st.fixed_dictionaries(
    {
        "rank": st.integers(0, 2),
        "stream": st.integers(-1, 2),
        "start_s": st.floats(-1, 3),
        "length_s": st.floats(0, 2),
        "kind": st.sampled_from([int(kind) for kind in SpanKind]),
        "phase": st.integers(-1, 2),
        "axis": st.integers(-1, 3),
    }
)


@pytest.mark.slow
@given(rows=st.lists(SPAN, max_size=30), step_s=st.floats(1e-3, 2.5))
def test_the_parts_of_every_rank_are_its_whole_step(rows: list[dict[str, float]], step_s: float) -> None:
    spans = [row | {"end_s": row["start_s"] + row["length_s"]} for row in rows]
    timeline = timeline_of(spans, step_s, multiplicity=(1, 3, 2))
    assert (seconds_by_rank(timeline) >= 0).all()
    for rank in timeline.ranks:
        assert decompose(timeline, rank).total_s == pytest.approx(step_s, rel=1e-9)
    assert decompose(timeline).total_s == pytest.approx(step_s, rel=1e-9)
