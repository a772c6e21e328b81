"""Corpora in the formats of other trainers, written by hand as these publish them."""

import io
import json
import struct
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MEGATRON_CODES = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "f8": 6, "f4": 7, "u2": 8}
_MDS_CODES = {"uint16": 16, "int32": 33, "int64": 65}


def write_megatron(prefix: Path, documents: Sequence[Sequence[int]], dtype: str = "i4") -> Path:
    """Write PREFIX.bin and PREFIX.idx with one sequence for each document, and return the prefix."""
    arrays = [np.array(document, f"<{dtype}") for document in documents]
    lengths = np.array([len(array) for array in arrays], "<i4")
    places = np.concatenate([[0], np.cumsum(lengths)])[:-1] * np.dtype(dtype).itemsize
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, MEGATRON_CODES[dtype], len(arrays), len(arrays) + 1)
    prefix.with_name(f"{prefix.name}.bin").write_bytes(b"".join(array.tobytes() for array in arrays))
    prefix.with_name(f"{prefix.name}.idx").write_bytes(
        header + lengths.tobytes() + places.astype("<i8").tobytes() + np.arange(len(arrays) + 1, dtype="<i8").tobytes()
    )
    return prefix


def write_mds(folder: Path, columns: Mapping[str, str], shards: Sequence[Sequence[Mapping[str, Any]]]) -> Path:
    """Write an MDS folder; columns are encodings by name, a shard is its rows."""
    folder.mkdir()
    names = sorted(columns)
    sizes = [_fixed_bytes(columns[name]) for name in names]
    config = {"version": 2, "format": "mds", "compression": None, "hashes": [], "size_limit": 2**26}
    config |= {"column_names": names, "column_encodings": [columns[name] for name in names], "column_sizes": sizes}
    index = []
    for number, rows in enumerate(shards):
        data = [_row([_encoded(columns[name], row[name]) for name in names], sizes) for row in rows]
        text = json.dumps(config, sort_keys=True).encode()
        ends = np.cumsum([0, *map(len, data)]) + 4 + 4 * (len(rows) + 1) + len(text)
        shard = folder / f"shard.{number:05}.mds"
        shard.write_bytes(np.array([len(rows), *ends], "<u4").tobytes() + text + b"".join(data))
        raw = {"basename": shard.name, "bytes": shard.stat().st_size, "hashes": {}}
        index.append({**config, "raw_data": raw, "samples": len(rows), "zip_data": None})
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": index}))
    return folder


def _fixed_bytes(encoding: str) -> int | None:
    kind, _, rest = encoding.partition(":")
    dtype, _, shape = rest.partition(":")
    if kind == "int":
        return 8
    return int(shape) * np.dtype(dtype).itemsize if shape else None


def _encoded(encoding: str, value: Any) -> bytes:
    kind, _, rest = encoding.partition(":")
    if kind != "ndarray":
        found: bytes = {"str": str.encode, "int": lambda n: struct.pack("<q", n), "bytes": bytes}[kind](value)
        return found
    dtype, _, shape = rest.partition(":")
    array: npt.NDArray[Any] = value
    code = b"" if dtype else bytes([_MDS_CODES[array.dtype.name]])
    # One dim, whose size is stated in 16 bits.
    sizes = b"" if shape else bytes([1 << 2 | 1]) + struct.pack("<H", len(array))
    return code + sizes + array.tobytes()


def _row(values: Sequence[bytes], sizes: Sequence[int | None]) -> bytes:
    stated = [len(value) for value, size in zip(values, sizes, strict=True) if size is None]
    return np.array(stated, "<u4").tobytes() + b"".join(values)


def write_tar(path: Path, members: Mapping[str, bytes]) -> Path:
    """Write an archive with these members in order."""
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path
