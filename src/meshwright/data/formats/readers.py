"""Documents as pieces of text in bounded memory, and the reader of plain text."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

_PIECE_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Piece:
    """Valid UTF-8 text; a long document is several pieces."""

    utf8: bytes
    ends_document: bool

    @property
    def text(self) -> str:
        """Return the piece as str."""
        return self.utf8.decode()


@dataclass(frozen=True)
class Broken:
    """A document that cannot be read, with what was read of it before; the message names file and place."""

    message: str


def utf8_cut(utf8: bytes, end: int) -> int:
    """Return the largest character boundary of `utf8` up to `end`."""
    if end >= len(utf8):
        return len(utf8)
    while end and utf8[end] & 0xC0 == 0x80:
        end -= 1
    return end


def read_text(name: str, stream: BinaryIO) -> Iterator[Piece | Broken]:
    """Yield a text as one document, which may be empty; `name` is for messages."""
    rest, offset = b"", 0
    chunk = stream.read(_PIECE_BYTES)
    if not chunk:
        yield Piece(b"", ends_document=True)
    while chunk:
        following = stream.read(_PIECE_BYTES)
        rest += chunk
        # Pieces are tokenized separately, so a long document is split after a line if possible.
        end = len(rest) if not following else rest.rfind(b"\n") + 1 or _last_character(rest)
        piece, rest = rest[:end], rest[end:]
        try:
            piece.decode()
        except UnicodeDecodeError as error:
            yield Broken(
                f"{name} is no UTF-8 text: byte {offset + error.start} ({piece[error.start : error.start + 1]!r}) "
                "starts no character: convert the file to UTF-8, or leave it out of data.source"
            )
            return
        yield Piece(piece, ends_document=not following)
        offset += end
        chunk = following


def _last_character(utf8: bytes) -> int:
    """Return the start of the last character of `utf8`, which may be incomplete."""
    start = len(utf8) - 1
    while start > 0 and utf8[start] & 0xC0 == 0x80:
        start -= 1
    return start or len(utf8)
