"""Entry times of modules in the forward and backward of one step, to attribute collectives to modules.

A collective belongs to the last module entered before it. With FSDP2 prefetching, that is the block that runs while the
next one's parameters are all-gathered.
"""

import time
from collections.abc import Iterator
from functools import partial
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from meshwright.parallelism.pipeline.stages import Stages
from meshwright.parallelism.torch_private.torch_compat import canonical_fqn


class ModuleTracker:
    """Context manager that records (nanoseconds since 1970, module name) in `marks`."""

    def __init__(self, stages: Stages) -> None:
        self.marks: list[tuple[int, str]] = []
        self._names = module_names(stages)

    def __enter__(self) -> Self:
        self._hooks = [register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave)]
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if name := self._names.get(id(module)):
            self._record(name)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Record the start of the module's backward when the output's gradient arrives."""
        name = self._names.get(id(module))
        if name and isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(partial(self._record_gradient, name))

    def _record_gradient(self, name: str, gradient: Tensor) -> None:
        self._record(name)

    def _record(self, name: str) -> None:
        self.marks.append((time.time_ns(), name))


def module_names(stages: Stages) -> dict[int, str]:
    """Return the name of every module in the unwrapped model, by id; a wrapper has the name of its module."""
    return dict(_named(stages))


def _named(stages: Stages) -> Iterator[tuple[int, str]]:
    for stage in stages:
        for name, module in stage.named_modules():
            yield id(module), canonical_fqn(f"{name}.").removesuffix(".")
