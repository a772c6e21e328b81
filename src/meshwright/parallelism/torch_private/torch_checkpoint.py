"""Selective checkpointing whose region may be recomputed more than once, and may hold parts of which only the
results are kept: through torch's private parts.

Checked in 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils.checkpoint import (
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    create_selective_checkpoint_contexts,
)

_WHOLE = "kept as a whole"
"""In place of an operator, in a record of what each operator's calls gave."""


def selective_contexts(policy: Callable[..., Any], *, is_reread: bool) -> tuple[Any, Any]:
    """Return the contexts of the forward pass and of recomputation, which keep what `policy` says.

    A backward in two parts recomputes in each (`is_reread`). torch gives each kept tensor back once, and frees it.
    """
    forward, recompute = create_selective_checkpoint_contexts(policy)
    return forward, _Rereads(policy, recompute.storage) if is_reread else recompute


def kept_whole(compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return what `compute` gives; recomputation under a selective policy is given it again, and computes none of it.

    For what policies, which choose operator by operator, cannot keep as cheaply: none within it is kept. To be called
    where no gradients are recorded.
    """
    mode: Any = _get_current_dispatch_mode()
    if not isinstance(mode, _CachingTorchDispatchMode | _CachedTorchDispatchMode):
        return compute()
    call = mode.func_counter[_WHOLE]
    mode.func_counter[_WHOLE] += 1
    with _pop_mode_temporarily():
        results = mode.storage[_WHOLE].pop(call) if isinstance(mode, _CachedTorchDispatchMode) else compute()
        if isinstance(mode, _CachingTorchDispatchMode):
            # Not those that are returned, which autograd makes outputs of the caller.
            mode.storage[_WHOLE][call] = tuple(result.detach() for result in results)
    return results


class _Rereads(_CachedTorchDispatchMode):
    def __init__(self, policy: Callable[..., Any], storage: dict[Any, Any]) -> None:
        super().__init__(policy, storage, False)
        self._kept = storage

    def __enter__(self) -> Self:
        # By op, what its calls gave: a list or a dict, from which one recomputation takes.
        self.storage = {op: results.copy() for op, results in self._kept.items()}
        entered: Self = super().__enter__()  # type: ignore[no-untyped-call]
        return entered
