"""TokenDataset: windows of a token stream."""

import numpy as np

from meshwright.data.cache.token_file import Tokens
from meshwright.data.corpus import CorpusTokens
from meshwright.data.numbered_samples import Dataset, num_validation
from meshwright.errors import DataError
from meshwright.spec.job.sections import DataSection


class TokenDataset(Dataset):
    """Windows of seq_len + 1 tokens, seq_len apart, over all documents joined by end of text."""

    def __init__(self, section: DataSection, seq_len: int, corpus: CorpusTokens) -> None:
        tokens, tokenizer = corpus.tokens, corpus.tokenizer
        self.left_out = corpus.content.left_out.lines()
        shortage = token_shortage(len(tokens), seq_len, section.validation_fraction)
        if shortage:
            raise DataError(f"data.source = {section.source!r} {shortage}")
        self._tokens, self._seq_len = tokens, seq_len
        self.vocab_size = tokenizer.vocab_size
        self.end_of_document = tokenizer.end_of_text if section.mask_documents else None
        num_samples, fingerprint = num_windows(len(tokens), seq_len), corpus.fingerprint(section, seq_len)
        super().__init__(num_samples, section.validation_fraction, fingerprint)

    def read(self, index: int) -> tuple[Tokens, Tokens]:
        """Return (inputs, targets), each int64 [seq_len], the targets one token ahead."""
        start = index * self._seq_len
        window = self._tokens[start : start + self._seq_len + 1].astype(np.int64)
        return window[:-1], window[1:]


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
