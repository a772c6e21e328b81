"""Selective checkpointing whose region may be computed again more than once: through torch's private parts.

Checked in 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torch.utils.checkpoint import _CachedTorchDispatchMode, create_selective_checkpoint_contexts


def selective_contexts(policy: Callable[..., Any], *, is_reread: bool) -> tuple[Any, Any]:
    """Return the contexts of the forward pass and of recomputation, which keep what `policy` says.

    A backward in two parts recomputes in each (`is_reread`). torch gives each kept tensor back once, and frees it.
    """
    forward, recompute = create_selective_checkpoint_contexts(policy)
    return forward, _Rereads(policy, recompute.storage) if is_reread else recompute


class _Rereads(_CachedTorchDispatchMode):
    def __init__(self, policy: Callable[..., Any], storage: dict[Any, Any]) -> None:
        super().__init__(policy, storage, False)
        self._kept = storage

    def __enter__(self) -> Self:
        # By op, what its calls gave: a list or a dict, from which one recomputation takes.
        self.storage = {op: results.copy() for op, results in self._kept.items()}
        entered: Self = super().__enter__()  # type: ignore[no-untyped-call]
        return entered
