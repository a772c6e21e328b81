"""TensorSource: what an import needs of a folder or file of foreign weights."""

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor


class TensorSource(Protocol):
    """Named tensors, read on request."""

    path: Path
    others: list[str]
    """Names of what is no tensor."""

    @property
    def names(self) -> set[str]:
        """Return the names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor."""

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of one tensor."""

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Return one tensor, or its `rows` (start, end) of dim 0."""
