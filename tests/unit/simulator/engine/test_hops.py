"""P2P between two pods, by hand: 32 devices in nodes of 8 and pods of 16, whose ways out carry 4 devices' traffic."""

from __future__ import annotations

import numpy as np
import pytest

from hand_traces import Script, all_of
from meshwright.cost.communication.collective import group_of
from meshwright.cost.communication.pipeline_p2p import mean_send_s, send_s
from meshwright.hardware.catalogue import load_cluster
from meshwright.simulator.engine.collective_times import comm_op_times, reached_fabric
from meshwright.simulator.engine.matching import match
from meshwright.simulator.simulate_step import simulate
from meshwright.spec.machine.cluster import Cluster, Link
from meshwright.spec.trace.timeline import SpanKind
from meshwright.spec.trace.traces import Traces

NUM_BYTES = 1 << 28
PIPELINE = (0, 8, 16, 24)
OVERSUBSCRIPTION = 4.0


def _two_pods() -> Cluster:
    cluster = load_cluster("h100-roce400").with_num_devices(32)
    link = cluster.inter_node
    assert isinstance(link, Link)
    assert link.oversubscription is not None
    figure = link.oversubscription.replace(value=OVERSUBSCRIPTION)
    return cluster.replace(inter_node=link.replace(oversubscription=figure, nonblocking_devices=16))


CLUSTER = _two_pods()
FABRIC = reached_fabric(CLUSTER)
CARD_S = NUM_BYTES / float(FABRIC.inter_bytes_per_s)
"""On a network card that a rank has for itself."""
FOUR_STAGES = np.repeat(PIPELINE, 8)
"""The ranks of a pipeline rank do the same."""


def _wire_s(traces: Traces) -> dict[tuple[int, ...], float]:
    """Return by sender and receiver the seconds of a message's bytes, alone in the network."""
    comm_ops = match(traces)
    times = comm_op_times(traces, comm_ops, CLUSTER)
    return {channel.ranks: float(times.wire_s[channel.first]) for channel in comm_ops.channels}


def _pipeline(*hops: tuple[int, int]) -> dict[int, Script]:
    scripts = {rank: Script(rank, 32) for rank in PIPELINE}
    for sender, receiver in hops:
        scripts[sender].send(receiver, PIPELINE, num_bytes=NUM_BYTES)
        scripts[receiver].receive(sender, PIPELINE, num_bytes=NUM_BYTES)
    for script in scripts.values():
        script.sync()
    return scripts


def _traces(*hops: tuple[int, int]) -> Traces:
    return Traces(32, {rank: script.trace() for rank, script in _pipeline(*hops).items()}, FOUR_STAGES)


def _took_s(traces: Traces) -> dict[int, float]:
    """Return by rank the seconds of its longest P2P op."""
    timeline = simulate(traces, CLUSTER)
    took = {}
    for rank in timeline.ranks:
        spans = timeline.of_rank(rank)
        is_p2p = spans.kind == SpanKind.COMMUNICATION
        took[rank] = float((spans.end_s - spans.start_s)[is_p2p].max(initial=0.0))
    return took


def test_a_hop_pays_for_the_borders_between_its_own_two_ranks() -> None:
    # A pod's 8 senders share a way out as wide as 4 cards.
    expected = {(0, 8): 1, (8, 16): 2, (16, 24): 1, (24, 0): 2, (16, 8): 2, (0, 24): 2}
    wire_s = _wire_s(_traces(*expected))
    assert wire_s == pytest.approx({hop: slowdown * CARD_S for hop, slowdown in expected.items()})


def test_the_closed_formula_has_the_slowest_and_the_mean_hop() -> None:
    times = _wire_s(_traces((0, 8), (8, 16), (16, 24)))
    group = group_of(8, 4, FABRIC)
    latency_s = float(FABRIC.base_s + FABRIC.inter_step_s)
    assert float(send_s(NUM_BYTES, group, FABRIC)) == pytest.approx(latency_s + max(times.values()))
    assert float(mean_send_s(NUM_BYTES, group, FABRIC)) == pytest.approx(latency_s + sum(times.values()) / 3)


def test_hops_inside_a_node_do_not_notice_the_network() -> None:
    pair = Traces(
        32,
        {rank: script.trace() for rank, script in zip((0, 1), _neighbours(), strict=True)},
        np.tile([0, 1], 16),
    )
    ((_, wire_s),) = _wire_s(pair).items()
    assert wire_s == pytest.approx(NUM_BYTES / float(FABRIC.intra_bytes_per_s))


def _neighbours() -> tuple[Script, Script]:
    first, second = Script(0, 32), Script(1, 32)
    first.send(1, (0, 1), num_bytes=NUM_BYTES)
    second.receive(0, (0, 1), num_bytes=NUM_BYTES)
    return first, second


def test_what_leaves_a_pod_at_the_same_time_shares_its_way_out() -> None:
    # Forward out of pod 0 and a gradient to the last stage: 16 senders on a way as wide as 4 cards.
    both = _took_s(_traces((8, 16), (0, 24)))
    assert both[8] == pytest.approx(4 * CARD_S, rel=0.01)
    assert both[0] == pytest.approx(4 * CARD_S, rel=0.01)
    # The other way has its own links, and so has what stays in the pod.
    opposite = _took_s(_traces((8, 16), (24, 0)))
    assert opposite[8] == pytest.approx(2 * CARD_S, rel=0.01)
    assert _took_s(_traces((8, 16), (0, 8)))[0] == pytest.approx(CARD_S, rel=0.01)


def test_ranks_one_by_one_take_as_long_as_their_classes() -> None:
    hops = ((8, 16), (0, 24), (16, 24))
    scripts = [Script(rank, 32) for rank in range(32)]
    for sender, receiver in hops:
        for place in range(8):
            group = tuple(rank + place for rank in PIPELINE)
            scripts[sender + place].send(receiver + place, group, num_bytes=NUM_BYTES)
            scripts[receiver + place].receive(sender + place, group, num_bytes=NUM_BYTES)
    for script in scripts:
        script.sync()
    one_by_one, by_class = _took_s(all_of(*scripts)), _took_s(_traces(*hops))
    for rank, took_s in by_class.items():
        assert one_by_one[rank + 3] == pytest.approx(took_s, rel=1e-3)


def test_the_end_of_a_ring_is_a_hop_between_its_own_two_ranks() -> None:
    # Rank 0 stands for a ring of four nodes: two of the four hops cross the pods' border.
    script = Script(0, 32)
    script.send(8, PIPELINE, num_bytes=NUM_BYTES)
    script.receive(24, PIPELINE, num_bytes=NUM_BYTES)
    traces = Traces(32, {0: script.trace()}, np.zeros(32, np.int64))
    assert list(_wire_s(traces).values()) == pytest.approx([2 * CARD_S])
