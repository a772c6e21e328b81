"""SafetensorsFile: a checked header, and tensors read by rows, without mapping the file into memory.

New files are written in place, piece by piece, by one or several processes.
"""

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from meshwright.checkpoint.safetensors.safetensors_header import LENGTH_BYTES, StoredEntry, read_entries
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
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8


class SafetensorsFile:
    """A file whose header covers each of its bytes exactly once; raises CheckpointError for any other."""

    def __init__(self, path: Path, entries: dict[str, StoredEntry] | None = None) -> None:
        """`entries` are those that `read_entries` returned, if they were read already."""
        self.path = path
        self.entries = read_entries(path) if entries is None else entries

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


def _fill(file: BinaryIO, start: int, into: memoryview) -> None:
    file.seek(start)
    num_read = 0
    while num_read < len(into):
        count = file.readinto(into[num_read:])  # type: ignore[attr-defined]
        if not count:
            raise ValueError("it has become shorter")
        num_read += count


def safetensors_header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> bytes:
    """Return the bytes in front of the first tensor; the others follow each other without gaps.

    `tensors` are dtype and shape by name, wider dtypes first, so that all are aligned.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def create(path: Path, header: bytes, num_bytes: int) -> None:
    """Create a file of `header` and `num_bytes` of tensors, which are zeros until they are written."""
    with path.open("xb", buffering=0) as file:
        write_at(file.fileno(), memoryview(header), 0)
        file.truncate(len(header) + num_bytes)


def write_at(descriptor: int, data: memoryview, start: int) -> None:
    """Write `data` into an open file from byte `start` on."""
    num_written = 0
    while num_written < len(data):
        num_written += os.pwrite(descriptor, data[num_written:], start + num_written)
