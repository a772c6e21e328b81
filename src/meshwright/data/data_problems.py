"""Check of [data] before any process starts, without torch and without reading a large corpus."""

from collections.abc import Iterator

from meshwright.data.dataset import token_shortage, unmaskable
from meshwright.data.prepared_folder import PreparedFolder, PreparedTokenizer, find_prepared
from meshwright.data.readers import Piece, read_file
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
    try:
        prepared = find_prepared(section)
        if prepared is not None:
            return _prepared_problems(prepared, section, seq_len, vocab_size)
    except MeshwrightError as error:
        return [str(error)]
    found: list[str] = []
    tokenizer = _tokenizer(section, found)
    found += _vocab_problems(section, tokenizer, vocab_size) if tokenizer else []
    corpus = _CorpusCheck(section)
    num_tokens = corpus.count_tokens(tokenizer, enough=2 * seq_len + 1)
    found += corpus.problems
    if num_tokens is not None and not corpus.problems:
        shortage = token_shortage(num_tokens, seq_len, section.validation_fraction)
        found += [f"data.source = {section.source!r} {shortage}"] if shortage else []
    return found


def _prepared_problems(
    prepared: PreparedFolder, section: DataSection, seq_len: int, vocab_size: int | None
) -> list[str]:
    """Return the problems of prepared tokens, which are not read: training compares them with their checksum."""
    problem = prepared.problem(section)
    shortage = token_shortage(prepared.num_tokens, seq_len, section.validation_fraction)
    found = [problem] if problem else _vocab_problems(section, prepared.tokenizer, vocab_size)
    return [*found, *([f"data.source = {section.source!r} {shortage}"] if shortage else [])]


def _vocab_problems(
    section: DataSection, tokenizer: Tokenizer | PreparedTokenizer, vocab_size: int | None
) -> list[str]:
    if vocab_size is None or tokenizer.vocab_size <= vocab_size:
        return []
    return [
        f"data.tokenizer = {section.tokenizer!r} has {tokenizer.vocab_size} tokens but the model's vocab_size is "
        f"{vocab_size}: set model.options.vocab_size to {tokenizer.vocab_size} or more, or change data.tokenizer"
    ]


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
        for path in files:
            try:
                yield from read_file(path, self._section.text_key)
            except MeshwrightError as error:
                self.problems.append(str(error))
                if len(self.problems) == _MAX_FILE_PROBLEMS:
                    return
