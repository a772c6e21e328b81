"""document_places(): which documents of the source a run of tokens is of."""

from collections.abc import Iterator

import numpy as np

from meshwright.data.cache.token_file import Tokens
from meshwright.data.corpus import Corpus
from meshwright.data.filtering.document_hashes import DocumentHashes
from meshwright.data.filtering.kept_documents import LeftOut, kept_documents
from meshwright.data.formats.document_form import ObservedForm
from meshwright.data.formats.read_documents import holds_records
from meshwright.data.sources import SourceReader

MAX_BYTES = 256 * 2**20
"""Text that is read to find a document: beyond it, a place takes longer than it is worth."""
_TOKENS_AT_ONCE = 2**24


def document_numbers(tokens: Tokens, start: int, end: int, end_of_text: int) -> range:
    """Return the numbers, from 0, of the documents that tokens [start, end) are of."""
    before = 0
    for chunk in range(0, start, _TOKENS_AT_ONCE):
        before += int(np.count_nonzero(tokens[chunk : min(chunk + _TOKENS_AT_ONCE, start)] == end_of_text))
    inside = int(np.count_nonzero(tokens[start : end - 1] == end_of_text))
    return range(before, before + inside + 1)


def document_places(corpus: Corpus, last: int) -> list[str]:
    """Return file, and in files of records the record in it, of documents 0 to `last` of a source of text.

    Shorter where that would take reading more than MAX_BYTES. Raises DataError where the source cannot be read.
    """
    return [place for place, _ in zip(_places(corpus), range(last + 1), strict=False)]


def _places(corpus: Corpus) -> Iterator[str]:
    section, records = corpus.section, list[str]()
    form = ObservedForm(corpus.encoding.form(section), lambda _, where: records.append(where))
    reader = SourceReader(lambda _: form, "places of documents")
    left = min(section.max_bytes, MAX_BYTES)
    is_new = DocumentHashes().add if section.deduplicate else None
    for file in reader.files(section):
        number, found = 0, reader.documents(file, section)
        for piece in kept_documents(found, section.on_bad_document, LeftOut(), is_new):
            left -= len(piece.utf8)
            if piece.ends_document or left <= 0:
                number += 1
                # A member of an archive that is a text is no record.
                of_text = f"{file}, document {number}" if holds_records(file) else str(file)
                yield records[-1] if records else of_text
                records.clear()
            if left <= 0:
                return
