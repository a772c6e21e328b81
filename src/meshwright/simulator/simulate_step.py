"""simulate(): the traced step of every rank, executed on a cluster; device_model(): how long its parts take there.

device_model(): durations and memory of a step on an accelerator with streams, or on a host that computes itself.
Where the host computes and also moves the bytes (gloo), nothing overlaps: each member's stream is busy for as long as a
communication op takes or adds to computation (engine/host_comm_ops.py). The host's own seconds are part of the measured
operators, as is the slowdown of concurrent communication.
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial

import numpy as np

from meshwright.cost.compute.op_time import op_seconds
from meshwright.cost.constants import fitted_constants
from meshwright.cost.memory.footprint_constants import WORKSPACE_BYTES
from meshwright.cost.memory.host_memory import host_seconds
from meshwright.errors import ConfigError
from meshwright.simulator.background import in_background
from meshwright.simulator.checks.call_sites import COMMUNICATION
from meshwright.simulator.checks.check_traces import check
from meshwright.simulator.engine.build_timeline import intervals_of, timeline_of
from meshwright.simulator.engine.collective_times import CommOpTimes, comm_op_times, our_stack_on
from meshwright.simulator.engine.conditions import USUAL, Conditions, comm_ops_under, records_under
from meshwright.simulator.engine.execute import Costs, execute
from meshwright.simulator.engine.host_comm_ops import host_comm_op_s
from meshwright.simulator.engine.matching import CommOps, match
from meshwright.simulator.engine.noisy_execution import noisy_execution
from meshwright.simulator.engine.program import RecordTimes, on_one_stream
from meshwright.simulator.engine.rank_classes import split_classes
from meshwright.simulator.memory.allocator import Allocator
from meshwright.simulator.memory.memory_curve import Totals, cached_totals, memory_of, uncached_totals
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.trace.timeline import Floats, Timeline, TimelineSource
from meshwright.spec.trace.trace import RecordKind, Trace
from meshwright.spec.trace.traces import Traces


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
    model = device_model(cluster)
    totals_of_rank = partial(model.memory_totals, conditions=conditions)
    with in_background(totals_of_rank, [traces.traces[rank] for rank in ranks], num_records) as found:
        execution = execute(traces, comm_ops, model.costs(traces, comm_ops, conditions), conditions)
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


def _source(traces: Traces, cluster: Cluster, name: str) -> TimelineSource:
    traced = next(iter(traces.traces.values())).traced
    return TimelineSource(
        kind="simulated",
        name=name or traced.build,
        world_size=traces.world_size,
        cluster=f"{cluster.name}:{cluster.num_devices}",
        versions={"torch": traced.torch_version},
    )


_BACKWARD, _OPTIMIZER = "backward", "optimizer"
"""The phase that only training steps have."""


class DeviceModel(ABC):
    """The devices of a cluster."""

    can_offload: bool
    """Whether the host has memory apart from the device's."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def costs(self, traces: Traces, comm_ops: CommOps, conditions: Conditions = USUAL) -> Costs:
        """Return the durations of all records and communication ops; raises UnsupportedError for an unknown rate."""
        times = comm_op_times(traces, comm_ops, self.cluster, conditions.communication_sms)
        costs = self._costs(traces, comm_ops, times)
        return replace(
            costs,
            records=records_under(conditions, traces, costs.records),
            comm_ops=comm_ops_under(conditions, traces, comm_ops, costs.comm_ops),
        )

    @abstractmethod
    def _costs(self, traces: Traces, comm_ops: CommOps, times: CommOpTimes) -> Costs:
        """Return the same under nominal conditions, given what communication takes on its links."""

    def op_s(self, trace: Trace) -> Floats:
        """Return the device's seconds for each record; 0 unless it is an operation [records]."""
        is_op = trace.records.kind == RecordKind.OP
        device_s = np.zeros(len(trace.records))
        device_s[is_op] = op_seconds(trace.signatures, self.cluster.device)[trace.records.signature[is_op]]
        return device_s

    def fixed_host_s(self, trace: Trace) -> float:
        """Return the host's seconds per training step outside of launches and operators."""
        return 0.0

    @abstractmethod
    def memory_totals(self, trace: Trace, conditions: Conditions) -> Totals:
        """Return the allocated and reserved memory of a rank's storages."""


class AcceleratorModel(DeviceModel):
    """Devices with streams, to which a host launches kernels."""

    can_offload = True

    def _costs(self, traces: Traces, comm_ops: CommOps, times: CommOpTimes) -> Costs:
        records = {rank: self._record_times(trace) for rank, trace in traces.traces.items()}
        return Costs(records, times, fitted_constants()["overlap_slowdown"])

    def _record_times(self, trace: Trace) -> RecordTimes:
        """Return the device and host time of each record.

        Only kernel launches cost host time; a collective costs as much as several. The first record also has the host's
        work that a training step has once: data, learning rate, log.
        """
        records, constants, figure = trace.records, fitted_constants(), self.cluster.device.host_launch_s
        device_s, is_op = self.op_s(trace), records.kind == RecordKind.OP
        launch_s = constants["launch_s.eager"] * self._overhead if figure is None else figure.value
        is_comm_op = np.isin(records.kind, COMMUNICATION)
        host_s = launch_s * np.where(is_comm_op, constants["collective_launches"], device_s > 0)
        host_s[is_op] += host_seconds(trace.signatures, self.cluster.devices_per_node)[records.signature[is_op]]
        host_s[:1] += self.fixed_host_s(trace)
        return RecordTimes(device_s, host_s)

    def fixed_host_s(self, trace: Trace) -> float:
        """Return the same; 0 for a step without an optimizer."""
        if _OPTIMIZER not in trace.phases:
            return 0.0
        return float(fitted_constants()["step_s"] * self._overhead)

    @property
    def _overhead(self) -> float:
        """Return the factor of what the host does for our stack, by which formulas price it as well."""
        return float(our_stack_on(self.cluster).factors(fitted_constants()).overhead)

    def memory_totals(self, trace: Trace, conditions: Conditions) -> Totals:
        """Return the same, by torch's caching allocator, which also holds what the matmul library works in."""
        capacity = int(self.cluster.device.usable_memory_bytes)
        allocator = Allocator(capacity, is_expandable=conditions.has_expandable_segments)
        if any(signature.flops for signature in trace.signatures):
            # Forward and backward run on a thread each, and each has its own.
            for _ in range(1 + (_BACKWARD in trace.phases)):
                allocator.allocate(WORKSPACE_BYTES)
        return cached_totals(trace, allocator)


class HostModel(DeviceModel):
    """Processors that run a step themselves."""

    can_offload = False

    def _costs(self, traces: Traces, comm_ops: CommOps, times: CommOpTimes) -> Costs:
        took_s = host_comm_op_s(traces, comm_ops, times, self.cluster)
        # The last is for -1, no communication op.
        comm_s = np.append(took_s, 0.0)
        records = {
            rank: RecordTimes(self.op_s(trace) + comm_s[comm_ops.of_record[rank]], np.zeros(len(trace.records)))
            for rank, trace in traces.traces.items()
        }
        return Costs(
            records, replace(times, latency_s=took_s, wire_s=np.zeros_like(took_s)), adapt_program=on_one_stream
        )

    def memory_totals(self, trace: Trace, conditions: Conditions) -> Totals:
        """Return the same, without a caching allocator."""
        return uncached_totals(trace)


def device_model(cluster: Cluster) -> DeviceModel:
    """Return the model of a cluster's devices."""
    return HostModel(cluster) if cluster.device.is_host else AcceleratorModel(cluster)
