"""Roles and messages: by_partners() refines roles by those of the ranks at the other end of their messages, and
unanswered() finds the ranks that, by their roles, leave a message without its other end.

Two ranks that do the same do not wait for the same if one of them sends to a rank that differs. So roles are refined
until the messages of all ranks of a role go to ranks of equal roles. A rank that was not traced is taken to send as
many places along its groups as the first one of its role.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshwright.simulator.checks.disagreements import asked_of, first_disagreement
from meshwright.simulator.engine.matching import match
from meshwright.spec.trace.trace import Ints, Trace
from meshwright.spec.trace.traces import Traces
from meshwright.tracer.extrapolate.axes import axis_of, peers_by_group


def by_partners(roles: Ints, traces: Mapping[int, Trace]) -> Ints:
    """Return for each rank the first one of its refined role, from the first one of its role [world_size]."""
    alike = [
        (np.flatnonzero(roles == first), _peers(traces[first]))
        for first in np.unique(roles).tolist()
        if first in traces
    ]
    while True:
        refined = roles.copy()
        for ranks, peers in alike:
            seen = np.stack([roles[ranks], *(roles[of_all[ranks]] for of_all in peers)])
            _, at, where = np.unique(seen, axis=1, return_index=True, return_inverse=True)
            refined[ranks] = ranks[at[where.ravel()]]
        if np.array_equal(refined, roles):
            return roles
        roles = refined


def unanswered(traces: Traces) -> set[int]:
    """Return the ranks at both ends of each message that is sent and not received as it is sent, or the reverse."""
    own = {
        rank
        for channel in match(traces).channels
        if channel.is_message and first_disagreement(traces, channel, asked_of(traces, channel))
        for rank in channel.ranks
    }
    return own if traces.earlier is None else own | unanswered(traces.earlier)


def _peers(trace: Trace) -> list[Ints]:
    """Return whom each rank would send to or receive from, were it as far away as in `trace`; each [world_size]."""
    rank, ranks = trace.traced.rank, np.arange(trace.traced.world_size)
    found = []
    for group, peers in peers_by_group(trace):
        axis = axis_of(group)
        if axis is None:
            continue
        for peer in sorted(peers):
            far = axis.place(np.array([peer]))[0] - axis.place(np.array([rank]))[0]
            found.append(ranks + ((axis.place(ranks) + far) % axis.size - axis.place(ranks)) * axis.stride)
    return found
