"""Replay of a pipeline's schedule: when its last rank is done, action by action.

Each rank runs its actions in order; a computation starts when the rank is free and its input has arrived.

    transfer   starts when its sender has posted the send, its receiver the receive, and the previous transfer from the
               same rank to the same rank has arrived; takes `transfer_s` alone, and shares the link out of a rank and
               the link into a rank with others (links.py)
    send       is posted once the previous one of its stage in its direction has arrived (parallelism/pipeline.py)

Ignored: other communication on the same links, links that belong to one pair of devices, and anything that makes one
microbatch slower than another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from meshwright.cost.links import Links
from meshwright.spec.action import COMPUTE_KINDS, Action, Kind

_PENDING = -1.0
"""In place of the time of what has not happened yet."""
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


class PipelineOp(NamedTuple):
    """A computation of a stage, or one end of a transfer."""

    kind: Literal["compute", "send", "receive"]
    transfer: int
    """The transfer that brings a computation its input, or that is sent or received; -1 for none."""
    action: Kind
    stage: int


class Transfer(NamedTuple):
    """Activations or gradients that one rank sends another."""

    sender: int
    receiver: int
    previous_of_stage: int
    """The previous one of the same stage in the same direction; -1 for none."""
    previous_of_pair: int
    """The previous one from the same rank to the same rank; -1 for none."""


class PipelineOps(NamedTuple):
    """What the ranks of a pipeline run, with transfers numbered."""

    of_rank: tuple[tuple[PipelineOp, ...], ...]
    transfers: tuple[Transfer, ...]


_Source = tuple[str, int, int]
"""What is sent: the output of a forward (F) or backward (B), its stage and microbatch."""


def pipeline_ops(orders: Sequence[Sequence[Action]]) -> PipelineOps:
    """Return what each rank runs; `orders` holds its actions with sends and receives, as `lower` places them."""
    sent = [action for order in orders for action in order if action.kind in ("SEND_F", "SEND_B")]
    numbers = {(kind[-1], stage, microbatch): number for number, (kind, stage, microbatch) in enumerate(sent)}
    rank_of = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    return PipelineOps(tuple(tuple(_ops(order, numbers)) for order in orders), tuple(_transfers(sent, rank_of)))


def _ops(order: Sequence[Action], numbers: Mapping[_Source, int]) -> Iterator[PipelineOp]:
    for kind, stage, microbatch in order:
        if kind in COMPUTE_KINDS:
            # Between two stages of one rank nothing is sent.
            yield PipelineOp("compute", numbers.get(_source(kind, stage, microbatch), _NONE), kind, stage)
        elif kind.startswith("SEND"):
            yield PipelineOp("send", numbers[kind[-1], stage, microbatch], kind, stage)
        else:
            yield PipelineOp("receive", numbers[_source(kind[-1], stage, microbatch)], kind, stage)


def _source(kind: str, stage: int, microbatch: int) -> _Source:
    """Return what a stage's forward (F) or backward (any other) reads."""
    return ("F", stage - 1, microbatch) if kind == "F" else ("B", stage + 1, microbatch)


def _transfers(sent: Sequence[Action], rank_of: Mapping[int, int]) -> Iterator[Transfer]:
    """Yield the transfers of `sent`, which holds those of each rank in order."""
    last_of_stage: dict[tuple[Kind, int], int] = {}
    last_of_pair: dict[tuple[int, int], int] = {}
    for number, (kind, stage, _) in enumerate(sent):
        pair = rank_of[stage], rank_of[stage + (1 if kind == "SEND_F" else -1)]
        yield Transfer(*pair, last_of_stage.get((kind, stage), _NONE), last_of_pair.get(pair, _NONE))
        last_of_stage[kind, stage] = last_of_pair[pair] = number


def replay_s(ops: PipelineOps, times: StageTimes, transfer_s: float) -> float:
    """Return the seconds from the first forward to the end of the last rank's last action.

    The ops of a schedule that `check_schedule` accepts cannot deadlock.
    """
    replay = _Replay(ops, times, transfer_s)
    for rank in range(len(ops.of_rank)):
        replay.run(rank)
    while (ended := replay.links.next_end()) is not None:
        replay.complete(*ended)
    assert all(place == len(own) for place, own in zip(replay.places, ops.of_rank, strict=True)), "deadlock"
    return max(replay.clocks)


class _Replay:
    """State of a replay: as in simulator/engine.py ranks run ahead until they block; transfers end in order of time."""

    def __init__(self, ops: PipelineOps, times: StageTimes, transfer_s: float) -> None:
        self._ops = ops
        left_s = [whole - weight for whole, weight in zip(times.backward_s, times.weight_s, strict=True)]
        inputs_s = left_s if times.input_s is None else times.input_s
        self._duration_s = {
            "F": times.forward_s,
            "B": times.backward_s,
            "I": times.backward_s if times.repeats else inputs_s,
            "W": times.backward_s if times.repeats else times.weight_s,
        }
        self.clocks, self.places = [0.0] * len(ops.of_rank), [0] * len(ops.of_rank)
        number = len(ops.transfers)
        # Of each rank a link out and a link in.
        uses = [[(2 * one.sender, 1.0), (2 * one.receiver + 1, 1.0)] for one in ops.transfers]
        self.links = Links([0.0] * number, [transfer_s] * number, uses)
        self._first_posted_at, self._both_posted_at, self._arrived_at = ([_PENDING] * number for _ in range(3))
        self._next_of_pair = {one.previous_of_pair: number for number, one in enumerate(ops.transfers)}
        self._waiters: dict[int, list[int]] = {}
        """Ranks that wait for a transfer to arrive."""

    def run(self, rank: int) -> None:
        """Run the ops of rank `rank` until one waits for a transfer."""
        own, clock = self._ops.of_rank[rank], self.clocks[rank]
        for place in range(self.places[rank], len(own)):
            kind, transfer, action, stage = own[place]
            awaited = self._ops.transfers[transfer].previous_of_stage if kind == "send" else transfer
            if kind != "receive" and awaited != _NONE:
                if self._arrived_at[awaited] == _PENDING:
                    self._waiters.setdefault(awaited, []).append(rank)
                    break
                clock = max(clock, self._arrived_at[awaited])
            if kind == "compute":
                clock += self._duration_s[action][stage]
            else:
                self._post(transfer, clock)
            self.places[rank] = place + 1
        self.clocks[rank] = clock

    def complete(self, transfer: int, at_s: float) -> None:
        """Complete a transfer, start the next one of its pair, and run the ranks that wait for it."""
        self._arrived_at[transfer] = at_s
        if transfer in self._next_of_pair:
            self._start(self._next_of_pair[transfer])
        for rank in self._waiters.pop(transfer, []):
            self.run(rank)

    def _post(self, transfer: int, now_s: float) -> None:
        """Post one end of a transfer, which starts it where the other end is posted."""
        if self._first_posted_at[transfer] == _PENDING:
            self._first_posted_at[transfer] = now_s
            return
        self._both_posted_at[transfer] = max(now_s, self._first_posted_at[transfer])
        self._start(transfer)

    def _start(self, transfer: int) -> None:
        """Start a transfer if both ends are posted and the previous one of its pair has arrived."""
        previous = self._ops.transfers[transfer].previous_of_pair
        free_at = 0.0 if previous == _NONE else self._arrived_at[previous]
        if self._both_posted_at[transfer] != _PENDING and free_at != _PENDING:
            self.links.start(transfer, max(self._both_posted_at[transfer], free_at))
