"""ProvenChannel: JSON messages over a socket between two ends that proved to each other that they know the job's token.

    server                                              client
    challenge                                       ->
                                                    <-  challenge, proof = HMAC(token, "client" server's challenge)
    proof = HMAC(token, "server" client's challenge) ->

Then lines of JSON in both directions, each in an order of its own sender. Nothing that arrives is unpickled or run. A
line over MAX_LINE_BYTES, or one that is no JSON object, ends the connection, and nothing else.
"""

import hashlib
import hmac
import json
import secrets
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, Self

MAX_LINE_BYTES: Final = 1 << 20
PROOF_TIMEOUT_S: Final = 5.0
"""Time that a client has for its proof, all of it; an end that is slow in sending has no longer."""
_MAX_PROOF_BYTES: Final = 4096
"""Bytes of a line before the proof."""


class ChannelClosed(Exception):
    """The other end is gone, or was never one of this job."""


class ProvenChannel:
    """One end of a proven connection; `send` may be called from several threads, `receive` from one."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lines = connection.makefile("rb")
        self._lock = threading.Lock()

    @classmethod
    def accept(cls, connection: socket.socket, token: str) -> tuple[Self, dict[str, Any]]:
        """Return the server's end and what the client says of itself; raises ChannelClosed for a stranger."""
        connection.settimeout(PROOF_TIMEOUT_S)
        # The server answers several: a client that is frozen must not hold it up.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(PROOF_TIMEOUT_S), 0))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel, challenge = cls(connection), secrets.token_hex(16)
        # A timeout of the socket begins again with each byte that arrives.
        deadline = threading.Timer(PROOF_TIMEOUT_S, channel._shut_down)
        deadline.daemon = True
        deadline.start()
        try:
            channel.send({"challenge": challenge})
            hello = channel.receive(_MAX_PROOF_BYTES)
            if not _is_proof(token, "client", challenge, hello.pop("proof", None)):
                raise ChannelClosed("a connection without the job's token")
            channel.send({"proof": _proof(token, "server", str(hello.pop("challenge", "")))})
        finally:
            deadline.cancel()
        connection.settimeout(None)
        return channel, hello

    @classmethod
    def connect(cls, address: tuple[str, int], token: str, hello: Mapping[str, Any], timeout_s: float) -> Self:
        """Return the client's end; raises ChannelClosed where the server is not there or is another job's."""
        try:
            connection = socket.create_connection(address, timeout=timeout_s)
        except OSError as error:
            raise ChannelClosed(f"nothing listens at {address[0]}:{address[1]}: {error}") from error
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel, challenge = cls(connection), secrets.token_hex(16)
        try:
            theirs = str(channel.receive().get("challenge", ""))
            channel.send({**hello, "challenge": challenge, "proof": _proof(token, "client", theirs)})
            if not _is_proof(token, "server", challenge, channel.receive().get("proof")):
                raise ChannelClosed(f"{address[0]}:{address[1]} is not of this job")
        except ChannelClosed:
            channel.close()
            raise
        return channel

    def set_timeout(self, timeout_s: float | None) -> None:
        """Let `receive` wait so long at most; None waits without a limit."""
        self._socket.settimeout(timeout_s)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; raises ChannelClosed."""
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        try:
            with self._lock:
                self._socket.sendall(line)
        except (OSError, ValueError) as error:
            raise ChannelClosed(str(error)) from error

    @property
    def own_host(self) -> str:
        """Return the address by which this machine reaches the other end."""
        return str(self._socket.getsockname()[0])

    def receive(self, max_bytes: int = MAX_LINE_BYTES) -> dict[str, Any]:
        """Return the next message; raises ChannelClosed at the end, after the timeout, and for what is no message."""
        try:
            line = self._lines.readline(max_bytes)
            message = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError, RecursionError) as error:
            raise ChannelClosed(str(error)) from error
        if not isinstance(message, dict):
            raise ChannelClosed("the connection ended" if not line else "what came is no message")
        return message

    def close(self) -> None:
        """End the connection, also for a thread that receives."""
        self._shut_down()
        self._socket.close()
        self._lines.close()

    def _shut_down(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def new_token() -> str:
    """Return a token that no one else knows."""
    return secrets.token_hex(32)


def _proof(token: str, role: str, challenge: str) -> str:
    # With the role: otherwise an answer of one end would do as that of the other.
    return hmac.new(token.encode(), f"{role} {challenge}".encode(), hashlib.sha256).hexdigest()


def _is_proof(token: str, role: str, challenge: str, proof: Any) -> bool:
    return isinstance(proof, str) and hmac.compare_digest(_proof(token, role, challenge).encode(), proof.encode())
