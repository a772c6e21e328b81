"""Replay of a pipeline's schedule: when its last rank is done, action by action.

Each rank runs its actions in order; a computation starts when the rank is free and its input has arrived.

    transfer   starts when its sender has posted the send, its receiver the receive, and the previous transfer from the
               same rank to the same rank has arrived; shares the link out of a rank and the link into a rank with
               others, inside its domain or over the network (links.py)
    send       is posted once the previous one of its stage in its direction has arrived
    (parallelism/pipeline/pipeline.py); at
               once where a split backward keeps the outputs
    tied head  the first and the last rank exchange its gradients at the end

Ignored: other communication on the same links, links that belong to one pair of devices, and anything that makes one
microbatch slower than another.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from meshwright.cost.communication.links import Links
from meshwright.spec.layout.schedule.action import COMPUTE_KINDS, Action, Kind

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
    after_forward_s: Sequence[float] | None = None
    """What a forward takes longer by right after another forward of its rank, whose last activations are still being
    copied to the host next to it; less what the rank has waited in between."""


class Hops(NamedTuple):
    """What a transfer takes alone, by the border that it crosses."""

    hop_s: tuple[float, ...]
    """Inside of a domain, between domains, between pods."""
    domains: tuple[int, ...]
    """Of each pipeline rank."""
    pods: tuple[int, ...]
    tied_s: float = 0.0
    """What the first and the last rank take for exchanging the gradients of a tied head, once a step."""

    def border(self, one: int, other: int) -> int:
        """Return which border a transfer between two ranks crosses, as in `hop_s`."""
        return 2 if self.pods[one] != self.pods[other] else int(self.domains[one] != self.domains[other])


class Replayed(NamedTuple):
    """Seconds of a replay."""

    total_s: float
    """From the first forward to the end of the last rank's last action."""
    exposed_s: float
    """In which a rank waits for a transfer that is under way, in the mean over ranks."""


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
    awaited: int
    """The one that arrives before it is sent: the previous of the same stage in the same direction; -1 for none."""
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
    splits_backward = any(action.kind == "I" for order in orders for action in order)
    transfers = _transfers(sent, rank_of, keeps_outputs=splits_backward)
    return PipelineOps(tuple(tuple(_ops(order, numbers)) for order in orders), tuple(transfers))


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


def _transfers(sent: Sequence[Action], rank_of: Mapping[int, int], *, keeps_outputs: bool) -> Iterator[Transfer]:
    """Yield the transfers of `sent`, which holds those of each rank in order."""
    last_of_stage: dict[tuple[Kind, int], int] = {}
    last_of_pair: dict[tuple[int, int], int] = {}
    for number, (kind, stage, _) in enumerate(sent):
        pair = rank_of[stage], rank_of[stage + (1 if kind == "SEND_F" else -1)]
        waits = not (keeps_outputs and kind == "SEND_F")
        awaited = last_of_stage.get((kind, stage), _NONE) if waits else _NONE
        yield Transfer(*pair, awaited, last_of_pair.get(pair, _NONE))
        last_of_stage[kind, stage] = last_of_pair[pair] = number


def replay(ops: PipelineOps, times: StageTimes, hops: Hops) -> Replayed:
    """Return what a pipeline takes.

    The ops of a schedule that `check_schedule` accepts cannot deadlock.
    """
    state = _Replay(ops, times, hops)
    num_ranks = len(ops.of_rank)
    for rank in range(num_ranks):
        state.run(rank)
    while (ended := state.links.next_end()) is not None:
        state.complete(*ended)
    assert all(place == len(own) for place, own in zip(state.places, ops.of_rank, strict=True)), "deadlock"
    return Replayed(max(state.clocks) + hops.tied_s, (sum(state.exposed_s) + 2 * hops.tied_s) / num_ranks)


class _Replay:
    """State of a replay: as in simulator/engine/engine.py ranks run ahead until they block; transfers end in order of
    time.
    """

    def __init__(self, ops: PipelineOps, times: StageTimes, hops: Hops) -> None:
        self._ops = ops
        left_s = [whole - weight for whole, weight in zip(times.backward_s, times.weight_s, strict=True)]
        inputs_s = left_s if times.input_s is None else times.input_s
        self._duration_s = {
            "F": times.forward_s,
            "B": times.backward_s,
            "I": times.backward_s if times.repeats else inputs_s,
            "W": times.backward_s if times.repeats else times.weight_s,
        }
        self._after_forward_s = times.after_forward_s
        self.clocks, self.places = [0.0] * len(ops.of_rank), [0] * len(ops.of_rank)
        self._forward_ended_at = [_PENDING] * len(ops.of_rank)
        """Of each rank whose last computation was a forward that copies."""
        number = len(ops.transfers)
        borders = [hops.border(one.sender, one.receiver) for one in ops.transfers]
        uses = [_links_of(one, border) for one, border in zip(ops.transfers, borders, strict=True)]
        self.links = Links([0.0] * number, [hops.hop_s[border] for border in borders], uses)
        self.exposed_s = [0.0] * len(ops.of_rank)
        self._first_posted_at, self._both_posted_at = [_PENDING] * number, [_PENDING] * number
        self._started_at, self._arrived_at = [_PENDING] * number, [_PENDING] * number
        self._next_of_pair = {one.previous_of_pair: number for number, one in enumerate(ops.transfers)}
        self._waiters: dict[int, list[int]] = {}
        """Ranks that wait for a transfer to arrive."""

    def run(self, rank: int) -> None:
        """Run the ops of rank `rank` until one waits for a transfer."""
        own, clock = self._ops.of_rank[rank], self.clocks[rank]
        for place in range(self.places[rank], len(own)):
            kind, transfer, action, stage = own[place]
            awaited = self._ops.transfers[transfer].awaited if kind == "send" else transfer
            if kind != "receive" and awaited != _NONE:
                if self._arrived_at[awaited] == _PENDING:
                    self._waiters.setdefault(awaited, []).append(rank)
                    break
                if self._arrived_at[awaited] > clock:
                    self.exposed_s[rank] += self._arrived_at[awaited] - max(clock, self._started_at[awaited])
                    clock = self._arrived_at[awaited]
            if kind == "compute":
                clock += self._duration_s[action][stage]
                if self._after_forward_s is not None:
                    clock = self._copied_after(rank, action, stage, clock)
            else:
                self._post(transfer, clock)
            self.places[rank] = place + 1
        self.clocks[rank] = clock

    def _copied_after(self, rank: int, action: Kind, stage: int, clock: float) -> float:
        """Return when a computation that would end at `clock` is done, with the copy of the forward before it."""
        assert self._after_forward_s is not None
        longer_s, before = self._after_forward_s[stage], self._forward_ended_at[rank]
        if action == "F" and before != _PENDING:
            started = clock - self._duration_s[action][stage]
            clock += max(0.0, longer_s - (started - before))
        self._forward_ended_at[rank] = clock if action == "F" and longer_s > 0 else _PENDING
        return clock

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
            self._started_at[transfer] = max(self._both_posted_at[transfer], free_at)
            self.links.start(transfer, self._started_at[transfer])


def _links_of(transfer: Transfer, border: int) -> list[tuple[int, float]]:
    """Return the links that a transfer fills when alone: out of one rank and into the other."""
    first = 2 * (border > 0)
    return [(4 * transfer.sender + first, 1.0), (4 * transfer.receiver + first + 1, 1.0)]
