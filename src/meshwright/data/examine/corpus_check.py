"""CorpusCheck: reads the start of a source of documents, and collects the problems of all of its files."""

from collections.abc import Iterator, Sequence

from meshwright.data.encoding import Encoding
from meshwright.data.filtering.kept_documents import LeftOut
from meshwright.data.formats.readers import Piece
from meshwright.data.formats.source_file import SourceFile
from meshwright.data.packing.pair_dataset import pair_length, too_long_pairs
from meshwright.data.packing.whole_documents import TARGET_BIT, shortage_of_documents, too_long_problem
from meshwright.data.sources import SourceReader, no_text
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import MeshwrightError
from meshwright.spec.job.sections import DataSection

READ_BYTES = 32_000_000
"""Bytes of a corpus that are checked; training checks the rest, with the same messages."""

_MAX_PROBLEMS = 5
_CHARACTERS_PER_TOKEN = 16
"""Several times the average of tokenizers on text."""


class CorpusCheck:
    """Reads the first bytes of one source and collects what is wrong with its files."""

    def __init__(self, section: DataSection, reader: SourceReader) -> None:
        self.problems: list[str] = []
        self._section, self._reader = section.replace(max_bytes=min(section.max_bytes, READ_BYTES)), reader

    def count_tokens(self, tokenizer: Tokenizer | None, enough: int) -> int | None:
        """Return the number of tokens, counted only until `enough` is reached; None without a tokenizer."""
        num_tokens = 0
        for piece in self._pieces():
            if tokenizer and num_tokens < enough:
                num_tokens += _count_tokens(tokenizer, piece.text, enough) + piece.ends_document
        return num_tokens if tokenizer else None

    def packing_problems(self, encoding: Encoding, seq_len: int) -> list[str]:
        """Return the problems of files; without any, those of whole documents together: too long ones, or too few."""
        section, lengths, num_kept, without_target = self._section, [], 0, 0
        for num_tokens, has_targets in self._documents(encoding, seq_len):
            lengths.append(num_tokens)
            without_target += not has_targets
            num_kept += has_targets and (num_tokens <= seq_len + 1 or section.too_long != "skip")
        if self.problems:
            return self.problems
        is_pairs = encoding.task == "dpo"
        describe = too_long_pairs if is_pairs else too_long_problem
        too_long = describe(lengths, section, seq_len) if section.too_long == "stop" else None
        has_long, unit = max(lengths, default=0) > seq_len + 1, "pair" if is_pairs else "document"
        problem = too_long or shortage_of_documents(num_kept, section, unit, without_target, has_long=has_long)
        return [problem] if problem else []

    def _documents(self, encoding: Encoding, seq_len: int) -> Iterator[tuple[int, bool]]:
        """Yield the tokens of each document, an upper bound where it fits a sequence, and whether it has a target."""
        num_tokens = 0
        for piece in self._pieces():
            if encoding.conversations is not None:
                (ids,) = encoding.conversations.encode_batch([piece.text])
                if encoding.task == "dpo":
                    yield pair_length(ids)
                else:
                    yield len(ids), bool((ids[1 : seq_len + 1] & TARGET_BIT).any())
                continue
            # A token is a byte or more, so that short pieces need no encoding.
            fits = num_tokens + len(piece.utf8) <= seq_len
            num_tokens += len(piece.utf8) if fits else len(encoding.tokenizer.encode(piece.text))
            if piece.ends_document:
                yield num_tokens + 1, num_tokens > 0
                num_tokens = 0

    def _pieces(self) -> Iterator[Piece]:
        """Yield the documents that are kept; what is wrong with the others is added to the problems."""
        num_pieces, left_out = 0, LeftOut()
        try:
            files = self._reader.files(self._section)
        except MeshwrightError as error:
            self.problems.append(str(error))
            return
        for piece in self._reader.limited(self._good(files, left_out), self._section):
            num_pieces += 1
            yield piece
        if not num_pieces and not self.problems:
            self.problems.append(no_text(self._section, len(files), left_out))

    def _good(self, files: Sequence[SourceFile], left_out: LeftOut) -> Iterator[Piece]:
        for file in files:
            try:
                for one in self._reader.documents(file, self._section):
                    if isinstance(one, Piece):
                        # An empty document is left out.
                        yield from [one] if one.utf8 else []
                    elif self._section.on_bad_document == "skip":
                        left_out.add_broken(one)
                    else:
                        self.problems.append(one.message)
                        # Of text, what is wrong with one record is mostly wrong with all of a file.
                        if self._reader.takes_text(self._section) or len(self.problems) == _MAX_PROBLEMS:
                            break
            except MeshwrightError as error:
                self.problems.append(str(error))
            if len(self.problems) == _MAX_PROBLEMS:
                self.problems.append(
                    f"data.source = {self._section.source!r} may hold more problems than these {_MAX_PROBLEMS}, after "
                    "which check stops: `meshwright data verify JOB` names all"
                )
                return


def _count_tokens(tokenizer: Tokenizer, text: str, enough: int) -> int:
    """Return the number of tokens of a text; of a long one that has more than `enough`, those of its start.

    A tokenizer takes a second for some MB, which may be one document.
    """
    start = text[: _CHARACTERS_PER_TOKEN * enough]
    num_tokens = len(tokenizer.encode(start))
    # The last tokens of the start may be others in the whole text.
    is_enough = len(start) == len(text) or num_tokens >= 2 * enough
    return num_tokens if is_enough else len(tokenizer.encode(text))
