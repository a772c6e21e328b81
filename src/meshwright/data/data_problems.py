"""Check of [data] before any process starts, without torch and without reading a large corpus."""

from collections.abc import Iterator

from meshwright.data.conversations.conversation_problems import conversation_problems
from meshwright.data.dataset import token_shortage, unmaskable
from meshwright.data.readers import Piece, read_file
from meshwright.data.sources import first_bytes, list_files, no_text
from meshwright.data.tokenizer import Tokenizer, load_tokenizer
from meshwright.data.whole_documents import shortage_of_documents, too_long_problem
from meshwright.errors import MeshwrightError
from meshwright.spec.job.sections import DataSection, Task
from meshwright.spec.job.user_object import is_object_source

READ_BYTES = 32_000_000
"""Bytes of a corpus that are checked; training checks the rest, with the same messages."""

_MAX_FILE_PROBLEMS = 5


def problems(section: DataSection, seq_len: int, vocab_size: int | None, task: Task = "pretrain") -> list[str]:
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
    if task == "sft":
        return found + (conversation_problems(section, seq_len, tokenizer, READ_BYTES) if tokenizer else [])
    corpus = _CorpusCheck(section)
    if section.packing != "split":
        lengths = corpus.document_lengths(tokenizer, seq_len)
        return [*found, *corpus.problems, *_packing_problems(section, seq_len, [] if corpus.problems else lengths)]
    num_tokens = corpus.count_tokens(tokenizer, enough=2 * seq_len + 1)
    found += corpus.problems
    if num_tokens is not None and not corpus.problems:
        shortage = token_shortage(num_tokens, seq_len, section.validation_fraction)
        found += [f"data.source = {section.source!r} {shortage}"] if shortage else []
    return found


def _packing_problems(section: DataSection, seq_len: int, lengths: list[int]) -> Iterator[str]:
    """Yield why documents of these lengths cannot be packed; nothing for none, where others are the problem."""
    if not lengths:
        return
    long = too_long_problem(lengths, section, seq_len)
    if long is not None and section.too_long == "stop":
        yield long
        return
    most = seq_len + 1 if section.too_long == "skip" else max(lengths)
    if shortage := shortage_of_documents(sum(1 < number <= most for number in lengths), section):
        yield shortage


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

    def document_lengths(self, tokenizer: Tokenizer | None, seq_len: int) -> list[int]:
        """Return the tokens of each document, end of text included; an upper bound for those that fit a sequence."""
        lengths, num_tokens = [], 0
        for piece in first_bytes(self._pieces(), self._section) if tokenizer else ():
            assert tokenizer is not None
            # A token is a byte or more, so that short pieces need no encoding.
            fits = num_tokens + len(piece.utf8) <= seq_len
            num_tokens += len(piece.utf8) if fits else len(tokenizer.encode(piece.text))
            if piece.ends_document:
                lengths.append(num_tokens + 1)
                num_tokens = 0
        if not lengths and not self.problems:
            self.problems.append(no_text(self._section, len(list_files(self._section))))
        return lengths

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
