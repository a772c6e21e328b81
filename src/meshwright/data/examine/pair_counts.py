"""count_pairs(): how many pairs of answers a job scores and learns from, and how many sequences hold them."""

from typing import NamedTuple

import numpy as np

from meshwright.data.corpus import Corpus, map_corpora
from meshwright.data.examine.target_notes import MAX_BYTES
from meshwright.data.packing.packed_dataset import pack_rows
from meshwright.data.packing.pair_dataset import PairDataset, pair_length
from meshwright.spec.job.sections import DataSection


class PairCount(NamedTuple):
    """Pairs of a job's data, those for validation included."""

    num_pairs: int
    num_sequences: int
    is_start: bool
    """Whether more may follow what was read."""


def count_pairs(section: DataSection, seq_len: int) -> PairCount:
    """Return the pairs of a job's data, of text those in the first 8 MB of each source; raises DataError for none.

    Pairs that are longer than a sequence, or without a target, are left out, as they are of a run.
    """
    found = map_corpora(section, "dpo", lambda corpus: _count(corpus, seq_len))
    pairs, sequences, is_start = zip(*found, strict=True)
    return PairCount(sum(pairs), sum(sequences), any(is_start))


def _count(corpus: Corpus, seq_len: int) -> PairCount:
    if not corpus.is_text:
        dataset = PairDataset(corpus.section, seq_len, corpus.tokens())
        return PairCount(
            dataset.num_pairs, dataset.num_training_samples + dataset.num_validation_samples, is_start=False
        )
    encoder = corpus.encoding.conversations
    assert encoder is not None
    section, num_inputs, read_bytes = corpus.section, [], 0
    for piece in corpus.read(section.replace(max_bytes=min(section.max_bytes, MAX_BYTES))):
        read_bytes += len(piece.utf8)
        (ids,) = encoder.encode_batch([piece.text])
        length, has_targets = pair_length(ids)
        num_inputs += [length - 1] if has_targets and length - 1 <= seq_len else []
    rows = pack_rows(np.array(num_inputs, np.int64), section, seq_len) if num_inputs else []
    # The last document that is read ends close to the limit.
    is_start = section.max_bytes > MAX_BYTES and read_bytes > 0.99 * MAX_BYTES
    return PairCount(len(num_inputs), len(rows), is_start)
