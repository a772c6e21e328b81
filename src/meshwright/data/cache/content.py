"""Content of a corpus: size and hash of its text, of the whole and of each part, measured once.

Measured by one process and then known from a file in the cache. The file is found by the names, sizes and modification
times of the corpus, so a corpus of which none has changed is not read again, neither by the other ranks of a host nor
at the next start.

A part is a run of whole pieces of at least PART_BYTES: what is tokenised at a time, and kept when preparation stops.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from meshwright.data.cache.measured_once import measured_once
from meshwright.data.filtering.kept_documents import CountedPieces, LeftOut
from meshwright.data.formats.readers import Piece
from meshwright.data.sources import pieces, source_identity
from meshwright.spec.job.sections import DataSection

PART_BYTES = 64 * 2**20

_FORMAT = 3
"""Raised when the hash or the parts of the same files change, as with another reader of a format."""

Read = Callable[[DataSection], Iterator[Piece]]
"""Returns the documents of data.source, up to data.max_bytes; has a name, which differs where it reads otherwise."""

CountBytes = Callable[[int], None]
"""Takes the bytes of text as they are done, to show how far a long pass is."""


@dataclass(frozen=True)
class PartContent:
    """Size and identity of one part of a corpus."""

    num_bytes: int
    text_hash: str
    """XXH3 of the documents' text and their ends, in hex."""


@dataclass(frozen=True)
class Content:
    """Size and identity of a corpus, up to data.max_bytes."""

    num_bytes: int
    num_documents: int
    content_hash: str
    """BLAKE2b of the documents' text in order, in hex; independent of file names and formats."""
    parts: tuple[PartContent, ...] = ()
    """In order; all of the text is in one of them."""
    left_out: LeftOut = field(default_factory=LeftOut, compare=False)


def content_of(section: DataSection, read: Read = pieces, count: CountBytes | None = None) -> Content:
    """Return size and hash of what `read` makes of data.source up to data.max_bytes; raises DataError if it cannot.

    Reads it unless a process has measured the same files before. A cache that cannot be written is no error here.
    """
    path = Path(os.path.expanduser(section.cache_dir)) / "contents" / f"{_identity(section, read)}.json"
    return content_from_dict(measured_once(path, lambda: asdict(measure(read(section), count))))


def _identity(section: DataSection, read: Read) -> str:
    """Return a hash of what the content follows from: the files as they are now, and how they are read."""
    parts = [_FORMAT, PART_BYTES, source_identity(section), read.__name__]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def content_from_dict(record: dict[str, Any]) -> Content:
    """Return what `asdict` made a record of; raises KeyError or TypeError for another one."""
    parts = tuple(PartContent(**part) for part in record["parts"])
    return Content(**{**record, "parts": parts, "left_out": LeftOut(**record["left_out"])})


def parts_of(stream: Iterable[Piece]) -> Iterator[tuple[int, Iterator[Piece]]]:
    """Yield the number and the pieces of each part, which are skipped where they are not taken before the next."""
    for number, numbered in itertools.groupby(_numbered(stream), key=lambda pair: pair[0]):
        yield number, (piece for _, piece in numbered)


def _numbered(stream: Iterable[Piece]) -> Iterator[tuple[int, Piece]]:
    number = part_bytes = 0
    for piece in stream:
        if part_bytes >= PART_BYTES:
            number, part_bytes = number + 1, 0
        part_bytes += len(piece.utf8)
        yield number, piece


class PartMeasure:
    """Running size and hash of the pieces of one part."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self._num_bytes = 0

    def add(self, piece: Piece) -> None:
        """Add a piece."""
        self._num_bytes += len(piece.utf8)
        _hash_piece(self._hash, piece)

    @property
    def content(self) -> PartContent:
        """Return size and hash of all pieces so far."""
        return PartContent(self._num_bytes, self._hash.hexdigest())


def measure(stream: Iterable[Piece], count: CountBytes | None = None) -> Content:
    """Return size and hash of a whole stream."""
    whole, parts = hashlib.blake2b(digest_size=16), []
    num_bytes = num_documents = 0
    for _, part_pieces in parts_of(stream):
        part = PartMeasure()
        for piece in part_pieces:
            part.add(piece)
            _hash_piece(whole, piece)
            num_bytes += len(piece.utf8)
            num_documents += piece.ends_document
            if count is not None:
                count(len(piece.utf8))
        parts.append(part.content)
    left_out = stream.left_out if isinstance(stream, CountedPieces) else LeftOut()
    return Content(num_bytes, num_documents, whole.hexdigest(), tuple(parts), left_out)


def _hash_piece(running: Any, piece: Piece) -> None:
    running.update(piece.utf8)
    if piece.ends_document:
        # Not a UTF-8 byte: marks document ends in the hash.
        running.update(b"\xff")
