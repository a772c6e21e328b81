"""Lane: this rank and the ranks in its place in the other replicas, and the sums among them.

A sum never raises: with a replica gone it leaves its tensor as it is and is remembered as failed, so that a backward
that is under way ends as always, and its step is dropped and done again. It always waits: a sum that is still under way
when the optimizer reads it gives each replica other parameters (torchft 0.2.0's PureDistributedDataParallel, measured).

Through gloo, also for tensors on GPUs: a lost peer is an error there, and not the end of the process.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor
from torch import distributed as dist

from meshwright.channels.channel_store import ChannelStore
from meshwright.channels.listening_sockets import closed_afterwards
from meshwright.errors import LostPeer
from meshwright.fault_tolerance.replicas.member import EpochValues, Member
from meshwright.log import logger
from meshwright.spec.run.quorum import Quorum

_IN_FLIGHT: Final = 8
"""Tensors of a state that are sent at once: one after the other took a quarter longer (1 GB, loopback, 2026-11-27)."""
_ENDS_BY_ITSELF_S: Final = 1.0
"""In which a sum fails whose peer has closed its connection. That of a frozen host, or across a cut, does not."""


class Lane:
    """The lane of one rank, made again with each epoch."""

    def __init__(self, member: Member, rank: int, timeout_s: float) -> None:
        self._member, self._rank, self._timeout_s = member, rank, timeout_s
        self._group: dist.ProcessGroup | None = None
        self._store: ChannelStore | None = None
        self._epoch = 0
        self._pending: threading.Event | None = None
        """Set where the sum that this rank waits for is done, or given up."""
        self._given_up: list[object] = []
        """Groups and sums that never end: freeing them would wait for them."""
        member.on_loss = self._note_loss
        self._quorum: Quorum | None = None
        self.has_failed = False
        """Whether a sum, or the connection, failed since `form`."""
        self.summed_bytes = 0
        """Bytes of tensors that were summed, or tried to be."""

    def form(self, quorum: Quorum) -> None:
        """Connect to the ranks in this place in all members of a quorum, if that is a new set of them."""
        self._quorum = quorum
        if quorum.epoch == self._epoch and not self.has_failed:
            return
        self._group, self._epoch, self.has_failed = None, quorum.epoch, False
        if len(quorum.members) == 1:
            return
        # Counted as a sum: one that does not come to connect is behind the others, who wait for it.
        self._member.begin_sum()
        self._try(lambda: self._connect(quorum))

    def sum(self, tensor: Tensor) -> None:
        """Sum a tensor over the lane, in place, and wait; without effect once something has failed."""
        self._member.begin_sum()
        if self._quorum is None or len(self._quorum.members) == 1 or self.has_failed:
            return
        self.summed_bytes += tensor.numel() * tensor.element_size()
        self._try(lambda: self._wait(self._required.allreduce([tensor], dist.AllreduceOptions())))

    def abandon(self) -> None:
        """Fail, and end the connections, so that others in this lane fail, too, and do not wait for this rank."""
        self.has_failed = True
        group, self._group = self._group, None
        if group is not None and hasattr(group, "abort"):
            group.abort()

    def send(self, tensors: list[Tensor], replica: int) -> None:
        """Send tensors to this rank's place in another replica."""
        if self.has_failed:
            return
        index = self._index(replica)

        def send_all() -> None:
            for some in _few_at_once(tensors):
                copies = [_on_host(tensor) for tensor in some]
                for work in [self._required.send([copy], index, 0) for copy in copies]:
                    work.wait()

        self._try(send_all)

    def receive(self, tensors: list[Tensor], replica: int) -> None:
        """Receive what a replica `send`s, in the same order, in place."""
        if self.has_failed:
            return
        index = self._index(replica)

        def receive_all() -> None:
            for some in _few_at_once(tensors):
                received = [_in_host_memory(tensor) for tensor in some]
                for work in [self._required.recv([each], index, 0) for each in received]:
                    work.wait()
                for tensor, each in zip(some, received, strict=True):
                    if each is not tensor:
                        tensor.copy_(each)

        self._try(receive_all)

    def _wait(self, work: dist.Work) -> None:
        """Wait for a sum, or until the coordinator has lost a member without whom it never ends."""
        self._pending = pending = threading.Event()
        future = work.get_future()
        future.add_done_callback(lambda _: pending.set())
        pending.wait()
        self._pending = None
        if not future.done():
            self._given_up += [self._group, work]
            raise RuntimeError("a member is lost whose connection is still open")
        work.wait()

    def _note_loss(self, epoch: int) -> None:
        """Give up a sum that is still waited for a moment after a member was lost; most end by themselves at once."""
        pending = self._pending
        if pending is None or epoch != self._epoch:
            return
        timer = threading.Timer(_ENDS_BY_ITSELF_S, pending.set)
        timer.daemon = True
        timer.start()

    @property
    def _required(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("the lane is not connected")
        return self._group

    def _index(self, replica: int) -> int:
        assert self._quorum is not None
        return self._quorum.index(replica)

    def _connect(self, quorum: Quorum) -> None:
        # Kept: what C++ calls of it must not be collected as garbage.
        self._store = ChannelStore(EpochValues(self._member, quorum.epoch))
        store = dist.PrefixStore(f"lane-{self._rank}", self._store)
        index, size = quorum.index(self._member.place.replica), len(quorum.members)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=self._timeout_s)
        # By default it would listen on the address of the host's name, which may be another network.
        options._devices = [gloo.create_device(hostname=self._member.own_host)]
        with closed_afterwards():
            group = gloo(store, index, size, options)
        self._group = group

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except LostPeer:
            raise
        except RuntimeError as error:
            self.abandon()
            logger.debug("replica %d: %s", self._member.place.replica, error)


def _few_at_once(tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Yield a few tensors at a time: enough for the network, and no copy of a GPU's whole state on the host."""
    for first in range(0, len(tensors), _IN_FLIGHT):
        yield tensors[first : first + _IN_FLIGHT]


def _in_host_memory(tensor: Tensor) -> Tensor:
    """Return a tensor, or another in memory into which gloo can write what it is to hold."""
    is_direct = tensor.device.type == "cpu" and tensor.is_contiguous()
    return tensor if is_direct else torch.empty(tensor.shape, dtype=tensor.dtype)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu").contiguous()
