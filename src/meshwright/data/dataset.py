"""Datasets of numbered samples, validation samples last: windows of a token stream, or a user's own."""

import json
from typing import Any

import numpy as np

from meshwright.data.cache import TokenCache
from meshwright.data.content import CountBytes
from meshwright.data.corpus import Corpus, CorpusTokens, corpora
from meshwright.data.mixing.mixture_dataset import MixtureDataset
from meshwright.data.mixing.mixture_sections import errors_of_table
from meshwright.data.numbered_samples import Dataset as Dataset
from meshwright.data.numbered_samples import Sample as Sample
from meshwright.data.numbered_samples import num_validation
from meshwright.data.sources import describe
from meshwright.data.token_file import Tokens
from meshwright.data.user_data import UserData, load_user_data, read_pair, sample_hash
from meshwright.errors import ConfigError, DataError
from meshwright.spec.job.sections import DataSection
from meshwright.spec.job.user_object import is_object_source


class TokenDataset(Dataset):
    """Windows of seq_len + 1 tokens, seq_len apart, over all documents joined by end of text."""

    def __init__(self, section: DataSection, seq_len: int, corpus: CorpusTokens) -> None:
        tokens, content, tokenizer = corpus
        self.notes = content.left_out.lines()
        shortage = token_shortage(len(tokens), seq_len, section.validation_fraction)
        if shortage:
            raise DataError(f"data.source = {section.source!r} {shortage}")
        self._tokens, self._seq_len = tokens, seq_len
        self.vocab_size = tokenizer.vocab_size
        self.end_of_document = tokenizer.end_of_text if section.mask_documents else None
        fingerprint = _token_fingerprint(section, seq_len, corpus)
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


def build_dataset(section: DataSection, seq_len: int) -> Dataset:
    """Return the dataset of a job's [data]; raises DataError or ConfigError if it is invalid or too short."""
    if is_object_source(section.source):
        problem = unmaskable(section)
        if problem:
            raise ConfigError(problem)
        return UserDataset(section, load_user_data(section))
    sources: list[Dataset] = []
    for number, corpus in enumerate(corpora(section)):
        with errors_of_table(section, number):
            sources.append(_dataset_of(corpus, seq_len))
    return MixtureDataset(section, sources) if section.mixture else sources[0]


def _dataset_of(corpus: Corpus, seq_len: int) -> Dataset:
    return TokenDataset(corpus.section, seq_len, corpus.tokens())


def token_caches(section: DataSection, count_read: CountBytes | None = None) -> list[TokenCache]:
    """Return the token caches that `build_dataset` reads, whether they are filled or not: one for each source of text.

    Reads sources that have not been measured: `count_read` takes their bytes. Raises DataError as build_dataset.
    """
    found = []
    for number, corpus in enumerate(corpora(section)):
        with errors_of_table(section, number):
            found += [corpus.cache(count_read)] if corpus.is_text else []
    return found


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


def _token_fingerprint(section: DataSection, seq_len: int, corpus: CorpusTokens) -> dict[str, Any]:
    tokens, content, tokenizer = corpus
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
