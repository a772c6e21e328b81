"""SampleLimits: what a model of tokens takes, compared with samples of a user's own before they reach the device."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.data.numbered_samples import IGNORED
from meshwright.data.order import Indices
from meshwright.errors import DataError
from meshwright.spec.job.job import Job
from meshwright.spec.job.user_object import is_object_source
from meshwright.spec.model.model_source import resolve_architecture

_DTYPES = {"inputs": (torch.int64, torch.int32), "targets": (torch.int64,)}
"""What an embedding and the next-token loss of torch take."""


class SampleLimits(NamedTuple):
    """Shape and range of the tokens that a built-in model takes."""

    source: str
    """data.source, for messages."""
    seq_len: int
    vocab_size: int

    def require(self, inputs: Tensor, targets: Tensor, numbers: Sequence[int] | Indices) -> None:
        """Raise DataError where stacked samples are no tokens of this model; `numbers` are those of the samples.

        Values are read in the host's memory alone: those of a device would have to be waited for.
        """
        for what, values in (("inputs", inputs), ("targets", targets)):
            shape = list(values.shape[1:])
            if values.dtype not in _DTYPES[what] or shape != [self.seq_len]:
                wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES[what])
                raise self._error(
                    f"{what} of sample {numbers[0]}",
                    f"are {str(values.dtype).removeprefix('torch.')} {shape}, and the model takes tokens, {wanted} "
                    f"[{self.seq_len}] (train.seq_len)",
                )
            if values.device.type == "cpu":
                self._require_range(what, values, numbers)

    def _require_range(self, what: str, values: Tensor, numbers: Sequence[int] | Indices) -> None:
        lowest, highest = (int(end) for end in values.aminmax())
        if lowest >= 0 and highest < self.vocab_size:
            return
        is_bad = (values < 0) | (values >= self.vocab_size)
        if what == "targets":
            is_bad &= values != IGNORED
        if not is_bad.any():
            return
        row, place = is_bad.nonzero()[0].tolist()
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
