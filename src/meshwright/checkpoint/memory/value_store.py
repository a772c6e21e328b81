"""ValueStore: what a process group asks of a store, over a connection that needs the job's token."""

import base64
from datetime import timedelta

from torch.distributed import Store

from meshwright.channels.key_value import KeyValueClient


class ValueStore(Store):
    """A store of torch's; keep a reference to it while its process group is made."""

    def __init__(self, client: KeyValueClient) -> None:
        super().__init__()
        self._client = client

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._client.set(key, base64.b64encode(data).decode())

    def get(self, key: str) -> bytes:
        """Return a value once it is set; raises TimeoutError."""
        return base64.b64decode(self._client.get(key))

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set, once they are."""
        self.wait(keys)
        return True

    def wait(self, keys: list[str], limit: timedelta | None = None) -> None:
        """Return once all keys are set."""
        for key in keys:
            self._client.get(key)
