"""Profiler marks around the calls of modules, where FSDP2, which sets such marks, is not.

A hook would be compiled with the module, so what is called is replaced, which has no public name (2.11 to 2.15).
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from meshwright.models.contract import blocks_of
from meshwright.spec.trace.timeline import MODULE_MARK


def mark_calls(model: nn.Module) -> None:
    """Mark when `model` and each of its blocks begins, and when its backward does, in profiles."""
    blocks = [block for block in blocks_of(model) if block is not None]
    names = {module: name for name, module in model.named_modules() if module in {model, *blocks}}
    for module, name in names.items():
        called: Any = module
        own = called._compiled_call_impl or called._call_impl
        called._compiled_call_impl = partial(_called, own, name, bool(blocks) and module is blocks[0])


def _called(own: Callable[..., Any], name: str, is_first: bool, *args: Any, **kwargs: Any) -> Any:
    if not torch.autograd.profiler._is_profiler_enabled:
        return own(*args, **kwargs)
    _mark("pre_forward", name)
    output = own(*args, **kwargs)
    _mark("post_forward", name)
    _in_backward(output, "pre_backward", name)
    if is_first:
        # The backward of any other begins where that of the one before ends.
        _in_backward(args, "post_backward", name)
    return output


def _in_backward(tensors: Any, what: str, name: str) -> None:
    candidates: Iterable[Any] = tensors if isinstance(tensors, tuple | list) else (tensors,)
    differentiable = [each for each in candidates if isinstance(each, Tensor) and each.requires_grad]
    if differentiable:
        differentiable[0].register_hook(lambda _: _mark(what, name))


def _mark(what: str, name: str) -> None:
    with record_function(f"{MODULE_MARK}{what} ({name})"):
        return
