"""A lost connection between nodes, from flight records: the ranks of each waited for those of the others, in vain.

A process that ends closes its connections, and its peers fail at once. With the network down none is closed: the ranks
of both sides have entered the same op, and each side ends with a timeout of its own.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.fault_tolerance.diagnosis_text import Wait, collective_text, ranks_text
from meshwright.fault_tolerance.evidence import Evidence
from meshwright.spec.run.rank_records import FlightRecord
from meshwright.units import format_duration

_TIMED_OUT = re.compile(r"tim(ed|e) ?out", re.IGNORECASE)
"""In the errors of gloo, NCCL and the store that no peer's end caused (torch 2.13)."""
_LATE = 0.5
"""A rank that waited for less than this part of the longest wait arrived late: it was busy, the network was not."""


@dataclass(frozen=True)
class LostConnection:
    """Hosts between which no data arrived any more."""

    ranks_of: dict[str, list[int]]
    """The ranks of each host."""
    wait: Wait | None
    """The collective that all of its ranks had entered; None in a pipeline's exchange."""
    evidence: list[str]

    @property
    def headline(self) -> str:
        """Return the finding in a sentence."""
        what = "the connection" if len(self.ranks_of) == 2 else "a connection"
        wait = "" if self.wait is None else f", in {collective_text(self.wait.collective, self.wait.group)}"
        return f"{what} between {nodes_text(self.ranks_of)} was lost{wait}"

    @property
    def advice(self) -> str:
        """Return what to do."""
        hosts = " and ".join(self.ranks_of)
        return (
            f"No rank is to blame. Look at the network between {hosts} (`meshwright doctor` under torchrun tests it), "
            "then start the same command on all of them with --resume."
        )


def lost_connection(evidence: Evidence, waits: Sequence[Wait], edges: Mapping[int, set[int]]) -> LostConnection | None:
    """Return the connection that a run of several hosts lost; None where another cause is possible."""
    hosts = {rank: beat.host for rank, beat in evidence.heartbeats.items()}
    records = evidence.records
    if len(set(hosts.values())) < 2 or set(records) != set(hosts) or _has_other_cause(records, edges):
        return None
    # An op that a rank has not entered would be that rank's.
    crossing = [wait for wait in waits if not wait.absent and _spans(wait.group.ranks, hosts)]
    pairs = [
        (rank, beat.waits_for_rank) for rank, beat in evidence.heartbeats.items() if beat.waits_for_rank is not None
    ]
    exchanges = [(rank, peer) for rank, peer in pairs if _spans((rank, peer), hosts)]
    if not crossing and not exchanges:
        return None
    concerned = {rank for wait in crossing for rank in wait.group.ranks} | {rank for pair in exchanges for rank in pair}
    ranks_of = ranks_by_host({rank: hosts[rank] for rank in concerned})
    every = ranks_by_host(hosts)
    if not all(any(_waited_in_vain(records[rank]) for rank in every[host]) for host in ranks_of):
        return None
    return LostConnection({host: every[host] for host in ranks_of}, crossing[0] if crossing else None, _ends(evidence))


def ranks_by_host(hosts: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the ranks of each host, in the order of their lowest rank."""
    found: dict[str, list[int]] = {}
    for rank in sorted(hosts):
        found.setdefault(hosts[rank], []).append(rank)
    return found


def nodes_text(ranks_of: Mapping[str, Sequence[int]]) -> str:
    """Return a text such as "node0 (ranks 0 and 1) and node1 (ranks 2 and 3)"."""
    *most, last = [f"{host} ({ranks_text(ranks)})" for host, ranks in ranks_of.items()]
    return f"{', '.join(most)} and {last}" if most else last


def _has_other_cause(records: Mapping[int, FlightRecord], edges: Mapping[int, set[int]]) -> bool:
    """Return whether no rank ended, or one ended with an error of its own, waits for none, or arrived late."""
    failed = [record for record in records.values() if record.error is not None]
    if not failed or not all(record.is_lost_peer for record in failed):
        return True
    longest_s = max((record.waited_s or 0.0 for record in failed), default=0.0)
    if any(record.waited_s is not None and record.waited_s < _LATE * longest_s for record in failed):
        return True
    return any(record.error is None and not _is_waiting(record, edges) for record in records.values())


def _is_waiting(record: FlightRecord, edges: Mapping[int, set[int]]) -> bool:
    return bool(edges.get(record.rank)) or any(not one.is_done for one in record.collectives)


def _waited_in_vain(record: FlightRecord) -> bool:
    """Return whether a rank ended with a timeout of its own, or waits still."""
    return record.error is None or _TIMED_OUT.search(record.error) is not None


def _spans(ranks: Sequence[int], hosts: Mapping[int, str]) -> bool:
    return len({hosts[rank] for rank in ranks if rank in hosts}) > 1


def _ends(evidence: Evidence) -> list[str]:
    """Return how the first rank of each host ended, a sentence each."""
    sentences = []
    for host, ranks in ranks_by_host({rank: beat.host for rank, beat in evidence.heartbeats.items()}).items():
        record = min((evidence.records[rank] for rank in ranks), key=lambda one: (one.error is None, one.time_s))
        waited = "" if record.waited_s is None else f" after {format_duration(record.waited_s)} without progress"
        ended = "still waits" if record.error is None else f"ended{waited} with {record.error}"
        sentences.append(f"rank {record.rank} on {host} {ended}")
    return sentences
