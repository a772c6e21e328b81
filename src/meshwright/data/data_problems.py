"""Check of [data] before any process starts, without torch and without reading a large corpus."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from meshwright.data.dataset import token_shortage, unmaskable
from meshwright.data.formats.read_documents import read_documents
from meshwright.data.formats.stored_tokens import (
    foreign_tokens,
    hash_of_tokens,
    missing_ends,
    no_documents,
    open_stored,
    token_files,
)
from meshwright.data.mixing.mixture_sections import mixture_sections, of_table
from meshwright.data.prepared_folder import PreparedTokenizer, find_prepared
from meshwright.data.readers import Piece
from meshwright.data.sources import first_bytes, list_files, no_text
from meshwright.data.tokenizer import Tokenizer, load_tokenizer
from meshwright.errors import MeshwrightError
from meshwright.spec.job.sections import DataSection
from meshwright.spec.job.user_object import is_object_source

READ_BYTES = 32_000_000
"""Bytes of a corpus that are checked; training checks the rest, with the same messages."""

_MAX_FILE_PROBLEMS = 5


def problems(section: DataSection, seq_len: int, vocab_size: int | None) -> list[str]:
    """Return the problems of a job's data, one message each; [] if valid.

    vocab_size is the model's, None if it takes no tokens. A user's class is not imported.
    """
    if is_object_source(section.source):
        problem = unmaskable(section)
        return [problem] if problem else []
    check = _JobCheck(section, seq_len, vocab_size)
    found: list[str] = []
    for number, one in enumerate(mixture_sections(section) or [section]):
        try:
            of_source = check.source_problems(one)
        except MeshwrightError as error:
            of_source = [str(error)]
        found += [of_table(section, number, text) for text in of_source] if section.mixture else of_source
    return [*check.tokenizer_problems, *found]


class _JobCheck:
    """Checks the sources of a job, whose tokenizer is loaded once, and not where all tokens are prepared."""

    def __init__(self, section: DataSection, seq_len: int, vocab_size: int | None) -> None:
        self.tokenizer_problems: list[str] = []
        self._section, self._seq_len, self._vocab_size = section, seq_len, vocab_size

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        try:
            tokenizer = load_tokenizer(self._section.tokenizer)
        except MeshwrightError as error:
            self.tokenizer_problems.append(str(error))
            return None
        self.tokenizer_problems += self._vocab_problems(tokenizer)
        return tokenizer

    def _vocab_problems(self, tokenizer: Tokenizer | PreparedTokenizer) -> list[str]:
        if self._vocab_size is None or tokenizer.vocab_size <= self._vocab_size:
            return []
        return [
            f"data.tokenizer = {self._section.tokenizer!r} has {tokenizer.vocab_size} tokens but the model's "
            f"vocab_size is {self._vocab_size}: set model.options.vocab_size to {tokenizer.vocab_size} or more, or "
            "change data.tokenizer"
        ]

    def source_problems(self, section: DataSection) -> list[str]:
        """Return the problems of one source; without a tokenizer its tokens are not counted."""
        prepared, files = find_prepared(section), token_files(section)
        if section.deduplicate and (prepared or files):
            return [no_documents(section)]
        if prepared is not None:
            # Not read: training compares the tokens with their checksum.
            problem = prepared.problem(section)
            found = [problem] if problem else self._vocab_problems(prepared.tokenizer)
            return [*found, *self._shortage(section, prepared.num_tokens)]
        if files is not None:
            return self._stored_problems(section, files)
        corpus = _CorpusCheck(section)
        num_tokens = corpus.count_tokens(self._tokenizer, enough=2 * self._seq_len + 1)
        return corpus.problems or ([] if num_tokens is None else self._shortage(section, num_tokens))

    def _stored_problems(self, section: DataSection, files: list[Path]) -> list[str]:
        """Return the problems of stored tokens, of which the first are read."""
        stored = open_stored(section, files)
        if shortage := self._shortage(section, len(stored)):
            return shortage
        if self._tokenizer is None:
            return []
        first = open_stored(section.replace(max_bytes=min(section.max_bytes, READ_BYTES)), files)
        _, highest = hash_of_tokens(first, section.source)
        problem = foreign_tokens(section, highest, self._tokenizer) or missing_ends(section, stored, self._tokenizer)
        return [problem] if problem else []

    def _shortage(self, section: DataSection, num_tokens: int) -> list[str]:
        problem = token_shortage(num_tokens, self._seq_len, section.validation_fraction)
        return [f"data.source = {section.source!r} {problem}"] if problem else []


class _CorpusCheck:
    """Reads the start of a corpus and collects the problems of all files."""

    def __init__(self, section: DataSection) -> None:
        self.problems: list[str] = []
        self._section = section.replace(max_bytes=min(section.max_bytes, READ_BYTES))

    def count_tokens(self, tokenizer: Tokenizer | None, enough: int) -> int | None:
        """Return the number of tokens, counted only until `enough` is reached; None without a tokenizer."""
        num_tokens = num_pieces = 0
        for piece in first_bytes(self._pieces(), self._section):
            num_pieces += 1
            if tokenizer and num_tokens < enough:
                num_tokens += len(tokenizer.encode(piece.text)) + piece.ends_document
        if not num_pieces and not self.problems:
            self.problems.append(no_text(self._section, len(list_files(self._section))))
        return num_tokens if tokenizer else None

    def _pieces(self) -> Iterator[Piece]:
        try:
            files = list_files(self._section)
        except MeshwrightError as error:
            self.problems.append(str(error))
            return
        for file in files:
            try:
                for one in read_documents(file, self._section.text_key):
                    if isinstance(one, Piece):
                        # An empty document is left out.
                        yield from [one] if one.utf8 else []
                    elif self._section.on_bad_document == "stop":
                        self.problems.append(one.message)
                        break
            except MeshwrightError as error:
                self.problems.append(str(error))
            if len(self.problems) == _MAX_FILE_PROBLEMS:
                return
