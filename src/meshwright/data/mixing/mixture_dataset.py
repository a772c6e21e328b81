"""MixtureDataset: the samples of several sources as those of one."""

from collections.abc import Callable
from itertools import accumulate

import numpy as np

from meshwright.data.content import Read
from meshwright.data.filtering.unique_documents import UniqueDocuments
from meshwright.data.mixing.mixture_order import MixtureOrder
from meshwright.data.mixing.mixture_schedule import MixtureSchedule
from meshwright.data.mixing.mixture_sections import errors_of_table, mixture_sections
from meshwright.data.numbered_samples import Dataset, Sample
from meshwright.data.sources import pieces
from meshwright.spec.job.mixture_source import whole_weights
from meshwright.spec.job.rules.mixture_rules import stage_weights
from meshwright.spec.job.sections import DataSection

BuildSource = Callable[[DataSection, Read], Dataset]
"""Returns the dataset of one source, of what the reader makes of it."""


class MixtureDataset(Dataset):
    """The training samples of each source, one source after another, then the validation samples of all in turn.

    Which of them a run reads when, its order says. A validation reads each validation sample once, those of the sources
    in proportion to their numbers, so that a short one has some of each.
    """

    def __init__(self, section: DataSection, build: BuildSource) -> None:
        sections = mixture_sections(section)
        self._sources: list[Dataset] = []
        for number, one in enumerate(sections):
            with errors_of_table(section, number):
                read = UniqueDocuments(sections[:number]) if section.deduplicate else pieces
                self._sources.append(build(one, read))
        self._names = names = [table.label for table in section.mixture]
        self.notes = [f"{name}: {note}" for name, one in zip(names, self._sources, strict=True) for note in one.notes]
        self._weights = [whole_weights(weights) for weights in stage_weights(section)]
        self._stage_steps = section.stage_steps
        first = self._sources[0]
        self.vocab_size, self.end_of_document = first.vocab_size, first.end_of_document
        self.may_ignore_targets = any(source.may_ignore_targets for source in self._sources)
        # Not from a fraction: each source has kept its own last samples.
        self._sizes = [source.num_training_samples for source in self._sources]
        self._offsets = [0, *accumulate(self._sizes)]
        self.num_training_samples = self._offsets[-1]
        validation_sizes = [source.num_validation_samples for source in self._sources]
        self.num_validation_samples = sum(validation_sizes)
        self._validation = MixtureSchedule(validation_sizes) if self.num_validation_samples else None
        self.fingerprint = {
            "mixture": [
                {"name": name, "weights": [stage[number] for stage in self._weights], **source.fingerprint}
                for number, (name, source) in enumerate(zip(self._names, self._sources, strict=True))
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
        """Return a sample by its index among all, training first."""
        if index < self.num_training_samples:
            source = int(np.searchsorted(self._offsets, index, side="right")) - 1
            return self._sources[source].sample(index - self._offsets[source])
        assert self._validation is not None, f"sample {index} of {self.num_training_samples}"
        sources, numbers = self._validation.at(np.array([index - self.num_training_samples]))
        return self._sources[int(sources[0])].validation_sample(int(numbers[0]))
