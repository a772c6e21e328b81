"""ChannelServer: accepts connections, and serves those that prove the job's token, each in a thread of its own.

Anything else that connects is closed within PROOF_TIMEOUT_S. However many there are, a client with the token is served:
where too many have proven nothing, the oldest of them is closed.
"""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from meshwright.channels.channel import ChannelClosed, ProvenChannel

_MOST_UNPROVEN: Final = 64
_PAUSE_S: Final = 0.05


class ChannelServer:
    """A listening socket on one address."""

    def __init__(self, host: str, token: str, serve: Callable[[ProvenChannel, dict[str, Any]], None]) -> None:
        """Listen on any free port of `host` only; raises OSError where that is no address of this machine.

        `serve` is called with each proven channel and what its client says of itself. It returns when it has ended.
        """
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._socket = socket.create_server(address[:2], family=family)
        self.address: tuple[str, int] = (host, self._socket.getsockname()[1])
        """Where it listens."""
        self._token, self._serve = token, serve
        self._is_closed = False
        self._lock = threading.Lock()
        self._unproven: list[socket.socket] = []
        """The oldest first."""

    def start(self) -> None:
        """Begin to accept."""
        threading.Thread(target=self._accept, name="channel-server", daemon=True).start()

    def close(self) -> None:
        """Accept nothing any more; channels stay open."""
        self._is_closed = True
        # Closing alone does not wake a thread that accepts.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._is_closed:
                    return
                # Gone before it was accepted; or this process has no descriptor left, for a moment.
                time.sleep(_PAUSE_S)
                continue
            with self._lock:
                self._unproven.append(connection)
                if len(self._unproven) > _MOST_UNPROVEN:
                    # Only shut down: its own thread closes it, so that no other connection has its number yet.
                    with suppress(OSError):
                        self._unproven.pop(0).shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._prove, args=(connection,), name="channel", daemon=True).start()

    def _prove(self, connection: socket.socket) -> None:
        try:
            channel, hello = ProvenChannel.accept(connection, self._token)
        except (ChannelClosed, OSError):
            connection.close()
            return
        finally:
            with self._lock, suppress(ValueError):
                self._unproven.remove(connection)
        # What it says of itself may lack what is needed, in a job of mixed versions.
        try:
            self._serve(channel, hello)
        except (ChannelClosed, KeyError, ValueError, TypeError):
            pass
        finally:
            channel.close()
