"""Limit on how long a rank waits for a store whose host is gone without a word, as when its network goes down."""

import os
import socket
import stat
import sys
from contextlib import suppress

from torch.distributed import TCPStore


def limit_silence(store: TCPStore, timeout_s: float) -> None:
    """Let every call of `store` fail within twice `timeout_s` once its host no longer answers; Linux only.

    The timeout of a TCPStore limits the wait for a key, not the wait for the server: `add`, and the end of a `get` that
    has timed out, last until TCP gives up, after some 15 minutes (torch 2.13).
    """
    if sys.platform != "linux":
        return
    # The kernel closes a connection whose data is not acknowledged for this long, and probes one that is silent.
    probe_s = max(1, round(timeout_s / 4))
    options = {
        socket.TCP_USER_TIMEOUT: max(1, round(timeout_s * 1e3)),
        socket.TCP_KEEPIDLE: probe_s,
        socket.TCP_KEEPINTVL: probe_s,
        socket.TCP_KEEPCNT: 3,
    }
    for one in connections_to(store.port):
        with one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in options.items():
                one.setsockopt(socket.IPPROTO_TCP, option, value)


def connections_to(port: int) -> list[socket.socket]:
    """Return this process's connections to a port, as sockets that share them."""
    found = []
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        # A descriptor may be closed meanwhile.
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            one = socket.socket(fileno=os.dup(descriptor))
            if _peer_port(one) == port:
                found.append(one)
            else:
                one.close()
    return found


def _peer_port(one: socket.socket) -> int | None:
    """Return the port that a TCP connection leads to; None for any other socket."""
    if one.type != socket.SOCK_STREAM or one.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        return int(one.getpeername()[1])
    except OSError:
        return None  # it listens
