"""write_safetensors: a safetensors file whose tensors are written piece by piece."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

import torch

from meshwright.checkpoint.hf.safetensors_file import DTYPES, LENGTH_BYTES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8


def write_safetensors(
    path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], data: Iterable[memoryview]
) -> int:
    """Write the new file `path` durably and return the bytes of its tensors.

    `tensors` are dtype and shape by name, wider dtypes first, so that all are aligned; `data` are their bytes in that
    order, cut anywhere.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    num_bytes = 0
    with path.open("xb", buffering=0) as file:
        _write(file.fileno(), memoryview(len(text).to_bytes(LENGTH_BYTES, "little") + text))
        for piece in data:
            _write(file.fileno(), piece)
            num_bytes += len(piece)
        os.fsync(file.fileno())
    assert num_bytes == end, f"{path}: {num_bytes} bytes of {end}"
    return num_bytes


def _write(descriptor: int, data: memoryview) -> None:
    num_written = 0
    while num_written < len(data):
        num_written += os.write(descriptor, data[num_written:])
