"""PairMixture: the rows of several sources of pairs as those of one, with pairs numbered over all sources."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from meshwright.data.mixing.mixture_dataset import MixtureDataset
from meshwright.data.numbered_samples import Dataset, Sample
from meshwright.data.packing.pair_dataset import NO_PAIR
from meshwright.spec.job.sections import DataSection


class PairMixture(MixtureDataset):
    """A mixture of PairDatasets. The pairs of a source come after those of the tables before it."""

    def __init__(self, section: DataSection, sources: Sequence[Dataset]) -> None:
        super().__init__(section, sources)
        self._first_pairs = [0, *accumulate(source.num_pairs for source in sources)]
        self.num_pairs = self._first_pairs[-1]
        self.pairs_in_row = max(source.pairs_in_row for source in sources)

    def _read_of(self, number: int, own: int) -> Sample:
        """Return a sample of a source, with as many places for pairs as the other sources' have."""
        inputs, targets, documents, of_source = super()._read_of(number, own)  # type: ignore[misc]
        pairs = np.full(self.pairs_in_row, NO_PAIR)
        pairs[: len(of_source)] = np.where(of_source == NO_PAIR, NO_PAIR, of_source + self._first_pairs[number])
        return inputs, targets, documents, pairs
