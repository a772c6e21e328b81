"""Operations that the members of a group, or a pair of ranks, call differently, and the culprits, by majority.

collective    compared by name, bytes, dtype, reduction and root
exchange      (all-to-all, gathers and scatters of lists) by name, dtype and root; for each pair of ranks the bytes
              that one sends have to equal those that the other receives
message       by bytes, dtype, and in a pipeline the stage and microbatch

blamed(): the culprit of each disagreement, by majority.
Criteria in order, until one rank remains: the majority of the group; the majority of equivalent groups (the same axis
and distances between ranks) at the same position; a rank that is the culprit elsewhere. If none decides it is a tie,
and the member with the fewest operations there is named first.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from meshwright.simulator.engine.matching import Channel
from meshwright.spec.layout.schedule.action import Action, parse_cell
from meshwright.spec.trace.trace import NONE, Ints, Trace
from meshwright.spec.trace.traces import Traces

_EXCHANGES = ("alltoall_", "alltoall_base_", "all_to_all_single", "allgather_", "gather_", "scatter_")
"""Collectives whose ranks may pass tensors of different sizes."""
_FIELDS = ("tensors of the same size", "the same dtype", "the same reduction and root")
"""Fields of a collective's call after its name."""
CallSignatures = list[list[Hashable]]
"""The calls of each member, in order [members][operations]."""


@dataclass(frozen=True)
class Disagreement:
    """An operation of a channel that its members call differently."""

    channel: Channel
    number: int
    at: tuple[Hashable, ...]
    """Each member's call; None where it has no more."""
    rule: str = ""
    """The rule that is broken, where it is more than the same operations in the same order."""


def call_signatures(traces: Traces, channel: Channel) -> CallSignatures:
    """Return for each member of a channel the fields of its calls that all members have to agree on."""
    sides = zip(channel.members, channel.rows, strict=True)
    return [_signatures_of(traces.traces[rank], rows, is_message=channel.is_message) for rank, rows in sides]


def first_disagreement(traces: Traces, channel: Channel, asked: CallSignatures) -> Disagreement | None:
    """Return the first operation on which members disagree; None if they agree."""
    has_exchange = not channel.is_message and any(_is_exchange(one) for one in set(asked[0]))
    if not has_exchange and all(one == asked[0] for one in asked):
        return None
    compared: set[Hashable] = set()
    for number in range(max(len(one) for one in asked)):
        at = tuple(one[number] if number < len(one) else None for one in asked)
        if len(set(at)) > 1:
            return Disagreement(channel, number, at, "" if channel.is_message else _broken(at))
        if not channel.is_message and _is_exchange(at[0]):
            splits = _splits(traces, channel, number)
            found = None if splits in compared else _unequal_pair(traces, channel, number)
            if found is not None:
                return found
            compared.add(splits)
    return None


def _splits(traces: Traces, channel: Channel, number: int) -> Hashable:
    """Return a key that determines the bytes between the ranks of an exchange."""
    pairs = zip(channel.members, channel.rows, strict=True)
    records = [(traces.traces[rank].records, rows[number]) for rank, rows in pairs]
    return tuple((int(one.signature[row]), int(one.num_bytes[row])) for one, row in records)


def _signatures_of(trace: Trace, rows: Ints, *, is_message: bool) -> list[Hashable]:
    records = trace.records
    actions = records.action[rows] if is_message else np.full(len(rows), NONE)
    columns = (records.signature[rows], records.num_bytes[rows], actions)
    known: dict[tuple[int, int, int], Hashable] = {}
    asked: list[Hashable] = []
    for row in zip(*(column.tolist() for column in columns), strict=True):
        if row not in known:
            known[row] = _signature_of(trace, *row, is_message=is_message)
        asked.append(known[row])
    return asked


def _signature_of(trace: Trace, signature: int, num_bytes: int, action: int, *, is_message: bool) -> Hashable:
    shapes = trace.signatures[signature]
    dtype = next((shape.dtype for shape in (*shapes.inputs, *shapes.outputs)), "")
    if is_message:
        return num_bytes, dtype, None if action == NONE else _carried(trace.actions[action])
    return shapes.op, None if _exchanges(shapes.op) else num_bytes, dtype, shapes.agreed


def _broken(at: Sequence[Hashable]) -> str:
    """Return the rule for ranks that run the same collective with different arguments; "" otherwise."""
    asked = [one for one in at if isinstance(one, tuple)]
    if len(asked) < len(at) or len({one[0] for one in asked}) > 1:
        return ""
    field = next(field for field in range(1, len(asked[0])) if len({one[field] for one in asked}) > 1)
    return f"run the same collectives in the same order, with {_FIELDS[field - 1]}"


def _exchanges(op: str) -> bool:
    return op.split(".")[1] in _EXCHANGES if "." in op else False


def _is_exchange(asked: Hashable) -> bool:
    return isinstance(asked, tuple) and _exchanges(asked[0])


def _carried(action: str) -> Hashable:
    """Return the stage and microbatch whose output or gradient a pipeline's message carries."""
    found: tuple[Action, ...] = parse_cell(action)
    if len(found) != 1 or not found[0].kind.startswith(("SEND", "RECV")):
        return None
    kind, stage, microbatch = found[0]
    way = 1 if kind.endswith("F") else -1
    return kind[-1], stage - way if kind.startswith("RECV") else stage, microbatch


def _unequal_pair(traces: Traces, channel: Channel, number: int) -> Disagreement | None:
    """Return the disagreement of an exchange in which a rank does not send the bytes that another expects.

    Only pairs of traced ranks are compared: a representative's splits are those of its own position.
    """
    exchanged = {
        rank: _exchange(traces.traces[rank], int(rows[number]))
        for rank, rows in zip(channel.members, channel.rows, strict=True)
    }
    unequal = [
        (one, other)
        for one in channel.members
        for other in exchanged[one][0]
        if other in exchanged and one in exchanged[other][1] and exchanged[one][0][other] != exchanged[other][1][one]
    ]
    if not unequal:
        return None
    sender, receiver = unequal[0]
    sent, expected = exchanged[sender][0][receiver], exchanged[receiver][1][sender]
    pair = f"rank {sender} sends {sent:,} bytes to rank {receiver}, which expects {expected:,} from it"
    at = _deviations(channel.members, unequal, exchanged)
    return Disagreement(channel, number, at, f"send the bytes that the others expect ({pair})")


_Exchanged = Mapping[int, int]
"""Bytes by global rank."""


def _exchange(trace: Trace, record: int) -> tuple[_Exchanged, _Exchanged]:
    """Return what a rank sends to, and receives from, each rank of its group."""
    ranks = trace.groups[int(trace.records.group[record])]
    signature = trace.signatures[int(trace.records.signature[record])]
    even = (int(trace.records.num_bytes[record]) // len(ranks),) * len(ranks)
    return tuple(dict(zip(ranks, one or even, strict=True)) for one in (signature.sends, signature.receives))  # type: ignore[return-value]


def _deviations(
    members: Sequence[int], unequal: Sequence[tuple[int, int]], exchanged: Mapping[int, tuple[_Exchanged, _Exchanged]]
) -> tuple[Hashable, ...]:
    """Return for each member the number of unequal pairs it is in; 0 if it is no suspect.

    Suspects are in the most of these pairs; of them, those that send or receive other sizes than most members.
    """
    counts = [sum(rank in pair for pair in unequal) for rank in members]
    most = [count if count == max(counts) else 0 for count in counts]
    odd = [0] * len(members)
    for side in (0, 1):
        sizes = [sorted(exchanged[rank][side].values()) for rank in members]
        usual = max(sizes, key=sizes.count)
        if 2 * sizes.count(usual) > len(sizes):
            odd = [already or count * (size != usual) for already, count, size in zip(odd, most, sizes, strict=True)]
    return tuple(odd if any(odd) else most)


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
