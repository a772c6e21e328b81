"""PairDataset: rows of whole pairs of answers, of which one is preferred (train.task = "dpo")."""

from collections.abc import Sequence

import numpy as np

from meshwright.data.cache.token_file import Tokens
from meshwright.data.conversations.conversation_encoder import END_OF_CONVERSATION
from meshwright.data.corpus import CorpusTokens
from meshwright.data.numbered_samples import Sample
from meshwright.data.order import Indices
from meshwright.data.packing.packed_dataset import PackedDataset
from meshwright.data.packing.whole_documents import TARGET_BIT, KeptDocuments
from meshwright.errors import DataError
from meshwright.spec.job.sections import DataSection
from meshwright.units import counted

NO_PAIR = -1
"""In the place of a pair that a row does not hold."""


class PairDataset(PackedDataset):
    """Rows in which documents 2 i and 2 i + 1 are the chosen and the rejected answer of the row's pair i."""

    unit = "pair"

    def __init__(self, section: DataSection, seq_len: int, corpus: CorpusTokens) -> None:
        super().__init__(section, seq_len, corpus)
        # Those held out are the last.
        self.num_pairs = len(self.kept.documents)
        self.pairs_in_row = max(len(row) for row in self._rows)

    def documents_of(self, index: int) -> list[int]:
        """Return the numbers of the source's pairs that sample `index` holds, in order."""
        return [number // 2 for number in super().documents_of(index)]

    def read(self, index: int) -> Sample:
        """Return (inputs, targets, documents), each int64 [seq_len], and the row's pairs, NO_PAIR after the last."""
        inputs, targets, *documents = super().read(index)
        row = self._rows[index] if index < len(self._rows) else ()
        pairs = np.full(self.pairs_in_row, NO_PAIR)
        pairs[: len(row)] = row
        # Rules of a job see to it that documents are marked.
        return inputs, targets, documents[0], pairs

    def _keep(self, section: DataSection) -> KeptDocuments:
        """Return the pairs that fit a row, each by the number of its chosen document."""
        num_inputs = np.maximum(self._whole.num_tokens - 1, 0)
        of_pair = num_inputs.reshape(-1, 2).sum(1)
        is_long = of_pair > self._seq_len
        if section.too_long == "stop" and (problem := too_long_pairs(of_pair + 1, section, self._seq_len)):
            raise DataError(problem)
        is_learned = self._whole.has_targets(num_inputs).reshape(-1, 2).all(1)
        pairs = np.flatnonzero(is_learned & ~is_long)
        num_too_long = int((is_learned & is_long).sum())
        return KeptDocuments(2 * pairs, of_pair[pairs], 0, num_too_long, int((~is_learned).sum()))

    def _parts(self, kept: int) -> Sequence[tuple[int, int]]:
        chosen = int(self.kept.documents[kept])
        return [(document, int(self._whole.num_tokens[document]) - 1) for document in (chosen, chosen + 1)]


def pair_length(ids: Tokens) -> tuple[int, bool]:
    """Return one more than the inputs of a pair as the token cache holds it, and whether both answers have targets."""
    middle = int(np.flatnonzero(ids == END_OF_CONVERSATION)[0])
    is_target = ids & TARGET_BIT != 0
    return len(ids) - 2, bool(is_target[1:middle].any() and is_target[middle + 2 :].any())


def too_long_pairs(lengths: Sequence[int] | Indices, section: DataSection, seq_len: int) -> str | None:
    """Return that pairs of these lengths, one more than their inputs, do not fit rows of seq_len; None where all do."""
    longer = [int(number) - 1 for number in lengths if number > seq_len + 1]
    if not longer:
        return None
    return (
        f"{counted(len(longer), 'pair')} of {len(lengths)} of data.source = {section.source!r} "
        f"{'does' if len(longer) == 1 else 'do'} not fit a sequence, which holds both answers of a pair, each after "
        f"the prompt, {max(longer)} tokens of the longest: set train.seq_len to {max(longer)} or more, or "
        "data.too_long to skip"
    )
