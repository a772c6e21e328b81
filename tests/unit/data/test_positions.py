"""Whatever the kills and the ranks, microbatches and workers of each attempt: all samples in order, each once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_kinds import KINDS, SEQ_LEN, write_data
from meshwright.data.dataset import build_dataset
from meshwright.data.loader import Loader, Prefetch
from meshwright.data.numbered_samples import Dataset, Sample
from meshwright.data.order import Share, check_resumable
from meshwright.data.streams.stream_dataset import StreamDataset
from meshwright.data.streams.stream_loader import StreamLoader
from meshwright.fault_tolerance.step_ledger import digests
from meshwright.spec.job.sections import DataSection

BATCH, STEPS, SEED = 12, 8, 5
DIVISIONS = [(dp, size) for dp in (1, 2, 3, 4) for size in (1, 2, 3, 6, 12) if BATCH % (dp * size) == 0]
"""Data-parallel ranks, and samples of a microbatch."""
Samples = dict[int, str]
"""A global batch: the hash of each sample by its slot."""


@dataclass(frozen=True)
class Attempt:
    """An attempt of a run, and its end."""

    division: tuple[int, int]
    cp: int
    """Ranks that take the same samples."""
    num_replicas: int
    """Independent ones, which deal out the microbatches of those ranks."""
    num_workers: int
    num_ahead: int
    num_steps: int
    """After which it ends."""
    saves: bool
    """Whether it saves at its end, as after SIGTERM; else it is killed."""


ATTEMPTS = st.builds(
    Attempt,
    division=st.sampled_from(DIVISIONS),
    cp=st.sampled_from([1, 1, 2]),
    num_replicas=st.sampled_from([1, 1, 2]),
    num_workers=st.integers(0, 3),
    num_ahead=st.integers(1, 3),
    num_steps=st.integers(0, STEPS),
    saves=st.booleans(),
)
LAST = Attempt((1, BATCH), 1, 1, 0, 1, STEPS, False)


class Readers:
    """Threads in the place of worker processes, which are tested in workers/: each has a dataset of its own."""

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        self._idle: SimpleQueue[Dataset] = SimpleQueue()
        for one in datasets:
            self._idle.put(one)
        self._threads = ThreadPoolExecutor(len(datasets))

    def submit(self, numbers: Sequence[int]) -> Callable[[], list[Sample]]:
        return self._threads.submit(self._read, numbers).result

    def _read(self, numbers: Sequence[int]) -> list[Sample]:
        dataset = self._idle.get()
        samples = [dataset.read(int(number)) for number in numbers]
        self._idle.put(dataset)
        return samples

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class Source:
    """Data of one kind, of which every reader has a dataset of its own."""

    def __init__(self, folder: Path, kind: str) -> None:
        data, self._task = write_data(folder, kind)
        self._section = DataSection.from_dict(data)
        self._numbered = cache(self._build)
        with self.opened(LAST) as loaders:
            self.expected = [taken(loaders, step) for step in range(STEPS)]

    def _build(self, reader: int) -> Dataset:
        return build_dataset(self._section, SEQ_LEN, self._task)

    @contextmanager
    def opened(self, attempt: Attempt) -> Iterator[list[Loader]]:
        """Yield the loader of each rank."""
        dp, size = attempt.division
        shares = [
            Share(BATCH, size, dp_rank, dp, replica, attempt.num_replicas)
            for replica in range(attempt.num_replicas)
            for dp_rank in range(dp)
            for _ in range(attempt.cp)
        ]
        with ExitStack() as stack:
            yield [stack.enter_context(closing(self._open(rank, one, attempt))) for rank, one in enumerate(shares)]

    def _open(self, rank: int, share: Share, attempt: Attempt) -> Loader:
        dataset = self._numbered(4 * rank)
        if isinstance(dataset, StreamDataset):
            return StreamLoader(self._build(0), share, num_ahead=attempt.num_ahead)
        of_workers = [self._numbered(4 * rank + 1 + worker) for worker in range(attempt.num_workers)]
        workers = Readers(of_workers) if of_workers else None
        return Loader(dataset, share, seed=SEED, prefetch=Prefetch(attempt.num_ahead, workers))


def taken(loaders: Sequence[Loader], step: int, num_copies: int = 1) -> Samples:
    """Return the samples that all ranks take in a step, of which each is on `num_copies` ranks."""
    uses: Counter[tuple[int, str]] = Counter()
    for loader in loaders:
        for microbatch in loader.microbatches(step):
            uses.update(digests(microbatch).items())
    assert set(uses.values()) == {num_copies}
    assert len(uses) == BATCH
    return dict(sorted(uses))


def train(source: Source, attempts: Sequence[Attempt], interval: int) -> list[Samples]:
    """Return the samples of each step that counts, in the end, of a run in several attempts."""
    saved_step, saved = 0, None
    steps: list[Samples] = []
    for attempt in attempts:
        # A step that was not saved does not count.
        del steps[saved_step:]
        with source.opened(attempt) as loaders:
            for loader in loaders if saved is not None else ():
                position: dict[str, Any] = json.loads(saved)
                check_resumable(position, loader.position)
                loader.restore(position)
            for step in range(saved_step, min(STEPS, saved_step + attempt.num_steps)):
                steps.append(taken(loaders, step, attempt.cp))
                if (step + 1) % interval == 0 or attempt.saves:
                    (saved,) = {json.dumps(loader.position) for loader in loaders}
                    saved_step = step + 1
    return steps


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Source]:
    return cache(lambda kind: Source(tmp_path_factory.mktemp("data"), kind))


@pytest.mark.slow
@settings(max_examples=(4 if settings.default.max_examples >= 100 else 1) * settings.default.max_examples)
@given(kind=st.sampled_from(KINDS), attempts=st.lists(ATTEMPTS, min_size=1, max_size=2), interval=st.integers(1, STEPS))
def test_no_sample_is_lost_or_repeated_or_in_another_place(
    sources: Callable[[str], Source], kind: str, attempts: list[Attempt], interval: int
) -> None:
    source = sources(kind)
    assert train(source, [*attempts, LAST], interval) == source.expected
