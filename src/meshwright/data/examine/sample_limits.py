"""SampleLimits: what a model of tokens takes, compared with samples of a user's own before they reach the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from meshwright.data.numbered_samples import IGNORED
from meshwright.data.order import Indices
from meshwright.errors import DataError
from meshwright.spec.job.job import Job
from meshwright.spec.job.user_object import is_object_source
from meshwright.spec.model.model_source import resolve_architecture

if TYPE_CHECKING:
    from torch import Tensor

    Stacked: TypeAlias = Tensor | npt.NDArray[Any]
    """Samples along the first dim."""

_DTYPES = {"inputs": ("int64", "int32"), "targets": ("int64",)}
"""What an embedding and the next-token loss of torch take."""


class SampleLimits(NamedTuple):
    """Shape and range of the tokens that a built-in model takes."""

    source: str
    """data.source, for messages."""
    seq_len: int
    vocab_size: int

    def require(self, inputs: Stacked, targets: Stacked, numbers: Sequence[int] | Indices) -> None:
        """Raise DataError where stacked samples are no tokens of this model; `numbers` are those of the samples.

        Values are read in the host's memory alone: those of a device would have to be waited for.
        """
        for what, values in (("inputs", inputs), ("targets", targets)):
            shape, dtype = list(values.shape[1:]), str(values.dtype).removeprefix("torch.")
            if dtype not in _DTYPES[what] or shape != [self.seq_len]:
                raise self._error(
                    f"{what} of sample {numbers[0]}",
                    f"are {dtype} {shape}, and the model takes tokens, {' or '.join(_DTYPES[what])} [{self.seq_len}] "
                    "(train.seq_len)",
                )
            if isinstance(values, np.ndarray):
                self._require_range(what, values, numbers)
            elif values.device.type == "cpu":
                self._require_range(what, values.detach().numpy(), numbers)

    def _require_range(self, what: str, values: npt.NDArray[Any], numbers: Sequence[int] | Indices) -> None:
        if values.min() >= 0 and values.max() < self.vocab_size:
            return
        is_bad = (values < 0) | (values >= self.vocab_size)
        if what == "targets":
            is_bad &= values != IGNORED
        if not is_bad.any():
            return
        row, place = np.argwhere(is_bad)[0].tolist()
        raise self._error(
            f"{what} of sample {numbers[row]}",
            f"hold {int(values[row, place])} at place {place}, and the model's tokens are 0 to {self.vocab_size - 1}"
            + (f" (a target of {IGNORED} is left out)" if what == "targets" else ""),
        )

    def _error(self, where: str, problem: str) -> DataError:
        return DataError(
            f"the {where} of data.source = {self.source!r} {problem}: change the samples, or set train.seq_len and "
            "model.options to fit them"
        )


def sample_limits(job: Job) -> SampleLimits | None:
    """Return the limits of a user's samples; None where the model is the user's, too, or the data is a text."""
    architecture = resolve_architecture(job.model) if is_object_source(job.data.source) else None
    return None if architecture is None else SampleLimits(job.data.source, job.train.seq_len, architecture.vocab_size)
