"""Readers of text, JSONL and Parquet files as pieces of documents, in bounded memory."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from meshwright.errors import DataError
from meshwright.extras import import_extra

_PIECE_BYTES = 4 * 2**20
_PARQUET_ROWS = 1024

JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson"})
PARQUET_SUFFIXES = frozenset({".parquet"})


@dataclass(frozen=True)
class Piece:
    """Valid UTF-8 text; a long document is several pieces."""

    utf8: bytes
    ends_document: bool

    @property
    def text(self) -> str:
        """Return the piece as str."""
        return self.utf8.decode()


def read_file(path: Path, text_key: str) -> Iterator[Piece]:
    """Yield the pieces of one file, by its suffix; raises DataError with the file and the location.

    A document is a text file, a JSONL line or a Parquet row; empty documents are skipped.
    """
    suffix = path.suffix.lower()
    try:
        if suffix in PARQUET_SUFFIXES:
            yield from _parquet(path, text_key)
            return
        with path.open("rb") as file:
            yield from _jsonl(path, file, text_key) if suffix in JSONL_SUFFIXES else _text(path, file)
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist: set data.source to a file or folder that does") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"{path} cannot be read ({reason}): change its permissions, or data.source") from error


def utf8_cut(utf8: bytes, end: int) -> int:
    """Return the largest character boundary of `utf8` up to `end`."""
    if end >= len(utf8):
        return len(utf8)
    while end and utf8[end] & 0xC0 == 0x80:
        end -= 1
    return end


def _text(path: Path, file: BinaryIO) -> Iterator[Piece]:
    rest, offset = b"", 0
    chunk = file.read(_PIECE_BYTES)
    while chunk:
        following = file.read(_PIECE_BYTES)
        rest += chunk
        # Pieces are tokenized separately, so a long document is split after a line if possible.
        end = len(rest) if not following else rest.rfind(b"\n") + 1 or _last_character(rest)
        piece, rest = rest[:end], rest[end:]
        try:
            piece.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path} is no UTF-8 text: byte {offset + error.start} ({piece[error.start : error.start + 1]!r}) "
                "starts no character: convert the file to UTF-8, or leave it out of data.source"
            ) from error
        yield Piece(piece, ends_document=not following)
        offset += end
        chunk = following


def _last_character(utf8: bytes) -> int:
    """Return the start of the last character of `utf8`, which may be incomplete."""
    start = len(utf8) - 1
    while start > 0 and utf8[start] & 0xC0 == 0x80:
        start -= 1
    return start or len(utf8)


def _jsonl(path: Path, file: BinaryIO, text_key: str) -> Iterator[Piece]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(
                f"{where} is no JSON ({error}): each line of a JSONL file is one JSON object; "
                "fix or remove the line, or change data.source"
            ) from error
        if not isinstance(record, dict):
            raise DataError(
                f"{where} is a JSON {type(record).__name__}, not an object: each line of a JSONL file is one object "
                f'with its text under data.text_key, such as {{"{text_key}": "..."}}'
            )
        if text_key not in record:
            raise DataError(_missing_key(where, text_key, list(record)))
        yield from _document(record[text_key], where, text_key)


def _parquet(path: Path, text_key: str) -> Iterator[Piece]:
    parquet = import_extra("pyarrow.parquet", f"reading {path}")
    arrow = import_extra("pyarrow", f"reading {path}")
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if text_key not in columns:
                raise DataError(_missing_key(f"{path}", text_key, columns))
            row = 0
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=[text_key]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield from _document(value, f"{path}, row {row}", text_key)
    except arrow.ArrowInvalid as error:
        raise DataError(f"{path} is no Parquet file ({error}): rename or replace it, or change data.source") from error


def _document(text: Any, where: str, text_key: str) -> Iterator[Piece]:
    if not isinstance(text, str):
        raise DataError(
            f"{where}: field {text_key!r} is {json.dumps(text, default=str)[:80]}, not text: "
            "remove the record, or set data.text_key to a field of text"
        )
    try:
        utf8 = text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: field {text_key!r} holds half of a surrogate pair ({text[error.start]!a}), "
            "which UTF-8 cannot express: fix or remove the record"
        ) from error
    if utf8:
        yield Piece(utf8, ends_document=True)


def _missing_key(where: str, text_key: str, present: list[str]) -> str:
    keys = ", ".join(repr(key) for key in present) or "none"
    return f"{where} has no field {text_key!r} (its fields: {keys}): set data.text_key to the one that holds the text"
