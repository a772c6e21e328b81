"""PackedDataset: rows of whole documents, or of conversations."""

from collections.abc import Sequence

import numpy as np

from meshwright.data.conversations.conversation_encoder import END_OF_CONVERSATION
from meshwright.data.corpus import CorpusTokens
from meshwright.data.numbered_samples import IGNORED, Dataset, Sample, num_validation
from meshwright.data.order import Indices
from meshwright.data.packing.pack_documents import one_each, pack_documents
from meshwright.data.packing.whole_documents import (
    KeptDocuments,
    WholeDocuments,
    keep_documents,
    packing_fingerprint,
    shortage_of_documents,
)
from meshwright.errors import DataError
from meshwright.spec.job.sections import DataSection
from meshwright.units import counted


class PackedDataset(Dataset):
    """Rows of whole documents, or conversations, each padded to seq_len; the last documents are for validation.

    A row's padding is a document of its own, whose targets are ignored.
    """

    unit = "document"
    """What is packed whole."""
    may_ignore_targets = True
    pads_validation = True

    def __init__(self, section: DataSection, seq_len: int, corpus: CorpusTokens) -> None:
        """Raises DataError for too few documents, or longer ones than data.too_long allows."""
        if corpus.learned is None:
            self._whole = WholeDocuments.of_text(corpus.tokens, corpus.tokenizer.end_of_text)
        else:
            self._whole = WholeDocuments.of_conversations(corpus.tokens, END_OF_CONVERSATION)
        self._seq_len, self._marks_documents = seq_len, section.mask_documents
        self.kept = kept = self._keep(section)
        has_long = bool(kept.num_too_long or (self._whole.num_tokens > seq_len + 1).any())
        num_kept, without_target = len(kept.documents), kept.num_without_target
        if shortage := shortage_of_documents(num_kept, section, self.unit, without_target, has_long=has_long):
            raise DataError(shortage)
        self.vocab_size = corpus.tokenizer.vocab_size
        num_held_out = num_validation(len(kept.documents), section.validation_fraction)
        first_held_out = len(kept.documents) - num_held_out
        training, held_out = kept.num_inputs[:first_held_out], kept.num_inputs[first_held_out:]
        rows, last = pack_rows(training, section, seq_len), pack_rows(held_out, section, seq_len)
        self._rows = [*rows, *(row + first_held_out for row in last)]
        share_filled = kept.num_inputs.sum() / (len(self._rows) * seq_len)
        self.notes = (
            f"{counted(len(kept.documents), self.unit)} in {counted(len(self._rows), 'row')}, {share_filled:.1%} full"
            f"{f' ({kept.left_out})' if kept.left_out else ''}",
        )
        self.left_out = corpus.content.left_out.lines()
        fingerprint = corpus.fingerprint(section, seq_len) | packing_fingerprint(section)
        super().__init__(len(self._rows), 0.0, fingerprint, len(last))

    def num_inputs(self, index: int) -> int:
        """Return the inputs of sample `index` before its padding."""
        return int(self.kept.num_inputs[self._rows[index]].sum())

    def documents_of(self, index: int) -> list[int]:
        """Return the numbers of the source's documents, or conversations, that sample `index` holds, in order."""
        return [int(number) for number in self.kept.documents[self._rows[index]]]

    def validation_sample(self, index: int) -> Sample:
        """Return validation sample `index`, of padding alone after the last."""
        return self.read(self.num_training_samples + index)

    def read(self, index: int) -> Sample:
        """Return (inputs, targets), each int64 [seq_len], and with data.mask_documents the document of each input."""
        row = self._rows[index] if index < len(self._rows) else np.zeros(0, np.int64)
        inputs, targets = np.zeros(self._seq_len, np.int64), np.full(self._seq_len, IGNORED)
        parts = [part for kept in row for part in self._parts(int(kept))]
        documents, at = np.full(self._seq_len, len(parts)), 0
        for number, (document, num_inputs) in enumerate(parts):
            here = slice(at, at + num_inputs)
            inputs[here], targets[here] = self._whole.read(document, num_inputs)
            documents[here] = number
            at += num_inputs
        return (inputs, targets, documents) if self._marks_documents else (inputs, targets)

    def _keep(self, section: DataSection) -> KeptDocuments:
        """Return what is packed."""
        return keep_documents(self._whole, section, self._seq_len)

    def _parts(self, kept: int) -> Sequence[tuple[int, int]]:
        """Return the documents, with their inputs, of one of the kept, in order."""
        return [(int(self.kept.documents[kept]), int(self.kept.num_inputs[kept]))]


def pack_rows(num_inputs: Indices, section: DataSection, seq_len: int) -> list[Indices]:
    """Return the documents of each row, by data.packing."""
    return pack_documents(num_inputs, seq_len) if section.packing == "whole" else one_each(num_inputs)
