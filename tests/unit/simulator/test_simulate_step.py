"""The step as a timeline: what it costs, what it holds, what changes it."""

from __future__ import annotations

import numpy as np
import pytest

from hand_traces import ALL_GATHER, ALL_REDUCE, Script, all_of
from meshwright.cost.communication.all_to_all import all_to_all_s
from meshwright.cost.communication.collective import all_gather_s, all_reduce_s, group_of
from meshwright.cost.communication.pipeline_p2p import send_s
from meshwright.errors import ConfigError, UnsupportedError
from meshwright.hardware.catalogue import load_cluster
from meshwright.simulator.engine.collective_times import comm_op_times, group_at, kind_of, reached_fabric
from meshwright.simulator.engine.conditions import Conditions
from meshwright.simulator.engine.matching import match
from meshwright.simulator.simulate_step import simulate
from meshwright.spec.fault import Fault
from meshwright.spec.machine.device import Device
from meshwright.spec.trace.timeline import SpanKind, Timeline
from meshwright.spec.trace.traces import Traces

CLUSTER = load_cluster("h100-ib400").with_num_devices(16)
RANKS = tuple(range(16))
NUM_BYTES = 1 << 28


def _rank(rank: int, op: str = ALL_REDUCE) -> Script:
    script = Script(rank, 16)
    script.allocate(3000)
    for _ in range(3):
        script.op()
        kept = script.allocate(5 << 20)
        work = script.collective(RANKS, op=op, axis="fsdp", num_bytes=NUM_BYTES)
        script.op()
        script.wait(work)
        script.free(kept)
    script.sync()
    script.op()
    return script


def _classes() -> Traces:
    return Traces(16, {0: _rank(0).trace(), 8: _rank(8).trace()}, np.repeat([0, 8], 8))


def _step(conditions: Conditions | None = None) -> Timeline:
    return simulate(_classes(), CLUSTER, "hand", conditions or Conditions())


def test_a_collective_takes_what_the_planner_says_of_its_ranks() -> None:
    fabric = reached_fabric(CLUSTER)
    for ranks, stride in ((RANKS, 1), ((0, 8), 8), ((0, 1, 2, 3), 1), ((1, 3, 5, 7, 9, 11, 13, 15), 2)):
        group = group_at(ranks, fabric)
        for ours, theirs in zip(vars(group).values(), vars(group_of(stride, len(ranks), fabric)).values(), strict=True):
            assert ours == theirs
    traces = _classes()
    times = comm_op_times(traces, match(traces), CLUSTER)
    whole_s = float(all_reduce_s(NUM_BYTES, group_of(1, 16, fabric), fabric))
    np.testing.assert_allclose(times.latency_s + times.wire_s, whole_s, rtol=1e-12)
    spans = _step().spans
    is_comm_op = spans.kind == SpanKind.COMMUNICATION
    # What computes next to it costs a little.
    np.testing.assert_allclose((spans.end_s - spans.start_s)[is_comm_op], whole_s, rtol=1e-3)


def test_groups_share_what_joins_their_ranks() -> None:
    def seconds(cluster: str, first: tuple[int, ...], second: tuple[int, ...]) -> float:
        scripts = [Script(rank, 4) for rank in range(4)]
        for rank, script in enumerate(scripts):
            for ranks in (first, second):
                if rank in ranks:
                    script.collective(ranks, op=ALL_GATHER, axis=f"of {len(ranks)}", num_bytes=NUM_BYTES)
        return simulate(all_of(*scripts), load_cluster(cluster).with_num_devices(4), "hand").step_s

    alone_s = {name: seconds(name, (0, 1), (2, 3)) for name in ("h100-ib400", "mi300x-node")}
    # Behind a switch a rank has one link to all of its peers, on MI300X one to each.
    assert seconds("h100-ib400", (0, 1), (0, 2)) == pytest.approx(2 * alone_s["h100-ib400"], rel=0.05)
    assert seconds("mi300x-node", (0, 1), (0, 2)) == pytest.approx(alone_s["mi300x-node"], rel=0.01)
    assert seconds("mi300x-node", (0, 1), (0, 1, 2)) > 1.5 * alone_s["mi300x-node"]


def test_messages_and_exchanges_take_what_the_planner_says() -> None:
    fabric = reached_fabric(CLUSTER)
    first, second = Script(0, 2), Script(1, 2)
    first.send(1, (0, 1), num_bytes=NUM_BYTES)
    second.receive(0, (0, 1), num_bytes=NUM_BYTES)
    for script in (first, second):
        script.collective((0, 1), op="_c10d_functional.all_to_all_single.default", axis="ep", num_bytes=NUM_BYTES)
    traces = all_of(first, second)
    times = comm_op_times(traces, match(traces), CLUSTER)
    pair = group_of(1, 2, fabric)
    expected = [float(formula(NUM_BYTES, pair, fabric)) for formula in (send_s, all_to_all_s)]
    assert sorted((times.latency_s + times.wire_s).tolist()) == pytest.approx(sorted(expected), rel=1e-12)


def test_a_group_across_nodes_loads_the_network_and_one_of_neighbours_does_not() -> None:
    scripts = []
    for rank in RANKS:
        script, node = Script(rank, 16), rank // 8 * 8
        script.collective(tuple(range(node, node + 8)), op=ALL_GATHER, axis="tp", num_bytes=NUM_BYTES)
        script.collective((rank % 8, rank % 8 + 8), op=ALL_GATHER, axis="fsdp", num_bytes=NUM_BYTES)
        scripts.append(script)
    traces = all_of(*scripts)
    comm_ops = match(traces)
    times = comm_op_times(traces, comm_ops, CLUSTER)
    is_tp = np.array([channel.axis == "tp" for channel in comm_ops.channels])[comm_ops.channel]
    assert set(times.inside[is_tp].tolist()) == {1.0}
    assert set(times.network[is_tp].tolist()) == {0.0}
    assert set(times.network[~is_tp].tolist()) == {1.0}
    assert set(times.inside[~is_tp].tolist()) == {0.0}
    # So they do not notice each other.
    spans = simulate(traces, CLUSTER).spans
    alone_s = float(all_gather_s(NUM_BYTES, group_of(8, 2, reached_fabric(CLUSTER)), reached_fabric(CLUSTER)))
    assert (spans.end_s - spans.start_s).max() == pytest.approx(alone_s)


def test_a_limit_on_the_sms_of_communication_is_priced_as_the_planner_prices_it() -> None:
    traces, limited = _classes(), reached_fabric(CLUSTER).limited(4)
    times = comm_op_times(traces, match(traces), CLUSTER, communication_sms=4)
    whole_s = float(all_reduce_s(NUM_BYTES, group_of(1, 16, limited), limited))
    np.testing.assert_allclose(times.latency_s + times.wire_s, whole_s, rtol=1e-12)
    assert set(times.slows.tolist()) == {4 / 16}
    assert (
        _step(Conditions(communication_sms=16)).step_s == _step().step_s < _step(Conditions(communication_sms=4)).step_s
    )


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        ("c10d._allgather_base_.default", "all-gather"),
        ("_c10d_functional.reduce_scatter_tensor.default", "reduce-scatter"),
        ("c10d.allreduce_.default", "all-reduce"),
        ("c10d.alltoall_base_.default", "all-to-all"),
        ("c10d.barrier.default", "all-reduce"),
    ],
)
def test_collectives_are_known_by_their_names(op: str, kind: str) -> None:
    assert kind_of(op) == kind


def test_an_unknown_collective_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="gossip"):
        kind_of("c10d.gossip_.default")


def test_spans_of_a_stream_follow_each_other_and_end_with_the_step() -> None:
    step = _step()
    spans = step.spans
    assert (step.ranks, step.multiplicity) == ((0, 8), (8, 8))
    assert spans.end_s.max() == pytest.approx(step.step_s)
    for rank in step.ranks:
        of_rank = step.of_rank(rank)
        for stream in np.unique(of_rank.stream):
            one = of_rank.take(of_rank.stream == stream)
            assert (one.start_s[1:] >= one.end_s[:-1] - 1e-15).all()
    waits = spans.take(spans.kind == SpanKind.WAIT)
    assert len(waits)
    assert {step.axes[axis] for axis in waits.axis.tolist()} == {"fsdp"}


def test_the_host_waits_in_a_span_of_its_own() -> None:
    spans = _step().of_rank(0)
    last_comm_op_s = spans.end_s[spans.kind == SpanKind.COMMUNICATION].max()
    host = spans.take(spans.stream == -1)
    assert (host.kind == SpanKind.HOST).all()
    assert (host.end_s == last_comm_op_s).any()


def test_memory_is_what_is_alive_as_torch_rounds_it() -> None:
    curve = _step().memory[0]
    assert curve.by_role.sum(axis=1).max() == 3000 + (5 << 20)
    assert curve.allocated_bytes.max() == 3072 + (5 << 20)
    assert curve.reserved_bytes.tolist()[-1] == (2 << 20) + (20 << 20)
    assert (np.diff(curve.at_s) >= 0).all()


def test_the_same_seed_gives_the_same_step_and_jitter_another() -> None:
    usual, one, again, other = (
        _step(Conditions(seed=seed, jitter=jitter)).step_s for seed, jitter in ((0, 0.0), (1, 0.2), (1, 0.2), (2, 0.2))
    )
    assert one == again
    assert len({usual, one, other}) == 3


def test_jitter_leaves_the_mean_of_what_operations_take() -> None:
    script = Script(0, 1)
    for _ in range(4000):
        script.op()
    traces = all_of(script)
    usual_s, jittered_s = (
        float((step.spans.end_s - step.spans.start_s)[step.spans.kind == SpanKind.COMPUTE].sum())
        for step in (simulate(traces, CLUSTER, "", Conditions(jitter=jitter)) for jitter in (0.0, 0.3))
    )
    assert jittered_s == pytest.approx(usual_s, rel=0.03)


def test_ranks_that_are_slow_by_chance_are_so_for_the_whole_step() -> None:
    steps = [_step(Conditions(seed=seed, rank_spread=3.0)).step_s for seed in range(4)]
    assert min(steps) > _step().step_s
    assert len(set(steps)) == 4


def test_a_host_that_computes_has_one_stream_and_holds_what_is_asked_for() -> None:
    line = {"op": "aten.add.Tensor", "dtype": "float32", "start_s": _figure(2e-3)}
    device = {**CLUSTER.device.to_dict(), "is_host": True, "op_lines": [line]}
    host = CLUSTER.replace(device=Device.from_dict(device))
    script = Script(0, 1, device="cpu")
    script.op()
    script.op(stream=1)
    script.allocate(100)
    script.sync()
    step = simulate(all_of(script), host)
    assert step.step_s == pytest.approx(4e-3)
    assert set(step.spans.stream.tolist()) == {0}
    assert step.memory[0].reserved_bytes.tolist() == [100]


def _figure(value: float) -> dict[str, object]:
    return {"value": value, "source": {"kind": "measured", "title": "this test", "date": "2026"}}


def test_a_slow_link_and_a_slow_rank_hold_all_others_up() -> None:
    usual_s = _step().step_s
    link_s = _step(Conditions(faults=(Fault(kind="slow-link", rank=3, argument=10.0),))).step_s
    assert link_s > 9 * usual_s
    rank_s = _step(Conditions(faults=(Fault(kind="slow-rank", rank=12, argument=1e4),))).step_s
    assert rank_s > 2 * usual_s


def test_a_step_that_never_ends_is_refused_with_the_reason() -> None:
    fault = Fault(kind="hang", rank=8, argument=4.0)
    with pytest.raises(ConfigError, match="rank 8 stopped"):
        _step(Conditions(faults=(fault,)))
