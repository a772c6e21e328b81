"""Readers of tables: Parquet, and Arrow IPC as files or streams, as Hugging Face's datasets caches them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.data.formats.document_form import DocumentForm
from meshwright.data.formats.readers import Broken, Piece
from meshwright.data.formats.source_file import SourceFile
from meshwright.extras import import_extra

_ROWS = 1024
_ARROW_FILE = b"ARROW1"


def read_parquet(file: SourceFile, form: DocumentForm) -> Iterator[Piece | Broken]:
    """Yield the rows of a Parquet file, in bounded memory."""
    parquet = import_extra("pyarrow.parquet", f"reading {file}")
    arrow = import_extra("pyarrow", f"reading {file}")
    row = 0
    try:
        with file.open("rb") as stream, parquet.ParquetFile(stream) as table:
            present = table.schema_arrow.names
            if (missing := form.missing(present, f"{file}")) is not None:
                yield missing
                return
            chosen = [column for column in form.columns if column in present]
            for batch in table.iter_batches(batch_size=_ROWS, columns=chosen):
                yield from _rows(batch, file, row, form)
                row += batch.num_rows
    except (arrow.ArrowException, ValueError, OverflowError) as error:
        yield _damaged(file, "Parquet", row, error)


def read_arrow(file: SourceFile, form: DocumentForm) -> Iterator[Piece | Broken]:
    """Yield the rows of an Arrow IPC file or stream; one of this machine is mapped, not read into memory."""
    arrow = import_extra("pyarrow", f"reading {file}")
    row = 0
    try:
        with _open_arrow(file, arrow) as stream:
            is_file = stream.read(len(_ARROW_FILE)) == _ARROW_FILE
            stream.seek(0)
            with arrow.ipc.open_file(stream) if is_file else arrow.ipc.open_stream(stream) as table:
                present = table.schema.names
                if (missing := form.missing(present, f"{file}")) is not None:
                    yield missing
                    return
                chosen = [column for column in form.columns if column in present]
                batches = (table.get_batch(i) for i in range(table.num_record_batches)) if is_file else iter(table)
                for batch in batches:
                    yield from _rows(batch.select(chosen), file, row, form)
                    row += batch.num_rows
    except (arrow.ArrowException, ValueError, OverflowError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        yield _damaged(file, "Arrow", row, error)


def _open_arrow(file: SourceFile, arrow: Any) -> Any:
    if isinstance(file, Path):
        # Python's own error for a missing file or right; Arrow raises another for an empty one.
        file.open("rb").close()
        return arrow.memory_map(str(file)) if file.stat().st_size else arrow.BufferReader(b"")
    return arrow.PythonFile(file.open("rb"), mode="r")


def _rows(batch: Any, file: SourceFile, first_row: int, form: DocumentForm) -> Iterator[Piece | Broken]:
    # Offsets of a damaged file may point beyond its bytes, at which Arrow would crash.
    batch.validate(full=True)
    for start in range(0, batch.num_rows, _ROWS):
        for number, record in enumerate(batch.slice(start, _ROWS).to_pylist(), start=first_row + start + 1):
            fields = {column: _without_null(value) for column, value in record.items()}
            yield form.document(fields, f"{file}, row {number}")


def _without_null(value: Any) -> Any:
    """Return a value without the keys that are null: those that only other rows of the file have."""
    if isinstance(value, dict):
        return {key: _without_null(inner) for key, inner in value.items() if inner is not None}
    return [_without_null(inner) for inner in value] if isinstance(value, list) else value


def _damaged(file: SourceFile, kind: str, num_rows: int, error: Exception) -> Broken:
    if num_rows:
        return Broken(f"{file} is truncated or damaged after row {num_rows} ({error}): replace it, or leave it out")
    return Broken(f"{file} is no {kind} file ({error}): rename or replace it, or change data.source")
