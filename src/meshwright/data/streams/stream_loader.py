"""StreamLoader: the batches of a stream, which rank 0 reads ahead and all ranks take their slots of.

So the samples of a global batch and their order do not depend on the ranks, whatever the layout is. The position in a
checkpoint is that after the last batch that was used; what is read ahead is read again after a resume.
"""

from collections import deque
from concurrent.futures import CancelledError, Future
from typing import Any

from meshwright.data.loader import Loader, Microbatch, Prefetch, stack
from meshwright.data.order import Share
from meshwright.data.streams.batch_broadcast import StreamBatch, broadcast_batch, reads_stream
from meshwright.data.streams.sample_stream import START, SampleStream
from meshwright.data.streams.stream_dataset import StreamDataset


class StreamLoader(Loader):
    """Batches of consecutive steps; `microbatches` and `restore` are collectives of all ranks."""

    def __init__(self, dataset: StreamDataset, share: Share, *, pin_memory: bool = False, num_ahead: int = 1) -> None:
        """Read `num_ahead` batches ahead of the one in use."""
        super().__init__(dataset, share, seed=0, pin_memory=pin_memory, prefetch=Prefetch(num_ahead))
        self._stream = SampleStream(dataset.section, dataset.take_data()) if reads_stream() else None
        self._read_ahead: deque[tuple[int, Future[StreamBatch]]] = deque()
        self._next = 0
        """The first step that is not yet read."""
        self._used = START
        self._failure: Exception | None = None
        """Why the stream ended: a generator that has raised an error would look as if it were at its end."""

    @property
    def position(self) -> dict[str, Any]:
        """Return the position after the last batch in use, as JSON, for a checkpoint."""
        size = self._share.global_batch_size
        return {"data": self._dataset.fingerprint, "global_batch_size": size, "stream": self._used}

    def restore(self, position: dict[str, Any]) -> None:
        """Continue from the `position` of a checkpoint; raises DataError where the stream does not get there."""
        self._used = position["stream"]
        if (stream := self._stream) is None:
            return
        for _, future in self._read_ahead:
            future.cancel()
        self._read_ahead.clear()
        self._failure = None
        self._next = self._used["num_samples"] // self._share.global_batch_size
        # In the thread, after what it reads now.
        self._thread.submit(lambda: stream.restore(self._used)).result()
        if self._used["num_samples"] and not stream.is_stateful:
            # A run resumes before its log begins.
            num_samples = f"{self._used['num_samples']:,}"
            self._dataset.notes = [
                f"the first {num_samples} samples of data.source were read again: it has no state_dict()"
            ]

    def set_share(self, share: Share) -> None:
        """Take other slots of every global batch from the next request on."""
        self._share = share

    def microbatches(self, step: int) -> list[Microbatch]:
        """Return this rank's microbatches of `step`, not before the last one; batches between are left out."""
        batch = broadcast_batch(None if self._stream is None else self._take(step))
        self._used = batch.position
        return [self._microbatch(batch, int(row[0]), len(row)) for row in self._share.slots]

    def close(self) -> None:
        """Stop the thread after its current sample and close the stream; wait a few seconds at most."""
        self._thread.close(None if self._stream is None else self._stream.close)

    def _take(self, step: int) -> StreamBatch:
        while True:
            while len(self._read_ahead) <= self._prefetch.num_batches:
                self._read_ahead.append((self._next, self._thread.submit(self._read_batch)))
                self._next += 1
            number, future = self._read_ahead.popleft()
            assert number <= step, f"batch {step} of a stream that is at batch {number}"
            batch = future.result()
            if number == step:
                return batch

    def _read_batch(self) -> StreamBatch:
        if self._failure is not None:
            raise self._failure
        try:
            return self._read_next()
        except Exception as error:
            self._failure = error
            raise

    def _read_next(self) -> StreamBatch:
        assert self._stream is not None
        size = self._share.global_batch_size
        first = self._stream.num_samples
        samples = []
        for _ in range(size):
            if self._thread.is_closed:
                raise CancelledError
            samples.append(self._stream.read())
        numbers = range(first, first + size)
        inputs, targets = (stack([one[part] for one in samples], numbers, what) for part, what in enumerate(_PARTS))
        if self.limits is not None:
            self.limits.require(inputs, targets, numbers)
        return StreamBatch(inputs, targets, self._stream.position())

    def _microbatch(self, batch: StreamBatch, first: int, size: int) -> Microbatch:
        inputs, targets = batch.inputs[first : first + size], batch.targets[first : first + size]
        if self._pin_memory:
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        return Microbatch(inputs, targets, first)


_PARTS = ("inputs", "targets")
