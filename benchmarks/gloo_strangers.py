"""What gloo does when programs that are no ranks connect to its ports: reproductions for docs/security.md.

    python -m benchmarks.gloo_strangers

Two ranks on loopback, and a program that finds their ports as any user of the machine can.

    held     it holds 200 connections; each rank may have 128 files open
    closed   the same, with ports closed once the group is formed, as in our runs
    number   it sends small numbers while the group is formed, as a peer does, and nothing else; tried up to 8 times,
             since which of two ranks accepts the other depends on their ports
"""

import multiprocessing
import os
import resource
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from meshwright.channels.listening_sockets import closed_afterwards

_TIMEOUT_S = 8.0
_MAX_FILES, _NUM_CONNECTIONS = 128, 200


class _SlowStore(dist.Store):
    """A store whose answers take a while, as between hosts: time to connect while the group is formed."""

    def __init__(self, path: str, delay_s: float) -> None:
        super().__init__()
        self._store, self._delay_s = dist.FileStore(path), delay_s

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(key)
        time.sleep(self._delay_s)
        return value

    def wait(self, keys: list[str], limit: timedelta | None = None) -> None:
        self._store.wait(keys)

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))


def _rank(rank: int, path: str, how: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_FILES, _MAX_FILES))
    store = _SlowStore(path, 1.5 if how == "number" and rank == 1 else 0.0)
    gloo: Any = dist.ProcessGroupGloo
    try:
        with closed_afterwards() if how == "closed" else nullcontext():
            group = gloo(store, rank, 2, timedelta(seconds=_TIMEOUT_S))
        for _ in range(40):
            group.allreduce([torch.ones(4)], dist.AllreduceOptions()).wait()
            time.sleep(0.1)
    except RuntimeError as error:
        print(f"  rank {rank}: {str(error).splitlines()[0][:150]}", flush=True)
        os._exit(1)
    print(f"  rank {rank}: all sums done", flush=True)
    # The other may still receive the last sum.
    time.sleep(1.0)
    os._exit(0)


def _ports(pid: int) -> Iterator[int]:
    sockets = set()
    for name in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            sockets.add(os.readlink(name))
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
            yield int(fields[1].partition(":")[2], 16)


def _reproduce(how: str) -> list[int | None]:
    context = multiprocessing.get_context("fork")
    path = f"/proc/{os.getpid()}/fd/{os.memfd_create('store')}"
    ranks = [context.Process(target=_rank, args=(rank, path, how)) for rank in range(2)]
    for process in ranks:
        process.start()
    ports: list[int] = []
    while len(ports) < 2:
        ports = [port for process in ranks for port in _ports(process.pid or 0)]
    held = []
    if how != "number":
        time.sleep(1.0)
    for port in ports if how == "number" else [ports[0]] * (_NUM_CONNECTIONS // 8):
        for number in range(8):
            with suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", port), 0.05))
                if how == "number":
                    held[-1].sendall(struct.pack("<q", number) + bytes(64))
    for process in ranks:
        process.join()
    for connection in held:
        connection.close()
    return [process.exitcode for process in ranks]


if __name__ == "__main__":
    for how in sys.argv[1:] or ("held", "closed", "number"):
        print(how, flush=True)
        for _ in range(8 if how == "number" else 1):
            codes = _reproduce(how)
            print(f"  exit codes {codes}", flush=True)
            if any(codes):
                break
