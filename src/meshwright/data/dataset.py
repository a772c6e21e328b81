"""Datasets: numbered samples, validation last (windows of a token stream, or a user's own), or a user's iterable."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, cast

import numpy as np

from meshwright.data.cache import Content, cached_tokens
from meshwright.data.sources import describe
from meshwright.data.token_file import Tokens
from meshwright.data.tokenizer import Tokenizer, load_tokenizer
from meshwright.data.user_data import UserData, is_stream, load_user_data, read_pair, sample_hash
from meshwright.errors import ConfigError, DataError
from meshwright.spec.job.sections import DataSection
from meshwright.spec.job.user_object import is_object_source

Sample = tuple[Any, Any]


class Dataset(ABC):
    """Numbered samples (inputs, targets)."""

    vocab_size: int | None
    """One more than the largest token; None for samples without tokens."""
    end_of_document: int | None = None
    """The token that ends a document, with data.mask_documents."""

    may_ignore_targets = False
    """Whether targets may be -100, which the next-token loss ignores."""

    def __init__(self, num_samples: int, validation_fraction: float, fingerprint: dict[str, Any]) -> None:
        self.num_validation_samples = num_validation(num_samples, validation_fraction)
        self.num_training_samples = num_samples - self.num_validation_samples
        counts = {key: getattr(self, key) for key in ("num_training_samples", "num_validation_samples")}
        self.fingerprint: dict[str, Any] = {**fingerprint, **counts}
        """Identity of the data, as JSON for manifests and checkpoints."""

    def sample(self, index: int) -> Sample:
        """Return (inputs, targets) of training sample `index`."""
        assert 0 <= index < self.num_training_samples, f"sample {index} of {self.num_training_samples}"
        return self.read(index)

    def validation_sample(self, index: int) -> Sample:
        """Return (inputs, targets) of validation sample `index`."""
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
        fingerprint = {**_user_fingerprint(section, data), "sample_hash": sample_hash(data, section.source)}
        super().__init__(num_samples, section.validation_fraction, fingerprint)

    def read(self, index: int) -> Sample:
        """Return (inputs, targets) of the user's __getitem__."""
        return read_pair(self._data, index, self._source)


class StreamDataset(Dataset):
    """A user's iterable, whose samples have no numbers; those of its attribute `validation`, if it has one, do."""

    may_ignore_targets = True

    def __init__(self, section: DataSection, data: Iterable[Any]) -> None:
        if section.num_workers:
            raise ConfigError(
                f"data.num_workers = {section.num_workers} divides numbered samples among processes, but data.source = "
                f"{section.source!r} is an iterable: set data.num_workers to 0, and have the iterable start its own "
                "workers, as torchdata's StatefulDataLoader does"
            )
        self.vocab_size = None
        self.section = section
        self._data: Iterable[Any] | None = data
        self._validation: UserData | None = getattr(data, "validation", None)
        super().__init__(0, 0.0, _user_fingerprint(section, data))
        self.num_validation_samples = 0 if self._validation is None else len(self._validation)

    def take_data(self) -> Iterable[Any] | None:
        """Return the iterable that was made for this dataset, once, and None afterwards, when it may be in use."""
        data, self._data = self._data, None
        return data

    def read(self, index: int) -> Sample:
        """Return (inputs, targets) of a validation sample."""
        assert self._validation is not None
        return read_pair(self._validation, index, f"{self.section.source}, validation")


def build_dataset(section: DataSection, seq_len: int) -> Dataset:
    """Return the dataset of a job's [data]; raises DataError or ConfigError if it is invalid or too short."""
    if is_object_source(section.source):
        problem = unmaskable(section)
        if problem:
            raise ConfigError(problem)
        data = load_user_data(section)
        return StreamDataset(section, data) if is_stream(data) else UserDataset(section, cast(UserData, data))
    return TokenDataset(section, seq_len, load_tokenizer(section.tokenizer))


def _user_fingerprint(section: DataSection, data: object) -> dict[str, Any]:
    options = json.loads(json.dumps(section.options, default=str))
    return {"source": section.source, "class": type(data).__name__, "options": options}


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
