"""PeerGroup: ranks in one place of several replicas, connected by gloo; failures are remembered, and not raised.

Through gloo, also for tensors on GPUs: a lost peer is an error there, and not the end of the process.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

from torch import distributed as dist

from meshwright.channels.channel_store import ChannelStore
from meshwright.channels.listening_sockets import closed_afterwards
from meshwright.errors import LostPeer
from meshwright.fault_tolerance.replicas.member import EpochValues, Member
from meshwright.log import logger

_ENDS_BY_ITSELF_S: Final = 1.0
"""In which what is under way fails whose peer has closed its connection. That of a frozen host, or across a cut, does
not.
"""


class PeerGroup:
    """This rank's connections to peers, made again with each set of them."""

    def __init__(self, member: Member, timeout_s: float) -> None:
        self._member, self._timeout_s = member, timeout_s
        self._group: dist.ProcessGroup | None = None
        self._store: ChannelStore | None = None
        self._epoch = 0
        self._pending: threading.Event | None = None
        """Set where what this rank waits for is done, or given up."""
        self._has_lost_member = False
        """Whether the coordinator has lost one since they were connected."""
        self._given_up: list[tuple[dist.ProcessGroup | None, dist.Work]] = []
        """Collectives that have not ended, and may never, with their groups: freeing them would wait for it."""
        self.has_failed = False
        """Whether something failed since they were connected."""
        member.on_loss.append(self._note_loss)

    @property
    def connected(self) -> dist.ProcessGroup:
        """Return the group; raises RuntimeError without a connection."""
        if self._group is None:
            raise RuntimeError("peers are not connected")
        return self._group

    def connect(self, name: str, epoch: int, replicas: Sequence[int]) -> None:
        """Connect to the ranks that call this with the same `name` and `replicas`, whose places are those in there."""
        self._group, self._epoch, self.has_failed, self._has_lost_member = None, epoch, False, False
        self._given_up = [(group, work) for group, work in self._given_up if not work.is_completed()]
        if len(replicas) > 1:
            self.attempt(lambda: self._connect(name, replicas))

    def attempt(self, action: Callable[[], object]) -> None:
        """Do something that fails where a peer is lost, and remember whether it has; raises LostPeer for all others."""
        try:
            action()
        except LostPeer:
            raise
        except RuntimeError as error:
            self.abandon()
            logger.debug("replica %d: %s", self._member.place.replica, error)

    def abandon(self) -> None:
        """Fail, and end the connections, so that peers fail, too, and do not wait for this rank."""
        self.has_failed = True
        group, self._group = self._group, None
        if group is not None and hasattr(group, "abort"):
            group.abort()

    def start(self, collective: Callable[[dist.ProcessGroup], dist.Work]) -> dist.Work | None:
        """Return a collective that was started; None where that failed, which is remembered."""
        works: list[dist.Work] = []
        self.attempt(lambda: works.append(collective(self.connected)))
        return works[0] if works else None

    def wait(self, work: dist.Work) -> None:
        """Wait for a collective; raises RuntimeError where it, or another one before, fails, or a member is lost
        without whom it never ends.
        """
        if self.has_failed:
            self._given_up.append((self._group, work))
            raise RuntimeError("another collective of these peers has failed")
        done = threading.Event()
        future = work.get_future()
        future.add_done_callback(lambda _: done.set())
        self.wait_for(done)
        if not future.done():
            self._given_up.append((self._group, work))
            raise RuntimeError("a member is lost whose connection is still open")
        work.wait()

    def wait_for(self, done: threading.Event) -> None:
        """Wait for an event, which is also set where a member is lost without whom it may never come."""
        self._pending = done
        if self._has_lost_member:
            _set_soon(done)
        done.wait()
        self._pending = None

    def _note_loss(self, epoch: int) -> None:
        """Give up what is still waited for a moment after a member was lost; most ends by itself at once."""
        if epoch != self._epoch:
            return
        # Also for what is waited for later: across a cut, nothing else ends it before the timeout.
        self._has_lost_member = True
        if (pending := self._pending) is not None:
            _set_soon(pending)

    def _connect(self, name: str, replicas: Sequence[int]) -> None:
        # Kept: what C++ calls of it must not be collected as garbage.
        self._store = ChannelStore(EpochValues(self._member, self._epoch))
        store = dist.PrefixStore(name, self._store)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=self._timeout_s)
        # By default it would listen on the address of the host's name, which may be another network.
        options._devices = [gloo.create_device(hostname=self._member.own_host)]
        with closed_afterwards():
            group = gloo(store, replicas.index(self._member.place.replica), len(replicas), options)
        self._group = group


def _set_soon(event: threading.Event) -> None:
    timer = threading.Timer(_ENDS_BY_ITSELF_S, event.set)
    timer.daemon = True
    timer.start()
