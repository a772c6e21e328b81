"""Token cache: tokens on disk, written once per content and tokenizer and memory-mapped by every process.

A corpus is tokenised part by part. Each part is a file under the hash of its own text, so that what is finished is kept
when a process is killed, and other processes or machines can make other parts. The finished parts are joined to one
file under the hash of the whole text, and removed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from meshwright.data.cache.content import CountBytes, PartMeasure, Read, content_of, parts_of
from meshwright.data.cache.encode import Encoder, encoded
from meshwright.data.cache.token_file import FORMAT_VERSION, TokenFile, Tokens
from meshwright.data.formats.readers import Piece
from meshwright.data.sources import pieces
from meshwright.errors import DataError
from meshwright.log import logger
from meshwright.spec.job.sections import DataSection
from meshwright.units import format_bytes, format_count

_TOKENS_AT_ONCE = 2**21
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Codes of a full disk, of a quota and of a limit on file sizes."""


class TokenCache:
    """The cache files of one content and tokenizer."""

    def __init__(
        self, section: DataSection, tokenizer: Encoder, read: Read = pieces, count_read: CountBytes | None = None
    ) -> None:
        """Measure the content, unless that has been done before: `count_read` takes the bytes that are read for it."""
        self.content = content_of(section, read, count_read)
        self._section, self._tokenizer, self._read = section, tokenizer, read
        self._dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
        self._folder = Path(os.path.expanduser(section.cache_dir))
        self._whole = self._file(self._folder, self.content.content_hash)
        self.num_parts_made = 0
        """Parts that this process has tokenised."""
        self._parts = [self._file(self._folder / "parts", part.text_hash) for part in self.content.parts]

    @property
    def encoder(self) -> Encoder:
        """Return what makes the tokens."""
        return self._tokenizer

    def pieces(self) -> Iterator[Piece]:
        """Return the text of the source, read again."""
        return self._read(self._section)

    @property
    def source(self) -> str:
        """Return data.source."""
        return self._section.source

    @property
    def path(self) -> Path:
        """Return where all tokens lie once they are there."""
        return self._whole.path

    @property
    def is_complete(self) -> bool:
        """Return whether all tokens are there, judged by header and size."""
        with self._explained():
            return self._whole.is_complete

    def open(self) -> Tokens | None:
        """Return the mapped tokens, or None where they are not all there; raises DataError if they cannot be read."""
        with self._explained():
            return self._whole.open()

    def tokens(self, count: CountBytes | None = None) -> Tokens:
        """Return the mapped tokens, made and joined if needed; `count` takes the bytes of text that are done."""
        with self._explained():
            found = self._whole.open()
            if found is None:
                found = self._whole.build(lambda: self._runs(count), self._section.source)
                for part in self._parts:
                    part.path.unlink(missing_ok=True)
            return found

    def build_parts(self, numbers: Iterable[int], count: CountBytes | None = None) -> None:
        """Make those parts of `numbers` that are missing or damaged, unless all tokens are there already."""
        with self._explained():
            if self._whole.open() is None:
                self._build_parts(numbers, count)

    def damaged(self) -> list[Path]:
        """Return the files that are there and not what was written; all of them are read."""
        with self._explained():
            return [file.path for file in (self._whole, *self._parts) if file.path.exists() and file.open() is None]

    @property
    def parts_missing(self) -> list[int]:
        """Return the numbers of the parts that are still to be made, judged by headers and sizes."""
        with self._explained():
            if self._whole.is_complete:
                return []
            return [number for number, part in enumerate(self._parts) if not part.is_complete]

    def _file(self, folder: Path, text_hash: str) -> TokenFile:
        tokenizer = self._tokenizer
        parts = [FORMAT_VERSION, text_hash, tokenizer.identity, tokenizer.version, tokenizer.end_of_text]
        key = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
        return TokenFile(folder / f"tokens-{key}.bin", key, self._dtype)

    def _runs(self, count: CountBytes | None) -> Iterator[Tokens]:
        """Yield the tokens of all parts, having made those that are missing."""
        logger.info("tokenising %s of %s", format_bytes(self.content.num_bytes), self._section.source)
        num_tokens = 0
        for run in self._only_part(count) if self._has_one_part_to_make else self._joined_parts(count):
            num_tokens += len(run)
            yield run
        logger.info("%s holds %s tokens", self._section.source, format_count(num_tokens))

    @property
    def _has_one_part_to_make(self) -> bool:
        return len(self._parts) == 1 and not self._parts[0].is_complete

    def _only_part(self, count: CountBytes | None) -> Iterator[Tokens]:
        """Yield the tokens of the only part, which needs no file of its own."""
        yield from self._part_runs(0, self.pieces(), count)

    def _joined_parts(self, count: CountBytes | None) -> Iterator[Tokens]:
        self._build_parts(range(len(self._parts)), count)
        for number, part in enumerate(self._parts):
            while (tokens := part.open()) is None:
                # Removed by a process that has joined another corpus with the same part.
                self._build_parts([number], None)
            for start in range(0, len(tokens), _TOKENS_AT_ONCE):
                yield tokens[start : start + _TOKENS_AT_ONCE]

    def _build_parts(self, numbers: Iterable[int], count: CountBytes | None) -> None:
        missing = set()
        for number in numbers:
            if self._parts[number].open() is None:
                missing.add(number)
            elif count is not None:
                count(self.content.parts[number].num_bytes)
        if not missing:
            return
        last = max(missing)
        for number, part_pieces in parts_of(self._read(self._section)):
            if number in missing:
                runs = partial(self._part_runs, number, part_pieces, count)
                self._parts[number].build(runs, self._section.source)
            if number == last:
                return
        raise self._changed()

    def _part_runs(self, number: int, part_pieces: Iterable[Piece], count: CountBytes | None) -> Iterator[Tokens]:
        seen = PartMeasure()

        def measured() -> Iterator[Piece]:
            for piece in part_pieces:
                seen.add(piece)
                if count is not None:
                    count(len(piece.utf8))
                yield piece

        yield from encoded(measured(), self._tokenizer)
        if seen.content != self.content.parts[number]:
            raise self._changed()
        self.num_parts_made += 1

    def _changed(self) -> DataError:
        return DataError(
            f"data.source = {self._section.source!r} changed while it was read: restart when no process writes to it"
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise DataError for what the cache's folder cannot do."""
        try:
            yield
        except OSError as error:
            reason = f"{error.strerror or error}: {error.filename or self._whole.path}"
            if error.errno in NO_SPACE:
                size = format_bytes(self.content.num_bytes * self._dtype.itemsize)
                rule = f"has no room for about {size} of tokens"
                remedy = "free some space there, twice that until the parts are joined (finished ones are kept)"
            else:
                rule, remedy = "cannot hold the token cache", "change its permissions"
            raise DataError(
                f"data.cache_dir = {self._section.cache_dir!r} {rule} ({reason}): {remedy}, "
                "or set data.cache_dir to another folder"
            ) from error
