"""Where ranks compute on the cores that move the bytes, nothing is hidden: a step is the sum of what it asks for."""

from __future__ import annotations

import pytest

from hand_traces import ALL_GATHER, ALL_REDUCE, Script, all_of
from meshwright.cost.compute.op_time import op_seconds
from meshwright.hardware.catalogue import load_device
from meshwright.simulator.simulate_step import simulate
from meshwright.spec.machine.cluster import Cluster, Link
from meshwright.spec.machine.device import CollectivePoint, Figure, OpLine, Source
from meshwright.spec.trace.timeline import SpanKind

SOURCE = Source(title="a test", date="2026-11-22", kind="measured")
LATENCY_S, BYTES_PER_S, NUM_BYTES = 1e-3, 1e9, 4_000_000
GATHER_S = LATENCY_S + NUM_BYTES / BYTES_PER_S


def figure(value: float) -> Figure:
    return Figure(value=value, source=SOURCE)


def host_cluster(*more: CollectivePoint) -> Cluster:
    line = OpLine(op="aten.add.Tensor", dtype="float32", start_s=figure(2e-3))
    point = CollectivePoint(
        kind="all-gather", num_ranks=2, latency_s=figure(LATENCY_S), bytes_per_s=figure(BYTES_PER_S)
    )
    device = load_device("cpu-local").replace(op_lines=(line,), memory_bytes_per_s=figure(1e10))
    return Cluster(
        name="two-ranks",
        title="two ranks of a processor",
        device=device,
        num_devices=2,
        devices_per_node=2,
        intra_node=Link(
            name="gloo", bytes_per_s=figure(BYTES_PER_S), latency_s=figure(LATENCY_S), collectives=(point, *more)
        ),
        source=SOURCE,
    )


def rank(number: int) -> Script:
    script = Script(number, 2, device="cpu")
    script.op()
    work = script.collective((0, 1), op=ALL_GATHER, axis="fsdp", num_bytes=NUM_BYTES)
    # An accelerator would gather meanwhile.
    script.op()
    script.wait(work)
    return script


def test_a_step_on_a_host_is_the_sum_of_its_parts() -> None:
    cluster = host_cluster()
    traces = all_of(rank(0), rank(1))
    (op_s,) = set(op_seconds(traces.traces[0].signatures, cluster.device)) - {0.0}
    timeline = simulate(traces, cluster, "by hand")
    # What was measured on this very machine is taken as it is, without the host's launches once more.
    assert timeline.step_s == pytest.approx(2 * op_s + GATHER_S, rel=0.01)
    spans = timeline.spans
    lasted_s = (spans.end_s - spans.start_s)[spans.kind == SpanKind.COMMUNICATION]
    assert lasted_s == pytest.approx([GATHER_S] * len(lasted_s), rel=0.01)


def test_what_steps_were_seen_to_take_for_sharing_comes_first() -> None:
    seen = CollectivePoint(kind="exchange", num_ranks=2, latency_s=figure(5e-3), bytes_per_s=figure(BYTES_PER_S))
    traces = all_of(rank(0), rank(1))
    plain_s, seen_s = (simulate(traces, host_cluster(*more), "by hand").step_s for more in ((), (seen,)))
    assert seen_s - plain_s == pytest.approx(5e-3 - LATENCY_S, rel=0.01)


@pytest.mark.parametrize("computes_meanwhile", [True, False])
def test_an_all_reduce_takes_what_it_adds_to_computation_if_there_is_any(computes_meanwhile: bool) -> None:
    plain = CollectivePoint(kind="all-reduce", num_ranks=2, latency_s=figure(4e-3), bytes_per_s=figure(BYTES_PER_S))
    adds = CollectivePoint(kind="async-all-reduce", num_ranks=2, latency_s=figure(5e-4), bytes_per_s=figure(2e9))

    def summing(number: int) -> Script:
        script = Script(number, 2, device="cpu")
        work = script.collective((0, 1), op=ALL_REDUCE, axis="dp_replicate", num_bytes=NUM_BYTES)
        if computes_meanwhile:
            script.op()
        script.wait(work)
        if not computes_meanwhile:
            script.op()
        return script

    cluster, traces = host_cluster(plain, adds), all_of(summing(0), summing(1))
    op_s = max(op_seconds(traces.traces[0].signatures, cluster.device))
    whole_s, added_s = 4e-3 + NUM_BYTES / BYTES_PER_S, 5e-4 + NUM_BYTES / 2e9
    expected_s = op_s + (added_s if computes_meanwhile else whole_s)
    assert simulate(traces, cluster, "by hand").step_s == pytest.approx(expected_s, rel=0.01)
