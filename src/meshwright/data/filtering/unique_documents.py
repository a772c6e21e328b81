"""UniqueDocuments: a source without documents that equal one before, in it or in sources before it.

The hashes of the documents that are kept of a source are written next to its content, 16 bytes each, so that sources
after it need not read it again.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from meshwright.data.cache.measured_once import write_whole
from meshwright.data.filtering.document_hashes import DocumentHashes
from meshwright.data.filtering.kept_documents import CountedPieces, LeftOut
from meshwright.data.formats.readers import Piece
from meshwright.data.sources import SourceReader, pieces, source_identity
from meshwright.spec.job.sections import DataSection


class UniqueDocuments:
    """Reader of a source, without copies of documents of `earlier` ones, in their order."""

    def __init__(self, earlier: Sequence[DataSection], reader: SourceReader = pieces) -> None:
        """`reader` reads the documents of each source."""
        self._earlier, self._reader = tuple(earlier), reader
        self.__name__ = json.dumps(["unique", reader.__name__, *(source_identity(one) for one in self._earlier)])
        """Differs where another reader makes another text of a source; a name, as functions that read have one."""

    def __call__(self, section: DataSection) -> CountedPieces:
        """Return the text of a source up to data.max_bytes."""
        return CountedPieces(lambda left_out: self._read(section, left_out))

    def _read(self, section: DataSection, left_out: LeftOut) -> Iterator[Piece]:
        new = bytearray()
        yield from self._recorded(section, left_out, new)
        # Where they cannot be written, sources after this one read it again.
        with suppress(OSError):
            path = self._path(section)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, bytes(new))

    def _recorded(self, section: DataSection, left_out: LeftOut, new: bytearray) -> Iterator[Piece]:
        """Yield what is kept, and append the hash of each document to `new`."""
        seen = DocumentHashes()
        for number, one in enumerate(self._earlier):
            seen.update(UniqueDocuments(self._earlier[:number], self._reader)._hashes(one))

        def is_new(digest: bytes) -> bool:
            is_first = seen.add(digest)
            new.extend(digest if is_first else b"")
            return is_first

        return self._reader.kept(section, left_out, is_new)

    def _hashes(self, section: DataSection) -> bytes:
        """Return the hashes of the documents that are kept of a source, joined."""
        with suppress(OSError):
            return self._path(section).read_bytes()
        new = bytearray()
        for _ in self._recorded(section, LeftOut(), new):
            pass
        return bytes(new)

    def _path(self, section: DataSection) -> Path:
        parts = json.dumps([self.__name__, source_identity(section)]).encode()
        name = hashlib.blake2b(parts, digest_size=16).hexdigest()
        return Path(os.path.expanduser(section.cache_dir)) / "contents" / f"{name}.documents"
