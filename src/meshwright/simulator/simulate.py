"""simulate(): the traced step of every rank, played on a cluster."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshwright.cost.constants import fitted_constants
from meshwright.cost.op_time import op_seconds
from meshwright.simulator.collective_times import MeetingTimes, meeting_times
from meshwright.simulator.engine import PENDING, Played, Table, play
from meshwright.simulator.links import Links
from meshwright.simulator.matching import Meetings, match
from meshwright.simulator.program import Program, RecordTimes, Signals, program_of
from meshwright.simulator.spans import Names, Texts, spans_of
from meshwright.spec.cluster import Cluster
from meshwright.spec.timeline import Timeline, TimelineSource
from meshwright.spec.trace import RecordKind, Trace
from meshwright.spec.traces import Traces


def simulate(traces: Traces, cluster: Cluster, name: str = "") -> Timeline:
    """Return one step of `traces` on `cluster`; `name` is the job's.

    Raises UnsupportedError where the catalogue lacks a rate that the step needs.
    """
    meetings = match(traces)
    times = meeting_times(traces, meetings, cluster)
    record_times = {rank: record_times_of(trace, cluster) for rank, trace in traces.traces.items()}
    played = play_traces(traces, meetings, record_times, times)
    return _timeline(traces, cluster, name, meetings, played)


def play_traces(
    traces: Traces, meetings: Meetings, record_times: Mapping[int, RecordTimes], times: MeetingTimes
) -> Played:
    """Return when everything was, given what each representative's records take device and host, and each meeting."""
    signals = Signals(len(meetings))
    programs = [
        program_of(trace, meetings.of_record[rank], record_times[rank], signals)
        for rank, trace in sorted(traces.traces.items())
    ]
    return play(programs, _table(programs, meetings, times, signals))


def record_times_of(trace: Trace, cluster: Cluster) -> RecordTimes:
    """Return what each record takes the device, and the host before it.

    What launches no kernel costs the host nothing of its own: it is in the kernels' share. A collective costs it as
    much as some launches.
    """
    records, constants, figure = trace.records, fitted_constants(), cluster.device.host_launch_s
    launch_s = constants["launch_s.eager"] if figure is None else figure.value
    is_op = records.kind == RecordKind.OP
    device_s = np.zeros(len(records))
    device_s[is_op] = op_seconds(trace.signatures, cluster.device)[records.signature[is_op]]
    is_meeting = np.isin(records.kind, (RecordKind.COLLECTIVE, RecordKind.SEND, RecordKind.RECEIVE))
    num_launches = np.where(is_meeting, constants["collective_launches"], device_s > 0)
    return RecordTimes(device_s, launch_s * num_launches)


def _table(programs: list[Program], meetings: Meetings, times: MeetingTimes, signals: Signals) -> Table:
    place = {program.rank: number for number, program in enumerate(programs)}
    uses: list[list[tuple[int, float]]] = []
    missing: list[int] = []
    is_first = np.zeros(len(meetings), bool)
    is_last = np.zeros(len(meetings), bool)
    inside, network = times.inside.tolist(), times.network.tolist()
    for channel in meetings.channels:
        numbers = range(channel.first, channel.first + channel.num_meetings)
        is_first[channel.first] = is_last[numbers[-1]] = True
        links = [2 * place[rank] for rank in dict.fromkeys(channel.members)]
        missing += [len(channel.members)] * len(numbers)
        for at in numbers:
            shares = ((0, inside[at]), (1, network[at]))
            uses.append([(link + which, share) for link in links for which, share in shares if share > 0])
    signal_at = [PENDING] * signals.count
    signal_at[signals.always] = 0.0
    return Table(
        links=Links(times.latency_s.tolist(), times.wire_s.tolist(), uses),
        signal_at=signal_at,
        missing=missing,
        is_last=is_last.tolist(),
        is_first=is_first.tolist(),
        came_at=[0.0] * len(meetings),
        began_at=[PENDING] * len(meetings),
    )


def _timeline(traces: Traces, cluster: Cluster, name: str, meetings: Meetings, played: Played) -> Timeline:
    texts = Texts(*(Names() for _ in range(5)))
    spans = spans_of(traces, meetings, played, texts)
    ranks, counts = np.unique(traces.class_of_rank, return_counts=True)
    step_s = max(max(host.end_s, *(stream.now_s for stream in host.streams)) for host in played.hosts)
    first = next(iter(traces.traces.values())).traced
    return Timeline(
        source=TimelineSource(
            kind="simulated",
            name=name or first.build,
            world_size=traces.world_size,
            cluster=f"{cluster.name}:{cluster.num_devices}",
            versions={"torch": first.torch_version},
        ),
        step_s=max(step_s, float(spans.end_s.max(initial=0.0))),
        ranks=tuple(ranks.tolist()),
        stands_for=tuple(counts.tolist()),
        names=texts.names.all(),
        scopes=texts.scopes.all(),
        phases=texts.phases.all(),
        actions=texts.actions.all(),
        axes=texts.axes.all(),
        spans=spans,
    )
