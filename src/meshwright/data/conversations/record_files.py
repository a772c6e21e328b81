"""Records of JSONL and Parquet files, with all of their fields."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright.errors import DataError
from meshwright.extras import import_extra

RECORD_SUFFIXES = (".jsonl", ".ndjson", ".parquet")
_ROWS = 1024

Records = Iterator[tuple[str, dict[str, Any]]]
"""The place and the fields of each record."""


def read_records(path: Path, columns: Sequence[str]) -> Records:
    """Yield the place and the fields of each record of a file; raises DataError if it cannot be read.

    Of a Parquet file only those of `columns` that it has are read, or all if it has none of them.
    """
    try:
        yield from _parquet(path, columns) if path.suffix.lower() == ".parquet" else _jsonl(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"{path} cannot be read ({reason}): change its permissions, or data.source") from error


def _jsonl(path: Path) -> Records:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise DataError(f"{where} is no JSON ({error}): fix or remove the line") from error
            if not isinstance(record, dict):
                raise DataError(f"{where} is a JSON {type(record).__name__}, not an object: fix or remove the line")
            yield where, record


def _parquet(path: Path, columns: Sequence[str]) -> Records:
    parquet = import_extra("pyarrow.parquet", f"reading {path}")
    arrow = import_extra("pyarrow", f"reading {path}")
    try:
        with parquet.ParquetFile(path) as file:
            present, row = file.schema_arrow.names, 0
            chosen = [column for column in columns if column in present] or present
            for batch in file.iter_batches(batch_size=_ROWS, columns=chosen):
                for record in batch.to_pylist():
                    row += 1
                    yield f"{path}, row {row}", record
    except arrow.ArrowInvalid as error:
        raise DataError(f"{path} is no Parquet file ({error}): rename or replace it, or change data.source") from error
