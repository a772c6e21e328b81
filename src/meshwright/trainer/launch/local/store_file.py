"""StoreFile: the store by which local ranks find each other, a file without a name that they inherit.

torch's TCPStore listens on all interfaces and obeys all that connect. A file that has no name needs no port, no token
and no cleaning up: only processes that received its descriptor from their launcher can open it.
"""

import os
from collections.abc import Mapping, MutableMapping
from typing import Final

_VARIABLE: Final = "MESHWRIGHT_STORE"
"""Path of the file in the process that inherited it."""
_INTERFACES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class StoreFile:
    """The file, in the launcher; `descriptor` is what ranks are sent."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("meshwright-store")

    def close(self) -> None:
        """Close it here; it ends with the last rank that has it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


def variables_of_store(descriptor: int) -> dict[str, str]:
    """Return the variable by which `take_store_path` finds the file that this process received as `descriptor`."""
    # Each open() of this path is a file of its own, whose lock excludes other ranks.
    return {_VARIABLE: f"/proc/self/fd/{descriptor}"}


def take_store_path(environment: MutableMapping[str, str]) -> str | None:
    """Return the path of the store that this rank's launcher sent, None where ranks join otherwise.

    It is removed from `environment`, which processes that this rank starts inherit, unlike the file.
    """
    return environment.pop(_VARIABLE, None)


def loopback_interfaces(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep gloo and NCCL of local ranks on the loopback interface; the user's values win."""
    return {name: "lo" for name in _INTERFACES if name not in environment}
