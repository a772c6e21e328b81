"""A stream that starts processes of its own, as data.source names it."""

import multiprocessing
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from sample_sources import tokens_of


class Helped:
    """Samples of two forked workers of torch's DataLoader, of which one then hangs in a read, and a program.

    The process ids of all three are in a file.
    """

    def __init__(self, pids_file: str, hangs_at: int = -1) -> None:
        self._pids_file, self._hangs_at = pids_file, hangs_at

    def __iter__(self) -> Iterator[Any]:
        program = subprocess.Popen(["sleep", "600"])
        samples = _Hanging(self._hangs_at)
        read = iter(DataLoader(samples, batch_size=None, num_workers=2, multiprocessing_context="fork"))
        pids = [program.pid, *(child.pid for child in multiprocessing.active_children())]
        Path(self._pids_file).write_text(" ".join(map(str, pids)))
        return read


class _Hanging:
    def __init__(self, hangs_at: int) -> None:
        self._hangs_at = hangs_at

    def __len__(self) -> int:
        return 100_000_000

    def __getitem__(self, index: int) -> Any:
        if index == self._hangs_at:
            time.sleep(600)
        return tokens_of(index)
