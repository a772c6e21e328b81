"""Conditions: what distinguishes one step from the next: jitter, slow ranks, faults.

    seconds of an operation = its cost x the fault's factor x noise
    noise = exp(jitter x z - jitter^2 / 2) x rank factor,  rank factor = exp(spread x |z|)

with z from a standard normal distribution, so that jitter leaves the mean unchanged. Every rank and stream, and every
group and direction of messages, draws from a generator of its own, seeded by its identity: what a rank draws depends
neither on which ranks were traced nor on their classes. A fault affects all ranks of a class, until split_classes()
separates its rank. Ignored: correlation between slow moments of one rank.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from meshwright.errors import ConfigError
from meshwright.simulator.engine.collective_times import CommOpTimes
from meshwright.simulator.engine.matching import CommOps
from meshwright.simulator.engine.program import RecordTimes
from meshwright.spec.fault import Fault
from meshwright.spec.layout.layout import Layout
from meshwright.spec.trace.timeline import Floats
from meshwright.spec.trace.trace import NONE, Ints, RecordKind, Trace
from meshwright.spec.trace.traces import Traces


@dataclass(frozen=True)
class Conditions:
    """Deviations of a step from the nominal one; the same seed gives the same step."""

    seed: int = 0
    jitter: float = 0.0
    """Standard deviation of the logarithm of each operation's, collective's and message's time."""
    rank_spread: float = 0.0
    """Spread of the rank factors, in the same unit."""
    faults: tuple[Fault, ...] = ()
    has_expandable_segments: bool = True
    """Whether the allocator's segments grow (PYTORCH_ALLOC_CONF), as the trainer sets it."""
    replays_microbatches: bool = False
    """Whether the host launches a forward or backward at once, as a CUDA graph (layout.cuda_graphs)."""

    communication_sms: int | None = None
    """Most SMs that a collective's kernel takes (layout.communication_sms)."""

    @property
    def is_noisy(self) -> bool:
        """Return whether ranks of one class take different times."""
        return self.jitter > 0 or self.rank_spread > 0

    def under(self, layout: Layout) -> Self:
        """Return the same of a job in `layout`: what its keys change that no trace holds."""
        return replace(self, replays_microbatches=layout.cuda_graphs, communication_sms=layout.communication_sms)

    @property
    def nominal(self) -> Self:
        """Return the same without what makes stragglers."""
        return replace(self, jitter=0.0, rank_spread=0.0, faults=())

    @property
    def has_stragglers(self) -> bool:
        """Return whether any rank takes longer than usual."""
        return self.is_noisy or bool(self.faults)


USUAL = Conditions()
"""Nominal costs."""


def records_under(
    conditions: Conditions, traces: Traces, record_times: Mapping[int, RecordTimes]
) -> dict[int, RecordTimes]:
    """Return the durations of each representative's records with the faults and the launches of `conditions`."""
    changed = {}
    for rank, times in record_times.items():
        times = _replayed(times, traces.traces[rank]) if conditions.replays_microbatches else times
        device_s = times.device_s.copy()
        for fault in _of(conditions, traces, rank, "slow-rank"):
            device_s[_in_phase(fault, traces.traces[rank])] *= fault.argument
        changed[rank] = replace(times, device_s=device_s)
    return changed


def _replayed(times: RecordTimes, trace: Trace) -> RecordTimes:
    """Return the times of a step in which each action but for its first launch costs the host nothing."""
    action = trace.records.action
    goes_on = (action != NONE) & (action == np.roll(action, 1)) & (np.arange(len(action)) > 0)
    return replace(times, host_s=np.where(goes_on, 0.0, times.host_s))


def comm_ops_under(conditions: Conditions, traces: Traces, comm_ops: CommOps, times: CommOpTimes) -> CommOpTimes:
    """Return the durations of communication ops with the faults of `conditions`."""
    slower = np.ones(len(comm_ops))
    for rank, trace in traces.traces.items():
        for fault in _of(conditions, traces, rank, "slow-link"):
            slowed = comm_ops.of_record[rank][_in_phase(fault, trace)]
            slower[np.unique(slowed[slowed != NONE])] *= fault.argument
    return replace(times, latency_s=times.latency_s * slower, wire_s=times.wire_s * slower)


def stops_of(conditions: Conditions, traces: Traces) -> dict[int, int]:
    """Return the record before which each representative that crashes or hangs stops."""
    stops: dict[int, int] = {}
    for rank, trace in traces.traces.items():
        for kind in ("crash", "hang"):
            for fault in _of(conditions, traces, rank, kind):
                row = _nth(fault, _in_phase(fault, trace), "records")
                stops[rank] = min(stops.get(rank, row), row)
    return stops


def dropped_by(conditions: Conditions, traces: Traces, rank: int) -> Ints:
    """Return the records of a representative's messages that are never sent."""
    trace = traces.traces[rank]
    rows = []
    for fault in _of(conditions, traces, rank, "drop-message"):
        sent = _in_phase(fault, trace)
        rows.append(_nth(fault, sent[trace.records.kind[sent] == RecordKind.SEND], "messages sent"))
    return np.array(rows, np.int64)


def _of(conditions: Conditions, traces: Traces, rank: int, kind: str) -> list[Fault]:
    """Return the faults of a kind in a representative's class."""
    found = [fault for fault in conditions.faults if fault.kind == kind]
    for fault in found:
        if fault.rank >= traces.world_size:
            raise ConfigError(
                f"fault {kind}: rank = {fault.rank}: must be less than the world size, {traces.world_size}: "
                f"use a rank from 0 to {traces.world_size - 1}"
            )
    return [fault for fault in found if int(traces.class_of_rank[fault.rank]) == rank]


def _in_phase(fault: Fault, trace: Trace) -> Ints:
    """Return the records that a fault affects; raises ConfigError for a phase that the step does not have."""
    if fault.phase is None:
        return np.arange(len(trace.records))
    if fault.phase not in trace.phases:
        raise ConfigError(
            f"fault {fault.kind}: phase = {fault.phase!r}: the step of rank {fault.rank} has no such phase: "
            f"use one of {', '.join(trace.phases)}"
        )
    return np.flatnonzero(trace.records.phase == trace.phases.index(fault.phase))


def _nth(fault: Fault, rows: Ints, what: str) -> int:
    number = int(fault.argument)
    if number >= len(rows):
        raise ConfigError(
            f"fault {fault.kind}: argument = {number}: rank {fault.rank} has {len(rows)} {what} there: "
            f"use a number less than {len(rows)}"
        )
    return int(rows[number])


_CHUNK = 256
"""Draws of each rank at a time: few enough to hold for 1,024 ranks."""


class RankNoise:
    """Noise factors of one stream's operations on some ranks, drawn in order."""

    def __init__(self, conditions: Conditions, rank_factor: Floats, ranks: Ints, stream: int) -> None:
        self._jitter, self._rank_factor = conditions.jitter, rank_factor
        self._generators = [np.random.default_rng((conditions.seed, rank, stream)) for rank in ranks.tolist()]
        self._drawn = np.zeros((0, len(ranks)))
        self._next = 0

    def next(self) -> Floats:
        """Return the factors of the next operation [ranks]."""
        if self._jitter == 0:
            return self._rank_factor
        if self._next == len(self._drawn):
            drawn = np.stack([one.standard_normal(_CHUNK) for one in self._generators], axis=1)
            self._drawn, self._next = _factors(drawn, self._jitter) * self._rank_factor, 0
        self._next += 1
        return np.asarray(self._drawn[self._next - 1])


def rank_factors(conditions: Conditions, ranks: Sequence[int]) -> Floats:
    """Return the factor by which each rank is slower in the whole step [ranks]."""
    if conditions.rank_spread == 0:
        return np.ones(len(ranks))
    drawn = [np.random.default_rng((conditions.seed, rank)).standard_normal() for rank in ranks]
    return np.exp(conditions.rank_spread * np.abs(drawn))


def group_noise(conditions: Conditions, axis: str, ranks: Sequence[int], count: int) -> Floats:
    """Return noise factors of a group's collectives, or of messages between two ranks, in order [count]."""
    key = (conditions.seed, zlib.crc32(axis.encode()), len(ranks), ranks[0], ranks[-1])
    return _factors(np.random.default_rng(key).standard_normal(count), conditions.jitter)


def _factors(drawn: Floats, jitter: float) -> Floats:
    return np.asarray(np.exp(jitter * drawn - jitter**2 / 2))
