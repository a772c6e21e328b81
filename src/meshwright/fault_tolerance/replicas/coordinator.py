"""Coordinator: where the ranks of all replicas say that they are ready, and are answered with quorums.

It runs in the launcher, which outlives them, and listens on one port, on which only ends that know the job's token are
listened to. A rank that ends closes its connection: so a killed replica is known at once, not after a heartbeat. One
that hangs or is frozen keeps it, and is given up after the limit (silence.py), killed and replaced.
"""

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self

from pydantic import ValidationError

from meshwright.channels.channel import ChannelClosed, ProvenChannel
from meshwright.channels.channel_server import ChannelServer
from meshwright.fault_tolerance.replicas.roll_call import RollCall
from meshwright.fault_tolerance.replicas.silence import GivenUp, Pulse, Silence
from meshwright.log import logger
from meshwright.spec.run.quorum import Quorum, Readiness

_TICK_S: Final = 0.1
_TICKS_OF_SIGN: Final = 10
"""Ticks after which ranks hear that the coordinator is still there, and answer that they are."""
_MOST_AWAY_S: Final = 1.0
"""Between two looks, after which this process was itself frozen, or had no core, and has not read what ranks sent."""


@dataclass
class _Replica:
    """A replica that is connected."""

    incarnation: str
    num_ranks: int
    channels: dict[int, ProvenChannel] = field(default_factory=dict)
    ready: dict[int, Readiness] = field(default_factory=dict)
    """By rank."""
    pulse: Pulse = field(default_factory=Pulse)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to all of its ranks."""
        for channel in list(self.channels.values()):
            # A rank that is gone is noticed where it is listened to.
            with suppress(ChannelClosed):
                channel.send(message)

    @property
    def readiness(self) -> Readiness | None:
        """Return what its ranks say together, None until all do."""
        if len(self.ready) < self.num_ranks:
            return None
        all_ready = list(self.ready.values())
        return all_ready[0].replace(
            stop=max(one.stop for one in all_ready), has_failed=any(one.has_failed for one in all_ready)
        )


class _Asked(NamedTuple):
    """A rank that waits for a value."""

    channel: ProvenChannel
    key: str
    epoch: int
    deadline_s: float
    """On the clock of time.monotonic."""


class Coordinator:
    """A server in threads of its own; use it in a `with`."""

    def __init__(self, address: str, token: str, roll_call: RollCall, silence: Silence, patience_s: float) -> None:
        """Wait `patience_s` for replicas that are missing."""
        self._roll_call, self._silence, self._patience_s = roll_call, silence, patience_s
        self._server = ChannelServer(address, token, self._serve)
        self.address = self._server.address
        """Where it listens."""
        self.give_up: Callable[[Mapping[int, GivenUp]], None] = _ignore
        """Called with the replicas that hold up the others, or do not answer: kill them."""
        self._lock = threading.RLock()
        self._replicas: dict[int, _Replica] = {}
        self._left: set[int] = set()
        self._values: dict[str, str] = {}
        """By which the members of an epoch find each other."""
        self._asked: list[_Asked] = []
        self._epoch = self._broken_epoch = -1
        self._asked_s: float | None = None
        self._decided_s: float | None = None
        self._is_closed = False

    def __enter__(self) -> Self:
        self._server.start()
        threading.Thread(target=self._watch, name="coordinator-watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        self._server.close()
        with self._lock:
            for replica in list(self._replicas):
                self._remove(replica)

    def expect_fewer(self) -> None:
        """Wait for one replica less before the first step: it is lost for good."""
        with self._lock:
            self._roll_call.num_expected -= 1
            self._decide()

    @property
    def quorum(self) -> Quorum | None:
        """Return the newest quorum."""
        return self._roll_call.last

    def _serve(self, channel: ProvenChannel, hello: dict[str, Any]) -> None:
        """Listen to one rank until it is gone; whatever it sends ends no more than its connection."""
        number, rank = int(hello["replica"]), int(hello["rank"])
        incarnation, num_ranks = str(hello["incarnation"]), int(hello["num_ranks"])
        with self._lock:
            replica = self._joined(number, incarnation, num_ranks)
            replica.channels[rank] = channel
            replica.pulse.hear(rank)
        try:
            while True:
                self._take(number, replica, rank, channel, channel.receive())
        except (ChannelClosed, ValidationError, KeyError, TypeError, ValueError) as error:
            if not isinstance(error, ChannelClosed):
                logger.warning("replica %d, rank %d: a message that no rank sends: %s", number, rank, error)
        finally:
            channel.close()
            with self._lock:
                if self._replicas.get(number) is replica:
                    self._remove(number)

    def _joined(self, number: int, incarnation: str, num_ranks: int) -> _Replica:
        known = self._replicas.get(number)
        if known is not None and known.incarnation == incarnation:
            return known
        if known is not None:
            self._remove(number)
        self._replicas[number] = replica = _Replica(incarnation, num_ranks)
        if self._roll_call.last is not None:
            taking_part = self._replicas.keys() & set(self._roll_call.last.members)
            if len(taking_part - {number}) >= self._roll_call.most:
                logger.info("replica %d has come, and waits in reserve: %d take part", number, len(taking_part))
            else:
                logger.info("replica %d has come, and takes part once it is ready", number)
        self._left.discard(number)
        return replica

    def _remove(self, number: int) -> None:
        """Count a replica as gone, and let those that form connections with it know; call it under the lock."""
        replica = self._replicas.pop(number)
        last = self._roll_call.last
        if last is not None and number in last.members:
            self._broken_epoch = last.epoch
            for member in set(last.members) & self._replicas.keys():
                self._replicas[member].send({"lost_epoch": last.epoch})
        for channel in replica.channels.values():
            channel.close()
        self._decide()
        self._answer_asked()

    def _take(self, number: int, replica: _Replica, rank: int, channel: ProvenChannel, message: dict[str, Any]) -> None:
        """Do what one message asks for."""
        match message.pop("kind", None):
            case "beat":
                replica.pulse.begin_sum(rank)
            case "phase":
                replica.pulse.enter(rank, is_long=bool(message["is_long"]))
            case "here":
                replica.pulse.hear(rank)
            case "ready":
                with self._lock:
                    replica.pulse.begin_sum(rank)
                    replica.ready[rank] = Readiness.from_dict(message["ready"])
                    self._asked_s = self._asked_s or time.monotonic()
                    self._decide()
            case "leave":
                with self._lock:
                    self._left.add(number)
            case "set":
                with self._lock:
                    self._values[str(message["key"])] = str(message["value"])
                    self._answer_asked()
            case "get":
                with self._lock:
                    deadline_s = time.monotonic() + self._patience_s
                    self._asked.append(_Asked(channel, str(message["key"]), int(message["epoch"]), deadline_s))
                    self._answer_asked()
            case other:
                raise ValueError(f"kind {other!r}")

    def _answer_asked(self) -> None:
        """Answer those whose value is set, or never will be: a replica of its epoch is lost, or it took too long.

        Call it under the lock. Each who asks is answered later, not waited for here: its rank must be heard meanwhile.
        """
        now_s, waiting = time.monotonic(), []
        for asked in self._asked:
            is_hopeless = asked.epoch <= self._broken_epoch or now_s > asked.deadline_s
            value = None if is_hopeless else self._values.get(asked.key)
            if value is None and not is_hopeless:
                waiting.append(asked)
                continue
            with suppress(ChannelClosed):
                asked.channel.send({"value": value})
        self._asked = waiting

    def _decide(self) -> None:
        """Let go those that stop, and answer the others if they make a quorum; call it under the lock."""
        for number, replica in self._replicas.items():
            said = replica.readiness
            if said is not None and said.stop:
                replica.ready = {}
                self._left.add(number)
                replica.send(
                    {"quorum": self._roll_call.let_go(number, said, self._replicas.keys() - self._left).to_json()}
                )
        ready = {number: said for number, one in self._replicas.items() if (said := one.readiness) is not None}
        is_late = self._asked_s is not None and time.monotonic() - self._asked_s > self._patience_s
        previous = self._roll_call.last
        live = {number: one.incarnation for number, one in self._replicas.items() if number not in self._left}
        quorum = self._roll_call.decide(ready, live, is_late=is_late)
        if quorum is None:
            return
        now_s = time.monotonic()
        has_sent_state = previous is not None and bool(previous.sources)
        if self._decided_s is not None and not has_sent_state and not quorum.sources and not quorum.restores:
            self._silence.add_step(now_s - self._decided_s)
        self._decided_s, self._asked_s = now_s, None
        if quorum.epoch != self._epoch:
            # Its members write only after this answer.
            self._epoch = quorum.epoch
            self._values.clear()
        answer = {"quorum": quorum.to_json()}
        for number in quorum.members:
            replica = self._replicas[number]
            replica.ready = {}
            replica.pulse.restart_count()
            replica.send(answer)

    def _watch(self) -> None:
        looked_s = time.monotonic()
        for tick in itertools.count(1):
            time.sleep(_TICK_S)
            if self._is_closed:
                return
            with self._lock:
                self._answer_asked()
                self._decide()
                was_away = time.monotonic() - looked_s > _MOST_AWAY_S
                looked_s = time.monotonic()
                for replica in self._replicas.values():
                    if was_away:
                        replica.pulse.forgive()
                    if tick % _TICKS_OF_SIGN == 0:
                        replica.send({"are_you_there": True})
                culprits = self._culprits()
                for number in culprits:
                    self._remove(number)
            if culprits:
                self.give_up(culprits)

    def _culprits(self) -> dict[int, GivenUp]:
        """Return the replicas to give up, and why; call it under the lock."""
        last, now_s = self._roll_call.last, time.monotonic()
        members = () if last is None else last.members
        ready = {number: one for number, one in self._replicas.items() if number in members and one.readiness}
        pulses = {number: one.pulse for number, one in self._replicas.items()}
        in_quorum = {number: pulse for number, pulse in pulses.items() if number in members}
        others = {number: pulse for number, pulse in pulses.items() if number not in members}
        return self._silence.culprits(in_quorum, ready, now_s) | self._silence.frozen(others, now_s)


def _ignore(given_up: Mapping[int, GivenUp]) -> None:
    """Do nothing."""
