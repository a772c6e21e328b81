"""Documents as pieces of text in bounded memory, and the readers of plain text and of JSON lines."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

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


def read_jsonl(name: str, stream: BinaryIO, text_key: str) -> Iterator[Piece | Broken]:
    """Yield the text of each line's object."""
    for number, line in enumerate(stream, start=1):
        if line.strip():
            yield json_document(line, f"{name}:{number}", text_key)


def json_document(data: bytes, where: str, text_key: str) -> Piece | Broken:
    """Return the text of one JSON object."""
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        return Broken(
            f"{where} is no JSON ({error}): each line of a JSONL file is one JSON object; "
            "fix or remove the line, or change data.source"
        )
    if not isinstance(record, dict):
        return Broken(
            f"{where} is a JSON {type(record).__name__}, not an object: each line of a JSONL file is one object "
            f'with its text under data.text_key, such as {{"{text_key}": "..."}}'
        )
    if text_key not in record:
        return missing_key(where, text_key, list(record))
    return document(record[text_key], where, text_key)


def document(text: Any, where: str, text_key: str) -> Piece | Broken:
    """Return a field of text as a document, which may be empty."""
    if not isinstance(text, str):
        return Broken(
            f"{where}: field {text_key!r} is {json.dumps(text, default=str)[:80]}, not text: "
            "remove the record, or set data.text_key to a field of text"
        )
    try:
        return Piece(text.encode(), ends_document=True)
    except UnicodeEncodeError as error:
        return Broken(
            f"{where}: field {text_key!r} holds half of a surrogate pair ({text[error.start]!a}), "
            "which UTF-8 cannot express: fix or remove the record"
        )


def missing_key(where: str, text_key: str, present: list[str]) -> Broken:
    """Return that a record, or a file of records, lacks the field of text."""
    keys = ", ".join(repr(key) for key in present) or "none"
    return Broken(
        f"{where} has no field {text_key!r} (its fields: {keys}): set data.text_key to the one that holds the text"
    )
