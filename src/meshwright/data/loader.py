"""Loader: batches of one data-parallel rank, prefetched one step ahead in a background thread."""

import atexit
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.data.dataset import Dataset, Sample
from meshwright.data.order import Indices, SampleOrder, Share
from meshwright.errors import DataError

_CLOSE_TIMEOUT_S = 5.0


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


_Request = tuple[Callable[[], list[Microbatch]], Future[list[Microbatch]]]


class Loader:
    """Random access to the batches of any step; the step after the last one requested is prefetched.

    Stateless: the batches of a step depend only on (dataset, seed, shuffle, share, step).
    """

    def __init__(
        self, dataset: Dataset, share: Share, *, seed: int, shuffle: bool = True, pin_memory: bool = False
    ) -> None:
        self._dataset = dataset
        self._share = share
        self._order = SampleOrder(dataset.num_training_samples, seed, shuffle)
        self._pin_memory = pin_memory
        self._is_closed = False
        self._ahead: tuple[int, Future[list[Microbatch]]] | None = None
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        # A daemon: a read that hangs must not keep an interrupted process alive.
        self._thread = threading.Thread(target=self._serve, name="meshwright-loader", daemon=True)
        self._thread.start()
        # A thread inside of torch at interpreter exit would abort the process.
        atexit.register(self.close)

    @property
    def position(self) -> dict[str, Any]:
        """Return everything that determines the sample order, as JSON, for `resume.check_resumable`."""
        return {
            "data": self._dataset.fingerprint,
            "seed": self._order.seed,
            "shuffle": self._order.shuffle,
            "global_batch_size": self._share.global_batch_size,
        }

    def set_share(self, share: Share) -> None:
        """Take other slots of every global batch from the next request on."""
        self._share = share
        if self._ahead is not None:
            self._ahead[1].cancel()
            self._ahead = None

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
        assert not self._is_closed, "the loader is closed"
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == step:
            future = ahead[1]
        else:
            if ahead is not None:
                ahead[1].cancel()
            future = self._submit(partial(self._make, step))
        batches = future.result()
        self._ahead = (step + 1, self._submit(partial(self._make, step + 1)))
        return batches

    def validation_microbatches(self, batch_index: int) -> list[Microbatch]:
        """Return this rank's microbatches of a validation batch, in the order of samples, then padding or again."""
        assert not self._is_closed, "the loader is closed"
        assert self._dataset.num_validation_samples, "validation without validation samples"
        # Each of several independent replicas evaluates all of them.
        share = replace(self._share, member=0, num_members=1)
        samples = share.positions(batch_index)
        if not self._dataset.pads_validation:
            samples = samples % self._dataset.num_validation_samples
        # In the thread: a user's class need not be thread-safe.
        return self._submit(partial(self._stack, samples, share.slots, self._dataset.validation_sample)).result()

    def close(self) -> None:
        """Stop the thread after its current sample; wait a few seconds at most."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._ahead is not None:
            self._ahead[1].cancel()
        self._requests.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        atexit.unregister(self.close)

    def _submit(self, make: Callable[[], list[Microbatch]]) -> Future[list[Microbatch]]:
        future: Future[list[Microbatch]] = Future()
        self._requests.put((make, future))
        return future

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            make, future = request
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(make())
            except BaseException as error:
                # Re-raised in the thread that requests this batch.
                future.set_exception(error)

    def _make(self, step: int) -> list[Microbatch]:
        share = self._share
        return self._stack(self._order.samples_at(share.positions(step)), share.slots, self._dataset.sample)

    def _stack(self, samples: Indices, slots: Indices, read: Callable[[int], Sample]) -> list[Microbatch]:
        batches = []
        for row, first_slot in zip(samples, slots[:, 0], strict=True):
            pairs = [read(int(index)) for index in row if not self._is_closed]
            if self._is_closed:
                break
            inputs = stack([pair[0] for pair in pairs], row, "inputs")
            targets = stack([pair[1] for pair in pairs], row, "targets")
            documents, positions = self._documents_of(inputs, pairs, row)
            batch = Microbatch(inputs, targets, int(first_slot), documents, positions)
            batches.append(_pinned(batch) if self._pin_memory else batch)
        return batches

    def _documents_of(
        self, inputs: Tensor, pairs: Sequence[Sample], row: Indices
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the document of each token and the position in it; None where they are of no effect."""
        numbers = [document for _, _, *of_sample in pairs for document in of_sample]
        if numbers:
            documents_BS = stack(numbers, row, "documents")
            return documents_BS, positions_in(documents_BS)
        end = self._dataset.end_of_document
        return None if end is None else document_numbers(inputs, end), None


def _pinned(batch: Microbatch) -> Microbatch:
    """Return the microbatch in memory that is copied to a device in the background."""
    tensors = {name: getattr(batch, name) for name in ("inputs", "targets", "documents", "positions")}
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
        raise DataError(
            f"the {what} of sample {index} are a {type(value).__name__} that no tensor can hold ({error}): "
            "return numbers, NumPy arrays of numbers or tensors from __getitem__ of the class in data.source"
        ) from error


def positions_in(documents_BS: Tensor) -> Tensor:
    """Return positions_BS (int64): 0, 1, ... from the first token of each document, which are contiguous, on."""
    places_S = torch.arange(documents_BS.shape[1])
    is_first_BS = documents_BS.diff(dim=1, prepend=documents_BS[:, :1] - 1) != 0
    return places_S - (places_S * is_first_BS).cummax(dim=1).values


def document_numbers(tokens_BS: Tensor, end_of_text: int) -> Tensor:
    """Return documents_BS (int64): 0 up to and including a row's first end of text, then 1, ..."""
    ends_BS = (tokens_BS == end_of_text).long()
    return ends_BS.cumsum(dim=1) - ends_BS
