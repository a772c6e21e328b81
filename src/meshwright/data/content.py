"""What a stream of documents holds: its size and a hash by which caches and checkpoints know it."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.data.readers import Piece


@dataclass(frozen=True)
class Content:
    """Size and identity of a corpus, as far as data.max_bytes reaches."""

    num_bytes: int
    num_documents: int
    content_hash: str
    """BLAKE2b of the documents' text in order, in hex; neither file names nor file formats enter it."""


class Measure:
    """Counts and hashes pieces as they pass."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._num_bytes = 0
        self._num_documents = 0

    def add(self, piece: Piece) -> None:
        """Take in one more piece."""
        self._num_bytes += len(piece.utf8)
        self._hash.update(piece.utf8)
        if piece.ends_document:
            self._num_documents += 1
            # UTF-8 never holds this byte, so two corpora that differ only in where a document ends hash apart.
            self._hash.update(b"\xff")

    @property
    def content(self) -> Content:
        """Return size and hash of all pieces so far."""
        return Content(self._num_bytes, self._num_documents, self._hash.hexdigest())


def measure(stream: Iterable[Piece]) -> Content:
    """Return size and hash of a whole stream, which is read to its end."""
    total = Measure()
    for piece in stream:
        total.add(piece)
    return total.content
