"""Scopes: whose code is running, by the fully qualified names of modules and torch's own marks.

torch's ModTracker hangs hooks on tensors, which keep gradients for longer and so change what is to be measured. Here
nothing is touched: torch numbers the nodes of the autograd graph in the order in which they are made, so that a node's
number tells which module was running then, and that is the module whose backward the node is.
"""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from meshwright.parallelism.torch_private.torch_compat import canonical_fqn
from meshwright.spec.layout.schedule.action import ACTION_MARK, parse_action

_NO_TASK = -1
_GATHERS_GRADIENTS = 2**64 - 1
"""What torch numbers each node that adds a gradient to a parameter's."""


class _Open(NamedTuple):
    name: str
    task: int
    """The backward pass in which it was opened; -1 outside of all."""
    is_again: bool
    """Whether it is in the forward of a module that a backward runs again."""
    module: nn.Module | None = None
    """The module; None for a mark."""

    @property
    def scope(self) -> str:
        """An action of a schedule tells when, not whose code it is."""
        return "" if self.name.startswith(ACTION_MARK) else self.name


class Scopes:
    """Follows the modules that are called and the marks that are set."""

    def __init__(self) -> None:
        self.action: str | None = None
        """The action of the pipeline's schedule, as spec/layout/schedule/action.py writes it; None outside of all."""
        self.is_compiled_forward = False
        """Whether a compiled graph runs what it has of its forward."""
        self.is_in_schedule = False
        """Whether one of torch's own pipeline schedules runs: what it does after a backward is no optimizer's."""
        self._open = [_Open("", _NO_TASK, is_again=False)]
        self._names = weakref.WeakKeyDictionary[nn.Module, str]()
        self._first_nodes, self._makers = [0], [""]
        """From which node on, and which scope made them."""
        self._of_last_node = ""
        self._is_after_backward = False
        self.left_by_error = ""
        """The innermost of the modules that the newest error left."""

    @property
    def scope(self) -> str:
        """Return the module in whose forward, recompute or backward we are, or a mark within it; "" outside of all."""
        top = self._open[-1]
        if top.task == torch._C._current_graph_task_id():
            return top.scope
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return top.scope
        if (number := node._sequence_nr()) != _GATHERS_GRADIENTS:
            self._of_last_node = self._makers[bisect_right(self._first_nodes, number) - 1]
        return self._of_last_node

    @property
    def phase(self) -> str:
        """Return forward, backward, recompute or optimizer: what follows a backward, up to the next forward.

        In a pipeline schedule of torch's that is part of backward: messages, and the reductions of FSDP2.
        """
        if torch._C._current_graph_task_id() != _NO_TASK:
            self._is_after_backward = True
            # Of what a backward runs only a forward that is done again wants gradients, but for its own functions.
            is_again = self.is_compiled_forward or self._open[-1].is_again or torch.is_grad_enabled()
            return "recompute" if is_again else "backward"
        if self.action is not None:
            return "forward" if parse_action(self.action).kind.endswith("F") else "backward"
        if self._is_after_backward:
            return "backward" if self.is_in_schedule else "optimizer"
        return "forward"

    def begin(self) -> None:
        """Take what comes for the beginning of a step: no longer what follows a backward."""
        self._is_after_backward = False

    def open(self, name: str, module: nn.Module | None = None) -> None:
        """Follow the program into a module, or into what one of torch's marks names."""
        if name.startswith(ACTION_MARK):
            self.action = name.removeprefix(ACTION_MARK)
        self.left_by_error = ""
        task = torch._C._current_graph_task_id()
        self._is_after_backward &= module is None or task != _NO_TASK
        is_again = self._open[-1].is_again or (module is not None and task != _NO_TASK)
        self._open.append(_Open(name, task, is_again, module))
        self._next_nodes_are_made_here()

    def close(self) -> None:
        """Follow the program out of what the innermost mark names."""
        while (left := self._open.pop()).module is not None:
            pass
        if left.name.startswith(ACTION_MARK):
            self.action = None
        self._next_nodes_are_made_here()

    def leave(self, module: nn.Module) -> None:
        """Follow the program out of a module, and of all that was called in it.

        An error in code that is being compiled also runs the hooks of modules that were entered there, where none is
        followed: of these nothing is open.
        """
        if any(one.module is module for one in self._open):
            while self._open.pop().module is not module:
                pass
            self._next_nodes_are_made_here()

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow all calls of modules within."""
        hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def enter(self, module: nn.Module) -> None:
        """Follow the program into the forward of a module."""
        if module not in self._names:
            self._name_all_of(module)
        self.open(self._names[module], module)

    def _enter(self, module: nn.Module, _: Any) -> None:
        # What the compiler runs to see what it does is no step.
        if not torch.compiler.is_dynamo_compiling():
            self.enter(module)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        if sys.exception() is not None:
            self.left_by_error = self.left_by_error or self._open[-1].scope
        self.leave(module)

    def _name_all_of(self, root: nn.Module) -> None:
        """Name the modules of a model, as the model was before others wrapped it."""
        model = root.module if isinstance(root, DistributedDataParallel) else root
        self._names[root] = ""
        for fqn, module in model.named_modules():
            self._names[module] = canonical_fqn(f"{fqn}.").removesuffix(".")

    def _next_nodes_are_made_here(self) -> None:
        node = torch._C._autograd._get_sequence_nr()
        if self._first_nodes[-1] == node:
            self._makers[-1] = self._open[-1].scope
        else:
            self._first_nodes.append(node)
            self._makers.append(self._open[-1].scope)
