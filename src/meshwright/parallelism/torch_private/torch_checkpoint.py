"""Selective checkpointing with repeated recomputation and results saved as a unit (private parts of torch 2.13)."""

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils.checkpoint import (
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    create_selective_checkpoint_contexts,
)

_UNIT = "saved as a unit"
"""Key of such regions in torch's storage, whose other keys are operators."""


def selective_contexts(policy: Callable[..., Any], *, is_reread: bool) -> tuple[Any, Any]:
    """Return the contexts of forward and of recomputation, which save what `policy` selects.

    With `is_reread`, for a split backward, saved tensors can be read in several recomputations; torch frees them after
    the first.
    """
    forward, recompute = create_selective_checkpoint_contexts(policy)
    return forward, _RereadableCache(policy, recompute.storage) if is_reread else recompute


def saved_as_unit(compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return the results of `compute`, which a selective recomputation reads back instead of calling it again.

    Nothing else inside of `compute` is saved. Call it where no gradients are recorded.
    """
    mode: Any = _get_current_dispatch_mode()
    if not isinstance(mode, _CachingTorchDispatchMode | _CachedTorchDispatchMode):
        return compute()
    call = mode.func_counter[_UNIT]
    mode.func_counter[_UNIT] += 1
    with _pop_mode_temporarily():
        results = mode.storage[_UNIT].pop(call) if isinstance(mode, _CachedTorchDispatchMode) else compute()
        if isinstance(mode, _CachingTorchDispatchMode):
            # Detached: autograd makes the returned tensors outputs of the caller.
            mode.storage[_UNIT][call] = tuple(result.detach() for result in results)
    return results


class _RereadableCache(_CachedTorchDispatchMode):
    def __init__(self, policy: Callable[..., Any], storage: dict[Any, Any]) -> None:
        super().__init__(policy, storage, False)
        self._saved = storage

    def __enter__(self) -> Self:
        # Results by op, a list or a dict; each recomputation consumes its own copy.
        self.storage = {op: results.copy() for op, results in self._saved.items()}
        entered: Self = super().__enter__()  # type: ignore[no-untyped-call]
        return entered
