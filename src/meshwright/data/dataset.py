"""Datasets of numbered samples, validation samples last: windows of a token stream, or a user's own."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshwright.data.cache import Content, cached_tokens
from meshwright.data.conversations.chat_template import load_chat_template
from meshwright.data.conversations.encode import ConversationEncoder
from meshwright.data.conversations.records import ConversationReader
from meshwright.data.order import Indices
from meshwright.data.pack_documents import one_each, pack_documents
from meshwright.data.sources import describe
from meshwright.data.token_file import Tokens
from meshwright.data.tokenizer import Tokenizer, load_tokenizer
from meshwright.data.user_data import UserData, load_user_data, read_pair, sample_hash
from meshwright.data.whole_documents import (
    IGNORED,
    WholeDocuments,
    keep_documents,
    packing_fingerprint,
    shortage_of_documents,
)
from meshwright.errors import ConfigError, DataError
from meshwright.spec.job.sections import DataSection, Task
from meshwright.spec.job.user_object import is_object_source
from meshwright.units import counted

Sample = tuple[Any, Any] | tuple[Any, Any, Any]
"""(inputs, targets), or with the document of each input."""


class Dataset(ABC):
    """Numbered samples."""

    vocab_size: int | None
    """One more than the largest token; None for samples without tokens."""
    end_of_document: int | None = None
    """The token that ends a document, with data.mask_documents."""

    may_ignore_targets = False
    """Whether targets may be -100, which the next-token loss ignores."""
    notes: Sequence[str] = ()
    """What a run says of its data before the first step."""
    pads_validation = False
    """Whether validation samples after the last are padding, without a target, in place of the first ones again."""

    def __init__(
        self,
        num_samples: int,
        validation_fraction: float,
        fingerprint: dict[str, Any],
        num_validation_samples: int | None = None,
    ) -> None:
        """The last samples are for validation: a fraction of them, or `num_validation_samples`."""
        if num_validation_samples is None:
            num_validation_samples = num_validation(num_samples, validation_fraction)
        self.num_validation_samples = num_validation_samples
        self.num_training_samples = num_samples - self.num_validation_samples
        counts = {key: getattr(self, key) for key in ("num_training_samples", "num_validation_samples")}
        self.fingerprint: dict[str, Any] = {**fingerprint, **counts}
        """Identity of the data, as JSON for manifests and checkpoints."""

    def sample(self, index: int) -> Sample:
        """Return training sample `index`."""
        assert 0 <= index < self.num_training_samples, f"sample {index} of {self.num_training_samples}"
        return self.read(index)

    def validation_sample(self, index: int) -> Sample:
        """Return validation sample `index`."""
        assert 0 <= index < self.num_validation_samples, f"sample {index} of {self.num_validation_samples}"
        return self.read(self.num_training_samples + index)

    @abstractmethod
    def read(self, index: int) -> Sample:
        """Return sample `index` of all samples, training first."""


class TokenDataset(Dataset):
    """Windows of seq_len + 1 tokens, seq_len apart, over all documents joined by end of text."""

    def __init__(self, section: DataSection, seq_len: int, tokenizer: Tokenizer) -> None:
        tokens, content = cached_tokens(section, tokenizer)
        shortage = token_shortage(len(tokens), seq_len, section.validation_fraction)
        if shortage:
            raise DataError(f"data.source = {section.source!r} {shortage}")
        self._tokens, self._seq_len = tokens, seq_len
        self.vocab_size = tokenizer.vocab_size
        self.end_of_document = tokenizer.end_of_text if section.mask_documents else None
        fingerprint = _token_fingerprint(section, seq_len, tokenizer, tokens, content)
        super().__init__(num_windows(len(tokens), seq_len), section.validation_fraction, fingerprint)

    def read(self, index: int) -> tuple[Tokens, Tokens]:
        """Return (inputs, targets), each int64 [seq_len], the targets one token ahead."""
        start = index * self._seq_len
        window = self._tokens[start : start + self._seq_len + 1].astype(np.int64)
        return window[:-1], window[1:]


class PackedDataset(Dataset):
    """Rows of whole documents, or conversations, each padded to seq_len; the last documents are for validation.

    A row's padding is a document of its own, whose targets are ignored.
    """

    may_ignore_targets = True
    pads_validation = True

    def __init__(
        self,
        section: DataSection,
        seq_len: int,
        whole: WholeDocuments,
        fingerprint: dict[str, Any],
        vocab_size: int,
    ) -> None:
        """Raises DataError for too few documents, or longer ones than data.too_long allows."""
        self.kept = kept = keep_documents(whole, section, seq_len)
        if shortage := shortage_of_documents(len(kept.documents), section):
            raise DataError(shortage)
        self.vocab_size = vocab_size
        self._whole, self._seq_len, self._marks_documents = whole, seq_len, section.mask_documents
        num_held_out = num_validation(len(kept.documents), section.validation_fraction)
        first_held_out = len(kept.documents) - num_held_out
        training, held_out = kept.num_inputs[:first_held_out], kept.num_inputs[first_held_out:]
        rows, last = pack_rows(training, section, seq_len), pack_rows(held_out, section, seq_len)
        self._rows = [*rows, *(row + first_held_out for row in last)]
        share_filled = kept.num_inputs.sum() / (len(self._rows) * seq_len)
        self.notes = (
            f"{counted(len(kept.documents), 'document')} in {counted(len(self._rows), 'row')}, {share_filled:.1%} full"
            f"{f' ({kept.left_out})' if kept.left_out else ''}",
        )
        super().__init__(len(self._rows), 0.0, {**fingerprint, **packing_fingerprint(section)}, len(last))

    def validation_sample(self, index: int) -> Sample:
        """Return validation sample `index`, of padding alone after the last."""
        return self.read(self.num_training_samples + index)

    def read(self, index: int) -> Sample:
        """Return (inputs, targets), each int64 [seq_len], and with data.mask_documents the document of each input."""
        row = self._rows[index] if index < len(self._rows) else np.zeros(0, np.int64)
        inputs, targets = np.zeros(self._seq_len, np.int64), np.full(self._seq_len, IGNORED)
        documents, at = np.full(self._seq_len, len(row)), 0
        for number, kept in enumerate(row):
            num_inputs = int(self.kept.num_inputs[kept])
            here = slice(at, at + num_inputs)
            inputs[here], targets[here] = self._whole.read(int(self.kept.documents[kept]), num_inputs)
            documents[here] = number
            at += num_inputs
        return (inputs, targets, documents) if self._marks_documents else (inputs, targets)


def pack_rows(num_inputs: Indices, section: DataSection, seq_len: int) -> list[Indices]:
    """Return the documents of each row, by data.packing."""
    return pack_documents(num_inputs, seq_len) if section.packing == "whole" else one_each(num_inputs)


class UserDataset(Dataset):
    """Samples of a user's data object."""

    may_ignore_targets = True

    def __init__(self, section: DataSection, data: UserData) -> None:
        self.vocab_size = None
        self._data, self._source = data, section.source
        num_samples = len(data)
        needed = 1 + bool(section.validation_fraction)
        if num_samples < needed:
            raise DataError(
                f"data.source = {section.source!r} has {num_samples} samples but needs {needed}"
                f"{', one of them for validation' if needed == 2 else ''}: make its __len__ return more"
            )
        fingerprint = {
            "source": section.source,
            "class": type(data).__name__,
            "options": json.loads(json.dumps(section.options, default=str)),
            "sample_hash": sample_hash(data, section.source),
        }
        super().__init__(num_samples, section.validation_fraction, fingerprint)

    def read(self, index: int) -> Sample:
        """Return (inputs, targets) of the user's __getitem__."""
        return read_pair(self._data, index, self._source)


def build_dataset(section: DataSection, seq_len: int, task: Task = "pretrain") -> Dataset:
    """Return the dataset of a job's [data]; raises DataError or ConfigError if it is invalid or too short."""
    if task == "sft":
        return _conversations(section, seq_len)
    if is_object_source(section.source):
        problem = unmaskable(section)
        if problem:
            raise ConfigError(problem)
        return UserDataset(section, load_user_data(section))
    tokenizer = load_tokenizer(section.tokenizer)
    if section.packing == "split":
        return TokenDataset(section, seq_len, tokenizer)
    tokens, content = cached_tokens(section, tokenizer)
    whole = WholeDocuments.of_text(tokens, tokenizer.end_of_text)
    fingerprint = _token_fingerprint(section, seq_len, tokenizer, tokens, content)
    return PackedDataset(section, seq_len, whole, fingerprint, tokenizer.vocab_size)


def _conversations(section: DataSection, seq_len: int) -> PackedDataset:
    tokenizer = load_tokenizer(section.tokenizer)
    template = load_chat_template(section, tokenizer)
    encoder = ConversationEncoder(section, tokenizer, template)
    tokens, content = cached_tokens(section, encoder, ConversationReader(section))
    whole = WholeDocuments.of_conversations(tokens, encoder.end_of_text)
    fingerprint = _token_fingerprint(section, seq_len, tokenizer, tokens, content)
    fingerprint |= {"chat_template": template.identity, "train_on": section.train_on}
    return PackedDataset(section, seq_len, whole, fingerprint, tokenizer.vocab_size)


def unmaskable(section: DataSection) -> str | None:
    """Return why data.mask_documents is invalid for this data; None if it is valid or off."""
    if not section.mask_documents or not is_object_source(section.source):
        return None
    return (
        f"data.mask_documents = true needs the tokens that end documents, but the samples of data.source = "
        f"{section.source!r} are its own and name none: set data.mask_documents to false, or data.source to a text"
    )


def num_windows(num_tokens: int, seq_len: int) -> int:
    """Return the number of samples in a stream; consecutive windows overlap by one token."""
    return max(0, num_tokens - 1) // seq_len


def num_validation(num_samples: int, fraction: float) -> int:
    """Return the number of validation samples: the fraction rounded down, at least 1 unless it is 0."""
    return max(1, int(num_samples * fraction)) if fraction else 0


def token_shortage(num_tokens: int, seq_len: int, validation_fraction: float) -> str | None:
    """Return the message about too few tokens, without its subject; None if they are enough."""
    num_samples = num_windows(num_tokens, seq_len)
    if num_samples - num_validation(num_samples, validation_fraction) >= 1:
        return None
    needed_samples = 1 + bool(validation_fraction)
    needed = f"{needed_samples} samples, one for validation," if validation_fraction else "one sample"
    longest = (num_tokens - 1) // needed_samples
    remedy = f"set train.seq_len to {longest} or less, or " if longest >= 1 else ""
    return (
        f"has {num_tokens} tokens, but {needed} of train.seq_len = {seq_len} need {needed_samples * seq_len + 1}: "
        f"{remedy}set data.source to a longer text"
    )


def _token_fingerprint(
    section: DataSection, seq_len: int, tokenizer: Tokenizer, tokens: Tokens, content: Content
) -> dict[str, Any]:
    return {
        "source": describe(section),
        "content_hash": content.content_hash,
        "num_bytes": content.num_bytes,
        "num_documents": content.num_documents,
        "num_tokens": len(tokens),
        "tokenizer": tokenizer.identity,
        "end_of_text": tokenizer.end_of_text,
        "seq_len": seq_len,
    }
