"""AttentionMask: what a mask in place of a causal kernel adds to attention; kernels compute the scores that it hides.

    documents    ours: one mask for each sequence, T x T, made in every block, for whole sequences and for those that
                 ulysses makes whole: twice the causal work, at the rate of a context of T keys
    all-gather   of stacks that make it of torch's own operators (Stack.plain_context_attention), documents or not: the
                 first chunk of rank r attends to r + 1 chunks, the second to 2 P - r: (2 P + 1) / (2 P) of the causal
                 work. Without documents all sequences share one mask

A ring's documents are masked in row_attention.py. Counted in models/attention.py,
parallelism/context/context_parallel.py and
their traces of 2026-11-23. Ignored: that kernels read the mask, which all heads share and caches hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.case import Cases, Floats
from meshwright.cost.constants import Constants
from meshwright.cost.layout_table import CONTEXT_METHODS
from meshwright.cost.work import Owners

Index = NDArray[np.int64]

_CAUSAL_BYTES, _DOCUMENTS_BYTES = 4.0, 4.0
"""Of one score in eager code: ones (1), cut to a triangle (2), read (1); for each sequence equal documents (1), joined
with the triangle (2), read (1). What is added to scores is written besides; that is all of a compiled mask."""


@dataclass(frozen=True)
class AttentionMask:
    """One element a case."""

    owners: Owners
    seq_len: Floats
    cp: Floats
    microbatch_size: Floats
    element_bytes: Floats
    is_whole: NDArray[np.bool_]
    """Whether it hides documents of a whole sequence."""
    is_of_chunks: NDArray[np.bool_]
    """Whether it hides keys that were gathered."""
    hides_documents: NDArray[np.bool_]
    is_compiled: NDArray[np.bool_]

    def slowdown(self, owner: Index, c: Constants) -> Floats:
        """Return the time of attention kernels over that of the causal ones."""
        ramp = c["attention_ramp_tokens"]
        whole = (self.seq_len + ramp) / (self.owners.context[owner] + ramp)
        return np.where(self.is_whole, whole, np.where(self.is_of_chunks, 1 + 0.5 / self.cp, 1.0))

    def moved_bytes(self) -> Floats:
        """Return the bytes that making the mask of one block reads and writes, in forward."""
        of_chunks = self.seq_len**2 / self.cp / 2 * (1 + 0.5 / self.cp)
        scores = np.where(self.is_whole, self.seq_len**2, of_chunks * self.is_of_chunks)
        masks = np.where(self.hides_documents, self.microbatch_size, 1.0)
        eager = _CAUSAL_BYTES + self.microbatch_size * _DOCUMENTS_BYTES * self.hides_documents
        return scores * (np.where(self.is_compiled, 0.0, eager) + masks * self.element_bytes)


def attention_mask_of(cases: Cases, owners: Owners) -> AttentionMask:
    """Return the masks of `cases`, whose work is `owners`."""
    layouts = cases.layouts
    is_split, is_plain = layouts.cp > 1, cases.each(lambda s: float(s.stack.plain_context_attention)) > 0
    hides_documents = cases.each(lambda setting: float(setting.masks_scores)) > 0
    is_ulysses = layouts.cp_method == CONTEXT_METHODS.index("ulysses")
    return AttentionMask(
        owners=owners,
        seq_len=cases.each(lambda setting: float(setting.workload.seq_len)),
        cp=layouts.cp.astype(np.float64),
        microbatch_size=layouts.microbatch_size.astype(np.float64),
        element_bytes=cases.each(lambda s: float(s.workload.activation_element_bytes)),
        is_whole=hides_documents & (~is_split | is_ulysses),
        is_of_chunks=is_plain & is_split & (layouts.cp_method == CONTEXT_METHODS.index("all-gather")),
        hides_documents=hides_documents,
        is_compiled=layouts.compiles_blocks,
    )
