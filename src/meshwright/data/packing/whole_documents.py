"""Whole documents of a corpus, or conversations: where each is in the token stream, and which are kept for packing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.data.cache.token_file import Tokens
from meshwright.data.formats.stored_tokens import TokenStream
from meshwright.data.numbered_samples import IGNORED
from meshwright.data.order import Indices
from meshwright.errors import DataError
from meshwright.spec.job.sections import DataSection
from meshwright.units import counted

TARGET_BIT = np.uint32(1 << 31)
"""Bit of a token of a conversation that is a target."""
_TOKENS_AT_ONCE = 2**24


@dataclass(frozen=True)
class WholeDocuments:
    """Ranges of one token stream."""

    tokens: TokenStream
    starts: Indices
    ends: Indices
    has_targets_marked: bool
    """Whether targets have TARGET_BIT; else all tokens are targets."""

    @classmethod
    def of_text(cls, tokens: TokenStream, end_of_text: int) -> "WholeDocuments":
        """Return the documents that end with `end_of_text`, which is of each."""
        ends = _places_of(tokens, end_of_text) + 1
        return cls(tokens, np.concatenate(([0], ends[:-1])), ends, has_targets_marked=False)

    @classmethod
    def of_conversations(cls, tokens: TokenStream, separator: int) -> "WholeDocuments":
        """Return the conversations that `separator` follows, which is of none."""
        ends = _places_of(tokens, separator)
        return cls(tokens, np.concatenate(([0], ends[:-1] + 1)), ends, has_targets_marked=True)

    @property
    def num_tokens(self) -> Indices:
        """Return the number of tokens of each."""
        return self.ends - self.starts

    def read(self, document: int, num_inputs: int) -> tuple[Tokens, Tokens]:
        """Return (inputs, targets) of the first inputs of a document: int64, those that do not count IGNORED."""
        start = self.starts[document]
        found = self.tokens[start : start + num_inputs + 1].astype(np.uint32)
        ids = (found & ~TARGET_BIT if self.has_targets_marked else found).astype(np.int64)
        targets = np.where(found[1:] & TARGET_BIT, ids[1:], IGNORED) if self.has_targets_marked else ids[1:]
        return ids[:-1], targets

    def has_targets(self, num_inputs: Indices) -> npt.NDArray[np.bool_]:
        """Return which documents have a target among so many of their tokens after the first."""
        if not self.has_targets_marked:
            return num_inputs > 0
        is_target = np.concatenate((self.tokens[:] & TARGET_BIT != 0, [False]))
        # From the second token up to the last of the chosen: every other sum is of what is in between.
        bounds = np.stack((self.starts + 1, self.starts + 1 + num_inputs), axis=1).ravel()
        sums = np.add.reduceat(is_target, np.minimum(bounds, len(is_target) - 1), dtype=np.int64)[::2]
        return (sums > 0) & (num_inputs > 0)


def _places_of(tokens: TokenStream, token: int) -> Indices:
    """Return where a token is, ascending."""
    starts = range(0, len(tokens), _TOKENS_AT_ONCE)
    found = [start + np.flatnonzero(tokens[start : start + _TOKENS_AT_ONCE] == token) for start in starts]
    return np.concatenate([np.empty(0, np.int64), *found])


@dataclass(frozen=True)
class KeptDocuments:
    """Documents to pack, in order, and what became of the others."""

    documents: Indices
    num_inputs: Indices
    """Inputs of each kept document: its tokens but the last, which is only a target."""
    num_cut: int
    num_too_long: int
    """Documents left out since they are longer than a sequence."""
    num_without_target: int

    @property
    def left_out(self) -> str:
        """Return in words what was cut and left out; "" for nothing."""
        parts = [
            (self.num_cut, "cut"),
            (self.num_too_long, "left out as too long"),
            (self.num_without_target, "left out without a target"),
        ]
        return ", ".join(f"{number} {what}" for number, what in parts if number)


def keep_documents(whole: WholeDocuments, section: DataSection, seq_len: int) -> KeptDocuments:
    """Return the documents that are learned; raises DataError for long ones where data.too_long says so.

    The first seq_len + 1 tokens of a document fit a row. One without a target in them is left out.
    """
    num_inputs = whole.num_tokens - 1
    is_long = num_inputs > seq_len
    if section.too_long == "stop" and (problem := too_long_problem(whole.num_tokens, section, seq_len)):
        raise DataError(problem)
    num_inputs = np.minimum(num_inputs, seq_len)
    has_targets = whole.has_targets(num_inputs)
    is_kept = has_targets & ~(is_long & (section.too_long == "skip"))
    documents = np.flatnonzero(is_kept)
    return KeptDocuments(
        documents,
        num_inputs[documents],
        num_cut=int((is_long & is_kept).sum()),
        num_too_long=int((is_long & has_targets & ~is_kept).sum()),
        num_without_target=int((~has_targets).sum()),
    )


def too_long_problem(num_tokens: Sequence[int] | Indices, section: DataSection, seq_len: int) -> str | None:
    """Return that documents of these lengths do not fit rows of seq_len; None where all do."""
    longer = [int(number) for number in num_tokens if number > seq_len + 1]
    if not longer:
        return None
    return (
        f"{counted(len(longer), 'document')} of {len(num_tokens)} of data.source = {section.source!r} "
        f"{'is' if len(longer) == 1 else 'are'} longer than a sequence, the longest of {max(longer)} tokens, and "
        f'data.packing = "{section.packing}" keeps documents whole: set train.seq_len to {max(longer) - 1} or more, or '
        "data.too_long to cut or skip"
    )


def shortage_of_documents(
    num_kept: int, section: DataSection, unit: str, num_without_target: int, *, has_long: bool
) -> str | None:
    """Return that too few documents, or pairs, are left to train on and to validate; None where they are enough.

    `has_long` says whether some are longer than a sequence.
    """
    needed = 1 + bool(section.validation_fraction)
    if num_kept >= needed:
        return None
    others, advice = "", ["add some"]
    if has_long:
        advice.append("lengthen train.seq_len")
    if num_without_target:
        advice.insert(0, "correct those")
        others = (
            f"; {num_without_target} without a target {'is' if num_without_target == 1 else 'are'} left out: a "
            f"conversation needs a message with the role 'assistant', spelled so{' within train.seq_len' * has_long}"
        )
    return (
        f"data.source = {section.source!r} holds {counted(num_kept, unit)} to learn from but needs {needed}"
        f"{', one of them for validation' if needed == 2 else ''}{others}: {', or '.join(advice)}"
    )


def packing_fingerprint(section: DataSection) -> dict[str, Any]:
    """Return what rows follow from besides the tokens, for a checkpoint."""
    return {"packing": section.packing, "too_long": section.too_long}
