"""read_entries: the checked header of a safetensors file; needs no torch."""

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from meshwright.errors import CheckpointError

ITEM_BYTES = {
    **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1},
    **{"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1},
}
"""Bytes of one value by the name of its dtype; a file may hold others, which are not read."""

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


def read_entries(path: Path) -> dict[str, StoredEntry]:
    """Return the tensors of a file by name, in the order of their bytes.

    Raises CheckpointError for a file whose header does not cover each of its bytes exactly once.
    """
    try:
        with path.open("rb") as file:
            return _read_header(file, path.stat().st_size)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors ({error}): copy it again") from error


def unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict; raises ValueError for a key that occurs twice, which json would overwrite."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key} occurs twice")
        found[key] = value
    return found


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
    if end < start or (dtype in ITEM_BYTES and prod(shape) * ITEM_BYTES[dtype] != end - start):
        raise ValueError(f"{name} of shape {list(shape)} in {dtype} does not have {end - start} bytes")
    return StoredEntry(dtype, shape, first + start, end - start)
