"""Corpus: one source of a job's data as the tokens that training reads, whatever it is stored as."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from meshwright.data.cache.content import Content, CountBytes, Read
from meshwright.data.cache.prepared_folder import PreparedTokenizer, find_prepared
from meshwright.data.cache.token_cache import TokenCache
from meshwright.data.encoding import Encoding
from meshwright.data.filtering.unique_documents import UniqueDocuments
from meshwright.data.formats.stored_tokens import (
    TokenStream,
    foreign_tokens,
    measured_tokens,
    missing_ends,
    open_stored,
    token_files,
)
from meshwright.data.mixing.mixture_sections import errors_of_table, mixture_sections
from meshwright.data.sources import describe
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import DataError
from meshwright.spec.job.sections import DataSection, Task
from meshwright.spec.job.user_object import is_object_source


class CorpusTokens(NamedTuple):
    """All tokens of a corpus, up to data.max_bytes."""

    tokens: TokenStream
    content: Content
    tokenizer: Tokenizer | PreparedTokenizer
    """What made them; of a prepared folder only what training needs of it."""
    learned: dict[str, str] | None = None
    """Of conversations, `ConversationEncoder.learned`; their tokens have marks of targets. None of text."""

    def fingerprint(self, section: DataSection, seq_len: int) -> dict[str, Any]:
        """Return the identity of the tokens, as JSON for manifests and checkpoints."""
        return {
            "source": describe(section),
            "content_hash": self.content.content_hash,
            "num_bytes": self.content.num_bytes,
            "num_documents": self.content.num_documents,
            "num_tokens": len(self.tokens),
            "tokenizer": self.tokenizer.identity,
            "end_of_text": self.tokenizer.end_of_text,
            "seq_len": seq_len,
            **(self.learned or {}),
        }


class Corpus:
    """One source: documents with their token cache, a prepared folder, or tokens that another trainer stored."""

    def __init__(self, section: DataSection, encoding: Encoding, earlier: Sequence[DataSection] | None = None) -> None:
        """Take the section of one source, and with data.deduplicate those before it in a mixture; nothing is read."""
        self.section, self.encoding, self._earlier = section, encoding, earlier

    @property
    def is_text(self) -> bool:
        """Return whether its tokens are made, and not there already; raises DataError for a damaged folder."""
        return find_prepared(self.section) is None and token_files(self.section) is None

    @property
    def read(self) -> Read:
        """Return what reads its documents."""
        reader = self.encoding.reader
        return reader if self._earlier is None else UniqueDocuments(self._earlier, reader)

    @property
    def unread_files(self) -> list[str]:
        """Return a line about files of a folder that are not read, since they are of other kinds; [] where all are."""
        note = self.encoding.reader.unread_files_note(self.section) if self.is_text else None
        return [] if note is None else [note]

    def cache(self, count_read: CountBytes | None = None) -> TokenCache:
        """Return the token cache of text, filled or not; `count_read` takes the bytes that are read to measure it."""
        return TokenCache(self.section, self.encoding.encoder, self.read, count_read)

    def tokens(self) -> CorpusTokens:
        """Return the tokens, made if needed; raises DataError where they cannot be, or are not data.tokenizer's."""
        if (prepared := find_prepared(self.section)) is not None:
            if problem := prepared.problem(self.section, self.encoding):
                raise DataError(problem)
            return CorpusTokens(prepared.read(), prepared.content, prepared.tokenizer, prepared.conversations)
        if token_files(self.section) is not None:
            return self._stored()
        found, conversations = self.cache(), self.encoding.conversations
        learned = None if conversations is None else conversations.learned
        return CorpusTokens(found.tokens(), found.content, self.encoding.tokenizer, learned)

    def _stored(self) -> CorpusTokens:
        section, tokenizer = self.section, self.encoding.tokenizer
        files = token_files(section) or []
        stored = open_stored(section, files)
        content_hash, highest = measured_tokens(section, files, stored)
        if problem := foreign_tokens(section, highest, tokenizer) or missing_ends(section, stored, tokenizer):
            raise DataError(problem)
        content = Content(stored.num_tokens * stored.itemsize, stored.num_documents, content_hash)
        return CorpusTokens(stored, content, tokenizer)


T = TypeVar("T")


def map_corpora(section: DataSection, task: Task, take: Callable[[Corpus], T]) -> list[T]:
    """Return what `take` makes of each corpus of a job: that of each table of a mixture, none of a user's class.

    Raises DataError for tokens where documents are needed. An error about a table of a mixture names it.
    """
    if is_object_source(section.source):
        return []
    sections, encoding, found = mixture_sections(section) or [section], Encoding(section, task), []
    for number, one in enumerate(sections):
        with errors_of_table(section, number):
            if problem := no_documents(one, task):
                raise DataError(problem)
            earlier = sections[:number] if section.mixture and section.deduplicate else None
            found.append(take(Corpus(one, encoding, earlier)))
    return found


def no_documents(section: DataSection, task: Task) -> str | None:
    """Return that a source holds tokens where the job needs documents; None where it need not, or has some."""
    is_prepared = find_prepared(section) is not None
    if not is_prepared and token_files(section) is None:
        return None
    held = "prepared" if is_prepared else "stored"
    if section.deduplicate:
        return (
            f"data.deduplicate = true compares documents of text, and data.source = {section.source!r} is {held} "
            "tokens: set data.deduplicate to false, or name the text"
        )
    if task != "pretrain" and not is_prepared:
        return (
            f'train.task = "{task}" learns from conversations, and data.source = {section.source!r} is stored tokens, '
            "which do not say what the assistant wrote: name the records, or set train.task to pretrain"
        )
    return None
