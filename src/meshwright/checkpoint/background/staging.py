"""Staging of a rank's shards in memory that its writer process shares.

The memory is an anonymous file (memfd_create), which the size of /dev/shm, 64 MiB in many containers, does not limit;
another process of the same user opens it as /proc/PID/fd/N. Where the machine lacks the memory, or the call, saves are
synchronous. A GPU copies into it by itself, next to the kernels of the training, once CUDA has registered its pages:
without that a first copy of 7.2 GB took 4.9 s on an H200 and a later one 0.9 s (2026-11-26), both of which the training
waited for.
"""

import mmap
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.checkpoint.saving import Extent, bytes_of, extents_of
from meshwright.checkpoint.shards import Shard
from meshwright.log import logger
from meshwright.units import format_bytes

_CGROUP_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


class StagingBuffer:
    """Shared memory for the shards of one save; with `is_pinned` the GPU of this thread copies into it by itself."""

    def __init__(self, num_bytes: int, *, is_pinned: bool = False) -> None:
        self.num_bytes = num_bytes
        self._fd = os.memfd_create("meshwright-checkpoint")
        # Allocates the pages now: a shortage is an OSError here instead of a SIGBUS while copying.
        os.posix_fallocate(self._fd, 0, max(num_bytes, 1))
        # Mapped now, too: at the first copy each page would be a fault.
        self._map = mmap.mmap(self._fd, max(num_bytes, 1), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.memory = np.frombuffer(self._map, dtype=np.uint8)
        self._is_pinned = is_pinned and _register(self.memory)

    @property
    def path(self) -> str:
        """Return the path by which another process opens it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """Release the memory; the writer process must have closed it."""
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self.memory.ctypes.data)
        del self.memory
        self._map.close()
        os.close(self._fd)


def _register(memory: NDArray[np.uint8]) -> bool:
    """Pin `memory` for all GPUs of this process; return False, with a warning, where CUDA cannot."""
    portable = 1  # cudaHostRegisterPortable
    status = int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, portable))
    if status != 0:
        size = format_bytes(memory.nbytes)
        logger.warning("CUDA cannot pin %s of memory (error %d): checkpoints are staged more slowly", size, status)
    return status == 0


class OpenedBuffer:
    """The same memory in the writer process; use it in a `with`."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("rb")  # noqa: SIM115 - closed by __exit__
        self._map = mmap.mmap(self._file.fileno(), 0, prot=mmap.PROT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(BufferError):
            # After an error a traceback may still refer to a part; the mapping then goes with it.
            self._map.close()
        self._file.close()

    def extents(self, extents: Sequence[Extent]) -> Iterable[tuple[Extent, memoryview]]:
        """Yield each extent with its bytes, which lie one after the other."""
        start = 0
        with memoryview(self._map) as whole:
            for extent in extents:
                with whole[start : start + extent.num_bytes] as data:
                    yield extent, data
                start += extent.num_bytes


def num_bytes_of(shards: Iterable[Shard]) -> int:
    """Return the bytes that these shards take in a buffer."""
    return sum(extent.num_bytes for extent in extents_of(shards))


def no_staging(num_bytes: int) -> str | None:
    """Return why `num_bytes` cannot be staged on this machine, or None."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return f"{sys.platform} has no memfd_create"
    free = available_memory()
    # The training itself needs room for what it has not allocated yet.
    if num_bytes > 0.8 * free:
        return f"staging needs {format_bytes(num_bytes)} on this rank and {format_bytes(free)} of memory are free"
    return None


def available_memory() -> int:
    """Return the bytes that this process may still allocate: of the machine and of its control group."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    free = [int(fields["MemAvailable"].split()[0]) * 1024]
    for limit, usage in _CGROUP_LIMITS:
        try:
            free.append(int(Path(limit).read_text(encoding="utf-8")) - int(Path(usage).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            continue  # no such group, or "max"
    return min(free)


def stage(shards: Sequence[Shard], buffer: StagingBuffer) -> None:
    """Copy `shards` into `buffer`, one after the other, in the order of their extents; those on a GPU on a stream of
    their own, so that they are not queued behind kernels of the next step.
    """
    device = next((shard.data.device for shard in shards if shard.data.device.type == "cuda"), None)
    stream = None if device is None else torch.cuda.Stream(device)
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        start = 0
        for shard in shards:
            num_bytes = shard.data.numel() * shard.data.element_size()
            if num_bytes:
                _copy(shard.data, buffer.memory[start : start + num_bytes])
            start += num_bytes
    if stream is not None:
        stream.synchronize()


def _copy(data: Tensor, target: NDArray[np.uint8]) -> None:
    if data.device.type == "cpu":
        # numpy copies without the interpreter's lock, on this thread alone.
        np.copyto(target, np.frombuffer(bytes_of(data), dtype=np.uint8))
    else:
        torch.from_numpy(target).view(data.dtype).view(data.shape).copy_(data.detach(), non_blocking=True)
