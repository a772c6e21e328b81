"""Loader: batches of one data-parallel rank, read ahead in a background thread or in worker processes."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshwright.data.examine.sample_limits import SampleLimits
from meshwright.data.numbered_samples import Dataset, Sample, SourceUse
from meshwright.data.order import Indices, Share
from meshwright.data.user_data import no_tensor
from meshwright.data.workers.read_thread import ReadThread
from meshwright.data.workers.sample_workers import SampleWorkers
from meshwright.errors import DataError


@dataclass(frozen=True)
class Microbatch:
    """Samples stacked along a new first dim, and the slot of the first sample in the global batch."""

    inputs: Tensor
    targets: Tensor
    first_slot: int
    documents: Tensor | None = None
    """The document of each input token, with data.mask_documents."""
    positions: Tensor | None = None
    """The position of each input token in its document, where documents are packed whole; None: in the sequence."""
    pairs: Tensor | None = None
    """The numbers of the pairs in each row, [B, pairs_in_row], of a PairDataset."""


class Prefetch(NamedTuple):
    """How far and by whom samples are read ahead."""

    num_batches: int = 1
    """Batches ahead of the one in use."""
    workers: SampleWorkers | None = None
    """Processes that read the samples of the same dataset; None reads in the loader's thread."""


class Loader:
    """Random access to the batches of any step; the steps after the last one requested are prefetched.

    Stateless: the batches of a step depend only on (dataset, seed, shuffle, share, step).
    """

    limits: SampleLimits | None = None
    """What the samples of a user's own must keep to."""

    def __init__(
        self,
        dataset: Dataset,
        share: Share,
        *,
        seed: int,
        shuffle: bool = True,
        pin_memory: bool = False,
        prefetch: Prefetch | None = None,
    ) -> None:
        self._dataset, self._share = dataset, share
        self._seed, self._shuffle = seed, shuffle
        has_numbers = dataset.num_training_samples > 0
        self._order = dataset.order(seed, shuffle, share.global_batch_size) if has_numbers else None
        self._pin_memory = pin_memory
        self._prefetch = prefetch or Prefetch()
        self._thread = ReadThread()
        self._ahead: deque[tuple[int, Future[list[Microbatch]]]] = deque()

    @property
    def position(self) -> dict[str, Any]:
        """Return everything that determines the sample order, as JSON, for `order.check_resumable`."""
        return {
            "data": self._dataset.fingerprint,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "global_batch_size": self._share.global_batch_size,
        }

    def use(self, num_steps: int) -> Sequence[SourceUse]:
        """Return what the first steps of the run read of each source of a mixture; none of another dataset."""
        return () if self._order is None else self._order.use(num_steps * self._share.global_batch_size)

    def restore(self, position: dict[str, Any]) -> None:
        """Continue from the `position` of a checkpoint: here nothing is to be done, any step can be requested."""

    def set_share(self, share: Share) -> None:
        """Take other slots of every global batch from the next request on."""
        self._share = share
        self._forget_ahead()

    @property
    def num_validation_batches(self) -> int:
        """Return the number of global batches without repeated validation samples, at least 1 if there are any.

        Where padding follows the last sample, all samples are in them.
        """
        num_samples = self._dataset.num_validation_samples
        if self._dataset.pads_validation:
            return -(-num_samples // self._share.global_batch_size)
        return min(num_samples, max(1, num_samples // self._share.global_batch_size))

    def microbatches(self, step: int) -> list[Microbatch]:
        """Return this rank's microbatches of `step`, in order; re-raises errors of reading."""
        if self._ahead and self._ahead[0][0] != step:
            self._forget_ahead()
        last = step + self._prefetch.num_batches
        self._ahead += [(later, self._read_step(later)) for later in range(step + len(self._ahead), last + 1)]
        return self._ahead.popleft()[1].result()

    def validation_microbatches(self, batch_index: int) -> list[Microbatch]:
        """Return this rank's microbatches of a validation batch, in the order of samples, then padding or again."""
        assert self._dataset.num_validation_samples, "validation without validation samples"
        # Each of several independent replicas evaluates all of them.
        share = replace(self._share, member=0, num_members=1)
        samples = share.positions(batch_index)
        if not self._dataset.pads_validation:
            samples = samples % self._dataset.num_validation_samples
        return self._read(self._dataset.num_training_samples + samples, share.slots).result()

    def microbatches_of(self, samples: Indices) -> list[Microbatch]:
        """Return microbatches of samples, shaped [num_microbatches, microbatch_size], of all samples of the dataset."""
        return self._read(samples, samples).result()

    def close(self) -> None:
        """Stop the thread after its current sample, and worker processes at once; wait a few seconds at most."""
        self._forget_ahead()
        if self._prefetch.workers is not None:
            self._prefetch.workers.close()
        self._thread.close()

    def _forget_ahead(self) -> None:
        for _, future in self._ahead:
            future.cancel()
        self._ahead.clear()

    def _read_step(self, step: int) -> Future[list[Microbatch]]:
        assert self._order is not None, "samples without numbers"
        return self._read(self._order.samples_at(self._share.positions(step)), self._share.slots)

    def _read(self, samples: Indices, slots: Indices) -> Future[list[Microbatch]]:
        """Begin to read samples, by their numbers among all of the dataset, and stack each row of them."""
        workers = self._prefetch.workers
        begin = (lambda row: partial(self._read_row, row)) if workers is None else workers.submit
        return self._thread.submit(partial(self._stack, samples, slots, [begin(row) for row in samples]))

    def _read_row(self, row: Indices) -> list[Sample]:
        return [self._dataset.read(int(index)) for index in row if not self._thread.is_closed]

    def _stack(self, samples: Indices, slots: Indices, rows: Sequence[Callable[[], list[Sample]]]) -> list[Microbatch]:
        batches = []
        for numbers, first_slot, read in zip(samples, slots[:, 0], rows, strict=True):
            pairs = [] if self._thread.is_closed else read()
            if self._thread.is_closed:
                break
            inputs = stack([pair[0] for pair in pairs], numbers, "inputs")
            targets = stack([pair[1] for pair in pairs], numbers, "targets")
            if self.limits is not None:
                self.limits.require(inputs, targets, numbers)
            documents, positions = self._documents_of(inputs, pairs, numbers)
            of_pairs = [sample[3] for sample in pairs if len(sample) > 3]
            numbered = stack(of_pairs, numbers, "pairs") if of_pairs else None
            batch = Microbatch(inputs, targets, int(first_slot), documents, positions, numbered)
            batches.append(_pinned(batch) if self._pin_memory else batch)
        return batches

    def _documents_of(
        self, inputs: Tensor, pairs: Sequence[Sample], row: Indices
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the document of each token and the position in it; None where they are of no effect."""
        numbers = [sample[2] for sample in pairs if len(sample) > 2]
        if numbers:
            documents_BS = stack(numbers, row, "documents")
            return documents_BS, positions_in(documents_BS)
        end = self._dataset.end_of_document
        return None if end is None else document_numbers(inputs, end), None


def _pinned(batch: Microbatch) -> Microbatch:
    """Return the microbatch in memory that is copied to a device in the background."""
    tensors = {name: getattr(batch, name) for name in ("inputs", "targets", "documents", "positions", "pairs")}
    return replace(batch, **{name: one.pin_memory() for name, one in tensors.items() if one is not None})


def stack(values: Sequence[Any], indices: Sequence[int] | Indices, what: str) -> Tensor:
    """Return arrays, tensors or numbers as one tensor with a new first dim; raises DataError if they differ."""
    tensors = [_tensor(value, index, what) for value, index in zip(values, indices, strict=True)]
    first = tensors[0]
    for tensor, index in zip(tensors, indices, strict=True):
        if tensor.shape != first.shape or tensor.dtype != first.dtype:
            raise DataError(
                f"the {what} of sample {indices[0]} are {first.dtype} {list(first.shape)} but those of sample {index} "
                f"are {tensor.dtype} {list(tensor.shape)}: samples of one batch must have one shape and dtype, "
                "so pad or cut them in __getitem__ of the class in data.source"
            )
    return torch.stack(tensors)


def _tensor(value: Any, index: int, what: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        array = np.asarray(value)
        # Copied: torch warns about read-only arrays such as memory maps.
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except (TypeError, ValueError) as error:
        raise no_tensor(value, index, what, error) from error


def positions_in(documents_BS: Tensor) -> Tensor:
    """Return positions_BS (int64): 0, 1, ... from the first token of each document, which are contiguous, on."""
    places_S = torch.arange(documents_BS.shape[1])
    is_first_BS = documents_BS.diff(dim=1, prepend=documents_BS[:, :1] - 1) != 0
    return places_S - (places_S * is_first_BS).cummax(dim=1).values


def document_numbers(tokens_BS: Tensor, end_of_text: int) -> Tensor:
    """Return documents_BS (int64): 0 up to and including a row's first end of text, then 1, ..."""
    ends_BS = (tokens_BS == end_of_text).long()
    return ends_BS.cumsum(dim=1) - ends_BS
