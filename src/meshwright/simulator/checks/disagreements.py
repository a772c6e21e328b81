"""first_disagreement(): the first operation of a group, or of a pair of ranks, that its members call differently.

collective    compared by name, bytes, dtype, reduction and root
exchange      (all-to-all, gathers and scatters of lists) by name, dtype and root; for each pair of ranks the bytes
              that one sends have to equal those that the other receives
message       by bytes, dtype, and in a pipeline the stage and microbatch
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

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
