"""Check of [data] before any process starts, without torch and without reading a large corpus."""

from functools import cached_property
from pathlib import Path

from meshwright.data.cache.prepared_folder import PreparedTokenizer, find_prepared
from meshwright.data.corpus import no_documents
from meshwright.data.dataset import unmaskable
from meshwright.data.encoding import Encoding
from meshwright.data.examine.corpus_check import READ_BYTES, CorpusCheck
from meshwright.data.formats.stored_tokens import foreign_tokens, hash_of_tokens, missing_ends, open_stored, token_files
from meshwright.data.mixing.mixture_sections import mixture_sections, of_table
from meshwright.data.token_dataset import token_shortage
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import MeshwrightError
from meshwright.spec.job.sections import DataSection, Task
from meshwright.spec.job.user_object import is_object_source


def problems(section: DataSection, seq_len: int, vocab_size: int | None, task: Task = "pretrain") -> list[str]:
    """Return the problems of a job's data, one message each; [] if valid.

    vocab_size is the model's, None if it takes no tokens. A user's class is not imported.
    """
    if is_object_source(section.source):
        problem = unmaskable(section)
        return [problem] if problem else []
    check = _JobCheck(Encoding(section, task), section, seq_len, vocab_size)
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

    def __init__(self, encoding: Encoding, section: DataSection, seq_len: int, vocab_size: int | None) -> None:
        self.tokenizer_problems: list[str] = []
        self._encoding, self._section, self._seq_len, self._vocab_size = encoding, section, seq_len, vocab_size

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        try:
            tokenizer = self._encoding.tokenizer
            self.tokenizer_problems += self._vocab_problems(tokenizer)
            # The chat template, too, of conversations.
            return tokenizer if self._encoding.encoder else None
        except MeshwrightError as error:
            self.tokenizer_problems.append(str(error))
            return None

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
        if problem := no_documents(section, self._encoding.task):
            return [problem]
        prepared, files = find_prepared(section), token_files(section)
        if prepared is not None:
            # Not read: training compares the tokens with their checksum.
            problem = prepared.problem(section, self._encoding)
            found = [problem] if problem else self._vocab_problems(prepared.tokenizer)
            return [*found, *self._shortage(section, prepared.num_tokens)]
        if files is not None:
            return self._stored_problems(section, files)
        if self._encoding.task != "pretrain" and self._tokenizer is None:
            return []  # its form takes the chat template
        corpus = CorpusCheck(section, self._encoding.reader)
        if section.packing != "split":
            return [] if self._tokenizer is None else corpus.packing_problems(self._encoding, self._seq_len)
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
        if section.packing != "split":
            return []  # which of its documents fit is known when they are read
        problem = token_shortage(num_tokens, self._seq_len, section.validation_fraction)
        return [f"data.source = {section.source!r} {problem}"] if problem else []
