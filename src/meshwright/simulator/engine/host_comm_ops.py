"""Seconds of communication ops where the cores that compute move the bytes, too: nothing of them overlaps.

    state of FSDP ranks                          its measured time within steps (CollectivePoint "exchange")
    all-reduce, waited for after other operators what it adds to these (CollectivePoint "async-all-reduce")
    each side of a message                       half of the measured time, which is of one sent and one received
    any other                                    its whole time

Both sides of a message copy: over gloo, on 2 cores, one of 64 KiB takes its sender 63 and its receiver 50 CPU
microseconds, and an exchange of two takes each rank 101 (torch 2.13, docs/LOG.md).

The planner's equivalent is cost/host/host_step.py.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.communication.collective import async_all_reduce_s
from meshwright.simulator.engine.collective_times import CommOpTimes, group_at, kind_of, reached_fabric
from meshwright.simulator.engine.matching import CommOps
from meshwright.simulator.engine.program import waited_records
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.machine.device import CollectivePoint
from meshwright.spec.trace.timeline import Floats
from meshwright.spec.trace.trace import NONE, Ints, RecordKind, Trace
from meshwright.spec.trace.traces import Traces

_SHARING_AXES = ("fsdp", "fsdp_reduce")


def host_comm_op_s(traces: Traces, comm_ops: CommOps, times: CommOpTimes, cluster: Cluster) -> Floats:
    """Return the seconds of each communication op, whose links alone would take `times` [comm_ops]."""
    took_s, link = times.latency_s + times.wire_s, cluster.intra_node
    shared = next((one for one in link.collectives if one.kind == "exchange"), None) if link else None
    for rank, trace in traces.traces.items():
        of_record = comm_ops.of_record[rank]
        for rows, adds_s in (*_async_all_reduces(trace, cluster), *_shared_state(trace, of_record, shared)):
            took_s[of_record[rows]] = adds_s
    for channel in comm_ops.channels:
        if channel.is_message:
            took_s[channel.first : channel.first + channel.num_comm_ops] /= 2
    return took_s


def _shared_state(trace: Trace, of_record: Ints, point: CollectivePoint | None) -> Iterator[tuple[Ints, Floats]]:
    """Yield the records of collectives over the FSDP axis and their seconds, where they were measured."""
    if point is not None:
        rows = np.flatnonzero(_is_over(trace, _SHARING_AXES) & (of_record != NONE))
        yield rows, point.latency_s.value + trace.records.num_bytes[rows] / point.bytes_per_s.value


def _is_over(trace: Trace, axes: tuple[str, ...]) -> NDArray[np.bool_]:
    """Return which records are collectives over one of `axes` [records]."""
    is_axis = np.array([*(name in axes for name in trace.group_names), False])
    return np.asarray(is_axis[trace.records.group], np.bool_)


def _async_all_reduces(trace: Trace, cluster: Cluster) -> Iterator[tuple[Ints, Floats]]:
    """Yield the records of all-reduces next to which a rank computes, group by group, and their seconds."""
    records, fabric = trace.records, reached_fabric(cluster)
    waited = waited_records(trace)
    waits = np.flatnonzero(waited != NONE)
    num_ops = np.cumsum(records.kind == RecordKind.OP)
    started = waited[waits][num_ops[waits] > num_ops[waited[waits]]]
    started = np.array([row for row in np.unique(started) if _is_all_reduce(trace, int(row))], np.int64)
    for group in np.unique(records.group[started]):
        rows = started[records.group[started] == group]
        if group != NONE:
            yield rows, async_all_reduce_s(records.num_bytes[rows], group_at(trace.groups[group], fabric), fabric)


def _is_all_reduce(trace: Trace, row: int) -> bool:
    is_collective = trace.records.kind[row] == RecordKind.COLLECTIVE
    return bool(is_collective) and kind_of(trace.signatures[trace.records.signature[row]].op) == "all-reduce"
