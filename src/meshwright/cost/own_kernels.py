"""own_kernels: elementwise kernels that a block of our own trainer launches for one microbatch.

    dense       6 forward and 8 backward where the compiler fuses them, 20 and 24 one operator at a time
    mixture     27 and 13 compiled; 70 and 49 one operator at a time, and 16 and 4 to exchange tokens between ranks

Counted in traced steps of llama-15m, llama3-8b and moe-4m on torch 2.13, 2026-11-23. Ignored: further kernels of latent
attention, of shared experts and of attention that is split over cp.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.cost.case import Floats, Setting
from meshwright.cost.work import Work

_DENSE = {"compiled": (6.0, 8.0), "eager": (20.0, 24.0)}
_MIXTURE = {"compiled": (27.0, 13.0), "eager": (70.0, 49.0)}
_EXCHANGE = (16.0, 4.0)


def is_own(setting: Setting) -> bool:
    """Return whether the software is our own trainer, of which traces tell what it launches."""
    return setting.stack.eager_mixtures


def own_kernels(work: Work, settings: Sequence[Setting]) -> tuple[Floats, Floats]:
    """Return the kernels forward and backward of each owner, NaN where the software is another; 0 around blocks."""
    owners, setting = work.owners, work.setting[work.owners.key]
    is_ours = np.array([is_own(one) for one in settings])[setting]
    is_compiled = np.array([one.stack.kernels != "eager" for one in settings])[setting]
    is_mixture, is_eager = owners.routed_copies > 0, owners.eager_forward_elements > 0
    has_exchange = is_mixture & (work.keys.ep[owners.key] > 1)
    is_block = owners.attention_flops > 0

    def count(way: int) -> Floats:
        dense = np.where(is_compiled, _DENSE["compiled"][way], _DENSE["eager"][way])
        mixture = np.where(is_eager, _MIXTURE["eager"][way], _MIXTURE["compiled"][way]) + has_exchange * _EXCHANGE[way]
        kernels = np.where(is_mixture, mixture, dense) * is_block
        return np.where(is_ours, kernels, np.nan)

    return count(0), count(1)
