"""Replay of a pipeline's schedule: when its last rank is done, action by action.

Each rank runs its actions in their order; a computation starts when the rank is free and its input has arrived.

    message    begins when it is sent, its receiver has posted the receive, and the one before it between the same two
               ranks has arrived; it shares a rank's ways out and in, inside its domain or over the network (links.py)
    send       a stage's next send each way waits until the one before it has arrived, as parallelism/pipeline.py does;
               not where a split backward keeps the outputs
    tied head  the first and the last rank exchange its gradients at the end

Ignored: other communication on the same links, pairs of devices that have a link of their own, and anything that makes
one microbatch slower than another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from meshwright.cost.links import Links
from meshwright.spec.action import COMPUTE_KINDS, Action, Kind

_PENDING = -1.0
"""The time of what has not happened yet."""
_NONE = -1


@dataclass(frozen=True)
class StageTimes:
    """Seconds that one microbatch takes on each stage."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    """The whole backward."""
    weight_s: Sequence[float]
    """The part of the backward that makes the gradients of the weights, where it runs apart."""
    repeats: bool = False
    """Whether a backward that runs in two parts runs whole in each, as that of compiled blocks does."""
    input_s: Sequence[float] | None = None
    """The part that makes the gradients of the inputs; None for what the other part leaves of the whole."""


class Hops(NamedTuple):
    """What a message takes when alone, by the border that it crosses."""

    hop_s: tuple[float, ...]
    """Inside of a domain, between domains, between pods."""
    domains: tuple[int, ...]
    """Of each pipeline rank."""
    pods: tuple[int, ...]
    tied_s: float = 0.0
    """What the first and the last rank take for exchanging the gradients of a tied head, once a step."""

    def border(self, one: int, other: int) -> int:
        """Return which border a message between two ranks crosses, as in `hop_s`."""
        return 2 if self.pods[one] != self.pods[other] else int(self.domains[one] != self.domains[other])


class Part(NamedTuple):
    """A computation of a stage, or one end of a message."""

    kind: Literal["compute", "send", "receive"]
    message: int
    """The message that a computation needs, or that is sent or received; -1 for none."""
    action: Kind
    stage: int


class Message(NamedTuple):
    """What one rank sends another."""

    sender: int
    receiver: int
    awaited: int
    """The message that has to arrive before it is sent: the one before it of the same stage, the same way; -1 for
    none."""
    before_in_pair: int
    """The message before it from the same rank to the same rank; -1 for none."""


class Replayed(NamedTuple):
    """Seconds of a replay."""

    total_s: float
    exposed_s: float
    """In which a rank waits for a message that is under way, in the mean over ranks."""


class Parts(NamedTuple):
    """What ranks do, with messages numbered."""

    of_rank: tuple[tuple[Part, ...], ...]
    messages: tuple[Message, ...]


def parts_of(orders: Sequence[Sequence[Action]]) -> Parts:
    """Return what each rank does; `orders` holds its actions with sends and receives, as `lower` places them."""
    sent = [action for order in orders for action in order if action.kind in ("SEND_F", "SEND_B")]
    numbers = {(kind[-1], stage, microbatch): number for number, (kind, stage, microbatch) in enumerate(sent)}
    of_rank = tuple(tuple(_parts(order, numbers)) for order in orders)
    rank_of = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    splits_backward = any(action.kind == "I" for order in orders for action in order)
    return Parts(of_rank, tuple(_messages(sent, rank_of, keeps_outputs=splits_backward)))


def _parts(order: Sequence[Action], numbers: dict[tuple[str, int, int], int]) -> Iterator[Part]:
    for kind, stage, microbatch in order:
        if kind in COMPUTE_KINDS:
            needed = numbers.get(_source(kind, stage, microbatch), _NONE)
            yield Part("compute", needed if kind != "W" else _NONE, kind, stage)
        elif kind.startswith("SEND"):
            yield Part("send", numbers[kind[-1], stage, microbatch], kind, stage)
        else:
            yield Part("receive", numbers[_source(kind[-1], stage, microbatch)], kind, stage)


def _source(kind: str, stage: int, microbatch: int) -> tuple[str, int, int]:
    """Return which computation makes the input of a stage's forward (F) or backward."""
    return ("F", stage - 1, microbatch) if kind == "F" else ("B", stage + 1, microbatch)


def _messages(sent: Sequence[Action], rank_of: dict[int, int], *, keeps_outputs: bool) -> Iterator[Message]:
    """Yield the messages of `sent`, which holds each rank's in their order.

    `keeps_outputs`: a split backward keeps a stage's outputs, so that they wait for no send (parallelism/pipeline.py).
    """
    last_of_stage: dict[tuple[Kind, int], int] = {}
    last_of_pair: dict[tuple[int, int], int] = {}
    for number, (kind, stage, _) in enumerate(sent):
        pair = rank_of[stage], rank_of[stage + (1 if kind == "SEND_F" else -1)]
        waits = not (keeps_outputs and kind == "SEND_F")
        before = last_of_stage.get((kind, stage), _NONE) if waits else _NONE
        yield Message(*pair, before, last_of_pair.get(pair, _NONE))
        last_of_stage[kind, stage] = last_of_pair[pair] = number


def replay(parts: Parts, times: StageTimes, hops: Hops) -> Replayed:
    """Return the seconds from the first forward to the end of the last rank's last action.

    The parts of a schedule that `check_schedule` accepts always end.
    """
    ranks = _Ranks(parts, times, hops)
    for rank in range(len(parts.of_rank)):
        ranks.run(rank)
    while (ended := ranks.links.next_end()) is not None:
        ranks.arrive(*ended)
    assert all(place == len(own) for place, own in zip(ranks.places, parts.of_rank, strict=True)), (
        "ranks wait in a circle"
    )
    num_ranks = len(parts.of_rank)
    return Replayed(max(ranks.clocks) + hops.tied_s, (sum(ranks.exposed_s) + 2 * hops.tied_s) / num_ranks)


class _Ranks:
    """What ranks have done so far. As in simulator/engine.py ranks play as far as they can; messages go by time."""

    def __init__(self, parts: Parts, times: StageTimes, hops: Hops) -> None:
        self._parts = parts
        left_s = [whole - weight for whole, weight in zip(times.backward_s, times.weight_s, strict=True)]
        inputs_s = left_s if times.input_s is None else times.input_s
        self._duration_s = {
            "F": times.forward_s,
            "B": times.backward_s,
            "I": times.backward_s if times.repeats else inputs_s,
            "W": times.backward_s if times.repeats else times.weight_s,
        }
        self.clocks, self.places = [0.0] * len(parts.of_rank), [0] * len(parts.of_rank)
        number = len(parts.messages)
        borders = [hops.border(one.sender, one.receiver) for one in parts.messages]
        self.links = Links(
            [0.0] * number,
            [hops.hop_s[border] for border in borders],
            [_ways(one, border) for one, border in zip(parts.messages, borders, strict=True)],
        )
        self.exposed_s = [0.0] * len(parts.of_rank)
        self._first_end_at, self._met_at, self._began_at, self._arrived_at = ([_PENDING] * number for _ in range(4))
        self._after = {one.before_in_pair: number for number, one in enumerate(parts.messages)}
        self._waiting: dict[int, list[int]] = {}
        """Ranks that wait for a message to arrive."""

    def run(self, rank: int) -> None:
        """Run what rank `rank` can."""
        own, clock = self._parts.of_rank[rank], self.clocks[rank]
        for place in range(self.places[rank], len(own)):
            kind, message, action, stage = own[place]
            awaited = self._parts.messages[message].awaited if kind == "send" else message
            if kind != "receive" and awaited != _NONE:
                if self._arrived_at[awaited] == _PENDING:
                    self._waiting.setdefault(awaited, []).append(rank)
                    break
                if self._arrived_at[awaited] > clock:
                    self.exposed_s[rank] += self._arrived_at[awaited] - max(clock, self._began_at[awaited])
                    clock = self._arrived_at[awaited]
            if kind == "compute":
                clock += self._duration_s[action][stage]
            else:
                self._meet(message, clock)
            self.places[rank] = place + 1
        self.clocks[rank] = clock

    def arrive(self, message: int, at_s: float) -> None:
        """Let a message arrive, its pair's next one begin, and those go on who waited for it."""
        self._arrived_at[message] = at_s
        if message in self._after:
            self._begin(self._after[message])
        for rank in self._waiting.pop(message, []):
            self.run(rank)

    def _meet(self, message: int, now_s: float) -> None:
        """Let one end of a message be there."""
        if self._first_end_at[message] == _PENDING:
            self._first_end_at[message] = now_s
            return
        self._met_at[message] = max(now_s, self._first_end_at[message])
        self._begin(message)

    def _begin(self, message: int) -> None:
        """Let a message begin, if both ends are there and it is its pair's turn."""
        before = self._parts.messages[message].before_in_pair
        free_at = 0.0 if before == _NONE else self._arrived_at[before]
        if self._met_at[message] != _PENDING and free_at != _PENDING:
            self._began_at[message] = max(self._met_at[message], free_at)
            self.links.begin(message, self._began_at[message])


def _ways(message: Message, border: int) -> list[tuple[int, float]]:
    """Return the links that a message takes when alone: the way out of one rank and the way into the other."""
    first = 2 * (border > 0)
    return [(4 * message.sender + first, 1.0), (4 * message.receiver + first + 1, 1.0)]
