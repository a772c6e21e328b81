"""SampleStream: the samples of a user's iterable, epoch after epoch, from any position that was saved.

With state_dict() and load_state_dict(), as torchdata's loaders have them, it continues at once and exactly. Without, it
reads as many samples again, and refuses a stream that then gives others.
"""

from collections.abc import Iterator
from typing import Any

from meshwright.data.streams.stream_state import decoded, encoded
from meshwright.data.user_data import explained_reading, load_user_data, require_pair, sample_digest
from meshwright.errors import DataError
from meshwright.log import logger
from meshwright.spec.job.sections import DataSection

START: dict[str, Any] = {"num_samples": 0, "epoch": 0, "num_in_epoch": 0, "state": None, "last_sample": None}
"""Position before the first sample."""


class SampleStream:
    """One reader of data.source; not for several threads."""

    def __init__(self, section: DataSection, data: Any = None) -> None:
        """Read the iterable `data`, which data.source has just made, or one that it makes now."""
        self._section, self._source = section, section.source
        self._data: Any = load_user_data(section) if data is None else data
        self._iterator: Iterator[Any] | None = None
        self._last: tuple[Any, Any] | None = None
        self.num_samples = self._epoch = self._num_in_epoch = 0

    @property
    def is_stateful(self) -> bool:
        """Return whether its position can be saved and loaded without reading again."""
        return hasattr(self._data, "state_dict")

    def read(self) -> tuple[Any, Any]:
        """Return the next sample, after the last one of an epoch the first one of the next.

        Raises DataError where there is none.
        """
        while True:
            with explained_reading(self.num_samples, self._source):
                if self._iterator is None:
                    self._iterator = iter(self._data)
                found = next(self._iterator, _END)
            if found is _END:
                self._begin_epoch()
                continue
            self._last = require_pair(found, self.num_samples, self._source)
            self.num_samples += 1
            self._num_in_epoch += 1
            return self._last

    def _begin_epoch(self) -> None:
        """Begin the iterable again; an iterator, such as a generator, is made again."""
        read = f"after {self.num_samples:,} samples" if self.num_samples else "without a sample"
        if not self._num_in_epoch:
            again = ", and has none when it is begun again" if self.num_samples else ""
            raise DataError(
                f"data.source = {self._source!r} ended {read}{again}: let it give more, or lower train.steps"
            )
        logger.info("data.source = %r ended %s: epoch %d begins", self._source, read, self._epoch + 2)
        self._epoch, self._num_in_epoch = self._epoch + 1, 0
        if self._iterator is self._data:
            self._data = load_user_data(self._section)
        self._iterator = None

    def position(self) -> dict[str, Any]:
        """Return where the stream is, as JSON; raises DataError for a state that JSON cannot hold."""
        counts = {"num_samples": self.num_samples, "epoch": self._epoch, "num_in_epoch": self._num_in_epoch}
        if self.is_stateful:
            return START | counts | {"state": encoded(self._data.state_dict())}
        return START | counts | {"last_sample": None if self._last is None else sample_digest(self._last)}

    def restore(self, position: dict[str, Any]) -> None:
        """Continue from a `position`; raises DataError where the stream does not get there."""
        if self._iterator is not None:
            self.close()
            self._data = load_user_data(self._section)
        self.num_samples = self._epoch = self._num_in_epoch = 0
        if position["state"] is not None:
            if not self.is_stateful:
                raise DataError(
                    f"the checkpoint has a state of data.source = {self._source!r}, which has no load_state_dict() any "
                    "more: put it back, or start a new run in another run.dir"
                )
            self._data.load_state_dict(decoded(position["state"]))
            self.num_samples, self._epoch = position["num_samples"], position["epoch"]
            self._num_in_epoch = position["num_in_epoch"]
        elif position["num_samples"]:
            self._read_again(position)

    def _read_again(self, position: dict[str, Any]) -> None:
        num_samples: int = position["num_samples"]
        logger.info(
            "data.source = %r has no state_dict(), so its first %s samples are read again, to where the checkpoint was",
            *(self._source, f"{num_samples:,}"),
        )
        for _ in range(num_samples):
            sample = self.read()
        if sample_digest(sample) != position["last_sample"]:
            raise DataError(
                f"data.source = {self._source!r} gives another sample {num_samples - 1} than before the checkpoint, so "
                "that samples would be lost or repeated: draw random numbers from a generator with a fixed seed, or "
                "give it state_dict() and load_state_dict()"
            )

    def close(self) -> None:
        """Let the iterable go, with what it keeps open; worker processes of a torch DataLoader end."""
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()
        self._iterator = self._data = None


_END = object()
