"""Reader of tar archives of samples, as webdataset writes them: the text of members, in their order.

https://github.com/webdataset/webdataset: a sample is the members of one name, of which each has an extension.
"""

import tarfile
from collections.abc import Iterator
from typing import BinaryIO, cast

from meshwright.data.formats.document_form import DocumentForm, json_document
from meshwright.data.formats.readers import Broken, Piece, read_text

_BLOCK_BYTES = 512
_MAX_JSON_BYTES = 2**28
_MOST_NAMED = 5


def read_tar(name: str, stream: BinaryIO, form: DocumentForm) -> Iterator[Piece | Broken]:
    """Yield the members of the form's suffix, such as ".txt"; without one, the documents in .json members.

    Reads forward only. Raises tarfile.ReadError where the archive is damaged or truncated.
    """
    watched = _Watched(stream)
    extensions: dict[str, None] = {}
    num_documents = 0
    with tarfile.open(fileobj=cast(BinaryIO, watched), mode="r|") as archive:
        while (member := archive.next()) is not None:
            # It would keep all of them.
            archive.members.clear()  # type: ignore[attr-defined]
            if not member.isfile():
                continue
            extension = _extension(member.name)
            extensions[extension] = None
            is_text = form.member_suffix is not None
            if extension != (form.member_suffix or ".json"):
                continue
            num_documents += 1
            content = archive.extractfile(member)
            assert content is not None, "a regular file has content"
            where = f"{name}, member {member.name}"
            if is_text:
                yield from read_text(where, cast(BinaryIO, content))
            elif member.size > _MAX_JSON_BYTES:
                yield Broken(f"{where} has {member.size} bytes of JSON, more than {_MAX_JSON_BYTES}: leave it out")
            else:
                yield json_document(content.read(), where, form, "member")
    if not watched.has_end():
        raise tarfile.ReadError("it has no end-of-archive block")
    if not num_documents:
        found = ", ".join([*extensions][:_MOST_NAMED]) or "none"
        yield Broken(
            f"{name} has no member with {form.columns[0]!r} (extensions of its members: {found}): set data.text_key to "
            'one of these, such as ".txt", or to a field of its .json members'
        )


def _extension(member: str) -> str:
    """Return what follows the first dot of the last part of a name, as webdataset splits it."""
    _, dot, extension = member.rpartition("/")[2].partition(".")
    return dot + extension.lower()


class _Watched:
    """A stream that knows whether it ended with zeros, as archives do; tarfile takes some truncated ones as whole."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._last = stream, b""

    def read(self, size: int) -> bytes:
        """Return the next bytes."""
        data = self._stream.read(size)
        self._last = (self._last + data)[-_BLOCK_BYTES:]
        return data

    def has_end(self) -> bool:
        """Return whether the rest of the stream, which is read, ends with a block of zeros."""
        while self.read(2**20):
            pass
        return self._last == bytes(_BLOCK_BYTES)
