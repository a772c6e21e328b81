"""simulate(): the traced step of every rank, executed on a cluster.

Where the host computes and also moves the bytes (gloo), nothing overlaps: each member's stream is busy for the whole
communication op, and state that data-parallel ranks share takes its measured time (CollectivePoint "exchange"; the
planner's equivalent is host_step.py). The host's own seconds are part of the measured operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.compute.op_time import op_seconds
from meshwright.cost.constants import fitted_constants
from meshwright.cost.memory.host_memory import host_seconds
from meshwright.errors import ConfigError
from meshwright.simulator.background import in_background
from meshwright.simulator.checks.check_traces import check
from meshwright.simulator.engine.build_timeline import timeline_of
from meshwright.simulator.engine.collective_times import CommOpTimes, comm_op_times, our_stack_on
from meshwright.simulator.engine.conditions import USUAL, Conditions, comm_ops_under, records_under
from meshwright.simulator.engine.execute import Costs, execute
from meshwright.simulator.engine.intervals import intervals_of
from meshwright.simulator.engine.matching import CommOps, match
from meshwright.simulator.engine.noisy_execution import noisy_execution
from meshwright.simulator.engine.program import RecordTimes
from meshwright.simulator.engine.split_classes import split_classes
from meshwright.simulator.memory.memory_curve import memory_of, totals_of
from meshwright.spec.machine.cluster import Cluster, Link
from meshwright.spec.trace.timeline import Timeline, TimelineSource
from meshwright.spec.trace.trace import NONE, RecordKind, Trace
from meshwright.spec.trace.traces import Traces

_OPTIMIZER = "optimizer"
"""The phase that only training steps have."""


class Deadlock(ConfigError):
    """The step deadlocks; the message says why."""


def simulate(traces: Traces, cluster: Cluster, name: str = "", conditions: Conditions = USUAL) -> Timeline:
    """Return one step of `traces` on `cluster`, with its memory; `name` is the job's.

    Ranks with a fault in `conditions` are in the timeline, as are those of their groups.

    Raises Deadlock with the problems of check() where the step never ends, and UnsupportedError where the catalogue
    lacks a rate that the step needs.
    """
    traces = split_classes(traces, [fault.rank for fault in conditions.faults])
    comm_ops = match(traces)
    ranks, num_records = list(traces.traces), sum(len(trace.records) for trace in traces.traces.values())
    totals_of_rank = partial(totals_of, device=cluster.device, conditions=conditions)
    with in_background(totals_of_rank, [traces.traces[rank] for rank in ranks], num_records) as found:
        costs = costs_of(traces, comm_ops, cluster, conditions)
        execution = execute(traces, comm_ops, costs, conditions)
        if not execution.is_done:
            problems = "\n".join(str(problem) for problem in check(traces, conditions))
            raise Deadlock(f"the step of {name or 'these traces'} deadlocks:\n{problems}")
        if conditions.is_noisy:
            execution = noisy_execution(traces, comm_ops, execution, conditions)
        when = {
            host.rank: intervals_of(traces.traces[host.rank], comm_ops, execution, host) for host in execution.hosts
        }
        timeline = timeline_of(traces, comm_ops, execution, when, _source(traces, cluster, name))
        totals = dict(zip(ranks, found(), strict=True))
    memory = tuple(memory_of(traces.traces[rank], when[rank].start_s, totals[rank]) for rank in when)
    return replace(timeline, memory=memory)


def costs_of(traces: Traces, comm_ops: CommOps, cluster: Cluster, conditions: Conditions = USUAL) -> Costs:
    """Return the durations of all records and communication ops on `cluster`."""
    records = {rank: record_times_of(trace, cluster) for rank, trace in traces.traces.items()}
    times = comm_op_times(traces, comm_ops, cluster)
    if cluster.device.is_host:
        records, times = on_the_host(traces, records, comm_ops, times, cluster.intra_node)
    return Costs(
        records=records_under(conditions, traces, records),
        comm_ops=comm_ops_under(conditions, traces, comm_ops, times),
        is_host=cluster.device.is_host,
        # Timings of a host already include the slowdown.
        slowdown=0.0 if cluster.device.is_host else fitted_constants()["overlap_slowdown"],
    )


def record_times_of(trace: Trace, cluster: Cluster) -> RecordTimes:
    """Return the device and host time of each record.

    Only kernel launches cost host time; a collective costs as much as several. The first record also has the host's
    work that a training step has once: data, learning rate, log. Where the host itself computes, its measured
    operators include this work.
    """
    records, constants, figure = trace.records, fitted_constants(), cluster.device.host_launch_s
    is_op = records.kind == RecordKind.OP
    device_s = np.zeros(len(records))
    device_s[is_op] = op_seconds(trace.signatures, cluster.device)[records.signature[is_op]]
    if cluster.device.is_host:
        return RecordTimes(device_s, np.zeros(len(records)))
    launch_s = constants["launch_s.eager"] if figure is None else figure.value
    is_comm_op = np.isin(records.kind, (RecordKind.COLLECTIVE, RecordKind.SEND, RecordKind.RECEIVE))
    num_launches = np.where(is_comm_op, constants["collective_launches"], device_s > 0)
    host_s = launch_s * num_launches
    host_s[is_op] += host_seconds(trace.signatures, cluster.devices_per_node)[records.signature[is_op]]
    host_s[:1] += fixed_host_s(trace, cluster)
    return RecordTimes(device_s, host_s)


def fixed_host_s(trace: Trace, cluster: Cluster) -> float:
    """Return the host's seconds per training step, outside of launches; 0 for a step without an optimizer."""
    if cluster.device.is_host or _OPTIMIZER not in trace.phases:
        return 0.0
    constants = fitted_constants()
    return float(constants["step_s"] * our_stack_on(cluster).factors(constants).overhead)


def _source(traces: Traces, cluster: Cluster, name: str) -> TimelineSource:
    traced = next(iter(traces.traces.values())).traced
    return TimelineSource(
        kind="simulated",
        name=name or traced.build,
        world_size=traces.world_size,
        cluster=f"{cluster.name}:{cluster.num_devices}",
        versions={"torch": traced.torch_version},
    )


_SHARING_AXIS = "fsdp"


def on_the_host(
    traces: Traces, records: Mapping[int, RecordTimes], comm_ops: CommOps, times: CommOpTimes, link: Link | None
) -> tuple[dict[int, RecordTimes], CommOpTimes]:
    """Return durations of records, including those of their comm ops, and of comm ops."""
    took_s = times.latency_s + times.wire_s
    line = next((point for point in link.collectives if point.kind == "exchange"), None) if link else None
    if line is not None:
        for rank, trace in traces.traces.items():
            rows = np.flatnonzero(_shares_state(trace) & (comm_ops.of_record[rank] != NONE))
            exchanged_s = line.latency_s.value + trace.records.num_bytes[rows] / line.bytes_per_s.value
            took_s[comm_ops.of_record[rank][rows]] = exchanged_s
    changed = {}
    for rank, of_rank in records.items():
        of_comm_op = comm_ops.of_record[rank]
        comm_s = np.append(took_s, 0.0)[of_comm_op]  # The last is for -1, no communication op.
        changed[rank] = RecordTimes(of_rank.device_s + comm_s, np.zeros(len(of_comm_op)))
    return changed, replace(times, latency_s=took_s, wire_s=np.zeros_like(took_s))


def _shares_state(trace: Trace) -> NDArray[np.bool_]:
    """Return which records are collectives over the FSDP axis [records]."""
    is_axis = np.array([*(name == _SHARING_AXIS for name in trace.group_names), False])
    return np.asarray(is_axis[trace.records.group], np.bool_)
