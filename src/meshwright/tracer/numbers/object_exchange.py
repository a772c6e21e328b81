"""Python objects that traced ranks send to each other, such as the shapes between pipeline stages.

Each rank is traced in a process of its own; all share a folder, with one file per object. A rank that waits for an
object records the sender, which is then traced too; waiting ranks do not count as running.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_POLL_S = 0.02
_TIMEOUT_S = 600.0


class ObjectExchange:
    """One rank's access to the folder."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self._num_sent, self._num_received = Counter[int](), Counter[int]()

    def send(self, objects: Sequence[Any], peer: int) -> None:
        """Send objects to a rank, which receives them in order."""
        file = self.folder / f"{self.rank}-{peer}-{self._num_sent[peer]}.pickle"
        self._num_sent[peer] += 1
        # Atomic: the file is complete when it gets its name.
        unfinished = file.with_suffix(".part")
        with unfinished.open("wb") as opened:
            _Pickler(opened).dump(list(objects))
        unfinished.rename(file)

    def receive(self, peer: int) -> list[Any]:
        """Return the next objects from a rank; TimeoutError if it sends none."""
        file = self.folder / f"{peer}-{self.rank}-{self._num_received[peer]}.pickle"
        self._num_received[peer] += 1
        waiting, end = self.folder / f"{self.rank}.waits", time.monotonic() + _TIMEOUT_S
        waiting.write_text(str(peer), encoding="utf-8")
        while not file.exists():
            if time.monotonic() > end:
                raise TimeoutError(f"rank {peer} sent no object to rank {self.rank} within {_TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)
        waiting.unlink()
        objects: list[Any] = pickle.loads(file.read_bytes())
        return objects


class _Pickler(pickle.Pickler):
    """Pickles fake tensors as their metadata: up to torch 2.12 pipeline stages send meta tensors."""

    def reducer_override(self, value: Any) -> Any:
        """Return how to rebuild a fake tensor; NotImplemented for other values."""
        if not isinstance(value, FakeTensor):
            return NotImplemented
        kind = (tuple(value.shape), value.stride(), value.dtype, str(value.device), value.requires_grad)
        return _empty, kind


def _empty(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: str, grad: bool) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=device, requires_grad=grad)


def waiting_ranks(folder: Path) -> dict[int, int]:
    """Return by waiting rank the sender that it waits for."""
    found = {}
    for file in folder.glob("*.waits"):
        try:
            found[int(file.stem)] = int(file.read_text(encoding="utf-8") or file.stem)
        except FileNotFoundError:
            # It has received its object.
            continue
    return found
