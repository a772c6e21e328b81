"""What is wrong with a traced step, as data and as text.

TraceProblem: why the step does not end (mismatched collectives, a deadlock), with the rank and line that cause it.
Hazard: why its results may be undefined (a missing wait, two streams without an order).
"""

from typing import Literal, get_args

from pydantic import NonNegativeInt, PositiveInt

from meshwright.spec.frozen import Frozen

ProblemKind = Literal["collective", "message", "deadlock", "stopped"]
"""A collective or message that ranks do not agree on; ranks that wait in a circle; a rank that stopped."""

RaceKind = Literal["never waited for", "used before its wait", "across streams", "freed across streams"]
"""Communication whose result is used without a wait; two streams that use one tensor in no defined order."""

MessageHazardKind = Literal["both send first", "both receive first", "tags differ"]
"""Messages of a pair of ranks that are not batched and block each other; tags, which NCCL does not look at."""

_NUM_ENDS = 2
UNRECORDED = -2
"""Record of a CallSite that is in no trace, such as a call of new_group()."""


def along(axis: str) -> str:
    """Return " along AXIS" for a message, "" without an axis; an axis in parentheses is text already."""
    return f" {'' if axis.startswith('(') else 'along '}{axis}" if axis else ""


class CallSite(Frozen):
    """A record in one rank's step, in words."""

    rank: NonNegativeInt
    """Global rank; it may represent others that do the same."""
    record: int
    """Position in the rank's trace; -1 for what is missing at its end, UNRECORDED for a call that is no record."""
    op: str
    """As torch calls it, or what the record does."""
    scope: str = ""
    """Module in whose code it is, or the line of the program."""
    phase: str = ""
    action: str = ""
    """Of the pipeline's schedule."""
    axis: str = ""
    """Mesh axis of its group."""
    num_bytes: NonNegativeInt = 0
    dtype: str = ""
    agreed: str = ""
    """Reduction and root of a collective."""
    line: str = ""
    """Innermost line of a file of the user's own, such as train.py:40; "" where none called it."""

    def __str__(self) -> str:
        parts = dict.fromkeys((self.action, self.phase, self.scope, self.line))
        where = ", ".join(part for part in parts if part)
        if self.record == UNRECORDED:
            return f"rank {self.rank} ({where}): {self.op}" if where else f"rank {self.rank}: {self.op}"
        if self.record < 0:
            return f"rank {self.rank}: nothing more" + (f" after {self.op} ({where})" if self.op else "")
        size = f" of {self.num_bytes:,} bytes {self.dtype}".rstrip() if self.num_bytes else ""
        agreed = f" ({self.agreed})" if self.agreed else ""
        axis = along(self.axis)
        return f"rank {self.rank}, record {self.record} ({where}): {self.op}{agreed}{size}{axis}"


class TraceProblem(Frozen):
    """One reason why a step does not end, or computes nonsense."""

    kind: ProblemKind
    culprit: CallSite
    """Where the rank is that does otherwise than the others, or what it is at while they wait."""
    rule: str
    """What is broken, one sentence."""
    others: tuple[CallSite, ...] = ()
    """What other ranks do there, or wait for."""
    group: tuple[NonNegativeInt, ...] = ()
    """Global ranks of the collective's group, or sender and receiver."""
    is_tie: bool = False
    """Whether no majority says which side is wrong: the culprit, or else the others."""
    hint: str = ""
    """What else may be the mistake."""
    num_more: NonNegativeInt = 0
    """Groups and messages in which the culprit disagrees with others, too, such as after one call that it left out."""

    def __str__(self) -> str:
        names = ("either", "or") if self.is_tie else ("culprit", "against")
        lines = [f"{self.rule}", f"  {names[0]}: {self.culprit}"]
        lines += [f"  {names[1]}: {other}" for other in self.others]
        if self.is_tie:
            which = "both" if len(self.others) < _NUM_ENDS else "all"
            lines.append(f"  no majority of ranks says which of them is wrong: look at {which}")
        if self.hint:
            lines.append(f"  {self.hint}")
        if self.num_more:
            lines.append(
                f"  rank {self.culprit.rank} disagrees in other groups or messages, too ({self.num_more:,}), which may "
                "follow from this"
            )
        return "\n".join(lines)


class Hazard(Frozen):
    """Two uses of one tensor without an order, whose results then vary; or a pair of messages that gloo delivers and
    NCCL may not, or delivers in another order.
    """

    kind: RaceKind | MessageHazardKind
    first: CallSite
    """The communication op that is not waited for, or the earlier of the two uses."""
    second: CallSite | None = None
    """The use that is not ordered after it; None of a result that is not used again in the step."""
    count: PositiveInt = 1
    """How often in a step of that rank, between the same two lines."""
    num_ranks: PositiveInt = 1
    """Ranks that do so, the one of `first` included."""

    @property
    def is_race(self) -> bool:
        """Return whether it is about uses of one tensor of one rank."""
        return self.kind in get_args(RaceKind)

    def __str__(self) -> str:
        others = f" (and {self.num_ranks - 1:,} other ranks)" if self.num_ranks > 1 and self.is_race else ""
        others = others if self.is_race or self.num_ranks <= _NUM_ENDS else f" ({self.num_ranks:,} ranks do so)"
        times = f" {self.count} times" if self.count > 1 else ""
        lines = [f"{_HAZARDS[self.kind]}{times}{others}", f"  first: {self.first}"]
        then = "then" if self.is_race else "and"
        return "\n".join(lines + ([] if self.second is None else [f"  {then}: {self.second}"]))


_IN_ORDER = "NCCL runs the messages of two ranks one after the other unless they are batched"
_BATCH = "call batch_isend_irecv()"
_HAZARDS: dict[RaceKind | MessageHazardKind, str] = {
    "never waited for": "communication is never waited for: call wait() on the work that async_op=True returns",
    "used before its wait": "a tensor is used before the wait for the communication on it: wait first",
    "across streams": "two streams use a tensor and nothing orders them: call wait_stream(), or wait for an event",
    "freed across streams": "memory is freed while another stream uses it: record_stream(), or wait before the last "
    "reference to it ends",
    "both send first": f"two ranks send to each other and neither receives first: {_IN_ORDER}, a deadlock at "
    f"messages too large for its buffers: {_BATCH}, or let one of them receive first",
    "both receive first": f"two ranks receive from each other and neither sends first: {_IN_ORDER}, a deadlock: "
    f"{_BATCH}, or let one of them send first",
    "tags differ": "a message is sent with one tag and received with another: NCCL does not look at tags, and messages "
    "arrive in the order in which they are sent: receive them in that order",
}
