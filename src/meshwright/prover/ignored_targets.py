"""WithIgnoredTargets: a token dataset of which each sample ignores another number of targets.

A loss that counts its targets wrongly, for each microbatch or each part of a sequence, is right as long as all of them
hold equally many.
"""

from __future__ import annotations

from meshwright.data.dataset import Dataset, Sample, TokenDataset

IGNORED = -100
"""The target that the next-token loss does not count, as in torch."""
_STRIDE = 7
"""Samples that follow each other ignore numbers of targets that lie this far apart."""


class WithIgnoredTargets(Dataset):
    """The samples of a token dataset, the first targets of each ignored; one at least counts."""

    may_ignore_targets = True

    def __init__(self, dataset: TokenDataset, seq_len: int) -> None:
        num_samples = dataset.num_training_samples + dataset.num_validation_samples
        super().__init__(num_samples, 0.0, dataset.fingerprint)
        self.vocab_size, self.end_of_document = dataset.vocab_size, dataset.end_of_document
        self._dataset, self._seq_len = dataset, seq_len

    def read(self, index: int) -> Sample:
        """Return (inputs, targets), each int64 [seq_len], some of the targets IGNORED."""
        inputs, targets = self._dataset.read(index)
        targets = targets.copy()
        targets[: index * _STRIDE % self._seq_len] = IGNORED
        return inputs, targets
