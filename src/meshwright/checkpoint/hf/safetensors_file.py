"""SafetensorsFile: a checked header, and tensors read by rows, without mapping the file into memory."""

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from meshwright.errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By their name in a header; a file may hold others, which are not read."""

LENGTH_BYTES = 8
"""Bytes of the header's length at the start of a file."""

_MAX_HEADER_BYTES = 100_000_000


class StoredEntry(NamedTuple):
    """One tensor of a file, as its header describes it."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""
    num_bytes: int


class SafetensorsFile:
    """A file whose header covers each of its bytes exactly once; raises CheckpointError for any other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.entries = _read_header(file, path.stat().st_size)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read as safetensors ({error}): copy it again") from error

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Return one tensor as stored, or its `rows` (start, end) of dim 0."""
        entry = self.entries[name]
        shape, start, num_bytes = entry.shape, entry.start, entry.num_bytes
        if rows is not None:
            row_bytes = num_bytes // max(shape[0], 1)
            shape = (rows[1] - rows[0], *shape[1:])
            start, num_bytes = start + rows[0] * row_bytes, shape[0] * row_bytes
        data = torch.empty(num_bytes, dtype=torch.uint8)
        try:
            with self.path.open("rb", buffering=0) as file:
                _fill(file, start, data.numpy().data)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path} cannot be read ({error}): copy it again") from error
        return data.view(DTYPES[entry.dtype]).view(shape)


def unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict; raises ValueError for a key that occurs twice, which json would overwrite."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key} occurs twice")
        found[key] = value
    return found


def _fill(file: BinaryIO, start: int, into: memoryview) -> None:
    file.seek(start)
    num_read = 0
    while num_read < len(into):
        count = file.readinto(into[num_read:])  # type: ignore[attr-defined]
        if not count:
            raise ValueError("it has become shorter")
        num_read += count


def _read_header(file: BinaryIO, file_bytes: int) -> dict[str, StoredEntry]:
    """Return the tensors by name, in the order of their bytes; raises ValueError for an invalid header."""
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    first = LENGTH_BYTES + length
    if file_bytes < LENGTH_BYTES or length > _MAX_HEADER_BYTES or first > file_bytes:
        raise ValueError(f"{file_bytes} bytes are too few for its header")
    try:
        header = json.loads(file.read(length), object_pairs_hook=unique_keys)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    header.pop("__metadata__", None)
    entries = {name: _entry(name, value, first) for name, value in header.items()}
    ordered = sorted(entries.items(), key=lambda item: (item[1].start, item[1].num_bytes))
    end = first
    for name, entry in ordered:
        if entry.start != end:
            raise ValueError(f"{name} starts at byte {entry.start} where {end} was expected")
        end += entry.num_bytes
    if end != file_bytes:
        raise ValueError(f"it has {file_bytes} bytes, its header describes {end}")
    return dict(ordered)


def _entry(name: str, value: Any, first: int) -> StoredEntry:
    try:
        dtype, shape, (start, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"its header has no dtype, shape and data_offsets of {name}") from None
    if not isinstance(dtype, str) or not all(type(size) is int and size >= 0 for size in (*shape, start, end)):
        raise ValueError(f"its header has an invalid dtype, shape or data_offsets of {name}")
    if end < start or (dtype in DTYPES and prod(shape) * DTYPES[dtype].itemsize != end - start):
        raise ValueError(f"{name} of shape {list(shape)} in {dtype} does not have {end - start} bytes")
    return StoredEntry(dtype, shape, first + start, end - start)
