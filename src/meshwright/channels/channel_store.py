"""ChannelStore: what a process group of torch's asks of a store, over a connection that needs the job's token."""

import base64
from datetime import timedelta
from typing import Protocol

from torch.distributed import Store


class SharedValues(Protocol):
    """Strings that processes of one job set and get."""

    def set(self, key: str, value: str) -> None:
        """Set a value."""

    def get(self, key: str) -> str:
        """Return a value once it is set; raises an error where it never will be."""


class ChannelStore(Store):
    """A store of torch's; keep a reference to it while its process group is made."""

    def __init__(self, values: SharedValues) -> None:
        super().__init__()
        self._values = values

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._values.set(key, base64.b64encode(data).decode())

    def get(self, key: str) -> bytes:
        """Return a value once it is set."""
        return base64.b64decode(self._values.get(key))

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set, once they are."""
        self.wait(keys)
        return True

    def wait(self, keys: list[str], limit: timedelta | None = None) -> None:
        """Return once all keys are set."""
        for key in keys:
            self._values.get(key)
