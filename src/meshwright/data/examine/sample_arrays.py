"""Samples of any dataset as arrays, and their shapes."""

from typing import Any

import numpy.typing as npt

from meshwright.data.user_data import as_array


def arrays_of(sample: tuple[Any, ...]) -> list[npt.NDArray[Any]]:
    """Return the parts of a sample, (inputs, targets) and what a dataset adds, as arrays."""
    return [as_array(value) for value in sample]


def shapes_of(sample: tuple[Any, ...]) -> list[str]:
    """Return dtype and shape of each part of a sample: "int64 [256]"."""
    return [f"{array.dtype} {list(array.shape)}" for array in arrays_of(sample)]
