"""MixtureDataset: the samples of several sources as those of one."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from meshwright.data.mixing.mixture_order import MixtureOrder
from meshwright.data.mixing.mixture_schedule import MixtureSchedule
from meshwright.data.numbered_samples import Dataset, Sample
from meshwright.spec.job.mixture_source import whole_weights
from meshwright.spec.job.rules.mixture_rules import stage_weights
from meshwright.spec.job.sections import DataSection


class MixtureDataset(Dataset):
    """The training samples of each source, one source after another, then the validation samples of all in turn.

    Which of them a run reads when, its order says. A validation reads each validation sample once, those of the sources
    in proportion to their numbers, so that a short one has some of each.
    """

    def __init__(self, section: DataSection, sources: Sequence[Dataset]) -> None:
        """Mix the dataset of each table of data.mixture."""
        self.sources = sources
        self._names = names = [table.label for table in section.mixture]
        self.notes = [f"{name}: {line}" for name, one in zip(names, sources, strict=True) for line in one.notes]
        self.left_out = [f"{name}: {line}" for name, one in zip(names, sources, strict=True) for line in one.left_out]
        self._weights = [whole_weights(weights) for weights in stage_weights(section)]
        self._stage_steps = section.stage_steps
        first = self.sources[0]
        self.vocab_size, self.end_of_document = first.vocab_size, first.end_of_document
        self.may_ignore_targets, self.pads_validation = first.may_ignore_targets, first.pads_validation
        # Not from a fraction: each source has kept its own last samples.
        self._sizes = [source.num_training_samples for source in self.sources]
        self._offsets = [0, *accumulate(self._sizes)]
        self.num_training_samples = self._offsets[-1]
        validation_sizes = [source.num_validation_samples for source in self.sources]
        self.num_validation_samples = sum(validation_sizes)
        self._validation = MixtureSchedule(validation_sizes) if self.num_validation_samples else None
        self.fingerprint = {
            "mixture": [
                {"name": name, "weights": [stage[number] for stage in self._weights], **source.fingerprint}
                for number, (name, source) in enumerate(zip(self._names, self.sources, strict=True))
            ],
            "stage_steps": list(self._stage_steps),
            "num_training_samples": self.num_training_samples,
            "num_validation_samples": self.num_validation_samples,
        }

    def order(self, seed: int, shuffle: bool, global_batch_size: int) -> MixtureOrder:
        """Return the order of the training samples."""
        firsts = [step * global_batch_size for step in (0, *self._stage_steps)]
        stages = [(first, MixtureSchedule(weights)) for first, weights in zip(firsts, self._weights, strict=True)]
        return MixtureOrder(self._names, self._sizes, stages, seed=seed, shuffle=shuffle)

    def read(self, index: int) -> Sample:
        """Return a sample by its index among all, training first; with `pads_validation` padding after the last."""
        if index >= self.num_samples:
            return self._read_of(0, self.sources[0].num_samples)
        return self._read_of(*self.place_of(index))

    def _read_of(self, number: int, own: int) -> Sample:
        """Return a sample of a source by its index among all of that source."""
        return self.sources[number].read(own)

    def place_of(self, index: int) -> tuple[int, int]:
        """Return the number of the source that a sample is of, and its index among all of that source."""
        if index < self.num_training_samples:
            number = int(np.searchsorted(self._offsets, index, side="right")) - 1
            return number, index - self._offsets[number]
        assert self._validation is not None, f"sample {index} of {self.num_training_samples}"
        numbers, places = self._validation.at(np.array([index - self.num_training_samples]))
        number = int(numbers[0])
        return number, self.sources[number].num_training_samples + int(places[0])
