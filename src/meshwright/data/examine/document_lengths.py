"""document_lengths(): how long the documents of a token stream are, in bounded memory."""

from typing import NamedTuple

import numpy as np

from meshwright.data.formats.stored_tokens import TokenStream

_TOKENS_AT_ONCE = 2**24


class DocumentLengths(NamedTuple):
    """Documents and tokens by length; index i counts lengths from 2**i to 2**(i + 1) - 1."""

    num_documents: list[int]
    num_tokens: list[int]
    num_longer: int
    """Documents of more tokens than the limit."""


def document_lengths(tokens: TokenStream, end_of_text: int, limit: int, *, counts_end: bool = True) -> DocumentLengths:
    """Return the lengths of what each end of text ends, and how many are longer than `limit`.

    Without `counts_end` the ends are no tokens of documents.
    """
    num_documents, num_tokens = np.zeros(64, np.int64), np.zeros(64, np.int64)
    num_longer, last_end = 0, -1
    for start in range(0, len(tokens), _TOKENS_AT_ONCE):
        ends = start + np.flatnonzero(tokens[start : start + _TOKENS_AT_ONCE] == end_of_text)
        if not len(ends):
            continue
        lengths = np.diff(ends, prepend=last_end) - (not counts_end)
        lengths = lengths[lengths > 0]
        # frexp is exact: the exponent of a whole number below 2**53 is its number of bits.
        bins = np.frexp(lengths.astype(np.float64))[1] - 1
        num_documents += np.bincount(bins, minlength=64)
        np.add.at(num_tokens, bins, lengths)
        num_longer += int((lengths > limit).sum())
        last_end = int(ends[-1])
    num_bins = int(np.flatnonzero(num_documents)[-1]) + 1 if num_documents.any() else 0
    return DocumentLengths(num_documents[:num_bins].tolist(), num_tokens[:num_bins].tolist(), num_longer)
