"""loss_bytes: what the loss moves of each logit: whole, over ranks that share the vocabulary, in chunks, compiled."""

import numpy as np

from meshwright.cost.blocks.work import Work
from meshwright.cost.layout_table import Floats, Passes
from meshwright.cost.training_setup import TrainingSetup

_LOSS_BYTES = 16.0
"""Bytes for each logit: 16-bit write and read, float32 softmax, gradient."""
_PLAIN_LOSS_BYTES = {"whole": (14.0, 22.0), "over tp": (38.0, 14.0)}
"""The same of a loss of one kernel for each operator (Stack.has_plain_loss), forward and backward, of 16-bit logits.

whole: cast (6), log-softmax (8); gradient of the picked ones (4), of the log-softmax (12), cast (6). over tp, where
ranks share the vocabulary: cast (6), largest (4), difference (8), exponential (8), sum (4), division (8); product (8),
cast (6)."""
_COMPILED_LOSS_BYTES = (4.0, 4.0)
"""The same of a compiled loss (layout.compile_loss): read for the largest and for the sum; read, its gradient written.
"""
_COMPILED_CHUNK_BYTES = 8.0
"""All of that forward, of a loss in chunks."""
_CHUNKED_LOSS_BYTES = (34.0, 32.0)
"""The same of a loss in chunks (parallelism/losses/chunked_loss.py), all of it forward, of logits of 16 and of 32 bits.

largest (2; 4), difference (6; 8), exponential (8), sum (4), product with its inverse (8), cast of the gradient (6; 0).
Of pairs of answers backward does all of it again.
"""


def loss_bytes(work: Work, setups: tuple[TrainingSetup, ...], passes: Floats) -> Passes:
    """Return what the loss moves of each logit, forward and backward; `passes` are those of memory-bound ops [rows]."""
    of_row = work.setup_index[work.blocks.key]
    element_bytes = np.array([s.workload.activation_element_bytes for s in setups], np.float64)[of_row]
    is_plain = np.array([s.stack.has_plain_loss for s in setups])[of_row]
    # A cast is all of it that a wider or narrower format changes.
    wider = element_bytes - 2
    is_shared = work.keys.tp[work.blocks.key] > 1
    plain = (
        np.where(is_shared, shared, whole) + wider
        for whole, shared in zip(_PLAIN_LOSS_BYTES["whole"], _PLAIN_LOSS_BYTES["over tp"], strict=True)
    )
    is_joined = np.array([s.is_own and s.stack.joins_loss for s in setups])[of_row]
    width = element_bytes / 2
    forward, backward = (
        np.where(is_plain, num_bytes, np.where(is_joined, joined * width, _LOSS_BYTES / 2 * passes))
        for num_bytes, joined in zip(plain, _COMPILED_LOSS_BYTES, strict=True)
    )
    is_chunked = work.keys.loss_chunks[work.blocks.key] > 1
    in_chunks = np.where(wider > 0, *reversed(_CHUNKED_LOSS_BYTES))
    in_chunks = np.where(is_joined, _COMPILED_CHUNK_BYTES * width, in_chunks)
    is_again = np.array([s.is_own and s.workload.pairs_answers for s in setups])[of_row]
    # The token accuracy reads each logit once.
    counted = np.array([s.is_own and s.workload.counts_accuracy for s in setups])[of_row] * element_bytes
    return np.where(is_chunked, in_chunks, forward) + counted, np.where(is_chunked, is_again * in_chunks, backward)
