"""Megatron-LM's indexed files, PREFIX.bin and PREFIX.idx: tokens that are mapped, not copied.

megatron/core/datasets/indexed_dataset.py: the index is "MMIDIDX" and two zero bytes, the version 1 (uint64), the code
of the type (uint8), the numbers of sequences and of document indices (uint64), the length of each sequence (int32), its
place in bytes (int64), and the sequence that each document begins with, then the number of sequences (int64).
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from meshwright.data.cache.token_file import Tokens
from meshwright.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_VERSION = 1
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


@dataclass(frozen=True)
class MegatronTokens:
    """The tokens of all sequences, one after another as they are stored, and where each document begins."""

    tokens: Tokens
    first_tokens: npt.NDArray[np.int64]
    """Number of the first token of each document."""


def megatron_files(source: Path) -> tuple[Path, Path] | None:
    """Return (PREFIX.bin, PREFIX.idx) if `source` is one of these or PREFIX; None for another source.

    Raises DataError where one of both files is missing.
    """
    is_named = source.suffix in (".bin", ".idx")
    prefix = source.with_suffix("") if is_named else source
    files = (prefix.with_name(f"{prefix.name}.bin"), prefix.with_name(f"{prefix.name}.idx"))
    missing = [file for file in files if not file.is_file()]
    is_half = len(missing) == 1 and (is_named or not source.exists())
    if is_half or (is_named and source.exists() and missing):
        raise DataError(
            f"data.source = {str(source)!r} names Megatron's format, which is two files, PREFIX.bin and "
            f"PREFIX.idx, and {missing[0]} is missing: put it there, or name a text with another suffix"
        )
    return None if missing or (source.exists() and not is_named) else files


def map_megatron(bin_file: Path, idx_file: Path) -> MegatronTokens:
    """Return the mapped tokens; raises DataError where the files are damaged, truncated or do not fit each other."""
    with _read_errors(idx_file):
        data = np.memmap(idx_file, np.uint8, mode="r")
        magic, version, code, num_sequences, num_indices = _HEADER.unpack(data[: _HEADER.size].tobytes())
        if magic != _MAGIC or version != _VERSION or code not in _DTYPES:
            raise ValueError(f"it begins with {magic!r}, version {version}, type {code}")
        place = _HEADER.size
        lengths = np.frombuffer(data, "<i4", num_sequences, place)
        pointers = np.frombuffer(data, "<i8", num_sequences, place + lengths.nbytes)
        documents = np.frombuffer(data, "<i8", num_indices, place + lengths.nbytes + pointers.nbytes)
    dtype = np.dtype(_DTYPES[code])
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if (lengths < 0).any() or not np.array_equal(pointers, starts[:-1] * dtype.itemsize):
        raise DataError(f"{idx_file} does not list its sequences one after another: write it with Megatron's tools")
    if num_indices and (documents.min() < 0 or documents.max() > num_sequences):
        raise DataError(f"{idx_file} lists documents beyond its {num_sequences} sequences: write it again")
    size_bytes = bin_file.stat().st_size
    if size_bytes != starts[-1] * dtype.itemsize:
        raise DataError(
            f"{bin_file} has {size_bytes} bytes but {idx_file.name} lists {starts[-1]} tokens of {dtype.itemsize}: "
            "one of them is truncated or of another corpus; replace it"
        )
    tokens = np.asarray(np.memmap(bin_file, dtype, mode="r")) if size_bytes else np.empty(0, dtype)
    return MegatronTokens(tokens, starts[documents[:-1]])


@contextmanager
def _read_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, struct.error) as error:
        raise DataError(f"{file} is no index of Megatron's format, or truncated ({error}): replace it") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}): change its permissions, or data.source") from error
