"""Selective checkpointing with repeated recomputation and results saved as a unit (private parts of torch 2.13)."""

from collections.abc import Callable
from typing import Any, Protocol, Self

from torch import Tensor
from torch._guards import TracingContext
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import (
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    create_selective_checkpoint_contexts,
)

_UNIT = "saved as a unit"
"""Key of such regions in torch's storage, whose other keys are operators."""


class Hooks(Protocol):
    """Hooks of saved tensors, as torch.autograd.graph.saved_tensors_hooks takes them."""

    def pack(self, tensor: Tensor) -> Any:
        """Return what to keep in place of `tensor`."""

    def unpack(self, kept: Any) -> Tensor:
        """Return the tensor that `kept` was returned for."""


def selective_contexts(policy: Callable[..., Any], *, is_reread: bool, hooks: Hooks | None = None) -> tuple[Any, Any]:
    """Return the contexts of forward and of recomputation, which save what `policy` selects.

    With `is_reread`, for a split backward, saved tensors can be read in several recomputations; torch frees them after
    the first. They are kept as `hooks` pack them, which torch asks for what autograd saves alone.
    """
    forward, recompute = create_selective_checkpoint_contexts(policy)
    if hooks is not None:
        forward = _PackingCache(policy, recompute.storage, hooks)
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
        is_saved = isinstance(mode, _CachedTorchDispatchMode)
        results = _unpacked(mode.storage[_UNIT].pop(call)) if is_saved else compute()
        if isinstance(mode, _CachingTorchDispatchMode):
            # Detached: autograd makes the returned tensors outputs of the caller.
            mode.storage[_UNIT][call] = tuple(result.detach() for result in results)
    return results


class _PackingCache(_CachingTorchDispatchMode):
    """Packs the results that it saved when the forward is done."""

    def __init__(self, policy: Callable[..., Any], storage: dict[Any, Any], hooks: Hooks) -> None:
        super().__init__(policy, storage)
        self._hooks = hooks

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        # A compiler that traces the block decides on its own what to save, and its results are packed by autograd.
        if TracingContext.try_get() is None:
            for calls in self.storage.values():
                for call in calls if isinstance(calls, dict) else range(len(calls)):
                    calls[call] = tree_map(self._packed, calls[call])

    def _packed(self, saved: Any) -> Any:
        if isinstance(saved, Tensor):
            return _Packed(saved, self._hooks)
        return _Packed(saved.val, self._hooks) if isinstance(getattr(saved, "val", None), Tensor) else saved


class _Packed:
    """A saved result, in place of torch's own wrapper."""

    def __init__(self, result: Tensor, hooks: Hooks) -> None:
        self._kept, self._hooks = hooks.pack(result), hooks

    def get_val(self, _: bool = False) -> Tensor:
        """Return the result, in the words of torch's wrapper."""
        return self._hooks.unpack(self._kept)


def _unpacked(results: tuple[Any, ...]) -> tuple[Tensor, ...]:
    return tuple(result.get_val() if isinstance(result, _Packed) else result for result in results)


class _RereadableCache(_CachedTorchDispatchMode):
    def __init__(self, policy: Callable[..., Any], storage: dict[Any, Any]) -> None:
        super().__init__(policy, storage, False)
        self._saved = storage

    def __enter__(self) -> Self:
        # Results by op, a list or a dict; each recomputation consumes its own copy.
        self.storage = {op: results.copy() for op, results in self._saved.items()}
        entered: Self = super().__enter__()  # type: ignore[no-untyped-call]
        return entered
