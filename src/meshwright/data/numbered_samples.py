"""Dataset: numbered samples of any kind, validation samples last, and the order in which a run reads them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from meshwright.data.order import Indices, SampleOrder

Sample = tuple[Any, Any] | tuple[Any, Any, Any] | tuple[Any, Any, Any, Any]
"""(inputs, targets), or with the document of each input, of pairs also with the numbers of its pairs."""


IGNORED = -100
"""Target that the next-token loss leaves out, as torch's does."""


@dataclass(frozen=True)
class SourceUse:
    """What a run has read of one source of a mixture."""

    name: str
    num_samples: int
    epochs: float
    """Times that the source was read: 1.5 is once, and half of it again."""


class TrainingOrder(Protocol):
    """Infinite sequence of sample indices."""

    def samples_at(self, positions: Indices) -> Indices:
        """Return the sample index at each global position, shaped as `positions`."""
        ...

    def use(self, num_positions: int) -> Sequence[SourceUse]:
        """Return what the first positions of a run read of each source of a mixture; none of another dataset."""
        ...


class Dataset(ABC):
    """Numbered samples."""

    vocab_size: int | None
    """One more than the largest token; None for samples without tokens."""
    end_of_document: int | None = None
    """The token that ends a document, with data.mask_documents."""

    notes: Sequence[str] = ()
    """What a run says of its data before the first step."""
    left_out: Sequence[str] = ()
    """What a run warns of: documents that were left out since they are broken, or copies, and files of other kinds."""
    may_ignore_targets = False
    """Whether targets may be IGNORED."""
    pads_validation = False
    """Whether validation samples after the last are padding, without a target, in place of the first ones again."""
    num_pairs: int = 0
    """Pairs of answers in all samples, numbered from 0; none but with train.task = "dpo"."""
    pairs_in_row: int = 0
    """Places for the numbers of pairs in a sample."""

    def __init__(
        self,
        num_samples: int,
        validation_fraction: float,
        fingerprint: dict[str, Any],
        num_validation_samples: int | None = None,
    ) -> None:
        """The last samples are for validation: a fraction of them, or `num_validation_samples`."""
        if num_validation_samples is None:
            num_validation_samples = num_validation(num_samples, validation_fraction)
        self.num_validation_samples = num_validation_samples
        self.num_training_samples = num_samples - self.num_validation_samples
        counts = {key: getattr(self, key) for key in ("num_training_samples", "num_validation_samples")}
        self.fingerprint: dict[str, Any] = {**fingerprint, **counts}
        """Identity of the data, as JSON for manifests and checkpoints."""

    @property
    def num_samples(self) -> int:
        """Return the number of all samples."""
        return self.num_training_samples + self.num_validation_samples

    def sample(self, index: int) -> Sample:
        """Return training sample `index`."""
        assert 0 <= index < self.num_training_samples, f"sample {index} of {self.num_training_samples}"
        return self.read(index)

    def validation_sample(self, index: int) -> Sample:
        """Return validation sample `index`."""
        assert 0 <= index < self.num_validation_samples, f"sample {index} of {self.num_validation_samples}"
        return self.read(self.num_training_samples + index)

    def order(self, seed: int, shuffle: bool, global_batch_size: int) -> TrainingOrder:
        """Return the order of the training samples in a run of steps of `global_batch_size`."""
        return SampleOrder(self.num_training_samples, seed, shuffle)

    @abstractmethod
    def read(self, index: int) -> Sample:
        """Return sample `index` of all samples, training first; with `pads_validation` padding after the last."""


def num_validation(num_samples: int, fraction: float) -> int:
    """Return the number of validation samples: the fraction rounded down, at least 1 unless it is 0."""
    return max(1, int(num_samples * fraction)) if fraction else 0
