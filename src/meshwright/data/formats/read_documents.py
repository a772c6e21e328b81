"""read_documents: the documents of one file, by the suffixes of its name."""

import tarfile
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

from meshwright.data.formats.archive_readers import read_tar
from meshwright.data.formats.document_form import DocumentForm, json_document
from meshwright.data.formats.mds import read_mds_text
from meshwright.data.formats.readers import Broken, Piece, read_text
from meshwright.data.formats.source_file import (
    COMPRESSED_SUFFIXES,
    RemoteFile,
    SourceFile,
    explained,
    no_regular_file,
    open_stream,
)
from meshwright.data.formats.table_readers import read_arrow, read_parquet
from meshwright.errors import DataError

TEXT_SUFFIXES = frozenset(
    {".txt", ".text", ".md", ".rst", ".tex", ".html", ".xml", ".csv", ".tsv"}
    | {".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".js", ".ts", ".sh"}
)
"""Suffixes of text files that are read from a folder; a file named directly may have any suffix."""

_JSONL = (".jsonl", ".ndjson")
_JSON_LINES = tuple(f".json{suffix}" for suffix in COMPRESSED_SUFFIXES)
"""Corpora such as C4 name compressed JSON lines so."""
_TAR = (".tar", ".tgz")
_COMPRESSIBLE = (*TEXT_SUFFIXES, *_JSONL, ".tar")
_TABLES = (".parquet", ".arrow", ".mds")
_OTHERS = (".tgz", *_TABLES)

READ_SUFFIXES = (
    *(*_COMPRESSIBLE, *_OTHERS, *_JSON_LINES),
    *(f"{suffix}{compressed}" for suffix in _COMPRESSIBLE for compressed in COMPRESSED_SUFFIXES),
)
"""Ends of the names of files that are read from a folder."""
SUFFIX_WORDS = (
    f"{' '.join(sorted((*_COMPRESSIBLE, *_OTHERS)))}, nor in one of text or JSONL with "
    f"{' or '.join(COMPRESSED_SUFFIXES)} behind it"
)

RECORD_WORDS = f"{_JSONL[0]} or {_TAR[0]} (both also with {' or '.join(COMPRESSED_SUFFIXES)}), {' or '.join(_TABLES)}"
TEXT_WORDS = f"{RECORD_WORDS}, or text such as .txt"
"""The kinds of files that are read from a folder, in short."""


def read_documents(file: SourceFile, form: DocumentForm) -> Iterator[Piece | Broken]:
    """Yield the documents of a file as pieces, in bounded memory, and those that cannot be read as Broken.

    A document is a text file, a JSON line, a row of a table, or a member of an archive. Raises DataError where the file
    itself is missing or may not be read, DataUnavailable where a store cannot be reached.
    """
    if isinstance(file, Path) and (problem := no_regular_file(file)) is not None:
        yield Broken(problem)
        return
    with explained(file.url) if isinstance(file, RemoteFile) else nullcontext():
        try:
            yield from _documents(file, form)
        except (EOFError, zlib.error, tarfile.ReadError) as error:
            yield _damaged(file, error)
        except FileNotFoundError as error:
            raise DataError(f"{file} does not exist: set data.source to a file or folder that does") from error
        except OSError as error:
            # What decompressors raise has no number of the operating system.
            if error.errno is None and not isinstance(error, PermissionError):
                yield _damaged(file, error)
            elif isinstance(file, RemoteFile):
                raise
            else:
                reason = error.strerror or str(error)
                raise DataError(f"{file} cannot be read ({reason}): change its permissions, or data.source") from error


def holds_records(file: SourceFile) -> bool:
    """Return whether a file holds a document in each line, row or member, not one in all."""
    name = file.name.lower()
    return name.removesuffix(".gz").removesuffix(".zst").endswith((*_JSONL, *_TAR, *_TABLES)) or name.endswith(
        _JSON_LINES
    )


def _documents(file: SourceFile, form: DocumentForm) -> Iterator[Piece | Broken]:
    name = file.name.lower()
    if name.endswith(".parquet"):
        yield from read_parquet(file, form)
        return
    if name.endswith(".arrow"):
        yield from read_arrow(file, form)
        return
    if name.endswith(".mds"):
        yield from read_mds_text(file, form)
        return
    content = name.removesuffix(".gz").removesuffix(".zst")
    with open_stream(file) as stream:
        if content.endswith(_TAR):
            yield from read_tar(f"{file}", stream, form)
        elif content.endswith(_JSONL) or name.endswith(_JSON_LINES):
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield json_document(line, f"{file}:{number}", form, "line")
        else:
            yield from read_text(f"{file}", stream)


def _damaged(file: SourceFile, error: Exception) -> Broken:
    return Broken(f"{file} is truncated or damaged ({error}): replace it, or leave it out of data.source")
