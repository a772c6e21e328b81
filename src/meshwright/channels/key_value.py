"""KeyValueServer and KeyValueClient: a store of strings over channels, for processes of one job."""

import threading
from typing import Any, Final

from meshwright.channels.channel import ChannelClosed, ProvenChannel
from meshwright.channels.channel_server import ChannelServer

_MAX_VALUE_BYTES: Final = 1 << 30
"""Bytes of a message after the proof; the index of a rank's shards may take megabytes."""


class StoreLost(ConnectionError, TimeoutError):
    """The process that serves the values, or one that was to set a value, is gone."""


class KeyValueServer:
    """The values, in this process; it listens until `close`."""

    def __init__(self, host: str, token: str) -> None:
        """Listen on an address of this machine; raises OSError for any other."""
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()
        self._server = ChannelServer(host, token, self._serve)
        self.address = self._server.address
        """Where it listens."""
        self._server.start()

    def close(self) -> None:
        """Accept no more clients; those that are connected are served while this process runs."""
        self._server.close()

    def _serve(self, channel: ProvenChannel, hello: dict[str, Any]) -> None:
        while True:
            message = channel.receive(_MAX_VALUE_BYTES)
            key = str(message["key"])
            match message["kind"]:
                case "set":
                    with self._changed:
                        self._values[key] = str(message["value"])
                        self._changed.notify_all()
                case "take":
                    channel.send({"value": self._wait_for(key, float(message["timeout_s"]), is_last=True)})
                case "get":
                    channel.send({"value": self._wait_for(key, float(message["timeout_s"]), is_last=False)})
                case other:
                    raise ValueError(f"kind {other!r}")

    def _wait_for(self, key: str, timeout_s: float, *, is_last: bool) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, timeout_s)
            return self._values.pop(key, None) if is_last else self._values.get(key)


class KeyValueClient:
    """A connection to the values, for one thread at a time; a lost server raises StoreLost."""

    def __init__(self, address: tuple[str, int], token: str, timeout_s: float) -> None:
        """Wait `timeout_s` for a value; raises StoreLost where no server of this job listens."""
        self._timeout_s = timeout_s
        try:
            self._channel = ProvenChannel.connect(address, token, {}, timeout_s)
        except ChannelClosed as error:
            raise StoreLost(str(error)) from error
        # The server is the one that gives up waiting.
        self._channel.set_timeout(None)

    def set(self, key: str, value: str) -> None:
        """Set a value."""
        self._send({"kind": "set", "key": key, "value": value})

    def get(self, key: str) -> str:
        """Return a value once it is set; raises StoreLost after the timeout."""
        return self._ask("get", key)

    def take(self, key: str) -> str:
        """Return a value once it is set, and remove it; raises StoreLost after the timeout."""
        return self._ask("take", key)

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def _ask(self, kind: str, key: str) -> str:
        self._send({"kind": kind, "key": key, "timeout_s": self._timeout_s})
        try:
            value = self._channel.receive(_MAX_VALUE_BYTES)["value"]
        except ChannelClosed as error:
            raise StoreLost(f"the store of the job is gone: {error}") from error
        if value is None:
            raise StoreLost(f"the store of the job had no {key} within {self._timeout_s:g} s")
        return str(value)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._channel.send(message)
        except ChannelClosed as error:
            raise StoreLost(f"the store of the job is gone: {error}") from error
