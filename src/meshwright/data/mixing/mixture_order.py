"""MixtureOrder: the sample at each position of a run over several sources, each with its own epochs and shuffle."""

import hashlib
from collections.abc import Sequence

import numpy as np

from meshwright.data.mixing.mixture_schedule import MixtureSchedule
from meshwright.data.numbered_samples import SourceUse
from meshwright.data.order import Indices, SampleOrder


class MixtureOrder:
    """Infinite sequence of indices into the samples of all sources, one source's after another's.

    A pure function of the position: stages of the weights follow one another, and of each source sample q of its own
    order is the q-th that is read, whatever the stage.
    """

    def __init__(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        stages: Sequence[tuple[int, MixtureSchedule]],
        *,
        seed: int,
        shuffle: bool,
    ) -> None:
        """Take the number of training samples of each source, and stages as (first position, schedule)."""
        self.seed, self.shuffle = seed, shuffle
        self._names, self._sizes, self._stages = tuple(names), tuple(sizes), tuple(stages)
        self._offsets = np.cumsum([0, *sizes])
        self._orders = [SampleOrder(size, _seed_of(seed, number), shuffle) for number, size in enumerate(sizes)]
        self._before = [np.array(self._counts(first), dtype=np.int64) for first, _ in stages]

    def samples_at(self, positions: Indices) -> Indices:
        """Return the index among the samples of all sources at each global position, shaped as `positions`."""
        positions = np.asarray(positions, dtype=np.int64)
        samples = np.empty_like(positions)
        ends = [*(first for first, _ in self._stages[1:]), None]
        for (first, schedule), end, before in zip(self._stages, ends, self._before, strict=True):
            here = (positions >= first) & (True if end is None else positions < end)
            if not here.any():
                continue
            sources, numbers = schedule.at(positions[here] - first)
            found = np.empty_like(sources)
            for source in np.unique(sources):
                chosen = sources == source
                own = self._orders[source].samples_at(before[source] + numbers[chosen])
                found[chosen] = self._offsets[source] + own
            samples[here] = found
        return samples

    def use(self, num_positions: int) -> list[SourceUse]:
        """Return what the first positions of the run read of each source."""
        rows = zip(self._names, self._counts(num_positions), self._sizes, strict=True)
        return [SourceUse(name, count, count / size) for name, count, size in rows]

    def _counts(self, num_positions: int) -> list[int]:
        """Return how many of the first positions read each source."""
        counts = [0] * len(self._sizes)
        ends = [*(first for first, _ in self._stages[1:]), num_positions]
        for (first, schedule), end in zip(self._stages, ends, strict=True):
            of_stage = schedule.counts(max(0, min(end, num_positions) - first))
            counts = [count + more for count, more in zip(counts, of_stage, strict=True)]
        return counts


def _seed_of(seed: int, source: int) -> int:
    """Return a seed of its own for a source, so that sources of one size are not shuffled alike."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{source}".encode(), digest_size=7, person=b"mixture").digest())
