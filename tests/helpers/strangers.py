"""Strangers: connections to every port on which a run's processes listen, with what scanners and attackers send."""

import os
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_CONNECT_S = 0.2


def process_tree(pid: int) -> list[int]:
    """Return a process and all that it has started, directly or not."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def listening(pid: int) -> list[tuple[str, int]]:
    """Return the addresses on which a process accepts TCP connections; none where it has ended."""
    inodes = set()
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                inodes.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return [address for address, inode in _all_listening() if f"socket:[{inode}]" in inodes]


def _all_listening() -> Iterator[tuple[tuple[str, int], str]]:
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            host, port = fields[1].split(":")
            if fields[3] == "0A":
                words = struct.unpack(f">{len(host) // 8}I", bytes.fromhex(host))
                packed = struct.pack(f"<{len(words)}I", *words)
                yield (socket.inet_ntop(family, packed), int(port, 16)), fields[9]


def payloads(seed: int, *, is_connected: bool) -> list[bytes]:
    """Return what to send. What could pass for a peer of gloo's is left out until all ranks are connected."""
    noise = random.Random(seed)
    first = [
        b"",
        noise.randbytes(4096),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /replica/0/kill HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + noise.randbytes(500),
        b"\xff" * 64,
        b'{"challenge": "',
        b'{"challenge": "0", "proof": "0", "replica": 0, "rank": 0, "incarnation": "x", "num_ranks": 1}\n',
        b'{"kind": "leave"}\n' * 100,
        b"[" * 4000 + b"\n",
        b"\x80\x04\x95" + b"cos\nsystem\n(S'exit 1'\ntR.",
    ]
    second = [struct.pack("<q", number) + noise.randbytes(number * 20) for number in range(8)]
    return [*first, *second] if is_connected else first


class Strangers:
    """Connections from threads of this process; every second one is held open until the end."""

    def __init__(self, root_pid: int, num_connections: int) -> None:
        """Make `num_connections` to each port of the process tree, again and again."""
        self._root_pid, self._num_connections = root_pid, num_connections
        self._held: list[socket.socket] = []
        self.addresses: set[tuple[str, int]] = set()
        """All that any process has listened on."""
        self.answered: set[tuple[str, int]] = set()
        """Those that have accepted a connection."""
        self.num_accepted = 0
        self.are_connected = False
        """Whether all ranks have connected to each other."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Attack during the block."""
        done = threading.Event()
        thread = threading.Thread(target=self._attack_until, args=(done,))
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            for connection in self._held:
                connection.close()

    def _attack_until(self, done: threading.Event) -> None:
        seed = 0
        while not done.is_set():
            for pid in process_tree(self._root_pid):
                for address in listening(pid):
                    seed += 1
                    self.addresses.add(address)
                    self._attack(address, payloads(seed, is_connected=self.are_connected))
            time.sleep(0.05)

    def _attack(self, address: tuple[str, int], contents: list[bytes]) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        pending = {}
        for number in range(self._num_connections):
            connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            connection.connect_ex(address)
            pending[connection] = contents[number % len(contents)]
        _, ready, _ = select.select([], list(pending), [], _CONNECT_S)
        for number, (connection, content) in enumerate(pending.items()):
            if connection not in ready or connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                connection.close()
                continue
            self.answered.add(address)
            self.num_accepted += 1
            with suppress(OSError):
                connection.send(content)
            if number % 2 and len(self._held) < 400:
                self._held.append(connection)
            else:
                connection.close()
