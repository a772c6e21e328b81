"""Peers: the ranks that a channel's members send to, for domains where every pair of devices has a link of its own."""

from __future__ import annotations

from meshwright.simulator.engine.matching import Channel
from meshwright.spec.trace.traces import Traces

Peers = tuple[tuple[int, ...], ...]
"""Of each of a channel's members the others in its domain."""


def peers_of(channel: Channel, traces: Traces, domain_size: int) -> Peers:
    """Return for each member the other ranks of its own group inside its domain; sibling groups have other ranks."""
    found = []
    for member, rows in zip(channel.members, channel.rows, strict=True):
        trace = traces.traces[member]
        if not len(rows):
            others: tuple[int, ...] = ()
        elif channel.is_message:
            others = (int(trace.records.peer[rows[0]]),)
        else:
            others = trace.groups[trace.records.group[rows[0]]]
        inside = member // domain_size
        found.append(tuple(other for other in others if other != member and other // domain_size == inside))
    return tuple(found)
