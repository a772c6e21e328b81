"""segments_of(): a sample of tokens as text, cut where documents end and where targets are ignored."""

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from meshwright.data.examine.sample_arrays import arrays_of
from meshwright.data.numbered_samples import IGNORED
from meshwright.data.tokenizer import Tokenizer
from meshwright.spec.data_findings import TextSegment

_ANSWERS: tuple[Literal["chosen"], Literal["rejected"]] = "chosen", "rejected"


def segments_of(sample: tuple[Any, ...], tokenizer: Tokenizer, *, holds_pairs: bool = False) -> list[TextSegment]:
    """Return the text of (inputs, targets), each [seq_len], or with the document of each input as a third part.

    A token is learned where the target in the place before it is not ignored. Nothing is before the first token of a
    document: it is counted with the one after it. With `holds_pairs`, even documents are chosen and odd ones rejected.
    """
    inputs, targets, *rest = arrays_of(sample)
    has_last = bool(targets[-1] != IGNORED)
    ids = np.append(inputs, targets[-1:]) if has_last else inputs
    is_target = np.concatenate(([False], targets != IGNORED))[: len(ids)]
    documents = _documents(ids, inputs, rest, tokenizer.end_of_text)
    is_first = np.diff(documents, prepend=documents[0] - 1) != 0
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


def _documents(
    ids: npt.NDArray[Any], inputs: npt.NDArray[Any], rest: list[npt.NDArray[Any]], end_of_text: int
) -> npt.NDArray[Any]:
    """Return the document of each token: as the sample says, or else up to and including each end of text."""
    if rest:
        return np.append(rest[0], rest[0][-1:])[: len(ids)]
    ends = (ids == end_of_text).astype(np.int64)
    documents: npt.NDArray[np.int64] = np.cumsum(ends) - ends
    return documents
