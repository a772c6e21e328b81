"""Check of [data] before any process starts, without torch and without reading a large corpus."""

from collections.abc import Iterator
from pathlib import Path

from meshwright.data.dataset import token_shortage, unmaskable
from meshwright.data.formats.read_documents import read_documents
from meshwright.data.formats.stored_tokens import foreign_tokens, hash_of_tokens, missing_ends, open_stored, token_files
from meshwright.data.mixing.mixture_sections import mixture_sections, of_table
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
    found: list[str] = []
    tokenizer = _tokenizer(section, found)
    if tokenizer and vocab_size is not None and tokenizer.vocab_size > vocab_size:
        found.append(
            f"data.tokenizer = {section.tokenizer!r} has {tokenizer.vocab_size} tokens but the model's vocab_size is "
            f"{vocab_size}: set model.options.vocab_size to {tokenizer.vocab_size} or more, or change data.tokenizer"
        )
    sections = mixture_sections(section) or [section]
    for number, one in enumerate(sections):
        of_source = _source_problems(one, seq_len, tokenizer)
        found += [of_table(section, number, text) for text in of_source] if section.mixture else of_source
    return found


def _source_problems(section: DataSection, seq_len: int, tokenizer: Tokenizer | None) -> list[str]:
    """Return the problems of one source; without a tokenizer its tokens are not counted."""
    found: list[str] = []
    try:
        if (files := token_files(section)) is not None:
            return _stored_problems(section, files, seq_len, tokenizer)
    except MeshwrightError as error:
        return [str(error)]
    corpus = _CorpusCheck(section)
    num_tokens = corpus.count_tokens(tokenizer, enough=2 * seq_len + 1)
    found += corpus.problems
    if num_tokens is not None and not corpus.problems:
        shortage = token_shortage(num_tokens, seq_len, section.validation_fraction)
        found += [f"data.source = {section.source!r} {shortage}"] if shortage else []
    return found


def _stored_problems(section: DataSection, files: list[Path], seq_len: int, tokenizer: Tokenizer | None) -> list[str]:
    """Return the problems of stored tokens, of which the first are read."""
    stored = open_stored(section, files)
    shortage = token_shortage(len(stored), seq_len, section.validation_fraction)
    if shortage:
        return [f"data.source = {section.source!r} {shortage}"]
    if tokenizer is None:
        return []
    first = open_stored(section.replace(max_bytes=min(section.max_bytes, READ_BYTES)), files)
    _, highest = hash_of_tokens(first, section.source)
    problem = foreign_tokens(section, highest, tokenizer) or missing_ends(section, stored, tokenizer)
    return [problem] if problem else []


def _tokenizer(section: DataSection, found: list[str]) -> Tokenizer | None:
    try:
        return load_tokenizer(section.tokenizer)
    except MeshwrightError as error:
        found.append(str(error))
        return None


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
