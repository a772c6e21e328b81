"""Keep your torchdata loaders: a StatefulDataLoader, or a graph of torchdata.nodes, as the data.source of a job.

Both yield single samples, and their state is in the checkpoint. What is shuffled must be a function of the epoch, or
part of the state: torch's RandomSampler with a generator is neither after a resume in a later epoch (torchdata 0.11).
"""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler
from torchdata.nodes import Loader, MapStyleWrapper, ParallelMapper, Prefetcher
from torchdata.stateful_dataloader import StatefulDataLoader


class Windows(Dataset[np.ndarray]):
    """Windows of the bytes of Python's own library."""

    def __init__(self, num_samples: int, seq_len: int) -> None:
        text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
        self.rows = np.frombuffer(text, np.uint8)[: num_samples * (seq_len + 1)].reshape(num_samples, seq_len + 1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.rows[index].astype(np.int64)


class ShuffledByEpoch(Sampler[int]):
    """Another order in each epoch, which the state counts; torchdata.nodes sets it instead."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch, self.place = size, 0, 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.place < self.size:
            self.place += 1
            yield order[self.place - 1]
        self.epoch, self.place = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.place = epoch, 0


def shifted(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (inputs, targets) of a window."""
    return tokens[:-1], tokens[1:]


def loader(num_samples: int = 2000, seq_len: int = 128, num_workers: int = 2) -> StatefulDataLoader:
    # Forked workers would hold a killed rank's connections open, and torch's outlive it under a forkserver.
    context = "spawn" if num_workers else None
    return StatefulDataLoader(
        Windows(num_samples, seq_len),
        batch_size=None,
        sampler=ShuffledByEpoch(num_samples),
        collate_fn=shifted,
        num_workers=num_workers,
        multiprocessing_context=context,
        persistent_workers=num_workers > 0,  # or each epoch waits for new ones, which import torch
    )


def graph(num_samples: int = 2000, seq_len: int = 128) -> Loader[tuple[np.ndarray, np.ndarray]]:
    windows = MapStyleWrapper(Windows(num_samples, seq_len), sampler=ShuffledByEpoch(num_samples))
    return Loader(Prefetcher(ParallelMapper(windows, shifted, num_workers=2, method="thread"), prefetch_factor=8))
