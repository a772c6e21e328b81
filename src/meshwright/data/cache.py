"""Token cache: tokens on disk, written once per content and tokenizer and memory-mapped by every process.

A file is written under a temporary name, then renamed, so that readers see it complete or not at all. The temporary
file is also the lock, so that several processes write it once, and leftovers of a killed process are reused.

Size and hash of a corpus, measured once by one process and then known from a file in the cache.
The file is found by the names, sizes and modification times of the corpus, so a corpus of which none has changed is
not read again, neither by the other ranks of a host nor at the next start.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from meshwright.data.readers import Piece
from meshwright.data.sources import list_files, pieces
from meshwright.data.token_file import FORMAT_VERSION, Tokens, map_tokens, write_tokens
from meshwright.errors import DataError
from meshwright.log import logger
from meshwright.spec.job.sections import DataSection
from meshwright.units import format_bytes, format_count

Read = Callable[[DataSection], Iterator[Piece]]
"""Returns the documents of data.source, up to data.max_bytes."""


class Encoder(Protocol):
    """What the cache needs of a tokenizer, of text or of conversations."""

    vocab_size: int
    end_of_text: int
    identity: str
    version: str

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the ids of each text."""
        ...


_BATCH_BYTES = 8 * 2**20
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def cached_tokens(section: DataSection, tokenizer: Encoder, read: Read = pieces) -> tuple[Tokens, Content]:
    """Return the tokens of what `read` makes of data.source, with end of text after each document, and the content.

    Tokenises only if the cache has no entry for the hash of the content.
    Raises DataError when the source cannot be read or data.cache_dir cannot be written.
    """
    content = content_of(section, read)
    cache = _Cache(section, tokenizer, content, read)
    try:
        tokens = cache.open()
        return (cache.build() if tokens is None else tokens), content
    except OSError as error:
        reason = f"{error.strerror or error}: {error.filename or cache.path}"
        if error.errno in _NO_SPACE:
            rule, remedy = f"has no room for about {format_bytes(cache.size_bytes)} of tokens", "free some space there"
        else:
            rule, remedy = "cannot hold the token cache", "change its permissions"
        raise DataError(
            f"data.cache_dir = {section.cache_dir!r} {rule} ({reason}): {remedy}, "
            "or set data.cache_dir to another folder"
        ) from error


class _Cache:
    """The cache file of one content and tokenizer."""

    def __init__(self, section: DataSection, tokenizer: Encoder, content: Content, read: Read) -> None:
        parts = [FORMAT_VERSION, content.content_hash, tokenizer.identity, tokenizer.version, tokenizer.end_of_text]
        self._key = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
        folder = Path(os.path.expanduser(section.cache_dir))
        self.path = folder / f"tokens-{self._key}.bin"
        self._partial = folder / f"tokens-{self._key}.partial"
        self._section, self._tokenizer, self._content, self._read = section, tokenizer, content, read
        self._dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
        self.size_bytes = content.num_bytes * self._dtype.itemsize

    def open(self) -> Tokens | None:
        """Return the mapped tokens, or None if the file is missing or damaged."""
        return map_tokens(self.path, self._key)

    def build(self) -> Tokens:
        """Return the mapped tokens after this or another process has written the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            with open(os.open(self._partial, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as partial:
                self._lock(partial)
                # The previous owner of the lock has renamed the file, or failed and removed it.
                tokens = self.open()
                if tokens is None and self._is_in_place(partial):
                    tokens = self._write(partial)
                if tokens is not None:
                    return tokens

    def _lock(self, partial: BinaryIO) -> None:
        try:
            fcntl.flock(partial, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process to tokenise %s", self._section.source)
            fcntl.flock(partial, fcntl.LOCK_EX)

    def _is_in_place(self, partial: BinaryIO) -> bool:
        try:
            return os.path.samestat(os.fstat(partial.fileno()), os.stat(self._partial))
        except FileNotFoundError:
            return False

    def _write(self, partial: BinaryIO) -> Tokens:
        if self.path.exists():
            logger.warning("the token cache %s is damaged and is rebuilt", self.path)
        logger.info("tokenising %s of %s", format_bytes(self._content.num_bytes), self._section.source)
        try:
            num_tokens = write_tokens(partial, self._key, self._dtype, self._runs())
            # Not synced: after a power cut the checksum fails, and the file is rebuilt.
            os.rename(self._partial, self.path)
        except BaseException:
            self._partial.unlink(missing_ok=True)
            raise
        tokens = self.open()
        if tokens is None:
            raise OSError(errno.EIO, "data read back differs from data written", str(self.path))
        logger.info("%s holds %s tokens", self._section.source, format_count(num_tokens))
        return tokens

    def _runs(self) -> Iterator[Tokens]:
        """Yield the tokens piece by piece, with end of text after each document."""
        seen = Measure()
        end_of_text = np.array([self._tokenizer.end_of_text])
        for batch in _batches(self._read(self._section)):
            for piece, tokens in zip(batch, self._tokenizer.encode_batch([p.text for p in batch]), strict=True):
                seen.add(piece)
                yield tokens
                if piece.ends_document:
                    yield end_of_text
        if seen.content != self._content:
            raise DataError(
                f"data.source = {self._section.source!r} changed while it was read: "
                "restart when no process writes to it"
            )


def _batches(stream: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Yield lists of pieces of a few MiB: enough for a tokenizer's threads, bounded in memory."""
    batch: list[Piece] = []
    size_bytes = 0
    for piece in stream:
        batch.append(piece)
        size_bytes += len(piece.utf8)
        if size_bytes >= _BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


_FORMAT = 1
"""Raised when the hash of the same files changes, as with another reader of a format."""


@dataclass(frozen=True)
class Content:
    """Size and identity of a corpus, up to data.max_bytes."""

    num_bytes: int
    num_documents: int
    content_hash: str
    """BLAKE2b of the documents' text in order, in hex; independent of file names and formats."""


def content_of(section: DataSection, read: Read = pieces) -> Content:
    """Return size and hash of what `read` makes of data.source up to data.max_bytes; raises DataError if it cannot.

    Reads it unless a process has measured the same files before. A cache that cannot be written is no error here.
    """
    path = Path(os.path.expanduser(section.cache_dir)) / "contents" / f"{_identity(section, read)}.json"
    if (known := _read(path)) is not None:
        return known
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o666), "r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Another process may have measured it while this one waited.
            if (known := _read(path)) is None:
                known = measure(read(section))
                partial = path.with_suffix(f".{os.getpid()}")
                partial.write_text(json.dumps(asdict(known)), encoding="utf-8")
                partial.rename(path)
            return known
    except OSError:
        return measure(read(section))


def _identity(section: DataSection, read: Read) -> str:
    """Return a hash of what the content follows from: the files as they are now, and how they are read."""
    parts: list[object] = [_FORMAT, section.max_bytes, section.text_key]
    parts += [] if read is pieces else [read.__name__]
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
