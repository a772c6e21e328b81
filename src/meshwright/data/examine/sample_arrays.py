"""Samples of any dataset as arrays: their shapes, and a digest by which two reads are compared."""

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.data.user_data import as_array


def arrays_of(sample: tuple[Any, ...]) -> list[npt.NDArray[Any]]:
    """Return the parts of a sample, (inputs, targets) and what a dataset adds, as arrays."""
    return [as_array(value) for value in sample]


def shapes_of(sample: tuple[Any, ...]) -> list[str]:
    """Return dtype and shape of each part of a sample: "int64 [256]"."""
    return [f"{array.dtype} {list(array.shape)}" for array in arrays_of(sample)]


def digest_of(sample: tuple[Any, ...]) -> bytes:
    """Return a hash of the values, dtypes and shapes of a sample."""
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays_of(sample):
        digest.update(f"{array.dtype.str} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()
