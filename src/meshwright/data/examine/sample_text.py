"""segments_of(): a sample of tokens as text, cut where documents end and where targets are ignored."""

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from meshwright.data.examine.sample_arrays import arrays_of
from meshwright.data.numbered_samples import IGNORED
from meshwright.data.tokenizer import Tokenizer
from meshwright.spec.data_findings import TextSegment

_Numbers = npt.NDArray[Any]
_ANSWERS: tuple[Literal["chosen"], Literal["rejected"]] = "chosen", "rejected"


def segments_of(
    sample: tuple[Any, ...], tokenizer: Tokenizer, *, holds_pairs: bool = False, joins_first: bool = True
) -> list[TextSegment]:
    """Return the text of (inputs, targets), each [seq_len], or with the document of each input as a third part.

    A token is learned where the target in the place before it is not ignored. Nothing is before the first token of a
    document: with `joins_first`, for documents of which all is learned, it is counted with the one after it. With
    `holds_pairs`, even documents are chosen and odd ones rejected.
    """
    inputs, targets, *rest = arrays_of(sample)
    if rest:
        ids, is_target, documents = _tokens_of_documents(inputs, targets, rest[0])
    else:
        ids, is_target = _tokens(inputs, targets)
        # Up to and including each end of text.
        ends = (ids == tokenizer.end_of_text).astype(np.int64)
        documents = np.cumsum(ends) - ends
    is_first = np.diff(documents, prepend=documents[0] - 1) != 0
    if joins_first:
        has_next = is_first & np.append(~is_first[1:], False)
        is_target[has_next] = is_target[np.flatnonzero(has_next) + 1]
    is_start = is_first | (np.diff(is_target.astype(np.int8), prepend=0) != 0)
    starts = np.flatnonzero(is_start)
    segments = []
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        ends_document = bool(end < len(ids) and is_first[end]) or ids[end - 1] == tokenizer.end_of_text
        text = tokenizer.decode(ids[start:end], special=True)
        segments.append(
            TextSegment(
                text=text,
                num_tokens=int(end - start),
                is_target=bool(is_target[start]),
                ends_document=bool(ends_document),
                answer=_ANSWERS[documents[start] % 2] if holds_pairs else None,
            )
        )
    return segments


def _tokens(inputs: _Numbers, targets: _Numbers) -> tuple[_Numbers, _Numbers]:
    """Return the inputs and the last target, where it is not ignored, and whether each is learned."""
    ids = np.append(inputs, targets[-1:]) if targets[-1] != IGNORED else inputs
    return ids, np.concatenate(([False], targets != IGNORED))[: len(ids)]


def _tokens_of_documents(
    inputs: _Numbers, targets: _Numbers, documents: _Numbers
) -> tuple[_Numbers, _Numbers, _Numbers]:
    """Return `_tokens` of each document, whose last target is no input of the row, and the document of each."""
    cuts = np.flatnonzero(np.diff(documents)) + 1
    found = [_tokens(*one) for one in zip(np.split(inputs, cuts), np.split(targets, cuts), strict=True)]
    numbers = [np.full(len(ids), number) for number, (ids, _) in zip(documents[[0, *cuts]], found, strict=True)]
    return np.concatenate([ids for ids, _ in found]), np.concatenate([one for _, one in found]), np.concatenate(numbers)
