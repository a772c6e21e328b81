"""Which documents of a source are kept: not the empty ones, and as the job says neither broken ones nor copies."""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from meshwright.data.filtering.document_hashes import document_hash
from meshwright.data.formats.readers import Broken, Piece
from meshwright.errors import DataError
from meshwright.units import counted

_MEMORY_BYTES = 64 * 2**20
MOST_NAMED = 5


@dataclass
class LeftOut:
    """Documents that were left out, counted."""

    num_empty: int = 0
    num_copies: int = 0
    """Documents equal to an earlier one."""
    num_broken: int = 0
    first_broken: list[str] = field(default_factory=list)
    """Messages about the first few."""

    def add_broken(self, document: Broken) -> None:
        """Count one that cannot be read."""
        self.num_broken += 1
        self.first_broken += [document.message] if len(self.first_broken) < MOST_NAMED else []

    def lines(self) -> list[str]:
        """Return what to log of broken documents and of copies."""
        found = []
        if self.num_broken:
            more = f", the first {len(self.first_broken)} of them" if self.num_broken > len(self.first_broken) else ""
            found.append(f"left out {counted(self.num_broken, 'document')} that cannot be read{more}:")
            found += [f"  {message}" for message in self.first_broken]
        if self.num_copies:
            found.append(f"left out {counted(self.num_copies, 'document')} equal to an earlier one")
        return found


class CountedPieces:
    """Iterator of pieces that counts what is left out of them."""

    def __init__(self, read: Callable[[LeftOut], Iterator[Piece]]) -> None:
        self.left_out = LeftOut()
        self._pieces = read(self.left_out)

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)


def kept_documents(
    stream: Iterable[Piece | Broken],
    on_bad: Literal["stop", "skip"],
    left_out: LeftOut,
    is_new: Callable[[bytes], bool] | None = None,
) -> Iterator[Piece]:
    """Yield the pieces of documents that are kept, and count the others in `left_out`.

    `is_new` says of a document's hash whether the document is no copy. Raises DataError for a broken one with "stop".
    """
    holds_back = on_bad == "skip" or is_new is not None
    held = _HeldDocument()
    is_inside = False
    for item in stream:
        if isinstance(item, Broken):
            if on_bad == "stop":
                raise DataError(item.message)
            left_out.add_broken(item)
            held.clear()
            is_inside = False
            continue
        if not item.utf8 and not is_inside and item.ends_document:
            left_out.num_empty += 1
            continue
        is_inside = not item.ends_document
        if not holds_back:
            yield item
            continue
        held.add(item)
        if item.ends_document:
            if is_new is None or is_new(document_hash(piece.utf8 for piece in held.pieces())):
                yield from held.pieces()
            else:
                left_out.num_copies += 1
            held.clear()


class _HeldDocument:
    """Pieces of one document: a long one is on disk."""

    def __init__(self) -> None:
        self._single: Piece | None = None
        self._file: tempfile.SpooledTemporaryFile[bytes] | None = None
        self._sizes: list[int] = []

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        if piece.ends_document and self._file is None:
            self._single = piece
            return
        if self._file is None:
            self._file = tempfile.SpooledTemporaryFile(max_size=_MEMORY_BYTES)  # noqa: SIM115 - closed by clear
        self._file.write(piece.utf8)
        self._sizes.append(len(piece.utf8))

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces of a document that has ended."""
        if self._single is not None:
            yield self._single
        elif self._file is not None:
            self._file.seek(0)
            for number, size in enumerate(self._sizes, start=1):
                yield Piece(self._file.read(size), ends_document=number == len(self._sizes))

    def clear(self) -> None:
        """Forget the document."""
        if self._file is not None:
            self._file.close()
        self._single, self._file, self._sizes = None, None, []
