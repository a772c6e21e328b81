"""ModuleTrail: which module was entered when, in forward and in backward, so that a collective can be given a place.

It listens for one step only. Of a collective it tells the last module that was entered before: with FSDP2 that is the
block whose turn it is when the parameters of the next one are gathered ahead.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from meshwright.parallelism.pipeline.stages import Stages
from meshwright.parallelism.torch_private.torch_compat import canonical_fqn


class ModuleTrail:
    """Notes (nanoseconds since 1970, module) while it is entered."""

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
            self._note(name)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Have the gradient of the output tell when the module's backward begins."""
        name = self._names.get(id(module))
        if name and isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(partial(self._note_gradient, name))

    def _note_gradient(self, name: str, gradient: Tensor) -> None:
        self._note(name)

    def _note(self, name: str) -> None:
        self.marks.append((time.time_ns(), name))


def module_names(stages: Stages) -> dict[int, str]:
    """Return the name in the plain model of every module, by id; wrappers have the name of what they wrap."""
    return dict(_named(stages))


def _named(stages: Stages) -> Iterator[tuple[int, str]]:
    for stage in stages:
        for name, module in stage.named_modules():
            yield id(module), canonical_fqn(f"{name}.").removesuffix(".")
