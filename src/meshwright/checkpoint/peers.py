"""What the ranks of a save or load exchange with each other: small JSON values and one error for all."""

import json
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import distributed as dist

from meshwright.checkpoint.signed_objects import broadcast_object, collect_objects, gather_objects
from meshwright.errors import CheckpointError, DamagedCheckpoint, MeshwrightError

T = TypeVar("T")
ProcessGroup = dist.ProcessGroup | None
"""The ranks that save or load together, a group with a CPU backend; None for all ranks."""


class Peers(Protocol):
    """The ranks that write one checkpoint; every method is a collective."""

    rank: int
    num_ranks: int

    def publish(self, value: Any) -> Any:
        """Return rank 0's `value` on every rank."""

    def collect(self, value: Any) -> list[Any]:
        """Return the values of all ranks on rank 0, an empty list elsewhere."""


class GroupPeers:
    """The ranks of a process group, or this process alone where none exists."""

    def __init__(self, group: ProcessGroup = None, *, is_alone: bool = False) -> None:
        """`is_alone` is this process by itself, also where a process group exists."""
        self._group = group
        self._is_alone = is_alone or not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self._is_alone else dist.get_rank(group)
        self.num_ranks = 1 if self._is_alone else dist.get_world_size(group)

    def publish(self, value: Any) -> Any:
        """Return rank 0's `value` on every rank."""
        if self._is_alone:
            return value
        return broadcast_object(value, self._group)

    def collect(self, value: Any) -> list[Any]:
        """Return the values of all ranks on rank 0, an empty list elsewhere."""
        if self._is_alone:
            return [value]
        return collect_objects(value, self._group)

    def exchange(self, messages: list[Any]) -> list[Any]:
        """Return what each rank sent to this one, where `messages` has one JSON value for each rank."""
        if self._is_alone:
            return messages
        sent = [json.dumps(message, separators=(",", ":")).encode() for message in messages]
        sizes = torch.tensor([len(data) for data in sent])
        received_sizes = torch.empty_like(sizes)
        dist.all_to_all_single(received_sizes, sizes, group=self._group)
        received = torch.empty(int(received_sizes.sum()), dtype=torch.uint8)
        dist.all_to_all_single(
            received,
            torch.frombuffer(bytearray(b"".join(sent)), dtype=torch.uint8),
            received_sizes.tolist(),
            sizes.tolist(),
            group=self._group,
        )
        return [json.loads(part.numpy().tobytes()) for part in received.split(received_sizes.tolist())]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks on every rank; for small values."""
        if self._is_alone:
            return [value]
        return gather_objects(value, self._group)

    def maximum(self, value: int) -> int:
        """Return the largest of the integers of all ranks on every rank."""
        if self._is_alone:
            return value
        largest = torch.tensor(value)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        return int(largest)

    def act_together(self, act: Callable[[], T], on_rank: int | None = None) -> T | None:
        """Return what `act` returns, run on every rank or only `on_rank` (elsewhere None); a collective.

        What it raises of Meshwright's errors on any rank, every rank raises.
        """
        outcome: T | None = None
        problem: MeshwrightError | None = None
        if on_rank in (None, self.rank):
            try:
                outcome = act()
            except MeshwrightError as error:
                problem = error
        for found in self.gather(problem):
            if found is not None:
                raise found
        return outcome

    def on_all(self, act: Callable[[], T]) -> T:
        """Return what `act` returns on this rank, or raise on every rank what it raised on any; a collective."""
        return cast(T, self.act_together(act))

    def raise_on_all(self, problem: CheckpointError | None) -> None:
        """Raise on every rank, with all texts, if any rank has a problem; as damage if all of them are damage."""
        own = None if problem is None else (str(problem), isinstance(problem, DamagedCheckpoint))
        found = [each for each in self.gather(own) if each is not None]
        if found:
            kind = DamagedCheckpoint if all(is_damage for _, is_damage in found) else CheckpointError
            raise kind("\n".join(dict.fromkeys(text for text, _ in found)))
