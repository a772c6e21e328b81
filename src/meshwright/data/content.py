"""Size and hash of a corpus, measured once by one process and then known from a file in the cache.

The file is found by the names, sizes and modification times of the corpus, so a corpus of which none has changed is
not read again, neither by the other ranks of a host nor at the next start.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from meshwright.data.readers import Piece
from meshwright.data.sources import list_files, pieces
from meshwright.spec.job.sections import DataSection

_FORMAT = 1
"""Raised when the hash of the same files changes, as with another reader of a format."""


@dataclass(frozen=True)
class Content:
    """Size and identity of a corpus, up to data.max_bytes."""

    num_bytes: int
    num_documents: int
    content_hash: str
    """BLAKE2b of the documents' text in order, in hex; independent of file names and formats."""


def content_of(section: DataSection) -> Content:
    """Return size and hash of data.source up to data.max_bytes; raises DataError if it cannot be read.

    Reads it unless a process has measured the same files before. A cache that cannot be written is no error here.
    """
    path = Path(os.path.expanduser(section.cache_dir)) / "contents" / f"{_identity(section)}.json"
    if (known := _read(path)) is not None:
        return known
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o666), "r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Another process may have measured it while this one waited.
            if (known := _read(path)) is None:
                known = measure(pieces(section))
                partial = path.with_suffix(f".{os.getpid()}")
                partial.write_text(json.dumps(asdict(known)), encoding="utf-8")
                partial.rename(path)
            return known
    except OSError:
        return measure(pieces(section))


def _identity(section: DataSection) -> str:
    """Return a hash of what the content follows from: the files as they are now, and how they are read."""
    parts: list[object] = [_FORMAT, section.max_bytes, section.text_key]
    for file in list_files(section):
        found = file.stat()
        parts.append([str(file.absolute()), found.st_size, found.st_mtime_ns, found.st_ino])
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _read(path: Path) -> Content | None:
    try:
        return Content(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


class Measure:
    """Running count and hash of pieces."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._num_bytes = 0
        self._num_documents = 0

    def add(self, piece: Piece) -> None:
        """Add a piece."""
        self._num_bytes += len(piece.utf8)
        self._hash.update(piece.utf8)
        if piece.ends_document:
            self._num_documents += 1
            # Not a UTF-8 byte: marks document ends in the hash.
            self._hash.update(b"\xff")

    @property
    def content(self) -> Content:
        """Return size and hash of all pieces so far."""
        return Content(self._num_bytes, self._num_documents, self._hash.hexdigest())


def measure(stream: Iterable[Piece]) -> Content:
    """Return size and hash of a whole stream."""
    total = Measure()
    for piece in stream:
        total.add(piece)
    return total.content
