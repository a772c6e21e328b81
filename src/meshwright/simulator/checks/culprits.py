"""blamed(): the culprit of each disagreement, by majority.

Criteria in order, until one rank remains: the majority of the group; the majority of equivalent groups (the same axis
and distances between ranks) at the same position; a rank that is the culprit elsewhere. If none decides it is a tie,
and the member with the fewest operations there is named first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from meshwright.simulator.checks.disagreements import CallSignatures, Disagreement
from meshwright.simulator.engine.matching import Channel
from meshwright.spec.trace.traces import Traces

_Votes = Counter[Hashable]


class Blame(NamedTuple):
    """A disagreement and its culprit."""

    disagreement: Disagreement
    culprit: int
    """Position among the channel's members."""
    is_tie: bool
    """Whether the others may be wrong instead."""

    @property
    def rank(self) -> int:
        """Return the culprit's rank."""
        return self.disagreement.channel.members[self.culprit]


def blamed(
    traces: Traces, found: Sequence[Disagreement], channels: Sequence[Channel], asked: Sequence[CallSignatures]
) -> list[Blame]:
    """Return the culprit of each disagreement, the most certain first, in order of their records."""
    culprits: dict[int, int] = {}
    for position, one in enumerate(found):
        alike = [theirs for channel, theirs in zip(channels, asked, strict=True) if _is_alike(channel, one.channel)]
        culprit = _message_culprit(one, alike) if one.channel.is_message else _group_culprit(traces, one, alike)
        if culprit is not None:
            culprits[position] = culprit
    elsewhere = Counter(found[position].channel.members[at] for position, at in culprits.items())
    sure = set(culprits)
    for position, one in enumerate(found):
        if position not in sure:
            culprits[position] = _fallback(one, elsewhere)
    order = sorted(range(len(found)), key=lambda at: (at not in sure, _first_record(found[at], culprits[at])))
    blames = [Blame(found[position], culprits[position], position not in sure) for position in order]
    return [blame._replace(is_tie=blame.is_tie and not elsewhere[blame.rank]) for blame in blames]


def _group_culprit(traces: Traces, one: Disagreement, alike: Sequence[CallSignatures]) -> int | None:
    """Return the first member that differs from the majority of its group, or of equivalent groups; None in a tie."""
    classes = traces.class_of_rank[list(one.channel.ranks)]
    votes: _Votes = Counter()
    for rank, what in zip(one.channel.members, one.at, strict=True):
        votes[what] += int((classes == rank).sum())
    of_alike = _votes_at(one.number, alike)
    usual = _most(votes) or _most(Counter({what: votes[what] + of_alike[what] for what in votes}))
    return None if usual is None else _other_than(usual, one.at)


def _message_culprit(one: Disagreement, alike: Sequence[CallSignatures]) -> int | None:
    """Return the end of a message that sends or receives more, fewer or other messages than equivalent ranks."""
    counts = tuple(len(rows) for rows in one.channel.rows)
    if counts[0] != counts[1]:
        usual = _most(Counter(len(theirs[0]) for theirs in alike if len(theirs[0]) == len(theirs[1])))
        return _other_than(usual, counts) if usual is not None and usual[0] in counts else None
    usual = _most(_votes_at(one.number, alike))
    return _other_than(usual, one.at) if usual is not None and usual[0] in one.at else None


def _other_than(usual: tuple[Hashable], at: Sequence[Hashable]) -> int | None:
    return next((position for position, what in enumerate(at) if what != usual[0]), None)


def _votes_at(number: int, alike: Sequence[CallSignatures]) -> _Votes:
    """Return the calls at one position of equivalent channels whose members agree."""
    votes: _Votes = Counter()
    for theirs in alike:
        at = [member[number] if number < len(member) else None for member in theirs]
        if len(set(at)) == 1:
            votes[at[0]] += len(at)
    return votes


def _is_alike(one: Channel, other: Channel) -> bool:
    """Return whether two channels are equivalent: of the same axis, with the same distances between ranks."""
    if one is other or (one.is_message, one.axis) != (other.is_message, other.axis):
        return False
    # Without names of axes, groups along different axes differ in nothing else.
    return _distances(one) == _distances(other)


def _distances(channel: Channel) -> list[int]:
    return [rank - channel.ranks[0] for rank in channel.ranks]


def _most(votes: Counter[Any]) -> tuple[Hashable] | None:
    """Return the call with the most votes as a 1-tuple, since it may be None; None in a tie."""
    most = votes.most_common(2)
    if not most or (len(most) == 2 and most[0][1] == most[1][1]):
        return None
    return (most[0][0],)


def _fallback(one: Disagreement, elsewhere: Mapping[int, int]) -> int:
    """Return the member that is the culprit elsewhere, else the one with the fewest calls."""
    # 0 marks a member of an exchange that is no suspect.
    positions = [position for position, what in enumerate(one.at) if what != 0]
    members, rows = one.channel.members, one.channel.rows
    return max(positions, key=lambda at: (elsewhere.get(members[at], 0), one.at[at] is None, -len(rows[at]), -at))


def _first_record(one: Disagreement, culprit: int) -> int:
    rows = one.channel.rows[culprit]
    return int(rows[one.number]) if one.number < len(rows) else int(rows[-1]) + 1 if len(rows) else 0
