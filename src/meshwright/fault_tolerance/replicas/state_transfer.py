"""StateTransfer: a state on its way from one replica to others, most of it while all compute a step.

Nothing of a state changes before the update that ends the step, and forward and backward read the model alone. So its
tensors are sent first, before what receives them computes its part; the optimizer's, two thirds of the bytes with
AdamW, follow meanwhile. What sends waits for neither until its own update.
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


_Parts = tuple[Sequence[Tensor], Sequence[Tensor]]


class SentState(Protocol):
    """What is sent: tensors in two parts, and the rest."""

    def parts(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return this rank's tensors of the model, and all others of the state, in one order in all replicas."""

    def metadata(self, step: int) -> dict[str, Any]:
        """Return the rest of the state, as JSON holds it."""


@dataclass
class _Passage:
    """How far the thread is that sends or receives."""

    has_model: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    """Each is set also where it has failed."""
    metadata: dict[str, Any] | None = None
    """Received with the model; None until that is whole."""
    is_complete: bool = False


class StateTransfer:
    """One rank's sending or receiving of a state, in one quorum after the other."""

    def __init__(self, member: Member, rank: int, timeout_s: float) -> None:
        self._member, self._name = member, f"state-{rank}"
        # Connections of its own: sums would wait in line behind the state.
        self._peers = PeerGroup(member, timeout_s)
        self._passage: _Passage | None = None
        self._is_receiving = False

    @property
    def is_under_way(self) -> bool:
        """Return whether this rank sends or receives, and has not come to the end of it."""
        return self._passage is not None

    @property
    def is_receiving(self) -> bool:
        """Return whether this rank receives, and has not come to the end of it."""
        return self._passage is not None and self._is_receiving

    def begin(self, quorum: Quorum, state: SentState) -> None:
        """Begin to send to, or to receive from, the ranks in this place in members of a quorum, if it says so."""
        own = self._member.place.replica
        source = quorum.sources.get(own, own)
        receivers = [replica for replica in sorted(quorum.sources) if quorum.sources[replica] == source]
        if not receivers:
            return
        self._passage = passage = _Passage()
        self._is_receiving = own in receivers
        self._peers.connect(self._name, quorum.epoch, (source, *receivers))
        if self._peers.has_failed:
            passage.has_model.set()
            passage.done.set()
            return
        group, parts = self._peers.connected, state.parts()
        if self._is_receiving:
            action = partial(_receive, group, parts, passage)
        else:
            action = partial(_send, group, parts, state.metadata(quorum.step), len(receivers))
        threading.Thread(target=self._pass_on, args=(action, passage), name=self._name, daemon=True).start()

    def receive_model(self) -> dict[str, Any] | None:
        """Wait for the model, and return the metadata that came with it; None where they did not come."""
        assert self._passage is not None
        self._wait_for(self._passage.has_model)
        return self._passage.metadata

    def finish(self) -> bool:
        """Wait for all, and return whether this rank has all of the state, as one that sends always does.

        Whether it has arrived elsewhere is not asked: a replica that lacks it is behind, and is sent it again.
        """
        passage = self._passage
        assert passage is not None
        self._wait_for(passage.done)
        if not passage.is_complete:
            self._peers.abandon()
        self._passage = None
        return passage.is_complete or not self._is_receiving

    def _wait_for(self, event: threading.Event) -> None:
        if not event.is_set():
            # What is sent is as large as it is: no reason to give either side up.
            self._member.enter(is_long=True)
            self._peers.wait_for(event)
            self._member.enter(is_long=False)

    def _pass_on(self, action: Callable[[], None], passage: _Passage) -> None:
        try:
            action()
            passage.is_complete = True
        except RuntimeError as error:
            logger.debug("replica %d: %s", self._member.place.replica, error)
        finally:
            passage.has_model.set()
            passage.done.set()


def _send(group: dist.ProcessGroup, parts: _Parts, metadata: dict[str, Any], num_receivers: int) -> None:
    data = torch.frombuffer(bytearray(json.dumps(metadata).encode()), dtype=torch.uint8)
    places = range(1, num_receivers + 1)
    for some in ([torch.tensor(len(data))], [data], *_few_at_once(parts[0]), *_few_at_once(parts[1])):
        copies = [tensor.detach().to("cpu").contiguous() for tensor in some]
        for work in [group.send([copy], place, 0) for place in places for copy in copies]:
            work.wait()


def _receive(group: dist.ProcessGroup, parts: _Parts, passage: _Passage) -> None:
    size = torch.tensor(0)
    group.recv([size], 0, 0).wait()
    data = torch.zeros(int(size), dtype=torch.uint8)
    group.recv([data], 0, 0).wait()
    of_model, others = parts
    _receive_tensors(group, of_model)
    passage.metadata = json.loads(data.numpy().tobytes())
    passage.has_model.set()
    _receive_tensors(group, others)


@torch.no_grad()
def _receive_tensors(group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> None:
    for some in _few_at_once(tensors):
        received = [_in_host_memory(tensor) for tensor in some]
        for work in [group.recv([each], 0, 0) for each in received]:
            work.wait()
        for tensor, each in zip(some, received, strict=True):
            if each is not tensor:
                tensor.copy_(each)


def _few_at_once(tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Yield a few tensors at a time: enough for the network, and no copy of a GPU's whole state on the host."""
    for first in range(0, len(tensors), _IN_FLIGHT):
        yield tensors[first : first + _IN_FLIGHT]


def _in_host_memory(tensor: Tensor) -> Tensor:
    """Return a tensor, or another in memory into which gloo can write what it is to hold."""
    is_direct = tensor.device.type == "cpu" and tensor.is_contiguous()
    return tensor if is_direct else torch.empty(tensor.shape, dtype=tensor.dtype)
