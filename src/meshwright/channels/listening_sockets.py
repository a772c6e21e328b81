"""closed_afterwards: sockets that listen only while process groups are formed.

gloo needs its port until all ranks are connected, and listens on it as long as the group exists. A program that
connects then takes a file descriptor of the rank, and once it has none left gloo ends the process (torch 2.13: "accept:
Too many open files" out of a thread, SIGABRT). gloo offers no way to close the socket, so the kernel is asked to drop
what arrives.
"""

import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

_SO_ATTACH_FILTER: Final = 26
# The program of one instruction: return 0, of each packet no byte (linux/filter.h).
_DROP_ALL: Final = struct.pack("HBBI", 0x06, 0, 0, 0)


@contextmanager
def closed_afterwards() -> Iterator[None]:
    """Let sockets that begin to listen within the block, in any thread, accept no connection after it.

    Without effect where gloo connects ranks only when they first communicate (TORCH_GLOO_LAZY_INIT), and elsewhere than
    on Linux.
    """
    if sys.platform != "linux" or os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0"):
        yield
        return
    before = _listening()
    yield
    for target, descriptor in _listening().items():
        if target in before:
            continue
        with suppress(OSError), _socket(descriptor) as listener:
            program = ctypes.create_string_buffer(_DROP_ALL)
            listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))


def _listening() -> dict[str, int]:
    """Return the descriptors of the TCP sockets on which this process listens, by what distinguishes the sockets."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                with _socket(int(name)) as opened:
                    if opened.family in (socket.AF_INET, socket.AF_INET6) and opened.getsockopt(
                        socket.SOL_SOCKET, socket.SO_ACCEPTCONN
                    ):
                        found[target] = int(name)
    return found


def _socket(descriptor: int) -> socket.socket:
    return socket.socket(fileno=os.dup(descriptor))
