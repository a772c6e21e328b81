"""UserDataset: the samples of a user's data object."""

from meshwright.data.numbered_samples import Dataset, Sample
from meshwright.data.user_data import UserData, num_samples_of, read_pair, sample_hash, user_fingerprint
from meshwright.errors import DataError
from meshwright.spec.job.sections import DataSection


class UserDataset(Dataset):
    """Samples of a user's data object."""

    may_ignore_targets = True

    def __init__(self, section: DataSection, data: UserData) -> None:
        self.vocab_size = None
        self._data, self._source = data, section.source
        num_samples = num_samples_of(data, section.source)
        needed = 1 + bool(section.validation_fraction)
        if num_samples < needed:
            raise DataError(
                f"data.source = {section.source!r} has {num_samples} samples but needs {needed}"
                f"{', one of them for validation' if needed == 2 else ''}: make its __len__ return more"
            )
        fingerprint = {**user_fingerprint(section, data), "sample_hash": sample_hash(data, section.source)}
        super().__init__(num_samples, section.validation_fraction, fingerprint)

    def read(self, index: int) -> Sample:
        """Return (inputs, targets) of the user's __getitem__."""
        return read_pair(self._data, index, self._source)
