"""blamed(): which rank is to blame for each disagreement, by what most ranks do.

In this order, until one rank remains: what most ranks of the group ask for; what the ranks of groups that are alike
(the same axis and size, messages over the same distance) ask for at the same place; a rank that is to blame elsewhere;
the rank that runs fewest operations there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence

from meshwright.simulator.disagreements import Asked, Disagreement
from meshwright.simulator.matching import Channel
from meshwright.spec.traces import Traces

_Votes = Counter[Hashable]


def blamed(
    traces: Traces, found: Sequence[Disagreement], channels: Sequence[Channel], asked: Sequence[Asked]
) -> list[tuple[Disagreement, int]]:
    """Return each disagreement with the position of the member to blame, the surest first, by that member's records."""
    culprits: dict[int, int] = {}
    for position, one in enumerate(found):
        votes = _votes_of(traces, one)
        usual = _most(votes) if not one.channel.is_message else None
        if usual is None:
            alike = _alike(traces, one, channels, asked)
            usual = _most(votes + _votes_of_alike(one, alike))
        if usual is not None and (unusual := [at for at, what in enumerate(one.at) if what != usual[0]]):
            culprits[position] = unusual[0]
    elsewhere = Counter(found[position].channel.members[at] for position, at in culprits.items())
    sure = set(culprits)
    for position, one in enumerate(found):
        if position not in sure:
            culprits[position] = _fallback(one, elsewhere)
    order = sorted(range(len(found)), key=lambda at: (at not in sure, _first_record(found[at], culprits[at])))
    return [(found[position], culprits[position]) for position in order]


def _votes_of(traces: Traces, one: Disagreement) -> _Votes:
    """Return how many ranks ask for each thing; of a message each end counts once."""
    votes: _Votes = Counter()
    classes = traces.class_of_rank[list(one.channel.ranks)]
    for rank, what in zip(one.channel.members, one.at, strict=True):
        votes[what] += 1 if one.channel.is_message else int((classes == rank).sum())
    return votes


def _alike(traces: Traces, one: Disagreement, channels: Sequence[Channel], asked: Sequence[Asked]) -> Iterator[Asked]:
    """Yield what the members of channels ask for that are like that of a disagreement."""
    kind = _kind(one.channel, traces.world_size)
    for channel, theirs in zip(channels, asked, strict=True):
        if channel is not one.channel and _kind(channel, traces.world_size) == kind:
            yield theirs


def _votes_of_alike(one: Disagreement, alike: Iterator[Asked]) -> _Votes:
    """Return what members of channels that are alike, and that agree, ask for at the same place."""
    votes: _Votes = Counter()
    for theirs in alike:
        at = [member[one.number] if one.number < len(member) else None for member in theirs]
        if len(set(at)) == 1:
            votes[at[0]] += len(at)
    return votes


def _kind(channel: Channel, world_size: int) -> Hashable:
    """Return what channels that are alike have in common."""
    first, last = channel.ranks[0], channel.ranks[-1]
    distance = (last - first) % world_size if channel.is_message else len(channel.ranks)
    return channel.is_message, channel.axis, distance


def _most(votes: _Votes) -> tuple[Hashable] | None:
    """Return what more ranks ask for than any other thing, in a tuple, since nothing may be it; None of a tie."""
    (first, most), *rest = votes.most_common(2)
    return None if rest and rest[0][1] == most else (first,)


def _fallback(one: Disagreement, elsewhere: Mapping[int, int]) -> int:
    """Return the member that is to blame elsewhere, else the one that asks for least there."""
    positions = range(len(one.at))
    members, rows = one.channel.members, one.channel.rows
    return max(positions, key=lambda at: (elsewhere.get(members[at], 0), one.at[at] is None, -len(rows[at]), -at))


def _first_record(one: Disagreement, culprit: int) -> int:
    rows = one.channel.rows[culprit]
    return int(rows[one.number]) if one.number < len(rows) else int(rows[-1]) + 1 if len(rows) else 0
