"""Recomputed: the shares of a block's forward pass that activation checkpointing computes again.

    none 0, full 1; selective what Stack.selective says; every n-th block only: 1 / n of it

Collectives are done again where the whole forward pass is. Ignored: that the last block before the loss, which is still
in memory, need not be.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.cost.case import Cases, Floats
from meshwright.cost.layout_table import ACTIVATION_CHECKPOINTS

_SELECTIVE = {
    "matmul-outputs": (0.0, 0.0, 1.0),
    "half-of-matmul-outputs": (0.45, 0.0, 1.0),
    "core-attention": (0.0, 1.0, 0.1),
}
"""Shares of matmuls, attention and memory-bound ops by what a stack calls selective."""


@dataclass(frozen=True)
class Recomputed:
    """Shares between 0 and 1, one element a case."""

    matmul: Floats
    attention: Floats
    memory: Floats
    collectives: Floats


def recomputed_of(cases: Cases) -> Recomputed:
    """Return what each case computes again."""
    policy, every = cases.layouts.activation_checkpoint, cases.layouts.activation_checkpoint_every
    is_full = policy == ACTIVATION_CHECKPOINTS.index("full")
    is_selective = policy == ACTIVATION_CHECKPOINTS.index("selective")
    by_setting = np.array([_SELECTIVE[setting.stack.selective] for setting in cases.settings])[cases.setting]
    matmul, attention, memory = (
        np.where(is_full, 1.0, np.where(is_selective, share, 0.0)) / every for share in by_setting.T
    )
    return Recomputed(matmul, attention, memory, np.where(is_full, 1.0, 0.0) / every)
