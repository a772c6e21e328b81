"""Member: a rank's connection to the coordinator, and values by which ranks of a new quorum find each other."""

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from meshwright.channels.channel import ChannelClosed, ProvenChannel
from meshwright.errors import LostPeer
from meshwright.spec.run.quorum import Quorum, Readiness, ReplicaPlace

_LOOK_S = 1.0
_MARGIN_S = 5.0
"""By which the coordinator's own limits come first."""


class Member:
    """One rank among those that the coordinator knows."""

    def __init__(self, place: ReplicaPlace, rank: int, num_ranks: int, timeout_s: float) -> None:
        """Raises LostPeer where no coordinator of this job is."""
        self.place = place
        hello = {"replica": place.replica, "incarnation": place.incarnation, "rank": rank, "num_ranks": num_ranks}
        try:
            self._channel = ProvenChannel.connect((place.host, place.port), place.token, hello, timeout_s)
        except ChannelClosed as error:
            raise LostPeer(f"replica {place.replica}, rank {rank}: {error}") from error
        self._limit_s, self._heard_s = timeout_s + _MARGIN_S, time.monotonic()
        self._channel.set_timeout(None)
        self.on_loss: list[Callable[[int], None]] = []
        """Called in another thread with the epoch of a quorum of which a member is lost."""
        self._answers: SimpleQueue[dict[str, Any] | ChannelClosed] = SimpleQueue()
        self.own_host = self._channel.own_host
        """The address by which this machine reaches the coordinator: that of the network that connects replicas."""
        threading.Thread(target=self._listen, name="replica-member", daemon=True).start()

    def begin_sum(self) -> None:
        """Say that this rank begins a sum over replicas, or to connect to them."""
        self._send({"kind": "beat"})

    def enter(self, *, is_long: bool) -> None:
        """Say that this rank enters a phase that takes longer than a step, or has left one."""
        self._send({"kind": "phase", "is_long": is_long})

    def ready(self, step: int | None, *, stop: int = 0, has_failed: bool = False) -> Quorum:
        """Return the quorum of the next step once all have said that they are ready; a collective of all replicas."""
        said = Readiness(
            replica=self.place.replica,
            incarnation=self.place.incarnation,
            step=step,
            stop=stop,
            has_failed=has_failed,
        )
        self._send({"kind": "ready", "ready": said.to_dict()})
        return Quorum.from_json(self._answer()["quorum"])

    def leave(self) -> None:
        """Say that this rank ends in good order."""
        self._send({"kind": "leave"})

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def set(self, key: str, value: str) -> None:
        """Let other ranks `get` a value."""
        self._send({"kind": "set", "key": key, "value": value})

    def get(self, key: str, epoch: int) -> str:
        """Return a value once it is set; raises RuntimeError where a replica of its epoch is lost, or never sets it."""
        self._send({"kind": "get", "key": key, "epoch": epoch})
        value = self._answer()["value"]
        if value is None:
            raise RuntimeError(f"a replica of quorum {epoch} is lost")
        return str(value)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._channel.send(message)
        except ChannelClosed as error:
            raise self._lost(error) from error

    def _answer(self) -> dict[str, Any]:
        asked_s = time.monotonic()
        while True:
            try:
                answer = self._answers.get(timeout=_LOOK_S)
                break
            except Empty:
                if time.monotonic() - max(asked_s, self._heard_s) > self._limit_s:
                    raise self._lost(ChannelClosed(f"no sign of it for {self._limit_s:.0f} s")) from None
        if isinstance(answer, ChannelClosed):
            self._answers.put(answer)
            raise self._lost(answer) from answer
        return answer

    def _listen(self) -> None:
        """Take what the coordinator sends, in a thread of its own: the loop may be inside of a sum that never ends."""
        try:
            while True:
                message = self._channel.receive()
                self._heard_s = time.monotonic()
                if "are_you_there" in message:
                    self._channel.send({"kind": "here"})
                elif "lost_epoch" in message:
                    for note in self.on_loss:
                        note(int(message["lost_epoch"]))
                else:
                    self._answers.put(message)
        except ChannelClosed as error:
            self._answers.put(error)

    def _lost(self, error: Exception) -> LostPeer:
        place = self.place
        return LostPeer(
            f"replica {place.replica} lost the coordinator at {place.host}:{place.port}, or was given up by it: {error}"
        )


class EpochValues:
    """The values of one epoch, over a member's connection."""

    def __init__(self, member: Member, epoch: int) -> None:
        self._member, self._epoch = member, epoch

    def set(self, key: str, value: str) -> None:
        """Set a value of this epoch."""
        self._member.set(f"{self._epoch}/{key}", value)

    def get(self, key: str) -> str:
        """Return a value of this epoch once it is set; raises RuntimeError where it never will be."""
        return self._member.get(f"{self._epoch}/{key}", self._epoch)
