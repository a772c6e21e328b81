"""Peers of an asynchronous save: the writer processes of all ranks, over a store of their own.

Keys are SAVE/NUMBER for what rank 0 publishes and SAVE/NUMBER/RANK for what it collects, where NUMBER counts the calls.
"""

import json
import socket
from typing import Any

from meshwright.channels.key_value import KeyValueClient, KeyValueServer
from meshwright.checkpoint.saving import COLLECTS, PUBLISHES


class StorePeers:
    """One rank's writer process among those of all ranks, for one save."""

    def __init__(self, store: KeyValueClient | None, save: str, rank: int, num_ranks: int) -> None:
        assert store is not None or num_ranks == 1
        self._store, self._save = store, save
        self._num_calls = 0
        self.rank, self.num_ranks = rank, num_ranks

    def publish(self, value: Any) -> Any:
        """Return rank 0's `value` on every rank."""
        key = self._next_key()
        if self._store is None:
            return value
        if self.rank == 0:
            self._store.set(key, json.dumps(value))
            return value
        return json.loads(self._store.get(key))

    def collect(self, value: Any) -> list[Any]:
        """Return the values of all ranks on rank 0, an empty list elsewhere."""
        key = self._next_key()
        if self._store is None:
            return [value]
        if self.rank != 0:
            self._store.set(f"{key}/{self.rank}", json.dumps(value))
            return []
        values = [value]
        for rank in range(1, self.num_ranks):
            values.append(json.loads(self._store.take(f"{key}/{rank}")))
        return values

    def _next_key(self) -> str:
        self._num_calls += 1
        return f"{self._save}/{self._num_calls - 1}"


def serve_store(host: str, token: str) -> KeyValueServer:
    """Return a new store that this process serves, on the address of `host` only.

    Where `host`, by which others reach this machine, is the name of something in between, on that of its own host name.
    """
    try:
        return KeyValueServer(host, token)
    except OSError:
        return KeyValueServer(socket.gethostname(), token)


def report_failure(store: KeyValueClient, save: str, rank: int, reason: str) -> None:
    """Answer for a writer process that cannot, so that no other waits for it: the save fails with `reason`."""
    if rank == 0:
        for number in PUBLISHES:
            store.set(f"{save}/{number}", json.dumps({"error": reason}))
    else:
        for number in COLLECTS:
            store.set(f"{save}/{number}/{rank}", json.dumps({"error": reason}))
