"""Corpus: one source of a job's data as the tokens that training reads, whatever it is stored as."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

from meshwright.data.cache import TokenCache
from meshwright.data.content import Content, CountBytes, Read
from meshwright.data.formats.stored_tokens import (
    TokenStream,
    foreign_tokens,
    measured_tokens,
    missing_ends,
    no_documents,
    open_stored,
    token_files,
)
from meshwright.data.mixing.mixture_sections import errors_of_table, mixture_sections
from meshwright.data.prepared_folder import PreparedTokenizer, find_prepared
from meshwright.data.sources import pieces
from meshwright.data.tokenizer import Tokenizer, load_tokenizer
from meshwright.data.unique_documents import UniqueDocuments
from meshwright.errors import DataError
from meshwright.spec.job.sections import DataSection
from meshwright.spec.job.user_object import is_object_source


class CorpusTokens(NamedTuple):
    """All tokens of a corpus, up to data.max_bytes."""

    tokens: TokenStream
    content: Content
    tokenizer: Tokenizer | PreparedTokenizer
    """What made them; of a prepared folder only what training needs of it."""


class Corpus:
    """One source: text with its token cache, a prepared folder, or tokens that another trainer stored."""

    def __init__(
        self, section: DataSection, read: Read = pieces, load: Callable[[str], Tokenizer] = load_tokenizer
    ) -> None:
        """Take the section of one source, and what reads its documents if it is text; nothing is read yet."""
        self.section, self._read, self._load = section, read, load

    @property
    def is_text(self) -> bool:
        """Return whether its tokens are made, and not there already; raises DataError for a damaged folder."""
        return find_prepared(self.section) is None and token_files(self.section) is None

    def cache(self, count_read: CountBytes | None = None) -> TokenCache:
        """Return the token cache of text, filled or not; `count_read` takes the bytes that are read to measure it."""
        return TokenCache(self.section, self._load(self.section.tokenizer), self._read, count_read)

    def tokens(self) -> CorpusTokens:
        """Return the tokens, made if needed; raises DataError where they cannot be, or are not data.tokenizer's."""
        if (prepared := find_prepared(self.section)) is not None:
            if problem := prepared.problem(self.section):
                raise DataError(problem)
            return CorpusTokens(prepared.read(), prepared.content, prepared.tokenizer)
        if token_files(self.section) is not None:
            return self._stored()
        found = self.cache()
        return CorpusTokens(found.tokens(), found.content, self._load(self.section.tokenizer))

    def _stored(self) -> CorpusTokens:
        section, tokenizer = self.section, self._load(self.section.tokenizer)
        files = token_files(section) or []
        stored = open_stored(section, files)
        content_hash, highest = measured_tokens(section, files, stored)
        if problem := foreign_tokens(section, highest, tokenizer) or missing_ends(section, stored, tokenizer):
            raise DataError(problem)
        content = Content(stored.num_tokens * stored.itemsize, stored.num_documents, content_hash)
        return CorpusTokens(stored, content, tokenizer)


def corpora(section: DataSection) -> Iterator[Corpus]:
    """Yield the corpora of a job's [data], one for each table of a mixture; none where it names a user's class.

    Raises DataError for data.deduplicate of tokens, which are no documents to compare.
    """
    sections, load = mixture_sections(section) or [section], cache(load_tokenizer)
    for number, one in enumerate([] if is_object_source(section.source) else sections):
        with errors_of_table(section, number):
            read = UniqueDocuments(sections[:number]) if section.mixture and section.deduplicate else pieces
            corpus = Corpus(one, read, load)
            if section.deduplicate and not corpus.is_text:
                raise DataError(no_documents(one))
        yield corpus
