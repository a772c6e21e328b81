"""corpus_tokens: the tokens of a source, from the token cache or where they are stored."""

from meshwright.data.cache import cached_tokens
from meshwright.data.content import Content, Read
from meshwright.data.formats.stored_tokens import (
    TokenStream,
    foreign_tokens,
    measured_tokens,
    missing_ends,
    open_stored,
    token_files,
)
from meshwright.data.sources import pieces
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import DataError
from meshwright.spec.job.sections import DataSection


def corpus_tokens(section: DataSection, tokenizer: Tokenizer, read: Read = pieces) -> tuple[TokenStream, Content]:
    """Return the tokens of what `read` makes of data.source up to data.max_bytes, and its content.

    Raises DataError for a source that cannot be read, and for stored tokens that are not data.tokenizer's.
    """
    files = token_files(section)
    if files is None:
        return cached_tokens(section, tokenizer, read)
    stored = open_stored(section, files)
    content_hash, highest = measured_tokens(section, files, stored)
    problem = foreign_tokens(section, highest, tokenizer) or missing_ends(section, stored, tokenizer)
    if problem:
        raise DataError(problem)
    return stored, Content(stored.num_tokens * stored.itemsize, stored.num_documents, content_hash)
