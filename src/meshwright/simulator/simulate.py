"""simulate(): the traced step of every rank, played on a cluster."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from meshwright.cost.compute.op_time import op_seconds
from meshwright.cost.constants import fitted_constants
from meshwright.cost.memory.host_memory import host_seconds
from meshwright.errors import ConfigError
from meshwright.simulator.background import in_background
from meshwright.simulator.checks.check import check
from meshwright.simulator.engine.apart import apart
from meshwright.simulator.engine.clocks import clocks
from meshwright.simulator.engine.collective_times import comm_op_times, our_stack_on
from meshwright.simulator.engine.conditions import USUAL, Conditions, comm_ops_under, records_under
from meshwright.simulator.engine.host_comm_ops import on_the_host
from meshwright.simulator.engine.matching import CommOps, match
from meshwright.simulator.engine.moments import moments_of
from meshwright.simulator.engine.play_traces import Costs, play_traces
from meshwright.simulator.engine.program import RecordTimes
from meshwright.simulator.engine.spans import timeline_of
from meshwright.simulator.memory.memory import memory_of, totals_of
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.trace.timeline import Timeline, TimelineSource
from meshwright.spec.trace.trace import RecordKind, Trace
from meshwright.spec.trace.traces import Traces

_OPTIMIZER = "optimizer"
"""The phase that only training steps have."""


class NeverEnds(ConfigError):
    """A step in which ranks wait for ever; says why."""


def simulate(traces: Traces, cluster: Cluster, name: str = "", conditions: Conditions = USUAL) -> Timeline:
    """Return one step of `traces` on `cluster`, with its memory; `name` is the job's.

    Ranks that `conditions` has a fault for are among the timeline's, as are those in their groups.

    Raises NeverEnds with what check() finds where the step never ends, and UnsupportedError where the catalogue lacks
    a rate that the step needs.
    """
    traces = apart(traces, [fault.rank for fault in conditions.faults])
    comm_ops = match(traces)
    ranks, num_records = list(traces.traces), sum(len(trace.records) for trace in traces.traces.values())
    totals_of_rank = partial(totals_of, device=cluster.device, conditions=conditions)
    with in_background(totals_of_rank, [traces.traces[rank] for rank in ranks], num_records) as found:
        costs = costs_of(traces, comm_ops, cluster, conditions)
        played = play_traces(traces, comm_ops, costs, conditions)
        if not played.is_done:
            problems = "\n".join(str(problem) for problem in check(traces, conditions))
            raise NeverEnds(f"the step of {name or 'these traces'} never ends:\n{problems}")
        if conditions.is_noisy:
            played = clocks(traces, comm_ops, played, conditions)
        when = {host.rank: moments_of(traces.traces[host.rank], comm_ops, played, host) for host in played.hosts}
        timeline = timeline_of(traces, comm_ops, played, when, _source(traces, cluster, name))
        totals = dict(zip(ranks, found(), strict=True))
    memory = tuple(memory_of(traces.traces[rank], when[rank].start_s, totals[rank]) for rank in when)
    return replace(timeline, memory=memory)


def costs_of(traces: Traces, comm_ops: CommOps, cluster: Cluster, conditions: Conditions = USUAL) -> Costs:
    """Return what everything takes on `cluster`."""
    records = {rank: record_times_of(trace, cluster) for rank, trace in traces.traces.items()}
    times = comm_op_times(traces, comm_ops, cluster)
    if cluster.device.is_host:
        records, times = on_the_host(traces, records, comm_ops, times, cluster.intra_node)
    return Costs(
        records=records_under(conditions, traces, records),
        comm_ops=comm_ops_under(conditions, traces, comm_ops, times),
        is_host=cluster.device.is_host,
        # What was timed on a host was timed with both.
        slowdown=0.0 if cluster.device.is_host else fitted_constants()["overlap_slowdown"],
    )


def record_times_of(trace: Trace, cluster: Cluster) -> RecordTimes:
    """Return what each record takes the device, and the host before it.

    What launches no kernel costs the host nothing of its own: it is in the kernels' share. A collective costs it as
    much as some launches. Before a training step's first record the host has the work that each step has once, such as
    the data, the learning rate and the log. Where the host itself computes, what was measured holds its own work, too.
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
    """Return the seconds of the host's work that each training step has once; 0 for a step without an optimizer."""
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
