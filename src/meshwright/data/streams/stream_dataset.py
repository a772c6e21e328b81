"""StreamDataset: a user's iterable, whose samples are read in its own order."""

from collections.abc import Iterable
from typing import Any

from meshwright.data.numbered_samples import Dataset, Sample
from meshwright.data.user_data import UserData, num_samples_of, read_pair, user_fingerprint
from meshwright.errors import ConfigError
from meshwright.spec.job.sections import DataSection


class StreamDataset(Dataset):
    """A user's iterable, whose samples have no numbers; those of its attribute `validation`, if it has one, do."""

    may_ignore_targets = True

    def __init__(self, section: DataSection, data: Iterable[Any]) -> None:
        if section.num_workers:
            raise ConfigError(
                f"data.num_workers = {section.num_workers} divides numbered samples among processes, but data.source = "
                f"{section.source!r} is an iterable: set data.num_workers to 0, and have the iterable start its own "
                "workers, as torchdata's StatefulDataLoader does"
            )
        self.vocab_size = None
        self.section = section
        self._data: Iterable[Any] | None = data
        self._validation: UserData | None = getattr(data, "validation", None)
        super().__init__(0, 0.0, user_fingerprint(section, data))
        if self._validation is not None:
            self.num_validation_samples = num_samples_of(self._validation, self._validation_source)

    @property
    def _validation_source(self) -> str:
        return f"{self.section.source}, validation"

    def take_data(self) -> Iterable[Any] | None:
        """Return the iterable that was made for this dataset, once, and None afterwards, when it may be in use."""
        data, self._data = self._data, None
        return data

    def read(self, index: int) -> Sample:
        """Return (inputs, targets) of a validation sample."""
        assert self._validation is not None
        return read_pair(self._validation, index, self._validation_source)
