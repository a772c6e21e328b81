"""New safetensors files whose tensors are then written in place, piece by piece, by one or several processes."""

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch

from meshwright.checkpoint.safetensors.safetensors_file import DTYPES
from meshwright.checkpoint.safetensors.safetensors_header import LENGTH_BYTES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8


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
