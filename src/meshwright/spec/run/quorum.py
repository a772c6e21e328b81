"""Quorum: which replicas take part in the next step, as data: decided by the coordinator, read by every rank."""

import uuid
from typing import Self

from pydantic import Field, NonNegativeInt

from meshwright.spec.frozen import Frozen


class Readiness(Frozen):
    """What one replica says before a step, once all of its ranks have."""

    replica: NonNegativeInt
    incarnation: str
    """What distinguishes its processes from those that it replaced."""
    step: NonNegativeInt | None
    """Steps that its state has; None for one that has started and holds no state."""
    stop: int = 0
    """The strongest stop signal that a rank of it got; 0 for none."""
    has_failed: bool = False
    """Whether a sum over replicas failed since the last quorum."""


class Quorum(Frozen):
    """The answer to all that were ready: the same for each of them."""

    epoch: NonNegativeInt
    """Counts the sets of replicas so far: with each new one, replicas connect again."""
    step: NonNegativeInt = 0
    """Steps that the members' states have when the step begins."""
    members: tuple[int, ...] = Field(strict=False)
    """Numbers of the replicas that share the batch, ascending."""
    sources: dict[int, int] = Field(default_factory=dict)
    """Members that lack the state, and the member that sends it to each: the model first, the rest during the step."""
    writer: NonNegativeInt = 0
    """The member that writes metrics and checkpoints."""
    restores: bool = False
    """Whether all members load the newest checkpoint instead, and say then how far they are: no one has the state."""
    stop: int = 0
    """The signal for which the replica that is answered leaves; 0 for none. The members go on, or it was the last."""
    too_few: bool = False
    """Whether the members gave up waiting for others, as fewer than replicas.minimum are left."""

    def index(self, replica: int) -> int:
        """Return the place of a member in this quorum, from 0."""
        return self.members.index(replica)


class ReplicaPlace(Frozen):
    """Which replica a rank is part of, and where the coordinator is."""

    replica: int
    incarnation: str
    """Distinguishes its processes from those that it replaced."""
    host: str
    port: int
    token: str
    """Known to this job's processes alone."""

    @classmethod
    def of(cls, replica: int, address: tuple[str, int], token: str) -> Self:
        """Return the place of the next processes of a replica."""
        return cls(replica=replica, incarnation=uuid.uuid4().hex, host=address[0], port=address[1], token=token)

    def number_of(self, rank: int, num_ranks: int) -> int:
        """Return the number of a rank of this replica, which has `num_ranks`, among those of all replicas."""
        return self.replica * num_ranks + rank
