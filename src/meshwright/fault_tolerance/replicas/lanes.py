"""Lane: this rank and the ranks in its place in the other replicas, and the sums among them.

A sum never raises: with a replica gone it leaves its tensor as it is and is remembered as failed, so that a backward
that is under way ends as always, and its step is dropped and done again. It always waits: a sum that is still under way
when the optimizer reads it gives each replica other parameters (torchft 0.2.0's PureDistributedDataParallel, measured).
"""

from dataclasses import dataclass

from torch import Tensor
from torch import distributed as dist

from meshwright.fault_tolerance.replicas.member import Member
from meshwright.fault_tolerance.replicas.peer_group import PeerGroup
from meshwright.spec.run.quorum import Quorum


@dataclass
class LaneSum:
    """A sum over a lane that was started."""

    peers: PeerGroup
    work: dist.Work | None
    """None where it was not: the lane has failed, or has no other member."""

    def wait(self) -> None:
        """Return once it is done, or has failed, which the lane remembers."""
        work = self.work
        if work is not None:
            self.peers.attempt(lambda: self.peers.wait(work))


class Lane:
    """The lane of one rank, made again with each epoch."""

    def __init__(self, member: Member, rank: int, timeout_s: float) -> None:
        self._member, self._name = member, f"lane-{rank}"
        self._peers = PeerGroup(member, timeout_s)
        self._quorum: Quorum | None = None
        self.summed_bytes = 0
        """Bytes of tensors that were summed, or tried to be."""

    @property
    def has_failed(self) -> bool:
        """Return whether a sum, or the connection, failed since `form`."""
        return self._peers.has_failed

    def form(self, quorum: Quorum) -> None:
        """Connect to the ranks in this place in all members of a quorum, if that is a new set of them."""
        previous, self._quorum = self._quorum, quorum
        if previous is not None and quorum.epoch == previous.epoch and not self.has_failed:
            return
        if len(quorum.members) > 1:
            # Counted as a sum: one that does not come to connect is behind the others, who wait for it.
            self._member.begin_sum()
        self._peers.connect(self._name, quorum.epoch, quorum.members)

    def sum(self, tensor: Tensor) -> None:
        """Sum a tensor over the lane, in place, and wait; without effect once something has failed."""
        self.start_sum(tensor).wait()

    def start_sum(self, tensor: Tensor) -> LaneSum:
        """Start to sum a tensor over the lane, in place; all start theirs in one order."""
        self._member.begin_sum()
        if self._quorum is None or len(self._quorum.members) == 1 or self.has_failed:
            return LaneSum(self._peers, None)
        self.summed_bytes += tensor.numel() * tensor.element_size()
        return LaneSum(self._peers, self._peers.start(lambda group: group.allreduce([tensor], dist.AllreduceOptions())))

    def abandon(self) -> None:
        """Fail, and end the connections, so that others in this lane fail, too, and do not wait for this rank."""
        self._peers.abandon()
