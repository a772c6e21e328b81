"""Latency and bandwidth of one TCP connection between two addresses."""

import os
import socket
import statistics
import struct
import time
from typing import Final

_NUM_ROUND_TRIPS: Final = 100
_SEND_S: Final = 0.5
"""Seconds for which each direction sends."""
_CHUNK_BYTES: Final = 2**17
_BUFFER_BYTES: Final = 2**20
"""What the kernel holds of a sender: at 1 MB/s it takes a second to leave."""
_SENT: Final = struct.Struct("!Qd")


def listen(address: str) -> socket.socket:
    """Return a socket that listens on any free port of one of this host's addresses."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


def serve_test(listener: socket.socket, timeout_s: float) -> None:
    """Answer one test from another node; raises TimeoutError where none connects within `timeout_s`."""
    listener.settimeout(timeout_s)
    connection, _ = listener.accept()
    with connection:
        _prepare(connection, timeout_s)
        for _ in range(_NUM_ROUND_TRIPS):
            connection.sendall(_exactly(connection, 1))
        connection.sendall(_SENT.pack(*_receive(connection)))
        _send(connection)
        # The other node closes when it has read all.
        connection.recv(1)


def run_test(own: str, address: str, port: int, timeout_s: float) -> tuple[float, float]:
    """Return the latency in s and the bytes/s of a connection from `own` to a node that serves a test.

    The latency is half of the median round trip, the bandwidth that of the slower direction, as its receiver saw it.
    Raises OSError where there is no connection.
    """
    with socket.create_connection((address, port), timeout=timeout_s, source_address=(own, 0)) as connection:
        _prepare(connection, timeout_s)
        trips = []
        for _ in range(_NUM_ROUND_TRIPS):
            started_s = time.perf_counter()
            connection.sendall(b"x")
            _exactly(connection, 1)
            trips.append(time.perf_counter() - started_s)
        _send(connection)
        there = _SENT.unpack(_exactly(connection, _SENT.size))
        back = _receive(connection)
        rates = [num_bytes / seconds for num_bytes, seconds in (there, back)]
        return statistics.median(trips) / 2, min(rates)


def _prepare(connection: socket.socket, timeout_s: float) -> None:
    connection.settimeout(timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)


def _send(connection: socket.socket) -> None:
    """Send for _SEND_S, each chunk after a byte that says that one comes."""
    # Random: a link may compress.
    chunk = os.urandom(_CHUNK_BYTES)
    deadline_s = time.perf_counter() + _SEND_S
    while time.perf_counter() < deadline_s:
        connection.sendall(b"\1")
        connection.sendall(chunk)
    connection.sendall(b"\0")


def _receive(connection: socket.socket) -> tuple[int, float]:
    """Return the bytes that a sender sent and the seconds from the first to the last."""
    buffer, num_bytes, started_s = bytearray(_CHUNK_BYTES), 0, 0.0
    while _exactly(connection, 1) == b"\1":
        started_s = started_s or time.perf_counter()
        view, read = memoryview(buffer), 0
        while read < len(buffer):
            count = connection.recv_into(view[read:])
            if count == 0:
                raise ConnectionResetError("the other node closed the connection")
            read += count
        num_bytes += read
    return num_bytes, max(time.perf_counter() - started_s, 1e-9)


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        part = connection.recv(num_bytes - len(found))
        if not part:
            raise ConnectionResetError("the other node closed the connection")
        found += part
    return found
