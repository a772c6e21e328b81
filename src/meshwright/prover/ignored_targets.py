"""Token dataset in which each sample ignores a different number of targets.

With equal numbers, a loss that counts targets wrongly per microbatch or per shard of a sequence would still be right.
"""

from __future__ import annotations

from meshwright.data.dataset import Dataset, Sample, TokenDataset

IGNORED = -100
"""Target that the next-token loss ignores, as in torch."""
_STRIDE = 7
"""Difference of the numbers of ignored targets between consecutive samples."""


class WithIgnoredTargets(Dataset):
    """Samples of a token dataset with their first targets ignored; at least one target counts."""

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
