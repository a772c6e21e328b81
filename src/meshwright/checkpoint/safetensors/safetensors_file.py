"""SafetensorsFile: a checked header, and tensors read by rows, without mapping the file into memory."""

from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from meshwright.checkpoint.safetensors.safetensors_header import StoredEntry, read_entries
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
