"""on_the_host: what meetings cost the ranks where they compute on the cores that also move the bytes.

    each member's stream is busy for as long as the meeting takes, from when it comes to it

Nothing hides there: gloo's threads take the core that would compute meanwhile, and what was measured is what a
collective adds to work (measured_sharding.py says the same to the planner). The host's own seconds are in those of
operators, which were measured with them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshwright.simulator.collective_times import MeetingTimes
from meshwright.simulator.matching import Meetings
from meshwright.simulator.program import RecordTimes
from meshwright.spec.trace import NONE


def on_the_host(records: Mapping[int, RecordTimes], meetings: Meetings, times: MeetingTimes) -> dict[int, RecordTimes]:
    """Return the seconds of each representative's records with those of the meetings that they are part in."""
    took_s = times.latency_s + times.wire_s
    changed = {}
    for rank, of_rank in records.items():
        met = meetings.of_record[rank]
        met_s = np.where(met == NONE, 0.0, took_s[np.maximum(met, 0)] if len(took_s) else 0.0)
        changed[rank] = RecordTimes(of_rank.device_s + met_s, np.zeros(len(met)))
    return changed
