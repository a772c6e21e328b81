"""Files of a source: paths of this machine, or URLs that fsspec reads, and their streams without compression."""

import errno
import gzip
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from meshwright.errors import DataError, DataUnavailable, UnsupportedError
from meshwright.extras import import_extra

COMPRESSED_SUFFIXES = (".gz", ".zst")

_VERSION_KEYS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")
"""What file systems of fsspec name the version, or the time of the last change, of a file."""


@dataclass(frozen=True)
class RemoteFile:
    """A file at a URL."""

    url: str
    version: str
    """Size and last change, as the file system states them."""

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """Return the last part of the URL."""
        return self.url.rpartition("/")[2]

    def open(self, mode: str = "rb") -> BinaryIO:
        """Return the file's stream, which is fetched in blocks."""
        fsspec = import_extra("fsspec", f"reading {self.url}")
        stream: BinaryIO = fsspec.open(self.url, mode).open()
        return stream


SourceFile = Path | RemoteFile


def is_url(source: str) -> bool:
    """Return whether a source is a URL."""
    return "://" in source


_KINDS = ((stat.S_ISFIFO, "named pipe"), (stat.S_ISSOCK, "socket"), (stat.S_ISDIR, "folder"))


def no_regular_file(path: Path) -> str | None:
    """Return that a path is neither a regular file nor a link to one; None if it is, or does not exist at all.

    Opening a named pipe would wait for a writer.
    """
    advice = "remove it from data.source"
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if not path.is_symlink() or error.errno == errno.EACCES:
            return None  # opening it says so
        return f"{path} is no regular file but a link to {os.readlink(path)} ({error.strerror}): {advice}"
    if stat.S_ISREG(mode):
        return None
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "device")
    return f"{path} is no regular file but a {kind}: {advice}"


def file_identity(file: SourceFile) -> list[Any]:
    """Return what differs, as JSON, once a file is another one or was changed."""
    if isinstance(file, RemoteFile):
        return [file.url, file.version]
    try:
        found = file.stat()
    except OSError as error:
        # What is wrong with it is said, or it is left out, where it is read.
        return [str(file.absolute()), error.errno]
    return [str(file.absolute()), found.st_size, found.st_mtime_ns, found.st_ino]


def list_url(url: str) -> tuple[list[RemoteFile], bool]:
    """Return the files at a URL, sorted, and whether it is a folder; none where nothing is there.

    Raises UnsupportedError without fsspec or the package of the store, DataError for an unknown kind of URL,
    DataUnavailable where the store cannot be reached.
    """
    fsspec = import_extra("fsspec", f"data.source = {url!r}")
    try:
        store, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        raise UnsupportedError(
            f"data.source = {url!r} needs a package that is not installed ({error}): install it; for s3:// "
            "run pip install '.[remote]' in Meshwright's checkout"
        ) from error
    except ValueError as error:
        raise DataError(
            f"data.source = {url!r} is no URL that fsspec knows ({error}): write one such as s3://bucket/texts"
        ) from error
    with explained(url):
        is_folder = store.isdir(root)
        found = store.find(root, detail=True) if is_folder else {root: store.info(root)} if store.exists(root) else {}
    files = [RemoteFile(store.unstrip_protocol(path), _version(info)) for path, info in sorted(found.items())]
    return files, is_folder


def _version(info: dict[str, Any]) -> str:
    changed = next((info[key] for key in _VERSION_KEYS if info.get(key) is not None), "")
    return f"{info.get('size')} {changed}"


@contextmanager
def explained(url: str) -> Iterator[None]:
    """Raise what a store of fsspec raises as DataError, where it lasts, or as DataUnavailable, where it may pass."""
    try:
        yield
    except (FileNotFoundError, PermissionError) as error:
        raise DataError(f"{url} cannot be read ({error}): correct data.source, or the rights to read it") from error
    except (DataError, UnsupportedError, GeneratorExit):
        raise
    except Exception as error:  # each store has errors of its own
        raise DataUnavailable(
            f"{url} cannot be read ({type(error).__name__}: {error}): such errors mostly pass: start again with "
            "--resume, or let run.max_restarts do so"
        ) from error


@contextmanager
def open_stream(file: SourceFile) -> Iterator[BinaryIO]:
    """Open a file; .gz and .zst are decompressed in bounded memory."""
    with file.open("rb") as raw:
        name = file.name.lower()
        if name.endswith((".gz", ".tgz")):
            with gzip.GzipFile(fileobj=raw) as stream:
                yield stream  # type: ignore[misc]
        elif name.endswith(".zst"):
            arrow = import_extra("pyarrow", f"reading {file}")
            with io.BufferedReader(arrow.CompressedInputStream(raw, "zstd")) as buffered:
                yield buffered
        else:
            yield raw
