"""Which interface and address each kind of traffic of a run takes on this host, by the rules of who sends it."""

import fcntl
import ipaddress
import re
import resource
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshwright.spec.machine.node_report import NetworkPath

_CLASS: Final = Path("/sys/class/net")
_INFINIBAND: Final = Path("/sys/class/infiniband")
# ioctl requests of Linux for the address and the netmask of an interface.
_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B
_NCCL_LAST: Final = ("docker", "lo", "virbr")
"""Prefixes of interfaces that NCCL takes last (2.28)."""


@dataclass(frozen=True)
class Interface:
    """One address of an interface that is up."""

    name: str
    address: str
    network: str | None = None
    bytes_per_s: float | None = None


def interfaces() -> list[Interface]:
    """Return the IPv4 addresses of the interfaces of this host, in the kernel's order; [] but on Linux."""
    found: list[Interface] = []
    if not _CLASS.is_dir():
        return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                address, mask = (_asked(one, name, request) for request in (_SIOCGIFADDR, _SIOCGIFNETMASK))
                network = ipaddress.ip_network(f"{address}/{mask}", strict=False)
                found.append(Interface(name, address, str(network), _speed(name)))
    return found


def resolved_address(host: str) -> str | None:
    """Return the address that this host finds for a name, None where it finds none."""
    try:
        return _plain(str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]))
    except OSError:
        return None


def rendezvous_path(host: str, port: int, known: Sequence[Interface], *, served: str | None = None) -> NetworkPath:
    """Return the path to the store of the rendezvous: that of the kernel's route to `host`.

    `served` is the address at which other nodes find the store, on the node that serves it.
    """
    if served is not None and any(one.address == served for one in known):
        return _path("rendezvous", served, known, f"where the other nodes find {host}")
    why = f"the route to {host}"
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        # No packet is sent: the kernel chooses a route and the own address on it.
        with socket.socket(family, kind, protocol) as one:
            one.connect(target)
            return _path("rendezvous", _plain(one.getsockname()[0]), known, why)
    except OSError as error:
        return NetworkPath(name="rendezvous", address=None, interface=None, why=f"{why}: {error.strerror or error}")


def gloo_path(environment: Mapping[str, str], known: Sequence[Interface], *, named: str | None = None) -> NetworkPath:
    """Return the path of gloo: GLOO_SOCKET_IFNAME, else the first address of the host name that is one's own.

    `named` is the host name; None asks the system.
    """
    if names := environment.get("GLOO_SOCKET_IFNAME"):
        return _interface_path("gloo", names.split(",")[0], known, "GLOO_SOCKET_IFNAME")
    named = named or socket.gethostname()
    with suppress(OSError):
        for family, kind, protocol, _, target in socket.getaddrinfo(named, None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as one:
                one.bind(target)
                return _path("gloo", _plain(str(target[0])), known, f"the host name {named}")
    return _path("gloo", "127.0.0.1", known, f"the host name {named} is no address of this host, so loopback")


def nccl_path(environment: Mapping[str, str], known: Sequence[Interface]) -> NetworkPath:
    """Return the path of NCCL's sockets: NCCL_SOCKET_IFNAME, else its own order; InfiniBand's data goes elsewhere."""
    setting = environment.get("NCCL_SOCKET_IFNAME", "")
    adapters = environment.get("NCCL_IB_HCA")
    data = f"; data by InfiniBand, NCCL_IB_HCA={adapters}" if adapters else ""
    if setting:
        chosen = next((one for one in known if _matches(setting, one.name)), None)
        why = f"NCCL_SOCKET_IFNAME={setting}{data}"
        if chosen is None:
            return NetworkPath(name="NCCL", address=None, interface=None, why=f"no interface matches {why}")
        return _path("NCCL", chosen.address, known, why)
    ordered = sorted(known, key=_nccl_order)
    if not ordered:
        return NetworkPath(name="NCCL", address=None, interface=None, why="no interface has an IPv4 address")
    return _path("NCCL", ordered[0].address, known, f"NCCL's order of interfaces{data}")


def has_infiniband() -> bool:
    """Return whether this host has an InfiniBand or RoCE adapter."""
    return _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())


def max_locked_bytes() -> int | None:
    """Return how many bytes a process may lock in memory (ulimit -l); None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def paths_of(environment: Mapping[str, str], *, has_gpus: bool, served: str | None = None) -> list[NetworkPath]:
    """Return the paths of a rank that torchrun started: rendezvous, as `served`, gloo and, with GPUs, NCCL."""
    known = interfaces()
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    paths = [rendezvous_path(host, port, known, served=served), gloo_path(environment, known)]
    return [*paths, nccl_path(environment, known)] if has_gpus else paths


def _asked(one: socket.socket, name: str, request: int) -> str:
    answer = fcntl.ioctl(one.fileno(), request, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])


def _speed(name: str) -> float | None:
    """Return an interface's speed per direction in bytes/s; None where it does not say."""
    try:
        megabits = int((_CLASS / name / "speed").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return megabits * 1e6 / 8 if megabits > 0 else None


def _plain(address: str) -> str:
    return re.sub(r"^::ffff:", "", address.partition("%")[0])


def _path(name: str, address: str, known: Sequence[Interface], why: str) -> NetworkPath:
    own = next((one for one in known if one.address == address), None)
    if own is None:
        # 127.0.1.1 belongs to the loopback interface, which lists 127.0.0.1.
        interface = "lo" if address.startswith("127.") else None
        return NetworkPath(name=name, address=address, interface=interface, why=why)
    return NetworkPath(
        name=name, address=address, interface=own.name, network=own.network, bytes_per_s=own.bytes_per_s, why=why
    )


def _interface_path(name: str, interface: str, known: Sequence[Interface], variable: str) -> NetworkPath:
    own = next((one for one in known if one.name == interface), None)
    if own is None:
        why = f"{variable}={interface}, which is no interface of this host with an IPv4 address"
        return NetworkPath(name=name, address=None, interface=None, why=why)
    return _path(name, own.address, known, f"{variable}={interface}")


def _matches(setting: str, interface: str) -> bool:
    """Return whether NCCL_SOCKET_IFNAME allows an interface: prefixes, or names after "=", of which "^" excludes."""
    excludes, exact = "^" in setting[:2], "=" in setting[:2]
    names = setting.lstrip("^=").split(",")
    is_named = interface in names if exact else interface.startswith(tuple(names))
    return is_named != excludes


def _nccl_order(one: Interface) -> int:
    if one.name.startswith("ib"):
        return 0
    return 2 + _NCCL_LAST.index(prefix) if (prefix := _last_prefix(one.name)) else 1


def _last_prefix(name: str) -> str | None:
    return next((prefix for prefix in _NCCL_LAST if name.startswith(prefix)), None)
