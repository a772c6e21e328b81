"""StateTransfer: a state on its way from one replica to others, while the first computes a step.

Nothing of the state changes before the update that ends the step. So what sends it computes meanwhile, and what
receives it takes part in the step's sums with nothing of its own: afterwards it has the state before the step and the
step's gradients, and does the same update. No replica waits for the bytes, unless they take longer than the step.
"""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from meshwright.fault_tolerance.replicas.member import Member
from meshwright.fault_tolerance.replicas.peer_group import PeerGroup
from meshwright.log import logger
from meshwright.spec.run.quorum import Quorum

_IN_FLIGHT: Final = 8
"""Tensors of a state that are sent at once: one after the other took a quarter longer (1 GB, loopback, 2026-11-27)."""


class SentState(Protocol):
    """What is sent."""

    def tensors(self) -> list[Tensor]:
        """Return this rank's tensors of the state, in one order in all replicas."""

    def metadata(self, step: int) -> dict[str, Any]:
        """Return the rest of the state, as JSON holds it."""


@dataclass
class _Passage:
    """What a thread does, and has done."""

    done: threading.Event = field(default_factory=threading.Event)
    is_complete: bool = False
    rest: dict[str, Any] = field(default_factory=dict)
    """Received with the tensors."""


class StateTransfer:
    """One rank's part in it, of one quorum after the other."""

    def __init__(self, member: Member, rank: int, timeout_s: float) -> None:
        self._member, self._name = member, f"state-{rank}"
        # Connections of its own: sums would wait in line behind the state.
        self._peers = PeerGroup(member, timeout_s)
        self._passage: _Passage | None = None
        self.is_receiving = False
        """Whether this rank lacks the state, and what it computes is of no use."""

    @property
    def is_under_way(self) -> bool:
        """Return whether this rank sends or receives, and has not come to the end of it."""
        return self._passage is not None

    def begin(self, quorum: Quorum, state: SentState) -> None:
        """Begin to send to, or to receive from, the ranks in this place in members of a quorum, if it says so."""
        own = self._member.place.replica
        source = quorum.sources.get(own, own)
        receivers = [replica for replica in sorted(quorum.sources) if quorum.sources[replica] == source]
        self.is_receiving = own in receivers
        if not receivers:
            return
        self._passage = passage = _Passage()
        self._peers.connect(self._name, quorum.epoch, (source, *receivers))
        if self._peers.has_failed:
            passage.done.set()
            return
        group, tensors = self._peers.connected, state.tensors()
        if self.is_receiving:
            action = partial(_receive, group, tensors, passage)
        else:
            action = partial(_send, group, tensors, state.metadata(quorum.step), len(receivers))
        threading.Thread(target=self._pass_on, args=(action, passage), name=self._name, daemon=True).start()

    def finish(self) -> dict[str, Any] | None:
        """Wait, and return the rest of a state that was received; None where it was not, or was sent.

        Whether it has arrived elsewhere is not asked: a replica that lacks it is behind, and is sent it again.
        """
        passage = self._passage
        assert passage is not None
        if not passage.done.is_set():
            # What is sent is as large as it is: no reason to give either side up.
            self._member.enter(is_long=True)
            self._peers.wait_for(passage.done)
            self._member.enter(is_long=False)
        if not passage.is_complete:
            self._peers.abandon()
        was_receiving, self.is_receiving, self._passage = self.is_receiving, False, None
        return passage.rest if was_receiving and passage.is_complete else None

    def _pass_on(self, action: Callable[[], None], passage: _Passage) -> None:
        try:
            action()
            passage.is_complete = True
        except RuntimeError as error:
            logger.debug("replica %d: %s", self._member.place.replica, error)
        finally:
            passage.done.set()


def _send(group: dist.ProcessGroup, tensors: Sequence[Tensor], rest: dict[str, Any], num_receivers: int) -> None:
    data = torch.frombuffer(bytearray(json.dumps(rest).encode()), dtype=torch.uint8)
    places = range(1, num_receivers + 1)
    for some in ([torch.tensor(len(data))], [data], *_few_at_once(tensors)):
        copies = [tensor.detach().to("cpu").contiguous() for tensor in some]
        for work in [group.send([copy], place, 0) for place in places for copy in copies]:
            work.wait()


def _receive(group: dist.ProcessGroup, tensors: Sequence[Tensor], passage: _Passage) -> None:
    size = torch.tensor(0)
    group.recv([size], 0, 0).wait()
    data = torch.zeros(int(size), dtype=torch.uint8)
    group.recv([data], 0, 0).wait()
    passage.rest = json.loads(data.numpy().tobytes())
    for some in _few_at_once(tensors):
        received = [_in_host_memory(tensor) for tensor in some]
        for work in [group.recv([each], 0, 0) for each in received]:
            work.wait()
        for tensor, each in zip(some, received, strict=True):
            if each is not tensor:
                # Not a change that autograd hears of: what a backward computes of it meanwhile is of no use.
                tensor.data.copy_(each)


def _few_at_once(tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Yield a few tensors at a time: enough for the network, and no copy of a GPU's whole state on the host."""
    for first in range(0, len(tensors), _IN_FLIGHT):
        yield tensors[first : first + _IN_FLIGHT]


def _in_host_memory(tensor: Tensor) -> Tensor:
    """Return a tensor, or another in memory into which gloo can write what it is to hold."""
    is_direct = tensor.device.type == "cpu" and tensor.is_contiguous()
    return tensor if is_direct else torch.empty(tensor.shape, dtype=tensor.dtype)
