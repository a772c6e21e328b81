"""Files of a rank on the way from one node to another: its manifest, then its data in pieces, over gloo.

Both ends map the data file, so nothing is copied but into and out of the sockets. The receiver allocates the memory
before anything arrives, since a shortage that shows while a mapping is written ends the process.
"""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from meshwright.checkpoint.format.manifest import data_name, manifest_name

_PIECE_BYTES = 64 << 20


class Sending(NamedTuple):
    """Messages on their way, and what must stay in memory until they have arrived."""

    works: list[dist.Work]
    tensors: list[Tensor]

    def wait(self) -> None:
        """Return once all have arrived."""
        for work in self.works:
            work.wait()


def start_sending(folder: Path, file: int, to: int, *, is_whole: bool = True) -> Sending:
    """Send the files of rank `file` in `folder` to the rank `to`, without waiting; not `is_whole`: that there are none.

    Whatever fails here is sent as that there are none, so that the other rank does not wait.
    """
    messages: list[Tensor] = []
    if is_whole:
        try:
            manifest = (folder / manifest_name(file)).read_bytes()
            data = _mapped(folder / data_name(file), (folder / data_name(file)).stat().st_size)
            messages = [torch.frombuffer(bytearray(manifest), dtype=torch.uint8), *data.split(_PIECE_BYTES)]
            messages.insert(0, torch.tensor([data.numel(), len(manifest)]))
        except (OSError, RuntimeError):
            messages = []
    messages = [each for each in messages if each.numel()] or [torch.tensor([-1, -1])]
    works = [work for each in messages if (work := dist.isend(each, to)) is not None]
    return Sending(works, messages)


def receive(folder: Path, file: int, source: int) -> str | None:
    """Write the files of rank `file`, which the rank `source` sends, into `folder`; return what failed, or None."""
    header = torch.empty(2, dtype=torch.int64)
    dist.recv(header, source)
    num_bytes, num_manifest_bytes = header.tolist()
    if num_bytes < 0:
        return f"rank {source} could not send the files of rank {file}"
    manifest = torch.empty(num_manifest_bytes, dtype=torch.uint8)
    dist.recv(manifest, source)
    problem = None
    path = folder / data_name(file)
    try:
        data = _allocated(path, num_bytes)
    except (OSError, RuntimeError) as error:
        problem = f"{path} could not be made ({getattr(error, 'strerror', None) or error})"
        path.unlink(missing_ok=True)
        data = None
    for start in range(0, num_bytes, _PIECE_BYTES):
        size = min(_PIECE_BYTES, num_bytes - start)
        # What has no place is received all the same: its sender waits.
        dist.recv(torch.empty(size, dtype=torch.uint8) if data is None else data[start : start + size], source)
    if problem is not None:
        return problem
    try:
        (folder / manifest_name(file)).write_bytes(manifest.numpy().tobytes())
    except OSError as error:
        return f"{folder / manifest_name(file)} could not be written ({error.strerror})"
    return None


def _allocated(path: Path, num_bytes: int) -> Tensor:
    """Return the bytes of a new file, all of its memory taken; raises OSError where there is too little."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if num_bytes:
            os.posix_fallocate(descriptor, 0, num_bytes)
    finally:
        os.close(descriptor)
    return _mapped(path, num_bytes)


def _mapped(path: Path, num_bytes: int) -> Tensor:
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="r+", shape=(num_bytes,)))
