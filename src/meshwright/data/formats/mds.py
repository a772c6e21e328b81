"""MosaicML's MDS folders, uncompressed: rows of text, read as documents, or of tokens, read in place.

https://github.com/mosaicml/streaming, format version 2. A shard is the number of rows, the offset of each and of the
end (all uint32), the columns as JSON, and the rows: the sizes of the columns without a fixed one (uint32), then their
values. index.json lists the shards.
"""

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from meshwright.data.cache.token_file import Tokens
from meshwright.data.formats.document_form import DocumentForm
from meshwright.data.formats.readers import Broken, Piece
from meshwright.data.formats.source_file import SourceFile
from meshwright.errors import DataError

INDEX = "index.json"
_VERSION = 2
_ARRAY, _BYTES = "ndarray", "bytes"
_BYTES_DTYPE = "int64"
"""The type that LLM Foundry writes tokens of a column of bytes in."""
_DTYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 32: "uint32", 33: "int32", 64: "uint64", 65: "int64"}
"""Types of integers by their code in a value of a column "ndarray", which fixes none."""

_Array = npt.NDArray[Any]


@dataclass(frozen=True)
class _Column:
    """Where a column's value is in a row."""

    encoding: str
    fixed_bytes: tuple[int | None, ...]
    """Size of each column up to and with this one; None for one that each row states."""
    num_sizes: int
    """Sizes that a row states before its values."""


def mds_shards(folder: Path) -> list[Path]:
    """Return the shards of an MDS folder in order; raises DataError for what is no index, or one of another format."""
    index = folder / INDEX
    try:
        found = _listed(index, index.stat().st_mtime_ns)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{index} is no index of MDS shards ({error!r}): replace it, or remove it") from error
    for name in found:
        if name in ("", "..") or Path(name).name != name:
            raise DataError(f"{index} lists a shard {name!r}, which is no file's name in its folder: replace it")
    return [folder / name for name in found]


class _Listed(NamedTuple):
    """What index.json says of a shard."""

    num_rows: int
    num_bytes: int


@lru_cache(maxsize=8)
def _listed(index: Path, modified_ns: int) -> dict[str, _Listed]:
    """Return the shards of an index by name; raises what reading another file than one does."""
    found = {}
    for shard in json.loads(index.read_text(encoding="utf-8"))["shards"]:
        given = (shard["format"], shard["version"], shard["compression"])
        if given != ("mds", _VERSION, None):
            raise DataError(
                f"{index} lists shards of format, version and compression {given}: only uncompressed MDS "
                f"of version {_VERSION} is read; write them so with MDSWriter(compression=None)"
            )
        raw = shard["raw_data"]
        found[str(raw["basename"])] = _Listed(int(shard["samples"]), int(raw["bytes"]))
    return found


def _difference(shard: Path, offsets: _Array) -> str | None:
    """Return how a shard differs from what the index in its folder says of it; None if it does not, or is in none.

    A truncated shard is left to who reads it.
    """
    index = shard.parent / INDEX
    if not index.is_file():
        return None
    mds_shards(shard.parent)
    listed = _listed(index, index.stat().st_mtime_ns).get(shard.name)
    held = _Listed(len(offsets) - 1, shard.stat().st_size)
    if listed is None or listed == held or held.num_bytes < offsets[-1]:
        return None
    return (
        f"{shard} has {held.num_rows} rows in {held.num_bytes} bytes, and {INDEX} lists {listed.num_rows} in "
        f"{listed.num_bytes}: one of them is of another corpus; replace it"
    )


def holds_tokens(folder: Path, text_key: str) -> bool:
    """Return whether the column `text_key` of an MDS folder holds arrays or bytes, not text."""
    shards = mds_shards(folder)
    if not shards:
        return False
    try:
        with shards[0].open("rb") as stream:
            columns = _read_header(stream)[1]
    except (OSError, ValueError):
        return False  # reported where it is read
    return text_key in columns and columns[text_key].encoding.partition(":")[0] in (_ARRAY, _BYTES)


def read_mds_text(file: SourceFile, form: DocumentForm) -> Iterator[Piece | Broken]:
    """Yield the rows of one shard, whose column of that name is text; other forms of documents are not read."""
    with file.open("rb") as stream:
        try:
            offsets, columns = _read_header(stream)
        except ValueError as error:
            yield Broken(f"{file} is no MDS shard ({error}): replace it, or leave it out of data.source")
            return
        if not form.takes_text:
            yield Broken(f"{file}: rows of MDS are read as text only: write JSONL or Parquet that holds {form.what}")
            return
        if isinstance(file, Path) and (difference := _difference(file, offsets)) is not None:
            yield Broken(difference)
        if (missing := form.missing([*columns], f"{file}")) is not None:
            yield missing
            return
        (text_key,) = form.columns
        column = columns[text_key]
        if column.encoding != "str":
            yield Broken(f"{file}: column {text_key!r} is {column.encoding}, not str: set data.text_key to a text")
            return
        for number, (begin, end) in enumerate(pairwise(offsets.tolist()), start=1):
            row = stream.read(end - begin)
            if len(row) < end - begin:
                raise EOFError(f"it ends in row {number} of {len(offsets) - 1}")
            try:
                yield _text_of(row, column)
            except ValueError as error:
                yield Broken(f"{file}, row {number} holds no UTF-8 text ({error}): fix or remove the row")


def _text_of(row: bytes, column: _Column) -> Piece:
    """Return the text of a row; raises ValueError where it is none, or its sizes are wrong."""
    try:
        begins, sizes = _places(np.frombuffer(row, np.uint8), np.zeros(1, np.int64), column)
    except IndexError as error:
        raise ValueError("it is shorter than its sizes") from error
    start, end = int(begins[0]), int(begins[0] + sizes[0])
    if end > len(row):
        raise ValueError("its sizes are larger than it")
    utf8 = row[start:end]
    utf8.decode()
    return Piece(utf8, ends_document=True)


class MdsTokens:
    """The tokens of a column of all rows, one after another, from mapped shards; 16 bytes of memory for each row."""

    def __init__(self, shards: Sequence[Path], text_key: str) -> None:
        self._shards = [_TokenShard(shard, text_key) for shard in shards]
        self._ends = np.cumsum([0, *(shard.ends[-1] for shard in self._shards)])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the type of the first shard's tokens."""
        return self._shards[0].dtype

    def num_rows(self, num_tokens: int) -> int:
        """Return the rows that begin in the first `num_tokens` tokens."""
        firsts = (shard.ends[:-1] + end for shard, end in zip(self._shards, self._ends[:-1], strict=True))
        return sum(int(np.searchsorted(first, num_tokens)) for first in firsts)

    def __getitem__(self, place: slice) -> Tokens:
        """Return the tokens of a range, copied."""
        start, stop, _ = place.indices(len(self))
        parts: list[Tokens] = []
        while start < stop:
            number = int(np.searchsorted(self._ends, start, side="right")) - 1
            shard, first = self._shards[number], int(self._ends[number])
            part = shard.read(start - first, min(stop, int(self._ends[number + 1])) - first)
            parts += part
            start = min(stop, int(self._ends[number + 1]))
        return np.concatenate(parts) if parts else np.empty(0, self.dtype)


class _TokenShard:
    """The mapped rows of one shard."""

    def __init__(self, path: Path, text_key: str) -> None:
        try:
            with path.open("rb") as stream:
                offsets, columns = _read_header(stream)
            column = columns[text_key]
            self._raw = np.memmap(path, np.uint8, mode="r")
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{path} is no MDS shard with a column {text_key!r} ({error!r}): replace it") from error
        if len(self._raw) < offsets[-1]:
            raise DataError(f"{path} is truncated: it has {len(self._raw)} bytes of {offsets[-1]}: replace it")
        if (difference := _difference(path, offsets)) is not None:
            raise DataError(difference)
        try:
            begins, sizes = _places(self._raw, offsets[:-1].astype(np.int64), column)
            if (begins + sizes > offsets[1:]).any():
                raise IndexError("sizes are larger than their rows")
        except IndexError as error:
            raise DataError(f"{path} is damaged ({error}): replace it") from error
        self.dtype, header_bytes = self._types(path, column.encoding, begins)
        self._begins = begins + header_bytes
        counts, rest = np.divmod(sizes - header_bytes, self.dtype.itemsize)
        if rest.any() or (counts < 0).any():
            row = int(np.flatnonzero(rest | (counts < 0))[0]) + 1
            raise DataError(f"{path}, row {row}: column {text_key!r} is no array of {self.dtype}: replace the shard")
        self.ends = np.concatenate([[0], np.cumsum(counts)])

    def _types(self, path: Path, encoding: str, begins: _Array) -> tuple[np.dtype[Any], _Array | int]:
        """Return the type of the tokens, and the bytes of each value before them."""
        if encoding == _BYTES:
            return np.dtype(_BYTES_DTYPE).newbyteorder("<"), 0
        _, _, fixed = encoding.partition(":")
        dtype_name, has_shape, _ = fixed.partition(":")
        header_bytes: _Array | int = 0
        if not dtype_name:
            codes = np.unique(self._raw[begins])
            if len(codes) != 1 or int(codes[0]) not in _DTYPES:
                raise DataError(f"{path}: its tokens have types of codes {codes.tolist()}: write integers of one type")
            dtype_name, header_bytes = _DTYPES[int(codes[0])], 1
        if not has_shape:
            # A byte with the number of dims and the size of each, then the shape.
            head = self._raw[begins + header_bytes].astype(np.int64)
            header_bytes = header_bytes + 1 + ((head >> 2) << (head & 3))
        return np.dtype(dtype_name).newbyteorder("<"), header_bytes

    def read(self, start: int, stop: int) -> list[Tokens]:
        """Return the tokens of a range, by row."""
        parts = []
        while start < stop:
            row = int(np.searchsorted(self.ends, start, side="right")) - 1
            end = min(stop, int(self.ends[row + 1]))
            place = int(self._begins[row]) + (start - int(self.ends[row])) * self.dtype.itemsize
            data = self._raw[place : place + (end - start) * self.dtype.itemsize]
            parts.append(np.frombuffer(data.tobytes(), self.dtype))
            start = end
        return parts


def _read_header(stream: BinaryIO) -> tuple[_Array, dict[str, _Column]]:
    """Return the offsets of a shard's rows and of its end, and its columns; the stream is then at the first row.

    Raises ValueError for what is no shard.
    """
    try:
        (num_rows,) = struct.unpack("<I", stream.read(4))
        data = stream.read(4 * (num_rows + 1))
        offsets = np.frombuffer(data, "<u4", count=num_rows + 1)
        size_bytes = int(offsets[0]) - 4 - len(data)
        if size_bytes < 0 or (np.diff(offsets.astype(np.int64)) < 0).any():
            raise ValueError("its rows are not in order")
        config = json.loads(stream.read(size_bytes))
        if config["format"] != "mds":
            raise ValueError(f"its format is {config['format']!r}")
        return offsets, dict(_columns(config["column_names"], config["column_encodings"], config["column_sizes"]))
    except (struct.error, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(repr(error)) from error


def _columns(
    names: Sequence[str], encodings: Sequence[str], sizes: Sequence[int | None]
) -> Iterator[tuple[str, _Column]]:
    num_stated = sum(not size for size in sizes)
    for place, (name, encoding) in enumerate(zip(names, encodings, strict=True)):
        fixed = tuple(None if not size else int(size) for size in sizes[: place + 1])
        yield str(name), _Column(str(encoding), fixed, num_stated)


def _places(raw: _Array, rows: _Array, column: _Column) -> tuple[_Array, _Array]:
    """Return the place and size of the column's value in each row, int64 [num_rows]; `rows` are their places."""
    begins, sizes, stated = rows + 4 * column.num_sizes, np.zeros_like(rows), rows
    for fixed in column.fixed_bytes:
        begins = begins + sizes
        if fixed:
            sizes = np.full_like(rows, fixed)
        else:
            sizes = sum((raw[stated + byte].astype(np.int64) << (8 * byte) for byte in range(4)), np.zeros_like(rows))
            stated = stated + 4
    return begins, sizes
