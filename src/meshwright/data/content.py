"""Size and hash of a corpus, which identify it in caches and checkpoints."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.data.readers import Piece


@dataclass(frozen=True)
class Content:
    """Size and identity of a corpus, up to data.max_bytes."""

    num_bytes: int
    num_documents: int
    content_hash: str
    """BLAKE2b of the documents' text in order, in hex; independent of file names and formats."""


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
