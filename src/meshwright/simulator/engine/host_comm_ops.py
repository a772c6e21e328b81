"""on_the_host: what communication ops cost the ranks where they compute on the cores that also move the bytes.

    each member's stream is busy for as long as the communication op takes, from when it comes to it
    parameters and gradients that ranks share take what they were seen to take in steps (CollectivePoint "exchange")

Nothing hides there: gloo's threads take the core that would compute meanwhile, and what was measured is what a
collective adds to work (measured_sharding.py says the same to the planner). The host's own seconds are in those of
operators, which were measured with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from meshwright.simulator.engine.collective_times import CommOpTimes
from meshwright.simulator.engine.matching import CommOps
from meshwright.simulator.engine.program import RecordTimes
from meshwright.spec.machine.cluster import Link
from meshwright.spec.trace.trace import NONE, Trace
from meshwright.spec.trace.traces import Traces

_SHARING_AXIS = "fsdp"


def on_the_host(
    traces: Traces, records: Mapping[int, RecordTimes], comm_ops: CommOps, times: CommOpTimes, link: Link | None
) -> tuple[dict[int, RecordTimes], CommOpTimes]:
    """Return the seconds of records with those of the comm ops that they are part in, and of comm ops."""
    took_s = times.latency_s + times.wire_s
    line = next((point for point in link.collectives if point.kind == "exchange"), None) if link else None
    if line is not None:
        for rank, trace in traces.traces.items():
            rows = np.flatnonzero(_shares_state(trace) & (comm_ops.of_record[rank] != NONE))
            exchanged_s = line.latency_s.value + trace.records.num_bytes[rows] / line.bytes_per_s.value
            took_s[comm_ops.of_record[rank][rows]] = exchanged_s
    changed = {}
    for rank, of_rank in records.items():
        met = comm_ops.of_record[rank]
        met_s = np.append(took_s, 0.0)[met]  # The last is that of no communication op, -1.
        changed[rank] = RecordTimes(of_rank.device_s + met_s, np.zeros(len(met)))
    return changed, replace(times, latency_s=took_s, wire_s=np.zeros_like(took_s))


def _shares_state(trace: Trace) -> NDArray[np.bool_]:
    """Return which records are collectives of what data-parallel ranks share [records]."""
    is_axis = np.array([*(name == _SHARING_AXIS for name in trace.group_names), False])
    return np.asarray(is_axis[trace.records.group], np.bool_)
